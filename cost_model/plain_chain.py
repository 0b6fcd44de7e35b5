"""A collective with its dots, known by pattern, sizes and dtype alone, and its price as rings."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, get_args

from cost_model.axis import Axis
from cost_model.chain_sizes import CutRows, GatherSizes, ScatterSizes, Sizes, pricer
from cost_model.dtypes import dtype_bytes, parse_dtype
from cost_model.exchange import exchange_estimate
from cost_model.form import EXCHANGE, Form
from cost_model.forms import LONGEST_UNROLLED, Cuttable
from cost_model.forms import forms as forms_of
from cost_model.hardware import Hardware
from cost_model.matmul import Matmul
from cost_model.offloaded import sums_whole
from cost_model.on_chip import SIDES, Side
from cost_model.ring import Estimate
from cost_model.ring_work import RingWork
from cost_model.tile import LANES, tile_rows
from cost_model.whole import whole

Pattern = Literal["all_gather_dot", "dot_reduce_scatter", "dot_psum", "all_to_all_dot", "dot_all_to_all"]
PATTERNS: Final[tuple[Pattern, ...]] = get_args(Pattern)
Dim = Literal["batch", "m", "k", "n"]

LEAST_ROUNDED: Final = 512
"""Rows, columns and depth of a block from which on all its pieces are surely the matrix unit's."""


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
      operand: which operand is gathered, where the cut dim is of both; None: as far as the sizes tell.
    """

    matmul: Matmul
    cut: Dim
    apart: bool | None = None
    operand: Side | None = None

    @property
    def side(self) -> Side | None:
        """The operand with the cut dim; of both the one that is gathered."""
        return "lhs" if self.cut == "m" else "rhs" if self.cut == "n" else self.operand

    @property
    def copied_bytes(self) -> float:
        """Bytes of the blocks that are copied before a scatter ring's dots."""
        if not (self.cut == "n" if self.apart is None else self.apart):
            return 0.0
        of = self.matmul
        return of.batch * of.k * (of.m if self.cut == "m" else of.n) * dtype_bytes(of.dtype)

    def piece(self, share: Fraction, second: tuple[Dim, Fraction] | None = None) -> Matmul:
        """The dot on a share of the cut dim, and perhaps of a second one, sizes rounded up."""
        sizes: dict[str, Any] = {self.cut: _share(getattr(self.matmul, self.cut), share)}
        if second is not None:
            sizes[second[0]] = _share(getattr(self.matmul, second[0]), second[1])
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
        that every dot keeps, or of the operand that is not cut (of a scatter of one dot); None where there is
        none.
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

    def misfit(self, axis_size: int) -> str:
        """Why the chain cannot be cut into the blocks of so many devices; empty if it can."""
        for dot in self.dots:
            name, size = dot.cut if dot.cut == "batch" else dot.cut.upper(), getattr(dot.matmul, dot.cut)
            if size % axis_size:
                return f"{name} = {size} cannot be cut evenly over {axis_size} devices"
        return ""

    def wire_bytes(self, axis: Axis) -> float:
        """Bytes of the whole array as it travels.

        On a TPU dots round float32 operands to bfloat16 by default, and its compiler does so before it
        gathers them, if nothing else needs them. For dots too small to be surely the matrix unit's it is not
        counted on.
        """
        return self.elements * dtype_bytes("bfloat16") if self._rounds(axis) else self.moved_bytes

    def multiplied(self, axis: Axis) -> tuple[PlainDot, ...]:
        """The dots, what travels in the dtype that it does so in, where it is known which operand that is."""
        return tuple(map(_rounded, self.dots)) if self._rounds(axis) else self.dots

    def written(self, axis: Axis) -> tuple[Matmul, ...]:
        """The dots as they read what the collective has rounded, where rings may not round it."""
        return tuple(_rounded(dot).matmul for dot in self.dots) if self.may_round(axis) else ()

    def _rounds(self, axis: Axis) -> bool:
        """Whether the array is surely rounded to bfloat16 before it travels."""
        blocks = [dot.piece(Fraction(1, axis.size)) for dot in self.dots]
        return self.may_round(axis) and all(map(surely_rounds, blocks))

    def may_round(self, axis: Axis) -> bool:
        """Whether a compiler may round the array to bfloat16 before it gathers it."""
        rounds = self.pattern == "all_gather_dot" and self.dtype == "float32" and not self.handed_out
        return rounds and axis.hardware.network == "torus"

    def cuttable(self, axis: Axis) -> Cuttable:
        """Into what the blocks can be cut."""
        psum, sums = self.pattern == "dot_psum", any(dot.cut == "k" for dot in self.dots)
        return Cuttable(
            collective="all_gather" if self.gathers else "psum" if psum else "reduce_scatter",
            unit=math.gcd(*(getattr(dot.matmul, dot.cut) // axis.size for dot in self.dots)),
            tile_rows=tile_rows(min(dtype_bytes(dot.matmul.dtype) for dot in self.dots)),
            strip=0 if self.free is None else getattr(self.dots[0].matmul, self.free),
            sums=sums,
            # Of dots that add up the pieces would be no larger, and what is rounded to travel is slow to cut
            # again.
            halfway=not sums and self.wire_bytes(axis) == self.moved_bytes,
            # Strips of every row are not cut into chunks.
            chunks=psum and not self.starts_implied and all(dot.cut != "n" for dot in self.dots),
            whole_rows=all(dot.matmul.n % LANES == 0 for dot in self.dots),
        )

    def sizes(self, axis: Axis) -> Sizes:
        """What prices ask of it, but of an all_to_all."""
        multiplied = self.multiplied(axis) if self.gathers else self.dots

        @functools.cache
        def dots(share: Fraction, strip: Fraction) -> tuple[Matmul, ...]:
            across = None if self.free is None or strip == 1 else (self.free, strip)
            return tuple(dot.piece(share, across) for dot in multiplied)

        sides = tuple(dot.side for dot in self.dots)
        if self.gathers:
            summed = [_accumulator(dot.matmul.result_dtype) for dot in self.dots if dot.cut == "k"]
            return GatherSizes(
                dots=dots,
                sent_bytes=self.wire_bytes(axis),
                gathered_bytes=gathered_bytes(self, axis),
                accumulator=max(summed, key=dtype_bytes, default="float32"),
                sides=sides,
                rounds=self._rounds(axis),
                collective_rounds=self.may_round(axis),
                written=self.written(axis),
                hands_out_gathered=self.handed_out,
                starts_implied=self.starts_implied and axis.hardware.network == "torus",
            )
        rows = (dot.matmul for dot in self.dots if dot.cut == "m" and not dot.apart)
        return ScatterSizes(
            dots=dots,
            elements=self.elements,
            dtype=self.dtype,
            accumulator=_accumulator(self.dtype),
            apart_bytes=sum(dot.copied_bytes for dot in self.dots),
            right_apart_bytes=sum(
                dot.copied_bytes for dot in self.dots if dot.cut == "n" and self.pattern == "dot_psum"
            ),
            rows=tuple(CutRows(of.lhs_bytes, of.m, dtype_bytes(of.dtype)) for of in rows),
            sides=sides,
            sums_whole=self.pattern == "dot_reduce_scatter" and sums_whole(self.dtype, axis),
        )


Forms = Callable[[PlainChain, Axis], Sequence[Form]]
"""Which forms of rings are considered for a chain on an axis."""


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
      operand: which operand is gathered, where `cut` is k: "lhs" if None. m is of the lhs, n of the rhs. None
        where nothing is gathered.
      handed_out: whether a gathered array is also needed whole.
      starts_implied: see `PlainChain`.

    Raises:
      ValueError: a size is below 1, the dtype is unknown, cut or operand is none, the operand has no such
        dim, or the pattern does not cut it, or gathers no operand.
      TypeError: a size is no whole number.
    """
    m, k, n = (whole(size, name) for size, name in zip((m, k, n), "MKN", strict=True))
    if min(m, k, n) < 1:
        raise ValueError(f"a dot's sizes are at least 1, got M, K, N = {m}, {k}, {n}")
    if cut not in ("m", "k", "n"):
        raise ValueError(f"cut is m, k or n, got {cut!r}")
    if operand not in (None, "lhs", "rhs"):
        raise ValueError(f"operand is lhs or rhs, got {operand!r}")
    gathers = pattern in ("all_gather_dot", "all_to_all_dot")
    if cut == "k" and pattern in ("dot_reduce_scatter", "dot_psum", "dot_all_to_all"):
        raise ValueError(f"{pattern} scatters a dim of the dot's result, m or n, not k")
    side: Side = "lhs" if cut == "m" else "rhs" if cut == "n" else operand or "lhs"
    if operand is not None and operand != side:
        dims = {"lhs": "m or k", "rhs": "k or n"}[operand]
        raise ValueError(f"the {operand}'s dims are {dims}, and {cut} is cut: cut one of those")
    if operand is not None and not gathers:
        raise ValueError(f"{pattern} gathers no operand: leave operand {operand!r} out")
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
        dots=(PlainDot(matmul, cut, operand=side if cut == "k" else None),),
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
        return (Form(), Form(late=True))
    return forms_of(chain.cuttable(axis), axis)


def works(chain: PlainChain, form: Form, axis: Axis) -> tuple[RingWork, ...]:
    """The rings of a chain: one; for a psum that of its scatter. None where no ring is run."""
    if "all_to_all" in chain.pattern or form.route != "ring":
        return ()
    return (chain.sizes(axis).work(form, axis),)


def price(chain: PlainChain, form: Form, axis: Axis) -> Estimate:
    """The predicted times of the chain as it stands, and as rings of this form."""
    return _pricer(chain, axis)(form)


def _pricer(chain: PlainChain, axis: Axis) -> Callable[[Form], Estimate]:
    """Prices forms of one chain: what they have in common is found once."""
    if "all_to_all" in chain.pattern:
        share = Fraction(1, axis.size)
        exchanged = exchange_estimate(
            block_bytes=chain.moved_bytes / axis.size,
            matmuls=tuple(dot.matmul for dot in chain.dots),
            partials=tuple(dot.piece(share) for dot in chain.dots),
            axis=axis,
        )
        return lambda _: exchanged
    return pricer(chain.sizes(axis), axis, psum=chain.pattern == "dot_psum")


def pays(priced: Estimate, hardware: Hardware) -> bool:
    """Whether rings are worth it: they gain more than a prediction may be off, and need no more memory.

    That is `least_gain` of the time as written. Of compiled gathers whose sums needed more (several dots that
    contract one array) memory grew up to six times, and half gained nothing.
    """
    gains = priced.original_s > 0 and priced.benefit_s / priced.original_s >= hardware.least_gain
    return gains and priced.added_bytes <= 0


def best(chain: PlainChain, axis: Axis, among: Sequence[Form] | None = None) -> tuple[Form, Estimate]:
    """The form of the largest predicted benefit, the first of equals, and its price.

    First of all come those that need no more memory than the chain as written.
    """
    price_of = _pricer(chain, axis)
    priced = [(form, price_of(form)) for form in among or forms(chain, axis)]
    return max(priced, key=lambda pair: pair[1].rank)


def gathered_bytes(chain: PlainChain, axis: Axis) -> float:
    """Bytes of the array as an all_gather moves it: where the compiler may round it, the half."""
    sent_bytes = chain.wire_bytes(axis)
    return sent_bytes / 2 if chain.may_round(axis) and sent_bytes == chain.moved_bytes else sent_bytes


def _share(size: int, share: Fraction) -> int:
    """A share of a size, rounded up."""
    return -(-size * share.numerator // share.denominator)


def _rounded(dot: PlainDot) -> PlainDot:
    """A dot that finds what travels rounded to bfloat16, where it is known which operand that is."""
    lhs, rhs = ("bfloat16" if side == dot.side else None for side in SIDES)
    return dataclasses.replace(dot, matmul=dataclasses.replace(dot.matmul, lhs_dtype=lhs, rhs_dtype=rhs))


def _accumulator(dtype: str) -> str:
    """The dtype of partial sums: floats narrower than 32 bits are added up in float32."""
    kind, bits = parse_dtype(dtype)
    return "float32" if kind == "float" and bits < 32 else dtype
