"""What trials found: the times of a chain as written and as each ring tried, and which of them is to run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from overlap import units
from passes import Choice, Trial

GAIN: Final = 0.01
"""By how much of its own time a ring must beat the chain as written."""

NEARLY: Final = 0.1
"""By how much a ring may be slower than what is run by itself, to be tried within the program anyhow."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One version of a chain, compiled and timed.

    Attributes:
      seconds: that it takes.
      temporary_bytes: that one device needs beside arguments and results; None where the compiler tells none.

    Raises:
      ValueError: the time is not positive and finite, or the bytes are negative.
    """

    seconds: float
    temporary_bytes: int | None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"a program takes a positive and finite time, not {self.seconds!r} s")
        if self.temporary_bytes is not None and self.temporary_bytes < 0:
            raise ValueError(f"a program needs no negative memory, got {self.temporary_bytes!r} bytes")

    def fits(self, original: Timed) -> bool:
        """Whether it needs no more memory than the chain as written, as far as is known."""
        if self.temporary_bytes is None or original.temporary_bytes is None:
            return True
        return self.temporary_bytes <= original.temporary_bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """A ring that could not be compiled or timed.

    Attributes:
      error: why, in one line.
      lasting: whether it would fail again: the compiler refused it. Else it may have been want of memory, or
        a fault of this library.
    """

    error: str
    lasting: bool


@dataclass(frozen=True, slots=True)
class Times:
    """What was found of one chain.

    Attributes:
      original: the chain as written.
      rings: its schedules, in the order in which they were tried; the last ones may be missing.
    """

    original: Timed
    rings: tuple[Timed | Failed, ...]

    @property
    def lasting(self) -> bool:
        """Whether the same would be found again."""
        return all(isinstance(ring, Timed) or ring.lasting for ring in self.rings)


def _more_memory(times: Times) -> str:
    """How much more memory the fastest ring needs than the chain as written."""
    fastest = min((ring for ring in times.rings if isinstance(ring, Timed)), key=lambda ring: ring.seconds)
    original = times.original.temporary_bytes
    if fastest.temporary_bytes is None or original is None:
        return ""
    more = fastest.temporary_bytes - original
    return f"It needs {units.size(more)} more than the {units.size(original)} of temporary memory as written."


def choose(times: Times, choices: Sequence[Choice], kind: str) -> Trial[Choice]:
    """The fastest ring that needs no more memory than the chain as written, if it gains enough.

    Args:
      times: what was found.
      choices: what the rings are, in order.
      kind: ``modelled`` or ``measured``.

    Returns:
      The trial. Where every ring needs more memory, its ``ring_s`` is the fastest of them; where every ring
      failed, infinite.
    """
    enough_s = times.original.seconds / (1 + GAIN)
    timed = [(ring, number) for number, ring in enumerate(times.rings) if isinstance(ring, Timed)]
    fitting = [(ring.seconds, number) for ring, number in timed if ring.fits(times.original)]
    best_s, best = min(fitting, default=(math.inf, 0))
    others = [(ring.seconds, number) for ring, number in timed if not ring.fits(times.original)]
    larger_s, larger = min(others, default=(math.inf, 0))
    lean = not fitting and bool(timed)
    run = best if best_s < enough_s else None
    run_s = times.original.seconds if run is None else best_s
    nearly_s, nearly = min((found for found in fitting if found[1] != run), default=(math.inf, 0))
    return Trial(
        None if run is None else choices[run],
        times.original.seconds,
        larger_s if lean else best_s,
        kind,
        note=_more_memory(times) if lean else "",
        larger=choices[larger] if larger_s < min(enough_s, best_s / (1 + GAIN)) else None,
        larger_s=larger_s,
        nearly=choices[nearly] if nearly_s <= run_s * (1 + NEARLY) else None,
        nearly_s=nearly_s,
    )
