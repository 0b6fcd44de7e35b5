"""Weights' gradients: found, and on CPU devices left out of gathers' rings and held back behind a scatter's.

On TPUs they run before it.
"""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cost_model import Hardware, by_name
from overlap import overlap_collectives
from passes.chains import Chain
from passes.collective import Collective
from passes.graph import Dataflow, dataflow
from passes.match import match_dataflow
from passes.weight_gradients import held_back, run_first, weight_gradients
from tests.passes import bodies, spmd

ROWS, WIDTH, HIDDEN = 4, 6, 10
CPU = dataclasses.replace(by_name("cpu"), overlaps=True)


def mlp(x: Any, up: Any, down: Any) -> Any:
    hidden = jax.nn.relu(lax.all_gather(x, "x", axis=0, tiled=True) @ up)
    y = lax.psum_scatter(hidden @ down, "x", scatter_dimension=0, tiled=True)
    return jnp.mean(y * y)[None]


def step(devices: int) -> Any:
    specs = (P("x"), P(None, "x"), P("x"))
    mapped = jax.shard_map(mlp, mesh=spmd.mesh_of(devices), in_specs=specs, out_specs=P("x"))
    return jax.jit(jax.value_and_grad(lambda *given: jnp.sum(mapped(*given)), argnums=(0, 1, 2)))


def arguments(devices: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = ((ROWS * devices, WIDTH), (WIDTH, HIDDEN * devices), (HIDDEN * devices, WIDTH))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def backward(devices: int = 2) -> Any:
    """The body of the backward pass."""
    jaxpr = jax.make_jaxpr(step(devices))(*arguments(devices))
    found = [eqn.params["jaxpr"] for eqn in bodies.equations(jaxpr) if eqn.primitive.name == "shard_map"]
    return found[-1]


def test_weights_gradients_are_the_dots_that_lead_to_no_collective() -> None:
    flow = dataflow(backward())
    shapes = {flow.avals[flow.ops[op].outputs[0]].shape for op in weight_gradients(flow)}
    assert shapes == {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}


def test_a_dot_whose_result_is_summed_over_devices_is_none() -> None:
    def body(x: Any, w: Any) -> Any:
        return lax.psum(x.T @ x, "x"), x @ w

    shards = [jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((8, 2), "float32")]
    mapped = jax.shard_map(
        body, mesh=spmd.mesh_of(2), in_specs=(P("x"), P("x")), out_specs=(P(), P("x")), check_vma=False
    )
    wholes = [jax.ShapeDtypeStruct((s.shape[0] * 2, s.shape[1]), s.dtype) for s in shards]
    flow = dataflow(bodies.mapped_body(jax.make_jaxpr(mapped)(*wholes)))
    (dot,) = weight_gradients(flow)
    assert flow.avals[flow.ops[dot].outputs[0]].shape == (4, 2)


def test_a_dot_that_a_ring_needs_is_none() -> None:
    """Held back behind the scatter, which needs the gather's ring, it would wait for itself."""

    def body(x: Any, w: Any, v: Any) -> Any:
        scale = v @ v.T
        gathered = lax.all_gather(x, "x", axis=0, tiled=True)
        return lax.psum_scatter((gathered * scale) @ w, "x", scatter_dimension=0, tiled=True)

    devices = 2
    specs = (P("x"), P("x"), P("x"))
    mapped = jax.jit(
        jax.shard_map(body, mesh=spmd.mesh_of(devices), in_specs=specs, out_specs=P("x"), check_vma=False)
    )
    rng = np.random.default_rng(4)
    given = [rng.normal(size=shape).astype(np.float32) for shape in ((4, 4), (8, 6), (8, 3))]
    flow = dataflow(bodies.mapped_body(jax.make_jaxpr(mapped)(*given)))
    found = [match.found[0] for match in match_dataflow(flow) if isinstance(match.found, tuple)]
    members = {op for chain in found for op in chain.members}
    assert not weight_gradients(flow, members)
    ring = overlap_collectives(mapped, policy="always", hardware=CPU, strict=True)
    np.testing.assert_allclose(ring(*given), mapped(*given), rtol=1e-4, atol=1e-5)


def test_they_are_held_back_beside_a_scatter_that_they_do_not_need() -> None:
    flow = dataflow(backward())
    matches = match_dataflow(flow)
    found = [match.found[0] for match in matches if isinstance(match.found, tuple)]
    held = held_back(flow, found, weight_gradients(flow))
    assert set(held) == weight_gradients(flow)
    assert {collective.kind for collective in held.values()} == {"reduce_scatter"}
    gathers = [chain for chain in found if chain.collective.kind == "all_gather"]
    assert not held_back(flow, gathers, weight_gradients(flow))


def test_what_needs_the_last_scatter_s_result_is_neither_held_back_nor_run_before_one() -> None:
    def body(x: Any, w: Any) -> Any:
        y = lax.psum_scatter(x @ w, "x", scatter_dimension=0, tiled=True)
        return y.T @ y

    shards = [jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((8, 2), "float32")]
    flow, (match,) = bodies.matched(body, *shards, axis_size=2, check_vma=False)
    assert isinstance(match.found, tuple)
    assert len(weight_gradients(flow)) == 1
    assert not held_back(flow, match.found, weight_gradients(flow))
    assert not run_first(flow, match.found, weight_gradients(flow))


def test_they_run_before_the_next_scatter_in_their_final_form() -> None:
    flow = dataflow(backward())
    found = [match.found[0] for match in match_dataflow(flow) if isinstance(match.found, tuple)]
    first = run_first(flow, found, weight_gradients(flow))
    assert {flow.avals[flow.ops[op].outputs[0]].shape for op in first} == {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}
    assert {flow.ops[op].outputs[0] for op in first} <= set(flow.outputs)
    assert {collective.kind for collective in first.values()} == {"reduce_scatter"}
    gathers = [chain for chain in found if chain.collective.kind == "all_gather"]
    assert not run_first(flow, gathers, weight_gradients(flow))


def test_they_do_not_where_a_loop_puts_them_together() -> None:
    flow = dataflow(backward())
    found = [match.found[0] for match in match_dataflow(flow) if isinstance(match.found, tuple)]
    dots = weight_gradients(flow)
    one, other = (flow.ops[op].outputs[0] for op in run_first(flow, found, dots))
    in_a_stack = dataclasses.replace(flow, stacked=frozenset({one}))
    assert [flow.ops[op].outputs[0] for op in run_first(in_a_stack, found, dots)] == [other]


def test_of_several_scatters_they_run_before_the_one_after_what_they_need() -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        def scattered(y: Any) -> Any:
            return lax.psum_scatter(y, "x", scatter_dimension=0, tiled=True)

        first = lax.all_gather(scattered(x @ w), "x", axis=0, tiled=True)
        second = lax.all_gather(scattered(first @ v), "x", axis=0, tiled=True)
        return scattered(second @ w), x.T @ x, first.T @ x, second.T @ x

    shards = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 8), (8, 8), (8, 8))]
    flow, matches = bodies.matched(body, *shards, axis_size=2, check_vma=False)
    sums = [m.found[0] for m in matches if isinstance(m.found, tuple) and m.collective.kind != "all_gather"]
    first = run_first(flow, sums, weight_gradients(flow))
    results = [flow.outputs.index(flow.ops[op].outputs[0]) for op in first]
    wanted = [sums[number - 1].collective for number in results]
    assert sorted(results) == [1, 2, 3]
    assert list(first.values()) == wanted


def test_sums_of_gradients_run_before_the_next_sum_that_others_wait_for() -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        first = lax.psum(x @ w, "x")
        one = lax.psum(x.T @ first, "x").astype(jnp.bfloat16)
        second = lax.psum(first @ v, "x")
        two = lax.psum(first.T @ second, "x")
        return lax.psum(second @ w, "x") @ w, one, two

    shards = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 8), (8, 8), (8, 8))]
    flow, matches = bodies.matched(body, *shards, axis_size=2, check_vma=False)
    chains = [match.found[0] for match in matches if isinstance(match.found, tuple)]
    assert len(chains) == 5
    first = run_first(flow, chains, weight_gradients(flow, {op for chain in chains for op in chain.members}))
    # The last sum is awaited by none, as the gradients are: for that no sum waits.
    assert {flow.outputs.index(flow.ops[op].outputs[0]): after for op, after in first.items()} == {
        1: chains[2].collective
    }


def decorated(devices: int, hardware: Hardware) -> Any:
    return overlap_collectives(step(devices), policy="always", hardware=hardware, strict=True)


@pytest.mark.parametrize("hardware", [CPU, by_name("tpu_v5p")], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("devices", [2, 4])
def test_a_training_step_has_the_same_loss_and_gradients(devices: int, hardware: Hardware) -> None:
    given = arguments(devices)
    ring = decorated(devices, hardware)
    assert all(site.rewritten for site in ring.explain(*given).sites)
    loss, gradients = ring(*given)
    with jax.enable_x64(True):
        expected, slopes = step(devices)(*(each.astype(np.float64) for each in given))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for found, wanted in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_the_gather_of_the_backward_pass_has_one_dot_on_cpu_devices_alone() -> None:
    given = arguments(2)

    def dots(hardware: Hardware) -> list[int]:
        return [len(site.dots) for site in decorated(2, hardware).explain(*given).sites]

    assert dots(CPU) == [1, 1, 1, 1]
    assert dots(by_name("tpu_v5p")) == [1, 1, 2, 1]


def test_they_wait_for_what_the_scatter_sends() -> None:
    given = arguments(2)

    def waiting(hardware: Hardware) -> int:
        jaxpr = jax.make_jaxpr(decorated(2, hardware))(*given)
        count = 0
        for eqn in bodies.equations(jaxpr):
            if eqn.primitive.name == "shard_map":
                body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
                makers = {var: each for each in body.eqns for var in each.outvars}
                for dot in (each for each in body.eqns if each.primitive.name == "dot_general"):
                    shape = dot.outvars[0].aval.shape
                    maker = makers.get(dot.invars[0])
                    if shape in {(WIDTH, HIDDEN), (HIDDEN, WIDTH)} and maker is not None:
                        count += maker.primitive.name == "custom_jvp_call"
        return count

    assert waiting(CPU) == 2
    assert waiting(by_name("tpu_v5p")) == 0


def test_on_tpus_the_last_ring_waits_for_them() -> None:
    given = arguments(2)

    def awaited(hardware: Hardware) -> bool:
        jaxpr = jax.make_jaxpr(decorated(2, hardware))(*given)
        # The other gradient is the gather's ring's.
        wanted = {(WIDTH, HIDDEN), (2 * ROWS, HIDDEN)}
        return any(
            wanted == {var.aval.shape for var in eqn.invars}
            for eqn in bodies.equations(jaxpr)
            if eqn.primitive.name == "optimization_barrier"
        )

    assert awaited(by_name("tpu_v5p"))
    assert not awaited(CPU)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_in_a_scan_over_layers_it_does_not(checkpointed: bool) -> None:
    """Behind a barrier a gradient is written twice: by its dot, and into its place among all layers'."""

    def layers(x: Any, up: Any, down: Any) -> Any:
        def layer(x: Any, w: tuple[Any, Any]) -> Any:
            hidden = jax.nn.relu(lax.all_gather(x, "x", axis=0, tiled=True) @ w[0])
            return x + lax.psum_scatter(hidden @ w[1], "x", scatter_dimension=0, tiled=True), None

        y, _ = lax.scan(jax.checkpoint(layer) if checkpointed else layer, x, (up, down))
        return lax.psum(jnp.sum(y * y), "x")

    specs = (P("x"), P(None, None, "x"), P(None, "x"))
    mapped = jax.shard_map(layers, mesh=spmd.mesh_of(2), in_specs=specs, out_specs=P())
    written = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1, 2)))
    ring = overlap_collectives(written, policy="always", hardware=by_name("tpu_v5p"), strict=True)
    rng = np.random.default_rng(3)
    shapes = ((2 * ROWS, WIDTH), (3, WIDTH, 2 * HIDDEN), (3, 2 * HIDDEN, WIDTH))
    given = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    held = [
        {var.aval.shape for var in eqn.invars}
        for eqn in bodies.equations(jax.make_jaxpr(ring)(*given))
        if eqn.primitive.name == "optimization_barrier"
    ]
    assert held and {(WIDTH, HIDDEN), (2 * ROWS, HIDDEN)} not in held
    for found, wanted in zip(jax.tree.leaves(ring(*given)), jax.tree.leaves(written(*given)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_no_ring_is_given_up_for_a_wait_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def after_all(flow: Dataflow, chains: Iterable[Chain], dots: Iterable[int]) -> dict[int, Collective]:
        del dots
        return {max(flow.live): chain.collective for chain in chains}

    monkeypatch.setattr("passes.plan.run_first", after_all)
    given = arguments(2)
    ring = decorated(2, by_name("tpu_v5p"))
    assert all(site.rewritten for site in ring.explain(*given).sites)
    np.testing.assert_allclose(ring(*given)[0], step(2)(*given)[0], rtol=1e-5)
