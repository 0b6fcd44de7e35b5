"""Whether two runs of a program gave the same results, to the rounding of their types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax import dtypes
from jax import numpy as jnp

TOLERANCES: Final[Mapping[str, float]] = {
    "float64": 1e-9,
    "float32": 1e-3,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""Relative differences that another order of summation explains, by the narrowest type of the arithmetic.

About the square root of the type's resolution: hundreds of rounded operations in a row are allowed for, and
optimisers that magnify rounding (Adam's first step is the gradient's sign). One shard of hundreds in the
wrong place is not, nor in float32 one value of a million that is wrong altogether.
"""

NARROWEST: Final = 0.25
"""The same for the types of 8 bits and fewer."""

REDUCED: Final = 1e-2
"""For float32 on GPUs and TPUs, whose matmuls round float32 operands to TF32 or bfloat16 by default."""

_HLO_FLOATS: Final[Mapping[str, str]] = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
}
_HLO_FLOAT: Final = re.compile(r"\b(b?f\d+\w*)\[")

Shards = dict[tuple[tuple[int | None, int | None], ...], Any]
"""A leaf on the host: the values that this process has, by where they lie in the whole array."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a run, copied to the host.

    Attributes:
      structure: of the tree of results.
      names: of its leaves, such as ``"[0]['w']"``.
      types: their shapes and dtypes, as ``"float32[8,6]"``.
      leaves: their values.
    """

    structure: Any
    names: tuple[str, ...]
    types: tuple[str, ...]
    leaves: tuple[Shards, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What comparing the results showed.

    Attributes:
      agreed: None if there was nothing to compare, or no finite value among what was.
      sentence: what was found, in words.
      compared: number of arrays compared.
      difference: of the floating-point array that differs most: the norm of the difference by the norm of the
        array; None where there is no such array, or none with a finite value.
      tolerance: what that may be; integers and booleans must be equal.
    """

    agreed: bool | None
    sentence: str
    compared: int = 0
    difference: float | None = None
    tolerance: float | None = None


def fetch(results: Any) -> Results:
    """Copies what this process has of the results to the host, each part once."""
    pairs, structure = jax.tree.flatten_with_path(results)
    leaves = tuple(_shards(leaf) for _, leaf in pairs)
    types = tuple(f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for _, leaf in pairs)
    return Results(structure, tuple(jax.tree_util.keystr(path) for path, _ in pairs), types, leaves)


def tolerance_of(hlo: str, platform: str) -> float:
    """The relative tolerance for a program: that of the narrowest floating-point type in its HLO text.

    A float32 loss of a bfloat16 network is no better than bfloat16. Without HLO text it is float32's.
    """
    found = {_HLO_FLOATS.get(name, name) for name in _HLO_FLOAT.findall(hlo)} or {"float32"}
    tolerance = max(TOLERANCES.get(name, NARROWEST) for name in found)
    return tolerance if platform == "cpu" or found == {"float64"} else max(tolerance, REDUCED)


def compare(a: Results, b: Results, tolerance: float) -> Agreement:
    """Compares two runs' results.

    Floating-point arrays agree if ``‖x − y‖ ≤ tolerance · ‖x‖`` (Euclidean norms of the finite values) and
    infinities and NaN stand in the same places. Not value by value: one in which large terms cancel, or which
    an optimiser made of such a one, may be off by any factor in a correct program. Results without any finite
    value are not called agreement: a program that gives NaN everywhere shows nothing of its rewrite.
    """
    if a.structure != b.structure or a.types != b.types:
        return Agreement(
            agreed=False,
            sentence=f"The results are of different types: {_tree(a)} originally, {_tree(b)} overlapped.",
        )
    if not a.names:
        return Agreement(agreed=None, sentence="The function returns nothing: no results to compare.")
    compared, blank, most, wrong = 0, 0, None, []
    for name, kind, x, y in zip(a.names, a.types, a.leaves, b.leaves, strict=True):
        where = x.keys() & y.keys()
        compared += bool(where)
        found = _compare_leaf([x[at] for at in where], [y[at] for at in where], tolerance)
        blank += found.blank
        if found.difference is not None:
            most = found.difference if most is None else max(most, found.difference)
        if not found.agreed:
            by = "" if found.difference is None else f", by {found.difference:.1e}"
            wrong.append(f"{name or 'the result'} ({kind}{by})")
    if not compared:
        return Agreement(
            agreed=None,
            sentence="The results lie on other devices in the two variants, so none were compared.",
        )
    arrays = "1 array" if compared == 1 else f"{compared} arrays"
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        differ = "differs" if len(wrong) == 1 else "differ"
        sentence = (
            f"Results do NOT agree: {', '.join(wrong[:3])}{more} {differ} beyond rounding (relative "
            f"tolerance {tolerance:.0e}; integers must be equal). Either variant may be the less exact one: "
            "a run in float32 tells."
        )
    elif blank == compared:
        sentence = (
            f"No finite value was compared: {arrays} of NaN and infinities alone, in the same places in both "
            "variants. Give arguments for which the results are finite."
        )
    else:
        agree = "all equal" if most is None else f"relative difference at most {most:.1e}"
        within = "" if most is None else f" (tolerance {tolerance:.0e})"
        without = f"; {blank} of them without a finite value" if blank else ""
        sentence = f"Results agree: {arrays} compared, {agree}{within}{without}."
    agreed = None if blank == compared and not wrong else not wrong
    return Agreement(
        agreed=agreed, sentence=sentence, compared=compared, difference=most, tolerance=tolerance
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    """What comparing one array showed: ``difference`` as in ``Agreement``.

    Attributes:
      agreed: whether it is the same to rounding.
      difference: None if it holds no floats, or none that are finite.
      blank: whether it holds values, and none that is finite.
    """

    agreed: bool
    difference: float | None = None
    blank: bool = False


def _shards(leaf: Any) -> Shards:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array):
        return {(): np.asarray(leaf)}
    if leaf.is_fully_addressable:
        return {(): np.asarray(leaf)}
    found: Shards = {}
    for shard in leaf.addressable_shards:
        where = tuple((part.start, part.stop) for part in shard.index)
        if where not in found:
            found[where] = np.asarray(shard.data)
    return found


def _compare_leaf(xs: list[Any], ys: list[Any], tolerance: float) -> _Leaf:
    """Compares the parts of an array."""
    if not xs or not jnp.issubdtype(xs[0].dtype, np.inexact):
        return _Leaf(all(np.array_equal(x, y) for x, y in zip(xs, ys, strict=True)))
    wide: Any = np.complex128 if jnp.issubdtype(xs[0].dtype, np.complexfloating) else np.float64
    x, y = (np.concatenate([part.ravel().astype(wide) for part in parts]) for parts in (xs, ys))
    finite = np.isfinite(x) & np.isfinite(y)
    # Infinities and NaN must be equal to the letter: rounding makes none.
    agreed = np.array_equal(x[~finite], y[~finite], equal_nan=True)
    if x.size and not finite.any():
        return _Leaf(agreed, blank=True)
    x, y = x[finite], y[finite]
    norm, apart = float(np.linalg.norm(x)), float(np.linalg.norm(x - y))
    difference = apart / norm if norm else (float("inf") if apart else 0.0)
    return _Leaf(agreed and difference <= tolerance, difference)


def _tree(results: Results) -> str:
    types = ", ".join(results.types[:4]) + (", …" if len(results.types) > 4 else "")
    return f"({types})"
