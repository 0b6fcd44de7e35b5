"""What has to be written for a ring that TPU compilers as written make within the dots that read it.

A norm's last multiplication, an activation, a weight's cast, its slice of what a loop runs over: compilers
make them part of the dots that read them. What a ring's dots read goes through barriers, so that it is there
as a whole: a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from passes import shims
from passes.block_eval import Read, cut_once, tie
from passes.blocks import MOVING, REDUCTIONS, is_elementwise, is_fusible
from passes.chains import AllGatherDot, DotReduceScatter
from passes.graph import Dataflow, Op, Operand

_NOTHING: Final = MOVING | {"copy", "name", "pvary", "stop_gradient"}
"""Operations that change no element, and at most move or drop some."""

_PUT_TOGETHER: Final = ("concatenate", "pad", "stack")

_TAKEN_APART: Final = ("slice", "split", "unstack")

_WHOLE: Final = _NOTHING.difference(_TAKEN_APART)
"""Those of them that keep all elements of an array."""

GATING: Final = 2.0
"""How many times longer an activation's pass takes than reading and writing its arrays, whose arithmetic
bounds it: 2.0 to 2.3 by the compilers' estimates of a gate times what it gates (bfloat16, all chips)."""

REDUCING: Final = 8
"""How many times longer than reading an array its reduction along the last dim takes that is no part of a
dot: 7 on v5e, 10 on v4, v5p and v6e, and 4.5 on 7x, by their compilers' estimates of a maximum (bfloat16)."""

FARTHEST: Final = 16
"""Operations in a row that are looked through for what an array is best made of."""

MOST: Final = 64
"""Operations that are looked at for a dot that an array is made with."""


def written_bytes(flow: Dataflow, chain: AllGatherDot | DotReduceScatter) -> float:
    """Bytes that are read and written to make what a chain's dots read, and would not be as written.

    Passes that take longer than that at the memory's bandwidth count for more: see `GATING` and `REDUCING`.
    What other dots read as well is written once: each has its share. What is made of a dot's result is no
    pass of its own: it is made with that result. A reduction of the results of a gather's dots along their
    last dim, such as the largest logit, is part of them too; behind a ring it takes as long as reading more.
    """
    operands = sorted(_operands(flow, chain))
    made = sum(_share(flow, chain, value) * _pass_bytes(flow, value) for value in operands)
    if not isinstance(chain, AllGatherDot):
        return made
    results = (value for dot in chain.dots for value in flow.ops[dot.op].outputs)
    return made + sum(REDUCING * flow.bytes_of(value) for value in results if _is_reduced(flow, value))


def made_once(flow: Dataflow, chain: DotReduceScatter, read: Read) -> dict[int, Any]:
    """What every product of a scatter reads as a whole, and a TPU's compiler would put together within each.

    The halves of a rotary embedding, put together 48 times, made a gradient take three times as long (v4).
    What is only computed element by element was not seen to matter, and is left to the compiler.
    """
    if not shims.on_tpu(flow.aval(flow.ops[chain.collective.op].inputs[0])):
        return {}
    blocked = cut_once(flow, chain.body)
    whole = (operand for operand in _operands(flow, chain) if operand not in blocked)
    put_together = (
        each for each in sorted(whole) if any(o.name in _PUT_TOGETHER for o in _fused(flow, each))
    )
    return {each: tie(read(each))[0] for each in put_together}


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
        elif not (_is_fused(flow.ops[user]) or name in REDUCTIONS):
            return 0.0
    return len(dots & own) / len(dots)


def _pass_bytes(flow: Dataflow, value: int) -> float:
    """Bytes of an array and of what it is made of; 0 if compilers do not make it within its dots."""
    if _before_moves(flow, value) in flow.sliced:
        return 2.0 * flow.bytes_of(value)
    op = _computing(flow, value)
    if op is None:
        return 0.0
    gating = _is_of_parts(flow, value)
    if not gating and _is_made_with_a_dot(flow, value):
        return 0.0
    read_and_written = flow.bytes_of(value) + sum(map(flow.bytes_of, _roots_of(flow, op)))
    return GATING * read_and_written if gating else read_and_written


def _is_made_with_a_dot(flow: Dataflow, value: int) -> bool:
    """Whether an array is made of a dot's result, and needs no sums of it.

    A norm behind a dot does: it can be made when all of a row is there.
    """
    names = {each.name for each in _fused(flow, value)}
    return "dot_general" in names and names.isdisjoint(REDUCTIONS)


def _is_of_parts(flow: Dataflow, value: int) -> bool:
    """Whether an array is made of parts of another, or put together of several: no dot makes it so.

    A gate, and what it gates, that come from one dot; or their gradients. Halves of rows, such as those of a
    rotary embedding, are put together for the program as written as well.
    """
    parts: dict[int, set[int]] = {}
    for op in _fused(flow, value, through=_is_in_place):
        if op.name in _PUT_TOGETHER and not _makes_rows(flow, op):
            return True
        if op.name in _TAKEN_APART and isinstance(of := op.inputs[0], int):
            parts.setdefault(of, set()).update(op.outputs)
    return any(len(taken) > 1 for taken in parts.values())


def _makes_rows(flow: Dataflow, op: Op) -> bool:
    """Whether what is put together are parts of rows."""
    part, whole = (flow.aval(value).shape for value in (op.inputs[0], op.outputs[0]))
    return part[-1] != whole[-1]


def _is_reduced(flow: Dataflow, value: int) -> bool:
    """Whether what is made of an array, element by element, is reduced along its last dim alone."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < MOST:
        for user in flow.users[waiting.pop()]:
            if user < 0 or user in seen:
                continue
            seen.add(user)
            op = flow.ops[user]
            if op.name in REDUCTIONS:
                if tuple(op.params["axes"]) == (len(flow.aval(op.inputs[0]).shape) - 1,):
                    return True
            elif is_elementwise(op.name):
                waiting += op.outputs
    return False


def _computing(flow: Dataflow, value: int) -> Op | None:
    """The operation that computes a value, beside any that only move it; None if compilers do not fuse it."""
    maker = flow.producer.get(_before_moves(flow, value))
    op = None if maker is None else flow.ops[maker]
    return op if op is not None and _is_fused(op) and op.name not in _NOTHING else None


def _before_moves(flow: Dataflow, value: int) -> int:
    """The value that this one is the same as, moved perhaps."""
    while (maker := flow.producer.get(value)) is not None and flow.ops[maker].name in _NOTHING:
        of = flow.form_of(flow.ops[maker])
        if of is None:
            break
        value = of
    return value


def _is_fused(op: Op) -> bool:
    return is_fusible(op.name) or op.name in _PUT_TOGETHER


def _is_in_place(op: Op) -> bool:
    return is_elementwise(op.name) or op.name in _WHOLE


def _fused(flow: Dataflow, value: Operand, through: Callable[[Op], bool] = _is_fused) -> Iterator[Op]:
    """The operations that compilers may fuse into what reads a value, and where they end, back to back."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < MOST:
        value = waiting.pop()
        maker = flow.producer.get(value) if isinstance(value, int) else None
        if maker is not None and maker not in seen:
            seen.add(maker)
            yield flow.ops[maker]
            if through(flow.ops[maker]):
                waiting += flow.ops[maker].inputs


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
