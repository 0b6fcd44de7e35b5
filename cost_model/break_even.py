"""Where rewriting begins or ceases to pay: over tokens per device, axis size and the links' bandwidth.

Found on the cost model itself: a scan over a geometric grid, and a bisection wherever it changes between two
of its points whether rewriting pays. Where it changes twice between two points both are missed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cost_model.axis import Axis
from cost_model.explanation import check_axis, explain
from cost_model.hardware import Hardware
from cost_model.plain_chain import Forms, PlainChain, pays
from cost_model.ring import Estimate
from cost_model.whole import whole

Variable = Literal["tokens", "axis_size", "bandwidth"]
HowOften = Literal["always", "never", "sometimes"]

AXIS_SIZES: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
LARGEST: Final = 2**20
"""Tokens per device up to which is looked."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value at which rewriting begins or ceases to pay.

    Attributes:
      at: the value; of whole numbers the first on the far side.
      pays_above: whether rewriting pays from there on, or up to there.
    """

    at: float
    pays_above: bool


@dataclass(frozen=True, slots=True)
class BreakEven:
    """How a chain's benefit depends on one thing, all else equal.

    Attributes:
      variable: "tokens", the rows (of M) that each device contributes or keeps, all where M is not cut;
        "axis_size", devices on the axis, with the whole dot's sizes as they are, but M rounded up to a
        multiple of them; "bandwidth", bytes per second of the axis's links, one way; of an axis over several
        hosts or slices also of the network between them, in proportion.
      here: the value as given.
      points: (value, the best form's price), in ascending order; it pays as `plain_chain.pays` has it.
      crossings: where that changes.
      pays: in how much of what was looked at rewriting pays.
    """

    variable: Variable
    here: float
    points: tuple[tuple[float, Estimate], ...]
    crossings: tuple[Crossing, ...]
    pays: HowOften

    @property
    def pays_at_first(self) -> bool:
        """Whether rewriting pays at the least value that was looked at."""
        return not self.crossings[0].pays_above if self.crossings else self.pays == "always"


def break_evens(
    chain_for: Callable[[int], PlainChain],
    axis: Axis,
    m: int,
    *,
    among: Forms | None = None,
    resize: bool = True,
) -> tuple[BreakEven, ...]:
    """Scans tokens per device, axis size, and bandwidth.

    Args:
      chain_for: the chain whose dot has so many rows M, all else fixed.
      axis: the mesh axis.
      m: the rows M as given.
      among: the forms of rings to consider; all if None.
      resize: whether to look at other axis sizes too, over which the dot can be cut evenly: each an axis of
        which only the size is known (`Axis.of_size`).

    Raises:
      ValueError: M is below 1, or as `explain`.
      TypeError: `chain_for` is no function, the axis none, or M no whole number.
    """
    if not callable(chain_for):
        raise TypeError(
            "chain_for is a function from rows to their chain, such as "
            f"lambda m: chain_of('all_gather_dot', m, 8192, 2048), got {chain_for!r}"
        )
    check_axis(axis)
    if (m := whole(m, "M")) < 1:
        raise ValueError(f"M must be at least 1, got {m!r}")
    # The scan over tokens meets no M that does not fit.
    if misfit := chain_for(m).misfit(axis.size):
        raise ValueError(misfit)

    def priced(chain: PlainChain, on: Axis) -> Estimate:
        return explain(chain, on, among and among(chain, on)).best.estimate

    shares = axis.size if chain_for(m).dots[0].cut == "m" else 1
    found = [
        _scanned(
            "tokens",
            m / shares,
            _grid(1, LARGEST, m / shares),
            lambda tokens: priced(chain_for(max(1, round(tokens)) * shares), axis),
            axis.hardware,
            whole=True,
        )
    ]
    if resize:

        def cut_for(size: int) -> PlainChain:
            return chain_for(m if size == axis.size else _multiple(m, size))

        points = _sizes(
            sorted({axis.size, *(size for size in AXIS_SIZES if size <= max(m, 2))}),
            lambda size: not cut_for(size).misfit(size),
            lambda size: priced(
                cut_for(size), axis if size == axis.size else Axis.of_size(size, axis.hardware)
            ),
            axis.hardware,
        )
        found.append(
            _break_even("axis_size", axis.size, points, _steps(points, axis.hardware), axis.hardware)
        )
    speed = axis.hardware.axis_bytes_per_s
    found.append(
        _scanned(
            "bandwidth",
            speed,
            _grid(speed / 256, min(256 * speed, sys.float_info.max), speed),
            lambda value: priced(chain_for(m), _faster(axis, value / speed)),
            axis.hardware,
            whole=False,
        )
    )
    return tuple(found)


def _scanned(
    variable: Variable,
    here: float,
    grid: Sequence[float],
    estimate: Callable[[float], Estimate],
    hardware: Hardware,
    *,
    whole: bool,
) -> BreakEven:
    """The prices over a grid, and the crossings between its points by bisection."""
    points = [(value, estimate(value)) for value in grid]
    crossings = []
    for (low, before), (high, after) in itertools.pairwise(points):
        pays_above = pays(after, hardware)
        if pays(before, hardware) == pays_above:
            continue
        while (high - low > 1) if whole else (high / low > 1.001):
            middle = (low + high) // 2 if whole else math.sqrt(low * high)
            if pays(estimate(middle), hardware) == pays_above:
                high = middle
            else:
                low = middle
        crossings.append(Crossing(high, pays_above))
    return _break_even(variable, here, points, crossings, hardware)


def _break_even(
    variable: Variable,
    here: float,
    points: Sequence[tuple[float, Estimate]],
    crossings: Sequence[Crossing],
    hardware: Hardware,
) -> BreakEven:
    """What a scan comes to."""
    gains = {pays(estimate, hardware) for _, estimate in points}
    how_much: HowOften = "sometimes" if len(gains) > 1 else "always" if True in gains else "never"
    return BreakEven(variable, here, tuple(points), tuple(crossings), how_much)


def _sizes(
    sizes: Iterable[int], fits: Callable[[int], bool], estimate: Callable[[int], Estimate], hardware: Hardware
) -> list[tuple[float, Estimate]]:
    """The prices of those of these sizes that fit, and of the last ones before each crossing and after it.

    Args:
      sizes: rising.
      fits: whether the chain can be cut for a size.
      estimate: of a size that fits.
      hardware: the devices.
    """
    points = {size: estimate(size) for size in sizes if fits(size)}
    for low, high in itertools.pairwise(tuple(points)):
        pays_above = pays(points[high], hardware)
        if pays(points[low], hardware) == pays_above:
            continue
        inside = list(filter(fits, range(low + 1, high)))
        while inside:
            middle = len(inside) // 2
            size = inside[middle]
            points[size] = estimate(size)
            above = pays(points[size], hardware) == pays_above
            inside = inside[:middle] if above else inside[middle + 1 :]
    return [(float(size), points[size]) for size in sorted(points)]


def _steps(points: Sequence[tuple[float, Estimate]], hardware: Hardware) -> list[Crossing]:
    """Crossings of a scan whose points are all there is."""
    return [
        Crossing(value, pays(after, hardware))
        for (_, before), (value, after) in itertools.pairwise(points)
        if pays(before, hardware) != pays(after, hardware)
    ]


def _grid(low: float, high: float, here: float) -> list[float]:
    """Two points per octave, and the one that matters."""
    count = round(2 * math.log2(high / low))
    values: Iterable[float] = (low * (high / low) ** (i / count) for i in range(count + 1))
    if low == 1:
        values = (float(round(value)) for value in values)
        here = float(max(1, round(here)))
    return sorted({*values, here})


def _multiple(m: int, size: int) -> int:
    """M, made divisible by an axis size."""
    return -(-m // size) * size


def _faster(axis: Axis, factor: float) -> Axis:
    """The axis with links, and a network, of so many times the bandwidth."""
    hardware = dataclasses.replace(
        axis.hardware,
        link_bytes_per_s=factor * axis.hardware.link_bytes_per_s,
        dcn_bytes_per_s=factor * axis.hardware.dcn_bytes_per_s,
    )
    if axis.topology is None:
        return Axis(hardware, axis.size)
    # The same orders: which of them are best does not depend on how fast all links are alike.
    topology = dataclasses.replace(axis.topology, hardware=hardware)
    return dataclasses.replace(axis, hardware=hardware, topology=topology)
