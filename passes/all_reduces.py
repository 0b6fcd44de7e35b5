"""Emits a chain whose pieces go by all_reduces, one after the other, each beside the dots of another piece.

A psum's pieces where the compiler runs all_reduces beside dots by itself: on CPU devices, whose collectives
go over a network by gloo (docs/network.md), and on TPUs whose SparseCores run them (`Hardware.offloaded`).
And, on CPU, what each of two devices has for the other: a permute sends one way after the other there, by
chance, and an all_reduce both ways at once; and what becomes ready along with a permute waits for it, while
an all_reduce lets it pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax import lax

from cost_model.offloaded import cuts_apart
from cost_model.tile import LANES
from passes import shims
from passes.arrivals import rounded, take_in
from passes.block_eval import (
    Piece,
    Read,
    accumulator_dtype,
    blank,
    cut_once,
    reading,
    run_on_piece,
    tie,
    tie_typed,
    transposed,
    write_in_a_row,
)
from passes.chains import AllGatherDot, Chain, DotPsum, DotReduceScatter
from passes.chip import chip_of
from passes.gather_ring import cut, own_block
from passes.graph import Dataflow, Operand
from passes.hops import Places
from passes.scatter_ring import partial_sum, widened_ops
from passes.schedule import WHOLE, Across, RingSchedule, across, divisions, parts, tile_rows
from passes.turns import ELEMENT_BYTES, Turns, pieces_of


def goes_by_all_reduces(flow: Dataflow, chain: Chain) -> bool:
    """Whether the chain's pieces can: a psum's, and what each of two devices has for the other."""
    collective = chain.collective
    if isinstance(chain, DotPsum):
        value = flow.ops[collective.op].outputs[0]
        return chain.gather is None and flow.avals[value].dtype.itemsize == ELEMENT_BYTES
    sizes = [length for _, length in collective.mesh_sizes]
    between_two = collective.axis_size == 2 and collective.groups is None and int(np.prod(sizes)) == 2
    value = chain.wire if isinstance(chain, AllGatherDot) else flow.ops[collective.op].outputs[0]
    # Each multiplies its own shard whole, and the other's in pieces.
    equal = isinstance(chain, AllGatherDot) and bool(chain.alike)
    return between_two and not equal and flow.avals[value].dtype.itemsize == ELEMENT_BYTES


def emit_all_reduces(
    flow: Dataflow, chain: Chain, schedule: RingSchedule, read: Read, places: Places
) -> dict[int, Any]:
    """Runs the chain and returns the values that the rest of the program needs, by number."""
    turns = Turns(flow, chain, places)
    if isinstance(chain, AllGatherDot):
        return _gather(flow, chain, schedule, read, turns)
    if isinstance(chain, DotPsum):
        return sums_in_turn(flow, chain, schedule, read, turns)
    return _scatter(flow, chain, schedule, read, turns)


def _gather(
    flow: Dataflow, chain: AllGatherDot, schedule: RingSchedule, read: Read, turns: Turns
) -> dict[int, Any]:
    """This device's own shard is multiplied whole, then the other's, piece by piece."""
    collective = chain.collective
    with turns.scope():
        own = own_block(collective, read(flow.ops[collective.op].inputs[0]))
    here = Piece(turns.places, 0, WHOLE)
    local = {flow.ops[collective.op].outputs[0]: own}
    run_on_piece(flow, chain.before, local, here, read)
    wire = local[chain.wire]
    strips = across(flow, chain) if schedule.across else None
    dim = chain.blocked[chain.wire] if strips is None else strips.dim
    unit = divisions(flow, chain) if strips is None else wire.shape[dim]
    arrived = []
    divided = pieces_of(chain, schedule, unit)
    for part in divided:
        # The own dot of sums reads a block that is cut out first; begun before, it would wait with the rest.
        arrived.append(turns.swap(cut(wire, dim, part), at_once=strips is None))
    results = take_in(flow, chain, {chain.wire: wire}, here, read, {})
    if strips is None:
        for part, piece in zip(divided, arrived, strict=True):
            there = Piece(turns.places, 1, part)
            results = take_in(flow, chain, {chain.wire: piece}, there, read, results)
    else:
        results = _with_strips(flow, chain, strips, arrived, results, turns.places, read)
    return rounded(flow, chain, results)


def _with_strips(
    flow: Dataflow,
    chain: AllGatherDot,
    along: Across,
    strips: list[Any],
    results: dict[int, Any],
    places: Places,
    read: Read,
) -> dict[int, Any]:
    """The sums of the chain's only dot, with the products of the other device's strips added to theirs."""
    (dot,), dim = chain.dots, along.result_dim
    (value,) = flow.ops[dot.op].outputs
    start, sums = 0, []
    for strip in strips:
        made = {chain.wire: strip}
        run_on_piece(flow, chain.dots, made, Piece(places, 1, WHOLE), read, frozenset({dot.op}))
        partial = lax.convert_element_type(made[value], results[value].dtype)
        end = start + partial.shape[dim]
        sums.append(lax.add(lax.slice_in_dim(results[value], start, end, axis=dim), partial))
        start = end
    return {**results, value: lax.concatenate(sums, dim)}


def _scatter(
    flow: Dataflow, chain: DotReduceScatter, schedule: RingSchedule, read: Read, turns: Turns
) -> dict[int, Any]:
    """The other device's block is made piece by piece, then the own one, to which what arrives is added."""
    collective = chain.collective
    (value,) = flow.ops[collective.op].outputs
    widened = widened_ops(flow, chain)
    received, last = [], None
    for part in pieces_of(chain, schedule, divisions(flow, chain)):
        last = _sum_of(flow, chain, Piece(turns.places, 1, part, turns.nothing_of(last)), read, widened)
        turns.places.made[collective.op] = last
        received.append(turns.swap(last))
    own = _sum_of(flow, chain, Piece(turns.places, 0, WHOLE, turns.nothing_of(last)), read, widened)
    with turns.scope():
        total = lax.add(own, lax.concatenate(received, collective.dim) if received[1:] else received[0])
        total = lax.convert_element_type(total, flow.avals[value].dtype)
        return {value: total if collective.tiled else lax.squeeze(total, (collective.dim,))}


def sums_in_turn(
    flow: Dataflow, chain: DotPsum | DotReduceScatter, schedule: RingSchedule, read: Read, turns: Turns
) -> dict[int, Any]:
    """The sum is made and added up by the chain's collective piece by piece.

    Of a psum pieces are rows, or, across, columns; of a reduce_scatter, whose rows are the devices', columns.
    """
    op = flow.ops[chain.collective.op]
    scatter = chain.scatter if isinstance(chain, DotPsum) else chain
    on_gpu = shims.on_gpu(flow.avals[op.outputs[0]])
    # A GPU's matmul rounds its result itself; another kernel would round a wide one.
    widened = frozenset() if on_gpu else widened_ops(flow, scatter)
    strips = across(flow, scatter) if schedule.across else None
    dim = chain.collective.dim if strips is None else strips.result_dim
    last = None
    placed = _Placed(flow, op.outputs[0], dim, turns)
    whole = _Whole(flow, read)
    for piece, read_piece in _pieces_of_sum(flow, chain, scatter, schedule, strips, whole, turns):
        later = dataclasses.replace(piece, later=turns.nothing_of(last))
        last = _sum_of(flow, scatter, later, read_piece, widened)
        with turns.scope():
            last = lax.convert_element_type(last, flow.aval(op.inputs[0]).dtype)
            if placed.in_place:
                # Else the compiler may lay pieces out by columns, and turns each round to place it.
                last = shims.row_major(last)
        if on_gpu:
            last = whole.behind(last)
        turns.send(last)
        if isinstance(chain, DotPsum):
            placed.but(2)
    return {op.outputs[0]: placed.all()}


class _Placed:
    """What has arrived of a value, put together along a dim.

    Where no barrier holds, all of it at the end: to place a piece is work that the next product would wait
    behind. A TPU's compiler would hold all pieces till then.
    """

    def __init__(self, flow: Dataflow, value: int, dim: int, turns: Turns) -> None:
        self._dim, self._turns = dim, turns
        self.in_place = not flow.differentiable and shims.on_tpu(flow.avals[value])
        self._whole = blank(flow, value) if self.in_place else None
        self._number = self._start = 0

    def but(self, later: int) -> None:
        """Places what has arrived, but so many of the last, before the first of those is waited for."""
        if self.in_place and len(self._turns.arrived) > later:
            self._place(len(self._turns.arrived) - later)
            (self._whole,) = self._turns.hold(self._whole, sent_since=later - 1)

    def all(self) -> Any:
        """The whole value."""
        with self._turns.scope():
            if not self.in_place:
                return lax.concatenate(self._turns.arrived, self._dim)
            self._place(len(self._turns.arrived))
            return self._whole

    def _place(self, end: int) -> None:
        pieces = self._turns.arrived[self._number : end]
        self._whole, self._start = write_in_a_row(
            self._whole, pieces, self._dim, self._start, self._turns.places
        )
        self._number = end


def _pieces_of_sum(
    flow: Dataflow,
    chain: DotPsum | DotReduceScatter,
    scatter: DotReduceScatter,
    schedule: RingSchedule,
    strips: Across | None,
    read: Read,
    turns: Turns,
) -> Iterator[tuple[Piece, Read]]:
    """The pieces of a sum, and what gives the dot's operands for each.

    A psum's piece is not begun before all but the last that was sent have arrived: else a TPU's compiler lets
    several be made beside the first, and nothing is left beside the last ones.
    """
    waits = isinstance(chain, DotPsum)
    if strips is not None:
        (dot,) = scatter.dots
        sliced = flow.ops[dot.op].inputs[strips.operand]
        along = strips.dim
        summed = flow.aval(flow.ops[chain.collective.op].inputs[0])
        hardware = chip_of(summed)
        rows, of = summed.size // summed.shape[strips.result_dim], flow.aval(sliced).dtype.name
        apart = hardware is not None and cuts_apart(rows, of, hardware)
        for part in parts(schedule, read(sliced).shape[along], LANES):
            (whole,) = turns.hold(read(sliced), sent_since=1) if waits else (read(sliced),)
            strip = cut(whole, along, part)
            if apart:
                (strip,) = tie(strip)
            yield _Stretch(turns.places, 0, WHOLE), reading({sliced: strip}, read)
        return
    rows = divisions(flow, chain) * chain.collective.axis_size
    if shims.on_tpu(flow.avals[flow.ops[chain.collective.op].outputs[0]]):
        divided = parts(schedule, rows, tile_rows(flow, chain))
    else:
        divided = pieces_of(chain, schedule, rows)
    blocked = set(cut_once(flow, scatter.body))
    for part in divided:
        yield _Stretch(turns.places, 0, part), _behind_earlier(read, blocked, turns) if waits else read


def _behind_earlier(read: Read, operands: Set[int], turns: Turns) -> Read:
    """Reads as before, these operands when all values have arrived but the one that was sent last."""
    held: dict[int, Any] = {}

    def reading(operand: Operand) -> Any:
        if not isinstance(operand, int) or operand not in operands:
            return read(operand)
        if operand not in held:
            (held[operand],) = turns.hold(read(operand), sent_since=1)
        return held[operand]

    return reading


class _Whole:
    """Reads whole values, of which pieces that come later may be made to wait."""

    def __init__(self, flow: Dataflow, read: Read) -> None:
        self._flow, self._read = flow, read
        self._held: dict[int, Any] = {}

    def __call__(self, operand: Operand) -> Any:
        if not isinstance(operand, int):
            return self._read(operand)
        if operand not in self._held:
            value = self._read(operand)
            turned = shims.on_gpu(jax.typeof(value)) and transposed(self._flow, operand)
            self._held[operand] = shims.row_major(value) if turned else value
        return self._held[operand]

    def behind(self, value: Any) -> Any:
        """Lets what was read wait for a value: XLA:GPU would make one of dots that share an operand."""
        value, *held = tie_typed(self._flow, value, *self._held.values())
        self._held = dict(zip(self._held, held, strict=True))
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch(Piece):
    """A piece of a whole dim; ``part`` is its part of the whole."""

    @property
    def share(self) -> Fraction:
        """How much of the whole dim the piece is."""
        return self.part.share

    def offset(self, size: int) -> Any:
        """Where the piece begins in a dim of ``size`` elements."""
        return np.int32(int(self.part.start * size))


def _sum_of(
    flow: Dataflow, chain: DotReduceScatter, piece: Piece, read: Read, widened: frozenset[int]
) -> Any:
    """A piece of the partial sums, in the accumulator's dtype."""
    partial = partial_sum(flow, chain, piece, read, widened)
    return lax.convert_element_type(partial, accumulator_dtype(partial.dtype))
