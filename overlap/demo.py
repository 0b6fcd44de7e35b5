"""The demo: a decoder trained with and without the rewrite, reported on, compiled for TPUs, inspected.

Its sections run in one process on virtual CPU devices, but for the compilation for TPUs, which needs an
environment of its own and so runs in processes that it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import jax

import cost_model
from overlap import timeline_table, tpu_target
from overlap.compiled_memory import temporary_bytes
from overlap.decorator import Overlapped, overlap_collectives
from overlap.figures_table import figures_table
from overlap.hlo.module import Module
from overlap.hlo.parse import parse
from overlap.hlo.timeline import Timeline
from overlap.inspection import Inspection, inspect_compiled
from overlap.output_file import check_writable, write_text
from overlap.plain_text import PIPE_COLUMNS
from overlap.report import Report

if TYPE_CHECKING:
    from rich.console import Console

STEPS: Final = 10
TOLERANCE: Final = 1e-5
"""Largest relative difference between the two runs' losses at any step."""

LEARNING_RATE: Final = 3e-3
"""Small enough that what two orders of summation differ by in the last bit stays small over the steps."""

MESH: Final = (2, 4)
"""Sizes of the axes "fsdp" and "tensor" of the virtual devices."""

HARDWARE: Final = "tpu_v5p"
TOPOLOGY: Final = "v5p:2x2x4"
TPU_MESH: Final = (4, 4)
TPU_LAYERS: Final = 4
COMPILE_LIMIT_S: Final = 600
"""Seconds after which a compilation for TPUs is given up."""

COLLECTIVES: Final = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute")
PROGRAMS: Final = ("original", "overlapped")

REPORT: Final = "overlap-report.html"
"""The page that the demo writes where it is run."""


def add_commands(commands: Any) -> None:
    """Adds ``demo`` to argparse's subcommands."""
    demo = commands.add_parser(
        "demo",
        help="train a decoder with and without the rewrite, and compile it for a TPU pod",
        description=(
            f"Trains a small decoder for {STEPS} steps on {MESH[0] * MESH[1]} virtual CPU devices, with and "
            "without overlap_collectives, and compares losses and compiled programs; shows what would be "
            f"rewritten on TPU v5p and why; and compiles the decoder for {TOPOLOGY} with the real TPU "
            "compiler where libtpu is installed. Run it in a checkout of the project. It exits with 0 if "
            "the losses agree and all compiled."
        ),
    )
    demo.add_argument("--no-tpu", action="store_true", help="do not compile for TPUs")
    demo.add_argument("--seed", type=_seed, default=0, help="seed of the weights (default: 0)")
    demo.add_argument(
        "--report",
        type=Path,
        default=Path(REPORT),
        metavar="OUT",
        help="the page with the timelines of the compiled programs (default: %(default)s)",
    )
    demo.set_defaults(
        run=lambda arguments: run(seed=arguments.seed, tpu=not arguments.no_tpu, report=arguments.report)
    )


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 4294967295")
    return int(text)


def run(*, seed: int = 0, tpu: bool = True, report: Path = Path(REPORT)) -> int:
    """Runs the demo in a process that has not used JAX yet.

    Args:
      seed: of the weights.
      tpu: whether to compile for TPUs, where the compiler is installed.
      report: where to write the page with the timelines of what was compiled.

    Returns:
      The exit status: 0; 1 if losses differ or a compilation fails; 2 if the decoder is not importable,
      or the page cannot be written.
    """
    from rich.console import Console

    _use_virtual_devices(MESH[0] * MESH[1])
    try:
        decoder = _decoder()
    except ImportError as error:
        print(
            f"The demo trains bench/programs/decoder.py, which cannot be imported ({error}).\n"
            "Run it in the root of a checkout of overlap-collectives; `make demo` installs what it needs.",
            file=sys.stderr,
        )
        return 2
    try:
        check_writable(report)
    except OSError as error:
        print(f"overlap demo: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    equal, on_cpu = _train(console, decoder, seed)
    _explain(console, decoder)
    _programs(console)
    compiled, on_tpu = _compile_both(console, tpu)
    written = _report_page(console, report, [*on_tpu, on_cpu])
    return 0 if equal and compiled and written else 1


def count_collectives(module: Module) -> dict[str, int]:
    """Counts the collective instructions of an HLO module.

    An asynchronous one counts once, by its start. An instruction in a loop's body counts once.

    Returns:
      A number for each name of ``COLLECTIVES``.
    """
    instructions = (i for computation in module.computations.values() for i in computation.instructions)
    counts = Counter(instruction.opcode.removesuffix("-start") for instruction in instructions)
    return {name: counts[name] for name in COLLECTIVES}


# The sections.


def _train(console: Console, decoder: ModuleType, seed: int) -> tuple[bool, Inspection]:
    """Trains with and without the rewrite; returns whether the losses agree, and the compiled programs."""
    config = _small(decoder)
    devices = MESH[0] * MESH[1]
    _heading(
        console, f"A {config.layers}-layer decoder trained for {STEPS} steps on {devices} virtual CPU devices"
    )
    console.print(
        f"Mesh: fsdp {MESH[0]} × tensor {MESH[1]}. On CPUs no ring pays, so the decorator has "
        'policy="always" here: every legal rewrite, to check the numbers.\n'
    )
    mesh = decoder.make_mesh(shape=MESH)
    step = decoder.make_train_step(config, mesh)
    programs = dict(
        zip(PROGRAMS, (step, overlap_collectives(step, policy="always", strict=True)), strict=True)
    )
    losses, counts, compiled = {}, {}, {}
    for name, program in programs.items():
        with _status(console, f"compiling and training: {name}"):
            losses[name] = _losses(decoder, config, mesh, program, seed)
            shapes = decoder.state_shapes(config, mesh), decoder.batch_shapes(config, mesh)
            compiled[name] = program.lower(*shapes).compile()
            counts[name] = count_collectives(parse(compiled[name].as_text()))

    table = figures_table("step", *(f"loss, {name}" for name in PROGRAMS), "relative difference")
    differences = []
    for i, pair in enumerate(zip(*losses.values(), strict=True)):
        differences.append(_relative_difference(*pair))
        table.add_row(str(i), *(f"{loss:.6f}" for loss in pair), _short(differences[-1]))
    console.print(table)
    # Not max(): a NaN must not pass.
    equal = all(difference <= TOLERANCE for difference in differences)
    verdict = "[green]equal[/]" if equal else "[bold red]NOT equal[/]"
    console.print(
        f"\nLosses {verdict} to {_short(TOLERANCE, 0)} relative (checked): they differ by at most "
        f"{_short(max(differences))}.\n"
    )

    table = figures_table("compiled for CPU", *PROGRAMS)
    for collective in COLLECTIVES:
        table.add_row(collective, *(str(counts[name][collective]) for name in PROGRAMS))
    console.print(table)
    return equal, inspect_compiled(f"The decoder that was trained, on {devices} CPU devices", compiled)


def _explain(console: Console, decoder: ModuleType) -> None:
    """Reports on the decoder in real sizes, as decided for TPU v5p."""
    mesh = decoder.make_mesh(shape=MESH)
    large, small = (_report(decoder, config, mesh) for config in (decoder.LARGE, _small(decoder)))
    _heading(console, "What is decided for TPU v5p, and why")
    config = decoder.LARGE
    console.print(
        f"train_step.explain(state, batch), on the same mesh, of {config.layers} layers of Llama-3-8B's "
        f"widths, with {config.batch} sequences of {config.seq} tokens.\n"
    )
    if console.is_terminal:
        console.print(large)
    else:
        print(large.text(console.width), flush=True)
    reasons = ", ".join(f"{code} {count}" for code, count in Counter(s.reason for s in small.kept).items())
    console.print(
        f"\nOf the small decoder trained above, {len(small.rewritten)} of {len(small.sites)} would be "
        f"rewritten on v5p: its arrays are too small for a ring to pay. Kept: {reasons}."
    )


def _programs(console: Console) -> None:
    """Tells what is decided about the other programs of parallel training, in real sizes."""
    from bench import programs_table

    _heading(console, "Other programs, as decided for TPU v5p")
    table = figures_table("program", "rewritten", "kept, and why", "modelled ms")
    table.columns[2].justify = "left"
    with _status(console, "tracing the programs"):
        for row in programs_table.rows(("auto",)):
            program, _, _, rewritten, kept, times = row.cells
            table.add_row(program, rewritten, kept, times.replace(" → ", "→"))
    console.print(table)


def _compile_both(console: Console, wanted: bool) -> tuple[bool, list[Inspection]]:
    """Compiles both programs for a TPU pod; whether that worked, or was not to be done, and the timelines."""
    _heading(console, f"Compiled for {TOPOLOGY} by the TPU compiler")
    skipped = tpu_target.missing() if wanted else "--no-tpu was given"
    if skipped is not None:
        console.print(f"[yellow]Skipped[/]: {skipped}.")
        return True, []
    console.print(
        f"{TPU_LAYERS} layers of the same widths on a mesh of fsdp {TPU_MESH[0]} × tensor {TPU_MESH[1]}; the "
        "cost model takes the hardware from the devices. Compiled side by side, each in its own process.\n"
    )
    with _status(console, f"compiling both for {TOPOLOGY}; this takes a minute or two"):
        results, timelines = _compiled_for_tpu()
    for name, result in results.items():
        if isinstance(result, str):
            console.print(f"[bold red]Failed[/] to compile the {name} program:")
            console.print(result, markup=False)
    figures = [result for result in results.values() if not isinstance(result, str)]
    if len(figures) < len(results):
        return False, []

    table = figures_table(f"compiled for {TOPOLOGY}", *results)
    for collective in COLLECTIVES:
        table.add_row(collective, *(str(result["counts"][collective]) for result in figures))
    table.add_row(
        "temporary memory a device, GiB", *(f"{result['temp_bytes'] / 2**30:.2f}" for result in figures)
    )
    table.add_row("compile time, s (measured)", *(f"{result['compile_s']:.1f}" for result in figures))
    console.print(table)
    last = figures[-1]
    console.print(f"\n{last['rewritten']} of {last['sites']} collectives rewritten, for {last['hardware']}.")
    inspection = Inspection(
        f"{TPU_LAYERS} layers of Llama-3-8B's widths, on {TOPOLOGY}", tuple(timelines.items())
    )
    console.print(f"{timeline_table.comparison(inspection)}")
    return True, [inspection]


def _report_page(console: Console, path: Path, inspections: list[Inspection]) -> bool:
    """Writes the page with the timelines; returns whether that worked."""
    from overlap.timeline_page import page

    _heading(console, "Where communication is exposed")
    try:
        write_text(path, page(inspections))
    except OSError as error:
        console.print(f"[bold red]Failed[/] to write {path}: {error.strerror or error}.")
        return False
    console.print(
        "The modelled timelines of these compiled programs, with and without rings, are in", end=" "
    )
    console.print(path.resolve().as_uri(), soft_wrap=True, markup=False)
    return True


# What they compute.


def _use_virtual_devices(count: int) -> None:
    """Makes JAX run on so many virtual CPU devices; it must not have started a backend yet.

    ``JAX_PLATFORMS`` would come too late: importing this package imports JAX, which reads it then. XLA reads
    its flags when a backend starts.
    """
    flags = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()
    jax.config.update("jax_platforms", "cpu")


def _decoder() -> ModuleType:
    from bench.programs import decoder

    return decoder


def _small(decoder: ModuleType) -> Any:
    return dataclasses.replace(decoder.SMALL, learning_rate=LEARNING_RATE)


def _losses(decoder: ModuleType, config: Any, mesh: Any, program: Any, seed: int) -> list[float]:
    state = decoder.init_state(config, mesh, seed)
    losses = []
    for i in range(STEPS):
        state, loss = program(state, decoder.make_batch(config, mesh, i))
        losses.append(float(loss))
    return losses


def _relative_difference(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def _report(decoder: ModuleType, config: Any, mesh: Any) -> Report:
    step: Overlapped = overlap_collectives(decoder.make_train_step(config, mesh), hardware=HARDWARE)
    return step.explain(decoder.state_shapes(config, mesh), decoder.batch_shapes(config, mesh))


def _compile_for_tpu(name: str, timeline: Path) -> int:
    """Compiles one program, in a process started for it; prints figures as JSON, and pickles its timeline."""
    decoder = _decoder()
    config = dataclasses.replace(decoder.LARGE, layers=TPU_LAYERS)
    devices = tpu_target.devices(TOPOLOGY)
    mesh = decoder.make_mesh(devices, TPU_MESH)
    program = decoder.make_train_step(config, mesh)
    shapes = decoder.state_shapes(config, mesh), decoder.batch_shapes(config, mesh)
    report = Report(())
    if name == "overlapped":
        program = overlap_collectives(program, strict=True)
        report = program.explain(*shapes)
    hardware = cost_model.from_device_kind(devices[0].device_kind)
    lowered = program.lower(*shapes)
    start_s = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - start_s
    (program_timeline,) = (t for _, t in inspect_compiled(name, {name: compiled}).programs)
    timeline.write_bytes(pickle.dumps(program_timeline))
    figures = {
        "compile_s": compile_s,
        "counts": count_collectives(parse(compiled.as_text())),
        "temp_bytes": temporary_bytes(compiled),
        "hardware": hardware.name if hardware else devices[0].device_kind,
        "rewritten": len(report.rewritten),
        "sites": len(report.sites),
    }
    print(json.dumps(figures))
    return 0


def _compiled_for_tpu() -> tuple[dict[str, dict[str, Any] | str], dict[str, Timeline]]:
    """The figures of each program, or what went wrong with it, and the timelines of those that compiled.

    Compiles them at once, in a process each.
    """
    environment = {**os.environ, **tpu_target.ENVIRONMENT}
    end_s = time.monotonic() + COMPILE_LIMIT_S
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = {}
        for name in PROGRAMS:
            command = [sys.executable, "-m", "overlap.demo", name, str(folder / name)]
            processes[name] = stack.enter_context(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
            # Leaving before the end, for whatever reason, must not wait for the compiler.
            stack.callback(processes[name].kill)
        results = {name: _figures(process, end_s - time.monotonic()) for name, process in processes.items()}
        done = [name for name, result in results.items() if not isinstance(result, str)]
        return results, {name: pickle.loads((folder / name).read_bytes()) for name in done}


def _figures(process: subprocess.Popen[str], limit_s: float) -> dict[str, Any] | str:
    try:
        out, errors = process.communicate(timeout=max(limit_s, 0))
    except subprocess.TimeoutExpired:
        return f"it took more than {COMPILE_LIMIT_S} s, and was given up"
    if process.returncode:
        return f"exit status {process.returncode}\n" + "\n".join(errors.splitlines()[-20:])
    figures: dict[str, Any] = json.loads(out.splitlines()[-1])  # libtpu may have printed before
    return figures


# How they look.


def _heading(console: Console, text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]\n")


def _short(value: float, digits: int = 1) -> str:
    """As 1.2e-7."""
    return f"{value:.{digits}e}".replace("e-0", "e-").replace("e+00", "")


@contextlib.contextmanager
def _status(console: Console, text: str) -> Iterator[None]:
    """Shows what is being waited for, on a terminal."""
    if console.is_terminal:
        with console.status(f"{text} …"):
            yield
    else:
        yield


if __name__ == "__main__":
    # The process that compiles one program for TPUs: ``_compiled_for_tpu`` starts it.
    sys.exit(_compile_for_tpu(sys.argv[1], Path(sys.argv[2])))
