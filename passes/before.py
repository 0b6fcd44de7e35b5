"""What the ring before another in a program has on chip, of TPUs: it says what the next one finds there.

An operand that all dots of a ring share, its weights, is fetched while the ring before it runs if both fit;
`cost_model.ring_on_chip` says what becomes of it if they do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from cost_model import Hardware
from cost_model.ring_work import NOTHING_BEFORE, Before
from passes.chains import Chain, DotPsum
from passes.graph import Dataflow


def before_each(
    flow: Dataflow, chains: Iterable[Chain], hardware: Hardware, lasting: Set[int]
) -> Mapping[int, Before]:
    """Number of a collective → what the ring before that of its chain has on chip, as TPUs are known to do.

    Args:
      flow: the dataflow graph.
      chains: one of every collective, in program order.
      hardware: where they run.
      lasting: inputs of the jaxpr that the program around it reads again.
    """
    found: dict[int, Before] = {}
    before = NOTHING_BEFORE
    if hardware.network != "torus":
        return found
    for chain in chains:
        found[chain.collective.op] = before
        last = max(dot.op for dot in chain.dots)
        held_bytes, stays = 0, False
        for operand in sorted(_shared(flow, chain), key=flow.bytes_of):
            if held_bytes + flow.bytes_of(operand) <= hardware.on_chip_bytes:
                held_bytes += flow.bytes_of(operand)
                stays = stays or operand in lasting or any(user > last for user in flow.users[operand])
        before = Before(held_bytes, stays)
    return found


def _shared(flow: Dataflow, chain: Chain) -> set[int]:
    """The operands of a chain's dots that no block of theirs cuts."""
    inner = (chain.scatter,) if isinstance(chain, DotPsum) else (chain,)
    return {
        operand
        for part in inner
        for dot in part.dots
        for operand, dim in zip(flow.ops[dot.op].inputs, dot.dims.operand_dims, strict=True)
        if dim is None and isinstance(operand, int)
    }
