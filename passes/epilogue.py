"""Epilogues: operations on a gather ring's results that run block by block too, inside the ring.

Left outside, an activation behind a dot reads and writes the whole result once the ring is done. Inside, it
is part of the partial dot's fusion, and what only it reads is never written.

What it reads beside the results must then be there as a whole. A factor that a backward pass is given has
been kept by the forward pass for it: left outside, compilers make it anew of what is smaller, within the
fusion that reads it. So an epilogue reads nothing of the results' size that the program is given, but masks:
with the two factors of a gelu inside, four layers of an MLP took 56 % more memory and 9 % more time (v5e).
What something before the ring reads is there anyway, as a residual is: where it was added outside, the dots
of the backward pass each added it anew, and a step took 8 % longer (v5p; an MLP over two pods).
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator, Set

from passes.blocks import MOVING, blockwise
from passes.chains import AllGatherDot, BlockOp, reductions
from passes.collective import explicitly_sharded
from passes.decide import Decision, rings_of
from passes.emit import Ring
from passes.gather_match import call_of, keeps_types
from passes.graph import Dataflow, Operand
from passes.schedule import divisions
from passes.shims import has_effects


def with_epilogues(flow: Dataflow, decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """The decisions, the rings among them with the epilogues that make what they write smaller.

    Epilogues that they have are worked out again.

    No operation goes into two rings, and none that needs the results of a ring other than its own, so that
    the rings can still run one after the other.
    """
    decisions = tuple(map(_without_epilogue, decisions))
    rings = rings_of(decisions)
    if not any(_takes(ring) for ring in rings):
        return decisions
    taken = {op for ring in rings for op in ring.chain.members}
    taken.update(op for ring in rings for reduced in reductions(ring.chain) for op in reduced.members)
    late = _later(flow, taken)
    revised = []
    for decision in decisions:
        if decision.rewritten and decision.ring is not None and _takes(decision.ring):
            ring = _with_epilogue(flow, decision.ring, taken, late)
            taken.update(ring.chain.members)
            decision = dataclasses.replace(decision, ring=ring)
        revised.append(decision)
    return tuple(revised)


def _without_epilogue(decision: Decision) -> Decision:
    ring = decision.ring
    if ring is None or not isinstance(ring.chain, AllGatherDot) or not ring.chain.epilogue:
        return decision
    chain = dataclasses.replace(ring.chain, epilogue=(), unplaced=frozenset())
    return dataclasses.replace(decision, ring=Ring(chain, ring.schedule))


def _takes(ring: Ring) -> bool:
    """Whether a ring may have an epilogue: its pieces are whole rows (or matrices of a batch) of results."""
    schedule = ring.schedule
    return isinstance(ring.chain, AllGatherDot) and not schedule.across and schedule.columns == 1


def _later(flow: Dataflow, taken: Set[int]) -> frozenset[int]:
    """The operations of rings, and all that need a result of theirs."""
    late: set[int] = set()
    producer = flow.producer
    for index, op in flow.live.items():
        if index in taken or any(producer.get(v) in late for v in op.inputs if isinstance(v, int)):
            late.add(index)
    return frozenset(late)


def _with_epilogue(flow: Dataflow, ring: Ring, taken: Set[int], late: Set[int]) -> Ring:
    chain = ring.chain
    assert isinstance(chain, AllGatherDot)
    made = {
        value: dot.dims.result_dim
        for dot in chain.dots
        for value in flow.ops[dot.op].outputs
        if dot.dims.result_dim is not None and not explicitly_sharded(flow.avals[value])
    }
    blocks = _fewest_bytes(flow, made, list(_followers(flow, chain, dict(made), taken, late)))
    if not blocks:
        return ring
    inside = {block.op for block in blocks}
    values = (*made, *(value for block in blocks for value in flow.ops[block.op].outputs))
    chain = dataclasses.replace(
        chain,
        epilogue=tuple(blocks),
        unplaced=frozenset(v for v in values if all(user in inside for user in flow.users[v])),
    )
    return Ring(chain, ring.schedule)


def _followers(
    flow: Dataflow, chain: AllGatherDot, blocked: dict[int, int], taken: Set[int], late: Set[int]
) -> Iterator[BlockOp]:
    """The operations that can follow the dots block by block, in program order."""
    unit, axis_size = divisions(flow, chain), chain.collective.axis_size
    start = min(dot.op for dot in chain.dots)
    pending = [user for value in blocked for user in flow.users[value] if user >= 0]
    heapq.heapify(pending)
    done = -1
    while pending:
        index = heapq.heappop(pending)
        if index == done or index in taken:
            continue
        done = index
        op = flow.ops[index]
        sharded = any(explicitly_sharded(flow.avals[value]) for value in op.outputs)
        if sharded or has_effects(op.eqn) or not keeps_types(flow, op):
            continue
        side = next(i for i, v in enumerate(op.inputs) if isinstance(v, int) and v in blocked)
        first = op.inputs[side]
        assert isinstance(first, int)
        rule = blockwise(op.name, call_of(flow, op), side, blocked[first], axis_size)
        if rule is None:
            continue
        pairs = list(zip(op.inputs, rule.operand_dims, strict=True))
        own = [(v, dim) for v, dim in pairs if isinstance(v, int) and v in blocked]
        others = [v for v, _ in pairs if isinstance(v, int) and v not in blocked]
        if any(blocked[v] != dim for v, dim in own) or any(flow.producer.get(v) in late for v in others):
            continue
        if any(_is_given(flow, v, start) for v, dim in pairs if dim is not None):
            continue
        sizes = [flow.aval(v).shape[dim] for v, dim in pairs if dim is not None]
        sizes += [flow.avals[value].shape[rule.result_dim] for value in op.outputs]
        if math.gcd(unit, *(size // axis_size for size in sizes)) != unit:
            continue
        blocked.update(dict.fromkeys(op.outputs, rule.result_dim))
        yield BlockOp(index, rule)
        for value in op.outputs:
            for user in flow.users[value]:
                if user >= 0:
                    heapq.heappush(pending, user)


def _is_given(flow: Dataflow, value: Operand, start: int) -> bool:
    """Whether an operand is an array that the program is given, no mask, and that nothing before reads.

    It may be in another shape, as where dims are kept apart that the program is given merged.
    """
    if not isinstance(value, int) or flow.avals[value].dtype.itemsize <= 1:
        return False
    read: set[int] = set(flow.users[value])
    while value not in flow.given:
        maker = flow.producer.get(value)
        if maker is None or flow.ops[maker].name != "reshape":
            return False
        (source,) = flow.ops[maker].inputs
        if not isinstance(source, int):
            return False
        read |= set(flow.users[source]) - {maker}
        value = source
    return not any(0 <= user < start for user in read)


def _fewest_bytes(flow: Dataflow, made: Iterable[int], blocks: list[BlockOp]) -> list[BlockOp]:
    """The beginning of the operations after which the fewest bytes are needed outside; of equals the longest.

    But it does not end with operations that only move elements: what takes a result apart, such as a fused
    projection's, is one copy after the ring and one a piece in it (q, k and v of 8192 tokens, v5p: 200 µs
    against 9). None of them where each adds to what has to be written, as when all that it reads is needed
    elsewhere too.
    """
    left = {value: len(flow.users[value]) for value in made}
    total = fewest = sum(flow.bytes_of(value) for value, users in left.items() if users)
    best = 0
    for number, block in enumerate(blocks, 1):
        op = flow.ops[block.op]
        for value in op.inputs:
            if isinstance(value, int) and value in left:
                left[value] -= 1
                total -= 0 if left[value] else flow.bytes_of(value)
        for value in op.outputs:
            left[value] = len(flow.users[value])
            total += flow.bytes_of(value) if left[value] else 0
        if total < fewest or (total == fewest and op.name not in MOVING):
            best, fewest = number, total
    return blocks[:best]
