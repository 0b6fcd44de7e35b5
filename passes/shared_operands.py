"""What a ring of a sum cuts into blocks and other dots read as a whole, on TPUs: made once, for all of them.

The gradient of an activation is an operand of two dots, a weight's gradient and the input's, which is summed.
As written compilers make it along with the dot before, for both. A ring reads it from behind a barrier, and
dots that do not are then given what it is made of, to make it again themselves (v5e: a weight's gradient took
1.9 times as long, the step of a scanned MLP 5 % longer). What else reads it, such as a bias' gradient, does
so before the barrier, for that dot makes its sum along with it (v5p: a step took 4 % longer).
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from passes.block_eval import cut_once
from passes.blocks import is_elementwise
from passes.chains import AllGatherDot, Chain, summed_dots
from passes.graph import Dataflow


def shared_operands(flow: Dataflow, chains: Iterable[Chain], apart: Container[int]) -> frozenset[int]:
    """The values that dots are to read from behind one barrier.

    Args:
      flow: the dataflow graph.
      chains: those that become rings.
      apart: operations that do not read what is made for the ring.
    """
    chains = tuple(chains)
    rings = {op for chain in chains for op in chain.members}
    found: set[int] = set()
    for chain in chains:
        if isinstance(chain, AllGatherDot):
            continue
        for value in cut_once(flow, summed_dots(chain)):
            maker = flow.producer.get(value)
            if maker is None or not is_elementwise(flow.ops[maker].name):
                continue
            readers = (user for user in flow.readers(maker) if user not in rings and user not in apart)
            if any(flow.ops[user].name == "dot_general" for user in readers):
                found.add(value)
    return frozenset(found)
