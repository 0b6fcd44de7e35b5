"""Runs the operations of a chain on one piece of their blocked dims."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from passes import rows, shims
from passes.blocks import LONE, Blockwise, block_params
from passes.chains import BlockOp, Chain
from passes.gather_match import call_of
from passes.graph import Dataflow, Operand
from passes.hops import Places
from passes.schedule import Part

Read = Callable[[Operand], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of one block.

    Attributes:
      places: where the devices stand.
      distance: how many places further along the device stands whose block it is; traced in a rolled ring.
      part: which part of the block.
      later: an int32 0 that is known only once something else is, so that the piece is neither cut out nor
        placed before; None where it may be at any time. See `Places.nothing_of`.
    """

    places: Places
    distance: Any
    part: Part
    later: Any = None

    @property
    def share(self) -> Fraction:
        """How much of the whole dim the piece is."""
        return self.part.share / self.places.axis_size

    def offset(self, size: int) -> Any:
        """Where the piece begins in a dim of ``size`` elements; traced."""
        block = size // self.places.axis_size
        return self.places.offset(self.distance, block, int(self.part.start * block))

    def _start(self, size: int) -> Any:
        return self.offset(size) if self.later is None else jnp.add(self.offset(size), self.later)

    def of(self, whole: Any, dim: int) -> Any:
        """The piece of a whole array."""
        size = whole.shape[dim]
        length = int(size * self.share)
        return lax.dynamic_slice_in_dim(whole, self._start(size), length, dim, allow_negative_indices=False)

    def place(self, whole: Any, piece: Any, dim: int, *, apart: bool = False) -> Any:
        """The whole array with the piece written into it, by its maker or apart from that."""
        offset = self._start(whole.shape[dim])
        if apart:
            return write(whole, piece, {dim: offset}, self.places)
        return lax.dynamic_update_slice_in_dim(whole, piece, offset, dim, allow_negative_indices=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """Several pieces, one after the other in one array: as good as a piece."""

    pieces: tuple[Piece, ...]

    @property
    def share(self) -> Fraction:
        """How much of the whole dim they are."""
        return sum((piece.share for piece in self.pieces), Fraction(0))

    def of(self, whole: Any, dim: int) -> Any:
        """The pieces of a whole array."""
        return lax.concatenate([piece.of(whole, dim) for piece in self.pieces], dim)

    def place(self, whole: Any, joined: Any, dim: int, *, apart: bool = False) -> Any:
        """The whole array with the pieces written into it."""
        start = 0
        for piece in self.pieces:
            end = start + int(whole.shape[dim] * piece.share)
            part = lax.slice_in_dim(joined, start, end, axis=dim)
            whole = piece.place(whole, part, dim, apart=apart)
            start = end
        return whole


def accumulator_dtype(dtype: Any) -> Any:
    """Partial sums of floats narrower than 32 bits are added up in float32; others in their own type."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def added(total: Any, partial: Any) -> Any:
    """A sum so far with one more partial product, which comes first.

    Where the TPU compiler places the starts of hops it fuses an addition into a matmul only so: the other way
    round each sum was read and written apart, and rings took up to three times as long.
    """
    return lax.add(partial, total)


def run_on_piece(
    flow: Dataflow,
    blocks: Iterable[BlockOp],
    pieces: dict[int, Any],
    piece: Piece | Joined,
    read: Read,
    widened: frozenset[int] = frozenset(),
) -> None:
    """Runs operations on one piece and adds what they make to ``pieces``, value by value.

    Args:
      flow: the dataflow graph.
      blocks: operations, in program order.
      pieces: values of which the piece is at hand.
      piece: which piece; operands that are not at hand are cut out of the whole.
      read: gives whole values.
      widened: operations whose results are wanted in the accumulator's dtype.
    """
    dot: int | None = None
    for block in blocks:
        op = flow.ops[block.op]
        operands = []
        for operand, dim in zip(op.inputs, block.dims.operand_dims, strict=True):
            if dim is not None and isinstance(operand, int) and operand in pieces:
                operands.append(pieces[operand])
            else:
                operands.append(read(operand) if dim is None else piece.of(read(operand), dim))
        if op.name in LONE:
            pieces[op.outputs[0]] = operands[0]
            continue
        params = dict(op.params)
        if isinstance(block.dims, Blockwise):
            params = dict(block_params(op.name, call_of(flow, op), block.dims, piece.share))
        if op.name == "pvary":
            params["axes"] = tuple(sorted(set(op.params["axes"]) - _varying(operands[0])))
            if not params["axes"]:
                pieces[op.outputs[0]] = operands[0]
                continue
        if block.op in widened:
            dtype = accumulator_dtype(flow.avals[op.outputs[0]].dtype)
            if op.name == "dot_general":
                params["preferred_element_type"] = dtype
                if shims.device_kind(flow.avals[op.outputs[0]]) == "cpu":
                    # XLA:CPU has no kernel for some dots of narrow floats with a float32 result.
                    operands = [lax.convert_element_type(o, accumulator_dtype(o.dtype)) for o in operands]
            elif op.name == "convert_element_type":
                params["new_dtype"] = accumulator_dtype(params["new_dtype"])
        if op.name == "dot_general" and shims.on_gpu(flow.avals[op.outputs[0]]):
            if dot is not None:
                # XLA:GPU makes one of dots that share an operand, and then joins their weights in every step.
                operands[0], pieces[dot] = tie_typed(flow, operands[0], pieces[dot])
            dot = op.outputs[0]
        with shims.equation_scope(op.eqn, op.scope):
            operands = _alike(operands)
            results = op.bind(operands, params)
        pieces.update(zip(op.outputs, results, strict=True))


def reading(known: Mapping[Any, Any], read: Read) -> Read:
    """Reads operands, in whose place some are given."""
    return lambda operand: known[operand] if operand in known else read(operand)


def read_after(awaited: Sequence[Any], operands: Collection[int], read: Read) -> Read:
    """Reads operands, of which these are not there before what is awaited."""
    if not awaited:
        return read
    waiting = tie(*awaited, *map(read, operands))[len(awaited) :]
    return reading(dict(zip(operands, waiting, strict=True)), read)


def cut_once(flow: Dataflow, blocks: Iterable[BlockOp]) -> dict[int, int]:
    """The values from elsewhere that operations cut into blocks, always along the same dim, and that dim."""
    blocks = tuple(blocks)
    made = {value for block in blocks for value in flow.ops[block.op].outputs}
    dims: dict[int, set[int]] = {}
    for block in blocks:
        for operand, dim in zip(flow.ops[block.op].inputs, block.dims.operand_dims, strict=True):
            if isinstance(operand, int) and operand not in made and dim is not None:
                dims.setdefault(operand, set()).add(dim)
    return {operand: dim for operand, (dim, *more) in ((o, tuple(d)) for o, d in dims.items()) if not more}


def blocks_of(
    wholes: Mapping[int, Any], dims: Mapping[int, int], piece: Piece | Joined, *, apart: bool
) -> dict[int, Any]:
    """The piece's block of each whole, along its dim; if ``apart``, cut out by an operation of its own."""
    blocks = {operand: piece.of(wholes[operand], dim) for operand, dim in dims.items()}
    return {o: lax.optimization_barrier(block) for o, block in blocks.items()} if apart else blocks


def _varying(value: Any) -> frozenset[str]:
    return shims.varying_axes(jax.typeof(value))


def _alike(operands: list[Any]) -> list[Any]:
    """The operands with equal varying types: pieces vary over the axis even if the whole does not."""
    axes = frozenset().union(*map(_varying, operands))
    return [as_varying(operand, axes) for operand in operands]


def as_varying(value: Any, axes: Iterable[str]) -> Any:
    """A value of a type that varies over (at least) the axes."""
    missing = tuple(sorted(set(axes) - _varying(value)))
    return lax.pcast(value, missing, to="varying") if missing else value


def blank(flow: Dataflow, value: int) -> Any:
    """An array of a value's type, to place its pieces in."""
    aval = flow.avals[value]
    return blank_of(aval.shape, aval, differentiable=flow.differentiable)


def blank_of(shape: tuple[int, ...], like: Any, *, differentiable: bool) -> Any:
    """An array of this shape, with the dtype and varying type of another value or type."""
    aval = jax.typeof(like) if hasattr(like, "aval") else like
    array = shims.uninitialised(shape, aval, differentiable=differentiable)
    return as_varying(array, shims.varying_axes(aval))


def write(whole: Any, part: Any, starts: Mapping[int, Any], places: Places) -> Any:
    """The whole array with a part of it written from these starts, by dim; from 0 in the others.

    Of a write from constant starts TPU compilers make a loop, two or three times as long by their own
    estimates as the write by itself takes at the speed of the memory.
    """
    indices: list[Any] = [starts.get(dim, np.int32(0)) for dim in range(whole.ndim)]
    if shims.on_tpu(jax.typeof(whole)):
        nothing = places.nothing
        indices = [lax.add(index, nothing) for index in indices]
    return lax.dynamic_update_slice(whole, part, indices, allow_negative_indices=False)


def in_rows(flow: Dataflow, whole: Any, *, dims: int = 3, dim: int | None = None) -> Any:
    """An array that parts are written to, or cut out of, laid out by rows on a TPU.

    Its compiler may else lay one of three dims out by columns, and turns every part to write it, and what is
    read with it: a Megatron MLP's step took 6 % longer (v5p). Arrays of fewer dims than `dims` are left to
    it, those whose rows are no whole tiles, and what jax is to differentiate.

    Args:
      flow: the dataflow graph.
      whole: the array.
      dims: how many it has to have.
      dim: along which it is put together. Where the rows before its last dim are too few to fill a tile, such
        as some heads of a device, those of this dim are its rows.
    """
    order = _order(flow, whole.shape, dims, dim)
    if order is None or not shims.on_tpu(jax.typeof(whole)):
        return whole
    return shims.laid_out(whole, order)


def is_in_rows(flow: Dataflow, value: int, dim: int) -> bool:
    """Whether an array that is put together along a dim is laid out so."""
    return _order(flow, flow.avals[value].shape, 3, dim) is not None


def _order(flow: Dataflow, shape: Sequence[int], dims: int, dim: int | None) -> rows.Order | None:
    return None if len(shape) < dims or flow.differentiable else rows.put_together(shape, dim)


def transposed(flow: Dataflow, value: int) -> bool:
    """Whether a value is a transposed one in another form: what an attention gives has its heads moved.

    Compilers may leave it as it was made, and then lay the whole out anew for every piece that is cut out of
    it behind a barrier: the step of an attention took 5 % longer (v5p), its last dot 20 % (H100).
    """
    while (maker := flow.producer.get(value)) is not None:
        of = flow.form_of(flow.ops[maker])
        if of is None or flow.ops[maker].name == "transpose":
            return of is not None
        value = of
    return False


def laid_out_once(flow: Dataflow, cut: Mapping[int, int], read: Read) -> dict[int, Any]:
    """The operands, of those that are cut into blocks along these dims, that are laid out before by rows.

    Beside what is `transposed`, arrays of few rows: of weights of four heads the compiler laid out all behind
    each barrier, to multiply a block of them (v6e: a step of three layers took 13 % longer).
    """
    found: dict[int, Any] = {}
    for operand, dim in cut.items():
        if transposed(flow, operand):
            found[operand] = in_rows(flow, read(operand))
        elif rows.has_few(flow.avals[operand].shape):
            found[operand] = in_rows(flow, read(operand), dim=dim)
    return found


def write_in_a_row(whole: Any, parts: Iterable[Any], dim: int, start: int, places: Places) -> tuple[Any, int]:
    """The whole array with parts of it written one after the other along a dim, and where they end."""
    for part in parts:
        whole = write(whole, part, {dim: np.int32(start)}, places)
        start += part.shape[dim]
    return whole, start


Carried = TypeVar("Carried")


def loop(start: int, stop: int, body: Callable[[Any, Carried], Carried], carried: Carried) -> Carried:
    """``lax.fori_loop`` whose body is given an int32: jax counts between known bounds in int64 under x64."""

    def iteration(number: Any, carried: Carried) -> Carried:
        with shims.hops_vary():
            return body(lax.convert_element_type(number, np.int32), carried)

    return lax.fori_loop(start, stop, iteration, carried)


@contextlib.contextmanager
def chain_scope(flow: Dataflow, chain: Chain) -> Iterator[None]:
    """The place of a chain's collective in the user's program."""
    op = flow.ops[chain.collective.op]
    with shims.equation_scope(op.eqn, op.scope), jax.named_scope(f"overlap_{chain.kind}"):
        yield


def tie(*values: Any) -> tuple[Any, ...]:
    """Makes each of the values wait for all of them, which keeps a hop beside the matmul to overlap."""
    return shims.barrier(*values)


def tie_typed(flow: Dataflow, *values: Any) -> tuple[Any, ...]:
    """The same; values of different types are not held up in what jax is to differentiate."""
    if flow.differentiable and len(set(map(_varying, values))) > 1:
        return values
    return tie(*values)
