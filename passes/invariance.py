"""Which values are the same on every device of an axis, as far as the program itself shows it."""

from __future__ import annotations

from collections.abc import Callable

from passes import shims
from passes.blocks import is_blockwise
from passes.collective import Collective, mesh_axes
from passes.graph import COLLECTIVES, GATHERS, REDUCTIONS, Dataflow, Operand

_LOCAL = frozenset({"iota", "dot_general"})


class Invariance:
    """Answers for one dataflow graph; each value is looked at once per set of axes.

    Types tell only under ``check_vma=True``, so this is derived from the program: constants are invariant,
    the results of a psum or all_gather over the axes, and what deterministic local equations compute from
    such values. Of what the other collectives make nothing is known: a psum's sum, scattered, differs again.
    """

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        self._known: dict[tuple[str, ...], dict[int, bool]] = {}

    def over(self, collective: Collective) -> Callable[[Operand], bool]:
        """Tells whether an operand is known to be the same on all devices along the collective's axes."""
        known = self._known.setdefault(tuple(sorted(collective.axes)), {})

        def invariant(operand: Operand) -> bool:
            return not isinstance(operand, int) or self._look(operand, set(collective.axes), known)

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
                known[value] = value in flow.constants
                continue
            op = flow.ops[flow.producer[value]]
            if op.name in COLLECTIVES:
                whole = axes.issubset(mesh_axes(op)) and op.params.get("axis_index_groups") is None
                known[value] = whole and op.name in GATHERS | REDUCTIONS
            elif shims.has_effects(op.eqn) or not (op.name in _LOCAL or is_blockwise(op.name)):
                known[value] = False
            else:
                inputs = [operand for operand in op.inputs if isinstance(operand, int)]
                unknown = [operand for operand in inputs if operand not in known]
                stack.extend(unknown)
                if not unknown:
                    known[value] = all(known[operand] for operand in inputs)
        return known[wanted]
