"""Dots that no collective waits for, held back to run beside one: weights' gradients, on CPU devices.

XLA:CPU runs first what is ready first (docs/network.md). A weight's gradient is ready as soon as a backward
pass has gathered what came back, along with the dots that its next collective waits for; run before those it
delays that collective, and nothing is left to run beside it. So it is left out of the gather's ring, takes
the assembled value in one dot, and waits by data until the ring of that collective has made what it sends
last. Other compilers order a program themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from passes import shims
from passes.chains import AllGatherDot, Chain
from passes.collective import Collective
from passes.graph import COLLECTIVES, Dataflow, Op


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
    sums = [chain.collective for chain in chains if not isinstance(chain, AllGatherDot)]
    wanted = frozenset(dots)
    if not sums or not wanted:
        return {}
    held: dict[int, Collective] = {}
    # Bit n of a value's: whether it needs what sum n makes.
    makes = {collective.op: 1 << number for number, collective in enumerate(sums)}
    needs: dict[int, int] = {}
    for index, op in flow.live.items():
        needed = 0
        for operand in op.inputs:
            if isinstance(operand, int):
                needed |= needs.get(operand, 0)
        if index in wanted and (free := ~needed & ((1 << len(sums)) - 1)):
            held[index] = sums[free.bit_length() - 1]
        if needed := needed | makes.get(index, 0):
            needs.update(dict.fromkeys(op.outputs, needed))
    return held


def _may_communicate(op: Op) -> bool:
    return op.name in COLLECTIVES or bool(op.bodies) or shims.has_effects(op.eqn)
