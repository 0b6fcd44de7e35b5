"""The time of a collective and its dots, rewritten as a ring of hops with partial dots beside them.

The dots of one ring step run while the next shard (or accumulator) is on the wire, so a step lasts as long as
the slower of the two; one step has no hop to hide behind it. This is the criterion of Wang et al. (ASPLOS'23)
with per-step times in place of the sums, so that latency and small partial matmuls are charged where they
arise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from cost_model.collectives import all_gather_s, hop_s, reduce_scatter_s
from cost_model.hardware import Hardware
from cost_model.matmul import Matmul, matmul_s

Directions = Literal[1, 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWork:
    """What one device does at a site: the collective with its dots, and one step of a ring in their place.

    Attributes:
      collective: which collective the ring replaces.
      axis_size: devices on the mesh axis, P.
      shard_bytes: bytes of one whole shard as the ring sends it: one hop of a unidirectional ring.
      collective_shard_bytes: bytes per shard of the original collective, more when it moves a wider dtype.
      matmuls: the original dots, whole.
      partials: the dots of one step, for one whole shard, in the order of `matmuls`, whose work P steps do.
      half_partials: the dots for one of the two half-shards of a bidirectional step. If empty, `partials`
        halved along m.
      accumulates: whether each step's result is added to an accumulator apart from its dots (not fused into
        them).
      accumulate_bytes: bytes of accumulator that one step's additions read and write together. Not charged
        unless `accumulates`.
      hands_out_gathered: whether the ring also assembles the gathered array, for other uses.

    Raises:
      ValueError: `axis_size` is below 1, bytes are negative, or there is not one partial to each matmul.
    """

    collective: Literal["all_gather", "reduce_scatter"]
    axis_size: int
    shard_bytes: float
    collective_shard_bytes: float
    matmuls: tuple[Matmul, ...]
    partials: tuple[Matmul, ...]
    half_partials: tuple[Matmul, ...] = ()
    accumulates: bool = False
    accumulate_bytes: float = 0
    hands_out_gathered: bool = False

    def __post_init__(self) -> None:
        if self.collective not in ("all_gather", "reduce_scatter"):
            raise ValueError(f"collective must be 'all_gather' or 'reduce_scatter', got {self.collective!r}")
        if self.axis_size < 1:
            raise ValueError(f"axis_size must be at least 1, got {self.axis_size!r}")
        if not (self.shard_bytes >= 0 and self.collective_shard_bytes >= 0 and self.accumulate_bytes >= 0):
            raise ValueError(f"bytes must not be negative, got {self}")
        if len(self.partials) != len(self.matmuls) or len(self.half_partials) not in (0, len(self.matmuls)):
            raise ValueError(f"every matmul needs its partial, and none or each its half, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted seconds of a site as it stands, and as a ring.

    Attributes:
      dot_s: the original dots.
      collective_s: the original collective, which the dots wait for, or it for them.
      partials_s: all partial dots of the ring, with the additions and copies between them.
      hops_s: all hops of the ring, one after the other.
      hop_latency_s: the part of `hops_s` that latency alone would take; where the two are equal, larger
        shards would travel for free.
      overlapped_s: the ring, partial dots beside hops.
    """

    dot_s: float
    collective_s: float
    partials_s: float
    hops_s: float
    hop_latency_s: float
    overlapped_s: float

    @property
    def original_s(self) -> float:
        """Seconds of the site as it stands: the collective and the dots, one after the other."""
        return self.dot_s + self.collective_s

    @property
    def benefit_s(self) -> float:
        """Seconds that the ring saves; negative where it loses."""
        return self.original_s - self.overlapped_s

    def __add__(self, other: Estimate) -> Estimate:
        """Two sites, or two parts of one, one after the other."""
        return Estimate(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Estimate)})


def estimate(work: RingWork, hardware: Hardware, *, directions: Directions) -> Estimate:
    """Prices the ring that sends whole shards one way (directions=1) or halves both ways (directions=2).

    With P devices a ring has P steps and P-1 hops. A gather ring adds its own partial sums, beside the hop. A
    unidirectional reduce_scatter ring cannot: the accumulator that has just arrived must be added to before
    it is sent on, so the link idles meanwhile; of the two accumulators of a bidirectional one, one travels
    while the other is added to. Copying the gathered shards into place reads and writes each once. An operand
    that every partial dot shares is read from HBM in one step and found on chip in the others, if it takes
    half of that memory at most.

    Where the hardware does not overlap, hops and partial dots take turns, and a hop carries no less than the
    original collective did: a narrower wire is not an effect of the ring, and shared memory does not reward
    it.
    """
    hops = work.axis_size - 1
    pieces = work.partials
    if directions == 2:
        pieces = work.half_partials or tuple(partial.halved() for partial in work.partials)
    copy_s = 2 * work.shard_bytes / hardware.hbm_bytes_per_s if work.hands_out_gathered else 0.0
    first_s = directions * sum(matmul_s(piece, hardware) for piece in pieces) + copy_s
    partial_s = directions * _warm_s(pieces, work.matmuls, hardware) + copy_s
    add_s = work.accumulate_bytes / hardware.hbm_bytes_per_s if work.accumulates else 0.0

    shard_bytes = work.shard_bytes
    if not hardware.overlaps:
        shard_bytes = max(shard_bytes, work.collective_shard_bytes)
    one_hop_s = ring_hop_s(shard_bytes, work.axis_size, hardware, directions=directions)

    if not hardware.overlaps:
        step_s = partial_s + add_s + one_hop_s
    elif work.collective == "reduce_scatter" and directions == 1:
        step_s = max(partial_s, one_hop_s) + add_s
    else:
        step_s = max(partial_s + add_s, one_hop_s)

    collective_s = all_gather_s if work.collective == "all_gather" else reduce_scatter_s
    return Estimate(
        dot_s=sum((matmul_s(matmul, hardware) for matmul in work.matmuls), 0.0),
        collective_s=collective_s(work.axis_size * work.collective_shard_bytes, work.axis_size, hardware),
        partials_s=first_s + hops * (partial_s + add_s),
        hops_s=hops * one_hop_s,
        hop_latency_s=hops * ring_hop_s(0, work.axis_size, hardware, directions=directions),
        overlapped_s=first_s + hops * step_s,
    )


def best(work: RingWork, hardware: Hardware) -> tuple[Directions, Estimate]:
    """The faster of the two rings, with its estimate; the unidirectional one if neither is."""
    one, two = (estimate(work, hardware, directions=directions) for directions in (1, 2))
    return (2, two) if two.overlapped_s < one.overlapped_s else (1, one)


def ring_hop_s(shard_bytes: float, axis_size: int, hardware: Hardware, *, directions: Directions) -> float:
    """Seconds in which every device passes on a whole shard one way, or a half-shard each way at once.

    With wraparound all transfers go to neighbours, and two directions halve the bytes on every link. Without
    it the last device reaches the first across the whole line, P-1 links against the direction of the others:
    no contention with one direction, but P-1 latencies; with two, every link carries a half-shard of each
    ring both ways, as many bytes as a whole shard one way, and nothing is gained. Where opposite hops do not
    overlap, the halves take turns.
    """
    if axis_size == 1:
        return 0.0
    distance = 1 if hardware.has_wraparound(axis_size) else axis_size - 1
    if directions == 1:
        return hop_s(shard_bytes, hardware, distance=distance)
    if not hardware.opposite_hops_overlap:
        return 2 * hop_s(shard_bytes / 2, hardware, distance=distance)
    link_bytes = shard_bytes / 2 if hardware.has_wraparound(axis_size) else shard_bytes
    return hop_s(link_bytes, hardware, distance=distance)


def _warm_s(pieces: tuple[Matmul, ...], wholes: tuple[Matmul, ...], hardware: Hardware) -> float:
    """Seconds of the pieces in a step that finds the operands shared by all steps on chip, if they fit."""
    stationary = [piece.stationary_bytes(whole) for piece, whole in zip(pieces, wholes, strict=True)]
    if sum(stationary) > hardware.on_chip_bytes / 2:
        stationary = [0.0] * len(pieces)
    return sum(
        matmul_s(piece, hardware, on_chip_bytes=resident)
        for piece, resident in zip(pieces, stationary, strict=True)
    )
