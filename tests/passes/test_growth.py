"""The work of the pass grows as the program does, and not faster."""

# JAX leaves its collectives untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from overlap import overlap_collectives
from tests.calls import calls_in
from tests.passes import spmd

P = PartitionSpec
ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / floor}/" for floor in ("overlap", "passes", "cost_model"))


def gather(x: Any) -> Any:
    return lax.all_gather(x, "x", axis=0, tiled=True)


def scatter(y: Any) -> Any:
    return lax.psum_scatter(y, "x", scatter_dimension=0, tiled=True)


def long_head(n: int, x: Any, *weights: Any) -> Any:
    """A long way from a gather to its dot."""
    y = gather(x)
    for _ in range(n):
        y = jnp.tanh(y)
    return scatter(y @ weights[0])


def equal_gathers(n: int, x: Any, *weights: Any) -> Any:
    """One gather written once for each of its dots."""
    return scatter(sum(gather(x) @ weight for weight in weights))


def slices(n: int, x: Any, *weights: Any) -> Any:
    """Many operations of one kind that read one value."""
    found = sum(lax.slice(x, (0, i), (1, i + 1)) for i in range(n))
    return scatter(gather(x) @ weights[0]) + found


def reductions(n: int, x: Any, *weights: Any) -> Any:
    """A gather that is summed in many ways beside its dot."""
    y = gather(x)
    return scatter(y @ weights[0]) + sum((y * (i + 1)).sum(axis=0, keepdims=True) for i in range(n))


def layers(n: int, x: Any, *weights: Any) -> Any:
    """A residual stream, to which every sum is added."""
    for weight in weights:
        x = x + scatter(jnp.tanh(gather(x) @ weight))
    return x


def calls(body: Callable[..., Any], n: int) -> int:
    """The calls of the library's own functions in a trace of a program of that size."""
    weights = n if body in (equal_gathers, layers) else 1
    function = jax.jit(
        jax.shard_map(
            lambda *arguments: body(n, *arguments),
            mesh=spmd.mesh_of(4),
            in_specs=(P("x"), *[P()] * weights),
            out_specs=P("x"),
            check_vma=False,
        )
    )
    shapes = [jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)]
    shapes += [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * weights
    decorated = overlap_collectives(function, hardware="tpu_v5p", strict=True)
    # What dataclasses generate has no file.
    return calls_in(lambda: decorated.trace(*shapes), (*OURS, "<string>"))


@pytest.mark.parametrize(
    ("body", "size"), [(long_head, 200), (equal_gathers, 25), (slices, 200), (reductions, 100), (layers, 25)]
)
def test_twice_the_program_is_twice_the_work(body: Callable[..., Any], size: int) -> None:
    once, twice, four_times = (calls(body, n) for n in (size, 2 * size, 4 * size))
    assert four_times - twice < 2.5 * (twice - once)
