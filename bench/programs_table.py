"""Tells of every program in real widths what would be rewritten for a TPU v5p, and why the rest would not.

    python -m bench.programs_table      prints a table, writes bench/results/programs.json and .md

Programs are traced for eight virtual CPU devices; none is compiled or run. All times are modelled.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from jax.sharding import Mesh

import overlap
from bench.programs import PROGRAMS, decoder
from bench.versions import spelled
from overlap import Report, overlap_collectives
from passes import Policy

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "results"
HARDWARE: Final = "tpu_v5p"
POLICIES: Final[tuple[Policy, ...]] = ("auto", "always")
HEADINGS: Final = ("program", "mesh", "policy", "rewritten", "kept, and why", "modelled, ms")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What is decided about one program under one policy.

    Attributes:
      program: its name.
      mesh: its axes and their sizes.
      policy: see ``overlap_collectives``.
      report: every site.
    """

    program: str
    mesh: str
    policy: str
    report: Report

    @property
    def kept(self) -> Counter[str]:
        """How many sites stay for each reason."""
        return Counter(site.reason for site in self.report.kept)

    @property
    def before_s(self) -> float:
        """Modelled seconds, in one call, of the collectives that are rewritten and of their dots."""
        return sum(s.estimate.original_s * s.count for s in self.report.rewritten if s.estimate)

    @property
    def after_s(self) -> float:
        """Modelled seconds of the rings in their place."""
        return sum(s.estimate.overlapped_s * s.count for s in self.report.rewritten if s.estimate)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row under ``HEADINGS``."""
        times = f"{self.before_s * 1e3:.1f} → {self.after_s * 1e3:.1f}" if self.report.rewritten else ""
        return (
            self.program,
            self.mesh,
            self.policy,
            f"{len(self.report.rewritten)} of {len(self.report.sites)}",
            ", ".join(f"{code} ×{count}" for code, count in self.kept.most_common()),
            times,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON; ``kept`` is one entry per kind, reason and sentence."""
        kept = Counter((s.kind, s.reason, s.sentence.replace(f"{ROOT}/", "")) for s in self.report.kept)
        return {
            "program": self.program,
            "mesh": self.mesh,
            "policy": self.policy,
            "sites": len(self.report.sites),
            "rewritten": dict(Counter(s.kind for s in self.report.rewritten)),
            "kept": [
                {"kind": kind, "reason": reason, "sentence": sentence, "sites": sites}
                for (kind, reason, sentence), sites in kept.items()
            ],
            "modelled_before_s": self.before_s,
            "modelled_after_s": self.after_s,
        }


def programs() -> Iterator[tuple[str, Mesh, Any, tuple[Any, ...]]]:
    """Every program in real widths: its name, its mesh, its jitted step and the types of its arguments."""
    for program in PROGRAMS:
        mesh = program.make_mesh()
        yield program.name, mesh, program.make(mesh), program.shapes(mesh, "real")
    mesh, config = decoder.make_mesh(), decoder.LARGE
    shapes = decoder.state_shapes(config, mesh), decoder.batch_shapes(config, mesh)
    yield "decoder", mesh, decoder.make_train_step(config, mesh), shapes


def rows(policies: Sequence[Policy] = POLICIES) -> Iterator[Row]:
    """The table's rows, each as soon as it is known."""
    for name, mesh, step, shapes in programs():
        axes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        for policy in policies:
            decorated = overlap_collectives(step, policy=policy, hardware=HARDWARE, strict=True)
            yield Row(program=name, mesh=axes, policy=str(policy), report=decorated.explain(*shapes))


def versions() -> dict[str, str]:
    """What the table was made with."""
    return {
        "overlap-collectives": overlap.__version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib")},
    }


def markdown(found: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *(row.cells for row in found)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints and writes the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder of programs.json and programs.md"
    )
    options = parser.parse_args(argv)
    found, made_with = list(rows()), versions()

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in (HEADINGS[0], *HEADINGS[2:]):
        table.add_column(heading, no_wrap=heading == HEADINGS[0], overflow="fold")
    for row in found:
        program, mesh, policy, rewritten, kept, times = row.cells
        first = row.policy == POLICIES[0]
        table.add_row(
            f"{program}\n[dim]{mesh}" if first else "",
            policy,
            rewritten,
            kept.replace(", ", "\n"),
            times,
            end_section=not first,
        )
    about = (
        f"What is decided for {HARDWARE}, per training step of one device. Modelled: the time of the "
        f"rewritten collectives and their dots, before → after. {spelled(made_with)}."
    )
    console = Console()
    console.print(about, style="dim")
    console.print(table)

    options.output.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": 1,
        "hardware": HARDWARE,
        "versions": made_with,
        "rows": [row.to_dict() for row in found],
    }
    (options.output / "programs.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    (options.output / "programs.md").write_text(f"# Programs\n\n{about}\n\n{markdown(found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
