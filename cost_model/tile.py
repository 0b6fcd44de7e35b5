"""The tiles in which TPUs keep arrays: what does not begin and end with one is copied."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Final

TILE_ROWS: Final = 16
"""Rows of a tile of elements of two bytes, the most common."""

LANES: Final = 128
"""Columns of a tile."""


def tile_rows(itemsize: float) -> int:
    """Rows of a tile of elements of so many bytes: twice as many of one byte."""
    return TILE_ROWS if itemsize > 1 else 2 * TILE_ROWS


def padded(size: int, multiple: int) -> int:
    """The next multiple from a size on."""
    return -(-size // multiple) * multiple


def whole_columns(columns: int) -> int:
    """Columns of the tiles that so many fill, or begin to."""
    return padded(columns, LANES)


SUBLANES: Final = 8
"""Rows that a TPU's matrix unit is fed at once: its windows have multiples of them."""


def by_columns(rows: int, columns: int) -> bool:
    """Whether a TPU's compiler lays an array out by columns, as it is padded less so."""
    turned = padded(columns, SUBLANES) * padded(rows, LANES)
    return turned < padded(rows, SUBLANES) * padded(columns, LANES)


UNEVEN: Final = 9 / 8
"""How much wider than the mean the widest of a block's columns may be, to begin at a multiple of 128."""

MOST_WINDOW_ROWS: Final = 2200
"""Rows of a window that still leave room for columns enough."""

LEAST_WINDOW_ROWS: Final = 256
"""Rows of a window that still keep the matrix unit busy."""

LEAST_WINDOW_COLUMNS: Final = 4 * LANES
"""The same of columns."""

FEW_COLUMNS: Final = 32 * LANES
"""Columns of a window at whose edges, however few divide them, dots were seen to lose no time."""

WIDER: Final = 1.05
"""How many times the mean the largest of pieces may be whose edges are moved for the sake of windows."""


@functools.cache
def has_window(size: int, *, columns: bool = False) -> bool:
    """Whether a good window divides the rows, or the columns, of what a dot writes into a larger array.

    The compiler takes windows that divide them; else the last one may reach beyond them.
    """
    if columns:
        least, step, enough = LEAST_WINDOW_COLUMNS, LANES, FEW_COLUMNS
    else:
        least, step, enough = LEAST_WINDOW_ROWS, SUBLANES, MOST_WINDOW_ROWS
    if size <= enough or size % step:
        return True
    return any(size % window == 0 for window in range(least, MOST_WINDOW_ROWS + 1, step))


def _have_windows(edges: Sequence[int], *, columns: bool = False) -> bool:
    """Whether every piece between two edges has a window."""
    return all(has_window(last - first, columns=columns) for first, last in itertools.pairwise(edges))


def placed_edges(edges: Sequence[int], grain: int) -> list[int]:
    """Where pieces begin and end, moved if need be to where good windows divide what dots make of them.

    Of compiled rings of all chips, whose pieces were 2504 to 16,624 rows without a window, most took 1.1 to
    4.3 times as long as with pieces a little larger and smaller that have one, and such with 37 to 83 · 128
    columns 1.02 to 1.28 times.

    Args:
      edges: from 0 to the size of all pieces.
      grain: what edges are multiples of. Of whole tiles of columns pieces are taken to be columns.
    """
    size, pieces = edges[-1], len(edges) - 1
    columns = grain >= LANES and size % LANES == 0
    if pieces == 1 or _have_windows(edges, columns=columns):
        return list(edges)
    most = int(WIDER * size / pieces)
    least = max(1, -(-(size - most) // ((pieces - 1) * grain))) * grain
    sizes = ((piece, size - (pieces - 1) * piece) for piece in range(least, most + 1, grain))
    good = [
        (max(piece, rest), piece)
        for piece, rest in sizes
        if 0 < rest <= most and has_window(piece, columns=columns) and has_window(rest, columns=columns)
    ]
    if not good:
        return list(edges)
    _, piece = min(good)
    return [*range(0, pieces * piece, piece), size]


@functools.lru_cache
def piece_edges(unit: int, pieces: int, grain: int, *, placed: bool) -> tuple[int, ...]:
    """Where the pieces of a block begin and end that can be cut into so many equal parts.

    All but the last are multiples of ``grain`` parts, or of less where blocks are small, or where columns
    would be too uneven; they are equal if they can be, in as many multiples of 8 rows (of elements of a byte:
    of ``grain``). Those that are ``placed`` are chosen for that: see `placed_edges`.
    """
    columns, tiles = grain >= LANES, grain
    # Of elements of a byte a TPU's compiler copies the whole operand for a piece that begins within a tile.
    even = SUBLANES if grain <= TILE_ROWS else grain
    # The largest piece sets the pace of all hops.
    most = UNEVEN * unit if columns else math.inf
    while grain > 1 and (
        unit % (pieces * min(grain, even)) == 0
        or 2 * grain * pieces > unit
        or _largest(unit, pieces, grain) * pieces > most
    ):
        grain //= 2
    edges = [-(-unit * number // (pieces * grain)) * grain for number in range(pieces)] + [unit]
    return tuple(placed_edges(edges, tiles) if placed else edges)


def _largest(unit: int, pieces: int, grain: int) -> int:
    """The largest of so many pieces, where all but the last are multiples of a grain."""
    return -(-unit // (pieces * grain)) * grain
