"""The decisions and their judgement as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from bench.deciding import chains, judgement
from bench.deciding.chains import Drawn
from bench.deciding.judgement import RIGHT, RING_ERROR, Score, Spread, score
from bench.deciding.rows import Decided, Row
from bench.schedules.tables import micro, table
from bench.versions import spelled
from cost_model.hardware import LEAST_GAIN

NOTES: Final = (
    "All times are modelled: predictions are the cost model's, and compiled times are the real TPU "
    "compiler's schedules of one run, with its own cycle estimates and stated link speeds "
    "(`overlap.hlo.simulate`). No TPU was used.",
    "Chains are random, drawn with a seed; `bench/deciding/chains.py` tells how. None has the dot of a "
    'sample from which the tables of matmuls were made. Decisions are those of `policy="auto"`, made on the '
    "chain's traced program for compile-only devices as a call makes them.",
    "The sample is chosen before anything is decided: as many chains of every chip and pattern, spread "
    "evenly over the ratio of communication to compute.",
    f"On is right if the ring chosen is faster than the chain as written. Off is right if no ring that was "
    f"compiled gains {LEAST_GAIN:.0%} of the chain's time (`auto` asks for {judgement.ASKED[0]:.0%} to "
    f"{judgement.ASKED[-1]:.0%}, by chip); read strictly, if none is faster at all. What does not compile "
    "when it is chosen is wrong.",
    "Regret is the time of what runs over the least of all compiled (rings and the chain as written), less "
    f"1. A loss is a predicted gain of {LEAST_GAIN:.0%} or more where that ring is slower than the chain as "
    "written.",
    "Errors are relative to the compiled time. Of a ring they are of the one with the largest predicted "
    "benefit, chosen or not; of all rings, of every one that was compiled. Bias is the median with its sign.",
)
"""What the figures rest on."""


def document(
    drawn: Sequence[Drawn],
    decided: Sequence[Decided],
    rows: Sequence[Row],
    versions: Mapping[str, str],
    *,
    seed: int,
    most: int,
) -> str:
    """The whole page."""
    searched = f"the {most} best of a search, by prediction" if most else "all of a search"
    parts = ["# Decisions of the cost model", *NOTES]
    made = f"Made with {spelled(versions)}."
    parts += [f"Seed {seed}; rings that are compiled: {searched}, and the one chosen. {made}"]
    parts += ["## Against the goals", goals(rows), "![predicted and compiled times](decisions.svg)"]
    parts += ["## All chains that were drawn", drawn_table(drawn, decided)]
    parts += ["## The sample", scores(rows), errors(rows), errors_by_both(rows)]
    parts += ["### Wrong decisions and losses", wrong(rows), "### Largest regrets", regrets(rows)]
    parts += ["### Largest errors of rings, µs", ring_parts(rows)]
    if any(row.failures for row in rows):
        failures = [(row.chain.name, *failed) for row in rows for failed in row.failures.items()]
        parts += ["### Programs that did not compile", table(("chain", "program", "error"), failures)]
    parts += ["### Every chain of the sample, µs predicted / compiled", times(rows)]
    return "\n\n".join(parts) + "\n"


def content(
    drawn: Sequence[Drawn],
    decided: Sequence[Decided],
    rows: Sequence[Row],
    versions: Mapping[str, str],
    *,
    seed: int,
    most: int,
) -> dict[str, Any]:
    """The same as the page, for JSON."""
    return {
        "schema": 1,
        "versions": dict(versions),
        "notes": list(NOTES),
        "rule": chains.__doc__,
        "goals": {
            "right": RIGHT,
            "mean_regret": judgement.REGRET,
            "losses": judgement.LOSSES,
            "median_ring_error": RING_ERROR,
        },
        "seed": seed,
        "candidates": most,
        "drawn": {
            chip: {"chains": len(of), "on": judgement.share_on(of)}
            for chip, of in _by_chip(drawn, decided).items()
        },
        "met": score(rows).met,
        "all": score(rows).to_dict(),
        **{
            by: {name: score(group).to_dict() for name, group in groups.items()}
            for by, groups in (("chips", _chips(rows)), ("patterns", _patterns(rows)))
        },
        "sample": [row.to_dict() for row in rows],
    }


def goals(rows: Sequence[Row]) -> str:
    """The figures to reach, and what was reached."""
    found = score(rows)
    low, high = judgement.interval(found.right, found.rows)
    lines = [
        ("decisions that are right", percent(found.share), f"≥ {RIGHT:.0%}", met(found.share >= RIGHT)),
        ("the same, read strictly", percent(found.share_strictly), "", ""),
        (
            "mean regret",
            percent(found.mean_regret),
            f"≤ {judgement.REGRET:.0%}",
            met(found.mean_regret <= judgement.REGRET),
        ),
        ("largest regret", percent(found.max_regret), "", ""),
        ("losses", str(len(found.losses)), "none", met(not found.losses)),
        (
            "median error of rings",
            percent(found.ring.median),
            f"≤ {RING_ERROR:.0%}",
            met(found.ring.median <= RING_ERROR),
        ),
        ("median error of all rings compiled", percent(found.rings.median), "", ""),
        ("median error of chains as written", percent(found.original.median), "", ""),
    ]
    said = (
        f"{found.right} of {found.rows} decisions in the sample are right; of all chains like these, with "
        f"95 % certainty, between {low:.1%} and {high:.1%}."
    )
    return f"{table(('', 'found', 'goal', ''), lines)}\n\n{said}"


def drawn_table(drawn: Sequence[Drawn], decided: Sequence[Decided]) -> str:
    """Chains drawn and the part that becomes rings, by chip and pattern."""
    lines = []
    for chip, of in _by_chip(drawn, decided).items():
        cells = [chip, str(len(of)), percent(judgement.share_on(of))]
        patterns = {each.name: each.pattern for each in drawn}
        for pattern in chains.PATTERNS:
            cells.append(percent(judgement.share_on([d for d in of if patterns[d.name] == pattern])))
        lines.append(cells)
    return table(("chip", "chains", "on", *(f"on, {p}" for p in chains.PATTERNS)), lines)


def scores(rows: Sequence[Row]) -> str:
    """Decisions by chip and by pattern."""
    lines = []
    for name, group in _groups(rows):
        found = score(group)
        lines.append(
            (
                name,
                str(found.rows),
                str(found.on),
                percent(found.share),
                percent(found.share_strictly),
                percent(found.mean_regret),
                percent(found.max_regret),
                str(len(found.losses)),
            )
        )
    return table(("", "chains", "on", "right", "strictly", "mean regret", "largest regret", "losses"), lines)


def errors(rows: Sequence[Row]) -> str:
    """Errors of predictions by chip and by pattern."""
    lines = []
    for name, group in _groups(rows):
        found = score(group)
        lines.append(
            (name, *spread_cells(found.ring), *spread_cells(found.rings), *spread_cells(found.original))
        )
    headings = [""]
    for what in ("ring", "all rings", "as written"):
        headings += [f"{what}: median", "p90", "bias"]
    return table(headings, lines)


def errors_by_both(rows: Sequence[Row]) -> str:
    """Median errors of the ring and of the chain as written, by chip and pattern."""
    chips, patterns = _chips(rows), _patterns(rows)

    def cell(found: Score) -> str:
        return f"{percent(found.ring.median)} / {percent(found.original.median)}" if found.rows else ""

    lines = [
        [pattern, *(cell(score(r for r in group if r.chain.chip == chip)) for chip in chips)]
        for pattern, group in patterns.items()
    ]
    return f"Median error of the ring / of the chain as written:\n\n{table(('', *chips), lines)}"


def wrong(rows: Sequence[Row]) -> str:
    """Every decision that is wrong, in either reading, and every loss."""
    lines = []
    for row in judgement.judged(rows):
        marks = [] if judgement.right(row) else ["wrong"]
        if not judgement.right(row, least_gain=0.0):
            marks = marks or ["wrong, read strictly"]
        if judgement.loses(row):
            marks.append("loss")
        if marks:
            lines.append((row.chain.name, ", ".join(marks), *_both(row)))
    headings = ("chain", "", "decided", "as written", "ring", "best compiled")
    return table(headings, lines) if lines else "None."


def regrets(rows: Sequence[Row], count: int = 15) -> str:
    """The chains in which most is left on the table."""
    found = [(regret, row) for row in judgement.judged(rows) if (regret := judgement.regret(row))]
    found.sort(key=lambda pair: -pair[0])
    lines = [(row.chain.name, percent(regret), *_both(row)) for regret, row in found[:count]]
    return table(("chain", "regret", "decided", "as written", "ring", "best compiled"), lines)


def ring_parts(rows: Sequence[Row], count: int = 15) -> str:
    """The rings that are predicted worst, with the parts of their times."""
    found = [
        (error, row, schedule)
        for row in judgement.judged(rows)
        for schedule, error in judgement.ring_errors(row).items()
        if schedule == row.decided.schedule
    ]
    found.sort(key=lambda each: -abs(each[0]))
    lines = []
    for error, row, schedule in found[:count]:
        priced, compiled = row.predicted[schedule], row.compiled[schedule]
        predicted = (priced.overlapped_s, priced.partials_s, priced.hops_s)
        timed = (row.rings_s[schedule], compiled.compute_s, compiled.matmul_s)
        waiting = (compiled.exposed_s, compiled.copy_wait_s)
        lines.append((row.chain.name, schedule, f"{error:+.1%}", *map(micro, (*predicted, *timed, *waiting))))
    headings = ("chain", "ring", "error", "predicted", "partial dots", "hops", "compiled", "computing")
    return table((*headings, "of it matmuls", "waiting for hops", "for copies"), lines)


def times(rows: Sequence[Row]) -> str:
    """Predicted and compiled times of every chain."""
    lines = [(row.chain.name, f"{chains.ratio(row.chain):.2f}", *_both(row)) for row in rows]
    return table(
        ("chain", "communication / compute", "decided", "as written", "ring", "best compiled"), lines
    )


def _both(row: Row) -> tuple[str, ...]:
    """What is decided, with times predicted / compiled, and the best ring."""
    decided = row.decided

    def pair(predicted_s: float, compiled_s: float | None) -> str:
        return f"{micro(predicted_s)} / {'failed' if compiled_s is None else micro(compiled_s)}"

    best = min(row.rings_s, key=lambda schedule: row.rings_s[schedule], default="")
    found = f"{best}: {pair(row.predicted[best].overlapped_s, row.rings_s[best])}" if best else ""
    return (
        "on" if decided.rewritten else "off",
        pair(decided.original_s, row.original_s),
        f"{decided.schedule}: {pair(decided.ring_s, row.seconds(decided.schedule))}",
        "the same" if best == decided.schedule else found,
    )


def percent(share: float) -> str:
    """With one decimal; nothing for what is not a number."""
    return "" if math.isnan(share) else f"{share:.1%}"


def met(reached: bool) -> str:
    """Whether a goal is reached, in a word."""
    return "met" if reached else "**missed**"


def spread_cells(found: Spread) -> tuple[str, str, str]:
    """Median, 90th percentile and bias."""
    bias = "" if math.isnan(found.bias) else f"{found.bias:+.1%}"
    return percent(found.median), percent(found.p90), bias


def _groups(rows: Sequence[Row]) -> Iterable[tuple[str, Sequence[Row]]]:
    return (*_chips(rows).items(), *_patterns(rows).items(), ("all", rows))


def _chips(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return judgement.grouped(rows, lambda row: row.chain.chip)


def _patterns(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return judgement.grouped(rows, lambda row: row.chain.pattern)


def _by_chip(drawn: Sequence[Drawn], decided: Sequence[Decided]) -> dict[str, list[Decided]]:
    found: dict[str, list[Decided]] = {}
    for chain, each in zip(drawn, decided, strict=True):
        found.setdefault(chain.chip, []).append(each)
    return found
