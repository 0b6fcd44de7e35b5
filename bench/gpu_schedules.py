"""Compares schedules by the GPU compiler, for eight H100s: where permutes start and end, and the memory.

    python -m bench.gpu_schedules       (make bench-gpu)    writes bench/results/gpu_schedules.*

Needs jax's CUDA plugin, and neither a GPU nor CUDA: `make bench-gpu` makes the environment. The order of the
compiler's schedule is the evidence; all times but those of compiling are modelled.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bench.schedules import command, grid, measure, run, summary, tables
from bench.schedules.case import Slice
from bench.schedules.rows import ORIGINAL, OURS, TEXTBOOK, Figures, Row
from bench.versions import spelled

NAME: Final = "gpu_schedules"
TITLE: Final = "Schedules by the GPU compiler"
SHOWN: Final = (TEXTBOOK, *OURS)
PLUGIN: Final = "jax_cuda12_plugin"

NOTES: Final = (
    "Eight H100s behind one switch, by XLA's GPU compiler without a GPU. The order of the schedule is real: "
    "S and D are the start and the done of a permute, M is a matmul, C another collective, `8×[…]` a loop. "
    "Every permute of ours must have a matmul between its start and its done, and temporary memory must not "
    "exceed the original's.",
    "Times are modelled (`overlap.hlo.simulate`): the compiler gives none.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints, writes; the exit status is 1 where a demand is not met, 2 without the plugin."""
    options = command.grid_parser(__doc__).parse_args(argv)
    cases = command.chosen(grid.gpu_cases(), options.rows)
    if (status := command.nothing_to_measure(NAME, cases, options, missing)) is not None:
        return status
    if options.worker:
        run.work(cases, _mesh, options.versions)
        return 0
    made_with = run.versions(PLUGIN.replace("_", "-"))
    rows = run.run(
        cases,
        module=f"bench.{NAME}",
        environment=measure.H100_ENVIRONMENT,
        made_with=made_with,
        line=line,
        jobs=options.jobs,
        resume=options.resume,
        wanted=options.versions,
    )
    rows = command.with_stored(rows, NAME, grid.gpu_cases(), options)
    broken = [(row.name, version, said) for row in rows for version, said in demands(row)]
    for name, version, said in broken:
        print(f"{name}, {tables.TITLES[version]}: {said}")
    found = summary.summarise(rows)
    print(f"\n{tables.means(found)}\n\n{verdict(rows, broken)}")
    if (folder := command.folder(options)) is not None:
        page = document(rows, made_with, found, broken)
        content = tables.content(rows, found, made_with, notes=NOTES)
        run.write(folder, NAME, page, {**content, "not_met": broken})
        print(f"\nWritten: {folder / NAME}.md and .json")
    return 1 if broken else 0


def missing() -> str | None:
    """Why nothing can be compiled for GPUs here; None where it can."""
    if importlib.util.find_spec(PLUGIN) is not None:
        return None
    return "jax's CUDA plugin is not installed; `make bench-gpu` makes an environment that has it"


def demands(row: Row) -> list[tuple[str, str]]:
    """(version, what is wrong) for each demand that a row does not meet."""
    if not row.measured:
        return [(ORIGINAL, said) for said in row.failures.values()]
    found = [(version, said) for version, said in row.failures.items() if version in OURS]
    for version in OURS:
        figures = row.versions.get(version)
        if figures is None:
            continue
        if figures.idle:
            said = f"{len(figures.idle)} of {figures.permutes} permutes have no matmul beside them"
            found.append((version, f"{said}: {figures.order} ({figures.schedule})"))
        if summary.more_memory(row, version):
            said = summary.extra_memory(row, version)
            found.append((version, f"{said}: {figures.order} ({figures.schedule})"))
    return found


def line(row: Row) -> str:
    """A row as it is printed when it comes."""
    if not row.measured:
        return f"{row.name}: FAILED {'; '.join(row.failures.values())}"
    shown = [f"{tables.TITLES[v]} {tables.timed(row, v)}" for v in (ORIGINAL, *SHOWN) if v in row.versions]
    orders = [f"{tables.TITLES[v]}: {compact(row.versions[v])}" for v in SHOWN if v in row.versions]
    return "\n    ".join([f"{row.name}: {', '.join(shown)} µs, {row.wall_s:.0f} s", *orders])


def compact(figures: Figures) -> str:
    """The order of a schedule, without blanks."""
    return figures.order.replace(" ", "") or "no matmul and no collective"


def verdict(rows: Sequence[Row], broken: Sequence[Any]) -> str:
    """How many rows there are, and whether all demands are met."""
    rewritten = sum(any(row.versions[v].permutes for v in OURS if v in row.versions) for row in rows)
    said = f"{len(broken)} demands are **not** met" if broken else "all demands are met"
    return f"{len(rows)} rows, of which {rewritten} have a ring of ours; {said}."


def document(
    rows: Sequence[Row],
    made_with: Mapping[str, str],
    found: summary.Summary,
    broken: Sequence[tuple[str, str, str]],
) -> str:
    """The whole page."""
    parts = [f"# {TITLE}", *NOTES, f"Made with {spelled(made_with)}.", verdict(rows, broken)]
    if broken:
        lines = [(name, tables.TITLES[version], what) for name, version, what in broken]
        parts += ["## Not met", tables.table(("row", "version", "what"), lines)]
    parts += ["## Means", tables.means(found)]
    for version, slow in found.slower.items():
        parts.append(
            tables.listed(f"{tables.TITLES[version]}: slower than the original by more than 1 %", slow)
        )
    parts += ["## Times, µs (efficiency)", tables.times(rows)]
    parts += ["## Orders and memory", orders(rows)]
    return "\n\n".join(parts) + "\n"


def orders(rows: Sequence[Row]) -> str:
    """The order of every schedule, permutes without a matmul, temporary memory."""
    lines = []
    for row in rows:
        for version in (ORIGINAL, *SHOWN):
            if (figures := row.versions.get(version)) is not None:
                lines.append(
                    (
                        row.name,
                        tables.TITLES[version],
                        f"`{compact(figures)}`",
                        f"{len(figures.idle)} of {figures.permutes}",
                        f"{figures.temp_bytes / 1e6:.1f}",
                        figures.schedule,
                    )
                )
    headings = ("row", "version", "order", "permutes without a matmul", "temporary MB", "schedule")
    return tables.table(headings, lines)


def _mesh(where: Slice) -> Any:
    return measure.h100_mesh()


if __name__ == "__main__":
    sys.exit(main())
