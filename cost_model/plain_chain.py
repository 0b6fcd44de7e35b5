"""A collective with its dots, known by pattern, sizes and dtype alone, and its price as rings."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal, Protocol, get_args

from cost_model.axis import Axis, Directions
from cost_model.dtypes import dtype_bytes, parse_dtype
from cost_model.exchange import exchange_estimate
from cost_model.hardware import Hardware
from cost_model.matmul import Matmul
from cost_model.offloaded import (
    LEAST_ROWS,
    InTurn,
    counts,
    hides_rows,
    in_words,
    is_offloaded,
    offloaded_estimate,
    sums_whole,
)
from cost_model.pipeline import gather_after, pipeline_estimate
from cost_model.ring import Estimate, estimate
from cost_model.ring_copies import between_tiles_bytes
from cost_model.ring_work import Cut, RingWork
from cost_model.tile import LANES, tile_rows

Pattern = Literal["all_gather_dot", "dot_reduce_scatter", "dot_psum", "all_to_all_dot", "dot_all_to_all"]
PATTERNS: Final[tuple[Pattern, ...]] = get_args(Pattern)
Dim = Literal["batch", "m", "k", "n"]

MOST_PIECES: Final = 4
"""With more hops in flight at once the TPU compiler gives up; the GPU compiler with more than one."""

COLUMNS: Final = (1, 2, 4, 8, 16)
"""Into how many columns a gather on a contracting dim may be cut, and a psum into chunks."""

LEAST_ROUNDED: Final = 512
"""Rows, columns and depth of a block from which on all its pieces are surely the matrix unit's."""

LONGEST_UNROLLED: Final = 24
"""Devices on the longest axis whose ring is unrolled: compile time grows faster than the ring."""

LEAST_COLUMN: Final = 256
"""Elements below which a column makes a matmul too narrow for the matrix unit."""


def surely_rounds(block: Matmul) -> bool:
    """Whether a TPU's matrix unit, and no other, multiplies such float32 blocks and their pieces."""
    whole = block.dtype == block.result_dtype == "float32"
    return whole and min(block.m, block.k, block.n) >= LEAST_ROUNDED


@dataclass(frozen=True, slots=True)
class PlainDot:
    """A dot of a chain, with the sizes that one device computes before the rewrite.

    Attributes:
      matmul: the whole dot.
      cut: the dim of it that is gathered or scattered: one block of it is one ring step's.
      apart: whether the blocks of a scatter's operand do not lie together in memory, so that each is copied
        before its dot; None: as in `[m, k] · [k, n]`, where those of n do not.
    """

    matmul: Matmul
    cut: Dim
    apart: bool | None = None

    @property
    def copied_bytes(self) -> float:
        """Bytes of the blocks that are copied before a scatter ring's dots."""
        if not (self.cut == "n" if self.apart is None else self.apart):
            return 0.0
        of = self.matmul
        return of.batch * of.k * (of.m if self.cut == "m" else of.n) * dtype_bytes(of.dtype)

    def piece(self, share: Fraction, second: tuple[Dim, Fraction] | None = None) -> Matmul:
        """The dot on a share of the cut dim, and perhaps of a second one, sizes rounded up."""
        sizes = {self.cut: math.ceil(getattr(self.matmul, self.cut) * share)}
        if second is not None:
            sizes[second[0]] = math.ceil(getattr(self.matmul, second[0]) * second[1])
        return dataclasses.replace(self.matmul, **sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainChain:
    """One collective with its dots.

    Attributes:
      pattern: what stands there, by the names that reports give it.
      dots: the dots that the gathered array feeds, or those whose sum is scattered.
      elements: of the whole array that the collective moves, V / bytes per element: what a device holds after
        a gather and before a scatter; for an all_to_all what it holds before and after.
      dtype: of that array.
      free: the largest dim of what travels (of a gather on a contracting or batch dim) that is not cut and
        that the dot keeps, or of the operand that is not cut (of a scatter); None where there is none, or
        several dots.
      handed_out: whether the gathered array is also needed whole.
      starts_implied: whether the compiler places the starts of a gather's hops; see `RingWork`.

    Raises:
      ValueError: there is no dot, a size is below 1, or a scatter cuts a contracting dim.
    """

    pattern: Pattern
    dots: tuple[PlainDot, ...]
    elements: int
    dtype: str = "bfloat16"
    free: Dim | None = None
    handed_out: bool = False
    starts_implied: bool = False

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ValueError(f"unknown pattern {self.pattern!r}; known: {', '.join(PATTERNS)}")
        if not self.dots or self.elements < 1:
            raise ValueError(f"a chain has at least one dot and one element to move, got {self}")
        if not self.gathers and any(dot.cut == "k" for dot in self.dots):
            raise ValueError(f"{self.pattern} scatters a result's dim: cut m, n or batch, not k")
        dtype_bytes(self.dtype)

    @property
    def gathers(self) -> bool:
        """Whether the collective comes before the dots."""
        return self.pattern in ("all_gather_dot", "all_to_all_dot")

    @property
    def moved_bytes(self) -> float:
        """Bytes of the whole array, V."""
        return self.elements * dtype_bytes(self.dtype)

    def wire_bytes(self, axis: Axis) -> float:
        """Bytes of the whole array as it travels.

        On a TPU dots round float32 operands to bfloat16 by default, and its compiler does so before it
        gathers them, if nothing else needs them. For dots too small to be surely the matrix unit's it is not
        counted on.
        """
        return self.elements * dtype_bytes("bfloat16") if self._rounds(axis) else self.moved_bytes

    def multiplied(self, axis: Axis) -> tuple[PlainDot, ...]:
        """The dots, what travels in the dtype that it does so in, where it is known which operand that is."""
        if not self._rounds(axis):
            return self.dots
        found = []
        for dot in self.dots:
            dim = dot.cut if dot.cut in ("m", "n") else self.free
            rounded = dataclasses.replace(
                dot.matmul,
                lhs_dtype="bfloat16" if dim == "m" else None,
                rhs_dtype="bfloat16" if dim == "n" else None,
            )
            found.append(dataclasses.replace(dot, matmul=rounded))
        return tuple(found)

    def _rounds(self, axis: Axis) -> bool:
        """Whether the array is surely rounded to bfloat16 before it travels."""
        blocks = [dot.piece(Fraction(1, axis.size)) for dot in self.dots]
        return self.may_round(axis) and all(map(surely_rounds, blocks))

    def may_round(self, axis: Axis) -> bool:
        """Whether a compiler may round the array to bfloat16 before it gathers it."""
        rounds = self.pattern == "all_gather_dot" and self.dtype == "float32" and not self.handed_out
        return rounds and axis.hardware.network == "torus"

    def unit(self, axis_size: int) -> int:
        """Into how many equal parts one device's block of every dot can be cut."""
        return math.gcd(*(getattr(dot.matmul, dot.cut) // axis_size for dot in self.dots))


class Pieces(Protocol):
    """Into what a ring's blocks are cut, as a `Form` or a ring schedule has it; see `RingWork`."""

    @property
    def chains(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def across(self) -> bool: ...
    @property
    def joined(self) -> bool: ...
    @property
    def halfway(self) -> bool: ...
    @property
    def cut(self) -> Cut: ...


def cut_in_words(pieces: Pieces) -> list[str]:
    """How a ring's blocks are cut, as forms and schedules say it; nothing where they are not."""
    said = {
        f"{pieces.chains} chains": pieces.chains > 1,
        f"{pieces.columns} columns": pieces.columns > 1,
        "cut across": pieces.across,
        "joined": pieces.joined,
        "half way": pieces.halfway,
        f"cut {pieces.cut}": pieces.cut != "dot",
    }
    return [words for words, so in said.items() if so]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the rings run: the part of a ring schedule that has a price. See `RingWork` for the fields.

    Attributes:
      route: a ring, or by which collectives pieces go in turn. See `offloaded`.
    """

    route: Literal["ring", "all_gather", "all_reduce", "reduce_scatter"] = "ring"
    directions: Directions = 1
    rings: int = 1
    walks: bool = False
    chains: int = 1
    columns: int = 1
    across: bool = False
    joined: bool = False
    halfway: bool = False
    cut: Cut = "dot"
    wide_wire: bool = False

    @property
    def pieces(self) -> int:
        """Pieces of a shard, and so of a step."""
        return self.directions * self.rings * self.chains

    def __str__(self) -> str:
        if self.route != "ring":
            return in_words(self.route, self.chains, across=self.across)
        words = ["unidirectional" if self.directions == 1 else "bidirectional"]
        if self.rings > 1:
            words.append(f"{self.rings} {'walks' if self.walks else 'rings'}")
        words += cut_in_words(self)
        if self.wide_wire:
            words.append("float32 wire")
        return ", ".join(words)


EXCHANGE: Final = Form()
"""The one form of an all_to_all chain: every block goes straight to where it belongs."""


def chain_of(
    pattern: Pattern,
    m: int,
    k: int,
    n: int,
    *,
    dtype: str = "bfloat16",
    cut: Literal["m", "k", "n"] = "m",
    operand: Literal["lhs", "rhs"] | None = None,
    handed_out: bool = False,
    starts_implied: bool = False,
) -> PlainChain:
    """The chain around one dot `[m, k] · [k, n]`, with the sizes that one device computes.

    Args:
      pattern: the chain's.
      m, k, n: the whole dot on one device: after a gather, before a scatter.
      dtype: of operands and result.
      cut: the dim that is gathered or scattered.
      operand: which operand is gathered, where `cut` is k: "lhs" if None. m is of the lhs, n of the rhs.
      handed_out: whether a gathered array is also needed whole.
      starts_implied: see `PlainChain`.

    Raises:
      ValueError: a size is below 1, the dtype is unknown, or the dot has no such dim, or the pattern does not
        cut it.
    """
    if min(m, k, n) < 1:
        raise ValueError(f"a dot's sizes are at least 1, got M, K, N = {m}, {k}, {n}")
    if cut not in ("m", "k", "n"):
        raise ValueError(f"cut is m, k or n, got {cut!r}")
    gathers = pattern in ("all_gather_dot", "all_to_all_dot")
    side = {"m": "lhs", "n": "rhs", "k": operand or "lhs"}[cut]
    if operand is not None and operand != side:
        raise ValueError(f"{cut} is no dim of the {operand}")
    free: Dim | None
    if gathers:
        elements = m * k if side == "lhs" else k * n
        free = None
        if cut == "k" and not handed_out and pattern == "all_gather_dot":
            free = "m" if side == "lhs" else "n"
    else:
        elements = m * n
        free = ("n" if cut == "m" else "m") if pattern != "dot_all_to_all" else None
    matmul = Matmul(m=m, k=k, n=n, dtype=dtype)
    return PlainChain(
        pattern=pattern,
        dots=(PlainDot(matmul, cut),),
        elements=elements,
        dtype=dtype,
        free=free,
        handed_out=handed_out and gathers,
        starts_implied=starts_implied,
    )


def forms(chain: PlainChain, axis: Axis) -> tuple[Form, ...]:
    """Every form of ring that the chain can take on this axis, the simplest first."""
    if "all_to_all" in chain.pattern:
        return (EXCHANGE,)
    if chain.gathers and "cpu" in axis.hardware.device_kinds and axis.size <= LONGEST_UNROLLED:
        return (Form(),)
    unit = chain.unit(axis.size)
    most = MOST_PIECES if axis.hardware.opposite_hops_overlap else 1
    # XLA:CPU adds narrow floats up in float32 when it scatters, and so do rings there.
    wide = not chain.gathers and "cpu" in axis.hardware.device_kinds
    fitting = [
        dataclasses.replace(form, wide_wire=wide)
        for form in _all(chain, axis)
        if _in_flight(chain, form) <= most and _fits(chain, form, unit)
    ]
    fitting.extend(_offloaded(chain, axis, unit))
    return tuple(fitting) or (Form(wide_wire=wide),)


def works(chain: PlainChain, form: Form, axis: Axis) -> tuple[RingWork, ...]:
    """The rings of a chain: one; for a psum that of its scatter. None where no ring is run."""
    if "all_to_all" in chain.pattern or form.route != "ring":
        return ()
    return (_gather_work(chain, form, axis) if chain.gathers else _scatter_work(chain, form, axis),)


def price(chain: PlainChain, form: Form, axis: Axis) -> Estimate:
    """The predicted times of the chain as it stands, and as rings of this form.

    As `passes.pricing` has it of a program: a psum is a scatter ring and then a gather of its own, or, in
    columns, both side by side.
    """
    if "all_to_all" in chain.pattern:
        share = Fraction(1, axis.size)
        return exchange_estimate(
            block_bytes=chain.moved_bytes / axis.size,
            matmuls=tuple(dot.matmul for dot in chain.dots),
            partials=tuple(dot.piece(share) for dot in chain.dots),
            axis=axis,
        )
    if form.route != "ring":
        return _offloaded_price(chain, form, axis)
    (work,) = works(chain, form, axis)
    if chain.pattern != "dot_psum":
        return estimate(work, axis)
    width = dtype_bytes(chain.dtype)
    if form.columns > 1:
        return pipeline_estimate(work, chain.moved_bytes, width, axis, across=form.across)
    return estimate(work, axis) + gather_after(chain.moved_bytes, width, axis)


def _offloaded_price(chain: PlainChain, form: Form, axis: Axis) -> Estimate:
    """The price of pieces that go by collectives in turn."""
    assert form.route != "ring"
    dots = chain.multiplied(axis) if chain.gathers else chain.dots
    work = InTurn(
        collective=form.route,
        pieces=form.chains,
        across=form.across,
        moved_bytes=gathered_bytes(chain, axis) if chain.gathers else chain.moved_bytes,
        matmuls=tuple(dot.matmul for dot in dots),
        piece=piece_in_turn(chain, form, dots),
    )
    return offloaded_estimate(work, price(chain, Form(), axis), axis)


def piece_in_turn(chain: PlainChain, form: Form, dots: tuple[PlainDot, ...]) -> tuple[Matmul, ...]:
    """One piece of each of the chain's dots, where pieces go by collectives in turn."""
    share = Fraction(1, form.chains)
    if form.across and chain.free is not None:
        return tuple(dot.piece(Fraction(1), (chain.free, share)) for dot in dots)
    return tuple(dot.piece(share) for dot in dots)


def pays(priced: Estimate, hardware: Hardware) -> bool:
    """Whether rings gain more than a prediction may be off: `least_gain` of the time as written."""
    return priced.original_s > 0 and priced.benefit_s / priced.original_s >= hardware.least_gain


def best(chain: PlainChain, axis: Axis, among: tuple[Form, ...] | None = None) -> tuple[Form, Estimate]:
    """The form of the largest predicted benefit, the first of equals, and its price.

    First of all come those that need no more memory than the chain as written.
    """
    priced = [(form, price(chain, form, axis)) for form in among or forms(chain, axis)]
    return max(priced, key=lambda pair: pair[1].rank)


def goes_halfway(directions: Directions, axis_size: int, hardware: Hardware) -> bool:
    """Whether whole shards may go half way round in place of half-shards: on TPUs, where rings are unrolled.

    Of two devices half-shards go one hop either way.
    """
    return directions == 2 and 2 < axis_size <= LONGEST_UNROLLED and hardware.network == "torus"


def makes_strips(size: int, columns: int) -> bool:
    """Whether a psum's columns, of which there are so many elements, make so many equal chunks."""
    return not size % columns and size // columns >= LEAST_COLUMN


def cuts(axis: Axis, *, gathers: bool, sums: bool) -> tuple[Cut, ...]:
    """The ways worth trying to cut blocks out of an operand: a TPU's compiler keeps some copies on chip.

    Args:
      axis: the devices.
      gathers: whether the ring gathers; else it scatters.
      sums: whether dots of a gather add up. Where they do not, no operand is cut.
    """
    if axis.hardware.network != "torus" or (gathers and not sums):
        return ("dot",)
    return ("dot", "apart") if gathers else ("dot", "early")


def _all(chain: PlainChain, axis: Axis) -> Iterator[Form]:
    ways: tuple[Directions, ...] = (1, 2)
    rings = range(1, max(1, len(axis.orders)) + 1)
    bases = [Form(directions=way, rings=count) for way, count in itertools.product(ways, rings)]
    if axis.walks:
        bases.append(Form(rings=len(axis.walks), walks=True))
    ways_to_cut = cuts(axis, gathers=chain.gathers, sums=any(dot.cut == "k" for dot in chain.dots))
    bases = [dataclasses.replace(base, cut=cut) for base in bases for cut in ways_to_cut]
    # Of dots that add up the pieces would be no larger, and what is rounded to travel is slow to cut again.
    halfway = all(dot.cut != "k" for dot in chain.dots) and chain.wire_bytes(axis) == chain.moved_bytes
    for base in bases:
        if chain.gathers:
            for columns, joined in itertools.product(COLUMNS, (False, True)):
                yield dataclasses.replace(base, columns=columns, joined=joined)
                if not joined:
                    yield dataclasses.replace(base, columns=columns, across=True)
            if halfway and goes_halfway(base.directions, axis.size, axis.hardware):
                yield dataclasses.replace(base, halfway=True)
        else:
            for chains, across in itertools.product((1, 2), (False, True)):
                yield dataclasses.replace(base, chains=chains, across=across)
            # Strips of every row are not cut into chunks.
            if chain.pattern == "dot_psum" and all(dot.cut != "n" for dot in chain.dots):
                for columns, across in itertools.product(COLUMNS[1:], (False, True)):
                    yield dataclasses.replace(base, columns=columns, across=across)


def _offloaded(chain: PlainChain, axis: Axis, unit: int) -> Iterator[Form]:
    """The ways by collectives in turn that run beside dots by themselves."""
    size = 0 if chain.free is None else getattr(chain.dots[0].matmul, chain.free)
    if chain.pattern == "dot_psum" and is_offloaded("all_reduce", axis):
        for pieces in counts(unit * axis.size, LEAST_ROWS, axis.hardware):
            yield Form(route="all_reduce", chains=pieces)
        for pieces in counts(size, LANES, axis.hardware) if size else ():
            yield Form(route="all_reduce", chains=pieces, across=True)
    elif chain.pattern == "dot_reduce_scatter" and is_offloaded("reduce_scatter", axis):
        for pieces in counts(size, LANES, axis.hardware) if size else ():
            yield Form(route="reduce_scatter", chains=pieces, across=True)
    elif chain.pattern == "all_gather_dot" and is_offloaded("all_gather", axis):
        if size:
            for pieces in counts(size, LANES, axis.hardware):
                yield Form(route="all_gather", chains=pieces, across=True)
        elif all(dot.cut != "k" for dot in chain.dots) and hides_rows(axis.hardware):
            rows = tile_rows(min(dtype_bytes(dot.matmul.dtype) for dot in chain.dots))
            for pieces in counts(unit, rows, axis.hardware, few=True):
                yield Form(route="all_gather", chains=pieces)


def _in_flight(chain: PlainChain, form: Form) -> int:
    """How many hops are in flight at once: of a psum in chunks those of two chunks."""
    return form.pieces * (2 if chain.pattern == "dot_psum" and form.columns > 1 else 1)


def _fits(chain: PlainChain, form: Form, unit: int) -> bool:
    """Whether the blocks can be cut into so many pieces and columns."""
    size = 0 if chain.free is None else getattr(chain.dots[0].matmul, chain.free)
    if chain.pattern == "dot_psum" and form.columns > 1:
        if form.across:
            return form.pieces <= unit and makes_strips(size, form.columns)
        return not unit % form.columns and form.pieces <= unit // form.columns
    if form.pieces == 1 and (form.joined or form.across):
        return False
    if form.columns > 1 and (size // form.columns < LEAST_COLUMN or chain.dots[0].cut != "k"):
        return False
    return form.pieces * form.columns <= size if form.across else form.pieces <= unit


def _gather_work(chain: PlainChain, form: Form, axis: Axis) -> RingWork:
    pieces = 1 if form.joined or form.across else form.pieces
    share = Fraction(1, axis.size * pieces)
    strips = form.pieces if form.across else 1
    columns = form.columns * strips
    second = None
    if chain.free is not None and columns > 1:
        second = (chain.free, Fraction(1, columns))
    summed = [_accumulator(d.matmul.result_dtype) for d in chain.dots if d.cut == "k"]
    dots, shard_bytes = chain.multiplied(axis), chain.wire_bytes(axis) / axis.size
    return RingWork(
        collective="all_gather",
        shard_bytes=shard_bytes,
        collective_shard_bytes=gathered_bytes(chain, axis) / axis.size,
        matmuls=tuple(dot.matmul for dot in dots),
        piece=tuple(dot.piece((1 + form.halfway) * share, second) for dot in dots),
        directions=form.directions,
        rings=form.rings,
        walks=form.walks,
        chains=form.chains,
        columns=form.columns,
        joined=form.joined,
        halves=tuple(dot.piece(share) for dot in dots) if form.halfway else (),
        cut=form.cut,
        accumulator=max(summed, key=dtype_bytes, default="float32"),
        accumulators=strips,
        hands_out_gathered=chain.handed_out,
        starts_implied=chain.starts_implied and axis.hardware.network == "torus",
    )


def gathered_bytes(chain: PlainChain, axis: Axis) -> float:
    """Bytes of the array as an all_gather moves it: where the compiler may round it, the half."""
    sent_bytes = chain.wire_bytes(axis)
    return sent_bytes / 2 if chain.may_round(axis) and sent_bytes == chain.moved_bytes else sent_bytes


def _scatter_work(chain: PlainChain, form: Form, axis: Axis) -> RingWork:
    share, second = Fraction(1, axis.size), None
    fused = axis.hardware.fuses_additions and form.pieces > 1
    copied_bytes = 2 * sum(dot.copied_bytes for dot in chain.dots) / axis.size
    if form.across and chain.free is not None:
        second = (chain.free, Fraction(1, form.columns if form.columns > 1 else form.pieces))
        share /= form.pieces if form.columns > 1 else 1
    else:
        share /= form.pieces * form.columns
        copied_bytes /= form.columns
    for dot in chain.dots:
        of = dot.matmul
        if dot.cut == "m" and not dot.apart:
            copied_bytes += between_tiles_bytes(
                of.lhs_bytes,
                of.m // axis.size // (1 if form.across else form.columns),
                dtype_bytes(of.dtype),
                axis.size,
                axis.hardware,
                pieces=form.pieces,
                across=form.across and form.columns == 1,
                cut=form.cut,
            )
    wide_bytes = chain.elements * dtype_bytes(_accumulator(chain.dtype)) / axis.size
    narrow_bytes = chain.moved_bytes / axis.size
    return RingWork(
        collective="reduce_scatter",
        shard_bytes=wide_bytes if form.wide_wire else narrow_bytes,
        collective_shard_bytes=narrow_bytes,
        matmuls=tuple(dot.matmul for dot in chain.dots),
        piece=tuple(dot.piece(share, second) for dot in chain.dots),
        directions=form.directions,
        rings=form.rings,
        walks=form.walks,
        chains=form.chains,
        cut=form.cut,
        accumulator=_accumulator(chain.dtype) if form.wide_wire else chain.dtype,
        columns=form.columns,
        fused=fused,
        apart_bytes=copied_bytes if fused else copied_bytes + 3 * wide_bytes / form.columns,
        sums_whole=chain.pattern == "dot_reduce_scatter" and sums_whole(chain.dtype, axis),
    )


def _accumulator(dtype: str) -> str:
    """The dtype of partial sums: floats narrower than 32 bits are added up in float32."""
    kind, bits = parse_dtype(dtype)
    return "float32" if kind == "float" and bits < 32 else dtype
