"""Compiling for GPUs in a process of its own, which sees CPUs only; skipped where the compiler is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from bench.schedules.measure import H100_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]

needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="jax's CUDA plugin is missing (python .ci/pairs.py gpu makes an environment with it)",
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


def told_by(script: str) -> Any:
    """What a script prints as its last line, which is JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **H100_ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
