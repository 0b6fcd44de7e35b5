"""Emits the ring of a chain, whatever its pattern."""

from __future__ import annotations

import dataclasses
from typing import Any

from passes.all_gathers import emit_all_gathers
from passes.all_reduces import emit_all_reduces
from passes.block_eval import Read
from passes.chains import AllGatherDot, Chain, DotPsum
from passes.gather_ring import emit_gather_ring
from passes.graph import Dataflow
from passes.hops import Rings
from passes.psum_ring import emit_psum_rings
from passes.reduce_scatters import emit_reduce_scatters
from passes.scatter_ring import emit_scatter_exchange, emit_scatter_ring
from passes.schedule import RingSchedule


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """A chain and the schedule it is run with."""

    chain: Chain
    schedule: RingSchedule

    @property
    def members(self) -> tuple[int, ...]:
        """The operations that it replaces."""
        return self.chain.members


def emit_ring(flow: Dataflow, ring: Ring, read: Read, rings: Rings) -> dict[int, Any]:
    """Runs a chain as a ring and returns the values that the rest of the program needs, by number."""
    chain = ring.chain
    op = flow.ops[chain.collective.op]
    if ring.schedule.route == "all_reduce":
        return emit_all_reduces(flow, chain, ring.schedule, read, rings[0])
    if isinstance(chain, DotPsum):
        return emit_psum_rings(flow, chain, ring.schedule, read, rings)
    if isinstance(chain, AllGatherDot):
        if ring.schedule.route == "all_gather":
            return emit_all_gathers(flow, chain, ring.schedule, read, rings[0])
        return emit_gather_ring(flow, chain, ring.schedule, read(op.inputs[0]), read, rings)
    if ring.schedule.route == "reduce_scatter":
        return emit_reduce_scatters(flow, chain, ring.schedule, read, rings[0])
    if ring.schedule.route == "exchange":
        return {op.outputs[0]: emit_scatter_exchange(flow, chain, read, rings[0])}
    return {op.outputs[0]: emit_scatter_ring(flow, chain, ring.schedule, read, rings)}
