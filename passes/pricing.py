"""What a chain costs: its arrays' sizes, put into the cost model's terms."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final

from cost_model import Axis, Estimate, Hardware, Matmul, RingWork, estimate, exchange_estimate
from cost_model.in_turn import in_turn_estimate
from cost_model.matmul import matmul_s
from cost_model.offloaded import InTurn, offloaded_estimate, sums_whole
from cost_model.pipeline import gather_after, pipeline_estimate
from cost_model.ring_copies import between_tiles_bytes
from cost_model.ring_work import NOTHING_BEFORE, Before
from passes.block_eval import accumulator_dtype, cut_once
from passes.candidates import starts_explicitly
from passes.chains import AllGatherDot, BlockOp, Chain, DotPsum, DotReduceScatter
from passes.dots import matmul
from passes.graph import Dataflow
from passes.schedule import Across, RingSchedule, across, gather_schedule
from passes.turns import shares
from passes.wire import may_round, wire_dtype

Pricer = Callable[[RingSchedule], Estimate]

_NONE: Final[Mapping[int, str]] = MappingProxyType({})

_ANY: Final = RingSchedule(directions=1)
"""A schedule to ask for the times of a chain as it stands, which are the same for all."""


def pricer(flow: Dataflow, chain: Chain, axis: Axis, before: Before = NOTHING_BEFORE) -> Pricer:
    """Predicts, per schedule, the times of the chain as written and as a ring. Sizes are worked out once."""
    axis_size = chain.collective.axis_size
    op = flow.ops[chain.collective.op]
    if isinstance(chain, DotPsum):
        scatter = pricer(flow, chain.scatter, axis, before)
        if chain.gather is not None:
            after = pricer(flow, chain.gather, axis, before)
            return lambda schedule: scatter(schedule) + after(gather_schedule(schedule))
        total = flow.avals[op.outputs[0]]
        width = total.dtype.itemsize
        total_bytes = total.size * width
        gather = gather_after(total_bytes, width, axis)
        work_of_scatter = scatter_work(flow, chain.scatter, axis, before)
        psum_as_written = functools.cache(lambda: scatter(_ANY) + gather)

        def psum(schedule: RingSchedule) -> Estimate:
            if schedule.route == "all_reduce":
                if "all_reduce" in axis.hardware.offloaded:
                    return _offloaded(flow, chain, schedule, axis, psum_as_written())
                return _in_turn(flow, chain, schedule, axis)
            if schedule.columns == 1:
                return scatter(schedule) + gather
            work = work_of_scatter(schedule)
            return pipeline_estimate(work, total_bytes, width, axis, across=schedule.across)

        return psum
    if chain.collective.kind == "all_to_all":
        operand = flow.aval(op.inputs[0])
        exchange = exchange_estimate(
            block_bytes=operand.size * operand.dtype.itemsize / axis_size,
            matmuls=_matmuls(flow, chain, Fraction(1)),
            partials=_matmuls(flow, chain, Fraction(1, axis_size)),
            axis=axis,
        )
        return lambda schedule: exchange
    works = gather_work if isinstance(chain, AllGatherDot) else scatter_work
    work_of: WorkOf = works(flow, chain, axis, before)  # type: ignore[arg-type]
    as_written = functools.cache(lambda: estimate(work_of(_ANY), axis))
    added_s = 0.0
    for reduction in chain.reductions if isinstance(chain, AllGatherDot) else ():
        reduced = flow.avals[flow.ops[reduction.op].outputs[0]]
        across_bytes = reduced.size * accumulator_dtype(reduced.dtype).itemsize
        sums = flow.ops[reduction.op].name == "reduce_sum"
        added_s += axis.all_reduce_s(across_bytes) if sums else axis.all_gather_s(axis_size * across_bytes)

    def ring(schedule: RingSchedule) -> Estimate:
        if schedule.route == "all_reduce":
            priced = _in_turn(flow, chain, schedule, axis)
        elif schedule.route in ("all_gather", "reduce_scatter"):
            priced = _offloaded(flow, chain, schedule, axis, as_written())
        else:
            priced = estimate(work_of(schedule), axis)
        return dataclasses.replace(priced, overlapped_s=priced.overlapped_s + added_s) if added_s else priced

    return ring


def _in_turn(flow: Dataflow, chain: Chain, schedule: RingSchedule, axis: Axis) -> Estimate:
    """The price of pieces that go by all_reduces."""
    op, parts = flow.ops[chain.collective.op], shares(chain, schedule.chains)
    moved = flow.avals[chain.wire] if isinstance(chain, AllGatherDot) else flow.aval(op.inputs[0])
    moved_bytes, hardware = moved.size * moved.dtype.itemsize, axis.hardware
    inner = chain.scatter if isinstance(chain, DotPsum) else chain
    cut = across(flow, inner) if schedule.across else None

    def dots_s(share: Fraction, second: Fraction | None = None) -> float:
        strip = None if cut is None or second is None else (cut, second)
        return sum(matmul_s(matmul, hardware) for matmul in _matmuls(flow, inner, share, strip))

    whole_s = dots_s(Fraction(1))
    if isinstance(chain, DotPsum):
        return in_turn_estimate(
            "psum",
            dot_s=whole_s,
            collective_s=axis.all_reduce_s(moved_bytes),
            own_s=0.0,
            pieces_s=[dots_s(part) for part in parts],
            hops_s=[axis.all_reduce_s(moved_bytes * float(part)) for part in parts],
            latency_s=len(parts) * axis.all_reduce_s(0.0),
            hardware=hardware,
        )
    half = Fraction(1, axis.size)
    gathers = isinstance(chain, AllGatherDot)
    return in_turn_estimate(
        "gather" if gathers else "scatter",
        dot_s=whole_s,
        collective_s=(axis.all_gather_s if gathers else axis.reduce_scatter_s)(moved_bytes),
        own_s=dots_s(half),
        pieces_s=[dots_s(half, part) if cut is not None else dots_s(half * part) for part in parts],
        hops_s=[axis.permute_s(moved_bytes * float(half * part), 1) for part in parts],
        latency_s=len(parts) * axis.permute_s(0.0, 1),
        hardware=hardware,
    )


def _offloaded(
    flow: Dataflow, chain: Chain, schedule: RingSchedule, axis: Axis, as_written: Estimate
) -> Estimate:
    """The price of pieces by collectives that run beside dots by themselves."""
    op, part = flow.ops[chain.collective.op], Fraction(1, schedule.chains)
    inner: AllGatherDot | DotReduceScatter = chain.scatter if isinstance(chain, DotPsum) else chain
    moved, rounded = flow.aval(op.inputs[0]), _NONE
    moved_bytes = moved.size * moved.dtype.itemsize
    if isinstance(chain, AllGatherDot):
        moved, sent = flow.avals[chain.wire], _sent(flow, chain, axis.hardware)
        total_bytes = moved.size * sent.itemsize
        moved_bytes = _as_gathered(flow, chain, total_bytes, axis.hardware, rounded=sent != moved.dtype)
        rounded = {} if sent == moved.dtype else dict.fromkeys(chain.blocked, sent.name)
    cut = across(flow, inner) if schedule.across else None
    share, second = (part, None) if cut is None else (Fraction(1), (cut, part))
    assert schedule.route != "ring" and schedule.route != "exchange"
    work = InTurn(
        collective=schedule.route,
        pieces=schedule.chains,
        across=schedule.across,
        moved_bytes=moved_bytes,
        matmuls=_matmuls(flow, inner, Fraction(1), rounded=rounded),
        piece=_matmuls(flow, inner, share, second, rounded),
    )
    return offloaded_estimate(work, as_written, axis)


WorkOf = Callable[[RingSchedule], RingWork]


def gather_work(flow: Dataflow, chain: AllGatherDot, axis: Axis, before: Before = NOTHING_BEFORE) -> WorkOf:
    """The bytes and matmuls of a gather ring, per device and schedule."""
    axis_size = chain.collective.axis_size
    gathered = flow.avals[flow.ops[chain.collective.op].outputs[0]]
    wire = flow.avals[chain.wire]
    # What travels in a narrower type does so before and after.
    sent = _sent(flow, chain, axis.hardware)
    rounded = {} if sent == wire.dtype else dict.fromkeys(chain.blocked, sent.name)
    total_bytes = gathered.size * (sent if rounded else gathered.dtype).itemsize
    gathered_bytes = _as_gathered(flow, chain, total_bytes, axis.hardware, rounded=bool(rounded))
    whole = _matmuls(flow, chain, Fraction(1), rounded=rounded)
    sums = [flow.avals[flow.ops[d.op].outputs[0]] for d in chain.summed]
    accumulator = max((accumulator_dtype(s.dtype) for s in sums), key=lambda d: d.itemsize, default=None)
    cut = across(flow, chain)

    def work(schedule: RingSchedule) -> RingWork:
        pieces = 1 if schedule.joined or schedule.across else schedule.pieces
        share = Fraction(1, axis_size * pieces)
        strips = schedule.pieces if schedule.across else 1
        columns = schedule.columns * strips
        second = None if cut is None or columns == 1 else (cut, Fraction(1, columns))
        return RingWork(
            collective="all_gather",
            shard_bytes=wire.size * sent.itemsize / axis_size,
            collective_shard_bytes=gathered_bytes / axis_size,
            matmuls=whole,
            piece=_matmuls(flow, chain, (1 + schedule.halfway) * share, second, rounded),
            directions=schedule.directions,
            rings=schedule.rings,
            walks=schedule.walks,
            chains=schedule.chains,
            columns=schedule.columns,
            joined=schedule.joined,
            halves=_matmuls(flow, chain, share, None, rounded) if schedule.halfway else (),
            halved=schedule.late,
            cut=schedule.cut,
            accumulator="float32" if accumulator is None else accumulator.name,
            accumulators=strips,
            hands_out_gathered=bool(chain.handed_out),
            starts_implied=axis.hardware.network == "torus" and not starts_explicitly(flow),
            before=before,
        )

    return work


def _sent(flow: Dataflow, chain: AllGatherDot, hardware: Hardware) -> Any:
    """The type in which what a chain gathers travels: between TPUs a narrower one perhaps."""
    return wire_dtype(flow, chain) if hardware.network == "torus" else flow.avals[chain.wire].dtype


def _as_gathered(
    flow: Dataflow, chain: AllGatherDot, total_bytes: int, hardware: Hardware, *, rounded: bool
) -> int:
    """Bytes of an array as the program gathers it as written.

    Half of them where a TPU's compiler may round it and no one else did: what cannot be known is taken to be
    in favour of the program as written.
    """
    halved = hardware.network == "torus" and not rounded and may_round(flow, chain)
    return total_bytes // 2 if halved else total_bytes


def scatter_work(
    flow: Dataflow, chain: DotReduceScatter, axis: Axis, before: Before = NOTHING_BEFORE
) -> WorkOf:
    """The bytes and matmuls of a scatter ring, per device and schedule."""
    axis_size = chain.collective.axis_size
    scattered = flow.aval(flow.ops[chain.collective.op].inputs[0])
    whole = _matmuls(flow, chain, Fraction(1))
    cut = across(flow, chain)
    narrow, wide = scattered.dtype, accumulator_dtype(scattered.dtype)
    wide_bytes = scattered.size * wide.itemsize / axis_size
    blocked = [(flow.avals[operand], dim) for operand, dim in cut_once(flow, chain.body).items()]
    # Blocks that do not lie together in memory: each is copied before its dot.
    copied_bytes = 2 * sum(aval.size * aval.dtype.itemsize for aval, dim in blocked if dim) / axis_size
    narrow_bytes = scattered.size * narrow.itemsize / axis_size
    scatters = chain.collective.kind == "reduce_scatter"

    def between_tiles(schedule: RingSchedule) -> float:
        return sum(
            between_tiles_bytes(
                aval.size * aval.dtype.itemsize,
                aval.shape[0] // axis_size // (1 if schedule.across else schedule.columns),
                aval.dtype.itemsize,
                axis_size,
                axis.hardware,
                pieces=schedule.pieces,
                across=schedule.across and schedule.columns == 1,
                cut=schedule.cut,
            )
            for aval, dim in blocked
            if dim == 0 and aval.ndim > 1
        )

    def work(schedule: RingSchedule) -> RingWork:
        share = Fraction(1, axis_size)
        fused = axis.hardware.fuses_additions and schedule.pieces > 1
        second = None
        copied, columns = copied_bytes, schedule.columns
        if cut is not None and schedule.across:
            # Of a pipeline the chunks are cut across, and their pieces are not.
            second = (cut, Fraction(1, columns if columns > 1 else schedule.pieces))
            share /= schedule.pieces if columns > 1 else 1
        else:
            share /= schedule.pieces * columns
            copied /= columns
        copied += between_tiles(schedule)
        return RingWork(
            collective="reduce_scatter",
            shard_bytes=narrow_bytes if schedule.wire == "operand" else wide_bytes,
            collective_shard_bytes=narrow_bytes,
            matmuls=whole,
            piece=_matmuls(flow, chain, share, second),
            directions=schedule.directions,
            rings=schedule.rings,
            walks=schedule.walks,
            chains=schedule.chains,
            cut=schedule.cut,
            accumulator=(narrow if schedule.wire == "operand" else wide).name,
            columns=columns,
            fused=fused,
            apart_bytes=copied if fused else copied + 3 * wide_bytes / columns,
            sums_whole=scatters and sums_whole(narrow.name, axis),
            before=before,
        )

    return work


def _matmuls(
    flow: Dataflow,
    chain: AllGatherDot | DotReduceScatter,
    share: Fraction,
    second: tuple[Across, Fraction] | None = None,
    rounded: Mapping[int, str] = _NONE,
) -> tuple[Matmul, ...]:
    """The chain's dots on a share of their blocked dims; values in ``rounded`` have its dtypes."""
    return tuple(_matmul(flow, dot, share, second, rounded) for dot in chain.dots)


def _matmul(
    flow: Dataflow,
    dot: BlockOp,
    share: Fraction,
    second: tuple[Across, Fraction] | None,
    rounded: Mapping[int, str],
) -> Matmul:
    """The dot on a piece of its blocked dim, and of a second one, sizes rounded up."""
    op = flow.ops[dot.op]
    shapes = []
    for operand, dim in zip(op.inputs, dot.dims.operand_dims, strict=True):
        shape = list(flow.aval(operand).shape)
        if dim is not None:
            shape[dim] = math.ceil(shape[dim] * share)
        shapes.append(shape)
    if second is not None:
        cut, part = second
        shapes[cut.operand][cut.dim] = math.ceil(shapes[cut.operand][cut.dim] * part)
    lhs, rhs = (flow.aval(operand).dtype for operand in op.inputs)
    out = flow.avals[op.outputs[0]].dtype
    found = matmul(op.params["dimension_numbers"], tuple(shapes[0]), tuple(shapes[1]), lhs, rhs, out)
    if not rounded:
        return found
    left, right = (rounded.get(operand) if isinstance(operand, int) else None for operand in op.inputs)
    return dataclasses.replace(found, lhs_dtype=left, rhs_dtype=right)
