"""Emits a chain whose pieces go by all_reduces, one after the other, each beside the dots of another piece.

For CPU devices, whose collectives go over a network by gloo (docs/network.md). Between two devices a permute
sends one way after the other there, by chance, and an all_reduce both ways at once; and what becomes ready
along with a permute waits for it, while an all_reduce lets it pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from fractions import Fraction
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from passes.block_eval import Piece, Read, accumulator_dtype, chain_scope, run_on_piece
from passes.chains import AllGatherDot, Chain, DotPsum, DotReduceScatter
from passes.gather_ring import cut, own_block, rounded, take_in
from passes.graph import Dataflow
from passes.hops import Places
from passes.scatter_ring import partial_sum, widened_ops
from passes.schedule import WHOLE, Across, Part, RingSchedule, across, divisions

ELEMENT_BYTES: Final = 4
"""Width of the elements whose bits are sent: those of the words that are added up."""


def goes_by_all_reduces(flow: Dataflow, chain: Chain) -> bool:
    """Whether the chain's pieces can: a psum's, and what each of two devices has for the other."""
    collective = chain.collective
    if isinstance(chain, DotPsum):
        value = flow.ops[collective.op].outputs[0]
        return chain.gather is None and flow.avals[value].dtype.itemsize == ELEMENT_BYTES
    sizes = [length for _, length in collective.mesh_sizes]
    between_two = collective.axis_size == 2 and collective.groups is None and int(np.prod(sizes)) == 2
    value = chain.wire if isinstance(chain, AllGatherDot) else flow.ops[collective.op].outputs[0]
    return between_two and flow.avals[value].dtype.itemsize == ELEMENT_BYTES


def shares(chain: Chain, pieces: int) -> tuple[Fraction, ...]:
    """How much of what travels each piece is.

    What hides a gather's piece is the one before it, and what a scatter's hides the one after it, so those
    get smaller and these larger, by half; a psum's first and last are half as large as the others: the one
    is made before anything travels, and nothing hides the other.
    """
    if isinstance(chain, AllGatherDot):
        weights = [2**number for number in reversed(range(pieces))]
    elif isinstance(chain, DotReduceScatter):
        weights = [2**number for number in range(pieces)]
    else:
        weights = [1 if number in (0, pieces - 1) else 2 for number in range(pieces)]
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


def pieces_of(chain: Chain, schedule: RingSchedule, unit: int) -> tuple[Part, ...]:
    """The pieces of a block (of a psum: of the whole) that can be cut into so many equal parts.

    Raises:
      ValueError: there are fewer parts than pieces.
    """
    if schedule.chains > unit:
        raise ValueError(f"{unit} part(s) cannot be cut into {schedule.chains} pieces")
    ends = itertools.accumulate(shares(chain, schedule.chains))
    bounds = [0]
    for left, end in zip(reversed(range(schedule.chains)), ends, strict=True):
        bounds.append(min(max(round(end * unit), bounds[-1] + 1), unit - left))
    return tuple(
        Part(Fraction(start, unit), Fraction(end - start, unit), 1)
        for start, end in itertools.pairwise(bounds)
    )


def emit_all_reduces(
    flow: Dataflow, chain: Chain, schedule: RingSchedule, read: Read, places: Places
) -> dict[int, Any]:
    """Runs the chain and returns the values that the rest of the program needs, by number.

    XLA:CPU drops barriers before it orders a program, and makes one all_reduce of several that it may. So
    data alone keeps a piece behind the one before.
    """
    turns = _Turns(flow, chain, places)
    if isinstance(chain, AllGatherDot):
        return _gather(flow, chain, schedule, read, turns)
    if isinstance(chain, DotPsum):
        return _psum(flow, chain, schedule, read, turns)
    return _scatter(flow, chain, schedule, read, turns)


class _Turns:
    """Sends values of one chain, each after the one before it has arrived."""

    def __init__(self, flow: Dataflow, chain: Chain, places: Places) -> None:
        self.places = places
        self._flow, self._chain = flow, chain
        self._arrived: Any = None

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """The collective's place in the user's program."""
        return chain_scope(self._flow, self._chain)

    def swap(self, value: Any, *, at_once: bool = True) -> Any:
        """What the other device sends.

        Args:
          value: what this one does.
          at_once: whether the first value may go as soon as it is there. Else it takes one operation more,
            and what is ready along with it begins before.
        """
        with self.scope():
            self._arrived = _swapped(self._behind(value, at_once=at_once), self._names)
        return self._arrived

    def sum(self, value: Any) -> Any:
        """The sum over the devices, as the psum itself has it."""
        op = self._flow.ops[self._chain.collective.op]
        primitive = op.eqn.primitive
        with self.scope():
            behind = self._behind(value, at_once=False)
            results = primitive.bind(behind, **primitive.get_bind_params(op.params))
            self._arrived = results[0] if primitive.multiple_results else results
        return self._arrived

    def nothing_of(self, value: Any) -> Any:
        """See `Places.nothing_of`; None of no value."""
        if value is None:
            return None
        with self.scope():
            return self.places.nothing_of(value)

    def _behind(self, value: Any, *, at_once: bool) -> Any:
        if self._arrived is None and at_once:
            return value
        return _behind(value, self.places.nothing_of(value if self._arrived is None else self._arrived))

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._chain.collective.mesh_sizes)


def _gather(
    flow: Dataflow, chain: AllGatherDot, schedule: RingSchedule, read: Read, turns: _Turns
) -> dict[int, Any]:
    """This device's own shard is multiplied whole, then the other's, piece by piece."""
    collective = chain.collective
    with turns.scope():
        own = own_block(collective, read(flow.ops[collective.op].inputs[0]))
    here = Piece(turns.places, 0, WHOLE)
    local = {flow.ops[collective.op].outputs[0]: own}
    run_on_piece(flow, chain.before, local, here, read)
    wire = local[chain.wire]
    strips = across(flow, chain) if schedule.across else None
    dim = chain.blocked[chain.wire] if strips is None else strips.dim
    unit = divisions(flow, chain) if strips is None else wire.shape[dim]
    arrived = []
    parts = pieces_of(chain, schedule, unit)
    for part in parts:
        # The own dot of sums reads a block that is cut out first; begun before, it would wait with the rest.
        arrived.append(turns.swap(cut(wire, dim, part), at_once=strips is None))
    results = take_in(flow, chain, {chain.wire: wire}, here, read, {})
    if strips is None:
        for part, piece in zip(parts, arrived, strict=True):
            there = Piece(turns.places, 1, part)
            results = take_in(flow, chain, {chain.wire: piece}, there, read, results)
    else:
        results = _with_strips(flow, chain, strips, arrived, results, turns.places, read)
    return rounded(flow, chain, results)


def _with_strips(
    flow: Dataflow,
    chain: AllGatherDot,
    along: Across,
    strips: list[Any],
    results: dict[int, Any],
    places: Places,
    read: Read,
) -> dict[int, Any]:
    """The sums of the chain's only dot, with the products of the other device's strips added to theirs."""
    (dot,) = chain.dots
    (value,) = flow.ops[dot.op].outputs
    start, sums = 0, []
    for strip in strips:
        made = {chain.wire: strip}
        run_on_piece(flow, chain.dots, made, Piece(places, 1, WHOLE), read, frozenset({dot.op}))
        partial = lax.convert_element_type(made[value], results[value].dtype)
        end = start + partial.shape[along.result_dim]
        sums.append(lax.add(lax.slice_in_dim(results[value], start, end, axis=along.result_dim), partial))
        start = end
    return {**results, value: lax.concatenate(sums, along.result_dim)}


def _scatter(
    flow: Dataflow, chain: DotReduceScatter, schedule: RingSchedule, read: Read, turns: _Turns
) -> dict[int, Any]:
    """The other device's block is made piece by piece, then the own one, to which what arrives is added."""
    collective = chain.collective
    (value,) = flow.ops[collective.op].outputs
    widened = widened_ops(flow, chain)
    received, last = [], None
    for part in pieces_of(chain, schedule, divisions(flow, chain)):
        last = _sum_of(flow, chain, Piece(turns.places, 1, part, turns.nothing_of(last)), read, widened)
        received.append(turns.swap(last))
    own = _sum_of(flow, chain, Piece(turns.places, 0, WHOLE, turns.nothing_of(last)), read, widened)
    with turns.scope():
        total = lax.add(own, lax.concatenate(received, collective.dim) if received[1:] else received[0])
        total = lax.convert_element_type(total, flow.avals[value].dtype)
        return {value: total if collective.tiled else lax.squeeze(total, (collective.dim,))}


def _psum(
    flow: Dataflow, chain: DotPsum, schedule: RingSchedule, read: Read, turns: _Turns
) -> dict[int, Any]:
    """The sum is made and added up piece by piece."""
    collective = chain.collective
    op = flow.ops[collective.op]
    widened = widened_ops(flow, chain.scatter)
    totals, last = [], None
    unit = divisions(flow, chain) * collective.axis_size
    for part in pieces_of(chain, schedule, unit):
        stretch = _Stretch(turns.places, 0, part, turns.nothing_of(last))
        last = _sum_of(flow, chain.scatter, stretch, read, widened)
        with turns.scope():
            last = lax.convert_element_type(last, flow.aval(op.inputs[0]).dtype)
        totals.append(turns.sum(last))
    with turns.scope():
        # All at the end: to place each where it belongs is work that the next product would wait behind.
        return {op.outputs[0]: lax.concatenate(totals, collective.dim) if totals[1:] else totals[0]}


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch(Piece):
    """A piece of a whole dim; ``part`` is its part of the whole."""

    @property
    def share(self) -> Fraction:
        """How much of the whole dim the piece is."""
        return self.part.share

    def offset(self, size: int) -> Any:
        """Where the piece begins in a dim of ``size`` elements."""
        return np.int32(int(self.part.start * size))


def _sum_of(
    flow: Dataflow, chain: DotReduceScatter, piece: Piece, read: Read, widened: frozenset[int]
) -> Any:
    """A piece of the partial sums, in the accumulator's dtype."""
    partial = partial_sum(flow, chain, piece, read, widened)
    return lax.convert_element_type(partial, accumulator_dtype(partial.dtype))


def _behind(value: Any, nothing: Any) -> Any:
    """The value, to the bit, once the int32 0 ``nothing`` is known."""

    @jax.custom_jvp
    def wait(value: Any, nothing: Any) -> Any:
        bits = lax.bitcast_convert_type(value, np.uint32)
        bits = jnp.bitwise_xor(bits, lax.convert_element_type(nothing, np.uint32))
        return lax.bitcast_convert_type(bits, value.dtype)

    @wait.defjvp
    def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        return wait(*primals), tangents[0]

    return wait(value, nothing)


def _swapped(value: Any, names: tuple[str, ...]) -> Any:
    """The other device's value, to the bit: sums of bits wrap around."""

    @jax.custom_jvp
    def swap(value: Any) -> Any:
        bits = lax.bitcast_convert_type(value, np.uint32)
        return lax.bitcast_convert_type(jnp.subtract(lax.psum(bits, names), bits), value.dtype)

    @swap.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        return swap(*primals), lax.ppermute(*tangents, names, [(0, 1), (1, 0)])

    return swap(value)
