"""``overlap.ab_profile``: runs a decorated function and its original in turn, measures and traces both."""

from __future__ import annotations

import contextlib
import operator
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax

from overlap import agreement as agreements
from overlap.ab_report import ABReport, Conditions, Variant
from overlap.ab_run import Run
from overlap.agreement import Agreement
from overlap.decorator import Overlapped
from overlap.device_activity import Activity, Directory, activity, bars
from overlap.exposure import COMPUTE
from overlap.hlo.timeline import Event, Timeline
from overlap.profile_events import Execution, Source, Trace, of_variants, read_file
from overlap.speedup import speedup

ORIGINAL, OVERLAPPED = "original", "overlapped"

TRACED_ROUNDS: Final = 3
"""Rounds that are traced: enough to see, and few enough for the buffers of a TPU's tracer."""

COMMUNICATION: Final = "communication"
"""The row of a measured timeline that shows collectives in flight."""


def ab_profile(
    fn: Any,
    *args: Any,
    rounds: int = 10,
    warmup: int = 2,
    traced_rounds: int = TRACED_ROUNDS,
    trace_dir: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> ABReport:
    """Measures a decorated function against its original: A B A B …, in turn, on these arguments.

    Both are compiled and warmed up. Then each round calls the original and the overlapped function, waits for
    the results of each, and takes the wall-clock time. A few more rounds run under ``jax.profiler``, whose
    trace tells what the devices did meanwhile; they do not count for the times, because tracing takes time.

    Arguments that the function donates are copied before each call, outside of the timed region; the caller's
    own stay usable. The results of the first calls are compared.

    A variant that fails is reported with the reason, and what was measured before stands; so do the times
    where the profiler fails. With several processes (``jax.distributed``) every process must call this, as it
    would call the function: each writes its trace and gets a report of its own devices; that of process 0 is
    the one to show (``ABReport.is_main``).

    Args:
      fn: a function decorated with ``overlap_collectives``, or a bound method so decorated.
      *args, **kwargs: of the function, static ones included. Arguments of the function that are named like
        those below must be given by position.
      rounds: timed calls of each variant; a bootstrap interval takes 6 at least.
      warmup: calls of each variant before that, 1 at least.
      traced_rounds: traced calls of each variant; 0 for no trace.
      trace_dir: where the trace goes, for XProf (``xprof --logdir``) or Perfetto; None for a new temporary
        directory, which stays. Of several processes each has a directory ``process_<i>`` in it.

    Returns:
      The report.

    Raises:
      TypeError: ``fn`` is not decorated, an argument holds a shape or a tracer in place of an array, or a
        number of rounds is no integer.
      ValueError: a number of rounds is too small.
      OSError: ``trace_dir`` cannot be made.
    """
    fn, args = _unbound(fn, args)
    rounds, warmup, traced_rounds = (
        _at_least(least, name, value)
        for least, name, value in (
            (1, "rounds", rounds),
            (1, "warmup", warmup),
            (0, "traced_rounds", traced_rounds),
        )
    )
    _check_arguments((args, kwargs))
    runs = (Run(ORIGINAL, fn.original, args, kwargs), Run(OVERLAPPED, fn, args, kwargs))
    made = tempfile.mkdtemp(prefix="overlap-ab-") if traced_rounds and trace_dir is None else None
    where = made if trace_dir is None else trace_dir
    try:
        directory = _own_directory(where) if traced_rounds and where is not None else None
        return _compared(fn, runs, rounds, warmup, traced_rounds, directory)
    except BaseException:
        # A directory that the caller has not named would be found by nobody.
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise


def _compared(
    fn: Overlapped,
    runs: tuple[Run, Run],
    rounds: int,
    warmup: int,
    traced_rounds: int,
    directory: Path | None,
) -> ABReport:
    """The report of two runs, with a trace in the directory if there is one."""
    for run in runs:
        run.compile()
    devices = _devices(runs)
    device = devices[0]
    agreement = _warm_up(runs, warmup, device.platform)
    for _ in range(rounds):
        for run in runs:
            run.time()
    notes: list[str] = [_rewritten(fn, runs[0].args, runs[0].kwargs)]
    trace, problem = _traced(runs, traced_rounds, directory) if directory is not None else (None, "")
    if problem:
        notes.append(problem)
    seen = {} if trace is None else _seen(trace, runs)
    source = trace.source if trace is not None and seen else None
    variants = [_variant(run, seen.get(run.name), device, source) for run in runs]
    notes += _honest(source, variants, devices, traced_rounds, bool(problem))
    return ABReport(
        name=str(getattr(fn, "__name__", "")),
        original=variants[0],
        overlapped=variants[1],
        conditions=Conditions(
            platform=device.platform,
            device_kind=device.device_kind,
            devices=len(devices),
            process=jax.process_index(),
            processes=jax.process_count(),
            rounds=rounds,
            warmup=warmup,
            traced_rounds=traced_rounds if trace is not None else 0,
        ),
        speedup=speedup(runs[0].times_s, runs[1].times_s),
        agreement=agreement,
        source=source,
        trace_dir=str(directory) if trace is not None else None,
        notes=tuple(note for note in notes if note),
    )


# The arguments.


def _unbound(fn: Any, args: tuple[Any, ...]) -> tuple[Overlapped, tuple[Any, ...]]:
    """The function and its arguments; of a bound method, the instance among them."""
    function = getattr(fn, "__func__", None)
    if isinstance(function, Overlapped):
        return function, (fn.__self__, *args)
    if not isinstance(fn, Overlapped):
        raise TypeError(
            f"ab_profile takes a function decorated with overlap_collectives, not {fn!r}: "
            "it compares the decorated function with its original"
        )
    return fn, args


def _at_least(least: int, name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if number < least:
        raise ValueError(f"{name} must be {least} at least, not {number}")
    return number


def _check_arguments(arguments: Any) -> None:
    for leaf in jax.tree.leaves(arguments):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError("ab_profile runs the function: give it arrays, not ShapeDtypeStructs")
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError("ab_profile measures time: call it outside of jit, grad, vmap and the like")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise TypeError("an argument was deleted, by a call that it was donated to: make it anew")


def _own_directory(trace_dir: str | os.PathLike[str]) -> Path:
    """This process's directory for the trace: two on one host would write to the same files."""
    path = Path(trace_dir).absolute()
    if jax.process_count() > 1:
        path /= f"process_{jax.process_index()}"
    path.mkdir(parents=True, exist_ok=True)
    return path


# Running.


def _devices(runs: Sequence[Run]) -> Sequence[Any]:
    """The devices that the programs run on; all that there are if neither program tells its own."""
    return next((run.devices for run in runs if run.devices), None) or jax.devices()


def _warm_up(runs: Sequence[Run], warmup: int, platform: str) -> Agreement:
    """Warms up in turn, and compares the results of the first calls."""
    original, overlapped = (run.results() for run in runs)
    for _ in range(warmup - 1):
        for run in runs:
            run.warm_up()
    if original is None or overlapped is None:
        failed = " and the ".join(run.name for run in runs if run.failure is not None)
        return Agreement(agreed=None, sentence=f"Results were not compared: the {failed} variant failed.")
    return agreements.compare(original, overlapped, agreements.tolerance_of(runs[0].hlo, platform))


# The trace.


def _traced(runs: Sequence[Run], rounds: int, directory: Path) -> tuple[Trace | None, str]:
    """Runs the traced rounds; the trace, or why there is none."""
    before = _files(directory)
    try:
        options = jax.profiler.ProfileOptions()
        # Python's frames would make most of the trace, and slow the calls.
        options.python_tracer_level = 0
        with jax.profiler.trace(directory, profiler_options=options):
            for number in range(rounds):
                for run in runs:
                    run.trace(number)
        written = sorted(_files(directory) - before, key=lambda file: file[1])
        if not written:
            raise OSError(f"it wrote nothing to {directory}")
        return read_file(written[-1][0]), ""
    except Exception as error:
        with contextlib.suppress(OSError):
            directory.rmdir()  # which leaves a directory that is not empty
        return None, f"No device times: the profiler failed ({type(error).__name__}: {error})."


def _files(directory: Path) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in directory.rglob("*.xplane.pb")}


Steps = Mapping[tuple[int, str], list[Execution]]
"""Traced round and device → what the device executed."""


def _seen(trace: Trace, runs: Sequence[Run]) -> dict[str, Steps]:
    """What each variant executed in its traced rounds; without the variants of which nothing is seen."""
    modules = {run.name: run.module.name if run.module is not None else "" for run in runs}
    return {name: steps for name, steps in of_variants(trace, modules).items() if steps}


def _variant(run: Run, steps: Steps | None, device: Any, source: Source | None) -> Variant:
    directory = Directory(run.module)
    found = activity(steps.values(), directory) if steps else None
    return Variant(
        name=run.name,
        times_s=tuple(run.times_s),
        compile_s=run.compile_s,
        failure=run.failure,
        activity=found,
        timeline=_timeline(run, steps, found, directory, f"{device.device_kind}, {source}")
        if steps and found
        else None,
    )


def _timeline(run: Run, steps: Steps, mean: Activity, directory: Directory, hardware: str) -> Timeline:
    """The last traced round on the first device, as measured."""
    number = max(number for number, _ in steps)
    name = min(device for at, device in steps if at == number)
    executions = steps[number, name]
    own = activity([executions], directory) or mean
    zero_ns = min(execution.start_ns for execution in executions)
    events = []
    for execution in executions:
        for bar in bars(execution, directory):
            what = bar.operation
            kind = what.kind or "compute"
            events.append(
                Event(
                    name=bar.name,
                    opcode=what.opcode or bar.name,
                    kind=kind,
                    stream=COMMUNICATION if kind == "collective" else COMPUTE,
                    start_s=(bar.start_ns - zero_ns) * 1e-9,
                    end_s=(bar.end_ns - zero_ns) * 1e-9,
                    op_name=what.op_name,
                    source=what.source,
                )
            )
    end_ns = max(execution.end_ns for execution in executions)
    return Timeline(
        module=run.module.name if run.module is not None else "",
        hardware=hardware,
        topology=f"{name}, traced round {number + 1}",
        total_s=(end_ns - zero_ns) * 1e-9,
        compute_s=own.compute_only_s + own.both_s,
        exposed_s=own.communication_only_s,
        collectives=(),
        events=tuple(sorted(events, key=lambda event: (event.start_s, event.end_s))),
        peak_in_flight=0,
        assumptions=(),
    )


# What must be said beside the figures.


def _rewritten(fn: Overlapped, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    try:
        report = fn.explain(*args, **kwargs)
    except Exception:
        return ""  # the call has warned, or failed, of the same
    count, total = len(report.rewritten), len(report.sites)
    if not total:
        return (
            "This program has no collective: both variants run the same operations, and what differs is "
            "noise."
        )
    if not count:
        return (
            f"None of the {total} collectives is rewritten: both variants run the same operations, and what "
            "differs is noise."
        )
    return f"{count} of {total} collectives rewritten."


def _honest(
    source: Source | None, variants: Sequence[Variant], devices: Sequence[Any], rounds: int, failed: bool
) -> Iterator[str]:
    """What the device times are, and what they are not."""
    seen = [v.activity for v in variants if v.activity is not None]
    platform = devices[0].platform
    if source is not None:
        count = "1 device" if seen[0].devices == 1 else f"{seen[0].devices} devices"
        mean = f"means of the traced rounds over {count} of this process"
        if source == "device planes":
            yield f"Times on the device are from the device planes of the trace, {mean}."
        else:
            yield (
                f"Times on the device are HOST EVENTS, {mean}: {platform} has no device plane. They are what "
                "host threads spent in each instruction; devices share the cores, an instruction that hands "
                "work to other threads shows its own part only, and waiting for another device counts as "
                "communication."
            )
    elif not failed:
        yield (
            "No device times: nothing was traced (traced_rounds=0)."
            if not rounds
            else "No device times: the trace shows no operation of these programs; the wall clock stands."
        )
    if platform == "cpu" and jax.process_count() == 1 and len(devices) > 1:
        yield (
            "Virtual CPU devices of one process share its cores and memory: these times say nothing about "
            "accelerators or networks."
        )
    for variant in variants:
        if variant.activity is not None and variant.activity.unknown > 0.05:
            yield (
                f"{variant.activity.unknown:.0%} of the busy time of the {variant.name} variant are events "
                "that name no instruction of its HLO text; what they did is told by their names alone."
            )
