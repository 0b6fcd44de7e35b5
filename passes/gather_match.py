"""Finder of ``all_gather → dot`` chains: sinks each gather through blockwise equations to its dots."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence

import jax.numpy as jnp

from passes import shims
from passes.blocks import Call, blockwise, shards
from passes.chains import AllGatherDot, BlockOp, ShardReduction
from passes.collective import Collective, explicitly_sharded, of_two_bits
from passes.dots import dot_dims
from passes.graph import Dataflow, Op
from passes.handed_out import handed_out
from passes.invariance import Invariance
from passes.reasons import Code, Reason


@dataclasses.dataclass(slots=True)
class Sinking:
    """How far one gather has been sunk.

    Attributes:
      collective: the gather; its ``dim`` is the gathered dim.
      blocked: value → the dim along which it is gathered, not yet materialised.
      ops: operations passed, in program order.
      dots: dots reached, in program order.
      alike: those whose results are the same on several devices.
      reductions: reductions over the gathered dim that every device can do for its own shard.
      uniform: those of the blocked values that owner and receiver of a shard would compute alike.
      stops: why it went no further, and where.
      bit: stands for it in numbers that say which gathers' dots a value needs.
    """

    collective: Collective
    blocked: dict[int, int]
    ops: list[BlockOp] = dataclasses.field(default_factory=list)
    dots: list[BlockOp] = dataclasses.field(default_factory=list)
    alike: set[int] = dataclasses.field(default_factory=set)
    reductions: list[int] = dataclasses.field(default_factory=list)
    uniform: set[int] = dataclasses.field(default_factory=set)
    stops: list[Reason] = dataclasses.field(default_factory=list)
    bit: int = 0

    @property
    def reducible(self) -> bool:
        """Whether every device could reduce its own shard, where the gathered dim is reduced."""
        return self.collective.kind == "all_gather" and self.collective.groups is None


def call_of(flow: Dataflow, op: Op) -> Call:
    """What the block rules need to know of an operation."""
    return Call(
        op.params,
        tuple(flow.aval(operand).shape for operand in op.inputs),
        tuple(flow.avals[value].shape for value in op.outputs),
    )


def keeps_types(flow: Dataflow, op: Op) -> bool:
    """Whether all results of an operation vary, by their types, wherever its operands do.

    A number that is sorted along with varying keys does not, and what a ring makes of blocks of it does.
    """
    if len(op.outputs) == 1:
        return True
    varying = frozenset[str]().union(*(shims.varying_axes(flow.aval(operand)) for operand in op.inputs))
    return all(varying <= shims.varying_axes(flow.avals[value]) for value in op.outputs)


def find_gather_chains(
    flow: Dataflow, gathers: Mapping[int, Collective], invariance: Invariance, replicas: Invariance
) -> dict[int, AllGatherDot | Reason]:
    """For each operation of ``gathers``: the chain of its result, or why there is none. One pass.

    The operations may be all_gathers, or others whose result can be taken as gathered along
    ``Collective.dim``.

    Of ``replicas`` it is enough that they may be the same on several devices, and are meant to be.

    What needs the result of a dot that a gather has reached is no part of its chain. The gather goes no
    further there: each sum of a residual stream ends with its layer, and does not sink through all others.
    """
    sinkings: dict[int, Sinking] = {}
    gathered_by: dict[int, list[Sinking]] = {}
    dots_needed: dict[int, int] = {}
    for index, op in flow.live.items():
        found: dict[int, Sinking] = {}
        needed = 0
        for operand in op.inputs:
            if isinstance(operand, int):
                needed |= dots_needed.get(operand, 0)
                for sinking in gathered_by.get(operand, ()):
                    found[sinking.collective.op] = sinking
        for sinking in found.values():
            late = bool(needed & sinking.bit)
            if op.name == "dot_general":
                if not late and _reach_dot(flow, sinking, index, op, replicas):
                    needed |= sinking.bit
            elif _sink(flow, sinking, index, op, invariance, late=late):
                for value in op.outputs:
                    gathered_by.setdefault(value, []).append(sinking)
        if needed:
            dots_needed.update(dict.fromkeys(op.outputs, needed))
        if index in gathers and not explicitly_sharded(flow.avals[op.outputs[0]]):
            (value,) = op.outputs
            bit = 1 << len(sinkings)
            sinking = Sinking(gathers[index], {value: gathers[index].dim}, uniform={value}, bit=bit)
            sinkings[index] = sinking
            gathered_by.setdefault(value, []).append(sinking)
    return {index: _chain(flow, sinkings.get(index), invariance) for index in gathers}


def _reach_dot(flow: Dataflow, sinking: Sinking, index: int, op: Op, replicas: Invariance) -> bool:
    """Adds a dot to what a gather reaches, if it can be part of a ring; says whether it did.

    What is the same on several devices has to stay so, to the last bit: they may go by it whether to go on.
    Each device of a ring adds up in an order of its own.
    """
    alike = bool(replicas.axes_of(op.outputs[0], sinking.collective.axes))
    blocked = [sinking.blocked.get(operand) if isinstance(operand, int) else None for operand in op.inputs]
    side = 0 if blocked[0] is not None else 1
    dim = blocked[side]
    assert dim is not None
    ranks = (len(flow.aval(op.inputs[0]).shape), len(flow.aval(op.inputs[1]).shape))
    dims = dot_dims(op.params["dimension_numbers"], ranks, side, dim)
    if blocked[1 - side] is not None and blocked[1 - side] != dims.operand_dims[1 - side]:
        where = f"At dot_general, {op.source}: both operands are gathered."
        sinking.stops.append(Reason(Code.DEPENDS_ON_ITSELF, where))
    elif any(explicitly_sharded(flow.aval(operand)) for operand in (*op.inputs, *op.outputs)):
        sinking.stops.append(Reason(Code.EXPLICIT_SHARDING, f"At dot_general, {op.source}."))
    elif not all(flow.aval(operand).size for operand in op.inputs):
        sinking.stops.append(Reason(Code.EMPTY, f"At dot_general, {op.source}."))
    elif dims.result_dim is None and (why_not := _no_partial_sums(flow, op)):
        sinking.stops.append(Reason(Code.UNSUPPORTED_DTYPE, f"At dot_general, {op.source}: {why_not}."))
    elif dims.result_dim is None and alike:
        sinking.stops.append(Reason(Code.REPLICATED, f"At dot_general, {op.source}."))
    else:
        sinking.dots.append(BlockOp(index, dims))
        sinking.alike.update({index} if alike else ())
        return True
    return False


def _no_partial_sums(flow: Dataflow, op: Op) -> str:
    """Why the sums that a dot makes of parts do not add up to its result, in words; empty if they do."""
    result, operands = flow.avals[op.outputs[0]].dtype, (flow.aval(operand).dtype for operand in op.inputs)
    if result == jnp.bool_:
        return "its sums are booleans"
    rounds = not jnp.issubdtype(result, jnp.inexact) and any(jnp.issubdtype(d, jnp.inexact) for d in operands)
    return "it rounds its sums to integers" if rounds else ""


def _sink(
    flow: Dataflow, sinking: Sinking, index: int, op: Op, invariance: Invariance, *, late: bool
) -> bool:
    """Sinks a gather through one equation, if it acts block by block; says whether it did.

    Through a late one, which needs a dot's result, only towards reductions: of what is uniform.
    """
    invariant = invariance.over(sinking.collective)
    uniform = sinking.reducible and all(o in sinking.uniform or invariant(o) for o in op.inputs)
    if late and not uniform:
        return False
    blocked = [sinking.blocked.get(operand) if isinstance(operand, int) else None for operand in op.inputs]
    side = next(i for i, dim in enumerate(blocked) if dim is not None)
    dim = blocked[side]
    assert dim is not None
    if _is_shard_reduction(flow, sinking, op, dim):
        sinking.reductions.append(index)
        return False
    rule = blockwise(op.name, call_of(flow, op), side, dim, sinking.collective.axis_size)
    consistent = rule is not None and all(
        dim is None or dim == wanted for dim, wanted in zip(blocked, rule.operand_dims, strict=True)
    )
    if rule is None or not consistent or shims.has_effects(op.eqn) or not keeps_types(flow, op):
        sinking.stops.append(Reason(Code.NO_DOT, f"It stops at {op.name}, {op.source}."))
        return False
    sinking.ops.append(BlockOp(index, rule))
    sinking.blocked.update(dict.fromkeys(op.outputs, rule.result_dim))
    if uniform:
        sinking.uniform.update(op.outputs)
    return True


def _is_shard_reduction(flow: Dataflow, sinking: Sinking, op: Op, dim: int) -> bool:
    """Whether an equation reduces over the gathered dim, and each owner could reduce its own shard.

    A maximum over devices has no derivative in jax.
    """
    return (
        (op.name == "reduce_sum" or (op.name in ("reduce_max", "reduce_min") and not flow.differentiable))
        and dim in op.params["axes"]
        and not shards(op.params.get("out_sharding"))
        and op.inputs[0] in sinking.uniform
        and sinking.reducible
    )


def _chain(flow: Dataflow, sinking: Sinking | None, invariance: Invariance) -> AllGatherDot | Reason:
    if sinking is None:
        return Reason(Code.EXPLICIT_SHARDING)
    if not sinking.dots:
        return sinking.stops[0] if sinking.stops else Reason(Code.GATHERED_VALUE_ESCAPES)
    chain = gather_chain(flow, sinking, invariance)
    return Reason(Code.DEPENDS_ON_ITSELF) if chain is None else chain


def gather_chain(flow: Dataflow, sinking: Sinking, invariance: Invariance) -> AllGatherDot | None:
    """The chain of a gather that feeds its dots through those operations that lead to them.

    A dot whose other operand depends on the ring's own results is left out; it takes the assembled value.
    None if no dot is left.
    """
    collective, blocked = sinking.collective, sinking.blocked
    source = flow.ops[collective.op].outputs[0]
    ops, dots = _without_self_dependence(flow, sinking, source) if sinking.dots else ([], [])
    if not dots:
        return None
    kept = _leading_to(flow, _makers(flow, ops), [o for dot in dots for o in _blocked_operands(flow, dot)])
    members = {block.op for block in (*kept, *dots)}
    reduced = _shard_reductions(flow, sinking, members)
    gone = members.union(*(reduction.members for reduction in reduced))
    made = [source, *(value for block in kept for value in flow.ops[block.op].outputs)]
    values, again = handed_out(flow, (source,), kept, gone)
    before, wire, after = _cut(flow, collective, kept, source, invariance)
    return AllGatherDot(
        collective=collective,
        blocked={value: blocked[value] for value in made},
        before=before,
        wire=wire,
        after=after,
        dots=tuple(dots),
        reductions=reduced,
        handed_out=values,
        again=again,
        alike=frozenset(dot.op for dot in dots if dot.op in sinking.alike),
    )


def without_dots(
    flow: Dataflow, chain: AllGatherDot, taken: set[int], invariance: Invariance
) -> AllGatherDot | None:
    """The chain without the dots that others have taken; None if no dot is left."""
    dots = [dot for dot in chain.dots if dot.op not in taken]
    if len(dots) == len(chain.dots):
        return chain
    ops = sorted({*chain.before, *chain.after, *(b for r in chain.reductions for b in r.path)}, key=_number)
    blocked = dict(chain.blocked)
    for block in ops:
        assert block.dims.result_dim is not None
        blocked.update(dict.fromkeys(flow.ops[block.op].outputs, block.dims.result_dim))
    reduced = [reduction.op for reduction in chain.reductions]
    sinking = Sinking(chain.collective, blocked, ops, dots, set(chain.alike), reduced)
    return gather_chain(flow, sinking, invariance)


def _number(block: BlockOp) -> int:
    return block.op


def _blocked_operands(flow: Dataflow, block: BlockOp) -> list[int]:
    pairs = zip(flow.ops[block.op].inputs, block.dims.operand_dims, strict=True)
    return [operand for operand, dim in pairs if dim is not None and isinstance(operand, int)]


def _makers(flow: Dataflow, ops: Iterable[BlockOp]) -> Mapping[int, BlockOp]:
    """The operation that makes each value."""
    return {value: block for block in ops for value in flow.ops[block.op].outputs}


def _leading_to(flow: Dataflow, makers: Mapping[int, BlockOp], wanted: Iterable[int]) -> list[BlockOp]:
    """Those operations from which one of the wanted values is reached, in program order."""
    kept: dict[int, BlockOp] = {}
    waiting = list(wanted)
    while waiting:
        block = makers.get(waiting.pop())
        if block is not None and block.op not in kept:
            kept[block.op] = block
            waiting += _blocked_operands(flow, block)
    return sorted(kept.values(), key=_number)


def _without_self_dependence(
    flow: Dataflow, sinking: Sinking, source: int
) -> tuple[list[BlockOp], list[BlockOp]]:
    """Leaves out what needs the ring's results (its dots' results, or a gathered value assembled) to run.

    Visits what depends on the gather, in program order, up to the last dot.
    """
    members = {block.op: block for block in (*sinking.ops, *sinking.dots)}
    dot_ops = {dot.op for dot in sinking.dots}
    reduced = set(sinking.reductions)
    last = max(dot_ops)
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

    add(blocks, (source,))
    done = -1
    while pending:
        index = heapq.heappop(pending)
        if index == done:
            continue
        done = index
        op = flow.ops[index]
        block = members.get(index)
        if index in reduced and op.inputs[0] in blocks:
            continue
        if block is not None:
            pairs = zip(op.inputs, block.dims.operand_dims, strict=True)
            own = [operand in blocks and dim is not None for operand, dim in pairs]
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


def _shard_reductions(flow: Dataflow, sinking: Sinking, members: set[int]) -> tuple[ShardReduction, ...]:
    """The reductions over the gathered dim, each with its way from the gather; the first owns shared ways."""
    replaced = members | set(sinking.reductions)
    absorbed: list[int] = []
    for block in reversed(sinking.ops):
        users = flow.readers(block.op)
        if block.op not in members and users and users <= replaced:
            absorbed.append(block.op)
            replaced.add(block.op)
    makers, left = _makers(flow, sinking.ops), set(absorbed)
    found = []
    for index in sinking.reductions:
        path = _leading_to(flow, makers, [o for o in flow.ops[index].inputs if isinstance(o, int)])
        own = tuple(block.op for block in path if block.op in left)
        left.difference_update(own)
        found.append(ShardReduction(op=index, collective=sinking.collective, path=tuple(path), absorbed=own))
    return tuple(found)


def _cut(
    flow: Dataflow, collective: Collective, ops: Sequence[BlockOp], source: int, invariance: Invariance
) -> tuple[tuple[BlockOp, ...], int, tuple[BlockOp, ...]]:
    """Chooses the value that travels: the narrowest on the way from the gather to where the ways part.

    What lies before it is applied once to each device's own shard, so an equation may come before only if its
    other operands are the same on every device. Among equally narrow values the last is taken.
    """
    invariant = invariance.over(collective)
    by_input = {operand: block for block in ops for operand in _blocked_operands(flow, block)}
    path: list[BlockOp] = []
    value, wire, length = source, source, 0
    while collective.kind == "all_gather" and len(set(flow.users[value])) == 1 and value in by_input:
        block = by_input[value]
        op = flow.ops[block.op]
        others = [operand for operand in op.inputs if operand != value]
        if len(op.outputs) != 1 or not all(invariant(operand) for operand in others):
            break
        path.append(block)
        value = op.outputs[0]
        if flow.bytes_of(value) <= flow.bytes_of(wire) and not of_two_bits(flow.avals[value].dtype):
            wire, length = value, len(path)
    before = tuple(path[:length])
    done = {block.op for block in before}
    return before, wire, tuple(block for block in ops if block.op not in done)
