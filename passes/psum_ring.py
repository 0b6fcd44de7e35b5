"""Emits the rings of a ``dot → psum`` chain."""

from __future__ import annotations

from typing import Any

from jax import lax

from passes import shims
from passes.block_eval import Read
from passes.chains import DotPsum
from passes.gather_ring import emit_gather_ring
from passes.graph import Dataflow
from passes.hops import Rings
from passes.psum_pipeline import emit_psum_pipeline
from passes.scatter_ring import emit_scatter_ring
from passes.schedule import RingSchedule, gather_schedule


def emit_psum_rings(
    flow: Dataflow, chain: DotPsum, schedule: RingSchedule, read: Read, rings: Rings
) -> dict[int, Any]:
    """Runs the psum as a reduce_scatter ring and a gather; returns the values needed, by number.

    In columns the two run beside one another. Not where the program may be differentiated and its types tell
    varying values from others: the transpose of a gather by hops sums what the devices hold of the result's
    cotangent, which is the same on all of them.
    """
    collective = chain.collective
    op = flow.ops[collective.op]
    if schedule.columns > 1 and not (flow.differentiable and op.name == "psum_invariant"):
        return {op.outputs[0]: emit_psum_pipeline(flow, chain, schedule, read, rings)}
    shard = emit_scatter_ring(flow, chain.scatter, schedule, read, rings)
    if chain.gather is not None:
        gather = gather_schedule(schedule)
        return emit_gather_ring(flow, chain.gather, gather, shard, read, rings)
    with shims.equation_scope(op.eqn, op.scope):
        whole = lax.all_gather(
            shard,
            collective.axes,
            axis_index_groups=collective.groups,
            axis=collective.dim,
            tiled=True,
            to="invarying" if op.name == "psum_invariant" else "varying",
        )
    return {op.outputs[0]: whole}
