"""Blockwise equations: one rule per primitive, saying along which dims it acts block by block.

A value is *blocked* along a dim when that dim is the concatenation of ``axis_size`` equal blocks, one per
device of a mesh axis. A primitive is blockwise for that dim when block j of its result needs only block j of
its blocked operands (and the whole of the others). Gathers sink through such equations and partial sums
come up through them, so one rule serves both directions: it is asked with the side it is entered from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from jax.sharding import PartitionSpec

RESULT = -1
"""The side of a rule that is entered from the equation's result."""

Params = Mapping[str, Any]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Blockwise:
    """How an equation acts on blocks.

    Attributes:
      operand_dims: per operand, the dim that is cut into blocks; None where every block needs the whole.
      result_dim: the dim of every result that is cut into blocks.
    """

    operand_dims: tuple[int | None, ...]
    result_dim: int


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What a rule is told of an equation: its parameters and the shapes of its operands and results."""

    params: Params
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]


Dims = Callable[[Call, int, int, int], Blockwise | None]
Resize = Callable[[Call, Blockwise, Fraction], Params]


@dataclasses.dataclass(frozen=True, slots=True)
class _Rule:
    """How a primitive acts; with ``sharded`` also where it asks for a sharding that cuts some dim."""

    dims: Dims
    resize: Resize | None = None
    sharded: bool = False


_RULES: dict[str, _Rule] = {}

_SHARDINGS: Final = ("sharding", "out_sharding")
"""Parameters that say how results are sharded."""


def is_blockwise(primitive: str) -> bool:
    """Whether there is a rule for the primitive, for some dims at least."""
    return primitive in _RULES


def is_elementwise(primitive: str) -> bool:
    """Whether every element of the result is made of those at its place in the operands."""
    return primitive in _RULES and _RULES[primitive].dims is _elementwise


def is_fusible(primitive: str) -> bool:
    """Whether compilers may make it part of whatever reads its result: elementwise, or another form."""
    return primitive in _FUSIBLE


def blockwise(primitive: str, call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    """How the equation acts on ``blocks`` blocks along ``dim`` of operand ``side`` (or of ``RESULT``).

    Returns None where it does not act block by block along that dim.
    """
    rule = _RULES.get(primitive)
    if rule is None:
        return None
    if not rule.sharded and any(shards(call.params.get(name)) for name in _SHARDINGS):
        return None
    return rule.dims(call, side, dim, blocks)


def shards(sharding: Any) -> bool:
    """Whether a sharding that an equation asks for, if any, does cut some dim."""
    return sharding is not None and any(entry is not None for entry in sharding.spec.partitions)


def unsharded(params: Mapping[str, Any]) -> dict[str, Any]:
    """An operation's parameters, for results of another rank, that are sharded along no dim: see `shards`.

    What it says of the shardings of results has an entry for each of their dims.
    """
    return {name: None if name in _SHARDINGS else value for name, value in params.items()}


def of_shape(aval: Any, shape: tuple[int, ...]) -> Any:
    """A type with another shape, that is sharded along no dim; types have an entry for each of theirs."""
    spec = aval.sharding.spec.update(partitions=(None,) * len(shape))
    return aval.update(shape=shape, sharding=aval.sharding.update(spec=spec))


def block_params(primitive: str, call: Call, dims: Blockwise, share: Fraction) -> Params:
    """The equation's parameters for a piece that is ``share`` of the blocked dim."""
    resize = _RULES[primitive].resize
    return call.params if resize is None else {**call.params, **resize(call, dims, share)}


def _scaled(sizes: Sequence[int], dim: int, share: Fraction) -> tuple[int, ...]:
    size = sizes[dim] * share
    if size.denominator != 1:
        raise ValueError(f"a piece of {share} of dim {dim} of {tuple(sizes)} is not whole")
    return (*sizes[:dim], int(size), *sizes[dim + 1 :])


def _elementwise(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    """Every operand has the result's shape, or 1 in place of some sizes, or is a scalar."""
    shape = call.results[0]
    for operand in call.operands:
        if operand and (
            len(operand) != len(shape) or any(a not in (1, b) for a, b in zip(operand, shape, strict=True))
        ):
            return None
    cut = (bool(operand) and operand[dim] == shape[dim] for operand in call.operands)
    return Blockwise(tuple(dim if c else None for c in cut), dim)


def _transpose(call: Call, side: int, dim: int, blocks: int) -> Blockwise:
    permutation = call.params["permutation"]
    if side == RESULT:
        return Blockwise((permutation[dim],), dim)
    return Blockwise((dim,), permutation.index(dim))


def _reshaped_dim(source: Shape, target: Shape, dim: int, blocks: int) -> int | None:
    """Where ``dim`` of ``source`` goes, if its blocks stay contiguous: it must be the major of its group."""
    before = math.prod(source[:dim])
    passed = 1
    for index, size in enumerate(target):
        if passed == before and size % blocks == 0:
            return index
        passed *= size
        if passed > before:
            return None
    return None


def _reshape(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    if call.params.get("dimensions") is not None:
        return None
    (source,), (target,) = call.operands, call.results
    if side == RESULT:
        operand_dim = _reshaped_dim(target, source, dim, blocks)
        return None if operand_dim is None else Blockwise((operand_dim,), dim)
    result_dim = _reshaped_dim(source, target, dim, blocks)
    return None if result_dim is None else Blockwise((dim,), result_dim)


def _broadcast_in_dim(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    if len(call.operands) != 1:
        return None
    (source,), (target,) = call.operands, call.results
    placed: tuple[int, ...] = call.params["broadcast_dimensions"]
    if side != RESULT:
        return Blockwise((dim,), placed[dim]) if source[dim] == target[placed[dim]] else None
    operand_dim = placed.index(dim) if dim in placed else None
    if operand_dim is not None and source[operand_dim] != target[dim]:
        operand_dim = None
    return Blockwise((operand_dim,), dim)


def _removed(dims_name: str) -> Dims:
    """The rule of an equation whose results lack the dims that a parameter names (a reduction over them)."""

    def rule(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
        rank = len(call.operands[0])
        kept = [d for d in range(rank) if d not in {axis % rank for axis in call.params[dims_name]}]
        if side == RESULT:
            return Blockwise((kept[dim],) * len(call.operands), dim)
        return Blockwise((dim,) * len(call.operands), kept.index(dim)) if dim in kept else None

    return rule


def _aside_of(dim_name: str) -> Dims:
    """The rule of an equation that keeps every dim and works along those that a parameter names."""

    def rule(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
        own = call.params[dim_name]
        if dim in (own if isinstance(own, tuple | list) else (own,)):
            return None
        return Blockwise((dim,) * len(call.operands), dim)

    return rule


def _stack(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    axis = call.params["axis"] % len(call.results[0])
    if side == RESULT:
        return None if dim == axis else Blockwise((dim - (dim > axis),) * len(call.operands), dim)
    return Blockwise((dim,) * len(call.operands), dim + (dim >= axis))


def _unstack(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    axis = call.params["axis"] % len(call.operands[0])
    if side == RESULT:
        return Blockwise((dim + (dim >= axis),), dim)
    return None if dim == axis else Blockwise((dim,), dim - (dim > axis))


def _tile(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    return Blockwise((dim,), dim) if call.params["reps"][dim] == 1 else None


def _slice(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    strides = call.params["strides"]
    whole = call.operands[0][dim] == call.results[0][dim] and (strides is None or strides[dim] == 1)
    return Blockwise((dim,), dim) if whole else None


def _pad(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    if side == 1 or tuple(call.params["padding_config"][dim]) != (0, 0, 0):
        return None
    return Blockwise((dim, None), dim)


def _dynamic_slice(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    if side > 0 or call.operands[0][dim] != call.results[0][dim]:
        return None
    return Blockwise((dim, *(None for _ in call.operands[1:])), dim)


def _lone(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    """A tiled collective among one device does nothing."""
    lone = call.params["tiled"] and call.params["axis_size"] == 1
    return Blockwise((dim,), dim) if lone else None


def _constraint(call: Call, side: int, dim: int, blocks: int) -> Blockwise | None:
    """How the compiler is to shard the value, over axes that are not mapped, is the same of each block.

    Of a dim that is to be cut itself, blocks would be cut otherwise than the whole.
    """
    spec = getattr(call.params["sharding"], "spec", None)
    if spec is None or call.params["layout"] is not None:
        return None
    entry = spec[dim] if dim < len(spec) else None
    return Blockwise((dim,), dim) if entry in (None, PartitionSpec.UNCONSTRAINED) else None


def _result_size(name: str) -> Resize:
    """Resizes the parameter that holds the result's shape."""
    return lambda call, dims, share: {name: _scaled(call.params[name], dims.result_dim, share)}


REDUCTIONS = frozenset({"reduce_max", "reduce_min", "reduce_prod", "reduce_sum"})
"""Reductions of numbers to fewer."""

_REDUCING = REDUCTIONS | {"reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"}
_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz "
    "complex conj convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor "
    "ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul mulhi "
    "name ne neg nextafter not one_minus_square or overlap_aligned polygamma population_count pow pvary real "
    "reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor "
)

MOVING = frozenset({"broadcast_in_dim", "reshape", "slice", "split", "squeeze", "transpose", "unstack"})
"""Operations that compute nothing, and at most move elements."""

_FUSIBLE = frozenset(_ELEMENTWISE.split()) | MOVING

LONE = ("all_gather", "reduce_scatter")
"""Collectives with a rule: among one device they do nothing."""

_RULES.update({name: _Rule(_lone) for name in LONE})
_RULES.update({name: _Rule(_elementwise) for name in _ELEMENTWISE.split()})
_RULES.update({name: _Rule(_removed("axes")) for name in sorted(_REDUCING)})
_RULES.update(
    {
        name: _Rule(_aside_of("axis"))
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split")
    }
)
_RULES.update(
    {
        "transpose": _Rule(_transpose),
        "reshape": _Rule(_reshape, _result_size("new_sizes")),
        "broadcast_in_dim": _Rule(_broadcast_in_dim, _result_size("shape")),
        "squeeze": _Rule(_removed("dimensions")),
        "concatenate": _Rule(_aside_of("dimension")),
        "stack": _Rule(_stack),
        "unstack": _Rule(_unstack),
        "tile": _Rule(_tile),
        "rev": _Rule(_aside_of("dimensions")),
        "sort": _Rule(_aside_of("dimension")),
        "slice": _Rule(_slice, _result_size("limit_indices")),
        "pad": _Rule(_pad),
        "sharding_constraint": _Rule(_constraint, sharded=True),
        "dynamic_slice": _Rule(_dynamic_slice, _result_size("slice_sizes")),
    }
)
