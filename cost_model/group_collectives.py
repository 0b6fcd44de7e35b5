"""The time of one collective over groups of devices, by the links those groups really have.

A baseline to measure rings against: the bandwidth term is a lower bound, so that no implementation on the
same links is faster. It looks at many cuts: sets of chips, into which certain bytes have to come through the
links that lead there, those of all groups at once. A set is a box of the slice: in each dimension one chip,
two, as many as lie between two neighbours of a group, half, or all; and where it wraps around, twice as many,
what all groups span before they are the same again, half of that, or all of it but one neighbour's distance.
No other box was found to be tighter on rings of 4 to 32 chips and on tori of up to 256. An all_gather brings
into a set what its chips lack, (n-p)/n of V for a group that has p of its n devices there; an all_to_all
p·(n-p) blocks. Rings, lines, grids and tori reach the bound. A whole axis with wraparound has two links into
each chip, hence the scaling book's V/W, and V/(W·n_axes) for several axes; a line has one link into its end,
hence P-1 hops of a shard ("Sharded Matrices and How to Multiply Them").

The latency term is that of the links between the two devices of a group that are farthest apart.

`full_bytes` is V, the bytes of the whole array, as in `collectives`: what every device holds after an
all_gather, and before a reduce_scatter or an all_reduce. `groups` are the devices that take part together, by
their number in the topology; all groups run at once. Every function raises ValueError for bytes that are
negative or not finite, for an empty group and for a device in two groups.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_model.hardware import Hardware
from cost_model.topology import Coords, Place, Topology

Groups = Sequence[Sequence[int]]


def all_gather_s(full_bytes: float, groups: Groups, topology: Topology, *, book: bool = False) -> float:
    """Seconds to gather an array of `full_bytes` from its shards in every group.

    Args:
      full_bytes: V.
      groups: the devices that gather together.
      topology: where they are.
      book: counts V bytes where (P-1)/P·V arrive, if every axis of the group wraps around: the scaling book's
        formula, as `book` of `collectives.all_gather_s`.
    """
    network = _checked(full_bytes, groups, topology)
    return _gather_s(full_bytes, network, book)


def reduce_scatter_s(full_bytes: float, groups: Groups, topology: Topology, *, book: bool = False) -> float:
    """Seconds to reduce arrays of `full_bytes` and scatter the result: as its mirror, the all_gather."""
    return all_gather_s(full_bytes, groups, topology, book=book)


def all_reduce_s(full_bytes: float, groups: Groups, topology: Topology, *, book: bool = False) -> float:
    """Seconds to reduce arrays of `full_bytes` on every device.

    A reduce_scatter, then an all_gather; or, for few bytes, every device sends its whole array to all others,
    which pays the latency once.
    """
    network = _checked(full_bytes, groups, topology)
    size = max(map(len, groups), default=1)
    return min(2 * _gather_s(full_bytes, network, book), _gather_s(size * full_bytes, network, book))


def all_to_all_s(full_bytes: float, groups: Groups, topology: Topology) -> float:
    """Seconds to move the sharding of an array of `full_bytes`, all shards together, to another dimension.

    Every device has one of P² blocks for each other. Half of them cross the middle of each dimension: on a
    ring a quarter of the all_gather, V/4W.
    """
    network = _checked(full_bytes, groups, topology)
    return max(network.latency_s, full_bytes * network.exchange_s_per_byte)


@dataclass(frozen=True, slots=True)
class _Network:
    """What the links of all groups together come to: seconds per byte of V, and the least latency.

    `book_share` is what a chip lacks of V where every axis of the groups wraps around, 1 elsewhere.
    """

    gather_s_per_byte: float
    exchange_s_per_byte: float
    latency_s: float
    book_share: float


@dataclass(frozen=True, slots=True)
class _Cut:
    """What has to come into a set of devices, and what leads there; how fast that is, hardware says.

    Attributes:
      gathered: bytes that an all_gather brings, per byte of V, of all groups together.
      exchanged: those that an all_to_all brings.
      links: links of an axis, one way.
      memories: a chip's main memory, between the devices of one chip.
      hosts: devices' shares of the network between slices or hosts.
    """

    gathered: float
    exchanged: float
    links: int = 0
    memories: int = 0
    hosts: int = 0

    def bytes_per_s(self, hardware: Hardware) -> float:
        """The bandwidth into it."""
        near = self.links * hardware.axis_bytes_per_s + self.memories * hardware.hbm_bytes_per_s
        return near + self.hosts * hardware.dcn_bytes_per_s


def _gather_s(full_bytes: float, network: _Network, book: bool) -> float:
    per_byte = network.gather_s_per_byte / (network.book_share if book else 1)
    return max(network.latency_s, full_bytes * per_byte)


def _checked(full_bytes: float, groups: Groups, topology: Topology) -> _Network:
    if not (math.isfinite(full_bytes) and full_bytes >= 0):
        raise ValueError(f"bytes must be finite and not negative, got {full_bytes!r}")
    return _network(tuple(map(tuple, groups)), topology)


@functools.lru_cache(maxsize=256)
def _network(groups: tuple[tuple[int, ...], ...], topology: Topology) -> _Network:
    if not all(groups):
        raise ValueError("a group of devices is empty")
    devices = Counter(itertools.chain.from_iterable(groups))
    if twice := [device for device, count in devices.items() if count > 1]:
        raise ValueError(f"device {twice[0]} is in two groups, or twice in one")
    if outside := [device for device in devices if not 0 <= device < topology.size]:
        raise ValueError(f"device {outside[0]} is not one of the {topology.size} of {topology}")
    gather_s = exchange_s = 0.0
    for cut in _cuts(groups, topology.places, topology.shape, topology.wraparound):
        bytes_per_s = cut.bytes_per_s(topology.hardware)
        gather_s = max(gather_s, cut.gathered / bytes_per_s)
        exchange_s = max(exchange_s, cut.exchanged / bytes_per_s)
    latency_s = max((_latency_s(group, topology) for group in groups), default=0.0)
    return _Network(gather_s, exchange_s, latency_s, _book_share(groups, topology))


@functools.lru_cache(maxsize=64)
def _cuts(
    groups: tuple[tuple[int, ...], ...],
    places: tuple[Place, ...],
    shape: tuple[int, ...],
    wraparound: tuple[bool, ...],
) -> tuple[_Cut, ...]:
    """Sets of devices that a collective may have to squeeze into: one device, a host, a box of chips.

    Of a pod they are many, and nearly all alike; and they are the same however fast its links are.
    """
    sizes = list(map(len, groups))

    def cut(inside: Mapping[int, int], **leads: int) -> _Cut:
        counts = [(count, sizes[number]) for number, count in inside.items()]
        gathered = sum((size - count) / size for count, size in counts)
        return _Cut(gathered, sum(count * (size - count) / size**2 for count, size in counts), **leads)

    of_chip: dict[tuple[int, Coords], Counter[int]] = {}
    of_domain: dict[int, Counter[int]] = {}
    for number, group in enumerate(groups):
        for device in group:
            place = places[device]
            of_chip.setdefault((place.domain, place.coords), Counter())[number] += 1
            of_domain.setdefault(place.domain, Counter())[number] += 1
    # A group within one slice or host leaves the network between them alone.
    spread = {n for n, group in enumerate(groups) if len({places[d].domain for d in group}) > 1}
    apart = {n for n, group in enumerate(groups) if len({places[d].coords for d in group}) > 1}
    strides, repeats = _strides(groups, places, shape), _repeats(groups, places, shape, wraparound)
    found: list[_Cut] = []
    for (_, coords), inside in of_chip.items():
        links = _links(coords, shape, wraparound) if shape else 1
        for number, count in inside.items():
            if count > 1:
                near = links if number in apart or not shape else 0
                found.append(
                    cut({number: 1}, links=near, memories=int(bool(shape)), hosts=int(number in spread))
                )
    for domain, inside in of_domain.items():
        crossing = {number: count for number, count in inside.items() if number in spread}
        if crossing:
            found.append(cut(crossing, hosts=sum(crossing.values())))
        if shape:
            chips = {
                coords: [*numbers.elements()] for (of, coords), numbers in of_chip.items() if of == domain
            }
            for boxed, links in _boxes(chips, strides, repeats, shape, wraparound):
                hosts = sum(count for number, count in boxed.items() if number in spread)
                found.append(cut(boxed, links=links, hosts=hosts))
    return tuple(dict.fromkeys(each for each in found if each.gathered))


def _links(coords: Coords, shape: tuple[int, ...], wraparound: tuple[bool, ...]) -> int:
    """The links into one chip."""
    along = zip(coords, shape, wraparound, strict=True)
    return sum(2 if wraps else (at > 0) + (at + 1 < length) for at, length, wraps in along)


def _boxes(
    chips: Mapping[Coords, Sequence[int]],
    strides: Sequence[int],
    repeats: Sequence[int],
    shape: tuple[int, ...],
    wraparound: tuple[bool, ...],
) -> Iterator[tuple[Counter[int], int]]:
    """Boxes of chips of one slice, as how many devices they have of each group, and the links into them.

    Half a slice only along one dimension.

    Args:
      chips: the group of each device of a chip.
      strides, repeats: see `_strides` and `_repeats`: boxes that are the same again are left out.
      shape, wraparound: of the slice.
    """
    dims = list(zip(shape, wraparound, repeats, strict=True))
    spans = []
    for (length, wraps, repeat), stride in zip(dims, strides, strict=True):
        around = {2 * stride, repeat, repeat // 2, repeat - stride} if wraps else set()
        spans.append(list(_spans(length, wraps, {1, 2, stride} | around, repeat)))
    everything = [(tuple(range(length)), 0) for length in shape]
    boxes = itertools.product(*([*some, whole] for some, whole in zip(spans, everything, strict=True)))
    halves = (
        (*everything[:dim], half, *everything[dim + 1 :])
        for dim, (length, wraps, repeat) in enumerate(dims)
        for half in _spans(length, wraps, {length // 2}, repeat, step=max(1, length // 16))
    )
    for box in itertools.chain(boxes, halves):
        volume = math.prod(len(values) for values, _ in box)
        links = sum(sides * volume // len(values) for values, sides in box)
        held = (chips.get(coords, ()) for coords in itertools.product(*(values for values, _ in box)))
        inside = Counter(itertools.chain.from_iterable(held))
        if inside and links:
            yield inside, links


def _spans(
    length: int, wraps: bool, counts: set[int], repeat: int, *, step: int = 1
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Runs of so many chips along a dimension, not all of them, each with its number of links inwards."""
    for count in sorted(counts & set(range(1, length))):
        starts = range(0, length if wraps else length - count + 1, step)
        for start in sorted({start % repeat for start in starts}):
            values = tuple((start + i) % length for i in range(count))
            yield values, 2 if wraps else (start > 0) + (start + count < length)


def _strides(
    groups: tuple[tuple[int, ...], ...], places: tuple[Place, ...], shape: tuple[int, ...]
) -> list[int]:
    """Per dimension, the distance at which a group's chips follow each other; 1 if it has but one there."""
    strides = []
    for dim in range(len(shape)):
        stride = 1
        for group in groups:
            values = sorted({places[device].coords[dim] for device in group})
            stride = max([stride, *(b - a for a, b in itertools.pairwise(values))])
        strides.append(stride)
    return strides


def _repeats(
    groups: tuple[tuple[int, ...], ...],
    places: tuple[Place, ...],
    shape: tuple[int, ...],
    wraparound: tuple[bool, ...],
) -> list[int]:
    """Per dimension, the least number of chips by which all groups can move along and be the same groups.

    Its length where it does not wrap around, or nothing less will do.
    """
    here = [[(places[device].domain, places[device].coords) for device in group] for group in groups]

    unmoved = sorted(map(sorted, here))

    def moved(dim: int, by: int) -> list[list[tuple[int, Coords]]]:
        length = shape[dim]
        return sorted(
            sorted((domain, (*at[:dim], (at[dim] + by) % length, *at[dim + 1 :])) for domain, at in group)
            for group in here
        )

    return [
        next((by for by in range(1, length) if length % by == 0 and moved(dim, by) == unmoved), length)
        if wraps
        else length
        for dim, (length, wraps) in enumerate(zip(shape, wraparound, strict=True))
    ]


def _latency_s(group: tuple[int, ...], topology: Topology) -> float:
    """The least latency between two devices of a group that are far apart: the farthest, in a box."""
    if len(group) == 1:
        return 0.0
    places = [topology.places[device] for device in group]
    if len({place.domain for place in places}) > 1:
        return topology.hardware.dcn_latency_s
    hop_s = topology.hardware.hop_latency_s
    chips = sorted({place.coords for place in places})
    if not topology.shape or len(chips) == 1:
        return hop_s
    along = [set(values) for values in zip(*chips, strict=True)]
    if math.prod(map(len, along)) == len(chips):
        return hop_s * sum(
            max(_apart(dim, one, other, topology) for one in values for other in values)
            for dim, values in enumerate(along)
        )

    def links(one: Coords, other: Coords) -> int:
        return sum(_apart(dim, a, b, topology) for dim, (a, b) in enumerate(zip(one, other, strict=True)))

    far = max(chips, key=lambda coords: links(chips[0], coords))
    return hop_s * max(links(far, coords) for coords in chips)


def _apart(dim: int, one: int, other: int, topology: Topology) -> int:
    along = abs(one - other)
    return min(along, topology.shape[dim] - along) if topology.wraparound[dim] else along


def _book_share(groups: tuple[tuple[int, ...], ...], topology: Topology) -> float:
    """What a chip lacks of V if every group has whole dimensions, all with wraparound; else 1."""
    share = 1.0
    for group in groups:
        chips = Counter(topology.places[device].coords for device in group)
        lengths = [len(set(values)) for values in zip(*chips, strict=True)]
        whole = math.prod(lengths) == len(chips) > 1 and all(
            found == 1 or (found == length and wraps)
            for found, length, wraps in zip(lengths, topology.shape, topology.wraparound, strict=True)
        )
        if not whole:
            return 1.0
        share = min(share, 1 - max(chips.values()) / len(group))
    return share
