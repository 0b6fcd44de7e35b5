"""What a chain costs: its arrays' sizes, put into the cost model's terms."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from cost_model import Estimate, Hardware, Matmul, RingWork, estimate
from passes.block_eval import accumulator_dtype
from passes.chains import AllGatherDot, BlockOp, Chain
from passes.dots import matmul
from passes.graph import Dataflow
from passes.schedule import RingSchedule


def price(flow: Dataflow, chain: Chain, schedule: RingSchedule, hardware: Hardware) -> Estimate:
    """Predicted times of the chain as written and as a ring."""
    return estimate(ring_work(flow, chain), hardware, directions=schedule.directions)


def ring_work(flow: Dataflow, chain: Chain) -> RingWork:
    """The chain's bytes and matmuls, per device."""
    axis_size = chain.axis_size
    matmuls = tuple(_matmul(flow, dot, Fraction(1)) for dot in chain.dots)
    partials = tuple(_matmul(flow, dot, Fraction(1, axis_size)) for dot in chain.dots)
    halves = tuple(_matmul(flow, dot, Fraction(1, 2 * axis_size)) for dot in chain.dots)
    collective = flow.ops[chain.collective]
    if isinstance(chain, AllGatherDot):
        gathered, wire = flow.avals[collective.outputs[0]], flow.avals[chain.wire]
        sums = [flow.avals[flow.ops[d.op].outputs[0]] for d in chain.dots if d.dims.result_dim is None]
        added = sum(2 * s.size * accumulator_dtype(s.dtype).itemsize for s in sums)
        return RingWork(
            collective="all_gather",
            axis_size=axis_size,
            shard_bytes=wire.size * wire.dtype.itemsize / axis_size,
            collective_shard_bytes=gathered.size * gathered.dtype.itemsize / axis_size,
            matmuls=matmuls,
            partials=partials,
            half_partials=halves,
            accumulates=bool(sums),
            accumulate_bytes=added,
            hands_out_gathered=bool(chain.handed_out),
        )
    result = flow.avals[collective.outputs[0]]
    wire_bytes = result.size * accumulator_dtype(result.dtype).itemsize
    return RingWork(
        collective="reduce_scatter",
        axis_size=axis_size,
        shard_bytes=wire_bytes,
        collective_shard_bytes=result.size * result.dtype.itemsize,
        matmuls=matmuls,
        partials=partials,
        half_partials=halves,
        accumulates=True,
        accumulate_bytes=3 * wire_bytes,
    )


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
