"""Where rings start their hops themselves, and where the compiler starts them."""

from __future__ import annotations

import jax.numpy as jnp

from passes import shims
from passes.collective import Collective
from passes.graph import Dataflow


def may_start_explicitly(flow: Dataflow, collective: Collective) -> bool:
    """Whether a collective's ring may start its hops itself, on devices whose compiler takes that.

    What is differentiated afterwards may not. Nor may a ring over the manual axes of a mesh that has others:
    the partitioner lays out anew, or gathers, what a started hop takes, and compilers then refuse it. Nor may
    one whose operand is the same in every iteration of a loop: XLA moves a start out of the loop and leaves
    in it what waits for the hop, which ends the process. Nor may one of complex numbers, which the TPU
    compiler takes apart, but not where a hop is started of them.
    """
    operands = flow.ops[collective.op].inputs
    sent = flow.aval(operands[0])
    return (
        shims.EXPLICIT_STARTS
        and not flow.differentiable
        and not jnp.issubdtype(sent.dtype, jnp.complexfloating)
        and shims.all_manual(sent)
        and not flow.steady.issuperset(operands)
    )


def starts_explicitly(flow: Dataflow, collective: Collective) -> bool:
    """Whether a collective's ring does start its hops itself."""
    operand = flow.aval(flow.ops[collective.op].inputs[0])
    return may_start_explicitly(flow, collective) and shims.explicit_starts(operand)
