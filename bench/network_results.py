"""What the network benchmark found: rows, what follows from them, and how they are shown."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from overlap.speedup import LEVEL, Speedup, speedup, spread

ALONE: Final = ("compute", "communication")
LIBRARY: Final = ("auto", "autotune")
RACED: Final = (*ALONE, "original", "textbook", *LIBRARY)

EVEN: Final = 1.0
"""The ratio of communication to compute at which overlapping gains the most."""

EFFICIENCY: Final = 0.75
"""Goal: of the single chains under ``autotune`` where the ratio is even."""

MLP_SPEEDUP: Final = 1.2
"""Goal: of the MLP step under ``autotune`` where the ratio is even."""

PREDICTION: Final = 0.15
"""Goal: how far predicted and measured times are apart in the median, of the measured."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case at one link rate.

    Attributes:
      processes: how many, one device each.
      case: name.
      ratio: communication to compute, as asked for; None over loopback, whose rate is not set.
      rate_bytes_per_s: of the links; None over loopback.
      rows: of the matmul on each device.
      times_s: per variant the seconds of each round, those of the slowest process.
      predicted_s: per variant what the cost model says, where it says something.
      schedules: per variant of the library what became of each collective.
      apart: per variant the largest difference from the original's results, relative to the largest value.
      date: the day of the race; empty where it was not noted.
    """

    processes: int
    case: str
    ratio: float | None
    rate_bytes_per_s: float | None
    rows: int
    times_s: Mapping[str, Sequence[float]]
    predicted_s: Mapping[str, float]
    schedules: Mapping[str, Sequence[str]]
    apart: Mapping[str, float]
    date: str = ""

    @property
    def key(self) -> tuple[int, str, float | None]:
        """What the row is of; a run has one of each."""
        return self.processes, self.case, self.ratio

    def median_s(self, variant: str) -> float:
        """Median seconds of a variant."""
        return statistics.median(self.times_s[variant])

    @property
    def limit_s(self) -> float:
        """What no overlap can beat: the longer of the two halves alone."""
        return max(self.median_s(half) for half in ALONE)

    def efficiency(self, variant: str) -> float:
        """The limit over the variant's time."""
        return self.limit_s / self.median_s(variant)

    def speedup(self, variant: str, level: float = LEVEL) -> Speedup:
        """Over the original."""
        found = speedup(self.times_s["original"], self.times_s[variant], level=level)
        assert found is not None
        return found

    def error(self, variant: str) -> float | None:
        """By how much the prediction is off, relative to the measured median; None where there is none."""
        if variant not in self.predicted_s:
            return None
        return self.predicted_s[variant] / self.median_s(variant) - 1


def predicted(sites: Sequence[Mapping[str, Any]], compute_s: float) -> dict[str, float]:
    """The predicted times of the program as written and as the library made it.

    The time of compute alone is measured; every collective adds what the cost model says: its own time where
    it is kept, and what its ring takes beyond its dots where it is rewritten.

    Args:
      sites: of the report, as JSON.
      compute_s: compute alone.

    Returns:
      Seconds of ``original`` and ``made``; nothing where a site has no estimate.
    """
    if any(site["estimate"] is None for site in sites):
        return {}
    original = made = compute_s
    for site in sites:
        estimate, count = site["estimate"], site["count"]
        original += count * estimate["collective_s"]
        ring = estimate["overlapped_s"] - estimate["dot_s"]
        made += count * (ring if site["rewritten"] else estimate["collective_s"])
    return {"original": original, "made": made}


def outcome(site: Mapping[str, Any]) -> str:
    """What became of a collective, in a few words."""
    return str(site["schedule"] if site["rewritten"] else "kept")


def to_dict(row: Row) -> dict[str, Any]:
    """The row and what follows from it, as JSON values."""
    gains = {variant: row.speedup(variant) for variant in row.times_s}
    raced = {
        variant: {
            **dataclasses.asdict(quartiles),
            "efficiency": row.efficiency(variant),
            "predicted_s": row.predicted_s.get(variant),
            "prediction_error": row.error(variant),
            "speedup": dataclasses.asdict(gains[variant]) | {"verdict": gains[variant].verdict},
        }
        for variant, times in row.times_s.items()
        if (quartiles := spread(times)) is not None
    }
    return {**dataclasses.asdict(row), "variants": raced}


def from_dict(values: Mapping[str, Any]) -> Row:
    """The row that ``to_dict`` made JSON values of."""
    names = {field.name for field in dataclasses.fields(Row)}
    return Row(**{name: value for name, value in values.items() if name in names})


def dates(rows: Sequence[Row]) -> str:
    """When the rows were measured, where not all were on one day; else nothing."""
    days = Counter(row.date or "a day not noted" for row in rows)
    if len(days) < 2:
        return ""
    return "Measured on: " + ", ".join(f"{day} ({days[day]} rows)" for day in sorted(days)) + "."


def header() -> tuple[str, ...]:
    """The columns of the table."""
    return (
        *("P", "case", "comm./comp.", "compute", "communication", "original", "textbook", "auto"),
        *("autotune", "× auto", "× autotune", "efficiency auto", "efficiency autotune"),
        *("predicted original", "predicted auto", "autotune took"),
    )


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table: milliseconds with half the distance of the quartiles."""

    def time(variant: str) -> str:
        found = spread(row.times_s[variant])
        assert found is not None
        return f"{found.median_s * 1e3:.1f} ± {(found.high_s - found.low_s) / 2 * 1e3:.1f}"

    def gain(variant: str) -> str:
        found = row.speedup(variant)
        mark = {"slower": " slower", "within noise": " ~"}.get(found.verdict, "")
        return f"{found.ratio:.2f}{mark}"

    def error(variant: str) -> str:
        found = row.error(variant)
        return "" if found is None else f"{found:+.0%}"

    took = row.schedules.get("autotune", ())
    return (
        str(row.processes),
        row.case,
        "" if row.ratio is None else f"{row.ratio:g} ({row.median_s(ALONE[1]) / row.median_s(ALONE[0]):.2f})",
        *(time(variant) for variant in RACED),
        *(gain(variant) for variant in LIBRARY),
        *(f"{row.efficiency(variant):.2f}" for variant in LIBRARY),
        *(error("original"), error("auto")),
        "; ".join(dict.fromkeys(took)),
    )


def table(rows: Sequence[Row]) -> str:
    """All rows as a Markdown table."""
    lines = [header(), tuple("---" for _ in header()), *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Something the run is to show, and what it did show."""

    name: str
    found: str
    met: bool


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The goals that these rows can tell about."""
    found: list[Goal] = []
    compared = [(row, variant) for row in rows for variant in LIBRARY if row.ratio is not None]
    # Of many equal pairs a few differ by chance: the level is that of all comparisons together.
    level = 1 - (1 - LEVEL) / max(1, len(compared))
    slower = [
        f"{row.case} P={row.processes} at {row.ratio:g} ({variant})"
        for row, variant in compared
        if row.speedup(variant, level).verdict == "slower"
    ]
    found.append(
        Goal(
            name=f"no case slower than as written ({LEVEL:.0%}, all {len(compared)} comparisons together)",
            found="; ".join(slower) or "none",
            met=not slower,
        )
    )
    even = [row for row in rows if row.ratio == EVEN]
    chains = [row for row in even if row.case != "mlp_step"]
    if chains:
        least = min(chains, key=lambda row: row.efficiency("autotune"))
        value = least.efficiency("autotune")
        found.append(
            Goal(
                name=f"efficiency of single chains with autotune, at 1: ≥ {EFFICIENCY}",
                found=f"least {value:.2f} ({least.case}, P={least.processes}); median "
                f"{statistics.median(row.efficiency('autotune') for row in chains):.2f}",
                met=value >= EFFICIENCY,
            )
        )
    for row in (row for row in even if row.case == "mlp_step"):
        value = row.speedup("autotune").ratio
        found.append(
            Goal(
                name=f"MLP step with autotune, P={row.processes}, at 1: ≥ {MLP_SPEEDUP}×",
                found=f"{value:.2f}×",
                met=value >= MLP_SPEEDUP,
            )
        )
    errors = [
        abs(error) for row in rows for name in ("original", "auto") if (error := row.error(name)) is not None
    ]
    if errors:
        value = statistics.median(errors)
        found.append(
            Goal(
                name=f"predicted and measured apart, in the median: ≤ {PREDICTION:.0%}",
                found=f"{value:.0%}",
                met=value <= PREDICTION,
            )
        )
    return found
