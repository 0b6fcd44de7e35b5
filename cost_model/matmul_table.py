"""The time of a matmul on a TPU, as that TPU's compiler estimates it: a formula and a table of its rates.

The compiler runs a matmul as a pipeline of steps. In each, the matrix unit works on one tile while the next
operands come from main memory and finished results go there. So the time is

    launch + latencies + max(C, D) + min(C, D) / S + S · step          S steps

    C  multiplications: padded M·K·N over the peak; no less than `least_rows` rows, since for fewer
       the loading of weights into the matrix unit takes as long
    D  main memory: operands, accumulator and result that are there, each over its own rate
    S  steps: the best balance between filling the pipeline (min(C, D) / S) and their own cost (S · step),
       √(min(C, D) / step), but no fewer than the buffers need for what is read

Of a large matmul, whose operands are in main memory and larger than `LARGE` each, the compiler takes the
better of two ways. Either it keeps a strip of one operand, of all of K, and reads the other once for each
strip: the larger K, the narrower they are, and the fewer the rows for which weights are loaded. Or it cuts K
too, makes the result tile by tile and reads both operands for each: then an accumulator is added to for every
part of K, and what leaves does so beside the last part alone. Of others one operand is read again for every
tile of the other (whichever costs less), and partial sums are added up, which counts as multiplications, and
more so beside an accumulator.

The rates are fitted, per chip, to the `estimated_cycles` of compiled programs (bench/matmul_tables.py). They
are the compiler's beliefs: on every TPU it takes a bfloat16 result to leave at a third of the rate of a
float32 one, which is about that of reading.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from cost_model.chips import by_name
from cost_model.dtypes import parse_dtype
from cost_model.hardware import Hardware
from cost_model.typed import loads

SCHEMA: Final = 4
"""Version of the files in `cost_model/tables`."""

FOLDER: Final = Path(__file__).with_name("tables")
CHIPS: Final = ("tpu_v4 core", "tpu_v5e", "tpu_v5p", "tpu_v6e", "tpu_7x")
"""Hardware with a table. A whole TPU v4 is taken as two cores that share the work."""

SUBLANES: Final = 8
"""The multiple to which one of M and N is padded; the other one, and K, to the matrix unit's width."""

REGISTER: Final = 128
"""Lanes of a vector register, on every TPU."""

DEPTH_BYTES: Final = 1024
"""Bytes along K of a tile that is cut along it: 512 elements of bfloat16."""

UNCUT: Final = 1280
"""Elements of K up to which it is not cut."""

LARGE: Final = 16e6
"""Bytes of an operand from which on a matmul is large. Little ones may well be fetched in time."""

LARGE_TILE: Final = 1500
"""Rows and columns of a tile of a large matmul's result."""

FEW_ROWS: Final = 0.5
"""How much of `MatmulTable.least_rows` loading the weights for another strip takes."""

Unit = Literal["int8", "bfloat16", "float32"]
"""What the matrix unit computes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTable:
    """The rates of one chip, as its compiler has them; see the module for how they make a time.

    Attributes:
      lanes: width of the matrix unit, the multiple to which K and one of M and N are padded.
      flops_per_s: by what the unit computes in.
      least_rows: rows of the left operand that take as long as one, likewise.
      launch_s: cost of every matmul.
      narrow_launch_s: what one with operands of one byte costs more.
      batch_s: cost of every matrix of a batch but the first, where K fills more than half of the matrix unit.
      operand_latency_s: until the first tile of an operand in main memory is there.
      second_latency_s: how much later that of the other operand is, if it is in main memory too.
      result_latency_s: until the last tile of a result in main memory is there.
      step_s: cost of each step of the pipeline.
      second_stream: what a step costs more where both operands come from main memory, as a share.
      step_bytes: most bytes that a step can read.
      tile: rows and columns of a tile of the result that are computed without reading an operand again.
      sums_per_s: elements of partial sums that are added up, one for each `DEPTH_BYTES` of K, where both
        operands are in main memory and tiles have to be cut along K.
      wide_sums: how many times as many there are where an operand is of four bytes.
      added_bytes_per_s: bytes of an accumulator in main memory, as often, which makes that longer; 0 where
        it does not.
      strip_bytes: of a large matmul's strip of one operand, that is kept while the other is read; 0 where
        large ones are taken as others.
      large_added_bytes_per_s: as `added_bytes_per_s`, of large ones.
      left_over: the share of the time in which the result of one leaves that nothing hides, where K is cut.
      lhs_bytes_per_s, rhs_bytes_per_s: reading from main memory; an accumulator is read as the rhs.
      narrow_reading: the share of these rates that operands of one byte have.
      result_bytes_per_s: writing to main memory, by bytes per element.
      near_elements_per_s: of operands that are both on the chip; 0 where that never counts. It does on v4,
        where they are in CMEM.
      ragged_elements_per_s: masking a right operand of two bytes or more, if K is no multiple of the lanes
        and more than `UNCUT`; 0 where that never counts. It does on v4.
      converted_elements_per_s: making bfloat16 of a right operand of one byte, where the matrix unit does not
        take those; 0 where it does. It does not on v4.

    Raises:
      ValueError: a rate is missing, negative or not finite, or zero where it divides.
    """

    lanes: int
    flops_per_s: dict[str, float]
    least_rows: dict[str, float]
    launch_s: float
    narrow_launch_s: float
    batch_s: float
    operand_latency_s: float
    second_latency_s: float
    result_latency_s: float
    step_s: float
    second_stream: float
    step_bytes: float
    tile: float
    sums_per_s: float
    wide_sums: float
    added_bytes_per_s: float
    strip_bytes: float
    large_added_bytes_per_s: float
    left_over: float
    lhs_bytes_per_s: float
    rhs_bytes_per_s: float
    result_bytes_per_s: dict[str, float]
    narrow_reading: float
    near_elements_per_s: float
    ragged_elements_per_s: float
    converted_elements_per_s: float

    def __post_init__(self) -> None:
        may_be_zero = {
            "launch_s",
            "narrow_launch_s",
            "operand_latency_s",
            "second_latency_s",
            "batch_s",
            "result_latency_s",
            "second_stream",
            "added_bytes_per_s",
            "strip_bytes",
            "large_added_bytes_per_s",
            "left_over",
            "near_elements_per_s",
            "ragged_elements_per_s",
            "converted_elements_per_s",
            "least_rows",
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            values = value.values() if isinstance(value, dict) else (value,)
            for number in values:
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise ValueError(f"{field.name} must be a number, got {number!r}")
                least = 0 if field.name in may_be_zero else math.ulp(0)
                if not (math.isfinite(number) and number >= least):
                    raise ValueError(f"{field.name} must be positive and finite, got {number!r}")
        for name, keys in {
            "flops_per_s": ("int8", "bfloat16", "float32"),
            "least_rows": ("int8", "bfloat16", "float32"),
            "result_bytes_per_s": ("1", "2", "4"),
        }.items():
            value = getattr(self, name)
            if not isinstance(value, dict) or sorted(value) != sorted(keys):
                raise ValueError(f"{name} must have a number for each of {', '.join(keys)}, got {value!r}")

    def seconds(
        self,
        batch: int,
        m: int,
        k: int,
        n: int,
        unit: str,
        lhs_width: float,
        rhs_width: float,
        out_width: float,
        *,
        lhs_near: bool = False,
        rhs_near: bool = False,
        result_near: bool = False,
        accumulator_width: float = 0,
        accumulator_near: bool = False,
    ) -> float:
        """Seconds of `[batch, m, k] · [batch, k, n]`.

        Args:
          batch, m, k, n: sizes, at least 1.
          unit: what the matrix unit computes in.
          lhs_width, rhs_width, out_width: bytes per element of the operands and of the result.
          lhs_near, rhs_near, result_near, accumulator_near: whether it lies on the chip.
          accumulator_width: bytes per element of an array of the result's shape that is added to the
            product in the same fusion; 0 if there is none.
        """
        lanes = self.lanes
        wide = -(-n // lanes) * lanes
        rows = -(-m // SUBLANES) * SUBLANES
        turned = -(-n // SUBLANES) * SUBLANES * (-(-m // lanes) * lanes)
        # A result that is padded less if turned round is laid out so; one that fills its registers is not.
        area = max(min(rows * wide, turned), rows * (-(-(n - n % REGISTER) // lanes) * lanes))
        deep = -(-k // lanes) * lanes
        compute_s = 2 * batch * deep * max(area, self.least_rows[unit] * wide) / self.flops_per_s[unit]
        if self.ragged_elements_per_s and unit != "int8" and k > UNCUT and k % lanes:
            compute_s += batch * k * wide / self.ragged_elements_per_s
        if self.converted_elements_per_s and unit == "int8":
            compute_s += batch * k * wide / self.converted_elements_per_s

        lhs_bytes = batch * m * k * lhs_width
        rhs_bytes = batch * k * n * rhs_width
        elements = batch * min(
            rows * -(-n // REGISTER) * REGISTER, -(-n // SUBLANES) * SUBLANES * -(-m // REGISTER) * REGISTER
        )
        overhead_s = self.launch_s + (batch - 1) * (self.batch_s if 2 * k > lanes else 0)
        if unit == "int8":
            overhead_s += self.narrow_launch_s
        lhs_s, rhs_s = lhs_bytes / self.lhs_bytes_per_s, rhs_bytes / self.rhs_bytes_per_s
        if lhs_width <= 1:
            lhs_s /= self.narrow_reading
        if rhs_width <= 1:
            rhs_s /= self.narrow_reading
        leaving_s = 0.0
        if accumulator_width and not accumulator_near:
            leaving_s += elements * accumulator_width / self.rhs_bytes_per_s
        if not result_near:
            overhead_s += self.result_latency_s
            rate = self.result_bytes_per_s["1" if out_width <= 1 else "2" if out_width <= 2 else "4"]
            leaving_s += elements * out_width / rate
        if lhs_near and rhs_near:
            near_s = batch * (m + n) * k / self.near_elements_per_s if self.near_elements_per_s else 0.0
            return overhead_s + self._pipelined_s(compute_s, max(leaving_s, near_s), 0.0)
        overhead_s += self.operand_latency_s
        if lhs_near or rhs_near:
            read_s, read_bytes = (rhs_s, rhs_bytes) if lhs_near else (lhs_s, lhs_bytes)
            return overhead_s + self._pipelined_s(compute_s, read_s + leaving_s, read_bytes)

        overhead_s += self.second_latency_s
        width = max(lhs_width, rhs_width)
        times = max(0.0, k * min(lhs_width, rhs_width) / DEPTH_BYTES - 1)
        added_bytes = 0.0 if accumulator_near else elements * accumulator_width * times
        if self.strip_bytes and is_large(batch, lhs_bytes, rhs_bytes, width):
            strip = self.strip_bytes / (k * width)
            again_s = max(0.0, min(lhs_s * (n / strip - 1), rhs_s * (m / strip - 1)))
            loading = FEW_ROWS * self.least_rows[unit] * max(0.0, 1 / strip - 1 / min(m, n))
            strips_s = self._pipelined_s(
                compute_s * (1 + loading), lhs_s + rhs_s + again_s + leaving_s, lhs_bytes + rhs_bytes
            )
            if self.large_added_bytes_per_s:
                compute_s += added_bytes / self.large_added_bytes_per_s
            across, down = max(1.0, n / LARGE_TILE), max(1.0, m / LARGE_TILE)
            tiles_s = self.left_over * leaving_s + self._pipelined_s(
                compute_s, lhs_s * across + rhs_s * down, lhs_bytes * across + rhs_bytes * down
            )
            return overhead_s + min(strips_s, tiles_s)
        if width > 2:
            times *= self.wide_sums
            added_bytes *= self.wide_sums
        compute_s += elements * times / self.sums_per_s
        if self.added_bytes_per_s:
            compute_s += added_bytes / self.added_bytes_per_s
        again_bytes = max(0.0, min(lhs_bytes * (n / self.tile - 1), rhs_bytes * (m / self.tile - 1)))
        memory_s = lhs_s + rhs_s + again_bytes / self.rhs_bytes_per_s + leaving_s
        read_bytes = lhs_bytes + rhs_bytes + again_bytes
        return overhead_s + self._pipelined_s(compute_s, memory_s, read_bytes, 1 + self.second_stream)

    def _pipelined_s(self, compute_s: float, memory_s: float, read_bytes: float, cost: float = 1.0) -> float:
        """Seconds of computing beside reading and writing, in steps that cost so many times `step_s`."""
        slower_s, faster_s = (compute_s, memory_s) if compute_s > memory_s else (memory_s, compute_s)
        steps = max(1.0, math.sqrt(faster_s / self.step_s), read_bytes / self.step_bytes)
        return slower_s + faster_s / steps + steps * cost * self.step_s

    def shared_by(self, cores: int) -> MatmulTable:
        """The rates of so many cores that share every matmul."""
        fields: dict[str, Any] = {
            name: getattr(self, name) * cores
            for name in (
                "step_bytes",
                "sums_per_s",
                "added_bytes_per_s",
                "large_added_bytes_per_s",
                "lhs_bytes_per_s",
                "rhs_bytes_per_s",
                "near_elements_per_s",
                "ragged_elements_per_s",
                "converted_elements_per_s",
            )
        }
        for name in ("flops_per_s", "result_bytes_per_s"):
            fields[name] = {key: rate * cores for key, rate in getattr(self, name).items()}
        return dataclasses.replace(self, **fields)


def is_large(batch: int, lhs_bytes: float, rhs_bytes: float, width: float) -> bool:
    """Whether a matmul is large, if both operands, of elements of so many bytes, are in main memory."""
    return batch == 1 and width <= 2 and min(lhs_bytes, rhs_bytes) > LARGE


def read(text: str) -> MatmulTable:
    """The table in the text of a file that `bench/matmul_tables.py` wrote.

    Raises:
      ValueError: the text is no JSON object, has another schema, or a rate is missing or impossible.
    """
    content: Any = loads(text)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f'a matmul table is a JSON object with "schema": {SCHEMA}')
    rates = content.get("rates")
    if not isinstance(rates, dict):
        raise ValueError('it has no "rates"')
    known = {field.name for field in dataclasses.fields(MatmulTable)}
    if wrong := sorted(known ^ rates.keys()):
        raise ValueError(f"its rates are incomplete or not known: {', '.join(wrong)}")
    return MatmulTable(**rates)


def table_of(hardware: Hardware) -> MatmulTable | None:
    """The table of this hardware.

    None if it has none, or if its rates are not those of the chip of that name: measured or changed by hand,
    they say more than the compiler's beliefs.

    Raises:
      ValueError: the table's file is missing or damaged.
    """
    known = _known(hardware.name)
    if known is None:
        return None
    chip, table = known
    if hardware is not chip and (
        hardware.peak_flops != chip.peak_flops
        or hardware.hbm_bytes_per_s != chip.hbm_bytes_per_s
        or hardware.matmul_overhead_s != chip.matmul_overhead_s
        or hardware.matmul_efficiency != chip.matmul_efficiency
        or hardware.matmul_tile != chip.matmul_tile
    ):
        return None
    return table


def unit_of(dtype: str, hardware: Hardware) -> Unit | None:
    """What the matrix unit computes operands of this dtype in; None if it does not take them."""
    kind, bits = parse_dtype(dtype)
    if kind == "int":
        return "int8" if bits <= 8 else None
    if kind != "float" or bits > 32:
        return None
    if bits > 16:
        return "float32"
    narrow = bits <= 8 and hardware.flops_for(dtype) > hardware.flops_for("bfloat16")
    return "int8" if narrow else "bfloat16"


@functools.cache
def _known(name: str) -> tuple[Hardware, MatmulTable] | None:
    whole_v4 = name == "tpu_v4"
    file_name = "tpu_v4 core" if whole_v4 else name
    if file_name not in CHIPS:
        return None
    path = FOLDER / f"{file_name.replace(' ', '_')}.json"
    try:
        table = read(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the table of matmul times of {file_name}, {path}, cannot be used: {error}. "
            "Reinstall overlap-collectives, or make it again: make bench-matmul"
        ) from error
    if whole_v4:
        return by_name(name), table.shared_by(2)
    return (by_name("tpu_v4").per_core(2) if name == "tpu_v4 core" else by_name(name)), table
