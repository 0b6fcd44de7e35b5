"""The rows and their summary as Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bench.schedules import grid
from bench.schedules import summary as summaries
from bench.schedules.rows import AUTO, AUTOMATIC, ORIGINAL, OURS, POST_SPMD, TEXTBOOK, VERIFY, Row
from bench.schedules.summary import EFFICIENCY, SPEED_UP, Summary
from bench.versions import spelled

TITLES: Final = {
    ORIGINAL: "original",
    AUTOMATIC: "XLA automatic",
    POST_SPMD: "XLA post_spmd",
    TEXTBOOK: "textbook ring",
    AUTO: "auto",
    VERIFY: "verify",
}

NOTES: Final = (
    "All times are modelled: the real TPU compiler's schedule of one run, with its own cycle estimates and "
    "stated link speeds (`overlap.hlo.simulate`); search times are measured by the clock, compile "
    "times in processor seconds of all threads. No TPU was used.",
    "The limit is max(matmul, links): the matmuls of the original's own schedule (or of ours, where they "
    "take less), and the bytes of its collectives over all link directions of the axis "
    "(`cost_model.group_collectives`; an all-reduce counts as a reduce-scatter and an all-gather). "
    "Efficiency is limit over time.",
    "XLA's two own modes: automatic sharding (`jax.jit` with shardings, of the same arrays), and the manual "
    "program with `post_spmd` collective matmuls. The textbook ring goes one way and has no barriers.",
    "v5p:2x2x4: wraparound in z is assumed, as in the issue that set this grid; Google's page of v5p says "
    "that slices under 4×4×4 have none. Without it every version of those rows would be slower.",
    "v5p:4x4x4 is a mesh of 16 × 4: @4 communicates along one physical ring, @16 over planes of 4 × 4 chips. "
    "v4 and tpu7x have two devices on each chip.",
    "Temporary memory is the smaller of the compiler's two figures: one of them counts more than it allots, "
    "and so a program above the chip's whole memory compiles (`overlap/compiled_memory.py`).",
    '"Sceptical" charges elementwise work no more than its bytes at the memory bandwidth, for every version: '
    "the compiler's estimates of such work are cautious, and it is what XLA's modes have most of.",
)
"""What the figures rest on."""

WITHOUT: Final = "{} was not measured in this run."
UNDATED: Final = "2026-11-24 or before"
"""When figures were measured whose date was not kept."""


def document(
    rows: Sequence[Row], summary: Summary, versions: Mapping[str, str], *, title: str, notes: Sequence[str]
) -> str:
    """The whole page."""
    parts = [f"# {title}", *notes, f"Made with {spelled(versions)}.", "## Summary", headline(rows, summary)]
    parts += [targets(summary), means(summary)]
    parts += ["### By pattern", by(rows, lambda row: row.pattern, "pattern")]
    parts += ["### By slice", by(rows, lambda row: row.slice, "slice")]
    parts += ["### By element type", by(rows, lambda row: row.dtype, "element type")]
    for version, slow in summary.slower.items():
        parts += [listed(f"{TITLES[version]}: slower than the original by more than 1 %", slow)]
    for version, more in summary.more_memory.items():
        parts += [listed(f"{TITLES[version]}: more temporary memory than the original", more)]
    parts += ["## Rows that miss a figure, and why", misses(summary)]
    if summary.failures:
        parts += ["## Failures", table(("row", "version", "what happened"), summary.failures)]
    parts += ["## Times, µs (efficiency)", times(rows), "## Memory, exposure, compile times", costs(rows)]
    return "\n\n".join(parts) + "\n"


def dates(rows: Sequence[Row]) -> list[str]:
    """What was not measured, and when the rest was, where not all was measured on one day."""
    found: list[str] = []
    days: dict[str, Counter[str]] = {}
    for version, title in TITLES.items():
        days[version] = Counter(
            row.versions[version].date or UNDATED for row in rows if version in row.versions
        )
        if not days[version]:
            found.append(WITHOUT.format(f"`{title}`"))
    if len({day for counts in days.values() for day in counts}) > 1:
        said = (
            f"`{TITLES[version]}` " + ", ".join(f"{day} ({counts[day]})" for day in sorted(counts))
            for version, counts in days.items()
            if counts
        )
        found.append(f"Dates on which rows were measured: {'; '.join(said)}.")
    return found


def content(
    rows: Sequence[Row], summary: Summary, versions: Mapping[str, str], *, notes: Sequence[str]
) -> dict[str, Any]:
    """The same as the page, for JSON."""
    return {
        "schema": 1,
        "versions": dict(versions),
        "notes": list(notes),
        "rule": grid.__doc__,
        "summary": summaries.to_dict(summary),
        "rows": [row.to_dict() for row in rows],
    }


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    cells = [headings, ["---"] * len(headings), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in cells)


def known(value: float) -> bool:
    """Whether a mean is one: of no rows it is not a number."""
    return not math.isnan(value)


def mean(value: float, digits: int = 3) -> str:
    """A mean in a table, whose cell stays empty where nothing was measured."""
    return f"{value:.{digits}f}" if known(value) else ""


def headline(rows: Sequence[Row], summary: Summary) -> str:
    """How many rows there are and count."""
    low, high = summaries.COUNTED
    return (
        f"{summary.rows} rows measured of {len(rows)}; communication is {low:g} to {high:g} × compute in "
        f"{summary.counted} of them, of which the means are."
    )


def targets(summary: Summary) -> str:
    """The figures to reach, and what was reached."""
    lines: list[list[str]] = []
    ours = [version for version in OURS if version in summary.slower]

    def line(name: str, value: Callable[[str], str]) -> None:
        lines.append([name, *(value(version) for version in ours)])

    def against(value: float, target: float) -> str:
        return f"{value:.3f} ({'≥' if value >= target else '**below**'} {target})" if known(value) else ""

    def means_of(version: str) -> summaries.Means:
        found = summary.of(version)
        assert found is not None
        return found

    if all(summary.of(version) for version in ours):
        line("geometric mean efficiency", lambda v: against(means_of(v).efficiency, EFFICIENCY[v]))
        line(
            "geometric mean speed-up over the better of XLA's modes",
            lambda v: against(means_of(v).over_xla, SPEED_UP[v]),
        )
        line("the same, sceptical", lambda v: mean(means_of(v).over_xla_sceptical))
    line("rows slower than the original by more than 1 %", lambda v: str(len(summary.slower[v])))
    line("rows with more temporary memory than the original", lambda v: str(len(summary.more_memory[v])))
    return table(("", *(TITLES[version] for version in ours)), lines)


def means(summary: Summary) -> str:
    """The means of every version."""
    headings = (
        "version",
        "rows",
        "efficiency",
        "over the better of XLA's",
        "sceptical",
        "over the original",
        "sceptical",
        "compiling, over the original's",
    )
    lines = [
        (
            TITLES[m.version],
            str(m.rows),
            f"{m.efficiency:.3f}",
            mean(m.over_xla),
            mean(m.over_xla_sceptical),
            f"{m.over_original:.3f}",
            f"{m.over_original_sceptical:.3f}",
            mean(m.compiling, 1),
        )
        for m in summary.means
    ]
    return table(headings, lines)


def by(rows: Sequence[Row], key: Callable[[Row], str], heading: str) -> str:
    """Means over groups of rows: efficiency of the original and of ours, and our speed-up over XLA."""
    lines = []
    ours = [version for version in OURS if any(version in row.versions for row in rows)]
    for name, group in summaries.grouped(rows, key).items():
        cells = [name, str(len(group)), f"{summaries.means_of(group, ORIGINAL).efficiency:.3f}"]
        for version in ours:
            found = summaries.means_of(group, version)
            cells += [f"{found.efficiency:.3f}", mean(found.over_xla, 2)]
        lines.append(cells)
    headings = [heading, "rows", "original"]
    for version in ours:
        headings += [TITLES[version], f"{TITLES[version]} over XLA"]
    return table(headings, lines)


def listed(what: str, names: Sequence[str]) -> str:
    """Rows by name, under what they have in common."""
    names_below = "".join(f"\n- {name}" for name in names)
    return f"Rows {what}:\n{names_below}" if names else f"Rows {what}: none."


def misses(summary: Summary) -> str:
    """Every row that misses a figure, with the reason."""
    if not summary.misses:
        return "None."
    lines = [(miss.row, TITLES[miss.version], miss.what, miss.reason) for miss in summary.misses]
    return table(("row", "version", "misses", "found in its schedule"), lines)


def times(rows: Sequence[Row]) -> str:
    """Modelled times of every version of every row, and the schedules."""
    headings = [
        "row",
        "communication / compute",
        "limit",
        *TITLES.values(),
        "schedule (auto)",
        "schedule (verify)",
    ]
    return table(headings, [time_cells(row) for row in rows])


def time_cells(row: Row) -> list[str]:
    """One line of ``times``."""
    cells = [row.name, f"{row.ratio:.2f}", micro(row.limit_s)]
    for version in TITLES:
        cells.append(timed(row, version))
    for version in OURS:
        cells.append(row.versions[version].schedule if version in row.versions else "")
    return cells


def timed(row: Row, version: str) -> str:
    """A time with its efficiency; what else there is to say where there is none."""
    efficiency = row.efficiency(version)
    if efficiency is None:
        return "failed" if version in row.failures or "row" in row.failures else ""
    return f"{micro(row.versions[version].total_s)} ({efficiency:.2f})"


def costs(rows: Sequence[Row]) -> str:
    """Exposed time, memory and compile time of original and ours; and how long verifying searched."""
    shown = (ORIGINAL, AUTO, VERIFY)
    headings = ["row"]
    for what in ("exposed µs", "temporary MB", "compile processor s"):
        headings += [f"{what}, {TITLES[version]}" for version in shown]
    headings += [
        "search s, verify",
        "sceptical µs, better of XLA's",
        *(f"sceptical µs, {TITLES[v]}" for v in shown),
    ]
    lines = []
    for row in rows:
        found = [row.versions.get(version) for version in shown]
        cells = [row.name]
        cells += [micro(f.exposed_s) if f else "" for f in found]
        cells += [f"{f.temp_bytes / 1e6:.1f}" if f else "" for f in found]
        cells += ["" if f is None or f.compile_cpu_s is None else f"{f.compile_cpu_s:.1f}" for f in found]
        searched = row.versions.get(VERIFY)
        cells.append(f"{searched.search_s:.1f}" if searched else "")
        xla = row.xla_s(sceptical=True)
        cells.append(micro(xla) if xla is not None else "")
        cells += [micro(f.sceptical_s) if f else "" for f in found]
        lines.append(cells)
    return table(headings, lines)


def micro(seconds: float) -> str:
    """Microseconds, without decimals from ten on."""
    value = seconds * 1e6
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
