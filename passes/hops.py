"""Hops: who stands where among the devices of a collective, and sending a value some places along."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cost_model import Walk
from passes import shims
from passes.collective import Collective
from passes.in_flight import InFlight

Order = tuple[int, ...] | Walk
"""How a ring goes round: the places in the order in which it visits them, or a walk."""

WORD_BITS: Final = 32
"""Of the scalars that small numbers are packed into."""

LONGEST_PACKED: Final = 64
"""Devices of the longest order that is packed wherever it is asked: of a longer one the scalars are so many
that compiling a ring of 256 devices takes a quarter longer than from an array (TPU v6e)."""


class Places:
    """Where the devices of a collective stand, seen from this one, and where their blocks begin.

    Places are counted along ``order``, or as the collective numbers its devices. A distance is a number, or
    a traced one in a rolled ring. Along a walk the device so many places further along is the one whose block
    is here after so many hops. Everything is computed once, so the rings of one traced body over the same
    axes share these.

    Attributes:
      made: by a collective's operation, what its ring has made last to be sent.
      in_flight: the rings of sums of the body.
    """

    def __init__(self, collective: Collective, order: Order = (), in_flight: InFlight | None = None) -> None:
        self.made: dict[int, Any] = {}
        self.in_flight = in_flight or InFlight()
        self._collective = collective
        self._walk = order if isinstance(order, Walk) else None
        self._order = order.order if isinstance(order, Walk) else order
        self._known: dict[int, Any] = {}
        self._offsets: dict[tuple[int, int, int], Any] = {}
        self._pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}

    @property
    def axis_size(self) -> int:
        """Devices that take part."""
        return self._collective.axis_size

    def after(self, distance: Any) -> Any:
        """The number of the device ``distance`` places further along; traced, int32."""
        if not isinstance(distance, int):
            return self._after(distance)
        distance %= self.axis_size
        if distance not in self._known:
            self._known[distance] = self._after(distance)
        return self._known[distance]

    def settle(self) -> None:
        """Computes here what traced distances rest on, so that a loop's body finds it and does not own it."""
        self.after(0)

    def offset(self, distance: Any, block: int, start: int) -> Any:
        """Where element ``start`` of that device's block is, in a dim of blocks of so many elements."""
        if not isinstance(distance, int):
            return lax.add(lax.mul(self.after(distance), np.int32(block)), np.int32(start))
        key = (distance % self.axis_size, block, start)
        if key not in self._offsets:
            offset = lax.mul(self.after(distance), np.int32(block)) if block != 1 else self.after(distance)
            self._offsets[key] = lax.add(offset, np.int32(start)) if start else offset
        return self._offsets[key]

    def hop(self, value: Any, distance: int, held: Any = 0) -> Any:
        """Sends a value so that each device receives that of the one ``distance`` places further along.

        Along a walk: what is now the block of the device ``held`` places further along arrives where it is
        that of the one ``held + distance`` places along. Elsewhere ``held`` makes no difference.
        """
        return lax.ppermute(value, self._names, self._pairs_of(distance, held))

    def start_hop(self, value: Any, distance: int, held: Any = 0) -> Any:
        """Starts such a hop; see ``shims.start_ppermute``."""
        return shims.start_ppermute(value, self._names, self._pairs_of(distance, held))

    def nothing_of(self, *values: Any) -> Any:
        """An int32 0 that is known only once all values are.

        XLA:CPU drops barriers before it orders a program; data alone keeps one thing behind another.
        """
        mixed = functools.reduce(jnp.bitwise_xor, map(first_bits, values))
        return _alike_everywhere(jnp.bitwise_and(mixed, self.nothing))

    @property
    def nothing(self) -> Any:
        """See `zero_of`."""
        return _alike_everywhere(zero_of(self.after(0)))

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._collective.mesh_sizes)

    def _pairs_of(self, distance: int, held: Any) -> list[tuple[int, int]]:
        key = (distance, 0 if self._walk is None else held % self.axis_size)
        if key not in self._pairs:
            if self._walk is None:
                steps = _steps(self._order or tuple(range(self.axis_size)), distance)
            else:
                steps = self._walk.hop(held, held + distance)
            self._pairs[key] = _pairs(self._collective, steps)
        return self._pairs[key]

    def _after(self, distance: Any) -> Any:
        size = self.axis_size
        if self._walk is not None:
            return self._along_walk(self._walk, distance)
        if isinstance(distance, int):
            if distance == 0 and not self._order:
                return _place(self._collective)
            distance = np.int32(distance)
        else:
            # A remainder has the sign of what is divided.
            distance = lax.rem(lax.add(lax.rem(distance, np.int32(size)), np.int32(size)), np.int32(size))
        if not self._order:
            return lax.rem(lax.add(self.after(0), distance), np.int32(size))
        place = lax.rem(lax.add(self._position, distance), np.int32(size))
        if size > LONGEST_PACKED:
            return lax.dynamic_index_in_dim(self._array, place, keepdims=False)
        return _chosen(self._order, place)

    def _along_walk(self, walk: Walk, distance: int) -> Any:
        changes = walk.changes(distance)
        if len(set(changes)) == 1:
            change = np.int32(changes[0])
        else:
            change = _chosen(changes, lax.rem(self._position, np.int32(walk.cores)))
        return _chosen(self._order, lax.bitwise_xor(self._position, change))

    @cached_property
    def _array(self) -> Any:
        """The order as an array, which is the program's and no constant at every place that reads it."""
        order = np.array(self._order, np.int32)
        return lax.add(order, lax.broadcast(zero_of(self._position), order.shape))

    @cached_property
    def _position(self) -> Any:
        """Where in the order this device is."""
        positions = tuple(self._order.index(place) for place in range(self.axis_size))
        return _chosen(positions, _place(self._collective))


def zero_of(number: Any) -> Any:
    """An int32 0 of a device's number, which the compiler takes for anything: none has a sign bit."""
    return lax.shift_right_logical(number, np.int32(31))


def _alike_everywhere(zero: Any) -> Any:
    """The 0 with a type that says that no device has another: what it is added to keeps its type then."""
    axes = shims.varying_axes(jax.typeof(zero))
    return shims.as_invarying(zero, sorted(axes)) if axes else zero


def first_bits(value: Any) -> Any:
    """An int32 of the bits of a value's first element."""
    first = lax.squeeze(lax.slice(value, [0] * value.ndim, [1] * value.ndim), range(value.ndim))
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        first = lax.real(first)
    if jnp.issubdtype(first.dtype, jnp.floating):
        first = lax.bitcast_convert_type(first, f"uint{jnp.finfo(first.dtype).bits}")
    return lax.convert_element_type(first, np.int32)


Rings = tuple[Places, ...]
"""The places of a collective along each of the rings that run at once."""


class PlacesOf:
    """The places for each collective of one traced body, which may have other rings of sums already."""

    def __init__(self, in_flight: InFlight | None = None) -> None:
        self._places: dict[Any, Places] = {}
        self._in_flight = in_flight or InFlight()

    def __call__(self, collective: Collective, order: Order = ()) -> Places:
        key = (collective.axes, collective.groups, collective.axis_size, order)
        if key not in self._places:
            self._places[key] = Places(collective, order, self._in_flight)
        return self._places[key]

    def rings(self, collective: Collective, orders: tuple[Order, ...]) -> Rings:
        """The places along each order; in the collective's own if there is none."""
        return tuple(self(collective, order) for order in orders or ((),))


def _chosen(values: tuple[int, ...], index: Any) -> Any:
    """``values[index]``, of small numbers: int32, computed from scalars alone.

    The numbers are packed into words. An array of them would be a buffer in a device's main memory, of which
    XLA:TPU allots half a megabyte at least, and reading it there would take longer.
    """
    bits = max(1, max(values).bit_length())
    in_word = 1 << (WORD_BITS // bits).bit_length() - 1
    words = [
        sum(value << bits * place for place, value in enumerate(values[start : start + in_word]))
        for start in range(0, len(values), in_word)
    ]
    index = lax.convert_element_type(index, np.uint32)
    shift = lax.mul(lax.bitwise_and(index, np.uint32(in_word - 1)), np.uint32(bits))
    word: Any = np.uint32(words[0])
    for number in range(1, len(words)):
        begun = lax.ge(index, np.uint32(number * in_word))
        word = lax.select(begun, np.uint32(words[number]), word)
    mask = np.uint32((1 << bits) - 1)
    return lax.convert_element_type(lax.bitwise_and(lax.shift_right_logical(word, shift), mask), np.int32)


def _steps(order: tuple[int, ...], distance: int) -> list[tuple[int, int]]:
    """Sources and targets, by place, of a hop so many places along an order."""
    size = len(order)
    return [(order[place], order[(place - distance) % size]) for place in range(size)]


def _pairs(collective: Collective, steps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sources and targets in all groups, as indices along the collective's axes in the mesh's order."""
    names = [name for name, _ in collective.mesh_sizes]
    sizes = [length for _, length in collective.mesh_sizes]
    grid = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    device = [int(i) for i in grid.transpose([names.index(axis) for axis in collective.axes]).ravel()]
    return [
        (device[line[source]], device[line[target]])
        for line in collective.groups or (tuple(range(collective.axis_size)),)
        for source, target in steps
    ]


def _place(collective: Collective) -> Any:
    """This device's place: its index along the axes (major to minor), or within its group."""
    index = lax.axis_index(collective.axes)
    if collective.groups is None:
        return index
    size = collective.axis_size
    stride = collective.groups[0][1] - collective.groups[0][0] if size > 1 else 1
    regular = stride > 0 and all(
        (device // stride) % size == place
        for group in collective.groups
        for place, device in enumerate(group)
    )
    if regular:
        return lax.rem(lax.div(index, np.int32(stride)), np.int32(size))
    places = {device: place for group in collective.groups for place, device in enumerate(group)}
    place = jnp.int32(0)
    for device, value in places.items():
        place = jnp.where(index == device, jnp.int32(value), place)
    return place
