"""Operations behind a gather's dots run inside the ring where less is written so, with the same values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

from passes.chains import AllGatherDot
from passes.decide import decide
from passes.epilogue import with_epilogues
from passes.graph import Dataflow
from passes.network import Network
from passes.schedule import RingSchedule
from tests.passes import bodies, spmd

ROWS, WIDTH, HIDDEN = 4, 6, 10
"""Per device: rows of x, its columns, and columns of each weight."""

AXIS_SIZE = 4


def gather(x: Any) -> Any:
    return lax.all_gather(x, "x", tiled=True)


def shard(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X, W = shard(ROWS, WIDTH), shard(WIDTH, HIDDEN)


def chains_of(body: Callable[..., Any], *shards: Any, form: RingSchedule | None = None) -> tuple[Any, ...]:
    """The gather chains of a program, all rewritten, with their epilogues."""
    flow, matches = bodies.matched(body, *shards, axis_size=AXIS_SIZE, check_vma=False)
    form = RingSchedule(directions=1) if form is None else form
    with spmd.only_schedule(form):
        decisions = decide(flow, matches, "always", Network(None), lambda decision: None)  # type: ignore[arg-type, return-value]
    revised = with_epilogues(flow, decisions)
    chains = [d.ring.chain for d in revised if d.ring is not None]
    return flow, [chain for chain in chains if isinstance(chain, AllGatherDot)]


def inside(flow: Dataflow, chain: AllGatherDot) -> list[str]:
    return [flow.ops[block.op].name for block in chain.epilogue]


def gated(x: Any, w: Any, v: Any) -> Any:
    whole = gather(x)
    return jnp.tanh(whole @ w) * (whole @ v)


def swiglu(x: Any, w: Any, v: Any) -> Any:
    whole = gather(x)
    return jax.nn.silu(whole @ w) * (whole @ v)


def sums_too(x: Any, w: Any) -> Any:
    """One gathered array as the free dim of one dot and the contracting dim of another."""
    whole = gather(x)
    return jnp.tanh(whole @ w).sum(1), jnp.ones((3, AXIS_SIZE * ROWS), x.dtype) @ whole


def test_an_activation_and_a_gate_run_inside_and_only_their_product_is_assembled() -> None:
    flow, (chain,) = chains_of(gated, X, W, W)
    assert inside(flow, chain) == ["tanh", "mul"]
    made = [value for block in (*chain.dots, *chain.epilogue) for value in flow.ops[block.op].outputs]
    assert len(made) == 4 and len(chain.unplaced) == 3
    assert flow.ops[chain.epilogue[-1].op].outputs[0] not in chain.unplaced


def test_a_call_of_an_activation_is_looked_into() -> None:
    flow, (chain,) = chains_of(swiglu, X, W, W)
    assert "logistic" in inside(flow, chain)


def test_what_would_have_to_be_written_anyway_stays_outside() -> None:
    def body(x: Any, w: Any) -> Any:
        y = gather(x) @ w
        return y, jnp.tanh(y)

    _, (chain,) = chains_of(body, X, W)
    assert not chain.epilogue and not chain.unplaced


def test_what_only_takes_a_result_apart_stays_outside() -> None:
    """It is one copy after the ring, and one a piece inside."""

    def fused(x: Any, w: Any) -> Any:
        q, k = jnp.split(gather(x) @ w, 2, axis=1)
        return q.reshape(-1, 5, 1), k

    def gated(x: Any, w: Any) -> Any:
        one, other = jnp.split(gather(x) @ w, 2, axis=1)
        return jnp.tanh(one) * other

    _, (chain,) = chains_of(fused, X, W)
    assert not chain.epilogue
    flow, (chain,) = chains_of(gated, X, W)
    assert inside(flow, chain) == ["split", "tanh", "mul"], "after what computes less is written"


def test_of_what_the_program_is_given_whole_only_masks_are_read_inside() -> None:
    def scaled(x: Any, w: Any, whole: Any) -> Any:
        return (gather(x) @ w) * whole

    def masked(x: Any, w: Any, whole: Any) -> Any:
        return lax.select(whole, gather(x) @ w, jnp.zeros(whole.shape, x.dtype))

    shape = (AXIS_SIZE * ROWS, HIDDEN)
    flow, (chain,) = chains_of(scaled, X, W, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert not chain.epilogue

    def merged(x: Any, w: Any, whole: Any) -> Any:
        return scaled(x, w, whole.reshape(shape))

    flow, (chain,) = chains_of(merged, X, W, jax.ShapeDtypeStruct((AXIS_SIZE, ROWS, HIDDEN), jnp.float32))
    assert not chain.epilogue, "in another shape it is given all the same"
    flow, (chain,) = chains_of(masked, X, W, jax.ShapeDtypeStruct(shape, jnp.bool_))
    assert "select_n" in inside(flow, chain)
    # One row for all, a bias, is read as it is.
    flow, (chain,) = chains_of(scaled, X, W, shard(1, HIDDEN))
    assert "mul" in inside(flow, chain)


def test_a_residual_that_is_read_before_the_ring_is_added_inside() -> None:
    """Added outside it would be added anew by every dot of a backward pass that reads the sum."""

    def added(x: Any, w: Any, whole: Any) -> Any:
        return whole + gather(x) @ w

    def normed(x: Any, w: Any, whole: Any) -> Any:
        return whole + gather(x * jnp.square(whole).mean()) @ w

    whole = shard(AXIS_SIZE * ROWS, HIDDEN)
    _, (chain,) = chains_of(added, X, W, whole)
    assert not chain.epilogue
    flow, (chain,) = chains_of(normed, X, W, whole)
    assert inside(flow, chain) == ["add"]

    def in_another_shape(x: Any, w: Any, whole: Any) -> Any:
        return normed(x, w, whole.reshape(AXIS_SIZE * ROWS, HIDDEN))

    flow, (chain,) = chains_of(in_another_shape, X, W, shard(AXIS_SIZE, ROWS, HIDDEN))
    assert inside(flow, chain) == ["add"]


def test_nothing_follows_that_mixes_rows() -> None:
    flow, (chain,) = chains_of(lambda x, w: lax.cumsum(jnp.tanh(gather(x) @ w), axis=0), X, W)
    assert inside(flow, chain) == ["tanh"]


def test_a_sum_over_columns_follows_and_nothing_else_is_written() -> None:
    flow, (chain,) = chains_of(lambda x, w: jnp.exp(gather(x) @ w).sum(axis=1), X, W)
    assert inside(flow, chain)[:2] == ["exp", "reduce_sum"]
    results = [flow.ops[block.op].outputs[0] for block in chain.epilogue]
    assert [flow.avals[v].shape for v in results if v not in chain.unplaced] == [(ROWS * AXIS_SIZE,)]


def test_no_ring_waits_for_another_one_s_results() -> None:
    def body(x: Any, y: Any, w: Any, v: Any) -> Any:
        a, b = gather(x) @ w, gather(y) @ v
        return jnp.tanh(a) * b, jnp.tanh(b) * a

    flow, chains = chains_of(body, X, X, W, W)
    assert len(chains) == 2
    assert all("mul" not in inside(flow, chain) for chain in chains)


def test_an_operation_goes_into_one_ring_only() -> None:
    def body(x: Any, y: Any, w: Any, v: Any) -> Any:
        hidden = (gather(x) @ w) * gather(y)
        return hidden @ v

    _, chains = chains_of(body, X, shard(ROWS, HIDDEN), W, shard(HIDDEN, 3))
    members = Counter(op for chain in chains for op in chain.members)
    assert len(chains) == 2 and max(members.values()) == 1


@pytest.mark.parametrize(
    "form", [{"across": True, "directions": 2}, {"columns": 2, "directions": 1}], ids=str
)
def test_pieces_that_are_not_whole_rows_have_no_epilogue(form: Any) -> None:
    _, (chain,) = chains_of(gated, X, W, W, form=RingSchedule(**form))
    assert not chain.epilogue


BODIES: dict[str, tuple[Callable[..., Any], int]] = {
    "gated": (gated, 2),
    "silu": (swiglu, 2),
    "gelu": (lambda x, w: jax.nn.gelu(gather(x) @ w), 1),
    "bias": (lambda x, w: jnp.maximum(gather(x) @ w + jnp.arange(HIDDEN, dtype=x.dtype), 0), 1),
    "rows_bias": (
        lambda x, w: (gather(x) @ w) * jnp.arange(AXIS_SIZE * ROWS, dtype=x.dtype)[:, None],
        1,
    ),
    "softmax": (lambda x, w: jax.nn.log_softmax(gather(x) @ w)[:, :2], 1),
    "transposed": (lambda x, w: jnp.tanh((gather(x) @ w).T), 1),
    "split_heads": (lambda x, w: jnp.tanh((gather(x) @ w).reshape(-1, 2, HIDDEN // 2)).sum(-1), 1),
    "contracting_too": (sums_too, 1),
}

FORMS = {
    "one_way": RingSchedule(directions=1),
    "both_ways": RingSchedule(directions=2),
    "joined": RingSchedule(directions=2, joined=True),
    "rolled": RingSchedule(directions=1, unroll=1),
    "reordered": RingSchedule(directions=2, orders=((0, 2, 1, 3),)),
}


def drawn(count: int, dtype: str, seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    shapes = [(ROWS, WIDTH), *[(WIDTH, HIDDEN)] * count]
    return tuple(np.asarray(jnp.asarray(rng.normal(size=(AXIS_SIZE, *shape)) / 2, dtype)) for shape in shapes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BODIES)
def test_values_with_epilogues(name: str, form: str) -> None:
    body, weights = BODIES[name]
    with spmd.only_schedule(FORMS[form]):
        outcome = spmd.run_both(body, drawn(weights, "float32", 1))
    assert all(site.rewritten for site in outcome.report.sites)
    pairs = zip(jax.tree.leaves(outcome.rewritten), jax.tree.leaves(outcome.original), strict=True)
    for rewritten, original in pairs:
        np.testing.assert_allclose(rewritten, original, rtol=2e-5, atol=2e-5)


def test_values_of_a_gate_against_float64() -> None:
    given_arguments = drawn(2, "bfloat16", 2)
    outcome = spmd.run_both(gated, given_arguments)
    x, w, v = (np.asarray(each, np.float64) for each in given_arguments)
    whole = np.concatenate(list(x))
    reference = [np.tanh(whole @ w[i]) * (whole @ v[i]) for i in range(AXIS_SIZE)]
    spmd.assert_as_good(outcome, reference)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(["tanh", "scale", "bias", "rows", "gate", "keep", "square"]), max_size=6))
def test_any_operations_give_the_same_values(steps: list[str]) -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        whole = gather(x)
        y, gate, kept = whole @ w, whole @ v, []
        for step in steps:
            if step == "keep":
                kept.append(y)
            y = {
                "tanh": lambda y: jnp.tanh(y),
                "scale": lambda y: 0.5 * y,
                "bias": lambda y: y + jnp.arange(HIDDEN, dtype=y.dtype),
                "rows": lambda y: y + jnp.arange(AXIS_SIZE * ROWS, dtype=y.dtype)[:, None],
                "gate": lambda y: y * gate,
                "keep": lambda y: -y,
                "square": lambda y: y * y / 8,
            }[step](y)  # type: ignore[no-untyped-call]
        return (y, *kept)

    outcome = spmd.run_both(body, drawn(2, "float32", 3))
    for rewritten, original in zip(outcome.rewritten, outcome.original, strict=True):
        np.testing.assert_allclose(rewritten, original, rtol=2e-5, atol=2e-5 * np.abs(original).max())


@pytest.mark.parametrize("name", ["gated", "silu", "softmax"])
def test_gradients_and_vmap_with_epilogues(name: str) -> None:
    body, weights = BODIES[name]
    arguments = drawn(weights, "float32", 4)
    outcome = spmd.run_both(body, arguments)

    def loss(function: Any) -> Any:
        return lambda *each: (function(*each) ** 2).sum()

    numbers = tuple(range(len(arguments)))
    ours = jax.grad(loss(outcome.overlapped), numbers)(*arguments)
    theirs = jax.grad(loss(outcome.jitted), numbers)(*arguments)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)
    stacked = [np.stack([each, 2 * each]) for each in arguments]
    mapped = jax.vmap(outcome.overlapped)(*stacked)
    np.testing.assert_allclose(mapped, jax.vmap(outcome.jitted)(*stacked), rtol=2e-5, atol=2e-5)
