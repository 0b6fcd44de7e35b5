"""Sums that are scattered next, over other axes: the scatter comes first and has a ring."""

# JAX leaves its collectives untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from overlap import Report, overlap_collectives
from passes.graph import dataflow
from passes.scattered_first import sums_before_scatters
from tests.passes import bodies
from tests.passes.hop_count import hops

P = PartitionSpec
RNG = np.random.default_rng(20261126)


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("pod", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])


def scatter(y: Any, axis: str = "x", **options: Any) -> Any:
    return lax.psum_scatter(y, axis, scatter_dimension=0, tiled=True, **options)


def both(x: Any, w: Any) -> Any:
    return scatter(lax.psum(x @ w, "pod"))


def read_twice(x: Any, w: Any) -> Any:
    total = lax.psum(x @ w, "pod")
    return scatter(total) + total[: total.shape[0] // 4]


def cast_between(x: Any, w: Any) -> Any:
    return scatter(lax.psum(x @ w, "pod").astype(jnp.float16))


def one_axis_twice(x: Any, w: Any) -> Any:
    return scatter(lax.psum(x @ w, ("pod", "x")) / 4)


def overlapping(x: Any, w: Any) -> Any:
    return lax.psum_scatter(lax.psum(x @ w, "x"), ("pod", "x"), scatter_dimension=0, tiled=True)


def untiled(x: Any, w: Any) -> Any:
    return lax.psum_scatter(lax.psum((x @ w).reshape(4, -1), "pod"), "x", scatter_dimension=0)


def in_groups(x: Any, w: Any) -> Any:
    return scatter(lax.psum(x @ w, "pod"), axis_index_groups=[[0, 1], [2, 3]])


def mapped(body: Callable[..., Any], *, check_vma: bool = True) -> Any:
    """Of an x whose columns are sharded over all devices, and a w whose rows are."""
    specs = (P(None, ("pod", "x")), P(("pod", "x")))
    return jax.shard_map(body, mesh=mesh(), in_specs=specs, out_specs=P("x"), check_vma=check_vma)


def pairs(body: Callable[..., Any]) -> int:
    shapes = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((16, 64), (64, 8)))
    jaxpr = bodies.mapped_body(jax.make_jaxpr(mapped(body, check_vma=False))(*shapes))
    return len(sums_before_scatters(dataflow(jaxpr)))


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (both, 1),
        (read_twice, 0),
        (cast_between, 0),
        (one_axis_twice, 0),
        (overlapping, 0),
        (untiled, 0),
        (in_groups, 0),
    ],
)
def test_which_change_places(body: Callable[..., Any], count: int) -> None:
    assert pairs(body) == count


def reported(body: Callable[..., Any], policy: Any = "auto", hardware: str = "tpu_v5p") -> Report:
    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 8 * 4096), (8 * 4096, 8192)))
    return overlap_collectives(jax.jit(mapped(body)), policy=policy, hardware=hardware, strict=True).explain(
        *shapes
    )


def test_the_scatter_has_the_ring_and_the_sum_is_of_a_part() -> None:
    ring, kept = reported(both).sites
    assert (ring.kind, ring.reason) == ("dot_reduce_scatter", "profitable")
    assert (kept.kind, kept.operand) == ("psum", "bf16[2048,8192]")


@pytest.mark.parametrize("policy", ["never", lambda site: site.kind == "dot_psum"])
def test_without_that_ring_the_program_stays_as_it_was(policy: Any) -> None:
    total, scattered = reported(both, policy).sites
    assert (total.kind, total.operand) == ("dot_psum", "bf16[8192,8192]")
    assert scattered.kind == "reduce_scatter"


def test_of_several_only_those_with_rings_change_places() -> None:
    def two(x: Any, w: Any) -> Any:
        return both(x, w), both(x[:8], w[:, :8])

    kinds = [(site.kind, site.rewritten) for site in reported(two).sites]
    assert kinds == [
        ("dot_reduce_scatter", True),
        ("psum", False),
        ("dot_psum", False),
        ("reduce_scatter", False),
    ]


def whole(dtype: Any) -> tuple[Any, Any]:
    x, w = RNG.normal(size=(64, 64)), RNG.normal(size=(64, 48))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_values(dtype: str, check_vma: bool) -> None:
    """The product of the whole arrays, whose rows the devices of each pod share out."""
    original = jax.jit(mapped(both, check_vma=check_vma))
    rewritten = overlap_collectives(original, policy="always", strict=True)
    x, w = whole(dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    got, wanted = (np.linalg.norm(np.asarray(f(x, w), np.float64) - exact) for f in (rewritten, original))
    assert got <= max(1.1 * wanted, 1e-6 * np.linalg.norm(exact))
    jaxpr = jax.make_jaxpr(rewritten)(x, w)
    assert hops(jaxpr, "ppermute") > 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(check_vma: bool) -> None:
    def loss(f: Any) -> Any:
        return lambda x, w: jnp.sum(jnp.sin(f(x, w)))

    original = jax.jit(mapped(both, check_vma=check_vma))
    rewritten = overlap_collectives(original, policy="always", strict=True)
    x, w = whole("float32")
    got, wanted = (jax.grad(loss(f), argnums=(0, 1))(x, w) for f in (rewritten, original))
    product = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    exact = np.cos(product) @ np.asarray(w, np.float64).T, np.asarray(x, np.float64).T @ np.cos(product)
    for one, other, reference in zip(got, wanted, exact, strict=True):
        np.testing.assert_allclose(other, reference, rtol=0, atol=1e-5 * np.abs(reference).max())
        np.testing.assert_allclose(one, reference, rtol=0, atol=1e-5 * np.abs(reference).max())


def test_sizes_not_yet_known_are_left_alone() -> None:
    (rows,) = jax.export.symbolic_shape("4*rows")
    shapes = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((rows, 64), (64, 8)))
    report = overlap_collectives(jax.jit(mapped(both)), policy="always", strict=True).explain(*shapes)
    assert [site.reason for site in report.sites] == ["symbolic_shape", "symbolic_shape"]
    assert [site.kind for site in report.sites] == ["psum", "reduce_scatter"]
