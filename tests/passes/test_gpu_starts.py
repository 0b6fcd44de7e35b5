"""Hops that are started explicitly for GPUs: which are, and that the compiler takes them."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
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
    return lax.all_to_all(x * 2, "x", 1, 0, tiled=True) @ w


def twice(x: Any, w: Any) -> tuple[Any, Any]:
    return exchange(x, w), exchange(x, w)


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


EQUAL = """
def exchange(x, w):
    return lax.all_to_all(x * 2, "x", 1, 0, tiled=True) @ w

def twice(x, w):
    return exchange(x, w), exchange(x, w)

def starts(body, shapes, **options):
    return compiled(body, shapes, (P("x"), P()), **options).count("collective-permute-start(")

shapes = (512, 64), (8, 64)
print(json.dumps([starts(twice, shapes), starts(exchange, shapes, dtype=jnp.int4)]))
"""


@explicit_only
@needs_gpu_compiler
def test_the_compiler_takes_rings_of_equal_values_and_of_narrow_ones() -> None:
    assert told_by(COMPILED + EQUAL) == [2 * 7, 7]
