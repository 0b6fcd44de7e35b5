"""Loops of a jaxpr: what in them is the same wherever their operands are, found as a fixpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from passes import shims

LOOPS = ("scan", "while")
Same = Sequence[bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """Where the arguments of a loop's bodies come from; nothing is kept of the bodies.

    Attributes:
      operands: of each body (named by its parameter) the loop's operands that its arguments are at first. The
        last body makes what is carried, and results; one before it tells whether the loop goes on.
      carried: the operands that become something else from one iteration to the next.
    """

    operands: Mapping[str, Sequence[int]]
    carried: slice

    @classmethod
    def of(cls, eqn: Any) -> Loop:
        """That of an equation of ``LOOPS``."""
        bodies = ("jaxpr",) if eqn.primitive.name == "scan" else ("cond_jaxpr", "body_jaxpr")
        return cls({body: tuple(shims.loop_operands(eqn, body)) for body in bodies}, shims.loop_carried(eqn))

    def same(self, given: Same, of_body: Callable[[str, Same], Same]) -> tuple[Mapping[str, Same], Same]:
        """Which arguments of the bodies are the same in every iteration, and which results of the loop.

        Results are so if the loop ends in the same iteration everywhere.

        Args:
          given: which operands are the same.
          of_body: tells which results of a body are, by which of its arguments.
        """
        known = list(given)
        *ends, step = self.operands
        while True:
            arguments = {body: [known[i] for i in operands] for body, operands in self.operands.items()}
            made, before = of_body(step, arguments[step]), known[self.carried]
            known[self.carried] = map(all, zip(before, made, strict=False))
            if known[self.carried] == before:
                together = all(all(of_body(body, arguments[body])) for body in ends)
                return arguments, [together and same for same in (*before, *made[len(before) :])]
