"""Pieces of one chain that go one after the other: how it is cut into them, and what keeps them in turn."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from passes import shims
from passes.block_eval import chain_scope, tie_typed
from passes.chains import AllGatherDot, Chain, DotReduceScatter
from passes.cpu_queue import behind
from passes.graph import Dataflow
from passes.hops import Places
from passes.schedule import Part, RingSchedule

ELEMENT_BYTES: Final = 4
"""Width of the elements whose bits are added up: that of the words that they become."""


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


class Turns:
    """Sends values of one chain, each after the one before it has arrived.

    A TPU's compiler keeps them so where a barrier says it, and puts the dots beside them. XLA:CPU drops
    barriers before it orders a program, and makes one all_reduce of several that it may: there data alone
    keeps a piece behind the one before, of elements as wide as the words that their bits become.

    Attributes:
      places: where the devices stand.
      arrived: what each value has become, in turn.
    """

    def __init__(self, flow: Dataflow, chain: Chain, places: Places) -> None:
        self.places = places
        self.arrived: list[Any] = []
        self._flow, self._chain = flow, chain
        op = flow.ops[chain.collective.op]
        self._params = dict(op.params)
        if isinstance(chain, AllGatherDot) and "all_gather_dimension" in self._params:
            # What travels may be a transpose of what the collective itself gathers.
            self._params["all_gather_dimension"] = chain.blocked[chain.wire]
        aval = flow.avals[op.outputs[0]]
        self._barriers = shims.device_kind(aval) != "cpu" or aval.dtype.itemsize != ELEMENT_BYTES

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """The collective's place in the user's program."""
        return chain_scope(self._flow, self._chain)

    def swap(self, value: Any, *, at_once: bool = True) -> Any:
        """What the other of two devices sends.

        Args:
          value: what this one does.
          at_once: whether the first value may go as soon as it is there. Else it takes one operation more,
            and what is ready along with it begins before.
        """
        with self.scope():
            if self.arrived or not at_once:
                value = self._next(value)
            self.arrived.append(_swapped(value, self._names))
        return self.arrived[-1]

    def send(self, value: Any, *, after: Sequence[Any] = ()) -> None:
        """Applies the chain's collective to a value.

        Args:
          value: what is sent.
          after: what must be there before it, where barriers hold. These themselves are not held up.
        """
        op = self._flow.ops[self._chain.collective.op]
        with self.scope():
            if not self._barriers:
                value = self._next(value)
            elif self.arrived:
                value, self.arrived[-1], *_ = tie_typed(self._flow, value, self.arrived[-1], *after)
            self.arrived.append(op.bind([value], self._params)[0])

    def hold(self, *values: Any, sent_since: int = 0) -> tuple[Any, ...]:
        """The values, for which the one that arrived last is made to wait, where barriers hold.

        Args:
          values: some of the program's.
          sent_since: how many that were sent after it need not have arrived; if all are, nothing waits.
        """
        if not self._barriers or len(self.arrived) <= sent_since:
            return values
        number = -1 - sent_since
        self.arrived[number], *held = tie_typed(self._flow, self.arrived[number], *values)
        return tuple(held)

    def nothing_of(self, value: Any) -> Any:
        """See `Places.nothing_of`; None of no value, and where barriers hold."""
        if value is None or self._barriers:
            return None
        with self.scope():
            return self.places.nothing_of(value)

    def _next(self, value: Any) -> Any:
        """The value behind what arrived last, or one operation after itself, by data."""
        return behind(value, self.places.nothing_of(self.arrived[-1] if self.arrived else value))

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._chain.collective.mesh_sizes)


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
