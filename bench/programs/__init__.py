"""Realistic programs shared by the tests, the benchmarks and the demo; none knows the library."""

from typing import Final

from bench.programs import (
    data_parallel,
    esm2_layer,
    fsdp_mlp,
    fsdp_tensor_layer,
    megatron_mlp,
    mixture_of_experts,
    two_pods,
)
from bench.programs.program import Program

PROGRAMS: Final[tuple[Program, ...]] = (
    data_parallel.PROGRAM,
    data_parallel.IN_SHARD_MAP,
    fsdp_mlp.PROGRAM,
    megatron_mlp.PSUM,
    megatron_mlp.SEQUENCE_PARALLEL,
    megatron_mlp.NORM_BEHIND,
    fsdp_tensor_layer.PROGRAM,
    esm2_layer.PROGRAM,
    mixture_of_experts.PROGRAM,
    two_pods.PROGRAM,
    two_pods.SCATTER_FIRST,
)
"""One training step's layer each; the decoder, a whole training step, is a module of its own."""
