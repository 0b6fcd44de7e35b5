"""What the sample says of the decisions: the share that is right, regret, losses, and errors of predictions.

A decision runs the chain as written ("off") or as the ring with the largest predicted benefit ("on"). It is
judged by compiled schedules: that of the chain as written, and those of the rings that were compiled.

- On is right if the ring it runs is faster than the chain as written. Off is right if no ring gains
  ``LEAST_GAIN`` of the chain's time, whatever ``auto`` asks of a ring on that chip. Read strictly, off is
  right only if no ring is faster at all.
- Regret is the time of what runs over the least of all compiled, less 1.
- A loss is a predicted gain of ``LEAST_GAIN`` or more where that ring is slower than the chain as written.
- The error of a prediction is its distance from the compiled time, as a part of that.

A chain that does not compile as written says nothing. If what a decision runs does not compile, it is wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.deciding.rows import Decided, Row
from bench.schedules.case import SLICES
from cost_model import by_name
from cost_model.hardware import LEAST_GAIN

RIGHT: Final = 0.97
REGRET: Final = 0.02
LOSSES: Final = 0
RING_ERROR: Final = 0.08
"""The goals: share of decisions that are right, mean regret, losses, median error of rings."""

ASKED: Final = tuple(sorted({by_name(where.hardware).least_gain for where in SLICES}))
"""What ``auto`` asks a ring to gain, of the chips; the least first."""

CERTAIN: Final = 1.96
"""Standard deviations of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Relative errors of predictions.

    Attributes:
      count: how many there are.
      median, p90: of their sizes; not a number if there are none.
      bias: the median with its sign: below 0 where predictions are too low.
    """

    count: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Some rows, judged.

    Attributes:
      rows: how many there are.
      on: in how many a ring is chosen.
      right, right_strictly: how many decisions are right.
      mean_regret, max_regret: of those rows in which what is chosen compiled; not a number if there is none.
      losses: names of the rows in which a gain is predicted and the ring is slower.
      ring: errors of the rings with the largest predicted benefit, one per row.
      rings: errors of all rings that were compiled.
      original: errors of the chains as written.
    """

    rows: int
    on: int
    right: int
    right_strictly: int
    mean_regret: float
    max_regret: float
    losses: tuple[str, ...]
    ring: Spread
    rings: Spread
    original: Spread

    @property
    def share(self) -> float:
        """Of decisions that are right; not a number if there are none."""
        return self.right / self.rows if self.rows else math.nan

    @property
    def share_strictly(self) -> float:
        """The same, read strictly."""
        return self.right_strictly / self.rows if self.rows else math.nan

    @property
    def met(self) -> bool:
        """Whether all goals are reached."""
        return (
            self.share >= RIGHT
            and self.mean_regret <= REGRET
            and len(self.losses) <= LOSSES
            and self.ring.median <= RING_ERROR
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON, where what is not a number is null."""
        found = {**dataclasses.asdict(self), "share": self.share, "share_strictly": self.share_strictly}
        return {name: _without_nan(value) for name, value in found.items()}


def judged(rows: Iterable[Row]) -> list[Row]:
    """The rows that say something: the chain as written compiled."""
    return [row for row in rows if row.original_s is not None]


def score(rows: Iterable[Row]) -> Score:
    """What the rows come to; those that say nothing are left out."""
    rows = judged(rows)
    regrets = [found for row in rows if (found := regret(row)) is not None]
    return Score(
        rows=len(rows),
        on=sum(row.decided.rewritten for row in rows),
        right=sum(right(row) for row in rows),
        right_strictly=sum(right(row, least_gain=0.0) for row in rows),
        mean_regret=float(np.mean(regrets)) if regrets else math.nan,
        max_regret=max(regrets, default=math.nan),
        losses=tuple(row.chain.name for row in rows if loses(row)),
        ring=spread(error for row in rows if (error := ring_error(row)) is not None),
        rings=spread(error for row in rows for error in ring_errors(row).values()),
        original=spread(original_error(row) for row in rows),
    )


def right(row: Row, *, least_gain: float = LEAST_GAIN) -> bool:
    """Whether the decision is right; with a ``least_gain`` of 0, read strictly."""
    original_s = _original_s(row)
    if row.decided.rewritten:
        ring_s = row.seconds(row.decided.schedule)
        return ring_s is not None and ring_s < original_s
    best_s = min(row.rings_s.values(), default=math.inf)
    if least_gain == 0:
        return best_s >= original_s
    return best_s > (1 - least_gain) * original_s


def regret(row: Row) -> float | None:
    """How much longer what runs takes than the best of all compiled; None if it did not compile."""
    runs_s = row.seconds(row.decided.runs)
    return None if runs_s is None else runs_s / min(_original_s(row), *row.rings_s.values(), math.inf) - 1


def loses(row: Row) -> bool:
    """Whether a gain is predicted where the ring is slower than the chain as written."""
    ring_s = row.seconds(row.decided.schedule)
    return row.decided.gain >= LEAST_GAIN and ring_s is not None and ring_s > _original_s(row)


def ring_errors(row: Row) -> dict[str, float]:
    """Schedule → error of its prediction, with its sign, of the rings that compiled."""
    return {
        schedule: row.predicted[schedule].overlapped_s / seconds - 1
        for schedule, seconds in row.rings_s.items()
    }


def ring_error(row: Row) -> float | None:
    """That of the ring with the largest predicted benefit; None if it did not compile."""
    return ring_errors(row).get(row.decided.schedule)


def original_error(row: Row) -> float:
    """That of the chain as written."""
    return row.decided.original_s / _original_s(row) - 1


def spread(errors: Iterable[float]) -> Spread:
    """What errors with signs come to."""
    found = np.array(list(errors))
    if not found.size:
        return Spread(0, math.nan, math.nan, math.nan)
    sizes = np.abs(found)
    return Spread(
        found.size, float(np.median(sizes)), float(np.quantile(sizes, 0.9)), float(np.median(found))
    )


def interval(right: int, of: int) -> tuple[float, float]:
    """Between what the share of all chains lies with 95 % certainty, given a sample's (Wilson's interval)."""
    if not of:
        return 0.0, 1.0
    share, weight = right / of, CERTAIN**2 / of
    middle = (share + weight / 2) / (1 + weight)
    reach = CERTAIN * math.sqrt(share * (1 - share) / of + weight / (4 * of)) / (1 + weight)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """The rows by chip, by pattern, …, in the order of their first row."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def share_on(decided: Sequence[Decided]) -> float:
    """The part of the chains that become rings; not a number if there are none."""
    return sum(each.rewritten for each in decided) / len(decided) if decided else math.nan


def _original_s(row: Row) -> float:
    if row.original_s is None:
        raise ValueError(f"{row.chain.name} as written was not compiled")
    return row.original_s


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
