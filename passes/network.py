"""The network under a jaxpr: the mesh that it runs on, and the axis of each collective for the cost model."""

from __future__ import annotations

import dataclasses
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from jax.sharding import Mesh

from cost_model import Axis, Hardware, Topology
from cost_model.topology import slice_of
from passes.collective import Collective


@lru_cache(maxsize=16)
def several_slices(mesh: Mesh) -> bool:
    """Whether a mesh's devices are TPUs of several slices: hops between those go through their hosts."""
    return len({slice_of(d) for d in mesh.devices.flat if getattr(d, "platform", "") == "tpu"}) > 1


class Network:
    """The devices of a mesh.

    Args:
      hardware: what the devices are; None if unknown.
      mesh: a concrete mesh, or None where the program knows only the mesh's shape.
      manual_axes: the axes of the mesh over which the jaxpr is mapped.
      check_vma: whether types say over which axes values vary.
    """

    def __init__(
        self,
        hardware: Hardware | None,
        mesh: Any = None,
        manual_axes: frozenset[str] = frozenset(),
        check_vma: bool = True,
    ) -> None:
        self.hardware = hardware
        self.mesh = mesh
        self.manual_axes = manual_axes
        self.check_vma = check_vma
        self._axes: dict[Any, Axis] = {}

    def axis(self, collective: Collective, *, alone: bool = True) -> Axis | None:
        """The axis of a collective; None if the hardware is unknown.

        Args:
          collective: the collective.
          alone: whether it is the only one that may become a ring. Else each has half of a cache (of what
            TPUs have on chip `passes.before` says more). On CPU devices the chains of a program hold
            each other up (docs/network.md), so that nothing is sure to overlap.
        """
        if self.hardware is None:
            return None
        key = (collective.axes, collective.groups, collective.axis_size, alone)
        if key not in self._axes:
            if self._topology is not None:
                axis = Axis.of(self._topology, self.groups(collective))
            elif self.mesh is not None:
                axis = Axis(self.hardware, collective.axis_size)
            else:
                axis = Axis.of_size(collective.axis_size, self.hardware)
            if not alone:
                hardware = axis.hardware
                shared = dataclasses.replace(
                    hardware,
                    on_chip_bytes=hardware.on_chip_bytes / (1 if hardware.network == "torus" else 2),
                    least_gain=max(hardware.least_gain, hardware.least_gain_beside),
                    overlaps=hardware.overlaps and not self.first_in_first_out,
                )
                axis = dataclasses.replace(axis, hardware=shared)
            self._axes[key] = axis
        return self._axes[key]

    def groups(self, collective: Collective) -> tuple[tuple[int, ...], ...]:
        """The devices that take part together, by their position in the flattened mesh."""
        names = list(self.mesh.axis_names)
        taken = [names.index(axis) for axis in collective.axes]
        others = [number for number in range(len(names)) if number not in taken]
        shape = tuple(self.mesh.shape[name] for name in names)
        lines = np.arange(np.prod(shape, dtype=int)).reshape(shape).transpose(others + taken)
        lines = lines.reshape(-1, np.prod([shape[number] for number in taken], dtype=int))
        within = collective.groups or (tuple(range(lines.shape[1])),)
        return tuple(tuple(int(line[i]) for i in group) for line in lines for group in within)

    @property
    def first_in_first_out(self) -> bool:
        """Whether the devices run first what is ready first, whatever a program's order: CPU devices."""
        return self.hardware is not None and "cpu" in self.hardware.device_kinds

    @property
    def leaves_for_last(self) -> bool:
        """Whether compilers leave for last what no collective waits for: TPUs'."""
        return self.hardware is not None and self.hardware.network == "torus"

    @cached_property
    def _topology(self) -> Topology | None:
        """Where the devices are, if they say so. The same in every process: a mesh lists all devices.

        Of devices behind one switch there is nothing to say; of several hosts with one each there is, if the
        network between them is known.
        """
        devices = getattr(self.mesh, "devices", None)
        if self.hardware is None or devices is None:
            return None
        if self.hardware.network == "switch":
            if not self.hardware.dcn_bytes_per_s:
                return None
            hosts = Topology.from_devices(devices, self.hardware)
            return hosts if hosts.domains > 1 else None
        if any(getattr(device, "coords", None) is None for device in devices.flat):
            return None
        return Topology.from_devices(devices, self.hardware)
