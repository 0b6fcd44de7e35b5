"""The devices of a TPU slice that is known by its shape, in the order in which jax lays a mesh on it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import cost_model
from cost_model import Hardware

PODS: Final = {
    "tpu_v4": (16, 16, 16),
    "tpu_v5e": (16, 16),
    "tpu_v5p": (16, 20, 28),
    "tpu_v6e": (16, 16),
    "tpu_7x": (16, 24, 24),
}
"""Chips of each TPU's pod, its largest slice, along each dimension.

Of three dimensions an optical switch joins cubes of 64 chips in any order, so that a slice may be longer.

Source: https://cloud.google.com/tpu/docs, "System architecture" of each version.
"""

MOST_CHIPS: Final = max(map(math.prod, PODS.values()))
"""Chips of the largest pod there is, one of TPU7x."""


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """What jax and the cost model ask of a device that is not there.

    Attributes: as ``jax.Device``'s.
    """

    id: int
    device_kind: str
    coords: tuple[int, int, int]
    core_on_chip: int
    platform: str = "tpu"
    process_index: int = 0
    slice_index: int = 0


def read_shape(text: str) -> tuple[str | None, tuple[int, ...]]:
    """Hardware's name, if any, and the chips along each dimension, of ``v5p:2x2x4`` or ``2x2x4``.

    Raises:
      ValueError: it is neither, the hardware is unknown, or there is no slice so large.
    """
    found = re.fullmatch(r"(?:(\w+):)?([1-9]\d{0,99}(?:x[1-9]\d{0,99}){0,2})", text.strip())
    if found is None:
        raise ValueError(f"topology {text!r} is no shape of a slice, such as 4x4x4 or v5p:2x2x4")
    shape = tuple(map(int, found[2].split("x")))
    if math.prod(shape) > MOST_CHIPS:
        raise ValueError(f"topology {text!r} is too large: the largest pod has {MOST_CHIPS:,} chips")
    if found[1] is None:
        return None, shape
    name = f"tpu_{found[1].removeprefix('tpu')}"
    known = name if name in cost_model.names() else found[1]
    return cost_model.by_name(known).name, shape


def slice_on(text: str, hardware: Hardware | None) -> tuple[Hardware, tuple[int, ...]]:
    """The hardware of a slice, by its name if none is given, and its chips.

    Raises:
      ValueError: as `read_shape`, there is neither hardware nor a name, the name is that of other hardware,
        or its pods are smaller.
    """
    name, shape = read_shape(text)
    if name is not None and hardware is not None and hardware.name != name:
        raise ValueError(f"--topology {text} is {name}, and --hardware says {hardware.name}")
    if hardware is None:
        if name is None:
            raise ValueError(f"--topology {text} needs --hardware, or its name, such as v5p:4x4x4")
        hardware = cost_model.by_name(name)
    _check_pod(text, shape, hardware)
    return hardware, shape


def _check_pod(text: str, shape: Sequence[int], hardware: Hardware) -> None:
    """Raises `ValueError` where a pod of the hardware is too small for a slice."""
    pod = PODS.get(hardware.name)
    if pod is None:
        return
    sides = [chips for chips in shape if chips > 1]
    flat = len(pod) == 2
    if math.prod(sides) > math.prod(pod) or (flat and (len(sides) > 2 or max(sides, default=1) > max(pod))):
        most = "×".join(map(str, pod))
        raise ValueError(f"--topology {text} is no slice of {hardware.name}: its pods have {most} chips")


def devices(
    hardware: Hardware, shape: Sequence[int], count: int, mesh_shape: Sequence[int]
) -> list[SliceDevice]:
    """The devices that run a program, by its partitions: those of a slice, as jax lays the mesh on them.

    Where jax lays none, as on TPU v4 with a device per core, they come as it lists them.

    Args:
      hardware: of the chips.
      shape: chips along each dimension.
      count: devices that run the program: all cores of all chips.
      mesh_shape: sizes of the mesh's axes.

    Raises:
      ValueError: the hardware has no slices, or the slice does not have that many devices.
    """
    from jax.experimental import mesh_utils

    chips = math.prod(shape)
    slice_name = f"a slice of {'×'.join(map(str, shape))} {hardware.name} chips"
    if hardware.network != "torus" or not hardware.device_kinds:
        raise ValueError(f"{hardware.name} is no TPU, so that it has no slices: leave --topology out")
    if count % chips or count // chips > 2:
        raise ValueError(f"{slice_name} is not where a program of {count} devices runs")
    cores = count // chips
    padded = (*shape, 1, 1)[:3]
    places = itertools.product(*map(range, reversed(padded)), range(cores))
    listed = [
        SliceDevice(number, hardware.device_kinds[0], (x, y, z), core)
        for number, (z, y, x, core) in enumerate(places)
    ]
    try:
        laid = mesh_utils.create_device_mesh(tuple(mesh_shape), listed)
    except (NotImplementedError, ValueError, AssertionError) as error:
        if cores > 1 and isinstance(error, AssertionError):
            # jax lays no mesh on some chips of which each core is a device: they are taken as listed.
            return listed
        said = f"a mesh of {'×'.join(map(str, mesh_shape))} cannot be laid on {slice_name}"
        if "allow_split_physical_axes" in str(error):
            # An option of jax's that nobody can give here.
            raise ValueError(f"{said}: each axis takes whole dimensions of the slice") from error
        raise ValueError(f"{said}: {error}") from error
    return list(laid.flat)
