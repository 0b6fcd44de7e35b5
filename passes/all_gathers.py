"""Emits a chain whose pieces go by all_gathers, one after the other, each beside the dots of the one before.

For devices that run all_gathers beside dots by themselves (`Hardware.offloaded`): nothing needs a ring there,
and no dot is cut into as many parts as there are devices.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax import lax

from cost_model.tile import LANES
from passes import rows, shims
from passes.arrivals import cut_for, rounded, take_in, values_of
from passes.block_eval import Piece, Read, run_on_piece, tie_typed, write
from passes.chains import AllGatherDot, Chain
from passes.chip import chip_of
from passes.gather_ring import cut
from passes.graph import Dataflow
from passes.hops import Places
from passes.schedule import WHOLE, Part, RingSchedule, across, divisions, parts, tile_rows
from passes.sent import sent
from passes.turns import Turns


def goes_by_all_gathers(chain: Chain) -> bool:
    """Whether pieces of what the chain gathers can be gathered by themselves."""
    collective = chain.collective
    return isinstance(chain, AllGatherDot) and collective.kind == "all_gather" and collective.tiled


def emit_all_gathers(
    flow: Dataflow, chain: AllGatherDot, schedule: RingSchedule, read: Read, places: Places
) -> dict[int, Any]:
    """Runs the chain and returns the values that the rest of the program needs, by number.

    A piece is a part of every shard. Across, it is a strip of them along a free dim of the dots, of whose
    results it makes a strip each; else its dots make as many rows of every block.
    """
    op = flow.ops[chain.collective.op]
    turns = Turns(flow, chain, places)
    local = {op.outputs[0]: read(op.inputs[0])}
    run_on_piece(flow, chain.before, local, Piece(places, 0, WHOLE), read)
    wire = local[chain.wire]
    strips = across(flow, chain) if schedule.across else None
    if strips is None:
        dim = chain.blocked[chain.wire]
        divided = parts(schedule, divisions(flow, chain), tile_rows(flow, chain))
    else:
        dim = strips.dim
        divided = parts(schedule, wire.shape[dim], LANES)
    pieces = sent(flow, chain, places, wire, dim, (*(part.start for part in divided), Fraction(1)))
    turns.send(pieces[0])
    if strips is None:
        return _by_rows(flow, chain, read, turns, divided, pieces)
    made = _by_strips(flow, chain, read, turns, pieces)
    with turns.scope():
        results = zip(values_of(flow, chain), strips.result_dims, zip(*made, strict=True), strict=True)
        return {value: lax.concatenate(parts_of, along) for value, along, parts_of in results}


def _by_rows(
    flow: Dataflow,
    chain: AllGatherDot,
    read: Read,
    turns: Turns,
    divided: Sequence[Part],
    pieces: Sequence[Any],
) -> dict[int, Any]:
    """The results, of which each piece makes the same rows of every block."""
    aval = flow.avals[chain.wire]
    turned = shims.on_gpu(aval) and len(aval.shape) > 2
    results: dict[int, Any] = {}
    for number, part in enumerate(divided):
        if part is not divided[-1]:
            turns.send(pieces[number + 1])
        piece = lax.convert_element_type(turns.arrived[number], aval.dtype)
        # Else each dot of several (q, k and v) turns the piece round for itself: a layer took 10 % longer.
        known = {chain.wire: shims.row_major(piece) if turned else piece}
        results = take_in(flow, chain, known, _OfEveryBlock(turns.places, 0, part), read, results)
        if part is not divided[-1]:
            # Else the compiler may put these dots after the next piece's arrival, and nothing beside it.
            results = dict(zip(results, turns.hold(*results.values()), strict=True))
    return rounded(flow, chain, results)


def _by_strips(
    flow: Dataflow, chain: AllGatherDot, read: Read, turns: Turns, pieces: list[Any]
) -> list[list[Any]]:
    """The strips of every result, piece by piece.

    What keeps dots beside the gather of the next piece is not the same everywhere. On GPUs its arrival waits
    for them, as with rows; a TPU's compiler could not make strips in their place in the result then. There
    the gather after it waits, but where the dots themselves run gathers (v5e), and hide them anyhow: cores of
    their own (7x) may else run all gathers before the second strip's dots. Laid out by rows the strips are,
    lest the compiler lays them out by columns and turns the whole result round.

    On 7x what the dots read besides waits for the piece too. Where of the two the right one alone comes
    from a barrier, and the left one is an argument of the program, the compiler changes their places, and
    dots took up to 1.4 times as long.
    """
    aval = flow.avals[chain.wire]
    on_gpu, on_tpu = shims.on_gpu(aval), shims.on_tpu(aval)
    waits = on_tpu and not _gathered_by_dots(aval)
    beside = cut_for(flow, chain, chain.dots) if waits else {}
    made: list[list[Any]] = []
    for number, piece in enumerate([*pieces[1:], None]):
        if piece is not None:
            turns.send(piece, after=made[-1] if waits and made else ())
        arrived = turns.arrived[number]
        tied = tie_typed(flow, arrived, *map(read, beside)) if beside else (arrived,)
        known = dict(zip((chain.wire, *beside), tied, strict=True))
        known[chain.wire] = lax.convert_element_type(known[chain.wire], aval.dtype)
        run_on_piece(flow, chain.dots, known, _OfEveryBlock(turns.places, 0, WHOLE), read)
        made.append([known[value] for value in values_of(flow, chain)])
        if on_tpu:
            made[-1] = [shims.laid_out(strip, rows.sent(strip.shape)) for strip in made[-1]]
        if on_gpu and piece is not None:
            held = iter(turns.hold(*itertools.chain.from_iterable(made)))
            made = [[next(held) for _ in strips] for strips in made]
    return made


def _gathered_by_dots(aval: Any) -> bool:
    """Whether the dots of a program with this value themselves run its all_gathers, as on v5e."""
    hardware = chip_of(aval)
    return hardware is not None and hardware.dots_gather


@dataclasses.dataclass(frozen=True, slots=True)
class _OfEveryBlock(Piece):
    """The same part of the blocks of all devices, one after the other."""

    @property
    def share(self) -> Fraction:
        """How much of the whole dim they are."""
        return self.part.share

    def of(self, whole: Any, dim: int) -> Any:
        """Those parts of a whole array."""
        if self.part.share == 1:
            return whole
        blocks = self._blocks(whole, dim)
        return _joined(cut(blocks, dim + 1, self.part), dim)

    def place(self, whole: Any, piece: Any, dim: int, *, apart: bool = False) -> Any:
        """The whole array with those parts written into it; always apart, for no dot writes to all blocks."""
        blocks = self._blocks(whole, dim)
        start = np.int32(int(self.part.start * blocks.shape[dim + 1]))
        return _joined(write(blocks, self._blocks(piece, dim), {dim + 1: start}, self.places), dim)

    def _blocks(self, array: Any, dim: int) -> Any:
        """The array with a dim of its own for the devices."""
        size, shape = self.places.axis_size, array.shape
        return lax.reshape(array, (*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :]))


def _joined(blocks: Any, dim: int) -> Any:
    shape = blocks.shape
    return lax.reshape(blocks, (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))
