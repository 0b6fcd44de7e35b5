"""Decides which chains of a jaxpr become rings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal

import networkx as nx

from cost_model import Estimate, Hardware
from passes.chains import AllGatherDot, Chain
from passes.collective import Collective
from passes.gather_match import gather_chain
from passes.graph import Dataflow
from passes.match import Match
from passes.pricing import price
from passes.reasons import Code, Reason
from passes.schedule import RingSchedule, candidates
from passes.site import Site

Policy = Literal["auto", "always", "never"] | Callable[[Site], bool]
POLICIES = ("auto", "always", "never")


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """A chain and the schedule it is run with."""

    chain: Chain
    collective: Collective
    schedule: RingSchedule


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one collective.

    Attributes:
      collective: the collective.
      ring: the ring that would replace it; None where there is no chain.
      estimate: the ring's predicted times; None where there is no chain or the hardware is unknown.
      rewritten: whether the ring does replace it.
      reason: why, or why not.
    """

    collective: Collective
    ring: Ring | None
    estimate: Estimate | None
    rewritten: bool
    reason: Reason


Describe = Callable[[Decision], Site]


def decide(
    flow: Dataflow, matches: Iterable[Match], policy: Policy, hardware: Hardware | None, describe: Describe
) -> tuple[Decision, ...]:
    """Decides each match, in program order.

    Chains that share a dot compete: the one with the larger predicted benefit has it, and the others are priced
    again without it. The outcome depends on the program, the policy and the hardware's numbers alone, so every
    process of a job decides alike.

    Args:
      flow: the dataflow graph of the matches.
      policy: see ``overlap_collectives``.
      hardware: None if unknown.
      describe: makes the site that a callable policy is asked about.
    """
    decided: dict[int, Decision] = {}
    proposals: list[Decision] = []
    for match in matches:
        if isinstance(match.found, Reason):
            decided[match.collective.op] = Decision(match.collective, None, None, False, match.found)
        else:
            proposals.append(_propose(flow, match.collective, match.found, hardware))
    proposals.sort(key=lambda d: (-d.estimate.benefit_s if d.estimate else 0.0, d.collective.op))
    taken: set[int] = set()
    for proposal in proposals:
        remaining = _without(flow, proposal, taken, hardware)
        if isinstance(remaining, Reason):
            decision = dataclasses.replace(proposal, reason=remaining)
        else:
            decision = _judge(remaining, policy, describe)
        if decision.rewritten and decision.ring is not None:
            taken.update(dot.op for dot in decision.ring.chain.dots)
        decided[decision.collective.op] = decision
    return tuple(decided[op] for op in sorted(decided))


def _propose(
    flow: Dataflow, collective: Collective, chain: Chain, hardware: Hardware | None
) -> Decision:
    """The chain with its best schedule: by predicted time, or the first in line if that is unknown."""
    schedules = candidates(flow, chain, collective)
    reason = Reason(Code.UNKNOWN_HARDWARE)
    if hardware is None:
        return Decision(collective, Ring(chain, collective, schedules[-1]), None, False, reason)
    priced = [(price(flow, chain, schedule, hardware), schedule) for schedule in schedules]
    best, schedule = min(priced, key=lambda p: p[0].overlapped_s)
    return Decision(collective, Ring(chain, collective, schedule), best, False, reason)


def _without(
    flow: Dataflow, proposal: Decision, taken: set[int], hardware: Hardware | None
) -> Decision | Reason:
    """The proposal without the dots that other rings have; a reason if nothing is left of it."""
    assert proposal.ring is not None
    chain = proposal.ring.chain
    free = [dot for dot in chain.dots if dot.op not in taken]
    if len(free) == len(chain.dots):
        return proposal
    lost = next(dot for dot in chain.dots if dot.op in taken)
    where = f"It is the dot_general at {flow.ops[lost.op].source}."
    if not free or not isinstance(chain, AllGatherDot):
        return Reason(Code.DOT_TAKEN, where)
    smaller = gather_chain(
        flow, proposal.collective, chain.blocked, (*chain.before, *chain.after), free
    )
    if isinstance(smaller, Reason):
        return smaller
    return _propose(flow, proposal.collective, smaller, hardware)


def _judge(proposal: Decision, policy: Policy, describe: Describe) -> Decision:
    code, rewritten = _verdict(proposal, policy, describe)
    return dataclasses.replace(proposal, reason=Reason(code), rewritten=rewritten)


def _verdict(proposal: Decision, policy: Policy, describe: Describe) -> tuple[Code, bool]:
    if policy == "never":
        return Code.POLICY_NEVER, False
    if policy == "always":
        return Code.POLICY_ALWAYS, True
    if proposal.estimate is None and not callable(policy):
        return Code.UNKNOWN_HARDWARE, False
    if callable(policy):
        accepted = policy(describe(proposal))
        return (Code.POLICY_ACCEPTED, True) if accepted else (Code.POLICY_DECLINED, False)
    assert proposal.estimate is not None
    if proposal.estimate.benefit_s > 0:
        return Code.PROFITABLE, True
    return Code.NOT_PROFITABLE, False


def program_order(flow: Dataflow, decisions: tuple[Decision, ...]) -> tuple[tuple[Decision, ...], tuple[int | Ring, ...]]:
    """An order in which the operations and rings can run, each ring as one step.

    Rings that wait for one another (each needs a result of the other before it can start) cannot both be: of a circle
    of them the one with the least benefit is given up.

    Returns:
      The decisions, with those given up revised; and operation numbers and rings in the order to run them.
    """
    while True:
        rings = {d.collective.op: d.ring for d in decisions if d.rewritten and d.ring is not None}
        unit_of = {member: op for op, ring in rings.items() for member in ring.chain.members}
        position = {op: min(d.op for d in ring.chain.dots) for op, ring in rings.items()}
        units: nx.DiGraph[int] = nx.DiGraph()
        units.add_nodes_from(unit_of.get(index, index) for index in range(len(flow.ops)))
        units.add_edges_from(
            (a, b)
            for source, target in flow.graph().edges
            if (a := unit_of.get(source, source)) != (b := unit_of.get(target, target))
        )
        try:
            order = nx.lexicographical_topological_sort(units, key=lambda unit: position.get(unit, unit))
            return decisions, tuple(rings.get(unit, unit) for unit in order)
        except nx.NetworkXUnfeasible:
            decisions = _give_up_one(decisions, nx.find_cycle(units))


def _give_up_one(decisions: tuple[Decision, ...], cycle: list[tuple[int, int]]) -> tuple[Decision, ...]:
    units = {unit for edge in cycle for unit in edge}
    in_cycle = [d for d in decisions if d.rewritten and d.collective.op in units]
    least = min(in_cycle, key=lambda d: (d.estimate.benefit_s if d.estimate else 0.0, -d.collective.op))
    given_up = dataclasses.replace(
        least, rewritten=False, reason=Reason(Code.DEPENDS_ON_ITSELF, "It does so through another ring.")
    )
    return tuple(given_up if d is least else d for d in decisions)
