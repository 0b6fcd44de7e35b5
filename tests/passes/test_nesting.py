"""Chains are found and run everywhere: control flow, remat, custom derivatives, vmap, meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import overlap
from tests.passes import spmd

P = PartitionSpec
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3, 5))  # per device [m, k], gathered on m
W = RNG.normal(size=(4, 5, 6))  # per device [k, n]
V = RNG.normal(size=(4, 6, 5))  # per device [n, k], back again
F32 = tuple(a.astype(np.float32) for a in (X, W, V))


def block(x: Any, w: Any, v: Any) -> Any:
    """gather → dot → tanh → dot → scatter, per device."""
    h = jnp.tanh(lax.all_gather(x, "x", axis=0, tiled=True) @ w)
    return lax.psum_scatter(h @ v, "x", scatter_dimension=0, tiled=True)


def reference(x: Any, w: Any, v: Any) -> spmd.Shards:
    """The same on lists of float64 arrays."""
    gathered = spmd.all_gather(list(x), 0)
    return spmd.psum_scatter([np.tanh(g @ a) @ b for g, a, b in zip(gathered, w, v, strict=True)], 0)


def in_scan(x: Any, w: Any, v: Any) -> Any:
    return lax.scan(lambda c, _: (block(c, w, v), None), x, length=2)[0]


def in_scan_over_weights(x: Any, w: Any, v: Any) -> Any:
    def step(c: Any, wv: Any) -> tuple[Any, Any]:
        return block(c, *wv), c.sum()

    return lax.scan(step, x, (jnp.stack([w, w]), jnp.stack([v, v])))[0]


def in_while(x: Any, w: Any, v: Any) -> Any:
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, block(s[1], w, v)), (0, x))[1]


def in_fori(x: Any, w: Any, v: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, c: block(c, w, v), x)


def in_cond(x: Any, w: Any, v: Any) -> Any:
    index = lax.axis_index("x") * 0
    x = lax.cond(index == 0, lambda a: block(a, w, v), lambda a: a * 2, x)
    return lax.switch(index + 1, [lambda a: a, lambda a: block(a, w, v), lambda a: -a], x)


def in_remat(x: Any, w: Any, v: Any) -> Any:
    return jax.checkpoint(block)(jax.checkpoint(block)(x, w, v), w, v)


def in_jit(x: Any, w: Any, v: Any) -> Any:
    inner = jax.jit(block)
    return inner(inner(x, w, v), w, v)


def across_jit(x: Any, w: Any, v: Any) -> Any:
    @jax.jit
    def gather(x: Any) -> Any:
        return lax.all_gather(x, "x", axis=0, tiled=True)

    @jax.jit
    def dot(a: Any, b: Any) -> Any:
        return jax.jit(jnp.dot)(a, b)

    @jax.jit
    def scatter(y: Any) -> Any:
        return lax.psum_scatter(y, "x", scatter_dimension=0, tiled=True)

    for _ in range(2):
        x = scatter(dot(jnp.tanh(dot(gather(x), w)), v))
    return x


def in_custom_jvp(x: Any, w: Any, v: Any) -> Any:
    @jax.custom_jvp
    def f(x: Any, w: Any, v: Any) -> Any:
        return block(x, w, v)

    f.defjvp(lambda primals, tangents: jax.jvp(block, primals, tangents))
    return f(f(x, w, v), w, v)


def in_custom_vjp(x: Any, w: Any, v: Any) -> Any:
    @jax.custom_vjp
    def f(x: Any, w: Any, v: Any) -> Any:
        return block(x, w, v)

    f.defvjp(lambda x, w, v: (f(x, w, v), (w, v)), lambda r, g: (g, *r))
    return f(f(x, w, v), w, v)


def in_vmap(x: Any, w: Any, v: Any) -> Any:
    twice = jax.vmap(block, in_axes=(0, None, None))(jnp.stack([x, x]), w, v)
    return block(twice[0], w, v)


def deep(x: Any, w: Any, v: Any) -> Any:
    @jax.checkpoint
    def layer(c: Any, _: Any) -> tuple[Any, None]:
        return lax.cond(True, jax.jit(lambda a: block(a, w, v)), lambda a: a, c), None

    return lax.scan(layer, x, length=2)[0]


NESTS: list[Callable[..., Any]] = [
    in_scan,
    in_scan_over_weights,
    in_while,
    in_fori,
    in_cond,
    in_remat,
    in_jit,
    across_jit,
    in_custom_jvp,
    in_custom_vjp,
    in_vmap,
    deep,
]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: nest.__name__)
def test_chains_in_nested_programs_become_rings(nest: Callable[..., Any], check_vma: bool) -> None:
    outcome = spmd.run_both(nest, F32, check_vma=check_vma)
    exact = reference(np.stack(reference(X, W, V)), W, V)
    spmd.assert_as_good(outcome, exact)
    assert {site.kind for site in outcome.report.sites} == {"all_gather_dot", "dot_reduce_scatter"}
    assert all(site.rewritten for site in outcome.report.sites)
    text = outcome.overlapped.lower(*F32).as_text()
    assert "all_gather" not in text and "reduce_scatter" not in text and "collective_permute" in text


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("nest", NESTS[:-1], ids=lambda nest: nest.__name__)
def test_gradients_agree_on_either_side_of_the_decorator(nest: Callable[..., Any], check_vma: bool) -> None:
    if nest is in_while:
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.grad(lambda *a: spmd.run_both(nest, F32).overlapped(*a).sum())(*F32)
        return
    outcome = spmd.run_both(nest, F32, check_vma=check_vma)

    def gradient(f: Any) -> Any:
        return jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2))

    wanted = gradient(outcome.jitted)(*F32)
    inside = overlap.overlap_collectives(
        jax.jit(gradient(outcome.jitted)), policy="always", strict=True, hardware="tpu_v5p"
    )
    for got in (gradient(outcome.overlapped)(*F32), inside(*F32)):
        for g, w in zip(got, wanted, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4 * np.abs(w).max())
    assert any(site.rewritten for site in inside.explain(*F32).sites)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_a_chain_agrees_with_finite_differences_in_float64(check_vma: bool) -> None:
    outcome = spmd.run_both(block, F32, check_vma=check_vma)
    weights = RNG.normal(size=(4, 3, 5))

    def loss64(*a: Any) -> float:
        return float((np.stack(reference(*a)) * weights).sum())

    got = jax.grad(lambda *a: (outcome.overlapped(*a) * weights.astype(np.float32)).sum(), argnums=(0, 1, 2))(
        *F32
    )
    for i, gradient in enumerate(got):
        direction = RNG.normal(size=gradient.shape)
        moved = [
            [a + s * 1e-5 * direction if j == i else a for j, a in enumerate((X, W, V))] for s in (1, -1)
        ]
        slope = (loss64(*moved[0]) - loss64(*moved[1])) / 2e-5
        np.testing.assert_allclose((np.asarray(gradient, np.float64) * direction).sum(), slope, rtol=2e-4)


MESHES = [
    ((8,), ("x",), "x"),
    ((2, 4), ("y", "x"), "x"),
    ((4, 2), ("x", "y"), "x"),
    ((2, 2, 2), ("a", "x", "b"), "x"),
    ((1, 3, 2), ("a", "x", "b"), "x"),
]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("shape", "names", "axis"), MESHES, ids=str)
@pytest.mark.parametrize("manual", ["all", "one"])
def test_meshes_of_one_to_three_axes_some_left_to_the_compiler(
    shape: tuple[int, ...], names: tuple[str, ...], axis: str, manual: str, check_vma: bool
) -> None:
    count = int(np.prod(shape))
    mesh = jax.make_mesh(
        shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=jax.devices()[:count]
    )
    size = mesh.shape[axis]
    x, w, v = (RNG.normal(size=(size, *a.shape[1:])) for a in (X, W, V))
    args = tuple(a.reshape(-1, a.shape[-1]).astype(np.float32) for a in (x, w, v))
    jitted = jax.jit(
        jax.shard_map(
            block,
            mesh=mesh,
            in_specs=(P(axis),) * 3,
            out_specs=P(axis),
            check_vma=check_vma,
            axis_names=set(names) if manual == "all" else {axis},
        )
    )
    overlapped = overlap.overlap_collectives(jitted, policy="always", strict=True)
    assert [s.rewritten for s in overlapped.explain(*args).sites] == [True, True]
    exact = np.concatenate(reference(x, w, v))
    np.testing.assert_allclose(overlapped(*args), exact, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("check_vma", [True, False])
def test_meshes_with_an_explicit_axis_that_a_vmap_may_be_sharded_over(check_vma: bool) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    jitted = jax.jit(
        jax.shard_map(
            block,
            mesh=mesh,
            in_specs=(P("x"),) * 3,
            out_specs=P("x"),
            check_vma=check_vma,
            axis_names={"x"},
        )
    )
    overlapped = overlap.overlap_collectives(jitted, policy="always", strict=True, hardware="tpu_v5p")
    x, w, v = (
        jax.device_put(a.reshape(-1, a.shape[-1]), jax.sharding.NamedSharding(mesh, P("x"))) for a in F32
    )
    exact = np.concatenate(reference(X, W, V))
    assert [site.rewritten for site in overlapped.explain(x, w, v).sites] == [True, True]
    np.testing.assert_allclose(overlapped(x, w, v), exact, atol=2e-5 * np.abs(exact).max())
    both = jax.device_put(np.stack([x, x]), jax.sharding.NamedSharding(mesh, P("y", "x")))
    mapped = jax.jit(jax.vmap(overlapped, in_axes=(0, None, None), spmd_axis_name="y"))(both, w, v)
    np.testing.assert_allclose(mapped, np.stack([exact, exact]), atol=2e-5 * np.abs(exact).max())


def test_debug_prints_inside_the_body_run_once_per_device(capfd: pytest.CaptureFixture[str]) -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        jax.debug.print("device {i}", i=lax.axis_index("x"))
        return block(x, w, v)

    outcome = spmd.run_both(body, F32)
    jax.effects_barrier()
    capfd.readouterr()
    jax.block_until_ready(outcome.overlapped(*F32))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", *(f"device {i}" for i in range(4))]


def test_name_scopes_and_source_lines_survive() -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        with jax.named_scope("attention"):
            x = jnp.sin(x)
            y = block(x, w, v)
        return y

    text = spmd.run_both(body, F32).overlapped.lower(*F32).compile().as_text()
    dots = [line for line in text.splitlines() if " dot(" in line]
    permutes = [line for line in text.splitlines() if " collective-permute" in line]
    assert dots and all(
        "attention" in line and "test_nesting.py" not in line.split("metadata")[0] for line in dots
    )
    assert permutes and all("attention" in line and "overlap_" in line for line in permutes)
    assert any("attention/sin" in line for line in text.splitlines())


def test_a_body_called_twice_stays_one_function() -> None:
    text = spmd.run_both(in_jit, F32).overlapped.lower(*F32).as_text()
    assert text.count("func.func private @block") == 1


def test_a_program_without_collectives_is_left_alone() -> None:
    f = overlap.overlap_collectives(jax.jit(lambda x: jnp.sin(x) @ x.T), policy="always", strict=True)
    x = RNG.normal(size=(3, 3))
    np.testing.assert_allclose(f(x), np.sin(x) @ x.T, rtol=1e-5)
    assert f.explain(x).sites == ()


@pytest.mark.parametrize("loop", ["scan", "while"])
@pytest.mark.parametrize("remat", [True, False])
def test_a_gather_of_the_same_value_in_every_iteration_is_reported_and_left_to_be_hoisted(
    loop: str, remat: bool
) -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        def step(c: Any) -> Any:
            same = lax.all_gather(w * 2, "x", axis=1, tiled=True)
            other = lax.all_gather(c, "x", axis=0, tiled=True)
            return jnp.tanh(c @ same)[:, :5] + (other @ w)[:3, :5]

        step = jax.checkpoint(step) if remat else step
        if loop == "scan":
            return lax.scan(lambda c, _: (step(c), None), x, length=2)[0]
        return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, step(s[1])), (0, x))[1]

    told = []

    def profitable(site: Any) -> bool:
        told.append(site.reason)
        return bool(site.reason == "profitable")

    cases: tuple[tuple[Any, bool, str], ...] = (
        ("auto", False, "loop_invariant"),
        ("always", True, "policy_always"),
        (profitable, False, "policy_declined"),
    )
    for policy, rewritten, reason in cases:
        outcome = spmd.run_both(body, F32, policy=policy)
        same, other = outcome.report.sites
        assert (same.rewritten, same.reason) == (rewritten, reason)
        assert "same in every iteration" in same.sentence and "every iteration" not in other.sentence
        np.testing.assert_allclose(outcome.rewritten, outcome.original, atol=1e-5)
    assert "loop_invariant" in told


def test_what_a_loop_carries_unchanged_is_the_same_in_every_iteration() -> None:
    """The cotangent of a running sum, from which the backward pass makes a sum that is then scattered."""

    def body(x: Any, w: Any, v: Any) -> Any:
        def total(x: Any) -> Any:
            def step(total: Any, _: None) -> tuple[Any, None]:
                return total + (lax.all_gather(x, "x", tiled=True) @ w).sum(), None

            return lax.scan(step, 0 * (x.sum() + w.sum()), length=3)[0]

        return jax.grad(total)(x)

    report = spmd.run_both(body, F32, policy="auto").report
    (scatter,) = (site for site in report.sites if site.kind == "dot_reduce_scatter")
    assert scatter.reason == "loop_invariant"


def test_functions_that_call_each_other_twice_are_each_counted_once() -> None:
    def summed(x: Any) -> Any:
        return lax.scan(lambda c, _: (lax.psum(c, "x"), None), x, length=3)[0]

    def twice(called: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(lambda x: called(called(x)))

    function: Callable[..., Any] = jax.jit(summed)
    for _ in range(24):
        function = twice(function)
    mapped = jax.shard_map(function, mesh=spmd.mesh_of(4), in_specs=P(), out_specs=P(), check_vma=False)
    report = overlap.overlap_collectives(jax.jit(mapped), policy="always").explain(jnp.zeros(4))
    assert [site.count for site in report.sites] == [3 * 2**24]
