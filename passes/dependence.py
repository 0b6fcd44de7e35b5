"""Which results of a program differ along the axis of a ``vmap``, by which of its arguments do.

jax gives no new dim to what is the same along the axis, even where it comes out of one equation along with
what is not: the counter that a loop carries, or a sum over the axis itself. It is told here as jax tells it,
and where an equation is unknown, all that it makes of what differs does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core as jex_core

from passes import shims
from passes.graph import GATHERS, REDUCTIONS
from passes.invariance import CALLS, EXTREMES
from passes.loops import LOOPS, Loop

_CALLS = CALLS | {"shard_map"}
"""Equations of which each result depends on the operands that it depends on in their one jaxpr."""
_ALIKE = GATHERS | REDUCTIONS | EXTREMES
"""Equations whose results are the same along the axes that they are over."""
_EACH = REDUCTIONS | EXTREMES | {"optimization_barrier"}
"""Equations of which each result depends on one operand, in order."""

Differs = Sequence[bool]
Rule = Callable[[Differs, Any], Differs]
"""Which results of an equation differ, by which operands do, along an axis of some name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dependence:
    """What in a jaxpr depends on what; values are numbers, of which the first are the arguments.

    Attributes:
      steps: of each equation the operands, its rule, and the results.
      results: the jaxpr's; None for a literal.
    """

    steps: tuple[tuple[tuple[int | None, ...], Rule, tuple[int, ...]], ...]
    results: tuple[int | None, ...]

    def reached(self, given: Differs, axis: Any) -> list[bool]:
        """Which results differ along an axis of this name, if these arguments do."""
        found = {number for number, told in enumerate(given) if told}
        for operands, rule, results in self.steps:
            differ = rule([operand in found for operand in operands], axis)
            found.update(value for value, reached in zip(results, differ, strict=True) if reached)
        return [result in found for result in self.results]


def dependence(jaxpr: Any) -> Dependence:
    """The dependence of a jaxpr, open or closed."""
    return _of(jaxpr, {})


def _of(jaxpr: Any, known: dict[int, Dependence]) -> Dependence:
    """The same; that of a body that is called twice is shared."""
    body, _ = shims.open_jaxpr(jaxpr)
    if id(body) not in known:
        numbers: dict[Any, int] = {}

        def number(var: Any) -> int:
            return numbers.setdefault(var, len(numbers))

        def read(atom: Any) -> int | None:
            return None if shims.is_literal(atom) else number(atom)

        for var in body.invars:
            number(var)
        steps = [
            (tuple(map(read, eqn.invars)), _rule(eqn, known), tuple(map(number, eqn.outvars)))
            for eqn in body.eqns
        ]
        known[id(body)] = Dependence(tuple(steps), tuple(map(read, body.outvars)))
    return known[id(body)]


def _rule(eqn: Any, known: dict[int, Dependence]) -> Rule:
    name = eqn.primitive.name
    if name in LOOPS:
        return _loop(eqn, known)
    if name == "cond":
        return _conditional([_of(branch, known) for branch in eqn.params["branches"]])
    if name in _CALLS:
        bodies = tuple(jex_core.jaxprs_in_params(eqn.params))
        if len(bodies) == 1:
            return _call(_of(bodies[0], known), frozenset(eqn.params.get("newly_manual_axes", ())))
    return _local(name, shims.named_axes(eqn), len(eqn.outvars))


def _local(name: str, axes: frozenset[Any], results: int) -> Rule:
    """Of an equation without a body of ours."""

    def rule(given: Differs, axis: Any) -> Differs:
        if axis in axes:
            return [name not in _ALIKE] * results
        return given if name in _EACH else [any(given)] * results

    return rule


def _call(body: Dependence, bound: frozenset[Any]) -> Rule:
    """Of an equation that runs its body, in which some names are those of other axes."""
    return lambda given, axis: body.reached(given, None if axis in bound else axis)


def _conditional(branches: Sequence[Dependence]) -> Rule:
    """Of a conditional: where the branches differ all that they make does."""

    def rule(given: Differs, axis: Any) -> Differs:
        which, *operands = given
        made = zip(*(branch.reached(operands, axis) for branch in branches), strict=True)
        return [which or any(differ) for differ in made]

    return rule


def _loop(eqn: Any, known: dict[int, Dependence]) -> Rule:
    """Of a loop: where it ends at different times all that it makes differs."""
    loop = Loop.of(eqn)
    bodies = {name: _of(eqn.params[name], known) for name in loop.operands}

    def rule(given: Differs, axis: Any) -> Differs:
        def same(name: str, told: Sequence[bool]) -> list[bool]:
            return _not(bodies[name].reached(_not(told), axis))

        return _not(loop.same(_not(given), same)[1])

    return rule


def _not(told: Sequence[bool]) -> list[bool]:
    """What differs is not the same, and the other way round."""
    return [not each for each in told]
