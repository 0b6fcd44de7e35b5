"""Branches and loops that run on some devices of the mesh only hold no rings, and others do."""

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

RNG = np.random.default_rng(7)
X = RNG.normal(size=(4, 3, 5))  # per device of x=2, y=2
W = RNG.normal(size=(4, 5, 5))
PER_DEVICE = P(("x", "y"))


def gather(x: Any, axes: Any = "x", **options: Any) -> Any:
    return lax.all_gather(x, axes, axis=0, tiled=True, **options)


def reasons(body: Callable[..., Any], flag: Any = 0.0, *, check_vma: bool = False) -> set[str]:
    """What is decided of the gathers of a per-device function of x, w and a flag, the same on all devices.

    Its results are those of the original.
    """
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    function = jax.jit(
        jax.shard_map(
            lambda x, w, flag: body(x[0], w[0], flag)[None],
            mesh=mesh,
            in_specs=(PER_DEVICE, PER_DEVICE, P()),
            out_specs=PER_DEVICE,
            check_vma=check_vma,
        )
    )
    ring = overlap_collectives(function, policy="always", strict=True, hardware="tpu_v5p")
    arguments = (X.astype(np.float32), W.astype(np.float32), np.float32(flag))
    np.testing.assert_allclose(ring(*arguments), function(*arguments), rtol=1e-4, atol=1e-4)
    return {site.reason for site in ring.explain(*arguments).sites if site.kind.startswith("all_gather")}


def either(predicate: Any, x: Any, w: Any, axes: Any = "x", **options: Any) -> Any:
    size = 4 if axes == ("x", "y") else 2
    return lax.cond(
        predicate,
        lambda x, w: gather(x, axes, **options) @ w,
        lambda x, w: jnp.tile(x @ w, (size, 1)),
        x,
        w,
    )


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_branch_that_is_taken_along_part_of_another_axis(check_vma: bool) -> None:
    def body(x: Any, w: Any, flag: Any) -> Any:
        return either(lax.axis_index("y") == 0, x, w)

    assert reasons(body, check_vma=check_vma) == {"devices_apart"}


def test_what_is_further_in_such_a_branch() -> None:
    def body(x: Any, w: Any, flag: Any) -> Any:
        def layers(x: Any) -> Any:
            return lax.scan(lambda c, _: (jax.checkpoint(gather)(c)[:3] @ w, None), x, length=2)[0]

        return lax.cond(lax.axis_index("y") == 0, layers, lambda x: x, x)

    assert reasons(body) == {"devices_apart"}


def test_a_loop_that_iterates_more_often_along_another_axis() -> None:
    def body(x: Any, w: Any, flag: Any) -> Any:
        return lax.fori_loop(0, lax.axis_index("y") + 1, lambda _, c: jnp.tanh(gather(c) @ w)[:3], x)

    assert reasons(body) == {"devices_apart"}


def test_groups_that_go_ways_of_their_own() -> None:
    groups = [[0, 1], [2, 3]]

    def body(x: Any, w: Any, flag: Any) -> Any:
        first = lax.axis_index(("x", "y")) < 2
        return lax.cond(
            first,
            lambda x, w: gather(x, ("x", "y"), axis_index_groups=groups) @ w,
            lambda x, w: jnp.tile(x @ w, (2, 1)),
            x,
            w,
        )

    assert reasons(body) == {"devices_apart"}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize(
    "predicate",
    [
        lambda x, flag: flag > 0,
        lambda x, flag: lax.psum(x.sum(), ("x", "y")) > flag,
        lambda x, flag: jnp.isfinite(lax.pmean(lax.pmean(x, "x"), "y")).all(),
    ],
    ids=["argument", "psum", "pmean"],
)
def test_a_branch_that_all_devices_take_alike(predicate: Any, check_vma: bool) -> None:
    def body(x: Any, w: Any, flag: Any) -> Any:
        return either(predicate(x, flag), x, w)

    assert reasons(body, 1.0, check_vma=check_vma) == {"policy_always"}


def test_a_collective_among_all_devices_finds_them_together() -> None:
    def body(x: Any, w: Any, flag: Any) -> Any:
        return either(lax.psum(x.sum(), ("x", "y")) < 1e9 * (1 + lax.axis_index("y")), x, w, ("x", "y"))

    assert reasons(body) == {"policy_always"}


def test_a_loop_whose_state_is_the_same_everywhere() -> None:
    def body(x: Any, w: Any, flag: Any) -> Any:
        def step(state: Any) -> Any:
            number, c = state
            return number + 1, jnp.tanh(gather(c) @ w)[:3]

        return lax.while_loop(lambda state: state[0] < flag, step, (0.0, x))[1]

    assert reasons(body, 2.0) == {"policy_always"}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", ["x", ("x", "y")])
def test_a_function_decorated_inside_shard_map_cannot_see_the_branch_around_it(
    axes: Any, check_vma: bool
) -> None:
    """All devices come to what runs over the whole mesh, whatever stands around it."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    size = 4 if axes == ("x", "y") else 2
    together = jax.jit(lambda x, w: gather(x, axes) @ w)

    def mapped(run: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            alone = jax.jit(lambda x, w: jnp.tile(x @ w, (size, 1)))
            chosen = lax.axis_index("y") == 0 if size == 2 else lax.psum(1.0, ("x", "y")) > 0
            return lax.cond(chosen, run, alone, x[0], w[0])[None]

        return jax.jit(
            jax.shard_map(
                body, mesh=mesh, in_specs=(PER_DEVICE,) * 2, out_specs=PER_DEVICE, check_vma=check_vma
            )
        )

    x, w = X.astype(np.float32), W.astype(np.float32)
    ring = overlap_collectives(together, policy="always", strict=True, hardware="tpu_v5p")
    assert ("ppermute" in str(jax.make_jaxpr(mapped(ring))(x, w))) == (size == 4)
    np.testing.assert_allclose(mapped(ring)(x, w), mapped(together)(x, w), rtol=1e-4, atol=1e-4)


def test_within_a_function_that_is_mapped_from_outside() -> None:
    """Nothing is known there of the arguments."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    branch = overlap_collectives(jax.jit(either), policy="always", strict=True, hardware="tpu_v5p")

    def mapped(run: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return run(lax.axis_index("y") == 0, x[0], w[0])[None]

        return jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=(PER_DEVICE,) * 2, out_specs=PER_DEVICE, check_vma=False)
        )

    x, w = X.astype(np.float32), W.astype(np.float32)
    assert "ppermute" not in str(jax.make_jaxpr(mapped(branch))(x, w))
    np.testing.assert_allclose(mapped(branch)(x, w), mapped(either)(x, w), rtol=1e-4, atol=1e-4)
