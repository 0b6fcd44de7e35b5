"""The decorated function under a ``vmap`` whose axis has a name, or stands for a mesh axis."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from overlap import overlap_collectives
from tests.overlap.mlp import Function, always, check, mesh_of

BATCH = 3
RNG = np.random.default_rng(3)
X = RNG.integers(-8, 9, (BATCH, 8, 5)) / 8.0
W = RNG.integers(-8, 9, (5, 6)) / 8.0
Y = X @ W
X32, W32 = X.astype(np.float32), W.astype(np.float32)

DECORATORS: dict[str, Function] = {
    "as most users have it": overlap_collectives,
    "auto": lambda f: overlap_collectives(f, policy="auto", hardware="tpu_v5p", strict=True),
    "always": always,
}


@dataclasses.dataclass(frozen=True)
class Program:
    """Rows gathered over ``x``, a dot, and what is done with its result over the ``vmap``'s axis ``v``.

    Attributes:
      inside, outside: applied in the ``shard_map``, and after it.
      wanted: the results of the batch, in float64, from those of the dot alone.
    """

    wanted: Any
    inside: Function = lambda y: y
    outside: Function = lambda y: y

    @property
    def function(self) -> Function:
        """The program of one example, jitted."""

        def body(x: Any, w: Any) -> Any:
            return self.inside(lax.all_gather(x, "x", axis=0, tiled=True) @ w)

        mapped = jax.shard_map(body, mesh=mesh_of(), in_specs=(P("x"), P()), out_specs=P(), check_vma=False)
        return jax.jit(lambda x, w: self.outside(mapped(x, w)))


PROGRAMS = {
    "pmean after": Program(lambda y: y - y.mean(0), outside=lambda y: y - lax.pmean(y, "v")),
    "psum after": Program(lambda y: np.stack([y.sum(0)] * BATCH), outside=lambda y: lax.psum(y, "v")),
    "psum within": Program(lambda y: np.stack([y.sum(0)] * BATCH), inside=lambda y: lax.psum(y, "v")),
    "psum over both": Program(
        lambda y: np.stack([4 * y.sum(0)] * BATCH), inside=lambda y: lax.psum(y, ("x", "v"))
    ),
    "all_gather": Program(lambda y: np.stack([y] * BATCH), outside=lambda y: lax.all_gather(y, "v")),
    "psum_scatter": Program(lambda y: y.sum(0)[:BATCH], outside=lambda y: lax.psum_scatter(y[:BATCH], "v")),
    "all_to_all": Program(
        lambda y: y[:, :BATCH].swapaxes(0, 1), outside=lambda y: lax.all_to_all(y[:BATCH], "v", 0, 0)
    ),
    "its size": Program(lambda y: BATCH * y, inside=lambda y: y * lax.psum(1, "v")),
}


def over_v(f: Function) -> Function:
    """``vmap`` over the examples."""
    return jax.vmap(f, (0, None), axis_name="v")


@pytest.mark.parametrize("decorator", DECORATORS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_collectives_over_the_name_of_a_vmap_keep_their_values(name: str, decorator: str) -> None:
    program = PROGRAMS[name]
    decorated = over_v(DECORATORS[decorator](program.function))
    check(decorated(X32, W32), program.wanted(Y))
    check(jax.jit(decorated)(X32, W32), program.wanted(Y))


@pytest.mark.parametrize("decorator", DECORATORS)
def test_the_report_says_that_they_are_over_an_axis_of_a_vmap(decorator: str) -> None:
    reports = []

    def explained(x: Any, w: Any) -> Any:
        reports.append(DECORATORS[decorator](PROGRAMS["psum after"].function).explain(x, w))
        return x

    jax.make_jaxpr(over_v(explained))(X32, W32)
    (site,) = [site for site in reports[0].sites if site.axis == "v"]
    assert (site.kind, site.rewritten, site.reason) == ("psum", False, "unsupported_collective")
    assert "vmap" in site.sentence


C = RNG.integers(-8, 9, Y.shape) / 8.0
CENTRED = C - C.mean(0)
"""What ``pmean after`` pulls C back to."""

GRADIENT = np.einsum("bmk,bmn->kn", X, CENTRED)


def test_gradients_through_the_name_of_a_vmap() -> None:
    decorated = over_v(always(PROGRAMS["pmean after"].function))
    check(jax.grad(lambda w: (decorated(X32, w) * C.astype(np.float32)).sum())(W32), GRADIENT)


@pytest.mark.parametrize("transformation", ["jvp of vmap", "vmap of jvp", "vmap of linearize"])
def test_tangents_through_the_name_of_a_vmap(transformation: str) -> None:
    f = always(PROGRAMS["pmean after"].function)
    pushed = {
        "jvp of vmap": lambda: jax.jvp(lambda w: over_v(f)(X32, w), (W32,), (W32,))[1],
        "vmap of jvp": lambda: over_v(lambda x, w: jax.jvp(lambda w: f(x, w), (w,), (w,))[1])(X32, W32),
        "vmap of linearize": lambda: over_v(lambda x, w: jax.linearize(lambda w: f(x, w), w)[1](w))(X32, W32),
    }
    check(pushed[transformation](), Y - Y.mean(0))


@jax.custom_vjp
def cube(y: Any) -> Any:
    """y³, with a derivative of its own."""
    return y**3


cube.defvjp(lambda y: (cube(y), y), lambda y, c: (3 * y**2 * c,))


def test_the_gradient_of_a_vmap_with_a_custom_vjp_inside() -> None:
    f = always(Program(None, inside=cube).function)
    wanted = np.einsum("bmk,bmn->kn", X, 3 * Y**2)
    check(jax.grad(lambda w: jax.vmap(f, (0, None))(X32, w).sum())(W32), wanted)
    check(jax.jit(jax.grad(lambda w: jax.vmap(f, (0, None))(X32, w).sum()))(W32), wanted)


def test_a_vmap_over_a_mesh_axis_stays_sharded_in_derivatives() -> None:
    mesh = jax.make_mesh((2, 2), ("y", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def body(x: Any, w: Any) -> Any:
        return lax.all_gather(x, "x", axis=0, tiled=True) @ w

    f = always(
        jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P(), check_vma=False))
    )
    x = jax.device_put(X32[:2], NamedSharding(mesh, P("y", "x")))

    def loss(x: Any) -> Any:
        return (jax.vmap(f, (0, None), spmd_axis_name="y")(x, W32) ** 2).sum()

    gradient = jax.jit(jax.grad(loss))(x)
    assert gradient.sharding.spec == P("y", "x")
    check(gradient, 2 * Y[:2] @ W.T)
