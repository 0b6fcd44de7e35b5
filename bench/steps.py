"""Whole programs compiled as written and under ``policy="auto"``: their figures, and what they come to."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from bench.programs.program import Program
from bench.quantile import quantile
from bench.schedules import measure
from bench.schedules.case import Slice
from bench.schedules.tables import table
from bench.versions import spelled
from cost_model import Topology, by_name
from overlap import overlap_collectives

SLOWER: Final = 0.01
"""What a program must take longer than as written to be told as slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What became of a program.

    Attributes:
      name: of the program.
      chip: that it was compiled for.
      rewritten, sites: collectives that ``"auto"`` rewrites, and all.
      original_s, auto_s: modelled seconds as written and with rings.
      saved_s: what the rings were predicted to save.
      original_bytes, auto_bytes: temporary memory.
      error: why there are no figures; empty where there are.
    """

    name: str
    chip: str
    rewritten: int = 0
    sites: int = 0
    original_s: float = 0.0
    auto_s: float = 0.0
    saved_s: float = 0.0
    original_bytes: int = 0
    auto_bytes: int = 0
    error: str = ""

    @property
    def off(self) -> float:
        """Predicted less compiled seconds, over those as written."""
        return (self.original_s - self.saved_s - self.auto_s) / self.original_s

    @property
    def time(self) -> float:
        """Time with rings over that as written."""
        return self.auto_s / self.original_s

    @property
    def memory(self) -> float:
        """Temporary memory with rings over that as written; 1 where there is none."""
        return self.auto_bytes / self.original_bytes if self.original_bytes else 1.0


SomeStep = TypeVar("SomeStep", bound=Step)


def figures(
    original: Any, operands: Sequence[Any], topology: Topology, *, plain: Any = None
) -> dict[str, Any]:
    """Decides and compiles: the figures of a `Step`.

    Args:
      original: the jitted program.
      operands: types of its arguments, sharded.
      topology: the devices' network.
      plain: the program as it is compiled as written; None: as it is.
    """
    ours = overlap_collectives(original, policy="auto", strict=True)
    sites = ours.explain(*operands).sites
    written = measure.compiled_figures(original if plain is None else plain, operands, topology)
    found = written
    if any(site.rewritten for site in sites):
        found = measure.compiled_figures(ours, operands, topology)
    saved = (site.count * site.estimate.benefit_s for site in sites if site.rewritten and site.estimate)
    return {
        "rewritten": sum(site.rewritten for site in sites),
        "sites": len(sites),
        "original_s": written.total_s,
        "auto_s": found.total_s,
        "saved_s": sum(saved),
        "original_bytes": written.temp_bytes,
        "auto_bytes": found.temp_bytes,
    }


class OnSlice(Protocol):
    """A program for the devices of a slice."""

    @property
    def name(self) -> str:
        """Of the row."""

    @property
    def slice(self) -> Slice:
        """The devices."""

    @property
    def program(self) -> Program:
        """The program, in its real sizes."""


def row(of: OnSlice) -> Step:
    """Decides and compiles a program."""
    program = of.program
    mesh = measure.mesh_of(of.slice.topology, program.mesh_shape, program.axis_names)
    topology = Topology.from_devices(mesh.devices, by_name(of.slice.hardware))
    found = figures(program.make(mesh), program.shapes(mesh, "real"), topology)
    return dataclasses.replace(empty(of), **found)


def empty(of: OnSlice, error: str = "") -> Step:
    """A row without figures."""
    return Step(name=of.name, chip=of.slice.chip, error=error)


def line(each: Step) -> str:
    """A program's figures as they are printed when they come."""
    if each.error:
        return f"{each.name}: FAILED {each.error}"
    return (
        f"{each.name}: {each.rewritten} of {each.sites} rewritten, {each.original_s * 1e6:.0f} → "
        f"{each.auto_s * 1e6:.0f} µs (×{each.time:.2f}), predicted {each.off:+.1%} off, "
        f"memory ×{each.memory:.2f}"
    )


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """Of the programs of which something is rewritten: times, memory, and how far predictions were off."""
    found = [each for each in steps if each.rewritten and not each.error]
    if not found:
        return {"nets": len(steps), "rewritten": 0}
    off = [abs(each.off) for each in found]
    return {
        "nets": len(steps),
        "rewritten": len(found),
        "time": round(statistics.geometric_mean(each.time for each in found), 4),
        "slowest": round(max(each.time for each in found), 4),
        "slower": [each.name for each in found if each.time > 1 + SLOWER],
        "memory": round(statistics.median(each.memory for each in found), 4),
        "most_memory": round(max(each.memory for each in found), 4),
        "more_memory": [each.name for each in found if each.auto_bytes > each.original_bytes],
        "off_median": round(statistics.median(off), 4),
        "off_p90": round(quantile(off, 0.9), 4),
    }


def table_of(groups: Mapping[str, Sequence[Step]], what: str) -> str:
    """The summaries of groups of programs as a Markdown table.

    Args:
      groups: name → the programs.
      what: they are, in the plural.
    """
    lines = []
    for name, group in groups.items():
        of = summary(group)
        figures = ["–"] * 6
        if of["rewritten"]:
            figures = [
                f"×{of['time']:.2f} (×{of['slowest']:.2f})",
                str(len(of["slower"])),
                f"×{of['memory']:.2f} (×{of['most_memory']:.2f})",
                str(len(of["more_memory"])),
                f"{of['off_median']:.1%}",
                f"{of['off_p90']:.1%}",
            ]
        lines.append((name, f"{of['rewritten']} of {of['nets']}", *figures))
    headings = (
        what,
        "with a rewritten chain",
        "time over that as written (slowest)",
        f"slower by more than {SLOWER:.0%}",
        "temporary memory, median (most)",
        "with more",
        "predicted time off, median",
        "nine in ten within",
    )
    return table(headings, lines)


def grouped(rows: Sequence[SomeStep], by: Callable[[SomeStep], str]) -> dict[str, list[SomeStep]]:
    """The rows of each kind, in the order in which the first of each comes."""
    groups: dict[str, list[SomeStep]] = {}
    for each in rows:
        groups.setdefault(by(each), []).append(each)
    return groups


def page(
    title: str,
    about: str,
    rows: Sequence[SomeStep],
    groups: Mapping[str, Sequence[SomeStep]],
    made_with: Mapping[str, str],
    what: str,
    *,
    alphabetical: bool,
) -> str:
    """The Markdown page of a benchmark.

    Args:
      title: its heading.
      about: what was compiled: the beginning of a sentence.
      rows: all programs, which are summed up together, by chip, and listed.
      groups: name → programs that are summed up too.
      made_with: versions.
      what: the programs are, in the plural.
      alphabetical: whether they are listed by name, or in their order.
    """
    groups = {"all": rows, **grouped(rows, lambda each: each.chip), **groups}
    listed = sorted(rows, key=lambda each: each.name) if alphabetical else rows
    parts = [
        f"# {title}",
        f'{about}, compiled by the TPU compiler as written and under `policy="auto"`. Times are modelled: '
        "the compiled schedules, with the compiler's own cycle estimates. The predicted time is that as "
        "written less what the rings were predicted to save; how far it is off is relative to the time as "
        "written.",
        f"Made with {spelled(made_with)}.",
        table_of(groups, what),
        "\n".join(f"- {line(each)}" for each in listed),
    ]
    return "\n\n".join(parts) + "\n"
