"""Emits a ``dot → psum`` chain in chunks: one is gathered while the sums of the next are scattered."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax

from passes import shims
from passes.block_eval import (
    Piece,
    Read,
    accumulator_dtype,
    added,
    as_varying,
    blank_of,
    blocks_of,
    chain_scope,
    cut_once,
    in_rows,
    loop,
    read_after,
    reading,
    tie,
    write,
)
from passes.chains import DotPsum
from passes.graph import Dataflow
from passes.hops import Rings
from passes.read_elsewhere import read_elsewhere
from passes.scatter_ring import partial_sum, widened_ops
from passes.schedule import Across, Part, RingSchedule, across, divisions, parts, tile_rows
from passes.starts import starts_explicitly
from passes.written import made_once


def emit_psum_pipeline(
    flow: Dataflow, chain: DotPsum, schedule: RingSchedule, read: Read, rings: Rings
) -> Any:
    """Runs the chain in as many chunks as the schedule has columns; returns the psum's result.

    Every block of the scattered dim is cut into chunks; across, the dot's other free dim is, which keeps the
    partial matmuls as tall as those of a plain ring. The scatter ring of a chunk runs as
    ``emit_scatter_ring`` has it, with one accumulator per ring and direction. Beside it the sums of the chunk
    before travel round on the same rings, and are placed where their owners' blocks are, each while the next
    is on its way. So the matmuls hide both halves of the psum, but for the last chunk's gather. The chunks
    are the iterations of a loop: the program is no longer for more of them.

    Raises:
      ValueError: the blocks cannot be cut into so many equal chunks, or these into the schedule's pieces.
    """
    return _Pipeline(flow, chain, schedule, read, rings).run()


@dataclasses.dataclass(frozen=True, slots=True)
class _ChunkPiece(Piece):
    """A piece of a chunk of a block; ``part`` is its part of the chunk.

    Attributes:
      number: of the chunk; may be traced.
      chunks: how many chunks a block has.
    """

    number: Any = 0
    chunks: int = 1

    @property
    def share(self) -> Any:
        """How much of the whole dim the piece is."""
        return self.part.share / (self.places.axis_size * self.chunks)

    def offset(self, size: int) -> Any:
        """Where the piece begins in a dim of ``size`` elements; traced."""
        block = size // self.places.axis_size
        chunk = block // self.chunks
        start = int(self.part.start * chunk)
        if isinstance(self.number, int):
            return self.places.offset(self.distance, block, self.number * chunk + start)
        within = lax.add(lax.mul(self.number, np.int32(chunk)), np.int32(start))
        return lax.add(self.places.offset(self.distance, block, 0), within)


class _Pipeline:
    """The pipeline of one chain."""

    def __init__(
        self, flow: Dataflow, chain: DotPsum, schedule: RingSchedule, read: Read, rings: Rings
    ) -> None:
        self.flow, self.chain, self.schedule, self.rings = flow, chain, schedule, rings
        self.read = reading(made_once(flow, chain.scatter, read), read)
        self.collective = chain.collective
        self.chunks = schedule.columns
        self.cut_across = across(flow, chain.scatter) if schedule.across else None
        self.chunks_of_block = self.chunks if self.cut_across is None else 1
        unit, left = divmod(divisions(flow, chain), self.chunks_of_block)
        if self.cut_across is not None:
            left = _other_size(flow, chain, self.cut_across) % self.chunks
        if left:
            raise ValueError(f"{schedule}: the dim that it cuts does not make so many equal chunks")
        self.divided = parts(schedule, unit, tile_rows(flow, chain))
        op = flow.ops[self.collective.op]
        self.operand_aval = flow.aval(op.inputs[0])
        self.aval = flow.avals[op.outputs[0]]
        # Beside the hops of sums there are as many of the gather.
        in_flight, self.held = rings[0].in_flight, len(self.divided)
        may_start = in_flight.may_start(self.operand_aval, self.held)
        self.explicit = may_start and starts_explicitly(flow, chain)
        # As in a scatter ring: an addition that is part of its product needs the sum before it.
        self.sum_first = shims.on_tpu(self.operand_aval) and len(self.divided) > 1
        self.widened = widened_ops(flow, chain.scatter)
        self.cut = cut_once(flow, chain.scatter.body)
        self.read_elsewhere = tuple(o for o in read_elsewhere(flow, chain.scatter) if o not in self.cut)

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """The collective's place in the user's program."""
        return chain_scope(self.flow, self.chain)

    def run(self) -> Any:
        """Runs the first chunk's scatter, then all others' beside a gather, then the last chunk's gather."""
        for places in self.rings:
            places.settle()
        in_flight = self.rings[0].in_flight
        if self.explicit:
            before = in_flight.before(self.operand_aval, self.held)
            self.read = read_after(before, self.cut, self.read)
        shards, _ = self._chunk(0, None, None)
        with self.scope():
            result = blank_of(self.aval.shape, self.aval, differentiable=self.flow.differentiable)
            result = as_varying(result, shims.varying_axes(jax.typeof(shards[0])))

        def iteration(number: Any, carried: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
            return self._chunk(number, *carried)

        shards, result = loop(1, self.chunks, iteration, (shards, result))
        with self.scope():
            last = self.collective.axis_size - 1
            for step in range(last):
                hops, result, _ = self._passed_on(shards, result, [], step, self.chunks - 1)
                shards = self._finished(hops)
            result = self._placed(result, shards, last, self.chunks - 1)
            if self.explicit:
                in_flight.ended(self.held, [result])
            if self.flow.ops[self.collective.op].name == "psum_invariant":
                result = shims.as_invarying(result, self.collective.axes)
        return result

    def _chunk(self, number: Any, gathered: list[Any] | None, result: Any) -> tuple[list[Any], Any]:
        """The scatter of a chunk, and beside it the gather of the one before, if there is one.

        Args:
          number: of the chunk.
          gathered: per piece this device's shard of the chunk before.
          result: what its shards are placed in.

        Returns:
          Per piece this device's shard of the chunk's sums; and the result.
        """
        last = self.collective.axis_size - 1
        read = self._reads(number)
        wholes = {operand: read(operand) for operand in self.cut}
        others = {operand: read(operand) for operand in self.read_elsewhere}

        def cut(piece: Piece) -> dict[int, Any]:
            return blocks_of(wholes, self.cut, piece, apart=self.schedule.cut == "apart")

        before = number - 1 if isinstance(number, int) else lax.sub(number, np.int32(1))
        sent: list[Any] = [None] * len(self.divided)
        in_flight: list[int] = []  # of the sums; only hops that are started explicitly can be tied
        for step in range(last + 1):
            hops: list[Any] = []
            if gathered is not None and step < last:
                started = [sent[other] for other in in_flight]
                with self.scope():
                    hops, result, started = self._passed_on(gathered, result, started, step, before)
                for other, hop in zip(in_flight, started, strict=True):
                    sent[other] = hop
            for index, part in enumerate(self.divided):
                piece = self._piece(part, -part.step * (step + 1), number)
                received = None
                if sent[index] is not None and self.sum_first:
                    (received,) = self._finished([sent[index]])
                    sent[index] = None
                operands = cut(piece) if self.schedule.cut == "early" else wholes
                # Whatever was started last is tied to the operands of the product that is to run beside it,
                # and so is what is placed: nothing else waits for it, and it would be left to the end.
                started = [sent[other] for other in in_flight]
                beside = [*hops, result] if index == 0 and hops and self.explicit else []
                arrived = [] if received is None else [received]
                if started or beside or arrived:
                    tied = list(tie(*started, *beside, *arrived, *others.values(), *operands.values()))
                    for other in in_flight:
                        sent[other] = tied.pop(0)
                    if beside:
                        *hops, result = (tied.pop(0) for _ in beside)
                    received = tied.pop(0) if arrived else None
                    others = {operand: tied.pop(0) for operand in others}
                    operands = dict(zip(operands, tied, strict=True))
                if self.schedule.cut != "early":
                    wholes = operands
                cuts = operands if self.schedule.cut == "early" else cut(piece)
                in_flight = []
                total = self._added(sent, index, piece, received, cuts, reading(others, read))
                if hops and self.explicit and index == len(self.divided) - 1:
                    *hops, total = tie(*hops, total)
                with self.scope():
                    if step == last:
                        sent[index] = lax.convert_element_type(total, self.aval.dtype)
                    else:
                        sent[index] = self._start(self._narrow(total), -part.step, part, piece.distance)
                        in_flight = [index] if self.explicit else []
            if hops:
                with self.scope():
                    gathered = self._finished(hops)
                    if not self.explicit:
                        # Else nothing keeps these hops beside this step's products.
                        tied = list(tie(*gathered, *sent))
                        gathered, sent = tied[: len(gathered)], tied[len(gathered) :]
        if gathered is not None:
            with self.scope():
                result = self._placed(result, gathered, last, before)
        return sent, result

    def _passed_on(
        self, shards: list[Any], result: Any, started: list[Any], step: int, number: Any
    ) -> tuple[list[Any], Any, list[Any]]:
        """Sends shards on along their rings, and places them beside that.

        Placed by then are those that came before: a compiler that may leave them to the end does so, and
        holds them all until then.

        Args:
          shards: per piece, what has come ``step`` places along.
          result: what they are placed in.
          started: hops of sums that are to be on their way first, for their next products wait for them.
          step: how far they have come.
          number: of their chunk.

        Returns:
          Their hops, the result, and the hops of sums.
        """
        *tied, result = tie(*started, *shards, result)
        started, shards = tied[: len(started)], tied[len(started) :]
        hops = self._gather_hops(shards, step)
        if self.explicit:
            *hops, result = tie(*hops, result)
        return hops, self._placed(result, shards, step, number), started

    def _reads(self, number: Any) -> Read:
        """Reads of the operand that is cut across only the columns of a chunk."""
        cut = self.cut_across
        if cut is None:
            return self.read
        (dot,) = self.chain.scatter.dots
        sliced = self.flow.ops[dot.op].inputs[cut.operand]
        whole = self.read(sliced)
        width = whole.shape[cut.dim] // self.chunks
        column = lax.dynamic_slice_in_dim(
            whole, self._start_of(number, width), width, cut.dim, allow_negative_indices=False
        )
        return reading({sliced: column}, self.read)

    @staticmethod
    def _start_of(number: Any, size: int) -> Any:
        """Where a chunk of ``size`` elements begins."""
        return number * size if isinstance(number, int) else lax.mul(number, np.int32(size))

    def _added(
        self,
        sent: list[Any],
        index: int,
        piece: Piece,
        received: Any,
        cuts: dict[int, Any],
        read: Read,
    ) -> Any:
        """One partial product, added to the sum that has arrived for it, if any."""
        partial = partial_sum(self.flow, self.chain.scatter, piece, read, self.widened, cuts)
        partial = lax.convert_element_type(partial, accumulator_dtype(partial.dtype))
        if not self.sum_first and sent[index] is not None:
            (received,) = self._finished([sent[index]])
            received, partial = tie(received, partial)
        if received is None:
            return partial
        return added(lax.convert_element_type(received, partial.dtype), partial)

    def _piece(self, part: Part, distance: int, number: Any) -> _ChunkPiece:
        within = number if self.cut_across is None else 0
        return _ChunkPiece(self.rings[part.ring], distance, part, number=within, chunks=self.chunks_of_block)

    def _placed(self, result: Any, shards: list[Any], step: int, number: Any) -> Any:
        """The result with the shards written into it that have come ``step`` places along their rings."""
        for part, shard in zip(self.divided, shards, strict=True):
            piece, dim = self._piece(part, part.step * step, number), self.collective.dim
            starts = {dim: piece.offset(result.shape[dim])}
            if self.cut_across is not None:
                other = self.cut_across.result_dim
                starts[other] = lax.convert_element_type(self._start_of(number, shard.shape[other]), np.int32)
            result = write(result, shard, starts, piece.places)
        return in_rows(self.flow, result)

    def _gather_hops(self, shards: list[Any], step: int) -> list[Any]:
        return [
            self._start(shard, part.step, part, part.step * step)
            for part, shard in zip(self.divided, shards, strict=True)
        ]

    def _start(self, value: Any, distance: int, part: Part, held: int) -> Any:
        places = self.rings[part.ring]
        return (places.start_hop if self.explicit else places.hop)(value, distance, held)

    def _finished(self, hops: list[Any]) -> list[Any]:
        return [shims.finish_ppermute(hop) for hop in hops] if self.explicit else hops

    def _narrow(self, total: Any) -> Any:
        """A sum as it travels."""
        if self.schedule.wire == "float32":
            return total
        return lax.convert_element_type(total, self.operand_aval.dtype)


def _other_size(flow: Dataflow, chain: DotPsum, cut: Across) -> int:
    """Elements of the dim that is cut across."""
    return int(flow.aval(flow.ops[chain.collective.op].inputs[0]).shape[cut.result_dim])
