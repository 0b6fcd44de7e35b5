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


def whole_columns(columns: int) -> int:
    """Columns of the tiles that so many fill, or begin to."""
    return -(-columns // LANES) * LANES


SUBLANES: Final = 8
"""Rows that a TPU's matrix unit is fed at once: its windows have multiples of them."""

MOST_WINDOW_ROWS: Final = 2200
"""Rows of a window that still leave room for columns enough."""

LEAST_WINDOW_ROWS: Final = 256
"""Rows of a window that still keep the matrix unit busy."""

PLACED_SLOWNESS: Final = 1.5
"""How many times as long a large dot takes where no window between those two divides its rows."""

LARGE: Final = 1024
"""Of a large dot the contracting dim and the columns are longer."""


def placed_slowness(rows: int, k: int, n: int) -> float:
    """How many times as long a dot takes whose rows are written straight into their place in a larger array.

    The compiler then takes windows that divide the rows; else the last one may reach beyond them. Where only
    very small ones do, or such large ones that few columns fit beside them, the dot takes longer: in compiled
    rings on v5e, v5p and v6e 8 · 467 rows took 1.5 to 1.9 times as long as the whole dot's share, 8 · 313 1.3
    and 8 · 11 · 29 1.1 to 1.3; 8 · 7 · 61, which windows of 488 divide, 1.1 to 1.2, and 8 · 5 · 7 · 11 at
    most 1.1.

    Args:
      rows: of the dot's result.
      k, n: its contracting dim and its columns.
    """
    if rows % SUBLANES or rows <= MOST_WINDOW_ROWS or min(k, n) <= LARGE:
        return 1.0
    windows = range(LEAST_WINDOW_ROWS, MOST_WINDOW_ROWS + 1, SUBLANES)
    return 1.0 if any(rows % window == 0 for window in windows) else PLACED_SLOWNESS
