"""When the steps of a program run on one device: dots one after the other, collectives beside them.

Compilers that hide latency schedule by list: of what is ready the dots run in program order, and a collective
that devices run beside them starts as soon as its operand is there and the wire is free. While no dot is
ready, what they wait for is exposed.
"""

from __future__ import annotations

import heapq
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


def list_schedule(steps: Sequence[Step]) -> Schedule:
    """Runs the steps, each once those that it needs have run.

    One that has dots and hops beside them ends when both have. What takes the time is the longer of the two,
    of each such step, all other dots, and what is exposed.

    Raises:
      ValueError: a step needs one that is not before it.
    """
    return _Device(steps).run()


class _Device:
    """The state of a device that runs the steps."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = steps
        self._users: list[list[int]] = [[] for _ in steps]
        self._missing = [0] * len(steps)
        for number, step in enumerate(steps):
            for needed in set(step.needs):
                if not 0 <= needed < number:
                    raise ValueError(f"step {number} needs step {needed}, which is not before it")
                self._users[needed].append(number)
                self._missing[number] += 1
        self._now_s = self._wire_s = 0.0
        self._ready: list[int] = []
        self._sent: list[tuple[float, int]] = []
        self._exposed_s = [0.0] * len(steps)

    def run(self) -> Schedule:
        self._start([number for number, missing in enumerate(self._missing) if not missing])
        while self._ready or self._sent:
            if self._sent and (not self._ready or self._sent[0][0] <= self._now_s):
                self._receive()
            else:
                self._run_next()
        return Schedule(self._now_s, tuple(self._exposed_s))

    def _receive(self) -> None:
        """Waits for the next collective, if it is not there yet."""
        there_s, number = heapq.heappop(self._sent)
        self._exposed_s[number] += max(0.0, there_s - self._now_s)
        self._now_s = max(self._now_s, there_s)
        self._start(self._released(number))

    def _run_next(self) -> None:
        """Runs the dots that come first in the program."""
        number = heapq.heappop(self._ready)
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
        """Sends or queues steps, in program order; those of no time have run, and may release others."""
        heapq.heapify(released)
        while released:
            number = heapq.heappop(released)
            step = self._steps[number]
            if step.dots_s:
                heapq.heappush(self._ready, number)
            elif step.wire_s:
                self._wire_s = max(self._now_s, self._wire_s) + step.wire_s
                heapq.heappush(self._sent, (self._wire_s, number))
            else:
                for user in self._released(number):
                    heapq.heappush(released, user)
