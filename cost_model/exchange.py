"""The time of an all_to_all and its dots, rewritten as direct exchanges with partial dots beside them."""

from __future__ import annotations

from cost_model.collectives import all_to_all_s, hop_s
from cost_model.hardware import Hardware
from cost_model.matmul import Matmul, matmul_s
from cost_model.ring import Estimate


def exchange_estimate(
    *,
    axis_size: int,
    block_bytes: float,
    matmuls: tuple[Matmul, ...],
    partials: tuple[Matmul, ...],
    hardware: Hardware,
) -> Estimate:
    """Prices P-1 exchanges, at distance 1 to P-1, each beside the dots of one of the P steps.

    Args:
      axis_size: devices that take part, P.
      block_bytes: bytes that each device has for each other.
      matmuls: the original dots, whole.
      partials: the dots of one step.
      hardware: the device and its links.

    Raises:
      ValueError: ``axis_size`` is below 1, or bytes are negative.
    """
    partial_s = sum((matmul_s(partial, hardware) for partial in partials), 0.0)
    exchanges = [exchange_s(block_bytes, axis_size, hardware, distance=d) for d in range(1, axis_size)]
    latencies = [exchange_s(0, axis_size, hardware, distance=d) for d in range(1, axis_size)]
    beside = [max(partial_s, s) if hardware.overlaps else partial_s + s for s in exchanges]
    return Estimate(
        dot_s=sum((matmul_s(matmul, hardware) for matmul in matmuls), 0.0),
        collective_s=all_to_all_s(axis_size**2 * block_bytes, axis_size, hardware),
        partials_s=axis_size * partial_s,
        hops_s=sum(exchanges),
        hop_latency_s=sum(latencies),
        overlapped_s=partial_s + sum(beside),
    )


def exchange_s(block_bytes: float, axis_size: int, hardware: Hardware, *, distance: int) -> float:
    """Seconds in which every device sends a block to the device ``distance`` places further along its axis.

    On a torus a block takes the shorter way round, min(d, P-d) links, and so many blocks share each link.
    Without wraparound the d last devices reach the first ones across P-d links the other way, with the same
    number of blocks on a link. Behind a switch every distance is one hop.
    """
    if hardware.network == "switch":
        return hop_s(block_bytes, hardware, distance=min(distance, 1))
    sharing = min(distance, axis_size - distance)
    ring = hardware.has_wraparound(axis_size)
    links = sharing if ring else max(distance, axis_size - distance)
    return hop_s(sharing * block_bytes, hardware, distance=links if distance else 0)
