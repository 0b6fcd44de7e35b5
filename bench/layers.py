"""Training steps of a transformer as people write them, drawn, decided and compiled.

    python -m bench.layers                    draws, compiles; writes bench/results/layers.json and .md
    python -m bench.layers --resume FILE      keeps every step in FILE, and goes on where FILE ends
    python -m bench.layers --rows 'v5e.*fsdp' some; writes nothing unless --output is given

`bench.programs.layers` has the choices: how a layer is sharded, its blocks, its norms and casts, scans and
what is made again in the backward pass. Every step is compiled as written and under ``policy="auto"``. Needs
libtpu, and no TPU. All times are modelled.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench import steps
from bench.programs import layers
from bench.programs.layers import Choices
from bench.programs.program import Program
from bench.schedules.case import SLICES, Slice
from bench.step_runs import Benchmark
from bench.steps import Step

SEED: Final = 20261129
COUNT: Final = 95

WIDTHS: Final = (2048, 4096, 8192)
LENGTHS: Final = (1024, 2048, 4096)
TOKENS: Final = (512, 1024, 2048, 4096)
"""Of a device, where the batch or the sequence is sharded; else so many for every eight devices."""

HEAD: Final = 128
VOCABULARY: Final = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A step for a slice.

    Attributes:
      slice: the devices.
      choices: how the step is written.
      width: of the activations; an MLP is four times as wide, a gated one three and a half times.
      batch, length: sequences of all devices, and tokens of each.
    """

    slice: Slice
    choices: Choices
    width: int
    batch: int
    length: int

    @property
    def name(self) -> str:
        """Unique, such as ``"v5e:2x4 16x2048x4096 fsdp attention+mlp rms gelu 1x bias"``."""
        return f"{self.slice} {self.batch}x{self.length}x{self.width} {self.choices}"

    @property
    def program(self) -> Program:
        """What there is to compile."""
        gated = any("gated" in block for block in self.choices.blocks)
        sizes = {
            "B": self.batch,
            "S": self.length,
            "D": self.width,
            "F": self.width * 7 // 2 if gated else self.width * 4,
            "H": self.width // HEAD,
            "h": HEAD,
            "V": VOCABULARY,
        }
        return layers.program(self.choices, self.slice.devices, sizes)


def drawn(count: int, seed: int, slices: Sequence[Slice] = SLICES) -> list[Drawn]:
    """So many steps, chips in turn."""
    chips = list(dict.fromkeys(each.chip for each in slices))
    found: dict[str, Drawn] = {}
    number = 0
    while len(found) < count:
        draw = random.Random(f"{seed} {number}")
        choices = layers.drawn(draw)
        chip = chips[len(found) % len(chips)]
        where = draw.choice([s for s in slices if s.chip == chip and len(s.mesh_shape) == 1])
        width, length, tokens = draw.choice(WIDTHS), draw.choice(LENGTHS), draw.choice(TOKENS)
        each = Drawn(
            slice=where,
            choices=choices,
            width=width,
            batch=_batch(choices, where.devices, tokens, length),
            length=length,
        )
        found.setdefault(each.name, each)
        number += 1
    return list(found.values())


def _batch(choices: Choices, devices: int, tokens: int, length: int) -> int:
    """How many sequences all devices have, one at least where the batch is sharded."""
    sharded = {"fsdp": devices, "fsdp+sequence": devices // 4}.get(choices.sharding, 1)
    tokens *= devices if choices.over_fsdp or choices.over_sequence else max(1, devices // 8)
    return max(sharded, tokens // length)


def document(rows: Sequence[Step], made_with: Mapping[str, str], seed: int) -> str:
    """The page."""
    groups = {
        **steps.grouped(rows, lambda each: f"`{each.name.split()[2]}`"),
        "in a scan": [each for each in rows if "scanned" in each.name.split()],
    }
    about = (
        f"{len(rows)} training steps of a transformer of 1 to 3 layers, whose parts, sharding and "
        f"differentiation are drawn (`bench/programs/layers.py`; seed {seed})"
    )
    title = "Training steps as people write them"
    return steps.page(title, about, rows, groups, made_with, "steps", alphabetical=True)


BENCHMARK: Final = Benchmark(
    name="layers",
    about=__doc__,
    what="steps",
    kind=Step,
    programs=drawn,
    row=steps.row,
    empty=steps.empty,
    document=document,
    draws=(COUNT, SEED),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
