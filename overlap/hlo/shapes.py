"""Shapes: their HLO text, and how many bytes they take."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

_ARRAY: Final = re.compile(
    r"([a-z]\w*)\[((?:(?:<=)?\d+|<=\?|\?)(?:,(?:(?:<=)?\d+|<=\?|\?))*)?\]"
    r"(?:\{(\d+(?:,\d+)*)?(?::((?:[^(){}]|\((?:[^(){}]|\{[^{}]*\}|\([^()]*\))*\))*))?\})?",
    re.ASCII,
)
_TILING: Final = re.compile(r"T(?:\([\d*,]*\))+")
_MEMORY: Final = re.compile(r"S\((\d+)\)")
_BITS: Final = re.compile(r"[su](\d+)|c(64|128)|bf(16)|f(16|32|64)|f([468])e\d+m\d+\w*")
_GAP: Final = re.compile(r"(?:\s|/\*.*?\*/)*")

_HOST: Final = 5

_UNSIZED: Final = frozenset({"tuple", "buffer", "token", "opaque"})


@dataclass(frozen=True, slots=True)
class Shape:
    """The type of a value: an array, a tuple of shapes, or a token.

    Attributes:
      dtype: as HLO spells it, such as ``"bf16"``; ``"tuple"``, ``"buffer"``, ``"token"`` or ``"opaque"``
        where it is no array.
      dims: sizes of an array's dimensions, the greatest where a size is dynamic; empty for a scalar.
      layout: an array's dimensions from the fastest to the slowest varying, where the text says.
      tiling: as printed, such as ``"T(8,128)(2,1)"``; empty where there is none.
      memory_space: 0 is main memory; 1 is VMEM on a TPU, 5 the host.
      elements: the shapes of a tuple; the one shape of a buffer.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    layout: tuple[int, ...] | None = None
    tiling: str = ""
    memory_space: int = 0
    elements: tuple[Shape, ...] = ()

    @property
    def is_in_host_memory(self) -> bool:
        """Whether an array, or some of a tuple's, lies in the host's memory."""
        return self.memory_space == _HOST or any(element.is_in_host_memory for element in self.elements)

    @property
    def size(self) -> int:
        """Number of an array's elements; 0 for what is no array."""
        return 0 if self.dtype in _UNSIZED else math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the data, without padding; a tuple's is the sum, a token's 0.

        Elements narrower than a byte are packed: the array's bits are rounded up to whole bytes.

        Raises:
          ValueError: the dtype is none of HLO's.
        """
        if self.dtype in _UNSIZED:
            return sum(element.bytes for element in self.elements)
        return -(-math.prod(self.dims) * bits(self.dtype) // 8)

    @property
    def arrays(self) -> tuple[Shape, ...]:
        """The arrays in it, in order: itself, or those of a tuple at any depth."""
        if self.dtype in _UNSIZED:
            return tuple(array for element in self.elements for array in element.arrays)
        return (self,)


def bits(dtype: str) -> int:
    """Bits of one element: HLO's names say them (``f8e4m3fn``, ``s4``, ``c64``); a pred takes a byte.

    Raises:
      ValueError: it is no dtype of an array.
    """
    if dtype == "pred":
        return 8
    match = _BITS.fullmatch(dtype)
    if match is None or match.lastindex is None:
        raise ValueError(f"{dtype!r} is no HLO type")
    return int(match[match.lastindex])


def parse_shape(text: str) -> Shape:
    """Reads a shape such as ``(bf16[8,<=16]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/u32[])``.

    Raises:
      ValueError: it is none; says where.
    """
    try:
        shape, end = _shape(text, 0)
    except RecursionError:
        raise ValueError("a shape of tuples in tuples without end") from None
    if end != len(text):
        raise ValueError(f"after the shape {text[:end]!r} comes {text[end : end + 20]!r}")
    return shape


def _shape(text: str, start: int) -> tuple[Shape, int]:
    """The shape that begins at `start`, and where it ends."""
    if text.startswith("(", start):
        elements, end = _elements(text, start + 1)
        return Shape("tuple", elements=elements), end
    if text.startswith("b(", start):
        elements, end = _elements(text, start + 2)
        if len(elements) != 1:
            raise ValueError(f"a buffer of {len(elements)} shapes; it has one")
        return Shape("buffer", elements=elements), end
    match = _ARRAY.match(text, start)
    if match is None:
        raise ValueError(f"no shape: {text[start : start + 40]!r}")
    dtype, dims, layout, notes = match.groups()
    if dtype in ("token", "opaque"):
        return Shape(dtype), match.end()
    bits(dtype)
    tiling = _TILING.search(notes) if notes else None
    memory = _MEMORY.search(notes) if notes else None
    rank = tuple(int(d.lstrip("<=")) if d[-1] != "?" else 0 for d in dims.split(",")) if dims else ()
    order = tuple(map(int, layout.split(","))) if layout else () if match[0].endswith("}") else None
    if order is not None and sorted(order) != list(range(len(rank))):
        raise ValueError(f"the layout of {match[0]!r} does not name its {len(rank)} dimensions")
    return (
        Shape(dtype, rank, order, tiling[0] if tiling else "", int(memory[1]) if memory else 0),
        match.end(),
    )


def _elements(text: str, start: int) -> tuple[tuple[Shape, ...], int]:
    """The shapes up to the closing parenthesis, and where what follows it begins."""
    elements: list[Shape] = []
    at = _gap(text, start)
    if text.startswith(")", at):
        return (), at + 1
    while True:
        shape, at = _shape(text, _gap(text, at))
        elements.append(shape)
        at = _gap(text, at)
        if text.startswith(")", at):
            return tuple(elements), at + 1
        if not text.startswith(",", at):
            raise ValueError(f"no comma and no parenthesis after {text[max(0, at - 20) : at]!r}")
        at += 1


def _gap(text: str, at: int) -> int:
    """Where the blanks and comments that begin at `at` end."""
    match = _GAP.match(text, at)
    return match.end() if match else at
