"""The command ``split``: over which mesh axes to divide a model on a slice, with rings and without."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, get_args

from cost_model import Hardware
from cost_model.layer import AxisName, Split
from cost_model.layer_time import PassTime
from cost_model.mesh_split import GOALS, IN_SLICE, StepTime, best_splits
from cost_model.strategies import Model
from cost_model.topology import Topology
from overlap import tpu_slice
from overlap.figures_table import figures_table
from overlap.plain_text import PIPE_COLUMNS, columns, plain_text, wrapped
from overlap.plan_command import hardware_given
from overlap.progress_bar import progress_bar
from overlap.units import digits, duration, size
from passes import shims
from passes.rules import considered

if TYPE_CHECKING:
    from rich.table import Table

FAILED: Final = 2
"""The exit status when an option is of no use, or nothing fits."""

AXES: Final[tuple[AxisName, ...]] = get_args(AxisName)

SIZES: Final = {
    "layers": "how many layers",
    "d_model": "width of the residual stream",
    "d_ff": "hidden width of the MLP",
    "tokens": "of one step, all devices together",
}
"""What a model needs."""

ATTENTION: Final = {
    "heads": ("query heads (default: 0, which leaves attention out)", 0),
    "kv_heads": ("key and value heads (default: as many)", None),
    "head_dim": ("width of a head (default: 128)", 128),
    "sequence": ("tokens of a sequence (default: 0, which leaves scores out)", 0),
}


def add_commands(commands: Any) -> None:
    """Adds ``split`` to argparse's subcommands."""
    parser = commands.add_parser(
        "split",
        help="predict how best to divide a model over the devices of a slice",
        description=(
            "Prices a training step of a transformer for every way to divide it over the devices: as "
            "written, every collective after its dots; with this library's rings; and at best, with all of a "
            "layer's communication hidden. Nothing runs."
        ),
        epilog="All times are predictions of the cost model. docs/cost_model.md tells what is left out.",
    )
    parser.add_argument(
        "--topology", required=True, metavar="SHAPE", help="the slice's chips: v5p:4x4x4; of GPUs, h100:8"
    )
    parser.add_argument("--hardware", metavar="NAME", help="a name, or a file that calibrate wrote (.json)")
    for name, words in SIZES.items():
        parser.add_argument(_option(name), required=True, type=int, metavar="N", help=words)
    for name, (words, default) in ATTENTION.items():
        parser.add_argument(_option(name), type=int, default=default, metavar="N", help=words)
    parser.add_argument("--gated", action="store_true", help="the MLP has two matrices in, as with SwiGLU")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations (default: bfloat16)")
    parser.add_argument(
        "--axes",
        default="fsdp,tensor",
        metavar="NAMES",
        help=f"mesh axes to try, of {', '.join(IN_SLICE)} (default: fsdp,tensor)",
    )
    parser.add_argument("--pods", type=int, default=1, metavar="N", help="slices, data parallel (default: 1)")
    parser.add_argument(
        "--microbatches",
        default="1",
        metavar="N,N",
        help="numbers to try with a pipeline in --axes (default: 1)",
    )
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="what weights and Adam's state of a device may take"
    )
    parser.add_argument(
        "--goal", choices=GOALS, default="overlapped", help="what is to be short (default: overlapped)"
    )
    parser.add_argument("--rows", type=int, default=10, metavar="N", help="splits shown (default: 10)")
    parser.add_argument("--collectives", action="store_true", help="list those of a layer, of the best split")
    parser.add_argument("--json", action="store_true", help="print JSON, of all splits")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Does what the command line says; the exit status is 0, or 2 with a sentence on stderr."""
    try:
        hardware, shape = _slice(arguments)
        model = Model(
            **{name: getattr(arguments, name) for name in (*SIZES, *ATTENTION)},
            gated=arguments.gated,
            dtype=arguments.dtype,
        )
        if arguments.rows < 1:
            raise ValueError(f"--rows {arguments.rows}: there is at least one to show")
        axes, microbatches = _names(arguments.axes), _numbers(arguments.microbatches)
        if microbatches != (1,) and "pipeline" not in axes:
            raise ValueError(
                f"--microbatches {arguments.microbatches} is of no use without a pipeline: give "
                f"--axes pipeline,{arguments.axes} too"
            )
        with progress_bar("pricing splits") as progress:
            found = best_splits(
                model,
                hardware,
                shape,
                axes=axes,
                pods=arguments.pods,
                microbatches=microbatches,
                memory_bytes=_memory_bytes(arguments.memory),
                goal=arguments.goal,
                among=considered,
                starts_implied=not shims.EXPLICIT_STARTS,
                progress=progress,
            )
    except ValueError as error:
        print(f"overlap split: {_as_options(str(error), arguments)}", file=sys.stderr)
        return FAILED
    if unfit := sorted({*microbatches} - {step.split.microbatches for step in found}):
        numbers = ", ".join(map(str, unfit))
        print(f"overlap split: no split with {numbers} microbatches fits the model", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"schema": 1, "splits": [_figures(step) for step in found]}, indent=2))
        return 0
    width = columns(PIPE_COLUMNS)
    shown, best = found[: arguments.rows], found[0]
    print(wrapped(_heading(best, hardware), width), end="\n\n")
    print(plain_text(_splits(shown), width=width), end="\n\n")
    print(wrapped(_words(best, len(shown), len(found)), width))
    if arguments.collectives:
        print("\n" + plain_text(_collectives(best), width=width))
        if any(move.saved_s > move.seconds for of in _passes(best).values() for move in of.moves):
            said = "A ring saves more than its collective takes where its dots are faster than the whole one."
            print("\n" + wrapped(said, width))
    return 0


def _slice(arguments: argparse.Namespace) -> tuple[Hardware, tuple[int, ...]]:
    """The device, and the chips along each dimension.

    Raises:
      ValueError: they are unknown, or contradict each other.
    """
    given = None if arguments.hardware is None else hardware_given(arguments.hardware)
    return tpu_slice.slice_on(arguments.topology, given)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _as_options(said: str, arguments: argparse.Namespace) -> str:
    """What an error says, in which arguments of Python with their values, ``d_ff 64``, become options."""
    if arguments.memory is not None:
        said = re.sub(r"\bmemory_bytes [\d.e+]+", f"--memory {arguments.memory:g}", said)
    names = "|".join((*SIZES, *ATTENTION, "pods"))
    return re.sub(rf"(?<!-)\b({names}) (?=-?\d)", lambda found: f"{_option(found[1])} ", said)


def _names(given: str) -> tuple[Any, ...]:
    """Names of mesh axes; ``best_splits`` refuses those it does not know."""
    return tuple(name.strip() for name in given.split(","))


def _numbers(given: str) -> tuple[int, ...]:
    if not all(part.strip().isdecimal() and int(part) for part in given.split(",")):
        raise ValueError(f"--microbatches {given} are no numbers from 1 on, such as 4,8,16")
    return tuple(map(int, given.split(",")))


def _memory_bytes(given: float | None) -> float:
    if given is None:
        return math.inf
    if not given > 0:
        raise ValueError(f"--memory {given:g} leaves no room for any weight")
    return given * 2**30


def _heading(step: StepTime, hardware: Hardware) -> str:
    model, layout = step.model, step.layout
    attention = f", {model.heads} heads" if model.heads else ", no attention"
    where = f"{'×'.join(map(str, layout.shape))} {hardware.name}"
    if hardware.network == "switch" and (hosts := Topology.logical(layout.shape, hardware)).domains > 1:
        where = str(hosts)
    where += f" in each of {step.split.pods} pods" if step.split.pods > 1 else ""
    return (
        f"{model.layers} layers of {model.d_model} and {model.d_ff}{attention}: "
        f"{digits(model.parameters / 1e9)} billion weights, {model.tokens:,} tokens a step, on {where} "
        f"({step.split.devices} device{'s' * (step.split.devices > 1)}). All times are modelled."
    )


def _splits(steps: tuple[StepTime, ...]) -> Table:
    table = figures_table("split", "as written", "rings", "gain", "at best", "state")
    for step in steps:
        plain_s, overlapped_s = step.step_s("plain"), step.step_s("overlapped")
        table.add_row(
            str(step.split),
            duration(plain_s),
            duration(overlapped_s),
            f"×{plain_s / overlapped_s:.2f}",
            duration(step.step_s("ideal")),
            size(round(step.state_bytes)),
        )
    return table


def _mesh(split: Split) -> Mapping[str, int]:
    return {axis: getattr(split, axis) for axis in AXES}


def _places(step: StepTime) -> Mapping[str, str]:
    """The part of the slice that each axis has, of those that have one."""
    described = ((axis, step.layout.describe(axis)) for axis in IN_SLICE)
    return {axis: where for axis, where in described if where}


def _words(best: StepTime, shown: int, count: int) -> str:
    """Where the axes of the best split lie, and how many splits are not shown."""
    lies = [f"{axis} has {where}" for axis, where in _places(best).items()] if _torus(best) else []
    lines = [f"Of the first, {'; '.join(lies)}."] if lies else []
    if shown < count:
        lines.append(f"{count - shown} more are slower: --rows {count} shows them.")
    lines.append(
        "As written: every collective after its dots. Rings: as this library makes them. At best: the longer "
        "of a layer's dots and its collectives, each as written; a ring's partial dots may be faster than "
        "whole ones. State: a device's weights and what Adam keeps of them, without activations."
    )
    return "\n".join(lines)


def _torus(step: StepTime) -> bool:
    """Whether the slice has dimensions that an axis can lie along."""
    return len(step.layout.shape) > 1 or len(step.layout.parts) > 1


def _collectives(step: StepTime) -> Table:
    table = figures_table("of a layer", "axis", "as written", "a ring saves")
    for name, of in _passes(step).items():
        if of.moves:
            table.add_row(f"{name}:", "", "", "")
        for each in of.moves:
            saved = duration(each.saved_s) if each.ring else "–"
            table.add_row(f"  {each.move.what}", each.move.axis, duration(each.seconds), saved)
    return table


def _passes(step: StepTime) -> Mapping[str, PassTime]:
    return {"forward": step.forward, "backward": step.backward, "at the end": step.reduction}


def _figures(step: StepTime) -> dict[str, Any]:
    return {
        "mesh": _mesh(step.split),
        "microbatches": step.split.microbatches,
        "layout": _places(step),
        "step_s": {goal: step.step_s(goal) for goal in GOALS},
        "communication_s": step.communication_s,
        "state_bytes": step.state_bytes,
        "layer": {
            name: {
                "compute_s": of.compute_s,
                "collectives": [
                    {
                        "what": each.move.what,
                        "axis": each.move.axis,
                        "seconds": each.seconds,
                        "ring": each.ring,
                        "saved_s": each.saved_s,
                    }
                    for each in of.moves
                ],
            }
            for name, of in _passes(step).items()
        },
    }
