"""What keeps dots beside collectives on CPU devices: data, in the order in which a thread finds it ready.

A thread of XLA:CPU runs first what was ready first, and a collective in its own time: all behind it waits.
A dot it hands to another thread, if anything is ready behind the dot. And what uses the memory of another
value waits until that value is done with, whether it needs it or not; barriers do not count. (docs/network.md
has the sources.) So whatever a dot is to run beside must become ready a little later than the dot, and may
not find memory that the dot is to free.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from passes.hops import Places


class Queue:
    """Makes values that are to be sent wait for what is to run beside them.

    Args:
      places: where the collective's devices stand.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._sent: dict[int, Any] = {}
        self._held: list[Any] = []

    def copy(self, value: Any, *earlier: Any, lane: int = 0) -> Any:
        """The value as a copy, three operations later than what is ready along with it.

        The value that was sent before on the same lane is kept till then: what this one becomes would take
        its place, and wait for the dots that read it.

        Args:
          value: what is to be sent.
          earlier: what else must have arrived before.
          lane: values of one lane are sent one after the other.
        """
        nothing = deferred(self._places.nothing_of(value, *earlier))
        if lane in self._sent:
            nothing = lax.bitwise_or(nothing, self._places.nothing_of(self._sent[lane], value))
        self._sent[lane] = value
        return behind(value, nothing)

    def hold(self, *values: Any) -> None:
        """Keeps the values' memory theirs until they are `released`."""
        self._held.extend(values)

    def released(self, later: Any) -> Any:
        """The int32 0 ``later``; values that are held may go when it is known.

        XLA would read what they are made of in place of them, were it not for the conditional.
        """
        if not self._held:
            return later
        held = [lax.stop_gradient(value) for value in self._held]
        return lax.cond(
            lax.ne(later, np.int32(0)),
            lambda later, *held: jnp.bitwise_or(later, self._places.nothing_of(*held)),
            lambda later, *held: later,
            later,
            *held,
        )


def deferred(nothing: Any) -> Any:
    """The int32 0 ``nothing``, two operations later: a sort is an operation that XLA fuses with no other."""
    return lax.sort(jnp.stack([nothing, nothing]))[0]


def can_wait(dtype: Any) -> bool:
    """Whether ``behind`` holds back values of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    else:
        return False
    return bool(bits == 8 * dtype.itemsize)


def behind(value: Any, nothing: Any) -> Any:
    """The value, to the bit, once the int32 0 ``nothing`` is known; at once if it cannot wait."""
    if not can_wait(value.dtype):
        return value
    words = np.dtype(f"uint{8 * value.dtype.itemsize}")

    @jax.custom_jvp
    def wait(value: Any, nothing: Any) -> Any:
        bits = lax.bitcast_convert_type(value, words)
        bits = jnp.bitwise_xor(bits, lax.convert_element_type(nothing, words))
        return lax.bitcast_convert_type(bits, value.dtype)

    @wait.defjvp
    def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        return wait(*primals), tangents[0]

    return wait(value, nothing)
