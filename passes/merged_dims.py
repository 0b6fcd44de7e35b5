"""Dims that a reshape merges between a collective and its dots: kept apart, so that the two are a chain.

Tokens are often flattened, ``[b, s, d] → [b*s, d]``, before a dot and spread out again after it. Where s is
gathered or scattered, a block of s is no block of b*s, and a chain would end at the reshape. Dots, reductions
and elementwise operations do the same with b and s as dims of their own, so the graph is written that way,
as far as they reach; reshapes stand where anything else reads or makes a merged dim.

A TPU keeps tiles of the two minor dims. Where blocks of a few rows, or parts of the minor dim, become dims of
their own, tiles are hardly filled, and rings took up to twice as long as what was written (v5p).
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from cost_model.tile import SUBLANES
from passes import shims
from passes.blocks import (
    REDUCTIONS,
    RESULT,
    Shape,
    blockwise,
    is_elementwise,
    of_shape,
    shards,
    unsharded,
)
from passes.collective import Collective, explicitly_sharded, read_collective, unsupported
from passes.dots import dot_dims
from passes.gather_match import call_of
from passes.graph import Dataflow, Op, Operand

_FAR = 64
"""Operations between a collective and a reshape, or beside the way to it, after which none is looked for."""

_ROWS: Final = 2 * SUBLANES
"""Rows of a tile of elements of two bytes."""

_SUMS = frozenset({"psum", "psum_invariant"})
"""Collectives to which dims are nothing."""

_OVER_MERGED = REDUCTIONS | {"reduce_and", "reduce_or"}
"""Reductions that may be over several dims just as well as over one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The dims that make up one: its number, and their sizes, major to minor."""

    dim: int
    sizes: tuple[int, ...]

    def shape(self, merged: Shape) -> Shape:
        """The shape in which they are dims of their own."""
        return (*merged[: self.dim], *self.sizes, *merged[self.dim + 1 :])

    def places(self, dim: int) -> tuple[int, ...]:
        """Where a dim of the merged shape is in that shape."""
        if dim == self.dim:
            return tuple(range(dim, dim + len(self.sizes)))
        return (dim if dim < self.dim else dim + len(self.sizes) - 1,)


@dataclasses.dataclass(frozen=True, slots=True)
class Merge:
    """A reshape at which the way between a collective and dots ends.

    Attributes:
      collective: the collective's operation.
      reshape: the reshape's.
      value: that of the reshape's operand and result in which dims are merged.
      parts: those dims.
      fills_tiles: whether blocks fill tiles where the dims are apart.
    """

    collective: int
    reshape: int
    value: int
    parts: Parts
    fills_tiles: bool


def merges(flow: Dataflow) -> tuple[Merge, ...]:
    """The reshapes at which the ways from gathers down to dots, or from scatters up to dots, end."""
    found: list[Merge] = []
    for index in flow.live:
        collective = read_collective(flow, index)
        if collective is None or unsupported(flow, collective) is not None:
            continue
        if collective.kind in ("all_gather", "all_to_all"):
            found.extend(_below(flow, collective))
        if collective.kind == "reduce_scatter":
            found.extend(_above(flow, collective, collective.dim))
        elif collective.kind == "all_to_all":
            found.extend(_above(flow, collective, flow.ops[index].params["split_axis"]))
    return tuple(found)


def kept_apart(flow: Dataflow, found: Iterable[Merge]) -> Dataflow:
    """The graph in which the dims merged by these reshapes are apart; values keep their numbers."""
    return _Apart(flow, tuple(found)).written()


def _below(flow: Dataflow, collective: Collective) -> Iterator[Merge]:
    """The reshapes that end the way of a gather."""
    waiting = deque([(flow.ops[collective.op].outputs[0], collective.dim)])
    seen: set[int] = set()
    while waiting and len(seen) < _FAR:
        value, dim = waiting.popleft()
        for user in sorted(set(flow.users[value]) - seen - {-1}):
            seen.add(user)
            op = flow.ops[user]
            side = op.inputs.index(value)
            rule = blockwise(op.name, call_of(flow, op), side, dim, collective.axis_size)
            if rule is not None:
                waiting.extend((made, rule.result_dim) for made in op.outputs)
            elif _is_plain_reshape(op):
                yield from _merged(flow, collective, user, value, op.outputs[0], dim)


def _above(flow: Dataflow, collective: Collective, dim: int) -> Iterator[Merge]:
    """The reshapes that end the way up from a scatter."""
    waiting: deque[tuple[Operand, int | None]] = deque([(flow.ops[collective.op].inputs[0], dim)])
    seen: set[int] = set()
    while waiting and len(seen) < _FAR:
        value, asked = waiting.popleft()
        maker = flow.producer.get(value) if isinstance(value, int) else None
        if maker is None or maker in seen or asked is None:
            continue
        seen.add(maker)
        op = flow.ops[maker]
        rule = blockwise(op.name, call_of(flow, op), RESULT, asked, collective.axis_size)
        if rule is not None:
            waiting.extend(zip(op.inputs, rule.operand_dims, strict=True))
        elif _is_plain_reshape(op) and isinstance(source := op.inputs[0], int):
            yield from _merged(flow, collective, maker, op.outputs[0], source, asked)


def _merged(
    flow: Dataflow, collective: Collective, reshape: int, apart: int, merged: int, dim: int
) -> Iterator[Merge]:
    """A reshape, if one dim of the value ``merged`` is made of dims around ``dim`` of the value ``apart``."""
    parts, whole = flow.avals[apart].shape, flow.avals[merged].shape
    for index, size in enumerate(whole):
        before = math.prod(whole[:index])
        first = next((d for d in range(dim + 1) if math.prod(parts[:d]) == before), None)
        if first is None:
            continue
        last = next((d for d in range(dim, len(parts)) if math.prod(parts[first : d + 1]) == size), None)
        if last is not None and last > first:
            rows = parts[last] // (collective.axis_size if dim == last else 1)
            fills = index < len(whole) - 1 and rows >= _ROWS
            yield Merge(collective.op, reshape, merged, Parts(index, parts[first : last + 1]), fills)
            return


def _is_plain_reshape(op: Op) -> bool:
    """Whether an operation is a reshape that keeps the order of elements, and says nothing of shardings."""
    return op.name == "reshape" and op.params["dimensions"] is None and not shards(op.params.get("sharding"))


@dataclasses.dataclass(frozen=True, slots=True)
class _Change:
    """An operation with dims apart.

    Attributes:
      operands, result: what it reads and makes apart, if anything.
      params: its parameters then.
      reshape: because of which it is changed.
    """

    operands: tuple[Parts | None, ...]
    result: Parts | None
    params: Mapping[str, Any]
    reshape: Op


class _Apart:
    """Spreads dims that are apart over the operations that can have them so, and writes the graph."""

    def __init__(self, flow: Dataflow, found: tuple[Merge, ...]) -> None:
        self.flow = flow
        self.parts: dict[int, Parts] = {}
        self.changes: dict[int, _Change] = {}
        # The reshapes because of which values have dims apart.
        self.made_by: dict[int, Op] = {}
        self.ops: list[Op] = []
        self.avals = list(flow.avals)
        self.reshaped: dict[tuple[Operand, Parts | None], int] = {}
        self.same: dict[Operand, Operand] = {}
        for merge in found:
            self._spread(merge.value, merge.parts, flow.ops[merge.reshape])

    def _spread(self, value: int, parts: Parts, reshape: Op) -> None:
        """Has a value made with dims apart, if its maker can, and so on with those beside and after it."""
        waiting: list[tuple[Operand, Parts]] = [(value, parts)]
        while waiting:
            operand, parts = waiting.pop()
            if not isinstance(operand, int) or operand in self.parts:
                continue
            maker = self.flow.producer.get(operand)
            if maker is None or explicitly_sharded(self.flow.avals[operand]):
                continue
            if not _is_plain_reshape(self.flow.ops[maker]) and maker not in self.changes:
                change = _changed(self.flow, self.flow.ops[maker], RESULT, parts, reshape)
                if change is None:
                    continue
                self.changes[maker] = change
                waiting.extend(self._read(change, maker))
            elif maker in self.changes and self.changes[maker].result != parts:
                continue
            self.parts[operand], self.made_by[operand] = parts, reshape
            for user in sorted({u for u in self.flow.users[operand] if u >= 0 and u not in self.changes}):
                op = self.flow.ops[user]
                change = _changed(self.flow, op, op.inputs.index(operand), parts, reshape)
                if change is None or op.outputs[0] in self.parts:
                    continue
                self.changes[user] = change
                waiting.extend(self._read(change, user))
                if change.result is not None:
                    waiting.append((op.outputs[0], change.result))

    def _read(self, change: _Change, index: int) -> Iterator[tuple[Operand, Parts]]:
        for operand, parts in zip(self.flow.ops[index].inputs, change.operands, strict=True):
            if parts is not None and set(parts.sizes) != {1}:
                yield operand, parts

    def written(self) -> Dataflow:
        """The graph with dims apart."""
        for value, parts in self.parts.items():
            self.avals[value] = self._shaped(value, parts)
        for index, op in enumerate(self.flow.ops):
            change = self.changes.get(index)
            if change is not None:
                pairs = zip(op.inputs, change.operands, strict=True)
                inputs = [self._as(o, parts, change.reshape) for o, parts in pairs]
                self._write(op, inputs, change.params)
            elif _is_plain_reshape(op) and not self.parts.keys().isdisjoint((*op.inputs, *op.outputs)):
                self._write_reshape(op)
            else:
                self.ops.append(dataclasses.replace(op, inputs=tuple(self._as(o, None) for o in op.inputs)))
        outputs = tuple(self._as(o, None) for o in self.flow.outputs)
        return dataclasses.replace(self.flow, ops=tuple(self.ops), avals=tuple(self.avals), outputs=outputs)

    def _write_reshape(self, op: Op) -> None:
        """Writes a reshape of or to dims that are apart, unless the two shapes are the same now."""
        (operand,), (result,) = op.inputs, op.outputs
        operand = self.same.get(operand, operand)
        shape = self.avals[result].shape
        if isinstance(operand, int) and self.avals[operand].shape == shape:
            self.same[result] = operand
        else:
            self._write(op, (operand,), {**op.params, "new_sizes": shape, "sharding": None})

    def _write(self, op: Op, inputs: Iterable[Operand], params: Mapping[str, Any]) -> None:
        eqn = op.eqn if params == op.params else op.eqn.replace(params=dict(params))
        self.ops.append(dataclasses.replace(op, eqn=eqn, inputs=tuple(inputs)))

    def _as(self, operand: Operand, wanted: Parts | None, reshape: Op | None = None) -> Operand:
        """The operand with these dims apart, or none: where it is otherwise, reshaped as the user did.

        Args:
          reshape: the one because of which dims are wanted apart, if any are.
        """
        key = (operand, wanted)
        if wanted == (self.parts.get(operand) if isinstance(operand, int) else None):
            return self.same.get(operand, operand)
        if key not in self.reshaped:
            like = self.made_by.get(operand, reshape) if isinstance(operand, int) else reshape
            assert like is not None
            self.avals.append(self._shaped(operand, wanted))
            made = self.reshaped[key] = len(self.avals) - 1
            params = {**like.params, "new_sizes": self.avals[made].shape, "sharding": None}
            source = self.same.get(operand, operand)
            self._write(dataclasses.replace(like, outputs=(made,)), (source,), params)
        return self.reshaped[key]

    def _shaped(self, operand: Operand, parts: Parts | None) -> Any:
        aval = self.flow.aval(operand)
        return aval if parts is None else of_shape(aval, parts.shape(aval.shape))


def _changed(flow: Dataflow, op: Op, side: int, parts: Parts, reshape: Op) -> _Change | None:
    """An operation of which one operand or the result has dims apart; None if it cannot."""
    avals = [*map(flow.aval, op.inputs), *(flow.avals[value] for value in op.outputs)]
    if len(op.outputs) != 1 or shims.has_effects(op.eqn) or any(map(explicitly_sharded, avals)):
        return None
    dims = _sides_apart(flow, op, side, parts)
    if dims is None:
        return None
    operands, result = dims
    return _Change(operands, result, {**unsharded(op.params), **_params(op, operands, result)}, reshape)


def _sides_apart(
    flow: Dataflow, op: Op, side: int, parts: Parts
) -> tuple[tuple[Parts | None, ...], Parts | None] | None:
    """What the operands and the result have apart, if one side has that; None if it is not so."""

    def apart(dim: int | None) -> Parts | None:
        return None if dim is None else Parts(dim, parts.sizes)

    call = call_of(flow, op)
    if shards(op.params.get("out_sharding")):
        return None
    if op.name == "dot_general":
        ranks = (len(call.operands[0]), len(call.operands[1]))
        dot = dot_dims(op.params["dimension_numbers"], ranks, side, parts.dim)
        return tuple(map(apart, dot.operand_dims)), apart(dot.result_dim)
    if op.name in _OVER_MERGED and side != RESULT and parts.dim in op.params["axes"]:
        return (apart(parts.dim),), None
    if op.name in _SUMS and all(isinstance(axis, str) for axis in op.params["axes"]):
        return (parts,), parts
    elementwise = is_elementwise(op.name)
    if not elementwise and op.name not in ("broadcast_in_dim", "transpose", *_OVER_MERGED):
        return None
    rule = blockwise(op.name, call, side, parts.dim, math.prod(parts.sizes))
    if rule is None:
        return None
    # Elementwise, a size of 1 stands for any: it is one of 1 for each of the dims.
    one = Parts(rule.result_dim, (1,) * len(parts.sizes)) if elementwise else None
    pairs = zip(call.operands, rule.operand_dims, strict=True)
    return tuple(one if shape and dim is None else apart(dim) for shape, dim in pairs), apart(rule.result_dim)


def _params(op: Op, operands: tuple[Parts | None, ...], result: Parts | None) -> Mapping[str, Any]:
    """The parameters that number dims, or hold sizes, of an operation with dims apart."""

    def places(parts: Parts | None, dims: Iterable[int]) -> tuple[int, ...]:
        return tuple(place for dim in dims for place in (parts.places(dim) if parts else (dim,)))

    if op.name == "dot_general":
        roles = op.params["dimension_numbers"]
        return {
            "dimension_numbers": tuple(
                tuple(places(parts, dims) for parts, dims in zip(operands, role, strict=True))
                for role in roles
            )
        }
    if op.name == "transpose":
        return {"permutation": places(operands[0], op.params["permutation"])}
    if op.name in _OVER_MERGED:
        return {"axes": places(operands[0], op.params["axes"])}
    if op.name == "broadcast_in_dim" and result is not None:
        placed = op.params["broadcast_dimensions"]
        whole = operands[0].dim if operands[0] else None
        return {
            "shape": result.shape(op.params["shape"]),
            "broadcast_dimensions": tuple(
                place
                for dim, target in enumerate(placed)
                for place in (result.places(target) if dim == whole else result.places(target)[:1])
            ),
        }
    return {}
