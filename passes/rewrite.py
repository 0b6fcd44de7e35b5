"""Runs a planned program: rings in place of the chosen chains, every other equation bound again unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from passes import shims
from passes.block_eval import Read
from passes.chains import AllGatherDot
from passes.decide import Ring
from passes.gather_ring import emit_gather_ring
from passes.graph import Dataflow, Literal, Op, Operand
from passes.plan import BODIES, Plan
from passes.scatter_ring import emit_scatter_ring


class RewriteError(Exception):
    """The rewritten program is not of the type of the original; a defect of the pass.

    The message names the place.
    """


def rewritten(plan: Plan) -> Callable[..., list[Any]]:
    """The planned program as a function of the jaxpr's arguments, to be traced; returns the jaxpr's results."""
    rewriter = _Rewriter()
    return lambda *arguments: rewriter.run(plan, arguments)


class _Rewriter:
    """Evaluates plans; remembers the new body of each jaxpr, so that a body called twice stays shared."""

    def __init__(self) -> None:
        self.traced: dict[Plan, Any] = {}

    def run(self, plan: Plan, arguments: Sequence[Any]) -> list[Any]:
        flow = plan.flow
        env: dict[int, Any] = {**flow.constants, **dict(zip(flow.inputs, arguments, strict=True))}
        remaining = [len(users) for users in flow.users]

        def read(operand: Operand) -> Any:
            return operand.val if isinstance(operand, Literal) else env[operand]

        for unit in plan.order:
            if isinstance(unit, Ring):
                env.update(_emit(flow, unit, read))
                continue
            op = flow.ops[unit]
            values = list(map(read, op.inputs))
            with shims.equation_scope(op.eqn, op.scope):
                results = self._bind(plan, unit, op, values)
            env.update(zip(op.outputs, results, strict=True))
            for operand in op.inputs:
                if isinstance(operand, int):
                    remaining[operand] -= 1
                    if not remaining[operand]:
                        del env[operand]
        return list(map(read, flow.outputs))

    def _bind(self, plan: Plan, index: int, op: Op, values: list[Any]) -> Sequence[Any]:
        bodies = plan.bodies.get(index, {})
        params = op.params
        if any(body.changes for plans in bodies.values() for body in plans):
            if op.name == "shard_map":
                return self._shard_map(op, bodies["jaxpr"][0], values)
            params = {**params, **{name: self._body(op, name, plans) for name, plans in bodies.items()}}
        primitive = op.eqn.primitive
        results = primitive.bind(*values, **primitive.get_bind_params(params))
        return results if primitive.multiple_results else (results,)  # type: ignore[no-any-return]

    def _shard_map(self, op: Op, body: Plan, values: list[Any]) -> Sequence[Any]:
        params = op.params
        mapped = jax.shard_map(
            lambda *shards: tuple(self.run(body, shards)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return mapped(*values)  # type: ignore[no-any-return]

    def _body(self, op: Op, name: str, plans: tuple[Plan, ...]) -> Any:
        assert name in BODIES[op.name]
        original = op.params[name]
        if isinstance(original, tuple | list):
            return type(original)(self._retrace(o, p) for o, p in zip(original, plans, strict=True))
        return self._retrace(original, plans[0])

    def _retrace(self, original: Any, plan: Plan) -> Any:
        if not plan.changes:
            return original
        if plan not in self.traced:
            types = [plan.flow.avals[value] for value in plan.flow.inputs]
            closed = jax.make_jaxpr(lambda *arguments: self.run(plan, arguments))(*types)
            wanted = [plan.flow.aval(operand) for operand in plan.flow.outputs]
            if list(closed.out_avals) != wanted:
                raise RewriteError(f"in {plan.path}: results are {closed.out_avals}, not {wanted}")
            self.traced[plan] = shims.like(original, closed)
        return self.traced[plan]


def _emit(flow: Dataflow, ring: Ring, read: Read) -> dict[int, Any]:
    if isinstance(ring.chain, AllGatherDot):
        results = emit_gather_ring(flow, ring.chain, ring.collective, ring.schedule, read)
    else:
        results = emit_scatter_ring(flow, ring.chain, ring.collective, ring.schedule, read)
    for value, result in results.items():
        if jax.typeof(result) != flow.avals[value]:
            where = flow.ops[ring.collective.op].source
            raise RewriteError(f"at {where}: a ring made {jax.typeof(result)}, not {flow.avals[value]}")
    return results
