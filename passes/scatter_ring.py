"""Emits the ring of a ``dot → reduce_scatter`` chain, and of a ``dot → all_to_all`` chain."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cost_model.tile import LANES
from passes import shims
from passes.block_eval import (
    Piece,
    Read,
    accumulator_dtype,
    added,
    blank,
    blank_of,
    blocks_of,
    chain_scope,
    cut_once,
    laid_out_once,
    loop,
    read_after,
    reading,
    run_on_piece,
    tie,
    tie_typed,
    write_in_a_row,
)
from passes.chains import DotReduceScatter
from passes.graph import Dataflow, Op, Operand
from passes.hops import Places, Rings
from passes.read_elsewhere import read_elsewhere
from passes.schedule import WHOLE, Across, Part, RingSchedule, across, divisions, parts, tile_rows
from passes.starts import starts_explicitly
from passes.written import made_once

_EXACT = frozenset(
    {
        *("transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type"),
        *("neg", "pvary", "sharding_constraint"),
    }
)
"""Equations that only move elements or change their type: a wider dot may come through them unrounded."""


def emit_scatter_ring(
    flow: Dataflow, chain: DotReduceScatter, schedule: RingSchedule, read: Read, rings: Rings
) -> Any:
    """Runs the chain as a ring and returns this device's shard of the result.

    The accumulator of the shard of device (i+P-1-s) mod P visits device i at step s and ends at its owner.
    While it travels, the next partial products are made: those for the other pieces of the schedule, then its
    own, to which it is added in float32 if the result is narrower. It travels in the schedule's dtype.
    """
    return _Ring(flow, chain, schedule, read, rings).run()


class _Ring:
    """The ring of one chain."""

    def __init__(
        self, flow: Dataflow, chain: DotReduceScatter, schedule: RingSchedule, read: Read, rings: Rings
    ) -> None:
        self.flow, self.chain, self.schedule, self.rings = flow, chain, schedule, rings
        self.axis_size = chain.collective.axis_size
        self.cut_across = across(flow, chain) if schedule.across else None
        if self.cut_across is None:
            self.divided = parts(schedule, divisions(flow, chain), tile_rows(flow, chain))
            self.dim = chain.collective.dim
        else:
            # Every piece has whole blocks of the scattered dim, and its part of the other one.
            self.dim = self.cut_across.result_dim
            size = flow.aval(flow.ops[chain.collective.op].inputs[0]).shape[self.dim]
            columns = parts(schedule, size, LANES)
            self.divided = tuple(
                dataclasses.replace(part, start=Fraction(0), share=Fraction(1)) for part in columns
            )
            self.columns = columns
        self.widened = widened_ops(flow, chain)
        (operand,) = flow.ops[chain.collective.op].inputs
        self.operand_aval = flow.aval(operand)
        in_flight, self.held = rings[0].in_flight, max(0, len(self.divided) - 2)
        may_start = in_flight.may_start(self.operand_aval, self.held)
        self.explicit = may_start and starts_explicitly(flow, chain)
        # For the addition to be fused into the product the sum must have arrived before it: then only the
        # products for other pieces can hide its hop.
        self.sum_first = shims.on_tpu(self.operand_aval) and len(self.divided) > 1
        self.cut = cut_once(flow, chain.body)
        laid_out = laid_out_once(flow, self.cut, read)
        self.read = reading(laid_out | made_once(flow, chain, read), read)
        self.in_flight: list[int] = []
        self.wholes: dict[int, Any] = {}
        self.read_elsewhere = tuple(o for o in read_elsewhere(flow, chain) if o not in self.cut)
        self.others: dict[int, Any] = {}
        # Where compilers place the starts, XLA:GPU makes one of dots of several steps that share their
        # weights, and the TPU compiler does not let the pieces take turns: hops have no product beside them.
        on_accelerator = shims.on_gpu(self.operand_aval) or self.sum_first
        self.ties_to_sums = on_accelerator and not self.explicit
        self.last_sum: Any = None

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """The collective's place in the user's program."""
        return chain_scope(self.flow, self.chain)

    def run(self) -> Any:
        """Runs the ring on the whole values."""
        size, unroll = self.axis_size, self.schedule.unroll
        hops = size - 1
        if self.explicit:
            before = self.rings[0].in_flight.before(self.operand_aval, self.held)
            self.read = read_after(before, self.cut, self.read)
        sent: list[Any] = [None] * len(self.divided)
        done = 0
        if unroll and hops - 1 >= 2 * unroll:
            carried = self._between(self._steps([0], sent))
            rolled = (hops - 1) // unroll
            for places in self.rings:
                places.settle()

            def iteration(number: Any, carried: list[Any]) -> list[Any]:
                first = lax.add(lax.mul(number, np.int32(unroll)), np.int32(1))
                steps = [lax.add(first, np.int32(step)) for step in range(unroll)]
                return self._between(self._steps(steps, self._resumed(carried)))

            carried = loop(0, rolled, iteration, carried)
            sent = self._resumed(carried)
            done = 1 + rolled * unroll
        sums = [total.value for total in self._steps(list(range(done, size)), sent)]
        if self.explicit:
            self.rings[0].in_flight.ended(self.held, sums)
        with self.scope():
            return self._result(sums)

    def _steps(self, steps: list[Any], sent: list[Any]) -> list[Any]:
        """Runs some steps, pieces in turn; the last sums of the last direction(s) are not sent on.

        Args:
          steps: their numbers.
          sent: per piece the sum on its way; None before the first step.

        Returns:
          Per piece the sum: on its way, or, in the last step, not sent yet.
        """
        sent = list(sent)
        self.in_flight, self.last_sum = [], None
        self.wholes = {operand: self.read(operand) for operand in self.cut}
        self.others = {operand: self.read(operand) for operand in self.read_elsewhere}
        for number, part in enumerate(self.divided):
            if isinstance(sent[number], _Unsent):
                sent[number] = self._send(sent[number].value, part)
                self.in_flight += [number] if self.explicit else []
        for step in steps:
            for number, part in enumerate(self.divided):
                self._await_in_turn(sent, number)
                piece = Piece(self.rings[part.ring], self._distance(part, step), part)
                sent[number] = self.last_sum = self._narrow(self._add(sent, number, piece), step)
                if step is steps[-1] and self._waits(number, step):
                    sent[number] = _Unsent(sent[number])
                else:
                    if isinstance(step, int):
                        self.rings[0].made[self.chain.collective.op] = sent[number]
                    sent[number] = self._send(sent[number], part, piece.distance)
                    self.in_flight = [number] if self.explicit else []
        return sent

    def _await_in_turn(self, sent: list[Any], number: int) -> None:
        """Ties a sum that is awaited next to the last one before it, where that is not sent on.

        Else, in the last step, the compiler may wait for all sums before it makes the products.
        """
        if not (number and self.explicit and self.sum_first):
            return
        before, awaited = sent[number - 1], sent[number]
        if isinstance(before, _Unsent) and not isinstance(awaited, _Unsent | _Arrived):
            sent[number], total = tie(awaited, before.value)
            sent[number - 1] = _Unsent(total)

    def _waits(self, number: int, step: Any) -> bool:
        """Whether a piece's sum of an iteration's last step is sent only in the next one.

        The hops of an iteration must be done at its end: the last piece each way would have nothing beside.
        """
        final = isinstance(step, int) and step == self.axis_size - 1
        return final or number >= self._first_waiting

    def _between(self, sent: list[Any]) -> list[Any]:
        """What goes from one iteration to the next."""
        with self.scope():
            return [value.value if isinstance(value, _Unsent) else self._received(value) for value in sent]

    def _resumed(self, carried: list[Any]) -> list[Any]:
        return [
            _Unsent(value) if number >= self._first_waiting else _Arrived(value)
            for number, value in enumerate(carried)
        ]

    @property
    def _first_waiting(self) -> int:
        return len(self.divided) - self.schedule.directions * self.schedule.rings

    def _distance(self, part: Part, step: Any) -> Any:
        if isinstance(step, int):
            return -part.step * (step + 1)
        after = lax.add(step, np.int32(1))
        return after if part.step == -1 else lax.neg(after)

    def _add(self, sent: list[Any], number: int, piece: Piece) -> Any:
        """One partial product, with the sum that has arrived for it."""
        received = None
        if self.sum_first:
            received = self._received(sent[number])
            # It is on its way no more, also where it was sent at the beginning of an iteration.
            self.in_flight = [other for other in self.in_flight if other != number]
        received, cuts = self._tie_to_operands(sent, received, piece)
        read = reading(self.others, self.read)
        if self.cut_across is not None:
            read = self._column(self.cut_across, self.columns[number], read)
        partial = partial_sum(self.flow, self.chain, piece, read, self.widened, cuts)
        partial = lax.convert_element_type(partial, accumulator_dtype(partial.dtype))
        if not self.sum_first:
            received = self._received(sent[number])
        if received is None:
            return partial
        if not self.sum_first:
            received, partial = tie(received, partial)
        return added(lax.convert_element_type(received, partial.dtype), partial)

    def _column(self, cut: Across, column: Part, read_whole: Read) -> Read:
        """Reads of the operand that is cut across only one piece's part."""
        op = self.flow.ops[self.chain.dots[0].op]

        def read(operand: Operand) -> Any:
            whole = read_whole(operand)
            if operand != op.inputs[cut.operand]:
                return whole
            size = whole.shape[cut.dim]
            start, length = int(column.start * size), int(column.share * size)
            return lax.slice_in_dim(whole, start, start + length, axis=cut.dim)

        return read

    def _tie_to_operands(self, sent: list[Any], received: Any, piece: Piece) -> tuple[Any, dict[int, Any]]:
        """Ties the start of the last hop, and what has arrived, to the operands of the next product.

        Where hops are not started explicitly, the sum that is to be sent takes the place of the start.

        Returns:
          what has arrived, and the piece's blocks of the operands.
        """
        futures = [sent[number] for number in self.in_flight]
        arrived = [] if received is None else [received]
        operands = self._blocks(piece) if self.schedule.cut == "early" else self.wholes
        before = [self.last_sum] if self.ties_to_sums and self.last_sum is not None else []
        if futures or arrived or (before and operands):
            others = self.others if futures else {}
            tied = list(
                tie_typed(self.flow, *futures, *arrived, *others.values(), *operands.values(), *before)
            )
            for number in self.in_flight:
                sent[number] = tied.pop(0)
            # The TPU compiler ends the process over a future that is tied and then not used.
            self.in_flight = []
            received = tied.pop(0) if arrived else None
            self.others |= {operand: tied.pop(0) for operand in others}
            operands = dict(zip(operands, tied, strict=False))
        if self.schedule.cut == "early":
            return received, operands
        self.wholes = operands
        return received, self._blocks(piece)

    def _blocks(self, piece: Piece) -> dict[int, Any]:
        return blocks_of(self.wholes, self.cut, piece, apart=self.schedule.cut == "apart")

    def _send(self, total: Any, part: Part, held: Any = 0) -> Any:
        with self.scope():
            places = self.rings[part.ring]
            hop = places.start_hop if self.explicit else places.hop
            return hop(total, -part.step, held)

    def _narrow(self, total: Any, step: Any) -> Any:
        """A sum as it travels; the last one does not."""
        final = isinstance(step, int) and step == self.axis_size - 1
        if final or self.schedule.wire == "float32":
            return total
        return lax.convert_element_type(total, self.operand_aval.dtype)

    def _received(self, sent: Any) -> Any:
        """A sum that was sent on, once it is here; None where there is none yet."""
        if sent is None or isinstance(sent, _Arrived):
            return None if sent is None else sent.value
        return shims.finish_ppermute(sent) if self.explicit else sent

    def _result(self, sums: list[Any]) -> Any:
        collective = self.chain.collective
        (value,) = self.flow.ops[collective.op].outputs
        dtype = self.flow.avals[value].dtype
        shards = [lax.convert_element_type(total, dtype) for total in sums]
        result = shards[0]
        if len(shards) > 1:
            shape = list(result.shape)
            shape[self.dim] = sum(shard.shape[self.dim] for shard in shards)
            result = blank_of(tuple(shape), result, differentiable=self.flow.differentiable)
            result, _ = write_in_a_row(result, shards, self.dim, 0, self.rings[0])
        return result if collective.tiled else lax.squeeze(result, (collective.dim,))


@dataclasses.dataclass(frozen=True, slots=True)
class _Unsent:
    """A sum that is still to be sent on."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Arrived:
    """A sum that an earlier iteration received."""

    value: Any


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
        block = partial_sum(flow, chain, destination, read, frozenset())
        with shims.equation_scope(op.eqn, op.scope), jax.named_scope(f"overlap_{chain.kind}"):
            if distance:
                block = places.hop(block, distance)
            source = Piece(places, distance, WHOLE)
            result = source.place(result, block, op.params["concat_axis"])
    return result


def partial_sum(
    flow: Dataflow,
    chain: DotReduceScatter,
    piece: Piece,
    read: Read,
    widened: frozenset[int],
    cuts: Mapping[int, Any] = types.MappingProxyType({}),
) -> Any:
    """One piece of the collective's operand, from whole values and the pieces ``cuts`` of some of them."""
    (operand,) = flow.ops[chain.collective.op].inputs
    assert isinstance(operand, int)
    pieces: dict[int, Any] = dict(cuts)
    run_on_piece(flow, chain.body, pieces, piece, read, widened)
    return pieces[operand]


def widened_ops(flow: Dataflow, chain: DotReduceScatter) -> frozenset[int]:
    """The operations that may give their results in the accumulator's dtype: all, if none is to round."""
    ops = [flow.ops[block.op] for block in chain.body]
    floating = all(
        jnp.issubdtype(flow.avals[value].dtype, jnp.floating) for op in ops for value in op.outputs
    )
    exact = all(op.name in _EXACT or op.name == "dot_general" for op in ops)
    if floating and exact and not _rounds_within(flow, ops):
        return frozenset(block.op for block in chain.body)
    return frozenset()


def _rounds_within(flow: Dataflow, ops: Sequence[Op]) -> bool:
    """Whether a conversion rounds, and another one follows: fake quantisation, which is meant to round.

    A result that is narrow up to the collective is rounded because the collective is to send less. So may be
    what a dot of narrow operands gives in two bytes, which compilers do not round if it is widened at once.
    """
    rounded = False
    for op in ops:
        (value,) = op.outputs
        to = flow.avals[value].dtype
        if op.name == "dot_general":
            operands = (flow.aval(operand).dtype for operand in op.inputs)
            wider = any(jnp.issubdtype(of, jnp.floating) and not _holds(to, of) for of in operands)
            rounded = rounded or wider or jnp.dtype(to).itemsize < 2
        elif op.name == "convert_element_type":
            if rounded:
                return True
            (operand,) = op.inputs
            assert isinstance(operand, int)
            rounded = not _holds(to, flow.avals[operand].dtype)
    return False


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether every number of one floating dtype is one of another."""
    of, within = jnp.finfo(narrow), jnp.finfo(wide)
    return bool(
        within.nmant >= of.nmant
        and within.maxexp >= of.maxexp
        and within.smallest_subnormal <= of.smallest_subnormal
    )
