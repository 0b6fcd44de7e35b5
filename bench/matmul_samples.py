"""Matmuls compiled by the real TPU compiler, with the cycles that it estimates for each.

A sample is one matmul of one compiled program. Programs are known by chip, set and number, from which their
shapes are drawn, so that a collection can stop anywhere and go on later.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from cost_model import Hardware, by_name

TOPOLOGIES: Final = {
    "tpu_v5e": "v5e:4x4",
    "tpu_v5p": "v5p:2x2x1",
    "tpu_v6e": "v6e:4x4",
    "tpu_v4 core": "v4:2x2x1",
    "tpu_7x": "tpu7x:2x2x1",
}
"""A slice of each chip. Compilers of v4 and 7x count a core as a device."""

Set = Literal["table", "large", "long", "unseen"]
"""Which of the collections a sample is of. Tables were fitted to the first three once, which read the
compiler's log now; all judge them."""

BYTES: Final = {"bfloat16": 2, "float32": 4, "int8": 1, "int32": 4}
LARGEST: Final = 4e9
"""Bytes of a matmul alone in its program; a quarter of that where there are several."""

LARGE_FROM: Final = 90
"""Numbers of unseen samples that are of matmuls too large for a chip."""

LONG_FROM: Final = 94
"""Numbers of those that are of long ones."""

PLACED_FROM: Final = 106
"""Numbers of unseen samples whose results are put into their places in a larger array."""

LONG: Final = 8
"""How many times as many rows as large ones they have, as matmuls of all devices' rows do."""

LARGEST_STEP: Final = 1e9
"""Bytes of a matmul of their rings, whose operands are there several times."""

RING_SHAPES: Final = ((512, 2048, 2048), (4096, 512, 8192))
RING_STEPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """`[batch, m, k] · [batch, k, n]`, as in `cost_model.Matmul`."""

    batch: int = 1
    m: int
    k: int
    n: int
    dtype: str
    out_dtype: str

    @property
    def bytes(self) -> int:
        """Of operands and result."""
        operands = (self.m * self.k + self.k * self.n) * BYTES[self.dtype]
        return self.batch * (operands + self.m * self.n * BYTES[self.out_dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One matmul as it was compiled.

    Attributes:
      dot: what it computes.
      lhs, rhs, result: the memory where each lies, as XLA numbers them: 0 is main memory, 1 VMEM, 3 CMEM.
      accumulator: that of an array added to the product in the same fusion; None if there is none.
      accumulator_width: its bytes per element; 0 if there is none.
      cycles: the compiler's estimate.
      program: what kind of program it is from.
    """

    dot: Dot
    lhs: int
    rhs: int
    result: int
    accumulator: int | None = None
    accumulator_width: int = 0
    cycles: int
    program: str

    def to_list(self) -> list[Any]:
        """The fields in their order, the dot's first; `from_list` reads them."""
        places = (self.lhs, self.rhs, self.result, self.accumulator, self.accumulator_width)
        return [*dataclasses.astuple(self.dot), *places, self.cycles, self.program]

    @classmethod
    def from_list(cls, fields: Sequence[Any]) -> Sample:
        """The sample that `to_list` wrote."""
        batch, m, k, n, dtype, out_dtype, lhs, rhs, result, accumulator, width, cycles, program = fields
        return cls(
            dot=Dot(batch=batch, m=m, k=k, n=n, dtype=dtype, out_dtype=out_dtype),
            lhs=lhs,
            rhs=rhs,
            result=result,
            accumulator=accumulator,
            accumulator_width=width,
            cycles=cycles,
            program=program,
        )


def draw(chance: random.Random) -> Dot:
    """A random shape: M from 8, K and N from 128 to 32768, even in the logarithm; one in eight has a batch.

    Four of five are as layers have them, multiples of 8 and 128. A batch's matmuls are four times smaller.
    """

    def size(least: int) -> int:
        return round(math.exp(chance.uniform(math.log(least), math.log(32768))))

    m, k, n = size(8), size(128), size(128)
    if chance.random() < 0.8:
        m, k, n = max(8, m // 8 * 8), max(128, round(k / 128) * 128), max(128, round(n / 128) * 128)
    batch = chance.choice((2, 4, 8, 16)) if chance.random() < 0.12 else 1
    if batch > 1:
        m, k, n = max(8, m // 4 // 8 * 8), max(128, k // 4 // 128 * 128), max(128, n // 4 // 128 * 128)
    dtype = chance.choices(("bfloat16", "float32", "int8"), (6, 2, 2))[0]
    out_dtype = "int32" if dtype == "int8" else dtype
    if dtype == "bfloat16" and chance.random() < 0.2:
        out_dtype = "float32"
    return Dot(batch=batch, m=m, k=k, n=n, dtype=dtype, out_dtype=out_dtype)


def _draw_small(chance: random.Random, bytes: float, rhs_elements: float = math.inf) -> Dot:
    while True:
        dot = draw(chance)
        if dot.bytes < bytes and dot.batch * dot.k * dot.n <= rhs_elements:
            return dot


def _draw_large(chance: random.Random, chip: str, bytes: float, times: int = 1) -> Dot:
    """A shape of which neither operand fits on the chip, with so many times the rows, of fewer bytes."""
    fits = hardware_of(chip).on_chip_bytes
    while True:
        dot = dataclasses.replace(_draw_small(chance, LARGEST), dtype="bfloat16", out_dtype="bfloat16")
        long = dataclasses.replace(dot, m=times * dot.m)
        if dot.batch == 1 and 2 * dot.k * min(dot.m, dot.n) > fits and long.bytes < bytes:
            return long


def hardware_of(chip: str) -> Hardware:
    """The hardware that one device of the chip's compiler is."""
    return by_name("tpu_v4").per_core(2) if chip == "tpu_v4 core" else by_name(chip)


def collect(chip: str, of: Set, number: int, seed: int) -> list[Sample]:
    """The samples of one number: a handful of programs, compiled for the chip.

    Table: two matmuls that are alone in their programs, so that operands stay in main memory unless the
    compiler finds time to move them; two that share a weight, which then stays on the chip; three side by
    side. Numbers below 2 add three steps of rings: results put into a large buffer, products added to a
    float32 sum, and products of a slice added to a bfloat16 sum. Large: one alone of which neither operand
    fits on the chip, and steps of rings that add up such. Long: the same, the first with more rows. Unseen:
    two alone and two that share; from `LARGE_FROM` on as large ones, from `LONG_FROM` on as long ones, from
    `PLACED_FROM` on steps of a ring whose results are put among the rows of a large buffer.
    """
    chance = random.Random(f"{seed}/{number}/{chip}/{of}")
    if of == "unseen" and number >= PLACED_FROM:
        dot = _draw_small(chance, LARGEST_STEP / 8)
        return _ring_compiled(chip, "placed", dot.m, dot.k, dot.n)
    long = of == "long" or (of == "unseen" and number >= LONG_FROM)
    if long or of == "large" or (of == "unseen" and number >= LARGE_FROM):
        alone_bytes, step_bytes, times = (LARGEST, LARGEST_STEP, LONG) if long else (math.inf, math.inf, 1)
        samples = _dots_compiled(chip, [_draw_large(chance, chip, alone_bytes, times)], "alone")
        for kind in ("summed", "scattered"):
            dot = _draw_large(chance, chip, step_bytes)
            samples += _ring_compiled(chip, kind, dot.m, dot.k, dot.n)[:1]
        return samples
    samples = [
        sample for _ in range(2) for sample in _dots_compiled(chip, [_draw_small(chance, LARGEST)], "alone")
    ]
    first = _draw_small(chance, LARGEST / 4, 24e6)
    second = dataclasses.replace(first, m=max(8, int(first.m * chance.uniform(0.3, 0.9)) // 8 * 8))
    samples += _dots_compiled(chip, [first, second], "shared weight", shared=True)
    if of == "table":
        beside = [_draw_small(chance, LARGEST / 4) for _ in range(3)]
        samples += _dots_compiled(chip, beside, "side by side")
        if number < len(RING_SHAPES):
            for kind in ("placed", "summed", "scattered"):
                samples += _ring_compiled(chip, kind, *RING_SHAPES[number])
    return samples


def compile_alone(chip: str, dot: Dot) -> None:
    """Compiles a matmul that is alone in its program."""
    _dots_compiled(chip, [dot], "alone")


def _dots_compiled(chip: str, dots: Sequence[Dot], program: str, shared: bool = False) -> list[Sample]:
    import jax
    import jax.numpy as jnp

    def run(*arrays: Any) -> list[Any]:
        results = []
        for number, dot in enumerate(dots):
            lhs, rhs = (arrays[number + 1], arrays[0]) if shared else arrays[2 * number : 2 * number + 2]
            with jax.named_scope(f"dot{number}"):
                spec = "bmk,bkn->bmn" if dot.batch > 1 else "mk,kn->mn"
                results.append(jnp.einsum(spec, lhs, rhs, preferred_element_type=dot.out_dtype))
        return results

    def operands(dot: Dot) -> list[Any]:
        batch = (dot.batch,) if dot.batch > 1 else ()
        return [_array(chip, (*batch, *rest), dot.dtype) for rest in ((dot.m, dot.k), (dot.k, dot.n))]

    if shared:
        arguments = [operands(dots[0])[1], *(operands(dot)[0] for dot in dots)]
    else:
        arguments = [array for dot in dots for array in operands(dot)]
    return _samples(_compile(run, arguments), dict(enumerate(dots)), program)


def _ring_compiled(chip: str, kind: str, m: int, k: int, n: int) -> list[Sample]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return _array(chip, shape, dtype)

    def placed(weight: Any, places: Any, *shards: Any) -> Any:
        out = lax.empty((8 * m, n), jnp.bfloat16)
        for step, shard in enumerate(shards):
            with jax.named_scope(f"dot{step}"):
                out = lax.dynamic_update_slice(out, shard @ weight, (places[step] * m, 0))
        return out

    def summed(total: Any, *operands: Any) -> Any:
        for step in range(RING_STEPS):
            with jax.named_scope(f"dot{step}"):
                lhs, rhs = operands[2 * step : 2 * step + 2]
                total = total + jnp.dot(lhs, rhs, preferred_element_type=jnp.float32)
        return total

    def scattered(lhs: Any, weight: Any, places: Any, *received: Any) -> list[Any]:
        sums = []
        for step, narrow in enumerate(received):
            with jax.named_scope(f"dot{step}"):
                rows = lax.dynamic_slice(lhs, (places[step] * m, 0), (m, k))
                product = jnp.dot(rows, weight, preferred_element_type=jnp.float32)
                sums.append((narrow.astype(jnp.float32) + product).astype(jnp.bfloat16))
        return sums

    places = array(RING_STEPS, dtype="int32")
    run: Callable[..., Any]
    if kind == "placed":
        run, arguments = placed, [array(k, n), places, *[array(m, k)] * RING_STEPS]
    elif kind == "summed":
        pairs = [array(m, k), array(k, n)] * RING_STEPS
        run, arguments = summed, [array(m, n, dtype="float32"), *pairs]
    else:
        run, arguments = scattered, [array(8 * m, k), array(k, n), places, *[array(m, n)] * RING_STEPS]
    dot = Dot(m=m, k=k, n=n, dtype="bfloat16", out_dtype="float32" if kind == "summed" else "bfloat16")
    return _samples(_compile(run, arguments), dict.fromkeys(range(RING_STEPS), dot), kind)


@functools.cache
def _sharding(chip: str) -> Any:
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from overlap import tpu_target

    device = tpu_target.devices(TOPOLOGIES[chip])[0]
    return NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())


def _array(chip: str, shape: Sequence[int], dtype: str) -> Any:
    import jax

    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=_sharding(chip))


def _compile(run: Callable[..., Any], arguments: list[Any]) -> str:
    import jax

    return jax.jit(run).trace(*arguments).lower().compile().as_text()


def _samples(text: str, dots: dict[int, Dot], program: str) -> list[Sample]:
    """The matmuls of a compiled program, which were traced under the names dot0, dot1 …"""
    from overlap.hlo import parse
    from overlap.hlo.module import estimated_cycles

    entry = parse(text).entry_computation
    named = dict(re.findall(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="[^"]*?/dot(\d+)/', text, re.MULTILINE))
    samples = []
    for instruction in entry.instructions:
        cycles = estimated_cycles(instruction)
        if (
            cycles is None
            or instruction.name not in named
            or instruction.opcode not in ("fusion", "convolution")
        ):
            continue
        dot = dots[int(named[instruction.name])]
        operands = [entry.by_name[name].shape for name in instruction.operands]
        placed = _placed(dot, [shape for shape in operands if len(shape.dims) > 1], program)
        if placed is None:
            continue
        lhs, rhs, accumulator = placed
        samples.append(
            Sample(
                dot=dot,
                lhs=lhs.memory_space,
                rhs=rhs.memory_space,
                result=instruction.shape.memory_space,
                accumulator=None if accumulator is None else accumulator.memory_space,
                accumulator_width=0 if accumulator is None else {"f32": 4, "bf16": 2}[accumulator.dtype],
                cycles=int(cycles),
                program=program,
            )
        )
    return samples


def _placed(dot: Dot, operands: list[Any], program: str) -> tuple[Any, Any, Any] | None:
    """Left, right and added operand of a fusion around a dot; None where it does anything else as well."""

    def take(*sizes: int) -> Any:
        wanted = sorted(size for size in sizes if size > 1)
        for shape in operands:
            if sorted(size for size in shape.dims if size > 1) == wanted:
                operands.remove(shape)
                return shape
        return None

    accumulator = None
    if program == "placed":
        take(8 * dot.m, dot.n)
    elif program == "summed":
        wide = [shape for shape in operands if shape.dtype == "f32"]
        if len(wide) > 1:  # several products are added up at once
            return None
        accumulator = wide[0] if wide else None
        operands = [shape for shape in operands if shape.dtype != "f32"]
    rows = 8 * dot.m if program == "scattered" else dot.m
    lhs, rhs = take(dot.batch, rows, dot.k), take(dot.batch, dot.k, dot.n)
    if program == "scattered":
        accumulator = take(dot.m, dot.n)
    return None if lhs is None or rhs is None or operands else (lhs, rhs, accumulator)


def to_line(number: int, samples: Sequence[Sample]) -> str:
    """One line of a collection's file."""
    return json.dumps({"number": number, "samples": [sample.to_list() for sample in samples]})
