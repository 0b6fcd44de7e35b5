"""What the rows come to: means, rows that fall behind, and why a row misses its figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.schedules.rows import AUTO, ORIGINAL, OURS, VERIFY, VERSIONS, Figures, Row

COUNTED: Final = (0.3, 3.0)
"""Communication over compute, as measured, of the rows that the means are of."""

SLOWER: Final = 1.01
"""Over the original's time: what counts as slower."""

ROUNDING_BYTES: Final = 4096
"""What a few buffers more come to, each rounded up (to 256 bytes on GPUs): no memory that anyone misses."""

EFFICIENCY: Final = {AUTO: 0.85, VERIFY: 0.92}
SPEED_UP: Final = {AUTO: 1.15, VERIFY: 1.25}
"""Figures to reach: geometric means of the limit over the time, and of the better XLA mode over it."""

WORTH_TELLING: Final = 0.01
"""Share of a row's time from which a cause is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Geometric means over the counted rows in which a version compiled.

    Attributes:
      version: a name of ``rows.VERSIONS``.
      rows: how many they are.
      efficiency: limit over time.
      over_xla, over_original: speed-ups over the better of XLA's modes and over the original.
      over_xla_sceptical, over_original_sceptical: the same with elementwise work at the memory bandwidth.
      compiling: processor time of compiling over the original's; not a number where none was measured.
    """

    version: str
    rows: int
    efficiency: float
    over_xla: float
    over_xla_sceptical: float
    over_original: float
    over_original_sceptical: float
    compiling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A row in which one of our versions misses a figure.

    Attributes:
      row: its name.
      version: which.
      what: the figures that are missed, in words.
      reason: what its schedule says.
    """

    row: str
    version: str
    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run comes to.

    Attributes:
      rows: how many were measured.
      counted: those of them whose ratio of communication to compute is within ``COUNTED``.
      means: of every version that was measured.
      slower: per version of ours, names of rows slower than the original by more than 1 %.
      more_memory: per version of ours, names of rows with more temporary memory than the original.
      misses: every row that misses a figure, with the reason.
      failures: (row, version, what happened) of what did not compile.
    """

    rows: int
    counted: int
    means: tuple[Means, ...]
    slower: dict[str, tuple[str, ...]]
    more_memory: dict[str, tuple[str, ...]]
    misses: tuple[Miss, ...]
    failures: tuple[tuple[str, str, str], ...]

    def of(self, version: str) -> Means | None:
        """The means of a version."""
        return next((means for means in self.means if means.version == version), None)

    def met(self, version: str) -> bool:
        """Whether a version of ours reaches all its figures."""
        means = self.of(version)
        return (
            means is not None
            and means.efficiency >= EFFICIENCY[version]
            and means.over_xla >= SPEED_UP[version]
            and not self.slower[version]
            and not self.more_memory[version]
            and not any(failed in (version, "row") for _, failed, _ in self.failures)
        )


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers; not a number if there is none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def counts(row: Row) -> bool:
    """Whether a row is one of those that the means are of."""
    return row.measured and COUNTED[0] <= row.ratio <= COUNTED[1]


def summarise(rows: Sequence[Row]) -> Summary:
    """What the rows come to."""
    measured = [row for row in rows if row.measured]
    counted = [row for row in measured if counts(row)]
    present = [version for version in VERSIONS if any(version in row.versions for row in counted)]
    ours = [version for version in OURS if any(version in row.versions for row in measured)]
    return Summary(
        rows=len(measured),
        counted=len(counted),
        means=tuple(means_of(counted, version) for version in present),
        slower={v: tuple(row.name for row in measured if slower(row, v)) for v in ours},
        more_memory={v: tuple(row.name for row in measured if more_memory(row, v)) for v in ours},
        misses=tuple(m for v in ours for row in measured if (m := missed(row, v)) is not None),
        failures=tuple((row.name, version, said) for row in rows for version, said in row.failures.items()),
    )


def means_of(rows: Sequence[Row], version: str) -> Means:
    """The means of a version over rows, those in which it did not compile left out."""
    present = [row for row in rows if version in row.versions]

    def over(base: Callable[[Row, bool], float | None], sceptical: bool) -> float:
        pairs = [(base(row, sceptical), row.total_s(version, sceptical=sceptical)) for row in present]
        return geometric_mean(before / after for before, after in pairs if before and after)

    def xla(row: Row, sceptical: bool) -> float | None:
        return row.xla_s(sceptical=sceptical)

    def original(row: Row, sceptical: bool) -> float | None:
        return row.total_s(ORIGINAL, sceptical=sceptical)

    return Means(
        version=version,
        rows=len(present),
        efficiency=geometric_mean(e for row in present if (e := row.efficiency(version))),
        over_xla=over(xla, False),
        over_xla_sceptical=over(xla, True),
        over_original=over(original, False),
        over_original_sceptical=over(original, True),
        compiling=geometric_mean(ratio for row in present if (ratio := compiling(row, version))),
    )


def grouped(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """The counted rows by chip, by pattern, …, in the order of their first row."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if counts(row):
            found.setdefault(key(row), []).append(row)
    return found


def slower(row: Row, version: str) -> bool:
    """Whether a version is slower than the original by more than 1 %."""
    time, before = row.total_s(version), row.total_s(ORIGINAL)
    return time is not None and before is not None and time > SLOWER * before


def more_memory(row: Row, version: str) -> bool:
    """Whether a version needs more temporary memory than the original, by more than `ROUNDING_BYTES`."""
    if version not in row.versions:
        return False
    return row.versions[version].temp_bytes > row.versions[ORIGINAL].temp_bytes + ROUNDING_BYTES


def compiling(row: Row, version: str) -> float | None:
    """Processor time of compiling a version over the original's; None where it was not measured."""
    ours, before = (row.versions[name].compile_cpu_s for name in (version, ORIGINAL))
    return ours / before if ours and before else None


def extra_memory(row: Row, version: str) -> str:
    """How much more temporary memory than the original a version needs, in words."""
    before = row.versions[ORIGINAL].temp_bytes
    extra = row.versions[version].temp_bytes - before
    amount = f"{extra / 1e6:.1f} MB" if extra >= 10**5 else f"{extra} bytes"
    return f"{amount} more temporary memory than the original's {before / 1e6:.1f} MB"


def missed(row: Row, version: str) -> Miss | None:
    """Which figures a row misses, and why; None if it misses none.

    Of the means' figures a row misses the efficiency where it counts and is below; of the speed-up over
    XLA's modes only where one of them is faster.
    """
    figures = row.versions.get(version)
    if figures is None:
        return None
    what = []
    efficiency, xla = row.efficiency(version), row.xla_s()
    if counts(row) and efficiency is not None and efficiency < EFFICIENCY[version]:
        what.append(f"efficiency {efficiency:.2f}")
    if counts(row) and xla is not None and xla < figures.total_s:
        what.append(f"XLA {figures.total_s / xla:.2f} × as fast")
    if slower(row, version):
        what.append(f"{figures.total_s / row.versions[ORIGINAL].total_s:.2f} × the original's time")
    if more_memory(row, version):
        what.append(extra_memory(row, version))
    if not what:
        return None
    return Miss(row=row.name, version=version, what=", ".join(what), reason=reason(row, figures))


def reason(row: Row, figures: Figures) -> str:
    """Where the time above the limit goes in a version's schedule, the largest cause first."""
    total = figures.total_s
    causes: list[tuple[float, str]] = []
    if row.matmul_s and figures.matmul_s > row.matmul_s:
        pieces = (
            f"{figures.matmuls} of {figures.matmul_type}" if figures.matmul_type else f"{figures.matmuls}"
        )
        causes.append(
            (
                figures.matmul_s - row.matmul_s,
                f"partial matmuls take {figures.matmul_s / row.matmul_s:.2f} × the whole: {pieces}",
            )
        )
    other = figures.compute_s - figures.matmul_s
    causes.append((other, f"elementwise work and copies {other / total:.0%}"))
    causes.append((figures.exposed_s, f"exposed {figures.exposed_s / total:.0%}"))
    causes.append((figures.copy_wait_s, f"waits for copies {figures.copy_wait_s / total:.0%}"))
    if row.links_s and figures.link_s > row.links_s:
        causes.append(
            (
                figures.link_s - row.links_s if figures.link_s > row.matmul_s else 0.0,
                f"the busiest link works {figures.link_s / row.links_s:.2f} × the bytes' share of all links",
            )
        )
    causes.sort(key=lambda cause: -cause[0])
    told = [text for seconds, text in causes if seconds > WORTH_TELLING * total]
    if figures.sites and figures.rewritten < figures.sites:
        number = "" if not figures.rewritten else f" {figures.sites - figures.rewritten} of {figures.sites}"
        told.insert(0, f"kept{number}: {' '.join(figures.sentences)}")
    return "; ".join(told) or "each cause is below 1 %"


def to_dict(summary: Summary) -> dict[str, Any]:
    """For JSON, which has no way to write what is not a number."""
    means = [
        {name: None if value != value else value for name, value in dataclasses.asdict(each).items()}
        for each in summary.means
    ]
    met = {version: summary.met(version) for version in summary.slower}
    return {**dataclasses.asdict(summary), "means": means, "met": met}
