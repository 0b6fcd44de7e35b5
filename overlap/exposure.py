"""What a timeline says about waiting: when compute waited for which collectives, and what could be done."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from overlap.hlo.timeline import CollectiveTime, Event, Timeline

COMPUTE: Final = "compute"
"""The stream of everything that is not communication or an asynchronous copy."""

MEMORY: Final = "memory"
"""The stream of asynchronous copies."""

WAIT: Final = "exposed wait"
"""What a time in which compute waits for collectives is called where it is drawn."""

ITERATIONS: Final = "further iterations"
"""What the time of a loop's other iterations, whose bars are not drawn, is called."""

ROUNDING_S: Final = 5e-10
"""Times below this are the rounding of sums, and count as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time without bars on the compute stream.

    Attributes:
      kind: ``WAIT`` or ``ITERATIONS``.
      start_s, end_s: modelled, from the start of the program.
      collectives: names of those that a wait may be for, in order of start.
      repeats: how often the loop runs in all whose further iterations these are.
    """

    kind: str
    start_s: float
    end_s: float
    collectives: tuple[str, ...] = ()
    repeats: int = 1


def gaps(timeline: Timeline) -> tuple[Gap, ...]:
    """What the gaps of the compute stream are, where they are of interest.

    A wait for a collective ends when it arrives, so the part of a gap up to the last arrival in it is one;
    the rest of the gap is a wait for a copy. Where a loop ends, the gap is that of its other iterations,
    whose waits are in ``timeline.exposed_s`` and not here.
    """
    worked = [e for e in timeline.events if e.stream == COMPUTE and e.kind != "collective"]
    worked.sort(key=lambda e: (e.start_s, e.end_s))
    flights = _Flights(timeline.collectives)
    found: list[Gap] = []
    now_s, repeats = 0.0, 1
    for start_s, end_s, later in [(e.start_s, e.end_s, e.repeats) for e in worked] + [
        (timeline.total_s, timeline.total_s, 1)
    ]:
        if start_s - now_s > ROUNDING_S:
            if repeats > later:
                found.append(Gap(kind=ITERATIONS, start_s=now_s, end_s=start_s, repeats=repeats))
            else:
                found += flights.wait(now_s, start_s)
        if end_s >= now_s:
            now_s, repeats = end_s, later
    return tuple(found)


class _Flights:
    """The collectives by start and by end."""

    def __init__(self, collectives: Sequence[CollectiveTime]) -> None:
        self.by_start = sorted((c.start_s, c.end_s, c.name) for c in collectives)
        self.ends = sorted(c.end_s for c in collectives)
        self.latest = list(accumulate((end_s for _, end_s, _ in self.by_start), max))

    def wait(self, start_s: float, end_s: float) -> Iterator[Gap]:
        """The part of a gap that waits for collectives, if any."""
        arrived = bisect_right(self.ends, end_s + ROUNDING_S)
        if not arrived or self.ends[arrived - 1] <= start_s + ROUNDING_S:
            return
        until_s = min(self.ends[arrived - 1], end_s)
        names = []
        at = bisect_left(self.by_start, (until_s,)) - 1
        # From the last one issued back to where all have arrived.
        while at >= 0 and self.latest[at] > start_s + ROUNDING_S:
            if self.by_start[at][1] > start_s + ROUNDING_S:
                names.append(self.by_start[at][2])
            at -= 1
        yield Gap(kind=WAIT, start_s=start_s, end_s=until_s, collectives=tuple(dict.fromkeys(names[::-1])))


def is_exposed(collective: CollectiveTime) -> bool:
    """Whether compute waits for it at all."""
    return collective.exposed_s > ROUNDING_S


def by_exposed_time(timeline: Timeline) -> list[CollectiveTime]:
    """The collectives, the most exposed first; equals, but for rounding, in order of start."""
    return sorted(timeline.collectives, key=lambda c: (-round(c.exposed_s / ROUNDING_S), c.start_s))


def streams(timeline: Timeline) -> dict[str, list[list[Event]]]:
    """The bars of every stream, in lanes such that no two bars of a lane overlap.

    Compute comes first and is always there, then copies, then the links by name. More than one lane is needed
    where transfers share a link.
    """
    rows: dict[str, list[list[Event]]] = {COMPUTE: [[]]}
    ends: dict[str, list[float]] = {COMPUTE: [0.0]}
    names = {event.stream for event in timeline.events} - {COMPUTE, MEMORY}
    present = [MEMORY] if any(event.stream == MEMORY for event in timeline.events) else []
    for name in [*present, *sorted(names)]:
        rows[name], ends[name] = [], []
    slack_s = 1e-9 * timeline.total_s
    for event in sorted(timeline.events, key=lambda e: (e.start_s, e.end_s)):
        lanes, free = rows[event.stream], ends[event.stream]
        at = next((i for i, end_s in enumerate(free) if end_s <= event.start_s + slack_s), len(lanes))
        if at == len(lanes):
            lanes.append([])
            free.append(0.0)
        lanes[at].append(event)
        free[at] = max(event.end_s, free[at])
    return rows


_HINTS: Final = {
    ("all-gather", "feeds"): "feeds a dot: could be decomposed into a ring of hops beside partial dots",
    ("reduce-scatter", "follows"): (
        "follows a dot: could be decomposed into a ring of hops beside partial dots"
    ),
    ("all-reduce", "follows"): (
        "follows a dot: could be decomposed into a reduce-scatter ring beside partial dots, and an all-gather"
    ),
    ("all-reduce", "feeds"): (
        "feeds a dot: could be decomposed into a reduce-scatter, and an all-gather ring beside partial dots"
    ),
    ("collective-permute", "feeds"): (
        "feeds a dot: could be issued earlier, or be decomposed into smaller hops"
    ),
    ("collective-permute", "follows"): (
        "follows a dot: could be waited for later, or be decomposed into smaller hops"
    ),
}


def hint(collective: CollectiveTime) -> str:
    """What could be done about an exposed collective beside a dot; empty for any other."""
    if not is_exposed(collective) or not collective.next_to_dot:
        return ""
    special = _HINTS.get((collective.opcode, collective.next_to_dot))
    return special or f"{collective.next_to_dot} a dot: could be decomposed into pieces beside partial dots"
