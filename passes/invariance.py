"""Which values are the same on every device of an axis, as far as the program itself shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from jax.extend import core as jex_core

from passes import shims
from passes.blocks import is_blockwise
from passes.collective import Collective, mesh_axes
from passes.graph import COLLECTIVES, GATHERS, REDUCTIONS, Dataflow, Operand

_LOCAL = frozenset({"iota", "dot_general"})
_OF_THE_DEVICE = frozenset({"axis_index", "ppermute", "pgather"}) | COLLECTIVES - GATHERS - REDUCTIONS
"""Equations that may give something else on each device, whatever they are given."""
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"})
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
        if name in GATHERS | REDUCTIONS:
            groups = eqn.params.get("axis_index_groups")
            if groups is None:
                return [axes <= set(mesh_axes(eqn)) or all(given)] * results
            # Groups of unequal size make different sums of one value.
            return [all(given) and len(set(map(len, groups))) == 1] * results
        if shims.has_effects(eqn) or name in _OF_THE_DEVICE:
            return [False] * results
        bodies = () if is_blockwise(name) else tuple(jex_core.jaxprs_in_params(eqn.params))
        if name in _CALLS and len(bodies) == 1:
            return self._of_body(bodies[0], tuple(given), axes)
        return [all(given) and not any(map(self._tells_devices_apart, bodies))] * results

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


def settled(
    flow: Dataflow, given: Mapping[int, frozenset[str]], constants: int
) -> Mapping[int, frozenset[str]]:
    """Of the arguments of a loop's body the axes along which they are the same in every iteration.

    Args:
      flow: the body.
      given: of its arguments, the axes along which they are the same before the first.
      constants: how many of them, the first ones, no iteration changes.
    """
    known = dict(given)
    while True:
        invariance = Invariance(flow, known)
        before = dict(known)
        # What is carried comes first among the results, and after the constants among the arguments.
        for argument, result in zip(flow.inputs[constants:], flow.outputs, strict=False):
            if known.get(argument):
                known[argument] = invariance.axes_of(result, known[argument])
        if known == before:
            return known
