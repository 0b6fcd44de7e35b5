"""Tokens that are flattened between a collective and its dots: their dims are kept apart, for a ring."""

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
from passes.merged_dims import Parts, kept_apart, merges
from tests.passes import bodies, spmd
from tests.passes.ring_patterns import gather, per_device, scatter

RNG = np.random.default_rng(20261128)
DEVICES = 4


def shards(*shape: int) -> Any:
    return jnp.asarray(RNG.normal(size=(DEVICES, *shape)), jnp.float32)


def silu(xp: Any, h: Any) -> Any:
    return h / (1 + xp.exp(-h))


def normed(xp: Any, t: Any, scale: Any) -> Any:
    """A norm over the features of tokens, as people write it: a mean, a root, a broadcast."""
    return t / xp.sqrt((t * t).mean(axis=-1, keepdims=True) + 1e-3) * scale


def flat(g: Any) -> Any:
    return g.reshape(-1, g.shape[-1])


def into_free(x: Any, w: Any) -> Any:
    g = gather(x, 1)
    return (flat(g) @ w).reshape(*g.shape[:-1], -1)


def left_flat(x: Any, w: Any) -> Any:
    return flat(gather(x, 1)) @ w


def from_the_right(x: Any, w: Any) -> Any:
    return w.T @ flat(gather(x, 1)).T


def with_bias(x: Any, w: Any, b: Any) -> Any:
    return silu(jnp, flat(gather(x, 1)) @ w + b)


def after_a_norm(x: Any, w: Any, b: Any) -> Any:
    t = normed(jnp, flat(gather(x, 1)), b)
    return jax.nn.softmax(t @ w, axis=-1)


def of_weights_gradient(x: Any, y: Any) -> Any:
    return flat(gather(x, 1)).T @ flat(y)


def of_two_gathered(x: Any, y: Any, w: Any) -> Any:
    return flat(gather(x, 1)).T @ (flat(gather(y, 1)) * w)


def to_scatter(h: Any, w: Any) -> Any:
    return scatter((flat(h) @ w).reshape(*h.shape[:-1], -1), 1)


def a_layer(x: Any, w: Any, v: Any) -> Any:
    g = gather(x, 1)
    return scatter((silu(jnp, flat(g) @ w) @ v).reshape(g.shape), 1)


def in_heads(x: Any, w: Any) -> Any:
    """Features are merged as well: heads before a dot."""
    g = gather(x, 1)
    return g.reshape(g.shape[0] * g.shape[1], -1) @ w


def untiled(x: Any, w: Any) -> Any:
    """Blocks of s are put beside one another, and flattened, by one reshape of three dims."""
    blocks = jnp.moveaxis(gather(x, 0, tiled=False), 0, 1)
    return blocks.reshape(-1, x.shape[-1]) @ w


def read_otherwise(x: Any, w: Any) -> Any:
    """What reads tokens in a way of its own gets them merged; a sum over them is one over both dims."""
    t = flat(gather(x, 1))
    return jnp.concatenate([t[1:5], jnp.cumsum(t, axis=0), lax.rev(t, (0,)), t @ w, t.sum(axis=0)[None]])


def an_exchange(x: Any, w: Any) -> Any:
    e = lax.all_to_all(x, "x", split_axis=2, concat_axis=1, tiled=True)
    return flat(e) @ w


def exchanged_after(h: Any, w: Any) -> Any:
    y = (flat(h) @ w).reshape(*h.shape[:-1], -1)
    return lax.all_to_all(y, "x", split_axis=1, concat_axis=2, tiled=True)


G = np.ndarray


def np_flat(g: G) -> G:
    return g.reshape(-1, g.shape[-1])


def softmax(z: G) -> G:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def exchange(blocks: list[G], split: int, concat: int) -> list[G]:
    parts = [np.split(block, DEVICES, split) for block in blocks]
    return [np.concatenate([part[device] for part in parts], concat) for device in range(DEVICES)]


def gathered(f: Callable[..., Any]) -> Callable[..., Any]:
    """The reference of a body that gathers its first argument along dim 1."""
    return lambda x, *others: per_device(f, spmd.all_gather(x, 1), *others)


def scattered(h: list[G], w: list[G]) -> list[G]:
    made = per_device(lambda a, b: (np_flat(a) @ b).reshape(*a.shape[:-1], -1), h, w)
    return spmd.psum_scatter(made, 1)


def layer(x: list[G], w: list[G], v: list[G]) -> list[G]:
    def own(g: G, a: G, b: G) -> G:
        return (silu(np, np_flat(g) @ a) @ b).reshape(g.shape)

    return spmd.psum_scatter(per_device(own, spmd.all_gather(x, 1), w, v), 1)


X, W, V, B = (3, 2, 6), (6, 8), (8, 6), (8,)

CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "into_free": (into_free, (X, W), gathered(lambda g, w: g @ w)),
    "left_flat": (left_flat, (X, W), gathered(lambda g, w: np_flat(g) @ w)),
    "from_the_right": (from_the_right, (X, W), gathered(lambda g, w: w.T @ np_flat(g).T)),
    "with_bias": (with_bias, (X, W, B), gathered(lambda g, w, b: silu(np, np_flat(g) @ w + b))),
    "after_a_norm": (
        after_a_norm,
        (X, W, (6,)),
        gathered(lambda g, w, b: softmax(normed(np, np_flat(g), b) @ w)),
    ),
    "of_weights_gradient": (
        of_weights_gradient,
        (X, (3, 8, 5)),
        gathered(lambda g, y: np_flat(g).T @ np_flat(y)),
    ),
    "of_two_gathered": (
        of_two_gathered,
        (X, (3, 2, 5), (5,)),
        lambda x, y, w: per_device(
            lambda g, h, u: np_flat(g).T @ (np_flat(h) * u), spmd.all_gather(x, 1), spmd.all_gather(y, 1), w
        ),
    ),
    "to_scatter": (to_scatter, ((3, 8, 6), W), scattered),
    "a_layer": (a_layer, (X, W, V), layer),
    "in_heads": (in_heads, ((3, 2, 2, 3), W), gathered(lambda g, w: g.reshape(-1, 6) @ w)),
    "untiled": (untiled, (X, W), gathered(lambda g, w: np_flat(g) @ w)),
    "read_otherwise": (
        read_otherwise,
        (X, (6, 6)),
        gathered(
            lambda g, w: np.concatenate(
                [
                    np_flat(g)[1:5],
                    np_flat(g).cumsum(0),
                    np_flat(g)[::-1],
                    np_flat(g) @ w,
                    np_flat(g).sum(0)[None],
                ]
            )
        ),
    ),
    "an_exchange": (
        an_exchange,
        ((3, 2, 8), (2, 5)),
        lambda x, w: per_device(lambda e, u: np_flat(e) @ u, exchange(x, 2, 1), w),
    ),
    "exchanged_after": (
        exchanged_after,
        ((3, 8, 6), (6, 4)),
        lambda h, w: exchange(per_device(lambda a, b: a @ b, h, w), 1, 2),
    ),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, check_vma: bool) -> None:
    body, shapes, reference = CASES[name]
    arguments = [shards(*shape) for shape in shapes]
    outcome = spmd.run_both(body, arguments, check_vma=check_vma)
    # One dot is in one ring only.
    kept = [site.reason for site in outcome.report.kept]
    assert kept == (["dot_taken"] if name == "of_two_gathered" else [])
    exact = reference(*([np.float64(a) for a in stacked] for stacked in arguments))
    spmd.assert_as_good(outcome, exact)


def slope(z: G) -> G:
    """The derivative of silu."""
    s = 1 / (1 + np.exp(-z))
    return s * (1 + z * (1 - s))


def test_gradients() -> None:
    """Of sum(layer * c), for all three arguments; the backward pass flattens and spreads out too."""
    arguments = [shards(*shape) for shape in (X, W, V, X)]

    def body(x: Any, w: Any, v: Any, c: Any) -> Any:
        def loss(x: Any, w: Any, v: Any) -> Any:
            return (a_layer(x, w, v) * c).sum()

        return jax.grad(loss, (0, 1, 2))(x, w, v)

    x, w, v, c = ([np.float64(a) for a in stacked] for stacked in arguments)
    g, whole = (np_flat(spmd.all_gather(each, 1)[0]) for each in (x, c))
    z = [g @ each for each in w]
    dz = [(whole @ b.T) * slope(each) for b, each in zip(v, z, strict=True)]
    dx = [(d @ a.T).reshape(3, 2 * DEVICES, 6) for d, a in zip(dz, w, strict=True)]
    exact = (
        spmd.psum_scatter(dx, 1),
        [g.T @ d for d in dz],
        [silu(np, each).T @ whole for each in z],
    )
    outcome = spmd.run_both(body, arguments, check_vma=False)
    assert [(site.kind, site.rewritten) for site in outcome.report.sites].count(("dot_reduce_scatter", True))
    for original, rewritten, wanted in zip(outcome.original, outcome.rewritten, exact, strict=True):
        for found in (original, rewritten):
            np.testing.assert_allclose(found, np.stack(wanted), rtol=0, atol=2e-5 * np.abs(wanted).max())


def mapped(body: Callable[..., Any], *specs: PartitionSpec, out: Any) -> Any:
    return jax.jit(
        jax.shard_map(body, mesh=spmd.mesh_of(DEVICES), in_specs=specs, out_specs=out, check_vma=False)
    )


TOKENS, IN, OUT = PartitionSpec(None, "x"), PartitionSpec(None, "x"), PartitionSpec("x")


def reported(layer: Callable[..., Any], size: int, hardware: str = "tpu_v5e") -> Report:
    """A training step of a layer of ``size`` tokens in each of 4 sequences, and as many features."""

    def step(x: Any, w: Any, v: Any) -> Any:
        return jax.grad(lambda *a: (layer(*a).astype(jnp.float32) ** 2).sum(), (0, 1, 2))(x, w, v)

    body = mapped(step, TOKENS, IN, OUT, out=(TOKENS, IN, OUT))
    shapes = ((4, size, size), (size, 4 * size), (4 * size, size))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return overlap_collectives(body, hardware=hardware, strict=True).explain(*arguments)


def as_it_should_be(x: Any, w: Any, v: Any) -> Any:
    return scatter(silu(jnp, gather(x, 1) @ w) @ v, 1)


def test_flattened_tokens_are_planned_as_those_that_are_not() -> None:
    flattened, apart = reported(a_layer, 4096), reported(as_it_should_be, 4096)
    assert flattened.rewritten

    def whole(report: Report) -> list[Any]:
        return [(s.kind, s.reason, s.schedule, s.estimate, len(s.dots)) for s in report.sites]

    assert whole(flattened) == whole(apart)


def test_where_no_ring_pays_the_program_stays_and_the_report_says_that_none_does() -> None:
    report = reported(a_layer, 128)
    assert {site.reason for site in report.sites} == {"not_profitable"}
    assert all(site.estimate is not None and site.estimate.benefit_s < 0 for site in report.sites)
    rewritten = overlap_collectives(mapped(a_layer, TOKENS, IN, OUT, out=TOKENS), hardware="tpu_v5e")
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 64, 64), (64, 64), (64, 64))]
    shapes = [
        eqn.outvars[0].aval.shape
        for eqn in bodies.equations(rewritten.trace(*arguments).jaxpr)
        if eqn.primitive.name == "dot_general"
    ]
    assert shapes == [(256, 16), (256, 64)]


def test_a_dim_that_is_gathered_along_its_major_part_needs_nothing_apart() -> None:
    """Blocks of a batch are blocks of its tokens."""
    jaxpr = bodies.shard_body(lambda x, w: flat(gather(x)) @ w, *(shards(*s)[0] for s in (X, W)))
    assert merges(dataflow(jaxpr)) == ()


def test_values_keep_their_numbers_and_reshapes_stand_only_where_something_reads_merged_dims() -> None:
    flow = dataflow(bodies.shard_body(read_otherwise, *(shards(*s)[0] for s in (X, (6, 6)))))
    (merge,) = merges(flow)
    assert not merge.fills_tiles
    assert (flow.ops[merge.reshape].name, merge.parts) == ("reshape", Parts(0, (3, 8)))
    apart = kept_apart(flow, (merge,))
    (dot,) = (op for op in apart.ops if op.name == "dot_general")
    assert apart.avals[dot.outputs[0]].shape == (3, 8, 6)
    assert [op.name for op in apart.ops].count("reshape") == 2  # of the tokens, and of the dot's result
    for op in (*flow.ops, *apart.ops):
        if op.name in ("slice", "cumsum", "rev"):
            assert flow.avals[op.outputs[0]] == apart.avals[op.outputs[0]]
    assert set(apart.producer) >= {value for op in flow.live.values() for value in op.outputs} - {merge.value}


def told(report: Report) -> list[tuple[str, str]]:
    return [(site.kind, site.reason) for site in report.sites]


def explained(body: Any, *shapes: Any, policy: Any = "auto", hardware: str = "tpu_v5p") -> Report:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return overlap_collectives(body, policy=policy, hardware=hardware, strict=True).explain(*arguments)


def of_heads(x: Any, w: Any) -> Any:
    return x @ gather(w, 2).reshape(w.shape[0], -1)


def summed_after(x: Any, w: Any) -> Any:
    """A residual stream that is flattened once."""
    t = flat(gather(x, 1))
    for _ in range(2):
        t = t + lax.psum(jax.nn.relu(t @ w) @ w.T, "x")
    return t.reshape(x.shape[0], -1, x.shape[2])


def as_sequences(x: Any, w: Any) -> Any:
    t = gather(x, 1)
    for _ in range(2):
        t = t + lax.psum(jax.nn.relu(t @ w) @ w.T, "x")
    return t


def test_sums_of_flattened_tokens_are_planned_as_those_of_sequences() -> None:
    shapes = ((3, 4096, 2048), (2048, 4 * 2048))
    programs = (mapped(body, TOKENS, IN, out=PartitionSpec()) for body in (summed_after, as_sequences))
    flattened, apart = (explained(program, *shapes) for program in programs)
    assert ("dot_psum", "profitable") in told(flattened)
    assert told(flattened) == told(apart)


def test_dims_stay_merged_where_a_ring_that_needs_them_so_saves_more() -> None:
    """Rows of a product are scattered that a gather, over another axis, needs apart."""

    def body(x: Any, w: Any) -> Any:
        product = flat(lax.all_gather(x, "a", axis=1, tiled=True)) @ w
        return lax.psum_scatter(product, "x", scatter_dimension=0, tiled=True)

    mesh = jax.make_mesh((2, 4), ("a", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    specs = (PartitionSpec(None, "a", "x"), PartitionSpec("x"))
    function = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("x"), check_vma=False)
    )
    report = explained(function, (3, 4096, 16384), (16384, 16384))
    assert told(report) == [("all_gather", "no_dot"), ("dot_reduce_scatter", "profitable")]


@pytest.mark.parametrize(
    ("body", "shapes", "specs"),
    [
        pytest.param(
            of_heads, ((32768, 4096), (4096, 32, 128)), (OUT, PartitionSpec(None, None, "x")), id="minor"
        ),
        pytest.param(left_flat, ((2048, 8, 4096), (4096, 4096)), (TOKENS, PartitionSpec()), id="few rows"),
    ],
)
def test_blocks_that_would_hardly_fill_tiles_stay_merged(body: Any, shapes: Any, specs: Any) -> None:
    """As rings they took 2.1 and 1.6 times as long as written (v5p, compiled)."""
    function = mapped(body, *specs, out=OUT if body is of_heads else PartitionSpec())
    assert told(explained(function, *shapes)) == [("all_gather", "no_dot")]
    assert told(explained(function, *shapes, policy="always")) == [("all_gather_dot", "policy_always")]


def test_sizes_that_are_not_known_yet_are_told_as_such() -> None:
    shape = jax.export.symbolic_shape("b, 4*s, 6")
    function = mapped(left_flat, TOKENS, PartitionSpec(), out=PartitionSpec())
    assert told(explained(function, shape, (6, 8), policy="always")) == [("all_gather", "symbolic_shape")]


def test_a_call_that_is_made_twice_has_two_collectives() -> None:
    flattened = jax.jit(lambda x: flat(gather(x, 1)))

    def body(x: Any, y: Any, w: Any) -> Any:
        return flattened(x) @ w, jnp.cumsum(flattened(y), axis=0)

    function = mapped(body, TOKENS, TOKENS, PartitionSpec(), out=PartitionSpec())
    report = explained(function, (3, 8, 6), (3, 8, 6), W, policy="always")
    assert told(report) == [("all_gather_dot", "policy_always"), ("all_gather", "no_dot")]


def test_a_reshape_stands_at_the_line_of_the_users_own() -> None:
    def body(x: Any, y: Any, w: Any) -> Any:
        first = gather(x, 1).reshape(-1, x.shape[-1]) @ w
        second = gather(y, 1).reshape(-1, y.shape[-1])
        return first, jnp.cumsum(jnp.tanh(second), axis=0)

    function = mapped(body, TOKENS, TOKENS, PartitionSpec(), out=PartitionSpec())
    (_, stopped) = explained(function, (3, 8, 6), (3, 8, 6), W, policy="always").sites
    line = body.__code__.co_firstlineno + 2
    assert f"It stops at reshape, {__file__}:{line}" in stopped.sentence


def test_a_reshape_that_names_a_sharding_of_nothing() -> None:
    """Its rank is another one where dims are apart."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Explicit))

    def body(h: Any, w: Any) -> Any:
        y = lax.reshape(flat(h) @ w, (3, 8, 8), out_sharding=PartitionSpec(None, None, None))
        return scatter(y, 1), jnp.cumsum(flat(h) @ w, 0)

    with jax.set_mesh(mesh):
        function = jax.jit(
            jax.shard_map(
                body,
                mesh=mesh,
                in_specs=(PartitionSpec(), PartitionSpec()),
                out_specs=(PartitionSpec(None, "x"), PartitionSpec()),
                axis_names={"x"},
                check_vma=False,
            )
        )
        h, w = shards(3, 8, 6)[0], shards(6, 8)[0]
        ring = overlap_collectives(function, policy="always", strict=True, hardware="tpu_v5p")
        scattered_sum, running = ring(h, w)
    product = np.float64(h).reshape(24, 6) @ np.float64(w)
    np.testing.assert_allclose(scattered_sum, 4 * product.reshape(3, 8, 8), atol=1e-4)
    np.testing.assert_allclose(running, product.cumsum(0), atol=1e-4)
