"""Dots that no collective waits for, weights' gradients most of all: when they run.

XLA:CPU runs first what is ready first (docs/network.md). A weight's gradient is ready as soon as a backward
pass has gathered what came back, along with the dots that its next collective waits for; run before those it
delays that collective, and nothing is left to run beside it. So it is left out of the gather's ring, takes
the assembled value in one dot, and waits by data until the ring of that collective has made what it sends
last.

TPU compilers leave them for last, and keep what they read until then: the gathered values of a whole backward
pass. So there the ring of the next sum waits for them, by a barrier; and for the rings of those weights'
gradients that are themselves summed over devices, of which the same is true. It does not wait for those that
a loop puts together of all its iterations: their dots write them in their place, which no barrier may stand
before.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Set
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
    if not sums:
        return {}
    every = (1 << len(sums)) - 1
    needed = flow.needs([collective.op for collective in sums])
    missing = {dot: every & ~needed.get(dot, 0) for dot in sorted(dots)}
    return {dot: sums[bits.bit_length() - 1] for dot, bits in missing.items() if bits}


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
    if not sums:
        return {}
    needed = flow.needs([collective.op for collective in sums])
    communicating = (bits for index, bits in needed.items() if _may_communicate(flow.ops[index]))
    awaited = functools.reduce(operator.or_, communicating, 0)
    others = [number for number in range(len(sums)) if awaited >> number & 1]
    last = {sum_.op for number, sum_ in enumerate(sums) if not awaited >> number & 1}
    waiting = last.union(dots)
    first = {}
    for index in flow.live:
        if index in waiting:
            among = others if index in last else range(len(sums))
            behind = needed.get(index, 0).bit_length()
            following = next((number for number in among if number >= behind), None)
            final = _in_final_form(flow, index)
            stacked = index not in last and not flow.stacked.isdisjoint(flow.ops[final].outputs)
            if following is not None and not stacked:
                first[final] = sums[following]
    return first


def _sums(chains: Iterable[Chain]) -> list[Collective]:
    return [chain.collective for chain in chains if not isinstance(chain, AllGatherDot)]


def _in_final_form(flow: Dataflow, index: int) -> int:
    """The last of the operations by which a result changes its form, where nothing else reads it."""
    last = index
    while True:
        users = flow.readers(last)
        if len(users) != 1 or -1 in users:
            return last
        (user,) = users
        if flow.ops[user].name not in _FORMS:
            return last
        last = user


def _may_communicate(op: Op) -> bool:
    return op.name in COLLECTIVES or bool(op.bodies) or shims.has_effects(op.eqn)
