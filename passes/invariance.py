"""Which values are the same on every device of an axis, as far as the program itself shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from passes import shims
from passes.blocks import is_blockwise
from passes.collective import Collective, mesh_axes
from passes.graph import COLLECTIVES, GATHERS, REDUCTIONS, Dataflow, Op, Operand, equations

_LOCAL = frozenset({"iota", "dot_general"})
_OF_THE_DEVICE = frozenset({"axis_index", "ppermute", "pgather"}) | COLLECTIVES
"""Equations that may give something else on each device, whatever they are given."""


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
            if op.name in COLLECTIVES:
                whole = axes.issubset(mesh_axes(op)) and op.params.get("axis_index_groups") is None
                known[value] = whole and op.name in GATHERS | REDUCTIONS
            elif shims.has_effects(op.eqn) or not self._keeps(op):
                known[value] = False
            else:
                inputs = [operand for operand in op.inputs if isinstance(operand, int)]
                unknown = [operand for operand in inputs if operand not in known]
                stack.extend(unknown)
                if not unknown:
                    known[value] = all(known[operand] for operand in inputs)
        return known[wanted]

    def _keeps(self, op: Op) -> bool:
        """Whether an operation makes the same of what is the same."""
        if op.name in _LOCAL or is_blockwise(op.name):
            return True
        inner = (eqn for body in op.bodies for eqn in equations(body))
        names = (op.name, *(eqn.primitive.name for eqn in inner))
        return self._given is not None and _OF_THE_DEVICE.isdisjoint(names)


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
