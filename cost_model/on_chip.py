"""What of a dot's operands is on chip before it starts, and dots as they are written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from cost_model.hardware import Hardware
from cost_model.matmul import Matmul, matmul_s
from cost_model.windows import Along

LITTLE: Final = 1 / 16
"""Share of the room on chip that an operand of one step may take to be there, as compilers do it."""

Side = Literal["lhs", "rhs"]
"""An operand of a dot."""

SIDES: Final[tuple[Side, Side]] = ("lhs", "rhs")
OTHER: Final[dict[Side, Side]] = {"lhs": "rhs", "rhs": "lhs"}


def side_bytes(matmul: Matmul, side: Side | None) -> float:
    """Bytes of that operand; 0 of none."""
    return 0.0 if side is None else matmul.lhs_bytes if side == "lhs" else matmul.rhs_bytes


def beside_bytes(held_bytes: float, hardware: Hardware) -> float:
    """Bytes of another operand that may be on chip beside what is held.

    A TPU's compiler places them: what takes little of the room that is left arrives there, or is fetched
    beforehand.
    """
    return LITTLE * (hardware.on_chip_bytes - held_bytes) if hardware.network == "torus" else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A dot as it is written.

    Attributes:
      seconds: its time, with what it waits for.
      waited_s: until its operands are on chip.
      on_chip: the operands that it finds there.
    """

    seconds: float
    waited_s: float = 0.0
    on_chip: tuple[Side, ...] = ()


def wholes(
    matmuls: tuple[Matmul, ...],
    hardware: Hardware,
    before_s: float,
    sent: Side | None = None,
    placed: Along | None = None,
) -> tuple[Whole, ...]:
    """The whole dots.

    The smaller operand of each is fetched beforehand, beside other work, if it fits. So may the larger be,
    beside it or in its place, for which the dot then waits if that takes longer than what runs before it.
    Where nothing does, a TPU's first dot waits for the larger operand that fits, as compilers have it,
    whether or not that is faster.

    Args:
      matmuls: the dots.
      hardware: where they run.
      before_s: what runs before them.
      sent: the operand of the first dot that a collective before it has made.
      placed: where they put their results into larger arrays; see `matmul_s`.
    """
    found: list[Whole] = []
    for matmul in matmuls:
        if hardware.network == "torus" and not before_s:
            found.append(_first(matmul, hardware, placed))
            before_s = sum((dot.seconds for dot in found), 0.0)
        else:
            far = None if hardware.receives_on_chip else sent
            dot, before_s = _later(matmul, hardware, before_s, far, placed)
            found.append(dot)
        sent = None
    return tuple(found)


def wholes_s(
    matmuls: tuple[Matmul, ...],
    hardware: Hardware,
    before_s: float,
    sent: Side | None = None,
    placed: Along | None = None,
) -> float:
    """Seconds of the whole dots: see `wholes`."""
    return sum((dot.seconds for dot in wholes(matmuls, hardware, before_s, sent, placed)), 0.0)


def _first(matmul: Matmul, hardware: Hardware, placed: Along | None) -> Whole:
    """A TPU's dot that nothing runs before, and what it waits for."""
    fitting: list[Side] = [side for side in SIDES if side_bytes(matmul, side) <= hardware.on_chip_bytes]
    held = max(fitting, key=lambda side: side_bytes(matmul, side), default=None)
    near = _beside(matmul, hardware, held)
    return _whole(matmul, hardware, near, placed, side_bytes(matmul, held) / hardware.hbm_bytes_per_s)


def _later(
    matmul: Matmul, hardware: Hardware, before_s: float, far: Side | None, placed: Along | None
) -> tuple[Whole, float]:
    """A dot that something runs before, and how much of that is left to fetch more beside it.

    Args:
      matmul: the dot.
      hardware: where it runs.
      before_s: what runs before.
      far: the operand that cannot be on chip.
      placed: where it puts its result.
    """
    sizes = [math.inf if side == far else side_bytes(matmul, side) for side in SIDES]
    smaller = SIDES[0] if sizes[0] < sizes[1] else SIDES[1]
    held = smaller if min(sizes) <= hardware.on_chip_bytes else None
    dot = _whole(matmul, hardware, _beside(matmul, hardware, held, far), placed)
    if hardware.network == "torus" and max(sizes) <= hardware.on_chip_bytes:
        fetch_s = max(sizes) / hardware.hbm_bytes_per_s
        both = sum(sizes) <= hardware.on_chip_bytes
        near = SIDES if both else _beside(matmul, hardware, OTHER[smaller])
        fetched = _whole(matmul, hardware, near, placed, max(0.0, fetch_s - before_s))
        if fetched.seconds < dot.seconds:
            return fetched, max(0.0, before_s - fetch_s)
    return dot, before_s


def _beside(
    matmul: Matmul, hardware: Hardware, held: Side | None, far: Side | None = None
) -> tuple[Side, ...]:
    """The operand that is held on chip, and the other if that takes little room beside it."""
    little_bytes = beside_bytes(side_bytes(matmul, held), hardware)
    return tuple(
        side for side in SIDES if side == held or (side != far and side_bytes(matmul, side) <= little_bytes)
    )


def _whole(
    matmul: Matmul,
    hardware: Hardware,
    near: tuple[Side, ...],
    placed: Along | None = None,
    waited_s: float = 0.0,
) -> Whole:
    """A dot that finds those operands on chip once it has waited so long."""
    lhs, rhs = ("lhs" in near, "rhs" in near)
    dot_s = matmul_s(matmul, hardware, lhs_on_chip=lhs, rhs_on_chip=rhs, placed=placed)
    return Whole(seconds=dot_s + waited_s, waited_s=waited_s, on_chip=near)
