"""Runs a planned program: rings in place of the chosen chains, every other equation bound again unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from passes import shims
from passes.block_eval import Read, reading, tie
from passes.blocks import MOVING
from passes.chains import Lone, ShardReduction
from passes.collective import Collective
from passes.cpu_queue import behind
from passes.decide import Unit
from passes.emit import Ring, emit_ring
from passes.gather_ring import emit_shard_reduction, own_block
from passes.graph import Dataflow, Literal, Op, Operand
from passes.hops import PlacesOf
from passes.in_flight import InFlight, own_computation, rings_are_alone
from passes.made_again import MadeAgain
from passes.plan import BODIES, Plan


class RewriteError(Exception):
    """The rewritten program is not of the type of the original; a defect of the pass.

    The message names the place.
    """


def rewritten(plan: Plan) -> Callable[..., list[Any]]:
    """The planned program as a function of the jaxpr's arguments, to be traced; returns the jaxpr's results.

    It may be differentiated as it is only if that was asked of the plan; see
    ``derivative.with_derivative_of``.
    """
    rewriter = _Rewriter()
    return lambda *arguments: rewriter.run(
        plan, arguments, alone=shims.all_is_seen() and rings_are_alone(plan)
    )


class _Rewriter:
    """Evaluates plans; remembers the new body of each jaxpr, so that a body called twice stays shared."""

    def __init__(self) -> None:
        self.traced: dict[tuple[Plan, bool], Any] = {}

    def run(
        self,
        plan: Plan,
        arguments: Sequence[Any],
        later: Mapping[int, bool] = MappingProxyType({}),
        *,
        alone: bool,
    ) -> list[Any]:
        """Evaluates a plan.

        Args:
          plan: what is to be done.
          arguments: the jaxpr's.
          later: the results that may be made again: see `Plan.made_again`.
          alone: see `InFlight`.
        """
        flow = plan.flow
        env: dict[int, Any] = {**flow.constants, **dict(zip(flow.inputs, arguments, strict=True))}
        places = PlacesOf(InFlight(alone=alone))
        twice = plan.made_again(later)

        def read(operand: Operand) -> Any:
            return operand.val if isinstance(operand, Literal) else env[operand]

        again, shared = _Again(flow, twice, read), plan.shared_operands(twice.readers)
        once: dict[int, Any] = {}
        read_once = reading(once, read)
        first: dict[int, list[int]] = {}
        by_rings: set[Operand] = set()
        for number, collective in plan.first.items():
            first.setdefault(collective.op, []).append(flow.ops[number].outputs[0])
        for unit in plan.order:
            if not isinstance(unit, int):
                if isinstance(unit, Ring):
                    waiting = _waiting(flow, unit, first.get(unit.chain.collective.op, ()), env)
                    env.update(waiting)
                    for value in waiting:
                        once.pop(value, None)
                reader = read_once if twice.readers.isdisjoint(unit.members) else again.read
                made = _emit(flow, unit, reader, places)
                by_rings.update(made if isinstance(unit, Ring) else ())
                env.update(made)
                continue
            op = flow.ops[unit]
            if op.name == "reduce_precision" and op.inputs[0] in by_rings and _rounds_to_own(flow, op):
                env[op.outputs[0]] = read(op.inputs[0])
                by_rings.update(op.outputs)
                continue
            reader = again.read if unit in twice.readers else read_once if op.name == "dot_general" else read
            values = list(map(reader, op.inputs))
            if unit in plan.held:
                values[0] = self._held_back(plan, unit, values[0], places)
            with shims.equation_scope(op.eqn, op.scope):
                results = self._bind(plan, unit, op, values, alone)
            if op.name in MOVING and op.inputs[0] in by_rings:
                by_rings.update(op.outputs)
            if not shared.isdisjoint(op.outputs):
                once.update(zip(op.outputs, tie(*results), strict=True))
            env.update(zip(op.outputs, results, strict=True))
        return [again.read(o) if o in twice.results else read(o) for o in flow.outputs]

    def _held_back(self, plan: Plan, unit: int, value: Any, places: PlacesOf) -> Any:
        """An operand of an operation, once a ring has made what it sends last."""
        collective, op = plan.held[unit], plan.flow.ops[unit]
        here = places(collective)
        if collective.op not in here.made:
            return value
        with shims.equation_scope(op.eqn, op.scope):
            return behind(value, here.nothing_of(here.made[collective.op]))

    def _bind(self, plan: Plan, index: int, op: Op, values: list[Any], alone: bool) -> Sequence[Any]:
        bodies = plan.bodies.get(index, {})
        params = op.params
        if any(body.changes for body in plan.bodies_of(index)):
            if op.name == "shard_map":
                return self._shard_map(op, bodies["jaxpr"][0], values, plan.read_later(index), alone)
            params = {
                **params,
                **{name: self._body(op, name, plans, alone) for name, plans in bodies.items()},
            }
        return op.bind(values, params)

    def _shard_map(
        self, op: Op, body: Plan, values: list[Any], later: Mapping[int, bool], alone: bool
    ) -> Sequence[Any]:
        params = op.params
        mapped: Any = jax.shard_map(
            lambda *shards: tuple(self.run(body, shards, later, alone=alone)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return mapped(*values)  # type: ignore[no-any-return]

    def _body(self, op: Op, name: str, plans: tuple[Plan, ...], alone: bool) -> Any:
        assert name in BODIES[op.name]
        original = op.params[name]
        if isinstance(original, tuple | list):
            return type(original)(
                self._retrace(o, p, op, alone) for o, p in zip(original, plans, strict=True)
            )
        return self._retrace(original, plans[0], op, alone)

    def _retrace(self, original: Any, plan: Plan, op: Op, alone: bool) -> Any:
        if not plan.changes:
            return original
        alone = rings_are_alone(plan) if own_computation(op) else alone
        if (plan, alone) not in self.traced:
            types = [plan.flow.avals[value] for value in plan.flow.inputs]
            closed = jax.make_jaxpr(lambda *arguments: self.run(plan, arguments, alone=alone))(*types)
            wanted = [plan.flow.aval(operand) for operand in plan.flow.outputs]
            if list(closed.out_avals) != wanted:
                raise RewriteError(f"in {plan.path}: results are {closed.out_avals}, not {wanted}")
            self.traced[plan, alone] = shims.like(original, closed)
        return self.traced[plan, alone]


class _Again:
    """Makes values again as they are first asked for."""

    def __init__(self, flow: Dataflow, twice: MadeAgain, read: Read) -> None:
        self._flow, self._twice, self._read = flow, twice, read
        self._made: dict[int, Any] = {}

    def read(self, operand: Operand) -> Any:
        """A value made again; as it is, if it is not to be."""
        if isinstance(operand, int):
            for index in self._to_run(operand):
                op = self._flow.ops[index]
                with shims.equation_scope(op.eqn, op.scope):
                    results = op.bind(list(map(self._at_hand, op.inputs)))
                self._made.update(zip(op.outputs, results, strict=True))
        return self._at_hand(operand)

    def _to_run(self, value: int) -> list[int]:
        """The operations that make a value of what is there, in program order; roots are fetched."""
        found: set[int] = set()
        waiting: list[Operand] = [value]
        while waiting:
            operand = waiting.pop()
            if not isinstance(operand, int) or operand in self._made:
                continue
            if operand in self._twice.roots:
                self._made[operand] = lax.optimization_barrier(self._read(operand))
            elif (maker := self._twice.makers.get(operand)) is not None and maker not in found:
                found.add(maker)
                waiting.extend(self._flow.ops[maker].inputs)
        return sorted(found)

    def _at_hand(self, operand: Operand) -> Any:
        if isinstance(operand, int) and operand in self._made:
            return self._made[operand]
        return self._read(operand)


def _waiting(flow: Dataflow, ring: Ring, first: Sequence[int], env: Mapping[int, Any]) -> dict[int, Any]:
    """What its dots read and what is to run first, by value: none of it is there before all is."""
    if not first:
        return {}
    read = [operand for operand in flow.ops[ring.chain.dots[0].op].inputs if isinstance(operand, int)]
    # Weights and other arguments had to be copied if they were held up.
    made = [operand for operand in read if operand not in flow.given] or read
    values = [value for value in dict.fromkeys((*made, *first)) if value in env]
    return dict(zip(values, tie(*(env[value] for value in values)), strict=True))


def _emit(flow: Dataflow, unit: Unit, read: Read, places: PlacesOf) -> dict[int, Any]:
    """Runs what stands in place of operations."""
    if isinstance(unit, Lone):
        collective, results = unit.collective, _emit_nothing(flow, unit.collective, read)
    elif isinstance(unit, ShardReduction):
        collective, results = unit.collective, emit_shard_reduction(flow, unit, read, places(unit.collective))
    else:
        collective = unit.chain.collective
        results = emit_ring(flow, unit, read, places.rings(collective, unit.schedule.orders))
    results = {value: _of_weak_type(result, flow.avals[value]) for value, result in results.items()}
    for value, result in results.items():
        if jax.typeof(result) != flow.avals[value]:
            where = flow.ops[collective.op].source
            raise RewriteError(f"at {where}: a ring made {jax.typeof(result)}, not {flow.avals[value]}")
    return results


def _rounds_to_own(flow: Dataflow, op: Op) -> bool:
    """Whether a reduce_precision rounds to its operand's type, as jax has it of all that `checkpoint` keeps.

    That is part of the dot which makes it as written; of what a ring has put together TPU compilers make a
    pass, and a slow one (v6e: 217 us for 34 MB). It is rounded there.
    """
    own = jnp.finfo(flow.avals[op.outputs[0]].dtype)
    return bool(op.params["exponent_bits"] >= own.nexp and op.params["mantissa_bits"] >= own.nmant)


def _of_weak_type(result: Any, aval: Any) -> Any:
    """The result, of a weak type where the original was: ``jnp.where(mask, 1.0, 0.0)`` and dots of it are."""
    if jax.typeof(result).weak_type == aval.weak_type:
        return result
    params = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
    return lax.convert_element_type_p.bind(result, **params)


def _emit_nothing(flow: Dataflow, collective: Collective, read: Read) -> dict[int, Any]:
    """The operand of a collective among one device, in the shape of its result."""
    op = flow.ops[collective.op]
    operand = read(op.inputs[0])
    if collective.kind == "all_gather":
        operand = own_block(collective, operand)
    elif not collective.tiled:
        operand = lax.squeeze(operand, (collective.dim,))
    return {op.outputs[0]: operand}
