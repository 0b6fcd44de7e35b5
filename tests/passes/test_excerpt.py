"""A chain cut out of its program gives what the program gave, as written and as a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import passes
from cost_model import by_name
from passes.candidates import EXCHANGE
from passes.chains import AllGatherDot
from passes.excerpt import Excerpt, excerpt
from passes.graph import dataflow
from passes.match import match
from passes.network import Network
from passes.schedule import RingSchedule
from tests.passes import bodies, spmd
from tests.passes.hop_count import hops

P = PartitionSpec
VMA = pytest.mark.parametrize("check_vma", [True, False])


def gathered(x: Any, dim: int = 0) -> Any:
    return lax.all_gather(x, "x", axis=dim, tiled=True)


def shared(x: Any, w: Any, v: Any) -> Any:
    """A gathered array with a nonlinear operation, two dots, and another use."""
    g = jnp.tanh(gathered(x))
    return g @ w, v @ g.T, g[::-1]


def normed(x: Any, w: Any) -> Any:
    """The sum over the gathered dim is made of the shards' sums."""
    g = gathered(x)
    return (g * lax.rsqrt((g * g).sum(0) + 1)) @ w


PATTERNS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "gather free": (lambda x, w: gathered(x) @ w, ((6, 5), (5, 3))),
    "gather contracting": (lambda x, w: gathered(x, 1) @ w, ((5, 6), (24, 3))),
    "gather handed out": (shared, ((6, 5), (5, 3), (2, 5))),
    "gather reduced": (normed, ((6, 5), (5, 3))),
    "scatter": (lambda x, w: lax.psum_scatter(-(x @ w), "x", tiled=True), ((24, 5), (5, 3))),
    "psum": (lambda x, w: lax.psum(x @ w, "x"), ((24, 5), (5, 3))),
    "psum then dot": (lambda x, w, v: (2 * lax.psum(x @ w, "x")) @ v, ((24, 5), (5, 3), (3, 4))),
    "gather exchanged": (
        lambda x, w: lax.all_to_all(x, "x", 0, 1, tiled=True) @ w,
        ((8, 5), (20, 3)),
    ),
    "scatter exchanged": (lambda x, w: lax.all_to_all(x @ w, "x", 1, 0, tiled=True), ((6, 5), (5, 8))),
}


def excerpt_of(body: Any, *shapes: tuple[int, ...], check_vma: bool) -> tuple[Excerpt[RingSchedule], Any]:
    """The excerpt of the first chain of a per-device function over four devices."""
    shards = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = bodies.shard_body(body, *shards, axis_size=4, check_vma=check_vma)
    flow, found = dataflow(jaxpr), match(jaxpr)[0].found
    assert isinstance(found, tuple), found
    network = Network(by_name("tpu_v5p"), spmd.mesh_of(4), frozenset({"x"}), check_vma)
    program = excerpt(flow, found[0], network)
    assert program is not None
    return program, found[0]


def random_arguments(program: Excerpt[RingSchedule]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=argument.shape).astype(argument.dtype) for argument in program.arguments]


@VMA
@pytest.mark.parametrize("name", PATTERNS)
def test_an_excerpt_as_written_and_as_rings_gives_the_same(name: str, check_vma: bool) -> None:
    body, shapes = PATTERNS[name]
    program, chain = excerpt_of(body, *shapes, check_vma=check_vma)
    given = random_arguments(program)
    original = program.original(*given)
    assert all(np.abs(result).max() > 0 for result in original)
    if chain.collective.kind == "all_to_all":
        schedules = [EXCHANGE]
    else:
        reordered = RingSchedule(directions=1, orders=((0, 2, 1, 3),))
        schedules = [RingSchedule(directions=2), reordered]
    for schedule in schedules:
        ring = program.version(schedule)
        assert hops(jax.make_jaxpr(ring)(*given)) >= 3
        assert hops(jax.make_jaxpr(program.original)(*given)) == 0
        results = ring(*given)
        assert len(results) == len(original)
        for result, expected in zip(results, original, strict=True):
            assert result.shape == expected.shape and result.dtype == expected.dtype
            np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())


@VMA
def test_an_excerpt_is_the_program_s_chain(check_vma: bool) -> None:
    """Against NumPy: arguments have the devices in front, as many as have values of their own."""
    body, shapes = PATTERNS["gather free"]
    program, _ = excerpt_of(body, *shapes, check_vma=check_vma)
    assert [argument.shape for argument in program.arguments] == [(4, 6, 5), (4, 5, 3)]
    x, w = random_arguments(program)
    (result,) = program.original(x, w)
    np.testing.assert_allclose(result, [np.concatenate(list(x)) @ each for each in w], atol=1e-4)
    text = program.original.lower(*program.arguments).as_text()  # type: ignore[attr-defined]
    assert text.count("all_gather") >= 1 and text.count("dot_general") >= 1


def test_what_is_handed_out_is_a_result() -> None:
    body, shapes = PATTERNS["gather handed out"]
    program, chain = excerpt_of(body, *shapes, check_vma=True)
    assert isinstance(chain, AllGatherDot) and chain.handed_out
    shapes_out = [result.shape for result in program.original(*random_arguments(program))]
    assert sorted(shapes_out) == sorted([(4, 24, 3), (4, 2, 24), (4, 24, 5)])


@VMA
def test_only_what_differs_between_devices_has_an_argument_for_each(check_vma: bool) -> None:
    """On a mesh of two axes of which only one is used. Where types say nothing, any value may differ."""
    mesh = jax.make_mesh((2, 4), ("y", "x"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        lambda x, w: gathered(x) @ w,
        mesh=mesh,
        in_specs=(P("x"), P("x")),
        out_specs=P("x"),
        check_vma=check_vma,
    )
    whole = (jnp.ones((24, 5), jnp.float32), jnp.ones((20, 3), jnp.float32))
    jaxpr = bodies.mapped_body(jax.make_jaxpr(mapped)(*whole))
    flow, found = dataflow(jaxpr), match(jaxpr)[0].found
    assert isinstance(found, tuple)
    network = Network(by_name("tpu_v5p"), mesh, frozenset({"x", "y"}), check_vma)
    program = excerpt(flow, found[0], network)
    assert program is not None
    copies = 4 if check_vma else 8
    assert [argument.shape for argument in program.arguments] == [(copies, 6, 5), (copies, 5, 3)]
    given = random_arguments(program)
    (expected,), (result,) = program.original(*given), program.version(RingSchedule(directions=1))(*given)
    np.testing.assert_allclose(result, expected, atol=1e-4)


@VMA
@pytest.mark.parametrize("in_context", [True, False])
def test_a_shard_map_within_another_gives_excerpts_over_the_axes_of_both(
    check_vma: bool, in_context: bool
) -> None:
    mesh = jax.make_mesh((2, 4), ("y", "x"), axis_types=(AxisType.Auto,) * 2)

    def inner(x: Any, w: Any) -> Any:
        return gathered(x) @ w

    def outer(x: Any, w: Any) -> Any:
        within = jax.shard_map(
            inner,
            mesh=None if in_context else jax.typeof(x).sharding.mesh,
            in_specs=(P("x"), P()),
            out_specs=P("x"),
            axis_names={"x"},
            check_vma=check_vma,
        )
        return within(x, w)

    program = jax.shard_map(
        outer,
        mesh=mesh,
        in_specs=(P("y"), P("y")),
        out_specs=P("y"),
        axis_names={"y"},
        check_vma=check_vma,
    )
    tried: list[tuple[Excerpt[RingSchedule], tuple[RingSchedule, ...]]] = []

    def try_out(chain: Excerpt[RingSchedule], schedules: tuple[RingSchedule, ...]) -> None:
        tried.append((chain, schedules))

    jaxpr = jax.make_jaxpr(jax.jit(program))(
        jax.ShapeDtypeStruct((48, 5), jnp.float32), jax.ShapeDtypeStruct((10, 3), jnp.float32)
    )
    passes.make_plan(jaxpr, "verify", lambda kind: by_name("tpu_v5p"), try_out=try_out)
    ((chain, schedules),) = tried
    assert [argument.shape for argument in chain.arguments] == [(8, 6, 5), (8, 5, 3)]
    given = random_arguments(chain)
    (expected,), (result,) = chain.original(*given), chain.version(schedules[0])(*given)
    x, w = given
    exact = [np.concatenate(list(x[i // 4 * 4 :][:4])) @ w[i] for i in range(8)]
    for each in (expected, result):
        np.testing.assert_allclose(each, exact, atol=1e-4)


def test_without_a_mesh_there_is_no_excerpt() -> None:
    flow, (found,) = bodies.matched(
        lambda x, w: gathered(x) @ w, np.ones((6, 5), np.float32), np.ones((5, 3), np.float32)
    )
    assert isinstance(found.found, tuple)
    assert excerpt(flow, found.found[0], Network(by_name("tpu_v5p"))) is None
