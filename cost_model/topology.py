"""Where devices are, which physical links join them, and which of those a message from one to another takes.

A TPU slice is a grid of chips, each linked to its next neighbour in every direction of every dimension; a
dimension may close on itself (wrap around). Behind a switch a device has one way up and one way down. Between
slices, and between hosts of GPUs, every device has a way out to the data-centre network and a way in. Every
direction of a link is a `Link` of its own.

Sources: the scaling book, "How to Think About TPUs" (networking, wraparound) and "How to Think About GPUs".
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cost_model.crossings import Way, busiest_link
from cost_model.hardware import Hardware

Coords = tuple[int, ...]


class Place(NamedTuple):
    """Where one device is. A tuple, as links are: pods have thousands, which routes make and count.

    Attributes:
      domain: the slice of a TPU, or the host (NVLink domain) of a GPU. Devices of different domains reach
        each other over the data-centre network only.
      coords: of the device's chip in its slice; () behind a switch.
      core: number of the device on its chip; behind a switch, in its domain.
    """

    domain: int = 0
    coords: Coords = ()
    core: int = 0

    def __str__(self) -> str:
        if not self.coords:
            return (f"host {self.domain} " if self.domain else "") + f"device {self.core}"
        where = (f"slice {self.domain} " if self.domain else "") + _printed(self.coords)
        return where + (f" core {self.core}" if self.core else "")


class Link(NamedTuple):
    """One direction of one physical link. `str(link)` names it, for example "x+ (0,0,0)→(1,0,0)".

    Attributes:
      kind: "ici" joins two neighbouring chips, "chip" two cores of one chip, "up" a device to its switch and
        "down" the switch to a device, "out" a device to the data-centre network and "in" the network to a
        device.
      source, target: its ends; of an "ici" link, core 0 of the two chips. None is the switch, or the network.
      step: dimension and direction of an "ici" link, such as "x+".
    """

    kind: Literal["ici", "chip", "up", "down", "out", "in"]
    source: Place | None
    target: Place | None
    step: str = ""

    def __str__(self) -> str:
        if self.kind == "ici" and self.source and self.target:
            domain = f"slice {self.source.domain} " if self.source.domain else ""
            return f"{domain}{self.step} {_printed(self.source.coords)}→{_printed(self.target.coords)}"
        if self.kind == "chip" and self.source and self.target:
            return (
                f"chip {Place(self.source.domain, self.source.coords)} {self.source.core}→{self.target.core}"
            )
        beyond = "switch" if self.kind in ("up", "down") else "network"
        return f"{self.source or beyond}→{self.target or beyond}"


@dataclass(frozen=True, slots=True)
class Topology:
    """The devices of a program and the network between them.

    Attributes:
      hardware: one device and its links.
      description: the network in words.
      places: where each device is, by logical id: HLO's partition id, the position in the flattened mesh.
      shape: chips of a slice along each dimension; () behind a switch.
      wraparound: per dimension, whether the last chip is linked to the first.

    Raises:
      ValueError: there is no device, two are in one place, one lies outside the slice, a dimension below 3
        chips wraps around (two chips have one link, not two), or there are several domains and the hardware
        has no data-centre network.
    """

    hardware: Hardware
    description: str
    places: tuple[Place, ...]
    shape: tuple[int, ...] = ()
    wraparound: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if not self.places:
            raise ValueError("a topology needs at least one device")
        if len(set(self.places)) < len(self.places):
            twice = next(str(place) for place in self.places if self.places.count(place) > 1)
            raise ValueError(f"two devices of a topology are in one place: {twice}")
        if len(self.wraparound) != len(self.shape):
            raise ValueError(f"shape {self.shape} needs as many wraparound flags, got {self.wraparound}")
        for length, wraps in zip(self.shape, self.wraparound, strict=True):
            if wraps and length < 3:
                raise ValueError(f"a dimension of {length} chips has no wraparound links, shape {self.shape}")
        for place in self.places:
            inside = len(place.coords) == len(self.shape) and all(
                0 <= at < length for at, length in zip(place.coords, self.shape, strict=True)
            )
            if not inside:
                raise ValueError(f"{place} lies outside a slice of {_times(self.shape)} chips")
        if not self.hardware.dcn_bytes_per_s and self.domains > 1:
            raise ValueError(
                f"devices in several slices or hosts need a network between them: hardware "
                f"{self.hardware.name!r} has no dcn_bytes_per_s"
            )

    def __hash__(self) -> int:
        # Prices are kept by topology, and looked up often: hashing every place of a pod took a millisecond.
        return hash((self.description, self.shape, len(self.places)))

    def __str__(self) -> str:
        return self.description

    @property
    def size(self) -> int:
        """The number of devices."""
        return len(self.places)

    @property
    def domains(self) -> int:
        """The number of slices, or of hosts of GPUs."""
        return len({place.domain for place in self.places})

    @classmethod
    def from_devices(
        cls, devices: Any, hardware: Hardware, *, wraparound: Sequence[bool] | None = None
    ) -> Topology:
        """The network between JAX devices, read from their coordinates, slices and processes.

        A dimension wraps around where the hardware does at its full length, whatever the others: the scaling
        book's rule. Google's page of v5p says otherwise of slices smaller than 4x4x4, such as 2x2x4: no
        wraparound at all; `wraparound` can say so. Devices that lie in a part of a slice have no wraparound
        where it goes on. It spans the coordinates of all devices of their client, or without one of those
        given.

        If the devices are finer than the hardware (a core each, where it describes a chip), the topology's
        `hardware` is that of a part: see `Hardware.per_core`. GPUs of one host share an NVLink switch.
        Devices without coordinates on hardware with a torus get what `logical` assumes.

        Args:
          devices: the devices by logical id; an array, such as `mesh.devices`, is flattened.
          hardware: what they are.
          wraparound: overrides, per dimension of the coordinates, whether it wraps around.

        Raises:
          ValueError: there is no device, or as `Topology`.
        """
        mesh_shape = tuple(getattr(devices, "shape", ())) or (len(devices),)
        listed = list(getattr(devices, "flat", devices))
        if not listed:
            raise ValueError("a topology needs at least one device")
        if hardware.network == "switch":
            return cls._behind_switches(listed, hardware)
        if any(getattr(device, "coords", None) is None for device in listed):
            return cls.logical(mesh_shape, hardware)
        domains = _numbered(map(slice_of, listed))
        spans = _spans(listed)
        places = tuple(
            Place(
                domain,
                tuple(at - low for at, (low, _) in zip(device.coords, spans[slice_of(device)], strict=True)),
                getattr(device, "core_on_chip", None) or 0,
            )
            for device, domain in zip(listed, domains, strict=True)
        )
        shape = tuple(1 + max(place.coords[dim] for place in places) for dim in range(len(places[0].coords)))
        if wraparound is None and (client := getattr(listed[0], "client", None)) is not None:
            whole = _spans(device for device in client.devices() if slice_of(device) in spans)
            entire = [all(spans[of][dim] == whole[of][dim] for of in spans) for dim in range(len(shape))]
            wraparound = [
                full and wraps for full, wraps in zip(entire, _wraparound(shape, hardware), strict=True)
            ]
        return cls._torus(places, shape, hardware, wraparound)

    @classmethod
    def torus(
        cls,
        shape: Sequence[int],
        hardware: Hardware,
        *,
        cores: int = 1,
        wraparound: Sequence[bool] | None = None,
    ) -> Topology:
        """A whole slice of `shape` chips with `cores` devices each.

        Logical ids count through the last dimension fastest, and through the cores of a chip before the next
        chip. `wraparound` is per dimension; by default, where the hardware wraps at that length.
        """
        if hardware.network != "torus":
            raise ValueError(f"{hardware.name} has no torus: its devices are behind a switch")
        if cores < 1 or not shape or min(shape) < 1:
            raise ValueError(f"a slice has at least one chip and one core, got {tuple(shape)} × {cores}")
        places = tuple(
            Place(0, coords, core)
            for coords in itertools.product(*map(range, shape))
            for core in range(cores)
        )
        return cls._torus(places, tuple(shape), hardware, wraparound)

    @classmethod
    def switch(cls, count: int, hardware: Hardware) -> Topology:
        """`count` devices behind one switch."""
        return cls._hosts([0] * count, hardware)

    @classmethod
    def axis(cls, axis_size: int, hardware: Hardware) -> Topology:
        """The default for one mesh axis: a ring along one physical dimension, a line, or as `logical`."""
        return cls.logical((axis_size,), hardware)

    @classmethod
    def logical(cls, mesh_shape: Sequence[int], hardware: Hardware) -> Topology:
        """The default for a mesh of which only the shape is known: each axis is a physical dimension.

        Devices behind switches fill one host after the other, as many as the hardware says that one has.
        """
        if hardware.network == "switch":
            count = math.prod(mesh_shape)
            of_host = hardware.switch_devices if hardware.dcn_bytes_per_s else 0
            return cls._hosts([device // (of_host or count) for device in range(count)], hardware)
        return cls.torus(tuple(mesh_shape) or (1,), hardware)

    def route(self, source: int, target: int) -> tuple[Link, ...]:
        """The links a message takes from one device to another, in order; none to itself.

        Dimension by dimension, each the shorter way round, upwards where both are as long: the routing of a
        torus whose switches know no detours.
        """
        start, end = self._place(source), self._place(target)
        if start == end:
            return ()
        if start.domain != end.domain:
            return Link("out", start, None), Link("in", None, end)
        if not self.shape:
            return Link("up", start, None), Link("down", None, end)
        if start.coords == end.coords:
            return (Link("chip", start, end),)
        return tuple(self.chip_route(start.domain, start.coords, end.coords))

    def chip_route(self, domain: int, source: Coords, target: Coords) -> Iterator[Link]:
        """The links a message takes from one chip of a slice to another: see `route`."""
        here = Place(domain, source)
        for dim, ahead in enumerate(self._ahead(source, target)):
            sign, by = ("+", 1) if ahead > 0 else ("-", -1)
            for _ in range(abs(ahead)):
                coords = here.coords
                at = (coords[dim] + by) % self.shape[dim]
                there = Place(domain, (*coords[:dim], at, *coords[dim + 1 :]))
                yield Link("ici", here, there, step_name(dim, sign))
                here = there

    def _ahead(self, source: Coords, target: Coords) -> tuple[int, ...]:
        """How many links a message goes up in each dimension, or down: negative."""
        return tuple(
            (end - start + (length - 1) // 2) % length - (length - 1) // 2 if wraps else end - start
            for start, end, length, wraps in zip(source, target, self.shape, self.wraparound, strict=True)
        )

    def link_bytes_per_s(self, link: Link) -> float:
        """Bytes per second in this direction of the link.

        No figure is published for the path between two cores of a chip: HBM's bandwidth stands in for it.
        """
        if link.kind in ("out", "in"):
            return self.hardware.dcn_bytes_per_s
        if link.kind == "chip":
            return self.hardware.hbm_bytes_per_s
        return self.hardware.axis_bytes_per_s

    def link_latency_s(self, link: Link) -> float:
        """The least time a message spends on the link. A way through a switch or the network counts once."""
        if link.kind in ("down", "in"):
            return 0.0
        return self.hardware.dcn_latency_s if link.kind == "out" else self.hardware.hop_latency_s

    def load(self, pairs: Iterable[tuple[int, int]]) -> dict[Link, int]:
        """How many of a permute's (source, target) pairs cross each link; links without any are left out."""
        counts: dict[Link, int] = {}
        for source, target in pairs:
            for link in self.route(source, target):
                counts[link] = counts.get(link, 0) + 1
        return counts

    def permute_s(self, pairs: Iterable[tuple[int, int]], shard_bytes: float) -> float:
        """Seconds in which every source of `pairs` sends `shard_bytes` to its target, all at once.

        The busiest link's bytes over its bandwidth, or the latencies of the longest way, whichever is more:
        messages are cut small and stream through the devices on the way.
        """
        if not (math.isfinite(shard_bytes) and shard_bytes >= 0):
            raise ValueError(f"bytes must be finite and not negative, got {shard_bytes!r}")
        latency_s, s_per_byte = self.permute_cost(pairs)
        return max(latency_s, shard_bytes * s_per_byte)

    def permute_cost(self, pairs: Iterable[tuple[int, int]]) -> tuple[float, float]:
        """What a permute comes to, whatever it sends: seconds of the longest way, and per byte of a shard."""
        ways: list[Way] = []
        others: list[tuple[int, int]] = []
        found: dict[Coords, Coords] = {}
        for pair in pairs:
            start, end = map(self._place, pair)
            if start.domain == end.domain and start.coords != end.coords:
                # Of two chips as far apart as two before the way is as theirs.
                apart = tuple(map(operator.sub, end.coords, start.coords))
                if apart not in found:
                    found[apart] = self._ahead(start.coords, end.coords)
                ways.append((start.domain, start.coords, found[apart]))
            else:
                others.append(pair)
        longest = max((sum(map(abs, ahead)) for _, _, ahead in ways), default=0)
        latencies = [self.latency_s(*pair) for pair in others]
        busy = [count / self.link_bytes_per_s(link) for link, count in self.load(others).items()]
        return (
            max([sum([self.hardware.hop_latency_s] * longest), *latencies]),
            max([busiest_link(self.shape, ways) / self.hardware.axis_bytes_per_s, *busy]),
        )

    def latency_s(self, source: int, target: int) -> float:
        """The least time a message from one device to another takes, however short."""
        return sum(self.link_latency_s(link) for link in self.route(source, target))

    def neighbours(self, coords: Coords) -> Iterator[tuple[str, Coords]]:
        """The chips linked to the one at `coords`, each with the step of the link that leads there."""
        for dim, length in enumerate(self.shape):
            for sign, by in (("+", 1), ("-", -1)):
                at = coords[dim] + by
                if 0 <= at < length or self.wraparound[dim]:
                    yield step_name(dim, sign), (*coords[:dim], at % length, *coords[dim + 1 :])

    def _place(self, device: int) -> Place:
        if not 0 <= device < len(self.places):
            raise ValueError(f"device {device} is not one of the {len(self.places)} of {self.description}")
        return self.places[device]

    @classmethod
    def _torus(
        cls,
        places: tuple[Place, ...],
        shape: tuple[int, ...],
        hardware: Hardware,
        wraparound: Sequence[bool] | None,
    ) -> Topology:
        if wraparound is None:
            wraparound = _wraparound(shape, hardware)
        cores = 1 + max(place.core for place in places)
        device = hardware.per_core(cores)
        slices = len({place.domain for place in places})
        closed = [step_name(dim, "") for dim, wraps in enumerate(wraparound) if wraps]
        description = (
            (f"{slices} slices of " if slices > 1 else "")
            + f"{_times(shape)} {hardware.name} chips"
            + (f" with {cores} devices each" if cores > 1 else "")
            + (f", wrapping around in {', '.join(closed)}" if closed else ", no wraparound")
        )
        return cls(device, description, places, shape, tuple(wraparound))

    @classmethod
    def _behind_switches(cls, devices: Sequence[Any], hardware: Hardware) -> Topology:
        # XLA counts the GPUs of one host as a slice, however many processes it runs.
        hosts: list[Any] = [getattr(device, "slice_index", None) for device in devices]
        if "cpu" in hardware.device_kinds:
            hosts = [0] * len(devices)
        elif any(host is None or host < 0 for host in hosts):
            hosts = [getattr(device, "process_index", 0) for device in devices]
        return cls._hosts(_numbered(hosts), hardware)

    @classmethod
    def _hosts(cls, domains: Sequence[int], hardware: Hardware) -> Topology:
        """Devices in these hosts, each with a switch."""
        counts: Counter[int] = Counter()
        places = []
        for domain in domains:
            places.append(Place(domain, (), counts[domain]))
            counts[domain] += 1
        description = f"{max(counts.values(), default=0)} {hardware.name}"
        if len(counts) > 1:
            most = "up to " if len(set(counts.values())) > 1 else ""
            description = f"{len(counts)} hosts of {most}{description}, each behind one switch"
        else:
            description += " behind one switch"
        return cls(hardware, description, tuple(places))


def slice_of(device: Any) -> int:
    """The number of the slice that a TPU's device is in."""
    return getattr(device, "slice_index", None) or 0


def _spans(devices: Iterable[Any]) -> dict[int, tuple[tuple[int, int], ...]]:
    """Per slice the least and the largest coordinate of its devices, along each dimension."""
    found: dict[int, list[Any]] = {}
    for device in devices:
        found.setdefault(slice_of(device), []).append(device.coords)
    return {of: tuple((min(at), max(at)) for at in zip(*all_of, strict=True)) for of, all_of in found.items()}


def _wraparound(shape: Sequence[int], hardware: Hardware) -> list[bool]:
    """Per dimension of a slice, whether it wraps around."""
    return [hardware.has_wraparound(length) for length in shape]


def _numbered(values: Iterable[int]) -> list[int]:
    """Each value replaced by its rank among those that occur."""
    listed = list(values)
    ranks = {value: rank for rank, value in enumerate(sorted(set(listed)))}
    return [ranks[value] for value in listed]


def step_name(dim: int, sign: str) -> str:
    """The name of a direction of a dimension, "x+" for (0, "+")."""
    return ("xyzw"[dim] if dim < 4 else f"dim{dim}") + sign


def _printed(coords: Coords) -> str:
    return f"({','.join(map(str, coords))})"


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
