"""Collectives that run beside the dots by themselves: pieces of them, in turn, and their price.

Of TPU7x the SparseCores run all_gathers, all_reduces and reduce_scatters (`Hardware.offloaded`); on v5e the
compiler makes all_gathers a part of the dots beside them; on GPUs they are kernels on a stream of their own.
One that comes before all dots, or after them, still has nothing to hide behind; in pieces each has the dots
of another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from cost_model.axis import Axis
from cost_model.dtypes import dtype_bytes, parse_dtype
from cost_model.hardware import Hardware, Offloaded
from cost_model.in_turn import in_turn_estimate
from cost_model.matmul import Matmul
from cost_model.on_chip import OTHER, Side, wholes_s
from cost_model.pipeline import copied_sum_s
from cost_model.ring import Estimate
from cost_model.ring_copies import rounding_s
from cost_model.windows import Along

Beside = Offloaded | Literal["all_to_all"]

IN_TURN: Final = range(8, 17)
"""Of how many pieces one tries the least and the most that are equal: nothing hides the first one's
all_gather, or the last one's all_reduce or reduce_scatter."""

FEW_IN_TURN: Final = (2, 4, 8)
"""The same of a gather's rows: what pieces of them become is placed by copies, and short dots take long."""

FEW_KERNELS: Final = (2, 4, 8)
"""The same of GPUs, whose collectives and matmuls are kernels that each take a while to start."""

MOST_DOTS: Final = 2
"""Dots of a gather's piece of rows beside which the compiler surely begins the next all_gather at once."""

LATE: Final = 1.12
"""How many times longer than else pieces of rows with more dots are taken to last.

Of 13 chains of three dots (7x) four took 12 to 23 % longer than priced, where the compiler began all_gathers
before the last dots only, and the others up to 3 %: this lies between the two.
"""

LEAST_ROWS: Final = 128
"""Of such multiples are a psum's pieces of rows."""

CUTTING: Final = 1.3
"""Times as long as reading and writing them once takes what the TPU compiler makes of cutting what travels
into pieces, all of them before the first goes; those of rows were seen to take 1.5 to 2 times as long (v4,
v5p, v6e). Placing pieces of rows takes just reading and writing them (7x)."""

COPYING: Final = 0.03
"""Up to which part of a strip's dots, at the peak, it may take to copy what the strip has of their operand.

Of a part of the whole, windows fit worse: of [65536,3072]·[3072,1536] dots took 15 % longer on v5p and 13 %
on v6e, of [16384,3584]·[3584,1024] 17 and 8 %, and of [4096,4096]·[4096,1024] no longer.
"""

NEAR_PIECES: Final = 10
"""Up to how many pieces of a product on chip are surely there too.

On v5e 8 and 10 pieces of two products took no main memory; of 16, now of rows and now of columns, three did.
"""


def is_offloaded(collective: Offloaded, axis: Axis) -> bool:
    """Whether this collective of these devices runs beside dots: not between slices, or where none does."""
    return collective in axis.hardware.offloaded and axis.hardware.overlaps and axis.within_domain


def runs_beside(collective: Beside, axis: Axis) -> bool:
    """Whether the compiler runs this collective beside dots that do not wait for it.

    On GPUs each is a kernel on a stream of its own (of an all_to_all, an all_reduce, all_gathers and
    reduce_scatters compiled for H100s, jax 0.12).
    """
    if axis.hardware.lone_matmuls:
        return axis.hardware.overlaps
    return collective != "all_to_all" and is_offloaded(collective, axis)


def sums_whole(dtype: str, axis: Axis) -> bool:
    """Whether a reduce_scatter of this type is an all_reduce, of which each device keeps its block.

    SparseCores make one of integers (of 7x: 2.00 times as long in 3 of 3 chains; floats take as priced).
    """
    by_cores = axis.hardware.network == "torus" and is_offloaded("reduce_scatter", axis)
    return by_cores and parse_dtype(dtype)[0] == "int"


def hides_rows(hardware: Hardware) -> bool:
    """Whether pieces of rows that are gathered have the dots before them to hide behind.

    Where the dots themselves run the all_gathers, those that place rows run few of them (v5e: 3 to 33 %
    slower than priced, and slower than rings).
    """
    return not hardware.dots_gather


def cuts_apart(rows: int, dtype: str, hardware: Hardware) -> bool:
    """Whether strips of so many rows of a sum are made of a copy of what they need: see `COPYING`."""
    if not hardware.strips_apart:
        return False
    return 2 * dtype_bytes(dtype) / hardware.hbm_bytes_per_s <= COPYING * 2 * rows / hardware.flops_for(dtype)


def counts(size: int, grain: int, hardware: Hardware, *, few: bool = False) -> Iterator[int]:
    """Into how many equal pieces, of multiples of `grain`, a dim of so many elements is worth cutting."""
    wanted = FEW_KERNELS if hardware.lone_matmuls else FEW_IN_TURN if few else IN_TURN
    equal = [pieces for pieces in wanted if size % (pieces * grain) == 0]
    yield from equal if hardware.lone_matmuls or few else dict.fromkeys((*equal[:1], *equal[-1:]))


def in_words(collective: Offloaded, pieces: int, *, across: bool) -> str:
    """How pieces go, as forms and schedules say it."""
    said = f"1 {collective}" if pieces == 1 else f"{pieces} {collective}s in turn"
    return f"{said}, cut across" if across else said


@dataclass(frozen=True, slots=True, kw_only=True)
class InTurn:
    """Pieces of a collective that go one after the other.

    Attributes:
      collective: by which pieces go.
      pieces: how many.
      across: whether they are strips along another dim than the gathered one, or a psum's columns.
      moved_bytes: of the whole array.
      matmuls: the dots.
      piece: one piece of each.
      hands_out_gathered: whether the gathered array is also needed whole. It is of no strips.
      rounds: whether shards of float32 are rounded to bfloat16 before they are gathered.
    """

    collective: Offloaded
    pieces: int
    across: bool
    moved_bytes: float
    matmuls: tuple[Matmul, ...]
    piece: tuple[Matmul, ...]
    hands_out_gathered: bool = False
    rounds: bool = False

    @property
    def gathers(self) -> bool:
        """Whether it is an all_gather, that comes before the dots."""
        return self.collective == "all_gather"


def offloaded_estimate(work: InTurn, as_written: Estimate, axis: Axis) -> Estimate:
    """Prices pieces that go one after the other.

    Pieces of what is gathered are cut out before. A TPU's dots make strips in their place in the result; on
    GPUs those are put together after. Pieces of rows are placed one by one. Of a sum each strip is cut out,
    and each piece placed, by a copy of its own; where matmuls are a library's, what a piece has of an operand
    is copied for it, and all pieces are put together at the end. Pieces of rows are placed too
    where what is gathered is needed whole.

    Args:
      work: the pieces.
      as_written: a price of the chain, for its times as it stands.
      axis: the devices.
    """
    hardware, gathers, pieces = axis.hardware, work.gathers, work.pieces
    summed_whole = sums_whole(work.matmuls[0].result_dtype, axis)
    whole_s = {
        "all_gather": axis.all_gather_s,
        "all_reduce": axis.all_reduce_s,
        "reduce_scatter": axis.all_reduce_s if summed_whole else axis.reduce_scatter_s,
    }[work.collective]
    hop_s = whole_s(work.moved_bytes / pieces)
    copies = _copies(work, axis)
    sent = _sent_side(work.piece[0], work.matmuls[0]) if gathers else None
    shared = work.piece[0].stationary(work.matmuls[0])

    def piece_s(before_s: float, again: Side | None = None) -> float:
        """Seconds of a piece's dots, before which something else runs for so long."""
        return copies.cut_s + wholes_s(work.piece, hardware, before_s, sent, _along(work), again)

    priced = in_turn_estimate(
        gathers=gathers,
        dot_s=as_written.dot_s,
        collective_s=as_written.collective_s,
        own_s=0.0,
        pieces_s=[piece_s(hop_s if gathers else 0.0), *[piece_s(hop_s, shared)] * (pieces - 1)],
        hops_s=[hop_s] * pieces,
        latency_s=pieces * whole_s(0.0),
        hardware=hardware,
        before_s=copies.before_s,
        placing_s=[copies.place_s] * pieces,
        after_s=copies.after_s,
        added_bytes=copies.added_bytes,
    )
    if gathers and not work.across and len(work.matmuls) > MOST_DOTS and not hardware.lone_matmuls:
        return dataclasses.replace(priced, overlapped_s=LATE * priced.overlapped_s)
    return priced


def _along(work: InTurn) -> Along | None:
    """Where the dots of a piece put their strips of the results; None where these are put there by copies."""
    if not (work.gathers and work.across):
        return None
    return "rows" if work.piece[0].m < work.matmuls[0].m else "columns"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """What is copied beside the dots and the collectives.

    Attributes:
      added_bytes: of temporary memory, more than the collective needs as written.
      before_s: before the first collective.
      cut_s: before each piece's dots.
      place_s: after them, or when what became of their result is there.
      after_s: when all else is done.
    """

    added_bytes: float
    before_s: float = 0.0
    cut_s: float = 0.0
    place_s: float = 0.0
    after_s: float = 0.0


def _copies(work: InTurn, axis: Axis) -> _Copies:
    """The copies of pieces that go one after the other."""
    hardware = axis.hardware

    def copied_s(size: float, slowness: float = 1.0) -> float:
        return slowness * 2 * size / hardware.hbm_bytes_per_s

    results_bytes = sum(matmul.result_bytes for matmul in work.matmuls)
    if work.collective == "reduce_scatter":
        results_bytes /= axis.size
    held_bytes = min(1.0, 2 / work.pieces) * work.moved_bytes
    added_bytes = held_bytes - work.moved_bytes
    # What is needed whole counts as a result, as with rings; XLA:GPU needs memory for it and for the pieces.
    whole_bytes = work.moved_bytes if work.hands_out_gathered else 0.0
    if hardware.lone_matmuls:
        added_bytes += whole_bytes
    overhead_s = hardware.copy_overhead_s
    if not work.gathers and hardware.lone_matmuls:
        # A GPU's all_reduce adds up in place.
        in_place = work.collective == "all_reduce"
        return _Copies(
            added_bytes=(held_bytes if in_place else added_bytes) + results_bytes,
            cut_s=overhead_s + copied_s(_cut_bytes(work.piece, work.matmuls)),
            after_s=overhead_s + copied_s(results_bytes),
        )
    if not work.gathers:
        piece_bytes = results_bytes / work.pieces
        place_s = (
            copied_sum_s(piece_bytes, dtype_bytes(work.matmuls[0].result_dtype), axis)
            if work.collective == "all_reduce"
            else copied_s(piece_bytes)
        )
        (piece, *_), (whole, *_) = work.piece, work.matmuls
        if work.collective == "all_reduce" and _is_near(results_bytes, hardware):
            added_bytes = held_bytes if work.pieces > NEAR_PIECES else 0.0
        apart = work.across and cuts_apart(_kept_rows(piece, whole), whole.dtype, hardware)
        return _Copies(
            added_bytes=added_bytes,
            cut_s=(overhead_s if work.across and work.collective == "all_reduce" else 0.0)
            + (copied_s(_cut_bytes(work.piece, work.matmuls)) if apart else 0.0),
            place_s=place_s,
        )
    before_s = copied_s(work.moved_bytes / axis.size, CUTTING if hardware.network == "torus" else 1.0)
    if work.rounds:
        before_s += rounding_s(work.moved_bytes / axis.size, hardware)
    if not work.across:
        placed = len(work.matmuls) + work.hands_out_gathered
        started_s = placed * overhead_s if hardware.lone_matmuls else 0.0
        product_bytes = results_bytes / work.pieces
        on_chip = hardware.network == "torus" and product_bytes <= hardware.on_chip_bytes
        if on_chip and len(work.matmuls) == 1:
            product_bytes = 0.0  # it stays there until it is placed
        return _Copies(
            added_bytes=added_bytes + product_bytes,
            before_s=before_s if hardware.network == "torus" and work.pieces > 1 else 0.0,
            place_s=started_s + copied_s((results_bytes + whole_bytes) / work.pieces),
        )
    added_bytes += work.moved_bytes / axis.size
    if hardware.network == "torus":
        return _Copies(added_bytes=added_bytes, before_s=before_s)
    return _Copies(
        added_bytes=added_bytes + results_bytes, before_s=before_s, after_s=copied_s(results_bytes)
    )


def _is_near(product_bytes: float, hardware: Hardware) -> bool:
    """Whether a product whose sum is wanted lies on chip as written, so that it takes no main memory.

    On v5e one of 67 or 84 MB does, and one of 168 MB does not. On v5p, v6e and 7x none does.
    """
    return hardware.places_slowly and product_bytes <= hardware.results_on_chip * hardware.on_chip_bytes


def _kept_rows(piece: Matmul, whole: Matmul) -> int:
    """Rows of a strip of a product, whichever operand it has a part of."""
    return piece.batch * (piece.m if piece.m == whole.m else piece.n)


def _cut_bytes(piece: tuple[Matmul, ...], matmuls: tuple[Matmul, ...]) -> float:
    """Bytes of the operands of which a piece has a part."""
    return sum(
        mine
        for part, whole in zip(piece, matmuls, strict=True)
        for mine, all_of_it in ((part.lhs_bytes, whole.lhs_bytes), (part.rhs_bytes, whole.rhs_bytes))
        if mine < all_of_it
    )


def _sent_side(piece: Matmul, whole: Matmul) -> Side | None:
    """The operand that travels; None of a batch, whose matrices were seen to take no longer for it."""
    shared = piece.stationary(whole)
    return None if shared is None or whole.batch > 1 else OTHER[shared]
