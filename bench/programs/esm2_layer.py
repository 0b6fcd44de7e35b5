"""An encoder layer of ESM-2 15B's shape: 5120 wide, 40 heads of 128, an MLP of 4 times the width.

Activations [batch_X, seq, embed_Y] are gathered over "Y" before each block and normalised whole; weights are
gathered over "X"; a block's output is scattered back to embed_Y. Docstrings give the shapes one device sees:
b = batch / X, e = embed / Y, H = heads / Y, F = hidden / Y.
"""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from bench.programs.decoder import rotate
from bench.programs.program import Operand, Program, gather, mean_square, scatter

T = TypeVar("T")

ROPE_BASE: Final = 10_000.0


class Norm(NamedTuple, Generic[T]):
    """Scale and bias of a layer norm."""

    scale: T
    bias: T


class Dense(NamedTuple, Generic[T]):
    """Kernel and bias of a projection."""

    kernel: T
    bias: T


class Layer(NamedTuple, Generic[T]):
    """One value per weight of the layer."""

    attention_norm: Norm[T]
    query: Dense[T]
    key: Dense[T]
    value: Dense[T]
    output: Dense[T]
    mlp_norm: Norm[T]
    up: Dense[T]
    down: Dense[T]


def layer_norm(x: Array, w: Norm[Array]) -> Array:
    """[b, seq, embed], in float32 inside."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return (centred * lax.rsqrt(variance + 1e-5) * w.scale + w.bias).astype(x.dtype)


def attention_block(w: Layer[Array], x: Array) -> Array:
    """[b, seq, e] → [b, seq, e]; query weights [embed / X, H, 128], output weights [H, 128, embed / X]."""
    x = layer_norm(gather(x, "Y", 2), w.attention_norm)
    q, k, v = (
        jnp.einsum("bse,ehk->bshk", x, gather(p.kernel, "X", 0)) + p.bias for p in (w.query, w.key, w.value)
    )
    q, k = rotate(q, ROPE_BASE) * q.shape[-1] ** -0.5, rotate(k, ROPE_BASE)
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32)
    mixed = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores).astype(v.dtype), v)
    out = jnp.einsum("bshk,hke->bse", mixed, gather(w.output.kernel, "X", 2))
    return scatter(out, "Y", 2) + w.output.bias


def mlp_block(w: Layer[Array], x: Array) -> Array:
    """[b, seq, e] → [b, seq, e]; up weights [embed / X, F], down weights [F, embed / X]."""
    x = layer_norm(gather(x, "Y", 2), w.mlp_norm)
    hidden = jax.nn.gelu(x @ gather(w.up.kernel, "X", 0) + w.up.bias)
    return scatter(hidden @ gather(w.down.kernel, "X", 1), "Y", 2) + w.down.bias


def local_loss(w: Layer[Array], x: Array) -> Array:
    """Scalar, the same on every device."""
    x = x + attention_block(w, x)
    x = x + mlp_block(w, x)
    return lax.pmean(mean_square(x), ("X", "Y"))


_norm: Final = Norm(scale=Operand("embed", P()), bias=Operand("embed", P()))
_projection: Final = Dense(
    kernel=Operand("embed heads head", P("X", "Y", None), fan_in="embed"),
    bias=Operand("heads head", P("Y", None)),
)
_into_embed = partial(Dense, bias=Operand("embed", P("Y")))

PROGRAM: Final = Program(
    name="esm2_layer",
    mesh_shape=(2, 4),
    axis_names=("X", "Y"),
    sizes={
        "small": {"batch": 4, "seq": 8, "embed": 32, "heads": 8, "head": 4, "hidden": 128},
        "real": {"batch": 32, "seq": 1024, "embed": 5120, "heads": 40, "head": 128, "hidden": 20480},
    },
    operands=(
        Layer(
            attention_norm=_norm,
            query=_projection,
            key=_projection,
            value=_projection,
            output=_into_embed(
                Operand("heads head embed", P("Y", None, "X"), fan_in="heads head"),
            ),
            mlp_norm=_norm,
            up=Dense(
                kernel=Operand("embed hidden", P("X", "Y"), fan_in="embed"), bias=Operand("hidden", P("Y"))
            ),
            down=_into_embed(Operand("hidden embed", P("Y", "X"), fan_in="hidden")),
        ),
        Operand("batch seq embed", P("X", None, "Y")),
    ),
    local_loss=local_loss,
)
