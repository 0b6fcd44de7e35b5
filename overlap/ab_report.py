"""The report of an A/B profile, as a table, a page and JSON: a function with the rewrite and without."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import jax

from overlap import units
from overlap.agreement import Agreement
from overlap.device_activity import Activity, CollectiveActivity
from overlap.figures_table import figures_table
from overlap.hlo.timeline import Timeline
from overlap.output_file import write_text
from overlap.plain_text import columns, plain_text, printable
from overlap.profile_events import Source
from overlap.speedup import FEWEST, Speedup, Spread, spread

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

SCHEMA: Final = 1
"""Version of the JSON form of an ``ABReport``."""

NOT_A_TERMINAL: Final = 100
"""Columns of the table where there is no terminal to ask."""

MOST: Final = 5
"""Collectives of each variant that the table lists; the page and the JSON have all."""

ABSENT: Final = "–"

Stage = Literal["compilation", "warm-up", "timed rounds", "traced rounds"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a variant was given up.

    Attributes:
      stage: what it failed in.
      error: type and message of the exception.
    """

    stage: Stage
    error: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What was measured of one variant.

    Attributes:
      name: "original" or "overlapped".
      times_s: wall-clock seconds of each timed round, from the call until its results were ready; without the
        profiler.
      compile_s: wall-clock seconds of tracing, rewriting and compiling; None if that failed. Little where the
        function had been called with such arguments before.
      failure: why it was given up; None if all went well. What was measured before stands.
      activity: what the devices did, from the trace; None without a trace that shows it.
      timeline: one traced round on one device.
    """

    name: str
    times_s: tuple[float, ...] = ()
    compile_s: float | None = None
    failure: Failure | None = None
    activity: Activity | None = None
    timeline: Timeline | None = None

    @property
    def spread(self) -> Spread | None:
        """Median, quartiles and extremes of the step times; None if there are none."""
        return spread(self.times_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How and on what it was measured.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      device_kind: such as "TPU v5p".
      devices: how many the program runs on, of all processes together.
      process, processes: the index of this process, and how many there are.
      rounds, warmup, traced_rounds: calls of each variant that were timed, not timed, and traced.
    """

    platform: str
    device_kind: str
    devices: int
    process: int
    processes: int
    rounds: int
    warmup: int
    traced_rounds: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ABReport:
    """A function measured with its collectives overlapped and as it was; ``overlap.ab_profile`` makes it.

    ``print(report)`` shows a table, ``rich.print(report)`` shows it in colour.

    Attributes:
      name: of the function.
      original, overlapped: the variants.
      conditions: how and on what it was measured.
      speedup: of the overlapped variant; None if a variant has no times.
      agreement: whether the results of the two were equal.
      source: where the activities come from; None if there are none.
      trace_dir: where this process's trace is, for XProf or Perfetto; None if there is none.
      notes: what a reader must know to judge the figures, in sentences.
    """

    name: str
    original: Variant
    overlapped: Variant
    conditions: Conditions
    speedup: Speedup | None
    agreement: Agreement
    source: Source | None = None
    trace_dir: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def variants(self) -> tuple[Variant, Variant]:
        """The original, then the overlapped one."""
        return self.original, self.overlapped

    @property
    def failures(self) -> tuple[tuple[str, Failure], ...]:
        """Name and failure of each variant that failed."""
        return tuple((v.name, v.failure) for v in self.variants if v.failure is not None)

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, whose report is the one to show where there are several."""
        return self.conditions.process == 0

    @property
    def title(self) -> str:
        """What was measured, where."""
        c = self.conditions
        where = (
            f"{c.devices} × {c.device_kind} ({c.platform})"
            if c.devices > 1
            else f"{c.device_kind} ({c.platform})"
        )
        if c.processes > 1:
            where += f", process {c.process} of {c.processes}"
            where += "" if self.is_main else " (process 0 has the report)"
        return f"{self.name or 'function'} on {where}"

    @property
    def verdict(self) -> str:
        """What may be said of the speed-up, in one or two sentences."""
        if self.speedup is None:
            failed = " and the ".join(name for name, _ in self.failures)
            return (
                f"No speed-up: the {failed} variant failed."
                if failed
                else "No speed-up: no times to compare."
            )
        ratio, verdict = self.speedup.ratio, self.speedup.verdict
        if verdict == "too few rounds":
            rounds = "1 round" if self.speedup.rounds == 1 else f"{self.speedup.rounds} rounds"
            return (
                f"Speed-up ×{ratio:.3f} in {rounds}, which may be noise: an interval takes {FEWEST} at least."
            )
        interval = f"{self.speedup.level:.0%}".replace("%", " %") + (
            f" bootstrap interval {self.speedup.low:.3f} to {self.speedup.high:.3f}"
        )
        if verdict == "within noise":
            return f"Speed-up ×{ratio:.3f} ({interval}): the difference is within noise."
        return f"Speed-up ×{ratio:.3f} ({interval}): overlapped is {verdict}, beyond noise."

    def __str__(self) -> str:
        return printable(self.text())

    def text(self, width: int | None = None) -> str:
        """The report as plain text.

        Args:
          width: columns that no line exceeds; None for the terminal's, or 100 where there is none.
        """
        return plain_text(self, width=columns(NOT_A_TERMINAL) if width is None else width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        yield Text(self.title, "bold")
        yield Text(self.method)
        yield Text()
        yield _figures(self)
        yield Text()
        for name, failure in self.failures:
            yield Text(f"The {name} variant failed in {failure.stage}: {failure.error}", "bold red")
        yield Text(self.verdict, "bold")
        yield Text(self.agreement.sentence, "bold red" if self.agreement.agreed is False else "")
        if any(v.activity is not None and v.activity.collectives for v in self.variants):
            yield Text()
            yield _collectives(self)
        yield Text()
        for note in self.notes:
            yield Text(note)
        if self.trace_dir is not None:
            # On one line, however long, so that it can be copied.
            yield Text(f"Trace: {self.trace_dir}", no_wrap=True, overflow="ignore")

    @property
    def method(self) -> str:
        """How it was measured, in a sentence."""
        c = self.conditions
        return (
            f"Measured: {_count(c.rounds, 'round')} of original, overlapped in turn, each call waited for, "
            f"after {_count(c.warmup, 'warm-up call')} of each."
        )

    def rows(self) -> list[tuple[str, list[str]]]:
        """The table of figures: what, and its value for each variant."""
        found = [(what, [_of(value, v.spread) for v in self.variants]) for what, value in _TIMES]
        found.append(("trace and compile", [_of(units.duration, v.compile_s) for v in self.variants]))
        if self.source is not None:
            found += [(what, [_of(value, v.activity) for v in self.variants]) for what, value in _ACTIVITY]
        return found

    def to_json(self) -> str:
        """A JSON object with all figures. Times are seconds; the events themselves are in the trace."""
        from overlap import __version__

        data: dict[str, Any] = {
            "schema": SCHEMA,
            "versions": {"overlap": __version__, "jax": jax.__version__},
            "name": self.name,
            "conditions": dataclasses.asdict(self.conditions),
            "verdict": self.verdict,
            "speedup": None if self.speedup is None else dataclasses.asdict(self.speedup),
            "agreement": dataclasses.asdict(self.agreement),
            "source": self.source,
            "trace_dir": self.trace_dir,
            "notes": list(self.notes),
        }
        for variant in self.variants:
            data[variant.name] = {
                "times_s": list(variant.times_s),
                "spread": None if variant.spread is None else dataclasses.asdict(variant.spread),
                "compile_s": variant.compile_s,
                "failure": None if variant.failure is None else dataclasses.asdict(variant.failure),
                "activity": None if variant.activity is None else dataclasses.asdict(variant.activity),
            }
        return json.dumps(_plain(data), indent=2, allow_nan=False, ensure_ascii=False)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes one self-contained page: the table, the collectives, and both measured timelines.

        Args:
          path: of the file, which is replaced if it exists.

        Returns:
          The path.

        Raises:
          TypeError: ``path`` is no path.
        """
        from overlap.ab_page import page

        return write_text(path, page(self))


# The rows of the table: their names, and their texts.

_TIMES: Final[tuple[tuple[str, Callable[[Spread], str]], ...]] = (
    ("step time, median", lambda s: units.duration(s.median_s)),
    ("  quartiles", lambda s: f"{units.duration(s.low_s)} to {units.duration(s.high_s)}"),
    ("  fastest, slowest", lambda s: f"{units.duration(s.fastest_s)}, {units.duration(s.slowest_s)}"),
)
_ACTIVITY: Final[tuple[tuple[str, Callable[[Activity], str]], ...]] = (
    ("on the device", lambda a: units.duration(a.span_s)),
    ("  in matmuls", lambda a: units.duration(a.matmul_s)),
    ("  collectives in flight", lambda a: units.duration(a.collective_s)),
    ("  compute alone", lambda a: units.percent(a.compute_only_s, a.span_s)),
    ("  communication alone", lambda a: units.percent(a.communication_only_s, a.span_s)),
    ("  both", lambda a: units.percent(a.both_s, a.span_s)),
    ("  idle", lambda a: units.percent(a.idle_s, a.span_s)),
)


def _of(value: Callable[[Any], str], figures: Any) -> str:
    return ABSENT if figures is None else value(figures)


def _figures(report: ABReport) -> Table:
    table = figures_table(
        "measured", *(f"{v.name} (failed)" if v.failure else v.name for v in report.variants)
    )
    for what, values in report.rows():
        table.add_row(what, *values)
    return table


def _collectives(report: ABReport) -> Table:
    from rich.text import Text

    table = figures_table("most exposed collectives", "exposed", "in flight", "runs")
    table.add_column("where", overflow="fold")
    for variant in report.variants:
        found = variant.activity.collectives if variant.activity is not None else ()
        if found:
            table.add_row(Text(f"{variant.name}:", "italic"), "", "", "", "")
        for c in found[:MOST]:
            name = f"  {c.name}" if c.opcode in ("", c.name) else f"  {c.name} ({c.opcode})"
            times = units.duration(c.exposed_s), units.duration(c.in_flight_s)
            table.add_row(Text(units.printable(name)), *times, f"{c.executions:g}", Text(place(c)))
        if len(found) > MOST:
            table.add_row(f"  and {len(found) - MOST} more", "", "", "", "")
    return table


def place(collective: CollectiveActivity) -> str:
    """The source line of a collective, its file as seen from the current directory where it is below that."""
    source = collective.source or collective.op_name or "unknown"
    here = os.getcwd().rstrip(os.sep) + os.sep
    return units.printable(source.removeprefix(here))


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _plain(value: Any) -> Any:
    """As JSON can say it: a number that is not finite is null."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
