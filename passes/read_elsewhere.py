"""What a chain's dots read that dots elsewhere in the program read too: XLA:GPU may make one of such dots."""

from __future__ import annotations

from collections.abc import Iterator

from passes import shims
from passes.chains import AllGatherDot, DotReduceScatter
from passes.graph import Dataflow
from passes.starts import starts_explicitly


def read_elsewhere(flow: Dataflow, chain: AllGatherDot | DotReduceScatter) -> tuple[int, ...]:
    """The operands that are to wait for every hop beside which the chain's ring runs its dots.

    One dot of two that run beside hops of different rings would have to wait for both hops, and XLA:GPU,
    which lets one be on its way at a time, then finds no order and refuses the program; even where it does,
    both rings wait for each other. It leaves dots alone of which neither operand is the same.

    Returns:
      whole values, from outside of the chain; none where the compiler starts the hops, or is not XLA:GPU.
    """
    (operand, *_) = flow.ops[chain.collective.op].inputs
    if not shims.on_gpu(flow.aval(operand)) or not starts_explicitly(flow, chain):
        return ()
    made = {value for op in chain.ops for value in flow.ops[op].outputs}
    own = {dot.op for dot in chain.dots}
    operands = dict.fromkeys(value for dot in chain.dots for value in flow.ops[dot.op].inputs)
    return tuple(
        value
        for value in operands
        if isinstance(value, int) and value not in made and not own.issuperset(_multiplied_by(flow, value))
    )


def _multiplied_by(flow: Dataflow, value: int) -> Iterator[int]:
    """The dots that read a value, in whatever form, and the calls that may have such dots."""
    waiting = [_source(flow, value)]
    while waiting:
        for user in flow.users[waiting.pop()]:
            op = flow.ops[user] if user >= 0 else None
            if op is not None and flow.form_of(op) is not None:
                waiting += op.outputs
            elif op is not None and (op.name == "dot_general" or op.bodies):
                yield user


def _source(flow: Dataflow, value: int) -> int:
    """What a value is another form of."""
    while (made_by := flow.producer.get(value)) is not None:
        of = flow.form_of(flow.ops[made_by])
        if of is None:
            break
        value = of
    return value
