"""Emits the ring of an ``all_gather → dot`` chain, and of an ``all_to_all → dot`` chain."""

from __future__ import annotations

import contextlib
import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
from jax import lax

from cost_model.tile import LANES
from passes import shims
from passes.arrivals import Late, Results, cut_for, put_together, rounded, take_in, values_of
from passes.block_eval import (
    Joined,
    Piece,
    Read,
    accumulator_dtype,
    as_varying,
    blank,
    blocks_of,
    chain_scope,
    cut_once,
    in_rows,
    loop,
    reading,
    run_on_piece,
    tie,
)
from passes.chains import AllGatherDot, ShardReduction
from passes.collective import Collective
from passes.graph import Dataflow
from passes.hops import Places, Rings
from passes.read_elsewhere import read_elsewhere
from passes.schedule import WHOLE, Across, Part, RingSchedule, across, divisions, itinerary, parts, tile_rows
from passes.sent import passed_on, sent, slices
from passes.starts import starts_explicitly


def emit_gather_ring(
    flow: Dataflow, chain: AllGatherDot, schedule: RingSchedule, shard: Any, read: Read, rings: Rings
) -> dict[int, Any]:
    """Runs the chain as a ring and returns the values that the rest of the program needs, by number.

    At step s device i has the shard of device (i+s) mod P (of i-s for the part that travels the other way).
    While the next one is on its way, the dots run on it: results of a free or batch dim are placed where the
    shard's owner says, those of a contracting dim are added up.

    Args:
      flow: the dataflow graph.
      chain: the chain.
      schedule: how the shards travel.
      shard: the collective's operand.
      read: gives whole values.
      rings: where the collective's devices stand on each ring.
    """
    collective = chain.collective
    ring = _Ring(flow, chain, schedule, read, rings, shard)
    with ring.scope():
        own = ring.fetch(0) if schedule.route == "exchange" else own_block(collective, shard)
    local = {flow.ops[collective.op].outputs[0]: own}
    run_on_piece(flow, chain.before, local, Piece(rings[0], 0, WHOLE), read)
    wire = local[chain.wire]
    apart = schedule.columns > 1 or (ring.cut_across is not None and ring.sums)
    results = _in_columns(ring, wire) if apart else ring.run(ring.pieces_of(wire))
    return rounded(flow, chain, results)


class _Ring:
    """The ring of one chain."""

    def __init__(
        self,
        flow: Dataflow,
        chain: AllGatherDot,
        schedule: RingSchedule,
        read: Read,
        rings: Rings,
        operand: Any,
    ) -> None:
        self.flow, self.chain, self.schedule = flow, chain, schedule
        # Else a dot may lay out by columns what it makes for these blocks, which is then turned round: the
        # layer of a router took 15 % longer (v5e).
        rows = {o: in_rows(flow, read(o), dims=2) for o in cut_once(flow, chain.after) if o != chain.wire}
        self.read, self.rings, self.operand = reading(rows, read), rings, operand
        self.dim = chain.blocked[chain.wire]
        self.cut_across = across(flow, chain) if schedule.across else None
        unit = divisions(flow, chain)
        if self.cut_across is None:
            divided = parts(schedule, unit, tile_rows(flow, chain), placed=True)
            self.bounds: tuple[Fraction, ...] = ()
        else:
            # Every piece has whole blocks of the gathered dim, and its part of the other one. Rows fill tiles
            # by fewer than columns do, and so strips of them are more even.
            shape, dim = flow.avals[chain.wire].shape, self.cut_across.dim
            grain = LANES if dim == len(shape) - 1 else tile_rows(flow, chain)
            strips = parts(schedule, shape[dim] // schedule.columns, grain, placed=True)
            divided = tuple(dataclasses.replace(p, start=Fraction(0), share=Fraction(1)) for p in strips)
            self.bounds = (*(strip.start for strip in strips), Fraction(1))
        self.itinerary = itinerary(schedule, divided, unit, chain.collective.axis_size)
        self.cut_apart = cut_for(flow, chain, chain.summed) if schedule.cut == "apart" else {}
        self.explicit = starts_explicitly(flow, chain)
        self.read_elsewhere = read_elsewhere(flow, chain)
        # Else all blocks could start at once, as one with the equal ones of another ring, and not arrive so.
        on_gpu = shims.on_gpu(flow.avals[flow.ops[chain.collective.op].outputs[0]])
        self.fetches_in_turn = self.explicit and schedule.route == "exchange" and on_gpu
        self.late = Late(flow, chain, rings[0], read) if schedule.late else None

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """The collective's place in the user's program."""
        return chain_scope(self.flow, self.chain)

    def run(self, at_hand: list[Any]) -> Results:
        """Runs the ring on the pieces of this device's shard; dots that add up stay in float32."""
        hops = len(self.itinerary) - 1
        results: Results = {}
        done = 0
        unroll = self.schedule.unroll
        if unroll and hops > unroll:
            at_hand, results = self._step(0, at_hand, results)
            rolled = (hops - 1) // unroll
            for places in self.rings:
                places.settle()

            def iteration(number: Any, carried: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
                pieces, values = carried
                known = dict(zip(results, values, strict=True))
                for step in range(unroll):
                    distance = lax.add(lax.mul(number, np.int32(unroll)), np.int32(step + 1))
                    pieces, known = self._step(distance, pieces, known)
                return pieces, list(known.values())

            at_hand, values = loop(0, rolled, iteration, (at_hand, list(results.values())))
            results = dict(zip(results, values, strict=True))
            done = 1 + rolled * unroll
        for step in range(done, hops):
            at_hand, results = self._step(step, at_hand, results)
        results = self._take_in(hops, at_hand, results, self.read)
        if self.late:
            return self.late.results(at_hand)
        if self.chain.handed_out:
            # Else what came last would be placed, and stay where it arrived, when the whole is first read.
            results = dict(zip(results, tie(*results.values()), strict=True))
        return results

    def pieces_of(self, wire: Any) -> list[Any]:
        """What of this device's shard travels on each way."""
        if self.cut_across is None:
            dim, bounds = self.dim, (*(part.start for part in self.itinerary[0]), Fraction(1))
        else:
            dim, bounds = self.cut_across.dim, self.bounds
        return sent(self.flow, self.chain, self.rings[0], wire, dim, bounds)

    @property
    def reuses_blocks(self) -> bool:
        """Whether several dots read the same block of what is cut apart: one for each column."""
        return self.schedule.columns > 1 or self.cut_across is not None

    @property
    def sums(self) -> bool:
        """Whether the dots' results are added up."""
        return bool(self.chain.summed)

    def _step(self, step: Any, at_hand: list[Any], results: Results) -> tuple[list[Any], Results]:
        """Runs the dots on what is at hand while the next shards arrive."""
        with self.scope():
            arriving = self._send_all(at_hand, step)
        read = self.read
        if self.explicit:
            others = {operand: self.read(operand) for operand in self.read_elsewhere}
            tied = iter(tie(*arriving, *at_hand, *others.values()))
            arriving, at_hand = [next(tied) for _ in arriving], [next(tied) for _ in at_hand]
            read = reading(dict(zip(others, tied, strict=True)), self.read)
        results = self._take_in(step, at_hand, results, read)
        if self.explicit:
            with self.scope():
                arriving = [shims.finish_ppermute(future) for future in arriving]
        if self.late:
            # XLA:CPU drops barriers, and the first half of what comes last need not wait for the second.
            return arriving, results
        in_turn = [self.operand] if self.fetches_in_turn else []
        tied = iter(tie(*arriving, *in_turn, *results.values()))
        arriving = [next(tied) for _ in arriving]
        if in_turn:
            self.operand = next(tied)
        return arriving, dict(zip(results, tied, strict=True))

    def _parts(self, step: Any) -> tuple[Part, ...]:
        """The parts of blocks that are at hand in a step; in rolled ones always the same."""
        return self.itinerary[step if isinstance(step, int) else 0]

    def _send_all(self, at_hand: list[Any], step: Any) -> list[Any]:
        """Sends what is at hand, or parts of it, and gives what is at hand in the next step."""
        held = self._parts(step)
        wanted = self._parts(step + 1 if isinstance(step, int) else step)
        arriving: list[Any] = []
        for number, part in enumerate(wanted):
            # Half way round, the first hop takes a whole both ways, and the last one half of each. What is
            # placed late comes in halves at last.
            source = number * len(held) // len(wanted)
            whole, piece = held[source], at_hand[source]
            if part.share < whole.share:
                length = piece.shape[self.dim]
                start = int(length * (part.start - whole.start) / whole.share)
                size = int(length * part.share / whole.share)
                places = self.rings[part.ring]
                piece = passed_on(self.flow, self.chain, places, piece, self.dim, start, size)
            if self.late:
                first_half = arriving[-1:] if part.start > whole.start else []
                piece = self.late.copy(piece, *first_half, lane=source)
            arriving.append(self._send(piece, part, step))
        return arriving

    def _send(self, piece: Any, part: Part, step: Any) -> Any:
        if self.schedule.route == "exchange":
            return self.fetch(step + 1)
        places = self.rings[part.ring]
        return (places.start_hop if self.explicit else places.hop)(piece, part.step, held=step)

    def fetch(self, distance: int) -> Any:
        """The block of the device ``distance`` places further along, straight from it."""
        split = self.flow.ops[self.chain.collective.op].params["split_axis"]
        places = self.rings[0]
        block = Piece(places, -distance, WHOLE).of(self.operand, split)
        if not distance:
            return block
        return (places.start_hop if self.explicit else places.hop)(block, distance)

    def _take_in(self, step: Any, at_hand: list[Any], results: Results, read: Read) -> Results:
        """Runs everything that arrived shards are for, and adds it to the results."""
        pieces = [
            Piece(self.rings[part.ring], step if part.step == 1 else -step, part)
            for part in self._parts(step)
        ]
        if self.schedule.joined and self.cut_across is None and len(pieces) > 1:
            joined = Joined(tuple(pieces))
            known = self._at_hand(lax.concatenate(at_hand, self.dim), joined, read)
            return take_in(self.flow, self.chain, known, joined, read, dict(results))
        results = dict(results)
        for number, (piece, shard) in enumerate(zip(pieces, at_hand, strict=True)):
            if self.late:
                self.late.take_in(shard, piece)
            elif self.cut_across is None:
                known = self._at_hand(shard, piece, read)
                results = take_in(self.flow, self.chain, known, piece, read, results)
            else:
                self._take_in_strip(number, piece, shard, self.cut_across, results, read)
        return results

    def _at_hand(self, shard: Any, piece: Piece | Joined, read: Read) -> dict[int, Any]:
        """What has arrived, and the blocks for it that are cut apart, by value."""
        wholes = {operand: read(operand) for operand in self.cut_apart}
        if wholes and isinstance(piece, Piece) and not self.reuses_blocks:
            # Else compilers cut out the blocks of all steps in one operation, and keep them.
            later, shard = tie(np.int32(0), shard)
            piece = dataclasses.replace(piece, later=later)
        blocks = blocks_of(wholes, self.cut_apart, piece, apart=True)
        dtype = self.flow.avals[self.chain.wire].dtype
        return {self.chain.wire: lax.convert_element_type(shard, dtype), **blocks}

    def _take_in_strip(
        self, number: int, piece: Piece, shard: Any, cut: Across, results: Results, read: Read
    ) -> None:
        """Runs the dots on one strip of a shard; sums of different strips have nothing in common."""
        flow, dots = self.flow, self.chain.dots
        made = self._at_hand(shard, piece, read)
        widened = frozenset(dot.op for dot in self.chain.summed)
        run_on_piece(flow, dots, made, piece, read, widened)
        if self.sums:
            strip: Results = dict(results.get(number, {}))
            put_together(flow, self.chain, piece, made, strip)
            results[number] = strip
            return
        for dot, value, result_dim in zip(dots, values_of(flow, self.chain), cut.result_dims, strict=True):
            assert dot.dims.result_dim is not None
            whole = results[value] if value in results else blank(flow, value)
            starts: list[Any] = [np.int32(0)] * whole.ndim
            starts[dot.dims.result_dim] = piece.offset(whole.shape[dot.dims.result_dim])
            starts[result_dim] = np.int32(int(self.bounds[number] * whole.shape[result_dim]))
            whole = lax.dynamic_update_slice(whole, made[value], starts, allow_negative_indices=False)
            results[value] = in_rows(flow, whole)


def _in_columns(ring: _Ring, wire: Any) -> Results:
    """One ring after the other for the columns of what travels, along a free dim of its dots.

    The sums of a column, or of its strips, are written straight into the results.
    """
    values = values_of(ring.flow, ring.chain)
    cut = across(ring.flow, ring.chain)
    assert cut is not None
    dim = cut.dim
    wholes: Results = {value: blank(ring.flow, value) for value in values}
    size, columns = wire.shape[dim], ring.schedule.columns
    grain = LANES if size >= columns * LANES else 1
    placed = 0
    edges = [min(size, -(-size * column // (columns * grain)) * grain) for column in range(columns + 1)]
    for column, shard in enumerate(slices(ring.flow, ring.chain, ring.rings[0], wire, dim, edges)):
        pieces = ring.pieces_of(shard)
        if column:
            # Else every ring's hops could start at once, and their shards be kept.
            *pieces, wholes = tie(*pieces, wholes)
        results = ring.run(pieces)
        for strip in results.values() if ring.cut_across else (results,):
            for value, along in zip(values, cut.result_dims, strict=True):
                part = lax.convert_element_type(strip[value], wholes[value].dtype)
                whole = lax.dynamic_update_slice_in_dim(wholes[value], part, placed, along)
                wholes[value] = in_rows(ring.flow, whole)
            placed += strip[values[0]].shape[cut.result_dims[0]]
    return wholes


def emit_shard_reduction(
    flow: Dataflow, reduction: ShardReduction, read: Read, places: Places
) -> dict[int, Any]:
    """Reduces a gathered value over the gathered dim: each device its own shard, then across devices.

    Sums are in float32 at least. Of extremes all are gathered: not every backend's all_reduce keeps a NaN.
    """
    collective, op = reduction.collective, flow.ops[reduction.op]
    gather = flow.ops[collective.op]
    pieces = {gather.outputs[0]: own_block(collective, read(gather.inputs[0]))}
    here = Piece(places, 0, WHOLE)
    run_on_piece(flow, reduction.path, pieces, here, read)
    (operand,), (value,) = op.inputs, op.outputs
    assert isinstance(operand, int)
    aval = flow.avals[value]
    with shims.equation_scope(op.eqn, op.scope):
        shard = lax.convert_element_type(pieces[operand], accumulator_dtype(aval.dtype))
        partial = op.eqn.primitive.bind(shard, **op.params)
        if op.name == "reduce_sum":
            total = lax.psum(partial, collective.axes)
        else:
            (total,) = op.bind([lax.all_gather(partial, collective.axes)], {**op.params, "axes": (0,)})
        total = lax.convert_element_type(total, aval.dtype)
        return {value: as_varying(total, shims.varying_axes(aval))}


def own_block(collective: Collective, shard: Any) -> Any:
    """This device's shard as a block of the gathered array: an untiled gather makes a new dim."""
    return shard if collective.tiled else lax.expand_dims(shard, (collective.dim,))


def cut(shard: Any, dim: int, part: Part) -> Any:
    """A part of a shard along one dim."""
    size = shard.shape[dim]
    start = int(part.start * size)
    return lax.slice_in_dim(shard, start, start + int(part.share * size), axis=dim)
