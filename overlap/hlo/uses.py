"""Who reads a value: the users of each instruction, indexed once per computation."""

from __future__ import annotations

from overlap.hlo.module import Computation, Instruction


class Uses:
    """The users of every value of a module's computations."""

    def __init__(self) -> None:
        self._users: dict[str, dict[str, list[tuple[Instruction, int]]]] = {}

    def of(self, computation: Computation, name: str) -> list[tuple[Instruction, int]]:
        """The instructions that read a value, each with the position of the operand; in schedule order."""
        known = self._users.get(computation.name)
        if known is None:
            known = self._users[computation.name] = {}
            for instruction in computation.instructions:
                for position, operand in enumerate(instruction.operands):
                    known.setdefault(operand, []).append((instruction, position))
        return known.get(name, [])
