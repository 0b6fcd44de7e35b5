"""What is matched around each collective, or why nothing is: chains, what they hand out, what travels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import overlap
import passes
from passes import blocks
from passes.chains import AllGatherDot, DotReduceScatter
from passes.graph import Dataflow, dataflow
from passes.reasons import Code, Reason
from tests.passes import bodies, spmd

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3, 5)).astype(np.float32)  # per device [m, k]
W = RNG.normal(size=(4, 5, 6)).astype(np.float32)  # per device [k, n]
V = RNG.normal(size=(4, 5, 4)).astype(np.float32)  # per device [k, n']
Y = RNG.normal(size=(4, 12, 5)).astype(np.float32)  # per device [P m, k]
S = RNG.normal(size=(4, 1)).astype(np.float32)  # per device, its own scale
GATHERED = spmd.all_gather([x.astype(np.float64) for x in X], 0)


def wide(array: Any) -> Any:
    return np.asarray(array, np.float64)


def gather(x: Any) -> Any:
    return lax.all_gather(x, "x", axis=0, tiled=True)


def scatter(y: Any) -> Any:
    return lax.psum_scatter(y, "x", scatter_dimension=0, tiled=True)


def the_match(body: Callable[..., Any], *stacked: Any, **options: Any) -> tuple[Dataflow, Any]:
    """The graph and what was found around the only collective of a per-device function."""
    flow, (match,) = bodies.matched(body, *(a[0] for a in stacked), **options)
    return flow, match.found if isinstance(match.found, Reason) else match.found[0]


def the_chain(body: Callable[..., Any], *stacked: Any, **options: Any) -> tuple[Dataflow, AllGatherDot]:
    flow, found = the_match(body, *stacked, **options)
    assert isinstance(found, AllGatherDot), found
    return flow, found


def the_reason(body: Callable[..., Any], *stacked: Any, **options: Any) -> Reason:
    _, found = the_match(body, *stacked, **options)
    assert isinstance(found, Reason), found
    return found


def lowered(outcome: spmd.Outcome, *arguments: Any) -> str:
    overlapped: Any = outcome.overlapped
    return str(overlapped.lower(*arguments).as_text())


def assert_right(
    body: Callable[..., Any], arguments: tuple[Any, ...], reference: Callable[..., Any], **options: Any
) -> spmd.Outcome:
    """Runs a body of the gather of its first argument; ``reference`` has it as float64 arrays, gathered."""
    outcome = spmd.run_both(body, arguments, **options)
    gathered = spmd.all_gather([np.asarray(a, np.float64) for a in arguments[0]], 0)
    rest = [[np.asarray(a, np.float64) for a in argument] for argument in arguments[1:]]
    wanted = [reference(*parts) for parts in zip(gathered, *rest, strict=True)]
    got = jax.tree.leaves(outcome.rewritten)
    for leaf, parts in zip(got, zip(*map(jax.tree.leaves, wanted), strict=True), strict=True):
        exact = np.stack(parts)
        np.testing.assert_allclose(leaf, exact, rtol=0, atol=2e-5 * max(1, np.abs(exact).max()))
    return outcome


def dots_of(flow: Dataflow) -> list[int]:
    return [i for i, op in enumerate(flow.ops) if op.name == "dot_general"]


# Gathers.


def test_one_gather_feeding_several_dots_is_one_chain_with_all_of_them() -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        g = gather(x)
        return g @ w, jnp.tanh(g) @ v, jnp.einsum("mk,kn->nm", g, w)

    def reference(g: Any, w: Any, v: Any) -> Any:
        return g @ w, np.tanh(g) @ v, (g @ w).T

    flow, chain = the_chain(body, X, W, V)
    assert [dot.op for dot in chain.dots] == dots_of(flow) and len(chain.dots) == 3
    assert {dot.dims.role for dot in chain.dots if hasattr(dot.dims, "role")} == {"free"}
    assert chain.collective.axes == ("x",) and chain.collective.axis_size == 4 and chain.handed_out == ()
    outcome = assert_right(body, (X, W, V), reference)
    (site,) = outcome.report.sites
    assert len(site.dots) == 3 and site.rewritten
    assert "all_gather" not in lowered(outcome, X, W, V)


def test_a_gathered_value_that_is_needed_elsewhere_is_handed_out() -> None:
    def body(x: Any, w: Any) -> Any:
        g = gather(x)
        return g @ w, g[::-1]

    flow, chain = the_chain(body, X, W)
    assert chain.handed_out == flow.ops[chain.collective.op].outputs
    outcome = assert_right(body, (X, W), lambda g, w: (g @ w, g[::-1]))
    assert "all_gather" not in lowered(outcome, X, W)


def test_a_value_on_the_way_that_is_a_result_is_handed_out_and_the_gathered_one_is_not() -> None:
    def body(x: Any, w: Any) -> Any:
        h = jnp.tanh(gather(x)).T
        return h.T @ w, h

    flow, chain = the_chain(body, X, W)
    (value,) = chain.handed_out
    assert flow.ops[flow.producer[value]].name == "transpose" and chain.blocked[value] == 1
    assert_right(body, (X, W), lambda g, w: (np.tanh(g) @ w, np.tanh(g).T))


def test_without_a_dot_the_reason_names_the_equation_that_stopped_and_its_line() -> None:
    def body(x: Any) -> Any:
        return lax.sort(gather(x) * 2, dimension=0)

    reason = the_reason(body, X)
    assert reason.code is Code.NO_DOT
    assert f"sort, {__file__}:{inspect.getsourcelines(body)[1] + 1} (" in reason.detail
    assert_right(body, (X,), lambda g: np.sort(g * 2, axis=0))


def test_a_gathered_value_that_is_only_returned_escapes() -> None:
    def body(x: Any) -> Any:
        return jnp.tanh(gather(x))

    assert the_reason(body, X).code is Code.GATHERED_VALUE_ESCAPES
    (site,) = spmd.run_both(body, (X,)).report.sites
    assert not site.rewritten and site.kind == "all_gather"


def test_a_dot_of_the_gathered_value_with_itself_is_left_alone() -> None:
    def body(x: Any) -> Any:
        g = gather(x)
        return g @ jnp.tanh(g).T

    assert the_reason(body, X).code is Code.DEPENDS_ON_ITSELF
    assert_right(body, (X,), lambda g: g @ np.tanh(g).T)


def test_a_dot_that_contracts_the_gathered_dim_of_both_operands_is_a_chain() -> None:
    def body(x: Any, s: Any) -> Any:
        g = gather(x)
        return jnp.tanh(g * s).T @ g

    _, chain = the_chain(body, X, S)
    (dot,) = chain.dots
    assert dot.dims.operand_dims == (1, 0) or dot.dims.operand_dims == (0, 0)
    assert dot.dims.result_dim is None
    assert_right(body, (X, S), lambda g, s: np.tanh(g * s).T @ g)


def test_queries_and_keys_of_one_gather_share_a_ring_and_their_product_is_left_out() -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        g = gather(x)
        return (g @ w) @ (g @ w * 2).T @ (g @ v)

    flow, chain = the_chain(body, X, W, V)
    inputs = [flow.ops[dot.op].inputs for dot in chain.dots]
    assert len(inputs) == 3 and len(dots_of(flow)) == 5
    assert_right(body, (X, W, V), lambda g, w, v: (g @ w) @ (g @ w * 2).T @ (g @ v))


def test_a_dot_of_the_gathered_value_and_another_dots_result_is_left_out() -> None:
    square = RNG.normal(size=(4, 5, 12)).astype(np.float32)

    def body(x: Any, w: Any) -> Any:
        g = gather(x)
        return jnp.sin(g @ w) @ g

    flow, chain = the_chain(body, X, square)
    first, second = dots_of(flow)
    assert [dot.op for dot in chain.dots] == [first] and second not in chain.members
    assert chain.handed_out == flow.ops[chain.collective.op].outputs
    assert_right(body, (X, square), lambda g, w: np.sin(g @ w) @ g)


def test_a_dot_whose_other_operand_needs_the_whole_gathered_value_is_left_out() -> None:
    def body(x: Any, w: Any) -> Any:
        g = gather(x)
        return g @ w, g @ lax.sort(g, dimension=0).T

    flow, chain = the_chain(body, X, W)
    assert [dot.op for dot in chain.dots] == dots_of(flow)[:1]
    assert chain.handed_out == flow.ops[chain.collective.op].outputs
    assert_right(body, (X, W), lambda g, w: (g @ w, g @ np.sort(g, axis=0).T))


# What travels.


def wire_dtype(flow: Dataflow, chain: AllGatherDot) -> str:
    return str(flow.avals[chain.wire].dtype)


def names_of(flow: Dataflow, blocks: Any) -> list[str]:
    return [flow.ops[block.op].name for block in blocks]


def permuted(outcome: spmd.Outcome, *arguments: Any) -> set[str]:
    """The element types that the rewritten program sends."""
    text = lowered(outcome, *arguments)
    lines = [line for line in text.splitlines() if "collective_permute" in line]
    return {line.rsplit("tensor<", 1)[1].split(">")[0].split("x")[-1] for line in lines}


def test_a_cast_to_a_narrower_type_comes_before_the_wire() -> None:
    def body(x: Any, w: Any) -> Any:
        return (gather(x * 2).astype(jnp.bfloat16) * 2).astype(jnp.float32) @ w

    flow, chain = the_chain(body, X, W)
    assert wire_dtype(flow, chain) == "bfloat16"
    assert names_of(flow, chain.before)[0] == names_of(flow, chain.after)[-1] == "convert_element_type"
    assert permuted(spmd.run_both(body, (X, W)), X, W) == {"bf16"}
    rounded = jnp.asarray(X * 2).astype(jnp.bfloat16).astype(np.float32)
    outcome = spmd.run_both(body, (X, W))
    spmd.assert_as_good(
        outcome, [2 * g @ w for g, w in zip(spmd.all_gather(list(wide(rounded)), 0), W, strict=True)]
    )


def test_integers_that_are_scaled_on_the_way_travel_as_integers() -> None:
    quantized = RNG.integers(-100, 100, (4, 3, 5)).astype(np.int8)

    def body(x: Any, w: Any) -> Any:
        return (gather(x).astype(jnp.float32) * 0.5) @ w

    flow, chain = the_chain(body, quantized, W)
    assert wire_dtype(flow, chain) == "int8" and chain.before == ()
    outcome = assert_right(body, (quantized, W), lambda g, w: (g * 0.5) @ w)
    assert permuted(outcome, quantized, W) == {"i8"}


def test_a_value_that_grows_on_the_way_travels_while_it_is_small() -> None:
    def body(x: Any, w: Any) -> Any:
        g = jnp.tanh(gather(x))
        return jnp.broadcast_to(g[:, None], (g.shape[0], 7, g.shape[1])) @ w

    flow, chain = the_chain(body, X, W)
    assert flow.avals[chain.wire].size == 4 * X[0].size
    assert "broadcast_in_dim" in names_of(flow, chain.after)
    assert_right(body, (X, W), lambda g, w: np.repeat(np.tanh(g)[:, None], 7, 1) @ w)


def by_argument(g: Any, s: Any) -> Any:
    return g * s


def by_index(g: Any, s: Any) -> Any:
    return g * (lax.axis_index("x") + 1).astype(g.dtype)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("scaled", [by_argument, by_index], ids=lambda f: f.__name__)
def test_what_differs_per_device_is_applied_after_the_wire(scaled: Any, check_vma: bool) -> None:
    def body(x: Any, s: Any, w: Any) -> Any:
        return scaled(gather(x), s[0]).astype(jnp.bfloat16).astype(jnp.float32) @ w

    flow, chain = the_chain(body, X, S, W, check_vma=check_vma)
    assert chain.wire == flow.ops[chain.collective.op].outputs[0] and chain.before == ()
    assert "mul" in names_of(flow, chain.after)
    outcome = spmd.run_both(body, (X, S, W), check_vma=check_vma)
    scales = S[:, 0] if scaled is by_argument else np.arange(1, 5, dtype=np.float32)
    reference = [
        np.asarray(jnp.asarray(np.float32(g) * s).astype(jnp.bfloat16), np.float64) @ w
        for g, s, w in zip(GATHERED, scales, wide(W), strict=True)
    ]
    spmd.assert_as_good(outcome, reference)


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_is_the_same_on_every_device_may_come_before_the_wire(check_vma: bool) -> None:
    def body(x: Any, s: Any, w: Any) -> Any:
        total = lax.psum(s[0], "x")
        return (gather(x) * total).astype(jnp.bfloat16).astype(jnp.float32) @ w

    flow, matches = bodies.matched(body, X[0], S[0], W[0], check_vma=check_vma)
    chains = [
        c for m in matches if isinstance(m.found, tuple) for c in m.found if isinstance(c, AllGatherDot)
    ]
    (chain,) = chains
    assert wire_dtype(flow, chain) == "bfloat16" and "mul" in names_of(flow, chain.before)
    outcome = spmd.run_both(body, (X, S, W), check_vma=check_vma)
    total = S.sum(dtype=np.float32)
    reference = [
        np.asarray(jnp.asarray(np.float32(g) * total).astype(jnp.bfloat16), np.float64) @ w
        for g, w in zip(GATHERED, wide(W), strict=True)
    ]
    exact = np.stack(reference)
    np.testing.assert_allclose(outcome.rewritten, exact, rtol=0, atol=1e-2 * np.abs(exact).max())


def test_a_sum_that_is_scattered_again_differs_per_device() -> None:
    def body(x: Any, s: Any, w: Any) -> Any:
        total = lax.psum(s * jnp.arange(1, 5, dtype=s.dtype), "x")
        return (gather(x) * scatter(total)).astype(jnp.bfloat16).astype(jnp.float32) @ w

    for check_vma in (True, False):
        outcome = spmd.run_both(body, (X, S, W), check_vma=check_vma)
        assert any(site.rewritten for site in outcome.report.sites if site.kind == "all_gather_dot")
        scattered = 4 * S.sum(dtype=np.float32) * np.arange(1, 5, dtype=np.float32)
        reference = [
            np.asarray(jnp.asarray(np.float32(g) * s).astype(jnp.bfloat16), np.float64) @ w
            for g, s, w in zip(GATHERED, scattered, wide(W), strict=True)
        ]
        spmd.assert_as_good(outcome, reference)


@pytest.mark.parametrize("extreme", ["max", "min"])
def test_an_extreme_over_the_gathered_dim_keeps_a_nan(extreme: str) -> None:
    """An all_reduce of XLA:CPU does not."""

    def body(x: Any, w: Any) -> Any:
        whole = gather(x)
        return whole @ w, getattr(whole, extreme)(0)

    x = X.copy()
    x[1, 2, 3] = np.nan
    outcome = spmd.run_both(body, (x, W))
    assert [site.kind for site in outcome.report.rewritten] == ["all_gather_dot"]
    wanted = getattr(np.concatenate(list(x)), extreme)(0)
    assert np.isnan(wanted).sum() == 1
    np.testing.assert_array_equal(outcome.rewritten[1], [wanted] * 4)


def test_numbers_that_are_sorted_along_with_what_varies_stay_of_their_type() -> None:
    """By jax's types they are the same on all devices; derivatives of sorts make such numbers."""
    function = spmd.run_both(lambda x, w: jnp.sort(gather(x), 1) @ w, (X, W)).jitted
    ring = overlap.overlap_collectives(
        jax.jit(jax.grad(lambda x, w: (function(x, w) ** 2).sum() / 2)),
        policy="always",
        strict=True,
        hardware="tpu_v5p",
    )
    stacked = [np.sort(GATHERED[0], 1) @ w for w in wide(W)]
    backward = sum(result @ w.T for result, w in zip(stacked, wide(W), strict=True))
    wanted = np.zeros_like(backward)
    np.put_along_axis(wanted, np.argsort(GATHERED[0], 1), backward, 1)
    np.testing.assert_allclose(ring(X, W), np.stack(np.split(wanted, 4)), rtol=0, atol=1e-3)
    assert "It stops at sort" in ring.explain(X, W).sites[0].sentence


def test_values_of_a_weak_type_stay_so() -> None:
    def body(x: Any, w: Any) -> Any:
        mask = (gather(x) > 0) * 1.0
        return (mask @ jnp.where(w > 0, 1.0, -1.0)), mask

    outcome = spmd.run_both(body, (X, W))
    assert [site.rewritten for site in outcome.report.sites] == [True]
    mask = np.concatenate(list(X)) > 0
    np.testing.assert_array_equal(outcome.rewritten[1], [mask] * 4)
    np.testing.assert_array_equal(outcome.rewritten[0], [mask @ np.where(w > 0, 1.0, -1.0) for w in W])


def test_a_sum_over_an_axis_of_a_vmap_too_is_kept() -> None:
    def body(x: Any, w: Any) -> Any:
        return jax.vmap(lambda row: lax.psum(row @ w, ("rows", "x")), axis_name="rows")(x)

    outcome = spmd.run_both(body, (X, W), check_vma=False)
    assert [site.reason for site in outcome.report.sites] == ["unsupported_collective"]
    total = sum(x.sum(0) @ w for x, w in zip(wide(X), wide(W), strict=True))
    spmd.assert_as_good(outcome, [np.broadcast_to(total, (3, 6))] * 4)


@pytest.mark.parametrize("hardware", ["tpu_v5p", "h100"])
def test_a_sum_that_comes_to_vary_over_a_second_axis_too(hardware: str) -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x, w, v = (RNG.normal(size=shape).astype(np.float32) for shape in ((8, 16), (16, 8), (32, 8)))
    specs = (PartitionSpec(None, "x"), PartitionSpec("x"), PartitionSpec(("x", "y")))
    function = jax.jit(
        jax.shard_map(lambda x, w, v: lax.psum(x @ w, "x") @ v, mesh=mesh, in_specs=specs, out_specs=specs[2])
    )
    ring = overlap.overlap_collectives(function, policy="always", hardware=hardware, strict=True)
    assert [site.kind for site in ring.explain(x, w, v).rewritten] == ["dot_psum"]
    blocks = np.split(wide(v), 4)
    wanted = np.concatenate([wide(x) @ wide(w) @ block for block in blocks])
    np.testing.assert_allclose(ring(x, w, v), wanted, rtol=0, atol=1e-4)


def test_a_psum_whose_dot_every_device_computes_alike_is_gathered_before_it() -> None:
    x, w, v = (RNG.normal(size=shape).astype(np.float32) for shape in ((7, 32), (32, 8), (8, 8)))
    specs = (PartitionSpec(None, "x"), PartitionSpec("x"), PartitionSpec())
    function = jax.jit(
        jax.shard_map(
            lambda x, w, v: lax.psum(x @ w, "x") @ v,
            mesh=spmd.mesh_of(4),
            in_specs=specs,
            out_specs=PartitionSpec(),
        )
    )
    ring = overlap.overlap_collectives(function, policy="always", hardware="tpu_v5p", strict=True)
    assert [site.kind for site in ring.explain(x, w, v).rewritten] == ["dot_psum"]
    np.testing.assert_allclose(ring(x, w, v), wide(x) @ wide(w) @ wide(v), rtol=0, atol=1e-4)


# Scatters.


def test_sums_of_dots_before_a_scatter_are_one_chain_with_all_of_them() -> None:
    def body(y: Any, w: Any, z: Any) -> Any:
        return scatter(jnp.einsum("mk,kn->nm", y, w).T + z @ w)

    flow, found = the_match(body, Y, W, Y)
    assert isinstance(found, DotReduceScatter)
    assert [dot.op for dot in found.dots] == dots_of(flow) and len(found.dots) == 2
    outcome = spmd.run_both(body, (Y, W, Y))
    spmd.assert_as_good(
        outcome, spmd.psum_scatter([2 * y @ w for y, w in zip(wide(Y), wide(W), strict=True)], 0)
    )


def test_without_a_dot_before_a_scatter_the_reason_names_the_equation_and_its_line() -> None:
    def body(y: Any, w: Any) -> Any:
        return scatter(lax.sort(y @ w, dimension=0))

    reason = the_reason(body, Y, W)
    assert reason.code is Code.NO_DOT
    assert f"sort, {__file__}:{inspect.getsourcelines(body)[1] + 1} (" in reason.detail


def test_a_scattered_argument_has_no_dot() -> None:
    assert the_reason(lambda y: scatter(y), Y).code is Code.NO_DOT


@pytest.mark.parametrize("used", ["the dot's result", "a value after it"])
def test_a_partial_sum_that_is_used_elsewhere_is_kept(used: str) -> None:
    def body(y: Any, w: Any) -> Any:
        p = y @ w
        return scatter(p), p[:3]

    def body_after(y: Any, w: Any) -> Any:
        p = jnp.reshape(y @ w, (12, 2, 3))
        return scatter(p), p[:3]

    chosen = body if used == "the dot's result" else body_after
    reason = the_reason(chosen, Y, W)
    if chosen is body:
        assert reason.code is Code.PARTIAL_SUM_ESCAPES
    else:
        assert reason.code in (Code.PARTIAL_SUM_ESCAPES, Code.NO_DOT)
    outcome = spmd.run_both(chosen, (Y, W))
    partials = [y @ w for y, w in zip(wide(Y), wide(W), strict=True)]
    for got, wanted in zip(
        outcome.rewritten, (spmd.psum_scatter(partials, 0), [p[:3] for p in partials]), strict=True
    ):
        np.testing.assert_allclose(got, np.stack(wanted).reshape(got.shape), atol=1e-4)


# What is kept as it is.


# XLA refuses a shard_map all of whose arguments are empty: each program that runs has one more.
ONES = np.ones((4, 6), np.float32)


@pytest.mark.parametrize("shapes", [((0, 5), (5, 6)), ((3, 0), (0, 6))], ids=str)
def test_gathers_of_nothing_are_kept(shapes: Any) -> None:
    x, w = (np.ones((4, *shape), np.float32) for shape in shapes)

    def body(x: Any, w: Any, one: Any) -> Any:
        return gather(x) @ w + one

    assert the_reason(body, x, w, ONES).code is Code.EMPTY
    if x.shape[1]:  # XLA itself refuses to gather along an empty dim
        outcome = spmd.run_both(body, (x, w, ONES))
        np.testing.assert_array_equal(outcome.rewritten, np.ones((4, 12, 6)))


def test_dots_of_nothing_are_kept() -> None:
    empty = np.ones((4, 5, 0), np.float32)
    assert the_reason(lambda x, w: gather(x) @ w, X, empty).code is Code.EMPTY
    lhs, rhs = np.ones((4, 12, 0), np.float32), np.ones((4, 0, 6), np.float32)

    def body(y: Any, w: Any, one: Any) -> Any:
        return scatter(y @ w) + one

    assert the_reason(body, lhs, rhs, ONES).code is Code.EMPTY
    np.testing.assert_array_equal(spmd.run_both(body, (lhs, rhs, ONES)).rewritten, np.ones((4, 3, 6)))


def test_a_boolean_gather_is_kept_until_it_is_a_number() -> None:
    mask = RNG.integers(0, 2, (4, 3, 5)).astype(bool)

    def body(x: Any, w: Any) -> Any:
        return gather(x).astype(jnp.float32) @ w

    outcome = assert_right(body, (mask, W), lambda g, w: g @ w)
    assert len(outcome.report.sites) == 1


def test_weights_that_are_gathered_together_may_be_unpacked() -> None:
    """As ``k, v = all_gather(kv)``: with jax 0.12 an operation of its own."""

    def body(x: Any, pair: Any) -> Any:
        a, b = lax.all_gather(pair, "x", axis=1, tiled=True)
        return jnp.tanh(x @ a) * (x @ b)

    x, pair = RNG.normal(size=(4, 3, 8)), RNG.normal(size=(4, 2, 2, 5))
    arguments = (x.astype(np.float32), pair.astype(np.float32))

    def exact(x: Any, whole: Any) -> Any:
        return np.tanh(x @ whole[0]) * (x @ whole[1])

    outcome = spmd.run_both(body, arguments)
    (site,) = outcome.report.sites
    assert site.rewritten and len(site.dots) == 2
    whole = np.concatenate(wide(arguments[1]), axis=1)
    spmd.assert_as_good(outcome, [exact(each, whole) for each in wide(arguments[0])])


def test_a_dot_with_a_number_is_priced_like_any_other() -> None:
    """The number is no value of the program, but written into it."""

    def body(x: Any) -> Any:
        return lax.dot_general(2.0, gather(x), (((), ()), ((), ())), preferred_element_type=jnp.float32)

    x = RNG.normal(size=(4, 3, 8)).astype(np.float32)
    outcome = spmd.run_both(body, (x,), policy="auto", hardware="tpu_v5p")
    (site,) = outcome.report.sites
    assert site.estimate is not None, "it is priced"
    spmd.assert_as_good(outcome, [2 * np.concatenate(wide(x))] * 4)


def explicit_program() -> tuple[Any, tuple[Any, ...], Any]:
    """A gather over a manual axis of a value whose type is sharded over another axis, an Explicit one."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Explicit))
    x = RNG.normal(size=(12, 4)).astype(np.float32)
    w = RNG.normal(size=(4, 6)).astype(np.float32)
    placed = (
        jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "y"))),
        jax.device_put(w, NamedSharding(mesh, PartitionSpec())),
    )

    def body(x: Any, w: Any) -> Any:
        numbers = (((1,), (0,)), ((), ()))
        return lax.dot_general(gather(x), w, numbers, out_sharding=PartitionSpec(None, None))

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        axis_names={"x"},
        in_specs=(PartitionSpec("x"), PartitionSpec()),
        out_specs=PartitionSpec("x"),
    )
    return jax.jit(mapped), placed, (mesh, np.tile(wide(x) @ w, (4, 1)))


def test_values_that_are_also_sharded_over_an_explicit_axis_are_kept() -> None:
    jitted, arguments, (mesh, exact) = explicit_program()
    with jax.set_mesh(mesh):
        (found,) = (m.found for m in passes.match(bodies.mapped_body(jax.make_jaxpr(jitted)(*arguments))))
        assert isinstance(found, Reason) and found.code is Code.EXPLICIT_SHARDING
        overlapped = overlap.overlap_collectives(jitted, policy="always", strict=True, hardware="tpu_v5p")
        (site,) = overlapped.explain(*arguments).sites
        assert not site.rewritten and site.reason == "explicit_sharding"
        assert (site.operand, site.result) == ("f32[3,4]", "f32[12,4]"), "all of each type, for people"
        np.testing.assert_allclose(overlapped(*arguments), exact, atol=1e-4)


def gather_to_invariant(x: Any) -> Any:
    """A gather whose result is, by its type, the same on every device."""
    return lax.all_gather(x, "x", axis=0, tiled=True, to="invarying")


def test_a_gather_to_an_invariant_value_is_reported_and_gives_the_same() -> None:
    w = W[0]
    mapped = jax.shard_map(
        lambda x: gather_to_invariant(x) @ w,
        mesh=spmd.mesh_of(4),
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec(),
    )
    x = X.reshape(12, 5)
    (match,) = passes.match(bodies.mapped_body(jax.make_jaxpr(mapped)(x)))
    assert match.collective.kind == "all_gather"
    overlapped = overlap.overlap_collectives(jax.jit(mapped), policy="always", strict=True)
    np.testing.assert_allclose(overlapped(x), wide(x) @ w, atol=1e-4)
    (site,) = overlapped.explain(x).sites
    assert site.axis == "x" and site.axis_size == 4 and not site.rewritten


@custom_vmap
def opaque(x: Any, w: Any) -> Any:
    return gather(x) @ w


opaque.def_vmap(lambda size, batched, x, w: (jax.vmap(opaque.fun, batched)(x, w), True))  # type: ignore[untyped-decorator]


def test_collectives_inside_calls_whose_body_cannot_be_replaced_are_reported_and_kept() -> None:
    def body(x: Any, w: Any) -> Any:
        return opaque(x, w) + lax.scan(lambda c, _: (opaque(x, w), None), jnp.zeros((12, 6)), length=2)[0]

    outcome = assert_right(body, (X, W), lambda g, w: 2 * (g @ w), check_vma=False)
    assert outcome.report.sites
    assert {(site.reason, site.rewritten, site.kind) for site in outcome.report.sites} == {
        ("opaque_call", False, "all_gather")
    }
    assert all("custom_vmap_call" in site.path for site in outcome.report.sites)


def test_every_collective_is_matched_in_program_order() -> None:
    def body(x: Any, w: Any) -> Any:
        y = lax.psum(gather(x) @ w, "x")
        return lax.all_to_all(scatter(y), "x", 1, 0, tiled=True)

    wide = RNG.normal(size=(4, 5, 8)).astype(np.float32)
    flow, matches = bodies.matched(body, X[0], wide[0])
    assert [m.collective.kind for m in matches] == ["all_gather", "psum", "reduce_scatter", "all_to_all"]
    ops = [m.collective.op for m in matches]
    assert ops == sorted(ops) and len({m.collective.op for m in matches}) == 4
    assert {m.collective.axes for m in matches} == {("x",)} and {m.collective.axis_size for m in matches} == {
        4
    }
    assert dataflow(bodies.shard_body(body, X[0], wide[0])).ops[ops[0]].source == flow.ops[ops[0]].source


def residual_sums(layers: int) -> Callable[..., Any]:
    def body(x: Any, w: Any, v: Any) -> Any:
        for _ in range(layers):
            x = x + lax.psum(jnp.tanh(x @ w) @ v, "x")
        return x

    return body


def test_each_sum_of_a_residual_stream_is_followed_to_the_next_one_only() -> None:
    square = np.zeros((8, 8), np.float32)

    def followed(layers: int) -> int:
        with mock.patch("passes.gather_match.blockwise", wraps=blocks.blockwise) as blockwise:
            bodies.matched(residual_sums(layers), square, square, square)
        return int(blockwise.call_count)

    assert followed(12) - followed(8) == followed(8) - followed(4) > 0


def test_what_is_no_jaxpr_is_refused() -> None:
    for other in (3, None, jnp.sin):
        with pytest.raises(TypeError, match=f"takes a jaxpr, .* not {type(other).__name__}"):
            passes.match(other)
