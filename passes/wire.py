"""In what type the operands of dots travel: on a TPU in the one that the matrix unit multiplies in."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp

from cost_model.plain_chain import surely_rounds
from passes.chains import AllGatherDot, BlockOp
from passes.dots import matmul
from passes.graph import Dataflow

_MOVES: Final = frozenset(
    {"transpose", "reshape", "squeeze", "broadcast_in_dim", "pvary", "copy", "sharding_constraint"}
)
"""Equations that round nothing, and commute with rounding."""


def wire_dtype(flow: Dataflow, chain: AllGatherDot) -> Any:
    """The type in which a TPU gathers what a chain's dots multiply.

    By default a dot of float32 operands rounds them to bfloat16 there (``lax.Precision.DEFAULT``), and the
    compiler rounds before it gathers: half as many bytes travel, and the result is the same. A ring that
    sent float32 would be the slower for it. What is needed beside the dots, goes through arithmetic before
    them, or belongs to dots so small that they may not be the matrix unit's, travels as it is.
    """
    dtype = flow.avals[chain.wire].dtype
    if dtype != jnp.float32 or chain.handed_out or chain.collective.kind != "all_gather":
        return dtype
    if flow.differentiable:
        return dtype  # A derivative of the ring would round its tangents too.
    moved = all(flow.ops[block.op].name in _MOVES for block in chain.after)
    rounded = moved and all(_rounds(flow, dot, chain.collective.axis_size) for dot in chain.dots)
    return jnp.dtype(jnp.bfloat16) if rounded else dtype


def gathered_dtype(flow: Dataflow, chain: AllGatherDot) -> Any:
    """The type in which a TPU's compiler gathers as written: it casts to fewer bytes before, not after.

    So it was seen to of float32 weights that are gathered and then cast to bfloat16 (v4, v5e).
    """
    dtype = flow.avals[flow.ops[chain.collective.op].outputs[0]].dtype
    for block in chain.before:
        op = flow.ops[block.op]
        if op.name != "convert_element_type":
            break
        dtype = min(dtype, flow.avals[op.outputs[0]].dtype, key=lambda each: each.itemsize)
    return dtype


def may_round(flow: Dataflow, chain: AllGatherDot) -> bool:
    """Whether the compiler may round what it gathers, where it is not sure that it does."""
    plain = flow.avals[chain.wire].dtype == jnp.float32 and not chain.handed_out
    return plain and all(_of_default_precision(flow, dot) for dot in chain.dots)


def _of_default_precision(flow: Dataflow, dot: BlockOp) -> bool:
    precision = flow.ops[dot.op].params["precision"]
    return precision is None or precision == (jax.lax.Precision.DEFAULT,) * 2


def _rounds(flow: Dataflow, dot: BlockOp, axis_size: int) -> bool:
    """Whether a dot is of the default precision, and large in every dim even on one block."""
    if not _of_default_precision(flow, dot):
        return False
    op = flow.ops[dot.op]
    operands = [flow.aval(operand) for operand in op.inputs]
    lhs, rhs = (
        tuple(size // axis_size if number == dim else size for number, size in enumerate(aval.shape))
        for aval, dim in zip(operands, dot.dims.operand_dims, strict=True)
    )
    dtypes = (*(aval.dtype for aval in operands), flow.avals[op.outputs[0]].dtype)
    same = all(dtype == jnp.float32 for dtype in dtypes)
    return same and surely_rounds(matmul(op.params["dimension_numbers"], lhs, rhs, *dtypes))
