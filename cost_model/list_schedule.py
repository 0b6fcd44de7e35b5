"""When the steps of a program run on one device: dots one after the other, collectives beside them.

Compilers that hide latency schedule by list: of what is ready the dots run in program order, and a
collective that devices run beside them has the wire as soon as its operand is there and those that were ready
before are through. Those of TPUs go by need. Of the dots they run those first that such a collective waits
for, and of collectives the one whose result the first dots wait for, which in a backward pass that gathers
weights anew is the last of the program. While no dot is ready, what they wait for is exposed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program.

    Attributes:
      needs: the numbers of the steps whose results it reads, each smaller than its own.
      dots_s: for how long it keeps from other dots the unit that runs them. A collective that runs beside
        dots does not; one that runs alone does for all its time.
      wire_s: for how long it keeps the wire from other steps.
    """

    needs: tuple[int, ...]
    dots_s: float = 0.0
    wire_s: float = 0.0

    @property
    def is_beside(self) -> bool:
        """Whether it is a collective that runs beside dots."""
        return self.wire_s > 0 and not self.dots_s


_Turn = tuple[bool, int]
"""When it is a step's turn: whether no collective beside dots waits for it, and its number."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the steps run.

    Attributes:
      total_s: until all have run.
      exposed_s: of each step that runs beside dots, the seconds for which others wait: dots for its result,
        or hops for the wire. 0 of the others.
    """

    total_s: float
    exposed_s: tuple[float, ...]


def list_schedule(steps: Sequence[Step], *, by_need: bool = True) -> Schedule:
    """Runs the steps, each once those that it needs have run.

    One that has dots and hops beside them ends when both have. What takes the time is the longer of the two,
    of each such step, all other dots, and what is exposed.

    Args:
      steps: those.
      by_need: whether it goes by need what is first of all that is ready; else dots run in the steps' order,
        and collectives as they become ready.

    Raises:
      ValueError: a step needs one that is not before it.
    """
    return _Device(steps, by_need).run()


class _Device:
    """The state of a device that runs the steps."""

    def __init__(self, steps: Sequence[Step], by_need: bool) -> None:
        self._steps = steps
        self._users: list[list[int]] = [[] for _ in steps]
        self._missing = [0] * len(steps)
        for number, step in enumerate(steps):
            for needed in set(step.needs):
                if not 0 <= needed < number:
                    raise ValueError(f"step {number} needs step {needed}, which is not before it")
                self._users[needed].append(number)
                self._missing[number] += 1
        self._first_come = not by_need
        self._turns = self._by_need() if by_need else [(False, number) for number in range(len(steps))]
        self._now_s = self._wire_s = 0.0
        self._ready: list[tuple[_Turn, int]] = []
        self._queued: list[tuple[_Turn, int]] = []
        self._sent: list[tuple[float, int]] = []
        self._exposed_s = [0.0] * len(steps)

    def _by_need(self) -> list[_Turn]:
        """Of each step, when it is its turn if it can run: that of the first dots that need it."""
        turns: list[_Turn] = [(True, len(self._steps))] * len(self._steps)
        awaited = [False] * len(self._steps)
        for number in reversed(range(len(self._steps))):
            step, users = self._steps[number], self._users[number]
            awaited[number] = any(awaited[user] or self._steps[user].is_beside for user in users)
            if step.dots_s:
                turns[number] = not awaited[number], number
            else:
                turns[number] = min((turns[user] for user in users), default=turns[number])
        return turns

    def run(self) -> Schedule:
        self._start([number for number, missing in enumerate(self._missing) if not missing])
        while self._ready or self._sent or self._queued:
            self._send(self._now_s)
            if not self._ready and not self._sent:
                self._send(self._wire_s)
            if self._sent and (not self._ready or self._sent[0][0] <= self._now_s):
                self._receive()
            else:
                self._run_next()
        return Schedule(self._now_s, tuple(self._exposed_s))

    def _send(self, until_s: float) -> None:
        """Puts on the wire what it is free for by then."""
        while self._queued and self._wire_s <= until_s:
            _, number = heapq.heappop(self._queued)
            self._wire_s += self._steps[number].wire_s
            heapq.heappush(self._sent, (self._wire_s, number))

    def _receive(self) -> None:
        """Waits for the next collective, if it is not there yet."""
        there_s, number = heapq.heappop(self._sent)
        self._exposed_s[number] += max(0.0, there_s - self._now_s)
        self._now_s = max(self._now_s, there_s)
        self._start(self._released(number))

    def _run_next(self) -> None:
        """Runs the dots whose turn it is."""
        _, number = heapq.heappop(self._ready)
        step = self._steps[number]
        free_s = self._now_s + max(step.dots_s, step.wire_s)
        self._now_s += step.dots_s
        if step.wire_s:
            self._wire_s = max(self._now_s - step.dots_s, self._wire_s) + step.wire_s
            self._now_s = max(self._now_s, self._wire_s)
            self._blame(self._now_s - free_s)
        self._start(self._released(number))

    def _blame(self, late_s: float) -> None:
        """Counts what a step's hops waited for as exposed, of what was on the wire, the last first."""
        for _, number in sorted(self._sent, reverse=True):
            more_s = min(late_s, self._steps[number].wire_s - self._exposed_s[number])
            self._exposed_s[number] += more_s
            late_s -= more_s

    def _released(self, number: int) -> list[int]:
        """The steps that have waited for this one alone."""
        released = []
        for user in self._users[number]:
            self._missing[user] -= 1
            if not self._missing[user]:
                released.append(user)
        return released

    def _start(self, released: list[int]) -> None:
        """Queues steps, in program order; those of no time have run, and may release others."""
        self._send(self._now_s)
        heapq.heapify(released)
        while released:
            number = heapq.heappop(released)
            step = self._steps[number]
            if step.dots_s:
                heapq.heappush(self._ready, (self._turns[number], number))
            elif step.is_beside:
                if not self._queued:
                    self._wire_s = max(self._wire_s, self._now_s)
                heapq.heappush(self._queued, (self._turns[number], number))
                if self._first_come:
                    self._send(math.inf)
            else:
                for user in self._released(number):
                    heapq.heappush(released, user)
