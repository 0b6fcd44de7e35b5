"""The command ``plan``: what is predicted of a collective and its dot, and where rewriting pays."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import cost_model
from cost_model import Axis, Hardware, Topology
from cost_model.break_even import BreakEven, break_evens
from cost_model.calibration import hardware_of
from cost_model.explanation import explain
from cost_model.offload_options import compiled_with, offload_options
from cost_model.plain_chain import PATTERNS, PlainChain, chain_of
from overlap import tpu_slice
from overlap.plain_text import PIPE_COLUMNS, columns, wrapped
from passes import shims
from passes.rules import considered

FAILED: Final = 2
"""The exit status when an option is of no use, or a file cannot be written."""

NAMES: Final = {"tokens": "tokens per device", "axis_size": "devices on the axis"}


class PlanError(ValueError):
    """What is asked for cannot be done; the message tells why, and what would do."""


def add_commands(commands: Any) -> None:
    """Adds ``plan`` to argparse's subcommands."""
    parser = commands.add_parser(
        "plan",
        help="predict whether a collective and its dot are worth rewriting, and why",
        description=(
            "Prices a collective and its dot, as written and as rings, term by term; and tells over which "
            "tokens per device, axis sizes and bandwidths rewriting pays. Nothing runs."
        ),
        epilog="All times are predictions of the cost model. docs/cost_model.md tells what they rest on.",
    )
    parser.add_argument(
        "--pattern",
        required=True,
        choices=PATTERNS,
        metavar="NAME",
        help=f"what stands in the program: {', '.join(PATTERNS)}",
    )
    parser.add_argument(
        "--shape",
        required=True,
        metavar="M,K,N",
        help="the dot [M,K]·[K,N] on one device: after a gather, before a scatter",
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"one of {', '.join(cost_model.names())}; or a file that calibrate wrote (.json)",
    )
    parser.add_argument("--axis-size", type=int, metavar="P", help="devices on the mesh axis")
    parser.add_argument(
        "--topology",
        metavar="SHAPE",
        help="the slice's chips, v5p:4x4x4; of GPUs, h100:64; the axis has all, or P",
    )
    parser.add_argument("--dtype", default="bfloat16", help="of operands and result (default: bfloat16)")
    parser.add_argument(
        "--cut", choices=("m", "k", "n"), default="m", help="the dim gathered or scattered (default: m)"
    )
    parser.add_argument(
        "--operand", choices=("lhs", "rhs"), help="which operand is gathered, with --cut k (default: lhs)"
    )
    parser.add_argument(
        "--offload",
        action="store_true",
        help="as compiled with overlap.offload_options(): collectives run beside dots by themselves",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the break-even there (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Does what the command line says; the exit status is 0, or 2 with a sentence on stderr."""
    try:
        axis = _axis(arguments)
        m, k, n = _shape(arguments.shape)

        def chain(rows: int) -> PlainChain:
            return chain_of(
                arguments.pattern,
                rows,
                k,
                n,
                dtype=arguments.dtype,
                cut=arguments.cut,
                operand=arguments.operand,
                starts_implied=not shims.EXPLICIT_STARTS,
            )

        explanation = explain(chain(m), axis, considered(chain(m), axis))
        found = break_evens(chain, axis, m, among=considered, resize=arguments.topology is None)
        if arguments.plot is not None:
            drawn = _plot(
                found,
                arguments.plot,
                f"{arguments.pattern}, {arguments.shape}, {axis.hardware.name}",
                axis.hardware.least_gain,
            )
    except ValueError as error:
        print(f"overlap plan: {error}", file=sys.stderr)
        return FAILED
    if arguments.json:
        figures = {**explanation.to_json(), "break_even": [_figures(each) for each in found]}
        print(json.dumps({"schema": 1, **figures}, indent=2))
    else:
        lines = [str(explanation), "", "Break-even, all else as it is:"]
        lines += [f"  {sentence(each)}" for each in found]
        print(wrapped("\n".join(lines), columns(PIPE_COLUMNS)))
    if arguments.plot is not None:
        print(f"Wrote {drawn}", file=sys.stderr if arguments.json else sys.stdout)
    return 0


def sentence(found: BreakEven) -> str:
    """Where rewriting pays, in words."""
    what, here = _named(found, found.here)
    values = [value for value, _ in found.points]
    (_, low), (_, high) = (_named(found, value) for value in (values[0], values[-1]))
    if found.pays != "sometimes":
        return f"{what}, here {here}: {found.pays} pays between {low} and {high}"
    parts = []
    start: str | None = low if found.pays_at_first else None
    for crossing in found.crossings:
        at = _named(found, crossing.at)[1]
        if crossing.pays_above:
            start = at
        else:
            parts.append(f"below {at}" if start == low else f"from {start} to below {at}")
            start = None
    if start is not None:
        parts.append(f"from {start}")
    return f"{what}, here {here}: pays {', '.join(parts)} (looked at {low} to {high})"


def _named(found: BreakEven, value: float) -> tuple[str, str]:
    """What a value is of, and the value with its unit."""
    if found.variable == "bandwidth":
        speed = value / 1e9
        return "links of the axis, one way", f"{speed:,.0f} GB/s" if speed >= 100 else f"{speed:.3g} GB/s"
    return NAMES[found.variable], f"{value:,.0f}"


def _figures(found: BreakEven) -> dict[str, Any]:
    return {
        "variable": found.variable,
        "here": found.here,
        "pays": found.pays,
        "crossings": [{"at": each.at, "pays_above": each.pays_above} for each in found.crossings],
        "points": [
            {"at": value, "original_s": of.original_s, "overlapped_s": of.overlapped_s}
            for value, of in found.points
        ],
    }


def _plot(found: Sequence[BreakEven], path: str, title: str, least_gain: float) -> str:
    """Draws the picture, and returns its path: of a name without a suffix it is that of a PNG.

    Raises:
      PlanError: it cannot be drawn there.
    """
    if not path:
        raise PlanError("--plot is empty: name a file, such as plan.png")
    if Path(path).is_dir():
        raise PlanError(f"--plot {path} is a directory: name a file, such as {Path(path, 'plan.png')}")
    named = path if Path(path).suffix else f"{path}.png"
    from overlap import plan_plot

    try:
        plan_plot.draw(found, named, title, least_gain)
    except ModuleNotFoundError as error:
        raise PlanError(
            f"--plot needs {error.name}, which is not installed: pip install matplotlib"
        ) from error
    except OSError as error:
        raise PlanError(
            f"--plot {path} cannot be written: {(error.strerror or str(error)).lower()}"
        ) from error
    except ValueError as error:
        raise PlanError(f"--plot {path} cannot be drawn: {str(error).lower()}") from error
    return named


def hardware_given(name: str) -> Hardware:
    """The hardware of the option ``--hardware``: of a name, or of a file that ``calibrate`` wrote.

    Raises:
      ValueError: the name is unknown, or the file cannot be read or is of no use.
    """
    try:
        return hardware_of(name)
    except OSError as error:
        raise PlanError(f"--hardware {error}") from error


def _compiled(hardware: Hardware, arguments: argparse.Namespace) -> Hardware:
    """The hardware as programs find it that are compiled as the command line says."""
    if not arguments.offload:
        return hardware
    options = offload_options(hardware)
    if not options:
        raise PlanError(f"--offload: there are no compiler options for it on {hardware.name}")
    return compiled_with(hardware, options)


def _shape(given: str) -> tuple[int, int, int]:
    if not re.fullmatch(r"[1-9]\d*,[1-9]\d*,[1-9]\d*", given):
        raise PlanError(f"--shape {given} is not M,K,N, such as 8192,8192,2048")
    m, k, n = map(int, given.split(","))
    return m, k, n


def _axis(arguments: argparse.Namespace) -> Axis:
    """The mesh axis: a ring of its own, or on a slice as jax lays a mesh of (rest, axis) there.

    Raises:
      ValueError: hardware or size are missing or unknown, or contradict the slice.
    """
    hardware = None if arguments.hardware is None else hardware_given(arguments.hardware)
    size: int | None = arguments.axis_size
    if size is not None and size < 2:
        raise PlanError(f"--axis-size {size}: an axis of fewer than 2 devices communicates nothing")
    if arguments.topology is None:
        if hardware is None or size is None:
            raise PlanError("give --hardware and --axis-size, or --topology, such as v5p:4x4x4")
        return Axis.of_size(size, _compiled(hardware, arguments))
    hardware, shape = tpu_slice.slice_on(arguments.topology, hardware)
    hardware = _compiled(hardware, arguments)
    count = hardware.devices_per_chip
    for chips in shape:
        count *= chips
    size = size or count
    if count % size:
        raise PlanError(f"--axis-size {size} does not divide the slice's {count} devices")
    if hardware.network == "switch":
        topology = Topology.logical((count,), hardware)
    else:
        devices = tpu_slice.devices(hardware, shape, count, (count // size, size))
        topology = Topology.from_devices(devices, hardware)
    return Axis.of(topology, tuple(tuple(range(i, i + size)) for i in range(0, count, size)))
