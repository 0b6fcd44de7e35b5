"""Element types and block sizes: what partial sums are added up in, and pieces that do not divide by two."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from passes.chains import AllGatherDot
from passes.reasons import Code, Reason
from tests.passes import bodies, spmd

RNG = np.random.default_rng(0)
NARROW = ["bfloat16", "float16"]


def normal(*shape: int, dtype: Any = "float32") -> np.ndarray:
    return np.asarray(jnp.asarray(RNG.normal(size=shape), dtype))


def gather(x: Any, dim: int = 0) -> Any:
    return lax.all_gather(x, "x", axis=dim, tiled=True)


def scatter(y: Any, dim: int = 0) -> Any:
    return lax.psum_scatter(y, "x", scatter_dimension=dim, tiled=True)


def rms(error: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.abs(error) ** 2)))


def wide(array: Any) -> np.ndarray:
    """In float64 (complex128)."""
    array = np.asarray(array)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def rewritten(body: Any, arguments: Any, **options: Any) -> spmd.Outcome:
    """The outcome of a body whose only collective became a ring."""
    outcome = spmd.run_both(body, arguments, **options)
    (site,) = outcome.report.sites
    assert site.rewritten, site
    assert outcome.rewritten.dtype == outcome.original.dtype
    assert outcome.rewritten.shape == outcome.original.shape
    return outcome


def gathered_dots(x: np.ndarray, w: np.ndarray, dim: int = 0) -> np.ndarray:
    """The exact result of gather → dot per device."""
    return np.stack([np.concatenate(list(wide(x)), dim) @ b for b in wide(w)])


def scattered_dots(y: np.ndarray, w: np.ndarray, dim: int = 0) -> np.ndarray:
    """The exact result of dot → scatter per device."""
    return np.stack(np.split(sum(a @ b for a, b in zip(wide(y), wide(w), strict=True)), len(y), dim))


# Narrow floats: a large contraction, so that rounding of partial sums would show.


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("dtype", NARROW)
def test_gather_on_contracting_dim_accumulates_in_float32(dtype: str, directions: int) -> None:
    x, w = normal(8, 16, 64, dtype=dtype), normal(8, 512, 24, dtype=dtype)
    with spmd.only_directions(directions):
        outcome = rewritten(lambda x, w: gather(x, 1) @ w, (x, w))
    exact = gathered_dots(x, w, 1)
    assert rms(wide(outcome.rewritten) - exact) <= 1.1 * rms(wide(outcome.original) - exact)
    rounded_once = np.asarray(jnp.asarray(exact, jnp.float32).astype(dtype))
    assert rms(wide(outcome.rewritten) - exact) <= 1.02 * rms(wide(rounded_once) - exact)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("dtype", NARROW)
def test_scatter_accumulates_in_float32(dtype: str, directions: int) -> None:
    y, w = normal(8, 32, 256, dtype=dtype), normal(8, 256, 24, dtype=dtype)
    with spmd.only_directions(directions):
        outcome = rewritten(lambda y, w: scatter(y @ w), (y, w))
    exact = scattered_dots(y, w)
    assert rms(wide(outcome.rewritten) - exact) <= 1.1 * rms(wide(outcome.original) - exact)
    rounded_once = np.asarray(jnp.asarray(exact, jnp.float32).astype(dtype))
    assert rms(wide(outcome.rewritten) - exact) <= 1.02 * rms(wide(rounded_once) - exact)


@pytest.mark.parametrize("dtype", NARROW)
def test_scatter_of_a_transposed_and_reshaped_dot_accumulates_in_float32(dtype: str) -> None:
    y, w = normal(8, 32, 256, dtype=dtype), normal(8, 256, 6, dtype=dtype)

    def body(y: Any, w: Any) -> Any:
        return scatter(-(y @ w).T.reshape(2, 3, 32), 2)

    outcome = rewritten(body, (y, w))
    total = -sum(a @ b for a, b in zip(wide(y), wide(w), strict=True)).T.reshape(2, 3, 32)
    exact = np.stack(np.split(total, 8, 2))
    assert rms(wide(outcome.rewritten) - exact) <= 1.1 * rms(wide(outcome.original) - exact)


@pytest.mark.parametrize("dtype", NARROW)
def test_gather_on_contracting_dim_before_a_transpose_accumulates_in_float32(dtype: str) -> None:
    x, w = normal(8, 16, 64, dtype=dtype), normal(8, 512, 24, dtype=dtype)
    outcome = rewritten(lambda x, w: (gather(x, 1) @ w).T, (x, w))
    exact = gathered_dots(x, w, 1).swapaxes(1, 2)
    assert rms(wide(outcome.rewritten) - exact) <= 1.1 * rms(wide(outcome.original) - exact)


@pytest.mark.parametrize("dtype", NARROW)
def test_scaled_partial_sums_are_as_exact_as_the_originals(dtype: str) -> None:
    y, w = normal(8, 32, 256, dtype=dtype), normal(8, 256, 24, dtype=dtype)
    outcome = rewritten(lambda y, w: scatter((y @ w) * jnp.asarray(0.3, y.dtype)), (y, w))
    exact = scattered_dots(y, w) * float(jnp.asarray(0.3, dtype))
    assert rms(wide(outcome.rewritten) - exact) <= 1.1 * rms(wide(outcome.original) - exact)


@pytest.mark.parametrize("dtype", NARROW)
def test_sums_of_two_dots_are_as_exact_as_the_originals(dtype: str) -> None:
    y, w = normal(8, 32, 256, dtype=dtype), normal(8, 256, 24, dtype=dtype)
    z, v = normal(8, 32, 256, dtype=dtype), normal(8, 256, 24, dtype=dtype)
    outcome = rewritten(lambda y, w, z, v: scatter(y @ w + z @ v), (y, w, z, v))
    exact = scattered_dots(y, w) + scattered_dots(z, v)
    assert rms(wide(outcome.rewritten) - exact) <= 1.1 * rms(wide(outcome.original) - exact)


def test_a_wider_result_asked_for_by_the_user_keeps_its_precision() -> None:
    x, w = normal(8, 16, 64, dtype="bfloat16"), normal(8, 512, 24, dtype="bfloat16")
    y, v = normal(8, 32, 256, dtype="bfloat16"), normal(8, 256, 24, dtype="bfloat16")

    def dot(a: Any, b: Any) -> Any:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    cases = (
        (rewritten(lambda x, w: dot(gather(x, 1), w), (x, w)), gathered_dots(x, w, 1)),
        (rewritten(lambda y, v: scatter(dot(y, v)), (y, v)), scattered_dots(y, v)),
    )
    for outcome, exact in cases:
        assert outcome.rewritten.dtype == np.float32
        np.testing.assert_allclose(outcome.rewritten, exact, rtol=0, atol=2e-5 * np.abs(exact).max())


def test_a_narrower_result_asked_for_by_the_user_is_as_exact_as_the_original() -> None:
    x, w = normal(8, 16, 64), normal(8, 512, 24)
    outcome = rewritten(lambda x, w: jnp.matmul(gather(x, 1), w, preferred_element_type=jnp.bfloat16), (x, w))
    assert outcome.rewritten.dtype == jnp.bfloat16
    exact = gathered_dots(x, w, 1)
    assert rms(wide(outcome.rewritten) - exact) <= 1.1 * rms(wide(outcome.original) - exact)


@pytest.mark.parametrize("narrow", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
@pytest.mark.parametrize("reduced", ["scattered", "summed"])
@pytest.mark.parametrize("by", ["conversion", "dot"])
def test_what_is_rounded_and_widened_again_is_rounded_in_a_ring_too(
    narrow: str, reduced: str, by: str
) -> None:
    """Fake quantisation, which trains for a narrow type: a wider sum would be of another model."""
    x, w = normal(4, 16, 8), normal(4, 8, 24)

    def quantised(x: Any, w: Any) -> Any:
        y = (x @ w).astype(narrow) if by == "conversion" else jnp.matmul(x, w, preferred_element_type=narrow)
        return y.astype(jnp.float32)

    def body(x: Any, w: Any) -> Any:
        y = quantised(x, w)
        return scatter(y) if reduced == "scattered" else lax.psum(y, "x")

    outcome = rewritten(body, (x, w))
    rounded = [np.asarray(quantised(*each), np.float64) for each in zip(x, w, strict=True)]
    exact = np.sum(rounded, 0)
    expected = np.stack(np.split(exact, 4)) if reduced == "scattered" else np.stack([exact] * 4)
    np.testing.assert_allclose(np.asarray(outcome.rewritten, np.float64), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1], ids=["scattered", "gathered"])
def test_operands_too_large_for_float32_are_multiplied_in_their_own_type(dim: int) -> None:
    def dot(a: Any, b: Any) -> Any:
        return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16)

    with jax.enable_x64(True):
        x, w = RNG.normal(size=(4, 8, 2)) * 1e60, RNG.normal(size=(4, (2, 8)[dim], 5)) / 1e60
        body = (lambda x, w: scatter(dot(x, w)), lambda x, w: dot(gather(x, 1), w))[dim]
        outcome = rewritten(body, (x, w))
    exact = gathered_dots(x, w, 1) if dim else scattered_dots(x, w)
    np.testing.assert_allclose(wide(outcome.rewritten), exact, rtol=0, atol=2.0**-7 * np.abs(exact).max())


# Other element types.


@pytest.mark.parametrize("directions", [1, 2])
def test_float64_stays_float64(directions: int) -> None:
    with jax.enable_x64(True), spmd.only_directions(directions):
        x, w = RNG.normal(size=(4, 6, 10)), RNG.normal(size=(4, 40, 7))
        outcome = rewritten(lambda x, w: gather(x, 1) @ w, (x, w))
        assert outcome.rewritten.dtype == np.float64
        np.testing.assert_allclose(outcome.rewritten, gathered_dots(x, w, 1), rtol=0, atol=1e-12 * 40)
        y, v = RNG.normal(size=(4, 12, 10)), RNG.normal(size=(4, 10, 7))
        outcome = rewritten(lambda y, v: scatter(y @ v), (y, v))
        assert outcome.rewritten.dtype == np.float64
        np.testing.assert_allclose(outcome.rewritten, scattered_dots(y, v), rtol=0, atol=1e-12 * 40)


@pytest.mark.parametrize("widened", ["before", "after", "in the dot"])
def test_float64_within_a_program_of_float32_is_kept(widened: str) -> None:
    def double(x: Any) -> Any:
        return lax.convert_element_type(x, np.float64)

    def body(x: Any, w: Any) -> Any:
        with jax.enable_x64(True):
            if widened == "in the dot":
                result = lax.dot(gather(x), w, preferred_element_type=np.float64)
            elif widened == "before":
                result = lax.dot(gather(double(x)), double(w))
            else:
                result = lax.dot(double(gather(x)), double(w))
            return lax.convert_element_type(result, np.float32)

    outcome = spmd.run_both(body, (normal(4, 6, 10), normal(4, 10, 7)))
    (site,) = outcome.report.sites
    assert site.reason == "unsupported_dtype"
    assert "float64 is in the program, and jax_enable_x64 is off" in site.sentence
    np.testing.assert_array_equal(outcome.rewritten, outcome.original)


@pytest.mark.parametrize("dim", [0, 1], ids=["free", "contracting"])
def test_float8_operands_give_as_exact_a_result(dim: int) -> None:
    fp8 = jnp.float8_e4m3fn
    x = normal(8, 4, 32, dtype=fp8)
    w = normal(8, 32 if dim == 0 else 256, 24, dtype=fp8)
    body = lambda x, w: jnp.matmul(gather(x, dim), w, preferred_element_type=jnp.bfloat16)  # noqa: E731
    outcome = rewritten(body, (x, w))
    exact = gathered_dots(x, w, dim)
    assert rms(wide(outcome.rewritten) - exact) <= 1.1 * rms(wide(outcome.original) - exact)


def test_float8_travels_as_float8() -> None:
    x, w = normal(4, 4, 32, dtype=jnp.float8_e4m3fn), normal(4, 32, 8, dtype=jnp.bfloat16)
    outcome = rewritten(lambda x, w: gather(x).astype(jnp.bfloat16) @ w, (x, w))
    overlapped: Any = outcome.overlapped
    text = overlapped.lower(x, w).as_text()
    permutes = [line for line in text.splitlines() if "collective_permute" in line]
    assert permutes and all("xf8E4M3FN>" in line for line in permutes)


@pytest.mark.parametrize("dim", [0, 1], ids=["free", "contracting"])
def test_int8_dots_into_int32_are_exact(dim: int) -> None:
    x = RNG.integers(-128, 128, (8, 4, 64)).astype(np.int8)
    w = RNG.integers(-128, 128, (8, 64 if dim == 0 else 512, 6)).astype(np.int8)
    outcome = rewritten(lambda x, w: jnp.matmul(gather(x, dim), w, preferred_element_type=jnp.int32), (x, w))
    assert outcome.rewritten.dtype == np.int32
    np.testing.assert_array_equal(outcome.rewritten, gathered_dots(x, w, dim))


def test_a_dot_of_floats_that_gives_integers_rounds_once() -> None:
    def body(x: Any, w: Any) -> Any:
        return lax.dot_general(gather(x, 1), w, (((1,), (0,)), ((), ())), preferred_element_type=np.int32)

    outcome = spmd.run_both(body, (np.full((4, 3, 2), 0.4, np.float32), np.ones((4, 8, 5), np.float32)))
    assert [site.reason for site in outcome.report.sites] == ["unsupported_dtype"]
    np.testing.assert_array_equal(outcome.rewritten, np.full((4, 3, 5), int(8 * 0.4)))


def test_a_dot_whose_sums_are_booleans_is_kept_where_they_would_be_added_up() -> None:
    x, w = RNG.integers(-1, 2, (4, 3, 2)), RNG.integers(-1, 2, (4, 8, 5))

    def body(x: Any, w: Any) -> Any:
        return lax.dot(gather(x, 1) > 0, w > 0)

    outcome = spmd.run_both(body, (x, w))
    assert [site.reason for site in outcome.report.sites] == ["unsupported_dtype"]
    positive = np.concatenate(list(x), 1) > 0
    np.testing.assert_array_equal(outcome.rewritten, [positive @ (each > 0) for each in w])


def test_int8_dots_into_int32_are_scattered_exactly() -> None:
    y = RNG.integers(-128, 128, (8, 16, 64)).astype(np.int8)
    w = RNG.integers(-128, 128, (8, 64, 6)).astype(np.int8)
    outcome = rewritten(lambda y, w: scatter(jnp.matmul(y, w, preferred_element_type=jnp.int32)), (y, w))
    np.testing.assert_array_equal(outcome.rewritten, scattered_dots(y, w))


def test_integers_that_overflow_wrap_around_as_in_the_original() -> None:
    x = RNG.integers(-128, 128, (4, 4, 8)).astype(np.int8)
    w = RNG.integers(-128, 128, (4, 32, 6)).astype(np.int8)
    outcome = rewritten(lambda x, w: gather(x, 1) @ w, (x, w))
    assert outcome.rewritten.dtype == np.int8
    np.testing.assert_array_equal(outcome.rewritten, gathered_dots(x, w, 1).astype(np.int64).astype(np.int8))


@pytest.mark.parametrize("directions", [1, 2])
def test_complex_numbers_are_summed_as_complex(directions: int) -> None:
    x, w = (normal(*s) + 1j * normal(*s) for s in ((4, 6, 10), (4, 40, 7)))
    y, v = (normal(*s) + 1j * normal(*s) for s in ((4, 8, 10), (4, 10, 7)))
    with spmd.only_directions(directions):
        gathered = rewritten(lambda x, w: gather(x, 1) @ w, (x, w))
        scattered = rewritten(lambda y, v: scatter(y @ v), (y, v))
    assert gathered.rewritten.dtype == scattered.rewritten.dtype == np.complex64
    np.testing.assert_allclose(gathered.rewritten, gathered_dots(x, w, 1), rtol=0, atol=2e-4)
    np.testing.assert_allclose(scattered.rewritten, scattered_dots(y, v), rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("lhs", "rhs"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("int8", "float32")]
)
def test_operands_of_two_types_give_the_result_of_the_original(lhs: str, rhs: str) -> None:
    x = RNG.integers(-9, 9, (4, 3, 8)).astype(np.int8) if lhs == "int8" else normal(4, 3, 8, dtype=lhs)
    w = normal(4, 32, 6, dtype=rhs)

    def body(x: Any, w: Any) -> Any:
        return lax.dot_general(gather(x, 1), w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    outcome = rewritten(body, (x, w))
    exact = gathered_dots(x, w, 1)
    assert outcome.rewritten.dtype == np.float32
    np.testing.assert_allclose(outcome.rewritten, exact, rtol=0, atol=2e-5 * np.abs(exact).max())


# Sizes.


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(("axis_size", "block"), [(2, 3), (3, 5), (4, 1), (5, 3), (6, 2), (7, 3), (8, 5)])
def test_any_axis_size_and_blocks_that_do_not_divide_by_two(
    axis_size: int, block: int, directions: int
) -> None:
    x, w = normal(axis_size, block, 4), normal(axis_size, 4, axis_size * block)
    contract = normal(axis_size, axis_size * block, 2)

    def body(x: Any, w: Any, c: Any) -> Any:
        g = gather(x)
        return scatter(jnp.tanh(g @ w) @ c) + g.T[:1, :block].T.sum() + (g.T @ c).sum()

    with spmd.only_directions(directions):
        outcome = spmd.run_both(body, (x, w, contract))
    assert [site.rewritten for site in outcome.report.sites] == [True, True]
    wanted = {"unidirectional"} if directions == 1 or block == 1 else {"bidirectional"}
    assert {site.schedule.split(",")[0] for site in outcome.report.sites} == wanted
    g = np.concatenate(list(wide(x)))
    products = [np.tanh(g @ a) @ c for a, c in zip(wide(w), wide(contract), strict=True)]
    exact = [
        part + g.T[:1, :block].sum() + (g.T @ c).sum()
        for part, c in zip(np.split(sum(products), axis_size), wide(contract), strict=True)
    ]
    np.testing.assert_allclose(outcome.rewritten, np.stack(exact), rtol=0, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("directions", [1, 2])
def test_a_block_of_one_row_stays_whole(directions: int, tiled: bool) -> None:
    x, w = normal(8, 1, 4) if tiled else normal(8, 4), normal(8, 4, 3)
    y = normal(8, 8, 4)
    with spmd.only_directions(directions):
        gathered = rewritten(lambda x, w: lax.all_gather(x, "x", axis=0, tiled=tiled) @ w, (x, w))
        scattered = rewritten(
            lambda y, w: lax.psum_scatter(y @ w, "x", scatter_dimension=0, tiled=tiled), (y, w)
        )
    assert {s.schedule for o in (gathered, scattered) for s in o.report.sites} == {"unidirectional"}
    exact = gathered_dots(x.reshape(8, 1, 4), w)
    np.testing.assert_allclose(gathered.rewritten, exact, rtol=0, atol=1e-4)
    exact = scattered_dots(y, w)
    np.testing.assert_allclose(scattered.rewritten, exact if tiled else exact[:, 0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
@pytest.mark.parametrize("cast", ["before", "after"])
def test_integers_of_two_bits_do_not_travel(dtype: str, cast: str) -> None:
    """XLA:CPU gathers others than they are, and the TPU compiler ends the process over a barrier of them."""

    def body(x: Any, w: Any) -> Any:
        narrow = gather(x) if cast == "before" else gather(x).astype(dtype)
        return narrow.astype(jnp.float32) @ w

    x = jax.ShapeDtypeStruct((4, 8), dtype if cast == "before" else "int8")
    flow, (match,) = bodies.matched(body, x, jax.ShapeDtypeStruct((8, 5), "float32"))
    if cast == "before":
        assert isinstance(match.found, Reason) and match.found.code is Code.UNSUPPORTED_DTYPE
    else:
        assert isinstance(match.found, tuple) and isinstance(match.found[0], AllGatherDot)
        assert flow.avals[match.found[0].wire].dtype == np.int8
