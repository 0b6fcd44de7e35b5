"""What ``vmap`` makes of a program's results: the same of a rewritten program as of its derivative's rule.

jax batches a function with a rule for its derivative in two steps: the function at once, and the rule when it
is asked for. It takes for granted that both have the new dim at the same place of a result, or both none:
where they differ, gradients come out wrong. Each is batched by the equations that it is made of, and those of
rings and of derivatives are others than the original's. So the results are put in one form: with the new dim
in front where they depend, in the original, on an argument that is mapped over, and without it elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from passes import shims
from passes.dependence import dependence


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
        self._dependence = dependence(jaxpr)

    def aligned(self, arguments: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """The results, to be batched where they depend on an argument that is."""
        if not arguments:
            return list(results)
        marks = _marks_p.bind(*arguments, mapped=self)
        return [aligned_p.bind(result, mark) for result, mark in zip(results, marks, strict=True)]

    def results(self, axis_data: Any, arguments: Sequence[bool]) -> list[bool]:
        """Which results differ along the axis of a ``vmap``, if these arguments do."""
        told = iter(arguments)
        return self._dependence.reached([used and next(told) for used in self._used], axis_data.name)


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
    marks = [shims.in_front(axis_data, m, None) if b else m for m, b in zip(marks, batched, strict=True)]
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
        return aligned_p.bind(shims.one_of(value, axis) if batched else value, mark), None
    return aligned_p.bind(shims.in_front(axis_data, value, axis if batched else None), mark), 0


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
