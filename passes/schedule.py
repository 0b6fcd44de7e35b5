"""Ring schedules: how the shards of one chain travel."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Literal

from cost_model import Walk, tile
from cost_model.form import cut_in_words
from cost_model.offloaded import in_words
from cost_model.ring_work import Cut
from passes import shims
from passes.blocks import MOVING
from passes.chains import AllGatherDot, BlockOp, Chain, DotPsum
from passes.dots import DotDims, dot_dims
from passes.graph import Dataflow, Op
from passes.hops import Order


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RingSchedule:
    """One way to run a chain as a ring.

    Attributes:
      directions: 1, whole shards travel one way round; 2, half-shards travel both ways at once, which uses
        both directions of every link and halves the time of a hop.
      route: ``ring``, every shard passes every device; ``exchange``, each block goes straight to where it
        belongs; ``all_reduce``, pieces go one after the other by all_reduces: those of a psum, or, between
        two devices, both blocks' bits, from which each takes off its own; ``all_gather``, a part of every
        shard is gathered after the other; ``reduce_scatter``, strips of a sum are scattered one after the
        other.
      chains: pieces per direction that each block is cut into. The hops of one piece run beside the partial
        dots of the others: a scatter ring needs two to hide a hop, as it must add to a sum before it sends
        it on.
      columns: into how many parts, along a free dim of what travels, a gather on a contracting dim is cut;
        their rings run one after the other. Fewer columns make a smaller accumulator, which may stay on chip.
        Into how many chunks a psum without dots after it is cut: one is gathered beside the scatter of the
        next, by hops; in one column, by an all_gather after it.
      across: whether pieces are cut along another dim than the gathered or scattered one: narrower matmuls of
        as many rows in place of shorter ones, and partial sums of the pieces apart in place of one for all.
        Of a psum in columns these are, and pieces are not.
      joined: whether the pieces of one step go into one partial dot, of their concatenation.
      cut: how blocks of what does not travel come to the dots of a scatter ring, and to those of a gather
        ring that add up: the ``dot`` itself reads its block of the whole; an operation of its own cuts it
        out, right before the dot, ``apart``, so that the dot may find it on chip; or it does so ``early``,
        before the hop that the dot hides.
      wire: what a scatter ring sends: partial sums in ``float32`` (at least), or in the dtype of the
        ``operand``, rounded after every addition as the collective itself would.
      halfway: whether in place of half-shards that go all the way round, each its way, whole shards go both
        ways, each half of the way: as many bytes per link in half as many hops, and partial dots twice as
        large. Of what has furthest to go a half comes from each side.
      unroll: steps per iteration of a rolled ring; 0 where the ring is unrolled.
      late: whether a gather ring sends copies, and places or adds up results when all shards are there, as
        CPU devices need it to run dots beside hops: see `cpu_queue`. What comes last it sends in halves, so
        that half of the last dots run beside a hop, too.
      orders: per ring the places in the order in which it visits them, or a walk, each ring with its share
        of every block; empty for one ring in the order of the places. Walks go one way, and are not rolled:
        each of their hops has pairs of its own.
    """

    directions: Literal[1, 2]
    route: Literal["ring", "exchange", "all_reduce", "all_gather", "reduce_scatter"] = "ring"
    chains: int = 1
    columns: int = 1
    across: bool = False
    joined: bool = False
    cut: Cut = "dot"
    wire: Literal["float32", "operand"] = "float32"
    halfway: bool = False
    unroll: int = 0
    late: bool = False
    orders: tuple[Order, ...] = ()

    def __post_init__(self) -> None:
        if self.walks and (self.directions > 1 or self.unroll or self.route != "ring"):
            raise ValueError(f"walks are unrolled rings of one direction, not {self}")
        if self.halfway and (self.directions == 1 or self.unroll or self.across or self.joined):
            raise ValueError(f"half way round go whole shards both ways, unrolled, not {self}")
        if self.late and (self.unroll or self.joined or self.across or self.columns > 1):
            raise ValueError(f"what is placed late is of unrolled rings of rows, not {self}")

    @property
    def walks(self) -> bool:
        """Whether the rings are walks."""
        return any(isinstance(order, Walk) for order in self.orders)

    @property
    def rings(self) -> int:
        """How many rings, with links of their own, run at once."""
        return max(1, len(self.orders))

    @property
    def wide_wire(self) -> bool:
        """Whether partial sums travel in float32 at least."""
        return self.wire == "float32"

    @property
    def pieces(self) -> int:
        """Into how many pieces each block is cut."""
        return self.directions * self.rings * self.chains

    def __str__(self) -> str:
        if self.route == "exchange":
            return "exchange"
        if self.route != "ring":
            return in_words(self.route, self.chains, across=self.across)
        words = ["unidirectional" if self.directions == 1 else "bidirectional"]
        words += cut_in_words(self)
        if self.wire == "operand":
            words.append("narrow wire")
        if self.unroll:
            words.append(f"rolled by {self.unroll}")
        if self.late:
            words.append("placed late")
        if self.walks:
            words.append(f"{self.rings} walks")
        elif self.orders:
            words.append("reordered" if self.rings == 1 else f"{self.rings} rings")
        return ", ".join(words)


def gather_schedule(schedule: RingSchedule) -> RingSchedule:
    """How the second half of a psum gathers what a ring of this schedule has scattered."""
    return dataclasses.replace(schedule, chains=1, across=False, cut="dot")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The part of each block that travels one way.

    Attributes:
      start, share: where the part begins and how much it is, in fractions of a block.
      step: by how many devices the owner of what arrives moves per hop: 1 or -1.
      ring: number of the ring that it travels on.
    """

    start: Fraction
    share: Fraction
    step: Literal[1, -1]
    ring: int = 0


WHOLE = Part(Fraction(0), Fraction(1), 1)
"""The part that is the whole block."""


def itinerary(
    schedule: RingSchedule, divided: tuple[Part, ...], unit: int, axis_size: int
) -> tuple[tuple[Part, ...], ...]:
    """The parts of blocks that a gather has at hand in each of its steps, of unrolled rings.

    Args:
      schedule: how the shards travel.
      divided: the parts that each block is cut into: see ``parts``.
      unit: the number of equal parts that a block can be cut into.
      axis_size: devices.
    """
    if schedule.late and all(part.share * unit > 1 for part in divided):
        halves = tuple(half for part in divided for half in _halves(part, unit))
        return (*(divided,) * (axis_size - 1), halves)
    if not schedule.halfway:
        return (divided,) * axis_size
    wholes = [
        dataclasses.replace(half, share=half.share + other.share)
        for half, other in zip(divided[::2], divided[1::2], strict=True)
    ]
    both = tuple(dataclasses.replace(whole, step=step) for whole in wholes for step in (1, -1))
    return (tuple(wholes), *[both] * ((axis_size - 1) // 2), *[divided] * (1 - axis_size % 2))


def _halves(part: Part, unit: int) -> tuple[Part, Part]:
    """Both halves of a part, of a block of so many equal parts; of an odd number the first has one more."""
    first = Fraction(math.ceil(part.share * unit / 2), unit)
    second = dataclasses.replace(part, start=part.start + first, share=part.share - first)
    return dataclasses.replace(part, share=first), second


@dataclasses.dataclass(frozen=True, slots=True)
class Across:
    """A second dim along which a chain's dots can be cut, apart from their blocked dim.

    Attributes:
      dim: of what is cut along it: of a gather what travels, of a scatter the operand that is not blocked.
      operands: which operand of each dot that is, 0 or 1.
      result_dims: the dim of each dot's result; of a scatter, of what is scattered.
    """

    dim: int
    operands: tuple[int, ...]
    result_dims: tuple[int, ...]

    @property
    def operand(self) -> int:
        """The operand of the only dot."""
        (operand,) = self.operands
        return operand

    @property
    def result_dim(self) -> int:
        """The dim of the only dot's result."""
        (dim,) = self.result_dims
        return dim


def across(flow: Dataflow, chain: Chain) -> Across | None:
    """The largest free dim of what travels in a gather, or of a scatter's operand that is not blocked.

    None where a scatter has more than one dot, or its product goes through more than transposes and what
    changes every element by itself; where a gather has operations before its dots, or is also needed whole;
    where its dots do not all contract what is gathered, or all have it as a batch; and where the compiler
    may have sharded that dim over another mesh axis.
    """
    if isinstance(chain, DotPsum) or chain.collective.kind == "all_to_all":
        return None
    if not shims.all_manual(flow.avals[flow.ops[chain.collective.op].outputs[0]]):
        return None
    sides: tuple[int, ...]
    moves: list[Op] = []
    if isinstance(chain, AllGatherDot):
        roles = {dot.dims.role for dot in chain.dots if isinstance(dot.dims, DotDims)}
        if chain.after or chain.handed_out or roles not in ({"contracting"}, {"batch"}):
            return None
        sides = tuple(flow.ops[dot.op].inputs.index(chain.wire) for dot in chain.dots)
    else:
        dims = chain.dots[0].dims
        moves = [flow.ops[block.op] for block in chain.body[1:]]
        if not (
            len(chain.dots) == 1
            and chain.body[0] == chain.dots[0]
            and isinstance(dims, DotDims)
            and dims.role == "free"
            and all(_keeps_dims(flow, op) for op in moves)
        ):
            return None
        sides = (dims.operand_dims.index(None),)
    ops = [flow.ops[dot.op] for dot in chain.dots]
    if any(op.inputs[0] == op.inputs[1] for op in ops):
        return None
    numbers = [op.params["dimension_numbers"] for op in ops]
    shape = flow.aval(ops[0].inputs[sides[0]]).shape
    taken = {dim for each, side in zip(numbers, sides, strict=True) for dims in each for dim in dims[side]}
    free = [dim for dim in range(len(shape)) if dim not in taken]
    if not free:
        return None
    dim = max(free, key=lambda d: shape[d])
    result_dims = []
    for op, each, side in zip(ops, numbers, sides, strict=True):
        lhs, rhs = (len(flow.aval(operand).shape) for operand in op.inputs)
        result_dim = dot_dims(each, (lhs, rhs), side, dim).result_dim
        assert result_dim is not None
        for move in moves:
            if move.name == "transpose":
                result_dim = move.params["permutation"].index(result_dim)
        result_dims.append(result_dim)
    return Across(dim, sides, tuple(result_dims))


def _keeps_dims(flow: Dataflow, op: Op) -> bool:
    """Whether an operation of one array moves its dims at most: it works on any part of it alike."""
    return flow.form_of(op) is not None and (op.name == "transpose" or op.name not in MOVING)


def divisions(flow: Dataflow, chain: Chain) -> int:
    """Into how many equal parts every block of the chain can be cut: the common divisor of their sizes."""
    if isinstance(chain, DotPsum):
        gathered = divisions(flow, chain.gather) if chain.gather else 0
        return math.gcd(divisions(flow, chain.scatter), gathered)
    if isinstance(chain, AllGatherDot):
        blocks: tuple[BlockOp, ...] = (*chain.after, *chain.dots, *chain.epilogue)
        sizes = [flow.avals[chain.wire].shape[chain.blocked[chain.wire]]]
    else:
        blocks = chain.body
        collective = chain.collective
        sizes = [flow.aval(flow.ops[collective.op].inputs[0]).shape[collective.dim]]
    for block in blocks:
        op = flow.ops[block.op]
        for operand, dim in zip(op.inputs, block.dims.operand_dims, strict=True):
            if dim is not None:
                sizes.append(flow.aval(operand).shape[dim])
        if block.dims.result_dim is not None:
            sizes.extend(flow.avals[value].shape[block.dims.result_dim] for value in op.outputs)
    return math.gcd(*(size // chain.collective.axis_size for size in sizes))


def tile_rows(flow: Dataflow, chain: Chain) -> int:
    """Rows of a tile of the narrowest operand of a chain's dots."""
    dots = chain.scatter.dots if isinstance(chain, DotPsum) else chain.dots
    operands = (operand for dot in dots for operand in flow.ops[dot.op].inputs)
    return tile.tile_rows(min(flow.aval(operand).dtype.itemsize for operand in operands))


def parts(
    schedule: RingSchedule, unit: int, grain: int = tile.TILE_ROWS, *, placed: bool = False
) -> tuple[Part, ...]:
    """How a schedule divides each block, given the number of equal parts it can be cut into.

    Pieces that go both ways take turns. Where ``unit`` does not divide into as many multiples of 8 rows (of
    elements of a byte: of ``grain``), or of ``grain`` columns, which TPUs place as they are, some are larger:
    all but the last are multiples of ``grain`` parts, or of less where blocks are small, or where columns
    would be too uneven. What dots make of pieces that are ``placed`` is written into larger arrays, and their
    sizes are chosen for it: see `cost_model.tile.placed_edges`.

    Raises:
      ValueError: the schedule has more pieces than there are parts.
    """
    pieces = schedule.pieces
    if pieces > unit:
        raise ValueError(f"a block of {unit} part(s) cannot be cut into {pieces} pieces")
    edges = tile.piece_edges(unit, pieces, grain, placed=placed)
    bounds = [Fraction(edge, unit) for edge in edges]
    steps: tuple[Literal[1, -1], ...] = (1, -1) if schedule.directions == 2 else (1,)
    ways = [(step, ring) for ring in range(schedule.rings) for step in steps]
    return tuple(
        Part(start, end - start, *ways[number % len(ways)])
        for number, (start, end) in enumerate(itertools.pairwise(bounds))
    )
