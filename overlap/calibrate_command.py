"""The command ``calibrate``: measures the attached devices, and writes what ``hardware=`` takes."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

from cost_model.calibration import SUFFIX, Calibration, is_file_name
from overlap.calibration import calibrate
from overlap.output_file import check_outputs
from overlap.plain_text import PIPE_COLUMNS, columns, wrapped
from overlap.progress_bar import progress_bar
from overlap.units import digits, duration, percent

FAILED: Final = 2
"""The exit status when nothing could be measured, or the file not written."""

STDOUT: Final = 1
STDERR: Final = 2
"""The numbers by which a process knows its standard output and error."""

NOISY: Final = 0.2
"""A spread above which the figures deserve a warning."""


def add_commands(commands: Any) -> None:
    """Adds ``calibrate`` to argparse's subcommands."""
    parser = commands.add_parser(
        "calibrate",
        help="measure the attached devices for the cost model",
        description=(
            "Times matmuls, memory, and the links of every mesh axis on all attached devices, and fits the "
            "cost model to them. What one device cannot tell is kept from the chip's table, and named."
        ),
        epilog=(
            "In a job of several processes, run it in each, with --distributed where JAX finds the others "
            "by itself, or with the three options that name them. Process 0 writes. docs/cost_model.md tells "
            "more."
        ),
    )
    parser.add_argument(
        "--out", metavar="FILE", help=f"where the JSON goes; its name ends in {SUFFIX} (default: stdout)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds: seconds, not minutes")
    parser.add_argument(
        "--mesh", metavar="SHAPE", help="devices along each axis to measure, such as 2x4 (default: one axis)"
    )
    parser.add_argument("--distributed", action="store_true", help="call jax.distributed.initialize first")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    parser.add_argument("--processes", type=int, metavar="COUNT", help="how many processes there are")
    parser.add_argument("--process", type=int, metavar="NUMBER", help="which of them this is, from 0")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Does what the command line says; the exit status is 0, or 2 with a sentence on stderr."""
    import jax

    try:
        mesh_shape = _mesh(arguments.mesh)
        _check_name(arguments.out)
        _join(arguments)
        main = jax.process_index() == 0
        if main:
            check_outputs({"--out": arguments.out})
        with _others_to_stderr(), progress_bar("measuring") if main else nullcontext() as progress:
            found = calibrate(mesh_shape=mesh_shape, quick=arguments.quick, progress=progress)
    except OSError as error:
        print(_unwritable(arguments.out, error), file=sys.stderr)
        return FAILED
    except (ValueError, RuntimeError) as error:
        print(f"overlap calibrate: {error}", file=sys.stderr)
        return FAILED
    return _tell(found, arguments.out) if main else 0


def _tell(found: Calibration, out: str | None) -> int:
    """Prints the figures and writes the file, or prints that too; the exit status."""
    table = sys.stderr if out is None else sys.stdout
    print(wrapped(text(found), columns(PIPE_COLUMNS)), file=table)
    if out is None:
        print(found.to_json())
        return 0
    try:
        found.write(out)
    except OSError as error:
        # They took minutes to measure.
        print(found.to_json())
        print(f"{_unwritable(out, error)}: what would stand there is printed above", file=sys.stderr)
        return FAILED
    print(f"Wrote {out}; give it as hardware=.", file=table)
    return 0


def _unwritable(out: str | None, error: OSError) -> str:
    return f"overlap calibrate: {out} cannot be written ({error.strerror})"


@contextmanager
def _others_to_stderr() -> Iterator[None]:
    """What libraries print to stdout goes to stderr: gloo tells there of every connection, amid the JSON."""
    try:
        kept = os.dup(STDOUT)
    except OSError:  # it is closed
        yield
        return
    with suppress(OSError):  # so is stderr
        os.dup2(STDERR, STDOUT)
    try:
        yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


def text(found: Calibration) -> str:
    """The figures, for people."""
    hardware = found.hardware
    where = f"{found.devices} × {found.device_kind}"
    if found.processes > 1:
        where += f" in {found.processes} processes"
    lines = [f"Measured on {where}, jax {found.jax_version}:"]
    spread, error = dict(found.spread), dict(found.error)
    for dtype in found.dtypes:
        reached = hardware.matmul_efficiency * hardware.flops_for(dtype)
        rate = f"{digits(reached / 1e12)} TFLOP/s" if reached >= 1e12 else f"{digits(reached / 1e9)} GFLOP/s"
        lines.append(f"  matmuls of {dtype:<10}   up to {rate}")
    lines.append(
        f"  a matmul's overhead     {duration(hardware.matmul_overhead_s)}, padded to multiples of "
        f"{'×'.join(map(str, hardware.matmul_tile))}"
    )
    lines.append(f"  main memory             {digits(hardware.hbm_bytes_per_s / 1e9)} GB/s")
    for number, axis in enumerate(found.axes):
        lines.append(
            f"  axis {number} of {axis.size} ({axis.between}): {duration(axis.latency_s)} latency, "
            f"{digits(axis.bytes_per_s / 1e9)} GB/s one way, opposite hops "
            f"{'overlap' if axis.opposite_hops_overlap else 'take turns'}, hops beside matmuls "
            f"{'are hidden' if axis.overlaps else 'are not hidden'}"
        )
    for what, value in spread.items():
        fitted = f", fit off by {percent(error[what], 1)}" if what in error else ""
        lines.append(f"  spread of {what}: ±{percent(value, 1)}{fitted}")
    lines.append(f"Not measured, kept from the table of {hardware.name}: {', '.join(found.kept)}")
    if max(spread.values(), default=0.0) > NOISY:
        lines.append("Warning: the times vary a lot. Is something else running here? Measure again.")
    return "\n".join(lines)


def _mesh(given: str | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", given):
        raise ValueError(f"--mesh {given} is no shape of a mesh, such as 8 or 2x4")
    return tuple(map(int, given.split("x")))


def _check_name(out: str | None) -> None:
    """Refuses a file that ``hardware=`` would take for the name of a chip.

    Raises:
      ValueError: it is one.
    """
    if out and not is_file_name(out):
        raise ValueError(f"hardware= takes files whose names end in {SUFFIX}, not --out {out}: call it so")


def _join(arguments: argparse.Namespace) -> None:
    """Becomes one process of a job, if the options say so.

    Raises:
      ValueError: only some of the three options are given, one has no meaning, or JAX does not find the
        others by itself.
      RuntimeError: the other processes are not found.
    """
    import jax

    named = (arguments.coordinator, arguments.processes, arguments.process)
    if any(each is not None for each in named) and not all(each is not None for each in named):
        raise ValueError("--coordinator, --processes and --process belong together: give all three")
    if named[0] is not None and re.fullmatch(r".+:\d+", arguments.coordinator) is None:
        raise ValueError(f"--coordinator {arguments.coordinator} is no HOST:PORT, such as 10.0.0.1:1234")
    if named[0] is not None and not 0 <= arguments.process < arguments.processes:
        raise ValueError(
            f"--process {arguments.process} is none of --processes {arguments.processes}, which count from 0"
        )
    if named[0] is None and not arguments.distributed:
        return
    # Read by the CPU backend alone.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if named[0] is None:
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise ValueError(
                f"--distributed: JAX does not find the other processes by itself ({str(error).rstrip('.')}): "
                "name them with --coordinator, --processes and --process"
            ) from error
    else:
        jax.distributed.initialize(named[0], named[1], named[2])
