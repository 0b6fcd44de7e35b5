"""What rings do on one device: the collective that they replace, and the partial dots of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from cost_model.axis import Directions
from cost_model.dtypes import dtype_bytes
from cost_model.matmul import Matmul
from cost_model.on_chip import OTHER, SIDES, Side, side_bytes
from cost_model.tile import LANES, LEAST_WINDOW_ROWS, SUBLANES, tile_rows

Cut = Literal["dot", "apart", "early"]
"""How blocks of an operand are cut out of the whole: by the dot that reads them, or copied right before it,
or before the hop that the dot hides."""

Blocks = Literal["rows", "columns", "ragged columns"]
"""What of a sum a device has in the end; ragged are columns that are no whole tiles."""


@dataclass(frozen=True, slots=True)
class Before:
    """What the ring before another in a program has on chip, of TPUs.

    Attributes:
      on_chip_bytes: of operands that all its dots share; None where there is no ring before.
      stays: whether they are read again later, and stay there meanwhile.
    """

    on_chip_bytes: float | None = None
    stays: bool = False


NOTHING_BEFORE: Final = Before()


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWork:
    """What one device does at a site: the collective with its dots, and one step of rings in their place.

    Attributes:
      collective: which collective the rings replace.
      shard_bytes: bytes of one whole shard as the rings send it.
      collective_shard_bytes: bytes per shard of the original collective, more when it moves a wider dtype.
      matmuls: the original dots, whole.
      piece: the dots of one piece of one step, in the order of `matmuls`.
      sides: of each matmul the operand with the gathered or the scattered dim: what travels of a gather, and
        what a scatter's dots take blocks of. None, or without any: as far as the sizes tell.
      directions: ways round that shards travel: 1, or 2 at once.
      rings: rings with links of their own.
      walks: whether they are the axis's walks, in place of rings along its orders.
      chains: pieces of a shard per ring and direction. A step has directions · rings · chains pieces.
      columns: how many such rings of steps run one after the other, each with its part of every shard.
      joined: whether the pieces of a step go into one partial dot; then `piece` is that of all of them.
      halves: where whole shards of a gather go both ways, each half way round, the dots of one piece of what
        has furthest to go, of which a half comes from each side; `piece` is twice that. Else none.
      halved: whether what comes last of a gather comes in halves, one after the other.
      cut: how blocks of what does not travel come to the dots of a scatter, and to those of a gather that are
        cut along K.
      cut_first: whether blocks that are cut before their dots are cut before the first hop, those of all
        steps, and have been.
      accumulator: dtype of the partial sums that dots add to, where they do: those of a gather whose piece is
        cut along K, and those of a fused scatter, which are as they travel.
      accumulators: to how many arrays the pieces of a gather add: all to one, or each to its own.
      fused: whether the additions of a scatter ring are part of its dots, which then wait for the sums.
      apart_bytes: bytes that are read and written beside the dots of one step: additions that are not part of
        them, blocks copied for them.
      hands_out_gathered: whether the rings also assemble the gathered array, for other uses.
      rounds, collective_rounds: whether shards of float32 are rounded to bfloat16 before rings send them, and
        before the original collective does.
      written: the original dots as they read what the collective has rounded, where rings do not round it;
        none: `matmuls`.
      sums_whole: whether the original is an all_reduce of which each device keeps its block; see
        `cost_model.offloaded`.
      starts_implied: whether a TPU's compiler places the starts of a gather's hops, by how long it takes them
        to be; else each is started before the dots of its step.
      before: what the ring before it in its program has on chip.

    Raises:
      ValueError: a count is below 1, bytes are negative, or there is not one piece to each matmul.
    """

    collective: Literal["all_gather", "reduce_scatter"]
    shard_bytes: float
    collective_shard_bytes: float
    matmuls: tuple[Matmul, ...]
    piece: tuple[Matmul, ...]
    sides: tuple[Side | None, ...] = ()
    directions: Directions = 1
    rings: int = 1
    walks: bool = False
    chains: int = 1
    columns: int = 1
    joined: bool = False
    halves: tuple[Matmul, ...] = ()
    halved: bool = False
    cut: Cut = "dot"
    cut_first: bool = False
    accumulator: str = "float32"
    accumulators: int = 1
    fused: bool = True
    apart_bytes: float = 0
    hands_out_gathered: bool = False
    rounds: bool = False
    collective_rounds: bool = False
    written: tuple[Matmul, ...] = ()
    sums_whole: bool = False
    starts_implied: bool = False
    before: Before = NOTHING_BEFORE

    def __post_init__(self) -> None:
        if self.collective not in ("all_gather", "reduce_scatter"):
            raise ValueError(f"collective must be 'all_gather' or 'reduce_scatter', got {self.collective!r}")
        if self.directions not in (1, 2) or min(self.rings, self.chains, self.columns, self.accumulators) < 1:
            raise ValueError(f"directions are 1 or 2, rings and other counts at least 1, got {self}")
        before_bytes = self.before.on_chip_bytes or 0
        if min(self.shard_bytes, self.collective_shard_bytes, self.apart_bytes, before_bytes) < 0:
            raise ValueError(f"bytes must not be negative, got {self}")
        if len(self.piece) != len(self.matmuls):
            raise ValueError(f"every matmul needs its piece, got {self}")
        if self.written and len(self.written) != len(self.matmuls):
            raise ValueError(f"every matmul is written, or none, got {self}")
        if self.sides and len(self.sides) != len(self.matmuls):
            raise ValueError(f"every matmul has a side, or none is told, got {self}")
        if self.halves and (
            len(self.halves) != len(self.matmuls)
            or self.directions == 1
            or self.joined
            or self.collective == "reduce_scatter"
        ):
            raise ValueError(f"half way round go whole shards of a gather, both ways, not {self}")

    @property
    def pieces(self) -> int:
        """Pieces of a shard, and so of a step."""
        return self.directions * self.rings * self.chains

    @property
    def dots(self) -> int:
        """Partial dots that a step runs of each matmul."""
        return 1 if self.joined else self.pieces

    @property
    def summed(self) -> bool:
        """Whether the dots of a gather all add to sums, as they contract a part of what is gathered."""
        return self.collective == "all_gather" and all(piece.k < whole.k for piece, whole in self.pairs)

    @property
    def pairs(self) -> tuple[tuple[Matmul, Matmul], ...]:
        """Of each matmul its piece and the whole."""
        return tuple(zip(self.piece, self.matmuls, strict=True))


def cut_side(work: RingWork, axis_size: int, number: int) -> Side | None:
    """Which operand of a matmul does not travel, and is read block by block; None where none or both are."""
    piece, whole = work.piece[number], work.matmuls[number]
    if piece.batch < whole.batch:
        return None
    if work.collective == "all_gather":
        return None if piece.k == whole.k else OTHER[sent_side(work, axis_size, number)]
    if piece == whole:
        return None
    if work.sides and (side := work.sides[number]) is not None:
        return side
    return "lhs" if piece.m / whole.m <= piece.n / whole.n else "rhs"


def sent_side(work: RingWork, axis_size: int, number: int) -> Side:
    """Which operand of a gather's dot travels."""
    if work.sides and (side := work.sides[number]) is not None:
        return side
    piece, whole = work.piece[number], work.matmuls[number]
    shared = piece.stationary(whole)
    if shared is not None:
        return OTHER[shared]
    gathered_bytes = axis_size * work.shard_bytes
    return min(SIDES, key=lambda side: abs(side_bytes(whole, side) - gathered_bytes))


def strip_side(work: RingWork, axis_size: int, number: int) -> Side:
    """Which operand of a scatter's dot its pieces take strips of, where they are cut across."""
    return OTHER[cut_side(work, axis_size, number) or "lhs"]


def begins_at_tiles(work: RingWork, axis_size: int) -> bool:
    """Whether the blocks of rows that a scatter's dots cut out, one a device, begin where a tile does."""
    return all(
        (whole.n if cut_side(work, axis_size, number) == "rhs" else whole.m)
        % (axis_size * _rows_of_tile(whole.dtype))
        == 0
        for number, whole in enumerate(work.matmuls)
    )


def _rows_of_tile(dtype: str) -> int:
    """Rows of a tile: half as many of float32 as of elements of two bytes."""
    itemsize = dtype_bytes(dtype)
    return SUBLANES if itemsize > 2 else tile_rows(itemsize)


def blocks_of(work: RingWork, axis_size: int) -> Blocks:
    """What of a sum a scatter gives each device; of several dots' what the first's is."""
    for number, whole in enumerate(work.matmuls):
        if cut_side(work, axis_size, number) == "rhs":
            return "ragged columns" if whole.n % (axis_size * LANES) else "columns"
    return "rows"


def few_rows_between_tiles(work: RingWork, axis_size: int) -> bool:
    """Whether a scatter's dots take parts of both operands, and of one few rows that begin within a tile."""
    if work.collective != "reduce_scatter":
        return False
    across = any(piece.m < whole.m and piece.n < whole.n for piece, whole in work.pairs)
    few = any(min(piece.m, piece.n) < LEAST_WINDOW_ROWS for piece in work.piece)
    return across and few and not begins_at_tiles(work, axis_size)
