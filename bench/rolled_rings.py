"""Rolled rings on long axes: what a chain takes to compile, and what a hop takes, on 16 to 256 TPUs.

    python -m bench.rolled_rings

Each device has as much to do per hop on every axis: 512 rows, of 8192 columns where they travel. Every
program is compiled several times, and the quickest counts. Needs libtpu, and no TPU. Compile times are
measured, times per hop are modelled from the compiled schedule.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import passes
from bench.schedules import measure, run
from bench.schedules.case import Slice
from bench.versions import spelled
from cost_model import Topology, by_name
from overlap import tpu_target
from passes import RingSchedule, Trial
from passes.candidates import UNROLL

if __name__ == "__main__":
    os.environ.update(tpu_target.ENVIRONMENT)

NAME: Final = "rolled_rings"
CHIP: Final = "tpu_v6e"
SLICES: Final = {16: "v6e:4x4", 64: "v6e:8x8", 256: "v6e:16x16"}
ROWS, WIDE, NARROW = 512, 8192, 4096

MOST_GROWTH: Final = 1.3
"""By how much compiling a chain may grow from 16 to 256 devices."""

MOST_SLOWER: Final = 0.05
"""By how much a hop of a rolled ring may take longer than one of the unrolled ring."""


def gather(x: Any, w: Any) -> Any:
    """Rows are gathered, and are the dot's free dim."""
    return lax.all_gather(x, "x", tiled=True) @ w


def scatter(x: Any, w: Any) -> Any:
    """Rows of the sum are scattered."""
    return lax.psum_scatter(x @ w, "x", tiled=True)


PATTERNS: Final[dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]]] = {
    "all_gather → dot": (gather, (P("x"), P(None, "x")), P(None, "x")),
    "dot → reduce_scatter": (scatter, (P(None, "x"), P("x")), P("x")),
}
"""Body, and how operands and result are sharded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """One program.

    Attributes:
      pattern: a name of ``PATTERNS``.
      devices: on the axis.
      form: "original", "unrolled" or "rolled".
      schedule: the ring's, in words.
      compile_cpu_s: measured processor seconds of tracing, rewriting and compiling: the least.
      hop_s: modelled: the program's time over its hops.
      temp_bytes: temporary memory of one device.
    """

    pattern: str
    devices: int
    form: str
    schedule: str
    compile_cpu_s: float
    hop_s: float
    temp_bytes: int


def shapes(pattern: str, devices: int) -> tuple[tuple[int, int], ...]:
    """Of the operands, over all devices."""
    if PATTERNS[pattern][0] is gather:
        return (devices * ROWS, WIDE), (WIDE, devices * NARROW)
    return (devices * ROWS, devices * NARROW), (devices * NARROW, WIDE)


def program(pattern: str, mesh: Mesh, form: str) -> tuple[Callable[..., Any], str]:
    """A function to be jitted anew for each compilation, and the ring's schedule in words."""
    body, in_specs, out_specs = PATTERNS[pattern]
    original = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    if form == "original":
        return original, ""
    jaxpr = jax.jit(original).trace(*operands(pattern, mesh)).jaxpr
    chosen: list[RingSchedule] = []

    def as_wanted(_: Any, schedules: tuple[RingSchedule, ...]) -> Trial[RingSchedule]:
        unroll = 0 if form == "unrolled" else UNROLL
        # Walks and ways half round are unrolled only. Blocks are cut out early on some axes, not on others,
        # which takes half as long to compile: here they are on none.
        rings = (s for s in schedules if s.route == "ring" and not (s.walks or s.halfway))
        best = next(s for s in rings if s.cut == "dot")
        chosen.append(dataclasses.replace(best, unroll=unroll))
        return Trial(chosen[-1], 1.0, 0.5, "modelled")

    plan = passes.make_plan(jaxpr, "verify", lambda kind: by_name(CHIP), try_out=as_wanted)
    run_plan = passes.rewritten(plan)
    return (lambda *arguments: tuple(run_plan(*arguments))), str(chosen[0])


def operands(pattern: str, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The types of the arguments, sharded."""
    specs = PATTERNS[pattern][1]
    return tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes(pattern, mesh.size), specs, strict=True)
    )


def compiled(pattern: str, mesh: Mesh, form: str, rounds: int) -> Compiled:
    """Compiles one program several times."""
    topology = Topology.from_devices(mesh.devices, by_name(CHIP))
    function, schedule = program(pattern, mesh, form)
    found = []
    for _ in range(rounds):
        jax.clear_caches()
        again = jax.jit(lambda *arguments: function(*arguments))
        found.append(measure.compiled_figures(again, operands(pattern, mesh), topology))
    return Compiled(
        pattern,
        mesh.size,
        form,
        schedule,
        min(figures.compile_cpu_s or 0.0 for figures in found),
        found[0].total_s / (mesh.size - 1),
        found[0].temp_bytes,
    )


def document(rows: Sequence[Compiled], made_with: dict[str, str]) -> str:
    """The page."""
    lines = [
        "# Rolled rings",
        "",
        f"TPU v6e, {ROWS} rows a device, bfloat16. Made with {spelled(made_with)}.",
        "Compile times are processor seconds of all threads (the least of several, measured), times per hop",
        "modelled from the compiled schedule; the memory is the compiler's account.",
        "",
        "| chain | devices | form | compiling | per hop | temporary memory | schedule |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.pattern} | {row.devices} | {row.form} | {row.compile_cpu_s:.2f} s "
        f"| {row.hop_s * 1e6:.1f} µs | {row.temp_bytes / 1e6:.1f} MB | {row.schedule} |"
        for row in rows
    ]
    lines += ["", *(f"- {sentence}" for sentence in claims(rows)[0])]
    return "\n".join(lines) + "\n"


def claims(rows: Sequence[Compiled]) -> tuple[list[str], bool]:
    """What the rows show, in sentences, and whether every figure is reached."""
    told, met = [], True
    by = {(row.pattern, row.devices, row.form): row for row in rows}
    for pattern in dict.fromkeys(row.pattern for row in rows):
        first, last = (by.get((pattern, devices, "rolled")) for devices in (16, 256))
        unrolled = by.get((pattern, 16, "unrolled"))
        if first is None or last is None or unrolled is None:
            continue
        growth = last.compile_cpu_s / first.compile_cpu_s
        from_unrolled = last.compile_cpu_s / unrolled.compile_cpu_s
        met = met and growth < MOST_GROWTH
        told.append(
            f"{pattern}: compiling the rolled ring takes {growth:.2f} × as long on 256 devices as on 16 (to "
            f"stay below {MOST_GROWTH}), and {from_unrolled:.2f} × as long as the unrolled ring on 16, which "
            "is what the pass makes there."
        )
        for devices in dict.fromkeys(row.devices for row in rows):
            pair = by.get((pattern, devices, "rolled")), by.get((pattern, devices, "unrolled"))
            if pair[0] is not None and pair[1] is not None:
                slower = pair[0].hop_s / pair[1].hop_s - 1
                met = met and slower <= MOST_SLOWER
                told.append(
                    f"{pattern}, {devices} devices: a hop takes {slower:+.1%} in the rolled ring (at most "
                    f"{MOST_SLOWER:+.0%})."
                )
    return told, met


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; the exit status is 1 where a figure is missed, 2 without libtpu."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="compilations of each program")
    options = parser.parse_args(argv)
    if (said := tpu_target.missing()) is not None:
        print(f"{NAME}: {said}", file=sys.stderr)
        return 2
    rows = []
    for devices, topology in SLICES.items():
        mesh = measure.tpu_mesh(Slice(topology=topology, hardware=CHIP, mesh_shape=(devices,)))
        for pattern in PATTERNS:
            # Unrolled, a ring of 256 devices takes minutes to compile, and tells nothing that 64 do not.
            for form in ("original", *(["unrolled"] if devices < 256 else []), "rolled"):
                row = compiled(pattern, mesh, form, options.rounds)
                print(
                    f"{pattern}, {devices} devices, {form}: compiled in {row.compile_cpu_s:.2f} s, "
                    f"{row.hop_s * 1e6:.1f} µs a hop",
                    flush=True,
                )
                rows.append(row)
    made_with = run.versions("libtpu")
    sentences, met = claims(rows)
    print("\n" + "\n".join(sentences))
    content = {"versions": made_with, "rows": [dataclasses.asdict(row) for row in rows], "met": met}
    run.write(run.RESULTS, NAME, document(rows, made_with), content)
    print(f"\nWritten: {run.RESULTS / NAME}.md and .json")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
