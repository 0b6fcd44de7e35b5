"""Which schedules are worth pricing for a chain: a few by rule, or all that may be best on some chip."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Final, Literal

from cost_model import Axis
from cost_model.offloaded import LEAST_ROWS, counts, hides_rows, is_offloaded
from cost_model.plain_chain import (
    COLUMNS,
    LEAST_COLUMN,
    LONGEST_UNROLLED,
    MOST_PIECES,
    cuts,
    goes_halfway,
    makes_strips,
)
from cost_model.tile import LANES
from passes import shims
from passes.all_gathers import goes_by_all_gathers
from passes.all_reduces import goes_by_all_reduces
from passes.chains import AllGatherDot, Chain, DotPsum, DotReduceScatter
from passes.graph import Dataflow
from passes.reduce_scatters import goes_by_reduce_scatters
from passes.rules import Rule, rule
from passes.schedule import RingSchedule, across, divisions, tile_rows
from passes.wire import wire_dtype

UNROLL: Final = 4
"""Steps per iteration of a rolled ring."""

EXCHANGE: Final = RingSchedule(directions=1, route="exchange")


def candidates(
    flow: Dataflow, chain: Chain, axis: Axis | None = None, *, thorough: bool = False
) -> tuple[RingSchedule, ...]:
    """The schedules that apply to a chain, the simplest first.

    Args:
      flow: the dataflow graph.
      chain: the chain.
      axis: the collective's axis; None if the hardware is unknown.
      thorough: all schedules, for a search that compiles or times them; else those of the chip's rule, or,
        where CPU devices overlap, the ways by all_reduces.
    """
    if chain.collective.kind == "all_to_all":
        return (EXCHANGE,)
    unit = divisions(flow, chain)
    unroll = UNROLL if chain.collective.axis_size > LONGEST_UNROLLED else 0
    if axis is None:
        found = [RingSchedule(directions=directions, unroll=unroll) for directions in _directions(unit)]
        return tuple(found)
    on_cpu = _on_cpu(flow, chain, axis)
    in_turn = _by_all_reduces(flow, chain, unit) if on_cpu else []
    if in_turn and axis.hardware.overlaps and not thorough:
        return tuple(in_turn)
    if on_cpu and isinstance(chain, AllGatherDot) and not (in_turn or unroll or chain.alike):
        late = RingSchedule(directions=1, late=True)
        return (RingSchedule(directions=1), late) if thorough else (late,)
    explicit = starts_explicitly(flow)
    known = rule(axis.hardware, gathers=isinstance(chain, AllGatherDot), explicit=explicit)
    wire: Literal["float32", "operand"] = "float32" if "cpu" in axis.hardware.device_kinds else "operand"
    found = []
    bases = [
        RingSchedule(directions=directions, unroll=unroll, wire=wire, orders=_orders(axis, rings))
        for directions, rings in itertools.product(_directions(2), range(1, max(1, len(axis.orders)) + 1))
    ]
    if axis.walks and not unroll:
        bases.append(RingSchedule(directions=1, wire=wire, orders=axis.walks))
    ways_to_cut = cuts(axis, gathers=isinstance(chain, AllGatherDot), sums=_adds_up(chain))
    halfway = _halfway(flow, chain, None if thorough else known)
    for base, cut in itertools.product(bases, ways_to_cut):
        base = dataclasses.replace(base, cut=cut)
        found.extend(_all(flow, chain, base) if thorough else _by_rule(flow, chain, base, known))
        if halfway and goes_halfway(base.directions, chain.collective.axis_size, axis.hardware):
            found.append(dataclasses.replace(base, halfway=True))
    most = MOST_PIECES if axis.hardware.opposite_hops_overlap else 1
    if not thorough:
        most = min(most, known.most_pieces)
    fitting = [
        s for s in dict.fromkeys(found) if _in_flight(chain, s) <= most and _fits(flow, chain, s, unit)
    ]
    fitting.extend(_offloaded(flow, chain, axis, unit))
    if thorough and in_turn:
        # Of the rings only the simplest could still be better there, and timing takes long.
        fitting = [*fitting[:1], *in_turn]
    return tuple(fitting) or (RingSchedule(directions=1, unroll=unroll, wire=wire),)


def starts_explicitly(flow: Dataflow) -> bool:
    """Whether rings on TPU and GPU start their hops themselves; what is differentiated afterwards cannot."""
    return shims.EXPLICIT_STARTS and not flow.differentiable


def _adds_up(chain: Chain) -> bool:
    """Whether a dot of a gather ring adds up its pieces' results."""
    return isinstance(chain, AllGatherDot) and bool(chain.summed)


def _on_cpu(flow: Dataflow, chain: Chain, axis: Axis) -> bool:
    """Whether the devices are CPU devices, and known as such."""
    kind = shims.device_kind(flow.avals[flow.ops[chain.collective.op].outputs[0]])
    return kind == "cpu" and kind in axis.hardware.device_kinds


def _by_all_reduces(flow: Dataflow, chain: Chain, unit: int) -> list[RingSchedule]:
    """The ways to send pieces by all_reduces in turn, on CPU devices alone: see `passes.all_reduces`.

    Of how many pieces follows from docs/network.md: with fewer the wire idles, more hold each other up.
    """
    if not goes_by_all_reduces(flow, chain):
        return []
    base = RingSchedule(directions=1, route="all_reduce")
    if isinstance(chain, DotPsum):
        whole = unit * chain.collective.axis_size
        return [dataclasses.replace(base, chains=n) for n in (5, 6) if n <= whole]
    cut = across(flow, chain) if _adds_up(chain) else None
    if cut is not None:
        assert isinstance(chain, AllGatherDot)
        unit = flow.avals[chain.wire].shape[cut.dim]
    pieces = [n for n in (1, 3) if n <= unit]
    return [dataclasses.replace(base, chains=n, across=cut is not None and n > 1) for n in pieces]


def _offloaded(flow: Dataflow, chain: Chain, axis: Axis, unit: int) -> Iterator[RingSchedule]:
    """The ways by collectives in turn that run beside dots by themselves: see `cost_model.offloaded`."""
    if isinstance(chain, DotPsum):
        if not is_offloaded("all_reduce", axis) or chain.gather is not None:
            return
        base = RingSchedule(directions=1, route="all_reduce")
        for pieces in counts(unit * chain.collective.axis_size, LEAST_ROWS, axis.hardware):
            yield dataclasses.replace(base, chains=pieces)
        yield from _strips_of_sum(flow, chain.scatter, base, axis)
    elif goes_by_reduce_scatters(chain):
        if is_offloaded("reduce_scatter", axis):
            yield from _strips_of_sum(flow, chain, RingSchedule(directions=1, route="reduce_scatter"), axis)
    elif isinstance(chain, AllGatherDot) and is_offloaded("all_gather", axis) and goes_by_all_gathers(chain):
        base = RingSchedule(directions=1, route="all_gather")
        if (cut := across(flow, chain)) is not None:
            for pieces in counts(flow.avals[chain.wire].shape[cut.dim], LANES, axis.hardware):
                yield dataclasses.replace(base, chains=pieces, across=True)
        elif not _adds_up(chain) and hides_rows(axis.hardware):
            for pieces in counts(unit, tile_rows(flow, chain), axis.hardware, few=True):
                yield dataclasses.replace(base, chains=pieces)


def _strips_of_sum(
    flow: Dataflow, chain: DotReduceScatter, base: RingSchedule, axis: Axis
) -> Iterator[RingSchedule]:
    """The ways by strips of the sum, where it has any."""
    cut = across(flow, chain)
    if cut is not None:
        result = flow.avals[flow.ops[chain.collective.op].outputs[0]]
        for pieces in counts(result.shape[cut.result_dim], LANES, axis.hardware):
            yield dataclasses.replace(base, chains=pieces, across=True)


def as_run(flow: Dataflow, chain: Chain, schedule: RingSchedule) -> RingSchedule:
    """A schedule for the devices that the program is on, whatever hardware it was priced for.

    Sums travel as the collective itself would send them. On TPU and GPU a reduce_scatter of narrow floats
    rounds each sum that it sends on. XLA:CPU widens it to float32, so a ring that did not would be the less
    exact of the two.
    """
    (value,) = flow.ops[chain.collective.op].outputs
    on_cpu = shims.device_kind(flow.avals[value]) == "cpu"
    return dataclasses.replace(schedule, wire="float32") if on_cpu else schedule


def _directions(unit: int) -> tuple[Literal[1, 2], ...]:
    return (1, 2) if unit > 1 else (1,)


def _orders(axis: Axis, rings: int) -> tuple[tuple[int, ...], ...]:
    orders = axis.orders[:rings]
    if rings == 1 and all(order.is_identity for order in orders):
        return ()
    return tuple(order.order for order in orders)


def _fits(flow: Dataflow, chain: Chain, schedule: RingSchedule, unit: int) -> bool:
    """Whether the blocks can be cut into so many pieces."""
    if isinstance(chain, DotPsum) and schedule.columns > 1:
        return _makes_chunks(flow, chain, schedule, unit)
    if schedule.pieces == 1 and (schedule.joined or schedule.across):
        return False
    if not schedule.across:
        return schedule.pieces <= unit
    inner = chain.scatter if isinstance(chain, DotPsum) else chain
    cut = across(flow, inner)
    if cut is None or (isinstance(chain, DotPsum) and chain.gather and schedule.pieces > unit):
        return False
    result = flow.avals[flow.ops[inner.dots[0].op].outputs[0]]
    return schedule.pieces * schedule.columns <= result.shape[cut.result_dim]


def _makes_chunks(flow: Dataflow, chain: DotPsum, schedule: RingSchedule, unit: int) -> bool:
    """Whether a psum can be run in so many equal chunks."""
    if not schedule.across:
        return not unit % schedule.columns and schedule.pieces <= unit // schedule.columns
    cut = across(flow, chain.scatter)
    if cut is None or schedule.pieces > unit:
        return False
    size = flow.avals[flow.ops[chain.scatter.dots[0].op].outputs[0]].shape[cut.result_dim]
    return makes_strips(size, schedule.columns)


def _halfway(flow: Dataflow, chain: Chain, known: Rule | None) -> bool:
    """Whether whole shards of the chain may go half way round.

    Of dots that add up the pieces would be no larger, and what is rounded to travel is slow to cut again.
    What comes a whole to some devices comes in halves to others.
    """
    if not isinstance(chain, AllGatherDot) or _adds_up(chain) or chain.alike:
        return False
    if known is not None and not known.takes_halfway(len(chain.dots), explicit=starts_explicitly(flow)):
        return False
    return wire_dtype(flow, chain) == flow.avals[chain.wire].dtype


def _in_flight(chain: Chain, schedule: RingSchedule) -> int:
    """How many hops are in flight at once: of a psum in chunks those of two chunks."""
    chunks = isinstance(chain, DotPsum) and schedule.columns > 1
    return schedule.pieces * (2 if chunks else 1)


def _in_chunks(flow: Dataflow, chain: Chain, base: RingSchedule) -> Iterator[RingSchedule]:
    """The pipelines of a psum. Each chunk's ring is unrolled.

    None along the last dim: shards there are strips of every row, too narrow to be placed chunk by chunk.
    None where the compiler places the starts: it puts too few of them before what could hide them, and the
    program may be slower than it was.
    """
    if not starts_explicitly(flow):
        return
    if not isinstance(chain, DotPsum) or chain.gather is not None or base.unroll:
        return
    if chain.collective.dim == len(flow.avals[flow.ops[chain.collective.op].outputs[0]].shape) - 1:
        return
    for columns, cut in itertools.product(COLUMNS[1:], (False, True)):
        yield dataclasses.replace(base, columns=columns, across=cut)


def _columns(flow: Dataflow, chain: Chain) -> tuple[int, ...]:
    cut = across(flow, chain) if isinstance(chain, AllGatherDot) else None
    if cut is None or chain.dots[0].dims.result_dim is not None:
        return (1,)
    assert isinstance(chain, AllGatherDot)
    size = flow.avals[chain.wire].shape[cut.dim]
    return tuple(columns for columns in COLUMNS if columns == 1 or size // columns >= LEAST_COLUMN)


def _by_rule(flow: Dataflow, chain: Chain, base: RingSchedule, known: Rule) -> Iterator[RingSchedule]:
    if isinstance(chain, AllGatherDot):
        joins = (False, True) if known.joined is None else (known.joined and base.pieces > 1,)
        has_strips = across(flow, chain) is not None
        for columns in _columns(flow, chain):
            for joined in joins:
                yield dataclasses.replace(base, columns=columns, joined=joined)
            if has_strips:
                yield dataclasses.replace(base, columns=columns, across=True)
    else:
        yield dataclasses.replace(base, chains=known.chains, across=known.across)
        if base.walks:
            # A third of a block's rows may be few, and cutting across may copy much: the prices decide.
            yield dataclasses.replace(base, across=True)
        if known.across:
            yield dataclasses.replace(base, chains=known.chains)
        if known.chains > 1:
            yield base
        yield from _in_chunks(flow, chain, base)


def _all(flow: Dataflow, chain: Chain, base: RingSchedule) -> Iterator[RingSchedule]:
    if isinstance(chain, AllGatherDot):
        has_strips = across(flow, chain) is not None
        for columns, joined in itertools.product(_columns(flow, chain), (False, True)):
            yield dataclasses.replace(base, columns=columns, joined=joined)
            if has_strips and not joined:
                yield dataclasses.replace(base, columns=columns, across=True)
    else:
        for chains, cut in itertools.product((1, 2), (False, True)):
            yield dataclasses.replace(base, chains=chains, across=cut)
        yield from _in_chunks(flow, chain, base)
