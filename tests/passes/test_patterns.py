"""The patterns beyond a plain gather or scatter: psum, all_to_all, axes, groups, reductions."""

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
RNG = np.random.default_rng(1)
VMA = pytest.mark.parametrize("check_vma", [True, False])
WAYS = pytest.mark.parametrize("directions", [1, 2], ids=["unidirectional", "bidirectional"])


def stacked(*shapes: tuple[int, ...], devices: int = 4) -> tuple[np.ndarray, ...]:
    return tuple(RNG.normal(size=(devices, *shape)).astype(np.float32) for shape in shapes)


def per_device(f: Callable[..., Any], *arguments: Any) -> spmd.Shards:
    return [f(*a) for a in zip(*(np.asarray(x, np.float64) for x in arguments), strict=True)]


def all_to_all(shards: spmd.Shards, split: int, concat: int, *, tiled: bool) -> spmd.Shards:
    count = len(shards)
    pieces = [np.split(s, count, split) for s in shards]
    if tiled:
        return [np.concatenate([p[i] for p in pieces], concat) for i in range(count)]
    return [np.stack([p[i].squeeze(split) for p in pieces], concat) for i in range(count)]


# dot → psum


@VMA
@WAYS
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_dot_psum_is_a_scatter_ring_and_a_gather(directions: int, check_vma: bool, devices: int) -> None:
    x, w = stacked((12, 5), (5, 7), devices=devices)
    with spmd.only_directions(directions):
        outcome = spmd.run_both(lambda x, w: lax.psum(jnp.tanh(x @ w), "x") * 2, (x, w), check_vma=check_vma)
    (site,) = outcome.report.sites
    assert site.kind == "dot_psum" and site.rewritten
    spmd.assert_as_good(outcome, [2 * s for s in spmd.psum(per_device(lambda x, w: np.tanh(x @ w), x, w))])


@VMA
@WAYS
def test_the_gather_of_a_psum_is_a_ring_of_the_next_dot(directions: int, check_vma: bool) -> None:
    """Megatron's row-parallel then column-parallel matmul, with a residual and a scale between them."""
    x, w, v = stacked((8, 5), (5, 6), (6, 3))
    scale = RNG.normal(size=(6,)).astype(np.float32)

    def body(x: Any, w: Any, v: Any) -> Any:
        return (lax.psum(x @ w, "x") * scale) @ v

    with spmd.only_directions(directions):
        outcome = spmd.run_both(body, (x, w, v), check_vma=check_vma)
    summed = spmd.psum(per_device(lambda x, w: x @ w, x, w))
    spmd.assert_as_good(outcome, [(s * scale) @ b.astype(np.float64) for s, b in zip(summed, v, strict=True)])
    (site,) = outcome.report.sites
    assert site.kind == "dot_psum" and len(site.dots) == 2
    text = outcome.overlapped.lower(x, w, v).as_text()
    assert "all_gather" not in text and "all_reduce" not in text


@VMA
def test_a_psum_whose_sum_does_not_divide_is_kept(check_vma: bool) -> None:
    x, w = stacked((3, 5), (5, 7))
    outcome = spmd.run_both(lambda x, w: lax.psum(x @ w, "x") * 1, (x, w), check_vma=check_vma)
    (site,) = outcome.report.sites
    assert (site.kind, site.rewritten, site.reason) == ("psum", False, "indivisible")
    spmd.assert_as_good(outcome, spmd.psum(per_device(lambda x, w: x @ w, x, w)))


def test_a_psum_without_a_dot_is_kept() -> None:
    (x,) = stacked((4, 5))
    (site,) = spmd.run_both(lambda x: lax.psum(jnp.sin(x), "x") * 1, (x,)).report.sites
    assert (site.kind, site.rewritten, site.reason) == ("psum", False, "no_dot")


# all_to_all


@VMA
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize(("split", "concat"), [(0, 0), (0, 1), (1, 0), (1, 2), (2, 1), (2, 2)])
def test_all_to_all_before_a_dot_is_an_exchange(
    split: int, concat: int, tiled: bool, check_vma: bool
) -> None:
    shape = [3, 2, 5]
    shape[split] = 4 * (shape[split] if tiled else 1)
    (x,) = stacked(tuple(shape))
    moved = all_to_all(list(x), split, concat, tiled=tiled)[0]
    (w,) = stacked((moved.shape[-1], 3))

    def body(x: Any, w: Any) -> Any:
        y = lax.all_to_all(x, "x", split, concat, tiled=tiled)
        return jnp.sin(y) @ w

    outcome = spmd.run_both(body, (x, w), check_vma=check_vma)
    (site,) = outcome.report.sites
    assert (site.kind, site.rewritten, site.schedule) == ("all_to_all_dot", True, "exchange")
    exact = all_to_all(list(x.astype(np.float64)), split, concat, tiled=tiled)
    spmd.assert_as_good(outcome, [np.sin(y) @ b for y, b in zip(exact, w.astype(np.float64), strict=True)])


@VMA
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize(("split", "concat"), [(0, 0), (0, 1), (1, 0), (1, 2), (2, 1), (2, 2)])
def test_all_to_all_after_a_dot_is_an_exchange(split: int, concat: int, tiled: bool, check_vma: bool) -> None:
    shape = [3, 2, 5]
    shape[split] = 4 * (shape[split] if tiled else 1)
    x, w = stacked((shape[0], shape[1], 6), (6, shape[2]))

    def body(x: Any, w: Any) -> Any:
        return lax.all_to_all(jnp.sin(x @ w), "x", split, concat, tiled=tiled)

    outcome = spmd.run_both(body, (x, w), check_vma=check_vma)
    (site,) = outcome.report.sites
    assert (site.kind, site.rewritten, site.schedule) == ("dot_all_to_all", True, "exchange")
    made = per_device(lambda x, w: np.sin(x @ w), x, w)
    spmd.assert_as_good(outcome, all_to_all(made, split, concat, tiled=tiled))


# axes


@VMA
@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a"), ("a", "c"), ("c", "b", "a")])
def test_several_axes_at_once_major_to_minor(axes: tuple[str, ...], check_vma: bool) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    size = 2 ** len(axes)
    rest = tuple(n for n in ("a", "b", "c") if n not in axes)
    x = RNG.normal(size=(size * 3, 5)).astype(np.float32)
    w = RNG.normal(size=(5, size * 2)).astype(np.float32)
    v = RNG.normal(size=(size * 2, 5)).astype(np.float32)

    def body(x: Any, w: Any, v: Any) -> Any:
        h = lax.all_gather(x, axes, axis=0, tiled=True) @ w
        return lax.psum_scatter(h @ v, axes, scatter_dimension=0, tiled=True)

    jitted = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(axes), P(None, axes), P(axes)),
            out_specs=P(axes),
            check_vma=check_vma,
        )
    )
    overlapped = overlap.overlap_collectives(jitted, policy="always", strict=True)
    sites = overlapped.explain(x, w, v).sites
    assert [(s.axis, s.axis_size, s.rewritten) for s in sites] == [(",".join(axes), size, True)] * 2
    exact = x.astype(np.float64) @ w @ v
    np.testing.assert_allclose(overlapped(x, w, v), exact, atol=2e-5 * np.abs(exact).max())
    assert rest or size == 8


def handed_out(x: Any, w: Any, v: Any) -> Any:
    gathered = lax.all_gather(x, "x", tiled=True)
    return gathered, gathered @ w


def two_dots(x: Any, w: Any, v: Any) -> Any:
    gathered = lax.all_gather(x, "x", tiled=True)
    return gathered @ w, gathered @ v


def a_dot_beside(x: Any, w: Any, v: Any) -> Any:
    return lax.psum(jnp.tanh(x @ w), "x"), v.T @ v


TYPED = {
    handed_out: ((P("x"), P(None, "y"), P()), (P("x"), P("x", "y"))),
    two_dots: ((P("x"), P(None, "y"), P()), (P("x", "y"), P("x"))),
    a_dot_beside: ((P(None, "x"), P("x"), P()), (P(), P())),
}
"""Programs with values of different varying types in one ring, or beside it."""


@pytest.mark.parametrize("hardware", ["tpu_v5p", "h100", "cpu"])
@pytest.mark.parametrize("body", TYPED)
def test_values_beside_each_other_keep_their_types(body: Callable[..., Any], hardware: str) -> None:
    """What makes values wait for one another makes none vary over the axes of another."""
    in_specs, out_specs = TYPED[body]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    jitted = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    ring = overlap.overlap_collectives(jitted, policy="always", strict=True, hardware=hardware)
    given = tuple(RNG.normal(size=(8, 8)).astype(np.float32) for _ in range(3))
    (site,) = ring.explain(*given).sites
    assert site.rewritten

    def gradients(function: Any) -> Any:
        return jax.grad(lambda *xs: sum(jnp.sum(jnp.sin(y)) for y in function(*xs)), (0, 1, 2))

    pairs = [(run(*given) for run in (ring, jitted)), (gradients(run)(*given) for run in (ring, jitted))]
    pairs.append(jax.vmap(run)(*(np.stack([each, -each]) for each in given)) for run in (ring, jitted))
    for results, expected in pairs:
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, wanted, atol=1e-4)


@VMA
@pytest.mark.parametrize(
    "groups", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 0], [1, 2]], [[2, 0, 1, 3]]], ids=str
)
def test_groups_of_equal_size(groups: list[list[int]], check_vma: bool) -> None:
    x, w, v = stacked((3, 5), (5, 8), (8, 5))

    def body(x: Any, w: Any, v: Any) -> Any:
        h = lax.all_gather(x, "x", axis=0, tiled=True, axis_index_groups=groups) @ w
        return lax.psum_scatter(h @ v, "x", scatter_dimension=0, tiled=True, axis_index_groups=groups)

    outcome = spmd.run_both(body, (x, w, v), check_vma=check_vma)
    assert [s.rewritten for s in outcome.report.sites] == [True, True]
    exact: spmd.Shards = [None] * 4
    for group in groups:
        x64, w64, v64 = (a[group].astype(np.float64) for a in (x, w, v))
        gathered = spmd.all_gather(list(x64), 0)
        out = spmd.psum_scatter([g @ a @ b for g, a, b in zip(gathered, w64, v64, strict=True)], 0)
        for device, shard in zip(group, out, strict=True):
            exact[device] = shard
    spmd.assert_as_good(outcome, exact)


@VMA
def test_an_axis_of_one_device_is_looked_through(check_vma: bool) -> None:
    mesh = jax.make_mesh((1, 4), ("one", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x = RNG.normal(size=(12, 5)).astype(np.float32)
    w = RNG.normal(size=(5, 8)).astype(np.float32)

    def body(x: Any, w: Any) -> Any:
        x = lax.all_gather(x, "x", axis=0, tiled=True)
        return lax.all_gather(x, "one", axis=0, tiled=True) @ w

    jitted = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(P(("one", "x")), P()), out_specs=P("one"), check_vma=False)
    )
    overlapped = overlap.overlap_collectives(jitted, policy="always", strict=True)
    assert [(s.axis, s.reason) for s in overlapped.explain(x, w).sites] == [
        ("x", "policy_always"),
        ("one", "axis_size_one"),
    ]
    np.testing.assert_allclose(overlapped(x, w), x.astype(np.float64) @ w, atol=1e-4)
    assert "all-gather" not in overlapped.lower(x, w).compile().as_text()


# sums over the gathered dim


def rms_norm(x: Any, scale: Any, numpy: Any) -> Any:
    return x / numpy.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def layer_norm(x: Any, scale: Any, numpy: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / numpy.sqrt(variance + 1e-6) * scale


@VMA
@WAYS
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
@pytest.mark.parametrize("cast", [False, True], ids=["float32", "bfloat16-wire"])
def test_a_norm_over_the_gathered_dim_is_one_chain_with_its_dot(
    norm: Callable[..., Any], cast: bool, directions: int, check_vma: bool
) -> None:
    x, w = stacked((3, 4), (16, 5))
    scale = RNG.normal(size=(16,)).astype(np.float32)

    def body(x: Any, w: Any) -> Any:
        x = lax.all_gather(x.astype(jnp.bfloat16) if cast else x, "x", axis=1, tiled=True)
        return norm(x.astype(jnp.float32), jnp.asarray(scale), jnp) @ w

    with spmd.only_directions(directions):
        outcome = spmd.run_both(body, (x, w), check_vma=check_vma)
    (site,) = outcome.report.sites
    assert site.kind == "all_gather_dot" and site.rewritten
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16 if cast else jnp.float32), np.float64)
    gathered = spmd.all_gather(list(rounded), 1)
    spmd.assert_as_good(
        outcome, [norm(g, scale, np) @ b for g, b in zip(gathered, w.astype(np.float64), strict=True)]
    )
    text = outcome.overlapped.lower(x, w).as_text()
    assert "all_gather" not in text and "all_reduce" in text


@VMA
def test_a_softmax_over_the_gathered_dim_is_one_chain_with_its_dot(check_vma: bool) -> None:
    x, w = stacked((3, 4), (16, 5))

    def softmax(x: Any, numpy: Any) -> Any:
        e = numpy.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def body(x: Any, w: Any) -> Any:
        return softmax(lax.all_gather(x, "x", axis=1, tiled=True), jnp) @ w

    outcome = spmd.run_both(body, (x, w), check_vma=check_vma)
    assert outcome.report.sites[0].rewritten
    gathered = spmd.all_gather(list(x.astype(np.float64)), 1)
    spmd.assert_as_good(
        outcome, [softmax(g, np) @ b for g, b in zip(gathered, w.astype(np.float64), strict=True)]
    )

    def gradient(f: Any) -> Any:
        return jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1))(x, w)

    for got, wanted in zip(gradient(outcome.overlapped), gradient(outcome.jitted), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@VMA
def test_custom_derivatives_between_gather_and_scatter_are_kept_under_differentiation(
    check_vma: bool,
) -> None:
    x, w, v = stacked((2, 5), (5, 6), (6, 5))

    @jax.custom_jvp
    def doubled(x: Any) -> Any:
        return jnp.tanh(x)

    doubled.defjvp(lambda p, t: (doubled(*p), 2 * t[0]))  # not the true derivative

    @jax.custom_vjp
    def tripled(x: Any) -> Any:
        return jnp.sin(x)

    tripled.defvjp(lambda x: (tripled(x), None), lambda _, g: (3 * g,))

    def body(x: Any, w: Any, v: Any) -> Any:
        h = doubled(lax.all_gather(x, "x", axis=0, tiled=True)) @ w
        return lax.psum_scatter(tripled(h @ v), "x", tiled=True)

    outcome = spmd.run_both(body, (x, w, v), check_vma=check_vma)
    assert [s.kind for s in outcome.report.sites] == ["all_gather_dot", "dot_reduce_scatter"]
    np.testing.assert_allclose(outcome.rewritten, outcome.original, atol=1e-5)

    def gradient(f: Any) -> Any:
        return jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2))(x, w, v)

    for got, wanted in zip(gradient(outcome.overlapped), gradient(outcome.jitted), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@VMA
def test_gradients_of_every_pattern(check_vma: bool) -> None:
    x, w, v = stacked((8, 4), (16, 5), (5, 12))

    def body(x: Any, w: Any, v: Any) -> Any:
        h = rms_norm(lax.all_gather(x, "x", axis=1, tiled=True), 1.0, jnp) @ w
        y = lax.psum(jnp.tanh(h) @ v, "x") @ v.T
        z = lax.all_to_all(y, "x", 0, 1, tiled=True)
        return lax.all_to_all(z.reshape(8, 5) @ v, "x", 1, 0, tiled=True)

    outcome = spmd.run_both(body, (x, w, v), check_vma=check_vma)
    np.testing.assert_allclose(outcome.rewritten, outcome.original, atol=1e-4)

    def gradient(f: Any) -> Any:
        return jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2))

    wanted = gradient(outcome.jitted)(x, w, v)
    inside = overlap.overlap_collectives(jax.jit(gradient(outcome.jitted)), policy="always", strict=True)
    for got in (gradient(outcome.overlapped)(x, w, v), inside(x, w, v)):
        for g, e in zip(got, wanted, strict=True):
            np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-4 * np.abs(e).max())


@VMA
def test_hessians_and_linearizations_go_through_the_rule(check_vma: bool) -> None:
    x, w, v = stacked((2, 3), (3, 4), (4, 3))

    def body(x: Any, w: Any, v: Any) -> Any:
        h = jax.nn.softplus(lax.all_gather(x, "x", axis=0, tiled=True) @ w)
        return lax.psum_scatter(h @ v, "x", tiled=True) + lax.psum(h @ v, "x")[:2]

    outcome = spmd.run_both(body, (x, w, v), check_vma=check_vma)
    transforms: list[Callable[[Any], Any]] = [
        lambda f: jax.hessian(lambda x: (f(x, w, v) ** 2).sum())(x),
        lambda f: jax.jacrev(lambda x: f(x, w, v))(x),
        lambda f: jax.jacfwd(lambda x: f(x, w, v))(x),
        lambda f: jax.linearize(lambda x: f(x, w, v), x)[1](x),
        lambda f: jax.vmap(jax.grad(lambda x: (f(x, w, v) ** 2).sum()))(np.stack([x, 2 * x])),
        lambda f: jax.grad(lambda x: (jax.vmap(lambda x: f(x, w, v))(x) ** 2).sum())(np.stack([x, 2 * x])),
        lambda f: jax.grad(jax.checkpoint(lambda x: (f(jnp.sin(f(x, w, v)), w, v) ** 2).sum()))(x),
        lambda f: jax.grad(lambda x: lax.scan(lambda c, _: (f(c, w, v), None), x, length=2)[0].sum())(x),
    ]
    for transform in transforms:
        wanted = transform(outcome.jitted)
        np.testing.assert_allclose(transform(outcome.overlapped), wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pattern", ["tensor", "fsdp", "megatron", "scan"])
def test_the_gradient_of_a_decorated_function_is_rings_and_keeps_no_more_residuals(
    pattern: str, dtype: str
) -> None:
    """Residuals against the original's, but for the arguments. Temporary memory against the decorated
    gradient's, by the compiler's own account: weights' gradients wait elsewhere there, and CPU devices, which
    widen the operands of a bfloat16 dot, hold one such copy more or less."""
    layers, tokens, width, hidden = 3, 256, 128, 512

    def tensor(x: Any, w: Any, v: Any) -> Any:
        h = jax.nn.silu(lax.all_gather(x, "x", axis=0, tiled=True) @ w)
        return lax.psum_scatter(h @ v, "x", scatter_dimension=0, tiled=True)

    def fsdp(x: Any, w: Any, v: Any) -> Any:
        h = jax.nn.silu(x @ lax.all_gather(w, "x", axis=0, tiled=True))
        return h @ lax.all_gather(v, "x", axis=0, tiled=True)

    def megatron(x: Any, w: Any, v: Any) -> Any:
        return lax.psum(jax.nn.silu(x @ w) @ v, "x")

    def scan(x: Any, w: Any, v: Any) -> Any:
        return lax.scan(lambda c, wv: (c + tensor(c, *wv), None), x, (w, v))[0]

    body, specs, out = {
        "tensor": (tensor, (P("x"), P(None, "x"), P("x")), P("x")),
        "fsdp": (fsdp, (P("x"), P("x"), P("x")), P("x")),
        "megatron": (megatron, (P(), P(None, "x"), P("x")), P()),
        "scan": (scan, (P("x"), P(None, None, "x"), P(None, "x")), P("x")),
    }[pattern]
    shapes: list[tuple[int, ...]] = [(tokens, width), (width, hidden), (hidden, width)]
    if pattern == "scan":
        shapes[1:] = [(layers, *shape) for shape in shapes[1:]]
    mesh = spmd.mesh_of(4)
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out))

    def gradient(f: Any) -> Any:
        return jax.jit(jax.grad(lambda *a: (f(*a).astype(jnp.float32) ** 2).sum(), argnums=(0, 1, 2)))

    def decorated(f: Any) -> Any:
        return overlap.overlap_collectives(f, policy="always", strict=True)

    def elements(arrays: Any) -> int:
        return sum(a.size for a in jax.tree.leaves(arrays))

    residuals = [jax.eval_shape(lambda *a, f=f: jax.vjp(f, *a)[1], *arguments) for f in (decorated(f), f)]
    assert elements(residuals[0]) <= elements(residuals[1]) + elements(arguments)
    inside = gradient(decorated(f)).lower(*arguments).compile()
    outside = decorated(gradient(f)).lower(*arguments).compile()
    kept, wanted = (c.memory_analysis().temp_size_in_bytes for c in (inside, outside))
    assert kept <= 1.15 * wanted
    rings = [c.as_text().count(" collective-permute(") for c in (inside, outside)]
    assert rings[0] == rings[1] > 0
    forward = decorated(f).lower(*arguments).compile().as_text().count(" collective-permute(")
    assert rings[0] > forward


def test_one_part_of_a_split_is_followed_up_to_its_dot() -> None:
    x, w = stacked((8, 5), (5, 6))
    outcome = spmd.run_both(lambda x, w: lax.psum_scatter(jnp.split(x @ w, 2, 1)[0], "x", tiled=True), (x, w))
    (site,) = outcome.report.sites
    assert (site.kind, site.rewritten) == ("dot_reduce_scatter", True)
    spmd.assert_as_good(outcome, spmd.psum_scatter(per_device(lambda x, w: (x @ w)[:, :3], x, w), 0))


def test_the_other_part_of_a_split_in_use_keeps_the_site() -> None:
    x, w = stacked((8, 5), (5, 6))

    def body(x: Any, w: Any) -> Any:
        one, other = jnp.split(x @ w, 2, 1)
        return lax.psum_scatter(one, "x", tiled=True), other

    (site,) = spmd.run_both(body, (x, w)).report.sites
    assert (site.kind, site.rewritten, site.reason) == ("reduce_scatter", False, "partial_sum_escapes")
    assert "split" in site.sentence


def test_a_partial_sum_that_a_norm_s_gradient_reads_escapes_whatever_is_reduced_beside_it() -> None:
    """The scale's gradient adds up a product of it; so does, on another way, the norm's derivative."""

    def body(dy: Any, w: Any, x: Any, scale: Any) -> Any:
        dx = dy @ w
        along = (dx * x * scale).sum(-1, keepdims=True)
        return lax.psum_scatter(dx * scale - x * along, "x", tiled=True), (dx * x).sum(0)

    arguments = stacked((8, 5), (5, 6), (8, 6), (6,))
    (site,) = spmd.run_both(body, arguments).report.sites
    assert (site.kind, site.rewritten, site.reason) == ("reduce_scatter", False, "partial_sum_escapes")


@VMA
@pytest.mark.parametrize(
    "f", [jax.nn.softmax, jax.nn.log_softmax, jax.nn.logsumexp], ids=lambda f: f.__name__
)
def test_a_softmax_over_the_gathered_dim_beside_a_dot_of_the_same(f: Any, check_vma: bool) -> None:
    """Its maximum is read by operations that stay, and by a sum shard by shard after them."""
    x, w = stacked((3, 5), (5, 6))

    def body(x: Any, w: Any) -> Any:
        gathered = lax.all_gather(x, "x", axis=0, tiled=True)
        return gathered @ w + jnp.sum(f(gathered, axis=0))

    def exact(g: Any, w: Any) -> Any:
        shifted = g - g.max(0)
        log_sum = np.log(np.exp(shifted).sum(0))
        values = {"softmax": np.exp(shifted - log_sum), "log_softmax": shifted - log_sum}
        return g @ w + np.sum(values.get(f.__name__, log_sum + g.max(0)))

    outcome = spmd.run_both(body, (x, w), check_vma=check_vma)
    gathered = [np.concatenate(x.astype(np.float64))] * 4
    spmd.assert_as_good(outcome, [exact(g, b) for g, b in zip(gathered, w.astype(np.float64), strict=True)])
    assert outcome.report.rewritten


@VMA
def test_jax_nn_softmax_over_the_gathered_dim_is_part_of_the_chain(check_vma: bool) -> None:
    x, w = stacked((3, 4), (16, 5))
    outcome = spmd.run_both(
        lambda x, w: jax.nn.softmax(lax.all_gather(x, "x", axis=1, tiled=True)) @ w,
        (x, w),
        check_vma=check_vma,
    )
    assert outcome.report.sites[0].rewritten
    np.testing.assert_allclose(outcome.rewritten, outcome.original, atol=1e-5)


@VMA
def test_chains_of_the_backward_pass_alone_become_rings(check_vma: bool) -> None:
    """Data parallelism: the forward pass has no collective, the weight's gradient is a dot and a psum."""
    x = RNG.normal(size=(16, 5)).astype(np.float32)
    w = RNG.normal(size=(5, 8)).astype(np.float32)
    mapped = jax.shard_map(
        lambda x, w: jnp.tanh(x @ w),
        mesh=spmd.mesh_of(4),
        in_specs=(P("x"), P()),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    decorated = overlap.overlap_collectives(jax.jit(mapped), policy="always", strict=True, hardware="tpu_v5p")
    gradient = jax.jit(jax.grad(lambda w: (decorated(x, w) ** 2).sum()))
    assert "collective_permute" in gradient.lower(w).as_text()
    y = np.tanh(x.astype(np.float64) @ w)
    np.testing.assert_allclose(gradient(w), x.T @ (2 * y * (1 - y**2)), atol=1e-4)


@VMA
def test_a_reshape_of_a_gathered_weight_is_followed_in_its_gradient_too(check_vma: bool) -> None:
    """The transpose of a reshape names a sharding, which shards nothing."""
    x = RNG.normal(size=(4, 6)).astype(np.float32)
    w = RNG.normal(size=(8, 8)).astype(np.float32)

    def loss(x: Any, w: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            w = lax.all_gather(w, "x", axis=0, tiled=True).reshape(8, 2, 4)
            return jnp.einsum("bd,dhk->bhk", jnp.tile(x, (1, 2))[:, :8], w)

        specs = (P("x"), P("x"))
        mapped = jax.shard_map(
            body, mesh=spmd.mesh_of(4), in_specs=specs, out_specs=P("x"), check_vma=check_vma
        )
        return (mapped(x, w) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, argnums=1))
    decorated = overlap.overlap_collectives(gradient, policy="always", strict=True, hardware="tpu_v5p")
    kinds = {site.kind for site in decorated.explain(x, w).sites if site.rewritten}
    assert kinds == {"all_gather_dot", "dot_reduce_scatter"}
    np.testing.assert_allclose(decorated(x, w), gradient(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "g",
    [lambda s: s + s @ s, lambda s: s @ s - s, lambda s: s @ s.T, lambda s: (s + 1) @ s + np.float32(2) * s],
)
@pytest.mark.parametrize("collective", ["reduce_scatter", "psum", "all_to_all"])
def test_of_two_dots_before_a_collective_one_may_read_the_other(
    g: Callable[[Any], Any], collective: str
) -> None:
    """As in the gradient of a Newton-Schulz step (Muon): the ring is of the last dot alone."""
    x, y = stacked((5, 8), (5, 8))
    after = {
        "reduce_scatter": lambda z: lax.psum_scatter(z, "x", scatter_dimension=0, tiled=True),
        "psum": lambda z: lax.psum(z, "x") * 1,
        "all_to_all": lambda z: lax.all_to_all(z, "x", 0, 1, tiled=True),
    }
    outcome = spmd.run_both(lambda x, y: after[collective](g(x.T @ y)), (x, y))
    (site,) = outcome.report.sites
    assert (site.rewritten, len(site.dots)) == (True, 1)
    before = per_device(lambda x, y: g(x.T @ y), x, y)
    wanted = {
        "reduce_scatter": spmd.psum_scatter(before, 0),
        "psum": spmd.psum(before),
        "all_to_all": all_to_all(before, 0, 1, tiled=True),
    }[collective]
    spmd.assert_as_good(outcome, wanted)
