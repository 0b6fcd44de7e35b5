"""The plan of a rewrite: for a program and every jaxpr inside it, which collectives become rings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Set
from functools import cached_property
from typing import Any

from jax.extend import core as jex_core
from jax.sharding import Mesh, PartitionSpec

from cost_model import Hardware
from passes import shims
from passes.collective import Collective
from passes.decide import Decision, Policy, TryOut, Unit, decide, program_order, rings_of
from passes.emit import Ring
from passes.epilogue import with_epilogues
from passes.flattened import flattened, flattenings
from passes.graph import COLLECTIVES, Dataflow, Op, Operand, dataflow
from passes.invariance import Invariance, mapped_axes
from passes.loops import LOOPS
from passes.made_again import MadeAgain, made_again, read_by_rings
from passes.match import match_dataflow, no_chains
from passes.merged_dims import kept_apart, merges
from passes.network import Network, several_slices
from passes.reasons import Code, Reason
from passes.scattered_first import scattered_first, sums_before_scatters
from passes.shared_operands import shared_operands
from passes.site import Site
from passes.summed_once import summed_once
from passes.weight_gradients import held_back, run_first, weight_gradients

BODIES: Mapping[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "shard_map": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "checkpoint": ("jaxpr",),
    "remat2": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
}
"""Primitives whose bodies can be replaced, and the parameters that hold them."""

_NO_DEVICES = "It was not compiled and timed: the mesh of its shard_map tells no devices (see jax.set_mesh)."

_CONCERN = COLLECTIVES | {"shard_map"}

HardwareOf = Callable[[str | None], Hardware | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is to be done with one jaxpr.

    Attributes:
      flow: its dataflow graph.
      path: the calls it is in.
      decisions: one per collective, in program order.
      order: operation numbers and what replaces operations, in the order to run them.
      bodies: operation number → parameter name → plans of the jaxprs in that parameter; none where they hold
        neither collectives nor shard_maps.
      opaque: operations whose bodies cannot be replaced, with the plans of those bodies (for the report).
      network: the devices that it runs on; None where there are no collectives, or none can be replaced.
      held: operations that are held back to run beside a ring's collective, each with the collective.
      first: operations that a ring waits for, each with the ring's collective.
    """

    flow: Dataflow
    path: str
    decisions: tuple[Decision, ...]
    order: tuple[int | Unit, ...]
    bodies: Mapping[int, Mapping[str, tuple[Plan, ...]]]
    opaque: Mapping[int, tuple[Plan, ...]]
    network: Network | None = None
    held: Mapping[int, Collective] = dataclasses.field(default_factory=dict)
    first: Mapping[int, Collective] = dataclasses.field(default_factory=dict)

    def decided(self, decisions: tuple[Decision, ...]) -> Plan:
        """The plan with these decisions, as far as their rings can all be, and an order for them."""
        order: tuple[int | Unit, ...] = ()
        held, first = self._outside(decisions)
        if any(decision.rewritten for decision in decisions):
            decisions = with_epilogues(self.flow, decisions)
            decisions, order = program_order(self.flow, decisions, held, first)
        if not any(decision.rewritten for decision in decisions):
            order = tuple(self.flow.live)
        return dataclasses.replace(self, decisions=decisions, order=order, held=held, first=first)

    def _outside(
        self, decisions: tuple[Decision, ...]
    ) -> tuple[Mapping[int, Collective], Mapping[int, Collective]]:
        """The weights' gradients outside of rings: those held back beside one's collective, and run first."""
        chains = [ring.chain for ring in rings_of(decisions)]
        if self.network is None or self.flow.differentiable or not chains:
            return {}, {}
        dots = weight_gradients(self.flow, {op for chain in chains for op in chain.members})
        held = held_back(self.flow, chains, dots) if self.network.first_in_first_out else {}
        first = run_first(self.flow, chains, dots) if self.network.leaves_for_last else {}
        return held, first

    def bodies_of(self, index: int) -> tuple[Plan, ...]:
        """The plans of the replaceable bodies of one operation."""
        return tuple(body for plans in self.bodies.get(index, {}).values() for body in plans)

    @cached_property
    def rings(self) -> tuple[Ring, ...]:
        """The rings, in program order."""
        return rings_of(self.decisions)

    def made_again(self, later: Mapping[int, bool]) -> MadeAgain:
        """What is made twice rather than kept.

        Args:
          later: positions of results that are read only after it, each with whether a ring reads it.
        """
        if not self._leaves_for_last:
            return MadeAgain()
        results = ((self.flow.outputs[position], ring) for position, ring in later.items())
        kept = [d.ring.chain for d in self.decisions if not d.rewritten and d.ring is not None]
        rings = [ring.chain for ring in self.rings]
        return made_again(self.flow, rings, kept, {v: ring for v, ring in results if isinstance(v, int)})

    def shared_operands(self, apart: Container[int]) -> frozenset[int]:
        """What rings of sums and other dots read, but for operations that do so `apart` from the rings."""
        if not self._leaves_for_last:
            return frozenset()
        return shared_operands(self.flow, [ring.chain for ring in self.rings], apart)

    @property
    def _leaves_for_last(self) -> bool:
        """Whether it is for TPUs, whose compilers decide what is made when, and not differentiated after."""
        return self.network is not None and self.network.leaves_for_last and not self.flow.differentiable

    def read_later(self, index: int) -> Mapping[int, bool]:
        """Positions of an operation's results that only operations read, each with whether a ring does."""
        users = self.flow.users
        return {
            position: any(self._in_ring(user, value) for user in users[value])
            for position, value in enumerate(self.flow.ops[index].outputs)
            if users[value] and min(users[value]) >= 0
        }

    def _in_ring(self, index: int, value: int) -> bool:
        """Whether a ring in a body of an operation reads a value."""
        op = self.flow.ops[index]
        for body in () if op.name in LOOPS else self.bodies_of(index):
            operands = _passed(op, len(body.flow.inputs))
            for argument in (a for o, a in zip(operands, body.flow.inputs, strict=True) if o == value):
                users = [user for user in body.flow.users[argument] if user >= 0]
                if argument in body.read_by_rings or any(body._in_ring(user, argument) for user in users):
                    return True
        return False

    @cached_property
    def read_by_rings(self) -> frozenset[int]:
        """The values from elsewhere that rings read."""
        return read_by_rings(self.flow, [ring.chain for ring in self.rings])

    @cached_property
    def changes(self) -> bool:
        """Whether anything is rewritten, here or in a body."""
        here = any(decision.rewritten for decision in self.decisions)
        return here or any(body.changes for index in self.bodies for body in self.bodies_of(index))

    def worth(self, policy: Policy) -> tuple[float, float]:
        """What plans of one jaxpr are compared by: seconds saved and rings; rings first of always."""
        rings = [decision for decision in self.decisions if decision.rewritten]
        saved_s = sum(d.estimate.benefit_s for d in rings if d.estimate is not None)
        return (len(rings), saved_s) if policy == "always" else (saved_s, len(rings))

    @cached_property
    def device_kinds(self) -> frozenset[str | None]:
        """The kinds of devices that the shard_maps of the program run on."""
        own = {
            shims.device_kind(var.aval)
            for op in self.flow.ops
            if op.name == "shard_map"
            for var in shims.open_jaxpr(op.params["jaxpr"])[0].invars[:1]
        }
        inner = (body.device_kinds for index in self.bodies for body in self.bodies_of(index))
        return frozenset(own).union(*inner)


def make_plan(
    jaxpr: Any,
    policy: Policy,
    hardware_of: HardwareOf,
    *,
    differentiable: bool = False,
    try_out: TryOut | None = None,
) -> Plan:
    """Plans the rewrite of a jaxpr and of all jaxprs inside it.

    Args:
      jaxpr: an open or closed jaxpr.
      policy: see ``overlap_collectives``.
      hardware_of: from the ``device_kind`` of the mesh that a collective runs on (None if not known) to
        hardware.
      differentiable: plan only what jax may differentiate: custom derivatives are kept.
      try_out: compiles and times a chain's schedules, for the policies ``verify`` and ``autotune``.
    """
    return _Planner(policy, hardware_of, differentiable, try_out).plan(
        jaxpr, "", None, replaceable=True, mapped=None, alike=_entering(jaxpr)
    )


def sites(plan: Plan) -> tuple[Site, ...]:
    """A site for every collective of a planned program, in program order, each equation once."""
    return tuple(describe(p, d, count) for p, count in _counts(plan).items() for d in p.decisions)


def _counts(plan: Plan) -> Mapping[Plan, int]:
    """How often each plan of a program runs, in program order; each is looked into once."""
    called: dict[Plan, tuple[tuple[Plan, int], ...]] = {}
    ended: list[Plan] = []

    def enter(entered: Plan) -> None:
        called[entered] = tuple(_called(entered))
        for body, _ in called[entered]:
            if body not in called:
                enter(body)
        ended.append(entered)

    enter(plan)
    counts = dict.fromkeys(called, 0)
    counts[plan] = 1
    for caller in reversed(ended):  # All that call a plan end after it.
        for body, times in called[caller]:
            counts[body] += counts[caller] * times
    return counts


def _called(plan: Plan) -> Iterator[tuple[Plan, int]]:
    """The plans of bodies that hold something, once per operation, with how often each runs there."""
    for index, op in enumerate(plan.flow.ops):
        # One function may be both branches of a conditional.
        for body in dict.fromkeys((*plan.bodies_of(index), *plan.opaque.get(index, ()))):
            if body.decisions or body.bodies or body.opaque:
                repeats = op.params.get("length", 1)
                yield body, repeats if isinstance(repeats, int) else 1


def describe(plan: Plan, decision: Decision, count: int = 1) -> Site:
    """The site of one decision."""
    flow, collective = plan.flow, decision.collective
    op = flow.ops[collective.op]
    ring = decision.ring
    return Site(
        kind=collective.kind if ring is None else ring.chain.kind,
        axis=collective.axis,
        axis_size=collective.axis_size,
        source=op.source,
        path=plan.path,
        count=count,
        operand=_type_of(flow.aval(op.inputs[0]), op.eqn.invars[0].aval),
        result=_type_of(flow.avals[op.outputs[0]], op.eqn.outvars[0].aval),
        dots=() if ring is None else tuple(_dot(flow, flow.ops[dot.op]) for dot in ring.chain.dots),
        rewritten=decision.rewritten,
        reason=str(decision.reason.code),
        sentence=decision.reason.sentence,
        schedule="" if ring is None else str(ring.schedule),
        estimate=decision.estimate,
    )


def _type_of(aval: Any, written: Any) -> str:
    """The type of an array; where the graph has its dims apart, or as one, that which the user wrote."""
    aval = written if written.size == aval.size else aval
    short, _, _ = str(aval.str_short(short_dtypes=True)).partition("[")
    return f"{short}[{','.join(map(str, aval.shape))}]"


def _dot(flow: Dataflow, op: Op) -> str:
    pairs = zip(op.inputs, op.eqn.invars, strict=True)
    lhs, rhs = (_type_of(flow.aval(operand), written.aval) for operand, written in pairs)
    return f"{lhs} · {rhs} at {op.source}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Mapped:
    """A shard_map on a concrete mesh: the mesh, the axes it maps over, whether types track varying axes."""

    mesh: Any
    axes: frozenset[str]
    check_vma: bool


def _mapped(op: Op, around: _Mapped | None) -> _Mapped | None:
    """What the body of a shard_map, in another one perhaps, is mapped over; None if that tells no devices.

    A shard_map on the mesh of the context, or within another, need not know the devices itself.
    """
    mesh = op.params["mesh"]
    if around is not None and not isinstance(mesh, Mesh):
        mesh = around.mesh
    mesh = shims.concrete_mesh(mesh)
    if mesh is None:
        return None
    axes = frozenset(op.params["newly_manual_axes"])
    return _Mapped(mesh, axes if around is None else axes | around.axes, op.params["check_vma"])


@dataclasses.dataclass(frozen=True, slots=True)
class _Alike:
    """What several devices have in common that run a jaxpr in a shard_map.

    Attributes:
      axes: the axes that are mapped over.
      arguments: of each argument, the axes along which it is the same; none are known of those that lack.
      apart: the axes along which some may not come to the jaxpr when others do.
    """

    axes: frozenset[str] = frozenset()
    arguments: tuple[frozenset[str], ...] = ()
    apart: frozenset[str] = frozenset()

    def of(self, flow: Dataflow) -> Mapping[int, frozenset[str]]:
        """The same by value of the jaxpr's graph."""
        return {value: axes for value, axes in zip(flow.inputs, self.arguments, strict=False) if axes}


def _entering(jaxpr: Any) -> _Alike:
    """What several devices have in common that come to a program, of whose surroundings nothing is known.

    Inside of a shard_map there may be a branch around it that only some devices take. If no type tells what
    differs between devices, as under ``check_vma=False``, then any argument may be the same on all.
    """
    body, _ = shims.open_jaxpr(jaxpr)
    arguments = [var.aval for var in body.invars]
    made = [var.aval for eqn in body.eqns for var in eqn.outvars]
    axes = frozenset(axis for aval in arguments or made for axis in mapped_axes(aval))
    told = bool(axes) and any(map(shims.varying_axes, (*arguments, *made)))
    same = tuple(axes - shims.varying_axes(aval) if told else axes for aval in arguments)
    return _Alike(axes, same, apart=axes)


def _axes_cut(spec: PartitionSpec) -> set[str]:
    """The mesh axes along which devices have parts of their own of what a ``shard_map`` takes.

    Of what is yet to be summed over an axis each has an addend of its own.
    """
    names = {name for entry in spec.partitions for name in (entry if isinstance(entry, tuple) else (entry,))}
    return names | spec.unreduced


def _alike(op: Op, param: str, body: Any, invariance: Invariance, around: _Alike) -> _Alike:
    """What several devices have in common that run a body of an operation.

    Args:
      around: what those have in common that come to the body.
    """
    if op.name == "shard_map":
        new = frozenset(op.params["newly_manual_axes"])
        cut = map(_axes_cut, op.params["in_specs"])
        same = [
            invariance.axes_of(operand, around.axes) | new.difference(names)
            for operand, names in zip(op.inputs, cut, strict=True)
        ]
        return _Alike(around.axes | new, tuple(same), around.apart)
    if not around.axes:
        return _Alike(apart=around.apart)
    if op.name in LOOPS:
        return dataclasses.replace(around, arguments=invariance.in_loop(op, param, around.axes))
    arguments = _passed(op, len(shims.open_jaxpr(body)[0].invars))
    same = [invariance.axes_of(operand, around.axes) for operand in arguments]
    return dataclasses.replace(around, arguments=tuple(same))


@dataclasses.dataclass(frozen=True, slots=True)
class _Stacks:
    """What a jaxpr has to do with stacks of what a loop around it reads and makes, a slice an iteration.

    Attributes:
      sliced: positions of arguments that are such slices.
      stacked: positions of results that are only put into such a stack.
    """

    sliced: frozenset[int] = frozenset()
    stacked: frozenset[int] = frozenset()

    def of(self, flow: Dataflow) -> Dataflow:
        """The jaxpr's graph, which knows them."""
        if self == _NO_STACKS:
            return flow
        results = {o for i, o in enumerate(flow.outputs) if i in self.stacked and isinstance(o, int)}
        stacked = (value for value in results if set(flow.users[value]) == {-1})
        sliced = frozenset(flow.inputs[i] for i in self.sliced)
        return dataclasses.replace(flow, sliced=sliced, stacked=frozenset(stacked))


def _stacks(op: Op, body: Any, flow: Dataflow) -> _Stacks:
    """Those of a body of an operation of this graph."""
    inner, _ = shims.open_jaxpr(body)
    if op.name == "scan":
        carried = shims.loop_carried(op.eqn)
        results = range(carried.stop - carried.start, len(inner.outvars))
        return _Stacks(frozenset(range(carried.stop, len(inner.invars))), frozenset(results))
    if op.name in LOOPS:
        return _Stacks()
    operands = enumerate(_passed(op, len(inner.invars)))
    sliced = frozenset(i for i, operand in operands if isinstance(operand, int) and operand in flow.sliced)
    return _Stacks(sliced, frozenset(i for i, value in enumerate(op.outputs) if value in flow.stacked))


_NO_STACKS = _Stacks()


class _Planner:
    """Plans each jaxpr once, however often it is called."""

    def __init__(
        self, policy: Policy, hardware_of: HardwareOf, differentiable: bool, try_out: TryOut | None
    ) -> None:
        self.try_out = try_out
        self.differentiable = differentiable
        self.policy = policy
        self.hardware_of = hardware_of
        self.plans: dict[tuple[int, frozenset[int] | None, bool, _Mapped | None, _Alike, _Stacks], Plan] = {}
        self.networks: dict[tuple[str | None, _Mapped | None], Network] = {}
        self.concerned: dict[int, bool] = {}

    def plan(
        self,
        jaxpr: Any,
        path: str,
        steady: frozenset[int] | None,
        *,
        replaceable: bool,
        mapped: _Mapped | None,
        alike: _Alike,
        lasting: frozenset[int] = frozenset(),
        stacks: _Stacks = _NO_STACKS,
    ) -> Plan:
        """The plan of one jaxpr.

        Args:
          jaxpr: the jaxpr.
          path: the calls it is in.
          steady: positions of the arguments that are the same in every iteration of the loop around it; None
            if it is in no loop.
          replaceable: whether it can be replaced in the program.
          mapped: the shard_map around it; None if there is none on a concrete mesh.
          alike: what the devices that run it have in common.
          lasting: positions of the arguments that the program around it reads again; of a body that is
            called several times those of the first call, of which there are most.
          stacks: what it has to do with those of a loop around it.
        """
        key = (id(shims.open_jaxpr(jaxpr)[0]), steady, replaceable, mapped, alike, stacks)
        if key in self.plans:
            return self.plans[key]
        flow = stacks.of(dataflow(jaxpr, differentiable=self.differentiable))
        if replaceable:
            flow = summed_once(flow)

        def planned(flow: Dataflow) -> Plan:
            return self._planned(
                flow, path, steady, lasting, replaceable=replaceable, mapped=mapped, alike=alike
            )

        def anew(flow: Dataflow) -> Plan:
            return _dims_apart(flow, planned, self.policy) if replaceable else planned(flow)

        on_tpus = replaceable and self._on_tpus(flow, mapped)
        self.plans[key] = _dims_as_one(flow, anew) if on_tpus else anew(flow)
        return self.plans[key]

    def _planned(
        self,
        flow: Dataflow,
        path: str,
        steady: frozenset[int] | None,
        lasting: frozenset[int],
        *,
        replaceable: bool,
        mapped: _Mapped | None,
        alike: _Alike,
    ) -> Plan:
        """The plan of a jaxpr's graph; see `plan`."""
        bodies: dict[int, dict[str, tuple[Plan, ...]]] = {}
        opaque: dict[int, tuple[Plan, ...]] = {}
        same = _steady_values(flow, steady)
        slices = mapped is not None and several_slices(mapped.mesh)
        flow = dataclasses.replace(flow, steady=frozenset(same or ()), several_slices=slices)
        again = frozenset(flow.inputs[position] for position in lasting)
        invariance = Invariance(flow, alike.of(flow))
        for index, op in enumerate(flow.ops):
            if not any(map(self._concerns, op.bodies)):
                continue
            read_again = {
                value
                for value in op.inputs
                if isinstance(value, int)
                and (value in again or any(user > index for user in reversed(flow.users[value])))
            }

            around = dataclasses.replace(alike, apart=alike.apart | invariance.apart(op))

            def within(param: str, body: Any, op: Op = op, around: _Alike = around) -> _Alike:
                return _alike(op, param, body, invariance, around)

            inner = self._bodies(flow, op, path, same, mapped, within, read_again, replaceable=replaceable)
            if not inner:
                continue
            if replaceable and op.name in BODIES and all(map(_retraceable, op.bodies)):
                bodies[index] = inner
            else:
                inner = self._bodies(flow, op, path, same, mapped, within, read_again, replaceable=False)
                opaque[index] = tuple(p for plans in inner.values() for p in plans)
        undecided = Plan(flow, path, (), (), bodies, opaque)

        def decided(plan: Plan) -> Plan:
            replicas = invariance if plan.flow is flow else Invariance(plan.flow, alike.of(plan.flow))
            return self._decided(plan, replaceable, mapped, replicas, again, alike.apart)

        return _scattering_first(undecided, decided) if replaceable else decided(undecided)

    def _bodies(
        self,
        flow: Dataflow,
        op: Op,
        path: str,
        same: Set[int] | None,
        mapped: _Mapped | None,
        within: Callable[[str, Any], _Alike],
        again: Set[int],
        *,
        replaceable: bool,
    ) -> dict[str, tuple[Plan, ...]]:
        name = f"{path}/{op.name}".lstrip("/")
        if op.name == "shard_map":
            mapped = _mapped(op, mapped)
        held = BODIES.get(op.name, op.params) if replaceable else op.params
        return {
            param: tuple(
                self.plan(
                    j,
                    name,
                    _steady_arguments(op, param, j, same),
                    replaceable=replaceable and op.name in BODIES,
                    mapped=mapped,
                    alike=within(param, j),
                    lasting=_arguments(op, param, j, again),
                    stacks=_stacks(op, j, flow),
                )
                for j in _as_jaxprs(op.params[param])
            )
            for param in held
            if any(map(self._concerns, _as_jaxprs(op.params[param])))
        }

    def _concerns(self, jaxpr: Any) -> bool:
        """Whether there is anything to plan in a jaxpr: a collective or a shard_map, in it or further in."""
        body, _ = shims.open_jaxpr(jaxpr)
        key = id(body)
        if key not in self.concerned:
            self.concerned[key] = any(
                eqn.primitive.name in _CONCERN
                or any(map(self._concerns, jex_core.jaxprs_in_params(eqn.params)))
                for eqn in body.eqns
            )
        return self.concerned[key]

    def _decided(
        self,
        plan: Plan,
        replaceable: bool,
        mapped: _Mapped | None,
        replicas: Invariance,
        lasting: Set[int],
        apart: Set[str],
    ) -> Plan:
        flow = plan.flow
        matches = match_dataflow(flow, replicas, apart)
        if not matches:
            return plan.decided(())
        if not replaceable:
            inside = Reason(Code.OPAQUE_CALL, f"It is in {plan.path}.")
            return plan.decided(tuple(Decision(m.collective, None, None, False, inside) for m in matches))
        result = flow.avals[flow.ops[matches[0].collective.op].outputs[0]]
        network = self._network(shims.device_kind(result), mapped)
        repeated = {
            match.collective.op
            for match in matches
            if flow.steady.issuperset(flow.ops[match.collective.op].inputs)
        }
        decisions = decide(
            flow,
            matches,
            self.policy,
            network,
            lambda d: describe(plan, d),
            repeated,
            self.try_out,
            lasting,
        )
        if self.try_out is not None and mapped is None:
            decisions = tuple(map(_untried, decisions))
        return dataclasses.replace(plan, network=network).decided(decisions)

    def _on_tpus(self, flow: Dataflow, mapped: _Mapped | None) -> bool:
        """Whether a graph with collectives runs on TPUs."""
        first = next((op for op in flow.ops if op.name in COLLECTIVES), None)
        if first is None:
            return False
        hardware = self._network(shims.device_kind(flow.avals[first.outputs[0]]), mapped).hardware
        return hardware is not None and hardware.network == "torus"

    def _network(self, device_kind: str | None, mapped: _Mapped | None) -> Network:
        key = (device_kind, mapped)
        if key not in self.networks:
            hardware = self.hardware_of(device_kind)
            self.networks[key] = (
                Network(hardware)
                if mapped is None
                else Network(hardware, mapped.mesh, mapped.axes, mapped.check_vma)
            )
        return self.networks[key]


def _dims_as_one(flow: Dataflow, planned: Callable[[Dataflow], Plan]) -> Plan:
    """The plan of a graph, with dims as one where rings have no need of them."""
    found = flattenings(flow)
    plan = planned(flattened(flow, found) if found else flow)
    rings = {plan.flow.ops[d.collective.op].eqn.outvars[0] for d in plan.decisions if d.rewritten and d.ring}
    left = tuple(each for each in found if flow.ops[each.collective].eqn.outvars[0] in rings)
    if left == found:
        return plan
    return planned(flattened(flow, left) if left else flow)


def _dims_apart(flow: Dataflow, planned: Callable[[Dataflow], Plan], policy: Policy) -> Plan:
    """The plan of a graph, with merged dims apart where that is predicted to save more.

    Where it is not, the graph stays as it is, and the report says why no ring is there then.
    """
    found = merges(flow) if flow.collectives and no_chains(flow) is None else ()
    if policy != "always":
        found = tuple(merge for merge in found if merge.fills_tiles)
    plan = best = planned(flow)
    told: dict[int, Decision] = {}
    while found:
        apart = planned(kept_apart(flow, found))
        best = max(best, apart, key=lambda each: each.worth(policy))
        decisions = {apart.flow.ops[d.collective.op].outputs: d for d in apart.decisions}
        made = [decisions.get(flow.ops[merge.collective].outputs) for merge in found]
        told = told or {merge.collective: d for merge, d in zip(found, made, strict=True) if d is not None}
        left = tuple(merge for merge, d in zip(found, made, strict=True) if d is not None and d.rewritten)
        found = () if left == found else left
    if best is not plan:
        return best

    def explained(decision: Decision) -> Decision:
        other = told.get(decision.collective.op)
        if other is None or other.rewritten or decision.reason.code is not Code.NO_DOT:
            return decision
        return dataclasses.replace(decision, reason=other.reason, estimate=other.estimate)

    return dataclasses.replace(plan, decisions=tuple(map(explained, plan.decisions)))


def _scattering_first(plan: Plan, decided: Callable[[Plan], Plan]) -> Plan:
    """The decided plan, with those sums scattered first whose scatter becomes a ring then, and no others."""
    pairs = sums_before_scatters(plan.flow)
    while pairs:
        turned = decided(dataclasses.replace(plan, flow=scattered_first(plan.flow, pairs)))
        rings = {d.collective.op for d in turned.decisions if d.rewritten and d.ring is not None}
        # A scatter has the number of the sum that it came after.
        left = tuple(pair for pair in pairs if pair[0] in rings)
        if left == pairs:
            return turned
        pairs = left
    return decided(plan)


def _untried(decision: Decision) -> Decision:
    """A decision by the cost model alone, which says why its chain was not tried."""
    code, detail = decision.reason.code, decision.reason.detail
    if code not in (Code.PROFITABLE, Code.NOT_PROFITABLE, Code.HIDDEN_AS_WRITTEN):
        return decision
    return dataclasses.replace(decision, reason=Reason(code, f"{detail} {_NO_DEVICES}".lstrip()))


def _steady_values(flow: Dataflow, steady: frozenset[int] | None) -> Set[int] | None:
    """The values of a jaxpr in a loop that are the same in every iteration; None if it is in no loop."""
    if steady is None:
        return None
    same = {flow.inputs[position] for position in steady} | set(flow.constants)
    for op in flow.ops:
        if not shims.has_effects(op.eqn) and all(o in same for o in op.inputs if isinstance(o, int)):
            same.update(op.outputs)
    return same


def _steady_arguments(op: Op, param: str, body: Any, same: Set[int] | None) -> frozenset[int] | None:
    """The positions of a body's arguments that are the same in every iteration of a loop."""
    return None if same is None and op.name not in LOOPS else _arguments(op, param, body, same or set())


def _arguments(op: Op, param: str, body: Any, values: Set[int]) -> frozenset[int]:
    """The positions of a body's arguments that are literals or among these values.

    Of a loop they are those that are the same in every iteration, which are read again in each.
    """
    if op.name in LOOPS:
        return shims.loop_unchanged(op.eqn, param)
    inputs = _passed(op, len(shims.open_jaxpr(body)[0].invars))
    return frozenset(i for i, o in enumerate(inputs) if not isinstance(o, int) or o in values)


def _passed(op: Op, arguments: int) -> tuple[Operand, ...]:
    """The operands that a body of so many arguments is given, unless it is a loop's.

    The first operand of a conditional chooses the branch; else operands and arguments correspond.
    """
    return op.inputs[len(op.inputs) - arguments :]


def _as_jaxprs(param: Any) -> Iterator[Any]:
    for item in param if isinstance(param, tuple | list) else (param,):
        if hasattr(item, "eqns"):
            yield item


def _retraceable(jaxpr: Any) -> bool:
    """Whether a body can be traced again from its types alone: all its arguments are arrays."""
    return all(type(var.aval).__name__ == "ShapedArray" for var in shims.open_jaxpr(jaxpr)[0].invars)
