"""What programs for eight GPUs compute, measured on one: their collectives are started, and move nothing.

    python -m bench.gpu_steps               writes bench/results/gpu_steps.*, in a quarter of an hour
    python -m bench.gpu_steps --resume FILE keeps every program in FILE, and goes on where FILE ends
    python -m bench.gpu_steps --stored      prices what was measured again

jax's mock topology makes one GPU the first of eight. The programs are those of `bench.gpu_schedules`, all of
their collectives rewritten, and training steps that `bench.layers` draws, under ``policy="auto"``; they are
compiled with the GPU's own autotuning, and run. What they compute is wrong, and how long it takes is real: a
ring's partial matmuls, its copies and its additions, beside the one matmul of the original. The same compiled
programs are timed by the cost model (`overlap.hlo.simulate`), without their collectives. One GPU is needed.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    # The other seven would have to take part in it.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false"

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from bench import layers
from bench.schedules import grid, programs
from bench.schedules.case import Case, Slice
from bench.schedules.order import order
from bench.schedules.rows import AUTO, ORIGINAL
from bench.schedules.run import RESULTS, keep, kept, versions, write
from bench.schedules.tables import table
from bench.versions import spelled
from cost_model import Topology, by_name
from cost_model.calibration import base_hardware
from overlap import overlap_collectives
from overlap.compiled_memory import temporary_bytes
from overlap.hlo.parse import parse
from overlap.hlo.simulate import simulate

NAME: Final = "gpu_steps"
PROGRAMS: Final = f"{NAME}_programs.json.gz"
"""The compiled programs' text, by row and version."""

DEVICES: Final = 8
STEPS: Final = 16
"""Training steps that are drawn."""

ROUNDS: Final = 7
TARGET_S: Final = 0.03
RING: Final = "ring"
"""Of the grid's programs: with all their collectives rewritten."""

_METADATA: Final = re.compile(r", metadata=\{[^{}]*\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A program's versions, as they ran.

    Attributes:
      name: of the program.
      versions: per version its seconds, their spread (the longest over the shortest, less 1), and the bytes
        of temporary memory.
      programs: per version its compiled text, without metadata.
    """

    name: str
    versions: Mapping[str, Mapping[str, Any]]
    programs: Mapping[str, str]


def mock_eight() -> None:
    """Makes the attached GPU the first of eight devices, of which the others do not exist."""
    jax.config.update("jax_mock_gpu_topology", f"1x{DEVICES}x1")


def sliced(device_kind: str) -> Slice:
    """Eight such GPUs behind one switch."""
    hardware = base_hardware(device_kind, "gpu").name
    return Slice(topology=f"{hardware}:{DEVICES}", hardware=hardware, mesh_shape=(DEVICES,))


def to_measure(where: Slice) -> dict[str, Callable[[], Measured]]:
    """Name → what measures a program: those of the grid, and then training steps."""
    found: dict[str, Callable[[], Measured]] = {}
    for case in grid.gpu_cases(where):
        found[case.name] = functools.partial(of_case, case)
    for each in layers.drawn(STEPS, layers.SEED, (where,)):
        found[each.name] = functools.partial(of_step, each)
    return found


def of_case(case: Case) -> Measured:
    """A program of the grid as written, and with all of its collectives rewritten."""
    problem = programs.problem(case)
    mesh = Mesh(np.array(jax.devices()), (programs.AXIS,), axis_types=(AxisType.Auto,))
    original = programs.manual(problem, mesh)
    versions = {
        ORIGINAL: original,
        RING: overlap_collectives(original, policy="always", strict=True),
    }
    return row(case.name, versions, programs.operands(problem, mesh))


def of_step(each: layers.Drawn) -> Measured:
    """A training step as written, and as ``"auto"`` rewrites it where it does."""
    program = each.program
    mesh = program.make_mesh()
    original, operands = program.make(mesh), program.shapes(mesh, "real")
    ours = overlap_collectives(original, policy="auto", strict=True)
    versions = {ORIGINAL: original}
    if any(site.rewritten for site in ours.explain(*operands).sites):
        versions[AUTO] = ours
    return row(each.name, versions, operands)


def row(name: str, versions: Mapping[str, Any], operands: Sequence[Any]) -> Measured:
    """A program's versions, compiled and measured."""
    values = jax.tree.map(array, operands)
    compiled = {version: each.trace(*values).lower().compile() for version, each in versions.items()}
    times = step_s({version: functools.partial(each, *values) for version, each in compiled.items()})
    found = Measured(
        name=name,
        versions={
            version: {
                "measured_s": times[version][0],
                "spread": times[version][1],
                "temp_bytes": temporary_bytes(each),
            }
            for version, each in compiled.items()
        },
        programs={version: _METADATA.sub("", each.as_text()) for version, each in compiled.items()},
    )
    jax.clear_caches()
    return found


def array(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Random values, of which the shards of this process' devices exist."""
    some = np.random.default_rng(0).standard_normal(1 << 20, np.float32) / 64
    shard = np.resize(some.astype(like.dtype), like.sharding.shard_shape(like.shape))
    return jax.make_array_from_callback(like.shape, like.sharding, lambda _: shard)


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


def priced(measured: Measured, where: Slice) -> dict[str, Any]:
    """What was measured, beside what the cost model says of the same programs."""
    topology = Topology.axis(DEVICES, by_name(where.hardware))
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
    figures = ("measured_s", "spread", "temp_bytes")
    rows = [
        Measured(
            name=each["name"],
            versions={v: {k: of[k] for k in figures} for v, of in each["versions"].items()},
            programs=texts[each["name"]],
        )
        for each in content["rows"]
    ]
    return rows, {key: content[key] for key in ("device_kind", "versions")}


def page(content: Mapping[str, Any]) -> str:
    """The results, for people."""
    cases, steps = apart(content["rows"])
    said = spelled(content["versions"])
    parts = [
        "# What programs for eight GPUs compute",
        f"Measured / modelled, on one {content['device_kind']} as the first of eight. Collectives start "
        "and move nothing, so these are the times of computing alone; what hides is not seen here. Times and "
        "memory are those of programs with the GPU's own autotuning.",
        "Programs are as they were rewritten on the day they were measured; for what these times have told, "
        "other schedules may be chosen since.",
        f"Made with {said}.",
        "## The programs of `gpu_schedules`, all their collectives rewritten where that is legal",
        f"Modelled times are off by {_summary(cases)}.",
        _table(cases, RING),
        '## Training steps as people write them, under `policy="auto"`',
        "The first that `bench.layers` draws for eight such GPUs; where nothing is rewritten there is one "
        f"time. Modelled times are off by {_summary(steps)}.",
        _table(steps, AUTO),
    ]
    return "\n\n".join(parts) + "\n"


def apart(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The rows of the grid, and those of training steps."""
    cases = [each for each in rows if RING in each["versions"]]
    return cases, [each for each in rows if RING not in each["versions"]]


def errors(rows: Sequence[Mapping[str, Any]], version: str) -> list[float]:
    """How far the modelled times of a version are off, of the rows that have it."""
    return [abs(_off(each["versions"][version])) for each in rows if version in each["versions"]]


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    return " and ".join(
        f"{statistics.median(off):.1%} in the median (at most {max(off):.0%}) for {named}"
        for version, named in ((ORIGINAL, "the originals"), (RING, "the rings"), (AUTO, "what is rewritten"))
        if (off := errors(rows, version))
    )


def _table(rows: Sequence[Mapping[str, Any]], version: str) -> str:
    """The rows as written and in another version, whose short orders are shown too."""
    in_short = version == RING
    lines = []
    for each in rows:
        one, other = each["versions"][ORIGINAL], each["versions"].get(version)
        cells = ["–"] * 4
        if other is not None:
            measured, modelled = (other[kind] / one[kind] for kind in ("measured_s", "modelled_s"))
            cells = [
                _times(other),
                f"{measured:.3f} / {modelled:.3f}",
                f"{other['idle']} of {other['permutes']}",
                f"{other['temp_bytes'] / 1e6:.1f} / {one['temp_bytes'] / 1e6:.1f}",
            ]
        lines.append((each["name"], _times(one), *cells, *([f"`{other['order']}`"] if in_short else [])))
    headings = (
        "row",
        "original, µs",
        f"{version}, µs",
        f"{version} / original",
        "permutes without a matmul",
        f"temporary MB, {version} / original",
        *(["order"] if in_short else []),
    )
    return table(headings, lines)


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
    parser.add_argument("--resume", type=Path, metavar="FILE", help="rows done, one JSON object a line")
    options = parser.parse_args(argv)
    if options.stored:
        rows, made_with = stored()
    else:
        mock_eight()
        device = jax.local_devices()[0]
        if device.platform != "gpu":
            print(f"bench.gpu_steps: needs a GPU, and jax has found {device.device_kind}", file=sys.stderr)
            return 2
        made_with = {"device_kind": device.device_kind, "versions": versions()}
        of_rows = {"device_kind": device.device_kind, **versions()}
        rows = list(measured(to_measure(sliced(device.device_kind)), options.resume, of_rows))
    where = sliced(made_with["device_kind"])
    content = {"schema": 2, "kind": "measured", **made_with, "rows": [priced(each, where) for each in rows]}
    write(options.out, NAME, page(content), content)
    with gzip.GzipFile(options.out / PROGRAMS, "wb", mtime=0) as file:
        file.write(json.dumps({each.name: each.programs for each in rows}).encode())
    print(page(content))
    return 0


def measured(
    wanted: Mapping[str, Callable[[], Measured]], resume: Path | None, made_with: Mapping[str, str]
) -> Iterator[Measured]:
    """The rows; those in the file of an earlier run are not measured again, and others are added to it."""
    before = [] if resume is None else [Measured(**of) for of in kept(resume, made_with)]
    found = {each.name: each for each in before}
    for name, measure in wanted.items():
        if name not in found:
            found[name] = measure()
            print(name, found[name].versions, flush=True)
            if resume is not None:
                keep(resume, dataclasses.asdict(found[name]), made_with)
        yield found[name]


if __name__ == "__main__":
    sys.exit(main())
