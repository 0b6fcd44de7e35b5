"""The whole program tried: each of its rings may gain by itself, and yet not beside the others.

Nor is a chain's memory that of the program, where another place may need the most.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Final

import jax
from jax.sharding import Mesh, NamedSharding

from passes import shims
from passes.decide import Decision, TryOut, benefit_s, dots_of
from passes.excerpt import Excerpt
from passes.plan import Plan
from passes.reasons import Code, Reason
from passes.rewrite import rewritten
from passes.schedule import RingSchedule

MOST: Final = 10
"""Selections of rings that are compiled at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Some of a program's rings.

    Attributes:
      rings: of each the number of its jaxpr, in the order of ``_plans``, that of its collective, and its
        schedule.
    """

    rings: tuple[tuple[int, int, RingSchedule], ...]

    def __str__(self) -> str:
        return "; ".join(f"{jaxpr}.{op} {schedule}" for jaxpr, op, schedule in self.rings)


Rings = Mapping[tuple[int, int], Decision]
"""The decisions for rings, by the numbers of jaxpr and collective."""


def tried_whole(plan: Plan, predicted: Plan, try_out: TryOut) -> Plan:
    """The plan with those of its rings that together gain and need no more memory.

    The program is compiled as written, with the fastest ring of each chain, and with the rings that the cost
    model would have chosen: by itself a chain may be faster than within the program. Then follow the second
    of each chain, if trials found such, fewer rings that need memory, and fewer rings. The better of the
    first two is taken, else what gains and fits first, and if nothing does the program as written. As planned
    remains what cannot be compiled on its own.

    Args:
      plan: of a whole program, made by a policy that tries chains out.
      predicted: of the same program, by the policy "auto".
      try_out: what the chains were tried with.
    """
    fastest, *fewer = _attempts(_plans(plan))
    modelled = _predicted(_plans(plan), _plans(predicted), fastest)
    first = {_selection(rings): rings for rings in (fastest, modelled) if rings}
    attempts = first | {_selection(rings): rings for rings in fewer if rings}
    selections = dict(itertools.islice(attempts.items(), MOST))
    program = _excerpt(plan, selections, compared=len(first)) if selections else None
    if program is None:
        return plan
    trial = try_out(program, tuple(selections))
    if trial is None:
        return plan
    times = f"{trial.original_s * 1e6:.0f} µs as written, {trial.ring_s * 1e6:.0f} µs as the best tried"
    found = f"{trial.kind.capitalize()}: {times}. {trial.note}".rstrip()
    return _with(plan, {} if trial.choice is None else selections[trial.choice], found)


def _plans(plan: Plan) -> list[Plan]:
    """The plan and those of its bodies, each once."""
    found = {plan: None}
    for op in plan.bodies:
        for body in plan.bodies_of(op):
            found.update(dict.fromkeys(_plans(body)))
    return list(found)


def _attempts(plans: list[Plan]) -> Iterator[Rings]:
    """Rings to try together, the fastest first."""
    lean: dict[tuple[int, int], Decision] = {}
    fastest: dict[tuple[int, int], Decision] = {}
    for number, plan in enumerate(plans):
        taken = {dot for d in plan.decisions if d.rewritten for dot in dots_of(d)}
        for decision in plan.decisions:
            key = number, decision.collective.op
            if decision.rewritten and decision.ring is not None:
                lean[key] = fastest[key] = decision
            if decision.within is None:
                continue
            # What is not rewritten has left its dots to others.
            if decision.rewritten or not taken.intersection(dots_of(decision.within)):
                taken.update(dots_of(decision.within))
                fastest[key] = decision.within
    order = sorted(fastest, key=lambda key: (benefit_s(fastest[key]), key))
    yield fastest
    yield {key: decision.second or decision for key, decision in fastest.items()}
    for key in order:
        if fastest[key] is not lean.get(key):
            smaller = {**fastest, **({key: lean[key]} if key in lean else {})}
            yield smaller if key in lean else _without(smaller, key)
    yield lean
    for key in order:
        if key in lean:
            yield _without(lean, key)


def _predicted(plans: list[Plan], predicted: list[Plan], tried: Rings) -> Rings:
    """The rings that the cost model would have chosen, and of those that were tried the trial's decision.

    A sum and its scatter that have changed places in one plan, and not in the other, are left out.
    """
    rings: dict[tuple[int, int], Decision] = {}
    for number, (plan, model) in enumerate(zip(plans, predicted, strict=True)):
        collectives = {decision.collective for decision in plan.decisions}
        for decision in model.decisions:
            if decision.rewritten and decision.ring is not None and decision.collective in collectives:
                key = number, decision.collective.op
                rings[key] = tried[key] if key in tried and _same(tried[key], decision) else decision
    return rings


def _same(one: Decision, other: Decision) -> bool:
    """Whether two decisions are for the same ring."""
    assert one.ring is not None and other.ring is not None
    return one.ring.schedule == other.ring.schedule and dots_of(one) == dots_of(other)


def _without(rings: Rings, key: tuple[int, int]) -> Rings:
    return {other: decision for other, decision in rings.items() if other != key}


def _selection(rings: Rings) -> Selection:
    return Selection(tuple((*key, d.ring.schedule) for key, d in sorted(rings.items()) if d.ring is not None))


def _with(plan: Plan, rings: Rings, found: str) -> Plan:
    """The plan with only these rings.

    Args:
      plan: of the whole program.
      rings: those of the program.
      found: what its trial found, in words.
    """
    numbers = {plan: number for number, plan in enumerate(_plans(plan))}
    known: dict[Plan, Plan] = {}

    def chosen(plan: Plan, decision: Decision) -> Decision:
        ring = rings.get((numbers[plan], decision.collective.op))
        if ring is not None:
            if ring.reason.code is Code.TRIED_FASTER:
                return ring
            return dataclasses.replace(ring, reason=Reason(Code.TRIED_FASTER, f"Of the program: {found}"))
        if decision.ring is None or not decision.rewritten:
            return decision
        return dataclasses.replace(decision, rewritten=False, reason=Reason(Code.TRIED_TOGETHER, found))

    def revised(plan: Plan) -> Plan:
        if plan not in known:
            bodies = {
                op: {name: tuple(map(revised, plans)) for name, plans in held.items()}
                for op, held in plan.bodies.items()
            }
            decisions = tuple(chosen(plan, decision) for decision in plan.decisions)
            known[plan] = dataclasses.replace(plan, bodies=bodies).decided(decisions)
        return known[plan]

    return revised(plan)


def _excerpt(
    plan: Plan, selections: Mapping[Selection, Rings], *, compared: int
) -> Excerpt[Selection] | None:
    """The whole program, of arguments sharded as its shard_maps want them; None where none has devices.

    What no shard_map takes is sharded as the compiler likes.
    """
    mesh = next((mesh for each in _plans(plan) for mesh in _meshes(each)), None)
    if mesh is None:
        return None
    shardings = _shardings(plan)
    types = [(value, plan.flow.avals[value]) for value in plan.flow.inputs]
    return Excerpt(
        tuple(jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=shardings.get(value)) for value, t in types),
        jax.jit(rewritten(_with(plan, {}, ""))),
        lambda selection: jax.jit(rewritten(_with(plan, selections[selection], ""))),
        mesh,
        whole=True,
        compared=compared,
        emitted=(plan.flow.differentiable,),
    )


def _meshes(plan: Plan) -> Iterator[Mesh]:
    """The concrete meshes of a jaxpr's shard_maps."""
    for op in plan.flow.ops:
        if op.name == "shard_map" and (mesh := shims.concrete_mesh(op.params["mesh"])) is not None:
            yield mesh


def _shardings(plan: Plan) -> dict[int, NamedSharding]:
    """How the shard_maps of a jaxpr want the values that they take."""
    found: dict[int, NamedSharding] = {}
    for op in plan.flow.ops:
        if op.name == "shard_map" and (mesh := shims.concrete_mesh(op.params["mesh"])) is not None:
            for operand, spec in zip(op.inputs, op.params["in_specs"], strict=True):
                if isinstance(operand, int):
                    found.setdefault(operand, NamedSharding(mesh, spec))
    return found
