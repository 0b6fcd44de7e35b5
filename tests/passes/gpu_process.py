"""Compiling for GPUs in a process of its own, which sees CPUs only; skipped where the compiler is missing."""

from __future__ import annotations

from typing import Any, Final

import pytest

from bench import gpu_schedules
from bench.schedules.measure import H100_ENVIRONMENT
from tests.passes import script

needs_gpu_compiler = pytest.mark.skipif(
    gpu_schedules.missing() is not None, reason=str(gpu_schedules.missing())
)

COMPILED: Final = """
import json
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from bench.schedules.measure import h100_mesh
from overlap import overlap_collectives

mesh = h100_mesh()

def compiled(body, shapes, ins, dtype=jnp.bfloat16):
    "The text of a rewritten per-device function, compiled for eight H100s."
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=P("x"), check_vma=False))
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, ins)
    ]
    traced = overlap_collectives(mapped, policy="always", strict=True).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).compile().as_text()
"""
"""The beginning of a script for `told_by`."""


def told_by(text: str) -> Any:
    """What a script that compiles for GPUs prints as its last line, which is JSON."""
    return script.told_by(text, environment=H100_ENVIRONMENT)
