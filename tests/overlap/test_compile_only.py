"""Compile-only TPU devices: decided by the kind of the mesh's devices, compiled by the real TPU compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overlap import tpu_target
from tests.libtpu import needs_libtpu

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
