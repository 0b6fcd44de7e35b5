"""The time of one local matmul: a roofline with padding and a fixed overhead."""

import dataclasses
import math
from dataclasses import dataclass

from cost_model.dtypes import dtype_bytes
from cost_model.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """`[batch, m, k] · [batch, k, n] -> [batch, m, n]`, with the sizes that one device computes.

    Attributes:
      batch, m, k, n: sizes of the batch, left free, contracting and right free dimensions (several dimensions
        of a role multiplied together). 0 is an empty matmul.
      dtype: name of the operands' dtype.
      out_dtype: name of the result's dtype; `dtype` if None.

    Raises:
      ValueError: a size is negative, or a dtype unknown.
    """

    batch: int = 1
    m: int
    k: int
    n: int
    dtype: str = "bfloat16"
    out_dtype: str | None = None

    def __post_init__(self) -> None:
        if min(self.batch, self.m, self.k, self.n) < 0:
            raise ValueError(f"matmul sizes must not be negative, got {self}")
        dtype_bytes(self.dtype)
        dtype_bytes(self.out_dtype or self.dtype)

    @property
    def flops(self) -> int:
        """Multiplications and additions, without padding: 2·batch·m·k·n."""
        return 2 * self.batch * self.m * self.k * self.n

    @property
    def bytes(self) -> float:
        """Bytes of both operands, read once, and of the result, written once."""
        operands = (self.m * self.k + self.k * self.n) * dtype_bytes(self.dtype)
        return self.batch * (operands + self.m * self.n * dtype_bytes(self.out_dtype or self.dtype))

    def stationary_bytes(self, whole: "Matmul") -> float:
        """Bytes of the operand this piece of `whole` shares with the others; 0 if cut along k or batch."""
        if (self.batch, self.k) != (whole.batch, whole.k):
            return 0.0
        if self.n == whole.n:
            return self.batch * self.k * self.n * dtype_bytes(self.dtype)
        if self.m == whole.m:
            return self.batch * self.m * self.k * dtype_bytes(self.dtype)
        return 0.0

    def halved(self) -> "Matmul":
        """Half of this matmul, cut along m and rounded up: one direction's part in a bidirectional step."""
        return dataclasses.replace(self, m=math.ceil(self.m / 2))

    def padded(self, tile: tuple[int, int, int]) -> "Matmul":
        """This matmul with m, k and n rounded up to multiples of the tile's."""
        m, k, n = (
            math.ceil(size / multiple) * multiple
            for size, multiple in zip((self.m, self.k, self.n), tile, strict=True)
        )
        return dataclasses.replace(self, m=m, k=k, n=n)


def matmul_s(matmul: Matmul, hardware: Hardware, *, on_chip_bytes: float = 0) -> float:
    """Seconds one matmul takes on one device.

        overhead + max(padded FLOPs / (efficiency · peak), (bytes - on_chip_bytes) / HBM bandwidth)

    The roofline is that of the scaling book ("All About Rooflines"). `matmul_overhead_s` and
    `matmul_efficiency` are fitted to the TPU compiler's own cycle estimates: on v5p, with K=8192 and N=2048,
    it charges 0.96 of the peak at M=8192 and 0.57 at M=64 when the operands are already on chip, and the
    formula stays within 4 % of it in between. `on_chip_bytes` of the operands need no reading. An empty
    matmul is free.
    """
    if not matmul.flops:
        return 0.0
    compute_s = matmul.padded(hardware.matmul_tile).flops / (
        hardware.matmul_efficiency * hardware.flops_for(matmul.dtype)
    )
    memory_s = max(matmul.bytes - on_chip_bytes, 0) / hardware.hbm_bytes_per_s
    return hardware.matmul_overhead_s + max(compute_s, memory_s)
