"""What the ring before another has on chip, of the programs that say so."""

# JAX leaves its collectives untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import passes.decide
from cost_model import by_name
from cost_model.ring_work import Before
from overlap import overlap_collectives
from passes.before import before_each
from tests.passes import bodies, spmd

ROWS, WIDTH, HIDDEN = 16, 24, 40
UP_BYTES = WIDTH * HIDDEN * 4
V5E = by_name("tpu_v5e")


def mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
    whole = lax.all_gather(x, "x", axis=0, tiled=True)
    hidden = jax.nn.silu(whole @ gate) * (whole @ up)
    return lax.psum_scatter(hidden @ down, "x", scatter_dimension=0, tiled=True)


SHARDS = [
    jax.ShapeDtypeStruct(shape, jnp.float32)
    for shape in ((ROWS, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
]


def found_before(body: Any, *shards: Any, room_bytes: float = 1e9, **hardware: Any) -> list[Before | None]:
    """Of each collective with a chain, in program order; None of one of which nothing is said."""
    flow, matches = bodies.matched(body, *shards, axis_size=4, check_vma=False)
    chains = [match.found[0] for match in matches if isinstance(match.found, tuple)]
    chip = dataclasses.replace(hardware.pop("chip", V5E), on_chip_bytes=room_bytes)
    lasting = {flow.inputs[number] for number in hardware.pop("lasting", ())}
    found = before_each(flow, chains, chip, lasting)
    return [found.get(chain.collective.op) for chain in chains]


def test_a_ring_finds_the_weights_of_the_one_before() -> None:
    assert found_before(mlp, *SHARDS) == [Before(), Before(2 * UP_BYTES)]
    # Of two weights that do not fit one is there.
    assert found_before(mlp, *SHARDS, room_bytes=1.5 * UP_BYTES) == [Before(), Before(UP_BYTES)]
    assert found_before(mlp, *SHARDS, room_bytes=0.5 * UP_BYTES) == [Before(), Before(0)]


def test_what_the_program_reads_again_stays() -> None:
    assert found_before(mlp, *SHARDS, lasting=[2]) == [Before(), Before(2 * UP_BYTES, stays=True)]
    assert found_before(mlp, *SHARDS, lasting=[0, 3]) == [Before(), Before(2 * UP_BYTES)]

    def reads_again(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return mlp(x, gate, up, down), gate * 2

    assert found_before(reads_again, *SHARDS)[1] == Before(2 * UP_BYTES, stays=True)


def test_of_blocks_nothing_is_there_and_of_caches_nothing_is_said() -> None:
    def contracted(x: Any, w: Any, v: Any) -> Any:
        y = w @ lax.all_gather(x, "x", axis=0, tiled=True)
        return lax.psum_scatter(y @ v, "x", scatter_dimension=0, tiled=True)

    shards = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 8), (12, 16), (8, 6))]
    assert found_before(contracted, *shards) == [Before(), Before(0)]
    assert found_before(mlp, *SHARDS, chip=by_name("h100")) == [None, None]


def spied(monkeypatch: pytest.MonkeyPatch, function: Any, *args: Any) -> list[Mapping[int, Before]]:
    """What was found of every jaxpr with collectives when a function was decided for, in program order."""
    seen: list[Mapping[int, Before]] = []

    def spy(*given: Any) -> Mapping[int, Before]:
        seen.append(before_each(*given))
        return seen[-1]

    monkeypatch.setattr(passes.decide, "before_each", spy)
    overlap_collectives(function, policy="auto", hardware="tpu_v5e", strict=True).explain(*args)
    return seen


def test_weights_stay_for_the_backward_pass_and_not_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = (P("x"), P(None, "x"), P(None, "x"), P("x"))
    mapped = jax.shard_map(mlp, mesh=spmd.mesh_of(2), in_specs=specs, out_specs=P("x"))
    loss = jax.jit(jax.grad(lambda x, *weights: jnp.sum(mapped(x, *weights) ** 2), argnums=(0, 1, 2, 3)))
    args = [
        jax.ShapeDtypeStruct(
            tuple(n * (2 if axis else 1) for n, axis in zip(s.shape, (*spec, None), strict=False)), s.dtype
        )
        for s, spec in zip(SHARDS, specs, strict=True)
    ]
    forward, backward = (
        [before.stays for before in found.values() if before.on_chip_bytes is not None]
        for found in spied(monkeypatch, loss, *args)
        if found
    )
    assert forward == [True]
    assert not any(backward)


def test_what_a_loop_is_given_stays_and_what_it_slices_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(x: Any, weights: Any, shared: Any) -> Any:
        def layer(y: Any, layer_weights: Any) -> Any:
            gate, up, down = layer_weights
            return mlp(y, gate, up, down), None

        def again(y: Any, _: Any) -> Any:
            return mlp(y, *shared), None

        return lax.scan(again, lax.scan(layer, x, weights)[0], None, length=3)[0]

    specs = (P("x"), ((P(None, None, "x"),) * 2 + (P(None, "x"),)), ((P(None, "x"),) * 2 + (P("x"),)))
    mapped = jax.jit(jax.shard_map(layers, mesh=spmd.mesh_of(2), in_specs=specs, out_specs=P("x")))
    up, down = (WIDTH, 2 * HIDDEN), (2 * HIDDEN, WIDTH)
    stacked = [jax.ShapeDtypeStruct((3, *shape), jnp.float32) for shape in (up, up, down)]
    single = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (up, up, down)]
    x = jax.ShapeDtypeStruct((2 * ROWS, WIDTH), jnp.float32)
    found = [each for each in spied(monkeypatch, mapped, x, tuple(stacked), tuple(single)) if each]
    stays = [[before.stays for before in each.values() if before.on_chip_bytes] for each in found]
    assert stays == [[False], [True]]
