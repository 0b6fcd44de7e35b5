"""What a gather sends: on TPUs uneven parts, and those that are converted, are cut at computed places."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import passes
from cost_model import by_name
from passes import shims
from passes.schedule import RingSchedule
from tests.passes import bodies, spmd
from tests.passes.ring_patterns import PATTERNS, arguments, as_ring, assert_close, exact, jitted

UNEVEN = {
    "pieces": ("gather_free", RingSchedule(directions=2)),
    "across": ("gather_contracting", RingSchedule(directions=2, across=True)),
    "columns": ("gather_contracting", RingSchedule(directions=2, columns=2)),
    "columns, across": ("gather_contracting", RingSchedule(directions=2, columns=2, across=True)),
    "columns of two dots": ("gather_contracting_twice", RingSchedule(directions=1, columns=2)),
}


def slices(jaxpr: Any, size: int) -> list[str]:
    """The slices that are cut out of an array of so many elements."""
    return [
        eqn.primitive.name
        for eqn in bodies.equations(jaxpr)
        if eqn.primitive.name in ("slice", "dynamic_slice") and eqn.invars[0].aval.size == size
    ]


@pytest.mark.parametrize("case", UNEVEN)
def test_uneven_parts_are_cut_at_computed_places(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, schedule = UNEVEN[case]
    pattern = PATTERNS[name]
    given = arguments(pattern.shapes(4, 9), 4, "float32")
    monkeypatch.setattr(shims, "on_tpu", lambda aval: True)
    with spmd.only_schedule(schedule):
        ring = as_ring(jitted(pattern.body, len(given), 4))
        shard = given[0].size // 4
        cut = slices(jax.make_jaxpr(ring)(*given), shard)
        results = ring(*given)
    assert cut and set(cut) == {"dynamic_slice"}
    assert_close(results, exact(pattern, given), "float32")


@pytest.mark.parametrize("why", ["even", "not for TPUs", "differentiable"])
def test_other_parts_are_plain_slices(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = PATTERNS["gather_free"]
    given = arguments(pattern.shapes(4, 8 if why == "even" else 9), 4, "float32")
    monkeypatch.setattr(shims, "on_tpu", lambda aval: why != "not for TPUs")
    with spmd.only_schedule(RingSchedule(directions=2)):
        jaxpr = jitted(pattern.body, len(given), 4).trace(*given).jaxpr
        plan = passes.make_plan(
            jaxpr, "always", lambda kind: by_name("tpu_v5p"), differentiable=why == "differentiable"
        )
        cut = slices(jax.make_jaxpr(passes.rewritten(plan))(*given), given[0].size // 4)
    assert cut == ["slice"] * 2
