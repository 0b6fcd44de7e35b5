"""The streams of one device and their clocks: compute in order, asynchronous copies, link directions.

Times are modelled seconds from the program's start. All devices run the same program in lockstep, so one
compute clock stands for all of them, while every device's links have a clock each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from overlap.hlo.wires import Transfer

Key = Hashable
"""What names an operation in flight."""

Backlog = tuple[npt.NDArray[np.float64], tuple[float, ...]]
"""Seconds that the links still have to do; and the copies, the network, each transfer on its way."""

Sums = tuple[float, float, float, float, dict[Key, tuple[float, float, float, float]]]
"""All that grows: the compute clock, its parts, and the sums of every record."""

TOLERANCE_S: Final = 1e-13
"""Clocks that differ by less are the same: far below any modelled time, above rounding."""


@dataclass(slots=True)
class Record:
    """Sums over all executions of one collective, and the times of the first.

    Attributes: as `CollectiveTime`'s.
    """

    executions: float = 0
    wire_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    overlapped_with: tuple[str, ...] = ()

    def sums(self) -> tuple[float, float, float, float]:
        """What grows with every execution."""
        return self.executions, self.wire_s, self.exposed_s, self.hidden_s


@dataclass(frozen=True, slots=True)
class Flight:
    """A transfer on its way: when it was issued, took its first link, and arrives."""

    issued_s: float
    begin_s: float
    end_s: float
    transfer: Transfer


class Busy:
    """When the compute stream was busy, and with what; grows at its end only."""

    def __init__(self) -> None:
        self._times = [0.0]
        self._sums = [0.0]
        self._starts: list[float] = []
        self._names: list[str] = []
        self._ends: list[float] = []

    def add(self, start_s: float, end_s: float, name: str = "", busy_s: float | None = None) -> None:
        """Compute was busy from start to end, all of the time or for `busy_s` of it."""
        times, sums = self._times, self._sums
        if start_s > times[-1]:
            times.append(start_s)
            sums.append(sums[-1])
        times.append(end_s)
        sums.append(sums[-1] + (end_s - start_s if busy_s is None else busy_s))
        if name:
            self._starts.append(start_s)
            self._ends.append(end_s)
            self._names.append(name)

    def between(self, start_s: float, end_s: float) -> float:
        """Seconds of an interval in which compute was busy."""
        return self._until(end_s) - self._until(start_s) if end_s > start_s else 0.0

    def names(self, start_s: float, end_s: float) -> tuple[str, ...]:
        """What ran in an interval, in order, each name once."""
        first = bisect_right(self._ends, start_s + TOLERANCE_S)
        last = bisect_left(self._starts, end_s - TOLERANCE_S)
        return tuple(dict.fromkeys(self._names[first:last]))

    def _until(self, time_s: float) -> float:
        times, sums = self._times, self._sums
        after = bisect_right(times, time_s)
        if after >= len(times):
            return sums[-1]
        before = after - 1
        span_s = times[after] - times[before]
        share = (time_s - times[before]) / span_s if span_s > 0 else 1.0
        return sums[before] + share * (sums[after] - sums[before])


@dataclass(slots=True)
class Streams:
    """The clocks of all streams, and what has been spent on each.

    Attributes:
      links_free_s: per link direction, when it has sent what it was given.
      one_at_a_time: whether asynchronous collectives queue behind each other whatever links they use.
      now_s: the compute clock.
      memory_free_s: when the asynchronous copies issued so far are done.
      network_free_s: when all transfers issued so far have arrived.
      compute_s, exposed_s, copy_wait_s: what `now_s` is made of.
      busy: when compute was busy.
      flights: transfers that have been issued and not been waited for, by their start's key.
      copies: when each asynchronous copy is done, by its start's key.
      records: of collectives, by their start's key.
      peak_in_flight: most transfers on their way at once.
    """

    one_at_a_time: bool = False
    links_free_s: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    now_s: float = 0.0
    memory_free_s: float = 0.0
    network_free_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    copy_wait_s: float = 0.0
    busy: Busy = field(default_factory=Busy)
    flights: dict[Key, Flight] = field(default_factory=dict)
    copies: dict[Key, float] = field(default_factory=dict)
    records: dict[Key, Record] = field(default_factory=dict)
    peak_in_flight: int = 0
    _on_their_way: list[float] = field(default_factory=list)

    def compute(self, seconds: float, name: str) -> None:
        """Runs an instruction on the compute stream."""
        start_s = self.now_s
        self.now_s = start_s + seconds
        self.compute_s += seconds
        self.busy.add(start_s, self.now_s, name)

    def copy_start(self, key: Key, seconds: float) -> tuple[float, float]:
        """Issues an asynchronous copy; when it begins and ends."""
        begin_s = max(self.now_s, self.memory_free_s)
        self.memory_free_s = self.copies[key] = begin_s + seconds
        return begin_s, begin_s + seconds

    def copy_done(self, key: Key) -> None:
        """Waits for an asynchronous copy."""
        wait_s = self.copies.get(key, 0.0) - self.now_s
        if wait_s > 0:
            self.now_s += wait_s
            self.copy_wait_s += wait_s

    def send(self, key: Key, transfer: Transfer) -> Flight:
        """Issues a transfer. It takes each of its links as soon as that link is free.

        It has arrived when its last link is done, and not before the latency of its longest way: bytes are
        pipelined through the devices on the way (scaling book, "Sharded Matrices").
        """
        issued_s = self.now_s
        if self.one_at_a_time:
            issued_s = max(issued_s, self.network_free_s)
        links = transfer.links
        if len(links):
            missing = int(links.max()) + 1 - len(self.links_free_s)
            if missing > 0:
                self.links_free_s = np.append(self.links_free_s, np.zeros(missing))
            starts_s = np.maximum(self.links_free_s[links], issued_s)
            if transfer.together:
                starts_s[:] = starts_s.max()
            ends_s = starts_s + transfer.busy_s
            self.links_free_s[links] = ends_s
            begin_s = float(starts_s.min())
            end_s = max(float(ends_s.max()), float(starts_s.max()) + transfer.latency_s)
        else:
            begin_s, end_s = issued_s, issued_s + transfer.latency_s
        flight = self.flights[key] = Flight(self.now_s, begin_s, end_s, transfer)
        self.network_free_s = max(self.network_free_s, end_s)
        self._on_their_way = [end for end in self._on_their_way if end > self.now_s + TOLERANCE_S]
        self._on_their_way.append(end_s)
        self.peak_in_flight = max(self.peak_in_flight, len(self._on_their_way))
        return flight

    def arrive(self, key: Key) -> None:
        """Waits for a transfer, and records what of it was hidden. Nothing if it has been waited for."""
        flight = self.flights.pop(key, None)
        if flight is None:
            return
        wait_s = max(flight.end_s - self.now_s, 0.0)
        self.now_s += wait_s
        self.exposed_s += wait_s
        self._record(key, flight, wait_s)

    def finish(self) -> None:
        """Records the transfers that nothing waited for."""
        for key, flight in self.flights.items():
            self._record(key, flight, 0.0)
        self.flights.clear()

    def _record(self, key: Key, flight: Flight, wait_s: float) -> None:
        record = self.records.setdefault(key, Record())
        if not record.executions:
            record.start_s, record.end_s = flight.issued_s, flight.end_s
            record.overlapped_with = self.busy.names(flight.begin_s, flight.end_s)
        record.executions += 1
        record.wire_s += flight.transfer.wire_s
        record.exposed_s += wait_s
        record.hidden_s += self.busy.between(flight.begin_s, flight.end_s)

    def backlog(self) -> Backlog:
        """What the streams still have to do, from now on: equal backlogs have equal futures."""
        return (
            np.maximum(self.links_free_s - self.now_s, 0.0),
            (
                max(self.memory_free_s - self.now_s, 0.0),
                max(self.network_free_s - self.now_s, 0.0) if self.one_at_a_time else 0.0,
                *(max(flight.end_s - self.now_s, 0.0) for flight in self.flights.values()),
            ),
        )

    def sums(self) -> Sums:
        """All that grows: the clock, its parts, and every record's sums."""
        records = {key: record.sums() for key, record in self.records.items()}
        return self.now_s, self.compute_s, self.exposed_s, self.copy_wait_s, records

    def repeat(
        self,
        before: Sums,
        times: float,
    ) -> None:
        """Lets all that happened since `before` happen `times` more, backlogs staying as they are."""
        then_s, compute_s, exposed_s, copy_wait_s, records = before
        step_s, worked_s = self.now_s - then_s, self.compute_s - compute_s
        skipped_s = times * step_s
        self.busy.add(self.now_s, self.now_s + skipped_s, busy_s=times * worked_s)
        pending = self.links_free_s > self.now_s
        self.links_free_s[pending] += skipped_s
        if self.memory_free_s > self.now_s:
            self.memory_free_s += skipped_s
        if self.network_free_s > self.now_s:
            self.network_free_s += skipped_s
        self._on_their_way = [end + skipped_s for end in self._on_their_way if end > self.now_s]
        for key, flight in self.flights.items():
            if flight.issued_s >= then_s:
                self.flights[key] = Flight(
                    flight.issued_s + skipped_s,
                    flight.begin_s + skipped_s,
                    flight.end_s + skipped_s,
                    flight.transfer,
                )
        self.now_s += skipped_s
        self.compute_s += times * worked_s
        self.exposed_s += times * (self.exposed_s - exposed_s)
        self.copy_wait_s += times * (self.copy_wait_s - copy_wait_s)
        for key, record in self.records.items():
            executions, wire_s, exposed, hidden_s = records.get(key, (0, 0.0, 0.0, 0.0))
            record.executions += times * (record.executions - executions)
            record.wire_s += times * (record.wire_s - wire_s)
            record.exposed_s += times * (record.exposed_s - exposed)
            record.hidden_s += times * (record.hidden_s - hidden_s)


def same(one: Backlog, other: Backlog) -> bool:
    """Whether two backlogs are equal, to `TOLERANCE_S`."""
    return (
        len(one[0]) == len(other[0])
        and len(one[1]) == len(other[1])
        and all(abs(a - b) <= TOLERANCE_S for a, b in zip(one[1], other[1], strict=True))
        and bool(np.all(np.abs(one[0] - other[0]) <= TOLERANCE_S))
    )
