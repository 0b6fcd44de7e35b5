"""Two MLPs in a row with Megatron's tensor parallelism, beside data parallelism.

The hidden width is sharded over "tensor". Between the MLPs activations are either whole on every device, and
each MLP ends with a psum; or sharded along the sequence (sequence parallelism), and each MLP begins with a
gather and ends with a reduce-scatter. Then the norm is before the gather, as Megatron has it; or behind it,
as where sequence parallelism was put around the blocks of a model, and all devices normalise all tokens.

Docstrings give the shapes one device sees: b = B / data, s = S / tensor, f = F / tensor.
"""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from dataclasses import replace
from typing import Final

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from bench.programs.data_parallel import Weights
from bench.programs.decoder import rms_norm
from bench.programs.program import Operand, Program, gather, mean_square, scatter

Blocks = tuple[Weights[Array], Weights[Array]]


def psum_loss(blocks: Blocks, x: Array) -> Array:
    """x [b, S, D], up weights [D, f], down weights [f, D] → scalar, the same on every device."""
    for w in blocks:
        hidden = jax.nn.gelu(rms_norm(x, w.norm) @ w.up)
        x = x + lax.psum(hidden @ w.down, "tensor")
    return lax.pmean(mean_square(x), "data")


def sequence_parallel_loss(blocks: Blocks, x: Array) -> Array:
    """x [b, s, D], up weights [D, f], down weights [f, D] → scalar, the same on every device."""
    for w in blocks:
        hidden = jax.nn.gelu(gather(rms_norm(x, w.norm), "tensor", 1) @ w.up)
        x = x + scatter(hidden @ w.down, "tensor", 1)
    return lax.pmean(mean_square(x), ("data", "tensor"))


def norm_behind_loss(blocks: Blocks, x: Array) -> Array:
    """x [b, s, D], up weights [D, f], down weights [f, D] → scalar, the same on every device."""
    for w in blocks:
        hidden = jax.nn.gelu(rms_norm(gather(x, "tensor", 1), w.norm) @ w.up)
        x = x + scatter(hidden @ w.down, "tensor", 1)
    return lax.pmean(mean_square(x), ("data", "tensor"))


_WEIGHTS: Final = Weights(
    norm=Operand("D", P()),
    up=Operand("D F", P(None, "tensor"), fan_in="D"),
    down=Operand("F D", P("tensor"), fan_in="F"),
)

PSUM: Final = Program(
    name="megatron_mlp",
    mesh_shape=(2, 4),
    axis_names=("data", "tensor"),
    sizes={
        "small": {"B": 4, "S": 8, "D": 16, "F": 32},
        "real": {"B": 8, "S": 4096, "D": 8192, "F": 32768},
    },
    operands=((_WEIGHTS, _WEIGHTS), Operand("B S D", P("data"))),
    local_loss=psum_loss,
)

SEQUENCE_PARALLEL: Final = replace(
    PSUM,
    name="megatron_mlp_sequence",
    operands=((_WEIGHTS, _WEIGHTS), Operand("B S D", P("data", "tensor"))),
    local_loss=sequence_parallel_loss,
)

NORM_BEHIND: Final = replace(SEQUENCE_PARALLEL, name="megatron_mlp_norm_behind", local_loss=norm_behind_loss)
