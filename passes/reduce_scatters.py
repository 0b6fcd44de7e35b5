"""Emits a scatter whose strips go by reduce_scatters, one after the other, each beside the next one's dot.

For devices that run reduce_scatters beside dots by themselves, as TPUs do whose SparseCores have taken them
over (`Hardware.offloaded`): nothing needs a ring there, and every dot has all rows.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from passes.all_reduces import sums_in_turn
from passes.block_eval import Read
from passes.chains import Chain, DotReduceScatter
from passes.graph import Dataflow
from passes.hops import Places
from passes.schedule import RingSchedule
from passes.turns import Turns


def goes_by_reduce_scatters(chain: Chain) -> TypeGuard[DotReduceScatter]:
    """Whether strips of what the chain scatters, if it has any, can be scattered by themselves."""
    collective = chain.collective
    return isinstance(chain, DotReduceScatter) and collective.kind == "reduce_scatter" and collective.tiled


def emit_reduce_scatters(
    flow: Dataflow, chain: DotReduceScatter, schedule: RingSchedule, read: Read, places: Places
) -> dict[int, Any]:
    """Runs the chain and returns the values that the rest of the program needs, by number."""
    return sums_in_turn(flow, chain, schedule, read, Turns(flow, chain, places))
