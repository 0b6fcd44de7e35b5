"""The time of a collective and its dots where pieces travel in turn, each beside the dots of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cost_model.hardware import Hardware
from cost_model.ring import Estimate

Pattern = Literal["gather", "scatter", "psum"]


def in_turn_estimate(
    pattern: Pattern,
    *,
    dot_s: float,
    collective_s: float,
    own_s: float,
    pieces_s: Sequence[float],
    hops_s: Sequence[float],
    latency_s: float,
    hardware: Hardware,
) -> Estimate:
    """Prices one way of dots on the device, beside one of hops on the wire.

    Of a gather the dots of the own shard begin with the first hop, and those of a piece when it is there. Of
    a scatter a piece can go when its dots are done, and the own block's dots come last; so they do of a psum,
    which has no own block. Where hops and dots take turns, all of it adds up.

    Args:
      pattern: which.
      dot_s: the original dots.
      collective_s: the original collective.
      own_s: the dots of what does not travel; 0 of a psum.
      pieces_s: the dots of each piece.
      hops_s: what each piece takes on the wire.
      latency_s: the part of all hops that is latency.
      hardware: one device.

    Raises:
      ValueError: there is not one hop to each piece.
    """
    if len(pieces_s) != len(hops_s):
        raise ValueError(f"each piece has one hop, got {len(pieces_s)} pieces and {len(hops_s)} hops")
    wire_s = 0.0
    if not hardware.overlaps:
        busy_s = own_s + sum(pieces_s) + sum(hops_s)
    elif pattern == "gather":
        busy_s = own_s
        for piece_s, hop_s in zip(pieces_s, hops_s, strict=True):
            wire_s += hop_s
            busy_s = max(busy_s, wire_s) + piece_s
    else:
        busy_s = 0.0
        for piece_s, hop_s in zip(pieces_s, hops_s, strict=True):
            busy_s += piece_s
            wire_s = max(wire_s, busy_s) + hop_s
        busy_s += own_s
    return Estimate(
        dot_s=dot_s,
        collective_s=collective_s,
        partials_s=own_s + sum(pieces_s),
        hops_s=sum(hops_s),
        hop_latency_s=latency_s,
        overlapped_s=max(busy_s, wire_s),
    )
