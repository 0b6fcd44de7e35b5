"""What jax's transformations make of a program's results, in whatever way those were made.

**vmap.** jax batches a function with a rule for its derivative in two steps: the function at once, and the
rule when it is asked for. It takes for granted that both have the new dim at the same place of a result, or
both none: where they differ, gradients come out wrong. Each is batched by the equations that it is made of,
and those of rings and of derivatives are others than the original's. So the results are put in one form: with
the new dim in front where they depend, in the original, on an argument that is mapped over, and without it
elsewhere.

**Transposes.** A program that is linear in some of its arguments may be transposed without being
differentiated (``jax.linear_transpose``, and gradients of ``lax.custom_linear_solve``). The equations of a
ring are not those of a linear function: it waits by its values' bits, say. So what comes back for a result
goes round them, to the transpose of the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from passes import shims
from passes.dependence import Dependence, dependence

Function = Callable[..., list[Any]]

Transpose = Callable[[Function, Sequence[Any], Sequence[Any]], list[Any]]
"""Of a function, its arguments, and what comes back for its results: what does for undefined arguments."""


class Results:
    """Puts the results of a program, however they were made, in the form in which they are transformed.

    Args:
      jaxpr: the original program, closed.
      used: which of its arguments those are that one is told of.
      transpose: how functions are transposed.
    """

    def __init__(self, jaxpr: Any, used: Sequence[bool], transpose: Transpose) -> None:
        self.types = tuple(map(_mark_type, jaxpr.out_avals))
        self.transpose = transpose
        self._jaxpr = jaxpr
        self._used = tuple(used)

    @functools.cached_property
    def _dependence(self) -> Dependence:
        """What depends on what in the program; only ``vmap`` asks."""
        return dependence(self._jaxpr)

    def aligned(
        self, own: Any, original: Function, arguments: Sequence[Any], results: Sequence[Any]
    ) -> list[Any]:
        """The results of that function of those arguments, as its own would be transformed.

        Args:
          own: an empty jaxpr, to which the function does not refer. jax keeps what it once worked out of an
            equation, its parameters too, until a jaxpr among these is gone.
          original: the program, as a function of the used arguments.
          arguments: those.
          results: what the rewritten program made of them.
        """
        if not arguments:
            return list(results)
        marks = _marks_p.bind(*arguments, own=own, original=original, types=self.types, results=self)
        return [aligned_p.bind(result, mark) for result, mark in zip(results, marks, strict=True)]

    def batched(self, axis_data: Any, arguments: Sequence[bool]) -> list[bool]:
        """Which results differ along the axis of a ``vmap``, if these arguments do."""
        told = iter(arguments)
        return self._dependence.reached([used and next(told) for used in self._used], axis_data.name)


# A mark per result, of the same type: it is batched where the result is to be, and takes what comes back for
# the result to the arguments. Its value is never read. And the result, as its mark is.

_marks_p = jex_core.Primitive("overlap_marks")
_marks_p.multiple_results = True
aligned_p = jex_core.Primitive("overlap_aligned")


def _mark_type(aval: Any) -> Any:
    """The type of a mark: no key of random numbers, for which there is no zero and nothing comes back."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return jax.core.ShapedArray((), np.dtype(np.bool_))
    return aval


def _marks(*arguments: Any, types: Sequence[Any], **_: Any) -> list[Any]:
    return [jnp.zeros(aval.shape, aval.dtype) for aval in types]


def _marks_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    marks = _marks_p.bind(*primals, **params)
    return marks, [ad.Zero(jax.typeof(mark).to_tangent_aval()) for mark in marks]


def _marks_transposed(
    cotangents: Sequence[Any], *arguments: Any, original: Function, results: Results, **_: Any
) -> list[Any]:
    return results.transpose(original, arguments, cotangents)


def _marks_batched(
    axis_data: Any, values: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[list[Any], list[int | None]]:
    axes = [dim if isinstance(dim, int) else None for dim in dims]
    told = [axis is not None for axis in axes]
    varies = params["results"].batched(axis_data, told)
    if not any(varies) and not any(told):
        return _marks_p.bind(*values, **params), [None] * len(varies)
    if not any(told):
        values, axes = [shims.in_front(axis_data, values[0], None), *values[1:]], [0, *axes[1:]]
    params["original"] = shims.vmap_over(axis_data)(params["original"], in_axes=tuple(axes))
    params["types"] = tuple(shims.batched_type(axis_data, aval) for aval in params["types"])
    marks = _marks_p.bind(*values, **params)
    marks = [mark if own else shims.one_of(mark, 0) for mark, own in zip(marks, varies, strict=True)]
    return marks, [0 if own else None for own in varies]


def _aligned_lowered(context: Any, value: Any, mark: Any) -> list[Any]:
    return [value]


def _aligned_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return aligned_p.bind(*primals), tangents[0]


def _aligned_transposed(cotangent: Any, value: Any, mark: Any) -> list[Any]:
    return [None, cotangent]


def _aligned_batched(axis_data: Any, values: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int | None]:
    (value, mark), (axis, marked) = values, dims
    batched = isinstance(axis, int)
    if not isinstance(marked, int):
        # Before jax 0.12 what is written into an empty array is batched, and the same for all.
        return aligned_p.bind(shims.one_of(value, axis) if batched else value, mark), None
    return aligned_p.bind(shims.in_front(axis_data, value, axis if batched else None), mark), 0


_marks_p.def_impl(_marks)
_marks_p.def_abstract_eval(lambda *_, types, **__: list(types))
mlir.register_lowering(_marks_p, mlir.lower_fun(_marks, multiple_results=True))
ad.primitive_jvps[_marks_p] = _marks_jvp
ad.primitive_transposes[_marks_p] = _marks_transposed
batching.fancy_primitive_batchers[_marks_p] = _marks_batched

aligned_p.def_impl(lambda value, mark: value)
aligned_p.def_abstract_eval(lambda value, mark: value)
mlir.register_lowering(aligned_p, _aligned_lowered)
ad.primitive_jvps[aligned_p] = _aligned_jvp
ad.primitive_transposes[aligned_p] = _aligned_transposed
batching.fancy_primitive_batchers[aligned_p] = _aligned_batched
