"""Hops: who stands where among the devices of a collective, and sending a value some places along."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from passes.collective import Collective


class Places:
    """Where the devices of a collective stand, seen from this one, and where their blocks begin.

    Everything is computed once, so the rings of one traced body over the same axes share these.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._known: dict[int, Any] = {}
        self._offsets: dict[tuple[int, int, int], Any] = {}
        self._pairs: dict[int, list[tuple[int, int]]] = {}

    @property
    def axis_size(self) -> int:
        """Devices that take part."""
        return self._collective.axis_size

    def after(self, distance: int) -> Any:
        """The place of the device ``distance`` places further along; traced, int32."""
        size = self._collective.axis_size
        distance %= size
        if 0 not in self._known:
            self._known[0] = _place(self._collective)
        if distance not in self._known:
            moved = lax.add(self._known[0], np.int32(distance))
            self._known[distance] = lax.rem(moved, np.int32(size))
        return self._known[distance]

    def offset(self, distance: int, block: int, start: int) -> Any:
        """Where element ``start`` of that device's block is, in a dim of blocks of so many elements."""
        key = (distance % self.axis_size, block, start)
        if key not in self._offsets:
            offset = lax.mul(self.after(distance), np.int32(block)) if block != 1 else self.after(distance)
            self._offsets[key] = lax.add(offset, np.int32(start)) if start else offset
        return self._offsets[key]

    def hop(self, value: Any, distance: int) -> Any:
        """Sends a value so that each device receives that of the one ``distance`` places further along."""
        if distance not in self._pairs:
            self._pairs[distance] = _pairs(self._collective, distance)
        names = tuple(name for name, _ in self._collective.mesh_sizes)
        return lax.ppermute(value, names, self._pairs[distance])


class PlacesOf:
    """The places for each collective of one traced body."""

    def __init__(self) -> None:
        self._places: dict[Any, Places] = {}

    def __call__(self, collective: Collective) -> Places:
        key = (collective.axes, collective.groups, collective.axis_size)
        if key not in self._places:
            self._places[key] = Places(collective)
        return self._places[key]


def _pairs(collective: Collective, distance: int) -> list[tuple[int, int]]:
    """Sources and targets of a hop, as indices along the collective's axes in the mesh's order."""
    size = collective.axis_size
    names = [name for name, _ in collective.mesh_sizes]
    sizes = [length for _, length in collective.mesh_sizes]
    grid = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    device = [int(i) for i in grid.transpose([names.index(axis) for axis in collective.axes]).ravel()]
    lines = collective.groups or (tuple(range(size)),)
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
