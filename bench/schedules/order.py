"""The order in which a schedule starts and ends permutes and multiplies, as a string; what lies between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cost_model import Hardware
from overlap.hlo.costs import Costs
from overlap.hlo.module import Module
from overlap.hlo.steps import Step, Steps

PERMUTES: Final = ("collective-permute", "send")


@dataclass(frozen=True, slots=True)
class Order:
    """A schedule in short.

    Attributes:
      text: in schedule order, S and D for the start and the done of a permute, M for a matmul, C for another
        collective (a synchronous one, or the start of an asynchronous one); a loop's body in brackets.
      permutes: how many permutes there are; a loop's count once.
      idle: names of those with no matmul between start and done.
    """

    text: str
    permutes: int
    idle: tuple[str, ...]


def order(module: Module, hardware: Hardware) -> Order:
    """The order of a scheduled module.

    A permute that a loop starts at its end and waits for in its next turn shows as ``[D M S]``: what lies
    between is looked for around the loop's end.
    """
    steps = Steps(module, Costs(module, hardware))
    text = " ".join(letter for letter, _ in _marks(module.entry, steps, turns=1))
    starts: dict[tuple[str, str], int] = {}
    idle: dict[str, None] = {}
    permutes: set[tuple[str, str]] = set()
    matmuls = 0
    for letter, step in _marks(module.entry, steps, turns=2):
        if letter == "M":
            matmuls += 1
        elif letter == "S" and step is not None:
            starts[step.key] = matmuls
            permutes.add(step.key)
        elif letter == "D" and step is not None and starts.get(step.key) == matmuls:
            idle[step.key[1]] = None
    return Order(text, len(permutes), tuple(idle))


def _marks(name: str, steps: Steps, turns: int) -> Iterator[tuple[str, Step | None]]:
    """Letter and step of everything that counts in a computation and those that it runs.

    The body of a loop comes ``turns`` times.
    """
    waited = {
        step.key
        for step in steps.of(name)
        if step.what == "send" and step.move is not None and step.move.operation in PERMUTES
    }
    for step in steps.of(name):
        if step.what == "compute" and step.cost is not None and step.cost.kind == "matmul":
            yield "M", step
        elif step.what in ("send", "exchange") and step.move is not None:
            permute = step.move.operation in PERMUTES
            yield ("S" if permute else "C"), step
            if permute and step.what == "exchange":
                yield "D", step
        elif step.what == "arrive":
            if step.key in waited:
                yield "D", step
        elif step.what in ("loop", "call", "branch"):
            if step.what == "loop":
                yield f"{step.trips or '?'}×[", None
            for called in step.called * (turns if step.what == "loop" else 1):
                yield from _marks(called, steps, turns)
            if step.what == "loop":
                yield "]", None
