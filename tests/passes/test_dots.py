"""The blocks of a dot: what each dim is to it, and what partial results add up to."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
from hypothesis import given, settings
from jax import lax

from passes.blocks import RESULT
from passes.dots import dot_dims, matmul

LETTERS = "abcdefghijkl"


@dataclasses.dataclass(frozen=True)
class Einsum:
    """A dot_general as an einsum: each letter is a dim."""

    batch: str
    contracting: str
    lhs: str
    rhs: str
    sizes: dict[str, int]

    @property
    def out(self) -> str:
        """The result's dims, as XLA orders them."""
        used = self.batch + self.contracting
        return self.batch + "".join(c for s in (self.lhs, self.rhs) for c in s if c not in used)

    @property
    def dimension_numbers(self) -> Any:
        """As ``lax.dot_general`` wants them."""
        return tuple(
            tuple(tuple(side.index(c) for c in letters) for side in (self.lhs, self.rhs))
            for letters in (self.contracting, self.batch)
        )

    @property
    def ranks(self) -> tuple[int, int]:
        return len(self.lhs), len(self.rhs)

    def shape(self, letters: str) -> tuple[int, ...]:
        return tuple(self.sizes[c] for c in letters)

    def __call__(self, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        return np.asarray(np.einsum(f"{self.lhs},{self.rhs}->{self.out}", lhs, rhs))


@st.composite
def einsums(draw: Any) -> Einsum:
    """Random dims of each role, in random order on either side; sizes that divide by two and by three."""
    names = iter(LETTERS)
    batch, contracting, free_l, free_r = (
        "".join(next(names) for _ in range(draw(st.integers(0, 2)))) for _ in range(4)
    )
    lhs = "".join(draw(st.permutations(batch + contracting + free_l)))
    rhs = "".join(draw(st.permutations(batch + contracting + free_r)))
    sizes = {c: draw(st.sampled_from([2, 4, 6])) for c in batch + contracting}
    sizes |= {c: draw(st.sampled_from([2, 3, 6])) for c in free_l + free_r}
    return Einsum(batch, contracting, lhs, rhs, sizes)


def operands(dot: Einsum) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(-5, 6, dot.shape(dot.lhs)), rng.integers(-5, 6, dot.shape(dot.rhs))


def blocks_of(array: np.ndarray, dim: int | None, blocks: int) -> list[np.ndarray]:
    return [array] * blocks if dim is None else np.split(array, blocks, dim)


@settings(max_examples=150)
@given(einsums())
def test_the_reference_orders_result_dims_as_xla_does(dot: Einsum) -> None:
    lhs, rhs = operands(dot)
    result = jax.eval_shape(lambda a, b: lax.dot_general(a, b, dot.dimension_numbers), lhs, rhs)
    assert result.shape == dot.shape(dot.out)


@settings(max_examples=200)
@given(einsums())
def test_partial_dots_of_a_blocked_operand_make_up_the_whole(dot: Einsum) -> None:
    lhs, rhs = operands(dot)
    whole = dot(lhs, rhs)
    for side, letters in enumerate((dot.lhs, dot.rhs)):
        for dim, letter in enumerate(letters):
            dims = dot_dims(dot.dimension_numbers, dot.ranks, side, dim)
            role = "batch" if letter in dot.batch else "contracting" if letter in dot.contracting else "free"
            assert dims.role == role and dims.operand_dims[side] == dim
            assert (dims.operand_dims[1 - side] is None) == (role == "free")
            assert (dims.result_dim is None) == (role == "contracting")
            for blocks in (b for b in (2, 3) if dot.sizes[letter] % b == 0):
                pairs = zip(
                    *(blocks_of(a, d, blocks) for a, d in zip((lhs, rhs), dims.operand_dims, strict=True)),
                    strict=True,
                )
                partials = [dot(a, b) for a, b in pairs]
                made = sum(partials) if dims.result_dim is None else np.concatenate(partials, dims.result_dim)
                np.testing.assert_array_equal(made, whole)


@settings(max_examples=200)
@given(einsums())
def test_a_block_of_the_result_is_the_dot_of_blocks_of_the_operands(dot: Einsum) -> None:
    lhs, rhs = operands(dot)
    whole = dot(lhs, rhs)
    for dim, letter in enumerate(dot.out):
        dims = dot_dims(dot.dimension_numbers, dot.ranks, RESULT, dim)
        assert dims.role == ("batch" if letter in dot.batch else "free") and dims.result_dim == dim
        assert [d is not None for d in dims.operand_dims] == [letter in dot.lhs, letter in dot.rhs]
        for blocks in (b for b in (2, 3) if dot.sizes[letter] % b == 0):
            pairs = zip(
                *(blocks_of(a, d, blocks) for a, d in zip((lhs, rhs), dims.operand_dims, strict=True)),
                strict=True,
            )
            for (a, b), block in zip(pairs, np.split(whole, blocks, dim), strict=True):
                np.testing.assert_array_equal(dot(a, b), block)
        for side, operand_dim in enumerate(dims.operand_dims):
            if operand_dim is not None:
                assert dot_dims(dot.dimension_numbers, dot.ranks, side, operand_dim) == dims


@settings(max_examples=100)
@given(einsums())
def test_matmul_sizes_are_the_products_of_the_dims_of_each_role(dot: Einsum) -> None:
    sizes = matmul(
        dot.dimension_numbers,
        dot.shape(dot.lhs),
        dot.shape(dot.rhs),
        *map(np.dtype, ("int8", "float32", "float16")),
    )
    roles = dot.batch + dot.contracting
    free = ["".join(c for c in letters if c not in roles) for letters in (dot.lhs, dot.rhs)]
    wanted = [math.prod(dot.shape(letters)) for letters in (dot.batch, free[0], dot.contracting, free[1])]
    assert [sizes.batch, sizes.m, sizes.k, sizes.n] == wanted
    assert sizes.batch * sizes.m * sizes.n == math.prod(dot.shape(dot.out))
    assert (sizes.dtype, sizes.out_dtype) == ("float32", "float16")
