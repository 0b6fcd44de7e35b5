"""The time of a collective and its dots, rewritten as rings of hops with partial dots beside them.

The dots of one ring step run while the next shards (or accumulators) are on the wire, so a step lasts as long
as the slower of the two; one step has no hop to hide behind it. This is the criterion of Wang et al.
(ASPLOS'23) with per-step times in place of the sums, so that latency and small partial matmuls are charged
where they arise.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Final, Literal

from cost_model.axis import Axis, Directions
from cost_model.dtypes import dtype_bytes
from cost_model.hardware import Hardware
from cost_model.matmul import Matmul, matmul_s
from cost_model.on_chip import OTHER, SIDES, Side, beside_bytes, side_bytes, wholes_s
from cost_model.tile import LANES, placed_slowness

JOINING: Final = 0.7
"""Times as long as reading and writing it once takes what a TPU's compiler makes of joining the pieces of a
step for its only dot, and of taking the rows of the result apart again, by its own estimates (v5e, v6e, 7x:
0.3 to 0.8). `Hardware.joining` of a chip multiplies it."""

JOINING_MORE: Final = 2.0
"""The same for several dots, or for one whose results are added up (v5e, v6e, 7x: 1.9 to 4.8)."""

CUTTING: Final = 1.25
"""The same of cutting a block out of an operand before its dot (v5e, v5p, v6e, 7x: 1.1 to 1.8)."""

Cut = Literal["dot", "apart", "early"]
"""How blocks of an operand are cut out of the whole: by the dot that reads them, or copied right before it,
or before the hop that the dot hides."""

SHARDS_HELD: Final = 4.5
"""Shards that TPU compilers were seen to hold at once, and a bit: some come while others are multiplied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWork:
    """What one device does at a site: the collective with its dots, and one step of rings in their place.

    Attributes:
      collective: which collective the rings replace.
      shard_bytes: bytes of one whole shard as the rings send it.
      collective_shard_bytes: bytes per shard of the original collective, more when it moves a wider dtype.
      matmuls: the original dots, whole.
      piece: the dots of one piece of one step, in the order of `matmuls`.
      directions: ways round that shards travel: 1, or 2 at once.
      rings: rings with links of their own.
      walks: whether they are the axis's walks, in place of rings along its orders.
      chains: pieces of a shard per ring and direction. A step has directions · rings · chains pieces.
      columns: how many such rings of steps run one after the other, each with its part of every shard.
      joined: whether the pieces of a step go into one partial dot; then `piece` is that of all of them.
      cut: how blocks of what does not travel come to the dots of a scatter, and to those of a gather that are
        cut along K.
      accumulator: dtype of the partial sums that dots add to, where they do: those of a gather whose piece is
        cut along K, and those of a fused scatter, which are as they travel.
      accumulators: to how many arrays the pieces of a gather add: all to one, or each to its own.
      fused: whether the additions of a scatter ring are part of its dots, which then wait for the sums.
      apart_bytes: bytes that are read and written beside the dots of one step: additions that are not part of
        them, blocks copied for them.
      hands_out_gathered: whether the rings also assemble the gathered array, for other uses.

    Raises:
      ValueError: a count is below 1, bytes are negative, or there is not one piece to each matmul.
    """

    collective: Literal["all_gather", "reduce_scatter"]
    shard_bytes: float
    collective_shard_bytes: float
    matmuls: tuple[Matmul, ...]
    piece: tuple[Matmul, ...]
    directions: Directions = 1
    rings: int = 1
    walks: bool = False
    chains: int = 1
    columns: int = 1
    joined: bool = False
    cut: Cut = "dot"
    accumulator: str = "float32"
    accumulators: int = 1
    fused: bool = True
    apart_bytes: float = 0
    hands_out_gathered: bool = False

    def __post_init__(self) -> None:
        if self.collective not in ("all_gather", "reduce_scatter"):
            raise ValueError(f"collective must be 'all_gather' or 'reduce_scatter', got {self.collective!r}")
        if self.directions not in (1, 2) or min(self.rings, self.chains, self.columns, self.accumulators) < 1:
            raise ValueError(f"directions are 1 or 2, rings and other counts at least 1, got {self}")
        if min(self.shard_bytes, self.collective_shard_bytes, self.apart_bytes) < 0:
            raise ValueError(f"bytes must not be negative, got {self}")
        if len(self.piece) != len(self.matmuls):
            raise ValueError(f"every matmul needs its piece, got {self}")

    @property
    def pieces(self) -> int:
        """Pieces of a shard, and so of a step."""
        return self.directions * self.rings * self.chains

    @property
    def dots(self) -> int:
        """Partial dots that a step runs of each matmul."""
        return 1 if self.joined else self.pieces

    @property
    def pairs(self) -> tuple[tuple[Matmul, Matmul], ...]:
        """Of each matmul its piece and the whole."""
        return tuple(zip(self.piece, self.matmuls, strict=True))


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
      added_bytes: how much more temporary memory the ring needs than the collective; negative where it needs
        less. Roughly, and counted of rings of one collective alone.
    """

    dot_s: float
    collective_s: float
    partials_s: float
    hops_s: float
    hop_latency_s: float
    overlapped_s: float
    added_bytes: float = 0.0

    @property
    def original_s(self) -> float:
        """Seconds of the site as it stands: the collective and the dots, one after the other."""
        return self.dot_s + self.collective_s

    @property
    def benefit_s(self) -> float:
        """Seconds that the ring saves; negative where it loses."""
        return self.original_s - self.overlapped_s

    @property
    def rank(self) -> tuple[bool, float]:
        """What of several rings is the better: one that needs no more memory, then one that saves more."""
        return self.added_bytes <= 0, self.benefit_s

    def __add__(self, other: Estimate) -> Estimate:
        """Two sites, or two parts of one, one after the other."""
        return Estimate(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Estimate)})


def estimate(work: RingWork, axis: Axis, *, fetched: bool = False, cut_out: bool = False) -> Estimate:
    """Prices the rings.

    With P devices a ring has P steps and P-1 hops. A step lasts, with n pieces whose dots take M each and
    hops h of one piece:

        gather ring   max(n · M + additions, chains · h)
        scatter ring  max(n · M, chains · h) + additions
                      max(n · M, M + h, chains · h), where the additions are part of the dots

    since a gather ring adds its own partial sums, beside the hop, and an accumulator must be added to before
    it is sent on; if the dot itself adds to it, its hop runs beside the dots of the other pieces only.
    Copying the gathered shards into place reads and writes each once. Joining the pieces of a step, taking
    the rows of its results apart again, and cutting blocks out of an operand before its dots take as long as
    `JOINING`, `JOINING_MORE` and `CUTTING` say, and each copy a fixed time; a block that was cut out is found
    on chip, if it fits there. So is an operand that every partial dot shares, for which the first dot waits.
    Partial sums are read and written by every dot that adds to them, unless they stay on chip; of sums that
    travel small ones do.

    Where the hardware does not overlap, hops and partial dots take turns, and a hop carries no less than the
    original collective did: a narrower wire is not an effect of the ring, and shared memory does not reward
    it.

    Args:
      work: what the rings do.
      axis: the devices.
      fetched: whether what is held on chip is there before the first dot.
      cut_out: whether the blocks that are cut out before their dots have been, for another column.
    """
    hardware = axis.hardware
    hops = axis.size - 1
    copy_s = _copies_s(work, axis.size, hardware, cut_out=cut_out)
    near, held_bytes = _near(work, axis.size, hardware)
    first_s = work.dots * _pieces_s(work, near, hardware, adds=False) + copy_s
    partial_s = work.dots * _pieces_s(work, near, hardware, adds=True) + copy_s
    add_s = work.apart_bytes / hardware.hbm_bytes_per_s

    shard_bytes = work.shard_bytes
    if not hardware.overlaps:
        shard_bytes = max(shard_bytes, work.collective_shard_bytes)
    piece_bytes = shard_bytes / (work.chains * work.columns)
    hop_s = axis.step_s(piece_bytes, work.directions, work.rings, walks=work.walks)
    wire_s = work.chains * hop_s

    if not hardware.overlaps:
        step_s = partial_s + add_s + wire_s
    elif work.collective == "reduce_scatter":
        waiting_s = partial_s / work.dots + hop_s if work.fused else 0.0
        step_s = max(partial_s, waiting_s, wire_s) + add_s
    else:
        step_s = max(partial_s + add_s, wire_s)

    # The first dot waits for what is held, and the hop beside it is on its way meanwhile.
    fetch_s = held_bytes / hardware.hbm_bytes_per_s if hardware.network == "torus" and not fetched else 0.0
    waited_s = max(0.0, fetch_s - max(0.0, step_s - add_s - partial_s))
    waited_s += _brought_out_s(work, hardware)

    gathered = work.collective == "all_gather"
    collective_s = (axis.all_gather_s if gathered else axis.reduce_scatter_s)(
        axis.size * work.collective_shard_bytes
    )
    latency_s = work.chains * axis.step_s(0, work.directions, work.rings, walks=work.walks)
    sent = _sent_side(work, axis.size, *work.pairs[0]) if gathered and work.pairs else None
    dot_s = wholes_s(work.matmuls, hardware, collective_s if gathered else 0.0, sent)
    if not hops:  # one device has nothing to wait for
        return Estimate(
            dot_s=dot_s,
            collective_s=collective_s,
            partials_s=dot_s,
            hops_s=0.0,
            hop_latency_s=0.0,
            overlapped_s=dot_s + collective_s,
        )
    return Estimate(
        dot_s=dot_s,
        collective_s=collective_s,
        partials_s=waited_s + work.columns * (first_s + hops * (partial_s + add_s)),
        hops_s=work.columns * hops * wire_s,
        hop_latency_s=work.columns * hops * latency_s,
        overlapped_s=waited_s + work.columns * (first_s + hops * step_s),
        added_bytes=_buffers_bytes(work, axis.size) - axis.size * work.collective_shard_bytes,
    )


def _buffers_bytes(work: RingWork, axis_size: int) -> float:
    """Bytes that the rings need beside operands and results.

    Shards that come and go; a gather's sums until they are the result, those of a column while those of the
    next one grow; and blocks that are cut out of an operand before their dots: one of each of the axis's
    devices where all columns need them, else that of the next step beside that of this one.
    """
    sums_bytes = cut_bytes = 0.0
    for piece, whole in work.pairs:
        if work.collective == "all_gather" and piece.k < whole.k:
            sums_bytes += whole.batch * whole.m * whole.n * dtype_bytes(work.accumulator)
        if work.cut != "dot":
            cut_bytes += work.dots * side_bytes(piece, _cut_side(work, axis_size, piece, whole))
    in_columns = work.columns > 1
    shards_bytes = min(axis_size - 1, SHARDS_HELD) * work.shard_bytes
    blocks = axis_size if in_columns else 2
    return (shards_bytes + (2 if in_columns else 1) * sums_bytes) / work.columns + blocks * cut_bytes


def _copies_s(work: RingWork, axis_size: int, hardware: Hardware, *, cut_out: bool) -> float:
    """Seconds of the copies of one step, beside its dots and what is added to them."""
    slower = hardware.network == "torus"
    shard_bytes = work.shard_bytes / work.columns
    copied_bytes, copies = 0.0, 0.0
    if work.hands_out_gathered:
        copied_bytes += shard_bytes
    if work.joined:
        placed = [piece.result_bytes for piece, whole in work.pairs if piece.k == whole.k]
        single = len(placed) == len(work.matmuls) == 1
        slowness = (JOINING if single else JOINING_MORE) * hardware.joining if slower else 1.0
        copied_bytes += slowness * (shard_bytes + sum(placed))
        copies += 1 + work.pieces * len(placed)
    if work.cut != "dot" and not cut_out:
        sides = [(piece, _cut_side(work, axis_size, piece, whole)) for piece, whole in work.pairs]
        blocks = [side_bytes(piece, side) for piece, side in sides if side is not None]
        # All columns need the same blocks, and compilers cut them once.
        copied_bytes += (CUTTING if slower else 1.0) * work.dots * sum(blocks) / work.columns
        copies += work.pieces * len(blocks) / work.columns
    return copies * hardware.copy_overhead_s + 2 * copied_bytes / hardware.hbm_bytes_per_s


Near = tuple[bool, bool]
"""Whether the left and the right operand are on chip before a dot starts."""


def _near(work: RingWork, axis_size: int, hardware: Hardware) -> tuple[tuple[Near, ...], float]:
    """What is on chip of every matmul's pieces, and the bytes of what all pieces share and is held there.

    Held are the operands that all pieces share, as many as fit together, and then what a dot cuts its blocks
    out of, if it fits well beside them. What was cut out before the dot is there, if it does, and so is what
    travels if it is little.
    """
    shared: list[Side | None] = [piece.stationary(whole) for piece, whole in work.pairs]
    held_bytes = 0.0
    for number, (piece, side) in enumerate(zip(work.piece, shared, strict=True)):
        if held_bytes + side_bytes(piece, side) <= hardware.on_chip_bytes:
            held_bytes += side_bytes(piece, side)
        else:
            shared[number] = None
    little_bytes = beside_bytes(held_bytes, hardware)
    room_bytes = (hardware.on_chip_bytes - held_bytes) / 2
    found: list[Near] = []
    for (piece, whole), side in zip(work.pairs, shared, strict=True):
        near = {operand: side == operand or side_bytes(piece, operand) <= little_bytes for operand in SIDES}
        if work.collective == "all_gather" and not found and not hardware.receives_on_chip:
            near[_sent_side(work, axis_size, piece, whole)] = False
        cut = _cut_side(work, axis_size, piece, whole)
        if piece.batch < whole.batch and work.collective == "all_gather":
            cut = OTHER[_sent_side(work, axis_size, piece, whole)]
        if cut is not None and hardware.network == "torus":
            apart = work.cut != "dot" and piece.batch == whole.batch
            needed_bytes = side_bytes(piece if apart else whole, cut)
            near[cut] = needed_bytes <= room_bytes
            if near[cut] and not apart:
                held_bytes += needed_bytes
                room_bytes -= needed_bytes
        found.append((near["lhs"], near["rhs"]))
    return tuple(found), held_bytes


def _cut_side(work: RingWork, axis_size: int, piece: Matmul, whole: Matmul) -> Side | None:
    """Which operand does not travel, and is read block by block; None where there is none, or both are."""
    if piece.batch < whole.batch:
        return None
    if work.collective == "reduce_scatter":
        rows, columns = piece.m / whole.m, piece.n / whole.n
        return None if rows == columns == 1 else "lhs" if rows <= columns else "rhs"
    if piece.k == whole.k:
        return None
    return OTHER[_sent_side(work, axis_size, piece, whole)]


def _sent_side(work: RingWork, axis_size: int, piece: Matmul, whole: Matmul) -> Side:
    """Which operand of a gather's dot travels."""
    shared = piece.stationary(whole)
    if shared is not None:
        return OTHER[shared]
    gathered_bytes = axis_size * work.shard_bytes
    return min(SIDES, key=lambda side: abs(side_bytes(whole, side) - gathered_bytes))


def _grows_on_chip(work: RingWork, piece: Matmul, whole: Matmul, hardware: Hardware) -> bool:
    """Whether a gather's results of rows are small enough, all together, to stay on chip until the end."""
    placed = work.collective == "all_gather" and not work.joined and hardware.network == "torus"
    results_bytes = sum(each.result_bytes for each in work.matmuls)
    few = results_bytes <= hardware.accumulator_on_chip_bytes
    return placed and few and piece.k == whole.k and LANES <= piece.m < whole.m


def _brought_out_s(work: RingWork, hardware: Hardware) -> float:
    """Seconds of copying results from the chip at the end, where all of them have grown there."""
    if not all(_grows_on_chip(work, piece, whole, hardware) for piece, whole in work.pairs):
        return 0.0
    return sum(whole.result_bytes for whole in work.matmuls) / hardware.hbm_bytes_per_s


def _pieces_s(work: RingWork, near: tuple[Near, ...], hardware: Hardware, *, adds: bool) -> float:
    """Seconds of one piece's dots: in the first step, or in one that adds to sums, where there are any."""
    gathered = work.collective == "all_gather"
    summed = [adds and (piece.k < whole.k if gathered else work.fused) for piece, whole in work.pairs]
    width = dtype_bytes(work.accumulator)
    sums = zip(work.piece, summed, strict=True)
    sum_bytes = sum(piece.batch * piece.m * piece.n * width for piece, added in sums if added)
    kept = sum_bytes * work.accumulators <= hardware.accumulator_on_chip_bytes
    if not gathered:  # it comes and goes, so it must be little
        kept = kept and sum_bytes <= beside_bytes(0, hardware)
    total_s = 0.0
    for (piece, whole), added, (lhs, rhs) in zip(work.pairs, summed, near, strict=True):
        placed = gathered and not work.joined and piece.k == whole.k and piece.m < whole.m
        by_tiles = placed and hardware.network == "torus"
        slowness = placed_slowness(piece.m, piece.k, piece.n) if by_tiles else 1.0
        total_s += slowness * matmul_s(
            dataclasses.replace(piece, out_dtype=work.accumulator) if added else piece,
            hardware,
            lhs_on_chip=lhs,
            rhs_on_chip=rhs,
            result_on_chip=(added and kept) or _grows_on_chip(work, piece, whole, hardware),
            accumulator=work.accumulator if added else None,
            accumulator_on_chip=added and kept,
        )
    return total_s
