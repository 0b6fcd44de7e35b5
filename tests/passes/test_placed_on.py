"""What a program places elsewhere than on the device's cores stays as it is (`compute_on`)."""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on

from tests.passes import spmd

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(4, 8, 6)).astype(np.float32), RNG.normal(size=(4, 6, 5)).astype(np.float32)
IS_CONTEXT = "out_memory_spaces" not in inspect.signature(compute_on).parameters


def on_host(fun: Any, *operands: Any) -> Any:
    """The function of the operands, computed by the host: a context in jax 0.10, in jax 0.12 a call."""
    place: Any = compute_on
    if IS_CONTEXT:
        with place("device_host"):
            return fun(*operands)
    return place(fun, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)(*operands)


@pytest.mark.parametrize("part", ["dot", "dot of a sum", "activation", "call"])
def test_nothing_of_what_the_host_computes_goes_into_a_ring(part: str) -> None:
    def body(x: Any, w: Any) -> Any:
        if part == "dot of a sum":
            return lax.psum_scatter(on_host(jnp.matmul, x, w), "x", scatter_dimension=0, tiled=True)
        g = lax.all_gather(x, "x", axis=0, tiled=True)
        if part == "dot":
            return on_host(jnp.matmul, g, w)
        return on_host(jax.jit(jnp.tanh) if part == "call" else jnp.tanh, g) @ w

    outcome = spmd.run_both(body, (X, W), check_vma=False)
    (site,) = outcome.report.sites
    assert not site.rewritten
    np.testing.assert_array_equal(outcome.rewritten, outcome.original)
