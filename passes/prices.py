"""The best schedule of each chain of a program, worked out once for chains that are alike.

Layers that are not scanned repeat their chains, and pricing them is most of what the pass costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping

from cost_model import Axis, Estimate
from cost_model.ring_work import NOTHING_BEFORE, Before
from passes.candidates import as_run, candidates
from passes.chains import BlockOp, Chain, DotPsum, DotReduceScatter
from passes.collective import Collective
from passes.graph import Dataflow, Literal
from passes.network import Network
from passes.pricing import Pricer, pricer
from passes.schedule import RingSchedule
from passes.starts import may_start_explicitly
from passes.written import written_bytes


class Prices:
    """What the chains of a program cost.

    Args:
      flow: the dataflow graph of the chains.
      network: the devices that they run on.
      before: number of a collective → what the ring before its chain has on chip.
      alone: whether there is only one collective with chains.
    """

    def __init__(
        self, flow: Dataflow, network: Network, before: Mapping[int, Before], *, alone: bool
    ) -> None:
        self._flow, self._network, self._before, self._alone = flow, network, before, alone
        self._best: dict[Hashable, tuple[Estimate | None, RingSchedule]] = {}

    def axis(self, collective: Collective) -> Axis | None:
        """The axis of a collective within the program; None if the hardware is unknown."""
        return self._network.axis(collective, alone=self._alone)

    def of(self, chain: Chain, axis: Axis) -> Pricer:
        """Predicts the chain's times per schedule on an axis, its own in the program or another."""
        return pricer(self._flow, chain, axis, self._before_it(chain), self._written_for(chain))

    def best(self, chain: Chain) -> tuple[Estimate | None, RingSchedule]:
        """The schedule of the largest predicted benefit, the last one if the hardware is unknown.

        First of all come those that need no more memory than the chain as written.
        """
        started = may_start_explicitly(self._flow, chain)  # not where its operand is the same in every turn
        like = (likeness(self._flow, chain), self._before_it(chain), started, self._written_for(chain))
        try:
            known = self._best.get(like)
        except TypeError:  # A parameter of an equation that cannot be hashed.
            return self._work_out(chain)
        if known is None:
            known = self._best[like] = self._work_out(chain)
        return known

    def fastest(self, chain: Chain, axis: Axis, count: int) -> tuple[RingSchedule, ...]:
        """Of all schedules that may be best on an axis so many of the least predicted time."""
        price = self.of(chain, axis)
        found = candidates(self._flow, chain, axis, thorough=True)
        fastest = sorted(found, key=lambda schedule: price(schedule).overlapped_s)[:count]
        return tuple(as_run(self._flow, chain, schedule) for schedule in fastest)

    def _before_it(self, chain: Chain) -> Before:
        return self._before.get(chain.collective.op, NOTHING_BEFORE)

    def _written_for(self, chain: Chain) -> float:
        hardware = self._network.hardware
        if hardware is None or hardware.network != "torus":
            return 0.0
        of = chain.scatter if isinstance(chain, DotPsum) else chain
        return written_bytes(self._flow, of)

    def _work_out(self, chain: Chain) -> tuple[Estimate | None, RingSchedule]:
        axis = self.axis(chain.collective)
        schedules = candidates(self._flow, chain, axis)
        if axis is None:
            return None, schedules[-1]
        price = self.of(chain, axis)
        estimate, schedule = max(((price(s), s) for s in schedules), key=lambda p: p[0].rank)
        return estimate, as_run(self._flow, chain, schedule)


def likeness(flow: Dataflow, chain: Chain) -> Hashable:
    """What a chain is, but for where in the program: its equations, types and blocks, its values renumbered.

    Chains with equal ones have the same schedules and prices. It may hold what cannot be hashed.
    """
    numbers: dict[int, int] = {}

    def renumbered(values: Iterable[int | Literal]) -> tuple[int | None, ...]:
        return tuple(
            numbers.setdefault(value, len(numbers)) if isinstance(value, int) else None for value in values
        )

    def operation(number: int) -> Hashable:
        op = flow.ops[number]
        types = (*map(flow.aval, op.inputs), *map(flow.aval, op.outputs))
        return op.name, tuple(op.params.items()), renumbered(op.inputs), renumbered(op.outputs), types

    def blocks(blocks: Iterable[BlockOp]) -> Hashable:
        return tuple((operation(block.op), block.dims) for block in blocks)

    def collective(found: Collective) -> Hashable:
        return dataclasses.replace(found, op=0), operation(found.op)

    def part(chain: Chain) -> Hashable:
        if isinstance(chain, DotPsum):
            gather = None if chain.gather is None else part(chain.gather)
            return collective(chain.collective), part(chain.scatter), gather, chain.scattered
        if isinstance(chain, DotReduceScatter):
            return collective(chain.collective), blocks(chain.body), blocks(chain.dots)
        return (
            collective(chain.collective),
            *map(blocks, (chain.before, chain.after, chain.dots, chain.epilogue)),
            tuple((collective(r.collective), blocks(r.path), operation(r.op)) for r in chain.reductions),
            tuple(zip(renumbered(chain.blocked), chain.blocked.values(), strict=True)),
            renumbered((chain.wire, *chain.handed_out)),
            frozenset(renumbered(sorted(chain.unplaced))),
            bool(chain.alike),
        )

    return type(chain).__name__, part(chain)
