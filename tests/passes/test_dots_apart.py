"""On GPUs dots of a ring that share an operand wait for each other: XLA would make one of them."""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import networkx as nx
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cost_model import by_name
from overlap import overlap_collectives
from passes import shims
from tests.passes import bodies, spmd

DEVICES, ROWS, WIDTH, NARROW = 4, 4, 8, 3
H100 = by_name("h100")


def shared(x: Any, q: Any, k: Any, v: Any) -> Any:
    whole = lax.all_gather(x, "x", tiled=True)
    return whole @ q, whole @ k, whole @ v


def scatter(x: Any, w: Any) -> Any:
    return lax.psum_scatter(x @ w, "x", tiled=True)


def program(body: Callable[..., Any], *specs: P, out: Any) -> Any:
    return jax.shard_map(body, mesh=spmd.mesh_of(DEVICES), in_specs=specs, out_specs=out)


FREE, ROW = P(None, "x"), P("x")
PROGRAMS = {
    "gather shared by three dots": (
        program(shared, ROW, FREE, FREE, FREE, out=(FREE, FREE, FREE)),
        [(DEVICES * ROWS, WIDTH), *[(WIDTH, DEVICES * NARROW)] * 3],
    ),
    "scatter": (
        program(scatter, FREE, ROW, out=ROW),
        [(DEVICES * ROWS, DEVICES * WIDTH), (DEVICES * WIDTH, NARROW)],
    ),
}


@pytest.fixture(params=PROGRAMS)
def made(request: pytest.FixtureRequest) -> tuple[Any, list[np.ndarray]]:
    """A program, and arguments of it."""
    body, shapes = PROGRAMS[request.param]
    rng = np.random.default_rng(5)
    return body, [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a GPU, with a jax whose compiler places the starts: an explicit one orders a scatter's dots."""
    monkeypatch.setattr(shims, "_platform", lambda _: "gpu")
    monkeypatch.setattr(shims, "explicit_starts", lambda _: False)


def together(function: Any, arguments: list[np.ndarray]) -> int:
    """How many pairs of dots share an operand, and neither waits for the other."""
    jaxpr = bodies.mapped_body(jax.make_jaxpr(function)(*arguments))
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
def test_no_two_dots_of_a_ring_can_be_made_one(made: tuple[Any, list[np.ndarray]]) -> None:
    body, arguments = made
    assert together(overlap_collectives(body, hardware=H100, policy="always", strict=True), arguments) == 0


def test_elsewhere_they_are_left_as_they_are(made: tuple[Any, list[np.ndarray]]) -> None:
    body, arguments = made
    assert together(overlap_collectives(body, hardware=H100, policy="always", strict=True), arguments) > 0


@pytest.mark.usefixtures("on_gpu")
def test_values_and_gradients_are_those_of_the_original(made: tuple[Any, list[np.ndarray]]) -> None:
    body, arguments = made
    exact = [argument.astype(np.float64) for argument in arguments]
    with jax.enable_x64(True):
        wanted, back = jax.vjp(body, *exact)
        seeds = jax.tree.map(np.cos, wanted)
        wanted = (wanted, back(seeds))
    ring = overlap_collectives(body, hardware=H100, policy="always", strict=True)
    found, back = jax.vjp(jax.jit(ring), *arguments)
    found = (found, back(jax.tree.map(lambda seed: np.asarray(seed, np.float32), seeds)))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
