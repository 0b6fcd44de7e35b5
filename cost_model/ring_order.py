"""In which order a ring visits the devices of a mesh axis: each hop one link, and no link for two hops.

The devices of an axis as the mesh counts them are seldom neighbours all the way round. Programs are SPMD: one
order of axis indices serves all groups of the axis at once. Where the group's chips form a grid or a torus,
several orders share no link, and rings along them, each in both directions, use all links together: two on a
4×4 torus (or v5p:2x2x4, where 2×2 is a cycle of four), three on 4×4×4, one on a grid without wraparound.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cost_model.hamiltonian import disjoint_tours, snake
from cost_model.topology import Coords, Topology

Groups = tuple[tuple[int, ...], ...]
Orders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOrder:
    """A cyclic order of the indices of a mesh axis.

    Attributes:
      order: axis indices, from 0 on; a hop goes from each to the next, and from the last to the first.
    """

    order: tuple[int, ...]

    @property
    def is_identity(self) -> bool:
        """Whether the ring follows the axis as the mesh counts it, so that no table of indices is needed."""
        return self.order == tuple(range(len(self.order)))


def ring_orders(topology: Topology, groups: Sequence[Sequence[int]], limit: int = 3) -> tuple[RingOrder, ...]:
    """The best ring orders of a mesh axis: several where rings along them share no link.

    Args:
      topology: the network.
      groups: the devices of each group of the axis, all of one size; member j of a group has axis index j.
      limit: the most orders wanted.

    Returns:
      at least one order: those that, with both directions of all rings in flight in all groups at once and
      the shard cut evenly between them, need the least time of the busiest link; of equals the set with the
      shorter longest hop, then the fewer orders, then the axis's own order. Several orders share no link
      within a group. The same in every process.

    Raises:
      ValueError: no groups, groups of different sizes, a device that is not in the topology, or `limit`
        below 1.
    """
    sizes = {len(group) for group in groups}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"the groups of a mesh axis must be of one size, got sizes {sorted(sizes)}")
    if outside := [device for group in groups for device in group if not 0 <= device < topology.size]:
        raise ValueError(f"device {outside[0]} is not one of the {topology.size} of {topology}")
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit!r}")
    return _ring_orders(topology, tuple(map(tuple, groups)), limit)


def ring_step_s(
    orders: Sequence[RingOrder],
    shard_bytes: float,
    topology: Topology,
    groups: Sequence[Sequence[int]],
    *,
    directions: int = 2,
) -> float:
    """Seconds of one step in which every device passes on a whole shard, cut evenly over all rings at once.

    With r orders and d directions each ring carries shard_bytes / (r·d). The step lasts as long as its
    busiest link, or the latency of its longest hop; where opposite hops do not overlap, the directions take
    turns.

    Raises:
      ValueError: no orders, directions that are neither 1 nor 2, or bytes that are negative or not finite.
    """
    if not orders or directions not in (1, 2):
        raise ValueError(f"a step needs orders and 1 or 2 directions, got {len(orders)} and {directions!r}")
    if not (math.isfinite(shard_bytes) and shard_bytes >= 0):
        raise ValueError(f"bytes must be finite and not negative, got {shard_bytes!r}")
    together = directions == 1 or topology.hardware.opposite_hops_overlap
    latency_s, s_per_byte = _step_cost(
        tuple(order.order for order in orders),
        topology,
        tuple(map(tuple, groups)),
        directions if together else 1,
    )
    piece_bytes = shard_bytes / (len(orders) * directions)
    return (1 if together else directions) * max(latency_s, piece_bytes * s_per_byte)


@functools.lru_cache(maxsize=256)
def _ring_orders(topology: Topology, groups: Groups, limit: int) -> tuple[RingOrder, ...]:
    identity = tuple(range(len(groups[0])))
    directions = 2 if topology.hardware.opposite_hops_overlap else 1
    best: Orders = (identity,)
    if topology.shape and len(identity) > 2:
        lowest = _cost(best, topology, groups, directions)
        for orders in _candidates(topology, groups[0], limit):
            cost = _cost(orders, topology, groups, directions)
            if cost < lowest:
                best, lowest = orders, cost
            if cost[1] <= topology.hardware.hop_latency_s:
                break  # Neighbours throughout, in all groups: what follows has fewer rings, or longer hops.
    return tuple(RingOrder(order=order) for order in best)


def _candidates(topology: Topology, group: tuple[int, ...], limit: int) -> Iterator[Orders]:
    """Sets of orders that may suit a group, the most promising first."""
    box = Box.of(topology, group)
    if box is None:
        walk = _by_coordinates(topology, group)
    else:
        wanted = limit
        while wanted and (tours := disjoint_tours(box.lengths, box.closed, wanted)):
            yield tuple(_turned(box.order(tour)) for tour in tours)
            wanted = len(tours) - 1
        walk = box.order(snake(box.lengths))
    yield (_turned(walk),)
    yield (_turned(_folded(walk)),)


@dataclass(frozen=True, slots=True)
class Box:
    """A group whose chips are a box of their slice, perhaps spaced out: all combinations of some coordinates.

    Attributes:
      along: the coordinates that occur, per dimension.
      closed: per dimension, whether the way from the last back to the first is no longer than one between.
      members: the axis indices on each chip.
    """

    along: tuple[tuple[int, ...], ...]
    closed: tuple[bool, ...]
    members: dict[Coords, tuple[int, ...]]

    @classmethod
    def of(cls, topology: Topology, group: tuple[int, ...]) -> "Box | None":
        """The box of a group; None if its chips are none, or in several slices."""
        places = [topology.places[device] for device in group]
        members: dict[Coords, tuple[int, ...]] = {}
        for index, place in enumerate(places):
            members[place.coords] = (*members.get(place.coords, ()), index)
        along = tuple(tuple(sorted(set(values))) for values in zip(*members, strict=True))
        if len({place.domain for place in places}) > 1 or math.prod(map(len, along)) != len(members):
            return None
        closed = tuple(
            wraps
            and len(values) > 2
            and values[0] + length - values[-1] <= max(b - a for a, b in itertools.pairwise(values))
            for values, length, wraps in zip(along, topology.shape, topology.wraparound, strict=True)
        )
        return cls(along, closed, members)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self.along))

    def order(self, tour: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The axis indices along a tour through the box's chips, those on one chip next to each other."""
        chips = (tuple(values[i] for values, i in zip(self.along, point, strict=True)) for point in tour)
        return tuple(itertools.chain.from_iterable(self.members[chip] for chip in chips))


def _by_coordinates(topology: Topology, group: tuple[int, ...]) -> tuple[int, ...]:
    """Axis indices slice by slice, through the chips of a slice row by row and back."""
    rank = {coords: i for i, coords in enumerate(snake(topology.shape))}
    places = [topology.places[device] for device in group]
    return tuple(
        sorted(
            range(len(group)),
            key=lambda index: (places[index].domain, rank[places[index].coords], places[index].core),
        )
    )


def _folded(walk: tuple[int, ...]) -> tuple[int, ...]:
    """A line as a ring: out along every second, back along the others, so that no hop crosses all of it."""
    return walk[::2] + walk[1::2][::-1]


def _turned(order: tuple[int, ...]) -> tuple[int, ...]:
    """The same ring from index 0 on, in the direction of its lower neighbour."""
    start = order.index(0)
    turned = order[start:] + order[:start]
    return turned if turned[1] <= turned[-1] else (turned[0], *turned[:0:-1])


def _hops(order: tuple[int, ...], groups: Groups, direction: int) -> list[tuple[int, int]]:
    """(source, target) devices of one hop of a ring, in all groups; direction -1 runs against the order."""
    steps = list(zip(order, order[1:] + order[:1], strict=True))
    if direction < 0:
        steps = [(b, a) for a, b in steps]
    return [(group[a], group[b]) for group in groups for a, b in steps]


def _cost(orders: Orders, topology: Topology, groups: Groups, directions: int) -> tuple[float, float, int]:
    """What makes a set of orders better than another: time per byte of a shard, then latency, then number."""
    latency_s, s_per_byte = _step_cost(orders, topology, groups, directions)
    return s_per_byte / len(orders), latency_s, len(orders)


@functools.lru_cache(maxsize=256)
def _step_cost(orders: Orders, topology: Topology, groups: Groups, directions: int) -> tuple[float, float]:
    """Latency of the longest hop, and seconds per byte that each ring and direction carries at once."""
    hops = [
        hop
        for order in orders
        for direction in (1, -1)[:directions]
        for hop in _hops(order, groups, direction)
    ]
    return topology.permute_cost(hops)
