"""Programs of several chains: random MLPs of some layers, with and without gradients, decided and compiled.

    python -m bench.nets                    draws, decides, compiles; writes bench/results/nets.json and .md
    python -m bench.nets --resume FILE      keeps every program in FILE, and goes on where FILE ends
    python -m bench.nets --rows 'v5e.*grad' some; writes nothing unless --output is given

Chains of one program share what is on chip and what is kept for the backward pass, which no single chain
shows. Every net is compiled as written and under ``policy="auto"``: the time that its rings were predicted to
save is compared with that of the two schedules. Needs libtpu, and no TPU. All times are modelled.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench import steps
from bench.schedules import grid, measure, programs
from bench.schedules.case import SLICES, TOKENS, WIDTHS, Case
from bench.schedules.programs import Problem
from bench.step_runs import Benchmark
from bench.steps import Step
from cost_model import Topology, by_name

SEED: Final = 20261126
COUNT: Final = 60
LAYERS: Final = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """An MLP of some layers.

    Attributes:
      case: a layer: ``mlp``, or ``mlp_grad`` for its gradient with respect to input and weights.
      layers: how many, one after the other, each with weights of its own.
    """

    case: Case
    layers: int

    @property
    def name(self) -> str:
        """Unique, such as ``"v5p:2x2x2 3 × mlp_grad llama3-8b 512"``."""
        case = self.case
        return f"{case.slice} {self.layers} × {case.pattern} {case.width.name} {case.tokens}"

    def problem(self) -> Problem:
        """What there is to compile."""
        layer = programs.problem(self.case)
        weights = len(layer.shapes) - 1

        def chained(of: Callable[..., Any]) -> Callable[..., Any]:
            def whole(x: Any, *every: Any) -> Any:
                for number in range(self.layers):
                    x = of(x, *every[number * weights : (number + 1) * weights])
                return x

            return whole

        return dataclasses.replace(
            layer,
            shapes=(layer.shapes[0], *layer.shapes[1:] * self.layers),
            in_specs=(layer.in_specs[0], *layer.in_specs[1:] * self.layers),
            manual=chained(layer.manual),
            automatic=lambda mesh: chained(layer.automatic(mesh)),
            textbook=chained(layer.textbook),
            moved=layer.moved * self.layers,
            flops=layer.flops * self.layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Step):
    """What became of a net.

    Attributes:
      layers, gradient: of the net.
    """

    layers: int
    gradient: bool


def drawn(count: int, seed: int) -> list[Net]:
    """So many nets, chips and gradients in turn; no gradients on slices with another axis, as in the grid."""
    draw = random.Random(seed)
    chips = list(dict.fromkeys(each.chip for each in SLICES))
    found: dict[str, Net] = {}
    while len(found) < count:
        chip = chips[len(found) % len(chips)]
        pattern = ("mlp", "mlp_grad")[len(found) // len(chips) % 2]
        where = draw.choice(
            [each for each in SLICES if each.chip == chip and (pattern == "mlp" or each.others == 1)]
        )
        case = Case(slice=where, pattern=pattern, width=draw.choice(WIDTHS), tokens=draw.choice(TOKENS))
        net = Net(case=case, layers=draw.choice(LAYERS))
        ratio = grid.estimated_ratio(case)
        kept = 3 if pattern == "mlp_grad" else 1
        held_bytes = kept * net.layers * programs.problem(case).held_bytes(case)
        if grid.WIDEST[0] <= ratio <= grid.WIDEST[1] and held_bytes <= grid.HELD_BYTES:
            found.setdefault(net.name, net)
    return list(found.values())


def row(net: Net) -> Row:
    """Decides and compiles a net."""
    case, problem = net.case, net.problem()
    mesh = measure.tpu_mesh(case.slice)
    original = programs.manual(problem, mesh)
    operands = programs.operands(problem, mesh)
    plain = programs.called(original, problem, mesh)
    topology = Topology.from_devices(mesh.devices, by_name(case.slice.hardware))
    return dataclasses.replace(empty(net), **steps.figures(original, operands, topology, plain=plain))


def empty(net: Net, error: str = "") -> Row:
    """A row without figures."""
    case = net.case
    return Row(
        name=net.name,
        chip=case.slice.chip,
        layers=net.layers,
        gradient=case.pattern == "mlp_grad",
        error=error,
    )


def document(rows: Sequence[Row], made_with: Mapping[str, str], seed: int) -> str:
    """The page."""
    groups = {
        "forward": [each for each in rows if not each.gradient],
        "with gradient": [each for each in rows if each.gradient],
    }
    about = f"{len(rows)} random MLPs of 1 to 3 layers (seed {seed}), half of them with gradients"
    return steps.page("Programs of several chains", about, rows, groups, made_with, "nets", alphabetical=True)


BENCHMARK: Final = Benchmark(
    name="nets",
    about=__doc__,
    what="nets",
    kind=Row,
    programs=drawn,
    row=row,
    empty=empty,
    document=document,
    draws=(COUNT, SEED),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
