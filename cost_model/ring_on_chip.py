"""What of a ring's partial dots is on chip: their operands, their results, and what waits for that.

As TPU compilers were seen to place it, by the compiled rings of `bench/decisions.py`: hardware says how they
differ.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Final

from cost_model.dtypes import dtype_bytes
from cost_model.hardware import Hardware
from cost_model.matmul import Matmul, matmul_s
from cost_model.on_chip import OTHER, SIDES, Side, beside_bytes, side_bytes
from cost_model.ring_work import NOTHING_BEFORE, RingWork, cut_side, sent_side
from cost_model.tile import LANES, SUBLANES, tile_rows

FETCHED_SUM: Final = 1 / 3
"""Share of the room on chip that a partial sum may take to be fetched beside the dots of another."""

LATE: Final = {False: 3.5, True: 1.8}
"""Times as long as fetching it takes until dots find on chip an operand of which they read strips: where
shards arrive in main memory, and where on chip. Compilers keep no program waiting for it (of 22 compiled
psums: v5p 1.9 to 8, v5e and v6e 1.5 to 2.4)."""

READ_OFTEN: Final = {True: 1 / 3, False: 1 / 13}
"""Share of the room on chip that one step's piece of what several dots read may take to be there: beside an
operand that is held (of 20 compiled rings v5e: 15 and 17 of 50 MB; v6e: 4 of 29 and 8 of 63, not 13 of 29),
and where none is, since dots of large operands need room (7x: 2 of 33, not 4; v6e: not 10 of 96; v5e: not 9
of 117)."""

SHARDS_BESIDE: Final = 3
"""Shards that there must be room for on chip for those of a gather to arrive there."""

ARRIVING_FLOPS: Final = 2.4e11
"""Floating-point operations of a step's dots up to which its shards arrive on chip. Longer dots were seen to
read them from main memory, whatever their size (of 100 compiled gathers those of 2.3e11 on v6e and of 2.5e11
on v5e arrived, and not those of 2.45e11 and 2.6e11)."""

SUMS_ROOM: Final = 1.05
"""How much more than else may be on chip with the sums of a gather: those of six compiled rings stayed that
together with what was held would take 1.00 to 1.045 of the room, and those of three that would take 1.09."""

Near = tuple[bool, bool]
"""Whether the left and the right operand are on chip before a dot starts."""


@dataclass(frozen=True, slots=True)
class OnChip:
    """What is on chip.

    Attributes:
      near: of every matmul's pieces, the operands.
      held_bytes: of the operands that are held there throughout.
      awaited_bytes: of them what the first dot of each matmul waits for; of a scatter the first of all.
      results: of every matmul, whether a gather's result grows there until the end.
      arriving: the operand of which the first of a step's dots finds its piece in main memory, where it has
        just arrived, while those of the other pieces are fetched beside it; None where there is none.
      leaving: whether the dots that add to a gather's sums for the last time write the results to main
        memory.
    """

    near: tuple[Near, ...]
    held_bytes: float
    awaited_bytes: tuple[float, ...]
    results: tuple[bool, ...]
    arriving: Side | None = None
    leaving: bool = False


def on_chip(work: RingWork, axis_size: int, hardware: Hardware) -> OnChip:
    """What is on chip of the partial dots, in all steps but the first.

    Held are the operands that all pieces share, as many as fit together, and then what a dot cuts its blocks
    out of, if it fits well beside them; before all of them that, where it is the largest that fits: of it
    even dots that otherwise cut nothing on chip (`Hardware.cuts_on_chip`) read their blocks there. What was
    cut out before the dot is there, if it fits, and so is what travels if it is little, or read by several
    dots. Where nothing arrives on chip, the first of them finds it in main memory, but for whole shards that
    the compiler fetches (7x, of 60 compiled rings: all up to 2 MB beside room for them). Others fetch it if
    it fills tiles, but for the first of a step's pieces (14 compiled rings of v5p: of four pieces three are).
    What is cut out for all columns of a gather, of an operand that does not fit, takes what room shards that
    arrive leave (v4, v5e, v6e: of 16 compiled rings 9 took 1.1 to 2 times as long as with sums that stay); of
    one that fits it takes half of its size, as the blocks go one by one. What long dots of a gather read does
    not arrive there (`ARRIVING_FLOPS`).
    """
    shared = [_shared_side(work, axis_size, number, hardware) for number in range(len(work.matmuls))]
    first_bytes = _cut_first_bytes(work, axis_size, shared, hardware)
    held_bytes = sum(first_bytes)
    for number, (whole, side) in enumerate(zip(work.matmuls, shared, strict=True)):
        with_bytes = held_bytes + side_bytes(whole, side)
        arriving_bytes = _sums_beside_strips_bytes(work, number, hardware)
        if with_bytes + arriving_bytes <= hardware.on_chip_bytes and _arrives_in_time(
            work, with_bytes, hardware
        ):
            held_bytes = with_bytes
        else:
            shared[number] = None
    little_bytes = beside_bytes(held_bytes, hardware)
    room_bytes = (hardware.on_chip_bytes - held_bytes) / 2
    found: list[Near] = []
    each_bytes = list(map(operator.add, first_bytes, map(side_bytes, work.matmuls, shared)))
    arriving: Side | None = None
    long = hardware.receives_on_chip and _step_flops(work) > ARRIVING_FLOPS
    comes_near = hardware.receives_on_chip or (hardware.fetches_shards and work.columns == 1)
    read_often_bytes = little_bytes
    if len(work.matmuls) > 1 and hardware.network == "torus":
        read_often_bytes = READ_OFTEN[held_bytes > 0] * (hardware.on_chip_bytes - held_bytes)
    placing = zip(work.pairs, shared, map(bool, first_bytes), strict=True)
    for number, ((piece, whole), side, kept) in enumerate(placing):
        sent = sent_side(work, axis_size, number) if work.collective == "all_gather" else None
        near = {
            operand: side == operand
            or side_bytes(piece, operand) <= (read_often_bytes if operand == sent else little_bytes)
            for operand in SIDES
        }
        if sent is not None and not found and not comes_near:
            near[sent] = near[sent] and hardware.fetches_sums and _fills_tiles(piece, whole, sent)
            arriving = sent if near[sent] else None
        if sent is not None and _arrives_beside(work, sent, held_bytes, hardware):
            near[sent] = True
        if sent is not None and long:
            near[sent] = False
        if sent is not None and _comes_whole(work, hardware) and side_bytes(piece, sent) <= room_bytes:
            near[sent], arriving = True, None
        cut = _read_by_blocks(work, axis_size, number)
        if cut is not None and hardware.network == "torus":
            apart = work.cut != "dot" and piece.batch == whole.batch
            needed_bytes = side_bytes(piece if apart else whole, cut)
            near[cut] = kept or needed_bytes <= room_bytes
            if work.collective == "reduce_scatter" and not apart and not kept:
                near[cut] = near[cut] and hardware.cuts_on_chip
            if _stay_far(work, number, hardware):
                near[cut] = near[cut] and side_bytes(whole, cut) <= hardware.on_chip_bytes
            if near[cut] and not apart and not kept:
                held_bytes += needed_bytes
                room_bytes -= needed_bytes
                each_bytes[len(found)] += needed_bytes
            if sent is not None and apart and work.columns > 1 and hardware.receives_on_chip:
                fits = side_bytes(whole, cut) <= hardware.on_chip_bytes
                held_bytes = held_bytes + side_bytes(whole, cut) / 2 if fits else hardware.on_chip_bytes
        found.append((near["lhs"], near["rhs"]))
    if _fits_beside(work, held_bytes, hardware):
        awaited_bytes = (0.0,)
    elif work.collective == "all_gather":
        awaited_bytes = tuple(each_bytes)
    else:
        awaited_bytes = (held_bytes,)
    results = _grow(work, held_bytes, hardware)
    leaving = work.summed and hardware.network == "torus" and (hardware.places_slowly or not any(results))
    return OnChip(tuple(found), held_bytes, awaited_bytes, results, arriving, leaving)


def _sums_beside_strips_bytes(work: RingWork, number: int, hardware: Hardware) -> float:
    """Bytes of the sums of a scatter that come and go beside an operand of which dots read strips.

    Where they arrive on chip and find no room beside it, it is not there for most dots (v6e: 79 MB of 96
    beside two of 8 and of 16 MB, of which three compiled rings were priced 7 to 23 % too fast).
    """
    piece, whole = work.piece[number], work.matmuls[number]
    strips = work.collective == "reduce_scatter" and piece.stationary(whole) is None
    return 2 * piece.result_bytes if strips and hardware.receives_on_chip else 0.0


def _stay_far(work: RingWork, number: int, hardware: Hardware) -> bool:
    """Whether blocks that were cut early, and all pieces read, are not fetched if they do not fit together.

    Of five compiled rings of v6e (of 285 and 432 MB) none were; those of v5e, and those that one dot reads,
    were fetched beside the dots before.
    """
    piece, whole = work.piece[number], work.matmuls[number]
    across = piece.m < whole.m and piece.n < whole.n
    return work.cut == "early" and across and not hardware.places_slowly


def _step_flops(work: RingWork) -> float:
    """Floating-point operations of the dots of one step."""
    return work.dots * sum(piece.flops for piece in work.piece)


def _fits_beside(work: RingWork, held_bytes: float, hardware: Hardware) -> bool:
    """Whether what is held is fetched while another ring runs, beside what that one holds."""
    before_bytes = work.before.on_chip_bytes
    return before_bytes is not None and before_bytes + held_bytes <= hardware.on_chip_bytes


def _arrives_in_time(work: RingWork, held_bytes: float, hardware: Hardware) -> bool:
    """Whether what is to be held can be fetched.

    With no room beside what the ring before it holds, it is fetched once that is done, and only if the dots
    of a step take as long: rings of MLPs (v5e, v6e) were else priced 6 to 30 % too fast. What is read again
    in a backward pass stays, and leaves no room (14 to 32 %).
    """
    if work.before == NOTHING_BEFORE or _fits_beside(work, held_bytes, hardware):
        return True
    if work.before.stays:
        return False
    pieces = (matmul_s(piece, hardware, lhs_on_chip=True, rhs_on_chip=True) for piece in work.piece)
    return held_bytes / hardware.hbm_bytes_per_s <= work.dots * sum(pieces)


def late_s(
    piece: Matmul,
    side: Side,
    fetched_bytes: float,
    dots: int,
    hardware: Hardware,
    *,
    waited_bytes: float,
    at_last: bool = False,
) -> float:
    """Seconds by which dots take longer while an operand of which each reads a strip is being fetched.

    Args:
      piece: one of the dots.
      side: that operand.
      fetched_bytes: of all of it.
      dots: how many there are.
      hardware: where they run.
      waited_bytes: for which the first of them is taken to wait, instead.
      at_last: whether it is fetched only once they all have run.
    """
    near_s = matmul_s(piece, hardware, lhs_on_chip=True, rhs_on_chip=True)
    far_s = matmul_s(piece, hardware, lhs_on_chip=side == "rhs", rhs_on_chip=side == "lhs")
    fetch_s = fetched_bytes / hardware.hbm_bytes_per_s
    far = math.ceil(LATE[hardware.receives_on_chip] * fetch_s / far_s)
    late = (dots if at_last else min(far, dots)) * (far_s - near_s)
    return max(0.0, late - waited_bytes / hardware.hbm_bytes_per_s)


def _fills_tiles(piece: Matmul, whole: Matmul, side: Side) -> bool:
    """Whether a piece of an operand fills tiles. Strips of what is contracted are cut where they do."""
    rows, columns = (piece.m, piece.k) if side == "lhs" else (piece.k, piece.n)
    if side == "rhs" and piece.k < whole.k and columns >= 2 * LANES:
        columns = whole.n
    dtype = (piece.lhs_dtype if side == "lhs" else piece.rhs_dtype) or piece.dtype
    least_rows = SUBLANES if dtype_bytes(dtype) > 1 else tile_rows(1)
    return rows % least_rows == columns % LANES == 0


def _comes_whole(work: RingWork, hardware: Hardware) -> bool:
    """Whether a whole shard that is contracted is fetched beside the dots before it.

    So it is where a step has one dot, long enough for that: v4 (19 and 63 MB) and 7x (7 MB) were else priced
    13 to 25 % longer than they took.
    """
    one = len(work.matmuls) == work.pieces == work.columns == 1
    return one and hardware.fetches_shards and work.piece[0].k < work.matmuls[0].k


def _arrives_beside(work: RingWork, sent: Side, held_bytes: float, hardware: Hardware) -> bool:
    """Whether the shards of a gather's only dot arrive on chip: where there is room for three.

    That is beside a result that grows there, and for six where they go both ways, each half way round. Of 29
    compiled rings (v4, v5e, v6e: shards of 7 to 33 MB) all did, but for one of long dots on v5e; one of 25 MB
    of 64 that did not have room (v4) did not.
    """
    one = len(work.matmuls) == 1 and work.piece[0].k == work.matmuls[0].k
    if not one or not hardware.receives_on_chip:
        return False
    arriving_bytes = max(work.shard_bytes / work.columns, side_bytes(work.piece[0], sent))
    shards = 2 * SHARDS_BESIDE if work.halves else SHARDS_BESIDE
    (grows,) = _grow(work, held_bytes, hardware)
    held_bytes += work.matmuls[0].result_bytes if grows else 0.0
    return shards * arriving_bytes <= hardware.on_chip_bytes - held_bytes


def _shared_side(work: RingWork, axis_size: int, number: int, hardware: Hardware) -> Side | None:
    """Which operand all steps share, be it on TPU that each piece of a scatter takes its own part of it."""
    shared = work.piece[number].stationary(work.matmuls[number])
    by_parts = hardware.network == "torus" and hardware.cuts_on_chip
    if shared is None and work.collective == "reduce_scatter" and by_parts:
        cut = cut_side(work, axis_size, number)
        return None if cut is None else OTHER[cut]
    return shared


def _cut_first_bytes(
    work: RingWork, axis_size: int, shared: list[Side | None], hardware: Hardware
) -> tuple[float, ...]:
    """Of every dot the bytes of what it reads its blocks of, where that is held before all else; else 0.

    TPU compilers fetch operands before a program begins: the largest that fit, not those that are read most
    often. But where pieces of a scatter read strips of the other operand, and the two do not fit together,
    it is this one (v6e, v5p: so it was in all of 8 compiled rings; two of them were priced 615 and 343 µs and
    took 1076 and 599). Of several dots of a scatter it is the first's. After another ring there is no such
    operand.
    """
    far = work.collective == "all_gather" and not hardware.cuts_on_chip
    if far or work.cut != "dot" or hardware.network != "torus" or work.before != NOTHING_BEFORE:
        return (0.0,) * len(work.matmuls)
    found: list[float] = []
    room_bytes = hardware.on_chip_bytes
    for number, ((piece, whole), side) in enumerate(zip(work.pairs, shared, strict=True)):
        cut_bytes = side_bytes(whole, _read_by_blocks(work, axis_size, number))
        first = not found or work.collective == "all_gather"
        other_bytes = side_bytes(whole, side)
        strips = work.collective == "reduce_scatter" and piece.stationary(whole) is None
        instead = strips and other_bytes <= room_bytes < other_bytes + cut_bytes
        before = first and (other_bytes < cut_bytes or instead)
        found.append(cut_bytes if before and cut_bytes <= room_bytes else 0.0)
        room_bytes -= found[-1]
    return tuple(found)


def _read_by_blocks(work: RingWork, axis_size: int, number: int) -> Side | None:
    """The operand whose blocks are read by step: also the other operand of a batch whose one is gathered."""
    if work.piece[number].batch < work.matmuls[number].batch and work.collective == "all_gather":
        return OTHER[sent_side(work, axis_size, number)]
    return cut_side(work, axis_size, number)


def _grow(work: RingWork, held_bytes: float, hardware: Hardware) -> tuple[bool, ...]:
    """Which of a gather's results are put together on chip: the last ones that fit beside what is held.

    Those of rows or of a batch's matrices (v6e, 2 to 42 MB: such rings were priced 1.1 to 1.5 times as long
    as they took), and those of sums that stay there, if each column of a ring makes some of their rows (v6e:
    0.7 to 72 MB, of which 20 compiled rings were priced 10 to 45 % too long).

    Of other sums the last dot writes them to main memory itself, where they are not little, and of columns or
    of pieces that begin within tiles, each with a sum of its own, or each column of joined pieces (v6e: 1 MB
    of those, and neither 12 and 21 MB nor 1 MB of whole tiles: 20 compiled rings were up to 19 % too fast).
    """
    none = (False,) * len(work.matmuls)
    if work.collective != "all_gather":
        return none
    placed = not work.joined and all(
        piece.k == whole.k and (piece.m < whole.m or piece.batch < whole.batch) for piece, whole in work.pairs
    )
    strips = work.columns > 1 and all(piece.m < whole.m for piece, whole in work.pairs)
    several = strips or work.accumulators > 1 or (work.joined and work.columns > 1)
    apart = several and all(piece.k < whole.k for piece, whole in work.pairs)
    sum_bytes = sum(p.batch * p.m * p.n for p in work.piece) * dtype_bytes(work.accumulator)
    if not (placed or (apart and sums_stay(work, sum_bytes, held_bytes, hardware))):
        return none
    largest_bytes = max(whole.result_bytes for whole in work.matmuls)
    between = work.columns > 1 or any(_begins_between_tiles(piece, whole) for piece, whole in work.pairs)
    if not (placed or strips or (between and largest_bytes <= beside_bytes(0, hardware))):
        return none
    room_bytes = hardware.results_on_chip * hardware.on_chip_bytes
    if room_bytes:
        # What is left beside two shards on their way, where these are little (v6e: 94 MB stayed, 99 did not).
        room_bytes = max(room_bytes, hardware.on_chip_bytes - 2 * work.shard_bytes / work.columns)
    room_bytes -= held_bytes
    found: list[bool] = []
    for whole in reversed(work.matmuls):
        found.insert(0, whole.result_bytes <= room_bytes)
        room_bytes -= whole.result_bytes if found[0] else 0.0
    return tuple(found)


def _begins_between_tiles(piece: Matmul, whole: Matmul) -> bool:
    """Whether pieces of a result are not of whole tiles."""
    return (piece.m < whole.m and piece.m % SUBLANES > 0) or (piece.n < whole.n and piece.n % LANES > 0)


def sum_near(work: RingWork, sum_bytes: float, held_bytes: float, hardware: Hardware) -> tuple[bool, bool]:
    """Whether the sum that a piece's dots add to is on chip before them, and whether it stays there.

    Where none stays from step to step, one that is added to by turns with others is still fetched beside
    their dots (v5p: such rings were priced 1.2 to 1.6 times as long as they took), and leaves after its own
    (where little ones were priced to stay, 60 compiled rings took 1.2 to 5 times as long). Arguments as of
    ``sums_stay``.
    """
    if sums_stay(work, sum_bytes, held_bytes, hardware):
        return True, True
    fetched = hardware.fetches_sums and work.collective == "all_gather" and work.accumulators > 1
    return fetched and sum_bytes <= FETCHED_SUM * hardware.on_chip_bytes, False


def sums_stay(work: RingWork, sum_bytes: float, held_bytes: float, hardware: Hardware) -> bool:
    """Whether partial sums stay on chip from one dot to the next.

    Those of a gather stay if there is room beside the operands that are held, and for one more of them,
    since a dot makes its sum beside the one that it reads (v5e, v6e, 7x: 12 compiled rings whose sums were
    taken to be too large at 12 to 32 MB were priced two to three times as long as they took).

    Those of a scatter come and go: they must arrive there, and have room for two of each piece where dots cut
    their blocks themselves (of 150 compiled rings of v5e and v6e two thirds were priced more exactly so; sums
    of 12 and 14 MB stayed, and not those of 49). Where blocks are cut early only little ones do, on v6e.

    Args:
      work: the rings.
      sum_bytes: of the sums that one piece's dots add to.
      held_bytes: of the operands that are held.
      hardware: where they run.
    """
    if not hardware.keeps_sums:
        return False
    if work.collective == "all_gather":
        elements = [piece.batch * piece.m * piece.n for piece in work.piece]
        made_bytes = sum_bytes * max(elements) / sum(elements)
        needed_bytes = held_bytes + sum_bytes * work.accumulators + made_bytes
        room = held_bytes < hardware.on_chip_bytes
        return room and needed_bytes <= SUMS_ROOM * hardware.on_chip_bytes
    if not hardware.receives_on_chip or hardware.results_on_chip == 0:
        return False
    room_bytes = 0.0 if hardware.places_slowly else beside_bytes(0, hardware)
    if work.cut == "dot":
        room_bytes = max(room_bytes, (hardware.on_chip_bytes - held_bytes) / (2 * work.pieces))
    return sum_bytes <= room_bytes
