"""What programs for eight GPUs compute, measured on one: their collectives are started, and move nothing.

    python -m bench.gpu_steps               writes bench/results/gpu_steps.*, in a minute or two
    python -m bench.gpu_steps --stored      prices what was measured again

jax's mock topology makes one GPU the first of eight. The programs are those of `bench.gpu_schedules`,
compiled with the GPU's own autotuning, and run. What they compute is wrong, and how long it takes is real: a
ring's partial matmuls, its copies and its additions, beside the one matmul of the original. The same compiled
programs are timed by the cost model (`overlap.hlo.simulate`), without their collectives. One GPU is needed.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import functools
import gzip
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from bench.versions import spelled
from cost_model import Topology, by_name
from overlap import overlap_collectives
from overlap.compiled_memory import temporary_bytes
from overlap.hlo.parse import parse
from overlap.hlo.simulate import simulate

NAME: Final = "gpu_steps"
PROGRAMS: Final = f"{NAME}_programs.json.gz"
"""The compiled programs' text, by row and version."""

DEVICES: Final = 8
ROUNDS: Final = 7
TARGET_S: Final = 0.03
VERSIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "original": lambda function: function,
    "ring": lambda function: overlap_collectives(function, policy="always", strict=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A program's versions, as they ran.

    Attributes:
      name: of the case.
      versions: per version its seconds, their spread (the longest over the shortest, less 1), and the bytes
        of temporary memory.
      programs: per version its compiled text.
    """

    name: str
    versions: Mapping[str, Mapping[str, Any]]
    programs: Mapping[str, str]


def mesh_of_one() -> Mesh:
    """Eight devices, of which the first is the attached GPU and the others do not exist."""
    jax.config.update("jax_mock_gpu_topology", f"1x{DEVICES}x1")
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


def row(name: str, problem: programs.Problem, mesh: Mesh) -> Measured:
    """Both versions of a program, compiled and measured."""
    original = programs.manual(problem, mesh)
    values = arguments(problem, mesh)
    compiled = {
        version: make(original).trace(*values).lower().compile() for version, make in VERSIONS.items()
    }
    times = step_s({version: functools.partial(each, *values) for version, each in compiled.items()})
    return Measured(
        name=name,
        versions={
            version: {
                "measured_s": times[version][0],
                "spread": times[version][1],
                "temp_bytes": temporary_bytes(each),
            }
            for version, each in compiled.items()
        },
        programs={version: each.as_text() for version, each in compiled.items()},
    )


def priced(measured: Measured) -> dict[str, Any]:
    """What was measured, beside what the cost model says of the same programs."""
    topology = Topology.axis(DEVICES, by_name("h100"))
    found = {}
    for version, figures in measured.versions.items():
        module = parse(measured.programs[version])
        schedule = order(module, topology.hardware)
        found[version] = {
            **figures,
            "modelled_s": simulate(module, topology=topology).compute_s,
            "order": schedule.text.replace(" ", ""),
            "permutes": schedule.permutes,
            "idle": len(schedule.idle),
        }
    return {"name": measured.name, "versions": found}


def stored() -> tuple[list[Measured], Mapping[str, Any]]:
    """The measurements and programs in the repository's results, and what they were made with."""
    content = json.loads((RESULTS / f"{NAME}.json").read_text("utf-8"))
    with gzip.open(RESULTS / PROGRAMS, "rt", encoding="utf-8") as file:
        texts = json.load(file)
    kept = ("measured_s", "spread", "temp_bytes")
    rows = [
        Measured(
            name=each["name"],
            versions={v: {k: of[k] for k in kept} for v, of in each["versions"].items()},
            programs=texts[each["name"]],
        )
        for each in content["rows"]
    ]
    return rows, {key: content[key] for key in ("device_kind", "versions")}


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
    said = spelled(content["versions"])
    headings = (
        "row",
        "original, µs",
        "ring, µs",
        "ring / original",
        "order",
        "permutes without a matmul",
        "temporary MB, ring / original",
    )
    off = {
        version: [abs(_off(each["versions"][version])) for each in content["rows"]] for version in VERSIONS
    }
    summary = " and ".join(
        f"{statistics.median(errors):.1%} in the median (at most {max(errors):.0%}) for the {version}s"
        for version, errors in off.items()
    )
    parts = [
        "# What programs for eight GPUs compute",
        f"Measured / modelled, on one {content['device_kind']}: the programs of `gpu_schedules`, all their "
        "collectives rewritten where that is legal, as the first of eight devices. Collectives are started "
        "and move nothing, so these are the times of computing alone; what hides is not seen here. Times and "
        "memory are those of programs with the GPU's own autotuning.",
        f"Made with {said}.",
        f"Modelled times are off by {summary}.",
        table(headings, lines),
    ]
    return "\n\n".join(parts) + "\n"


def _off(of: Mapping[str, Any]) -> float:
    return float(of["modelled_s"] / of["measured_s"] - 1)


def _times(of: Mapping[str, Any]) -> str:
    return f"{of['measured_s'] * 1e6:.0f} / {of['modelled_s'] * 1e6:.0f} ({_off(of):+.0%})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; the exit status is 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where results go")
    parser.add_argument(
        "--stored", action="store_true", help="price the programs in bench/results again; needs no GPU"
    )
    options = parser.parse_args(argv)
    if options.stored:
        rows, made_with = stored()
    else:
        mesh = mesh_of_one()
        device = jax.local_devices()[0]
        if device.platform != "gpu":
            print(f"bench.gpu_steps: needs a GPU, and jax has found {device.device_kind}", file=sys.stderr)
            return 2
        rows = []
        for case in grid.gpu_cases():
            rows.append(row(case.name, programs.problem(case), mesh))
            print(rows[-1].name, rows[-1].versions, flush=True)
        made_with = {"device_kind": device.device_kind, "versions": versions()}
    content = {"schema": 1, "kind": "measured", **made_with, "rows": list(map(priced, rows))}
    write(options.out, NAME, page(content), content)
    with gzip.GzipFile(options.out / PROGRAMS, "wb", mtime=0) as file:
        file.write(json.dumps({each.name: each.programs for each in rows}).encode())
    print(page(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
