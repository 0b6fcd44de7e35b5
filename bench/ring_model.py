"""The cost model's rings against the compiled schedules of the grid: how far its predictions are off.

    python -m bench.ring_model

Reads bench/results/tpu_schedules.json, predicts every row of one chain anew, and compares; and says what
would be reached if all hops were hidden. Compiles nothing, but needs libtpu to describe the devices. Both
sides are modelled: the one by formulas, the other from the schedules that the TPU compiler chose.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bench.schedules import decided, grid, measure, programs, run, summary
from bench.schedules.case import Case
from bench.schedules.rows import ORIGINAL, OURS, Row
from bench.versions import spelled
from cost_model import Estimate, by_name
from overlap import tpu_target

if __name__ == "__main__":
    os.environ.update(tpu_target.ENVIRONMENT)

NAME: Final = "ring_model"
MOST: Final = 0.08
"""Median error of rings to stay below."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """One version of a row's program.

    Attributes:
      row: the row's name.
      chip: its chip.
      schedule: the ring's, in words; "as written" for the original.
      predicted_s: by the cost model.
      compiled_s: of the compiled schedule.
    """

    row: str
    chip: str
    schedule: str
    predicted_s: float
    compiled_s: float

    @property
    def error(self) -> float:
        """How much more is predicted, as a part of the compiled time."""
        return self.predicted_s / self.compiled_s - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Priced:
    """The estimates of one row's program.

    Attributes:
      as_written: in seconds.
      rings: of every schedule that a search would consider, by its name.
    """

    as_written: float
    rings: dict[str, Estimate]


def priced(row: Row, case: Case) -> Priced | None:
    """The row's program, priced; None where it has several chains."""
    if row.pattern in ("mlp", "mlp_grad") or ORIGINAL not in row.versions:
        return None
    problem, mesh = programs.problem(case), measure.tpu_mesh(case.slice)
    plan = decided.plan_of(programs.manual(problem, mesh), programs.operands(problem, mesh), "auto")
    candidates = decided.candidates_of(plan, mesh, by_name(case.slice.hardware))
    _, decision = decided.decision_of(plan)
    assert decision.estimate is not None
    rings = {str(schedule): estimate for schedule, estimate in candidates.values()}
    return Priced(decision.estimate.original_s, rings)


def predictions(row: Row, of: Priced) -> list[Prediction]:
    """Of the row's original and its different rings."""
    found = {
        "as written": Prediction(
            row.name, row.chip, "as written", of.as_written, row.versions[ORIGINAL].total_s
        )
    }
    for version in OURS:
        figures = row.versions.get(version)
        if figures is not None and figures.schedule in of.rings:
            predicted_s = of.rings[figures.schedule].overlapped_s
            found[figures.schedule] = Prediction(
                row.name, row.chip, figures.schedule, predicted_s, figures.total_s
            )
    return list(found.values())


def hidden_s(row: Row, of: Priced) -> float:
    """How far hiding alone goes: the fastest form's seconds with all hops hidden, or what is reached."""
    hidden = [max(each.partials_s, each.hops_s, row.limit_s) for each in of.rings.values()]
    reached = [row.versions[version].total_s for version in (ORIGINAL, *OURS) if version in row.versions]
    return min(*hidden, *reached)


def reaches(rows: Mapping[str, tuple[Row, float]]) -> dict[str, dict[str, float]]:
    """Per pattern and of all: counted rows, and geometric means of the limit over the times.

    Args:
      rows: and their times with all hops hidden, by name.
    """
    groups = summary.grouped([row for row, _ in rows.values()], lambda row: row.pattern)

    def means(of: list[Row]) -> dict[str, float]:
        reached = {
            version: summary.geometric_mean(
                efficiency for row in of if (efficiency := row.efficiency(version)) is not None
            )
            for version in OURS
        }
        hidden = summary.geometric_mean(row.limit_s / rows[row.name][1] for row in of)
        return {"rows": len(of), **reached, "hidden": hidden}

    groups["all"] = [row for of in groups.values() for row in of]
    return {name: means(of) for name, of in groups.items()}


def errors(found: Sequence[Prediction]) -> dict[str, dict[str, float]]:
    """Number of predictions, median and 90th percentile of their errors, of originals and rings, per chip."""
    groups: dict[str, list[float]] = {}
    for each in found:
        kind = "as written" if each.schedule == "as written" else "rings"
        for name in (f"{kind}, all", f"{kind}, {each.chip}"):
            groups.setdefault(name, []).append(abs(each.error))
    return {
        name: {
            "count": len(of),
            "median": statistics.median(of),
            "p90": sorted(of)[int(0.9 * (len(of) - 1))],
        }
        for name, of in sorted(groups.items())
    }


def document(
    found: Sequence[Prediction], told: dict[str, dict[str, float]], made_with: dict[str, str]
) -> str:
    """The page."""
    lines = [
        "# Predictions against compiled schedules",
        "",
        "Rows of the [grid](tpu_schedules.md) with one chain: the cost model's time against that of the",
        f"schedule which the TPU compiler chose. Both are modelled. Made with {spelled(made_with)}.",
        "",
        "| | predictions | median error | 90th percentile |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {of['count']} | {of['median']:.1%} | {of['p90']:.1%} |"
        for name, of in errors(found).items()
    ]
    lines += [
        "",
        "## If all hops were hidden",
        "",
        "Of the limit, in the rows where communication is 0.3 to 3 × compute (geometric means): what the",
        "library's schedules reach, and what would be reached with every hop of the best form beside its",
        "partial matmuls and copies, as the cost model prices them. What is missing then is what partial",
        "matmuls and copies take longer than the whole matmuls. Of a psum's gather only the limit counts.",
        "",
        "| pattern | rows | `auto` | `verify` | all hops hidden |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {of['rows']} | {of['auto']:.3f} | {of['verify']:.3f} | {of['hidden']:.3f} |"
        for name, of in told.items()
    ]
    lines += ["", "| row | schedule | predicted | compiled | error |", "|---|---|---|---|---|"]
    lines += [
        f"| {each.row} | {each.schedule} | {each.predicted_s * 1e6:.0f} µs | {each.compiled_s * 1e6:.0f} µs "
        f"| {each.error:+.0%} |"
        for each in found
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Compares, prints, writes; the exit status is 1 where the figure is missed, 2 without libtpu."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    if (said := tpu_target.missing()) is not None:
        print(f"{NAME}: {said}", file=sys.stderr)
        return 2
    path = run.RESULTS / "tpu_schedules.json"
    if not path.exists():
        print(f"{NAME}: there is no {path} yet; make bench-tpu writes it", file=sys.stderr)
        return 2
    content: Any = json.loads(path.read_text("utf-8"))
    cases = {case.name: case for case in grid.tpu_cases()}
    rows_of_grid = map(Row.from_dict, content["rows"])
    prices = [(row, each) for row in rows_of_grid if (each := priced(row, cases[row.name])) is not None]
    found = [each for row, prices_of in prices for each in predictions(row, prices_of)]
    hidden = reaches({row.name: (row, hidden_s(row, prices_of)) for row, prices_of in prices})
    made_with = run.versions("libtpu")
    told = errors(found)
    for name, of in told.items():
        print(f"{name}: {of['count']} rows, median {of['median']:.1%}, 90 % within {of['p90']:.1%}")
    print("If all hops were hidden: {hidden:.3f} of the limit; verify {verify:.3f}".format(**hidden["all"]))
    rows = [{**dataclasses.asdict(each), "error": each.error} for each in found]
    stored = {"versions": made_with, "errors": told, "hidden": hidden, "rows": rows}
    run.write(run.RESULTS, NAME, document(found, hidden, made_with), stored)
    print(f"\nWritten: {run.RESULTS / NAME}.md and .json")
    return 0 if told["rings, all"]["median"] <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
