"""Ring schedules: how the shards of one chain travel."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Literal

from passes.chains import AllGatherDot, BlockOp, Chain, DotPsum
from passes.graph import Dataflow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RingSchedule:
    """One way to run a chain as a ring.

    Attributes:
      directions: 1, whole shards travel one way round; 2, half-shards travel both ways at once, which uses
        both directions of every link and halves the time of a hop.
      route: ``ring``, every shard passes every device; ``exchange``, each block goes straight to where it
        belongs.
    """

    directions: Literal[1, 2]
    route: Literal["ring", "exchange"] = "ring"

    def __str__(self) -> str:
        if self.route == "exchange":
            return "exchange"
        return "unidirectional" if self.directions == 1 else "bidirectional"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The part of each block that travels one way.

    Attributes:
      start, share: where the part begins and how much it is, in fractions of a block.
      step: by how many devices the owner of what arrives moves per hop: 1 or -1.
    """

    start: Fraction
    share: Fraction
    step: Literal[1, -1]


WHOLE = Part(Fraction(0), Fraction(1), 1)
"""The part that is the whole block."""


def candidates(flow: Dataflow, chain: Chain) -> tuple[RingSchedule, ...]:
    """The schedules that apply to a chain."""
    if chain.collective.kind == "all_to_all":
        return (RingSchedule(directions=1, route="exchange"),)
    both = (RingSchedule(directions=1), RingSchedule(directions=2))
    return both if divisions(flow, chain) > 1 else both[:1]


def divisions(flow: Dataflow, chain: Chain) -> int:
    """Into how many equal parts every block of the chain can be cut: the common divisor of their sizes."""
    if isinstance(chain, DotPsum):
        gathered = divisions(flow, chain.gather) if chain.gather else 0
        return math.gcd(divisions(flow, chain.scatter), gathered)
    if isinstance(chain, AllGatherDot):
        blocks: tuple[BlockOp, ...] = (*chain.after, *chain.dots)
        sizes = [flow.avals[chain.wire].shape[chain.blocked[chain.wire]]]
    else:
        blocks = chain.body
        collective = chain.collective
        sizes = [flow.aval(flow.ops[collective.op].inputs[0]).shape[collective.dim]]
    for block in blocks:
        op = flow.ops[block.op]
        for operand, dim in zip(op.inputs, block.dims.operand_dims, strict=True):
            if dim is not None:
                sizes.append(flow.aval(operand).shape[dim])
        if block.dims.result_dim is not None:
            sizes.extend(flow.avals[value].shape[block.dims.result_dim] for value in op.outputs)
    return math.gcd(*(size // chain.collective.axis_size for size in sizes))


def parts(schedule: RingSchedule, unit: int) -> tuple[Part, ...]:
    """How a schedule divides each block, given the number of equal parts it can be cut into.

    Blocks that do not divide by two are cut into two unequal parts.
    """
    if schedule.directions == 1:
        return (WHOLE,)
    first = Fraction((unit + 1) // 2, unit)
    return (Part(Fraction(0), first, 1), Part(first, 1 - first, -1))
