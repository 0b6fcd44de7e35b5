"""The time of an all_to_all and its dots, rewritten as direct exchanges with partial dots beside them."""

from __future__ import annotations

from cost_model.axis import Axis
from cost_model.matmul import Matmul, matmul_s
from cost_model.ring import Estimate


def exchange_estimate(
    *,
    block_bytes: float,
    matmuls: tuple[Matmul, ...],
    partials: tuple[Matmul, ...],
    axis: Axis,
) -> Estimate:
    """Prices P-1 exchanges, at distance 1 to P-1, each beside the dots of one of the P steps.

    Each exchange stops the device for `Hardware.async_overhead_s`.

    Args:
      block_bytes: bytes that each device has for each other.
      matmuls: the original dots, whole.
      partials: the dots of one step.
      axis: the devices that take part, P.

    Raises:
      ValueError: bytes are negative.
    """
    hardware = axis.hardware
    partial_s = sum((matmul_s(partial, hardware) for partial in partials), 0.0)
    exchanges = [axis.permute_s(block_bytes, distance) for distance in range(1, axis.size)]
    latencies = [axis.permute_s(0, distance) for distance in range(1, axis.size)]
    beside = [max(partial_s + hardware.stops_s, s) if hardware.overlaps else partial_s + s for s in exchanges]
    return Estimate(
        dot_s=sum((matmul_s(matmul, hardware) for matmul in matmuls), 0.0),
        collective_s=axis.all_to_all_s(axis.size**2 * block_bytes),
        partials_s=axis.size * partial_s + len(exchanges) * hardware.stops_s,
        hops_s=sum(exchanges),
        hop_latency_s=sum(latencies),
        overlapped_s=partial_s + sum(beside),
    )
