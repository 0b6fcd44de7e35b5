"""The speed-up and its interval: by hand, by simulation, and where nothing may be said."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from overlap.speedup import FEWEST, Speedup, speedup, spread


def times(median_s: float, rounds: int, noise: float, seed: int) -> list[float]:
    """Noisy step times."""
    return list(median_s * np.random.default_rng(seed).lognormal(0, noise, rounds))


def test_the_spread_is_median_quartiles_and_extremes() -> None:
    found = spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert found is not None
    assert (found.fastest_s, found.low_s, found.median_s, found.high_s, found.slowest_s) == (1, 2, 3, 4, 5)
    assert spread([]) is None


def test_the_ratio_is_that_of_the_medians() -> None:
    found = speedup([3.0, 2.0, 100.0], [1.0, 2.0, 1.5])
    assert found is not None
    assert found.ratio == 2


def test_the_interval_is_that_of_every_way_to_draw_the_rounds() -> None:
    before, after = [2.0, 2.2, 2.4, 1.9, 2.1, 2.3], [1.0, 1.3, 1.1, 1.2, 0.9, 1.4]
    # All 6^6 draws of six rounds, where the bootstrap takes a sample of them.
    rows = np.array(list(itertools.product(range(6), repeat=6)))
    ratios = np.median(np.array(before)[rows], axis=1) / np.median(np.array(after)[rows], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    found = speedup(before, after)
    assert found is not None and found.low is not None and found.high is not None
    assert found.low == pytest.approx(low, rel=0.02)
    assert found.high == pytest.approx(high, rel=0.02)
    assert found.verdict == "faster"


def test_equal_times_and_seeds_give_equal_intervals() -> None:
    before, after = times(1, 12, 0.1, 1), times(1, 12, 0.1, 2)
    assert speedup(before, after) == speedup(before, after)
    assert speedup(before, after) != speedup(before, after, seed=1)


def test_what_slows_a_whole_round_cancels() -> None:
    slow = np.array([1, 1, 1, 1, 8, 8, 8, 8, 8.0])
    found = speedup(list(2 * slow), list(slow))
    assert found is not None
    assert (found.ratio, found.low, found.high) == (2, 2, 2)


def test_equally_fast_variants_are_seldom_told_apart() -> None:
    verdicts = [
        found.verdict
        for seed in range(60)
        if (found := speedup(times(1, 10, 0.1, 2 * seed), times(1, 10, 0.1, 2 * seed + 1)))
    ]
    # An interval of 95 % misses in 3 of 60, and one of so few rounds somewhat more often.
    assert verdicts.count("within noise") >= 51


@pytest.mark.parametrize(("after", "verdict"), [(0.5, "faster"), (2.0, "slower")])
def test_a_large_difference_is_told(after: float, verdict: str) -> None:
    found = speedup(times(1, 10, 0.05, 0), times(after, 10, 0.05, 1))
    assert found is not None
    assert found.verdict == verdict


def test_few_rounds_have_no_interval() -> None:
    few = speedup([2.0] * (FEWEST - 1), [1.0] * (FEWEST - 1))
    assert few == Speedup(ratio=2, low=None, high=None, level=0.95, rounds=FEWEST - 1)
    assert few.verdict == "too few rounds"
    enough = speedup([2.0] * FEWEST, [1.0] * FEWEST)
    assert enough is not None
    assert enough.verdict == "faster"


def test_rounds_that_only_one_variant_has_do_not_count() -> None:
    found = speedup([2.0, 2.0, 9.0, 9.0], [1.0, 1.0])
    assert found is not None
    assert (found.ratio, found.rounds) == (2, 2)


def test_without_times_there_is_no_ratio() -> None:
    assert speedup([], [1.0]) is None
    assert speedup([1.0], [0.0]) is None


def test_many_rounds_take_little_memory() -> None:
    found = speedup(times(1, 3000, 0.1, 0), times(1, 3000, 0.1, 1))
    assert found is not None and found.low is not None and found.high is not None
    assert found.high - found.low < 0.03
