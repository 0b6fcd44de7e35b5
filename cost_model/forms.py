"""Which forms of rings a chain can take: into how many pieces, columns and chunks its blocks can be cut."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from cost_model.axis import Axis, Directions
from cost_model.form import Form
from cost_model.hardware import Hardware
from cost_model.offloaded import LEAST_ROWS, counts, hides_rows, is_offloaded
from cost_model.ring_work import Cut
from cost_model.tile import LANES

MOST_PIECES: Final = 4
"""With more hops in flight at once the TPU compiler gives up; the GPU compiler with more than one."""

COLUMNS: Final = (1, 2, 4, 8, 16)
"""Into how many columns a gather on a contracting dim may be cut, and a psum into chunks."""

LONGEST_UNROLLED: Final = 24
"""Devices on the longest axis whose ring is unrolled: compile time grows faster than the ring."""

LEAST_COLUMN: Final = 256
"""Elements below which a column makes a matmul too narrow for the matrix unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuttable:
    """A chain of a gather, of a scatter or of a psum, as far as it tells into what it can be cut.

    Attributes:
      collective: which.
      unit: into how many equal parts one device's block of every dot can be cut.
      tile_rows: rows of a tile of the narrowest operand.
      strip: elements of the largest dim of what travels (of a gather) that all dots keep, or of the operand
        that is not cut (of a scatter of one dot): pieces may be cut across it. 0 where there is none.
      sums: whether dots of a gather add up.
      halfway: whether whole shards of a gather may go half way round.
      chunks: whether a psum may be cut into chunks.
      in_turn: whether pieces may go by collectives in turn.
      whole_rows: whether the rows of what a gather's dots make are whole tiles. Of others TPU compilers turn
        every piece, and the weights for each.
    """

    collective: Literal["all_gather", "reduce_scatter", "psum"]
    unit: int
    tile_rows: int
    strip: int = 0
    sums: bool = False
    halfway: bool = False
    chunks: bool = False
    in_turn: bool = True
    whole_rows: bool = True

    @property
    def gathers(self) -> bool:
        """Whether the collective comes before the dots."""
        return self.collective == "all_gather"

    def in_flight(self, form: Form) -> int:
        """How many hops are in flight at once: of a psum in chunks those of two chunks."""
        return form.pieces * (2 if self._in_chunks(form) else 1)

    def fits(self, form: Form) -> bool:
        """Whether the blocks can be cut into so many pieces and columns."""
        if self._in_chunks(form):
            if form.across:
                return form.pieces <= self.unit and makes_strips(self.strip, form.columns)
            return self.unit % form.columns == 0 and form.pieces <= self.unit // form.columns
        if form.pieces == 1 and (form.joined or form.across):
            return False
        if form.columns > 1 and self.strip // form.columns < LEAST_COLUMN:
            return False
        return form.pieces * form.columns <= self.strip if form.across else form.pieces <= self.unit

    def _in_chunks(self, form: Form) -> bool:
        return self.collective == "psum" and form.columns > 1


def forms(of: Cuttable, axis: Axis) -> tuple[Form, ...]:
    """Every form that the chain can take on this axis, the simplest first."""
    # XLA:CPU adds narrow floats up in float32 when it scatters, and so do rings there.
    wide = not of.gathers and "cpu" in axis.hardware.device_kinds
    most = MOST_PIECES if axis.hardware.opposite_hops_overlap else 1
    rings = (dataclasses.replace(form, wide_wire=wide) for form in _rings(of, axis))
    found = [form for form in rings if of.in_flight(form) <= most and of.fits(form)]
    found.extend(_in_turn(of, axis))
    return tuple(found) or (Form(wide_wire=wide),)


def goes_halfway(directions: Directions, axis_size: int, hardware: Hardware) -> bool:
    """Whether whole shards may go half way round in place of half-shards: on TPUs, where rings are unrolled.

    Of two devices half-shards go one hop either way.
    """
    return directions == 2 and 2 < axis_size <= LONGEST_UNROLLED and hardware.network == "torus"


def makes_strips(size: int, columns: int) -> bool:
    """Whether a psum's columns, of which there are so many elements, make so many equal chunks."""
    return not size % columns and size // columns >= LEAST_COLUMN


def ways_to_cut(of: Cuttable, axis: Axis) -> tuple[Cut, ...]:
    """The ways worth trying to cut blocks out of an operand: a TPU's compiler keeps some copies on chip.

    Where a gather's dots do not add up, no operand is cut.
    """
    if axis.hardware.network != "torus" or (of.gathers and not of.sums):
        return ("dot",)
    return ("dot", "apart") if of.gathers else ("dot", "early")


def _rings(of: Cuttable, axis: Axis) -> Iterator[Form]:
    """The forms of rings, whether the blocks can be cut so or not."""
    unrolled = axis.size <= LONGEST_UNROLLED
    ways: tuple[Directions, ...] = (1, 2)
    counted = range(1, max(1, len(axis.orders)) + 1)
    bases = [Form(directions=way, rings=count) for way, count in itertools.product(ways, counted)]
    if axis.walks and unrolled:
        bases.append(Form(rings=len(axis.walks), walks=True))
    for base, cut in itertools.product(bases, ways_to_cut(of, axis)):
        form = dataclasses.replace(base, cut=cut)
        if not of.gathers:
            for chains, across in itertools.product((1, 2), (False, True)):
                yield dataclasses.replace(form, chains=chains, across=across)
            # Each chunk's ring is unrolled.
            chunks = COLUMNS[1:] if of.chunks and unrolled else ()
            for columns, across in itertools.product(chunks, (False, True)):
                yield dataclasses.replace(form, columns=columns, across=across)
            continue
        for columns, joined in itertools.product(COLUMNS if of.sums else (1,), (False, True)):
            yield dataclasses.replace(form, columns=columns, joined=joined)
            if not joined:
                yield dataclasses.replace(form, columns=columns, across=True)
        if of.halfway and goes_halfway(form.directions, axis.size, axis.hardware):
            yield dataclasses.replace(form, halfway=True)


def _in_turn(of: Cuttable, axis: Axis) -> Iterator[Form]:
    """The ways by collectives in turn that run beside dots by themselves: see `offloaded`."""
    route: Literal["all_gather", "all_reduce", "reduce_scatter"]
    route = "all_reduce" if of.collective == "psum" else of.collective
    if not of.in_turn or not is_offloaded(route, axis):
        return
    if route == "all_reduce":
        for pieces in counts(of.unit * axis.size, LEAST_ROWS, axis.hardware):
            yield Form(route=route, chains=pieces)
    if of.strip:
        for pieces in counts(of.strip, LANES, axis.hardware):
            yield Form(route=route, chains=pieces, across=True)
    elif route == "all_gather" and not of.sums and hides_rows(axis.hardware) and _places_rows(of, axis):
        for pieces in counts(of.unit, of.tile_rows, axis.hardware, few=True):
            yield Form(route=route, chains=pieces)


def _places_rows(of: Cuttable, axis: Axis) -> bool:
    return of.whole_rows or axis.hardware.network != "torus"
