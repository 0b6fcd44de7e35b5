"""Where rings start their hops themselves, and where the compiler starts them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from cost_model.dtypes import dtype_bytes
from passes import shims
from passes.chains import AllGatherDot, Chain
from passes.graph import Dataflow


def may_start_explicitly(flow: Dataflow, chain: Chain) -> bool:
    """Whether a chain's ring may start its hops itself, on devices whose compiler takes that.

    What is differentiated afterwards may not. Nor may a ring over the manual axes of a mesh that has others:
    the partitioner lays out anew, or gathers, what a started hop takes, and compilers then refuse it. Nor may
    one whose operand is the same in every iteration of a loop: XLA moves a start out of the loop and leaves
    in it what waits for the hop, which ends the process. Nor may any of a program for TPUs of several slices,
    be its ring within one: rewriting hops between slices, the compiler ends the process over a start behind a
    barrier (libtpu 0.0.50). Nor may one of what compilers take apart, or put together, but not where a hop is
    started of it.
    """
    operands = flow.ops[chain.collective.op].inputs
    sent = flow.aval(operands[0])
    wire = flow.avals[chain.wire] if isinstance(chain, AllGatherDot) else sent
    return (
        shims.EXPLICIT_STARTS
        and not flow.differentiable
        and not flow.several_slices
        and not any(map(_taken_apart, (sent, wire)))
        and shims.all_manual(sent)
        and not flow.steady.issuperset(operands)
    )


def starts_explicitly(flow: Dataflow, chain: Chain) -> bool:
    """Whether a chain's ring does start its hops itself."""
    operand = flow.aval(flow.ops[chain.collective.op].inputs[0])
    return may_start_explicitly(flow, chain) and shims.explicit_starts(operand)


def _taken_apart(aval: Any) -> bool:
    """Whether hops send another type in place of a value's, where the compiler starts them.

    Complex numbers on TPUs; on GPUs numbers of less than a byte, which travel as they lie in memory.
    """
    if jnp.issubdtype(aval.dtype, jnp.complexfloating):
        return True
    return shims.on_gpu(aval) and dtype_bytes(aval.dtype.name) < 1
