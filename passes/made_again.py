"""What a program with rings makes twice rather than keep it, on TPUs: activations, for the backward pass.

A ring of a sum reads an activation block by block, so that it has to be there as a whole. The backward pass
reads it as well, and factors of its derivative: made along with the activation, all of them would be kept.
As written, compilers keep what they are made of, and make them again within the operations that read them;
they do so beside a ring if what they are made of goes through a barrier. What a ring of the backward pass
reads, such as that of a weight's gradient, is made again before it, as a whole: a little work, in place of an
array for every layer.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from typing import Final

from passes.block_eval import cut_once
from passes.blocks import is_fusible
from passes.chains import AllGatherDot, Chain, summed_dots
from passes.graph import Dataflow

MOST_ROOTS: Final = 16
"""Of so many values at most is one made again: each of them is kept for it. What a residual stream has become
is made of all that was ever added to it.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class MadeAgain:
    """What is made again in a program, of what, and for whom.

    Attributes:
      makers: each value that can be made again, with the operation that makes it.
      roots: what these values are made of, beside arguments and constants.
      readers: the operations that read them made again.
      results: the results of the program that are made again.
    """

    makers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    roots: frozenset[int] = frozenset()
    readers: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()


def made_again(
    flow: Dataflow, chains: Iterable[Chain], kept: Iterable[Chain], later: Mapping[int, bool]
) -> MadeAgain:
    """What the program makes again if these chains are rings.

    For each ring of a sum: the values that its dots read in blocks, and others made of the same, for
    operations that need the ring's result and another sum's. What is soon read again need not be made again,
    but for operations after the program that are no rings, into which it is fused. And what such operations
    read where they are rings themselves, of what the ring's result needs. All of it if what is then kept has
    fewer bytes.

    Args:
      flow: the dataflow graph.
      chains: those that become rings, in program order.
      kept: those that do not.
      later: results of the program that are read only after it, each with whether a ring reads it.
    """
    chains = tuple(chains)
    rings = {chain.collective.op: chain for chain in chains if not isinstance(chain, AllGatherDot)}
    if not rings:
        return MadeAgain()
    members = {op for chain in chains for op in chain.members}
    again = functools.cache(lambda op: op not in members and _makes_again(flow, op))
    every = sorted({*rings, *(c.collective.op for c in kept if not isinstance(c, AllGatherDot))})
    needs, needed_by = flow.needs(every), _needed_by(flow, every)
    read_whole = read_by_rings(flow, chains) | {value for value, ring in later.items() if ring}
    of_sum: dict[int, list[int]] = {}
    for value, needing in needed_by.items():
        if value in read_whole:
            first = (needing & -needing).bit_length() - 1
            of_sum.setdefault(every[first], []).append(value)
    makers: dict[int, int] = {}
    roots: set[int] = set()
    readers: set[int] = set()
    for sum_op in every:
        following = functools.reduce(
            operator.or_, (needed_by.get(value, 0) for value in flow.ops[sum_op].outputs), 0
        )
        late = functools.partial(_needs, needs, following)
        cut = cut_once(flow, summed_dots(rings[sum_op])) if sum_op in rings else ()
        if following:
            together = [tuple(cut), *((value,) for value in of_sum.get(sum_op, ()))]
        else:
            together = [] if any(later.get(value, True) for value in cut) else [tuple(cut)]
        for values in together:
            made = _made_of(flow, [v for v in values if v not in makers], again, most=MOST_ROOTS)
            if made is None or not made[0]:
                continue
            found, of = made
            _with_others(flow, found, of, again, late)
            reads = {
                (value, user)
                for value in (*found, *of)
                for user in flow.users[value]
                if (value in later if user < 0 else late(user))
            }
            read = {value for value, _ in reads}
            spared = read & found.keys()
            if not spared or _bytes(flow, of - read) >= _bytes(flow, spared):
                continue
            makers.update(found)
            roots |= of
            readers.update(user for _, user in reads)
    results = frozenset(later.keys() & {*makers, *roots})
    return MadeAgain(makers, frozenset(roots), frozenset(readers - {-1}), results)


def read_by_rings(flow: Dataflow, chains: Iterable[Chain]) -> frozenset[int]:
    """The values from elsewhere that rings read."""
    made = {value for chain in chains for op in chain.ops for value in flow.ops[op].outputs}
    read = {operand for chain in chains for op in chain.ops for operand in flow.ops[op].inputs}
    return frozenset(operand for operand in read if isinstance(operand, int) and operand not in made)


def _needed_by(flow: Dataflow, ops: Sequence[int]) -> Mapping[int, int]:
    """Which of some operations need each value, where one does: bit n for the n-th."""
    wanted = {op: 1 << number for number, op in enumerate(ops)}
    found: dict[int, int] = {}
    for index in reversed(tuple(flow.live)):
        op, needing = flow.ops[index], wanted.get(index, 0)
        for value in op.outputs:
            needing |= found.get(value, 0)
        if needing:
            for operand in op.inputs:
                if isinstance(operand, int):
                    found[operand] = found.get(operand, 0) | needing
    return found


def _needs(needs: Mapping[int, int], wanted: int, index: int) -> bool:
    return bool(needs.get(index, 0) & wanted)


def _made_of(
    flow: Dataflow,
    values: Iterable[int],
    again: Callable[[int], bool],
    *known: Container[int],
    most: int = 0,
) -> tuple[dict[int, int], set[int]] | None:
    """What can be made again of these values and what they are made of, with its maker; and of what.

    Args:
      flow: the graph.
      values: those.
      again: whether an operation may be made again.
      known: values that need not be made.
      most: of so many others at most; None if they are made of more.
    """
    found: dict[int, int] = {}
    of: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        maker = flow.producer.get(value)
        if maker is None or value in found or value in of or any(value in each for each in known):
            continue
        if not again(maker):
            of.add(value)
            if len(of) > most:
                return None
            continue
        found[value] = maker
        waiting.extend(operand for operand in flow.ops[maker].inputs if isinstance(operand, int))
    return found, of


def _with_others(
    flow: Dataflow,
    found: dict[int, int],
    of: Set[int],
    again: Callable[[int], bool],
    late: Callable[[int], bool],
) -> None:
    """Adds all else that can be made of the same, and of arguments and constants."""
    waiting = [user for value in (*found, *of) for user in flow.users[value]]
    heapq.heapify(waiting)
    while waiting:
        index = heapq.heappop(waiting)
        if index < 0 or late(index) or not again(index):
            continue
        op = flow.ops[index]
        if op.outputs[0] in found:
            continue
        others = _made_of(flow, [o for o in op.inputs if isinstance(o, int)], again, found, of)
        if others is not None:
            found.update(others[0])
            found.update(dict.fromkeys(op.outputs, index))
            for value in op.outputs:
                for user in flow.users[value]:
                    heapq.heappush(waiting, user)


def _makes_again(flow: Dataflow, index: int) -> bool:
    """Whether the results of an operation may be made again: masks are smaller than what they are made of."""
    op = flow.ops[index]
    return is_fusible(op.name) and all(flow.avals[value].dtype.itemsize > 1 for value in op.outputs)


def _bytes(flow: Dataflow, values: Iterable[int]) -> int:
    return sum(map(flow.bytes_of, values))
