"""An MLP with FSDP: weights sharded, gathered just before use, and again in the backward pass.

In[B_X, D] · Win[D_X, F] · Wout[F, D_X] → Out[B_X, D].
Docstrings give the shapes one device sees: b = B / fsdp.
"""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from collections.abc import Mapping
from functools import partial
from typing import Final

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from bench.programs.data_parallel import Weights, mlp
from bench.programs.program import Operand, Program, Size, gather, mean_square


def sharded_mlp(axis: str, w: Weights[Array], x: Array) -> Array:
    """[b, S, D] → [b, S, D]; up weights [D / fsdp, F], down weights [F, D / fsdp]."""
    return mlp(w._replace(up=gather(w.up, axis, 0), down=gather(w.down, axis, 1)), x)


def local_loss(w: Weights[Array], x: Array) -> Array:
    """Scalar, the same on every device."""
    block = jax.checkpoint(partial(sharded_mlp, "fsdp"))
    return lax.pmean(mean_square(block(w, x)), "fsdp")


SIZES: Final[Mapping[Size, Mapping[str, int]]] = {
    "small": {"B": 8, "S": 4, "D": 16, "F": 32},
    "real": {"B": 16, "S": 4096, "D": 8192, "F": 28672},
}


def sharded_weights(axis: str) -> Weights[Operand]:
    """What the weights are, sharded over an axis."""
    return Weights(
        norm=Operand("D", P()),
        up=Operand("D F", P(axis), fan_in="D"),
        down=Operand("F D", P(None, axis), fan_in="F"),
    )


PROGRAM: Final = Program(
    name="fsdp_mlp",
    mesh_shape=(8,),
    axis_names=("fsdp",),
    sizes=SIZES,
    operands=(
        sharded_weights("fsdp"),
        Operand("B S D", P("fsdp")),
    ),
    local_loss=local_loss,
)
