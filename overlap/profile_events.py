"""What a profiler's trace says that the devices ran: the operations of every execution, by call.

Reads the ``XSpace`` protocol buffer that ``jax.profiler.trace`` writes (tsl/profiler/protobuf/xplane.proto),
as ``jax.profiler.ProfileData`` shows it: planes (a device, the host) of lines (a queue, a thread) of events.

- TPU planes, ``/device:TPU:0``: line "XLA Modules" has an event per execution, "XLA Ops" one per instruction.
- GPU planes, ``/device:GPU:0``: lines "Stream #…" have an event per kernel and copy, with its instruction.
- A CPU has no plane. The threads of ``/host:CPU`` show each instruction that they run, with its device.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

Source = Literal["device planes", "host events"]

ANNOTATION: Final = "overlap.ab_profile "
"""Before the variant's name: the host's event around each traced call. Its ``step_num`` is the round."""

_DEVICE: Final = re.compile(r"/device:(TPU|GPU):\d+")
_HOST: Final = "/host:CPU"
_MODULES, _OPS, _STREAM = "XLA Modules", "XLA Ops", "Stream #"
_MODULE_NAME: Final = re.compile(r"(.*?)(?:\((\d+)\))?")
_INSTRUCTION_NAME: Final = re.compile(r"%?([^\s=]+)")


@dataclass(frozen=True, slots=True)
class Op:
    """One event: an instruction that ran, or (``module`` empty) a kernel that names none.

    Attributes:
      name: of the HLO instruction, or of the kernel.
      start_ns, end_ns: on the trace's clock.
      module: the HLO module's name.
    """

    name: str
    start_ns: float
    end_ns: float
    module: str = ""


@dataclass(frozen=True, slots=True)
class Execution:
    """One run of a program on one device.

    Attributes:
      device: such as ``"/device:TPU:0"``, or ``"CPU 0"``.
      module: the HLO module's name; empty where the events did not say.
      start_ns, end_ns: of the whole.
      ops: its events, by start; of those that start together the longest first, as it may hold the others.
    """

    device: str
    module: str
    start_ns: float
    end_ns: float
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """The time in which the host ran one call of one variant, from its start until its results were ready."""

    variant: str
    round: int
    start_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace, as far as it concerns the A/B profile.

    Attributes:
      source: whether the executions are from device planes or from host events.
      windows: by start.
      executions: by start.
    """

    source: Source
    windows: tuple[Window, ...]
    executions: tuple[Execution, ...]


def read_file(path: str | Path) -> Trace:
    """Reads an ``.xplane.pb`` file.

    Raises:
      OSError: it cannot be opened.
      ValueError: it is no XSpace.
    """
    from jax.profiler import ProfileData

    data = Path(path).read_bytes()
    # Its types are made when first used, with a DeprecationWarning that aborts the process if made an error.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            profile = ProfileData.from_serialized_xspace(data)
        except RuntimeError as error:
            raise ValueError(f"{path} is no profile of jax.profiler: {error}") from error
        return read(profile.planes)


def read(planes: Iterable[Any]) -> Trace:
    """Reads the planes of a ``ProfileData``: device planes where there are any, else host events."""
    windows: list[Window] = []
    on_devices: list[Execution] = []
    on_host: list[Execution] = []
    kernels: dict[str, list[Op]] = {}
    for plane in planes:
        if plane.name == _HOST:
            host_ops = []
            for line in plane.lines:
                for event in line.events:
                    stats = dict(event.stats)
                    if event.name.startswith(ANNOTATION):
                        windows.append(_window(event, stats))
                    elif "hlo_op" in stats and "run_id" in stats:
                        host_ops.append((_op(event, stats), stats))
            on_host = _by_run(host_ops)
        elif found := _DEVICE.fullmatch(plane.name):
            if found[1] == "TPU":
                on_devices += _tpu_executions(plane)
            else:
                kernels[plane.name] = [
                    _op(event, dict(event.stats))
                    for line in plane.lines
                    if line.name.startswith(_STREAM)
                    for event in line.events
                ]
    windows.sort(key=lambda window: window.start_ns)
    for device, ops in kernels.items():
        on_devices += _by_window(device, ops, windows)
    executions = on_devices or on_host
    executions.sort(key=lambda execution: execution.start_ns)
    return Trace("device planes" if on_devices else "host events", tuple(windows), tuple(executions))


def of_variants(
    trace: Trace, modules: Mapping[str, str]
) -> dict[str, dict[tuple[int, str], list[Execution]]]:
    """Which executions belong to which calls.

    A device that ran the variants' modules exactly as often as they were called ran them in the order of the
    calls, whatever its clock says. Otherwise an execution belongs to the call whose time it overlaps most.

    Args:
      trace: the trace.
      modules: for each variant the name of its HLO module; empty where unknown: any program that ran during a
        call of that variant is then its own.

    Returns:
      For each variant of ``modules``: round and device → the executions.
    """
    found: dict[str, dict[tuple[int, str], list[Execution]]] = {variant: {} for variant in modules}
    windows = [window for window in trace.windows if window.variant in modules]
    by_device: dict[str, list[Execution]] = defaultdict(list)
    for execution in trace.executions:
        if not execution.module or not all(modules.values()) or execution.module in modules.values():
            by_device[execution.device].append(execution)
    for device, executions in by_device.items():
        in_order = len(executions) == len(windows) and all(
            modules[window.variant] in ("", execution.module) or not execution.module
            for window, execution in zip(windows, executions, strict=True)
        )
        for i, execution in enumerate(executions):
            window = windows[i] if in_order else _most_overlapped(execution, windows)
            if window is None or modules[window.variant] not in (
                "",
                execution.module or modules[window.variant],
            ):
                continue
            found[window.variant].setdefault((window.round, device), []).append(execution)
    return found


def _most_overlapped(execution: Execution, windows: Sequence[Window]) -> Window | None:
    def overlap_ns(window: Window) -> float:
        return min(execution.end_ns, window.end_ns) - max(execution.start_ns, window.start_ns)

    best = max(windows, key=overlap_ns, default=None)
    return best if best is not None and overlap_ns(best) > 0 else None


def _window(event: Any, stats: Mapping[str, Any]) -> Window:
    variant = event.name.removeprefix(ANNOTATION).split("#")[0]
    return Window(variant, int(stats.get("step_num", 0)), event.start_ns, event.end_ns)


def _op(event: Any, stats: Mapping[str, Any]) -> Op:
    """An event as an operation. One without an instruction goes by the kernel's name.

    Kernels of a CUDA graph all name the graph (``command_buffer_1``), in place of their instructions.
    """
    name = "" if "cuda_graph_id" in stats else str(stats.get("hlo_op", ""))
    module = str(stats.get("hlo_module", ""))
    return Op(name or event.name, event.start_ns, event.end_ns, module)


def _by_run(ops: Iterable[tuple[Op, Mapping[str, Any]]]) -> list[Execution]:
    """Executions on a host, whose events say their run and their device."""
    runs: dict[tuple[Any, ...], list[Op]] = defaultdict(list)
    for op, stats in ops:
        device = int(stats.get("device_ordinal", 0))
        runs[device, op.module, stats.get("program_id"), stats["run_id"]].append(op)
    return [_execution(f"CPU {key[0]}", key[1], group) for key, group in runs.items()]


def _by_window(device: str, ops: Iterable[Op], windows: Sequence[Window]) -> Iterator[Execution]:
    """Executions on a GPU, whose kernels say their module but not their run: those of a call together.

    What names no instruction (a kernel in a CUDA graph, a copy of an argument) goes with the call it ran in.
    """
    groups: dict[tuple[int, str], list[Op]] = defaultdict(list)
    ordered = sorted(ops, key=lambda op: op.start_ns)
    at = 0
    for op in ordered:
        middle = (op.start_ns + op.end_ns) / 2
        while at < len(windows) and windows[at].end_ns < middle:
            at += 1
        if at < len(windows) and windows[at].start_ns <= middle:
            groups[at, op.module].append(op)
    for i in sorted({i for i, _ in groups}):
        named = {module: group for (j, module), group in groups.items() if j == i and module}
        others = groups.get((i, ""), [])
        # What is unnamed goes with the program that took the most of the call.
        main = max(named, key=lambda module: sum(op.end_ns - op.start_ns for op in named[module]), default="")
        for module, group in (named or {"": []}).items():
            if members := group + (others if module == main else []):
                yield _execution(device, module, members)


def _tpu_executions(plane: Any) -> Iterator[Execution]:
    """Executions on a TPU: an event of line "XLA Modules" each, and the events of "XLA Ops" inside it."""
    lines = {line.name: list(line.events) for line in plane.lines if line.name in (_MODULES, _OPS)}
    ops = sorted((_tpu_op(event) for event in lines.get(_OPS, ())), key=_outer_first)
    at = 0
    for event in sorted(lines.get(_MODULES, ()), key=lambda event: event.start_ns):
        found = _MODULE_NAME.fullmatch(event.name)
        module = found[1] if found else event.name
        while at < len(ops) and ops[at].start_ns < event.start_ns:
            at += 1
        first = at
        while at < len(ops) and ops[at].start_ns < event.end_ns:
            at += 1
        inside = tuple(replace(op, module=module) for op in ops[first:at])
        yield Execution(plane.name, module, event.start_ns, event.end_ns, inside)


def _tpu_op(event: Any) -> Op:
    name = str(dict(event.stats).get("hlo_op", ""))
    if not name:
        found = _INSTRUCTION_NAME.match(event.name)
        name = found[1] if found else event.name
    return Op(name, event.start_ns, event.end_ns)


def _execution(device: str, module: str, ops: Iterable[Op]) -> Execution:
    ordered = tuple(sorted(ops, key=_outer_first))
    return Execution(device, module, ordered[0].start_ns, max(op.end_ns for op in ordered), ordered)


def _outer_first(op: Op) -> tuple[float, float]:
    return op.start_ns, -op.end_ns
