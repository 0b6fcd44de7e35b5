"""A decoder layer with FSDP over "x" and tensor parallelism over "y", activations sharded along the width.

In[B_X, D_Y] · Win[D_X, F_Y] · Wout[F_Y, D_X] → Out[B_X, D_Y], and attention likewise. Docstrings give the
shapes one device sees: b = B / x, d = D / y, H = heads / y, K = kv heads / y, h = width of a head, F = hidden
width / y.
"""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from bench.programs.decoder import Layer, causal_attention, rotate
from bench.programs.program import Operand, Program, gather, mean_square, scatter

ROPE_BASE: Final = 10_000.0


def rms_norm(x: Array, scale: Array) -> Array:
    """[b, S, d], [d] → [b, S, d], in float32 inside; the mean is over the whole width."""
    x32 = x.astype(jnp.float32)
    mean = lax.pmean(jnp.mean(x32 * x32, axis=-1, keepdims=True), "y")
    return (x32 * lax.rsqrt(mean + 1e-6) * scale).astype(x.dtype)


def attention_block(w: Layer[Array], x: Array) -> Array:
    """[b, S, d] → [b, S, d]; query weights [D / x, H, h], output weights [H, h, D / x]."""
    x = gather(rms_norm(x, w.attention_norm), "y", 2)
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, gather(p, "x", 0)) for p in (w.query, w.key, w.value))
    mixed = causal_attention(rotate(q, ROPE_BASE), rotate(k, ROPE_BASE), v)
    return scatter(jnp.einsum("bshk,hkd->bsd", mixed, gather(w.output, "x", 2)), "y", 2)


def mlp_block(w: Layer[Array], x: Array) -> Array:
    """[b, S, d] → [b, S, d]; gate and up weights [D / x, F], down weights [F, D / x]."""
    x = gather(rms_norm(x, w.mlp_norm), "y", 2)
    hidden = jax.nn.silu(x @ gather(w.gate, "x", 0)) * (x @ gather(w.up, "x", 0))
    return scatter(hidden @ gather(w.down, "x", 1), "y", 2)


def local_loss(w: Layer[Array], x: Array) -> Array:
    """Scalar, the same on every device."""
    x = x + attention_block(w, x)
    x = x + mlp_block(w, x)
    return lax.pmean(mean_square(x), ("x", "y"))


_projection = partial(Operand, spec=P("x", "y", None), fan_in="D")

PROGRAM: Final = Program(
    name="fsdp_tensor_layer",
    mesh_shape=(2, 4),
    axis_names=("x", "y"),
    sizes={
        "small": {"B": 4, "S": 8, "D": 32, "heads": 8, "kv_heads": 4, "head": 4, "F": 64},
        "real": {"B": 8, "S": 4096, "D": 4096, "heads": 32, "kv_heads": 8, "head": 128, "F": 14336},
    },
    operands=(
        Layer(
            attention_norm=Operand("D", P("y")),
            query=_projection("D heads head"),
            key=_projection("D kv_heads head"),
            value=_projection("D kv_heads head"),
            output=Operand("heads head D", P("y", None, "x"), fan_in="heads head"),
            mlp_norm=Operand("D", P("y")),
            gate=Operand("D F", P("x", "y"), fan_in="D"),
            up=Operand("D F", P("x", "y"), fan_in="D"),
            down=Operand("F D", P("y", "x"), fan_in="F"),
        ),
        Operand("B S D", P("x", None, "y")),
    ),
    local_loss=local_loss,
)
