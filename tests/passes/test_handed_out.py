"""What rings hand out of what they make, and what runs again outside: which of it, to the same values."""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from passes.chains import AllGatherDot, DotPsum, run_again
from passes.graph import Dataflow
from tests.libtpu import needs_libtpu
from tests.passes import bodies, spmd
from tests.passes.ring_patterns import gather
from tests.passes.tpu_process import told_by

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3, 6)).astype(np.float32)  # per device [m, k]
SCALE = RNG.normal(size=(4, 6)).astype(np.float32)  # per device [k]
W = RNG.normal(size=(4, 6, 5)).astype(np.float32)  # per device [k, n]
V = RNG.normal(size=(4, 5, 6)).astype(np.float32)  # per device [n, k]


def wide(*arrays: Any) -> list[list[Any]]:
    return [[np.asarray(shard, np.float64) for shard in array] for array in arrays]


def gathered(x: Any) -> Any:
    return np.concatenate(list(np.asarray(x, np.float64)))


def chain_of(body: Callable[..., Any], *shards: Any) -> tuple[Dataflow, AllGatherDot]:
    """The graph and the only chain of a per-device body of bfloat16 and float32 arrays."""
    flow, (match,) = bodies.matched(body, *shards)
    assert isinstance(match.found, tuple)
    chain = match.found[0]
    assert isinstance(chain, AllGatherDot)
    return flow, chain


def told(flow: Dataflow, chain: AllGatherDot) -> tuple[list[tuple[str, str]], list[str]]:
    """What a chain hands out, by maker and dtype, and what runs again."""
    values = [(flow.ops[flow.producer[v]].name, flow.avals[v].dtype.name) for v in chain.handed_out]
    return values, sorted(flow.ops[op].name for op in chain.again)


def norm(x: Any, scale: Any) -> tuple[Any, Any]:
    """A layer norm in float32, and what its derivative needs."""
    wider = x.astype(jnp.float32)
    centred = wider - wider.mean(-1, keepdims=True)
    return (centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-6) * scale), centred


NARROW = (
    jax.ShapeDtypeStruct((3, 6), "bfloat16"),
    jax.ShapeDtypeStruct((6,), "float32"),
    jax.ShapeDtypeStruct((6, 5), "bfloat16"),
)


def test_of_a_norm_what_was_gathered_and_its_mean_are_handed_out() -> None:
    def body(x: Any, scale: Any, w: Any) -> Any:
        normal, centred = norm(gather(x), scale)
        return normal.astype(w.dtype) @ w, centred

    flow, chain = chain_of(body, *NARROW)
    values, again = told(flow, chain)
    assert ("all_gather", "bfloat16") in values and {name for name, _ in values[1:]} <= {"div", "mul"}
    assert len(values) == 2 and max(flow.bytes_of(v) for v in chain.handed_out[1:]) == 4 * 12
    assert set(again) >= {"convert_element_type", "sub"}
    assert set(chain.again) <= set(chain.ops) and not set(chain.again) & set(chain.members)


def test_a_cast_to_fewer_bytes_is_handed_out_and_not_what_it_is_made_of() -> None:
    def body(x: Any, w: Any) -> Any:
        narrow = jnp.exp(gather(x)).astype(jnp.bfloat16)
        return narrow @ w, narrow + 1

    flow, chain = chain_of(body, jax.ShapeDtypeStruct((3, 6), "float32"), NARROW[2])
    assert told(flow, chain) == ([("convert_element_type", "bfloat16")], [])


def test_what_is_made_of_no_fewer_bytes_is_handed_out() -> None:
    def body(x: Any, w: Any) -> Any:
        h = jnp.tanh(gather(x))
        return h @ w, h[::-1]

    flow, chain = chain_of(body, NARROW[0], NARROW[2])
    assert told(flow, chain) == ([("tanh", "bfloat16")], [])


def test_what_is_handed_out_anyway_is_what_the_rest_is_made_of() -> None:
    def body(x: Any, w: Any) -> Any:
        g = gather(x)
        h = jnp.tanh(g * 2)
        return h @ w, h[::-1], g[::-1]

    flow, chain = chain_of(body, NARROW[0], NARROW[2])
    assert told(flow, chain) == ([("all_gather", "bfloat16")], ["mul", "tanh"])


def test_a_sum_over_another_dim_is_handed_out_and_not_made_again() -> None:
    def body(x: Any, w: Any) -> Any:
        h = gather(x)
        s = h.astype(jnp.float32).sum(-1)
        return (h * s[:, None].astype(h.dtype)) @ w, s

    flow, chain = chain_of(body, NARROW[0], NARROW[2])
    values, again = told(flow, chain)
    assert values == [("reduce_sum", "float32")] and not again


def test_a_body_of_many_operations() -> None:
    def body(x: Any, w: Any) -> Any:
        h = gather(x).astype(jnp.float32)
        for _ in range(1500):
            h = h + 1
        return h.astype(w.dtype) @ w, h

    flow, chain = chain_of(body, NARROW[0], NARROW[2])
    assert told(flow, chain) == ([("all_gather", "bfloat16")], ["add"] * 1500 + ["convert_element_type"])


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("policy", ["auto", "always"])
def test_values_of_a_norm_whose_parts_are_needed_elsewhere(policy: str, check_vma: bool) -> None:
    def body(x: Any, scale: Any, w: Any) -> Any:
        g = gather(x)
        normal, centred = norm(g, scale)
        return normal @ w, centred[::-1], (normal * centred).sum(0), g * 3

    outcome = spmd.run_both(body, (X, SCALE, W), policy=policy, check_vma=check_vma)
    whole = gathered(X)
    centred = whole - whole.mean(-1, keepdims=True)
    unit = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-6)
    scales, weights = wide(SCALE, W)
    expected = (
        [unit * s @ w for s, w in zip(scales, weights, strict=True)],
        [centred[::-1]] * 4,
        [(unit * s * centred).sum(0) for s in scales],
        [whole * 3] * 4,
    )
    for got, wanted in zip(outcome.rewritten, expected, strict=True):
        np.testing.assert_allclose(got, np.stack(wanted), rtol=0, atol=2e-5 * np.abs(wanted).max())
    assert any(site.rewritten for site in outcome.report.sites) or policy == "auto"


@pytest.mark.parametrize("differentiated", ["inside", "outside"])
def test_gradients_through_a_norm_behind_a_gather(differentiated: str) -> None:
    """Inside of the shard_map the ring and the derivative are in one jaxpr; outside, jax takes the ring's."""

    def loss(x: Any, scale: Any, w: Any, v: Any) -> Any:
        normal, _ = norm(gather(x), scale)
        return (jnp.tanh(normal @ w) @ v).sum()

    def body(x: Any, scale: Any, w: Any, v: Any) -> Any:
        if differentiated == "inside":
            return jax.grad(loss, (0, 1, 2, 3))(x, scale, w, v)
        return loss(x, scale, w, v)[None]

    arguments = (X, SCALE, W, V)
    outcome = spmd.run_both(body, arguments, check_vma=False)
    assert any(site.rewritten for site in outcome.report.sites)
    run: Any = (outcome.jitted, outcome.overlapped)
    if differentiated == "outside":
        run = [jax.grad(lambda *a, f=f: f(*a).sum(), (0, 1, 2, 3)) for f in run]
    original, rewritten = (f(*arguments) for f in run)
    with jax.enable_x64(True):
        exact = jax.grad(
            lambda x, *rest: sum(
                _loss_of(x.reshape(-1, 6), *(a[device] for a in rest)) for device in range(4)
            ),
            (0, 1, 2, 3),
        )(*(jnp.asarray(a, "float64") for a in arguments))
        exact = [np.asarray(e) for e in exact]
    for got, plain, wanted in zip(rewritten, original, exact, strict=True):
        allowed = 2e-5 * np.abs(wanted).max()
        np.testing.assert_allclose(plain, wanted, rtol=0, atol=allowed)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=allowed)


def _loss_of(whole: Any, scale: Any, w: Any, v: Any) -> Any:
    centred = whole - whole.mean(-1, keepdims=True)
    normal = centred / jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-6) * scale
    return (jnp.tanh(normal @ w) @ v).sum()


def test_what_runs_again_may_read_what_another_ring_makes_first() -> None:
    """The second ring's own operation reads the first ring's result, and so does what runs again of it."""

    def body(x: Any, w: Any, v: Any) -> Any:
        first = (gather(x) @ w).sum(0)
        g = gather(2 * x)
        h = (g.astype(jnp.float32) * first[:1]).astype(jnp.float32) - 1
        return h @ w, g[::-1], h[:2] @ (w + v.T)

    outcome = spmd.run_both(body, (X, W, V))
    assert sum(site.rewritten for site in outcome.report.sites) == 2
    whole = gathered(X)
    for got, w, v, g, two in zip(outcome.rewritten[0], *wide(W, V), *outcome.rewritten[1:], strict=True):
        h = 2 * whole * (whole @ w).sum(0)[:1] - 1
        np.testing.assert_allclose(got, h @ w, rtol=0, atol=2e-5 * np.abs(h @ w).max())
        np.testing.assert_allclose(g, 2 * whole[::-1], rtol=1e-6)
        np.testing.assert_allclose(two, h[:2] @ (w + v.T), rtol=0, atol=4e-5 * np.abs(h @ w).max())


def test_of_a_psum_with_a_ring_behind_it_too() -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        total = lax.psum((gather(x) @ w).astype(jnp.bfloat16), "x")
        wider = total.astype(jnp.float32) * 2
        return wider @ v, wider[::-1]

    shards = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (X, W, V)]
    flow, matches = bodies.matched(body, *shards, check_vma=False)
    chains = [chain for match in matches if isinstance(match.found, tuple) for chain in match.found]
    found = [run_again(c) for c in chains if isinstance(c, DotPsum) and c.gather is not None]
    assert found
    for again in found:
        assert {flow.ops[op].name for op in again} == {"convert_element_type", "mul"}
    outcome = spmd.run_both(body, (X, W, V), check_vma=False)
    for got, plain in zip(outcome.rewritten, outcome.original, strict=True):
        np.testing.assert_allclose(got, plain, rtol=0, atol=0.02 * np.abs(plain).max())


MEMORY = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from overlap import overlap_collectives, tpu_target
from tests.passes.test_handed_out import norm

mesh = Mesh(np.array(tpu_target.devices("v5e:2x4")), ("x",))

def layer(x, scale, w, v):
    def body(x, scale, w, v):
        normal, _ = norm(lax.all_gather(x, "x", axis=0, tiled=True), scale)
        h = jax.nn.gelu(normal.astype(x.dtype) @ w) @ v
        return x + lax.psum_scatter(h, "x", scatter_dimension=0, tiled=True)
    specs = (P("x"), P(), P(None, "x"), P("x"))
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"))(x, scale, w, v)

def shaped(shape, spec, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

T, D, F = 4096, 2048, 8192
arguments = (shaped((T, D), P("x")), shaped((D,), P(), "float32"), shaped((D, F), P(None, "x")),
             shaped((F, D), P("x")))
step = jax.jit(jax.grad(lambda *a: (layer(*a).astype(jnp.float32) ** 2).mean(), (0, 1, 2, 3)))
kept, ringed = (
    overlap_collectives(step, policy=p).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    for p in ("never", "always")
)
print(json.dumps([kept, ringed, T * D]))
"""


@needs_libtpu
def test_a_norm_behind_a_gather_keeps_nothing_in_float32_for_its_derivative() -> None:
    kept, ringed, elements = told_by(MEMORY)
    assert ringed < kept + 3 * elements  # of one float32 array there are four bytes an element
