"""The decoder's training step is right: tests and benchmarks that rewrite it take it as their reference."""

# mypy: allow-untyped-calls, no-warn-return-any

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import Mesh

from bench.programs import decoder
from bench.programs.decoder import SMALL, Batch, Config, Params


def reference_loss(params: Params[Array], batch: Batch[Array], config: Config) -> Array:
    """The same model on whole arrays: no mesh, no scan, one head at a time, in its parameters' dtype."""

    def norm(x: Array, scale: Array) -> Array:
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def rope(x: Array) -> Array:
        half = config.head_dim // 2
        turns = jnp.exp(1j * np.outer(np.arange(config.seq), config.rope_base ** (-np.arange(half) / half)))
        turned = (x[..., :half] + 1j * x[..., half:]) * turns
        return jnp.concatenate([turned.real, turned.imag], -1)

    x = params.embed[batch.tokens]
    for i in range(config.layers):
        w = jax.tree.map(lambda stacked, i=i: stacked[i], params.layers)
        y = norm(x, w.attention_norm)
        attention = jnp.zeros_like(x)
        for head in range(config.heads):
            kv = head * config.kv_heads // config.heads
            q, k, v = rope(y @ w.query[:, head]), rope(y @ w.key[:, kv]), y @ w.value[:, kv]
            scores = q @ k.mT / np.sqrt(config.head_dim)
            future = np.arange(config.seq)[None, :] > np.arange(config.seq)[:, None]
            attention += jax.nn.softmax(jnp.where(future, -1e30, scores)) @ v @ w.output[head]
        x = x + attention
        y = norm(x, w.mlp_norm)
        gate = y @ w.gate
        x = x + (gate / (1 + jnp.exp(-gate)) * (y @ w.up)) @ w.down
    log_p = jax.nn.log_softmax(norm(x, params.final_norm) @ params.unembed)
    return -jnp.take_along_axis(log_p, batch.targets[..., None], -1).mean()


@cache
def some_params(mesh: Mesh) -> Params[Array]:
    """Parameters whose norm scales are not 1, so that one left out or applied twice shows."""
    params = decoder.init_state(SMALL, mesh, seed=1).params

    def ramp(scale: Array) -> Array:
        values = np.linspace(0.5, 1.5, scale.size, dtype=np.float32).reshape(scale.shape)
        return jax.device_put(values, scale.sharding)

    layers = params.layers
    layers = layers._replace(attention_norm=ramp(layers.attention_norm), mlp_norm=ramp(layers.mlp_norm))
    return params._replace(layers=layers, final_norm=ramp(params.final_norm))


def sharded_loss_and_grads(config: Config, shape: tuple[int, int] = (2, 4)) -> tuple[Array, Params[Array]]:
    mesh = decoder.make_mesh(shape=shape)
    loss_and_grads = jax.jit(jax.value_and_grad(decoder.make_loss(config, mesh)))
    return loss_and_grads(some_params(mesh), decoder.make_batch(config, mesh, step=3))


@pytest.fixture(scope="module")
def reference() -> tuple[Array, Params[Array]]:
    """Loss and gradients, in float64 on one device, of what `sharded_loss_and_grads` computes."""
    mesh = decoder.make_mesh()
    params = jax.tree.map(lambda w: np.asarray(w, np.float64), some_params(mesh))
    batch = jax.tree.map(np.asarray, decoder.make_batch(SMALL, mesh, step=3))
    with jax.enable_x64(True):
        loss, grads = jax.jit(jax.value_and_grad(reference_loss), static_argnums=2)(params, batch, SMALL)
        assert loss.dtype == grads.embed.dtype == jnp.float64
        return jax.tree.map(np.asarray, (loss, grads))


def assert_same(actual: object, expected: object, relative: float) -> None:
    """Equal trees, to within `relative` of each array's largest value."""

    def check(path: tuple[object, ...], a: Array, e: np.ndarray) -> None:
        error = np.abs(np.asarray(a, np.float64) - e).max()
        assert error <= relative * np.abs(e).max(), f"{jax.tree_util.keystr(path)}: {error}"

    jax.tree_util.tree_map_with_path(check, actual, expected)


@pytest.mark.parametrize(
    ("check_vma", "remat"),
    [(True, True), (False, True), (True, False)],
    ids=["default", "no_vma", "no_remat"],
)
def test_loss_and_gradients_equal_the_unsharded_float64_reference(
    check_vma: bool, remat: bool, reference: tuple[Array, Params[Array]]
) -> None:
    actual = sharded_loss_and_grads(replace(SMALL, check_vma=check_vma, remat=remat))
    assert_same(actual, reference, relative=2e-5)


def test_loss_and_gradients_do_not_depend_on_the_mesh_shape(reference: tuple[Array, Params[Array]]) -> None:
    assert_same(sharded_loss_and_grads(SMALL, shape=(4, 2)), reference, relative=2e-5)


def test_bfloat16_compute_stays_near_the_reference(reference: tuple[Array, Params[Array]]) -> None:
    loss, grads = sharded_loss_and_grads(replace(SMALL, dtype=jnp.bfloat16))
    assert loss.dtype == jnp.float32 and all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
    assert_same((loss, grads), reference, relative=0.1)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_loss_falls_over_ten_steps_without_leaving_its_shardings(check_vma: bool) -> None:
    config, mesh = replace(SMALL, check_vma=check_vma), decoder.make_mesh()
    step, state = decoder.make_train_step(config, mesh), decoder.init_state(config, mesh)
    losses = []
    for i in range(10):
        state, loss = step(state, decoder.make_batch(config, mesh, i))
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 2
    assert all(later < earlier for earlier, later in zip(losses[::3], losses[3::3], strict=False))
    assert jax.tree.map(lambda x: x.sharding, state) == decoder.state_shardings(config, mesh)


@pytest.mark.parametrize("donate", [True, False])
def test_step_consumes_its_state_only_when_told_to_donate(donate: bool) -> None:
    mesh = decoder.make_mesh()
    step = decoder.make_train_step(SMALL, mesh, donate=donate)
    lowered = step.lower(decoder.state_shapes(SMALL, mesh), decoder.batch_shapes(SMALL, mesh))
    (state, batch), _ = lowered.args_info
    assert {x.donated for x in jax.tree.leaves(state)} == {donate}
    assert not any(x.donated for x in jax.tree.leaves(batch))


def test_shapes_describe_the_real_state_and_batch() -> None:
    mesh = decoder.make_mesh()

    def described(tree: object) -> object:
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)

    assert described(decoder.init_state(SMALL, mesh)) == described(decoder.state_shapes(SMALL, mesh))
    assert described(decoder.make_batch(SMALL, mesh, 0)) == described(decoder.batch_shapes(SMALL, mesh))


def test_batches_are_a_function_of_the_step_and_targets_follow_tokens() -> None:
    mesh = decoder.make_mesh()
    first, again, other = (decoder.make_batch(SMALL, mesh, step) for step in (5, 5, 6))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens)
    np.testing.assert_array_equal(np.asarray(first.tokens)[:, 1:], np.asarray(first.targets)[:, :-1])
