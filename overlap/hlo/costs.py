"""The time of one instruction on one device, collectives apart: compiler's cycles, or a roofline.

On a TPU the compiler writes `estimated_cycles` beside every convolution, loop fusion and most copies; they
are taken as they stand, over the chip's clock. They include main memory: compiled for v5e, v5p and v6e, a
float32 copy of 256 MB is estimated at 71 to 83 % of the HBM bandwidth, [8,8192]·[8192,32768] on v5p at 65 %,
and a matmul's estimate falls by 8 % when an operand is moved to VMEM. So no roofline is laid over them. For
elementwise work in bfloat16 and for operations outside fusions they are cautious: two to four times the bytes
over the bandwidth. `elementwise="bandwidth"` takes the smaller of the two for all but matmuls, so that a
comparison of programs can show that it does not rest on that caution.

What has no estimate is charged by the bytes it moves, over the HBM bandwidth, or 22 times that where all of
it is in VMEM (scaling book, "All About Rooflines"). A slice reads only what it returns, and an update in
place touches only the updated part. Scalars and other results of up to `TINY_BYTES` are free, but for what is
reduced to them: they run on the scalar core, beside the rest.

On GPU and CPU, matmuls (dots, cuBLAS and oneDNN calls, fusions around a dot) take `cost_model.matmul_s`;
every other kernel takes `KERNEL_S` and its bytes over the memory bandwidth. A Pallas kernel takes the cost
estimate that its author gave, where there is one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from cost_model import Hardware, Matmul, dtype_bytes, matmul_s
from overlap.hlo.module import Computation, Instruction, Module, Shape, estimated_cycles
from overlap.hlo.timeline import Kind

KERNEL_S: Final = 2e-6
"""From one small kernel's start to the next one's, on a GPU stream that is kept full: rounded experience."""

VMEM_SPEED: Final = 22
"""Bandwidth of VMEM over that of HBM (scaling book, "All About Rooflines")."""

TINY_BYTES: Final = 4096
"""A result of at most one vector register: free where the compiler gives no estimate."""

_READING: Final = frozenset({"fusion", "custom-call", "reduce", "reduce-window"})
"""What may read much to make little."""

Elementwise = Literal["estimated", "bandwidth"]
"""How elementwise work and copies with an estimate are charged; see above."""

FREE: Final = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "add-dependency",
        "domain",
        "get-dimension-size",
    }
)
"""Opcodes that move no data."""

MOVES: Final = frozenset(
    {
        "copy",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "transpose",
        "concatenate",
        "pad",
        "reverse",
        "gather",
        "broadcast",
        "iota",
        "reshape",
        "bitcast-convert",
        "convert",
    }
)
"""Opcodes that compute nothing."""

MATMULS: Final = frozenset({"dot", "convolution", "ragged-dot", "scaled-dot"})

_FREE_TARGETS: Final = frozenset(
    {"AllocateBuffer", "ConcatBitcast", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}
)
_MATMUL_TARGET: Final = re.compile(r"__cublas\$(gemm|lt\$matmul(\$f8)?)|__onednn\$matmul|__onednn\$dot")
_DTYPE: Final = re.compile(r"(bf|f|s|u|c)(\d+)(e\w+)?")
_KINDS: Final = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one execution of an instruction takes.

    Attributes:
      seconds: modelled.
      kind: what the time counts as.
      does: the opcode; for a fusion, of the operation that dominates it.
      estimated: whether the seconds are the compiler's cycles.
    """

    seconds: float
    kind: Kind
    does: str
    estimated: bool = False


class Costs:
    """Costs of a module's instructions on one kind of hardware; computations are read once."""

    def __init__(self, module: Module, hardware: Hardware, elementwise: Elementwise = "estimated") -> None:
        self._module = module
        self._hardware = hardware
        self._elementwise = elementwise
        self._reads: dict[str, tuple[float, ...]] = {}
        self._contents: dict[str, tuple[Kind, str]] = {}

    def cost(self, computation: Computation, instruction: Instruction) -> Cost:
        """What one execution of an instruction of `computation` takes; a caller prices what it calls."""
        opcode = instruction.opcode
        if opcode in FREE or instruction.custom_call_target in _FREE_TARGETS:
            return Cost(0.0, "copy", opcode)
        kind, does = self._doing(instruction)
        cycles = estimated_cycles(instruction)
        if cycles is not None and self._hardware.clock_hz:
            seconds = cycles / self._hardware.clock_hz
            if self._elementwise == "bandwidth" and kind != "matmul":
                seconds = min(seconds, self.bytes_s(computation, instruction))
            return Cost(seconds, kind, does, estimated=True)
        given = _author_s(instruction, self._hardware)
        if given is not None:
            return Cost(given, kind, does)
        bytes_s = self.bytes_s(computation, instruction)
        if kind == "matmul":
            matmuls_s = sum(matmul_s(m, self._hardware) for m in self._matmuls(computation, instruction))
            return Cost(max(matmuls_s, bytes_s), kind, does)
        if _result_bytes(instruction.shape) <= TINY_BYTES and opcode not in _READING:
            return Cost(0.0, kind, does)
        overhead_s = 0.0 if self._hardware.clock_hz else KERNEL_S
        return Cost(overhead_s + bytes_s, kind, does)

    def copy_s(self, computation: Computation, start: Instruction) -> float:
        """Seconds of main memory that an asynchronous copy, whole or of a slice, takes.

        A copy between two places in main memory reads and writes there; to or from VMEM, or the host's
        memory, it does one of both.
        """
        source, target = _copied(computation.by_name, start)
        spaces = (source.memory_space, target.memory_space)
        return spaces.count(0) * target.bytes / self._hardware.hbm_bytes_per_s

    def bytes_s(self, computation: Computation, instruction: Instruction) -> float:
        """Seconds in which the instruction's operands and results pass through memory."""
        main, near = self.traffic(computation, instruction)
        bandwidth = self._hardware.hbm_bytes_per_s
        return max(main / bandwidth, near / (VMEM_SPEED * bandwidth))

    def traffic(self, computation: Computation, instruction: Instruction) -> tuple[float, float]:
        """Bytes that the instruction reads and writes: in main memory, and in VMEM."""
        names = computation.by_name
        operands = [names[o] for o in instruction.operands if o in names]
        moved: list[tuple[int, float]] = []
        if instruction.opcode == "fusion" and instruction.calls:
            called = self._module.computation(instruction.calls[0])
            reads = self._parameter_reads(called)
            moved += [(_space(o.shape), read) for o, read in zip(operands, reads, strict=False)]
            written = self._writes(called)
            leaves = instruction.shape.elements or (instruction.shape,)
            moved += [(_space(leaf), count) for leaf, count in zip(leaves, written, strict=False)]
        else:
            moved += [
                (_space(o.shape), _read_bytes(instruction, position, o.shape))
                for position, o in enumerate(operands)
            ]
            written_bytes = _result_bytes(instruction.shape)
            if instruction.opcode in ("dynamic-update-slice", "scatter") and len(operands) > 1:
                written_bytes = float(operands[-1 if instruction.opcode == "scatter" else 1].shape.bytes)
            moved.append((_space(instruction.shape), written_bytes))
        near = sum(count for space, count in moved if space == 1)
        return sum(count for space, count in moved if space != 1), near

    def _parameter_reads(self, called: Computation) -> tuple[float, ...]:
        """Bytes that a fused computation reads of each of its parameters, by parameter number."""
        known = self._reads.get(called.name)
        if known is not None:
            return known
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for instruction in called.instructions:
            for position, operand in enumerate(instruction.operands):
                users.setdefault(operand, []).append((instruction, position))

        def read(value: Instruction) -> float:
            whole = float(value.shape.bytes)
            total = 0.0
            for user, position in users.get(value.name, ()):
                if user.opcode == "bitcast":
                    total += read(user)
                elif user.opcode == "fusion" and user.calls:
                    total += self._parameter_reads(self._module.computation(user.calls[0]))[position]
                elif user.opcode != "tuple":  # handed through, in place
                    total += _read_bytes(user, position, value.shape)
            return min(total, whole)

        known = self._reads[called.name] = tuple(read(parameter) for parameter in called.parameters)
        return known

    def _writes(self, called: Computation) -> tuple[float, ...]:
        """Bytes that a fused computation writes of each of its results: of an update in place, the update."""
        names = called.by_name

        def written(value: Instruction) -> float:
            source = value
            while source.opcode == "bitcast" and source.operands:
                source = names[source.operands[0]]
            if source.opcode == "parameter":
                return 0.0
            if source.opcode == "dynamic-update-slice":
                return float(names[source.operands[1]].shape.bytes)
            return float(value.shape.bytes)

        root = called.root
        results = [names[o] for o in root.operands] if root.opcode == "tuple" else [root]
        return tuple(written(result) for result in results)

    def _doing(self, instruction: Instruction) -> tuple[Kind, str]:
        """What an instruction counts as, and the opcode that names it best."""
        opcode = instruction.opcode
        if _MATMUL_TARGET.fullmatch(instruction.custom_call_target):
            return "matmul", "dot"
        if opcode != "fusion" or not instruction.calls:
            return _kind(opcode), opcode
        return self._content(instruction.calls[0])

    def _content(self, called: str) -> tuple[Kind, str]:
        if called not in self._contents:
            self._contents[called] = self._dominating(self._module.computation(called))
        return self._contents[called]

    def _dominating(self, computation: Computation) -> tuple[Kind, str]:
        """What a fused computation counts as, and the opcode of the operation that dominates it."""
        inside = [i for i in computation.instructions if i.opcode not in FREE]
        large = [i for i in inside if i.shape.elements or i.shape.bytes > TINY_BYTES]
        last: list[tuple[Kind, str]] = [("compute", i.opcode) for i in inside[-1:]]
        found = [self._doing(i) for i in large] or last
        matmuls = [does for kind, does in found if kind == "matmul"]
        computes = [does for kind, does in found if kind == "compute"]
        if matmuls:
            return "matmul", matmuls[-1]
        if computes:
            return "compute", "reduce" if "reduce" in computes else computes[-1]
        return "copy", found[-1][1] if found else "copy"

    def _matmuls(self, computation: Computation, instruction: Instruction) -> list[Matmul]:
        """The matmuls that an instruction of kind "matmul" computes."""
        names = computation.by_name
        if instruction.opcode == "fusion":
            called = self._module.computation(instruction.calls[0])
            return [m for i in called.instructions for m in self._fused_matmuls(called, i)]
        operands = [names[o].shape for o in instruction.operands[:2]]
        if len(operands) < 2:
            return []
        result = instruction.shape.elements[0] if instruction.shape.elements else instruction.shape
        if instruction.opcode == "convolution":
            return [_convolution(operands[0], operands[1], result, instruction.attributes)]
        return [_dot(operands[0], operands[1], result, _dimensions(instruction))]

    def _fused_matmuls(self, called: Computation, inner: Instruction) -> list[Matmul]:
        if inner.opcode in MATMULS or inner.opcode in ("fusion", "custom-call"):
            return self._matmuls(called, inner) if self._doing(inner)[0] == "matmul" else []
        return []


def _kind(opcode: str) -> Kind:
    if opcode in MATMULS:
        return "matmul"
    return "copy" if opcode in MOVES else "compute"


def _space(shape: Shape) -> int:
    return shape.elements[0].memory_space if shape.elements else shape.memory_space


def _result_bytes(shape: Shape) -> float:
    return float(shape.bytes)


def _read_bytes(user: Instruction, position: int, shape: Shape) -> float:
    """Bytes that an instruction reads of its operand of this shape."""
    if user.opcode in ("slice", "dynamic-slice", "gather") and position == 0:
        return float(user.shape.bytes)
    if user.opcode in ("dynamic-update-slice", "scatter") and position == 0:
        return 0.0
    return float(shape.bytes)


def _copied(names: Mapping[str, Instruction], start: Instruction) -> tuple[Shape, Shape]:
    """Where an asynchronous copy reads and what it writes: `copy-start`, `slice-start`, `async-start`.

    A `dynamic-update-slice-start` writes into a buffer no more than what it updates.
    """
    parts = start.shape.elements
    if start.opcode == "dynamic-update-slice-start" and all(name in names for name in start.operands[:2]):
        buffer, update = (names[name].shape for name in start.operands[:2])
        return update, dataclasses.replace(update, memory_space=buffer.memory_space)
    source = names[start.operands[0]].shape if start.operands and start.operands[0] in names else None
    if start.opcode == "copy-start" and parts:
        target = parts[0]
    else:
        target = parts[1] if len(parts) > 1 else start.shape
    while target.elements:
        target = target.elements[0]
    return source or target, target


def _author_s(instruction: Instruction, hardware: Hardware) -> float | None:
    """Seconds by the cost estimate that the author of a Pallas kernel gave; None without one."""
    if instruction.opcode != "custom-call" or not isinstance(instruction.backend_config, Mapping):
        return None
    config = instruction.backend_config.get("custom_call_config")
    estimate: Any = config.get("cost_estimate") if isinstance(config, Mapping) else None
    if not isinstance(estimate, Mapping):
        return None
    flops = float(estimate.get("flops", 0))
    moved = float(estimate.get("bytes_accessed", 0))
    peak = hardware.matmul_efficiency * hardware.flops_for("bfloat16")
    return max(flops / peak, moved / hardware.hbm_bytes_per_s)


Dimensions = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Contracting dimensions of the left and right operand of a dot, then its batch dimensions of both."""


def _dimensions(instruction: Instruction) -> Dimensions | None:
    """Which dimensions a dot, or a library's matmul, contracts; None where nothing says so."""
    config = instruction.backend_config
    if isinstance(config, Mapping) and "gemm_backend_config" in config:
        numbers = config["gemm_backend_config"].get("dot_dimension_numbers", {})
        keys = ("lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch")
        lc, rc, lb, rb = (tuple(int(d) for d in numbers.get(f"{key}_dimensions", ())) for key in keys)
        return (lc, rc, lb, rb)
    if "lhs_contracting_dims" in instruction.attributes:
        keys = ("lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims", "rhs_batch_dims")
        lc, rc, lb, rb = (
            tuple(int(d) for d in _NUMBER.findall(instruction.attributes.get(key, ""))) for key in keys
        )
        return (lc, rc, lb, rb)
    return None


def _dot(lhs: Shape, rhs: Shape, result: Shape, dimensions: Dimensions | None) -> Matmul:
    if dimensions is None:  # a library's [..., m, k] · [..., k, n]
        rank = len(lhs.dims)
        batch = tuple(range(rank - 2))
        dimensions = ((rank - 1,), (max(len(rhs.dims) - 2, 0),), batch, batch[: max(len(rhs.dims) - 2, 0)])
    lhs_contracting, rhs_contracting, lhs_batch, rhs_batch = dimensions
    for of, named in ((lhs, lhs_contracting + lhs_batch), (rhs, rhs_contracting + rhs_batch)):
        if beyond := [dim for dim in named if dim >= len(of.dims)]:
            raise ValueError(f"a dot names dimension {beyond[0]} of an operand with {len(of.dims)}")
    return _matmul(
        (lhs, rhs, result),
        batch=math.prod(lhs.dims[d] for d in lhs_batch),
        m=_free(lhs.dims, lhs_contracting + lhs_batch),
        k=math.prod(lhs.dims[d] for d in lhs_contracting),
        n=_free(rhs.dims, rhs_contracting + rhs_batch),
    )


def _convolution(lhs: Shape, rhs: Shape, result: Shape, attributes: Mapping[str, str]) -> Matmul:
    """A convolution as the matmul of its kernel: k is its input features times its window."""
    labels = re.fullmatch(r"\w+?_(\w+)->\w+", attributes.get("dim_labels", ""))
    output = labels[1].index("o") if labels and "o" in labels[1] else len(rhs.dims) - 1
    n = rhs.dims[output] if rhs.dims else 1
    groups = int(attributes.get("batch_group_count", "1"))
    return _matmul(
        (lhs, rhs, result),
        m=math.prod(result.dims) // max(n, 1),
        k=math.prod(rhs.dims) // max(n, 1) // max(groups, 1),
        n=n,
    )


def _matmul(arrays: tuple[Shape, Shape, Shape], *, m: int, k: int, n: int, batch: int = 1) -> Matmul:
    """The matmul of these operands and result, in the wider of the operands' types."""
    left, right, out = (dtype_name(array.dtype) for array in arrays)
    wider = max((left, right), key=dtype_bytes)
    return Matmul(
        m=m,
        k=k,
        n=n,
        batch=batch,
        dtype=wider,
        out_dtype=out,
        lhs_dtype=None if left == wider else left,
        rhs_dtype=None if right == wider else right,
    )


def _free(dims: tuple[int, ...], taken: tuple[int, ...]) -> int:
    return math.prod(size for d, size in enumerate(dims) if d not in taken)


def dtype_name(dtype: str) -> str:
    """The cost model's name of an HLO dtype: ``"bfloat16"`` for ``"bf16"``, ``"float32"`` if unknown."""
    if dtype == "pred":
        return "bool"
    if match := _DTYPE.fullmatch(dtype):
        return _KINDS[match[1]] + match[2] + (f"_{match[3]}" if match[3] else "")
    return "float32"
