"""What the library decides about a program of one chain, and what it decides between."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import cost_model
import passes
from cost_model import Estimate, Hardware
from passes import Plan, RingSchedule
from passes.candidates import candidates
from passes.chains import Chain, DotPsum
from passes.decide import Decision
from passes.network import Network
from passes.pricing import pricer


def plan_of(
    original: Any, operands: Sequence[Any], policy: passes.Policy, try_out: passes.TryOut | None = None
) -> Plan:
    """The plan of a jitted program, as the decorator makes it."""
    return passes.make_plan(original.trace(*operands).jaxpr, policy, _hardware_of, try_out=try_out)


def _hardware_of(device_kind: str | None) -> Hardware | None:
    return None if device_kind is None else cost_model.from_device_kind(device_kind)


def decision_of(plan: Plan) -> tuple[Plan, Decision]:
    """The program's one decision, and the plan of the jaxpr that it is in."""
    (found,) = [(inner, decision) for inner in _plans(plan) for decision in inner.decisions]
    return found


def _plans(plan: Plan) -> Iterable[Plan]:
    yield plan
    for number in plan.bodies:
        for body in plan.bodies_of(number):
            yield from _plans(body)


def name_of(chain: Chain, schedule: RingSchedule) -> str:
    """What a chain of a schedule is called: of a psum also along which dim it is scattered, if not rows."""
    dim = chain.collective.dim
    return f"{schedule}, along dim {dim}" if isinstance(chain, DotPsum) and dim else str(schedule)


def candidates_of(plan: Plan, mesh: Any, hardware: Hardware) -> dict[str, tuple[RingSchedule, Estimate]]:
    """Name → schedule and price, the fastest first: those of a search, and the one that is decided for.

    Args:
      plan: of a program of one chain, by the policy "auto".
      mesh: that it runs on, all axes manual.
      hardware: the mesh's devices.
    """
    inner, decision = decision_of(plan)
    assert decision.ring is not None
    chain = decision.ring.chain
    axis = Network(hardware, mesh, frozenset(mesh.axis_names)).axis(decision.collective)
    assert axis is not None
    price = pricer(inner.flow, chain, axis)
    every = candidates(inner.flow, chain, axis, thorough=True)
    ranked = sorted(every, key=lambda schedule: price(schedule).overlapped_s)
    wanted = dict.fromkeys((decision.ring.schedule, *ranked))
    priced = sorted(((s, price(s)) for s in wanted), key=lambda pair: pair[1].overlapped_s)
    named: dict[str, tuple[RingSchedule, Estimate]] = {}
    for schedule, estimate in priced:
        name = name_of(chain, schedule)
        assert name not in named, f"two schedules are called {name}"
        named[name] = schedule, estimate
    return named
