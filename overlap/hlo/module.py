"""A scheduled HLO module as data: its computations and instructions, in the order that the compiler chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """The type of a value: an array, a tuple of shapes, or a token.

    Attributes:
      dtype: as HLO spells it, such as ``"bf16"``; ``"tuple"`` or ``"token"`` where it is no array.
      dims: sizes of an array's dimensions; empty for a scalar.
      layout: an array's dimensions from the fastest to the slowest varying, where the text says.
      tiling: as printed, such as ``"T(8,128)(2,1)"``; empty where there is none.
      memory_space: 0 is main memory; 1 is VMEM on a TPU, 5 the host.
      elements: the shapes of a tuple.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    layout: tuple[int, ...] | None = None
    tiling: str = ""
    memory_space: int = 0
    elements: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: without its ``%``; unique in its computation.
      opcode: such as ``"collective-permute-start"``.
      shape: of its result.
      operands: names of the instructions it reads, in order; for parameters and constants, empty.
      literal: what stands between a constant's or parameter's parentheses.
      calls: names of the computations it calls: a fusion's, a loop's condition and body, the branches of a
        conditional, a reduction's function.
      attributes: the others, as printed: ``{"channel_id": "1", "dimensions": "{0}"}``.
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


@dataclass(frozen=True, slots=True)
class Computation:
    """A function of the module: its instructions, in execution order where the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @property
    def root(self) -> Instruction:
        """The instruction whose value is the computation's result."""
        return next(i for i in reversed(self.instructions) if i.is_root)


@dataclass(frozen=True, slots=True)
class Module:
    """A module of HLO text.

    Attributes:
      name: such as ``"jit_step"``.
      computations: by name.
      entry: name of the computation that runs.
      is_scheduled: whether the order of instructions is the order of execution.
      num_partitions, num_replicas: devices that run it, by SPMD partition and by replica.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    is_scheduled: bool = False
    num_partitions: int = 1
    num_replicas: int = 1
