"""What a program's time on the devices went into: matmuls, collectives, both at once, or neither."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from overlap.hlo.module import COLLECTIVES, Computation, Instruction, Module
from overlap.hlo.timeline import Kind
from overlap.profile_events import Execution, Op

Interval = tuple[float, float]

_CONTAINERS: Final = frozenset({"while", "conditional", "call"})
_COPIES: Final = frozenset({"copy", "copy-start", "copy-done", "slice-start", "slice-done"})
_FREE: Final = frozenset({"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all"})

# The names of instructions and kernels: what is left where there is no HLO text to look them up in.
_NAMED_COLLECTIVE: Final = re.compile(
    r"(?:^|[^a-z])(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast|"
    r"send|recv|psum-scatter|psum|ppermute|ragged-all-to-all|nccl|rccl)(?![a-z]*fusion)",
)
_NAMED_MATMUL: Final = re.compile(r"(?:^|[^a-z])(dot|convolution|matmul|cutlass|ynn)|gemm|cublas|xmma|nvjet")
_NAMED_COPY: Final = re.compile(r"^(copy|memcpy|memset)")
_NAMED_CONTAINER: Final = re.compile(r"^(while|conditional|call)(?:\.\d+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What an instruction does.

    Attributes:
      opcode: of a collective without ``-start`` or ``-done``; empty where unknown.
      kind: what its time counts as; None for one that only calls others (a loop).
      half: whether it starts or ends an asynchronous operation.
      start: for a done, the name of the instruction that it ends.
      op_name, source: the traced operation and its ``file:line``; empty where unknown.
    """

    opcode: str
    kind: Kind | None
    half: Literal["start", "done", ""] = ""
    start: str = ""
    op_name: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveActivity:
    """The time of one collective instruction, per step: the mean over traced rounds and devices.

    Attributes:
      name, opcode: of the instruction (of the start, where it is a pair; the opcode without ``-start``).
      op_name, source: the traced operation and its ``file:line``; empty where unknown.
      executions: how often it ran.
      in_flight_s: seconds from its start to its end.
      exposed_s: seconds of those in which the device computed nothing. Two collectives that wait at once
        both count the wait.
    """

    name: str
    opcode: str
    op_name: str
    source: str
    executions: float
    in_flight_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Where a variant's time on the devices went, per step: the mean over traced rounds and devices.

    ``compute_only_s + communication_only_s + both_s + idle_s`` is ``span_s``. Copies count as compute: what
    is told apart is whether the device waits for the network.

    Attributes:
      steps: executions that it is the mean of: traced rounds × devices of this process.
      devices: devices of this process that it is the mean of.
      span_s: from the start of the program on the device to its end.
      matmul_s: in which at least one matmul (or a fusion that holds one) ran.
      collective_s: in which at least one collective was in flight.
      compute_only_s, communication_only_s, both_s, idle_s: in which the device did only the one, only the
        other, both, neither.
      collectives: the collectives, the most exposed first.
      unknown: share of the busy time whose events name no instruction of the program's HLO text, and that was
        told by its name alone.
    """

    steps: int
    devices: int
    span_s: float
    matmul_s: float
    collective_s: float
    compute_only_s: float
    communication_only_s: float
    both_s: float
    idle_s: float
    collectives: tuple[CollectiveActivity, ...]
    unknown: float


@dataclass(frozen=True, slots=True)
class Bar:
    """An operation in the time of its step: an asynchronous collective is one bar, from start to end.

    Attributes:
      name: of the instruction, or of the kernel.
      operation: what it does.
      start_ns, end_ns: on the trace's clock.
      known: whether the instruction was found in the HLO text.
    """

    name: str
    operation: Operation
    start_ns: float
    end_ns: float
    known: bool


class Directory:
    """The instructions of a program by name: what every event of its profile does.

    A kernel that XLA:GPU generates goes by its instruction's name too, in which it has ``_`` for what is no
    letter or digit.
    """

    def __init__(self, module: Module | None) -> None:
        self._computations: Mapping[str, Computation] = {} if module is None else module.computations
        self._instructions: dict[str, Instruction] = {}
        for computation in self._computations.values():
            for instruction in computation.instructions:
                # Names are unique but for those in fusions and reductions, which have no events.
                if instruction.opcode not in _FREE:
                    self._instructions.setdefault(instruction.name, instruction)
        for name, instruction in tuple(self._instructions.items()):
            self._instructions.setdefault(_kernel(name), instruction)
        self._found: dict[str, Operation] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._instructions

    def __call__(self, name: str) -> Operation:
        """What the instruction or kernel of this name does."""
        if name not in self._found:
            instruction = self._instructions.get(name)
            self._found[name] = _by_name(name) if instruction is None else self._by_instruction(instruction)
        return self._found[name]

    def _by_instruction(self, instruction: Instruction) -> Operation:
        opcode, half, start = instruction.opcode, _half(instruction.opcode), ""
        if half == "done":
            start = instruction.operands[0] if instruction.operands else ""
            first = self._instructions.get(start)
            while first is not None and first.opcode.endswith("-update"):
                start = first.operands[0] if first.operands else ""
                first = self._instructions.get(start)
        opcodes = list(self._opcodes(instruction, set()))
        collective = next((name for code in opcodes if (name := _collective(code))), "")
        if opcode in _CONTAINERS:
            kind: Kind | None = None
        elif _collective(opcode):
            kind = "collective"
        elif any(code in ("dot", "convolution") or _is_gemm(code) for code in opcodes):
            kind, half = "matmul", ""
        elif collective:
            kind, opcode = "collective", collective
        else:
            kind, half = ("copy" if opcode in _COPIES else "compute"), ""
        if kind == "collective":
            opcode = _collective(opcode) or opcode
        return Operation(
            opcode=opcode,
            kind=kind,
            half=half,
            start=start,
            op_name=instruction.op_name,
            source=instruction.source,
        )

    def _opcodes(self, instruction: Instruction, seen: set[str]) -> Iterator[str]:
        """The opcode of an instruction and, where it is a fusion or the like, of what it fuses.

        A custom call stands with its target.
        """
        yield instruction.opcode
        if instruction.opcode == "custom-call":
            yield instruction.custom_call_target
        # A done tells nothing of what it waits for but through its start.
        if instruction.opcode == "async-done" and instruction.operands:
            start = self._instructions.get(instruction.operands[0])
            if start is not None and start.name not in seen:
                yield from self._opcodes(start, seen | {start.name})
        for name in instruction.calls if instruction.opcode not in _CONTAINERS else ():
            if name in self._computations and name not in seen:
                seen.add(name)
                for inner in self._computations[name].instructions:
                    yield from self._opcodes(inner, seen)


def activity(steps: Iterable[Sequence[Execution]], directory: Directory) -> Activity | None:
    """What the devices did in some steps; None of no steps.

    Args:
      steps: for each traced round and device, what the device executed.
      directory: of the program's instructions.
    """
    totals: dict[str, float] = defaultdict(float)
    per_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    devices: set[str] = set()
    count = 0
    for executions in steps:
        count += 1
        devices.update(execution.device for execution in executions)
        found = [bar for execution in executions for bar in bars(execution, directory)]
        communication = union((b.start_ns, b.end_ns) for b in found if b.operation.kind == "collective")
        compute = union((b.start_ns, b.end_ns) for b in found if b.operation.kind != "collective")
        span = union((execution.start_ns, execution.end_ns) for execution in executions)
        both = length(intersection(compute, communication))
        totals["span"] += length(span)
        totals["matmul"] += length(
            union((b.start_ns, b.end_ns) for b in found if b.operation.kind == "matmul")
        )
        totals["collective"] += length(communication)
        totals["compute_only"] += length(compute) - both
        totals["communication_only"] += length(communication) - both
        totals["both"] += both
        totals["busy"] += sum(b.end_ns - b.start_ns for b in found)
        totals["unknown"] += sum(b.end_ns - b.start_ns for b in found if not b.known)
        for bar in found:
            if bar.operation.kind == "collective":
                own = [(bar.start_ns, bar.end_ns)]
                exposed = length(own) - length(intersection(own, compute))
                for i, value in enumerate((1.0, length(own), exposed)):
                    per_name[bar.name][i] += value
    if not count:
        return None
    seconds = {name: value * 1e-9 / count for name, value in totals.items()}
    busy_s = seconds["compute_only"] + seconds["communication_only"] + seconds["both"]
    collectives = [
        CollectiveActivity(
            name=name,
            opcode=directory(name).opcode,
            op_name=directory(name).op_name,
            source=directory(name).source,
            executions=runs / count,
            in_flight_s=in_flight * 1e-9 / count,
            exposed_s=exposed * 1e-9 / count,
        )
        for name, (runs, in_flight, exposed) in per_name.items()
    ]
    return Activity(
        steps=count,
        devices=len(devices),
        span_s=seconds["span"],
        matmul_s=seconds["matmul"],
        collective_s=seconds["collective"],
        compute_only_s=seconds["compute_only"],
        communication_only_s=seconds["communication_only"],
        both_s=seconds["both"],
        idle_s=max(0.0, seconds["span"] - busy_s),
        collectives=tuple(sorted(collectives, key=lambda c: (-c.exposed_s, -c.in_flight_s, c.name))),
        unknown=totals["unknown"] / totals["busy"] if totals["busy"] else 0.0,
    )


def bars(execution: Execution, directory: Directory) -> list[Bar]:
    """The operations of an execution, by start, each asynchronous collective from its start to its done.

    A start without a done is a bar of its own length: on a GPU it is the kernel that communicates. So is a
    done without a start. A loop or call has no bar, but where nothing that it calls was recorded.
    """
    found: list[Bar] = []
    started: dict[str, deque[Op]] = defaultdict(deque)
    starts = [op.start_ns for op in execution.ops]

    def add(op: Op, name: str, since_ns: float) -> None:
        found.append(Bar(name, directory(name), since_ns, op.end_ns, name in directory))

    for i, op in enumerate(execution.ops):
        operation = directory(op.name)
        if operation.kind is None:
            last = bisect_left(starts, op.end_ns)
            if not any(other.end_ns <= op.end_ns for other in execution.ops[i + 1 : last]):
                known = op.name in directory
                found.append(Bar(op.name, _as_compute(operation), op.start_ns, op.end_ns, known))
        elif operation.kind == "collective" and operation.half == "start":
            started[op.name].append(op)
        elif operation.kind == "collective" and operation.half == "done":
            waiting = started.get(operation.start)
            add(
                op,
                operation.start if waiting else op.name,
                waiting.popleft().start_ns if waiting else op.start_ns,
            )
        else:
            add(op, op.name, op.start_ns)
    for waiting in started.values():
        for op in waiting:
            add(op, op.name, op.start_ns)
    return sorted(found, key=lambda bar: (bar.start_ns, bar.end_ns))


# Sets of times: ascending intervals that do not touch.


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times that lie in any of the intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The times that lie in both of two unions."""
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """How long the times of a union are together."""
    return sum(end - start for start, end in intervals)


def _as_compute(operation: Operation) -> Operation:
    return Operation(
        opcode=operation.opcode, kind="compute", op_name=operation.op_name, source=operation.source
    )


def _kernel(name: str) -> str:
    """What the kernel of an instruction is called."""
    return re.sub(r"[^a-zA-Z0-9]", "_", name)


def _half(opcode: str) -> Literal["start", "done", ""]:
    return "start" if opcode.endswith("-start") else "done" if opcode.endswith("-done") else ""


def _collective(opcode: str) -> str:
    """The collective that an opcode is, or is half of; empty if none."""
    base = opcode.removesuffix("-start").removesuffix("-done")
    return base if base in COLLECTIVES else ""


def _is_gemm(target: str) -> bool:
    return any(word in target for word in ("gemm", "matmul", "cublas", "cudnn$conv"))


def _by_name(name: str) -> Operation:
    """What an instruction or kernel does, as far as its name alone tells."""
    plain = name.lower().replace("_", "-")
    if _NAMED_CONTAINER.match(plain):
        return Operation(opcode="", kind=None)
    if found := _NAMED_COLLECTIVE.search(plain):
        half = _half(re.sub(r"[.\d]+$", "", plain))
        # The numbers of a start and its done are the same in all but rare cases.
        start = re.sub(r"-done(?=[.\d]*$)", "-start", name) if half == "done" else ""
        return Operation(opcode=found[1], kind="collective", half=half, start=start)
    if _NAMED_MATMUL.search(plain):
        return Operation(opcode="", kind="matmul")
    return Operation(opcode="", kind="copy" if _NAMED_COPY.match(plain) else "compute")
