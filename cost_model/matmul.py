"""The time of one local matmul: the TPU compiler's estimate, elsewhere a roofline with padding."""

import functools
from dataclasses import dataclass, replace
from typing import Literal

from cost_model.collectives import check_hardware
from cost_model.dtypes import dtype_bytes
from cost_model.hardware import Hardware
from cost_model.matmul_table import table_of, unit_of
from cost_model.whole import whole
from cost_model.windows import Along, Fused, cycles


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """`[batch, m, k] · [batch, k, n] -> [batch, m, n]`, with the sizes that one device computes.

    Attributes:
      batch, m, k, n: sizes of the batch, left free, contracting and right free dimensions (several dimensions
        of a role multiplied together). 0 is an empty matmul.
      dtype: name of the operands' dtype; of the wider one's where they differ.
      out_dtype: name of the result's dtype; `dtype` if None.
      lhs_dtype, rhs_dtype: name of that operand's dtype; `dtype` if None.

    Raises:
      ValueError: a size is negative, or a dtype unknown.
      TypeError: a size is no whole number, or a dtype no name.
    """

    batch: int = 1
    m: int
    k: int
    n: int
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    lhs_dtype: str | None = None
    rhs_dtype: str | None = None

    def __post_init__(self) -> None:
        # Prices make matmuls by the thousand: the sizes of nearly all are ints.
        if not type(self.batch) is type(self.m) is type(self.k) is type(self.n) is int:
            for field in ("batch", "m", "k", "n"):
                object.__setattr__(self, field, whole(getattr(self, field), f"a matmul's {field}"))
        if min(self.batch, self.m, self.k, self.n) < 0:
            raise ValueError(f"matmul sizes must not be negative, got {self}")
        _check_dtypes(self.dtype, self.out_dtype, self.lhs_dtype, self.rhs_dtype)

    @property
    def turned(self) -> "Matmul":
        """That of the transposed operands in the other order, which makes the transposed product."""
        return replace(self, m=self.n, n=self.m, lhs_dtype=self.rhs_dtype, rhs_dtype=self.lhs_dtype)

    @property
    def flops(self) -> int:
        """Multiplications and additions, without padding: 2·batch·m·k·n."""
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def bytes(self) -> float:
        """Bytes of both operands, read once, and of the result, written once."""
        return self.lhs_bytes + self.rhs_bytes + self.result_bytes

    @property
    def lhs_bytes(self) -> float:
        """Bytes of the left operand."""
        return self.batch * self.m * self.k * dtype_bytes(self.lhs_dtype or self.dtype)

    @property
    def rhs_bytes(self) -> float:
        """Bytes of the right operand."""
        return self.batch * self.k * self.n * dtype_bytes(self.rhs_dtype or self.dtype)

    @property
    def result_dtype(self) -> str:
        """Type of the result."""
        return self.out_dtype or self.dtype

    @property
    def result_bytes(self) -> float:
        """Bytes of the result."""
        return self.batch * self.m * self.n * dtype_bytes(self.result_dtype)

    def stationary(self, whole: "Matmul") -> Literal["lhs", "rhs"] | None:
        """The operand this piece of `whole` shares with the others; None if each has its own."""
        if (self.batch, self.k) != (whole.batch, whole.k):
            return None
        if self.n == whole.n:
            return "rhs"
        return "lhs" if self.m == whole.m else None

    def padded_flops(self, tile: tuple[int, int, int]) -> int:
        """Multiplications and additions with m, k and n rounded up to multiples of the tile's."""
        m, k, n = tile
        return 2 * self.batch * (-(-self.m // m) * m) * (-(-self.k // k) * k) * (-(-self.n // n) * n)


@functools.cache
def _check_dtypes(*dtypes: str | None) -> None:
    """Raises as `dtype_bytes` if one is unknown."""
    for dtype in dtypes:
        if dtype is not None:
            dtype_bytes(dtype)


def matmul_s(
    matmul: Matmul,
    hardware: Hardware,
    *,
    lhs_on_chip: bool = False,
    rhs_on_chip: bool = False,
    result_on_chip: bool = False,
    accumulator: str | None = None,
    accumulator_on_chip: bool = False,
    placed: Along | None = None,
    by_columns: bool = False,
) -> float:
    """Seconds one matmul takes on one device.

    On a TPU it is what the TPU's compiler would estimate: see `cost_model.windows`. Elsewhere, for
    dtypes that the TPU's matrix unit does not take, and where rates were measured or changed by hand:

        overhead + max(padded FLOPs / (efficiency · peak), bytes in main memory / bandwidth)

    the roofline of the scaling book ("All About Rooflines"). An empty matmul is free.

    Args:
      matmul: the matmul.
      hardware: where it runs.
      lhs_on_chip, rhs_on_chip: whether the operand needs no reading. A gather ring finds its weights so from
        the second step on.
      result_on_chip: whether the result stays in memory on the chip.
      accumulator: dtype of an array of the result's shape that is added in the same fusion, such as a ring's
        partial sum; None if there is none. Addition itself is free; the array is read.
      accumulator_on_chip: whether it lies on the chip, and needs no reading from main memory.
      placed: whether the result is put into its place among the rows or columns of a larger array in the same
        fusion, as a ring's are. On a TPU that leaves less choice of windows.
      by_columns: whether a TPU's result must be laid out by columns, which leaves less choice too.

    Raises:
      TypeError: the hardware is none.
    """
    check_hardware(hardware)
    if not matmul.flops:
        return 0.0
    rates = table_of(hardware)
    unit = None if rates is None else unit_of(matmul.dtype, hardware)
    if rates is None or unit is None:
        near_bytes = _near_bytes(matmul, lhs_on_chip, rhs_on_chip, result_on_chip)
        sum_bytes = 0.0
        if accumulator is not None and not accumulator_on_chip:
            sum_bytes = matmul.batch * matmul.m * matmul.n * dtype_bytes(accumulator)
        return _roofline_s(matmul, hardware, near_bytes, sum_bytes)
    fused = Fused(
        batch=matmul.batch,
        m=matmul.m,
        k=matmul.k,
        n=matmul.n,
        unit=unit,
        lhs_width=dtype_bytes(matmul.lhs_dtype or matmul.dtype),
        rhs_width=dtype_bytes(matmul.rhs_dtype or matmul.dtype),
        out_width=dtype_bytes(matmul.result_dtype),
        lhs_near=lhs_on_chip,
        rhs_near=rhs_on_chip,
        result_near=result_on_chip,
        accumulator_width=0.0 if accumulator is None else dtype_bytes(accumulator),
        accumulator_near=accumulator_on_chip,
        placed=placed,
        by_columns=by_columns,
    )
    return cycles(fused, rates) / rates.clock_hz


def _roofline_s(matmul: Matmul, hardware: Hardware, near_bytes: float, sum_bytes: float) -> float:
    compute_s = matmul.padded_flops(hardware.matmul_tile) / (
        hardware.matmul_efficiency * hardware.flops_for(matmul.dtype)
    )
    memory_s = (max(matmul.bytes - near_bytes, 0) + sum_bytes) / hardware.hbm_bytes_per_s
    return hardware.matmul_overhead_s + max(compute_s, memory_s)


def _near_bytes(matmul: Matmul, lhs: bool, rhs: bool, result: bool) -> float:
    """Bytes of what lies on the chip."""
    return lhs * matmul.lhs_bytes + rhs * matmul.rhs_bytes + result * matmul.result_bytes
