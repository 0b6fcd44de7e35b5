"""What a ring's dots read, and TPU compilers would make within them: its price, and that it is made once."""

# JAX leaves its collectives untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cost_model import by_name
from overlap import overlap_collectives
from passes import shims
from passes.chains import DotPsum
from passes.graph import dataflow
from passes.match import match_dataflow
from passes.written import GATING, written_bytes
from tests.passes import bodies, spmd
from tests.passes.ring_patterns import gather, jitted, rewritten_jaxpr, scatter

DEVICES = 4
X, W = (16, 8), (2, 32)
"""A device's activations, and its part of a weight that is gathered."""


def norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True))).astype(x.dtype)


def silu(h: Any) -> Any:
    return h * lax.logistic(h)


def bytes_of(body: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> list[float]:
    """Of each chain of a body."""
    arguments = [jax.ShapeDtypeStruct((DEVICES, *shape), dtype) for shape in shapes]
    jaxpr = jitted(body, len(arguments), DEVICES).trace(*arguments).jaxpr
    (mapped,) = (eqn for eqn in bodies.equations(jaxpr) if eqn.primitive.name == "shard_map")
    flow = dataflow(mapped.params["jaxpr"])
    found = (match.found[0] for match in match_dataflow(flow) if isinstance(match.found, tuple))
    return [written_bytes(flow, chain) for chain in found if not isinstance(chain, DotPsum)]


def test_what_is_there_anyway_costs_nothing() -> None:
    assert bytes_of(lambda x, w: x @ gather(w, 0), X, W) == [0]
    assert bytes_of(lambda x, w: x.T.reshape(8, 16).T @ gather(w, 0), X, W) == [0]

    def sent_too(x: Any, w: Any) -> Any:
        y = norm(x)
        return y @ gather(w, 0), lax.ppermute(y, "x", [(0, 1)])

    assert bytes_of(sent_too, X, W) == [0]


def test_a_slice_of_what_a_scan_runs_over_is_read_and_written() -> None:
    """Compilers take it from where it is within a dot; of a ring it is told by the time of its dots."""

    def layers(x: Any, w: Any) -> Any:
        return lax.scan(lambda x, w: (alone(x, w), None), x, w)[0]

    def alone(x: Any, w: Any) -> Any:
        return (gather(x, 0) @ w)[: x.shape[0]]

    hardware = by_name("tpu_v5p")

    def partials_s(body: Callable[..., Any], *shapes: tuple[int, ...]) -> list[float]:
        arguments = [jax.ShapeDtypeStruct((DEVICES, *shape), jnp.bfloat16) for shape in shapes]
        function = overlap_collectives(
            jitted(body, len(arguments), DEVICES), hardware=hardware, policy="always", strict=True
        )
        sites = function.explain(*arguments).sites
        return [site.estimate.overlapped_s for site in sites if site.estimate]

    width = 4096
    given = ((1024, width), (width, width))
    (once,) = set(partials_s(alone, *given))
    (sliced,) = set(partials_s(layers, given[0], (3, *given[1])))
    assert sliced - once == pytest.approx(2 * width * width * 2 / hardware.hbm_bytes_per_s, rel=1e-6)


def test_a_reduction_behind_a_gather_s_dot_takes_longer_than_as_part_of_it() -> None:
    size = 64 * 32 * 2

    def logits(x: Any, w: Any) -> Any:
        return gather(x, 0) @ w

    def largest(x: Any, w: Any) -> Any:
        y = logits(x, w)
        return y, (y.astype(jnp.float32) * 2).max(-1)

    def by_rows(x: Any, w: Any) -> Any:
        y = logits(x, w)
        return y, y.sum(0)

    def after_a_dot(x: Any, w: Any) -> Any:
        y = logits(x, w)
        return y, (y @ y.T).max(-1)

    def of_sums(x: Any, w: Any) -> Any:
        return scatter(x @ w, 0).max(-1)

    given = (X, (8, 32))
    assert bytes_of(logits, *given) == [0]
    assert bytes_of(largest, *given) == [8 * size]
    assert bytes_of(by_rows, *given) == bytes_of(after_a_dot, *given) == bytes_of(of_sums, *given) == [0]


def test_a_norm_is_read_and_written_once() -> None:
    size = 16 * 8 * 2
    (found,) = bytes_of(lambda x, w: norm(x) @ gather(w, 0), X, W)
    assert 2 * size <= found <= 2 * size + 16 * 4, "the array, what it is made of, and a number per row"

    def shared(x: Any, w: Any, v: Any) -> Any:
        y = norm(x)
        return y @ gather(w, 0), y @ v

    assert bytes_of(shared, X, W, (8, 4)) == [found / 2], "another dot reads it as well"


def test_a_cast_reads_the_wider_type() -> None:
    (found,) = bytes_of(
        lambda x, w: gather(x, 0).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), X, (8, 32), dtype=jnp.float32
    )
    assert found == 8 * 32 * (4 + 2)


def test_what_is_made_of_a_dots_result_is_made_with_it() -> None:
    def mlp(x: Any, up: Any, down: Any) -> Any:
        return scatter(silu(x @ up) @ down, 0)

    assert bytes_of(mlp, X, (8, 32), (32, 8)) == [0]

    def derivative(h: Any, y: Any, down: Any, up: Any) -> Any:
        """An activation's derivative, of several products, times what comes back through a projection."""
        s = lax.logistic(h)
        return scatter((y @ down * s + y @ down * h * s * (1 - s)) @ up, 0)

    assert bytes_of(derivative, (16, 32), X, (8, 32), (32, 8)) == [0]

    def normalised(x: Any, up: Any, down: Any) -> Any:
        return scatter(norm(x @ up) @ down, 0)

    assert bytes_of(normalised, X, (8, 32), (32, 8)) > [0], "a row's sum has to be there first"

    (found,) = bytes_of(lambda h, down: scatter(silu(h) @ down, 0), (16, 32), (32, 8))
    assert found == 2 * 16 * 32 * 2


def test_a_gate_that_comes_with_what_it_gates_is_made_when_both_are_there() -> None:
    hidden = 16 * 32 * 2

    def gated(x: Any, both: Any, down: Any) -> Any:
        gate, up = jnp.moveaxis(jnp.einsum("bd,dgf->bgf", x, both), 1, 0)
        return scatter(silu(gate) * up @ down, 0)

    assert bytes_of(gated, X, (8, 2, 32), (32, 8)) == [GATING * 3 * hidden], "read, read and written"

    def of_two_dots(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return scatter(silu(x @ gate) * (x @ up) @ down, 0)

    assert bytes_of(of_two_dots, X, (8, 32), (8, 32), (32, 8)) == [0]

    def gradient(x: Any, y: Any, up: Any, gate: Any) -> Any:
        """What comes back through both halves of a weight's product."""
        halves = jnp.stack([y @ gate, y @ up], 1)
        return scatter(jnp.einsum("bd,bgf->dgf", x, halves), 0)

    assert bytes_of(gradient, X, X, (8, 32), (8, 32)) == [GATING * 4 * hidden]

    def rotated(x: Any, y: Any, w: Any) -> Any:
        """Halves of rows are put together for the program as written as well."""
        first, second = jnp.split(y @ w, 2, -1)
        return scatter(x.T @ jnp.concatenate([first * 2 - second, second * 2 + first], -1), 0)

    assert bytes_of(rotated, X, X, (8, 32)) == [0]


def test_what_each_product_of_a_scatter_reads_whole_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a TPU's compiler makes it again within every piece's product."""

    def body(x: Any, h: Any) -> Any:
        return scatter(jnp.einsum("bd,bf->df", x, jnp.concatenate([h, -h], -1) * 2), 0)

    given = (np.ones((DEVICES, *X), np.float32), np.ones((DEVICES, 16, 32), np.float32))

    def barriers() -> int:
        jaxpr = rewritten_jaxpr(body, given, "tpu_v5p")
        barriers = (e for e in bodies.equations(jaxpr) if e.primitive.name == "optimization_barrier")
        return sum([v.aval.shape for v in e.invars] == [(16, 64)] for e in barriers)

    assert barriers() == 0, "on CPU"
    monkeypatch.setattr(shims, "on_tpu", lambda aval: True)
    assert barriers() == 1


# What `checkpoint` keeps is rounded to its own type.


def kept(x: Any, w: Any) -> Any:
    y = lax.reduce_precision(x @ gather(w, 0), 8, 23)
    y = lax.reduce_precision(jnp.moveaxis(y.reshape(-1, 2, 16), 1, 0), 8, 23).reshape(2, -1)
    return lax.reduce_precision(y, 8, 7).reshape(-1, 32) + lax.reduce_precision(x[:, :1], 8, 23)


def test_rounding_to_its_own_type_is_left_out_of_what_a_ring_made() -> None:
    rng = np.random.default_rng(0)
    arguments = [jnp.asarray(rng.normal(size=(DEVICES, *shape)), jnp.float32) for shape in (X, W)]
    outcome = spmd.run_both(kept, arguments)
    jaxpr = jax.make_jaxpr(outcome.overlapped)(*arguments)
    found = [e for e in bodies.equations(jaxpr) if e.primitive.name == "reduce_precision"]
    left = sorted((e.params["mantissa_bits"], e.invars[0].aval.shape) for e in found)
    assert left == [(7, (2, 256)), (23, (16, 1))], "what rounds, and what no ring made"
    np.testing.assert_allclose(outcome.rewritten, outcome.original, rtol=1e-2)
