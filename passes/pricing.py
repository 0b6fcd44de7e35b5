"""What a chain costs: its arrays' sizes, put into the cost model's terms."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from cost_model import Axis, Estimate, Matmul, chain_sizes, exchange_estimate
from cost_model.chain_sizes import CutRows, GatherSizes, ScatterSizes, Sizes
from cost_model.in_turn import in_turn_estimate
from cost_model.matmul import matmul_s
from cost_model.offloaded import sums_whole
from cost_model.on_chip import OTHER, Side
from cost_model.ring_work import NOTHING_BEFORE, Before
from cost_model.tile import whole_columns
from passes.block_eval import accumulator_dtype, cut_once, is_in_rows
from passes.blocks import REDUCTIONS, is_fusible
from passes.chains import AllGatherDot, BlockOp, Chain, DotPsum, DotReduceScatter
from passes.dots import matmul
from passes.graph import Dataflow
from passes.schedule import Across, RingSchedule, across, gather_schedule
from passes.starts import may_start_explicitly
from passes.turns import shares
from passes.wire import gathered_dtype, may_round, wire_dtype

Pricer = Callable[[RingSchedule], Estimate]

_NONE: Final[Mapping[int, str]] = MappingProxyType({})


def pricer(
    flow: Dataflow,
    chain: Chain,
    axis: Axis,
    before: Before = NOTHING_BEFORE,
    written: float = 0.0,
) -> Pricer:
    """Predicts, per schedule, the times of the chain as written and as a ring. Sizes are worked out once.

    Args:
      flow: the dataflow graph.
      chain: the chain.
      axis: its axis.
      before: what the ring before it has on chip.
      written: bytes that are read and written for the ring alone, beside its dots.
    """
    if chain.collective.kind == "all_to_all":
        return _exchange(flow, chain, axis)
    if isinstance(chain, DotPsum) and chain.gather is not None:
        scatter = pricer(flow, chain.scatter, axis, before, written)
        gather = pricer(flow, chain.gather, axis, before)
        return lambda schedule: scatter(schedule) + gather(gather_schedule(schedule))
    if isinstance(chain, AllGatherDot):
        sizes: Sizes = gather_sizes(flow, chain, axis, before)
    else:
        sizes = scatter_sizes(flow, chain.scatter if isinstance(chain, DotPsum) else chain, axis, before)
    priced = chain_sizes.pricer(sizes, axis, psum=isinstance(chain, DotPsum))
    in_turn = "all_reduce" not in axis.hardware.offloaded
    added_s = _reduced_s(flow, chain, axis) if isinstance(chain, AllGatherDot) else 0.0
    added_s += written / axis.hardware.hbm_bytes_per_s
    after = chain.after if isinstance(chain, AllGatherDot) else ()
    passes = _passes(flow, after) if axis.hardware.network == "torus" else 0
    # A TPU's compiler scatters first what is scattered next, and adds up a part (v4, v5e, v5p, v6e).
    scattered = chain.scattered if isinstance(chain, DotPsum) and axis.hardware.network == "torus" else 1

    def price(schedule: RingSchedule) -> Estimate:
        if schedule.route == "all_reduce" and in_turn:
            found = _in_turn(flow, chain, schedule, axis)
        else:
            found = priced(schedule)
        if scattered > 1:
            found = dataclasses.replace(found, collective_s=found.collective_s / scattered)
        more_s = added_s + passes * (axis.size * schedule.pieces - 1) * axis.hardware.copy_overhead_s
        return dataclasses.replace(found, overlapped_s=found.overlapped_s + more_s) if more_s else found

    return price


def _passes(flow: Dataflow, blocks: Iterable[BlockOp]) -> int:
    """Into how many passes compilers cut what is done to every piece and holds reductions, such as a norm.

    Each reduction is one, what is made of its numbers per row another, and one ends it.
    """
    names = [flow.ops[block.op].name for block in blocks]
    reductions = sum(name in REDUCTIONS for name in names)
    return 2 * reductions + 1 if reductions else 0


def _exchange(flow: Dataflow, chain: Chain, axis: Axis) -> Pricer:
    """The price of an all_to_all, which has one schedule."""
    assert not isinstance(chain, DotPsum)
    operand, axis_size = flow.aval(flow.ops[chain.collective.op].inputs[0]), chain.collective.axis_size
    priced = exchange_estimate(
        block_bytes=operand.size * operand.dtype.itemsize / axis_size,
        matmuls=_matmuls(flow, chain, Fraction(1)),
        partials=_matmuls(flow, chain, Fraction(1, axis_size)),
        axis=axis,
    )
    return lambda schedule: priced


def _reduced_s(flow: Dataflow, chain: AllGatherDot, axis: Axis) -> float:
    """Seconds of what reductions over the gathered dim have to send for themselves."""
    seconds = 0.0
    for reduction in chain.reductions:
        reduced = flow.avals[flow.ops[reduction.op].outputs[0]]
        across_bytes = reduced.size * accumulator_dtype(reduced.dtype).itemsize
        sums = flow.ops[reduction.op].name == "reduce_sum"
        seconds += axis.all_reduce_s(across_bytes) if sums else axis.all_gather_s(axis.size * across_bytes)
    return seconds


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
            gathers=False,
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
        gathers=gathers,
        dot_s=whole_s,
        collective_s=(axis.all_gather_s if gathers else axis.reduce_scatter_s)(moved_bytes),
        own_s=dots_s(half),
        pieces_s=[dots_s(half, part) if cut is not None else dots_s(half * part) for part in parts],
        hops_s=[axis.permute_s(moved_bytes * float(half * part), 1) for part in parts],
        latency_s=len(parts) * axis.permute_s(0.0, 1),
        hardware=hardware,
    )


def gather_sizes(
    flow: Dataflow, chain: AllGatherDot, axis: Axis, before: Before = NOTHING_BEFORE
) -> GatherSizes:
    """What prices ask of a gather with its dots."""
    gathered, wire = flow.avals[flow.ops[chain.collective.op].outputs[0]], flow.avals[chain.wire]
    on_torus = axis.hardware.network == "torus"
    # Between TPUs what the dots round travels so, by rings, and as written.
    sent = wire_dtype(flow, chain) if on_torus else wire.dtype
    rounded = {} if sent == wire.dtype else dict.fromkeys(chain.blocked, sent.name)
    gathered_as = gathered_dtype(flow, chain) if on_torus else gathered.dtype
    gathered_bytes = gathered.size * (sent if rounded else gathered_as).itemsize
    written: tuple[Matmul, ...] = ()
    perhaps = on_torus and not rounded and may_round(flow, chain)
    if perhaps:
        # What cannot be known is taken to be in favour of the program as written.
        gathered_bytes //= 2
        written = _matmuls(flow, chain, Fraction(1), None, dict.fromkeys(chain.blocked, "bfloat16"))
    sums = [accumulator_dtype(flow.avals[flow.ops[dot.op].outputs[0]].dtype) for dot in chain.summed]
    cut = across(flow, chain)
    columns = _of_whole_columns(flow, chain) if on_torus else frozenset()

    @functools.cache
    def dots(share: Fraction, strip: Fraction) -> tuple[Matmul, ...]:
        found = _matmuls(flow, chain, share, None if cut is None or strip == 1 else (cut, strip), rounded)
        if share == 1 or not columns:
            return found
        # A piece of whose columns some are no whole tile takes as long as with them.
        return tuple(
            dataclasses.replace(each, n=whole_columns(each.n)) if dot.op in columns else each
            for dot, each in zip(chain.dots, found, strict=True)
        )

    lefts = [flow.ops[dot.op].inputs[0] for dot in chain.dots]
    return GatherSizes(
        dots=dots,
        sent_bytes=wire.size * sent.itemsize,
        gathered_bytes=gathered_bytes,
        accumulator=max(sums, key=lambda dtype: dtype.itemsize).name if sums else "float32",
        # Of an array that is multiplied with itself both operands travel.
        sides=tuple("lhs" if isinstance(lhs, int) and lhs in chain.blocked else "rhs" for lhs in lefts),
        rounds=bool(rounded),
        collective_rounds=bool(rounded) or perhaps,
        written=written,
        hands_out_gathered=bool(chain.handed_out),
        starts_implied=on_torus and not may_start_explicitly(flow, chain),
        before=before,
    )


def _of_whole_columns(flow: Dataflow, chain: AllGatherDot) -> frozenset[int]:
    """The dots whose pieces make columns of what is laid out by rows, which TPUs compute by whole tiles."""
    found: set[int] = set()
    for dot in chain.dots:
        (value,) = flow.ops[dot.op].outputs
        last = flow.avals[value].ndim - 1
        if dot.dims.result_dim == last and is_in_rows(flow, value, last):
            found.add(dot.op)
    return frozenset(found)


def scatter_sizes(
    flow: Dataflow, chain: DotReduceScatter, axis: Axis, before: Before = NOTHING_BEFORE
) -> ScatterSizes:
    """What prices ask of a scatter, or of a psum's, with its dots."""
    scattered = flow.aval(flow.ops[chain.collective.op].inputs[0])
    cut = across(flow, chain)
    blocked = cut_once(flow, chain.body)
    rows = (flow.avals[value] for value, dim in blocked.items() if dim == 0 and flow.avals[value].ndim > 1)
    on_torus = axis.hardware.network == "torus"
    turned = _turned(flow, chain) if on_torus else frozenset()
    right = {flow.ops[dot.op].inputs[dot.op not in turned] for dot in chain.dots}
    of_dots = {operand for dot in chain.dots for operand in flow.ops[dot.op].inputs}
    factors = [
        value for value in blocked if value not in of_dots and flow.avals[value].size >= scattered.size
    ]
    apart_bytes = {value: flow.bytes_of(value) for value, dim in blocked.items() if dim and value in of_dots}
    scatters = chain.collective.kind == "reduce_scatter"

    @functools.cache
    def dots(share: Fraction, strip: Fraction) -> tuple[Matmul, ...]:
        second = None
        if cut is not None and strip != 1:
            second = (cut, _strip_of_tiles(flow, chain, cut, strip) if on_torus else strip)
        found = _matmuls(flow, chain, share, second)
        return tuple(
            each.turned if dot.op in turned else each for dot, each in zip(chain.dots, found, strict=True)
        )

    sides = [_cut_operand(dot) for dot in chain.dots]
    return ScatterSizes(
        dots=dots,
        elements=scattered.size,
        dtype=scattered.dtype.name,
        accumulator=accumulator_dtype(scattered.dtype).name,
        apart_bytes=sum(apart_bytes.values()),
        right_apart_bytes=0
        if scatters
        else sum(size for value, size in apart_bytes.items() if value in right),
        factors_bytes=sum((1 + _is_made_within(flow, value)) * flow.bytes_of(value) for value in factors),
        rows=tuple(
            CutRows(aval.size * aval.dtype.itemsize, aval.shape[0], aval.dtype.itemsize) for aval in rows
        ),
        sides=tuple(
            OTHER[side] if side is not None and dot.op in turned else side
            for dot, side in zip(chain.dots, sides, strict=True)
        ),
        sums_whole=scatters and sums_whole(scattered.dtype.name, axis),
        before=before,
    )


def _strip_of_tiles(flow: Dataflow, chain: DotReduceScatter, cut: Across, strip: Fraction) -> Fraction:
    """The share of what is cut across that a strip takes as long as.

    Parts of the rows of several free dims, such as of each head's, fill tiles with nothing: strips of 32
    columns of each of 48 rows took 2.3 times as long as the whole product (v6e).
    """
    shape = flow.aval(flow.ops[chain.dots[0].op].inputs[cut.operand]).shape
    if len(shape) < 3 or cut.dim != len(shape) - 1:
        return strip
    return Fraction(whole_columns(math.ceil(shape[-1] * strip)), shape[-1])


def _is_made_within(flow: Dataflow, value: int) -> bool:
    """Whether compilers may make an array within whatever reads it: of an argument nothing else is known."""
    maker = flow.producer.get(value)
    return maker is None or is_fusible(flow.ops[maker].name)


def _turned(flow: Dataflow, chain: DotReduceScatter) -> frozenset[int]:
    """The dots whose products are transposed, as jax does with weights' gradients.

    TPU compilers make the transposed product of it, that of the operands in the other order.
    """
    body = {block.op for block in chain.body}
    found: set[int] = set()
    for dot in chain.dots:
        readers = [dot.op]
        while readers := [op for op in flow.readers(readers[0]) if op in body]:
            op = flow.ops[readers[0]]
            if op.name == "transpose" and op.params["permutation"][-1] != len(op.params["permutation"]) - 1:
                found ^= {dot.op}
    return frozenset(found)


def _cut_operand(dot: BlockOp) -> Side | None:
    """The only operand of a scatter's dot with the scattered dim; None of a batch, which both have."""
    lhs, rhs = dot.dims.operand_dims
    return None if lhs is not None and rhs is not None else "rhs" if lhs is None else "lhs"


def _matmuls(
    flow: Dataflow,
    chain: AllGatherDot | DotReduceScatter,
    share: Fraction,
    second: tuple[Across, Fraction] | None = None,
    rounded: Mapping[int, str] = _NONE,
) -> tuple[Matmul, ...]:
    """The chain's dots on a share of their blocked dims; values in ``rounded`` have its dtypes."""
    cuts: Iterable[tuple[int, int, Fraction] | None] = [None] * len(chain.dots)
    if second is not None:
        cut, part = second
        cuts = [(operand, cut.dim, part) for operand in cut.operands]
    return tuple(_matmul(flow, dot, share, cut, rounded) for dot, cut in zip(chain.dots, cuts, strict=True))


def _matmul(
    flow: Dataflow,
    dot: BlockOp,
    share: Fraction,
    second: tuple[int, int, Fraction] | None,
    rounded: Mapping[int, str],
) -> Matmul:
    """The dot on a piece of its blocked dim, and of a second one of an operand, sizes rounded up."""
    op = flow.ops[dot.op]
    shapes = []
    for operand, dim in zip(op.inputs, dot.dims.operand_dims, strict=True):
        shape = list(flow.aval(operand).shape)
        if dim is not None:
            shape[dim] = math.ceil(shape[dim] * share)
        shapes.append(shape)
    if second is not None:
        operand, cut, part = second
        shapes[operand][cut] = math.ceil(shapes[operand][cut] * part)
    lhs, rhs = (flow.aval(operand).dtype for operand in op.inputs)
    out = flow.avals[op.outputs[0]].dtype
    found = matmul(op.params["dimension_numbers"], tuple(shapes[0]), tuple(shapes[1]), lhs, rhs, out)
    if not rounded:
        return found
    left, right = (rounded.get(operand) if isinstance(operand, int) else None for operand in op.inputs)
    return dataclasses.replace(found, lhs_dtype=left, rhs_dtype=right)
