"""Hops that are started explicitly for GPUs: which are, and that the compiler takes them."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import pytest
from jax import lax

from overlap import overlap_collectives
from passes import shims
from tests.passes import bodies, spmd
from tests.passes.gpu_process import COMPILED, needs_gpu_compiler, told_by
from tests.passes.hop_count import hops

DEVICES = 4
explicit_only = pytest.mark.skipif(
    not shims.EXPLICIT_STARTS, reason="the compiler of this jax places the starts itself"
)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "device_kind", lambda _: "NVIDIA H100 80GB HBM3")


def rewritten(body: Any, *shards: jax.ShapeDtypeStruct) -> Any:
    """A per-device function of shards of these types, jitted and rewritten, and its arguments."""
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(body, mesh=spmd.mesh_of(DEVICES), in_specs=spec, out_specs=spec, check_vma=False)
    arguments = [jax.ShapeDtypeStruct((DEVICES * s.shape[0], *s.shape[1:]), s.dtype) for s in shards]
    return overlap_collectives(jax.jit(mapped), policy="always", strict=True, hardware="h100"), arguments


def exchange(x: Any, w: Any) -> Any:
    return lax.all_to_all(x, "x", 1, 0, tiled=True) @ w


def twice(x: Any, w: Any) -> tuple[Any, Any]:
    """Rings of values that are equal to XLA alone."""
    return exchange(x * 2, w), exchange(2 * x, w)


@explicit_only
@pytest.mark.usefixtures("on_gpu")
def test_each_start_has_a_channel_of_its_own() -> None:
    """XLA:GPU reads all else that tells two starts of equal values apart before it looks for equal ones."""
    shards = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    function, arguments = rewritten(twice, *shards)
    text = function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    told = [
        json.loads(config.replace(r"\22", '"'))
        for config in re.findall(r'collective_config = "(.*?)"}', text)
    ]
    assert len(told) == 2 * (DEVICES - 1)
    assert {tuple(sorted(each)) for each in told} == {("channel_id", "permutation")}
    assert len({each["channel_id"] for each in told}) == len(told)
    assert len({str(each["permutation"]) for each in told}) == DEVICES - 1


def gather(x: Any, w: Any) -> Any:
    return lax.all_gather(x, "x", tiled=True) @ w


def gather_cast(x: Any, w: Any) -> Any:
    return lax.all_gather(x, "x", tiled=True).astype(jnp.int4) @ w.astype(jnp.int4)


def scatter(x: Any, w: Any) -> Any:
    return lax.psum_scatter(x @ w, "x", tiled=True)


@explicit_only
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("body", "dtype", "explicit"),
    [
        (gather, "int4", False),
        (scatter, "uint4", False),
        (exchange, "int4", False),
        (gather_cast, "float32", False),
        (gather, "int8", True),
        (scatter, "int8", True),
        (gather, "float8_e5m2", True),
    ],
)
def test_what_is_narrower_than_a_byte_is_not_started_explicitly(
    body: Any, dtype: str, explicit: bool
) -> None:
    """XLA:GPU puts two into a byte on their way, but not where a hop is started of them."""
    shards = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 64), (16 if body is exchange else 64, 8))]
    function, arguments = rewritten(body, *shards)
    jaxpr = bodies.mapped_body(jax.make_jaxpr(function)(*arguments))
    started, plain = hops(jaxpr, "ppermute_start"), hops(jaxpr, "ppermute")
    assert (started > 0, plain > 0) == (explicit, not explicit)


@explicit_only
@pytest.mark.usefixtures("on_gpu")
def test_blocks_are_fetched_in_turn() -> None:
    """Blocks of a function that is called twice would all start as one, and not arrive as one."""
    shards = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    function, arguments = rewritten(exchange, *shards)
    jaxpr = bodies.mapped_body(jax.make_jaxpr(function)(*arguments))
    starts = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "ppermute_start"]
    dones = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "ppermute_done"]
    waits = waiting(jaxpr)
    assert len(starts) == DEVICES - 1
    for done, start in zip(dones[:-1], starts[1:], strict=True):
        assert nx.has_path(waits, jaxpr.eqns.index(done), jaxpr.eqns.index(start))


def columns(x: Any, w: Any) -> Any:
    return lax.psum_scatter(x @ w, "x", scatter_dimension=1, tiled=True)


def scatters(x: Any, w: Any) -> Any:
    return columns(jnp.tile(columns(x, w), (1, DEVICES))[:, :64], w) + columns(x, w * 3)


def scatter_and_dot(x: Any, w: Any) -> Any:
    return columns(x, w) + (x @ jnp.tanh(w))[:, :16]


def gathers(x: Any, w: Any) -> Any:
    return gather(x, w) * gather(x + w, w * 1)


def gathers_contracted(x: Any, w: Any) -> Any:
    wide = jnp.tile(w, (DEVICES, 1))
    one, other = (lax.all_gather(each, "x", axis=1, tiled=True) for each in (x, x + w))
    return (one @ wide) * (other @ wide)


def gather_and_call(x: Any, w: Any) -> Any:
    return gather(x, w), jax.checkpoint(lambda x, w: jnp.sin(x @ w))(x, w)


@explicit_only
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "body",
    [scatters, scatter_and_dot, gathers, gathers_contracted, gather_and_call],
    ids=lambda body: body.__name__,
)
def test_a_dot_beside_a_hop_shares_no_operand(body: Any) -> None:
    """XLA:GPU makes one of dots of two rings that share one, and finds no order for their hops then."""
    function, arguments = rewritten(body, *[jax.ShapeDtypeStruct((64, 64), "float32")] * 2)
    jaxpr = bodies.mapped_body(jax.make_jaxpr(function)(*arguments))
    maker = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    waits = waiting(jaxpr)
    readers = [
        n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name in ("dot_general", "checkpoint", "remat2")
    ]
    beside = [number for number in readers if beside_a_hop(jaxpr.eqns[number], maker)]
    assert len(beside) >= DEVICES - 1
    for one, other in itertools.product(beside, readers):
        if one != other and not nx.has_path(waits, one, other) and not nx.has_path(waits, other, one):
            read, also_read = (sources(jaxpr.eqns[number], maker) for number in (one, other))
            assert not read & also_read


def waiting(jaxpr: Any) -> Any:
    """Which equations, by number, wait for which."""
    waits: Any = nx.DiGraph()
    for number, eqn in enumerate(jaxpr.eqns):
        waits.add_edges_from((value, number) for value in eqn.invars if not hasattr(value, "val"))
        waits.add_edges_from((number, value) for value in eqn.outvars)
    return waits


def sources(eqn: Any, maker: dict[Any, Any]) -> set[Any]:
    """What a dot's operands are, or are cut out of, or a multiple of."""
    found = set()
    for operand in eqn.invars:
        while operand in maker and maker[operand].primitive.name in ("dynamic_slice", "mul"):
            operand = maker[operand].invars[0]
        found.add(operand)
    return found


def beside_a_hop(eqn: Any, maker: dict[Any, Any]) -> bool:
    """Whether an operand of a dot, or what it is cut out of, waits for the start of a hop."""
    ties = [maker[source] for source in sources(eqn, maker) if source in maker]
    tied = [value for tie in ties if tie.primitive.name == "optimization_barrier" for value in tie.invars]
    return any("Future" in type(value.aval).__name__ for value in tied)


@explicit_only
@pytest.mark.usefixtures("on_gpu")
def test_what_is_started_under_vmap_is_laid_out_by_rows() -> None:
    shards = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
    function, (x, w) = rewritten(columns, *shards)
    weights = jax.ShapeDtypeStruct((2, *w.shape), w.dtype)
    lowered = jax.jit(jax.vmap(function, (None, 0))).trace(x, weights).lower(lowering_platforms=("cuda",))
    constrained = r"(%\w+) = stablehlo.custom_call @LayoutConstraint.* result_layouts = \[dense<(.*?)> .*\n"
    started = r'.*@"collective-permute-start"\(\1\)'
    layouts = [layout for _, layout in re.findall(constrained + started, lowered.as_text())]
    assert layouts == ["[2, 1, 0]"] * (DEVICES - 1)


EQUAL = """
def exchange(x, w):
    return lax.all_to_all(x, "x", 1, 0, tiled=True) @ w

def twice(x, w):
    return exchange(x * 2, w), exchange(2 * x, w)

def starts(body, shapes, **options):
    return compiled(body, shapes, (P("x"), P()), **options).count("collective-permute-start(")

def columns(x, w):
    return lax.psum_scatter(x @ jnp.tile(w, (1, 8)), "x", scatter_dimension=1, tiled=True)

def rings(x, w):
    return columns(columns(x, w), w) - columns(x, w * 3)  # of a sum the two scatters would be one

shapes, square = ((512, 64), (8, 64)), ((512, 64), (64, 64))
print(json.dumps([
    starts(twice, shapes), starts(exchange, shapes, dtype=jnp.int4), starts(rings, square)
]))
"""


@explicit_only
@needs_gpu_compiler
def test_the_compiler_takes_rings_of_equal_values_of_narrow_ones_and_of_shared_operands() -> None:
    assert told_by(COMPILED + EQUAL) == [2 * 7, 7, 3 * 7]


AROUND = """
def scatter(x, w):
    return lax.psum_scatter(x @ jnp.tile(w, (1, 8)), "x", scatter_dimension=1, tiled=True)

def exchange(x, w):
    return lax.all_to_all(x, "x", 1, 0, tiled=True) @ w[:8]

def step(body):
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    return overlap_collectives(jax.jit(mapped), policy="always", strict=True)

def starts(function, *shapes):
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P())) for shape in shapes
    ]
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile().as_text()
    return text.count("collective-permute-start(")

exchanged = step(exchange)
print(json.dumps([
    starts(jax.vmap(step(scatter), (None, 0)), (512, 64), (2, 64, 64)),
    starts(lambda x, w: exchanged(x, w) + exchanged(x, w), (512, 64), (64, 64)),
]))
"""


@explicit_only
@needs_gpu_compiler
def test_the_compiler_takes_rings_under_vmap_and_those_of_a_function_that_is_called_twice() -> None:
    assert told_by(COMPILED + AROUND) == [7, 1 + 2 * 6]
