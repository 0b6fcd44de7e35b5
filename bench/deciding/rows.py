"""What is found of a chain, as data: the model's decision, and programs that were compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bench.deciding.chains import Drawn
from cost_model import Estimate

ORIGINAL: Final = "original"
"""In place of a schedule's name: the chain as written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What ``policy="auto"`` makes of a chain.

    Attributes:
      name: the chain's.
      rewritten: whether a ring replaces it.
      reason: code of why, or why not.
      schedule: of the ring with the largest predicted benefit; empty where there is no ring.
      original_s, ring_s: predicted, of the chain as written and of that ring.
    """

    name: str
    rewritten: bool
    reason: str
    schedule: str
    original_s: float
    ring_s: float

    @property
    def gain(self) -> float:
        """The predicted benefit, as a part of the original time."""
        return 1 - self.ring_s / self.original_s

    @property
    def runs(self) -> str:
        """What then runs: the schedule's name, or ``ORIGINAL``."""
        return self.schedule if self.rewritten else ORIGINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A chain as written, or as one ring, compiled.

    Attributes:
      name: the chain's.
      schedule: the ring's, or ``ORIGINAL``.
      seconds: modelled, of the compiler's schedule; None if it did not compile.
      compute_s, matmul_s, exposed_s, copy_wait_s: of those: computing, its matmuls with what is fused into
        them, waiting for collectives, and for copies.
      temporary_bytes: of one device; None if they are not known.
      error: what went wrong.
      wall_s: measured, for all of it.
    """

    name: str
    schedule: str
    seconds: float | None = None
    compute_s: float = 0.0
    matmul_s: float = 0.0
    exposed_s: float = 0.0
    copy_wait_s: float = 0.0
    temporary_bytes: int | None = None
    error: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A chain of the sample.

    Attributes:
      chain: what it is.
      decided: the model's decision.
      predicted: schedule → prediction, of all candidates of a search, the fastest first.
      compiled: schedule or ``ORIGINAL`` → what was compiled.
    """

    chain: Drawn
    decided: Decided
    predicted: Mapping[str, Estimate]
    compiled: Mapping[str, Compiled] = field(default_factory=dict)

    def seconds(self, schedule: str) -> float | None:
        """The modelled time of one of the programs; None if it is not known."""
        found = self.compiled.get(schedule)
        return None if found is None else found.seconds

    @property
    def original_s(self) -> float | None:
        """As written, compiled."""
        return self.seconds(ORIGINAL)

    @property
    def rings_s(self) -> dict[str, float]:
        """Schedule → seconds, of all rings that compiled."""
        return {
            schedule: found.seconds
            for schedule, found in self.compiled.items()
            if schedule != ORIGINAL and found.seconds is not None
        }

    @property
    def failures(self) -> dict[str, str]:
        """Schedule → what went wrong with it."""
        return {schedule: found.error for schedule, found in self.compiled.items() if found.error}

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        return {
            **dataclasses.asdict(self.decided),
            "predicted": {
                schedule: dataclasses.asdict(priced)
                for schedule, priced in self.predicted.items()
                if schedule in self.compiled
            },
            "compiled": {
                schedule: {
                    name: value
                    for name, value in dataclasses.asdict(found).items()
                    if name not in ("name", "schedule")
                }
                for schedule, found in self.compiled.items()
            },
        }
