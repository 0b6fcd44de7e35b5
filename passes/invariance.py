"""Which values are the same on every device of an axis, as far as the program itself shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from jax.extend import core as jex_core
from jax.sharding import AxisType

from passes import shims
from passes.blocks import is_blockwise
from passes.collective import Collective, mesh_axes
from passes.graph import COLLECTIVES, GATHERS, REDUCTIONS, Dataflow, Op, Operand
from passes.loops import LOOPS, Loop

_LOCAL = frozenset({"iota", "dot_general"})
_OF_THE_DEVICE = COLLECTIVES - GATHERS - REDUCTIONS | {
    *("axis_index", "ppermute", "pgather", "precv", "ragged_all_to_all", "rng_uniform"),
    *("ppermute_start", "all_to_all_start", "reduce_scatter_start"),
}
"""Equations that may give something else on each device, whatever they are given."""
EXTREMES = frozenset({"pmax", "pmin"})
CALLS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"),
        *("custom_jvp_call", "custom_vjp_call"),
    }
)
"""Equations that do no more than run a jaxpr of their operands."""


class Invariance:
    """Answers for one dataflow graph; each value is looked at once per set of axes.

    Types tell only under ``check_vma=True``, so this is derived from the program: constants are invariant,
    the results of a psum or all_gather over the axes, and what deterministic local equations compute from
    such values. Of what the other collectives make nothing is known: a psum's sum, scattered, differs again.

    Args:
      flow: the dataflow graph.
      given: of inputs of the graph the axes along which they are meant to be the same. If there is such word,
        every equation but those that tell devices apart is taken to keep it; else only those known to.
    """

    def __init__(self, flow: Dataflow, given: Mapping[int, frozenset[str]] | None = None) -> None:
        self._flow = flow
        self._given = given
        self._known: dict[tuple[str, ...], dict[int, bool]] = {}
        self._bodies: dict[tuple[int, tuple[bool, ...], frozenset[str]], list[bool]] = {}
        self._apart: dict[int, bool] = {}

    def over(self, collective: Collective) -> Callable[[Operand], bool]:
        """Tells whether an operand is known to be the same on all devices along the collective's axes."""
        return self._along(collective.axes)

    def axes_of(self, operand: Operand, axes: Iterable[str]) -> frozenset[str]:
        """Along which of these axes an operand is the same on all devices."""
        return frozenset(axis for axis in axes if self._along((axis,))(operand))

    def apart(self, op: Op) -> frozenset[str]:
        """Along which axes devices may take other branches of a conditional, or iterate a loop more often."""
        if op.name not in ("cond", "while"):
            return frozenset()
        values = (*op.inputs, *op.outputs)
        axes = frozenset(axis for value in values for axis in mapped_axes(self._flow.aval(value)))
        if op.name == "cond":
            return axes - self.axes_of(op.inputs[0], axes)
        return frozenset(axis for axis in axes if not self._end_together(op, axis))

    def _end_together(self, op: Op, axis: str) -> bool:
        arguments = self._in_loop(op, "cond_jaxpr", axis)
        return all(self._of_body(op.params["cond_jaxpr"], tuple(arguments), {axis}))

    def in_loop(self, op: Op, body: str, axes: Iterable[str]) -> tuple[frozenset[str], ...]:
        """Along which of these axes each argument of a loop's body is the same in every iteration."""
        same = {axis: self._in_loop(op, body, axis) for axis in axes}
        arguments = len(shims.loop_operands(op.eqn, body))
        return tuple(frozenset(axis for axis in same if same[axis][i]) for i in range(arguments))

    def _in_loop(self, op: Op, body: str, axis: str) -> Sequence[bool]:
        given = list(map(self._along((axis,)), op.inputs))
        return self._of_loop(op.eqn, given, {axis})[0][body]

    def _along(self, axes: tuple[str, ...]) -> Callable[[Operand], bool]:
        known = self._known.setdefault(tuple(sorted(axes)), {})

        def invariant(operand: Operand) -> bool:
            return not isinstance(operand, int) or self._look(operand, set(axes), known)

        return invariant

    def _look(self, wanted: int, axes: set[str], known: dict[int, bool]) -> bool:
        flow = self._flow
        stack = [wanted]
        while stack:
            value = stack[-1]
            if value in known:
                stack.pop()
                continue
            if value not in flow.producer:
                same = (self._given or {}).get(value, frozenset())
                known[value] = value in flow.constants or axes <= same
                continue
            op = flow.ops[flow.producer[value]]
            unknown = [operand for operand in op.inputs if isinstance(operand, int) and operand not in known]
            if self._given is None and not (op.name in COLLECTIVES | _LOCAL or is_blockwise(op.name)):
                known[value] = False
            elif unknown:
                stack.extend(unknown)
            else:
                given = [not isinstance(operand, int) or known[operand] for operand in op.inputs]
                known.update(zip(op.outputs, self._results(op.eqn, given, axes), strict=True))
        return known[wanted]

    def _results(self, eqn: Any, given: Sequence[bool], axes: Set[str]) -> Sequence[bool]:
        """Which results of an equation are the same along axes, if its operands are that are said to be."""
        name, results = eqn.primitive.name, len(eqn.outvars)
        if name in GATHERS | REDUCTIONS | EXTREMES:
            groups = eqn.params.get("axis_index_groups")
            if groups is None:
                return [axes <= set(mesh_axes(eqn)) or all(given)] * results
            # Groups of unequal size make different sums of one value.
            return [all(given) and len(set(map(len, groups))) == 1] * results
        if name in _OF_THE_DEVICE:
            return [False] * results
        bodies = () if is_blockwise(name) else tuple(jex_core.jaxprs_in_params(eqn.params))
        if name in CALLS and len(bodies) == 1:
            return self._of_body(bodies[0], tuple(given), axes)
        if name in LOOPS:
            return self._of_loop(eqn, given, axes)[1]
        if name == "cond":
            branches = zip(*(self._of_body(body, tuple(given[1:]), axes) for body in bodies), strict=True)
            return [given[0] and all(same) for same in branches]
        deterministic = not shims.has_effects(eqn) and not any(map(self._tells_devices_apart, bodies))
        return [all(given) and deterministic] * results

    def _of_loop(
        self, eqn: Any, given: Sequence[bool], axes: Set[str]
    ) -> tuple[Mapping[str, Sequence[bool]], Sequence[bool]]:
        """Of a loop which arguments of its bodies are the same in every iteration, and which results."""
        return Loop.of(eqn).same(given, lambda body, told: self._of_body(eqn.params[body], tuple(told), axes))

    def _of_body(self, jaxpr: Any, given: tuple[bool, ...], axes: Set[str]) -> Sequence[bool]:
        """Which results of a jaxpr are the same; looked into once, however often it is called."""
        body, _ = shims.open_jaxpr(jaxpr)
        key = (id(body), given, frozenset(axes))
        if key not in self._bodies:
            same = {*body.constvars, *(var for var, told in zip(body.invars, given, strict=True) if told)}

            def told(atom: Any) -> bool:
                return shims.is_literal(atom) or atom in same

            for eqn in body.eqns:
                found = self._results(eqn, list(map(told, eqn.invars)), axes)
                same.update(var for var, kept in zip(eqn.outvars, found, strict=True) if kept)
            self._bodies[key] = list(map(told, body.outvars))
        return self._bodies[key]

    def _tells_devices_apart(self, jaxpr: Any) -> bool:
        """Whether there is an equation in a jaxpr, or further in, that may."""
        body, _ = shims.open_jaxpr(jaxpr)
        if id(body) not in self._apart:
            self._apart[id(body)] = any(
                eqn.primitive.name in _OF_THE_DEVICE
                or any(map(self._tells_devices_apart, jex_core.jaxprs_in_params(eqn.params)))
                for eqn in body.eqns
            )
        return self._apart[id(body)]


def mapped_axes(aval: Any) -> Iterator[str]:
    """The axes of several devices that are mapped over where there is a value of this type."""
    sharding = getattr(aval, "sharding", None)
    if sharding is not None:
        mesh = sharding.mesh
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        yield from (name for name, kind in kinds if kind is AxisType.Manual and mesh.shape[name] > 1)
