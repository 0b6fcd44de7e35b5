"""Hops: who stands where among the devices of a collective, and sending a value some places along."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from passes.collective import Collective


class Places:
    """Where the devices of a collective stand, seen from this one; each place is computed once."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._known: dict[int, Any] = {}

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


def hop(value: Any, collective: Collective, distance: int) -> Any:
    """Sends a value so that each device receives that of the device ``distance`` places further along."""
    return lax.ppermute(value, tuple(name for name, _ in collective.mesh_sizes), _pairs(collective, distance))


@functools.lru_cache(maxsize=1024)
def _pairs(collective: Collective, distance: int) -> tuple[tuple[int, int], ...]:
    """Sources and targets of a hop, as indices along the collective's axes in the mesh's order."""
    size = collective.axis_size
    names = [name for name, _ in collective.mesh_sizes]
    sizes = [length for _, length in collective.mesh_sizes]
    grid = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    device = [int(i) for i in grid.transpose([names.index(axis) for axis in collective.axes]).ravel()]
    lines = collective.groups or (tuple(range(size)),)
    return tuple(
        (device[line[place]], device[line[(place - distance) % size]])
        for line in lines
        for place in range(size)
    )


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
