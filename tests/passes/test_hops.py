"""Where the devices of a ring stand."""

# mypy: allow-untyped-calls

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes import hops


@given(st.lists(st.integers(0, 300), min_size=1, max_size=70))
def test_chosen_is_the_number_at_an_index(values: list[int]) -> None:
    choose = jax.vmap(lambda index: hops._chosen(tuple(values), index))
    found = choose(np.arange(len(values), dtype=np.int32))
    assert found.dtype == np.int32
    assert found.tolist() == values


@pytest.mark.parametrize("size", [2, 16, 17, 256])
def test_chosen_makes_no_array(size: int) -> None:
    jaxpr = jax.make_jaxpr(lambda index: hops._chosen(tuple(range(size)), index))(np.int32(0))
    assert not jaxpr.consts
    for eqn in jaxpr.eqns:
        for value in (*eqn.invars, *eqn.outvars):
            assert isinstance(value.aval, jax.core.ShapedArray)
            assert value.aval.shape == ()
