"""What a chain costs: its arrays' sizes, put into the cost model's terms."""

from __future__ import annotations

import dataclasses
import math
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


def price(flow: Dataflow, chain: Chain, schedule: RingSchedule, hardware: Hardware) -> Estimate:
    """Predicted times of the chain as written and as a ring."""
    axis_size = chain.collective.axis_size
    if isinstance(chain, DotPsum):
        before = price(flow, chain.scatter, schedule, hardware)
        if chain.gather is not None:
            return before + price(flow, chain.gather, schedule, hardware)
        total = flow.avals[flow.ops[chain.collective.op].outputs[0]]
        return before + _alone(all_gather_s(total.size * total.dtype.itemsize, axis_size, hardware))
    if schedule.route == "exchange":
        operand = flow.aval(flow.ops[chain.collective.op].inputs[0])
        return exchange_estimate(
            axis_size=axis_size,
            block_bytes=operand.size * operand.dtype.itemsize / axis_size,
            matmuls=_matmuls(flow, chain, Fraction(1)),
            partials=_matmuls(flow, chain, Fraction(1, axis_size)),
            hardware=hardware,
        )
    priced = estimate(ring_work(flow, chain), hardware, directions=schedule.directions)
    for reduction in chain.reductions if isinstance(chain, AllGatherDot) else ():
        summed = flow.avals[flow.ops[reduction.op].outputs[0]]
        sum_bytes = summed.size * accumulator_dtype(summed.dtype).itemsize
        added_s = all_reduce_s(sum_bytes, axis_size, hardware)
        priced = dataclasses.replace(priced, overlapped_s=priced.overlapped_s + added_s)
    return priced


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
    lhs, rhs = (flow.aval(operand) for operand in op.inputs)
    whole = matmul(op.params["dimension_numbers"], shapes[0], shapes[1], (lhs.dtype, rhs.dtype))
    return dataclasses.replace(whole, out_dtype=str(flow.avals[op.outputs[0]].dtype))
