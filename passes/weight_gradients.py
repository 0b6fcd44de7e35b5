"""Dots that no collective waits for, weights' gradients most of all: when they run.

XLA:CPU runs first what is ready first (docs/network.md). A weight's gradient is ready as soon as a backward
pass has gathered what came back, along with the dots that its next collective waits for; run before those it
delays that collective, and nothing is left to run beside it. So it is left out of the gather's ring, takes
the assembled value in one dot, and waits by data until the ring of that collective has made what it sends
last.

TPU compilers leave them for last, and keep what they read until then: the gathered values of a whole backward
pass. So there the ring of the next sum waits for them, by a barrier.
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

    Where the result of a dot is only to change its form, it is given by the operation that does so last.

    Args:
      flow: the dataflow graph of the chains.
      chains: in program order.
      dots: from which no collective is reached.
    """
    sums = _sums(chains)
    needed = _needed(flow, sums, frozenset(dots))
    return {
        _in_final_form(flow, dot): sums[bits.bit_length()]
        for dot, bits in needed.items()
        if bits.bit_length() < len(sums)
    }


def _sums(chains: Iterable[Chain]) -> list[Collective]:
    return [chain.collective for chain in chains if not isinstance(chain, AllGatherDot)]


def _needed(flow: Dataflow, sums: Sequence[Collective], dots: Set[int]) -> Mapping[int, int]:
    """The sums that each dot needs: bit n of its number says so of sum n."""
    if not sums or not dots:
        return {}
    needed = flow.needs([collective.op for collective in sums])
    return {index: needed.get(index, 0) for index in flow.live if index in dots}


def _in_final_form(flow: Dataflow, dot: int) -> int:
    """The last of the operations by which the result of a dot changes its form, and nothing else reads it."""
    last = dot
    while True:
        (value,) = flow.ops[last].outputs
        users = set(flow.users[value])
        if len(users) != 1 or -1 in users:
            return last
        (user,) = users
        if flow.ops[user].name not in _FORMS:
            return last
        last = user


def _may_communicate(op: Op) -> bool:
    return op.name in COLLECTIVES or bool(op.bodies) or shims.has_effects(op.eqn)
