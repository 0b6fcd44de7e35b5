"""Heads of a weight that is gathered, or of its gradient that is scattered: one dim, for a ring on a TPU."""

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
from passes.flattened import flattened, flattenings
from passes.graph import dataflow
from tests.passes import bodies, spmd
from tests.passes.ring_patterns import gather, per_device, scatter

RNG = np.random.default_rng(20261129)
DEVICES = 4


def shards(*shape: int) -> Any:
    return jnp.asarray(RNG.normal(size=(DEVICES, *shape)), jnp.float32)


def projection(x: Any, w: Any) -> Any:
    return jnp.einsum("bsd,dhk->bshk", x, gather(w, 0))


def cast_behind(x: Any, w: Any) -> Any:
    return jnp.einsum("bsd,dhk->bshk", x, -gather(w, 0).astype(jnp.float32) * 2)


def with_its_gradient(x: Any, w: Any) -> Any:
    """The weight is contracted along its heads as well, and somebody wants it as it is."""
    whole = gather(w, 0)
    y = jnp.einsum("bsd,dhk->bshk", x, whole)
    return jnp.einsum("bshk,dhk->bsd", y, whole) + whole.sum((1, 2))


def heads_first(x: Any, w: Any) -> Any:
    return jnp.einsum("hkd,bsd->hkbs", gather(w, 2), x)


def of_gradient(x: Any, y: Any) -> Any:
    return scatter(jnp.transpose(jnp.einsum("bshk,bsd->hkd", y, x), (2, 0, 1)), 0)


def of_output(x: Any, y: Any) -> Any:
    return scatter(3 * jnp.einsum("bsd,bshk->dhk", x, y).transpose(1, 2, 0), 2)


def heads_apart(x: Any, y: Any) -> Any:
    """The heads come out on either side of what is scattered: nothing to make one."""
    return scatter(jnp.einsum("bshk,bsd->hkd", y, x).transpose(0, 2, 1), 1)


def of_both(x: Any, y: Any) -> Any:
    """Heads of one operand, and width of the other."""
    return scatter(jnp.einsum("bsd,bshk->dhk", x, y).transpose(1, 0, 2), 0)


G = np.ndarray


def gathered(f: Callable[..., Any], dim: int = 0) -> Callable[..., Any]:
    """The reference of a body that gathers its second argument."""
    return lambda x, w: per_device(f, x, spmd.all_gather(w, dim))


def scattered(f: Callable[..., Any], dim: int) -> Callable[..., Any]:
    return lambda x, y: spmd.psum_scatter(per_device(f, x, y), dim)


def np_with_its_gradient(x: G, w: G) -> G:
    y = np.einsum("bsd,dhk->bshk", x, w)
    return np.einsum("bshk,dhk->bsd", y, w) + w.sum((1, 2))


X, W, Y = (2, 3, 8), (2, 2, 4), (2, 3, 2, 4)

CASES: dict[str, tuple[Callable[..., Any], Any, Callable[..., Any], int]] = {
    "projection": (projection, (X, W), gathered(lambda x, w: np.einsum("bsd,dhk->bshk", x, w)), 1),
    "cast_behind": (cast_behind, (X, W), gathered(lambda x, w: np.einsum("bsd,dhk->bshk", x, -2 * w)), 1),
    "with_its_gradient": (with_its_gradient, (X, W), gathered(np_with_its_gradient), 1),
    "heads_first": (
        heads_first,
        (X, (2, 4, 2)),
        gathered(lambda x, w: np.einsum("hkd,bsd->hkbs", w, x), 2),
        1,
    ),
    "of_gradient": (of_gradient, (X, Y), scattered(lambda x, y: np.einsum("bshk,bsd->dhk", y, x), 0), 1),
    "of_output": (of_output, (X, Y), scattered(lambda x, y: 3 * np.einsum("bsd,bshk->hkd", x, y), 2), 1),
    "heads_apart": (
        heads_apart,
        (X, (2, 3, 4, 4)),
        scattered(lambda x, y: np.einsum("bshk,bsd->hdk", y, x), 1),
        0,
    ),
    "of_both": (
        of_both,
        (X, (2, 3, 4, 4)),
        scattered(lambda x, y: np.einsum("bsd,bshk->hdk", x, y), 0),
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rewritten_equals_the_reference(name: str) -> None:
    body, shapes, reference, _ = CASES[name]
    arguments = [shards(*shape) for shape in shapes]
    outcome = spmd.run_both(body, arguments)
    assert outcome.report.rewritten
    per_shard = [list(np.asarray(a, np.float64)) for a in arguments]
    spmd.assert_as_good(outcome, reference(*per_shard))


def dots_of(body: Callable[..., Any], shapes: Any, hardware: str) -> set[tuple[int, int]]:
    """The ranks of the operands of all dots in the rewritten program."""
    arguments = [shards(*shape) for shape in shapes]
    outcome = spmd.run_both(body, arguments, hardware=hardware)
    jaxpr = jax.make_jaxpr(outcome.overlapped)(*arguments)
    dots = [eqn for eqn in bodies.equations(jaxpr) if eqn.primitive.name == "dot_general"]
    return {(len(eqn.invars[0].aval.shape), len(eqn.invars[1].aval.shape)) for eqn in dots}


def test_rings_are_of_dots_with_the_dims_as_one_on_tpus_alone() -> None:
    assert dots_of(projection, (X, W), "tpu_v5e") == {(3, 2)}
    assert dots_of(projection, (X, W), "h100") == {(3, 3)}
    assert dots_of(of_gradient, (X, Y), "tpu_v5e") == {(3, 3)}


def test_reports_tell_the_shapes_that_were_written() -> None:
    (site,) = spmd.run_both(projection, [shards(*X), shards(*W)], hardware="tpu_v5e").report.sites
    assert (site.operand, site.result) == ("f32[2,2,4]", "f32[8,2,4]")
    assert site.dots[0].startswith("f32[2,3,8] · f32[8,2,4] at ")


def flow_of(body: Callable[..., Any], shapes: Any) -> Any:
    """The graph of a body on one device's shards."""
    arguments = [jax.ShapeDtypeStruct((DEVICES, *shape), jnp.float32) for shape in shapes]
    jitted = spmd.run_both(body, [jnp.zeros(a.shape) for a in arguments]).jitted
    (mapped,) = (
        e for e in bodies.equations(jitted.trace(*arguments).jaxpr) if e.primitive.name == "shard_map"
    )
    return dataflow(mapped.params["jaxpr"])


@pytest.mark.parametrize("name", CASES)
def test_what_can_be_flattened_is_found(name: str) -> None:
    body, shapes, _, count = CASES[name]
    flow = flow_of(body, shapes)
    found = flattenings(flow)
    assert len(found) == count
    written = flattened(flow, found)
    assert written.outputs == flow.outputs and written.inputs == flow.inputs
    assert len(written.ops) > len(flow.ops) if found else written.ops == flow.ops


@pytest.mark.parametrize(("heads", "width", "count"), [(2, 1024, 0), (8, 1024, 1), (2, 1023, 1)])
def test_a_few_wide_arrays_in_one_stay_apart(heads: int, width: int, count: int) -> None:
    """Such as a gate and what it gates."""
    assert len(flattenings(flow_of(projection, (X, (2, heads, width))))) == count


def test_what_is_no_ring_stays_as_it_was_written() -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        return projection(x, w).sum() + lax.psum(x @ v, "x")

    def only_the_psum(site: Any) -> bool:
        return site.kind == "dot_psum"

    arguments = [shards(*X), shards(*W), shards(8, 4)]
    outcome = spmd.run_both(body, arguments, policy=only_the_psum, hardware="tpu_v5e")
    assert [site.kind for site in outcome.report.rewritten] == ["dot_psum"]
    gathers = [
        eqn
        for eqn in bodies.equations(jax.make_jaxpr(outcome.overlapped)(*arguments))
        if eqn.primitive.name.startswith("all_gather") and eqn.invars[0].aval.shape == W
    ]
    assert len(gathers) == 1


@pytest.mark.parametrize("out_sharding", [False, True])
def test_beside_an_explicit_axis(out_sharding: bool) -> None:
    """A type there has an entry for each of its dims: one of another rank is refused."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)

    def body(x: Any, w: Any) -> Any:
        whole = lax.all_gather(w, "x", axis=0, tiled=True)
        asked = P(None, None, None) if out_sharding else None
        return jnp.einsum("sd,dnh->snh", x, whole, out_sharding=asked)

    step = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"), axis_names={"x"})
    )
    with jax.set_mesh(mesh):
        x, w = (
            jax.device_put(RNG.normal(size=shape).astype(np.float32), jax.NamedSharding(mesh, P("x")))
            for shape in ((4, 16), (16, 8, 6))
        )
        decorated = overlap_collectives(step, policy="always", hardware="tpu_v5p", strict=True)
        assert decorated.explain(x, w).rewritten
        np.testing.assert_allclose(decorated(x, w), step(x, w), rtol=1e-5, atol=1e-5)
