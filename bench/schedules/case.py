"""A case of the grid: a slice of chips, a pattern of collective and dots, and a size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Devices and the mesh laid on them.

    Attributes:
      topology: as the compiler names it, such as ``"v5p:2x2x4"``.
      hardware: the cost model's name of the chip.
      mesh_shape: sizes of the mesh's axes; the program communicates over one of them.
      axis: number of that axis.
    """

    topology: str
    hardware: str
    mesh_shape: tuple[int, ...]
    axis: int = 0

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh's axes; the one communicated over is ``"x"``, the other ``"data"``."""
        return tuple("x" if number == self.axis else "data" for number in range(len(self.mesh_shape)))

    @property
    def axis_size(self) -> int:
        """Devices along the axis."""
        return self.mesh_shape[self.axis]

    @property
    def others(self) -> int:
        """Devices along the other axis, each with rows of its own; 1 if there is none."""
        return self.devices // self.axis_size

    @property
    def devices(self) -> int:
        """How many there are."""
        count = 1
        for size in self.mesh_shape:
            count *= size
        return count

    @property
    def chip(self) -> str:
        """The chip's short name, such as ``"v5p"``."""
        return self.topology.partition(":")[0]

    def __str__(self) -> str:
        return self.topology if self.others == 1 else f"{self.topology}@{self.axis_size}"


@dataclass(frozen=True, slots=True)
class Width:
    """A model's widths: the residual stream's and the MLP's hidden one.

    Attributes:
      name: the model's.
      d_model, d_ff: the widths.
      gated: whether its MLP is a SwiGLU, with two matmuls up; else one, with a GELU.
    """

    name: str
    d_model: int
    d_ff: int
    gated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the grid.

    Attributes:
      slice: where it runs.
      pattern: a name of ``programs.PATTERNS``.
      width: the model's widths.
      tokens: rows of activations per device (for ``gather_batch`` per device and expert).
      dtype: of what is multiplied.
    """

    slice: Slice
    pattern: str
    width: Width
    tokens: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Unique in the grid, such as ``"v5p:2x2x4 gather_free llama3-8b 1024 bfloat16"``."""
        return f"{self.slice} {self.pattern} {self.width.name} {self.tokens} {self.dtype}"


SLICES: Final = (
    Slice(topology="v5e:4x4", hardware="tpu_v5e", mesh_shape=(16,)),
    Slice(topology="v5e:2x4", hardware="tpu_v5e", mesh_shape=(8,)),
    Slice(topology="v6e:4x4", hardware="tpu_v6e", mesh_shape=(16,)),
    Slice(topology="v6e:2x4", hardware="tpu_v6e", mesh_shape=(8,)),
    Slice(topology="v5p:2x2x2", hardware="tpu_v5p", mesh_shape=(8,)),
    Slice(topology="v5p:2x2x4", hardware="tpu_v5p", mesh_shape=(16,)),
    Slice(topology="v5p:4x4x4", hardware="tpu_v5p", mesh_shape=(16, 4), axis=1),
    Slice(topology="v5p:4x4x4", hardware="tpu_v5p", mesh_shape=(16, 4), axis=0),
    Slice(topology="v4:2x2x1", hardware="tpu_v4", mesh_shape=(8,)),
    Slice(topology="v4:2x2x2", hardware="tpu_v4", mesh_shape=(16,)),
    Slice(topology="tpu7x:2x2x1", hardware="tpu_7x", mesh_shape=(8,)),
    Slice(topology="tpu7x:2x2x2", hardware="tpu_7x", mesh_shape=(16,)),
)
"""8 to 64 devices. Of v5p:4x4x4 as a mesh of 16 × 4, once each axis: 4 is one physical ring."""

H100: Final = Slice(topology="h100:8", hardware="h100", mesh_shape=(8,))
"""Eight GPUs behind one switch."""

WIDTHS: Final = (
    Width("llama3-8b", 4096, 14336, True),
    Width("llama3-70b", 8192, 28672, True),
    Width("esm2-15b", 5120, 20480, False),
    Width("gpt3-175b", 12288, 49152, False),
)

TOKENS: Final = (128, 256, 512, 1024, 2048, 4096, 8192)
