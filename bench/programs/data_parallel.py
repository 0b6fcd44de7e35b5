"""An MLP with data parallelism alone: weights on every device, their gradients summed over all of them.

Docstrings give the shapes one device sees: b = B / data.
"""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from dataclasses import replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from bench.programs.decoder import rms_norm
from bench.programs.program import Operand, Program, mean_square

T = TypeVar("T")


class Weights(NamedTuple, Generic[T]):
    """One value per weight of an MLP."""

    norm: T
    up: T
    down: T


def mlp(w: Weights[Array], x: Array) -> Array:
    """[b, S, D] → [b, S, D]."""
    return x + jax.nn.gelu(rms_norm(x, w.norm) @ w.up) @ w.down


def local_loss(w: Weights[Array], x: Array) -> Array:
    """Scalar, the same on every device; its derivative sums the weights' gradients."""
    return lax.pmean(mean_square(mlp(w, x)), "data")


def local_gradients(w: Weights[Array], x: Array) -> tuple[Array, Any]:
    """The same, differentiated on each device; the average is written out, as under `pmap`."""
    loss, (w_grads, x_grad) = jax.value_and_grad(lambda w, x: mean_square(mlp(w, x)), argnums=(0, 1))(w, x)
    return lax.pmean(loss, "data"), (lax.pmean(w_grads, "data"), x_grad / lax.axis_size("data"))


PROGRAM: Final = Program(
    name="data_parallel",
    mesh_shape=(8,),
    axis_names=("data",),
    sizes={
        "small": {"B": 8, "S": 4, "D": 16, "F": 32},
        "real": {"B": 32, "S": 4096, "D": 4096, "F": 16384},
    },
    operands=(
        Weights(
            norm=Operand("D", P()),
            up=Operand("D F", P(), fan_in="D"),
            down=Operand("F D", P(), fan_in="F"),
        ),
        Operand("B S D", P("data")),
    ),
    local_loss=local_loss,
)

IN_SHARD_MAP: Final = replace(PROGRAM, name="data_parallel_pmean", local_gradients=local_gradients)
"""Differentiated inside the shard_map."""
