"""How much faster one series of step times is than another, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

LEVEL: Final = 0.95
"""Share of repetitions of the experiment whose interval should hold the true speed-up."""

FEWEST: Final = 6
"""Rounds below which no interval is given.

Of two variants that are equally fast, one is the faster in all of n rounds with probability 2 · 2⁻ⁿ (the sign
test). That falls below 5 % at n = 6 only: with fewer rounds no outcome at all could show a difference.
"""

RESAMPLES: Final = 10_000
"""Bootstrap samples. The bounds then repeat to a few thousandths of the interval's width."""

_CHUNK: Final = 1_000_000
"""Numbers drawn at a time, which bounds the memory."""

Verdict = Literal["faster", "slower", "within noise", "too few rounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Where a series of times lies, in seconds.

    Attributes:
      median_s: half of the times are below it.
      low_s, high_s: the quartiles.
      fastest_s, slowest_s: the extremes.
    """

    median_s: float
    low_s: float
    high_s: float
    fastest_s: float
    slowest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The ratio of two median step times, original to overlapped; above 1 the overlapped one is faster.

    Attributes:
      ratio: of the medians.
      low, high: bounds of its bootstrap interval; None where there are fewer than ``FEWEST`` rounds.
      level: of the interval.
      rounds: pairs of times that it rests on.
    """

    ratio: float
    low: float | None
    high: float | None
    level: float
    rounds: int

    @property
    def verdict(self) -> Verdict:
        """What the interval allows to be said."""
        if self.low is None or self.high is None:
            return "too few rounds"
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "within noise"


def spread(times_s: Sequence[float]) -> Spread | None:
    """Median, quartiles and extremes of times in seconds; None of none."""
    if not times_s:
        return None
    fastest, low, median, high, slowest = np.quantile(np.asarray(times_s), (0, 0.25, 0.5, 0.75, 1)).tolist()
    return Spread(median_s=median, low_s=low, high_s=high, fastest_s=fastest, slowest_s=slowest)


def speedup(
    original_s: Sequence[float], overlapped_s: Sequence[float], *, seed: int = 0, level: float = LEVEL
) -> Speedup | None:
    """The ratio of the medians and its percentile bootstrap interval (Efron and Tibshirani 1993, ch. 13).

    Whole rounds are drawn, an original's time with the overlapped one's measured right after it: what slows
    both for a while (another process, a hot chip) then cancels.

    Args:
      original_s, overlapped_s: seconds of each round, in order. Of series of different lengths (a variant
        failed on the way) the rounds that both have count.
      seed: of the draws: equal times and seeds give equal bounds.
      level: of the interval. Where one of n comparisons may be told by chance, that of each is
        1 - (1 - level) / n (Bonferroni).

    Returns:
      The speed-up; None where a series is empty or a median is not above 0.
    """
    rounds = min(len(original_s), len(overlapped_s))
    before, after = np.asarray(original_s[:rounds], float), np.asarray(overlapped_s[:rounds], float)
    if rounds == 0 or min(np.median(before), np.median(after)) <= 0:
        return None
    low = high = None
    if rounds >= FEWEST:
        low, high = _interval(before, after, np.random.default_rng(seed), level)
    ratio = float(np.median(before) / np.median(after))
    return Speedup(ratio=ratio, low=low, high=high, level=level, rounds=rounds)


def _interval(before: Any, after: Any, rng: np.random.Generator, level: float) -> tuple[float, float]:
    ratios: list[Any] = []
    for drawn in range(0, RESAMPLES, step := max(1, _CHUNK // len(before))):
        rows = rng.integers(len(before), size=(min(step, RESAMPLES - drawn), len(before)))
        ratios.append(np.median(before[rows], axis=1) / np.median(after[rows], axis=1))
    low, high = np.quantile(np.concatenate(ratios), ((1 - level) / 2, (1 + level) / 2)).tolist()
    return low, high
