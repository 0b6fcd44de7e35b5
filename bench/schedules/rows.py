"""What is measured of a case, as data: a row with a figure for every version of its program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

ORIGINAL: Final = "original"
AUTOMATIC: Final = "xla_automatic"
POST_SPMD: Final = "xla_post_spmd"
TEXTBOOK: Final = "textbook"
AUTO: Final = "auto"
VERIFY: Final = "verify"

VERSIONS: Final = (ORIGINAL, AUTOMATIC, POST_SPMD, TEXTBOOK, AUTO, VERIFY)
"""The versions of a program: by hand, XLA's two modes, the usual ring, this library's two policies."""

XLA: Final = (AUTOMATIC, POST_SPMD)
OURS: Final = (AUTO, VERIFY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One compiled version of a program.

    Attributes:
      total_s: modelled, with elementwise work as the compiler estimates it.
      sceptical_s: modelled, with elementwise work at the memory bandwidth where the compiler estimates more.
      compute_s, exposed_s, copy_wait_s: of ``total_s``: computing, waiting for collectives, and for copies.
      matmul_s: of ``compute_s``: matmuls with what is fused into them.
      matmuls: how many of them run.
      matmul_type: result type of those that take the most time together.
      link_s: in which the busiest link direction is occupied.
      temp_bytes: temporary memory of one device.
      search_s: measured, of deciding on schedules; with "verify" of compiling those that are tried.
      schedule: of each of our sites, the ring's schedule, or "kept"; empty for other versions.
      rewritten, sites: collectives that rings replace, and all that the pass saw.
      sentences: why sites were kept.
      order: starts and dones of permutes, and matmuls, in schedule order: see ``order.Order``.
      permutes: how many permutes the schedule has; a loop's count once.
      idle: names of permutes with no matmul between start and done.
      date: on which it was compiled; empty where that was not kept.
      compile_cpu_s: measured processor seconds, of all threads, of tracing, rewriting and compiling the
        program itself; None where that was not measured.
    """

    total_s: float
    sceptical_s: float
    compute_s: float
    exposed_s: float
    copy_wait_s: float
    matmul_s: float
    matmuls: int
    matmul_type: str
    link_s: float
    temp_bytes: int
    search_s: float
    schedule: str = ""
    rewritten: int = 0
    sites: int = 0
    sentences: tuple[str, ...] = ()
    order: str = ""
    permutes: int = 0
    idle: tuple[str, ...] = ()
    date: str = ""
    compile_cpu_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case, measured.

    Attributes:
      name: of the case.
      chip, slice, pattern, width, tokens, dtype, axis_size: the case.
      matmul_s: of the original's dots, in its own schedule.
      links_s: of the collectives' bytes over all link directions of the axis.
      versions: name → figures of each version that compiled.
      failures: name → the first line of what went wrong with the others; "row" if the process died.
      wall_s: measured, for all of it.
    """

    name: str
    chip: str
    slice: str
    pattern: str
    width: str
    tokens: int
    dtype: str
    axis_size: int
    matmul_s: float = 0.0
    links_s: float = 0.0
    versions: Mapping[str, Figures] = dataclasses.field(default_factory=dict)
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def limit_s(self) -> float:
        """The least time: matmuls and links side by side, each at its best.

        Where the matmuls of our rings take less than the original's, as the compiler happens to lay them
        out better, they are the best.
        """
        ours = [self.versions[version].matmul_s for version in OURS if version in self.versions]
        return max(min(self.matmul_s, *ours), self.links_s) if ours else max(self.matmul_s, self.links_s)

    @property
    def ratio(self) -> float:
        """Communication over compute; 0 where nothing was measured."""
        return self.links_s / self.matmul_s if self.matmul_s else 0.0

    @property
    def measured(self) -> bool:
        """Whether the original compiled, without which nothing can be said."""
        return ORIGINAL in self.versions

    def total_s(self, version: str, *, sceptical: bool = False) -> float | None:
        """The modelled time of a version, if it compiled."""
        figures = self.versions.get(version)
        if figures is None:
            return None
        return figures.sceptical_s if sceptical else figures.total_s

    def xla_s(self, *, sceptical: bool = False) -> float | None:
        """The modelled time of the better of XLA's modes, if one compiled."""
        times = [self.total_s(version, sceptical=sceptical) for version in XLA]
        return min((time for time in times if time is not None), default=None)

    def efficiency(self, version: str) -> float | None:
        """The limit over the version's time."""
        time = self.total_s(version)
        return self.limit_s / time if time else None

    def renewed(self, other: Row) -> Row:
        """The row with what another measurement of its case found, and its own figures of other versions."""
        anew = {*other.versions, *other.failures}
        return dataclasses.replace(
            other,
            versions={v: f for v, f in self.versions.items() if v not in anew} | dict(other.versions),
            failures={v: f for v, f in self.failures.items() if v not in anew} | dict(other.failures),
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with what follows from the figures."""
        return {
            **dataclasses.asdict(self),
            "limit_s": self.limit_s,
            "ratio": self.ratio,
            "efficiency": {version: self.efficiency(version) for version in self.versions},
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Row:
        """A row from what ``to_dict`` made, or JSON of it."""
        known = {
            field.name: content[field.name] for field in dataclasses.fields(cls) if field.name in content
        }
        known["versions"] = {version: figures_of(figures) for version, figures in content["versions"].items()}
        return cls(**known)


def figures_of(content: Mapping[str, Any]) -> Figures:
    """Figures from JSON, which has lists for tuples."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
    }
    return Figures(**fields)
