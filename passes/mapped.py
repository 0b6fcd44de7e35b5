"""What ``vmap`` makes of a program's results: the same of a rewritten program as of its derivative's rule.

jax batches a function with a rule for its derivative in two steps: the function at once, and the rule when it
is asked for. It takes for granted that both have the new dim at the same place of a result, or both none:
where they differ, gradients come out wrong. Each is batched by the equations that it is made of, and those of
rings and of derivatives are others than the original's. So the results are put in one form: with the new dim
in front where they depend, in the original, on an argument that is mapped over, and without it elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from passes import shims
from passes.invariance import CALLS

_CALLS = CALLS | {"shard_map"}
"""Equations of which each result depends on the operands that it depends on in their one jaxpr."""


class Mapped:
    """Puts the results of a program, however they were made, in the form in which they are batched.

    Of the program it keeps no more than what depends on what: traced programs, which refer to this and which
    jax keeps, would keep the arrays that the program closes over.

    Args:
      jaxpr: the original program, closed.
      used: which of its arguments those are that one is told of.
    """

    def __init__(self, jaxpr: Any, used: Sequence[bool]) -> None:
        self.count = len(jaxpr.out_avals)
        self._used = tuple(used)
        self._names = shims.named_axes(jaxpr)
        self._links = _links(jaxpr, {})

    def aligned(self, arguments: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """The results, to be batched where they depend on an argument that is."""
        if not arguments:
            return list(results)
        marks = _marks_p.bind(*arguments, mapped=self)
        return [aligned_p.bind(result, mark) for result, mark in zip(results, marks, strict=True)]

    def results(self, axis_data: Any, arguments: Sequence[bool]) -> list[bool]:
        """Which results depend on some of the arguments; all, if the program names the axis of a ``vmap``."""
        if axis_data.name in self._names:
            return [True] * self.count
        told = iter(arguments)
        return self._links.reached([used and next(told) for used in self._used])


@dataclasses.dataclass(frozen=True, slots=True)
class _Links:
    """What in a jaxpr depends on what; values are numbers, of which the first are the arguments.

    Attributes:
      steps: of each equation the operands and the results, and the links of its body where these count; of a
        loop or branch all results depend on all operands.
      results: the jaxpr's; None for a literal.
    """

    steps: tuple[tuple[tuple[int | None, ...], tuple[int, ...], _Links | None], ...]
    results: tuple[int | None, ...]

    def reached(self, given: Sequence[bool]) -> list[bool]:
        """Which results depend on some of the arguments."""
        found = {number for number, told in enumerate(given) if told}
        for operands, results, inner in self.steps:
            told = [operand in found for operand in operands]
            if inner is not None:
                depends = inner.reached(told)
                found.update(value for value, reached in zip(results, depends, strict=True) if reached)
            elif any(told):
                found.update(results)
        return [result in found for result in self.results]


def _links(jaxpr: Any, known: dict[int, _Links]) -> _Links:
    """The links of a jaxpr; those of a body that is called twice are shared."""
    body, _ = shims.open_jaxpr(jaxpr)
    if id(body) not in known:
        numbers: dict[Any, int] = {}

        def number(var: Any) -> int:
            return numbers.setdefault(var, len(numbers))

        def read(atom: Any) -> int | None:
            return None if shims.is_literal(atom) else number(atom)

        for var in body.invars:
            number(var)
        steps = []
        for eqn in body.eqns:
            bodies = tuple(jex_core.jaxprs_in_params(eqn.params)) if eqn.primitive.name in _CALLS else ()
            inner = _links(bodies[0], known) if len(bodies) == 1 else None
            steps.append((tuple(map(read, eqn.invars)), tuple(map(number, eqn.outvars)), inner))
        known[id(body)] = _Links(tuple(steps), tuple(map(read, body.outvars)))
    return known[id(body)]


# A mark per result, which is batched where the result is to be; and the result as its mark is.

_marks_p = jex_core.Primitive("overlap_marks")
_marks_p.multiple_results = True
aligned_p = jex_core.Primitive("overlap_aligned")


def _marks(*arguments: Any, mapped: Mapped) -> list[Any]:
    return [jnp.zeros((), jnp.bool_)] * mapped.count


def _marks_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    marks = _marks_p.bind(*primals, **params)
    return marks, [ad.Zero(jax.typeof(mark).to_tangent_aval()) for mark in marks]


def _marks_batched(
    axis_data: Any, values: Sequence[Any], dims: Sequence[Any], *, mapped: Mapped
) -> tuple[list[Any], list[int | None]]:
    marks = _marks_p.bind(*values, mapped=mapped)
    batched = mapped.results(axis_data, [isinstance(dim, int) for dim in dims])
    size = axis_data.size
    marks = [jnp.broadcast_to(m, (size, *m.shape)) if b else m for m, b in zip(marks, batched, strict=True)]
    return marks, [0 if b else None for b in batched]


def _aligned_lowered(context: Any, value: Any, mark: Any) -> list[Any]:
    return [value]


def _aligned_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return aligned_p.bind(*primals), tangents[0]


def _aligned_batched(axis_data: Any, values: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int | None]:
    (value, mark), (axis, marked) = values, dims
    batched = isinstance(axis, int)
    if not isinstance(marked, int):
        # Before jax 0.12 what is written into an empty array is batched, and the same for all.
        value = lax.index_in_dim(value, 0, axis, keepdims=False) if batched else value
        return aligned_p.bind(value, mark), None
    shape = (axis_data.size, *np.shape(value))
    value = jnp.moveaxis(value, axis, 0) if batched else jnp.broadcast_to(value, shape)
    return aligned_p.bind(value, mark), 0


_marks_p.def_impl(_marks)
_marks_p.def_abstract_eval(lambda *_, mapped: [jax.core.ShapedArray((), np.dtype(np.bool_))] * mapped.count)
mlir.register_lowering(_marks_p, mlir.lower_fun(_marks, multiple_results=True))
ad.primitive_jvps[_marks_p] = _marks_jvp
batching.fancy_primitive_batchers[_marks_p] = _marks_batched

aligned_p.def_impl(lambda value, mark: value)
aligned_p.def_abstract_eval(lambda value, mark: value)
mlir.register_lowering(aligned_p, _aligned_lowered)
ad.primitive_jvps[aligned_p] = _aligned_jvp
batching.fancy_primitive_batchers[aligned_p] = _aligned_batched
