"""Walks: ways round a box of 2 × 2 × 2 chips that may cross another dimension in every hop.

Each chip of a cube has three links, but no two rings along fixed orders of its chips keep to links of their
own. The cube is the Cayley graph of three bits under XOR, however: where in one hop all chips pass on what
they have across the same dimension, every chip receives something, over a link that is used once in each
direction. If the hops cross the dimensions x, y, x, z, x, y, x in turn (a Gray code), each chip has seen the
shard of every other. Three such walks, their dimensions exchanged in turn, cross three different dimensions
in every hop: together they use all links, both ways, all the time.

Source: Savage, "A Survey of Combinatorial Gray Codes", SIAM Review 39 (1997), on Gray codes of groups.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.ring_order import Box, Groups, ring_orders, ring_step_s
from cost_model.topology import Topology


@dataclass(frozen=True, slots=True)
class Walk:
    """One way round the devices of a mesh axis whose chips are a box of lengths 2.

    A chip's number has one bit per dimension: which of the two chips along it. A device's number in the box
    is that of its chip, times the cores of a chip, plus that of its core. A shard passes through the cores
    of a chip one by one, from the last to the first, before it goes to the next chip.

    Attributes:
      order: axis indices, by the device's number in the box.
      dims: the dimension of every hop between chips; the last leads back to the first chip.

    Raises:
      ValueError: `dims` leads not once to every chip and back, or the cores of a chip are no power of 2.
    """

    order: tuple[int, ...]
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        chips = len(self.dims)
        if sorted(self._chips) != list(range(chips)) or self._chips[-1] ^ (1 << self.dims[-1]):
            raise ValueError(f"hops along dimensions {self.dims} lead not once to every chip and back")
        if len(self.order) % chips or self.cores & (self.cores - 1):
            raise ValueError(f"{len(self.order)} devices are not 1, 2, 4, … on each of {chips} chips")

    @property
    def cores(self) -> int:
        """Devices on a chip."""
        return len(self.order) // len(self.dims)

    def changes(self, distance: int) -> tuple[int, ...]:
        """Where what a device has after `distance` hops started, per number of the device's core.

        As the XOR of the device's own number in the box and that of the device where it started.
        """
        found = []
        for core in range(self.cores):
            hops, start = divmod(core + distance % len(self.order), self.cores)
            found.append(self._chips[hops % len(self.dims)] * self.cores | core ^ start)
        return tuple(found)

    def owners(self, distance: int) -> tuple[int, ...]:
        """Per axis index, the index of the device whose shard is there after `distance` hops."""
        changes = self.changes(distance)
        owner_of = {
            index: self.order[number ^ changes[number % self.cores]]
            for number, index in enumerate(self.order)
        }
        return tuple(owner_of[index] for index in range(len(self.order)))

    def hop(self, held: int, wanted: int) -> list[tuple[int, int]]:
        """(source, target) axis indices: what devices have after `held` hops becomes that after `wanted`."""
        source_of = {owner: index for index, owner in enumerate(self.owners(held))}
        return [(source_of[owner], index) for index, owner in enumerate(self.owners(wanted))]

    @property
    def _chips(self) -> tuple[int, ...]:
        """The XOR of a chip's number and that of the chip so many hops between chips away, hop by hop."""
        found = [0]
        for dim in self.dims[:-1]:
            found.append(found[-1] ^ (1 << dim))
        return tuple(found)


def gray_walks(order: tuple[int, ...], dimensions: int) -> tuple[Walk, ...]:
    """One walk per dimension, no two of which cross the same one in the same hop.

    Args:
      order: axis indices, by the device's number in the box: see `Walk`.
      dimensions: of the box.
    """
    # The reflected Gray code: bit b changes in every 2^(b+1)-th step, and the last bit once more at the end.
    code = [min((step & -step).bit_length() - 1, dimensions - 1) for step in range(1, 2**dimensions + 1)]
    return tuple(Walk(order, tuple((dim + turn) % dimensions for dim in code)) for turn in range(dimensions))


def ring_walks(topology: Topology, groups: Sequence[Sequence[int]]) -> tuple[Walk, ...]:
    """The walks along a mesh axis that together pass shards on faster than rings along fixed orders do.

    Args:
      topology: the network.
      groups: the devices of each group of the axis: see `ring_orders`.

    Returns:
      As many walks as the groups' boxes have dimensions; none where the chips of a group are no box of
      lengths 2, or where rings along the axis's `ring_orders` are as fast.

    Raises:
      ValueError: as `ring_orders`.
    """
    orders = ring_orders(topology, groups)
    walks = _walks_of(topology, tuple(groups[0]))
    if not walks:
        return ()
    # Many bytes: what is compared is bandwidth, not latency.
    many = 1e12
    faster = walk_step_s(walks, many, topology, groups) < 0.99 * ring_step_s(orders, many, topology, groups)
    return walks if faster else ()


def walk_step_s(
    walks: Sequence[Walk], shard_bytes: float, topology: Topology, groups: Sequence[Sequence[int]]
) -> float:
    """Seconds of one step in which every device passes on a whole shard, cut evenly over all walks at once.

    It lasts as long as the busiest link of the step's hops, or the latency of the longest of them, in the
    slowest of the steps.

    Raises:
      ValueError: no walks, or bytes that are negative or not finite.
    """
    if not walks:
        raise ValueError("a step needs walks")
    if not (math.isfinite(shard_bytes) and shard_bytes >= 0):
        raise ValueError(f"bytes must be finite and not negative, got {shard_bytes!r}")
    latency_s, s_per_byte = _step_cost(tuple(walks), topology, tuple(map(tuple, groups)))
    return max(latency_s, shard_bytes / len(walks) * s_per_byte)


def _walks_of(topology: Topology, group: tuple[int, ...]) -> tuple[Walk, ...]:
    box = Box.of(topology, group) if topology.shape else None
    if box is None or not set(box.lengths) <= {1, 2}:
        return ()
    cores, *others = {len(members) for members in box.members.values()}
    dimensions = box.lengths.count(2)
    if others or cores & (cores - 1) or dimensions < 2:
        return ()
    # Chips in the order of their coordinates: these are the bits of their numbers.
    order = tuple(index for chip in sorted(box.members) for index in box.members[chip])
    return gray_walks(order, dimensions)


@functools.lru_cache(maxsize=256)
def _step_cost(walks: tuple[Walk, ...], topology: Topology, groups: Groups) -> tuple[float, float]:
    """Latency of the longest hop, and the most seconds per byte that each walk carries in one step."""
    costs = [
        topology.permute_cost(
            (group[a], group[b]) for walk in walks for a, b in walk.hop(step, step + 1) for group in groups
        )
        for step in range(len(groups[0]) - 1)
    ]
    return max(latency for latency, _ in costs), max(s_per_byte for _, s_per_byte in costs)
