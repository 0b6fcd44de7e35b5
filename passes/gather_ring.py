"""Emits the ring of an ``all_gather → dot`` chain, and of an ``all_to_all → dot`` chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from passes import shims
from passes.block_eval import Piece, Read, accumulator_dtype, as_varying, blank, run_on_piece, tie
from passes.chains import AllGatherDot, ShardReduction
from passes.collective import Collective
from passes.graph import Dataflow
from passes.hops import Places
from passes.schedule import WHOLE, Part, RingSchedule, divisions, parts

Shards = list[tuple[Part, Any]]


def emit_gather_ring(
    flow: Dataflow, chain: AllGatherDot, schedule: RingSchedule, shard: Any, read: Read, places: Places
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
      places: where the collective's devices stand.
    """
    collective = chain.collective
    op, axis_size = flow.ops[collective.op], collective.axis_size
    send = _direct(flow, collective, shard, places) if schedule.route == "exchange" else None
    with shims.equation_scope(op.eqn, op.scope), jax.named_scope(f"overlap_{chain.kind}"):
        first = send(0) if send else own_block(collective, shard)
    local = {op.outputs[0]: first}
    run_on_piece(flow, chain.before, local, Piece(places, 0, WHOLE), read)
    dim = chain.blocked[chain.wire]
    at_hand: Shards = [
        (part, _cut(local[chain.wire], dim, part)) for part in parts(schedule, divisions(flow, chain))
    ]
    results: dict[int, Any] = {}
    for step in range(axis_size):
        arriving: Shards = []
        if step < axis_size - 1:
            with shims.equation_scope(op.eqn, op.scope), jax.named_scope(f"overlap_{chain.kind}"):
                if send:
                    arriving = [(part, send(step + 1)) for part, _ in at_hand]
                else:
                    arriving = [(part, places.hop(piece, part.step)) for part, piece in at_hand]
        for part, piece in at_hand:
            _take_in(flow, chain, piece, Piece(places, part.step * step, part), read, results)
        if arriving:
            tied = tie(*(piece for _, piece in arriving), *results.values())
            at_hand = [(part, piece) for (part, _), piece in zip(arriving, tied, strict=False)]
            results = dict(zip(results, tied[len(arriving) :], strict=True))
    for dot in chain.dots:
        (value,) = flow.ops[dot.op].outputs
        results[value] = lax.convert_element_type(results[value], flow.avals[value].dtype)
    return results


def emit_shard_reduction(
    flow: Dataflow, reduction: ShardReduction, read: Read, places: Places
) -> dict[int, Any]:
    """Reduces a gathered value over the gathered dim: each device its own shard, then across devices.

    Sums are in float32 at least.
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
        across: Any = {"reduce_sum": lax.psum, "reduce_max": lax.pmax, "reduce_min": lax.pmin}[op.name]
        total = lax.convert_element_type(across(partial, collective.axes), aval.dtype)
        return {value: as_varying(total, shims.varying_axes(aval))}


def own_block(collective: Collective, shard: Any) -> Any:
    """This device's shard as a block of the gathered array: an untiled gather makes a new dim."""
    return shard if collective.tiled else lax.expand_dims(shard, (collective.dim,))


def _direct(flow: Dataflow, collective: Collective, operand: Any, places: Places) -> Callable[[int], Any]:
    """How the block of the device ``distance`` places further along is fetched straight from it."""
    split = flow.ops[collective.op].params["split_axis"]

    def fetch(distance: int) -> Any:
        block = Piece(places, -distance, WHOLE).of(operand, split)
        return places.hop(block, distance) if distance else block

    return fetch


def _cut(shard: Any, dim: int, part: Part) -> Any:
    size = shard.shape[dim]
    start = int(part.start * size)
    return lax.slice_in_dim(shard, start, start + int(part.share * size), axis=dim)


def _take_in(
    flow: Dataflow, chain: AllGatherDot, shard: Any, piece: Piece, read: Read, results: dict[int, Any]
) -> None:
    """Runs everything that one arrived shard is for, and adds it to the results."""
    summed = frozenset(dot.op for dot in chain.dots if dot.dims.result_dim is None)
    pieces = {chain.wire: shard}
    run_on_piece(flow, chain.after, pieces, piece, read)
    for value in chain.handed_out:
        _place(flow, value, chain.blocked[value], pieces[value], piece, results)
    run_on_piece(flow, chain.dots, pieces, piece, read, widened=summed)
    for dot in chain.dots:
        (value,) = flow.ops[dot.op].outputs
        if dot.dims.result_dim is not None:
            _place(flow, value, dot.dims.result_dim, pieces[value], piece, results)
        else:
            partial = lax.convert_element_type(pieces[value], accumulator_dtype(pieces[value].dtype))
            results[value] = partial if value not in results else lax.add(results[value], partial)


def _place(flow: Dataflow, value: int, dim: int, part: Any, piece: Piece, results: dict[int, Any]) -> None:
    whole = results[value] if value in results else blank(flow, value)
    results[value] = piece.place(whole, part, dim)
