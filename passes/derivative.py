"""Derivatives of a rewritten program: those of the original, rewritten in their turn.

Left to itself jax would differentiate the rings: right, but a transposed ring is not the ring that one would
write. So the rewritten program carries a rule. Forward it runs the original's linearization, rewritten, which
also gives the residuals; what is linear in the tangents is one equation, whose transpose is the original's
backward pass, rewritten. Both modes, ``vmap``, and derivatives of derivatives work, since every function in
the rule is itself one that jax can differentiate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from passes import shims
from passes.results import Function, Results

T = TypeVar("T")


def with_derivative_of(
    jaxpr: Any, run: Function, rewrite: Callable[[Any], Function], failed: Callable[[Exception], None]
) -> Function:
    """``run`` with the derivative of the program that it stands for.

    Args:
      jaxpr: the original program, closed.
      run: the rewritten program, of the same arguments and results.
      rewrite: rewrites another closed jaxpr into a function that jax may differentiate.
      failed: told if the derivative cannot be made so, but that of the original can, which is taken unless
        this raises.
    """
    # What the program does not use is kept out, so that jit can still leave it out.
    used = _used(jaxpr)
    in_avals = _where(used, jaxpr.in_avals)
    original = _of_used(jex_core.jaxpr_as_fun(jaxpr), used)
    smooth = [_is_smooth(aval) for aval in jaxpr.out_avals]

    def backwards(function: Function, *operands: Any) -> list[Any]:
        """What a backward pass gives, rewritten."""

        def rewritten() -> list[Any]:
            return rewrite(jax.make_jaxpr(function)(*operands))(*operands)

        return _or_else(rewritten, lambda: function(*operands), failed)

    own = jax.make_jaxpr(lambda: ())()
    form = Results(jaxpr, used, partial(_transposed, backwards))

    def along(active: Sequence[bool], primals: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """The program as a function of its active arguments: its smooth results, and beside them others."""

        def f(*moved: Any) -> tuple[list[Any], list[Any]]:
            results = original(*_merged(active, moved, primals))
            return _where(smooth, results), _where([not s for s in smooth], results)

        return f, _where(active, primals)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        active = [
            _is_smooth(aval) and not isinstance(tangent, SymbolicZero)
            for aval, tangent in zip(in_avals, tangents, strict=True)
        ]
        structure: list[Any] = []

        def forward(*primals: Any) -> list[Any]:
            f, at = along(active, primals)
            results, backward, others = jax.vjp(f, *at, has_aux=True)
            residuals, tree = jax.tree.flatten(backward)
            structure[:] = [tree, len(results), len(others)]
            return [*results, *others, *residuals]

        forward_jaxpr = jax.make_jaxpr(forward)(*primals)
        tree, n_results, n_others = structure
        values = rewrite(forward_jaxpr)(*primals)
        results, others = values[:n_results], values[n_results : n_results + n_others]
        residuals = values[n_results + n_others :]

        def push(residuals: list[Any], primals: list[Any], tangents: list[Any]) -> list[Any]:
            f, at = along(active, primals)
            return jax.jvp(lambda *moved: f(*moved)[0], at, tangents)[1]  # type: ignore[no-any-return]

        def pull(residuals: list[Any], primals: list[Any], cotangents: list[Any]) -> list[Any]:
            def backward(*both: Any) -> list[Any]:
                return list(jax.tree.unflatten(tree, both[: len(residuals)])(list(both[len(residuals) :])))

            return backwards(backward, *residuals, *cotangents)

        moved = _where(active, tangents)
        types = list(map(jax.typeof, results))

        def depends(axis_data: Any, primals: Sequence[bool], tangents: Sequence[bool]) -> list[bool]:
            told = _merged(active, tangents, [False] * len(active))
            batched = [primal or tangent for primal, tangent in zip(primals, told, strict=True)]
            return _where(smooth, form.batched(axis_data, batched))

        pushed = _linear(push, pull, residuals, list(primals), moved, types, forward_jaxpr, depends)
        zeros = [np.zeros(np.shape(other), jax.dtypes.float0) for other in others]
        return _shuffled(smooth, results, others), _shuffled(smooth, pushed, zeros)

    def plain(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return _plain_derivative(original, in_avals, primals, tangents)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        def by(made: Callable[..., tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[Any]]:
            results, pushed = made(primals, tangents)
            return form.aligned(own, original, primals, results), pushed

        return _or_else(partial(by, derivative), partial(by, plain), failed)

    # A transpose passes over a function of its own for whose results nothing comes back.
    of_used = jax.custom_jvp(_of_used(run, used))
    of_used.defjvp(plain)
    guarded = jax.custom_jvp(lambda *arguments: form.aligned(own, original, arguments, of_used(*arguments)))
    guarded.defjvp(rule, symbolic_zeros=True)
    return lambda *arguments: guarded(*_where(used, arguments))


def _or_else(attempt: Callable[[], T], instead: Callable[[], T], failed: Callable[[Exception], None]) -> T:
    """What an attempt gives; if it fails what is done instead, whose own errors come first.

    What fails in both is the user's to mend: an error of their derivative, or a function without one.
    """
    try:
        return attempt()
    except Exception as error:
        fault = error
    result = instead()
    failed(fault)
    return result


def _used(jaxpr: Any) -> list[bool]:
    """Which arguments some equation or result of a program reads."""
    body, _ = shims.open_jaxpr(jaxpr)
    atoms = [atom for eqn in body.eqns for atom in eqn.invars] + list(body.outvars)
    read = {atom for atom in atoms if not shims.is_literal(atom)}
    return [var in read for var in body.invars]


def _of_used(function: Function, used: Sequence[bool]) -> Function:
    """A function of the used arguments alone; in place of the others, which it never reads, it gets None."""
    absent = [None] * len(used)
    return lambda *arguments: function(*_merged(used, arguments, absent))


def _plain_derivative(
    original: Function, in_avals: Sequence[Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The derivative of the original, as jax has it."""

    def full(aval: Any, primal: Any, tangent: Any) -> Any:
        if not _is_smooth(aval):
            return np.zeros(np.shape(primal), jax.dtypes.float0)
        return jnp.zeros_like(primal) if isinstance(tangent, SymbolicZero) else tangent

    moved = [full(*each) for each in zip(in_avals, primals, tangents, strict=True)]
    results, pushed = jax.jvp(original, tuple(primals), tuple(moved))
    return list(results), list(pushed)


def _transposed(
    backwards: Function, function: Function, arguments: Sequence[Any], cotangents: Sequence[Any]
) -> list[Any]:
    """What comes back for those arguments that are undefined, in which the function is linear; else None."""
    linear = [ad.is_undefined_primal(argument) for argument in arguments]
    known = [not moves for moves in linear]
    fixed, types = _where(known, arguments), [argument.aval for argument in _where(linear, arguments)]
    came = [not isinstance(cotangent, ad.Zero) for cotangent in cotangents]

    def backward(*both: Any) -> list[Any]:
        def f(*moved: Any) -> list[Any]:
            at = _merged(known, both[: len(fixed)], [None] * len(known))
            return _where(came, function(*_merged(linear, moved, at)))

        return list(jax.linear_transpose(f, *types)(list(both[len(fixed) :])))

    pulled = backwards(backward, *fixed, *_where(came, cotangents))
    return _merged(linear, pulled, [None] * len(linear))


def _is_smooth(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _where(mask: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value for value, keep in zip(values, mask, strict=True) if keep]


def _merged(mask: Sequence[bool], chosen: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The values, with the chosen ones in place of those under the mask."""
    replacement = iter(chosen)
    return [next(replacement) if keep else value for keep, value in zip(mask, values, strict=True)]


def _shuffled(mask: Sequence[bool], chosen: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The two lists as one: the chosen ones under the mask, the others elsewhere."""
    first, second = iter(chosen), iter(others)
    return [next(first if keep else second) for keep in mask]


# One equation: a function of residuals, primals and tangents, linear in the last, with its own transpose.

Map = Callable[[list[Any], list[Any], list[Any]], list[Any]]

Depends = Callable[[Any, Sequence[bool], Sequence[bool]], list[bool]]
"""Which results are batched by a ``vmap``, of which primals and which tangents are."""

_linear_p = jex_core.Primitive("overlap_linear")
_linear_p.multiple_results = True


def _linear(
    push: Map,
    pull: Map,
    residuals: list[Any],
    primals: list[Any],
    tangents: list[Any],
    types: list[Any],
    forward: Any,
    depends: Depends,
) -> list[Any]:
    """Binds the equation. That holds the forward program too, in which jit finds the mesh it is to run on."""
    counts = (len(residuals), len(primals))
    operands = (*residuals, *primals, *tangents)
    return _linear_p.bind(  # type: ignore[no-any-return]
        *operands,
        push=push,
        pull=pull,
        counts=counts,
        types=tuple(types),
        forward=forward,
        depends=depends,
    )


def _split(values: Sequence[Any], counts: tuple[int, int]) -> tuple[list[Any], list[Any], list[Any]]:
    first, second = counts[0], sum(counts)
    return list(values[:first]), list(values[first:second]), list(values[second:])


def _apply(*values: Any, push: Map, counts: tuple[int, int], **_: Any) -> list[Any]:
    return push(*_split(values, counts))


def _lowered(*values: Any, **params: Any) -> list[Any]:
    """As `_apply`. What is not needed may have no forward derivative, as a result of a ``custom_vjp``."""
    return shims.without_dead_code(partial(_apply, **params))(*values)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    full = tuple(map(ad.instantiate_zeros, tangents))
    start = sum(params["counts"])
    if all(isinstance(tangent, ad.Zero) for tangent in tangents[:start]):
        return _linear_p.bind(*primals, **params), _linear_p.bind(*primals[:start], *full[start:], **params)
    return jax.jvp(partial(_apply, **params), tuple(primals), full)  # type: ignore[no-any-return]


def _transpose(
    cotangents: Sequence[Any],
    *values: Any,
    pull: Map,
    counts: tuple[int, int],
    **_: Any,
) -> list[Any]:
    residuals, primals, tangents = _split(values, counts)
    full = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    pulled = zip(pull(residuals, primals, full), tangents, strict=True)
    return [None] * sum(counts) + [ct if ad.is_undefined_primal(t) else None for ct, t in pulled]


def _batch(
    axis_data: Any, values: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[list[Any], list[int | None]]:
    axes = [dim if isinstance(dim, int) else None for dim in dims]
    told = [axis is not None for axis in axes]
    varies = params["depends"](axis_data, *_split(told, params["counts"])[1:])
    if not any(varies) and not any(told):
        return _linear_p.bind(*values, **params), [None] * len(varies)
    *fixed_axes, moved_axes = _split(axes, params["counts"])
    batched = partial(shims.vmap_over(axis_data), in_axes=(*fixed_axes, 0))
    residuals, primals, tangents = _split(values, params["counts"])
    tangents = [
        shims.in_front(axis_data, tangent, axis) for tangent, axis in zip(tangents, moved_axes, strict=True)
    ]
    types = [shims.batched_type(axis_data, aval) for aval in params["types"]]
    push, pull = batched(params["push"]), batched(params["pull"])
    results = _linear(push, pull, residuals, primals, tangents, types, params["forward"], params["depends"])
    # What is the same for all has no new dim, as in the program itself (see `Results`).
    results = [
        result if own else shims.one_of(result, 0) for result, own in zip(results, varies, strict=True)
    ]
    return results, [0 if own else None for own in varies]


_linear_p.def_impl(lambda *values, **params: jax.jit(partial(_apply, **params))(*values))
_linear_p.def_abstract_eval(lambda *_, types, **__: list(types))
mlir.register_lowering(_linear_p, mlir.lower_fun(_lowered, multiple_results=True))
ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.fancy_primitive_batchers[_linear_p] = _batch
