"""What prices ask of a gather or a scatter with its dots, whoever knows it: a program, or a description."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from cost_model.axis import Axis
from cost_model.dtypes import dtype_bytes
from cost_model.form import AnyForm, Form
from cost_model.matmul import Matmul
from cost_model.offloaded import InTurn, offloaded_estimate
from cost_model.on_chip import Side
from cost_model.pipeline import gather_after, pipeline_estimate
from cost_model.ring import Estimate, estimate
from cost_model.ring_copies import between_tiles_bytes
from cost_model.ring_work import NOTHING_BEFORE, Before, RingWork, blocks_of

Dots = Callable[[Fraction, Fraction], tuple[Matmul, ...]]
"""A chain's dots on a share of the dim that is gathered or scattered, and of the dim across it, if any."""

WHOLE = Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSizes:
    """An array that is gathered, and the dots that it feeds, with the sizes that one device computes.

    Attributes:
      dots: the dots.
      sent_bytes: of the whole array as rings send it.
      gathered_bytes: of it as the collective moves it.
      accumulator: dtype in which results of dots add up, where they do.
      sides: see `RingWork`.
      rounds, collective_rounds, written: see `RingWork`.
      hands_out_gathered: whether the gathered array is also needed whole.
      starts_implied, before: see `RingWork`.
    """

    dots: Dots
    sent_bytes: float
    gathered_bytes: float
    accumulator: str
    sides: tuple[Side | None, ...] = ()
    rounds: bool = False
    collective_rounds: bool = False
    written: tuple[Matmul, ...] = ()
    hands_out_gathered: bool = False
    starts_implied: bool = False
    before: Before = NOTHING_BEFORE

    @property
    def moved_bytes(self) -> float:
        """Bytes of the whole array as the collective moves it."""
        return self.gathered_bytes

    def work(self, form: AnyForm, axis: Axis) -> RingWork:
        """What a device does, as written and in a step of the rings."""
        share = Fraction(1, axis.size * (1 if form.joined or form.across else form.pieces))
        strips = form.pieces if form.across else 1
        return RingWork(
            collective="all_gather",
            shard_bytes=self.sent_bytes / axis.size,
            collective_shard_bytes=self.gathered_bytes / axis.size,
            matmuls=self.dots(WHOLE, WHOLE),
            piece=self.dots((1 + form.halfway) * share, Fraction(1, form.columns * strips)),
            sides=self.sides,
            directions=form.directions,
            rings=form.rings,
            walks=form.walks,
            chains=form.chains,
            columns=form.columns,
            joined=form.joined,
            halves=self.dots(share, WHOLE) if form.halfway else (),
            halved=form.late,
            cut=form.cut,
            accumulator=self.accumulator,
            accumulators=strips,
            hands_out_gathered=self.hands_out_gathered,
            rounds=self.rounds,
            collective_rounds=self.collective_rounds,
            written=self.written,
            starts_implied=self.starts_implied,
            before=self.before,
        )


@dataclass(frozen=True, slots=True)
class CutRows:
    """An operand of a scatter's dots of whose rows each device's block takes some.

    Attributes:
      operand_bytes: of all of it.
      rows: how many it has.
      element_bytes: of one element.
    """

    operand_bytes: float
    rows: int
    element_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterSizes:
    """Dots whose sum is scattered, or added up and kept whole, with the sizes that one device computes.

    Attributes:
      dots: the dots.
      elements: of the sum.
      dtype: of the sum.
      accumulator: dtype in which partial sums add up.
      apart_bytes: of operands whose blocks do not lie together in memory, so that each is copied before its
        dot.
      right_apart_bytes: those of a psum's right operands. TPU compilers were seen to read them where they are
        (57 compiled psums), if no chunks share them; reduce_scatters were not looked at.
      rows: the operands whose blocks are rows.
      factors_bytes: of other arrays that the dots' results are combined with, block by block; twice those
        that as written may be made within the operation that reads them, and have to be written for a ring.
      sides, sums_whole, before: see `RingWork`.
    """

    dots: Dots
    elements: int
    dtype: str
    accumulator: str
    apart_bytes: float
    right_apart_bytes: float = 0.0
    rows: tuple[CutRows, ...] = ()
    factors_bytes: float = 0.0
    sides: tuple[Side | None, ...] = ()
    sums_whole: bool = False
    before: Before = NOTHING_BEFORE

    @property
    def moved_bytes(self) -> float:
        """Bytes of the whole sum."""
        return self.elements * dtype_bytes(self.dtype)

    def work(self, form: AnyForm, axis: Axis) -> RingWork:
        """What a device does, as written and in a step of the rings."""
        fused = axis.hardware.fuses_additions and form.pieces > 1
        # A psum's columns are cut across, and their pieces are not; else pieces are.
        cuts, strips = form.pieces * form.columns, 1
        if form.across:
            cuts, strips = (form.pieces, form.columns) if form.columns > 1 else (1, form.pieces)
        wide_bytes = self.elements * dtype_bytes(self.accumulator) / axis.size
        apart_bytes = self.apart_bytes
        if axis.hardware.network == "torus" and form.columns == 1:
            apart_bytes -= self.right_apart_bytes
        copied_bytes = 2 * apart_bytes / axis.size / (1 if form.across else form.columns)
        if self.factors_bytes:
            # As written they are part of a whole dot. Of a piece, what combines them with its result is an
            # operation of its own, which reads and writes that; a library's matmuls have one anyway.
            passed_bytes = 0 if axis.hardware.lone_matmuls else 2 * self.moved_bytes
            copied_bytes += (self.factors_bytes + passed_bytes) / axis.size / form.columns
        copied_bytes += sum(
            between_tiles_bytes(
                rows.operand_bytes,
                rows.rows // axis.size // (1 if form.across else form.columns),
                rows.element_bytes,
                axis.size,
                axis.hardware,
                pieces=form.pieces,
                across=form.across and form.columns == 1,
                cut=form.cut,
            )
            for rows in self.rows
        )
        return RingWork(
            collective="reduce_scatter",
            shard_bytes=wide_bytes if form.wide_wire else self.moved_bytes / axis.size,
            collective_shard_bytes=self.moved_bytes / axis.size,
            matmuls=self.dots(WHOLE, WHOLE),
            piece=self.dots(Fraction(1, axis.size * cuts), Fraction(1, strips)),
            sides=self.sides,
            directions=form.directions,
            rings=form.rings,
            walks=form.walks,
            chains=form.chains,
            cut=form.cut,
            accumulator=self.accumulator if form.wide_wire else self.dtype,
            columns=form.columns,
            fused=fused,
            apart_bytes=copied_bytes if fused else copied_bytes + 3 * wide_bytes / form.columns,
            sums_whole=self.sums_whole,
            before=self.before,
        )


IN_COLUMNS: Final = 1.03
"""How many times as long as their parts rings in columns take: of 184 that were compiled for TPU and near the
best, half took 2 % longer or more, and one of seven 10 %."""

JOINED: Final = 1.04
"""The same of rings whose pieces are joined: of 60 a fifth took 10 % longer or more."""

Sizes = GatherSizes | ScatterSizes
Pricer = Callable[[AnyForm], Estimate]


def piece_in_turn(sizes: Sizes, form: AnyForm) -> tuple[Matmul, ...]:
    """One piece of each dot, where pieces go by collectives in turn."""
    share = Fraction(1, form.chains)
    return sizes.dots(WHOLE, share) if form.across else sizes.dots(share, WHOLE)


def pricer(sizes: Sizes, axis: Axis, *, psum: bool = False) -> Pricer:
    """Predicts, per form, the times of the chain as written and so run.

    A psum is a scatter ring and then a gather of its own, or, in columns, both side by side.

    Args:
      sizes: the chain's.
      axis: its devices.
      psum: whether the sum is added up and kept whole.
    """

    @functools.cache
    def as_written() -> Estimate:
        return price(Form())

    def price(form: AnyForm) -> Estimate:
        found = of_form(form)
        longer = (IN_COLUMNS if form.columns > 1 else 1.0) * (JOINED if form.joined else 1.0)
        if longer == 1 or axis.hardware.network != "torus":
            return found
        return dataclasses.replace(found, overlapped_s=longer * found.overlapped_s)

    def of_form(form: AnyForm) -> Estimate:
        if form.route != "ring":
            assert form.route != "exchange"
            work = InTurn(
                collective=form.route,
                pieces=form.chains,
                across=form.across,
                moved_bytes=sizes.moved_bytes,
                matmuls=sizes.dots(WHOLE, WHOLE),
                piece=piece_in_turn(sizes, form),
                hands_out_gathered=isinstance(sizes, GatherSizes) and sizes.hands_out_gathered,
                rounds=isinstance(sizes, GatherSizes) and sizes.collective_rounds,
            )
            return offloaded_estimate(work, as_written(), axis)
        rings = sizes.work(form, axis)
        if not psum:
            return estimate(rings, axis)
        assert isinstance(sizes, ScatterSizes)
        element_bytes = dtype_bytes(sizes.dtype)
        if form.columns > 1:
            return pipeline_estimate(rings, sizes.moved_bytes, element_bytes, axis, across=form.across)
        blocks = blocks_of(rings, axis.size)
        return estimate(rings, axis) + gather_after(sizes.moved_bytes, element_bytes, axis, blocks)

    return price
