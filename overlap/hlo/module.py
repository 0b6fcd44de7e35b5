"""A scheduled HLO module as data: its computations and instructions, in the order that the compiler chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from overlap.hlo import attributes as text_of
from overlap.hlo.shapes import Shape

__all__ = [
    "COLLECTIVES",
    "Computation",
    "Instruction",
    "Module",
    "Shape",
    "async_pairs",
    "collective",
    "collective_instruction",
    "estimated_cycles",
    "host_transfers",
]

MOST_DEVICES: Final = 1 << 18
"""Devices of one program; a text that names more is damaged."""

COLLECTIVES: Final = frozenset(
    {
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
        "collective-broadcast",
        "ragged-all-to-all",
        "send",
        "recv",
    }
)
"""Opcodes that move data between devices."""

_LAZY: Final = frozenset({"backend_config", "op_name", "source_file", "source_line"})

# Hand a value on as it is: a pair is followed through them.
_HANDS_ON: Final = frozenset({"get-tuple-element", "tuple", "opt-barrier", "copy", "bitcast"})

# The TPU compiler cuts a collective into fusions: one that starts it, some that carry it on beside a matmul,
# one that waits for it. Only these names tell them from other fusions.
_FUSED_START: Final = "async-collective-start"
_FUSED_STEP: Final = "async_collective_fusion"
_FUSED_DONE: Final = "async-collective-done"
_FUSED_SCATTER: Final = "all-reduce-scatter"


class _Raw:
    """Room for the text of what few readers ask for: it is parsed when it is first read."""

    __slots__ = ("raw",)

    raw: tuple[str, str, text_of.Frames]
    """The text of ``backend_config`` and ``metadata``, and the module's tables of source lines."""


@dataclass(frozen=True, slots=True)
class Instruction(_Raw):
    """One instruction of a computation.

    Attributes:
      name: without its ``%``; unique in its computation.
      opcode: such as ``"collective-permute-start"``.
      shape: of its result.
      operands: names of the instructions it reads, in order; for parameters and constants, empty.
      literal: what stands between a constant's or parameter's parentheses.
      calls: names of the computations it calls: a fusion's, a loop's condition and body, the branches of a
        conditional, a reduction's function.
      attributes: as printed: ``{"channel_id": "1", "dimensions": "{0}", "to_apply": "%add"}``; all but
        ``metadata`` and ``backend_config``.
      backend_config: the compiler's notes, parsed where they are JSON, else the text; None if there are none.
      op_name: the path of the traced operation, such as ``"jit(f)/shard_map/dot_general"``.
      source_file, source_line: where it was traced; "" and 0 where unknown.
      is_root: whether it is its computation's result.
      line: of the text, from 1.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...] = ()
    literal: str = ""
    calls: tuple[str, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    backend_config: Any = None
    op_name: str = ""
    source_file: str = ""
    source_line: int = 0
    is_root: bool = False
    line: int = 0

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for a slot that the parser left empty."""
            if name not in _LAZY:
                raise AttributeError(f"an Instruction has no {name!r}")
            config, metadata, frames = self.raw
            if name == "backend_config":
                value = text_of.notes(config)
            else:
                described = text_of.metadata(metadata, frames)
                value = described[("op_name", "source_file", "source_line").index(name)]
            object.__setattr__(self, name, value)
            return value

    @property
    def source(self) -> str:
        """Where it was traced, as ``file:line``; "" where unknown."""
        return f"{self.source_file}:{self.source_line}" if self.source_file else ""

    @property
    def custom_call_target(self) -> str:
        """What a custom call calls; "" for all else."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def is_host_transfer(self) -> bool:
        """Whether it is a send or recv whose other side is the host: a callback's, or one between slices."""
        return self.attributes.get("is_host_transfer") == "true"

    @property
    def is_async_start(self) -> bool:
        """Whether it begins something that its done will finish.

        That is ``X-start``, ``send``, ``recv``, or the TPU's fusion ``async-collective-start``.
        """
        if self.opcode == "fusion":
            return self.name.startswith(_FUSED_START)
        return self.opcode.endswith("-start") or self.opcode in ("send", "recv")

    @property
    def is_async_update(self) -> bool:
        """Whether it stands between a start and its done: ``async-update``, ``X-update``."""
        return self.opcode.endswith("-update")

    @property
    def is_async_done(self) -> bool:
        """Whether it waits for what a start began: ``X-done``, the TPU's fusion ``async-collective-done``."""
        if self.opcode == "fusion":
            return self.name.startswith(_FUSED_DONE)
        return self.opcode.endswith("-done")

    @property
    def is_async_step(self) -> bool:
        """Whether it is one of the TPU's fusions that carry a started collective on beside their own work."""
        return self.opcode == "fusion" and bool(self.calls) and self.calls[0].startswith(_FUSED_STEP)


@dataclass(frozen=True)
class Computation:
    """A function of the module: its instructions, in execution order where the module is scheduled.

    Attributes:
      name: without its ``%``.
      instructions: each before those that read it.
      execution_thread: "main", or the core that runs it, such as ``"sparsecore"``.
    """

    name: str
    instructions: tuple[Instruction, ...]
    execution_thread: str = "main"

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """Its instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    def instruction(self, name: str) -> Instruction:
        """The instruction of that name.

        Raises:
          KeyError: there is none.
        """
        return self.by_name[name]

    @property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's result."""
        return next(i for i in reversed(self.instructions) if i.is_root)

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters, by number."""
        parameters = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(parameters, key=lambda i: int(i.literal or 0)))


@dataclass(frozen=True)
class Module:
    """A module of HLO text.

    Attributes:
      name: such as ``"jit_step"``.
      computations: by name.
      entry: name of the computation that runs.
      is_scheduled: whether the order of instructions is the order of execution.
      num_partitions, num_replicas: devices that run it, by SPMD partition and by replica.
      attributes: the others of its first line, as printed.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    is_scheduled: bool = False
    num_partitions: int = 1
    num_replicas: int = 1
    attributes: Mapping[str, str] = field(default_factory=dict)

    def computation(self, name: str) -> Computation:
        """The computation of that name.

        Raises:
          KeyError: there is none.
        """
        return self.computations[name]

    @property
    def entry_computation(self) -> Computation:
        """The computation that runs."""
        return self.computations[self.entry]

    @cached_property
    def callers(self) -> Mapping[str, tuple[tuple[Computation, Instruction], ...]]:
        """By name of a computation: the instructions that call it, each with the computation it stands in."""
        found: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for name in instruction.calls:
                    found.setdefault(name, []).append((computation, instruction))
        return {name: tuple(callers) for name, callers in found.items()}


def collective_instruction(module: Module, instruction: Instruction) -> Instruction | None:
    """The instruction that says what an instruction moves between devices, and among which.

    That is itself for ``all-gather``, ``all-gather-start``, ``send``; for a generic asynchronous start
    (``async-start``, ``call-start``) and for a fusion it is the first collective in the computation it calls.
    None for all others: a done, an update, a step, a loop, what goes to the host, what moves nothing.
    """
    opcode = instruction.opcode
    if opcode.removesuffix("-start") in COLLECTIVES:
        return None if instruction.is_host_transfer else instruction
    if instruction.is_async_done or instruction.is_async_step:
        return None
    if opcode == "fusion" or opcode.endswith("-start"):
        for name in instruction.calls:
            for inner in module.computations[name].instructions:
                found = collective_instruction(module, inner)
                if found is not None:
                    return found
    return None


def collective(module: Module, instruction: Instruction) -> str | None:
    """What an instruction moves between devices: one of `COLLECTIVES`; None where it moves nothing.

    A plain collective, a start, or what wraps one (see `collective_instruction`); a done is None, so that
    every transfer is told once. The TPU's fusion of an all-reduce with the slice that a device keeps is a
    reduce-scatter.
    """
    found = collective_instruction(module, instruction)
    if found is None:
        return None
    if instruction.opcode == "fusion" and instruction.calls[0].startswith(_FUSED_SCATTER):
        return "reduce-scatter"
    return found.opcode.removesuffix("-start")


def host_transfers(module: Module) -> tuple[int, int]:
    """The sends and receives whose other side is the host: those between slices, and others (callbacks)."""
    between = [
        "megascale" in i.attributes.get("frontend_attributes", "")
        for computation in module.computations.values()
        for i in computation.instructions
        if i.is_host_transfer and i.opcode in ("send", "recv")
    ]
    return sum(between), len(between) - sum(between)


def async_pairs(computation: Computation) -> dict[str, str]:
    """By name of each asynchronous start of a computation: its done, behind any updates and steps.

    A start whose done stands elsewhere (in a loop's body, say) is left out.
    """
    pairs: dict[str, str] = {}
    for done in computation.instructions:
        if done.is_async_done:
            start = _start_of(computation.by_name, done)
            if start is not None:
                pairs[start] = done.name
    return pairs


def _start_of(by_name: Mapping[str, Instruction], done: Instruction) -> str | None:
    """The start that a done waits for, found against the flow of data; None where it stands elsewhere."""
    several = done.opcode == "fusion"
    pending = [(name, 0) for name in reversed(done.operands if several else done.operands[:1])]
    seen = set()
    while pending:
        name, index = pending.pop()
        at = by_name.get(name)
        if at is None or (name, index) in seen:
            continue
        seen.add((name, index))
        if at.is_async_start:
            return name
        if at.is_async_step:
            pending.extend((operand, 0) for operand in reversed(at.operands))
        elif at.opcode == "get-tuple-element":
            pending.extend((operand, int(at.attributes.get("index", "0"))) for operand in at.operands)
        elif at.opcode == "tuple":
            pending.extend((operand, 0) for operand in at.operands[index : index + 1])
        elif at.is_async_update or at.opcode in _HANDS_ON:
            pending.extend((operand, index) for operand in at.operands[:1])
    return None


def estimated_cycles(instruction: Instruction) -> int | None:
    """The cycles that the TPU compiler expects an instruction to take; None where it says nothing."""
    config = instruction.backend_config
    window = config.get("window_config") if isinstance(config, dict) else None
    cycles = window.get("estimated_cycles") if isinstance(window, dict) else None
    return text_of.number(cycles)
