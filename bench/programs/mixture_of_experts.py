"""A mixture of experts, each device with its own: tokens travel to their expert and back by all_to_all.

Top-1 routing with a fixed capacity: each device sends an expert twice its fair share of tokens at most, and
what is over passes the layer by. Docstrings give the shapes one device sees: t = tokens / expert,
E = all experts, e = E / expert, C = capacity, D = width, F = hidden width.
"""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from bench.programs.decoder import rms_norm
from bench.programs.program import Operand, Program, mean_square

T = TypeVar("T")


class Weights(NamedTuple, Generic[T]):
    """One value per weight of the layer."""

    norm: T
    router: T
    up: T
    down: T


def places(expert: Array, experts: int, capacity: int) -> Array:
    """The expert of each token, [t] → one where token, expert and place in its queue meet, [t, E, C]."""
    chosen = jax.nn.one_hot(expert, experts, dtype=jnp.int32)
    place = jnp.cumsum(chosen, axis=0) * chosen - 1
    return jax.nn.one_hot(place, capacity)


def exchange(x: Array, split: int, concat: int) -> Array:
    """Cut one dim into a block per device, and concatenate what comes from all of them along another."""
    return lax.all_to_all(x, "expert", split_axis=split, concat_axis=concat, tiled=True)


def layer(w: Weights[Array], x: Array) -> Array:
    """[t, D] → [t, D]; router [D, E], up weights [e, D, F], down weights [e, F, D]."""
    y = rms_norm(x, w.norm)
    chances = jax.nn.softmax((y @ w.router).astype(jnp.float32))
    tokens, experts = chances.shape
    dispatch = places(chances.argmax(-1), experts, capacity=2 * tokens // experts).astype(x.dtype)
    combine = dispatch * chances.max(-1).astype(x.dtype)[:, None, None]

    sent = jnp.einsum("tec,td->ecd", dispatch, y)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", exchange(sent, 0, 1), w.up))
    back = exchange(jnp.einsum("ecf,efd->ecd", hidden, w.down), 1, 0)
    return jnp.einsum("tec,ecd->td", combine, back)


def local_loss(w: Weights[Array], x: Array) -> Array:
    """Scalar, the same on every device."""
    return lax.pmean(mean_square(x + layer(w, x)), "expert")


_experts = partial(Operand, spec=P("expert"))

PROGRAM: Final = Program(
    name="mixture_of_experts",
    mesh_shape=(8,),
    axis_names=("expert",),
    sizes={
        "small": {"T": 256, "E": 16, "D": 16, "F": 32},
        "real": {"T": 65536, "E": 16, "D": 4096, "F": 14336},
    },
    operands=(
        Weights(
            norm=Operand("D", P()),
            router=Operand("D E", P(), fan_in="D"),
            up=_experts("E D F", fan_in="D"),
            down=_experts("E F D", fan_in="F"),
        ),
        Operand("T D", P("expert")),
    ),
    local_loss=local_loss,
)
