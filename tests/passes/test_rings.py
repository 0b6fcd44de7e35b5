"""Random chains give the same numbers as rings: dot dimension numbers, dims, axis sizes, dtypes, ops."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, note, settings
from jax import lax

from tests.passes import spmd

DTYPES = ("float32", "bfloat16", "float16", "int32")
LETTERS = "abcdefgh"


@dataclasses.dataclass(frozen=True)
class Dot:
    """An einsum of two operands, and the shapes of its dims."""

    lhs: str
    rhs: str
    out: str
    sizes: dict[str, int]

    @property
    def spec(self) -> str:
        return f"{self.lhs},{self.rhs}->{self.out}"

    def shape(self, letters: str) -> tuple[int, ...]:
        return tuple(self.sizes[letter] for letter in letters)


@st.composite
def dots(draw: Any) -> Dot:
    """A dot_general with random free, contracting and batch dims, in random order."""
    counts = [draw(st.integers(low, high)) for low, high in ((0, 1), (1, 2), (0, 2), (1, 2))]
    names = iter(LETTERS)
    batch, lhs_free, rhs_free, contracting = ("".join(next(names) for _ in range(n)) for n in counts)
    lhs = "".join(draw(st.permutations(batch + lhs_free + contracting)))
    rhs = "".join(draw(st.permutations(batch + rhs_free + contracting)))
    used = batch + lhs_free + rhs_free + contracting
    return Dot(lhs, rhs, batch + lhs_free + rhs_free, {name: draw(st.integers(1, 3)) for name in used})


@st.composite
def gather_cases(draw: Any) -> tuple[Dot, int, int, int, bool, str, tuple[str, ...]]:
    dot = draw(dots())
    side = draw(st.integers(0, 1))
    dim = draw(st.integers(0, len((dot.lhs, dot.rhs)[side]) - 1))
    steps = draw(
        st.lists(st.sampled_from(["tanh", "scale", "neg", "swap", "shift"]), max_size=3, unique=True)
    )
    return (
        dot,
        side,
        dim,
        draw(st.sampled_from([2, 3, 4, 8])),
        draw(st.booleans()),
        draw(st.sampled_from(DTYPES)),
        tuple(steps),
    )


def arrays(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype.startswith("int"):
        return rng.integers(-4, 5, shape).astype(dtype)
    return np.asarray(jnp.asarray(rng.normal(size=shape), dtype))


def apply(step: str, x: Any, other: Any, numpy: Any) -> Any:
    """One operation of the chain, for JAX and for NumPy."""
    if step == "tanh":
        return numpy.tanh(x) if jnp.issubdtype(x.dtype, jnp.floating) else x
    if step == "scale":
        return x * other
    if step == "neg":
        return -x
    if step == "shift":
        return x + x * x
    return numpy.swapaxes(numpy.swapaxes(x, 0, x.ndim - 1), 0, x.ndim - 1)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("directions", [1, 2], ids=["unidirectional", "bidirectional"])
@settings(max_examples=40, deadline=None)
@given(case=gather_cases(), seed=st.integers(0, 99))
def test_any_gathered_operand_gives_the_result_of_the_gather(
    directions: int, check_vma: bool, case: Any, seed: int
) -> None:
    dot, side, dim, axis_size, tiled, dtype, steps = case
    rng = np.random.default_rng(seed)
    letters = [dot.lhs, dot.rhs]
    full = list(dot.shape(letters[side]))
    block = full[dim]
    letter = letters[side][dim]
    sizes = {**dot.sizes, letter: block * axis_size if tiled else axis_size}
    shard_shape = full if tiled else full[:dim] + full[dim + 1 :]
    other_shape = tuple(sizes[name] for name in letters[1 - side])
    shards = arrays(rng, (axis_size, *shard_shape), dtype)
    others = arrays(rng, (axis_size, *other_shape), dtype)
    scale = arrays(rng, (axis_size,), dtype)

    def body(x: Any, other: Any, scale: Any) -> Any:
        x = lax.all_gather(x, "x", axis=dim, tiled=tiled)
        for step in steps:
            x = apply(step, x, scale, jnp)
        operands = (x, other) if side == 0 else (other, x)
        return jnp.einsum(dot.spec, *operands)

    with spmd.only_directions(directions):
        outcome = spmd.run_both(body, (shards, others, scale), check_vma=check_vma)
    gathered = spmd.all_gather([s.astype(np.float64) for s in shards], dim, tiled=tiled)
    reference = []
    for x, other, factor in zip(gathered, others.astype(np.float64), scale.astype(np.float64), strict=True):
        for step in steps:
            x = apply(step, x, factor, np) if not (dtype == "int32" and step == "tanh") else x
        operands = (x, other) if side == 0 else (other, x)
        reference.append(np.einsum(dot.spec, *operands))
    note(str(outcome.report.sites))
    (site,) = outcome.report.sites
    assert site.kind == "all_gather_dot" and site.rewritten
    spmd.assert_as_good(outcome, reference)


@st.composite
def scatter_cases(draw: Any) -> tuple[Dot, int, int, bool, str, tuple[str, ...]]:
    dot = draw(dots())
    dim = draw(st.integers(0, len(dot.out) - 1))
    steps = draw(st.lists(st.sampled_from(["neg", "swap", "cast", "shift"]), max_size=3, unique=True))
    return (
        dot,
        dim,
        draw(st.sampled_from([2, 3, 4, 8])),
        draw(st.booleans()),
        draw(st.sampled_from(DTYPES)),
        tuple(steps),
    )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("directions", [1, 2], ids=["unidirectional", "bidirectional"])
@settings(max_examples=40, deadline=None)
@given(case=scatter_cases(), seed=st.integers(0, 99))
def test_any_scattered_dim_gives_the_result_of_the_reduce_scatter(
    directions: int, check_vma: bool, case: Any, seed: int
) -> None:
    dot, dim, axis_size, tiled, dtype, steps = case
    rng = np.random.default_rng(seed)
    letter = dot.out[dim]
    sizes = {**dot.sizes, letter: dot.sizes[letter] * axis_size if tiled else axis_size}
    lhs = arrays(rng, (axis_size, *(sizes[name] for name in dot.lhs)), dtype)
    rhs = arrays(rng, (axis_size, *(sizes[name] for name in dot.rhs)), dtype)

    def body(lhs: Any, rhs: Any) -> Any:
        y = jnp.einsum(dot.spec, lhs, rhs)
        for step in steps:
            y = y.astype(jnp.float32) if step == "cast" else apply(step, y, 1, jnp)
        return lax.psum_scatter(y, "x", scatter_dimension=dim, tiled=tiled)

    with spmd.only_directions(directions):
        outcome = spmd.run_both(body, (lhs, rhs), check_vma=check_vma)
    partials = [np.einsum(dot.spec, *map(np.float64, pair)) for pair in zip(lhs, rhs, strict=True)]
    for step in steps:
        partials = [p if step == "cast" else apply(step, p, 1, np) for p in partials]
    note(str(outcome.report.sites))
    (site,) = outcome.report.sites
    assert site.kind == "dot_reduce_scatter" and site.rewritten
    if dtype in ("bfloat16", "float16") and "cast" in steps:
        original, rewritten = (np.asarray(a, np.float64) for a in (outcome.original, outcome.rewritten))
        exact = np.stack(spmd.psum_scatter(partials, dim, tiled=tiled))
        half_unit = float(jnp.finfo(dtype).eps) / 2 * np.abs(exact).max()
        assert np.abs(rewritten - exact).mean() <= max(1.1 * np.abs(original - exact).mean(), half_unit)
    else:
        spmd.assert_as_good(outcome, spmd.psum_scatter(partials, dim, tiled=tiled))
