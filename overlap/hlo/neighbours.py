"""Which collectives stand next to a matmul, and so could be decomposed into a ring around it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, Protocol

from overlap.hlo.costs import Costs
from overlap.hlo.module import Computation, Instruction, Module, collective_instruction
from overlap.hlo.uses import Uses

_THROUGH: Final = frozenset(
    {
        "bitcast",
        "copy",
        "copy-start",
        "copy-done",
        "convert",
        "reshape",
        "transpose",
        "get-tuple-element",
        "opt-barrier",
        "slice",
        "all-gather-done",
        "all-reduce-done",
        "reduce-scatter-done",
        "all-to-all-done",
        "collective-permute-done",
        "async-done",
        "async-update",
        "slice-start",
        "slice-done",
    }
)
"""Opcodes that hand a value on without computing with it."""


class Neighbours:
    """What consumes and produces the values of a module's computations."""

    def __init__(self, module: Module, costs: Costs) -> None:
        self._module = module
        self._costs = costs
        self._uses = Uses()

    def next_to_dot(self, computation: Computation, start: Instruction) -> Literal["feeds", "follows", ""]:
        """Whether a matmul consumes ("feeds") or produces ("follows") what a collective moves.

        Directly, or through copies, bitcasts, casts and what else computes nothing. `start` is the
        collective, or the start of its pair.
        """
        names = computation.by_name
        if self._reaches(
            computation, start, lambda i: [user for user, _ in self._uses.of(computation, i.name)]
        ):
            return "feeds"
        if self._reaches(computation, start, lambda i: [names[o] for o in i.operands]):
            return "follows"
        return ""

    def _reaches(self, computation: Computation, start: Instruction, step: _Step) -> bool:
        pending, seen = list(step(start)), {start.name}
        while pending:
            value = pending.pop()
            if value.name in seen:
                continue
            seen.add(value.name)
            if value.opcode in _THROUGH:
                pending.extend(step(value))
                continue
            if value.opcode in ("while", "call", "conditional", "parameter", "constant", "tuple"):
                continue
            if value.opcode == "fusion" and collective_instruction(self._module, value) is not None:
                pending.extend(step(value))  # carries on an asynchronous collective beside its own work
                continue
            cost = self._costs.cost(computation, value)
            if cost.kind == "matmul":
                return True
            if value.opcode == "fusion" and cost.kind == "copy":
                pending.extend(step(value))
        return False


class _Step(Protocol):
    """From an instruction to those next to it."""

    def __call__(self, instruction: Instruction) -> Iterable[Instruction]: ...
