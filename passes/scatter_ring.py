"""Emits the ring of a ``dot → reduce_scatter`` chain, and of a ``dot → all_to_all`` chain."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from passes import shims
from passes.block_eval import Piece, Read, accumulator_dtype, blank, run_on_piece, tie
from passes.chains import DotReduceScatter
from passes.graph import Dataflow
from passes.hops import Places
from passes.schedule import WHOLE, RingSchedule, divisions, parts

_EXACT = frozenset(
    {"transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "neg", "pvary"}
)
"""Equations that only move elements or change their type: a wider dot may come through them unrounded."""


def emit_scatter_ring(
    flow: Dataflow, chain: DotReduceScatter, schedule: RingSchedule, read: Read, places: Places
) -> Any:
    """Runs the chain as a ring and returns this device's shard of the result.

    The accumulator of the shard of device (i+P-1-s) mod P visits device i at step s and ends at its owner.
    While it travels, the next partial product is made; the two are tied together after that product and then
    added, in float32 if the result is narrower.
    """
    collective = chain.collective
    op, axis_size = flow.ops[collective.op], collective.axis_size
    widened = _widened(flow, chain)
    accumulators: list[Any] = []
    divided = parts(schedule, divisions(flow, chain))
    for step in range(axis_size):
        with shims.equation_scope(op.eqn, op.scope), jax.named_scope(f"overlap_{chain.kind}"):
            received = [
                places.hop(accumulator, -part.step)
                for part, accumulator in zip(divided, accumulators, strict=False)
            ]
        partials = []
        for part in divided:
            piece = Piece(places, -part.step * (step + 1), part)
            partial = _partial(flow, chain, piece, read, widened)
            partials.append(lax.convert_element_type(partial, accumulator_dtype(partial.dtype)))
        if received:
            tied = tie(*received, *partials)
            pairs = zip(tied[: len(divided)], tied[len(divided) :], strict=True)
            partials = [lax.add(a, b) for a, b in pairs]
        accumulators = partials
    with shims.equation_scope(op.eqn, op.scope), jax.named_scope(f"overlap_{chain.kind}"):
        result = lax.concatenate(accumulators, collective.dim) if len(divided) > 1 else accumulators[0]
        result = lax.convert_element_type(result, flow.avals[op.outputs[0]].dtype)
        return result if collective.tiled else lax.squeeze(result, (collective.dim,))


def emit_scatter_exchange(flow: Dataflow, chain: DotReduceScatter, read: Read, places: Places) -> Any:
    """Runs a ``dot → all_to_all`` chain as direct exchanges and returns the collective's result.

    At step s the block for device (i-s) mod P is made; it is sent there while the next one is made. This
    device's own block comes last.
    """
    collective = chain.collective
    op, axis_size = flow.ops[collective.op], collective.axis_size
    (value,) = op.outputs
    result = blank(flow, value)
    for distance in (*range(1, axis_size), 0):
        destination = Piece(places, -distance, WHOLE)
        block = _partial(flow, chain, destination, read, frozenset())
        with shims.equation_scope(op.eqn, op.scope), jax.named_scope(f"overlap_{chain.kind}"):
            if distance:
                block = places.hop(block, distance)
            source = Piece(places, distance, WHOLE)
            result = source.place(result, block, op.params["concat_axis"])
    return result


def _partial(
    flow: Dataflow, chain: DotReduceScatter, piece: Piece, read: Read, widened: frozenset[int]
) -> Any:
    """One piece of the collective's operand."""
    (operand,) = flow.ops[chain.collective.op].inputs
    assert isinstance(operand, int)
    pieces: dict[int, Any] = {}
    run_on_piece(flow, chain.body, pieces, piece, read, widened)
    return pieces[operand]


def _widened(flow: Dataflow, chain: DotReduceScatter) -> frozenset[int]:
    """The operations that may give their results in the accumulator's dtype: all, if none rounds."""
    ops = [flow.ops[block.op] for block in chain.body]
    floating = all(
        jnp.issubdtype(flow.avals[value].dtype, jnp.floating) for op in ops for value in op.outputs
    )
    if floating and all(op.name in _EXACT or op.name == "dot_general" for op in ops):
        return frozenset(block.op for block in chain.body)
    return frozenset()
