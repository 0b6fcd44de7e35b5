"""The time of a collective and its dots, rewritten as rings of hops with partial dots beside them.

The dots of one ring step run while the next shards (or accumulators) are on the wire, so a step lasts as long
as the slower of the two; one step has no hop to hide behind it. This is the criterion of Wang et al.
(ASPLOS'23) with per-step times in place of the sums, so that latency and small partial matmuls are charged
where they arise.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from dataclasses import dataclass, fields
from typing import Final

from cost_model.axis import Axis
from cost_model.dtypes import dtype_bytes
from cost_model.hardware import Hardware
from cost_model.matmul import Matmul, matmul_s
from cost_model.on_chip import Whole, beside_bytes, side_bytes, wholes
from cost_model.ring_copies import (
    adding_s,
    copies_at_once_s,
    copies_s,
    entering_s,
    gathered_between_tiles_s,
    halving_s,
    rounding_s,
)
from cost_model.ring_on_chip import OnChip, late_s, on_chip, sum_near, sums_stay
from cost_model.ring_work import RingWork, blocks_of, cut_side, few_rows_between_tiles, sent_side, strip_side
from cost_model.tile import LANES, SUBLANES, by_columns, piece_edges, tile_rows
from cost_model.windows import Along

FORESEEN: Final = 1 / 4
"""Share of a hop's time for which TPU compilers put dots beside it where they place its start. They were seen
to take hops for a quarter to two thirds as long as they are; of the compiled gathers of a grid (jax 0.10) two
took 15 and 20 % longer than priced with a quarter (v5p), and the other 42 no more than 6 %."""

ROOMIER: Final = 1.045
"""How much more than usual TPU compilers were seen to keep on chip of a gather's operands (v6e 95 MiB in
place of 92, v4 63.9 in place of 61 of a core, v5p 47.8 in place of 47)."""

SHARDS_HELD: Final = 4.5
"""Shards that TPU compilers were seen to hold at once, and a bit: some come while others are multiplied."""

SUMMED_SHARDS_HELD: Final = 2.5
"""The same where all dots of a gather add to its sums, in one column, and one waits for the other (of 20
compiled rings: 2.0 to 2.5)."""

SHARDS_ON_CHIP: Final = 0.6
"""Share of the memory on chip that a gather's shards were seen to fill before they lie in main memory: on v4,
v5e and v6e, and on 7x if all that are held fit; not on v5p."""


FLOAT32_BYTES: Final = dtype_bytes("float32")

ADDING_S: Final = 1.3e-6
"""The least that adding products up apart from a scatter's dots takes (1.1 to 1.7 µs in compiled rings)."""

LITTLE: Final = (0.5e6, 1.25e6)
"""Bytes of what is not brought on chip beside the first step's dots, but later (v5e, v6e: 0.5 to 0.8 MB were,
and neither 0.1 MB nor 2)."""

TURNING: Final = {False: 2.0, True: 1.2}
"""Times as long as otherwise it takes to add up partial sums that are laid out by columns, and turned round:
in main memory, and where they arrive on chip. Each also takes `TURNING_S` longer."""

TURNING_S: Final = {False: 3e-6, True: 1.2e-6}
"""With both, turning took 2.9 to 10 µs in compiled rings of v4 and v5p, and 1.5 to 1.9 µs in those of v5e."""


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
      hidden_s: of `collective_s`, what the compiler hides behind other dots of the program as it stands.
    """

    dot_s: float
    collective_s: float
    partials_s: float
    hops_s: float
    hop_latency_s: float
    overlapped_s: float
    added_bytes: float = 0.0
    hidden_s: float = 0.0

    @property
    def original_s(self) -> float:
        """Seconds of the site as it stands: the dots, and what of the collective nothing else hides."""
        return self.dot_s + self.collective_s - self.hidden_s

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
    """Prices the rings: of a gather's whose dots find more on chip if that is a bit larger, the worse price.

    Of an operand that just fits, or just does not, nothing is sure; a ring may take twice as long with it
    there, as its sums find no room. `_estimate` tells the formulas.

    Args:
      work: what the rings do.
      axis: the devices.
      fetched: whether what is held on chip is there before the first dot.
      cut_out: whether the blocks that are cut out before their dots have been, for another chunk of a psum.
    """
    found = _estimate(work, axis, fetched=fetched, cut_out=cut_out)
    hardware = axis.hardware
    if work.collective != "all_gather" or hardware.network != "torus":
        return found
    roomier = _roomier(hardware)
    if on_chip(work, axis.size, hardware) == on_chip(work, axis.size, roomier):
        return found
    other = _estimate(work, dataclasses.replace(axis, hardware=roomier), fetched=fetched, cut_out=cut_out)
    if other.overlapped_s <= found.overlapped_s:
        return found
    return dataclasses.replace(found, partials_s=other.partials_s, overlapped_s=other.overlapped_s)


@functools.lru_cache
def _roomier(hardware: Hardware) -> Hardware:
    return dataclasses.replace(hardware, on_chip_bytes=ROOMIER * hardware.on_chip_bytes)


def _estimate(work: RingWork, axis: Axis, *, fetched: bool, cut_out: bool) -> Estimate:
    """Prices the rings.

    With P devices a ring has P steps and P-1 hops. A step lasts, with n pieces whose dots take M each and
    hops h of one piece:

        gather ring   n · M + additions, and what of chains · h is longer than the dots beside it: all
                      of them, or, where the compiler places the starts, the last few
        scatter ring  max(n · M, chains · h) + additions
                      max(n · M, M + h, chains · h), where the additions are part of the dots

    since a gather ring adds its own partial sums, beside the hop, and an accumulator must be added to before
    it is sent on; if the dot itself adds to it, its hop runs beside the dots of the other pieces only.
    A gather whose whole shards go both ways, each half way round, has its own shard in the first step, two in
    each later one, and where P is even the one that has furthest to go, in halves, in the last: as many bytes
    on the wire in half as many hops, and half as many dots, twice as large.
    Where what comes last comes in halves, h and D being the hops and the dots of a step, the last hop and the
    dots beside and after it last max(max(D, h/2) + D/2, h) + D/2.
    Before them a gather cuts its own shard into what it sends. Copying the gathered shards into place reads
    and writes each once. Joining the pieces of a step, taking the rows of its results apart again, and
    cutting a shard, or blocks out of an operand before its dots, take as long as `cost_model.ring_copies`
    says, and what is on chip is what `cost_model.ring_on_chip` says: the first dot waits for what is held
    there, and results that grow there leave it at the end. Partial sums are read and written by every dot
    that adds to them, unless they stay on chip. Where matmuls are kernels of a library, other kernels copy
    what a gather's make into place, and add partial sums up. Every hop that runs beside dots stops the device
    for `Hardware.async_overhead_s`.

    Where the hardware does not overlap, hops and partial dots take turns, and a hop carries no less than the
    original collective did: a narrower wire is not an effect of the ring, and shared memory does not reward
    it. Arguments as of `estimate`.
    """
    if work.halves and axis.size > 1:
        return _halfway_estimate(work, axis, fetched=fetched)
    hardware = axis.hardware
    hops = axis.size - 1
    ragged = _ragged(work, axis)
    # Laid out by columns, and turned round, where additions are no part of the dots (v4, v5e, v5p).
    turned = (ragged or _turns(work, hardware)) and not work.fused and hardware.matmul_tile[2] <= LANES
    if ragged and not turned:
        work = _padded(work, hardware)
    copy_s = copies_s(work, axis.size, hardware, cut_out=cut_out)
    placed = on_chip(work, axis.size, hardware)
    dots = work.dots * (hardware.between_tiles if few_rows_between_tiles(work, axis.size) else 1.0)
    first_s = dots * _pieces_s(work, placed, hardware, adds=False) + copy_s
    summing_s = dots * _pieces_s(work, placed, hardware, adds=True, by_columns=turned)
    partial_s = summing_s + copy_s
    partial_s += work.pieces * hardware.stops_s
    add_s = work.apart_bytes / hardware.hbm_bytes_per_s
    if turned:
        add_s = TURNING[hardware.receives_on_chip] * add_s + TURNING_S[hardware.receives_on_chip]
    elif _adds_apart(work, hardware):
        near = all(_made_near(piece, hardware) for piece in work.piece)
        add_s = ADDING_S + add_s * (hardware.adding if near else max(1.0, hardware.adding))
    if hardware.lone_matmuls and work.apart_bytes:
        add_s += hardware.copy_overhead_s

    piece_bytes = _piece_bytes(work, axis)
    hop_s = axis.step_s(piece_bytes, work.directions, work.rings, walks=work.walks)
    wire_s = work.chains * hop_s

    if not hardware.overlaps:
        step_s = partial_s + add_s + wire_s
    elif work.collective == "reduce_scatter":
        waiting_s = partial_s / work.dots + hop_s if work.fused else 0.0
        step_s = max(partial_s, waiting_s, wire_s) + add_s
    else:
        step_s = _beside_s(work, partial_s + add_s, wire_s)

    overlapped_s = first_s + hops * step_s
    if work.halved and hardware.overlaps:
        dots_s = partial_s + add_s
        halved_s = max(max(dots_s, wire_s / 2) + dots_s / 2, wire_s) + dots_s / 2
        overlapped_s -= step_s + dots_s - halved_s

    made_s = 0.0
    if placed.leaving:
        made_s = dots * _pieces_s(work, placed, hardware, adds=True, last=True) - summing_s
    # Blocks of all steps that are cut at once are cut before the first dots, beside the first hop.
    at_once_s = once_s = copies_at_once_s(work, axis.size, hardware)
    if at_once_s and hardware.overlaps:
        once_s = _beside_s(work, partial_s + add_s + at_once_s, wire_s) - step_s
    waited_s = _waited_s(work, placed, hardware, fetched=fetched, first_s=partial_s, wire_s=step_s - add_s)
    waited_s += _first_reads_s(work, placed, axis, max(0.0, step_s - add_s - partial_s))
    if not fetched:
        waited_s += _late_s(work, placed, axis)
    dot_s, collective_s = _as_written_s(work, axis)
    latency_s = work.chains * axis.step_s(0, work.directions, work.rings, walks=work.walks)
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
        partials_s=waited_s + at_once_s + work.columns * (first_s + hops * (partial_s + add_s) + made_s),
        hops_s=work.columns * hops * wire_s,
        hop_latency_s=work.columns * hops * latency_s,
        overlapped_s=waited_s + once_s + work.columns * (overlapped_s + made_s),
        added_bytes=_added_bytes(work, placed, axis),
    )


def _halfway_estimate(work: RingWork, axis: Axis, *, fetched: bool) -> Estimate:
    """Prices a gather whose whole shards go both ways, each half way round. Arguments as of `estimate`."""
    hardware = axis.hardware
    placed = on_chip(work, axis.size, hardware)
    copy_s = copies_s(work, axis.size, hardware, cut_out=False)
    halved = dataclasses.replace(work, piece=work.halves, halves=())
    pairs, halves = (axis.size - 1) // 2, 1 - axis.size % 2
    dots_s = [work.pieces / 2 * _pieces_s(work, placed, hardware, adds=False) + copy_s]
    stops_s = work.pieces * hardware.stops_s
    dots_s += pairs * [work.pieces * _pieces_s(work, placed, hardware, adds=True) + 2 * copy_s + stops_s]
    dots_s += halves * [work.pieces * _pieces_s(halved, placed, hardware, adds=True) + copy_s + stops_s]

    piece_bytes = _piece_bytes(work, axis)
    pair_s, half_s, latency_s = (
        work.chains * axis.step_s(times * piece_bytes, work.directions, work.rings) for times in (2, 1, 0)
    )
    wires_s = [*pairs * [pair_s], *halves * [half_s]]
    # What has furthest to go is cut in halves before its last hop.
    cut_s = halves * halving_s(work, hardware) / work.columns
    beside_s = functools.partial(_beside_s, work) if hardware.overlaps else operator.add
    besides_s = map(beside_s, dots_s, wires_s)
    ring_s = sum(besides_s) + cut_s + dots_s[-1]
    waited_s = _waited_s(work, placed, hardware, fetched=fetched, first_s=dots_s[0], wire_s=wires_s[0])
    waited_s += _first_reads_s(work, placed, axis, max(0.0, wires_s[0] - dots_s[0]))
    dot_s, collective_s = _as_written_s(work, axis)
    return Estimate(
        dot_s=dot_s,
        collective_s=collective_s,
        partials_s=waited_s + work.columns * (sum(dots_s) + cut_s),
        hops_s=work.columns * sum(wires_s),
        hop_latency_s=work.columns * len(wires_s) * latency_s,
        overlapped_s=waited_s + work.columns * ring_s,
        added_bytes=_added_bytes(work, placed, axis),
    )


def _ragged(work: RingWork, axis: Axis) -> bool:
    """Whether a TPU scatters columns that are no whole tiles, or cuts them into such pieces."""
    if axis.hardware.network != "torus" or work.collective != "reduce_scatter":
        return False
    blocks = blocks_of(work, axis.size)
    return blocks == "ragged columns" or (
        blocks == "columns" and any(piece.n % LANES for piece in work.piece)
    )


def _turns(work: RingWork, hardware: Hardware) -> bool:
    """Whether a TPU's compiler lays the products of a scatter out by columns, as they are padded less so."""
    scatters = hardware.network == "torus" and work.collective == "reduce_scatter"
    return scatters and all(by_columns(piece.m, piece.n) for piece in work.piece)


def _padded(work: RingWork, hardware: Hardware) -> RingWork:
    """The same rings, whose pieces' columns fill tiles."""
    width = hardware.matmul_tile[2]
    piece = (dataclasses.replace(each, n=-(-each.n // width) * width) for each in work.piece)
    return dataclasses.replace(work, piece=tuple(piece))


def _beside_s(work: RingWork, dots_s: float, wire_s: float) -> float:
    """Seconds of a gather's step: its dots, and the hops that run beside them.

    A compiler that places the starts puts no more dots beside a hop than it takes to last as long.
    """
    beside_s = dots_s
    if work.starts_implied:
        one_s = dots_s / (work.dots * len(work.piece))
        beside_s = min(dots_s, math.ceil(FORESEEN * wire_s / one_s) * one_s)
    return dots_s + max(0.0, wire_s - beside_s)


def _piece_bytes(work: RingWork, axis: Axis) -> float:
    """Bytes of a shard's pieces that travel at once; no fewer than the original's where nothing overlaps."""
    shard_bytes = work.shard_bytes
    if not axis.hardware.overlaps:
        shard_bytes = max(shard_bytes, work.collective_shard_bytes)
    return _largest(work, axis) * shard_bytes / (work.chains * work.columns)


def _largest(work: RingWork, axis: Axis) -> float:
    """How many times the mean the largest piece is, which sets the pace of the hops of all.

    Those of a psum's chunks take turns, and are of the mean.
    """
    if not work.pairs or work.joined or work.halves:
        return 1.0
    piece, whole = work.pairs[0]
    gathered = work.collective == "all_gather"
    if not gathered and piece.m * piece.n * work.pieces * axis.size < whole.m * whole.n:
        return 1.0
    along = _along(piece, whole) if gathered else None
    sizes = _sizes(piece, whole, along, work.pieces, axis.hardware)
    return max(size.m * size.n for _, size in sizes) / (piece.m * piece.n)


def _waited_s(
    work: RingWork, placed: OnChip, hardware: Hardware, *, fetched: bool, first_s: float, wire_s: float
) -> float:
    """Seconds before the first dot and after the last, and between those of the first step.

    Dots wait for what is held on chip, unless that is fetched beside another ring: those of several matmuls
    each for its own, which is fetched while the others' run. The hop beside the first step's dots, which take
    ``first_s``, is on its way meanwhile, and takes ``wire_s``. Results that grow on chip are brought out at
    the end.
    """
    fetch_s = 0.0
    if hardware.network == "torus" and not fetched:
        first_bytes, *later_bytes = placed.awaited_bytes
        beside_s = first_s * len(later_bytes) / (1 + len(later_bytes))
        fetch_s = first_bytes / hardware.hbm_bytes_per_s
        fetch_s += max(0.0, sum(later_bytes) / hardware.hbm_bytes_per_s - beside_s)
    waited_s = max(entering_s(work, hardware), fetch_s - max(0.0, wire_s - first_s))
    grown = zip(work.matmuls, placed.results, strict=True)
    out_s = [whole.result_bytes * grows / hardware.hbm_bytes_per_s for whole, grows in grown]
    waited_s += _written_last_s(work, placed, hardware)
    if work.dots * len(work.matmuls) == 1 and not work.halves and work.piece[0].k == work.matmuls[0].k:
        # What is there of the only result, but for the last dot's, leaves while that waits for its hop.
        return waited_s + max(0.0, out_s[0] - max(0.0, wire_s - first_s))
    # Those of all matmuls but the last leave beside the dots of the others; sums are all done at last.
    summed = any(piece.k < whole.k for piece, whole in work.pairs)
    beside_s = 0.0 if summed else first_s * (len(out_s) - 1) / len(out_s)
    return waited_s + out_s[-1] + max(0.0, sum(out_s[:-1]) - beside_s)


def _written_last_s(work: RingWork, placed: OnChip, hardware: Hardware) -> float:
    """By how much longer the dot takes that puts the last part into a gather's only result, grown on chip.

    The other parts have left by then, and it writes to main memory (v6e).
    """
    if placed.results != (True,) or work.summed:
        return 0.0
    (piece, whole), (lhs, rhs) = work.pairs[0], placed.near[0]
    along: Along | None = "rows" if piece.m < whole.m else None
    dot_s = functools.partial(matmul_s, piece, hardware, lhs_on_chip=lhs, rhs_on_chip=rhs, placed=along)
    return dot_s() - dot_s(result_on_chip=True)


def _first_reads_s(work: RingWork, placed: OnChip, axis: Axis, spare_s: float) -> float:
    """By how much the first step's dots of a gather take longer, which read main memory.

    A device's own shard is brought on chip beside the first dot, which reads it where it is, unless it is cut
    into pieces. What later ones of several matmuls share is there in time, but if it is little: then it comes
    later, and the dots of two steps read it where it is (see `LITTLE`). What of this is hidden by the
    ``spare_s`` by which a step's hops outlast its dots is not counted.
    """
    hardware = axis.hardware
    if work.collective != "all_gather" or hardware.network != "torus":
        return 0.0
    # Nor where each step's first dot reads its shard so anyway.
    near_at_once = placed.arriving is not None or entering_s(work, hardware) > 0
    own_s = again_s = 0.0
    each = zip(work.pairs, placed.near, placed.results, strict=True)
    for number, ((piece, whole), (lhs, rhs), grows) in enumerate(each):
        sent = sent_side(work, axis.size, number)
        # Beside another ring's dots all of it is fetched before.
        awaited_bytes = placed.awaited_bytes[number] if 0 < number < len(placed.awaited_bytes) else 0.0
        little = hardware.receives_on_chip and LITTLE[0] <= awaited_bytes < LITTLE[1]
        if number and not little:
            continue
        along = _along(piece, whole) if not work.joined else None
        dot_s = functools.partial(matmul_s, piece, hardware, result_on_chip=grows, placed=along)
        near_s = dot_s(lhs_on_chip=lhs, rhs_on_chip=rhs)
        if not near_at_once:
            own_s += dot_s(lhs_on_chip=lhs and sent != "lhs", rhs_on_chip=rhs and sent != "rhs") - near_s
        if little:
            again_s += dot_s(lhs_on_chip=lhs and sent == "lhs", rhs_on_chip=rhs and sent == "rhs") - near_s
    return max(0.0, own_s + work.dots * again_s - spare_s) + max(0.0, again_s - spare_s)


def _late_s(work: RingWork, placed: OnChip, axis: Axis) -> float:
    """By how much a scatter's dots take longer while an operand of which each takes a strip is fetched."""
    if work.collective != "reduce_scatter" or not any(placed.awaited_bytes):
        return 0.0
    dots, total_s = axis.size * work.dots, 0.0
    for number, ((piece, whole), near) in enumerate(zip(work.pairs, placed.near, strict=True)):
        if piece.m < whole.m and piece.n < whole.n:
            side = strip_side(work, axis.size, number)
            if near[side == "rhs"]:
                held_bytes = side_bytes(whole, side)
                total_s += late_s(piece, side, held_bytes, dots, axis.hardware, waited_bytes=held_bytes)
    return total_s


def _as_written_s(work: RingWork, axis: Axis) -> tuple[float, float]:
    """Seconds of the original dots, and of the original collective."""
    if work.sums_whole:
        whole_s = axis.all_reduce_s
    else:
        whole_s = axis.all_gather_s if work.collective == "all_gather" else axis.reduce_scatter_s
    collective_s = whole_s(axis.size * work.collective_shard_bytes)
    copies_s = copies_as_written_s(work, axis)
    dots = dots_as_written(work, axis, collective_s + copies_s)
    return copies_s + sum((dot.seconds for dot in dots), 0.0), collective_s


def copies_as_written_s(work: RingWork, axis: Axis) -> float:
    """Seconds of rounding what the original gather moves, and of laying out what it brings."""
    if work.collective != "all_gather":
        return 0.0
    rounded_bytes = work.collective_shard_bytes if work.collective_rounds else 0.0
    return rounding_s(rounded_bytes, axis.hardware) + gathered_between_tiles_s(work, axis.size, axis.hardware)


def dots_as_written(work: RingWork, axis: Axis, collective_s: float) -> tuple[Whole, ...]:
    """The original dots, after a gather and its copies, or before a scatter, that take so long.

    All dots of a scatter's sum but the first read the sum of those before.
    """
    hardware = axis.hardware
    if work.collective == "all_gather":
        sent = sent_side(work, axis.size, 0) if work.pairs else None
        return wholes(work.written or work.matmuls, hardware, collective_s, sent)
    dots = wholes(work.matmuls, hardware, 0.0, summed=len(work.matmuls) == 1)
    summing_s = (0.0, *(_summing_s(matmul, hardware) for matmul in work.matmuls[1:]))
    return tuple(
        dataclasses.replace(dot, seconds=dot.seconds + s) for dot, s in zip(dots, summing_s, strict=True)
    )


def _summing_s(matmul: Matmul, hardware: Hardware) -> float:
    """What it takes a dot to read the sum of those before, as written."""
    return matmul_s(matmul, hardware, accumulator=matmul.result_dtype) - matmul_s(matmul, hardware)


def _added_bytes(work: RingWork, placed: OnChip, axis: Axis) -> float:
    """Bytes of temporary memory that the rings need more than the collective."""
    return _buffers_bytes(work, placed, axis.size, axis.hardware) - axis.size * work.collective_shard_bytes


def _buffers_bytes(work: RingWork, placed: OnChip, axis_size: int, hardware: Hardware) -> float:
    """Bytes of main memory that the rings need beside operands and results.

    Shards that come and go; a gather's sums until they are the result, those of one column at a time; and
    blocks that are cut out of an operand before their dots: one of each of the axis's devices where all
    columns need them, else that of the next step beside that of this one.
    """
    sums_bytes = cut_bytes = 0.0
    for number, (piece, whole) in enumerate(work.pairs):
        if work.collective == "all_gather" and piece.k < whole.k:
            sums_bytes += whole.batch * whole.m * whole.n * dtype_bytes(work.accumulator)
        if work.cut != "dot":
            cut_bytes += work.dots * side_bytes(piece, cut_side(work, axis_size, number))
    sums_bytes /= work.columns
    if sums_stay(work, sums_bytes / work.accumulators, placed.held_bytes, hardware):
        sums_bytes = 0.0
    blocks = axis_size if work.columns > 1 else 2
    return _shards_bytes(work, axis_size, hardware) + sums_bytes + blocks * cut_bytes


def _shards_bytes(work: RingWork, axis_size: int, hardware: Hardware) -> float:
    """Bytes of main memory of the shards of one column that are there at once."""
    hops = axis_size - 1
    # The first has gone when the last arrives; whole shards that go both ways are there twice, one in halves.
    most = SUMMED_SHARDS_HELD if work.summed and work.columns == 1 else SHARDS_HELD
    held = min(axis_size, 2 * SHARDS_HELD) if work.halves else min(hops - (hops > 2), most)
    held_bytes = held * work.shard_bytes / work.columns
    if work.collective != "all_gather" or work.joined or hardware.network != "torus":
        return held_bytes
    near_bytes = SHARDS_ON_CHIP * hardware.on_chip_bytes
    if held_bytes <= near_bytes and (hardware.receives_on_chip or hardware.keeps_sums):
        return 0.0
    return held_bytes - near_bytes if hardware.receives_on_chip else held_bytes


def _pieces_s(
    work: RingWork,
    placed: OnChip,
    hardware: Hardware,
    *,
    adds: bool,
    last: bool = False,
    by_columns: bool = False,
) -> float:
    """Seconds of one piece's dots: in the first step, or in one that adds to sums, where there are any.

    Args:
      work: the rings.
      placed: what is on chip.
      hardware: where they run.
      adds: whether this step adds to sums.
      last: whether it makes a gather's results of them.
      by_columns: whether the products are laid out by columns, to be turned round.
    """
    gathered = work.collective == "all_gather"
    summed = [piece.k < whole.k if gathered else work.fused for piece, whole in work.pairs]
    width = dtype_bytes(work.accumulator)
    sums = zip(work.piece, summed, strict=True)
    sum_bytes = sum(piece.batch * piece.m * piece.n * width for piece, is_sum in sums if is_sum)
    sum_before, sum_after = sum_near(work, sum_bytes, placed.held_bytes, hardware)
    total_s = 0.0
    each = zip(work.pairs, summed, placed.near, placed.results, strict=True)
    for number, ((mean, whole), is_sum, (lhs, rhs), grows) in enumerate(each):
        is_sum = is_sum and (adds or gathered)
        added, made = adds and is_sum, last or not is_sum
        along = _along(mean, whole) if gathered and not work.joined and made else None
        stays = grows if made else sum_after
        for share, piece in _sizes(mean, whole, along, 1 if work.halves else work.pieces, hardware):
            if is_sum:
                piece = dataclasses.replace(piece, out_dtype=whole.result_dtype if last else work.accumulator)
            elif adds and _adds_apart(work, hardware):
                piece, stays = dataclasses.replace(piece, out_dtype="float32"), _made_near(piece, hardware)
            dot_s = functools.partial(
                matmul_s,
                piece,
                hardware,
                result_on_chip=stays,
                accumulator=work.accumulator if added and not hardware.lone_matmuls else None,
                accumulator_on_chip=added and sum_before,
                placed=along,
                by_columns=by_columns,
            )
            near_s = dot_s(lhs_on_chip=lhs, rhs_on_chip=rhs)
            if placed.arriving and not number:
                far_s = dot_s(
                    lhs_on_chip=lhs and placed.arriving != "lhs", rhs_on_chip=rhs and placed.arriving != "rhs"
                )
                near_s += (far_s - near_s) / work.dots
            total_s += share * near_s
        if added:
            total_s += adding_s(mean.batch * mean.m * mean.n * width, hardware)
    return total_s


def _adds_apart(work: RingWork, hardware: Hardware) -> bool:
    """Whether a TPU adds a scatter's products up apart from its dots, which make them in float32."""
    apart = work.collective == "reduce_scatter" and not work.fused and hardware.adding > 0
    return apart and all(dtype_bytes(piece.result_dtype) < FLOAT32_BYTES for piece in work.piece)


def _made_near(piece: Matmul, hardware: Hardware) -> bool:
    """Whether a product that is added up apart stays on chip until then."""
    product_bytes = FLOAT32_BYTES * piece.batch * piece.m * piece.n
    return hardware.results_on_chip > 0 and product_bytes <= beside_bytes(0, hardware)


def _along(piece: Matmul, whole: Matmul) -> Along | None:
    """Where pieces of a gather's result are put into the whole."""
    return "rows" if piece.m < whole.m else "columns" if piece.n < whole.n else None


def _sizes(
    mean: Matmul, whole: Matmul, along: Along | None, pieces: int, hardware: Hardware
) -> tuple[tuple[float, Matmul], ...]:
    """The dots of pieces that are not all of the mean size: how many times each, for one, and what.

    On TPU pieces are of whole tiles where they can be, and those whose results are put into place have
    windows: see `cost_model.tile.piece_edges`. Where columns are cut as well the mean lies between two sizes.
    """
    if hardware.network != "torus":
        return ((1.0, mean),)
    if mean.n < whole.n and mean.n % LANES and whole.n % LANES == 0 and mean.n > LANES:
        sizes = _even(mean.n, pieces, LANES, placed=along == "columns")
        return tuple((share, dataclasses.replace(mean, n=n)) for share, n in sizes)
    if mean.m < whole.m and (mean.m % SUBLANES or along == "rows") and mean.m > SUBLANES:
        rows = tile_rows(dtype_bytes(mean.lhs_dtype or mean.dtype))
        sizes = _even(mean.m, pieces, rows, placed=along == "rows")
        return tuple((share, dataclasses.replace(mean, m=m)) for share, m in sizes)
    return ((1.0, mean),)


@functools.lru_cache
def _even(mean: int, pieces: int, grain: int, *, placed: bool) -> tuple[tuple[float, int], ...]:
    """The sizes of pieces of this mean, and the share of the pieces that each is of."""
    unit = mean * pieces
    if unit % min(grain, LANES if grain >= LANES else SUBLANES):
        fewer, share = mean // grain * grain, mean % grain / grain
        return ((1.0 - share, fewer), (share, fewer + grain)) if fewer else ((1.0, mean),)
    edges = piece_edges(unit, pieces, grain, placed=placed)
    sizes = [last - first for first, last in itertools.pairwise(edges)]
    return tuple((sizes.count(size) / pieces, size) for size in dict.fromkeys(sizes))
