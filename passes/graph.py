"""A jaxpr as a dataflow graph: operations, the values between them, and who uses which value.

Inner ``jit`` calls that a chain crosses, and those that act block by block (an activation), are inlined
here, so that finders and prices see one flat program. The others stay calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jax.extend import core as jex_core

from passes import shims
from passes.blocks import is_blockwise, is_fusible

GATHERS = frozenset({"all_gather", "all_gather_invariant", "all_gather_reduced"})
SCATTERS = frozenset({"reduce_scatter", "unreduced_reduce_scatter"})
REDUCTIONS = frozenset({"psum", "psum_invariant", "unreduced_psum"})
EXCHANGES = frozenset({"all_to_all"})
COLLECTIVES = GATHERS | SCATTERS | REDUCTIONS | EXCHANGES

_SPREADING = GATHERS | REDUCTIONS | EXCHANGES
"""Collectives whose result dots may be fed from."""
_COLLECTING = SCATTERS | REDUCTIONS | EXCHANGES
"""Collectives that dots may feed."""
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""Calls of functions with a derivative of their own."""
_JITTED = frozenset({"jit", "pjit"})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A constant operand; compared by identity, since its value may be an array."""

    val: Any
    aval: Any


Operand = int | Literal


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and after each those of the jaxprs that it calls."""
    for eqn in shims.open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One equation, its operands and results named by value number.

    Attributes:
      eqn: the jaxpr equation (primitive, parameters, source).
      inputs: value numbers or literals.
      outputs: value numbers.
      scope: name scopes of the inlined calls around the equation; None outside of any.
      call: the outermost of those calls, an equation.
    """

    eqn: Any
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]
    scope: Any = None
    call: Any = None

    @property
    def name(self) -> str:
        """The primitive's name; of what is to run elsewhere than on the device's cores, that too."""
        name, place = str(self.eqn.primitive.name), shims.placed_on(self.eqn)
        return name if place is None else f"{name} on {place}"

    @property
    def params(self) -> Mapping[str, Any]:
        """The equation's parameters."""
        return self.eqn.params  # type: ignore[no-any-return]

    def bind(self, values: Sequence[Any], params: Mapping[str, Any] | None = None) -> Sequence[Any]:
        """The equation's results for other operands, and other parameters perhaps."""
        primitive = self.eqn.primitive
        try:
            results = primitive.bind(
                *values, **primitive.get_bind_params(self.params if params is None else params)
            )
        except FloatingPointError as error:
            # `jax_debug_nans` runs a program again, equation by equation, to find the first one.
            error.add_note(f"It came out of the {self.name} at {self.source}.")
            raise
        return results if primitive.multiple_results else (results,)  # type: ignore[no-any-return]

    @property
    def bodies(self) -> tuple[Any, ...]:
        """The jaxprs among the parameters; what acts block by block, as most of a long program, has none."""
        return () if is_blockwise(self.name) else tuple(jex_core.jaxprs_in_params(self.params))

    @property
    def source(self) -> str:
        """The user's source line."""
        line = shims.source_line(self.eqn)
        return shims.source_line(self.call) if line == shims.UNKNOWN and self.call is not None else line


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """A jaxpr with numbered values.

    Attributes:
      ops: the equations in program order.
      avals: the type of each value.
      inputs: value numbers of the jaxpr's arguments.
      outputs: the jaxpr's results.
      constants: values known when the jaxpr was made.
      differentiable: whether only what jax may differentiate is to be made of the graph.
      steady: values that are the same in every iteration of the loop around it.
      several_slices: whether the devices that run it are TPUs of several slices.
      sliced: arguments that are each a slice of what a loop around it runs over.
      stacked: results that a loop around it puts together, and nothing else reads.
      summed: results of sums over devices that are part of another → that one's result.
    """

    ops: tuple[Op, ...]
    avals: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Operand, ...]
    constants: Mapping[int, Any]
    differentiable: bool = False
    steady: frozenset[int] = frozenset()
    several_slices: bool = False
    sliced: frozenset[int] = frozenset()
    stacked: frozenset[int] = frozenset()
    summed: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def bytes_of(self, value: int) -> int:
        """Bytes of a value, as a whole."""
        aval = self.avals[value]
        return int(aval.size * aval.dtype.itemsize)

    @cached_property
    def producer(self) -> Mapping[int, int]:
        """The operation that makes each value; arguments and constants have none."""
        return {value: index for index, op in enumerate(self.ops) for value in op.outputs}

    @cached_property
    def collectives(self) -> Mapping[tuple[Any, ...], list[Op]]:
        """The collectives by name and operands, in program order."""
        found: dict[tuple[Any, ...], list[Op]] = {}
        for op in self.ops:
            if op.name in COLLECTIVES:
                found.setdefault((op.name, op.inputs), []).append(op)
        return found

    @cached_property
    def given(self) -> frozenset[int]:
        """The jaxpr's arguments."""
        return frozenset(self.inputs)

    @cached_property
    def live(self) -> Mapping[int, Op]:
        """The operations that have an effect or lead to a result, by number, in program order."""
        wanted = {operand for operand in self.outputs if isinstance(operand, int)}
        live: dict[int, Op] = {}
        for index in range(len(self.ops) - 1, -1, -1):
            op = self.ops[index]
            if shims.has_effects(op.eqn) or any(value in wanted for value in op.outputs):
                live[index] = op
                wanted.update(operand for operand in op.inputs if isinstance(operand, int))
        return dict(reversed(live.items()))

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """The live operations that read each value, once per operand; -1 for a result of the jaxpr."""
        users: list[list[int]] = [[] for _ in self.avals]
        for index in self.live:
            for operand in self.ops[index].inputs:
                if isinstance(operand, int):
                    users[operand].append(index)
        for operand in self.outputs:
            if isinstance(operand, int):
                users[operand].append(-1)
        return tuple(map(tuple, users))

    def edges(self) -> Iterator[tuple[int, int]]:
        """Pairs of live operations: a producer and a user of its values, once per operand.

        Those with effects are joined in program order, so that any topological order of all is one in which
        the program may run.
        """
        effectful = None
        for index, op in self.live.items():
            for before in self.before(index):
                yield before, index
            if shims.has_effects(op.eqn):
                if effectful is not None:
                    yield effectful, index
                effectful = index

    def needs(self, ops: Iterable[int]) -> Mapping[int, int]:
        """Which of some operations every live one needs a result of, where it does: bit n for the n-th."""
        makes = {op: 1 << number for number, op in enumerate(ops)}
        found: dict[int, int] = {}
        carried: dict[int, int] = {}
        for index, op in self.live.items():
            needed = 0
            for operand in op.inputs:
                if isinstance(operand, int):
                    needed |= carried.get(operand, 0)
            if needed:
                found[index] = needed
            if needed := needed | makes.get(index, 0):
                carried.update(dict.fromkeys(op.outputs, needed))
        return found

    def before(self, index: int) -> Iterator[int]:
        """The operations that make what an operation reads, once per operand."""
        producer = self.producer
        for operand in self.ops[index].inputs:
            if isinstance(operand, int) and operand in producer:
                yield producer[operand]

    def readers(self, index: int) -> set[int]:
        """The operations that read what an operation makes; -1 of a result of the program."""
        return {user for value in self.ops[index].outputs for user in self.users[value]}

    def form_of(self, op: Op) -> int | None:
        """The one array that an operation makes another form of: to XLA it may be the same, as with x * 1."""
        arrays = [operand for operand in op.inputs if isinstance(operand, int) and self.avals[operand].shape]
        return arrays[0] if len(arrays) == 1 and is_fusible(op.name) else None

    def aval(self, operand: Operand) -> Any:
        """The type of an operand."""
        return self.avals[operand] if isinstance(operand, int) else operand.aval


def dataflow(jaxpr: Any, *, differentiable: bool = False) -> Dataflow:
    """Reads an open or closed jaxpr; calls that a chain may cross, and activations, are inlined.

    Args:
      jaxpr: the jaxpr.
      differentiable: leave calls of functions with a custom derivative as they are, so that what is made of
        the graph may be differentiated.
    """
    return _Reader(differentiable).read(jaxpr)


def _told(operand: Operand) -> Any:
    """What an operand is told by: a number among constants by its type and bits."""
    if isinstance(operand, int) or operand.aval.shape or not isinstance(operand.aval.dtype, np.dtype):
        return operand
    aval = operand.aval
    return aval.dtype, aval.weak_type, np.asarray(operand.val, aval.dtype).tobytes()


@dataclasses.dataclass(frozen=True, slots=True)
class _Crossing:
    """What a jaxpr does with chains that cross its border.

    Attributes:
      gathered_outputs: some result is, or follows blockwise from, that of a collective inside.
      scattered_inputs: some argument leads, blockwise, to a collective inside.
    """

    gathered_outputs: bool
    scattered_inputs: bool


class _Reader:
    """Numbers values and inlines calls; one per jaxpr that is read."""

    def __init__(self, differentiable: bool) -> None:
        self.differentiable = differentiable
        self.ops: list[Op] = []
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.gathered: set[int] = set()
        self.alike: dict[tuple[Any, ...], list[Op]] = {}
        self.crossings: dict[int, _Crossing] = {}
        self.blockwise: dict[int, bool] = {}

    def read(self, jaxpr: Any) -> Dataflow:
        body, consts = shims.open_jaxpr(jaxpr)
        inputs = tuple(self._value(var.aval) for var in body.invars)
        outputs = self._inline(body, consts, inputs, None, None, frozenset())
        return Dataflow(
            tuple(self.ops),
            tuple(self.avals),
            inputs,
            outputs,
            self.constants,
            self.differentiable,
        )

    def _value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _inline(
        self,
        body: Any,
        consts: tuple[Any, ...],
        arguments: tuple[Operand, ...],
        scope: Any,
        call: Any,
        scattered: frozenset[Any],
    ) -> tuple[Operand, ...]:
        """Adds the equations of a jaxpr; ``scattered`` are its results that lead to a collective outside."""
        env: dict[Any, Operand] = dict(zip(body.invars, arguments, strict=True))
        for var, const in zip(body.constvars, consts, strict=True):
            env[var] = self._value(var.aval)
            self.constants[env[var]] = const  # type: ignore[index]

        def operand(atom: Any) -> Operand:
            return Literal(atom.val, atom.aval) if shims.is_literal(atom) else env[atom]

        wanted = self._scattered(body, scattered)
        for eqn in body.eqns:
            operands = tuple(map(operand, eqn.invars))
            tainted = any(o in self.gathered for o in operands if isinstance(o, int))
            called = self._called(eqn)
            if called is not None:
                crossing = self._crossing(called)
                if (
                    tainted
                    or crossing.gathered_outputs
                    or crossing.scattered_inputs
                    or any(var in wanted for var in eqn.outvars)
                    or self._blockwise_only(called)
                ):
                    inner, inner_consts = shims.open_jaxpr(called)
                    leading = frozenset(
                        result
                        for result, var in zip(inner.outvars, eqn.outvars, strict=True)
                        if var in wanted and not shims.is_literal(result)
                    )
                    inner_scope = shims.call_scope(eqn, scope)
                    results = self._inline(inner, inner_consts, operands, inner_scope, call or eqn, leading)
                    env.update(zip(eqn.outvars, results, strict=True))
                    continue
            outputs = tuple(self._value(var.aval) for var in eqn.outvars)
            if eqn.primitive.name in _SPREADING or (tainted and is_blockwise(eqn.primitive.name)):
                self.gathered.update(outputs)
            op = Op(eqn, operands, outputs, scope, call)
            self.ops.append(op)
            env.update(zip(eqn.outvars, self._first(op).outputs, strict=True))
        return tuple(map(operand, body.outvars))

    def _first(self, op: Op) -> Op:
        """The first that is equal to this one: compilers keep no other. Of most operations itself.

        So it is of collectives, and of cheap operations, such as the cast before each of two gathers.
        """
        if op.name not in COLLECTIVES and not is_fusible(op.name):
            return op
        told = op.name, tuple(map(_told, op.inputs))
        try:
            alike = self.alike.setdefault((*told, frozenset(op.params.items())), [])
        except TypeError:  # a parameter that cannot be hashed
            alike = self.alike.setdefault(told, [])
        first = next((other for other in alike if other.params == op.params), op)
        if first is op:
            alike.append(op)
        return first

    def _blockwise_only(self, jaxpr: Any) -> bool:
        """Whether all equations of a call act block by block, for some dims: an activation, for one."""
        if id(jaxpr) not in self.blockwise:
            body, _ = shims.open_jaxpr(jaxpr)
            self.blockwise[id(jaxpr)] = all(
                is_blockwise(eqn.primitive.name)
                or ((called := self._called(eqn)) is not None and self._blockwise_only(called))
                for eqn in body.eqns
            )
        return self.blockwise[id(jaxpr)]

    def _crossing(self, jaxpr: Any) -> _Crossing:
        if id(jaxpr) not in self.crossings:
            body, _ = shims.open_jaxpr(jaxpr)
            gathered: set[Any] = set()
            for eqn in body.eqns:
                name, called = eqn.primitive.name, self._called(eqn)
                follows = any(not shims.is_literal(v) and v in gathered for v in eqn.invars)
                inside = called is not None and self._crossing(called).gathered_outputs
                if name in _SPREADING or inside or (follows and (called is not None or is_blockwise(name))):
                    gathered.update(eqn.outvars)
            scattered = self._scattered(body, frozenset())
            self.crossings[id(jaxpr)] = _Crossing(
                any(not shims.is_literal(v) and v in gathered for v in body.outvars),
                any(v in scattered for v in body.invars),
            )
        return self.crossings[id(jaxpr)]

    def _scattered(self, body: Any, scattered: frozenset[Any]) -> set[Any]:
        """The variables that lead, blockwise, to a collective, here or through ``scattered``."""
        wanted = set(scattered)
        for eqn in reversed(body.eqns):
            name, called = eqn.primitive.name, self._called(eqn)
            starts = name in _COLLECTING or (called is not None and self._crossing(called).scattered_inputs)
            passes_on = any(v in wanted for v in eqn.outvars) and (called is not None or is_blockwise(name))
            if starts or passes_on:
                wanted.update(v for v in eqn.invars if not shims.is_literal(v))
        return wanted

    def _called(self, eqn: Any) -> Any:
        """The jaxpr that may stand in place of an equation that asks for no more than to run it; or None."""
        name, params = eqn.primitive.name, eqn.params
        calls = name in _CUSTOM or name in _JITTED  # most equations call nothing
        if not calls or shims.has_effects(eqn) or shims.placed_on(eqn) is not None:
            return None
        if name in _CUSTOM:
            return None if self.differentiable else params["call_jaxpr"]
        if params.get("compiler_options_kvs"):
            return None
        asked = (a for side in ("in", "out") for a in params.get(f"{side}_shardings", ()))
        if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in asked):
            return None
        layouts = (a for side in ("in", "out") for a in params.get(f"{side}_layouts", ()))
        return None if any(layout is not None for layout in layouts) else params["jaxpr"]
