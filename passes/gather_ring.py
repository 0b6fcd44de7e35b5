"""Emits the ring of an ``all_gather → dot`` chain."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from passes import shims
from passes.block_eval import (
    Piece,
    Read,
    accumulator_dtype,
    blank,
    hop,
    owner_after,
    run_on_piece,
    tie,
)
from passes.chains import AllGatherDot
from passes.collective import Collective
from passes.graph import Dataflow
from passes.schedule import WHOLE, Part, RingSchedule, divisions, parts


def emit_gather_ring(
    flow: Dataflow, chain: AllGatherDot, collective: Collective, schedule: RingSchedule, read: Read
) -> dict[int, Any]:
    """Runs the chain as a ring and returns the values that the rest of the program needs, by number.

    At step s device i holds the shard of device (i+s) mod P (of i-s for the part that travels the other way). While
    it is sent on, the dots run on it: results of a free or batch dim are placed where the shard's owner says, those
    of a contracting dim are added up.
    """
    op = flow.ops[chain.collective]
    axis, axis_size = chain.axis, chain.axis_size
    with shims.equation_scope(op.eqn, op.scope), jax.named_scope(f"overlap_{chain.kind}"):
        shard = read(op.inputs[0])
        if not collective.tiled:
            shard = lax.expand_dims(shard, (collective.dim,))
        local = {op.outputs[0]: shard}
    run_on_piece(flow, chain.before, local, Piece(owner_after(axis, axis_size, 0), WHOLE, axis_size), read)
    dim = chain.blocked[chain.wire]
    travelling = [
        (part, _cut(local[chain.wire], dim, part))
        for part in parts(schedule, divisions(flow, chain, collective))
    ]

    results: dict[int, Any] = {}
    for step in range(axis_size):
        sent = travelling
        if step < axis_size - 1:
            with shims.equation_scope(op.eqn, op.scope), jax.named_scope(f"overlap_{chain.kind}"):
                travelling = [(part, hop(shard, axis, axis_size, part.step)) for part, shard in sent]
        for part, shard in sent:
            piece = Piece(owner_after(axis, axis_size, part.step * step), part, axis_size)
            _take_in(flow, chain, shard, piece, read, results)
        if step < axis_size - 1:
            shards = [shard for _, shard in travelling]
            tied = tie(*shards, *results.values())
            travelling = [(part, shard) for (part, _), shard in zip(travelling, tied, strict=False)]
            results = dict(zip(results, tied[len(shards) :], strict=True))
    for dot in chain.dots:
        (value,) = flow.ops[dot.op].outputs
        results[value] = lax.convert_element_type(results[value], flow.avals[value].dtype)
    return results


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


def _place(
    flow: Dataflow, value: int, dim: int, part: Any, piece: Piece, results: dict[int, Any]
) -> None:
    whole = results[value] if value in results else blank(flow.avals[value])
    results[value] = piece.place(whole, part, dim)
