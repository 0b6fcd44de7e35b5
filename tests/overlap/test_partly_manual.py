"""Meshes of which `shard_map` is manual over some axes only: over others the compiler goes on sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from overlap import overlap_collectives

Body = Callable[[Any, Any, Any], Any]


def summed(x: Any, w: Any, v: Any) -> Any:
    return lax.psum(jnp.tanh(x @ w) @ v, "tensor")


def scattered_columns(x: Any, w: Any, v: Any) -> Any:
    return lax.psum_scatter(jnp.tanh(x @ w) @ v, "tensor", scatter_dimension=1, tiled=True)


def scattered_rows(x: Any, w: Any, v: Any) -> Any:
    h = lax.all_gather(x, "tensor", axis=1, tiled=True) @ w
    return lax.psum_scatter(jnp.tanh(h) @ v, "tensor", scatter_dimension=1, tiled=True)


@pytest.mark.parametrize("gradient", [False, True], ids=["value", "gradient"])
@pytest.mark.parametrize(
    ("body", "shape", "spec", "rewritten"),
    [
        (summed, (64, 64), P(), 0),
        (scattered_columns, (64, 64), P(None, "tensor"), 1),
        (scattered_rows, (8, 16, 64), P(None, "tensor"), 2),
    ],
    ids=["psum", "columns", "rows"],
)
def test_rows_that_the_compiler_shards_stay_so(
    body: Body, shape: tuple[int, ...], spec: Any, rewritten: int, gradient: bool
) -> None:
    """Each device computes its rows alone, as in the original, and its part of the result."""
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    chance = np.random.default_rng(0)

    def array(shape: tuple[int, ...], *spec: str | None) -> Any:
        values = chance.normal(size=shape).astype(np.float32) / 8
        return jax.device_put(values, NamedSharding(mesh, P(*spec)))

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(spec if body is scattered_rows else P(), P(None, "tensor"), P("tensor")),
        out_specs=spec,
        axis_names={"tensor"},
    )
    arguments = array(shape, "data"), array((64, 64), None, "tensor"), array((64, 64), "tensor")
    original = jax.jit(jax.grad(lambda *args: jnp.square(mapped(*args)).sum()) if gradient else mapped)
    decorated = overlap_collectives(original, policy="always", hardware="tpu_v5p", strict=True)
    assert sum(site.rewritten for site in decorated.explain(*arguments).sites) >= rewritten
    made, found = original(*arguments), decorated(*arguments)
    np.testing.assert_allclose(found, made, rtol=1e-4, atol=1e-5)
    assert found.sharding.is_equivalent_to(made.sharding, made.ndim)
    flops = []
    for function in (original, decorated):
        costs = function.lower(*arguments).compile().cost_analysis()
        assert costs is not None
        flops.append(costs["flops"])
    assert flops[1] <= 1.1 * flops[0]


def test_operands_that_are_yet_to_be_summed_or_whose_gradients_are() -> None:
    """`reduced` and `unreduced` in what a `shard_map` takes: each device has an addend of its own."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])

    def body(x: Any, w: Any, v: Any) -> Any:
        return lax.all_gather(x, "x", axis=0, tiled=True) @ w.T * v.sum()

    def program(x: Any, w: Any, v: Any) -> Any:
        reduced = jax.sharding.reshard(v, P(reduced={"x"}))
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(P("x"), P("x"), P(reduced={"x"})), out_specs=P(None, "x")
        )
        return mapped(x, w, reduced)

    with jax.set_mesh(mesh):
        arguments = [jax.device_put(jnp.arange(64.0).reshape(8, 8) / 64, P("x")) for _ in range(3)]
        original = jax.jit(program)
        decorated = overlap_collectives(original, policy="always", hardware="tpu_v5p", strict=True)
        (site,) = decorated.explain(*arguments).sites
        assert site.rewritten
        np.testing.assert_allclose(decorated(*arguments), original(*arguments), rtol=1e-5)
