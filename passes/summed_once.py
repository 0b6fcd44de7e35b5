"""Sums over devices that are only added up: one sum, so that one ring stands in for all of them.

Differentiation of what several dots read, such as a block's input before its projections, sums the gradient
of every dot over the devices, and adds the sums up. ``psum(a) + psum(b)`` is ``psum(a + b)``: XLA writes it
so for TPUs and GPUs too (its passes all-reduce-reassociate and reduce-scatter-reassociate).
"""

from __future__ import annotations

import dataclasses
from typing import Final

from passes.graph import REDUCTIONS, SCATTERS, Dataflow, Op

_ADDITIONS: Final = ("add", "add_any")


def summed_once(flow: Dataflow) -> Dataflow:
    """The graph with those sums as one; all numbers stay, of operations and of values.

    The last of the sums takes the place of the addition, and the addition that of the sum. What the others
    make is read by nothing then.
    """
    ops, avals, summed = list(flow.ops), list(flow.avals), dict(flow.summed)
    for index in flow.live:
        pair = _sums_of(flow, ops, index)
        if pair is None:
            continue
        first, last = sorted(pair)
        addition, total = ops[index], ops[last]
        (partial_sum,), (result,) = total.outputs, addition.outputs
        (alone,) = ops[first].outputs
        parts = tuple(part for number in pair for part in ops[number].inputs if isinstance(part, int))
        avals[partial_sum] = avals[parts[0]]
        ops[last] = dataclasses.replace(addition, inputs=parts, outputs=(partial_sum,))
        ops[index] = dataclasses.replace(total, inputs=(partial_sum,), outputs=(result,))
        gone = {alone, partial_sum}
        summed = {of: result if by in gone else by for of, by in summed.items()} | {alone: result}
    return dataclasses.replace(flow, ops=tuple(ops), avals=tuple(avals), summed=summed) if summed else flow


def _sums_of(flow: Dataflow, ops: list[Op], index: int) -> tuple[int, int] | None:
    """The two sums over the same devices that an addition, and nothing else, reads; None if it is no such."""
    op = ops[index]
    if op.name not in _ADDITIONS:
        return None
    makers = [flow.producer.get(o) for o in op.inputs if isinstance(o, int) and flow.users[o] == (index,)]
    pair = [maker for maker in makers if maker is not None]
    if len(pair) < len(op.inputs):
        return None
    left, right = pair
    one, other = ops[left], ops[right]
    if one.name not in REDUCTIONS | SCATTERS or (one.name, one.params) != (other.name, other.params):
        return None
    if any(len(each.outputs) != 1 or not isinstance(each.inputs[0], int) for each in (one, other)):
        return None
    return (left, right) if flow.avals[one.outputs[0]] == flow.avals[other.outputs[0]] else None
