"""Finder of ``all_gather → dot`` chains: sinks each gather through blockwise equations to its dots."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Mapping

from passes import shims
from passes.blocks import Call, blockwise, is_blockwise
from passes.chains import AllGatherDot, BlockOp
from passes.collective import Collective, explicitly_sharded
from passes.dots import dot_dims
from passes.graph import Dataflow, Literal, Op
from passes.reasons import Code, Reason

_INVARIANT_SOURCES = frozenset({"psum", "psum_invariant", "all_gather", "all_gather_invariant"})


@dataclasses.dataclass(slots=True)
class _Sinking:
    """How far one gather has been sunk.

    Attributes:
      blocked: value → the dim along which it is gathered, not yet materialised.
      ops: operations passed, in program order.
      dots: dots reached, in program order.
      stops: why it went no further, and where.
    """

    collective: Collective
    blocked: dict[int, int]
    ops: list[BlockOp] = dataclasses.field(default_factory=list)
    dots: list[BlockOp] = dataclasses.field(default_factory=list)
    stops: list[Reason] = dataclasses.field(default_factory=list)


def call_of(flow: Dataflow, op: Op) -> Call:
    """What the block rules need to know of an operation."""
    return Call(
        op.params,
        tuple(flow.aval(operand).shape for operand in op.inputs),
        tuple(flow.avals[value].shape for value in op.outputs),
    )


def find_gather_chains(
    flow: Dataflow, gathers: Mapping[int, Collective]
) -> dict[int, AllGatherDot | Reason]:
    """For each all_gather operation of ``gathers``: its chain, or why it has none. One pass over the graph."""
    sinkings: dict[int, _Sinking] = {}
    gathered_by: dict[int, list[_Sinking]] = {}
    for index, op in enumerate(flow.ops):
        if index in gathers:
            collective = gathers[index]
            if explicitly_sharded(flow.avals[op.outputs[0]]):
                continue
            sinking = sinkings[index] = _Sinking(collective, {op.outputs[0]: collective.dim})
            gathered_by[op.outputs[0]] = [sinking]
            continue
        found: dict[int, _Sinking] = {}
        for operand in op.inputs:
            if isinstance(operand, int):
                for sinking in gathered_by.get(operand, ()):
                    found[sinking.collective.op] = sinking
        for sinking in found.values():
            if op.name == "dot_general":
                _reach_dot(flow, sinking, index, op)
            elif _sink(flow, sinking, index, op):
                for value in op.outputs:
                    gathered_by.setdefault(value, []).append(sinking)
    return {index: _chain(flow, sinkings.get(index)) for index in gathers}


def _reach_dot(flow: Dataflow, sinking: _Sinking, index: int, op: Op) -> None:
    blocked = [sinking.blocked.get(operand) if isinstance(operand, int) else None for operand in op.inputs]
    side = 0 if blocked[0] is not None else 1
    dim = blocked[side]
    assert dim is not None
    ranks = (len(flow.aval(op.inputs[0]).shape), len(flow.aval(op.inputs[1]).shape))
    dims = dot_dims(op.params["dimension_numbers"], ranks, side, dim)
    if blocked[1 - side] is not None and blocked[1 - side] != dims.operand_dims[1 - side]:
        sinking.stops.append(
            Reason(Code.DEPENDS_ON_ITSELF, f"At dot_general, {op.source}: both operands are gathered.")
        )
    elif any(explicitly_sharded(flow.aval(operand)) for operand in (*op.inputs, *op.outputs)):
        sinking.stops.append(Reason(Code.EXPLICIT_SHARDING, f"At dot_general, {op.source}."))
    elif not all(flow.aval(operand).size for operand in op.inputs):
        sinking.stops.append(Reason(Code.EMPTY, f"At dot_general, {op.source}."))
    else:
        sinking.dots.append(BlockOp(index, dims))


def _sink(flow: Dataflow, sinking: _Sinking, index: int, op: Op) -> bool:
    """Sinks a gather through one equation, if it acts block by block; says whether it did."""
    blocked = [sinking.blocked.get(operand) if isinstance(operand, int) else None for operand in op.inputs]
    side = next(i for i, dim in enumerate(blocked) if dim is not None)
    dim = blocked[side]
    assert dim is not None
    rule = blockwise(op.name, call_of(flow, op), side, dim, sinking.collective.axis_size)
    consistent = rule is not None and all(
        dim is None or dim == wanted for dim, wanted in zip(blocked, rule.operand_dims, strict=True)
    )
    if rule is None or not consistent or shims.has_effects(op.eqn):
        sinking.stops.append(Reason(Code.NO_DOT, f"It stops at {op.name}, {op.source}."))
        return False
    sinking.ops.append(BlockOp(index, rule))
    sinking.blocked.update(dict.fromkeys(op.outputs, rule.result_dim))
    return True


def _chain(flow: Dataflow, sinking: _Sinking | None) -> AllGatherDot | Reason:
    if sinking is None:
        return Reason(Code.EXPLICIT_SHARDING)
    if not sinking.dots:
        if sinking.stops:
            return sinking.stops[0]
        return Reason(Code.GATHERED_VALUE_ESCAPES)
    return gather_chain(flow, sinking.collective, sinking.blocked, sinking.ops, sinking.dots)


def gather_chain(
    flow: Dataflow,
    collective: Collective,
    blocked: Mapping[int, int],
    ops: list[BlockOp] | tuple[BlockOp, ...],
    dots: list[BlockOp] | tuple[BlockOp, ...],
) -> AllGatherDot | Reason:
    """The chain of a gather that feeds ``dots`` through those of ``ops`` that lead to them.

    A dot whose other operand depends on the ring's own results is left out; it takes the assembled value.
    """
    ops, dots = _without_self_dependence(flow, collective, blocked, ops, dots)
    if not dots:
        return Reason(Code.DEPENDS_ON_ITSELF)
    needed = {
        operand
        for dot in dots
        for operand, dim in zip(flow.ops[dot.op].inputs, dot.dims.operand_dims, strict=True)
        if dim is not None and operand in blocked
    }
    kept: list[BlockOp] = []
    for block in reversed(ops):
        op = flow.ops[block.op]
        if any(value in needed for value in op.outputs):
            kept.append(block)
            needed.update(o for o in op.inputs if isinstance(o, int) and o in blocked)
    kept.reverse()
    members = {block.op for block in (*kept, *dots)}
    source = flow.ops[collective.op].outputs[0]
    made = [source, *(value for block in kept for value in flow.ops[block.op].outputs)]
    handed_out = tuple(v for v in made if any(user not in members for user in flow.users[v]))
    before, wire, after = _cut(flow, collective, kept, source)
    return AllGatherDot(
        collective=collective.op,
        axis=collective.axes[0],
        axis_size=collective.axis_size,
        blocked={value: blocked[value] for value in made},
        before=before,
        wire=wire,
        after=after,
        dots=tuple(dots),
        handed_out=handed_out,
    )


def _without_self_dependence(
    flow: Dataflow,
    collective: Collective,
    blocked: Mapping[int, int],
    ops: list[BlockOp] | tuple[BlockOp, ...],
    dots: list[BlockOp] | tuple[BlockOp, ...],
) -> tuple[list[BlockOp], list[BlockOp]]:
    """Leaves out what needs the ring's results (its dots' results, or a gathered value assembled) to run."""
    members = {block.op: block for block in (*ops, *dots)}
    dot_ops = {dot.op for dot in dots}
    last = max(members)
    results: set[int] = set()
    blocks: set[int] = set()
    kept_ops: list[BlockOp] = []
    kept_dots: list[BlockOp] = []
    pending: list[int] = []

    def add(values: set[int], made: tuple[int, ...]) -> None:
        values.update(made)
        for value in made:
            for user in flow.users[value]:
                if 0 <= user <= last:
                    heapq.heappush(pending, user)

    add(blocks, flow.ops[collective.op].outputs)
    done = -1
    while pending:
        index = heapq.heappop(pending)
        if index == done:
            continue
        done = index
        op = flow.ops[index]
        block = members.get(index)
        if block is not None:
            own = [o in blocks and dim is not None for o, dim in zip(op.inputs, block.dims.operand_dims, strict=True)]
            others = [operand for operand, mine in zip(op.inputs, own, strict=True) if not mine]
            if any(own) and not any(o in results or o in blocks for o in others):
                if index in dot_ops:
                    kept_dots.append(block)
                    add(results, op.outputs)
                else:
                    kept_ops.append(block)
                    add(blocks, op.outputs)
                continue
        add(results, op.outputs)
    return kept_ops, kept_dots


def _cut(
    flow: Dataflow, collective: Collective, ops: list[BlockOp], source: int
) -> tuple[tuple[BlockOp, ...], int, tuple[BlockOp, ...]]:
    """Chooses the value that travels: the narrowest on the way from the gather to where the ways part.

    What lies before it is applied once to each device's own shard, so an equation may come before only if its
    other operands are the same on every device. Among equally narrow values the last is taken.
    """
    invariant = _invariant_over(flow, collective)
    by_input = {
        operand: block for block in ops for operand in flow.ops[block.op].inputs if isinstance(operand, int)
    }
    path: list[BlockOp] = []
    value, wire, length = source, source, 0
    while len(set(flow.users[value])) == 1 and value in by_input:
        block = by_input[value]
        op = flow.ops[block.op]
        others = [operand for operand in op.inputs if operand != value]
        if len(op.outputs) != 1 or not all(invariant(operand) for operand in others):
            break
        path.append(block)
        value = op.outputs[0]
        if _bytes(flow, value) <= _bytes(flow, wire):
            wire, length = value, len(path)
    before = tuple(path[:length])
    after = tuple(block for block in ops if block not in before)
    return before, wire, after


def _bytes(flow: Dataflow, value: int) -> int:
    aval = flow.avals[value]
    return int(aval.size * aval.dtype.itemsize)


def _invariant_over(flow: Dataflow, collective: Collective) -> Callable[[int | Literal], bool]:
    """Tells whether an operand is known to be the same on every device of the collective's axis.

    Derived from the program, since under ``check_vma=False`` types do not tell: constants are, and so is what is
    computed from them, and the result of a psum or all_gather over the axis.
    """
    producer = flow.producer
    axis = collective.axes[0]
    known: dict[int, bool] = {}

    def invariant(operand: int | Literal) -> bool:
        if isinstance(operand, Literal) or operand in flow.constants:
            return True
        stack = [operand]
        while stack:
            value = stack[-1]
            if value in known:
                stack.pop()
                continue
            if value not in producer:
                known[value] = value in flow.constants
                continue
            op = flow.ops[producer[value]]
            if op.name in _INVARIANT_SOURCES:
                axes = op.params.get("axes", op.params.get("axis_name", ()))
                known[value] = axis in axes and op.params.get("axis_index_groups") is None
                continue
            inputs = [o for o in op.inputs if isinstance(o, int)]
            if shims.has_effects(op.eqn) or not _pure_local(op):
                known[value] = False
                continue
            unknown = [o for o in inputs if o not in known]
            if unknown:
                stack.extend(unknown)
            else:
                known[value] = all(known[o] for o in inputs)
        return known[operand]

    return invariant


def _pure_local(op: Op) -> bool:
    """Whether an operation's result is a function of its operands alone, the same on every device."""
    return op.name == "iota" or is_blockwise(op.name)
