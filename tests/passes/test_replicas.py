"""What is the same on several devices stays so to the last bit; the axes along which values are the same."""

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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from overlap import overlap_collectives
from tests.passes import spmd

RNG = np.random.default_rng(3)
X = RNG.normal(size=(8, 64)).astype(np.float32)
W = RNG.normal(size=(64, 64)).astype(np.float32)
X_SPEC, W_SPEC, WHOLE = P(None, "x"), P("x"), P()


def contracted(x: Any, w: Any) -> Any:
    """The gathered dim is added up."""
    return x @ lax.all_gather(w, "x", axis=0, tiled=True)


def mapped(
    body: Callable[..., Any], *specs: P, out: Any = WHOLE, check_vma: bool = False, axis_size: int = 4
) -> Any:
    mesh = spmd.mesh_of(axis_size)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma))


def decided(function: Any, *arguments: Any) -> list[tuple[str, bool, str]]:
    sites = overlap_collectives(function, policy="always", hardware="tpu_v5p", strict=True).explain(
        *arguments
    )
    return [(site.kind, site.rewritten, site.reason) for site in sites.sites]


def copies_differ(function: Any, *arguments: Any) -> bool:
    result = overlap_collectives(function, policy="always", hardware="tpu_v5p", strict=True)(*arguments)
    first, *others = (np.asarray(shard.data) for shard in result.addressable_shards)
    return any((other != first).any() for other in others)


def test_a_sum_that_every_device_computes_alike_is_kept() -> None:
    function = mapped(contracted, WHOLE, W_SPEC)
    assert decided(function, X, W) == [("all_gather", False, "replicated")]
    assert not copies_differ(function, X, W)


def test_one_that_differs_per_device_is_rewritten() -> None:
    function = mapped(lambda x, w: contracted(x[0], w)[None], P("x"), W_SPEC, out=P("x"))
    assert decided(function, np.stack([X] * 4), W) == [("all_gather_dot", True, "policy_always")]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("spec", [P(), P("x")], ids=["replicated", "sharded"])
def test_a_function_decorated_inside_shard_map_goes_by_its_types(spec: P, check_vma: bool) -> None:
    """Without types that tell, any argument may be the same on all devices, also where it is not."""
    inside = overlap_collectives(jax.jit(contracted), policy="always", strict=True, hardware="tpu_v5p")
    function = mapped(lambda x, w: inside(x, w)[None], spec, W_SPEC, out=P("x"), check_vma=check_vma)
    made = np.asarray(function(X, W))
    rows = np.asarray(X, np.float64).reshape(-1 if spec else 1, 2 if spec else 8, 64) @ W.astype(np.float64)
    np.testing.assert_allclose(made, np.broadcast_to(rows, made.shape), rtol=1e-4, atol=1e-3)
    assert spec == P("x") or (made == made[0]).all()
    rewritten = "ppermute" in str(jax.make_jaxpr(function)(X, W))
    assert rewritten == (spec == P("x") and check_vma)


def test_the_other_dots_of_a_gather_are_rewritten_and_that_one_reads_the_whole() -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        whole = lax.all_gather(w, "x", axis=0, tiled=True)
        return x @ whole, v[0] @ whole

    function = mapped(body, WHOLE, W_SPEC, P("x"), out=(WHOLE, P("x")))
    v = RNG.normal(size=(4, 8, 64)).astype(np.float32)
    assert decided(function, X, W, v) == [("all_gather_dot", True, "policy_always")]
    same, other = overlap_collectives(function, policy="always", hardware="tpu_v5p", strict=True)(X, W, v)
    first, second = (np.asarray(shard.data) for shard in same.addressable_shards[:2])
    np.testing.assert_array_equal(first, second)
    wide = W.astype(np.float64)
    np.testing.assert_allclose(same, X @ wide, rtol=0, atol=1e-4)
    np.testing.assert_allclose(other, np.concatenate(v) @ wide, rtol=0, atol=1e-4)


def test_a_block_that_every_device_multiplies_is_multiplied_in_equal_pieces() -> None:
    """Half way round, what is furthest away comes in halves: its products were not those of a whole."""

    def body(x: Any, w: Any) -> Any:
        return lax.all_gather(x, "x", axis=0, tiled=True) @ w

    x, w = RNG.normal(size=(24, 64)).astype(np.float32), W[:, :8]
    with spmd.only_directions(2):
        alike = mapped(body, P("x"), WHOLE, axis_size=8)
        assert decided(alike, x, w) == [("all_gather_dot", True, "policy_always")]
        assert not copies_differ(alike, x, w)


def test_a_psum_that_a_replicated_dot_contracts_is_gathered_before_it() -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        return lax.psum(x @ w, "x").T @ v

    v = RNG.normal(size=(8, 16)).astype(np.float32)
    for check_vma in (False, True):
        function = mapped(body, X_SPEC, W_SPEC, WHOLE, check_vma=check_vma)
        assert decided(function, X, W, v) == [("dot_psum", True, "policy_always")]
        assert not copies_differ(function, X, W, v)
        result = overlap_collectives(function, policy="always", hardware="tpu_v5p", strict=True)(X, W, v)
        np.testing.assert_allclose(result, (X @ W.astype(np.float64)).T @ v, rtol=0, atol=1e-3)


@pytest.mark.parametrize("check_vma", [False, True])
def test_in_a_loop_that_goes_on_until_nothing_changes(check_vma: bool) -> None:
    """Were the copies to differ, some devices would stop, and the others wait for their shards."""

    def body(x: Any, w: Any) -> Any:
        def go_on(state: Any) -> Any:
            return state[1]

        def step(state: Any) -> Any:
            new = jnp.tanh(contracted(state[0], w))
            return new, jnp.abs(new - state[0]).max() > 1e-7

        start = lax.pcast(x, "x", to="varying") if check_vma else x
        found = lax.while_loop(go_on, step, (start, jnp.abs(start).max() > 0))[0]
        return lax.psum(found, "x") / 4 if check_vma else found

    function = mapped(body, WHOLE, W_SPEC, check_vma=check_vma)
    reasons = [reason for kind, _, reason in decided(function, X, 0.01 * W) if kind == "all_gather"]
    assert reasons == ["replicated"]


def test_what_a_loop_carries_differs_if_an_iteration_makes_it_so() -> None:
    def body(x: Any, w: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            return contracted(carry, w) + x[0], None

        return lax.scan(step, jnp.zeros_like(x[0]), None, length=3)[0][None]

    function = mapped(body, P("x"), W_SPEC, out=P("x"))
    assert decided(function, np.stack([X] * 4), W) == [("all_gather_dot", True, "policy_always")]

    def alike(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, _: (contracted(c, w) + x, None), jnp.zeros_like(x), None, length=3)[0]

    assert decided(mapped(alike, WHOLE, W_SPEC), X, W) == [("all_gather", False, "replicated")]


def test_a_loop_whose_condition_is_such_a_sum() -> None:
    def body(x: Any, w: Any) -> Any:
        def go_on(state: Any) -> Any:
            return jnp.abs(contracted(state, w)).max() > 1e-3

        return lax.while_loop(go_on, lambda state: state / 2, x)

    assert decided(mapped(body, WHOLE, W_SPEC), X, W) == [("all_gather", False, "replicated")]


def test_what_a_scan_reads_stays_the_same_whatever_it_gives() -> None:
    def body(x: Any, w: Any) -> Any:
        def step(count: Any, x: Any) -> Any:
            y = contracted(x, w)
            return count + 1, (y + lax.axis_index("x"), y)

        return lax.scan(step, 0, jnp.stack([x, 2 * x]))[1][1]

    function = mapped(body, WHOLE, W_SPEC)
    assert decided(function, X, W) == [("all_gather", False, "replicated")]
    assert not copies_differ(function, X, W)


def scanned(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.tanh(contracted(c, w)), None), x, length=2)[0]


def printed(x: Any, w: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        jax.debug.print("{}", c[0, 0])
        return jnp.tanh(contracted(c, w)), None

    return lax.scan(step, x, length=2)[0]


def looped(x: Any, w: Any) -> Any:
    return lax.while_loop(lambda s: s[0].max() > 0.1, lambda s: (s[0] / 2, -s[1]), (x, w))[0]


def chosen(x: Any, w: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda x: scanned(x, w), lambda x: -x, x)


@jax.custom_jvp
def derived(x: Any, w: Any) -> Any:
    return scanned(x, w)


derived.defjvp(lambda primals, tangents: jax.jvp(scanned, primals, tangents))


def largest(x: Any, w: Any) -> Any:
    return lax.pmax(x * w[0], "x")


@pytest.mark.parametrize("made", [scanned, printed, looped, chosen, derived, largest])
def test_what_is_the_same_behind_loops_and_calls_that_also_read_what_is_not(made: Any) -> None:
    function = mapped(lambda x, w: contracted(made(x, w), w), WHOLE, W_SPEC)
    assert {reason for _, _, reason in decided(function, X, W)} == {"replicated"}
    assert not copies_differ(function, X, W)


def test_what_a_loop_that_ends_sooner_on_some_devices_gives_is_not_the_same() -> None:
    def body(x: Any, w: Any) -> Any:
        def go_on(state: Any) -> Any:
            return state.max() > 0.1 * (1 + lax.axis_index("x"))

        return contracted(lax.while_loop(go_on, lambda s: s / 2, x), w)[None]

    assert decided(mapped(body, WHOLE, W_SPEC, out=P("x")), X, W) == [
        ("all_gather_dot", True, "policy_always")
    ]


def test_groups_of_unequal_size_make_different_sums_of_the_same_value() -> None:
    """A factor made of such sums may not be applied before a gather."""
    rows, factor = RNG.normal(size=(4, 3, 6)), np.array([1.0, 3.0, 3.0, 3.0])

    def body(x: Any, w: Any) -> Any:
        sums = lax.psum(jnp.arange(6.0), "x", axis_index_groups=[[0], [1, 2, 3]])
        return ((lax.all_gather(x[0], "x", axis=0, tiled=True) * sums) @ w[0])[None]

    function = mapped(body, P("x"), P("x"), out=P("x"))
    x, w = (np.asarray(a, np.float32) for a in (rows, RNG.normal(size=(4, 6, 5))))
    kinds = [kind for kind, rewritten, _ in decided(function, x, w) if rewritten]
    assert kinds == ["all_gather_dot"]
    result = overlap_collectives(function, policy="always", hardware="tpu_v5p", strict=True)(x, w)
    gathered = np.concatenate(list(x.astype(np.float64)))
    expected = [gathered * (f * np.arange(6)) @ v for f, v in zip(factor, w, strict=True)]
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4)


def test_one_axis_of_two_along_which_it_is_the_same_is_enough() -> None:
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def body(x: Any, w: Any) -> Any:
        return x[0] @ lax.all_gather(w, ("x", "y"), axis=0, tiled=True)

    for spec, reason in ((P("y"), "replicated"), (P(("x", "y")), "policy_always")):
        function = jax.jit(
            jax.shard_map(
                lambda x, w: body(x, w)[None],
                mesh=mesh,
                in_specs=(spec, P(("x", "y"))),
                out_specs=spec,
                check_vma=False,
            )
        )
        copies = np.stack([X] * (2 if spec == P("y") else 4))
        ((_, _, found),) = decided(function, copies, W)
        assert found == reason
