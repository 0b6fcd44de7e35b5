"""One mesh axis as its network carries it: the time of its collectives, and of a step of rings along it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from cost_model import collectives, group_collectives
from cost_model.hardware import Hardware
from cost_model.ring_order import Groups, RingOrder, ring_orders, ring_step_s
from cost_model.topology import Topology
from cost_model.walk import Walk, ring_walks, walk_step_s
from cost_model.whole import whole

Directions = Literal[1, 2]

MANY_BYTES: Final = 2.0**80
"""So many that no latency counts; a power of 2, so that dividing by it rounds nothing."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis.

    Attributes:
      hardware: one device and its links.
      size: devices on the axis, P.
      topology: where the devices are; None if unknown: then the axis is a ring (or a line) of its own.
      groups: the devices of each line of the mesh along the axis, by their number in the topology.
      orders: the best rings along the axis, which share no link.
      walks: rings that follow no order and together are faster than those; none on most axes.
      cell: the least part of the topology that repeats throughout it without any group leaving it, and the
        groups there, which load its links as all groups load all links; None if that is not known.

    Raises:
      ValueError: there is no device on it.
      TypeError: the hardware is none (a name: see `by_name`), or the size no whole number.
    """

    hardware: Hardware
    size: int
    topology: Topology | None = None
    groups: Groups = ()
    orders: tuple[RingOrder, ...] = ()
    walks: tuple[Walk, ...] = ()
    cell: tuple[Topology, Groups] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        collectives.check_hardware(self.hardware)
        object.__setattr__(self, "size", whole(self.size, "axis_size"))
        if self.size < 1:
            raise ValueError(f"axis_size must be at least 1, got {self.size!r}")

    def __hash__(self) -> int:
        # Costs are kept by axis, and looked up often: see `Topology.__hash__`.
        return hash((self.size, self.topology, len(self.groups), *(group[-1] for group in self.groups[:2])))

    @classmethod
    def of_size(cls, size: int, hardware: Hardware) -> Axis:
        """An axis of which only the size is known: a ring or line of its own, or hosts with a switch each.

        Raises:
          ValueError, TypeError: as `Axis`.
        """
        alone = cls(hardware, size)
        if hardware.network != "switch":
            return alone
        hosts = Topology.axis(alone.size, hardware)
        return alone if hosts.domains == 1 else cls.of(hosts, (tuple(range(alone.size)),))

    @classmethod
    def of(cls, topology: Topology, groups: Groups, cell: tuple[Topology, Groups] | None = None) -> Axis:
        """The axis along these groups of devices; `cell` as the attribute.

        Raises:
          ValueError: there is no group, or one without devices.
        """
        if not groups or not all(groups):
            raise ValueError("an axis has at least one group, of at least one device")
        hardware = topology.hardware
        if topology.shape:
            hardware = hardware.on_slice(math.prod(topology.shape))
        if len(groups[0]) == 1:
            return cls(hardware, 1, topology, groups)
        part = cell or (topology, groups)
        orders, walks = ring_orders(*part), ring_walks(*part)
        return cls(hardware, len(groups[0]), topology, groups, orders, walks, cell)

    @property
    def within_domain(self) -> bool:
        """Whether no group leaves its slice (of GPUs: its NVLink domain)."""
        places = () if self.topology is None else self.topology.places
        return all(len({places[number].domain for number in group}) == 1 for group in self.groups if places)

    def all_gather_s(self, full_bytes: float) -> float:
        """Seconds to gather an array of `full_bytes` from its shards."""
        if self.topology is None:
            return collectives.all_gather_s(full_bytes, self.size, self.hardware)
        return _gather_cost(self, self.topology).seconds(full_bytes)

    def reduce_scatter_s(self, full_bytes: float) -> float:
        """Seconds to reduce arrays of `full_bytes` and scatter the result."""
        return self.all_gather_s(full_bytes)

    def all_reduce_s(self, full_bytes: float) -> float:
        """Seconds to reduce arrays of `full_bytes` on every device."""
        if self.topology is None:
            return collectives.all_reduce_s(full_bytes, self.size, self.hardware)
        return _reduce_s(self, self.topology, full_bytes)

    def all_to_all_s(self, full_bytes: float) -> float:
        """Seconds to move the sharding of an array of `full_bytes` to another dimension."""
        if self.topology is None:
            return collectives.all_to_all_s(full_bytes, self.size, self.hardware)
        return group_collectives.all_to_all_s(full_bytes, self.groups, self.topology)

    def step_s(
        self, shard_bytes: float, directions: Directions, rings: int = 1, *, walks: bool = False
    ) -> float:
        """Seconds in which every device passes on a shard, cut evenly over directions and rings, or walks."""
        if self.size == 1:
            return 0.0
        if self.topology is None:
            return ring_hop_s(shard_bytes, self.size, self.hardware, directions=directions)
        if walks and self.walks:
            return _walk_cost(self, self.topology).seconds(shard_bytes / len(self.walks))
        pieces = len(self.orders[:rings]) * directions
        return _step_cost(self, self.topology, directions, rings).seconds(shard_bytes / pieces)

    def permute_s(self, block_bytes: float, distance: int) -> float:
        """Seconds in which every device sends a block to the one `distance` places further along."""
        if self.size == 1 or distance % self.size == 0:
            return 0.0
        if self.topology is None:
            return exchange_s(block_bytes, self.size, self.hardware, distance=distance % self.size)
        return _permute_cost(self, self.topology, distance % self.size).seconds(block_bytes)


@dataclass(frozen=True, slots=True)
class _Cost:
    """A time that is a latency, or bytes over a bandwidth, whichever is more."""

    latency_s: float
    s_per_byte: float

    @classmethod
    def of(cls, price: Callable[[float], float], pieces: int = 1) -> _Cost:
        """What a price of bytes comes to, per byte of each of the pieces into which they are cut."""
        return cls(price(0.0), price(pieces * MANY_BYTES) / MANY_BYTES)

    def seconds(self, moved_bytes: float) -> float:
        if not (math.isfinite(moved_bytes) and moved_bytes >= 0):
            raise ValueError(f"bytes must be finite and not negative, got {moved_bytes!r}")
        return max(self.latency_s, moved_bytes * self.s_per_byte)


# Each is asked for thousands of times where a model is divided over a pod, of hundreds of axes: what only one
# axis and its groups say is found once.


@functools.lru_cache(maxsize=2048)
def _gather_cost(axis: Axis, topology: Topology) -> _Cost:
    return _Cost.of(lambda full_bytes: group_collectives.all_gather_s(full_bytes, axis.groups, topology))


@functools.lru_cache(maxsize=8192)
def _reduce_s(axis: Axis, topology: Topology, full_bytes: float) -> float:
    return group_collectives.all_reduce_s(full_bytes, axis.groups, topology)


@functools.lru_cache(maxsize=2048)
def _walk_cost(axis: Axis, topology: Topology) -> _Cost:
    part = _part(axis, topology)
    return _Cost.of(lambda shard_bytes: walk_step_s(axis.walks, shard_bytes, *part), len(axis.walks))


@functools.lru_cache(maxsize=8192)
def _step_cost(axis: Axis, topology: Topology, directions: Directions, rings: int) -> _Cost:
    orders, part = axis.orders[:rings], _part(axis, topology)
    return _Cost.of(
        lambda shard_bytes: ring_step_s(orders, shard_bytes, *part, directions=directions),
        len(orders) * directions,
    )


@functools.lru_cache(maxsize=4096)
def _permute_cost(axis: Axis, topology: Topology, distance: int) -> _Cost:
    part, groups = _part(axis, topology)
    pairs = (
        pair for group in groups for pair in zip(group, group[distance:] + group[:distance], strict=True)
    )
    return _Cost(*part.permute_cost(pairs))


def _part(axis: Axis, topology: Topology) -> tuple[Topology, Groups]:
    """Where it is enough to look for the busiest link: the axis's cell, or else everywhere."""
    if axis.cell is None:
        return topology, axis.groups
    cell, groups = axis.cell
    if cell.hardware != topology.hardware:
        cell = dataclasses.replace(cell, hardware=topology.hardware)
    return cell, groups


def ring_hop_s(shard_bytes: float, axis_size: int, hardware: Hardware, *, directions: Directions) -> float:
    """Seconds in which every device passes on a whole shard one way, or a half-shard each way at once.

    With wraparound all transfers go to neighbours, and two directions halve the bytes on every link. Without
    it the last device reaches the first across the whole line, P-1 links against the direction of the others:
    no contention with one direction, but P-1 latencies; with two, every link carries a half-shard of each
    ring both ways, as many bytes as a whole shard one way, and nothing is gained. Where opposite hops do not
    overlap, the halves take turns. Behind a switch both leave a device by its one way up.

    Raises:
      ValueError: there are neither 1 nor 2 directions, or as the collectives of `cost_model.collectives`.
      TypeError: as those.
    """
    if directions not in (1, 2):
        raise ValueError(f"a ring runs in 1 or 2 directions, got {directions!r}")
    collectives.check(shard_bytes, axis_size, hardware)
    if axis_size == 1:
        return 0.0
    distance = 1 if hardware.has_wraparound(axis_size) else axis_size - 1
    if directions == 1:
        return collectives.hop_s(shard_bytes, hardware, distance=distance)
    if not hardware.opposite_hops_overlap:
        return 2 * collectives.hop_s(shard_bytes / 2, hardware, distance=distance)
    apart = hardware.network != "switch" and hardware.has_wraparound(axis_size)
    link_bytes = shard_bytes / 2 if apart else shard_bytes
    return collectives.hop_s(link_bytes, hardware, distance=distance)


def exchange_s(block_bytes: float, axis_size: int, hardware: Hardware, *, distance: int) -> float:
    """Seconds in which every device sends a block to the device `distance` places further along its axis.

    On a torus a block takes the shorter way round, min(d, P-d) links, and so many blocks share each link.
    Without wraparound the d last devices reach the first ones across P-d links the other way, with the same
    number of blocks on a link. Behind a switch every distance is one hop.

    Raises: as the collectives of `cost_model.collectives`, of the distance too.
    """
    collectives.check(block_bytes, axis_size, hardware)
    if hardware.network == "switch":
        return collectives.hop_s(block_bytes, hardware, distance=min(distance, 1))
    sharing = min(distance, axis_size - distance)
    ring = hardware.has_wraparound(axis_size)
    links = sharing if ring else max(distance, axis_size - distance)
    return collectives.hop_s(sharing * block_bytes, hardware, distance=links if distance else 0)
