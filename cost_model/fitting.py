"""Rates, overheads and latencies from measured times: robust statistics and fits, without the devices.

Fits minimise the mean of |log(measured / model)|, in which an outlier counts once, not squared, and a short
time as much as a long one. The models are the cost model's own: `matmul_s`, and `collectives.hop_s`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cost_model.matmul import Matmul

TILES: Final = (1, 8, 16, 32, 64, 128, 256)
"""Multiples to which hardware is known to pad."""

CLEARLY: Final = 0.8
"""By which factor another tile must lower the error to be believed."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Repeated measurements of one thing.

    Attributes:
      seconds: their median.
      spread: median absolute deviation from it, as a fraction of it.
    """

    seconds: float
    spread: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        """The median of times and their spread.

        Raises:
          ValueError: there are none, or the median is not positive and finite.
        """
        if not times:
            raise ValueError("no times were measured")
        median = statistics.median(times)
        if not (math.isfinite(median) and median > 0):
            raise ValueError(f"measured times must be positive and finite, their median is {median!r}")
        return cls(median, statistics.median(abs(time - median) for time in times) / median)


@dataclass(frozen=True, slots=True)
class MatmulFit:
    """What times of matmuls say of a device.

    Attributes:
      flops: FLOP/s that large matmuls reach, per dtype.
      overhead_s: fixed cost of every matmul.
      tile: the multiples of (M, K, N) to which they are padded.
      error: the mean of |log(measured / model)|.
    """

    flops: Mapping[str, float]
    overhead_s: float
    tile: tuple[int, int, int]
    error: float


@dataclass(frozen=True, slots=True)
class HopFit:
    """What times of messages say of a link: max(latency, bytes / bandwidth).

    Attributes:
      latency_s: of the shortest.
      bytes_per_s: of long ones.
      error: the mean of |log(measured / model)|.
    """

    latency_s: float
    bytes_per_s: float
    error: float


def fit_matmuls(
    samples: Sequence[tuple[Matmul, float]], hbm_bytes_per_s: float, tile: tuple[int, int, int]
) -> MatmulFit:
    """Fits overhead, rate per dtype and tile of `matmul_s`.

    Args:
      samples: matmuls and their seconds: from small ones, which tell the overhead, to large ones, which tell
        the rate; sizes just above a multiple of a tile tell the tile.
      hbm_bytes_per_s: bandwidth of main memory.
      tile: the tile to keep unless another one explains the times clearly better.

    Raises:
      ValueError: a dtype has fewer than three samples, or a time is not positive and finite.
    """
    dtypes = sorted({matmul.dtype for matmul, _ in samples})
    for dtype in dtypes:
        if sum(matmul.dtype == dtype for matmul, _ in samples) < 3:
            raise ValueError(f"fewer than three matmuls of {dtype} were timed")
    if not samples:
        raise ValueError("no matmuls were timed")
    _check(seconds for _, seconds in samples)

    def fitted(tile: tuple[int, int, int]) -> MatmulFit:
        padded = [
            (dtypes.index(matmul.dtype), matmul.padded_flops(tile), matmul.bytes / hbm_bytes_per_s, seconds)
            for matmul, seconds in samples
        ]

        def error(values: Sequence[float]) -> float:
            overhead_s, *rates = values
            return statistics.fmean(
                abs(math.log(seconds / (overhead_s + max(flops / rates[dtype], memory_s))))
                for dtype, flops, memory_s, seconds in padded
            )

        start = [min(seconds for _, seconds in samples) / 2]
        start += [max(flops / s for of, flops, _, s in padded if of == i) for i in range(len(dtypes))]
        (overhead_s, *rates), least = minimised(error, start)
        return MatmulFit(dict(zip(dtypes, rates, strict=True)), overhead_s, tile, least)

    best = fitted(tile)
    for dim in (0, 1, 2):
        others = [fitted(_with(tile, dim, size)) for size in TILES if size != tile[dim]]
        # The smallest of those that explain the times equally well.
        challenger = min(others, key=lambda fit: (round(fit.error, 3), fit.tile))
        if challenger.error < CLEARLY * best.error and best.error > 1e-3:
            best, tile = challenger, challenger.tile
    return best


def fit_hop(samples: Sequence[tuple[float, float]]) -> HopFit:
    """Fits latency and bandwidth to (bytes, seconds) of messages, short and long.

    Raises:
      ValueError: there are fewer than three, or a time is not positive and finite.
    """
    if len(samples) < 3:
        raise ValueError(f"three messages at least tell latency and bandwidth, got {len(samples)}")
    _check(seconds for _, seconds in samples)

    def error(values: Sequence[float]) -> float:
        latency_s, bytes_per_s = values
        return statistics.fmean(
            abs(math.log(seconds / max(latency_s, size / bytes_per_s))) for size, seconds in samples
        )

    shortest, longest = min(samples), max(samples)
    (latency_s, bytes_per_s), least = minimised(error, [shortest[1], longest[0] / longest[1]])
    return HopFit(latency_s, bytes_per_s, least)


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """Seconds per byte of (bytes, seconds): the median slope between two samples (Theil and Sen).

    Raises:
      ValueError: there are fewer than two sizes, or longer work takes no longer.
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(samples, 2) if a[0] != b[0]]
    if not slopes:
        raise ValueError("a bandwidth needs times of at least two sizes")
    found = statistics.median(slopes)
    if found <= 0:
        raise ValueError("more bytes took no longer: the times are too noisy to tell a bandwidth")
    return found


def hidden(first_s: float, second_s: float, together_s: float) -> float:
    """How much of the shorter of two activities ran beside the other: 0 none, 1 all of it."""
    share = (first_s + second_s - together_s) / min(first_s, second_s)
    return min(1.0, max(0.0, share))


def minimised(
    error: Callable[[Sequence[float]], float], start: Sequence[float]
) -> tuple[tuple[float, ...], float]:
    """Positive values at which an error is least, and that error: a pattern search along their logarithms."""
    values, least, step = list(start), error(start), 2.0
    moves = [
        [sign if i == j else 0.0 for j in range(len(start))]
        for i in range(len(start))
        for sign in (1.0, -1.0)
    ]
    # A rate and an overhead trade off against each other: steps that change both at once.
    moves += [[-1.0] * len(start), [1.0] * len(start), [1.0] + [-1.0] * (len(start) - 1)]
    moves += [[-1.0] + [1.0] * (len(start) - 1)]
    while step > 1 + 1e-5:
        better = False
        for move in moves:
            tried = [value * step**by for value, by in zip(values, move, strict=True)]
            if (found := error(tried)) < least:
                values, least, better = tried, found, True
        if not better:
            step = math.sqrt(step)
    return tuple(values), least


def _with(tile: tuple[int, int, int], dim: int, size: int) -> tuple[int, int, int]:
    m, k, n = (size if at == dim else old for at, old in enumerate(tile))
    return m, k, n


def _check(times: Iterable[float]) -> None:
    for time in times:
        if not (math.isfinite(time) and time > 0):
            raise ValueError(f"measured times must be positive and finite, got {time!r}")
