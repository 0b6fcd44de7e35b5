"""Results compared: to rounding where they are floating-point, to the letter where they are not."""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from overlap.agreement import Agreement, compare, fetch, tolerance_of
from tests.overlap.mlp import mesh_of


def compared(a: Any, b: Any, tolerance: float = 1e-4) -> Agreement:
    return compare(fetch(a), fetch(b), tolerance)


X = jnp.array([1.0, -2.0, 1e-7])


def test_rounding_agrees_and_its_size_is_told() -> None:
    found = compared({"w": X}, {"w": X + jnp.array([0.0, 1e-5, 0.0])})
    assert found.agreed
    assert found.compared == 1
    # The norm of 1, -2 and almost 0.
    assert found.difference == pytest.approx(1e-5 / np.sqrt(5), rel=0.1)


def test_a_value_in_which_large_terms_cancel_may_differ_by_the_rounding_of_the_terms() -> None:
    assert compared(X, X.at[2].set(3e-7)).agreed


def test_adam_s_first_step_may_take_another_sign_where_the_gradient_is_rounding() -> None:
    weights = jnp.asarray(np.random.default_rng(0).normal(size=10_000), jnp.float32)
    step = weights.at[17].add(2e-3)
    assert compared(weights, step, tolerance=tolerance_of("f32[8]", "cpu")).agreed


def test_a_shard_in_the_wrong_place_is_no_rounding_in_any_type() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(128, 8)))
    wrong = x.at[5].set(x[6])
    for hlo in ("f32[8]", "f16[8]", "bf16[8]"):
        assert compared(x, wrong, tolerance=tolerance_of(hlo, "tpu")).agreed is False


def test_one_value_of_a_million_that_is_wrong_altogether_is_found() -> None:
    x = jnp.ones(1_000_000)
    assert compared(x, x.at[3].set(-1), tolerance=tolerance_of("f32[8]", "cpu")).agreed is False


def test_what_differs_beyond_rounding_is_named() -> None:
    found = compared({"b": X, "w": X}, {"b": X, "w": X.at[1].set(-2.1)})
    assert found.agreed is False
    assert "['w'] (float32[3], by 4.5e-02) differs beyond rounding" in found.sentence
    assert "['b']" not in found.sentence
    both = compared({"b": X, "w": X}, {"b": 2 * X, "w": X + 1})
    assert "['b'] (float32[3], by 1.0e+00), ['w'] (float32[3], by" in both.sentence
    assert ") differ beyond rounding" in both.sentence


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_values_that_are_not_finite_are_equal_to_themselves_only(value: float) -> None:
    special = X.at[0].set(value)
    assert compared(special, special).agreed
    assert compared(special, X).agreed is False
    assert compared(X, special).agreed is False
    assert compared(special, special.at[0].set(-value)).agreed is bool(np.isnan(value))


def test_results_without_a_finite_value_are_not_called_agreement() -> None:
    for value in (jnp.nan, jnp.inf):
        nothing = jnp.full(3, value)
        found = compared({"a": nothing, "b": nothing}, {"a": nothing, "b": nothing})
        assert found.agreed is None and found.difference is None
        assert found.sentence.startswith("No finite value was compared: 2 arrays")
        assert compared(nothing, X).agreed is False
    found = compared((nothing, X), (nothing, X))
    assert found.agreed
    assert "2 arrays compared" in found.sentence and "1 of them without a finite value" in found.sentence
    assert compared((nothing, jnp.arange(3)), (nothing, jnp.arange(3))).agreed


def test_integers_and_booleans_must_be_equal() -> None:
    large = jnp.array([1_000_000, 3])
    found = compared(large, large)
    assert (found.agreed, found.difference) == (True, None)
    assert "all equal" in found.sentence
    assert compared(large, large + 1, tolerance=0.5).agreed is False
    assert compared(jnp.array([True]), jnp.array([False]), tolerance=2.0).agreed is False


def test_keys_of_random_numbers_are_compared_by_their_data() -> None:
    assert compared(jax.random.key(1), jax.random.key(1)).agreed
    assert compared(jax.random.key(1), jax.random.key(2)).agreed is False


def test_complex_numbers_are_compared() -> None:
    z = jnp.array([1 + 2j, 3j])
    assert compared(z, z * (1 + 1e-6)).agreed
    assert compared(z, z.conj()).agreed is False


def test_zeros_agree_with_zeros_only() -> None:
    zero = jnp.zeros(3)
    assert compared(zero, zero).agreed
    assert compared(zero, zero.at[0].set(1e-30)).agreed is False
    assert compared(jnp.zeros((0, 4)), jnp.zeros((0, 4))).agreed


def test_other_types_and_structures_do_not_agree() -> None:
    assert compared(X, X.astype(jnp.bfloat16)).agreed is False
    assert compared(X, X[None]).agreed is False
    found = compared((X, X), [X, X])
    assert found.agreed is False
    assert "different types" in found.sentence


def test_nothing_is_not_called_agreement() -> None:
    found = compared(None, None)
    assert found.agreed is None
    assert "returns nothing" in found.sentence


def test_arrays_sharded_differently_are_compared_as_wholes() -> None:
    mesh = mesh_of(4)
    x = np.arange(16.0).reshape(8, 2)
    a = jax.device_put(x, NamedSharding(mesh, P("x")))
    b = jax.device_put(x, NamedSharding(mesh, P()))
    assert compared(a, b).agreed
    assert compared(a, jax.device_put(x[::-1], NamedSharding(mesh, P()))).agreed is False


@pytest.mark.parametrize(
    ("hlo", "platform", "tolerance"),
    [
        ("%dot.1 = f32[8,8]{1,0} dot(f32[8,8] %a)", "cpu", 1e-3),
        ("%dot.1 = f32[8,8]{1,0} dot(f32[8,8] %a)", "tpu", 1e-2),
        ("%dot.1 = f64[8,8]{1,0} dot(f64[8,8] %a)", "gpu", 1e-9),
        ("%l = f32[] convert(bf16[] %x)", "cpu", 5e-2),
        ("%x = f16[4]{0} add(f32[4] %y)", "cpu", 1e-2),
        ("%x = f8e4m3fn[4]{0} convert(f32[4] %y)", "tpu", 0.25),
        ("%i = s32[4]{0} add(s32[4] %y)", "cpu", 1e-3),
        ("", "gpu", 1e-2),
    ],
)
def test_the_tolerance_is_that_of_the_narrowest_type_in_the_program(
    hlo: str, platform: str, tolerance: float
) -> None:
    assert tolerance_of(hlo, platform) == tolerance
