"""What a chain costs: its arrays' sizes, put into the cost model's terms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from cost_model import (
    Estimate,
    Hardware,
    Matmul,
    RingWork,
    all_gather_s,
    all_reduce_s,
    estimate,
    exchange_estimate,
)
from passes.block_eval import accumulator_dtype
from passes.chains import AllGatherDot, BlockOp, Chain, DotPsum, DotReduceScatter
from passes.dots import matmul
from passes.graph import Dataflow
from passes.schedule import RingSchedule

Pricer = Callable[[RingSchedule], Estimate]


def pricer(flow: Dataflow, chain: Chain, hardware: Hardware) -> Pricer:
    """Predicts, per schedule, the times of the chain as written and as a ring. Sizes are worked out once."""
    axis_size = chain.collective.axis_size
    op = flow.ops[chain.collective.op]
    if isinstance(chain, DotPsum):
        before = pricer(flow, chain.scatter, hardware)
        if chain.gather is not None:
            after = pricer(flow, chain.gather, hardware)
            return lambda schedule: before(schedule) + after(schedule)
        total = flow.avals[op.outputs[0]]
        gather = _alone(all_gather_s(total.size * total.dtype.itemsize, axis_size, hardware))
        return lambda schedule: before(schedule) + gather
    if chain.collective.kind == "all_to_all":
        operand = flow.aval(op.inputs[0])
        exchange = exchange_estimate(
            axis_size=axis_size,
            block_bytes=operand.size * operand.dtype.itemsize / axis_size,
            matmuls=_matmuls(flow, chain, Fraction(1)),
            partials=_matmuls(flow, chain, Fraction(1, axis_size)),
            hardware=hardware,
        )
        return lambda schedule: exchange
    work = ring_work(flow, chain)
    added_s = 0.0
    for reduction in chain.reductions if isinstance(chain, AllGatherDot) else ():
        reduced = flow.avals[flow.ops[reduction.op].outputs[0]]
        reduced_bytes = reduced.size * accumulator_dtype(reduced.dtype).itemsize
        added_s += all_reduce_s(reduced_bytes, axis_size, hardware)

    def ring(schedule: RingSchedule) -> Estimate:
        priced = estimate(work, hardware, directions=schedule.directions)
        return dataclasses.replace(priced, overlapped_s=priced.overlapped_s + added_s) if added_s else priced

    return ring


def ring_work(flow: Dataflow, chain: AllGatherDot | DotReduceScatter) -> RingWork:
    """The chain's bytes and matmuls, per device."""
    axis_size = chain.collective.axis_size
    dots: dict[str, Any] = {
        "matmuls": _matmuls(flow, chain, Fraction(1)),
        "partials": _matmuls(flow, chain, Fraction(1, axis_size)),
        "half_partials": _matmuls(flow, chain, Fraction(1, 2 * axis_size)),
    }
    op = flow.ops[chain.collective.op]
    if isinstance(chain, AllGatherDot):
        gathered, wire = flow.avals[op.outputs[0]], flow.avals[chain.wire]
        sums = [flow.avals[flow.ops[d.op].outputs[0]] for d in chain.dots if d.dims.result_dim is None]
        return RingWork(
            collective="all_gather",
            axis_size=axis_size,
            shard_bytes=wire.size * wire.dtype.itemsize / axis_size,
            collective_shard_bytes=gathered.size * gathered.dtype.itemsize / axis_size,
            accumulates=bool(sums),
            accumulate_bytes=sum(2 * s.size * accumulator_dtype(s.dtype).itemsize for s in sums),
            hands_out_gathered=bool(chain.handed_out),
            **dots,
        )
    scattered = flow.aval(op.inputs[0])
    wire_bytes = scattered.size * accumulator_dtype(scattered.dtype).itemsize / axis_size
    return RingWork(
        collective="reduce_scatter",
        axis_size=axis_size,
        shard_bytes=wire_bytes,
        collective_shard_bytes=scattered.size * scattered.dtype.itemsize / axis_size,
        accumulates=True,
        accumulate_bytes=3 * wire_bytes,
        **dots,
    )


def _alone(seconds: float) -> Estimate:
    """A collective that stays, before and after."""
    return Estimate(
        dot_s=0.0, collective_s=seconds, partials_s=0.0, hops_s=0.0, hop_latency_s=0.0, overlapped_s=seconds
    )


def _matmuls(flow: Dataflow, chain: AllGatherDot | DotReduceScatter, share: Fraction) -> tuple[Matmul, ...]:
    return tuple(_matmul(flow, dot, share) for dot in chain.dots)


def _matmul(flow: Dataflow, dot: BlockOp, share: Fraction) -> Matmul:
    """The dot on a piece of its blocked dim, sizes rounded up."""
    op = flow.ops[dot.op]
    shapes = []
    for operand, dim in zip(op.inputs, dot.dims.operand_dims, strict=True):
        shape = list(flow.aval(operand).shape)
        if dim is not None:
            shape[dim] = math.ceil(shape[dim] * share)
        shapes.append(tuple(shape))
    lhs, rhs = (flow.aval(operand).dtype for operand in op.inputs)
    out = flow.avals[op.outputs[0]].dtype
    return matmul(op.params["dimension_numbers"], shapes[0], shapes[1], lhs, rhs, out)
