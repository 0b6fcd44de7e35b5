"""Hops: who stands where among the devices of a collective, and sending a value some places along."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from passes import shims
from passes.collective import Collective


class Places:
    """Where the devices of a collective stand, seen from this one, and where their blocks begin.

    Places are counted along ``order``, or as the collective numbers its devices. A distance is a number, or
    a traced one in a rolled ring. Everything is computed once, so the rings of one traced body over the same
    axes share these.
    """

    def __init__(self, collective: Collective, order: tuple[int, ...] = ()) -> None:
        self._collective = collective
        self._order = order
        self._known: dict[int, Any] = {}
        self._offsets: dict[tuple[int, int, int], Any] = {}
        self._pairs: dict[int, list[tuple[int, int]]] = {}

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

    def hop(self, value: Any, distance: int) -> Any:
        """Sends a value so that each device receives that of the one ``distance`` places further along."""
        return lax.ppermute(value, self._names, self._pairs_of(distance))

    def start_hop(self, value: Any, distance: int) -> Any:
        """Starts such a hop; see ``shims.start_ppermute``."""
        return shims.start_ppermute(value, self._names, self._pairs_of(distance))

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._collective.mesh_sizes)

    def _pairs_of(self, distance: int) -> list[tuple[int, int]]:
        if distance not in self._pairs:
            self._pairs[distance] = _pairs(self._collective, distance, self._order)
        return self._pairs[distance]

    def _after(self, distance: Any) -> Any:
        size = self.axis_size
        if isinstance(distance, int):
            if distance == 0 and not self._order:
                return _place(self._collective)
            distance = np.int32(distance)
        else:
            # A remainder has the sign of what is divided.
            distance = lax.rem(lax.add(lax.rem(distance, np.int32(size)), np.int32(size)), np.int32(size))
        if not self._order:
            return lax.rem(lax.add(self.after(0), distance), np.int32(size))
        return lax.dynamic_index_in_dim(self._twice, lax.add(self._position, distance), keepdims=False)

    @cached_property
    def _twice(self) -> Any:
        """The order, two times over."""
        return _small_array(self._order * 2)

    @cached_property
    def _position(self) -> Any:
        """Where in the order this device is."""
        positions = tuple(self._order.index(place) for place in range(self.axis_size))
        return lax.dynamic_index_in_dim(_small_array(positions), _place(self._collective), keepdims=False)


Rings = tuple[Places, ...]
"""The places of a collective along each of the rings that run at once."""


class PlacesOf:
    """The places for each collective of one traced body."""

    def __init__(self) -> None:
        self._places: dict[Any, Places] = {}

    def __call__(self, collective: Collective, order: tuple[int, ...] = ()) -> Places:
        key = (collective.axes, collective.groups, collective.axis_size, order)
        if key not in self._places:
            self._places[key] = Places(collective, order)
        return self._places[key]

    def rings(self, collective: Collective, orders: tuple[tuple[int, ...], ...]) -> Rings:
        """The places along each order; in the collective's own if there is none."""
        return tuple(self(collective, order) for order in orders or ((),))


def _small_array(values: tuple[int, ...]) -> Any:
    """An int32 array made of literals: a body that is traced again may not get constants."""
    return lax.concatenate([lax.broadcast(np.int32(value), (1,)) for value in values], 0)


def _pairs(collective: Collective, distance: int, order: tuple[int, ...]) -> list[tuple[int, int]]:
    """Sources and targets of a hop along the order, as indices along the collective's axes in the mesh's."""
    size = collective.axis_size
    names = [name for name, _ in collective.mesh_sizes]
    sizes = [length for _, length in collective.mesh_sizes]
    grid = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    device = [int(i) for i in grid.transpose([names.index(axis) for axis in collective.axes]).ravel()]
    lines = [
        [line[place] for place in order] if order else line
        for line in collective.groups or (tuple(range(size)),)
    ]
    return [
        (device[line[place]], device[line[(place - distance) % size]])
        for line in lines
        for place in range(size)
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
