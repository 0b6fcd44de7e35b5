"""What a transfer asks of the network: which link directions, how long of each, what latency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cost_model.group_collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s
from cost_model.topology import Link, Topology
from overlap.hlo.groups import Groups
from overlap.hlo.moves import Move, Pairs

ALL_PAIRS: Final = 32
"""Largest group of which the ways between all pairs are looked up."""


def _broadcast_s(full_bytes: float, groups: Groups, topology: Topology) -> float:
    """Seconds until every device has the whole array of one: of a gather it lacks (P-1)/P of it."""
    size = max(map(len, groups))
    return all_gather_s(full_bytes * size / (size - 1), groups, topology)


_GROUP_SECONDS = {
    "all-gather": all_gather_s,
    "collective-broadcast": _broadcast_s,
    "reduce-scatter": reduce_scatter_s,
    "all-reduce": all_reduce_s,
    "all-to-all": all_to_all_s,
}


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """One execution of a collective, as the links see it.

    Attributes:
      links: numbers of the link directions that it uses, of all devices.
      busy_s: seconds that it takes of each.
      latency_s: the least time from its start to its arrival.
      wire_s: seconds from start to arrival where no other transfer is in the way.
      sent_bytes: that one device sends, the one that sends most.
      together: whether it needs all its links at once, as the collectives of groups do.
      shown: names of the link directions on which one device sends, to be drawn.
    """

    links: npt.NDArray[np.intp]
    busy_s: npt.NDArray[np.float64]
    latency_s: float
    wire_s: float
    sent_bytes: int
    together: bool
    shown: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """What all transfers between the same devices have in common; `per_byte_s` is in the order of `links`."""

    links: npt.NDArray[np.intp]
    per_byte_s: npt.NDArray[np.float64]
    latency_s: float
    targets: int
    shown: tuple[str, ...]


class Wires:
    """The links of a topology by number, and the ways of the transfers seen so far."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._numbers: dict[Link, int] = {}
        self._ways: dict[Pairs, _Way] = {}
        self._group_links: dict[Groups, tuple[npt.NDArray[np.intp], tuple[str, ...]]] = {}
        self._transfers: dict[Move, Transfer] = {}

    def transfer(self, move: Move) -> Transfer:
        """What one execution of a collective asks of the links.

        A permute takes every link on its routes for as long as the bytes of all pairs that cross it need. The
        collective of groups takes all links of its groups for as long as the cost model says.
        """
        known = self._transfers.get(move)
        if known is None:
            permuted = move.priced_as == "collective-permute"
            known = self._transfers[move] = self._permuted(move) if permuted else self._grouped(move)
        return known

    def _permuted(self, move: Move) -> Transfer:
        way = self._ways.get(move.pairs)
        if way is None:
            way = self._ways[move.pairs] = self._way(move.pairs)
        busy_s = way.per_byte_s * move.full_bytes
        return Transfer(
            links=way.links,
            busy_s=busy_s,
            latency_s=way.latency_s,
            wire_s=max(way.latency_s, float(busy_s.max(initial=0.0))),
            sent_bytes=way.targets * move.full_bytes,
            together=False,
            shown=way.shown,
        )

    def _way(self, pairs: Pairs) -> _Way:
        topology = self.topology
        moved = tuple((source, target) for source, target in pairs if source != target)
        load = topology.load(moved)
        routes = {source: topology.route(source, target) for source, target in moved}
        latency_s = max((topology.latency_s(source, target) for source, target in moved), default=0.0)
        sources = Counter(source for source, _ in moved)
        first = min(sources, default=0)
        return _Way(
            links=self._number(load),
            per_byte_s=np.array([count / topology.link_bytes_per_s(link) for link, count in load.items()]),
            latency_s=latency_s,
            targets=max(sources.values(), default=0),
            shown=tuple(str(link) for link in routes.get(first, ())[:1]),
        )

    def _grouped(self, move: Move) -> Transfer:
        size = max((len(group) for group in move.groups), default=1)
        if size == 1 or move.priced_as not in _GROUP_SECONDS:
            nothing = np.empty(0)
            return Transfer(nothing.astype(np.intp), nothing, 0.0, 0.0, 0, True, ())
        seconds = _GROUP_SECONDS[move.priced_as](move.full_bytes, move.groups, self.topology)
        known = self._group_links.get(move.groups)
        if known is None:
            links = group_links(self.topology, move.groups)
            first = move.groups[0][0]
            shown = tuple(str(link) for link in links if self._leaves(link, first))
            known = self._group_links[move.groups] = (self._number(links), shown)
        numbers, shown = known
        return Transfer(
            links=numbers,
            busy_s=np.full(len(numbers), seconds),
            latency_s=seconds,
            wire_s=seconds,
            sent_bytes=_sent_bytes(move.priced_as, move.full_bytes, size),
            together=True,
            shown=shown,
        )

    def _number(self, links: Iterable[Link]) -> npt.NDArray[np.intp]:
        return np.array([self._numbers.setdefault(link, len(self._numbers)) for link in links], dtype=np.intp)

    def _leaves(self, link: Link, device: int) -> bool:
        """Whether a link leads away from a device, or from the chip that it is on."""
        place, source = self.topology.places[device], link.source
        if source is None:
            return False
        return source == place or (
            link.kind == "ici" and (source.domain, source.coords) == (place.domain, place.coords)
        )


def group_links(topology: Topology, groups: Groups) -> tuple[Link, ...]:
    """The links on the ways between the members of each group.

    Between all pairs of a small group; of a large one, between neighbouring chips, and from each member to
    the next and back.
    """
    found: dict[Link, None] = {}
    for group in groups:
        if len(group) <= ALL_PAIRS:
            pairs = [(a, b) for a in group for b in group if a != b]
        else:
            turned = (*group[1:], group[0])
            pairs = [*zip(group, turned, strict=True), *zip(turned, group, strict=True)]
            at = {(topology.places[m].domain, topology.places[m].coords): m for m in group}
            pairs += [
                (member, at[domain, there])
                for (domain, coords), member in at.items()
                for _, there in (topology.neighbours(coords) if coords else ())
                if (domain, there) in at
            ]
        for source, target in pairs:
            found.update(dict.fromkeys(topology.route(source, target)))
    return tuple(found)


def _sent_bytes(operation: str, full_bytes: int, size: int) -> int:
    """Bytes that each of `size` devices sends at least: (P-1)/P of the array, twice to reduce all.

    Of a broadcast the whole, once.
    """
    if operation == "collective-broadcast":
        return full_bytes
    if operation == "all-reduce":
        return 2 * full_bytes * (size - 1) // size
    if operation == "all-to-all":
        return full_bytes * (size - 1) // size**2
    return full_bytes * (size - 1) // size
