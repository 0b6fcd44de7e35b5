"""The tiles in which TPUs keep arrays: what does not begin and end with one is copied."""

from __future__ import annotations

from typing import Final

TILE_ROWS: Final = 16
"""Rows of a tile of elements of two bytes, the most common."""

LANES: Final = 128
"""Columns of a tile."""


def tile_rows(itemsize: float) -> int:
    """Rows of a tile of elements of so many bytes: twice as many of one byte."""
    return TILE_ROWS if itemsize > 1 else 2 * TILE_ROWS


SUBLANES: Final = 8
"""Rows that a TPU's matrix unit is fed at once: its windows have multiples of them."""

WHOLE_WINDOW_ROWS: Final = 2200
"""Rows of a window that still leave room for columns enough."""

PLACED_SLOWNESS: Final = 1.5
"""How many times as long a large dot takes where windows are large that must divide its rows."""

LARGE: Final = 1024
"""Of a large dot the contracting dim and the columns are longer."""


def placed_slowness(rows: int, k: int, n: int) -> float:
    """How many times as long a dot takes whose rows are written straight into their place in a larger array.

    The compiler then takes windows that divide the rows; else the last one may reach beyond them. It takes
    all rows, or a half, a quarter, …: of 8 · 467 all. Where those are many, few columns fit beside them. By
    the compilers' estimates in rings 8 · 11 · 29 rows take 1.9 times as long, 8 · 7 · 59 and 8 · 467 1.4 and
    16 · 467 1.8.

    Args:
      rows: of the dot's result.
      k, n: its contracting dim and its columns.
    """
    if rows % SUBLANES or min(k, n) <= LARGE:
        return 1.0
    while rows % (2 * SUBLANES) == 0:
        rows //= 2
    return PLACED_SLOWNESS if rows > WHOLE_WINDOW_ROWS else 1.0
