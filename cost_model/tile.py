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
