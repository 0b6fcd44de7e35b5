"""What a gather's dots make of a piece that has arrived, and how it is put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import lax

from passes.block_eval import Joined, Piece, Read, accumulator_dtype, blank, run_on_piece
from passes.chains import AllGatherDot
from passes.graph import Dataflow

Results = dict[int, Any]
"""Of values that the rest of the program needs what there is so far; sums in the accumulator's dtype."""


def rounded(flow: Dataflow, chain: AllGatherDot, results: Results) -> Results:
    """The results, those of dots in their own dtype: sums were in the accumulator's."""
    values = {flow.ops[dot.op].outputs[0] for dot in chain.dots}
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
    run_on_piece(flow, chain.dots, pieces, piece, read, widened=adding_up(chain))
    run_on_piece(flow, chain.epilogue, pieces, piece, read)
    put_together(flow, chain, piece, pieces, results)
    return results


def adding_up(chain: AllGatherDot) -> frozenset[int]:
    """The dots whose results of all pieces are added up."""
    return frozenset(dot.op for dot in chain.dots if dot.dims.result_dim is None)


def placed(flow: Dataflow, chain: AllGatherDot) -> dict[int, int]:
    """The values whose pieces are placed in a whole, and along which dim."""
    made = {
        value: block.dims.result_dim
        for block in (*chain.dots, *chain.epilogue)
        for value in flow.ops[block.op].outputs
        if block.dims.result_dim is not None and value not in chain.unplaced
    }
    return {**{value: chain.blocked[value] for value in chain.handed_out}, **made}


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
        if value not in chain.handed_out:
            _place(flow, value, dim, made[value], piece, results)
    for dot in chain.dots:
        (value,) = flow.ops[dot.op].outputs
        if dot.dims.result_dim is None:
            partial = lax.convert_element_type(made[value], accumulator_dtype(made[value].dtype))
            results[value] = partial if value not in results else lax.add(results[value], partial)


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
    results[value] = piece.place(whole, part, dim, apart=apart)
