"""Sums over devices that are only added up: summed as one, with one ring."""

# JAX leaves its collectives untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from overlap import overlap_collectives
from passes.graph import dataflow
from passes.summed_once import summed_once
from tests.passes import bodies
from tests.passes.hop_count import hops

DEVICES = 4
RNG = np.random.default_rng(20261129)


def scatter(y: Any, dim: int = 0) -> Any:
    return lax.psum_scatter(y, "x", scatter_dimension=dim, tiled=True)


def two(a: Any, b: Any, c: Any) -> Any:
    return lax.psum(a, "x") + lax.psum(b, "x")


def three(a: Any, b: Any, c: Any) -> Any:
    return lax.psum(a, "x") + lax.psum(b, "x") + lax.psum(c, "x")


def three_from_the_end(a: Any, b: Any, c: Any) -> Any:
    first, last = lax.psum(a, "x"), lax.psum(b, "x") + lax.psum(c, "x")
    return first + last


def beside_something(a: Any, b: Any, c: Any) -> Any:
    return a * 2 + lax.psum(a, "x") + lax.psum(b, "x")


def beside_a_number(a: Any, b: Any, c: Any) -> Any:
    return (1 + lax.psum(a, "x")) + (2 + lax.psum(b, "x"))


def after_something(a: Any, b: Any, c: Any) -> Any:
    return (a + b) + (lax.psum(a, "x") + (lax.psum(b, "x") + c)) + lax.psum(c, "x")


def of_two_kinds(a: Any, b: Any, c: Any) -> Any:
    one, other = lax.psum(a, "x"), scatter(jnp.tile(c, (DEVICES, 1)))
    return one + other + lax.psum(b, "x") + scatter(jnp.tile(a, (DEVICES, 1)))


def a_product_of_sums(a: Any, b: Any, c: Any) -> Any:
    return (lax.psum(a, "x") + 1) * (lax.psum(b, "x") + 1)


def scattered(a: Any, b: Any, c: Any) -> Any:
    return scatter(a) + scatter(b)


def read_elsewhere(a: Any, b: Any, c: Any) -> Any:
    total = lax.psum(a, "x")
    return total + lax.psum(b, "x"), total * 2


def a_result(a: Any, b: Any, c: Any) -> Any:
    total = lax.psum(a, "x")
    return total + lax.psum(b, "x"), total


def twice_the_same(a: Any, b: Any, c: Any) -> Any:
    total = lax.psum(a, "x")
    return total + total


def multiplied(a: Any, b: Any, c: Any) -> Any:
    return lax.psum(a, "x") * lax.psum(b, "x")


def not_summed(a: Any, b: Any, c: Any) -> Any:
    return lax.psum(a, "x") + b


def two_kinds(a: Any, b: Any, c: Any) -> Any:
    return lax.psum(a, "x")[:4] + scatter(b)


def along_other_dims(a: Any, b: Any, c: Any) -> Any:
    return scatter(a[:, :2]) + scatter(b[:4], 1)


def broadcast(a: Any, b: Any, c: Any) -> Any:
    return lax.psum(a, "x") + lax.psum(b[0, 0], "x")


def in_groups(a: Any, b: Any, c: Any) -> Any:
    return lax.psum(a, "x") + lax.psum(b, "x", axis_index_groups=[[0, 1], [2, 3]])


def mesh() -> jax.sharding.Mesh:
    kind = jax.sharding.AxisType.Auto
    return jax.make_mesh((DEVICES,), ("x",), axis_types=(kind,), devices=jax.devices()[:DEVICES])


def body_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Any:
    mapped = jax.shard_map(function, mesh=mesh(), in_specs=P("x"), out_specs=P(), check_vma=False)
    whole = [jax.ShapeDtypeStruct((DEVICES * shape[0], *shape[1:]), np.float32) for shape in shapes]
    return bodies.mapped_body(jax.make_jaxpr(mapped)(*whole))


BODIES: Final = [
    (two, 1),
    (three, 2),
    (three_from_the_end, 2),
    (beside_something, 1),
    (beside_a_number, 1),
    (after_something, 2),
    (of_two_kinds, 2),
    (a_product_of_sums, 0),
    (scattered, 1),
    (read_elsewhere, 0),
    (a_result, 0),
    (twice_the_same, 0),
    (multiplied, 0),
    (not_summed, 0),
    (two_kinds, 0),
    (along_other_dims, 0),
    (broadcast, 0),
    (in_groups, 0),
]
"""Each with how many of its sums become part of another."""


@pytest.mark.parametrize(("body", "count"), BODIES)
def test_which_are_summed_as_one(body: Callable[..., Any], count: int) -> None:
    flow = dataflow(body_of(body, *[(16, 8)] * 3))
    found = summed_once(flow)
    assert len(found.summed) == count
    assert (found is flow) == (count == 0)
    of = ("psum", "psum_invariant", "reduce_scatter")
    alive = [sum(op.name in of for op in each.live.values()) for each in (flow, found)]
    assert alive[0] - alive[1] == count
    results = {found.ops[found.producer[total]].name for total in found.summed.values()}
    assert results <= {*of}, "each is told that sum which is left"


@pytest.mark.parametrize(("body", "count"), BODIES)
def test_integers_are_the_same_beside_a_ring(body: Callable[..., Any], count: int) -> None:
    def both(a: Any, b: Any, c: Any, x: Any, w: Any) -> Any:
        return body(a, b, c), lax.psum(x @ w, "x")

    mapped = jax.shard_map(both, mesh=mesh(), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    written = jax.jit(mapped)
    ours = overlap_collectives(written, policy="always", strict=True)
    shapes = (*[(16 * DEVICES, 8)] * 3, (8 * DEVICES, 5), (5 * DEVICES, 8))
    given = [RNG.integers(-9, 9, shape).astype(np.int32) for shape in shapes]
    for got, wanted in zip(jax.tree.leaves(ours(*given)), jax.tree.leaves(written(*given)), strict=True):
        np.testing.assert_array_equal(got, wanted)
    reasons = [site.reason for site in ours.explain(*given).sites]
    assert (reasons.count("summed_once"), reasons.count("policy_always")) == (count, 1)


def projected(x: Any, q: Any, k: Any, v: Any) -> Any:
    """A loss of what three projections make of an x that is the same on all devices."""
    return lax.pmean((jnp.tanh(x @ q) * (x @ k) + (x @ v) ** 2).mean(), "x")


def gradient(policy: str | None, *, check_vma: bool = True) -> Any:
    specs = (P(), *[P(None, "x")] * 3)
    mapped = jax.shard_map(projected, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=check_vma)
    written = jax.jit(jax.grad(mapped))
    return written if policy is None else overlap_collectives(written, policy=policy, strict=True)  # type: ignore[call-overload]


def test_the_gradient_of_what_several_projections_read_is_one_ring() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((16, 8), *[(8, 16)] * 3)]
    report = gradient("always").explain(*shapes)
    of_dots = (site for site in report.sites if site.reason != "no_dot")
    ring, *others = sorted(of_dots, key=lambda site: not site.rewritten)
    assert (ring.kind, ring.rewritten, len(ring.dots)) == ("dot_psum", True, 3)
    assert [(site.reason, site.rewritten) for site in others] == [("summed_once", False)] * 2
    assert all("The other is at " in site.sentence for site in others)


@pytest.mark.parametrize("policy", [None, "always"])
def test_values_of_that_gradient(policy: str | None) -> None:
    x, *weights = (RNG.normal(size=shape) for shape in ((16, 8), *[(8, 16)] * 3))
    q, k, v = weights
    a, b, c = x @ q, x @ k, x @ v
    slope = 1 - np.tanh(a) ** 2
    expected = ((slope * b) @ q.T + np.tanh(a) @ k.T + 2 * c @ v.T) / a.size
    got = gradient(policy)(*(jnp.asarray(each, np.float32) for each in (x, *weights)))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def of_dots(x: Any, a: Any, b: Any, c: Any) -> Any:
    return three(x @ a, x @ b, x @ c)


def of_scattered_dots(x: Any, a: Any, b: Any, c: Any) -> Any:
    return scatter(x @ a) + scatter(x @ b) + scatter(x @ c)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("body", [of_dots, of_scattered_dots])
def test_values(body: Callable[..., Any], dtype: str, check_vma: bool) -> None:
    scatters = body is of_scattered_dots
    specs = (P(None, "x"), *[P("x")] * 3)
    mapped = jax.shard_map(
        body, mesh=mesh(), in_specs=specs, out_specs=P("x") if scatters else P(), check_vma=check_vma
    )
    written = jax.jit(mapped)
    ours = overlap_collectives(written, policy="always", strict=True)
    x, *weights = (jnp.asarray(RNG.normal(size=shape) * 4, dtype) for shape in ((16, 32), *[(32, 8)] * 3))
    exact = sum(np.asarray(x, np.float64) @ np.asarray(w, np.float64) for w in weights)
    got, wanted = (np.linalg.norm(np.asarray(f(x, *weights), np.float64) - exact) for f in (ours, written))
    assert got <= max(1.5 * wanted, 1e-6 * np.linalg.norm(exact))
    assert hops(ours.trace(x, *weights).jaxpr) == DEVICES - 1, "the hops of one ring"
