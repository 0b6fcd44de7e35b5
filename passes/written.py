"""What has to be written for a ring that TPU compilers as written make within the dots that read it.

A norm's last multiplication, an activation, a weight's cast: compilers make them part of the dots that read
them. What a ring's dots read goes through barriers, so that it is there as a whole: a pass of its own.
"""

from __future__ import annotations

from typing import Any, Final

from passes import shims
from passes.block_eval import Read, cut_once, tie
from passes.blocks import MOVING, is_fusible
from passes.chains import AllGatherDot, DotReduceScatter
from passes.graph import Dataflow, Op

_NOTHING: Final = MOVING | {"copy", "name", "pvary", "stop_gradient"}
"""Operations that change no element."""

_PUT_TOGETHER: Final = ("concatenate", "pad")

FARTHEST: Final = 16
"""Operations in a row that are looked through."""


def written_bytes(flow: Dataflow, chain: AllGatherDot | DotReduceScatter) -> float:
    """Bytes that are read and written to make what a chain's dots read, and would not be as written.

    What other dots read as well is written once: each has its share. What is made of a dot's result is no
    pass of its own: it is made with that result.
    """
    operands = sorted(_operands(flow, chain))
    return sum(_share(flow, chain, value) * _pass_bytes(flow, value) for value in operands)


def made_once(flow: Dataflow, chain: DotReduceScatter, read: Read) -> dict[int, Any]:
    """What every product of a scatter reads as a whole, and a TPU's compiler would make within each of them.

    A rotary embedding's halves, put together 48 times, made a weight's gradient take three times as long.
    """
    if not shims.on_tpu(flow.aval(flow.ops[chain.collective.op].inputs[0])):
        return {}
    blocked = cut_once(flow, chain.body)
    whole = (operand for operand in _operands(flow, chain) if operand not in blocked)
    return {each: tie(read(each))[0] for each in sorted(whole) if _computing(flow, each) is not None}


def _operands(flow: Dataflow, chain: AllGatherDot | DotReduceScatter) -> set[int]:
    """What a chain's dots read that is made elsewhere."""
    made = {value for op in chain.ops for value in flow.ops[op].outputs}
    operands = {operand for dot in chain.dots for operand in flow.ops[dot.op].inputs}
    return {operand for operand in operands if isinstance(operand, int) and operand not in made}


def _share(flow: Dataflow, chain: AllGatherDot | DotReduceScatter, value: int) -> float:
    """Which part of an array's pass is the chain's; none of what is there as a whole anyway."""
    own = {dot.op for dot in chain.dots}
    dots: set[int] = set()
    for user in flow.users[value]:
        if user < 0:
            continue
        name = flow.ops[user].name
        if name == "dot_general":
            dots.add(user)
        elif not (_is_fused(flow.ops[user]) or name.startswith("reduce_")):
            return 0.0
    return len(dots & own) / len(dots)


def _pass_bytes(flow: Dataflow, value: int) -> float:
    """Bytes of an array and of what it is made of; 0 if compilers do not make it within its dots."""
    op = _computing(flow, value)
    if op is None:
        return 0.0
    roots = _roots_of(flow, op)
    makers = {flow.producer.get(root) for root in roots if flow.avals[root].size >= flow.avals[value].size}
    if any(m is not None and flow.ops[m].name == "dot_general" for m in makers):
        return 0.0
    return flow.bytes_of(value) + sum(map(flow.bytes_of, roots))


def _computing(flow: Dataflow, value: int) -> Op | None:
    """The operation that computes a value, beside any that only move it; None if compilers do not fuse it."""
    maker = flow.producer.get(value)
    while maker is not None and _is_fused(flow.ops[maker]):
        op = flow.ops[maker]
        if op.name not in _NOTHING:
            return op
        of = flow.form_of(op)
        maker = None if of is None else flow.producer.get(of)
    return None


def _is_fused(op: Op) -> bool:
    return is_fusible(op.name) or op.name in _PUT_TOGETHER


def _roots_of(flow: Dataflow, op: Op) -> set[int]:
    """The arrays that a fused operation's result is best made of: those of the fewest bytes."""
    known: dict[int, set[int]] = {}

    def of(op: Op, farthest: int) -> set[int]:
        found: set[int] = set()
        for value in op.inputs:
            if isinstance(value, int):
                if value not in known:
                    known[value] = best(value, farthest)
                found |= known[value]
        return found

    def best(value: int, farthest: int) -> set[int]:
        maker = flow.producer.get(value)
        if maker is None or not farthest or not _is_fused(flow.ops[maker]):
            return {value}
        made_of = of(flow.ops[maker], farthest - 1)
        return made_of if sum(map(flow.bytes_of, made_of)) <= flow.bytes_of(value) else {value}

    return of(op, FARTHEST)
