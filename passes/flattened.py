"""Dims that no ring needs apart, made one: heads and their width, of a weight that is gathered or scattered.

A projection's weight is often [D, heads, width], and D is gathered, or its gradient scattered along D. TPU
compilers make a convolution over the heads of such a dot, and lay its result out with the heads outermost;
what a ring adds up is turned round for every piece then (v5e: 3337 us for a gather that takes 784 as
written, and 506 as a ring of [D, heads · width]). So the graph is written with such dims as one, from the
collective to its dots; reshapes stand where anything else reads or makes them. A few wide arrays, such as a
gate and what it gates in one, stay apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from jax import lax

from cost_model.tile import SUBLANES
from passes.blocks import is_elementwise, of_shape, shards, unsharded
from passes.collective import Collective, explicitly_sharded, read_collective, unsupported
from passes.graph import Dataflow, Op, Operand

WIDE: Final = 1024
"""Of a few arrays in one, a gate and what it gates, of rows this wide each is better sent as it is: to make
their rows one turns round all of what is kept of them (v6e: a step of three layers took 9 % longer)."""

_DIMENSION: Final = {"all_gather": "all_gather_dimension", "reduce_scatter": "scatter_dimension"}


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring dims of an array, from the first to the last, that become one."""

    first: int
    last: int

    def shape(self, apart: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which they are one."""
        size = math.prod(apart[self.first : self.last + 1])
        return (*apart[: self.first], size, *apart[self.last + 1 :])

    def place(self, dim: int) -> int:
        """Where another dim, or the run, is in that shape."""
        return dim if dim <= self.first else max(self.first, dim - (self.last - self.first))

    def holds(self, dim: int) -> bool:
        """Whether it is one of them."""
        return self.first <= dim <= self.last


@dataclasses.dataclass(frozen=True, slots=True)
class _Dot:
    """A dot with a run of dims made one: of both its operands where they are contracted.

    Attributes:
      operands: the runs of its operands, if any.
      result: that of its result, if any.
    """

    operands: tuple[Run | None, Run | None]
    result: Run | None


@dataclasses.dataclass(frozen=True, slots=True)
class Flattening:
    """A collective, and what is between it and its dots, with dims made one.

    Attributes:
      collective: the collective's operation.
      kind: of the collective.
      run: the dims of what it moves.
      between: the operations between it and dots, each with the run of its result.
      dots: the dots.
    """

    collective: int
    kind: str
    run: Run
    between: Mapping[int, Run]
    dots: Mapping[int, _Dot]


def flattenings(flow: Dataflow) -> tuple[Flattening, ...]:
    """What can be flattened; each dot is part of one at most."""
    found: list[Flattening] = []
    taken: set[int] = set()
    for index in flow.live:
        collective = read_collective(flow, index)
        if collective is None or collective.kind not in _DIMENSION or not collective.tiled:
            continue
        if unsupported(flow, collective) is not None or not isinstance(flow.ops[index].inputs[0], int):
            continue
        for run in _runs(flow, collective):
            make = _of_gather if collective.kind == "all_gather" else _of_scatter
            one = make(flow, collective, run, taken)
            if one is not None:
                found.append(one)
                taken.update(one.dots)
                break
    return tuple(found)


def flattened(flow: Dataflow, found: Iterable[Flattening]) -> Dataflow:
    """The graph so written; values keep their numbers, operations do not."""
    return _Writer(flow, tuple(found)).written()


def _runs(flow: Dataflow, collective: Collective) -> Iterator[Run]:
    """The runs of two dims or more on either side of that which is gathered or scattered."""
    op = flow.ops[collective.op]
    avals = [flow.aval(op.inputs[0]), flow.avals[op.outputs[0]]]
    if any(map(explicitly_sharded, avals)):
        return
    for first, last in ((collective.dim + 1, len(avals[0].shape) - 1), (0, collective.dim - 1)):
        outer, inner = math.prod(avals[0].shape[first:last]), avals[0].shape[last]
        if last > first and (outer >= SUBLANES or inner < WIDE):
            yield Run(first, last)


def _of_gather(flow: Dataflow, collective: Collective, run: Run, taken: set[int]) -> Flattening | None:
    """A gather whose dots add up what is gathered, and keep the run."""
    between: dict[int, Run] = {}
    dots: dict[int, _Dot] = {}
    adds_up = False
    waiting = list(flow.ops[collective.op].outputs)
    while waiting:
        value = waiting.pop()
        for user in sorted(set(flow.users[value]) - {-1}):
            op = flow.ops[user]
            if op.name == "dot_general":
                dot = _dot(flow, op, value, run)
                if dot is not None and user not in taken and user not in dots:
                    dots[user] = dot
                    side = op.inputs.index(value)
                    contracting = op.params["dimension_numbers"][0][side]
                    adds_up = adds_up or (dot.result is not None and collective.dim in contracting)
            elif _is_alone(flow, op, value):
                between[user] = run
                waiting += op.outputs
    return Flattening(collective.op, "all_gather", run, between, dots) if adds_up else None


def _of_scatter(flow: Dataflow, collective: Collective, run: Run, taken: set[int]) -> Flattening | None:
    """A scatter of one dot's product, through transposes and what changes every element by itself."""
    (value,) = flow.ops[collective.op].inputs
    reader, here, between = collective.op, run, dict[int, Run]()
    while isinstance(value, int) and flow.users[value] == (reader,):
        reader = flow.producer.get(value, -1)
        if reader < 0 or reader in taken:
            return None
        op = flow.ops[reader]
        if op.name == "dot_general":
            dot = _dot_of_result(flow, op, here)
            if dot is None:
                return None
            return Flattening(collective.op, "reduce_scatter", run, between, {reader: dot})
        between[reader] = here
        if op.name == "transpose":
            dims = op.params["permutation"][here.first : here.last + 1]
            if list(dims) != list(range(dims[0], dims[0] + len(dims))):
                return None
            here, value = Run(dims[0], dims[-1]), op.inputs[0]
        elif (source := flow.form_of(op)) is not None and _is_alone(flow, op, source):
            value = source
        else:
            return None
    return None


def _is_alone(flow: Dataflow, op: Op, value: int) -> bool:
    """Whether an operation changes every element of this array by itself, and reads no other."""
    return is_elementwise(op.name) and flow.form_of(op) == value and len(op.outputs) == 1


def _dot(flow: Dataflow, op: Op, value: int, run: Run) -> _Dot | None:
    """A dot that reads a value with the run as one; None if it needs the dims apart, or reads it twice."""
    avals = [*map(flow.aval, op.inputs), flow.avals[op.outputs[0]]]
    if op.inputs[0] == op.inputs[1] or shards(op.params.get("out_sharding")):
        return None
    if any(map(explicitly_sharded, avals)) or not all(isinstance(o, int) for o in op.inputs):
        return None
    side = op.inputs.index(value)
    contracting, batch = op.params["dimension_numbers"]
    dims = range(run.first, run.last + 1)
    if not any(run.holds(dim) for dim in (*contracting[side], *batch[side])):
        free = [d for d in range(len(avals[side].shape)) if d not in contracting[side] + batch[side]]
        first = len(batch[0]) + free.index(run.first)
        if side == 1:
            first += len(avals[0].shape) - len(contracting[0]) - len(batch[0])
        operands = (run, None) if side == 0 else (None, run)
        return _Dot(operands, Run(first, first + run.last - run.first))
    if all(dim in contracting[side] for dim in dims):
        partner = [contracting[1 - side][list(contracting[side]).index(dim)] for dim in dims]
        if partner == list(range(partner[0], partner[0] + len(partner))):
            other = Run(partner[0], partner[-1])
            return _Dot((run, other) if side == 0 else (other, run), None)
    return None


def _dot_of_result(flow: Dataflow, op: Op, run: Run) -> _Dot | None:
    """A dot whose result has the run as one: free dims of one operand, neighbours there too."""
    contracting, batch = op.params["dimension_numbers"]
    offset = len(batch[0])
    for side in (0, 1):
        rank = len(flow.aval(op.inputs[side]).shape)
        free = [d for d in range(rank) if d not in (*contracting[side], *batch[side])]
        if offset <= run.first and run.last < offset + len(free):
            dims = free[run.first - offset : run.last - offset + 1]
            value = op.inputs[side]
            if dims[-1] - dims[0] != run.last - run.first or not isinstance(value, int):
                return None
            return _dot(flow, op, value, Run(dims[0], dims[-1]))
        offset += len(free)
    return None


class _Writer:
    """Writes the graph."""

    def __init__(self, flow: Dataflow, found: tuple[Flattening, ...]) -> None:
        self.flow = flow
        self.avals = list(flow.avals)
        self.ops: list[Op] = []
        self.flat: dict[tuple[int, Run], int] = {}
        self.collectives = {each.collective: each for each in found}
        self.between = {op: (each, run) for each in found for op, run in each.between.items()}
        self.dots = {op: (each, dot) for each in found for op, dot in each.dots.items()}

    def written(self) -> Dataflow:
        """The graph with such dims as one."""
        for index, op in enumerate(self.flow.ops):
            if index in self.collectives:
                each = self.collectives[index]
                name = _DIMENSION[each.kind]
                params = {**op.params, name: each.run.place(op.params[name])}
                self._write(op, [each.run], each.run, params, whole=True)
            elif index in self.between:
                each, run = self.between[index]
                self._write_between(op, each, run)
            elif index in self.dots:
                each, dot = self.dots[index]
                self._write(op, dot.operands, dot.result, _dot_params(op, dot), whole=_is_whole(each))
            else:
                self.ops.append(op)
        return dataclasses.replace(self.flow, ops=tuple(self.ops), avals=tuple(self.avals))

    def _write_between(self, op: Op, each: Flattening, run: Run) -> None:
        params, read = op.params, run
        if op.name == "transpose":
            dims = op.params["permutation"]
            read = Run(dims[run.first], dims[run.last])
            kept = [dim for place, dim in enumerate(dims) if not run.first < place <= run.last]
            params = {**params, "permutation": tuple(read.place(dim) for dim in kept)}
        scalar = [None if not self.flow.aval(operand).shape else read for operand in op.inputs]
        self._write(op, scalar, run, params, whole=_is_whole(each))

    def _write(
        self,
        op: Op,
        operands: Iterable[Run | None],
        result: Run | None,
        params: Mapping[str, Any],
        *,
        whole: bool,
    ) -> None:
        """Writes an operation with runs of its operands and its result as one.

        Args:
          whole: whether others may read the result with the dims apart.
        """
        inputs = [self._flat(o, run, op) for o, run in zip(op.inputs, operands, strict=True)]
        eqn = op.eqn.replace(params=dict(params))
        (value,) = op.outputs
        if result is None:
            self.ops.append(dataclasses.replace(op, eqn=eqn, inputs=tuple(inputs)))
            return
        made = self._new(value, result)
        self.flat[value, result] = made
        self.ops.append(dataclasses.replace(op, eqn=eqn, inputs=tuple(inputs), outputs=(made,)))
        if whole:
            self._reshape(op, made, value)

    def _flat(self, operand: Operand, run: Run | None, like: Op) -> Operand:
        """An operand with a run of dims as one."""
        if run is None or not isinstance(operand, int):
            return operand
        if (operand, run) not in self.flat:
            made = self.flat[operand, run] = self._new(operand, run)
            self._reshape(like, operand, made)
        return self.flat[operand, run]

    def _new(self, value: int, run: Run) -> int:
        aval = self.flow.avals[value]
        self.avals.append(of_shape(aval, run.shape(aval.shape)))
        return len(self.avals) - 1

    def _reshape(self, like: Op, source: int, to: int) -> None:
        params = {"new_sizes": self.avals[to].shape, "dimensions": None, "sharding": None}
        eqn = like.eqn.replace(primitive=lax.reshape_p, params=params)
        self.ops.append(dataclasses.replace(like, eqn=eqn, inputs=(source,), outputs=(to,)))


def _is_whole(each: Flattening) -> bool:
    """Whether others may read what is between a collective and its dots: of a scatter nobody does."""
    return each.kind == "all_gather"


def _dot_params(op: Op, dot: _Dot) -> Mapping[str, Any]:
    """A dot's parameters with runs of its operands as one."""

    def placed(dims: tuple[int, ...], run: Run | None) -> tuple[int, ...]:
        if run is None:
            return tuple(dims)
        return tuple(run.place(dim) for dim in dims if not run.first < dim <= run.last)

    roles = op.params["dimension_numbers"]
    numbers = tuple(
        tuple(placed(dims, run) for dims, run in zip(role, dot.operands, strict=True)) for role in roles
    )
    return {**unsharded(op.params), "dimension_numbers": numbers}
