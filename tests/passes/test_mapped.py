"""Under ``vmap``, results that no mapped argument reaches stay one, in values and in every derivative."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.overlap.mlp import always, mesh_of, reference
from tests.passes.ring_patterns import few

REF = reference()
X, W = (jnp.asarray(a) for a in REF.arguments[:2])
XS = jnp.stack([X, 2 * X, 3 * X])
Function = Callable[..., Any]
POLICIES = pytest.mark.parametrize("policy", ["always", lambda _: False], ids=["rewritten", "kept"])


def _body(x: Any, w: Any) -> tuple[Any, Any, Any]:
    """Its second result, and its third, depend on the weights alone."""
    gather = partial(lax.all_gather, axis_name="x", tiled=True)
    square = gather(w, axis=1).T @ w
    return jnp.sin(gather(x, axis=0) @ w), jnp.sin(square), lax.psum(jnp.sum(w), "x").astype(jnp.int32)


def _jitted() -> Any:
    specs, results = (P("x"), P(None, "x")), (P(None, "x"), P(None, "x"), P())
    return jax.jit(jax.shard_map(_body, mesh=mesh_of(), in_specs=specs, out_specs=results, check_vma=False))


def _mapped(f: Function, shared: int | None, axis: int) -> Function:
    return jax.vmap(f, in_axes=(axis, None), out_axes=(axis, shared, shared))


def _loss(f: Function) -> Function:
    def loss(*arguments: Any) -> Any:
        first, second, _ = f(*arguments)
        return jnp.cos(first).sum() + jnp.cos(2 * second).sum()

    return loss


USES: dict[str, Callable[[Function], Function]] = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(_loss(f), argnums=(0, 1)),
    "grad of jit": lambda f: jax.grad(_loss(jax.jit(f)), argnums=(0, 1)),
    "jvp": lambda f: lambda *at: jax.jvp(_loss(f), at, at),
    "backward over forward": lambda f: jax.grad(lambda *at: jax.jvp(_loss(f), at, at)[1], argnums=(0, 1)),
}


@pytest.mark.parametrize(
    ("use", "axes", "rewritten"),
    few(use=USES, axes=((0, 0), (None, 0), (None, 2)), rewritten=(True, False)),
)
def test_results_that_no_mapped_argument_reaches(
    use: str, axes: tuple[int | None, int], rewritten: bool
) -> None:
    shared, axis = axes
    policy: Any = "always" if rewritten else lambda _: False
    jitted = _jitted()
    arguments = (jnp.moveaxis(XS, 0, axis), W)
    wanted = USES[use](_mapped(jitted, shared, axis))(*arguments)
    decorated = always(_jitted(), policy=policy)
    got = USES[use](_mapped(decorated, shared, axis))(*arguments)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, wanted)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), got, wanted)


@POLICIES
def test_what_no_mapped_argument_reaches_is_worked_out_once(policy: Any) -> None:
    decorated = always(_jitted(), policy=policy)

    def slope(_: Any) -> Any:
        return jax.jvp(lambda *at: decorated(*at)[0], (X, W), (X, W))

    wanted = jax.jvp(lambda *at: _jitted()(*at)[0], (X, W), (X, W))
    got = jax.vmap(slope, out_axes=None)(jnp.arange(3))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, wanted)


@POLICIES
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_hessians(outer: Function, inner: Function, policy: Any) -> None:
    def hessian(f: Function) -> Any:
        return outer(inner(lambda scale: _loss(f)(X * scale, W)))(jnp.ones(X.shape[1]))

    got = hessian(always(_jitted(), policy=policy))
    np.testing.assert_allclose(got, hessian(_jitted()), rtol=2e-4, atol=2e-4)


def _branch(x: Any, w: Any) -> tuple[Any, Any]:
    return jnp.sin(x), jnp.cos(w)


def _step(carried: tuple[Any, Any], _: Any) -> tuple[tuple[Any, Any], Any]:
    x, w = carried
    return (jnp.sin(x), jnp.cos(w)), 2 * w


ALIKE: dict[str, Function] = {
    "carried": lambda x, w: lax.scan(_step, (x, w), length=2)[0][1],
    "scanned": lambda x, w: lax.scan(_step, (x, w), length=2)[1],
    "looped": lambda x, w: lax.while_loop(
        lambda c: c[2] < 9, lambda c: (c[0] + 1, -c[1], c[2] + 5), (x, w, 0)
    )[1],
    "conditional": lambda x, w: lax.cond(w[0, 0] < 9, _branch, lambda *both: both, x, w)[1],
    "barrier": lambda x, w: lax.optimization_barrier((x, w))[1],
    "sum": lambda x, w: lax.psum(x, "v"),
    "maximum": lambda x, w: lax.pmax(lax.stop_gradient(x), "v"),
    "gather": lambda x, w: lax.all_gather(x[:2], "v", axis=1),
    "looped sum": lambda x, w: lax.scan(
        lambda c, _: (c + lax.psum(x, "v"), None), jnp.zeros(X.shape), length=2
    )[0],
}
"""What is the same along the axis ``v`` of examples x, and made along with what is not, or of it."""

APART: dict[str, Function] = {
    "looped": lambda x, w: lax.while_loop(
        lambda c: c[0] < 9, lambda c: (2 * c[0] + 1, -c[1]), (x[0, 0] + 2, w)
    )[1],
    "conditional": lambda x, w: lax.cond(x[0, 0] < 1, _branch, lambda *both: both, x, w)[1],
    "number": lambda x, w: w * lax.axis_index("v"),
    "passed on": lambda x, w: lax.ppermute(x, "v", [(0, 1), (1, 2), (2, 0)]),
    "scattered": lambda x, w: lax.psum_scatter(w[:3], "v"),
    "in a loop": lambda x, w: lax.scan(_step, (w, x), length=2)[0][1],
}
"""What is not."""


@POLICIES
@pytest.mark.parametrize(
    ("made", "axis"),
    [(f, None) for f in ALIKE.values()] + [(f, 0) for f in APART.values()],
    ids=[*ALIKE, *(f"{name} apart" for name in APART)],
)
def test_results_that_are_the_same_for_all_beside_others(
    made: Function, axis: int | None, policy: Any
) -> None:
    def gathered(x: Any, w: Any) -> Any:
        return lax.all_gather(x, "x", axis=0, tiled=True) @ w

    specs = (P("x"), P(None, "x"))
    mapped = jax.shard_map(gathered, mesh=mesh_of(), in_specs=specs, out_specs=P(None, "x"))
    jitted = jax.jit(lambda x, w: (mapped(x, w), made(x, w)))

    def both(f: Function) -> Any:
        examples = jax.vmap(f, in_axes=(0, None), out_axes=(0, axis), axis_name="v")

        def loss(*at: Any) -> Any:
            return sum(jnp.cos(result).sum() for result in examples(*at))

        reversible = made not in (ALIKE["looped"], APART["looped"])
        return examples(XS, W), jax.grad(loss, argnums=(0, 1))(XS, W) if reversible else None

    got, wanted = both(always(jitted, policy=policy)), both(jitted)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, wanted)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), got, wanted)


@POLICIES
def test_examples_along_an_explicit_mesh_axis(policy: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("y", "x"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    specs = (P("x"), P(None, "x"))

    def gathered(x: Any, w: Any) -> Any:
        return jnp.sin(lax.all_gather(x, "x", axis=0, tiled=True) @ w)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(gathered, in_specs=specs, out_specs=P(None, "x"), axis_names={"x"})
        jitted = jax.jit(lambda x, w: (mapped(x, w), jnp.sin(w), jnp.ones_like(x)))
        x, w, examples = (
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in ((X, specs[0]), (W, specs[1]), (XS[:2], P("y", "x")))
        )

        def uses(f: Function) -> Any:
            def slope(t: Any, w: Any) -> Any:
                return jax.jvp(f, (t, w), (x, w))

            of_all = jax.vmap(f, in_axes=(0, None), out_axes=(0, None, None))

            def loss(w: Any) -> Any:
                return sum(jnp.cos(result).sum() for result in of_all(examples, w))

            slopes = jax.vmap(slope, in_axes=(0, None), out_axes=((0, None, 0), (0, None, 0)))
            return jax.jit(of_all)(examples, w), jax.jit(slopes)(examples, w), jax.jit(jax.grad(loss))(w)

        got, wanted = uses(always(jitted, policy=policy)), uses(jitted)
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, wanted)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), got, wanted)
