"""Emits the ring of a ``dot → reduce_scatter`` chain."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from passes import shims
from passes.block_eval import Piece, Read, accumulator_dtype, hop, owner_after, run_on_piece, tie
from passes.chains import DotReduceScatter
from passes.collective import Collective
from passes.graph import Dataflow
from passes.schedule import RingSchedule, divisions, parts

_EXACT = frozenset(
    "transpose reshape squeeze broadcast_in_dim convert_element_type neg pvary pcast dot_general".split()
)
"""Equations that only move elements or change their type: a wider dot may come through them unrounded."""


def emit_scatter_ring(
    flow: Dataflow, chain: DotReduceScatter, collective: Collective, schedule: RingSchedule, read: Read
) -> dict[int, Any]:
    """Runs the chain as a ring and returns the scattered result, by number.

    The accumulator of the shard of device (i+P-1-s) mod P visits device i at step s and ends at its owner. While
    it travels, the next partial product is made; the two are tied together after that product and then added, in
    float32 if the result is narrower.
    """
    op = flow.ops[chain.collective]
    axis, axis_size = chain.axis, chain.axis_size
    (partial_value,) = op.inputs
    assert isinstance(partial_value, int)
    widened = _widened(flow, chain)
    accumulators: list[Any] = []
    divided = parts(schedule, divisions(flow, chain, collective))
    for step in range(axis_size):
        with shims.equation_scope(op.eqn, op.scope), jax.named_scope(f"overlap_{chain.kind}"):
            received = [
                hop(accumulator, axis, axis_size, -part.step)
                for part, accumulator in zip(divided, accumulators, strict=False)
            ]
        partials = []
        for part in divided:
            distance = -part.step * (step + 1)
            pieces: dict[int, Any] = {}
            piece = Piece(owner_after(axis, axis_size, distance), part, axis_size)
            run_on_piece(flow, chain.body, pieces, piece, read, widened)
            partial = pieces[partial_value]
            partials.append(lax.convert_element_type(partial, accumulator_dtype(partial.dtype)))
        if received:
            tied = tie(*received, *partials)
            partials = [
                lax.add(a, b) for a, b in zip(tied[: len(divided)], tied[len(divided) :], strict=True)
            ]
        accumulators = partials
    (value,) = op.outputs
    with shims.equation_scope(op.eqn, op.scope), jax.named_scope(f"overlap_{chain.kind}"):
        result = lax.concatenate(accumulators, collective.dim) if len(divided) > 1 else accumulators[0]
        result = lax.convert_element_type(result, flow.avals[value].dtype)
        return {value: result if collective.tiled else lax.squeeze(result, (collective.dim,))}


def _widened(flow: Dataflow, chain: DotReduceScatter) -> frozenset[int]:
    """The operations that may give their results in the accumulator's dtype: all, if they round nothing else."""
    ops = [flow.ops[block.op] for block in chain.body]
    floating = all(jnp.issubdtype(flow.avals[value].dtype, jnp.floating) for op in ops for value in op.outputs)
    if floating and all(op.name in _EXACT for op in ops):
        return frozenset(block.op for block in chain.body)
    return frozenset()
