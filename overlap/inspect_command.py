"""The command ``inspect``: where communication is exposed in the modules of HLO dumps."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import cost_model
from cost_model import Hardware, hardware_of
from overlap import inspect_dumps, timeline_table, tpu_slice
from overlap.hlo.module import Module
from overlap.hlo.timeline import Timeline
from overlap.inspect_dumps import Dump, DumpError
from overlap.inspection import Inspection, to_json
from overlap.output_file import check_outputs, write_text
from overlap.plain_text import PIPE_COLUMNS
from overlap.timeline_table import ROWS

WRONG_INPUT: Final = 2
"""The exit status when a path, an option or a file is of no use."""

MANY: Final = 4
"""From so many modules on, a terminal shows how far it is."""


def add_commands(commands: Any) -> None:
    """Adds ``inspect`` to argparse's subcommands."""
    parser = commands.add_parser(
        "inspect",
        help="show where communication is exposed in a compiled program",
        description=(
            "Reads the HLO text of compiled programs (compiled.as_text(), or what "
            "XLA_FLAGS=--xla_dump_to=DIR writes), models when each instruction runs, and lists the "
            "collectives by the time that compute waits for them. Two paths are compared as before and after."
        ),
        epilog="All times are modelled, not measured. docs/inspect.md tells more, the JSON's fields too.",
    )
    parser.add_argument("paths", nargs="+", type=_path, metavar="PATH", help="HLO text, or a dump directory")
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"what to model: {', '.join(cost_model.names())}; or a file that calibrate wrote (.json) "
        "(default: as compiled)",
    )
    parser.add_argument(
        "--topology",
        metavar="SHAPE",
        help="chips of the slice, such as 4x4x4 or v5p:2x2x4 (default: guessed)",
    )
    parser.add_argument("--all", action="store_true", help="list every collective, not only the most exposed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--html", metavar="OUT", help="write a page with a timeline")
    parser.add_argument("--trace", metavar="OUT", help="write Trace Event JSON for ui.perfetto.dev")
    parser.set_defaults(run=run)


def _path(text: str) -> Path:
    # As of "$DUMP" that is not set: that is not the current directory.
    if not text:
        raise argparse.ArgumentTypeError("is empty: name HLO text, or a dump directory")
    return Path(text)


def run(arguments: argparse.Namespace) -> int:
    """Does what the command line says; the exit status is 0, or 2 with a sentence on stderr."""
    try:
        _check_outputs(arguments)
        hardware, chips = _options(arguments)
        files = [inspect_dumps.find(path) for path in arguments.paths]
        found = _read(files)
        inspections = [_inspection(dumps, hardware, chips) for dumps in inspect_dumps.pairs(found)]
        shown = [inspection for inspection in inspections if inspection.collectives] or inspections[:1]
        written = _write(arguments, shown)
    except (DumpError, ValueError, OSError) as error:
        print(f"overlap inspect: {error}", file=sys.stderr)
        return WRONG_INPUT
    if arguments.json:
        print(to_json(shown))
    else:
        _print(shown, len(inspections) - len(shown), rows=None if arguments.all else ROWS)
    for path in written:
        print(f"Wrote {path}", file=sys.stderr if arguments.json else sys.stdout)
    return 0


def _read(files: Sequence[Sequence[Path]]) -> list[list[Dump]]:
    """The modules in the files of each path."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    total = sum(map(len, files))
    every: Iterable[Path] = (file for group in files for file in group)
    if total >= MANY and console.is_terminal:
        every = track(every, "reading modules", total=total, console=console, transient=True)
    dumps = iter([inspect_dumps.read(file) for file in every])
    return [[next(dumps) for _ in group] for group in files]


def _options(arguments: argparse.Namespace) -> tuple[Hardware | None, tuple[int, ...] | None]:
    """The hardware, and the chips of the slice along each dimension, where they are given.

    Raises:
      ValueError: one of them is unknown, they contradict each other, or only the chips' number is given.
      OSError: the hardware's file cannot be read.
    """
    hardware = None if arguments.hardware is None else hardware_of(arguments.hardware)
    if arguments.topology is None:
        return hardware, None
    return tpu_slice.slice_on(arguments.topology, hardware)


def _timeline(module: Module, hardware: Hardware | None, chips: tuple[int, ...] | None) -> Timeline:
    """The timeline of a module, on a slice if one is given.

    Raises:
      ValueError: the hardware is needed and not given, or the slice is not one that runs the module.
    """
    from overlap.hlo.guess import mesh_shape
    from overlap.hlo.simulate import simulate

    if chips is None or hardware is None:
        return simulate(module, hardware)
    mesh = mesh_shape(module)
    count = module.num_partitions * module.num_replicas
    timeline = simulate(module, hardware, tpu_slice.devices(hardware, chips, count, mesh))
    laid = (
        f"The replica groups and permutes show a mesh of {'×'.join(map(str, mesh))} devices, which is "
        "taken to lie on the slice as jax.make_mesh lays it."
    )
    return dataclasses.replace(timeline, assumptions=(*timeline.assumptions, laid))


def _told(module: Module, timeline: Timeline, hardware: Hardware | None) -> Timeline:
    """The timeline; of a module that was compiled for another kind of device, it says so first."""
    from overlap.hlo.guess import platform

    if hardware is None:
        return timeline
    own = "cpu" if "cpu" in hardware.device_kinds else "GPU" if hardware.network == "switch" else "TPU"
    kind = platform(module)
    if kind == own:
        return timeline
    # A CPU's text has no signs of its own.
    found = (
        "Nothing in the text is of a TPU's or a GPU's compiler: if it is XLA:CPU's"
        if kind == "cpu"
        else f"The text is of a {kind}'s compiler"
    )
    said = f"{found}, so is the schedule, at the rates of {hardware.name}."
    return dataclasses.replace(timeline, assumptions=(said, *timeline.assumptions))


def _inspection(
    dumps: Sequence[Dump], hardware: Hardware | None, chips: tuple[int, ...] | None
) -> Inspection:
    """The timelines of one module, or of two as before and after."""
    labels = ("",) if len(dumps) == 1 else ("before", "after")
    programs = []
    for label, dump in zip(labels, dumps, strict=True):
        try:
            timeline = _timeline(dump.module, hardware, chips)
            programs.append((label, _told(dump.module, timeline, hardware)))
        except ValueError as error:
            # What is an argument to Python is an option here.
            said = str(error).replace("give hardware=", "give --hardware")
            raise DumpError(f"{dump.path}: {said}") from error
    name = dumps[0].module.name
    return Inspection(name, tuple(programs))


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuses files that cannot be written, before anything is read.

    Raises:
      DumpError: a file cannot be written.
      ValueError: an option names no file, two the same, or one that is read.
    """
    try:
        check_outputs(
            {"--html": arguments.html, "--trace": arguments.trace},
            read=(*arguments.paths, arguments.hardware),
        )
    except OSError as error:
        raise DumpError(_cannot_write(error.filename, error)) from error


def _cannot_write(path: str, error: OSError) -> str:
    return f"{path}: cannot be written ({error.strerror or error})."


def _write(arguments: argparse.Namespace, inspections: Sequence[Inspection]) -> list[str]:
    """Writes the files that are asked for, and returns their paths.

    Raises:
      DumpError: a file cannot be written.
    """
    from overlap import timeline_page, trace_events

    texts: list[tuple[str | None, Callable[[Sequence[Inspection]], str]]] = [
        (arguments.html, timeline_page.page),
        (arguments.trace, trace_events.to_json),
    ]
    written = []
    for path, make in texts:
        if path is None:
            continue
        try:
            write_text(path, make(inspections))
        except OSError as error:
            raise DumpError(_cannot_write(path, error)) from error
        written.append(path)
    return written


def _print(inspections: Sequence[Inspection], silent: int, *, rows: int | None) -> None:
    """Prints the tables."""
    from rich.console import Console
    from rich.rule import Rule

    console = Console(highlight=False)
    for number, inspection in enumerate(inspections):
        if not sys.stdout.isatty():
            print(("\n" if number else "") + timeline_table.text(inspection, PIPE_COLUMNS, rows=rows))
            continue
        if number:
            console.print(Rule())
        for part in timeline_table.renderables(inspection, rows=rows):
            console.print(part)
    if silent:
        print(f"\n{silent} more module{' has' if silent == 1 else 's have'} no collectives.")
