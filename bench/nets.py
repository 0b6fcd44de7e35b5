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
import json
import random
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.quantile import quantile
from bench.schedules import command, grid, measure, programs, run, workers
from bench.schedules.case import SLICES, TOKENS, WIDTHS, Case
from bench.schedules.programs import Problem
from bench.schedules.tables import table
from bench.versions import spelled
from cost_model import Topology, by_name
from overlap import overlap_collectives, tpu_target

NAME: Final = "nets"
SEED: Final = 20261126
COUNT: Final = 60
LAYERS: Final = (1, 2, 3)
LIMIT_S: Final = 1200.0
SLOWER: Final = 0.01
"""What a net must take longer than as written to be told as slower."""


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
class Row:
    """What became of a net.

    Attributes:
      name, chip, layers, gradient: of the net.
      rewritten, sites: collectives that ``"auto"`` rewrites, and all.
      original_s, auto_s: modelled seconds as written and with rings.
      saved_s: what the rings were predicted to save.
      original_bytes, auto_bytes: temporary memory.
      error: why there are no figures; empty where there are.
    """

    name: str
    chip: str
    layers: int
    gradient: bool
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
    topology = Topology.from_devices(mesh.devices, by_name(case.slice.hardware))
    original = programs.manual(problem, mesh)
    operands = programs.operands(problem, mesh)
    ours = overlap_collectives(original, policy="auto", strict=True)
    sites = ours.explain(*operands).sites
    plain = measure.compiled_figures(programs.called(original, problem, mesh), operands, topology)
    found = plain
    if any(site.rewritten for site in sites):
        found = measure.compiled_figures(ours, operands, topology)
    return dataclasses.replace(
        empty(net),
        rewritten=sum(site.rewritten for site in sites),
        sites=len(sites),
        original_s=plain.total_s,
        auto_s=found.total_s,
        saved_s=sum(
            site.count * site.estimate.benefit_s for site in sites if site.rewritten and site.estimate
        ),
        original_bytes=plain.temp_bytes,
        auto_bytes=found.temp_bytes,
    )


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


def line(each: Row) -> str:
    """A row as it is printed when it comes."""
    if each.error:
        return f"{each.name}: FAILED {each.error}"
    return (
        f"{each.name}: {each.rewritten} of {each.sites} rewritten, {each.original_s * 1e6:.0f} → "
        f"{each.auto_s * 1e6:.0f} µs (×{each.time:.2f}), predicted {each.off:+.1%} off, "
        f"memory ×{each.memory:.2f}"
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Over the nets of which something is rewritten: times, memory, and how far predictions were off."""
    found = [each for each in rows if each.rewritten and not each.error]
    if not found:
        return {"nets": len(rows), "rewritten": 0}
    off = [abs(each.off) for each in found]
    return {
        "nets": len(rows),
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


def document(rows: Sequence[Row], made_with: Mapping[str, str], seed: int) -> str:
    """The page."""
    groups: dict[str, list[Row]] = {"all": list(rows)}
    for chip in dict.fromkeys(each.chip for each in rows):
        groups[chip] = [each for each in rows if each.chip == chip]
    groups["forward"] = [each for each in rows if not each.gradient]
    groups["with gradient"] = [each for each in rows if each.gradient]
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
        "nets",
        "with a rewritten chain",
        "time over that as written (slowest)",
        f"slower by more than {SLOWER:.0%}",
        "temporary memory, median (most)",
        "with more",
        "predicted time off, median",
        "nine in ten within",
    )
    parts = [
        "# Programs of several chains",
        f"{len(rows)} random MLPs of 1 to 3 layers (seed {seed}), half of them with gradients, compiled by "
        'the TPU compiler as written and under `policy="auto"`. Times are modelled: the compiled schedules, '
        "with the compiler's own cycle estimates. The predicted time is that as written less what the rings "
        "were predicted to save; how far it is off is relative to the time as written.",
        f"Made with {spelled(made_with)}.",
        table(headings, lines),
        "\n".join(f"- {line(each)}" for each in sorted(rows, key=lambda each: each.name)),
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Decides, compiles, prints, writes; the exit status is 2 without libtpu."""
    parser = command.parser(__doc__, "nets")
    parser.add_argument("--count", type=int, metavar="N", default=COUNT, help=f"nets drawn ({COUNT})")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of the draw ({SEED})")
    options = parser.parse_args(argv)
    nets = {net.name: net for net in drawn(options.count, options.seed)}
    if options.worker:
        workers.serve(lambda name: dataclasses.asdict(row(nets[name])), sys.stdin, sys.stdout)
        return 0
    if options.rows:
        nets = {name: net for name, net in nets.items() if re.search(options.rows, name)}
    if (
        status := command.nothing_to_measure(NAME, list(nets.values()), options, tpu_target.missing)
    ) is not None:
        return status
    made_with = run.versions("libtpu")
    rows = compiled(nets, options, made_with)
    print(f"\n{json.dumps(summary(rows), indent=1)}")
    if (folder := command.folder(options)) is not None:
        page = document(rows, made_with, options.seed)
        content = {
            "schema": 1,
            "kind": "modelled",
            "versions": made_with,
            "seed": options.seed,
            "summary": summary(rows),
            "rows": [dataclasses.asdict(each) for each in rows],
        }
        run.write(folder, NAME, page, content)
        print(f"\nWritten: {folder / NAME}.md and .json")
    return 0


def compiled(nets: Mapping[str, Net], options: Any, made_with: Mapping[str, str]) -> list[Row]:
    """The rows of all nets, in their order, by other processes, printed and kept as they come."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else run.PIPE_COLUMNS)
    kept = (
        [] if options.resume is None else [Row(**content) for content in run.kept(options.resume, made_with)]
    )
    known = {each.name: each for each in kept if each.name in nets and not each.error}
    waiting = [name for name in nets if name not in known]
    asked = [
        *workers.interpreter(f"bench.{NAME}"),
        "--count",
        str(options.count),
        "--seed",
        str(options.seed),
    ]
    environment = run.of_workers(tpu_target.ENVIRONMENT)
    answers = workers.answers(waiting, asked, environment, jobs=options.jobs, limit_s=LIMIT_S)
    for number, answer in enumerate(run.progress(console, answers, len(waiting), NAME), 1):
        found = empty(nets[answer.name], answer.error) if answer.content is None else Row(**answer.content)
        known[found.name] = found
        if options.resume is not None:
            run.keep(options.resume, dataclasses.asdict(found), made_with)
        console.print(f"{number}/{len(waiting)} {line(found)}", markup=False, soft_wrap=True)
    return [known[name] for name in nets]


if __name__ == "__main__":
    sys.exit(main())
