"""On GPUs dots of a chain that share an operand wait for each other: XLA would make one of them."""

from __future__ import annotations

import itertools
from typing import Any

import networkx as nx
import pytest

from passes import shims
from passes.schedule import RingSchedule
from tests.passes import bodies
from tests.passes.ring_patterns import assert_gradients_and_vmap, assert_values

BLOCK, DEVICES = 8, 4
RING = RingSchedule(directions=1)
CHAINS = {
    "gather_free": RING,
    "gather_of_three_dots": RING,
    "scatter": RING,
    "scatter_columns": RING,
    "gather_free in turn": RingSchedule(directions=1, route="all_gather", chains=4),
    "gather_contracting in turn": RingSchedule(directions=1, route="all_gather", chains=3, across=True),
    "scatter in turn": RingSchedule(directions=1, route="reduce_scatter", chains=3, across=True),
    "scatter_columns in turn": RingSchedule(directions=1, route="reduce_scatter", chains=3, across=True),
    "psum in turn": RingSchedule(directions=1, route="all_reduce", chains=3),
}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a GPU, where the compiler places the starts: an explicit one orders a scatter's dots."""
    monkeypatch.setattr(shims, "device_kind", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(shims, "explicit_starts", lambda _: False)


def together(whole: Any) -> int:
    """How many pairs of dots share an operand, and neither waits for the other."""
    jaxpr = bodies.mapped_body(whole)
    waits: Any = nx.DiGraph()
    dots = []
    for number, eqn in enumerate(jaxpr.eqns):
        waits.add_edges_from((value, number) for value in eqn.invars if not hasattr(value, "val"))
        waits.add_edges_from((number, value) for value in eqn.outvars)
        if eqn.primitive.name == "dot_general":
            dots.append(number)
    assert len(dots) > 2
    return sum(
        bool(set(jaxpr.eqns[one].invars) & set(jaxpr.eqns[other].invars))
        and not nx.has_path(waits, one, other)
        for one, other in itertools.combinations(dots, 2)
    )


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("chain", CHAINS)
def test_no_two_dots_can_be_made_one_and_values_are_right(chain: str, check_vma: bool, dtype: str) -> None:
    name = chain.removesuffix(" in turn")
    assert together(assert_values(name, DEVICES, BLOCK, CHAINS[chain], dtype, check_vma=check_vma)) == 0


@pytest.mark.parametrize("chain", ["gather_of_three_dots", "scatter"])
def test_elsewhere_they_are_left_as_they_are(chain: str) -> None:
    assert together(assert_values(chain, DEVICES, BLOCK, CHAINS[chain], "float32", check_vma=True)) > 0


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("chain", [chain for chain in CHAINS if "three" not in chain])
def test_gradients_and_vmap(chain: str) -> None:
    assert_gradients_and_vmap(chain.removesuffix(" in turn"), 2, BLOCK, CHAINS[chain], check_vma=True)
