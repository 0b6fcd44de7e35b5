"""The dims of a dot_general: free, contracting or batch, and what a block of one does to the result."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

from cost_model import Matmul
from passes.blocks import RESULT

Role = Literal["free", "contracting", "batch"]


@dataclasses.dataclass(frozen=True, slots=True)
class DotDims:
    """How a dot acts on blocks.

    Attributes:
      role: what the blocked dim is to the dot. Partial results of a free or batch dim are placed in the
        result; those of a contracting dim are added up.
      operand_dims: dim of lhs and rhs that is cut into blocks; None where every block needs the whole.
      result_dim: dim of the result that is cut into blocks; None for a contracting dim.
    """

    role: Role
    operand_dims: tuple[int | None, int | None]
    result_dim: int | None


def _free(rank: int, contracting: tuple[int, ...], batch: tuple[int, ...]) -> list[int]:
    return [d for d in range(rank) if d not in contracting and d not in batch]


def dot_dims(dimension_numbers: Any, ranks: tuple[int, int], side: int, dim: int) -> DotDims:
    """The blocks of a dot whose operand ``side`` (0, 1 or ``RESULT``) is blocked along ``dim``.

    Result dims are ordered as XLA orders them: batch, free of lhs, free of rhs.
    """
    contracting, batch = dimension_numbers
    free = [_free(ranks[s], contracting[s], batch[s]) for s in (0, 1)]
    if side == RESULT:
        if dim < len(batch[0]):
            return DotDims("batch", (batch[0][dim], batch[1][dim]), dim)
        offset = dim - len(batch[0])
        if offset < len(free[0]):
            return DotDims("free", (free[0][offset], None), dim)
        return DotDims("free", (None, free[1][offset - len(free[0])]), dim)
    for role, pairs in (("contracting", contracting), ("batch", batch)):
        if dim in pairs[side]:
            index = list(pairs[side]).index(dim)
            dims = (pairs[0][index], pairs[1][index])
            return (
                DotDims("contracting", dims, None) if role == "contracting" else DotDims("batch", dims, index)
            )
    result = len(batch[0]) + (len(free[0]) if side else 0) + free[side].index(dim)
    return DotDims("free", (dim, None) if side == 0 else (None, dim), result)


def matmul(
    dimension_numbers: Any,
    lhs: tuple[int, ...],
    rhs: tuple[int, ...],
    lhs_dtype: Any,
    rhs_dtype: Any,
    out_dtype: Any,
) -> Matmul:
    """The sizes of a dot of two shapes for the cost model: dims of one role are multiplied together."""
    contracting, batch = dimension_numbers

    def size(shape: tuple[int, ...], dims: Any) -> int:
        return math.prod(shape[d] for d in dims)

    return Matmul(
        batch=size(lhs, batch[0]),
        m=size(lhs, _free(len(lhs), contracting[0], batch[0])),
        k=size(lhs, contracting[0]),
        n=size(rhs, _free(len(rhs), contracting[1], batch[1])),
        dtype=_name(lhs_dtype if lhs_dtype.itemsize >= rhs_dtype.itemsize else rhs_dtype),
        out_dtype=_name(out_dtype),
    )


@functools.cache
def _name(dtype: Any) -> str:
    """The name of a dtype, which numpy puts together each time it is asked for."""
    return str(dtype.name)
