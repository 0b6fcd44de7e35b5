"""Compares schedules by the TPU compiler: original, XLA's own modes, the textbook ring and this library.

    python -m bench.tpu_schedules                    the whole grid; writes bench/results/tpu_schedules.*
    python -m bench.tpu_schedules --rows 'v5p.*mlp'  some rows; writes nothing unless --output is given
    python -m bench.tpu_schedules --rows mlp --versions auto --renew    measures those, keeps the rest
    python -m bench.tpu_schedules --resume FILE      keeps every row in FILE, and goes on where FILE ends

    python -m bench.tpu_schedules --offload          with collectives that run beside dots by themselves

With a jax that does not start hops explicitly (0.10) the files are bench/results/tpu_schedules_implied.*.
With --offload programs are compiled with the options of `overlap.offload_options`, on chips that have any,
and the files are bench/results/tpu_schedules_offloaded.*.

Needs libtpu, and no TPU. All times but those of compiling are modelled.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from bench.schedules import command, grid, measure, plot, run, summary, tables
from bench.schedules.rows import OURS, VERIFY, Row
from overlap import tpu_target
from passes import shims

NAME: Final = "tpu_schedules" if shims.EXPLICIT_STARTS else "tpu_schedules_implied"
TITLE: Final = "Schedules by the TPU compiler" + (
    "" if shims.EXPLICIT_STARTS else " where it places the starts of hops"
)

OFFLOADED: Final = (
    "Programs are compiled with the options of `overlap.offload_options`, which have all_gathers (v4), "
    "all_reduces (v5e), or these and reduce_scatters (v5p, v6e) run beside dots by themselves; on tpu7x they "
    "do by default, and all_gathers on v5e. What is not this library's is compiled without them too, and the "
    "faster one counts (its memory is that with the options)."
)
"""Of results with ``--offload``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; the exit status is 1 where a figure is missed, 2 without libtpu."""
    parser = command.grid_parser(__doc__)
    parser.add_argument(
        "--offload",
        action="store_true",
        help="compile with the options that have collectives run beside dots by themselves; written apart",
    )
    options = parser.parse_args(argv)
    name, title = (
        (f"{NAME}_offloaded", f"{TITLE}, with collectives that are offloaded")
        if options.offload
        else (NAME, TITLE)
    )
    cases = command.chosen(grid.tpu_cases(), options.rows)
    if (status := command.nothing_to_measure(name, cases, options, tpu_target.missing)) is not None:
        return status
    if options.worker:
        run.work(cases, measure.tpu_mesh, options.versions, offloaded=options.offload)
        return 0
    made_with = run.versions("libtpu")
    rows = run.run(
        cases,
        module="bench.tpu_schedules",
        environment=tpu_target.ENVIRONMENT,
        made_with=made_with,
        line=line,
        jobs=options.jobs,
        resume=options.resume,
        wanted=options.versions,
        arguments=("--offload",) if options.offload else (),
    )
    rows = command.with_stored(rows, name, grid.tpu_cases(), options)
    found = summary.summarise(rows)
    print(f"\n{tables.headline(rows, found)}\n\n{tables.targets(found)}\n\n{tables.means(found)}\n")
    print(tables.misses(found))
    notes = (*tables.NOTES, *([OFFLOADED] if options.offload else []), *tables.dates(rows))
    measured = {row.name for row in rows}
    if left := [case.name for case in grid.tpu_cases() if case.name not in measured]:
        notes = (*notes, f"Of the grid {len(left)} rows are not measured here: {', '.join(left)}.")
    if (folder := command.folder(options)) is not None:
        page = tables.document(rows, found, made_with, title=title, notes=notes)
        run.write(folder, name, page, tables.content(rows, found, made_with, notes=notes))
        plot.draw(rows, folder / f"{name}.svg", title=f"{title}: modelled times against the limit")
        print(f"\nWritten: {folder / name}.md, .json and .svg")
    if (options.rows or VERIFY not in options.versions) and not options.renew:
        return 0 if found.rows else 1
    return 0 if all(version in found.slower and found.met(version) for version in OURS) else 1


def line(row: Row) -> str:
    """A row as it is printed when it comes."""
    if not row.measured:
        return f"{row.name}: FAILED {'; '.join(row.failures.values())}"
    cells = [f"{row.name}: {row.ratio:.2f}, limit {tables.micro(row.limit_s)} µs"]
    for version, title in tables.TITLES.items():
        if shown := tables.timed(row, version):
            cells.append(f"{title} {shown}")
    if marks := [version for version in OURS if summary.more_memory(row, version)]:
        cells.append(f"MORE MEMORY ({', '.join(marks)})")
    return ", ".join([*cells, f"{row.wall_s:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
