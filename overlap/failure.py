"""What to say when the pass fails on a program: which collective it was working on, and whose fault it is."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

from passes.collective import Collective
from passes.decide import ask
from passes.graph import COLLECTIVES, Dataflow, Op


def report_request(name: str, error: Exception) -> str:
    """The warning of a program that could not be rewritten, naming the site where it is known."""
    site = failing_site(error)
    where = f" ({site})" if site else ""
    return (
        f"overlap_collectives could not rewrite {name}{where}; the original program runs instead. "
        f"Please report this, with the program: {type(error).__name__}: {error}"
    )


def of_policy(error: Exception) -> bool:
    """Whether the user's own policy raised it."""
    return any(frame.f_code is ask.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def failing_site(error: Exception) -> str | None:
    """The collective (or else the equation) that the pass was working on, and its source line, if known.

    It is read from the frames that the exception passed through, innermost first, so that no stage of the
    pass has to keep account of where it is.
    """
    try:
        frames = [list(f.f_locals.values()) for f, _ in traceback.walk_tb(error.__traceback__)][::-1]
        ops = [op for held in frames for op in _ops(held)]
        op = next((op for op in ops if op.name in COLLECTIVES), ops[0] if ops else None)
        return None if op is None else f"at the {op.name} at {op.source}"
    except Exception:
        return None


def _ops(held: list[Any]) -> Iterator[Op]:
    """The operations among the values of a frame: themselves, or by number in the frame's dataflow graph."""
    flow = next((value for value in held if isinstance(value, Dataflow)), None)
    for value in held:
        if isinstance(value, Op):
            yield value
        elif flow is not None:
            # A ring, a decision and a match hold a collective, a chain the number of its operation.
            collective = getattr(value, "collective", value)
            number = collective if collective is not value else None
            if isinstance(collective, Collective):
                number = collective.op
            if isinstance(number, int):
                yield flow.ops[number]
