"""In which order an array's dims lie in a TPU's memory, which keeps it in tiles of rows of the last dim.

Two dims make a tile, the last one and the one that is its rows. Where the dim before the last is too small to
fill tiles with rows, some heads of a device, or a gate and what it gates, another is to be the rows: else
what a ring sends, and what it puts together, fills a quarter of its tiles, or is laid out by columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cost_model.tile import SUBLANES, TILE_ROWS, whole_columns

PADDED: Final = 1.2
"""How much of an array's memory rows that are no whole tiles may fill with nothing."""

Order = tuple[int, ...]
"""An array's dims, the major ones first."""


def has_few(shape: Sequence[int]) -> bool:
    """Whether the dim before the last is too small to fill tiles with rows."""
    return len(shape) > 2 and shape[-2] % TILE_ROWS != 0


def with_rows(dims: int, rows: int) -> Order:
    """The order in which a dim is the rows, and the others stay in theirs."""
    last = dims - 1
    return (*(dim for dim in range(last) if dim != rows), rows, last)


def sent(shape: Sequence[int]) -> Order:
    """That of what a hop sends: by rows, those of the dim before if that alone has enough to fill tiles."""
    dims = len(shape)
    if dims > 2 and shape[-2] % SUBLANES and shape[-3] % SUBLANES == 0:
        return with_rows(dims, dims - 3)
    return tuple(range(dims))


def put_together(shape: Sequence[int], dim: int | None) -> Order | None:
    """That of what is put together along a dim, or cut apart; None where no rows fill tiles.

    Args:
      shape: of the whole.
      dim: that dim, whose rows fill tiles where those of the dim before the last do not; None: no other does.
    """
    dims = len(shape)
    if whole_columns(shape[-1]) > PADDED * shape[-1]:
        return None
    if shape[-2] % TILE_ROWS == 0:
        return tuple(range(dims))
    if dim is None or dim == dims - 1 or shape[dim] % TILE_ROWS:
        return None
    return with_rows(dims, dim)
