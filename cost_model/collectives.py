"""The time of one whole collective on one mesh axis, and of one hop.

After the scaling book ("Sharded Matrices and How to Multiply Them"), for a ring (an axis with wraparound,
both directions of every link in use), a line (a torus axis without wraparound) and a switch.
`full_bytes` is always V, the bytes of the whole array: what every device holds after an all_gather, and
before a reduce_scatter or an all_reduce. W is the bandwidth of an axis's links, both directions together, P
the axis size.

Every function raises ValueError for an axis size below 1 and for bytes that are negative or not finite, and
TypeError for an axis size that is no whole number and for hardware that is no `Hardware`.
"""

import math

from cost_model.hardware import Hardware
from cost_model.whole import whole


def hop_s(shard_bytes: float, hardware: Hardware, *, distance: int = 1) -> float:
    """Seconds in which every device sends `shard_bytes` to the device `distance` links away, one way.

    The bytes are pipelined through the devices on the way, so distance multiplies only the latency:
    max(distance · latency, bytes / one-way bandwidth). Behind a switch every distance is one hop. With 1 µs
    and 4.5e10 B/s latency rules below 45 kB.

    Raises:
      ValueError: the distance is negative.
      TypeError: it is no whole number.
    """
    check(shard_bytes, 1, hardware)
    if whole(distance, "distance") < 0:
        raise ValueError(f"distance must not be negative, got {distance!r}")
    if distance == 0:
        return 0.0
    hops = distance if hardware.network == "torus" else 1
    return max(hops * hardware.hop_latency_s, shard_bytes / hardware.axis_bytes_per_s)


def all_gather_s(full_bytes: float, axis_size: int, hardware: Hardware, *, book: bool = False) -> float:
    """Seconds to gather an array of `full_bytes` from its shards.

    Ring: P-1 shards arrive through two links, max(⌊P/2⌋ · latency, (P-1)/P · V/W). Line: the shards of one
    end cross to the other, P-1 hops. Switch: a device receives P-1 shards through its own links, all peers
    at once, so the latency counts once.

    Args:
      full_bytes: V.
      axis_size: P.
      hardware: one device and its links.
      book: on a ring counts V bytes, though a device has its own shard: the scaling book's formula, P/2 hops
        of max(latency, V / (P · W/2)), V/W for a large array.
    """
    check(full_bytes, axis_size, hardware)
    if axis_size == 1:
        return 0.0
    shard_bytes = full_bytes / axis_size
    if hardware.network == "switch":
        return hop_s((axis_size - 1) * shard_bytes, hardware)
    if not hardware.has_wraparound(axis_size):
        return (axis_size - 1) * hop_s(shard_bytes, hardware)
    if book:
        return axis_size / 2 * hop_s(shard_bytes, hardware)
    return hop_s((axis_size - 1) / 2 * shard_bytes, hardware, distance=axis_size // 2)


def reduce_scatter_s(full_bytes: float, axis_size: int, hardware: Hardware, *, book: bool = False) -> float:
    """Seconds to reduce arrays of `full_bytes` and scatter the result: as its mirror, the all_gather."""
    return all_gather_s(full_bytes, axis_size, hardware, book=book)


def all_reduce_s(full_bytes: float, axis_size: int, hardware: Hardware, *, book: bool = False) -> float:
    """Seconds to reduce arrays of `full_bytes` on every device.

    A reduce_scatter, then an all_gather; or, for few bytes, every device sends its whole array to all others,
    which pays the latency once.
    """
    in_two_s = 2 * all_gather_s(full_bytes, axis_size, hardware, book=book)
    return min(in_two_s, all_gather_s(axis_size * full_bytes, axis_size, hardware, book=book))


def all_to_all_s(full_bytes: float, axis_size: int, hardware: Hardware) -> float:
    """Seconds to move the sharding of an array of `full_bytes`, all shards together, to another dimension.

    Ring: a quarter of the book's all_gather, V / 4W. Line: the middle link carries ⌊P/2⌋·⌈P/2⌉ of the P²
    blocks each way. Switch: a device sends P-1 blocks. On a torus the farthest block sets a latency of
    P/2 or P-1 hops.
    """
    check(full_bytes, axis_size, hardware)
    if axis_size == 1:
        return 0.0
    block_bytes = full_bytes / axis_size**2
    if hardware.network == "switch":
        return hop_s((axis_size - 1) * block_bytes, hardware)
    if hardware.has_wraparound(axis_size):
        return hop_s(axis_size**2 / 8 * block_bytes, hardware, distance=axis_size // 2)
    crossing_blocks = (axis_size // 2) * (axis_size - axis_size // 2)
    return hop_s(crossing_blocks * block_bytes, hardware, distance=axis_size - 1)


def check_hardware(hardware: Hardware) -> None:
    """Raises TypeError if it is none: a name, say."""
    if not isinstance(hardware, Hardware):
        raise TypeError(f"hardware must be a Hardware, such as by_name('tpu_v5p'), got {hardware!r}")


def check(moved_bytes: float, axis_size: int, hardware: Hardware) -> None:
    """Raises what every function here does."""
    check_hardware(hardware)
    if whole(axis_size, "axis_size") < 1:
        raise ValueError(f"axis_size must be at least 1, got {axis_size!r}")
    if not (math.isfinite(moved_bytes) and moved_bytes >= 0):
        raise ValueError(f"bytes must be finite and not negative, got {moved_bytes!r}")
