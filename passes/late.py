"""Gather rings for CPU devices: dots that run beside hops, results that are placed when all has arrived.

What must not be free or made before, and why, says `cpu_queue`.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from passes import shims
from passes.arrivals import Results, adding_up, hand_out, placed, put_together
from passes.block_eval import Piece, Read, as_varying, blocks_of, cut_once, run_on_piece
from passes.chains import AllGatherDot
from passes.cpu_queue import Queue, behind
from passes.graph import Dataflow
from passes.hops import Places


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
        once = cut_once(flow, (*chain.after, *chain.dots, *chain.epilogue))
        operands = {operand for dot in chain.dots for operand in flow.ops[dot.op].inputs}
        self._cut = {operand: dim for operand, dim in once.items() if operand in operands - {chain.wire}}
        self._made: list[tuple[Piece, dict[int, Any]]] = []

    def copy(self, piece: Any, *, lane: int) -> Any:
        """See `Queue.copy`."""
        return self._queue.copy(piece, lane=lane)

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
        last: Any = None
        for dot in chain.dots:
            op = flow.ops[dot.op]
            at_hand = made if last is None else {**made, **self._behind(last, made, op.inputs)}
            run_on_piece(flow, (dot,), at_hand, piece, self._read, widened=adding_up(chain))
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
        results = {value: self._blank(value) for value in placed(flow, chain)}
        sums = {flow.ops[op].outputs[0] for op in adding_up(chain)}
        for number, (piece, made) in enumerate(self._made):
            first = {value: behind(made[value], later) for value in sums if not number}
            then = Piece(piece.places, piece.distance, piece.part, later)
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
