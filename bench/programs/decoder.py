"""A training step of a decoder-only transformer: FSDP and tensor parallelism with explicit collectives.

Written the way such programs usually are, with `all_gather` and `psum_scatter` inside one `jax.shard_map`:

- weights are sharded over "fsdp" and gathered just before use; their gradients are reduce-scattered over it;
- heads, the MLP's hidden width and the vocabulary are sharded over "tensor"; between blocks, activations are
  sharded along the sequence over it (Megatron's sequence parallelism), so that each block begins with one
  gather that feeds several dots and ends with a dot and a reduce-scatter;
- layers are stacked, scanned, and rematerialised in the backward pass.

Docstrings give the shapes one device sees: b = batch / fsdp, s = seq / tensor, S = seq, D = d_model,
H = heads / tensor, K = kv_heads / tensor, h = head_dim, F = d_ff / tensor, V = vocab / tensor.
"""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes, of the whole model and the global batch, and choices.

    `kv_heads`, `d_ff`, `vocab` and `seq` must divide by the "tensor" axis; `d_model` and `batch` by "fsdp".
    Parameters are float32; activations, gathered weights and matmuls are of `dtype`.
    """

    layers: int = 4
    d_model: int = 64
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    d_ff: int = 192
    vocab: int = 256
    batch: int = 8
    seq: int = 32
    rope_base: float = 10_000.0
    dtype: DTypeLike = jnp.float32
    learning_rate: float = 1e-2
    remat: bool = True
    check_vma: bool = True


SMALL: Final = Config()
"""For tests: ten steps take two seconds on virtual CPU devices, nearly all of it compilation."""

LARGE: Final = Config(
    layers=32,
    d_model=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    d_ff=14336,
    vocab=128256,
    batch=16,
    seq=4096,
    rope_base=500_000.0,
    dtype=jnp.bfloat16,
    learning_rate=3e-4,
)
"""Llama-3-8B's widths, to be compiled for 16 chips or more, not run."""


class Layer(NamedTuple, Generic[T]):
    """One value per weight of a layer; as parameters, arrays with a leading dim of `layers`."""

    attention_norm: T
    query: T
    key: T
    value: T
    output: T
    mlp_norm: T
    gate: T
    up: T
    down: T


class Params(NamedTuple, Generic[T]):
    """One value per weight of the model."""

    embed: T
    layers: Layer[T]
    final_norm: T
    unembed: T


class State(NamedTuple, Generic[T]):
    """What a step carries: the parameters, and AdamW's state, whose moments are sharded like them."""

    params: Params[T]
    optimizer: Any


class Batch(NamedTuple, Generic[T]):
    """Token ids and the ids that follow them, int32 [batch, seq]."""

    tokens: T
    targets: T


PARAM_SPECS: Final = Params(
    embed=P("tensor", "fsdp"),
    layers=Layer(
        attention_norm=P(),
        query=P(None, "fsdp", "tensor", None),
        key=P(None, "fsdp", "tensor", None),
        value=P(None, "fsdp", "tensor", None),
        output=P(None, "tensor", None, "fsdp"),
        mlp_norm=P(),
        gate=P(None, "fsdp", "tensor"),
        up=P(None, "fsdp", "tensor"),
        down=P(None, "tensor", "fsdp"),
    ),
    final_norm=P(),
    unembed=P("fsdp", "tensor"),
)
BATCH_SPECS: Final = P("fsdp")


# The model, as one device sees it.


def rms_norm(x: Array, scale: Array) -> Array:
    """[b, s, D], [D] → [b, s, D], in float32 inside."""
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def rotate(x: Array, base: float) -> Array:
    """Rotary position embedding of [b, S, heads, h]; the two halves of h are the two coordinates."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Grouped-query attention: q [b, S, H, h], k and v [b, S, K, h] → [b, S, H, h]."""
    b, seq, heads, head_dim = q.shape
    q = q.reshape(b, seq, k.shape[2], -1, head_dim)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgqs,bskh->bqkgh", weights, v).reshape(b, seq, heads, head_dim)


def gather_weight(w: Array, axis: int, dtype: DTypeLike) -> Array:
    """Undo FSDP's sharding of dim `axis`, in the compute dtype."""
    return lax.all_gather(w.astype(dtype), "fsdp", axis=axis, tiled=True)


def gather_sequence(x: Array) -> Array:
    """[b, s, D] → [b, S, D]."""
    return lax.all_gather(x, "tensor", axis=1, tiled=True)


def scatter_sequence(x: Array) -> Array:
    """Partial sums [b, S, D] → their sum over "tensor", [b, s, D]."""
    return lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)


def attention_block(config: Config, layer: Layer[Array], x: Array) -> Array:
    """[b, s, D] → [b, s, D]; query weights [D / fsdp, H, h], output weights [H, h, D / fsdp]."""
    weight = partial(gather_weight, dtype=config.dtype)
    x = gather_sequence(rms_norm(x, layer.attention_norm))
    q = jnp.einsum("bsd,dhk->bshk", x, weight(layer.query, 0))
    k = jnp.einsum("bsd,dhk->bshk", x, weight(layer.key, 0))
    v = jnp.einsum("bsd,dhk->bshk", x, weight(layer.value, 0))
    mixed = causal_attention(rotate(q, config.rope_base), rotate(k, config.rope_base), v)
    return scatter_sequence(jnp.einsum("bshk,hkd->bsd", mixed, weight(layer.output, 2)))


def mlp_block(config: Config, layer: Layer[Array], x: Array) -> Array:
    """[b, s, D] → [b, s, D]; gate and up weights [D / fsdp, F], down weights [F, D / fsdp]."""
    weight = partial(gather_weight, dtype=config.dtype)
    x = gather_sequence(rms_norm(x, layer.mlp_norm))
    hidden = jax.nn.silu(x @ weight(layer.gate, 0)) * (x @ weight(layer.up, 0))
    return scatter_sequence(hidden @ weight(layer.down, 1))


def owned_vocab(ids: Array, size: int) -> tuple[Array, Array]:
    """Token ids as indices into this device's `size` rows of the vocabulary, and whether it owns them."""
    local = ids - lax.axis_index("tensor") * size
    owned = (local >= 0) & (local < size)
    return jnp.where(owned, local, 0), owned


def embed(config: Config, table: Array, tokens: Array) -> Array:
    """Tokens [b, S], table [V, D / fsdp] → [b, s, D]: look up the rows owned here, sum over the owners."""
    rows, owned = owned_vocab(tokens, table.shape[0])
    found = gather_weight(table, 1, config.dtype)[rows]
    return scatter_sequence(jnp.where(owned[..., None], found, 0))


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Logits float32 [b, S, V], of the part of the vocabulary owned here; targets [b, S] → [b, S]."""
    columns, owned = owned_vocab(targets, logits.shape[-1])
    largest = lax.pmax(lax.stop_gradient(logits).max(axis=-1), "tensor")
    total = lax.psum(jnp.exp(logits - largest[..., None]).sum(axis=-1), "tensor")
    picked = jnp.take_along_axis(logits, columns[..., None], axis=-1)[..., 0]
    return jnp.log(total) + largest - lax.psum(jnp.where(owned, picked, 0), "tensor")


def local_loss(config: Config, params: Params[Array], batch: Batch[Array]) -> Array:
    """Mean next-token cross-entropy over the global batch; a scalar, the same on every device."""

    def layer_step(x: Array, layer: Layer[Array]) -> tuple[Array, None]:
        x = x + attention_block(config, layer, x)
        return x + mlp_block(config, layer, x), None

    # The scan keeps the recomputation apart from the forward pass, so CSE needs no barrier.
    step = jax.checkpoint(layer_step, prevent_cse=False) if config.remat else layer_step
    x, _ = lax.scan(step, embed(config, params.embed, batch.tokens), params.layers)
    x = gather_sequence(rms_norm(x, params.final_norm))
    unembed = gather_weight(params.unembed, 0, config.dtype)
    logits = jnp.einsum("bsd,dv->bsv", x, unembed, preferred_element_type=jnp.float32)
    return lax.pmean(cross_entropy(logits, batch.targets).mean(), "fsdp")


# The program, as its user sees it.


def make_mesh(devices: Sequence[jax.Device] | None = None, shape: tuple[int, int] = (2, 4)) -> Mesh:
    """A mesh of axes "fsdp" and "tensor" of the given sizes, over `devices` (default: this machine's)."""
    return jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW."""
    return optax.adamw(config.learning_rate, weight_decay=1e-2)


def new_state(config: Config, key: Array) -> State[Array]:
    """Normal weights of variance 1 / fan-in, unit norm scales, and a fresh optimizer."""
    c, keys = config, iter(jax.random.split(key, 9))

    def normal(*shape: int, fan_in: int) -> Array:
        return jax.random.normal(next(keys), shape, jnp.float32) * fan_in**-0.5

    layers = Layer(
        attention_norm=jnp.ones((c.layers, c.d_model)),
        query=normal(c.layers, c.d_model, c.heads, c.head_dim, fan_in=c.d_model),
        key=normal(c.layers, c.d_model, c.kv_heads, c.head_dim, fan_in=c.d_model),
        value=normal(c.layers, c.d_model, c.kv_heads, c.head_dim, fan_in=c.d_model),
        output=normal(c.layers, c.heads, c.head_dim, c.d_model, fan_in=c.heads * c.head_dim),
        mlp_norm=jnp.ones((c.layers, c.d_model)),
        gate=normal(c.layers, c.d_model, c.d_ff, fan_in=c.d_model),
        up=normal(c.layers, c.d_model, c.d_ff, fan_in=c.d_model),
        down=normal(c.layers, c.d_ff, c.d_model, fan_in=c.d_ff),
    )
    params = Params(
        embed=normal(c.vocab, c.d_model, fan_in=1),
        layers=layers,
        final_norm=jnp.ones(c.d_model),
        unembed=normal(c.d_model, c.vocab, fan_in=c.d_model),
    )
    return State(params, optimizer(config).init(params))


def state_shapes(config: Config, mesh: Mesh) -> State[jax.ShapeDtypeStruct]:
    """The state as `ShapeDtypeStruct`s with shardings, for compiling without data."""
    shapes = jax.eval_shape(partial(new_state, config), jax.random.key(0))
    like_params = partial(optax.tree_map_params, optimizer(config), lambda _, spec: spec)
    specs = State(PARAM_SPECS, like_params(shapes.optimizer, PARAM_SPECS, transform_non_params=lambda _: P()))

    def place(x: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, shapes, specs)


def state_shardings(config: Config, mesh: Mesh) -> State[NamedSharding]:
    """The state's shardings, in its structure."""
    return jax.tree.map(lambda x: x.sharding, state_shapes(config, mesh))


def init_state(config: Config, mesh: Mesh, seed: int = 0) -> State[Array]:
    """A fresh state placed on the mesh; the values depend on the seed alone."""
    new = jax.jit(partial(new_state, config), out_shardings=state_shardings(config, mesh))
    return new(jax.random.key(seed))


def batch_shapes(config: Config, mesh: Mesh) -> Batch[jax.ShapeDtypeStruct]:
    """A batch as `ShapeDtypeStruct`s with shardings."""
    sharding = NamedSharding(mesh, BATCH_SPECS)
    ids = jax.ShapeDtypeStruct((config.batch, config.seq), jnp.int32, sharding=sharding)
    return Batch(ids, ids)


def make_batch(config: Config, mesh: Mesh, step: int) -> Batch[Array]:
    """A step's batch: walks through the vocabulary in random strides of 1 or 2. The best loss is ln 2."""
    rng = np.random.default_rng(step)
    start = rng.integers(config.vocab, size=(config.batch, 1))
    strides = rng.integers(1, 3, size=(config.batch, config.seq))
    walk = np.cumsum(np.hstack([start, strides]), axis=1, dtype=np.int32) % config.vocab
    place = partial(jax.device_put, device=NamedSharding(mesh, BATCH_SPECS))
    return Batch(tokens=place(walk[:, :-1]), targets=place(walk[:, 1:]))


def make_loss(config: Config, mesh: Mesh) -> Callable[[Params[Array], Batch[Array]], Array]:
    """The differentiable mean loss `(params, batch) → float32 scalar` of global, sharded arrays."""
    return jax.shard_map(
        partial(local_loss, config),
        mesh=mesh,
        in_specs=(PARAM_SPECS, BATCH_SPECS),
        out_specs=P(),
        check_vma=config.check_vma,
    )


def make_train_step(config: Config, mesh: Mesh, *, donate: bool = True) -> Any:
    """The jitted step `(state, batch) → (state, loss)`; with `donate`, it consumes the state it is given."""
    loss_and_grads, adamw = jax.value_and_grad(make_loss(config, mesh)), optimizer(config)

    def train_step(state: State[Array], batch: Batch[Array]) -> tuple[State[Array], Array]:
        loss, grads = loss_and_grads(state.params, batch)
        updates, optimizer_state = adamw.update(grads, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer_state), loss

    out_shardings = (state_shardings(config, mesh), NamedSharding(mesh, P()))
    return jax.jit(train_step, donate_argnums=0 if donate else (), out_shardings=out_shardings)
