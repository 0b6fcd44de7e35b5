"""Parallelism strategies by formula: bytes that a layer communicates, and where compute is what limits it.

The scaling book's tables and thresholds ("How to Parallelize a Transformer for Training"), for a layer of two
matmuls, In[B,D]·Win[D,F]·Wout[F,D]. B are the tokens of a step, D and F the widths, X devices share the
weights (FSDP) or the tokens (data parallel), Y devices the hidden width (tensor parallel), C is FLOP/s of a
device and W the bytes/s of a mesh axis's links, both directions together. Only bandwidth and peak count here:
`cost_model.layer` prices the same strategies with latencies, real links and real matmuls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

from cost_model.collectives import check_hardware
from cost_model.dtypes import dtype_bytes
from cost_model.hardware import Hardware
from cost_model.whole import whole

Strategy = Literal["data", "fsdp", "tensor", "fsdp_tensor"]
STRATEGIES: Final[tuple[Strategy, ...]] = get_args(Strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer and its batch. Every layer has an MLP and, if there are heads, attention before it.

    Attributes:
      layers: how many.
      d_model: width of the residual stream, D.
      d_ff: hidden width of the MLP, F.
      tokens: of one step, all devices together, B.
      heads: query heads; 0 leaves attention out, as the book's tables do.
      head_dim: width of a head.
      kv_heads: key and value heads; as many as there are query heads if None.
      sequence: tokens of a sequence; 0 leaves out the products of queries with keys and scores with values.
      gated: whether the MLP has two matrices in (SwiGLU and the like).
      dtype: of weights, activations and gradients as they are multiplied and sent.

    Raises:
      ValueError: a size is below 1 (or below 0 where 0 leaves something out), kv_heads does not divide heads,
        there are kv_heads or a sequence without heads, or the tokens are no whole number of sequences.
      TypeError: a size is no whole number, or the dtype no name.
    """

    layers: int
    d_model: int
    d_ff: int
    tokens: int
    heads: int = 0
    head_dim: int = 128
    kv_heads: int | None = None
    sequence: int = 0
    gated: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for field in ("layers", "d_model", "d_ff", "tokens", "head_dim"):
            if not getattr(self, field) >= 1:  # so that it refuses NaN too
                raise ValueError(f"{field} {getattr(self, field)!r}: a model has at least 1")
            whole(getattr(self, field), f"a model's {field}")
        for field in ("heads", "sequence"):
            if whole(getattr(self, field), f"a model's {field}") < 0:
                raise ValueError(f"{field} {getattr(self, field)!r} must not be negative")
        if self.sequence and not self.heads:
            raise ValueError(f"sequence {self.sequence} needs heads: without them a model has no attention")
        if self.sequence and self.tokens % self.sequence:
            raise ValueError(f"tokens {self.tokens} are no whole number of sequences of {self.sequence}")
        if self.kv_heads is not None:
            if not self.heads:
                raise ValueError(
                    f"kv_heads {self.kv_heads} needs heads: without them a model has no attention"
                )
            if whole(self.kv_heads, "a model's kv_heads") < 1 or self.heads % self.kv_heads:
                raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        dtype_bytes(self.dtype)

    @property
    def parameters(self) -> int:
        """Weights of all layers' matrices, without embeddings and norms."""
        width = self.head_dim * 2 * (self.heads + (self.heads if self.kv_heads is None else self.kv_heads))
        return self.layers * self.d_model * (width + (3 if self.gated else 2) * self.d_ff)


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes that every device of one layer has to see pass, an all-reduce counted as its two halves."""

    forward: float
    backward: float


def layer_bytes(
    strategy: Strategy,
    *,
    tokens: float,
    d_model: float,
    d_ff: float,
    x: float = 1,
    y: float = 1,
    dtype: str = "bfloat16",
) -> LayerBytes:
    """The book's table: the bytes V that a layer's collectives move, in the whole forward and backward pass.

    data: 0 and 8DF; fsdp: 4DF and 8DF; tensor: 4BD and 4BD; fsdp_tensor: 4BD/X + 4DF/Y and 8BD/X + 8DF/Y, in
    a dtype of two bytes. Tensor parallelism alone shares the forward's gathered input with the backward pass;
    the last row does not.

    Args:
      strategy: the row.
      tokens, d_model, d_ff: B, D and F.
      x: devices of the data or FSDP axis.
      y: devices of the tensor axis.
      dtype: of what is sent.

    Raises:
      ValueError: the strategy is unknown, or a size not positive and finite.
    """
    for name, size in {"tokens": tokens, "d_model": d_model, "d_ff": d_ff, "x": x, "y": y}.items():
        _positive(size, name)
    width = dtype_bytes(dtype)
    weights, activations = 2 * width * d_model * d_ff, 2 * width * tokens * d_model
    if strategy == "data":
        return LayerBytes(0, 2 * weights)
    if strategy == "fsdp":
        return LayerBytes(weights, 2 * weights)
    if strategy == "tensor":
        return LayerBytes(activations, activations)
    if strategy == "fsdp_tensor":
        once = activations / x + weights / y
        return LayerBytes(once, 2 * once)
    raise ValueError(f"unknown strategy {strategy!r}; known: {', '.join(STRATEGIES)}")


def intensity(hardware: Hardware, dtype: str = "bfloat16") -> float:
    """C/W: FLOPs that a device does while one byte passes a mesh axis's links. 2550 on v5p.

    Both ways round of a torus's axis; behind a switch what is gathered comes over each device's links once.

    Raises:
      TypeError: the hardware is none (a name: see `by_name`).
    """
    check_hardware(hardware)
    ways = 1 if hardware.network == "switch" else 2
    return hardware.flops_for(dtype) / (ways * hardware.axis_bytes_per_s)


def data_tokens_per_device(hardware: Hardware, *, axes: int = 1, dtype: str = "bfloat16") -> float:
    """Tokens per device above which data parallelism and FSDP are compute-bound: C/(W·axes).

    4·(B/X)·D·F FLOPs against 4·D·F bytes of weights, and twice both in the backward pass.

    Args:
      hardware: the device.
      axes: physical dimensions whose links carry the strategy's mesh axis.
      dtype: of weights and activations, two bytes wide.

    Raises:
      ValueError: there are no axes.
      TypeError: as `intensity`, or the axes are no whole number.
    """
    return intensity(hardware, dtype) / _axes(axes)


def most_tensor(hardware: Hardware, d_ff: int, *, axes: int = 1, dtype: str = "bfloat16") -> float:
    """Devices of a tensor axis below which it is compute-bound, at any batch: axes · F · W/C.

    Raises:
      ValueError, TypeError: as `data_tokens_per_device`, or the width is not positive and finite.
    """
    return _axes(axes) * _positive(d_ff, "d_ff") / intensity(hardware, dtype)


def best_fsdp(
    *, tokens: float, d_ff: float, devices: float, fsdp_axes: int = 1, tensor_axes: int = 1
) -> float:
    """X_opt = sqrt(B/F · M_X/M_Y · N), where FSDP×TP communicates least: both kinds of bytes take as long.

    Raises:
      ValueError: a size is not positive and finite, or there are no axes.
      TypeError: the axes are no whole number.
    """
    tokens_per_width = _positive(tokens, "tokens") / _positive(d_ff, "d_ff")
    return math.sqrt(tokens_per_width * _axes(fsdp_axes) / _axes(tensor_axes) * _positive(devices, "devices"))


def nearest_divisor(value: float, count: int) -> int:
    """The divisor of `count` whose ratio to `value` is nearest to 1.

    Raises:
      ValueError: the value is not positive and finite, or the count below 1.
      TypeError: the count is no whole number.
    """
    count, value = int(_positive(whole(count, "count"), "count")), _positive(value, "value")
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    return min(divisors, key=lambda d: abs(math.log(d / value)))


def fsdp_tensor_tokens_per_device(
    hardware: Hardware, d_ff: int, *, fsdp_axes: int = 1, tensor_axes: int = 1, dtype: str = "bfloat16"
) -> float:
    """Tokens per device above which FSDP×TP at X_opt is compute-bound: 4·(C/W)² / (M_X·M_Y·F).

    Raises:
      ValueError, TypeError: as `most_tensor`.
    """
    axes = _axes(fsdp_axes) * _axes(tensor_axes)
    return 4 * intensity(hardware, dtype) ** 2 / (axes * _positive(d_ff, "d_ff"))


def tokens_per_pod(hardware: Hardware, dtype: str = "bfloat16") -> float:
    """Tokens per pod above which data parallelism across pods is compute-bound: C/W of the network between.

    The pod's FLOP/s over its bytes/s into the data-centre network; the number of chips cancels. The backward
    pass has 8·B·D·F FLOPs, the all-reduce 8·D·F bytes on the way out.

    Raises:
      ValueError: the hardware has no such network.
      TypeError: the hardware is none.
    """
    check_hardware(hardware)
    if not hardware.dcn_bytes_per_s:
        raise ValueError(f"hardware {hardware.name!r} has no dcn_bytes_per_s: no network between pods")
    return pod_tokens(hardware.flops_for(dtype), hardware.dcn_bytes_per_s)


def pod_tokens(flops: float, bytes_per_s: float) -> float:
    """C/W of a pod: 3.8e18 / 5e13 = 76,000 tokens in the book's example.

    Raises:
      ValueError: a rate is not positive and finite.
    """
    return _positive(flops, "flops") / _positive(bytes_per_s, "bytes_per_s")


def _positive(value: float, name: str) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return value


def _axes(axes: int) -> int:
    if whole(axes, "axes") < 1:
        raise ValueError(f"a mesh axis takes at least one physical dimension, got {axes!r}")
    return axes
