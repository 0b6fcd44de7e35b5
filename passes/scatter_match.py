"""Finder of ``dot → reduce_scatter`` chains: goes up from each through blockwise equations to dots."""

from __future__ import annotations

import heapq

from passes import shims
from passes.blocks import RESULT, Blockwise, blockwise, is_blockwise
from passes.chains import BlockOp, DotReduceScatter
from passes.collective import Collective, explicitly_sharded
from passes.dots import DotDims, dot_dims
from passes.gather_match import call_of
from passes.graph import Dataflow
from passes.reasons import Code, Reason


def find_scatter_chain(flow: Dataflow, collective: Collective) -> DotReduceScatter | Reason:
    """The chain of one reduce_scatter operation, or why it has none.

    Goes upwards in reverse program order, so that every user of a value has been seen before its producer.
    """
    (operand,) = flow.ops[collective.op].inputs
    if not isinstance(operand, int):
        return Reason(Code.NO_DOT, "It scatters a constant.")
    if explicitly_sharded(flow.avals[operand]):
        return Reason(Code.EXPLICIT_SHARDING)
    asked: dict[int, set[int | None]] = {operand: {collective.dim}}
    taken = {collective.op}
    climbed: list[BlockOp] = []
    stops: list[Reason] = []
    pending: list[int] = []
    reduced: set[int] = set()
    _push_producer(flow, operand, pending)
    while pending:
        index = -heapq.heappop(pending)
        if climbed and climbed[-1].op == index:
            continue
        step = _climb(flow, collective, index, asked, taken, reduced)
        if isinstance(step, Reason):
            stops.append(step)
            continue
        climbed.append(BlockOp(index, step))
        taken.add(index)
        if flow.ops[index].name.startswith("reduce_") or flow.readers(index) <= reduced:
            reduced.add(index)
        # A dot reads its operands as a whole: what else they are cut for ends here.
        dims = (None, None) if isinstance(step, DotDims) else step.operand_dims
        for value, dim in zip(flow.ops[index].inputs, dims, strict=True):
            if isinstance(value, int):
                asked.setdefault(value, set()).add(dim)
                if dim is not None:
                    _push_producer(flow, value, pending)
    body = _leading_from_dots(flow, climbed[::-1])
    if not body:
        return next((s for s in stops if s.code is not Code.NO_DOT), (*stops, Reason(Code.NO_DOT))[0])
    return DotReduceScatter(
        collective=collective,
        body=body,
        dots=tuple(block for block in body if isinstance(block.dims, DotDims)),
    )


def _push_producer(flow: Dataflow, value: int, pending: list[int]) -> None:
    if value in flow.producer:
        heapq.heappush(pending, -flow.producer[value])


def _climb(
    flow: Dataflow,
    collective: Collective,
    index: int,
    asked: dict[int, set[int | None]],
    taken: set[int],
    reduced: set[int],
) -> Blockwise | DotDims | Reason:
    """How an operation makes the blocks that are asked of it; or why the chain stops below it."""
    op = flow.ops[index]
    where = f"It stops at {op.name}, {op.source}."
    if shims.has_effects(op.eqn):
        return Reason(Code.NO_DOT, where)
    (dim, *others) = set[int | None]().union(*(asked.get(value, ()) for value in op.outputs))
    users = flow.readers(index)
    if others or dim is None or not users <= taken:
        # What is only reduced on the way, such as a bias's gradient, would be no matmul even if not shared.
        escapes = not users & taken <= reduced and _follows_from_dot(flow, index)
        return Reason(Code.PARTIAL_SUM_ESCAPES if escapes else Code.NO_DOT, where)
    if op.name != "dot_general":
        rule = blockwise(op.name, call_of(flow, op), RESULT, dim, collective.axis_size)
        return rule if rule is not None else Reason(Code.NO_DOT, where)
    lhs, rhs = (flow.aval(operand) for operand in op.inputs)
    if any(map(explicitly_sharded, (lhs, rhs))):
        return Reason(Code.EXPLICIT_SHARDING, where)
    if not lhs.size or not rhs.size:
        return Reason(Code.EMPTY, where)
    return dot_dims(op.params["dimension_numbers"], (len(lhs.shape), len(rhs.shape)), RESULT, dim)


def _follows_from_dot(flow: Dataflow, index: int) -> bool:
    """Whether an operation is a dot or follows, in a few blockwise steps, from one."""
    nearest = [index]
    for _ in range(8):
        if any(flow.ops[i].name == "dot_general" for i in nearest):
            return True
        blockwise_ones = [flow.ops[i] for i in nearest if is_blockwise(flow.ops[i].name)]
        operands = [o for op in blockwise_ones for o in op.inputs if isinstance(o, int)]
        nearest = [flow.producer[o] for o in operands if o in flow.producer][:16]
    return False


def _leading_from_dots(flow: Dataflow, climbed: list[BlockOp]) -> tuple[BlockOp, ...]:
    """Those operations that a dot leads to; what the others make is cut into blocks instead of recomputed."""
    made: set[int] = set()
    body: list[BlockOp] = []
    for block in climbed:
        op = flow.ops[block.op]
        if isinstance(block.dims, DotDims) or any(operand in made for operand in op.inputs):
            body.append(block)
            made.update(op.outputs)
    return tuple(body)
