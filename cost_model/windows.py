"""The windows in which a TPU's compiler runs a matmul, and the cycles that it estimates for it.

The compiler cuts `[m, k] · [k, n]` into windows of rows, of what is contracted and of columns, and runs them
one after the other, columns outermost and what is contracted innermost. While the matrix unit works on one,
the next windows of the operands come from main memory and the last window of the result goes there. Of all
windows that fit on chip it takes those of the least cycles. The formulas here are those of its own log (see
`bench/matmul_tables.py`), which gives every term of every window that it tries. Where K is whole, and where
it is cut:

    A + B + C + O  +  rows' steps · max(C, A + O)  +  columns' steps · max(C, A + B + O)
    A + B + C + F + O  +  (tiles - 1) · max(C + F, A + B + O)  +  other steps · max(C, A + B)

    A, B  a window of the left and of the right operand: latency + bytes / rate; 0 if it is on chip. With one
          window of rows A is not read again
    O     a window of the result, and of an accumulator that is read for it: likewise. Of elements of two
          bytes the compiler takes three times as many to leave
    C     the matrix unit: start + tiles of K · tiles of columns · max(rows, least rows) / rows a cycle, or
          the loads and stores of registers beside it, if that is more
    F     adding up partial sums: cycles per register of the result

Windows are the least of those that give as many steps, and multiples of 8 rows and of 128 columns. One that
is put into its place in a larger array must divide what it is a part of, along the dim that is placed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from cost_model.tile import LANES, SUBLANES, by_columns, padded, tile_rows

NARROW_ROWS: Final = tile_rows(1)
"""The multiple that windows of one-byte elements are of rows."""

PACKED_ROWS: Final = {"int8": NARROW_ROWS, "bfloat16": 2 * SUBLANES, "float32": 2 * SUBLANES}
"""The multiple to which rows are padded of the copy that the matrix unit reads, by what it computes in."""

SUM_BYTES: Final = 8
"""Bytes on chip of an element of the result: a float32 sum, and two buffers of what leaves."""

SINGLE_BYTES: Final = 4
"""Those of the sum alone."""

LEAVING: Final = {1: 6.0, 2: 6.0}
"""Bytes for which an element of the result is taken to leave, by its width; others are taken as they are."""

SMALLER: Final = (0, 1, 2, 3, 4, 6, 8, 12, 17, 24, 34, 48, 0)
"""Which windows of rows are tried beside one of K and columns: so many steps smaller than the largest that
surely fits, and, for the last of these, all rows."""

LEAST_AREA: Final = {False: 1 << 16, True: 1 << 14}
"""Elements of a window of K and columns: smaller ones are tried only where the operand is little. And fewer
where windows must divide the rows: there may be very many then."""

LITTLE_DEPTH: Final = 2
"""Tiles of K of which windows of few columns are tried too, beside many rows."""

MOST_AREA: Final = 1 << 24
"""The same: larger ones do not fit on any chip."""

Along = Literal["rows", "columns"]
"""Where a result is put into its place in a larger array: among its rows or among its columns."""

Near = Literal["never", "between", "short", "whole"]
"""How windows of a result that stays on chip count: not at all; all (v4); all, but with the bytes that the
compiler takes too many (v5e, 7x: none of float32); or those but for the last one's and those between windows
of columns, where K is whole (v6e)."""

RETRY_BYTES: Final = 2**21
"""By how much less the memory for windows is in every further try, where they did not fit."""

MOST_RETRIES: Final = 8
"""After so many the windows are taken as they are."""

COPY_BYTES: Final = 2
"""Of an element of rows that are copied, which was not reckoned with."""

LIMIT_BYTES: Final = 2**25
"""What they may take, where the compiler tries again."""

CROWDED: Final = 0.8
"""Share of that beyond which rows that are copied, with their copies, are taken to need twice as much, where
results are put into place: of six such windows the log says 1.4 to 2.1 times, and tries of a ninth of the
memory."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """How the matrix unit computes elements of some kind.

    Attributes:
      start_cycles: of every window.
      depth: elements of K that are contracted at once, the multiple to which a window's are padded.
      rows_per_cycle: of one such part of K and as many columns as the unit is wide.
      least_rows: rows that take as long as one, since weights are loaded meanwhile.
      copy_bytes: bytes on chip of an element of a window that the unit reads, beside those that arrive.
      register_cycles: of registers of the left and of the right operand, and of what is added up, as many as
        of the padded result for every 128 elements of the padded K: cycles of loading and storing them, which
        may be more than those of the matrix unit.
    """

    start_cycles: float
    depth: int
    rows_per_cycle: float
    least_rows: int
    copy_bytes: float
    register_cycles: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a chip's compiler takes the core of the chip to do.

    Attributes:
      clock_hz: of the core.
      cores: that share every matmul: each takes half of the windows of rows, of columns or of the batch.
      lanes: width of the matrix unit, the multiple to which columns are padded.
      vmem_bytes: for windows.
      bytes_per_cycle: to and from main memory.
      read_cycles, write_cycles: latency of a window.
      read_together: whether the first windows of both operands have one latency.
      exact: whether a window that reaches over the edge counts with its mean bytes.
      adding_vmem_bytes: how much less there is where an accumulator is read.
      sum_cycles: per register of the result, where K is cut.
      convert_cycles: per register of the result's and of an accumulator's float32 sum, to make elements of
        four bytes of it, or the sum of them; of narrower ones twice as many.
      near_row_cycles: per register of a left operand that lies on chip but not in VMEM (v4: CMEM).
      near_window_cycles: per window of such a right operand.
      near_bytes_per_cycle: of such operands of one byte, which are read as from main memory; 0 where not.
      retries: whether windows of odd rows may turn out not to fit, and others are taken: see `cycles`.
      near_leaves: how windows of a result that stays on chip count.
      units: how it computes, by what the matrix unit computes in.

    Raises:
      ValueError: a number is missing, negative or not finite, or zero where it divides.
    """

    clock_hz: float
    cores: int
    lanes: int
    vmem_bytes: float
    bytes_per_cycle: float
    read_cycles: float
    write_cycles: float
    read_together: bool
    exact: bool
    adding_vmem_bytes: float
    sum_cycles: float
    convert_cycles: float
    near_row_cycles: float
    near_window_cycles: float
    near_bytes_per_cycle: float
    retries: bool
    near_leaves: Near
    units: dict[str, Unit]

    def __post_init__(self) -> None:
        positive = {"clock_hz", "cores", "lanes", "vmem_bytes", "bytes_per_cycle", "depth", "rows_per_cycle"}
        values = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        for unit in self.units.values():
            values += [(field.name, getattr(unit, field.name)) for field in dataclasses.fields(unit)]
        for name, value in values:
            if name == "units" or (isinstance(value, bool) and name in ("read_together", "exact", "retries")):
                continue
            if name == "near_leaves" and value in get_args(Near):
                continue
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise ValueError(f"{name} must be a number, got {number!r}")
                if not (math.isfinite(number) and number >= (math.ulp(0) if name in positive else 0)):
                    raise ValueError(f"{name} must be positive and finite, got {number!r}")
        if sorted(self.units) != ["bfloat16", "float32", "int8"]:
            raise ValueError(f"units must be int8, bfloat16 and float32, got {', '.join(sorted(self.units))}")

    def __hash__(self) -> int:
        return hash((self.clock_hz, self.bytes_per_cycle, self.vmem_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A matmul, `[batch, m, k] · [batch, k, n]`, and what is fused with it.

    Attributes:
      batch, m, k, n: sizes, at least 1.
      unit: what the matrix unit computes in.
      lhs_width, rhs_width, out_width: bytes per element of the operands and of the result.
      lhs_near, rhs_near, result_near: whether it lies on the chip.
      accumulator_width: bytes per element of an array of the result's shape that is added to the product; 0
        if there is none.
      accumulator_near: whether that lies on the chip.
      placed: where the result is put into a larger array; None if it is one.
      by_columns: whether the result must be laid out by columns. The compiler then lays operands out anew in
        windows of whole tiles, and takes twice the memory for that.
    """

    batch: int
    m: int
    k: int
    n: int
    unit: str
    lhs_width: float
    rhs_width: float
    out_width: float
    lhs_near: bool = False
    rhs_near: bool = False
    result_near: bool = False
    accumulator_width: float = 0.0
    accumulator_near: bool = False
    placed: Along | None = None
    by_columns: bool = False

    @property
    def turned(self) -> bool:
        """Whether rows are laid out in the place of columns: they must be, or the result is padded less."""
        return self.by_columns or by_columns(self.m, self.n)

    @property
    def read_width(self) -> float:
        """Bytes per element that are read for an accumulator, which is in main memory."""
        return 0.0 if self.accumulator_near else self.accumulator_width


@functools.lru_cache(1 << 14)
def cycles(of: Fused, rates: Rates) -> float:
    """Cycles that the compiler estimates, for the best of all windows that fit on chip.

    Where they turn out not to fit, the compiler tries again with less memory, and then with as much less as
    was missing, and a bit (7x).
    """
    found = _Search(of, rates)
    for tried in range(1, MOST_RETRIES + 1):
        lacking_bytes = found.lacking_bytes
        if lacking_bytes <= 0:
            break
        less_bytes = tried * RETRY_BYTES + (lacking_bytes if tried > 1 else 0.0)
        found = _Search(of, _less(rates, less_bytes))
    return found.least


def _less(rates: Rates, less_bytes: float) -> Rates:
    """The same with less memory for windows."""
    return dataclasses.replace(rates, vmem_bytes=max(RETRY_BYTES, rates.vmem_bytes - less_bytes))


class _Search:
    """The windows that are tried, as arrays: over parts of the batch, rows, and pairs of K and columns.

    Names are of a matmul that is not turned: the rows of one that is are columns, and its right operand is
    read once per window of them.
    """

    def __init__(self, of: Fused, rates: Rates) -> None:
        self.of, self.rates, self.unit = of, rates, rates.units[of.unit]
        if of.by_columns:
            self.unit = dataclasses.replace(self.unit, copy_bytes=2 * self.unit.copy_bytes)
        self.turned = of.turned
        self.sublane_size, self.lane_size = (of.n, of.m) if self.turned else (of.m, of.n)
        k, lanes = _areas(_tiles(of.k), _tiles(self.lane_size), rates.exact, self._placed("rows"))
        if self._placed("columns") and self.lane_size % LANES == 0:
            divides = self.lane_size % lanes == 0
            k, lanes = k[divides], lanes[divides]
        self.k, self.lanes = k[None, None, :], lanes[None, None, :]
        self.batch = np.array(_batches(of.batch), float)[:, None, None]
        self.rows = self._rows()

    @functools.cached_property
    def _best(self) -> tuple[int, float]:
        """The index of the best windows, or of the smallest, if none fits; and their cycles."""
        held_bytes, cycles = self._vmem_bytes(), self._cycles()
        found = np.where(held_bytes <= self._room_bytes, cycles, np.inf)
        index = int(found.argmin())
        if not math.isfinite(found.flat[index]):
            index = int(held_bytes.argmin())
        return index, float(cycles.flat[index])

    @property
    def least(self) -> float:
        """Cycles of the best windows."""
        return self._best[1]

    @property
    def lacking_bytes(self) -> float:
        """By how much the best windows turn out not to fit.

        Where their rows are no whole packed tiles the compiler copies them, which it does not reckon with
        (7x: five such windows took 0 to 15 % more than this, by its log; and see `CROWDED`).
        """
        if not self.rates.retries or self.of.unit == "int8":
            return 0.0
        arrays = np.broadcast_arrays(self.batch, self.rows, self.k, self.lanes, *self._counts())
        batch, rows, k, lanes, batches, down, deep, across = (
            float(each.flat[self._best[0]]) for each in arrays
        )
        if rows % PACKED_ROWS[self.of.unit] == 0:
            return 0.0
        if self.turned:
            down, across = across, down
        taken = COPY_BYTES * rows * k + rows * lanes * (SUM_BYTES if deep > 1 else SUM_BYTES / 2)
        for sublanes, size, steps in ((True, rows, down), (False, lanes, across)):
            width, near = self._operand(sublanes=sublanes)
            if not near:
                taken += size * k * width * (1 if batches == steps == deep == 1 else 2)
        twice = 2 * COPY_BYTES * batch * rows * k
        if self.of.placed == "rows" and twice > CROWDED * LIMIT_BYTES:
            return 2 * twice - LIMIT_BYTES
        return batch * taken - LIMIT_BYTES

    @property
    def _room_bytes(self) -> float:
        adding = self.of.read_width > 0
        return self.rates.vmem_bytes - (self.rates.adding_vmem_bytes if adding else 0.0)

    def _placed(self, along: Along) -> bool:
        """Whether the result is placed along the sublanes (`rows`, if not turned) or the lanes."""
        if self.of.placed is None:
            return False
        return (self.of.placed == along) != self.turned

    def _rows(self) -> _Floats:
        """Rows of the windows: the most that fit beside the others, and fewer."""
        grain = LANES if self.of.by_columns else NARROW_ROWS if self.of.unit == "int8" else SUBLANES
        tried = np.array(_windows(self.sublane_size, grain), float)
        if self._placed("rows") and self.sublane_size % SUBLANES == 0:
            tried = tried[self.sublane_size % tried == 0]
        width, near = self._operand(sublanes=True)
        row_bytes = (
            self.k * (self.unit.copy_bytes + (0.0 if near else 2 * width)) + self.lanes * self._sum_bytes
        )
        width, near = self._operand(sublanes=False)
        lone = (self.batch >= self.of.batch) & (self.k >= self.of.k) & (self.lanes >= self.lane_size)
        buffers_bytes = 0.0 if near else np.where(lone, 1, 2) * width
        other_bytes = self.batch * self.k * self.lanes * (self.unit.copy_bytes + buffers_bytes)
        most = np.maximum(0.0, (self._room_bytes - other_bytes) / (self.batch * row_bytes))
        last = np.searchsorted(tried, most, side="right") - 1
        smaller = last - np.array(SMALLER)[None, :, None]
        # All rows at once need no second buffer, and may fit where a little fewer do not.
        smaller[:, -1:] = len(tried) - 1
        found: _Floats = tried[np.maximum(smaller, 0)]
        return found

    @property
    def _sum_bytes(self) -> float:
        return SUM_BYTES + 2 * self.of.read_width

    @property
    def _lone_sum_bytes(self) -> float:
        """The same where the result is one window: without a second buffer, and a float32 one is the sum."""
        of = self.of
        rounded = of.out_width < SINGLE_BYTES
        return SINGLE_BYTES * rounded + of.out_width + of.read_width

    def _operand(self, *, sublanes: bool) -> tuple[float, bool]:
        """Bytes per element of an operand, and whether it is on chip: that of the rows, or the other."""
        of = self.of
        left = sublanes != self.turned
        return (of.lhs_width, of.lhs_near) if left else (of.rhs_width, of.rhs_near)

    def _counts(self) -> tuple[_Floats, _Floats, _Floats, _Floats]:
        """Windows of the batch, of rows, of K and of columns."""
        of = self.of
        sublane_windows = np.ceil(self.sublane_size / self.rows)
        lane_windows = np.ceil(self.lane_size / self.lanes)
        down, across = (lane_windows, sublane_windows) if self.turned else (sublane_windows, lane_windows)
        return np.ceil(of.batch / self.batch), down, np.ceil(of.k / self.k), across

    def _vmem_bytes(self) -> _Floats:
        batches, down, deep, across = self._counts()
        if self.turned:
            down, across = across, down
        packed = PACKED_ROWS[self.of.unit]
        copied_rows = np.ceil(self.rows / packed) * packed
        lone = (batches == 1) & (down == 1) & (across == 1)
        total = self.rows * self.lanes * np.where(lone, self._lone_sum_bytes, self._sum_bytes)
        for sublanes, steps in ((True, down), (False, across)):
            width, near = self._operand(sublanes=sublanes)
            elements = (self.rows if sublanes else self.lanes) * self.k
            copied = copied_rows * self.k if sublanes else elements
            total = total + copied * self.unit.copy_bytes
            if not near:
                lone = (batches == 1) & (steps == 1) & (deep == 1)
                total = total + np.where(lone, 1, 2) * width * elements
        found: _Floats = self.batch * total
        return found

    def _compute_cycles(self) -> _Floats:
        """Cycles of the matrix unit on one window, and of the registers beside it."""
        of, unit, rates = self.of, self.unit, self.rates
        tiles = self.batch * np.ceil(self.k / unit.depth) * np.ceil(self.lanes / rates.lanes)
        found = unit.start_cycles + tiles * np.maximum(self.rows, unit.least_rows) / unit.rows_per_cycle
        if not any(unit.register_cycles):
            return np.asarray(found, float)
        left = self.batch * self.rows / SUBLANES * self.k / LANES
        right = self.batch * self.k / SUBLANES * self.lanes / LANES
        sums = tiles * self.rows / SUBLANES * unit.depth / LANES * rates.lanes / LANES
        (_, left_near), (_, right_near) = self._operand(sublanes=True), self._operand(sublanes=False)
        of_left, of_right, of_sums = unit.register_cycles
        apart = rates.near_row_cycles > 0 and of.unit != "int8"
        if left_near and not right_near:
            of_left = 0.0
        elif right_near and not left_near and apart:
            of_right = 0.0
        found = np.maximum(found, of_left * left + of_right * right + of_sums * sums)
        if apart:
            if of.lhs_near:
                found = found + rates.near_row_cycles * (right if self.turned else left)
            if of.rhs_near:
                found = found + rates.near_window_cycles * (2 if self.turned else 1)
        return np.asarray(found, float)

    def _moved_cycles(self) -> tuple[_Floats, _Floats, _Floats, _Floats]:
        """Cycles in which a window of either operand arrives, and one of the result leaves.

        The last are those for which it counts between windows of rows, and where K is cut.
        """
        of, rates = self.of, self.rates
        batch, rows, k, lanes = self.batch, self.rows, self.k, self.lanes
        if rates.exact:  # windows at the edges are smaller
            batches, _, deep, _ = self._counts()
            batch = of.batch / batches
            rows = np.minimum(rows, padded(self.sublane_size, SUBLANES) / np.ceil(self.sublane_size / rows))
            lanes = np.minimum(lanes, padded(self.lane_size, LANES) / np.ceil(self.lane_size / lanes))
            k = np.minimum(k, padded(of.k, LANES) / deep)

        def read(elements: _Floats, width: float, near: bool) -> _Floats:
            rate = rates.bytes_per_cycle
            if near and of.unit == "int8" and rates.near_bytes_per_cycle:
                near, rate = False, rates.near_bytes_per_cycle
            if near:
                return np.zeros(1)
            return np.asarray(rates.read_cycles + elements * width / rate, float)

        left = read(batch * rows * k, *self._operand(sublanes=True))
        right = read(batch * np.minimum(k, padded(of.k, SUBLANES)) * lanes, *self._operand(sublanes=False))

        def leaves(leaving: float) -> _Floats:
            moved = of.read_width + leaving
            cycles = rates.write_cycles + batch * rows * lanes * moved / rates.bytes_per_cycle
            return np.asarray(cycles if moved else np.zeros(1), float)

        if self.turned:
            left, right = right, left
        last, between = self._leaving
        return left, right, leaves(last), leaves(between)

    @property
    def _leaving(self) -> tuple[float, float]:
        """Bytes for which an element of the result is taken to leave; the same between windows of rows."""
        of = self.of
        far = LEAVING.get(math.ceil(of.out_width), of.out_width)
        if not of.result_near:
            return far, far
        short = max(0.0, far - of.out_width)
        return {"never": (0.0, 0.0), "between": (0.0, short), "short": (short, short), "whole": (far, far)}[
            self.rates.near_leaves
        ]

    def _cycles(self) -> _Floats:
        """Cycles of all windows tried, those that do not fit included."""
        of, rates = self.of, self.rates
        batches, down, deep, across = self._counts()
        compute = self._compute_cycles()
        left, right, result, between = self._moved_cycles()
        registers = self.batch * self.rows * self.lanes / (SUBLANES * LANES)
        conversions = sum(2 if width <= 2 else 1 for width in (of.out_width, of.accumulator_width) if width)
        sums = registers * (rates.sum_cycles + conversions * rates.convert_cycles)
        first = left + right + compute + result
        if rates.read_together and not of.lhs_near and not of.rhs_near:
            first = first - rates.read_cycles
        last = np.zeros(1)
        if rates.cores > 1:
            lone = (batches == 1) & (down == 1) & (across == 1)
            last = np.where(lone & (deep > 1) & (result > 0), (rates.write_cycles - result) / 2, 0.0)
            deep = np.where(lone, np.ceil(deep / rates.cores), deep)
            batches, down, across = _shared(batches, down, across, rates.cores)
        tiles = batches * down * across
        cut = (
            first
            + sums
            + (tiles - 1) * np.maximum(compute + sums, left + right + between)
            + tiles * (deep - 1) * np.maximum(compute, left + right)
            + last
        )
        again = np.where(down > 1, left, 0.0)
        whole = (
            first
            + batches * across * (down - 1) * np.maximum(compute, left + between)
            + batches * (across - 1) * np.maximum(compute, again + right + result)
            + (batches - 1) * np.maximum(compute, left + right + result)
        )
        found: _Floats = np.where(self.k < of.k, cut, whole)
        return found


def _shared(batches: _Floats, down: _Floats, across: _Floats, cores: int) -> tuple[_Floats, _Floats, _Floats]:
    """Windows of one of the cores, which share those of the dim that leaves each the fewest."""
    split = [np.ceil(count / cores) for count in (batches, down, across)]
    by_batch, by_rows, by_columns = (
        split[0] * down * across,
        batches * split[1] * across,
        batches * down * split[2],
    )
    rows = (by_rows <= by_columns) & (by_rows <= by_batch)
    columns = ~rows & (by_columns <= by_batch)
    return (
        np.where(rows | columns, batches, split[0]),
        np.where(rows, split[1], down),
        np.where(columns, split[2], across),
    )


def _tiles(size: int) -> int:
    return -(-size // LANES)


@functools.lru_cache(1 << 12)
def _least(size: int, steps: tuple[int, ...]) -> tuple[int, ...]:
    """For every count of windows the least that gives it, among the multiples of each of the steps."""
    found: set[int] = set()
    for step in steps:
        units = -(-size // step)
        window = units
        while window >= 1:
            window = -(-units // -(-units // window))
            found.add(min(window * step, size))
            window -= 1
    return tuple(sorted(found))


@functools.lru_cache(1 << 12)
def _windows(size: int, grain: int) -> tuple[int, ...]:
    """Rows of windows: multiples of a grain, and of 128."""
    return _least(padded(size, SUBLANES), (grain, LANES))


@functools.lru_cache(1 << 12)
def _batches(size: int) -> tuple[int, ...]:
    """Matrices of a batch in one window: all, one, and some between."""
    found = _least(size, (1,))
    return found if len(found) <= 4 else (found[0], found[1], found[len(found) // 2], found[-1])


@functools.lru_cache(1 << 12)
def _areas(deep: int, across: int, even: bool, small: bool) -> tuple[_Floats, _Floats]:
    """Pairs of K and columns of windows, of so many tiles; even ones also, if the unit is two tiles wide.

    Small ones are left out, unless they are asked for, or what is contracted is little.
    """
    steps = (1, 2) if even else (1,)
    k = LANES * np.array(_least(deep, steps), float)
    columns = LANES * np.array(_least(across, steps), float)
    area = k[:, None] * columns[None, :]
    least = min(LEAST_AREA[small], deep * across * LANES * LANES / 16)
    little = (k[:, None] >= deep * LANES) & (deep <= LITTLE_DEPTH)
    kept = (little | (area >= least)) & (area <= MOST_AREA)
    first, second = np.nonzero(kept)
    return k[first], columns[second]
