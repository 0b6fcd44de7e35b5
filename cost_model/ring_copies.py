"""The time of what rings copy beside their partial dots.

Factors are of the compilers' own estimates in compiled rings: how many times as long as reading and writing
the bytes once a copy takes.
"""

from __future__ import annotations

from typing import Final

from cost_model.dtypes import dtype_bytes
from cost_model.hardware import Hardware
from cost_model.matmul import Matmul
from cost_model.on_chip import Side, side_bytes
from cost_model.ring_work import Cut, RingWork, cut_side, sent_side
from cost_model.tile import LANES, SUBLANES, by_columns, tile_rows

JOINING: Final = 0.7
"""What a TPU's compiler makes of joining the pieces of a step for its only dot, and of taking the rows of the
result apart again (v5e, v6e, 7x: 0.3 to 0.8). `Hardware.joining` of a chip multiplies it."""

JOINING_MORE: Final = 2.0
"""The same for several dots, or for one whose results are added up (v5e, v6e, 7x: 1.9 to 4.8)."""

JOINING_BLOCKS: Final = 1.5
"""Of joining the blocks of the other operand, where the pieces' results are added up and the whole of it is
not on chip (v4, v5e, v6e, 7x: 1.3 to 3.4)."""

CUTTING: Final = 1.25
"""Of cutting a block out of an operand before its dot, from main memory (v5e, v5p, v6e, 7x: 1.1 to 1.8)."""

CUTTING_ROWS: Final = 0.8
"""Of cutting rows of an operand that fits on chip: it is fetched once (v5e, v6e, 7x: 0.7 to 1.2)."""

CUTTING_COLUMNS: Final = (0.6, 2.2)
"""Of cutting columns of the left operand for a gather, wherever it is, and what elements of a byte add, wider
ones as much less (int8: 2.1 to 4.2, bfloat16: 1.0 to 2.5, float32: 1.2 to 1.7; least on v5e and v6e, most on
v5p and 7x)."""

CUTTING_SHARED_COLUMNS: Final = (0.5, 0.9)
"""The same where all pieces, strips of the other operand, read the block, which is cut once for them (int8:
1.1 to 1.9, bfloat16: 0.8 to 1.4, float32: 0.7 to 0.9; v4: 2.5 to 3.0)."""

CUTTING_RIGHT: Final = 2.5
"""Of cutting rows of the right operand for a gather, wherever it is (v5p: 1.4 to 2.8, v5e: 1.9 to 2.5,
v4: 2.5 to 5.7)."""

COPYING_WHOLE: Final = 3.9
"""Of copying a whole operand to cut a block of rows that does not begin where a tile does, out of elements of
a byte (v5e, v6e: 3.8 to 6.1)."""

CUTTING_BETWEEN_TILES: Final = 4.4
"""Of cutting such a block early, which spares the copy of the whole, beside what cutting takes anyway (v5e,
v6e: 3.8 to 5.0)."""

SLICING_NARROW: Final = 3.0
"""Of cutting shards of elements of a byte into what is sent, at least (2.2 to 4.4; 7x: 4 to 8)."""

HALVING_NARROW: Final = 1.8
"""How many times as long as that it takes to cut them in halves half way round, where two operations do (v5e,
v5p, v6e: 1 to 3, 7x: 1)."""

LAYING_OUT_GATHERED: Final = 3.0
"""Of putting gathered columns beside each other that are no whole tiles (v6e: 1.4 and 4.9, v4: 3.4)."""

LAYING_OUT: Final = 20.0
"""Of laying out a matrix of a batch anew for its place in the results, where its rows are no whole tiles and
the batch is: a TPU's compiler has the batch in the place of the rows then (float32: v5p 9, v6e 20, v4 42;
bfloat16: v5p 14, v4 33)."""


def between_tiles_bytes(
    operand_bytes: float,
    block_rows: int,
    itemsize: float,
    axis_size: int,
    hardware: Hardware,
    *,
    pieces: int,
    across: bool,
    cut: Cut,
) -> float:
    """Bytes read and written in a step of a scatter since its pieces' rows do not begin where a tile does.

    0 where they do (see `passes.schedule.parts`), or where a compiler cuts them anywhere: a TPU's does, of
    elements wider than a byte. Of narrower ones it copies the whole operand for every piece, or, where blocks
    are cut early, them.

    Args:
      operand_bytes: of the whole operand.
      block_rows: of it that belong to one device's block, or to a chunk of one.
      itemsize: bytes of an element.
      axis_size: devices of the axis.
      hardware: where the ring runs.
      pieces, cut: see `RingWork`.
      across: whether the pieces are cut along another dim, and each has all these rows.
    """
    if hardware.network != "torus" or itemsize > 1:
        return 0.0
    rows, cuts = tile_rows(itemsize), 1 if across else pieces
    if block_rows % rows == 0 and (block_rows % (cuts * rows) == 0 or block_rows >= 2 * cuts * rows):
        return 0.0
    if cut == "dot":
        return 2 * COPYING_WHOLE * pieces * operand_bytes
    return 2 * CUTTING_BETWEEN_TILES * operand_bytes / axis_size


def copies_s(work: RingWork, axis_size: int, hardware: Hardware, *, cut_out: bool) -> float:
    """Seconds of the copies of one step, beside its dots and what is added to them.

    Args:
      work: the rings.
      axis_size: devices of the axis.
      hardware: where they run.
      cut_out: whether the blocks that are cut out before their dots have been, for another chunk of a psum.
        Those from an operand on chip do not last, and are cut out anew.
    """
    shard_bytes = work.shard_bytes / work.columns
    copied_bytes, copies = 0.0, 0.0
    if work.hands_out_gathered:
        copied_bytes += shard_bytes
    if work.joined:
        placed = [piece.result_bytes for piece, whole in work.pairs if piece.k == whole.k]
        copied_bytes += _joining(work, len(placed), hardware) * (shard_bytes + sum(placed))
        copied_bytes += _joined_blocks_bytes(work, axis_size, hardware)
        copies += 1 + work.pieces * len(placed)
    elif hardware.lone_matmuls and work.collective == "all_gather":
        placed = [piece.result_bytes for piece, whole in work.pairs if piece.k == whole.k]
        copied_bytes += work.dots * sum(placed)
        copies += work.dots * len(placed)
    copied_bytes += LAYING_OUT * work.dots * _laid_out_bytes(work, hardware)
    cut = work.cut != "dot" and not work.cut_first
    for number, (piece, whole) in enumerate(work.pairs if cut else ()):
        side = cut_side(work, axis_size, number)
        near = _from_chip(work, whole, side, hardware)
        if side is not None and (near or not cut_out) and not _at_once(work, axis_size, number, hardware):
            # All columns need the same blocks, and compilers cut them once.
            factor = _cutting(work, piece, side, hardware, near=near)
            cut_bytes = work.dots * side_bytes(piece, side)
            if work.collective == "reduce_scatter" and side == "lhs" and not near:
                # Pieces that all read the same block find it cut once; not those cut from what is on chip.
                cut_bytes = min(cut_bytes, side_bytes(whole, side) / axis_size)
            copied_bytes += factor * cut_bytes / work.columns
            copies += 0 if near else work.pieces / work.columns
    return copies * hardware.copy_overhead_s + 2 * copied_bytes / hardware.hbm_bytes_per_s


def copies_at_once_s(work: RingWork, axis_size: int, hardware: Hardware) -> float:
    """Seconds of cutting the blocks of all steps, where a TPU's compiler does so before the first dots.

    It cuts what several steps read of one operand, each step one block, by one operation.
    """
    copied_bytes = sum(
        _by_elements(CUTTING_SHARED_COLUMNS, piece) * side_bytes(whole, "lhs")
        for number, (piece, whole) in enumerate(work.pairs)
        if _at_once(work, axis_size, number, hardware)
    )
    return 2 * copied_bytes / hardware.hbm_bytes_per_s


def adding_s(added_bytes: float, hardware: Hardware) -> float:
    """Seconds of a kernel that adds a partial sum to one of so many bytes; 0 where it is part of a matmul."""
    if not hardware.lone_matmuls:
        return 0.0
    return hardware.copy_overhead_s + 3 * added_bytes / hardware.hbm_bytes_per_s


def entering_s(work: RingWork, hardware: Hardware) -> float:
    """Seconds of cutting this device's shard into what a gather sends, before the first hop.

    A whole shard is rounded, if it is; where one is cut, rounding is a part of that.
    """
    sent = work.pieces // 2 if work.halves else work.pieces
    cut = work.collective == "all_gather" and sent * work.columns > 1
    if cut:
        return cutting_s(work, hardware)
    return rounding_s(work.shard_bytes, hardware) if work.rounds else 0.0


def rounding_s(rounded_bytes: float, hardware: Hardware) -> float:
    """Seconds of rounding float32 to so many bytes of bfloat16."""
    if hardware.network != "torus":
        return 0.0
    return hardware.rounding * 3 * rounded_bytes / hardware.hbm_bytes_per_s


def cutting_s(work: RingWork, hardware: Hardware) -> float:
    """Seconds of cutting a shard into pieces that are sent."""
    if hardware.network != "torus":
        return 0.0
    slicing = max(hardware.slicing, SLICING_NARROW if _narrow(work) else 0.0)
    return slicing * 2 * work.shard_bytes / hardware.hbm_bytes_per_s


def halving_s(work: RingWork, hardware: Hardware) -> float:
    """Seconds of cutting the last shards in halves, of which half a one comes from either side."""
    return cutting_s(work, hardware) * (HALVING_NARROW if _narrow(work) else 1.0)


def _narrow(work: RingWork) -> bool:
    """Whether all elements have a byte."""
    return all(dtype_bytes(whole.dtype) == 1 for whole in work.matmuls)


def gathered_between_tiles_s(work: RingWork, axis_size: int, hardware: Hardware) -> float:
    """Seconds of laying out what has been gathered along the columns of a left operand, as written.

    Of shards that are no whole tiles a TPU's compiler gathers blocks, and puts them beside each other after;
    those that are laid out by columns it gathers as they are. Rings multiply the shards.
    """
    if hardware.network != "torus":
        return 0.0
    for number, (piece, whole) in enumerate(work.pairs):
        columns = whole.k // axis_size
        along_columns = piece.k < whole.k and sent_side(work, axis_size, number) == "lhs"
        if along_columns and columns % LANES and not by_columns(whole.m, columns):
            copied_bytes = LAYING_OUT_GATHERED * 2 * axis_size * work.collective_shard_bytes
            return hardware.copy_overhead_s + copied_bytes / hardware.hbm_bytes_per_s
    return 0.0


def _joining(work: RingWork, placed: int, hardware: Hardware) -> float:
    """Times as long as copying takes to join pieces, and to take apart what is placed of their results."""
    if hardware.network != "torus":
        return 1.0
    return (JOINING if placed == len(work.matmuls) == 1 else JOINING_MORE) * hardware.joining


def _joined_blocks_bytes(work: RingWork, axis_size: int, hardware: Hardware) -> float:
    """Bytes copied to join the blocks of the operands that do not travel, those of all columns at once."""
    if hardware.network != "torus":
        return 0.0
    copied_bytes = 0.0
    for number, (piece, whole) in enumerate(work.pairs):
        side = cut_side(work, axis_size, number)
        if side_bytes(whole, side) > hardware.on_chip_bytes:
            copied_bytes += JOINING_BLOCKS * side_bytes(piece, side) / work.columns
    return copied_bytes


def _from_chip(work: RingWork, whole: Matmul, side: Side | None, hardware: Hardware) -> bool:
    """Whether blocks are cut from an operand that has been fetched as a whole."""
    return hardware.keeps_sums and not work.joined and side_bytes(whole, side) <= hardware.on_chip_bytes


def _laid_out_bytes(work: RingWork, hardware: Hardware) -> float:
    """Bytes of the results of a gather's pieces that are laid out anew, matrix by matrix of a batch."""
    if hardware.network != "torus" or work.collective != "all_gather":
        return 0.0
    laid_out_bytes = 0.0
    for piece, whole in work.pairs:
        if piece.batch == whole.batch:
            continue
        # Strips of a matrix are placed as they are if their rows would be whole tiles of wider elements. So
        # were whole matrices in five of nine compiled rings; four took up to 15 times as long.
        packed = int(SUBLANES * max(1.0, 4 / dtype_bytes(whole.result_dtype)))
        rows = {SUBLANES} if piece.m * piece.n < whole.m * whole.n else {SUBLANES, packed}
        if any(whole.m % tile and whole.batch % tile == 0 for tile in rows):
            laid_out_bytes += piece.result_bytes
    return laid_out_bytes


def _at_once(work: RingWork, axis_size: int, number: int, hardware: Hardware) -> bool:
    """Whether blocks of the left operand are cut for all pieces of a gather, and for all steps at once."""
    piece, whole = work.piece[number], work.matmuls[number]
    return (
        hardware.network == "torus"
        and work.collective == "all_gather"
        and work.cut == "apart"
        and work.dots > 1
        and piece.k * axis_size == whole.k
        and cut_side(work, axis_size, number) == "lhs"
    )


def _by_elements(factor: tuple[float, float], of: Matmul) -> float:
    """A factor of two parts, the second by the bytes of an operand's elements."""
    each, element = factor
    return each + element / dtype_bytes(of.dtype)


def _cutting(work: RingWork, piece: Matmul, side: Side, hardware: Hardware, *, near: bool) -> float:
    """Times as long as copying takes to cut a block."""
    if hardware.network != "torus":
        return 1.0
    if work.collective == "all_gather":
        return CUTTING_RIGHT if side == "rhs" else _by_elements(CUTTING_COLUMNS, piece)
    return CUTTING_ROWS if near else CUTTING
