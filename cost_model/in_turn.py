"""The time of a collective and its dots where pieces travel in turn, each beside the dots of another."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from cost_model.hardware import Hardware
from cost_model.ring import Estimate


def in_turn_estimate(
    *,
    gathers: bool,
    dot_s: float,
    collective_s: float,
    own_s: float,
    pieces_s: Sequence[float],
    hops_s: Sequence[float],
    latency_s: float,
    hardware: Hardware,
    before_s: float = 0.0,
    placing_s: Sequence[float] = (),
    after_s: float = 0.0,
    added_bytes: float = 0.0,
) -> Estimate:
    """Prices one way of dots on the device, beside one of hops on the wire.

    Of a gather the dots of the own shard begin with the first hop, and those of a piece when it is there. Of
    a scatter a piece can go when its dots are done, and the own block's dots come last; so they do of a psum,
    which has no own block. A gather's results are placed as they are made; what a psum's pieces have become
    is placed after all dots, the last of them when it is there. Every hop but one that has no dots beside it
    stops the device for `Hardware.async_overhead_s`. Where hops and dots take turns, all of it adds up.

    Args:
      gathers: whether the pieces are a gather's; else a scatter's, or a psum's.
      dot_s: the original dots.
      collective_s: the original collective.
      own_s: the dots of what does not travel; 0 of a psum.
      pieces_s: the dots of each piece.
      hops_s: what each piece takes on the wire.
      latency_s: the part of all hops that is latency.
      hardware: one device.
      before_s: what is done before the first hop.
      placing_s: what it takes to place each piece's result; nothing if empty.
      after_s: what is done when all else is.
      added_bytes: see `Estimate`.

    Raises:
      ValueError: there is not one hop to each piece, and one time to place it, if any.
    """
    placing_s = placing_s or (0.0,) * len(pieces_s)
    if not len(pieces_s) == len(hops_s) == len(placing_s):
        raise ValueError(
            f"each piece has one hop and is placed once, got {len(pieces_s)} pieces, {len(hops_s)} hops and "
            f"{len(placing_s)} times to place them"
        )
    stops_s = [hardware.stops_s] * len(pieces_s)
    if not own_s:
        stops_s[0 if gathers else -1] = 0.0
    pieces_s = list(map(operator.add, pieces_s, stops_s))
    wire_s, last_s = before_s, 0.0
    if not hardware.overlaps:
        busy_s = before_s + own_s + sum(pieces_s) + sum(hops_s) + sum(placing_s)
    elif gathers:
        busy_s = before_s + own_s
        for piece_s, hop_s, place_s in zip(pieces_s, hops_s, placing_s, strict=True):
            wire_s += hop_s
            busy_s = max(busy_s, wire_s) + piece_s + place_s
    else:
        busy_s = before_s
        for piece_s, hop_s in zip(pieces_s, hops_s, strict=True):
            busy_s += piece_s
            wire_s = max(wire_s, busy_s) + hop_s
        *others_s, last_s = placing_s
        busy_s += own_s + sum(others_s)
    return Estimate(
        dot_s=dot_s,
        collective_s=collective_s,
        partials_s=before_s + own_s + sum(pieces_s) + sum(placing_s) + after_s,
        hops_s=sum(hops_s),
        hop_latency_s=latency_s,
        overlapped_s=max(busy_s, wire_s) + last_s + after_s,
        added_bytes=added_bytes,
    )
