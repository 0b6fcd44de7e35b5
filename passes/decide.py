"""Decides which chains of a jaxpr become rings."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, Final, Generic, Literal

import numpy as np

from cost_model import Estimate, Hardware
from cost_model.plain_chain import pays
from passes.before import before_each
from passes.chains import AllGatherDot, Chain, Lone, ShardReduction, reductions, run_again
from passes.collective import Collective
from passes.emit import Ring
from passes.excerpt import Choice, Excerpt, excerpt
from passes.gather_match import without_dots
from passes.graph import Dataflow
from passes.hidden import Hidden
from passes.invariance import Invariance
from passes.match import Match
from passes.network import Network
from passes.prices import Prices
from passes.reasons import Code, Reason
from passes.schedule import RingSchedule
from passes.site import Site
from passes.weight_gradients import held_back, weight_gradients

if TYPE_CHECKING:
    import networkx as nx

Policy = Literal["auto", "always", "never", "verify", "autotune"] | Callable[[Site], bool]
POLICIES = ("auto", "always", "never", "verify", "autotune")
TRIED: Final = 8
"""Schedules of a chain, the best by cost model, that a trial compiles."""


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one collective.

    Attributes:
      collective: the collective.
      ring: the ring that would replace it; None where there is no chain.
      estimate: the ring's predicted times; None where there is no chain or the hardware is unknown.
      rewritten: whether the ring does replace it.
      reason: why, or why not.
      within: another ring to try within the program: one that is faster and by itself needs more memory than
        the chain as written; or, on CPU devices, one that gains nothing by itself. None if there is none.
      second: on CPU devices, a ring that by itself is hardly slower than this one: within the program XLA
        places memory otherwise, and it may be the faster. None if there is none.
    """

    collective: Collective
    ring: Ring | None
    estimate: Estimate | None
    rewritten: bool
    reason: Reason
    within: Decision | None = None
    second: Decision | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Trial(Generic[Choice]):
    """What became of a part of a program and of its versions when they were compiled and timed.

    Attributes:
      choice: the fastest that needs no more memory; None where none is faster than the part as written.
      original_s: the part as written.
      ring_s: the fastest version that needs no more memory.
      kind: ``modelled`` from compiled schedules, or ``measured``.
      note: a sentence on what else decided; may be empty.
      larger: a version that is faster still, and needs more memory; None if there is none.
      larger_s: that version.
      nearly: of the other versions that need no more memory the fastest, if it is hardly slower than the
        choice, or than the part as written where there is no choice; else None.
      nearly_s: that version.
    """

    choice: Choice | None
    original_s: float
    ring_s: float
    kind: str
    note: str = ""
    larger: Choice | None = None
    larger_s: float = math.inf
    nearly: Choice | None = None
    nearly_s: float = math.inf


TryOut = Callable[[Excerpt[Any], tuple[Any, ...]], Trial[Any] | None]
"""Compiles and times versions of a part of a program; None where that cannot be done."""

Unit = Ring | ShardReduction | Lone
"""What is run in place of operations."""

Describe = Callable[[Decision], Site]


def decide(
    flow: Dataflow,
    matches: Iterable[Match],
    policy: Policy,
    network: Network,
    describe: Describe,
    loop_invariant: Set[int] = frozenset(),
    try_out: TryOut | None = None,
    lasting: Set[int] = frozenset(),
) -> tuple[Decision, ...]:
    """Decides each match, in program order.

    Chains that share a dot compete: the one with the larger predicted benefit has it, and the others are
    priced again without it. What the compiler hides of a collective as written is no gain of a ring; beside
    rings less is hidden, so that what was is decided once more when they are known. The outcome depends on
    the program, the policy and the hardware's numbers alone, so every process of a job decides alike.

    Args:
      flow: the dataflow graph of the matches.
      policy: see ``overlap_collectives``.
      network: the devices that the jaxpr runs on.
      describe: makes the site that a callable policy is asked about.
      loop_invariant: numbers of the collectives whose operand is the same in every iteration of a loop.
        Unless the policy says otherwise they stay, since a compiler can move them out of the loop, and a ring
        it cannot.
      try_out: for the policies ``verify`` and ``autotune``.
      lasting: inputs of the jaxpr that the program around it reads again.
    """
    decided: dict[int, Decision] = {}
    proposals: list[tuple[Decision, tuple[Chain, ...]]] = []
    matches = tuple(matches)
    invariance = Invariance(flow)
    firsts = [match.found[0] for match in matches if not isinstance(match.found, Reason)]
    beside = _run_beside(flow, firsts) if network.first_in_first_out else set()
    before = {} if network.hardware is None else before_each(flow, firsts, network.hardware, lasting)
    prices = Prices(flow, network, before, alone=len(firsts) == 1)
    for match in matches:
        if isinstance(match.found, Reason):
            decided[match.collective.op] = _without_chain(match.collective, match.found, policy, describe)
        else:
            chains = _remaining(flow, match.found, beside, invariance) or match.found
            proposals.append((_propose(match.collective, chains, policy, prices), chains))
    collectives = [match.collective for match in matches] if proposals else []
    hidden = Hidden(flow, network, collectives, _collectives_s(proposals))
    taken: set[int] = set()

    def decide_next(proposal: Decision, chains: tuple[Chain, ...], hidden_s: Mapping[int, float]) -> Decision:
        remaining = _remaining(flow, chains, taken, invariance)
        if not remaining:
            return dataclasses.replace(proposal, reason=_taken(flow, proposal, taken))
        if taken.intersection(dots_of(proposal)):
            proposal = _propose(proposal.collective, remaining, policy, prices)
        proposal = _hiding(proposal, hidden_s)
        invariant = proposal.collective.op in loop_invariant
        trial = None
        if policy in ("verify", "autotune") and not invariant:
            trial = _tried(flow, proposal, network, try_out, prices)
        axis = prices.axis(proposal.collective)
        hardware = None if axis is None else axis.hardware
        return trial or _judge(proposal, policy, describe, hardware, invariant)

    hidden_s = as_written_s = hidden.seconds()
    every = tuple(proposals)
    while proposals:
        proposals.sort(key=lambda p: (-benefit_s(_hiding(p[0], hidden_s)), p[0].collective.op))
        for proposal, chains in proposals:
            decision = decide_next(proposal, chains, hidden_s)
            if decision.rewritten:
                taken.update(dots_of(decision))
            decided[decision.collective.op] = decision
        proposals = [p for p in every if _is_hidden(decided[p[0].collective.op])]
        if proposals:
            # Beside the dots of a ring nothing is hidden: what was may pay now, of all rings so far.
            before_s, hidden_s = hidden_s, hidden.seconds(_priced_rings(decided.values()))
            ops = {op for op, seconds in before_s.items() if hidden_s.get(op, 0.0) < seconds}
            proposals = [p for p in proposals if p[0].collective.op in ops]
    decisions = tuple(decided[op] for op in sorted(decided))
    revised = tuple(_against_all(d, as_written_s.get(d.collective.op, 0.0)) for d in decisions)
    if policy == "auto" and network.hardware is not None:
        exposed_s = _exposed_s(hidden, revised, as_written_s)
        if exposed_s or revised != decisions:
            return _if_all_pay(revised, exposed_s, network.hardware)
    return revised


def _exposed_s(hidden: Hidden, decisions: Iterable[Decision], as_written_s: Mapping[int, float]) -> float:
    """Seconds of what is hidden as written and exposed beside rings, of collectives that become none."""
    rings = tuple(_priced_rings(decisions))
    if not rings or not any(as_written_s.values()):
        return 0.0
    ops = {chain.collective.op for chain, _ in rings}
    left_s = hidden.seconds(rings)
    return sum(max(0.0, s - left_s.get(op, 0.0)) for op, s in as_written_s.items() if op not in ops)


def _collectives_s(proposals: Iterable[tuple[Decision, tuple[Chain, ...]]]) -> Mapping[int, float]:
    """Number of a collective → the seconds that its chain's price says it takes."""
    priced = ((decision.collective.op, decision.estimate) for decision, _ in proposals)
    return {op: estimate.collective_s for op, estimate in priced if estimate is not None}


def _priced_rings(decisions: Iterable[Decision]) -> Iterator[tuple[Chain, Estimate]]:
    for decision in decisions:
        if decision.rewritten and decision.ring is not None and decision.estimate is not None:
            yield decision.ring.chain, decision.estimate


def _is_hidden(decision: Decision) -> bool:
    return decision.reason.code is Code.HIDDEN_AS_WRITTEN


def _hiding(proposal: Decision, hidden_s: Mapping[int, float]) -> Decision:
    """The proposal, priced against what the compiler leaves exposed of its collective as written."""
    estimate, seconds = proposal.estimate, hidden_s.get(proposal.collective.op, 0.0)
    if estimate is None or not seconds:
        return proposal
    seconds = min(seconds, estimate.collective_s)
    return dataclasses.replace(proposal, estimate=dataclasses.replace(estimate, hidden_s=seconds))


def _against_all(decision: Decision, as_written_s: float) -> Decision:
    """A ring, priced against the program without any: so all of them save the sum of what each does.

    What the rings before it leave exposed of its collective is a loss of theirs, and a gain of this one.
    """
    first = _hiding(decision, {decision.collective.op: as_written_s})
    if not decision.rewritten or first.estimate == decision.estimate:
        return decision
    reason = Reason(decision.reason.code, "Beside the rings before it nothing would hide the collective.")
    return dataclasses.replace(first, reason=reason)


def _if_all_pay(
    decisions: tuple[Decision, ...], exposed_s: float, hardware: Hardware
) -> tuple[Decision, ...]:
    """The decisions, without rings if all together do not pay: some expose collectives that were hidden.

    Args:
      decisions: those.
      exposed_s: seconds of what is no ring and would be exposed.
      hardware: the devices.
    """
    rings = [estimate for _, estimate in _priced_rings(decisions)]
    if not rings:
        return decisions
    together = functools.reduce(operator.add, rings)
    if pays(dataclasses.replace(together, overlapped_s=together.overlapped_s + exposed_s), hardware):
        return decisions
    exposed = "Rings would expose a collective that is hidden as written, and all together gain too little."
    why = Reason(Code.NOT_PROFITABLE, exposed)
    return tuple(
        dataclasses.replace(d, rewritten=False, reason=why) if d.rewritten and d.ring is not None else d
        for d in decisions
    )


def ask(policy: Callable[[Site], bool], site: Site) -> bool:
    """What the user's own policy says; None is no, as ``site.estimate and …`` gives for want of an estimate.

    An error that passes through here is the user's, not the pass's.

    Raises:
      TypeError: it says neither yes nor no; any text, "no" too, would count as yes.
      RuntimeError: it raised StopIteration, which would end a loop here.
    """
    name = getattr(policy, "__qualname__", repr(policy))
    try:
        said: object = policy(site)
    except StopIteration as error:
        raise RuntimeError(f"the policy {name} raised StopIteration") from error
    if said is not None and not isinstance(said, bool | np.bool_):
        raise TypeError(f"the policy {name} must return True or False for each site, and returned {said!r}")
    return bool(said)


def _run_beside(flow: Dataflow, chains: Iterable[Chain]) -> set[int]:
    """The weights' gradients that may be left out of rings, to run beside the collective of another chain."""
    return set(held_back(flow, chains, weight_gradients(flow)))


def _without_chain(collective: Collective, reason: Reason, policy: Policy, describe: Describe) -> Decision:
    """A collective among one device disappears unless the policy is against it; any other stays."""
    kept = Decision(collective, None, None, False, reason)
    if reason.code is not Code.AXIS_SIZE_ONE or policy == "never":
        return kept
    if callable(policy) and not ask(policy, describe(kept)):
        return dataclasses.replace(kept, reason=Reason(Code.POLICY_DECLINED))
    return dataclasses.replace(kept, rewritten=True)


def _but(estimate: Estimate, hardware: Hardware) -> str:
    """Why a predicted gain is not enough."""
    if estimate.added_bytes <= 0:
        return f"less than the {hardware.least_gain:.0%} that a prediction may be off"
    return f"and need {estimate.added_bytes / 1e6:,.1f} MB more temporary memory"


def benefit_s(decision: Decision) -> float:
    """What its ring is predicted to save; 0 where nothing is known."""
    return decision.estimate.benefit_s if decision.estimate else 0.0


def _gain(decision: Decision) -> float:
    """The predicted benefit, as a part of the original time."""
    estimate = decision.estimate
    return estimate.benefit_s / estimate.original_s if estimate and estimate.original_s else 0.0


def dots_of(decision: Decision) -> list[int]:
    """The dots of its ring."""
    return [dot.op for dot in decision.ring.chain.dots] if decision.ring else []


def _propose(collective: Collective, chains: Iterable[Chain], policy: Policy, prices: Prices) -> Decision:
    """The chain and schedule of the largest predicted benefit, the last of each if the hardware is unknown.

    First of all come those that need no more memory than the chain as written.

    Under the policy "always" a chain of more dots comes first, whatever the benefit.
    """
    chains = tuple(chains)
    if policy == "always":
        most = max(len(chain.dots) for chain in chains)
        chains = tuple(chain for chain in chains if len(chain.dots) == most)
    priced = [(*prices.best(chain), chain) for chain in chains]
    known = [(estimate, schedule, chain) for estimate, schedule, chain in priced if estimate is not None]
    estimate, schedule, chain = max(known, key=lambda p: p[0].rank) if known else priced[-1]
    return Decision(collective, Ring(chain, schedule), estimate, False, Reason(Code.UNKNOWN_HARDWARE))


def _remaining(
    flow: Dataflow, chains: Iterable[Chain], taken: set[int], invariance: Invariance
) -> tuple[Chain, ...]:
    """What is left of the chains without the dots that other rings have."""
    left: list[Chain] = []
    for chain in chains:
        if isinstance(chain, AllGatherDot):
            smaller = without_dots(flow, chain, taken, invariance)
            if smaller is not None:
                left.append(smaller)
        elif not taken.intersection(dot.op for dot in chain.dots):
            left.append(chain)
    return tuple(left)


def _taken(flow: Dataflow, proposal: Decision, taken: set[int]) -> Reason:
    lost = next((op for op in dots_of(proposal) if op in taken), None)
    where = "" if lost is None else f"It is the dot_general at {flow.ops[lost].source}."
    return Reason(Code.DOT_TAKEN, where)


def _judge(
    proposal: Decision,
    policy: Policy,
    describe: Describe,
    hardware: Hardware | None,
    loop_invariant: bool = False,
) -> Decision:
    code, rewritten = _verdict(proposal, policy, describe, hardware, loop_invariant)
    detail = ""
    if loop_invariant and code is not Code.LOOP_INVARIANT:
        detail = "Its operand is the same in every iteration of the loop."
    elif code is Code.NOT_PROFITABLE and hardware and proposal.estimate and _gain(proposal) > 0:
        detail = f"It would gain {_gain(proposal):.1%}, {_but(proposal.estimate, hardware)}."
    elif code is Code.HIDDEN_AS_WRITTEN and proposal.estimate is not None:
        share = proposal.estimate.hidden_s / proposal.estimate.collective_s
        detail = f"Of its time {share:.0%} is hidden so."
    return dataclasses.replace(proposal, reason=Reason(code, detail), rewritten=rewritten)


def _tried(
    flow: Dataflow,
    proposal: Decision,
    network: Network,
    try_out: TryOut | None,
    prices: Prices,
) -> Decision | None:
    """Decides by what the compiler makes of the chain's best schedules; None where it cannot."""
    axis = network.axis(proposal.collective)
    assert proposal.ring is not None
    chain = proposal.ring.chain
    program = None if try_out is None or axis is None else excerpt(flow, chain, network)
    if try_out is None or axis is None or program is None:
        return None
    price = prices.of(chain, axis)
    hidden_s = 0.0 if proposal.estimate is None else proposal.estimate.hidden_s
    trial = try_out(program, prices.fastest(chain, axis, TRIED))
    if trial is None:
        return None

    def with_ring(schedule: RingSchedule, ring_s: float, note: str) -> Decision:
        return dataclasses.replace(
            proposal,
            ring=Ring(chain, schedule),
            estimate=dataclasses.replace(price(schedule), hidden_s=hidden_s),
            rewritten=True,
            reason=Reason(Code.TRIED_FASTER, _found(trial, ring_s, note)),
        )

    if trial.choice is None:
        reason = Reason(Code.TRIED_SLOWER, _found(trial, trial.ring_s, trial.note))
        decision = dataclasses.replace(proposal, reason=reason)
    else:
        decision = with_ring(trial.choice, trial.ring_s, trial.note)
    if trial.larger is not None:
        note = "By itself it needs more memory, and not within the program."
        return dataclasses.replace(decision, within=with_ring(trial.larger, trial.larger_s, note))
    if trial.nearly is None or not network.first_in_first_out:
        return decision
    if trial.choice is None:
        # What its hops leave idle, other chains can use.
        note = "By itself it gains nothing, and within the program it does."
        return dataclasses.replace(decision, within=with_ring(trial.nearly, trial.nearly_s, note))
    note = "By itself another ring is faster, and not within the program."
    return dataclasses.replace(decision, second=with_ring(trial.nearly, trial.nearly_s, note))


def _found(trial: Trial[RingSchedule], ring_s: float, note: str) -> str:
    """What a trial found, in words."""
    best = "no ring could be run" if math.isinf(ring_s) else f"{ring_s * 1e6:.0f} µs as the best ring tried"
    kind = trial.kind.capitalize()
    return f"{kind}: {trial.original_s * 1e6:.0f} µs as written, {best}. {note}".rstrip()


def _verdict(
    proposal: Decision,
    policy: Policy,
    describe: Describe,
    hardware: Hardware | None,
    loop_invariant: bool,
) -> tuple[Code, bool]:
    if policy == "never":
        return Code.POLICY_NEVER, False
    if policy == "always":
        return Code.POLICY_ALWAYS, True
    if loop_invariant:
        predicted = Code.LOOP_INVARIANT
    elif proposal.estimate is None or hardware is None:
        predicted = Code.UNKNOWN_HARDWARE
    else:
        predicted = _predicted(proposal.estimate, hardware)
    if callable(policy):
        # It is told what "auto" would decide.
        accepted = ask(policy, describe(dataclasses.replace(proposal, reason=Reason(predicted))))
        return (Code.POLICY_ACCEPTED, True) if accepted else (Code.POLICY_DECLINED, False)
    return predicted, predicted is Code.PROFITABLE


def _predicted(estimate: Estimate, hardware: Hardware) -> Code:
    if pays(estimate, hardware):
        return Code.PROFITABLE
    exposed = dataclasses.replace(estimate, hidden_s=0.0)
    return Code.HIDDEN_AS_WRITTEN if pays(exposed, hardware) else Code.NOT_PROFITABLE


def rings_of(decisions: Iterable[Decision]) -> tuple[Ring, ...]:
    """The rings that replace chains, in program order."""
    return tuple(d.ring for d in decisions if d.rewritten and d.ring is not None)


def program_order(
    flow: Dataflow,
    decisions: tuple[Decision, ...],
    held: Mapping[int, Collective],
    first: Mapping[int, Collective],
) -> tuple[tuple[Decision, ...], tuple[int | Unit, ...]]:
    """An order in which the operations and rings can run, each ring as one step.

    Rings that wait for one another (each needs a result of the other before it can start) cannot both be: of
    a circle of them the one with the least benefit is given up. What need not wait does not, in a circle.

    Args:
      flow: the dataflow graph.
      decisions: those for its collectives.
      held: operations that wait for a ring which they do not need, each with the ring's collective.
      first: operations that a ring waits for, and does not need, each with the ring's collective.

    Returns:
      The decisions, with those given up revised; and operation numbers, rings and sums of shards, in the
      order to run them.
    """
    import networkx as nx  # takes a third of the time to import the library, and only chains need it

    wished = {(beside.op, dot): beside.op for dot, beside in held.items()}
    wished |= {(op, after.op): after.op for op, after in first.items()}
    while True:
        units: dict[int, Unit] = {
            d.collective.op: Lone(d.collective) for d in decisions if d.rewritten and d.ring is None
        }
        position: dict[int, int] = {}
        for ring in rings_of(decisions):
            units[ring.chain.collective.op] = ring
            position[ring.chain.collective.op] = min(dot.op for dot in ring.chain.dots)
            units.update((reduction.op, reduction) for reduction in reductions(ring.chain))
        unit_of = {member: number for number, unit in units.items() for member in unit.members}
        waits = {
            (unit_of.get(a, a), unit_of.get(b, b)): (a, b) for (a, b), ring in wished.items() if ring in units
        }
        order = _contracted(flow, units, unit_of, waits)
        try:
            sequence = nx.lexicographical_topological_sort(order, key=lambda unit: position.get(unit, unit))
            return decisions, tuple(units.get(unit, unit) for unit in sequence)
        except nx.NetworkXUnfeasible:
            cycle = nx.find_cycle(order)
            if needless := [waits[edge] for edge in cycle if edge in waits]:
                for wait in needless:
                    del wished[wait]
            else:
                decisions = _give_up_one(decisions, cycle)


def _contracted(
    flow: Dataflow,
    units: Mapping[int, Unit],
    unit_of: Mapping[int, int],
    waits: Iterable[tuple[int, int]],
) -> nx.DiGraph[int]:
    """The dataflow graph with each unit as one node, and with what else is to wait for what."""
    import networkx as nx

    order: nx.DiGraph[int] = nx.DiGraph()
    order.add_nodes_from(unit_of.get(index, index) for index in flow.live)
    # What also runs outside of a ring is not awaited by it, but what that reads is.
    again = {
        op: number for number, unit in units.items() if isinstance(unit, Ring) for op in run_again(unit.chain)
    }
    order.add_edges_from(
        (a, b)
        for source, target in flow.edges()
        if (a := unit_of.get(source, source)) != (b := unit_of.get(target, target)) and again.get(source) != b
    )
    order.add_edges_from(
        (a, number)
        for op, number in again.items()
        for source in flow.before(op)
        if (a := unit_of.get(source, source)) != number and again.get(source) != number
    )
    order.add_edges_from((a, b) for a, b in waits if a != b)
    for number, unit in units.items():
        if isinstance(unit, ShardReduction):
            # It goes its own way from the gather's operand, beside the ring.
            way = {unit.collective.op, *(block.op for block in unit.path)}
            order.remove_edges_from([(unit_of.get(op, op), number) for op in way])
            before = {unit_of.get(p, p) for op in way for p in flow.before(op) if p not in way}
            order.add_edges_from((node, number) for node in before - {number})
    return order


def _give_up_one(decisions: tuple[Decision, ...], cycle: list[tuple[int, int]]) -> tuple[Decision, ...]:
    units = {unit for edge in cycle for unit in edge}
    in_cycle = [d for d in decisions if d.rewritten and d.collective.op in units]
    least = min(in_cycle, key=lambda d: (benefit_s(d), -d.collective.op))
    given_up = dataclasses.replace(
        least, rewritten=False, reason=Reason(Code.DEPENDS_ON_ITSELF, "It does so through another ring.")
    )
    return tuple(given_up if d is least else d for d in decisions)
