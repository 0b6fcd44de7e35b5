"""What a gather's dots make of a piece that has arrived, and how it is put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jax import lax

from passes import shims
from passes.block_eval import (
    Joined,
    Piece,
    Read,
    accumulator_dtype,
    added,
    as_varying,
    blank,
    blocks_of,
    cut_once,
    in_rows,
    run_on_piece,
)
from passes.chains import AllGatherDot, BlockOp
from passes.cpu_queue import Queue, behind
from passes.graph import Dataflow
from passes.hops import Places

Results = dict[int, Any]
"""Of values that the rest of the program needs what there is so far; sums in the accumulator's dtype."""


def values_of(flow: Dataflow, chain: AllGatherDot) -> tuple[int, ...]:
    """The results of a chain's dots."""
    return tuple(flow.ops[dot.op].outputs[0] for dot in chain.dots)


def rounded(flow: Dataflow, chain: AllGatherDot, results: Results) -> Results:
    """The results, those of dots in their own dtype: sums were in the accumulator's."""
    values = values_of(flow, chain)
    return {
        value: lax.convert_element_type(result, flow.avals[value].dtype) if value in values else result
        for value, result in results.items()
    }


def take_in(
    flow: Dataflow,
    chain: AllGatherDot,
    at_hand: dict[int, Any],
    piece: Piece | Joined,
    read: Read,
    results: Results,
) -> Results:
    """Runs everything that an arrived piece is for, and adds it to the results.

    Args:
      flow: the dataflow graph.
      chain: the chain.
      at_hand: values of which the piece is there, that which travels among them.
      piece: which piece.
      read: gives whole values.
      results: what there is so far, by value; sums in the accumulator's dtype.
    """
    pieces = dict(at_hand)
    run_on_piece(flow, chain.after, pieces, piece, read)
    hand_out(flow, chain, piece, pieces, results)
    run_on_piece(flow, chain.dots, pieces, piece, read, widened=frozenset(dot.op for dot in chain.summed))
    run_on_piece(flow, chain.epilogue, pieces, piece, read)
    put_together(flow, chain, piece, pieces, results)
    return results


def cut_for(flow: Dataflow, chain: AllGatherDot, dots: Iterable[BlockOp]) -> dict[int, int]:
    """The operands of dots, beside what travels, of which every piece needs its block, and the dim."""
    once = cut_once(flow, (*chain.after, *chain.dots, *chain.epilogue))
    operands = {operand for dot in dots for operand in flow.ops[dot.op].inputs if operand != chain.wire}
    return {operand: dim for operand, dim in once.items() if operand in operands}


def placed(flow: Dataflow, chain: AllGatherDot) -> dict[int, int]:
    """What dots and epilogue make that is placed in a whole, and along which dim."""
    return {
        value: block.dims.result_dim
        for block in (*chain.dots, *chain.epilogue)
        for value in flow.ops[block.op].outputs
        if block.dims.result_dim is not None and value not in chain.unplaced
    }


def hand_out(
    flow: Dataflow, chain: AllGatherDot, piece: Piece | Joined, made: Mapping[int, Any], results: Results
) -> None:
    """Places what of a piece no dot makes."""
    for value in chain.handed_out:
        # What a dot makes it may write where it belongs; no dot makes these.
        _place(flow, value, chain.blocked[value], made[value], piece, results, apart=True)


def put_together(
    flow: Dataflow, chain: AllGatherDot, piece: Piece | Joined, made: Mapping[int, Any], results: Results
) -> None:
    """Places or adds up what the dots and the epilogue have made of a piece."""
    for value, dim in placed(flow, chain).items():
        _place(flow, value, dim, made[value], piece, results)
    for dot in chain.summed:
        (value,) = flow.ops[dot.op].outputs
        partial = lax.convert_element_type(made[value], accumulator_dtype(made[value].dtype))
        results[value] = partial if value not in results else added(results[value], partial)


def _place(
    flow: Dataflow,
    value: int,
    dim: int,
    part: Any,
    piece: Piece | Joined,
    results: Results,
    *,
    apart: bool = False,
) -> None:
    whole = results[value] if value in results else blank(flow, value)
    results[value] = in_rows(flow, piece.place(whole, part, dim, apart=apart), dim=dim)


class Late:
    """What a gather's ring makes of its pieces, and puts together at the end.

    Args:
      flow: the dataflow graph.
      chain: the chain.
      places: where the devices stand.
      read: gives whole values.
    """

    def __init__(self, flow: Dataflow, chain: AllGatherDot, places: Places, read: Read) -> None:
        self._flow, self._chain, self._places, self._read = flow, chain, places, read
        self._queue = Queue(places)
        self._cut = cut_for(flow, chain, chain.dots)
        self._made: list[tuple[Piece, dict[int, Any]]] = []

    def copy(self, piece: Any, *earlier: Any, lane: int) -> Any:
        """See `Queue.copy`."""
        return self._queue.copy(piece, *earlier, lane=lane)

    def take_in(self, shard: Any, piece: Piece) -> None:
        """Runs everything that an arrived piece is for, each dot when the one before it is done.

        Two dots that were ready at once would take the threads that the hop beside them needs.
        """
        flow, chain = self._flow, self._chain
        made = {
            chain.wire: lax.convert_element_type(shard, flow.avals[chain.wire].dtype),
            **self._blocks(piece),
        }
        run_on_piece(flow, chain.after, made, piece, self._read)
        widened = frozenset(dot.op for dot in chain.summed)
        last: Any = None
        for dot in chain.dots:
            op = flow.ops[dot.op]
            at_hand = made if last is None else {**made, **self._behind(last, made, op.inputs)}
            run_on_piece(flow, (dot,), at_hand, piece, self._read, widened)
            (value,) = op.outputs
            last = made[value] = at_hand[value]
        run_on_piece(flow, chain.epilogue, made, piece, self._read)
        self._made.append((piece, made))

    def results(self, arrived: list[Any]) -> Results:
        """The results of all pieces, placed or added up when the last ones have arrived.

        Till then none of their memory is free; but the wholes are there before, filled beside a hop.
        """
        flow, chain = self._flow, self._chain
        later = self._queue.released(self._places.nothing_of(*arrived))
        results = {value: self._blank(value) for value in (*chain.handed_out, *placed(flow, chain))}
        sums = [flow.ops[dot.op].outputs[0] for dot in chain.summed]
        for number, (piece, made) in enumerate(self._made):
            first = {value: behind(made[value], later) for value in sums if not number}
            then = dataclasses.replace(piece, later=later)
            hand_out(flow, chain, then, made, results)
            put_together(flow, chain, then, {**made, **first}, results)
        return results

    def _blocks(self, piece: Piece) -> dict[int, Any]:
        """The blocks that dots take of other operands, in memory that stays theirs."""
        wholes = {operand: self._read(operand) for operand in self._cut}
        nothing = self._places.nothing
        cut = blocks_of(wholes, self._cut, piece, apart=False)
        blocks = {operand: behind(block, nothing) for operand, block in cut.items()}
        self._queue.hold(*blocks.values())
        return blocks

    def _behind(self, last: Any, made: dict[int, Any], operands: tuple[Any, ...]) -> dict[int, Any]:
        """The operands that are at hand, once a dot is done."""
        nothing = self._places.nothing_of(last)
        waiting = {o: behind(made[o], nothing) for o in operands if isinstance(o, int) and o in made}
        self._queue.hold(*waiting.values())
        return waiting

    def _blank(self, value: int) -> Any:
        """An array for a value, filled once its own piece is made and the first shard has arrived."""
        aval = self._flow.avals[value]
        (_, own), (_, first) = self._made[0], self._made[len(self._made) // self._places.axis_size]
        zero = self._places.nothing_of(own[value], first[self._chain.wire])
        whole = lax.broadcast(lax.convert_element_type(zero, aval.dtype), aval.shape)
        return as_varying(whole, shims.varying_axes(aval))
