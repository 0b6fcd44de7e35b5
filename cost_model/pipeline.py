"""The time of a dot and its psum in chunks: one is gathered while the sums of the next are scattered."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

from cost_model.axis import Axis
from cost_model.hardware import Hardware
from cost_model.matmul import Matmul
from cost_model.on_chip import side_bytes
from cost_model.ring import SHARDS_HELD, Estimate, estimate
from cost_model.ring_copies import copies_s
from cost_model.ring_on_chip import late_s
from cost_model.ring_work import Blocks, RingWork, begins_at_tiles, cut_side, strip_side
from cost_model.tile import LANES

PLACING: Final = {False: 1.0, True: 0.5}
"""Times as long as reading and writing it once takes placing a sum's shards: of main memory, and of the chip,
where they arrive there (of compiled chunks v4 and v5p: 1.0 to 1.4, v5e and v6e: 0.5)."""

GATHERED: Final = {False: 2.6, True: 0.6}
"""The same of the gathered shards of a psum in one column (v4: 1.8 to 2.7, v5p: 2.6 to 3.0, v5e and v6e: 2.4
to 2.6), of the sum of an all_reduce that another core runs (7x: 2.5 to 2.8), and of shards that fit on chip
(v5e, v6e: 0.5 to 0.7)."""

GATHERED_WIDE: Final = 1.4
"""The same where elements are of four bytes, which the compilers take to leave faster: see `windows`
(v4, v6e, 7x: 1.3 to 1.5)."""

TURNED: Final = {False: 2.0, True: 1.1}
"""How many times as long as reading and writing it once it takes to turn round a gathered sum that is laid
out by columns, as it is where they are no whole tiles. Counted of elements of four bytes, since narrower ones
take as long (v4 1.2, v5p 2.4 to 2.6, v6e 2.3; of sums that fit on chip v5e 0.9, v6e 1.2)."""

FEW_CHUNKS: Final = 4
"""Columns of a result that are chunks up to this number of which blocks that begin within a tile may be
read on chip."""

LOOPED: Final = 16
"""Devices from which on nothing is on chip before the dots of more than two chunks, which run in a loop, if a
step has one of them: three psums (v5e, v5p) took 3 to 4 times as long as if it were; none of eight devices
did, nor two of two dots a step."""

ROUNDING: Final = 3.3
"""Times as long as reading and writing them takes rounding operands of float32 before a loop of chunks; else
dots of the default precision do so by themselves (v5e 2.7, v6e 3.2, v5p 4.1)."""

SUM_ON_CHIP: Final = {True: 0.6, False: 0.36}
"""How much of what fits on chip a whole sum may be, where partial sums stay there at all: if its shards are
rows (v6e: 53 MB), and columns (v5e and v6e: 34 MB was there, 42 MB on v6e not)."""


def copied_sum_s(total_bytes: float, element_bytes: float, axis: Axis, blocks: Blocks = "rows") -> float:
    """Seconds of copying a whole sum, or its shards, to where they are needed once all is there.

    Args:
      total_bytes: of the sum.
      element_bytes: of one of its elements.
      axis: the devices.
      blocks: its shards. Ragged ones are laid out by columns, and turned round.
    """
    hardware, slowness = axis.hardware, 1.0
    if hardware.network == "torus":
        here = hardware.keeps_sums and "all_reduce" not in hardware.offloaded
        near = here and total_bytes <= SUM_ON_CHIP[blocks == "rows"] * hardware.on_chip_bytes
        slowness = GATHERED_WIDE if element_bytes >= 4 and not near else GATHERED[near]
        if blocks == "ragged columns":
            slowness = TURNED[near] * 4 / element_bytes
    return slowness * 2 * total_bytes / hardware.hbm_bytes_per_s


def gather_after(total_bytes: float, element_bytes: float, axis: Axis, blocks: Blocks = "rows") -> Estimate:
    """Prices the second half of a psum in one column: an all_gather.

    After it, its shards are copied to where they are needed. As written it is what an all_reduce takes longer
    than a reduce_scatter: as long, but of few bytes, which each device may send whole to all others. Where
    another core runs the original's all_reduce, its sum is copied just as the shards are.

    Args:
      total_bytes: of the whole sum.
      element_bytes: of one of its elements.
      axis: the devices.
      blocks: its shards.
    """
    gather_s, as_written_s = axis.all_gather_s(total_bytes), copied_sum_s(total_bytes, element_bytes, axis)
    copy_s = copied_sum_s(total_bytes, element_bytes, axis, blocks)
    second_s = axis.all_reduce_s(total_bytes) - axis.reduce_scatter_s(total_bytes)
    return Estimate(
        dot_s=0.0,
        collective_s=second_s + (as_written_s if "all_reduce" in axis.hardware.offloaded else 0.0),
        partials_s=copy_s,
        hops_s=0.0,
        hop_latency_s=0.0,
        overlapped_s=gather_s + copy_s,
    )


def pipeline_estimate(
    work: RingWork, gathered_bytes: float, element_bytes: float, axis: Axis, *, across: bool
) -> Estimate:
    """Prices a psum whose blocks are cut into chunks.

    With C chunks, whose scatter rings take S each, their products D, their hops H, and gathers that take G
    on the same links and copies P into place:

        S + (C-1) · (max(S + P, D + P, F + H + G) + R) + max(G, P)

    since the first scatter has no gather beside it and the last gather no scatter. The links carry the hops
    of both, after the first products F of a chunk, which nothing hides; products come after what is placed
    beside them. Blocks that are cut early are cut before all of it, where the operand fits on chip (v6e: 27
    and 62 µs of 133 and 281). The columns of an operand that a chunk takes are on chip while it lasts, if all
    of it fits there; the first dots of all find it in main memory (`late_s`). Where hops and dots take turns,
    all of it adds up. R is reading and writing the operand whose rows are cut into chunks, which the compiler
    copies for each of more than two if it is not on chip.

    Args:
      work: of the scatter rings of all chunks, which are its columns.
      gathered_bytes: of the whole sum.
      element_bytes: of one of its elements.
      axis: the devices.
      across: whether the chunks are columns of the result, and not rows.
    """
    hardware, chunks = axis.hardware, work.columns
    as_written = estimate(work, axis)
    many = chunks > FEW_CHUNKS or hardware.between_tiles > 1
    between = many and not begins_at_tiles(work, axis.size)
    looped = chunks > 2 and work.pieces == 1 and axis.size >= LOOPED
    if across and hardware.cuts_on_chip and (between or looped):
        # As on hardware that keeps nothing on chip; what there is before the rewrite stays as it is. The
        # compilers were seen to read both operands from main memory, though they fit on chip: that of v6e of
        # 104 rows (2.4 to 2.6 times as long as else), that of v5e of 84 in 8 chunks (2.4), not in 2 or 4.
        axis = dataclasses.replace(axis, hardware=_keeping_nothing(hardware))
    strips = dataclasses.replace(work, matmuls=_strips(work, axis)) if across else work
    chunk = dataclasses.replace(
        strips,
        columns=1,
        shard_bytes=work.shard_bytes / chunks,
        collective_shard_bytes=work.collective_shard_bytes / chunks,
    )
    cut_s = 0.0
    if not across and _cuts_first(chunk, axis):
        copied_s = copies_s(chunk, axis.size, hardware, cut_out=False)
        chunk = dataclasses.replace(chunk, cut_first=True)
        cut_s = axis.size * (copied_s - copies_s(chunk, axis.size, hardware, cut_out=False))
    first = estimate(chunk, axis)
    later = estimate(chunk, axis, fetched=True, cut_out=across)
    whole = estimate(strips, axis) if across else as_written
    gather_s, copy_s = _gather_s(work, gathered_bytes, axis, across=across)
    first_s = later.partials_s / axis.size
    if hardware.overlaps:
        busy_s = max(later.overlapped_s, later.partials_s) + copy_s
        middle_s = max(busy_s, first_s + later.hops_s + gather_s)
    else:
        middle_s = later.overlapped_s + gather_s + copy_s
    middle_s += _cutting_s(work, axis) if chunks > 2 and not across else 0.0
    before_s = _late_s(chunk, work, axis) if across else chunks * cut_s
    before_s += _rounding_s(work, axis) if chunks > 2 else 0.0
    latency_s, _ = _gather_s(work, 0, axis, across=across)
    return Estimate(
        dot_s=as_written.dot_s,
        collective_s=as_written.collective_s + gather_after(gathered_bytes, element_bytes, axis).collective_s,
        partials_s=before_s + whole.partials_s + chunks * copy_s,
        hops_s=whole.hops_s + chunks * gather_s,
        hop_latency_s=whole.hop_latency_s + chunks * latency_s,
        overlapped_s=before_s
        + first.overlapped_s
        + (chunks - 1) * middle_s
        + last_gather_s(work, gathered_bytes, axis, across=across),
        added_bytes=_buffers_bytes(work, axis, across=across) - gathered_bytes,
    )


def _cuts_first(work: RingWork, axis: Axis) -> bool:
    """Whether a TPU's compiler cuts the blocks of all chunks before the first hop: if they fit on chip."""
    sides = (cut_side(work, axis.size, number) for number in range(len(work.matmuls)))
    cut_bytes = sum(map(side_bytes, work.matmuls, sides))
    early = work.cut == "early" and axis.hardware.network == "torus"
    return early and cut_bytes <= axis.hardware.on_chip_bytes


def _strips(work: RingWork, axis: Axis) -> tuple[Matmul, ...]:
    """Of each matmul the part that makes a chunk of the result's columns.

    An operand of which that is no whole tiles stays where it is: no such part of it is fetched; and none is
    where no dot reads a part of what lies on chip. Of one that does not fit on chip as a whole no part is
    fetched either: every dot reads its columns from main memory (v5e, v5p, v6e, 134 to 151 MB: 1.4 to 3.9
    times as long as if they were on chip).
    """

    def part(number: int, piece: Matmul, whole: Matmul) -> Matmul:
        side = strip_side(work, axis.size, number)
        dim = "m" if side == "lhs" else "n"
        size = getattr(piece, dim)
        fits = side_bytes(whole, side) <= axis.hardware.on_chip_bytes
        fetched = fits and size % LANES == 0 and axis.hardware.cuts_on_chip
        return dataclasses.replace(whole, **{dim: size}) if fetched else whole

    return tuple(part(number, *pair) for number, pair in enumerate(work.pairs))


def _late_s(chunk: RingWork, work: RingWork, axis: Axis) -> float:
    """By how much the first chunk's dots take longer while what chunks take columns of is being fetched.

    Blocks that are cut out before their dots keep it from being fetched before all of them have run.
    """
    dots = axis.size * work.dots
    total_s = 0.0
    for number, (strip, whole) in enumerate(zip(chunk.matmuls, work.matmuls, strict=True)):
        if strip != whole:
            side = strip_side(work, axis.size, number)
            total_s += late_s(
                chunk.piece[number],
                side,
                side_bytes(whole, side),
                dots,
                axis.hardware,
                waited_bytes=side_bytes(strip, side),
                at_last=work.cut != "dot",
            )
    return total_s


def _rounding_s(work: RingWork, axis: Axis) -> float:
    """Seconds of rounding operands of float32 before a loop of chunks."""
    hardware = axis.hardware
    if hardware.network != "torus":
        return 0.0
    wide = (whole for whole in work.matmuls if whole.dtype == "float32")
    return sum(ROUNDING * 1.5 * (of.lhs_bytes + of.rhs_bytes) / hardware.hbm_bytes_per_s for of in wide)


def _buffers_bytes(work: RingWork, axis: Axis, *, across: bool) -> float:
    """Bytes beside operands and result: shards of two chunks, and blocks that all chunks have in common."""
    shards_bytes = 2 * min(axis.size - 1, SHARDS_HELD) * work.shard_bytes / work.columns
    if work.cut == "dot" or not across:
        return shards_bytes
    return shards_bytes + sum(
        side_bytes(whole, cut_side(work, axis.size, number)) for number, whole in enumerate(work.matmuls)
    )


def _cutting_s(work: RingWork, axis: Axis) -> float:
    """Seconds of copying the operand whose rows are cut; 0 where it is on chip."""
    cut_bytes = sum(
        whole.lhs_bytes if piece.stationary(whole) == "rhs" else whole.rhs_bytes
        for piece, whole in zip(work.piece, work.matmuls, strict=True)
    )
    hardware = axis.hardware
    return 0.0 if cut_bytes <= hardware.on_chip_bytes else 2 * cut_bytes / hardware.hbm_bytes_per_s


def last_gather_s(work: RingWork, gathered_bytes: float, axis: Axis, *, across: bool) -> float:
    """Seconds of the last chunk's gather, which no matmul hides. Arguments as of `pipeline_estimate`."""
    gather_s, copy_s = _gather_s(work, gathered_bytes, axis, across=across)
    return max(gather_s, copy_s) if axis.hardware.overlaps else gather_s + copy_s


def placing_s(work: RingWork, gathered_bytes: float, axis: Axis, *, across: bool) -> float:
    """Seconds of copying what all chunks' gathers bring into place. Arguments as of `pipeline_estimate`."""
    _, copy_s = _gather_s(work, gathered_bytes, axis, across=across)
    return work.columns * copy_s


def _gather_s(work: RingWork, gathered_bytes: float, axis: Axis, *, across: bool) -> tuple[float, float]:
    """Seconds of one chunk's gather hops, and of copying its shards into place."""
    part_bytes = gathered_bytes / axis.size / work.columns / work.chains
    hop_s = axis.step_s(part_bytes, work.directions, work.rings)
    hardware = axis.hardware
    copy_s = PLACING[hardware.keeps_sums] * 2 * gathered_bytes / work.columns / hardware.hbm_bytes_per_s
    return (axis.size - 1) * work.chains * hop_s, copy_s


@functools.lru_cache(maxsize=64)
def _keeping_nothing(hardware: Hardware) -> Hardware:
    """The hardware as if nothing fitted on chip; made once, as many forms are priced."""
    return dataclasses.replace(hardware, on_chip_bytes=1.0, between_tiles=1.0)
