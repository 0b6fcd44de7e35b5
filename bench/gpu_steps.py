"""What programs for eight GPUs compute, measured on one: their collectives are started, and move nothing.

    python -m bench.gpu_steps       writes bench/results/gpu_steps.json and .md, in a minute or two

jax's mock topology makes one GPU the first of eight. The programs are those of `bench.gpu_schedules`,
compiled with the GPU's own autotuning, and run. What they compute is wrong, and how long it takes is real: a
ring's partial matmuls, its copies and its additions, beside the one matmul of the original. The same compiled
programs are timed by the cost model (`overlap.hlo.simulate`), without their collectives. One GPU is needed.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    # The other seven would have to take part in it.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false"

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from bench.schedules import grid, programs
from bench.schedules.order import order
from bench.schedules.run import RESULTS, versions, write
from bench.schedules.tables import table
from cost_model import Topology, by_name
from overlap import overlap_collectives
from overlap.compiled_memory import temporary_bytes
from overlap.hlo.parse import parse
from overlap.hlo.simulate import simulate

NAME: Final = "gpu_steps"
ROUNDS: Final = 7
TARGET_S: Final = 0.03
VERSIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "original": lambda function: function,
    "ring": lambda function: overlap_collectives(function, policy="always", strict=True),
}


def mesh_of_one() -> Mesh:
    """Eight devices, of which the first is the attached GPU and the others do not exist."""
    jax.config.update("jax_mock_gpu_topology", "1x8x1")
    return Mesh(np.array(jax.devices()), (programs.AXIS,), axis_types=(AxisType.Auto,))


def arguments(problem: programs.Problem, mesh: Mesh) -> list[jax.Array]:
    """Arrays of a program, of random values, of which this device's shards exist."""
    some = np.random.default_rng(0).standard_normal(1 << 20, np.float32) / 64
    found: list[jax.Array] = []
    for shape, spec in zip(problem.shapes, problem.in_specs, strict=True):
        sharding = NamedSharding(mesh, spec)
        own = np.resize(some.astype(problem.dtype), sharding.shard_shape(shape))
        shard = jax.device_put(own, jax.local_devices()[0])
        found.append(jax.make_array_from_single_device_arrays(shape, sharding, [shard]))
    return found


def step_s(calls: Mapping[str, Callable[[], Any]]) -> dict[str, tuple[float, float]]:
    """Seconds of a call of each, in turn, and their spread; several calls are queued at once."""
    repeats = {}
    for name, call in calls.items():
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        repeats[name] = max(2, min(200, math.ceil(TARGET_S / (time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            jax.block_until_ready(call())
            start = time.perf_counter()
            for _ in range(repeats[name]):
                last = call()
            jax.block_until_ready(last)
            times[name].append((time.perf_counter() - start) / repeats[name])
    return {name: (statistics.median(of), max(of) / min(of) - 1) for name, of in times.items()}


def row(name: str, problem: programs.Problem, mesh: Mesh) -> dict[str, Any]:
    """Both versions of a program: measured, and as modelled."""
    topology = Topology.from_devices(mesh.devices, by_name("h100"))
    original = programs.manual(problem, mesh)
    values = arguments(problem, mesh)
    calls: dict[str, Callable[[], Any]] = {}
    found: dict[str, Any] = {}
    for version, make in VERSIONS.items():
        compiled = make(original).trace(*values).lower().compile()
        module = parse(compiled.as_text())
        schedule = order(module, topology.hardware)
        found[version] = {
            "modelled_s": simulate(module, topology=topology).compute_s,
            "order": schedule.text.replace(" ", ""),
            "permutes": schedule.permutes,
            "idle": len(schedule.idle),
            "temp_bytes": temporary_bytes(compiled),
        }
        calls[version] = functools.partial(compiled, *values)
    for version, (seconds, spread) in step_s(calls).items():
        found[version] |= {"measured_s": seconds, "spread": spread}
    return {"name": name, "versions": found}


def page(content: Mapping[str, Any]) -> str:
    """The results, for people."""
    lines = []
    for each in content["rows"]:
        one, ring = each["versions"]["original"], each["versions"]["ring"]
        measured, modelled = (ring[kind] / one[kind] for kind in ("measured_s", "modelled_s"))
        lines.append(
            (
                each["name"],
                _times(one),
                _times(ring),
                f"{measured:.2f} / {modelled:.2f}",
                f"`{ring['order']}`",
                f"{ring['idle']} of {ring['permutes']}",
                f"{ring['temp_bytes'] / 1e6:.1f} / {one['temp_bytes'] / 1e6:.1f}",
            )
        )
    said = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    headings = (
        "row",
        "original, µs",
        "ring, µs",
        "ring / original",
        "order",
        "permutes without a matmul",
        "temporary MB, ring / original",
    )
    parts = [
        "# What programs for eight GPUs compute",
        f"Measured / modelled, on one {content['device_kind']}: the programs of `gpu_schedules`, all their "
        "collectives rewritten where that is legal, as the first of eight devices. Collectives are started "
        "and move nothing, so these are the times of computing alone; what hides is not seen here. Times and "
        "memory are those of programs with the GPU's own autotuning.",
        f"Made with {said}.",
        table(headings, lines),
    ]
    return "\n\n".join(parts) + "\n"


def _times(of: Mapping[str, Any]) -> str:
    measured_s, modelled_s = of["measured_s"], of["modelled_s"]
    return f"{measured_s * 1e6:.0f} / {modelled_s * 1e6:.0f} ({modelled_s / measured_s - 1:+.0%})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; the exit status is 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where results go")
    options = parser.parse_args(argv)
    mesh = mesh_of_one()
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        print(f"bench.gpu_steps: needs a GPU, and jax has found {device.device_kind}", file=sys.stderr)
        return 2
    rows = []
    for case in grid.gpu_cases():
        rows.append(row(case.name, programs.problem(case), mesh))
        print(rows[-1], flush=True)
    content = {
        "schema": 1,
        "kind": "measured",
        "device_kind": device.device_kind,
        "versions": versions(),
        "rows": rows,
    }
    write(options.out, NAME, page(content), content)
    print(page(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
