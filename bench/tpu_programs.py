"""The programs of `bench/programs`, in real widths, compiled for five TPUs as written and under ``"auto"``.

    python -m bench.tpu_programs                 compiles; writes bench/results/tpu_programs.json and .md
    python -m bench.tpu_programs --resume FILE   keeps every program in FILE, and goes on where FILE ends
    python -m bench.tpu_programs --rows v5e      some; writes nothing unless --output is given

`bench.programs_table` tells what is predicted of their chains; this is what becomes of whole training steps,
whose compilers fuse residuals, norms and gradients with the dots around them. Needs libtpu, and no TPU. All
times are modelled.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench import steps
from bench.programs import PROGRAMS
from bench.programs.program import Program
from bench.schedules.case import SLICES, Slice
from bench.step_runs import Benchmark
from bench.steps import Step

DEVICES: Final = 8


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program for a slice of as many devices as its mesh has.

    Attributes:
      slice: the devices.
      program: the program.
    """

    slice: Slice
    program: Program

    @property
    def name(self) -> str:
        """Unique, such as ``"v5p:2x2x2 fsdp_mlp"``."""
        return f"{self.slice} {self.program.name}"


def everything() -> dict[str, Compiled]:
    """Every program for every chip, by name."""
    slices = [where for where in SLICES if where.mesh_shape == (DEVICES,)]
    found = (Compiled(where, program) for where in slices for program in PROGRAMS)
    return {each.name: each for each in found}


def document(rows: Sequence[Step], made_with: Mapping[str, str]) -> str:
    """The page."""
    groups = steps.grouped(rows, lambda each: f"`{each.name.split()[1]}`")
    about = f"The programs of `bench/programs` in real widths on {DEVICES} devices of a slice"
    return steps.page(
        "Training steps of a layer", about, rows, groups, made_with, "programs", alphabetical=False
    )


BENCHMARK: Final = Benchmark(
    name="tpu_programs",
    about=__doc__,
    what="programs",
    kind=Step,
    programs=lambda: everything().values(),
    row=steps.row,
    empty=steps.empty,
    document=document,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
