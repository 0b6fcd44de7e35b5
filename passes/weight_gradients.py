"""Dots that no collective waits for, weights' gradients most of all: when they run.

XLA:CPU runs first what is ready first (docs/network.md). A weight's gradient is ready as soon as a backward
pass has gathered what came back, along with the dots that its next collective waits for; run before those it
delays that collective, and nothing is left to run beside it. So it is left out of the gather's ring, takes
the assembled value in one dot, and waits by data until the ring of that collective has made what it sends
last.

TPU compilers leave them for last, and keep what they read until then: the gathered values of a whole backward
pass. So there the ring of the next sum waits for them, by a barrier; and for the rings of those weights'
gradients that are themselves summed over devices, of which the same is true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

from passes import shims
from passes.chains import AllGatherDot, Chain
from passes.collective import Collective
from passes.graph import COLLECTIVES, Dataflow, Op

_FORMS: Final = frozenset({"transpose", "reshape", "squeeze", "convert_element_type"})
"""Operations that a compiler makes part of a dot, or of its result's layout."""


def weight_gradients(flow: Dataflow, rings: Set[int] = frozenset()) -> frozenset[int]:
    """The dots from which no collective is reached, nor an operation with a body or an effect, nor a ring.

    Args:
      flow: the dataflow graph.
      rings: the operations that rings replace.
    """
    awaited: set[int] = set()
    found = []
    for index in reversed(tuple(flow.live)):
        op = flow.ops[index]
        if index in rings or _may_communicate(op) or any(value in awaited for value in op.outputs):
            awaited.update(operand for operand in op.inputs if isinstance(operand, int))
        elif op.name == "dot_general":
            found.append(index)
    return frozenset(found)


def held_back(flow: Dataflow, chains: Iterable[Chain], dots: Iterable[int]) -> Mapping[int, Collective]:
    """For each dot that can run beside the collective of a chain that sums up, the last such collective.

    Args:
      flow: the dataflow graph of the chains.
      chains: in program order.
      dots: from which no collective is reached.
    """
    sums = _sums(chains)
    every = (1 << len(sums)) - 1
    needed = _needed(flow, sums, frozenset(dots))
    return {dot: sums[(every & ~bits).bit_length() - 1] for dot, bits in needed.items() if bits != every}


def run_first(flow: Dataflow, chains: Iterable[Chain], dots: Iterable[int]) -> Mapping[int, Collective]:
    """For each dot the next collective of a chain that sums up, after all those that it needs.

    So too for each such collective that no other waits for, of those that others wait for. Where a result is
    only to change its form, it is given by the operation that does so last.

    Args:
      flow: the dataflow graph of the chains.
      chains: in program order.
      dots: from which no collective is reached.
    """
    sums = _sums(chains)
    last = {number: sums[number].op for number in _awaited_by_none(flow, sums)}
    others = [number for number in range(len(sums)) if number not in last]
    needed = _needed(flow, sums, {*dots, *last.values()})
    first = {}
    for index, bits in needed.items():
        among = others if index in last.values() else range(len(sums))
        import os

        skip = int(os.environ.get("SKIP", "0")) if index in last.values() else 0
        ahead = [number for number in among if number >= bits.bit_length()][skip:]
        following = ahead[0] if ahead else None
        if following is not None:
            first[_in_final_form(flow, index)] = sums[following]
    return first


def _awaited_by_none(flow: Dataflow, sums: Sequence[Collective]) -> list[int]:
    """The numbers of the sums whose results no collective, effect or operation with a body needs."""
    needed = flow.needs([collective.op for collective in sums])
    awaited = 0
    for index, bits in needed.items():
        if _may_communicate(flow.ops[index]):
            awaited |= bits
    return [number for number in range(len(sums)) if not awaited >> number & 1]


def _sums(chains: Iterable[Chain]) -> list[Collective]:
    return [chain.collective for chain in chains if not isinstance(chain, AllGatherDot)]


def _needed(flow: Dataflow, sums: Sequence[Collective], ops: Set[int]) -> Mapping[int, int]:
    """The sums that each operation needs: bit n of its number says so of sum n."""
    if not sums or not ops:
        return {}
    needed = flow.needs([collective.op for collective in sums])
    return {index: needed.get(index, 0) for index in flow.live if index in ops}


def _in_final_form(flow: Dataflow, index: int) -> int:
    """The last of the operations by which a result changes its form, where nothing else reads it."""
    last = index
    while True:
        users = {user for value in flow.ops[last].outputs for user in flow.users[value]}
        if len(users) != 1 or -1 in users:
            return last
        (user,) = users
        if flow.ops[user].name not in _FORMS:
            return last
        last = user


def _may_communicate(op: Op) -> bool:
    return op.name in COLLECTIVES or bool(op.bodies) or shims.has_effects(op.eqn)
