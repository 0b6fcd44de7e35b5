"""Which schedules are worth pricing for a chain: a few by rule, or all that may be best on some chip."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

from cost_model import Axis
from cost_model.form import Form
from cost_model.forms import LONGEST_UNROLLED, Cuttable, forms
from cost_model.tile import LANES
from passes import shims
from passes.all_gathers import goes_by_all_gathers
from passes.all_reduces import goes_by_all_reduces
from passes.chains import AllGatherDot, BlockOp, Chain, DotPsum, DotReduceScatter
from passes.graph import Dataflow
from passes.reduce_scatters import goes_by_reduce_scatters
from passes.rules import rule
from passes.schedule import RingSchedule, across, divisions, tile_rows
from passes.starts import may_start_explicitly
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
        return tuple(RingSchedule(directions=ways, unroll=unroll) for ways in _directions(unit))
    on_cpu = _on_cpu(flow, chain, axis)
    in_turn = _by_all_reduces(flow, chain, unit) if on_cpu else []
    if in_turn and axis.hardware.overlaps and not thorough:
        return tuple(in_turn)
    if on_cpu and isinstance(chain, AllGatherDot) and not (in_turn or unroll or chain.alike):
        late = RingSchedule(directions=1, late=True)
        return (RingSchedule(directions=1), late) if thorough else (late,)
    found = forms(_cuttable(flow, chain, unit), axis)
    if not thorough:
        explicit, gathers = may_start_explicitly(flow, chain), isinstance(chain, AllGatherDot)
        known = rule(axis.hardware, gathers=gathers, explicit=explicit)
        admitted = known.admitted(found, gathers=gathers, dots=len(chain.dots), explicit=explicit)
        found = admitted or found[:1]
    schedules = tuple(_schedule(form, axis, unroll) for form in found)
    # Of the rings only the simplest could still be better there, and timing takes long.
    return (*schedules[:1], *in_turn) if thorough and in_turn else schedules


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
    cut = across(flow, chain) if _adds_up(chain) and len(chain.dots) == 1 else None
    if cut is not None:
        assert isinstance(chain, AllGatherDot)
        unit = flow.avals[chain.wire].shape[cut.dim]
    pieces = [n for n in (1, 3) if n <= unit]
    return [dataclasses.replace(base, chains=n, across=cut is not None and n > 1) for n in pieces]


def _cuttable(flow: Dataflow, chain: Chain, unit: int) -> Cuttable:
    """Into what the chain's blocks can be cut.

    A psum is not cut into chunks if there are dots after it; along its last dim, where shards are strips of
    every row, too narrow to be placed chunk by chunk; or where the compiler places the starts: it puts too
    few of them before what could hide them, and the program may be slower than it was.
    """
    if isinstance(chain, DotPsum):
        result = flow.avals[flow.ops[chain.collective.op].outputs[0]]
        placed = chain.collective.dim < len(result.shape) - 1
        return Cuttable(
            collective="psum",
            unit=unit,
            tile_rows=tile_rows(flow, chain),
            strip=_strip(flow, chain.scatter, most=unit if chain.gather else None),
            chunks=may_start_explicitly(flow, chain) and chain.gather is None and placed,
            in_turn=chain.gather is None,
        )
    gathers = isinstance(chain, AllGatherDot)
    return Cuttable(
        collective="all_gather" if gathers else "reduce_scatter",
        unit=unit,
        tile_rows=tile_rows(flow, chain),
        strip=_strip(flow, chain),
        sums=_adds_up(chain),
        halfway=_halfway(flow, chain),
        in_turn=goes_by_all_gathers(chain) or goes_by_reduce_scatters(chain),
        whole_rows=all(_rows_are_whole(flow, dot) for dot in chain.dots),
    )


def _rows_are_whole(flow: Dataflow, dot: BlockOp) -> bool:
    """Whether the rows of what a dot makes are whole tiles."""
    (value,) = flow.ops[dot.op].outputs
    return all(size % LANES == 0 for size in flow.avals[value].shape[-1:])


def _strip(flow: Dataflow, chain: AllGatherDot | DotReduceScatter, most: int | None = None) -> int:
    """Elements of the dim along which pieces can be cut across, or `most` of them; 0 if there is none."""
    cut = across(flow, chain)
    if cut is None:
        return 0
    of = (
        flow.avals[flow.ops[chain.dots[0].op].outputs[0]]
        if isinstance(chain, AllGatherDot)
        else flow.aval(flow.ops[chain.collective.op].inputs[0])
    )
    size: int = of.shape[cut.result_dims[0]]
    return size if most is None else min(size, most)


def _schedule(form: Form, axis: Axis, unroll: int) -> RingSchedule:
    """The schedule of a form: its rings run along the axis's orders, or its walks."""
    if form.route != "ring":
        return RingSchedule(directions=1, route=form.route, chains=form.chains, across=form.across)
    return RingSchedule(
        directions=form.directions,
        chains=form.chains,
        columns=form.columns,
        across=form.across,
        joined=form.joined,
        cut=form.cut,
        wire="float32" if "cpu" in axis.hardware.device_kinds else "operand",
        halfway=form.halfway,
        unroll=unroll,
        late=form.late,
        orders=axis.walks if form.walks else _orders(axis, form.rings),
    )


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


def _halfway(flow: Dataflow, chain: Chain) -> bool:
    """Whether whole shards of the chain may go half way round.

    Of dots that add up the pieces would be no larger, and what is rounded to travel is slow to cut again.
    What comes a whole to some devices comes in halves to others.
    """
    if not isinstance(chain, AllGatherDot) or _adds_up(chain) or chain.alike:
        return False
    return bool(wire_dtype(flow, chain) == flow.avals[chain.wire].dtype)
