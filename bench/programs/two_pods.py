"""The MLP on two pods: data parallelism over the slow axis between them, FSDP inside each.

Each pod has all the weights. Left to itself, differentiation sums a weight's whole gradient over the pods,
then reduce-scatters it inside each. Weights marked as varying over the pods before they are gathered turn
that round, so that only a device's own part travels between pods.
"""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from dataclasses import replace
from typing import Final

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from bench.programs.data_parallel import Weights
from bench.programs.fsdp_mlp import SIZES, sharded_mlp, sharded_weights
from bench.programs.program import Operand, Program, mean_square


def local_loss(w: Weights[Array], x: Array) -> Array:
    """Scalar, the same on every device."""
    return lax.pmean(mean_square(sharded_mlp("data", w, x)), ("pod", "data"))


def scatter_first_loss(w: Weights[Array], x: Array) -> Array:
    """The same; gradients cross between pods once they are scattered."""
    return local_loss(jax.tree.map(lambda weight: lax.pcast(weight, "pod", to="varying"), w), x)


PROGRAM: Final = Program(
    name="two_pods",
    mesh_shape=(2, 4),
    axis_names=("pod", "data"),
    sizes=SIZES,
    operands=(
        sharded_weights("data"),
        Operand("B S D", P(("pod", "data"))),
    ),
    local_loss=local_loss,
)

SCATTER_FIRST: Final = replace(PROGRAM, name="two_pods_scatter_first", local_loss=scatter_first_loss)
