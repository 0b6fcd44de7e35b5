"""Hops that are started explicitly for GPUs: which are, and that the compiler takes them."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import pytest
from jax import lax

from overlap import overlap_collectives
from passes import shims
from tests.passes import spmd
from tests.passes.gpu_process import COMPILED, needs_gpu_compiler, told_by

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


EQUAL = """
def exchange(x, w):
    return lax.all_to_all(x * 2, "x", 1, 0, tiled=True) @ w

def twice(x, w):
    return exchange(x, w), exchange(x, w)

def starts(body, shapes, **options):
    return compiled(body, shapes, (P("x"), P()), **options).count("collective-permute-start(")

shapes = (512, 64), (8, 64)
print(json.dumps(starts(twice, shapes)))
"""


@explicit_only
@needs_gpu_compiler
def test_the_compiler_takes_rings_of_equal_values() -> None:
    assert told_by(COMPILED + EQUAL) == 2 * 7
