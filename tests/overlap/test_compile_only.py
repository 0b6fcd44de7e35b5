"""Compile-only TPU devices: decided by the kind of the mesh's devices, compiled by the real TPU compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overlap import tpu_target
from tests.libtpu import needs_libtpu
from tests.passes.tpu_process import told_by

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys
import jax, jax.extend.backend, jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from overlap import overlap_collectives
from tests.overlap.mlp import SPECS, mlp

topology, name, compiled = sys.argv[1], sys.argv[2], sys.argv[3] == "compile"
description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
mesh = jax.sharding.Mesh(np.array(description.devices), ("x",))
shapes = ((8192, 8192), (8192, 32768), (32768, 8192))
args = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    for shape, spec in zip(shapes, SPECS)
]
jitted = jax.jit(mlp(mesh))
guessed = overlap_collectives(jitted, strict=True)
named = overlap_collectives(jitted, hardware=name, strict=True)
told = {
    "kind": mesh.devices.flat[0].device_kind,
    "same": guessed.explain(*args) == named.explain(*args),
    "sites": [[s.kind, s.axis_size, s.rewritten, s.reason] for s in guessed.explain(*args).sites],
    "backends": list(jax.extend.backend.backends()),
}
if compiled:
    always = overlap_collectives(jitted, policy="always", strict=True)
    text = always.lower(*args).compile().as_text()
    told["permutes"] = text.count("collective-permute-start(")
    told["scheduled"] = "is_scheduled=true" in text
print(json.dumps(told))
"""


def ask(topology: str, name: str, how: str) -> Any:
    """What the script tells, run in a process of its own that only sees CPUs."""
    environment = {
        **os.environ,
        **tpu_target.ENVIRONMENT,
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", SCRIPT, topology, name, how]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_libtpu
@pytest.mark.parametrize(
    "topology, kind, name",
    [
        ("v4:2x2x2", "TPU v4", "tpu_v4"),
        ("v5e:4x4", "TPU v5 lite", "tpu_v5e"),
        ("v6e:4x4", "TPU v6 lite", "tpu_v6e"),
        ("tpu7x:2x2x1", "TPU7x", "tpu_7x"),
    ],
)
def test_hardware_comes_from_the_kind_of_compile_only_devices(topology: str, kind: str, name: str) -> None:
    told = ask(topology, name, "explain")
    assert told["kind"] == kind
    assert told["same"]
    assert told["backends"] == ["cpu"], "no TPU backend may be started"
    assert [site[0] for site in told["sites"]] == ["all_gather_dot", "dot_reduce_scatter"]
    assert not any(site[3] == "unknown_hardware" for site in told["sites"])


@needs_libtpu
def test_compiling_for_a_pod_that_is_not_there() -> None:
    told = ask("v5p:2x2x1", "tpu_v5p", "compile")
    assert told["kind"] == "TPU v5"
    assert told["same"]
    assert told["sites"][0] == ["all_gather_dot", 4, True, "profitable"]
    assert told["scheduled"]
    assert told["permutes"] >= 2 * 3, "two rings of three hops at least"


GRADIENTS = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding
from overlap import overlap_collectives, tpu_target
from tests.overlap.mlp import SPECS, mlp

mesh = jax.sharding.Mesh(np.array(tpu_target.devices("v5p:2x2x1")), ("x",))
shapes = ((8192, 8192), (8192, 32768), (32768, 8192))
args = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    for shape, spec in zip(shapes, SPECS)
]
body = jax.jit(mlp(mesh))
def gradient(function):
    return jax.grad(lambda *args: jnp.sum(function(*args) ** 2), (0, 1, 2))
within = overlap_collectives(jax.jit(gradient(body)), strict=True)
around = jax.jit(gradient(overlap_collectives(body, strict=True)))
texts = [function.lower(*args).as_text() for function in (within, around)]
ways = ('@"collective-permute-start"', "stablehlo.collective_permute")
print(json.dumps([[text.count(way) for way in ways] for text in texts]))
"""


@needs_libtpu
def test_the_gradient_of_a_decorated_function_has_the_hops_of_a_decorated_gradient() -> None:
    """They were once left to the compiler, and the gradient took a fifth longer than as written (v5p)."""
    within, around = told_by(GRADIENTS)
    assert sum(within) >= 4 * 3, "four rings of three hops at least"
    assert around == within
