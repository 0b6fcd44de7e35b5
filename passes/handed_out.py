"""What the rest of a program gets of a ring's values: handed out whole, or made again of what is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from passes.blocks import is_fusible
from passes.chains import BlockOp
from passes.graph import Dataflow


def handed_out(
    flow: Dataflow, first: Iterable[int], blocks: Sequence[BlockOp], gone: Set[int]
) -> tuple[tuple[int, ...], frozenset[int]]:
    """The values that a ring hands out, and the operations that run again outside of it.

    What a compiler makes part of whatever reads it, such as a cast, runs again where less has to be handed
    out so: a norm behind a gather is in float32, and its derivative needs it centred. As written, compilers
    keep what was gathered, and make the rest within the operations that read it; with what is in float32
    handed out, an MLP's step took 1.2 times as long as written, and more than twice its memory (v4).

    Args:
      flow: the dataflow graph.
      first: values that the ring does not make by operations: what a gather gives.
      blocks: its operations, in program order.
      gone: the operations that do not run outside of it, if none of `blocks` has to.
    """
    outside: set[int] = set()
    again: set[int] = set()
    bytes_for: dict[int, int] = {}
    made_of: dict[int, tuple[int, list[int]]] = {}
    values: list[int] = []

    def provide(value: int) -> None:
        waiting = [value]
        while waiting:
            wanted = waiting.pop()
            if wanted in outside:
                continue
            outside.add(wanted)
            bytes_for[wanted] = 0
            if wanted in made_of:
                op, operands = made_of[wanted]
                again.add(op)
                waiting.extend(operands)
            else:
                values.append(wanted)

    def add(value: int, needed: int) -> None:
        bytes_for[value] = needed
        if any(user not in gone for user in flow.users[value]):
            provide(value)

    for value in first:
        add(value, flow.bytes_of(value))
    for block in blocks:
        op = flow.ops[block.op]
        operands = list(dict.fromkeys(o for o in op.inputs if isinstance(o, int) and o in bytes_for))
        needed = sum(bytes_for[operand] for operand in operands)
        for value in op.outputs:
            if is_fusible(op.name) and needed < flow.bytes_of(value):
                made_of[value] = block.op, operands
            add(value, needed if value in made_of else flow.bytes_of(value))
    return tuple(sorted(values)), frozenset(again)
