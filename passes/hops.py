"""Hops: who stands where among the devices of a collective, and sending a value some places along."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from passes.collective import Collective


def hop(value: Any, collective: Collective, distance: int) -> Any:
    """Sends a value so that each device receives that of the device ``distance`` places further along."""
    size = collective.axis_size
    lines = collective.groups or (tuple(range(size)),)
    pairs = [(line[place], line[(place - distance) % size]) for line in lines for place in range(size)]
    ordered = _mesh_indices(collective)
    names = tuple(name for name, _ in collective.mesh_sizes)
    return lax.ppermute(value, names, [(ordered[source], ordered[target]) for source, target in pairs])


def _mesh_indices(collective: Collective) -> list[int]:
    """From a device's index along the collective's axes to that along them in the mesh's order."""
    names = [name for name, _ in collective.mesh_sizes]
    indices = np.arange(np.prod([size for _, size in collective.mesh_sizes], dtype=int))
    grid = indices.reshape([size for _, size in collective.mesh_sizes])
    return [int(i) for i in grid.transpose([names.index(axis) for axis in collective.axes]).ravel()]


def place_after(collective: Collective, distance: int) -> Any:
    """The place, among those taking part, of the device ``distance`` places further along; traced, int32."""
    size = collective.axis_size
    return lax.rem(_place(collective) + jnp.int32(distance % size), jnp.int32(size))


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
        return lax.rem(lax.div(index, jnp.int32(stride)), jnp.int32(size))
    places = {device: place for group in collective.groups for place, device in enumerate(group)}
    place = jnp.int32(0)
    for device, value in places.items():
        place = jnp.where(index == device, jnp.int32(value), place)
    return place
