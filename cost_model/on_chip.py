"""What of a dot's operands is on chip before it starts, and the time of dots as they are written."""

from __future__ import annotations

import math
from typing import Final, Literal

from cost_model.hardware import Hardware
from cost_model.matmul import Matmul, matmul_s

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


def wholes_s(
    matmuls: tuple[Matmul, ...], hardware: Hardware, before_s: float, sent: Side | None = None
) -> float:
    """Seconds of the whole dots.

    The smaller operand of each is fetched beforehand, beside other work, if it fits. So may the larger be,
    beside it or in its place, for which the dot then waits if that takes longer than what runs before it.
    Where nothing does, a TPU's first dot waits for the larger operand that fits, as compilers have it,
    whether or not that is faster.

    Args:
      matmuls: the dots.
      hardware: where they run.
      before_s: what runs before them.
      sent: the operand of the first dot that a collective before it has made.
    """
    total_s = 0.0
    for matmul in matmuls:
        if hardware.network == "torus" and not before_s:
            total_s += _first_s(matmul, hardware)
            before_s = total_s
        else:
            far = None if hardware.receives_on_chip else sent
            dot_s, before_s = _later_s(matmul, hardware, before_s, far)
            total_s += dot_s
        sent = None
    return total_s


def _first_s(matmul: Matmul, hardware: Hardware) -> float:
    """Seconds of a TPU's dot that nothing runs before, and of what it waits for."""
    fitting: list[Side] = [side for side in SIDES if side_bytes(matmul, side) <= hardware.on_chip_bytes]
    held = max(fitting, key=lambda side: side_bytes(matmul, side), default=None)
    return _with_s(matmul, hardware, held) + side_bytes(matmul, held) / hardware.hbm_bytes_per_s


def _later_s(matmul: Matmul, hardware: Hardware, before_s: float, far: Side | None) -> tuple[float, float]:
    """Seconds of a dot that something runs before, and how much of that is left to fetch more beside it.

    Args:
      matmul: the dot.
      hardware: where it runs.
      before_s: what runs before.
      far: the operand that cannot be on chip.
    """
    sizes = [math.inf if side == far else side_bytes(matmul, side) for side in SIDES]
    smaller = SIDES[0] if sizes[0] < sizes[1] else SIDES[1]
    dot_s = _with_s(matmul, hardware, smaller if min(sizes) <= hardware.on_chip_bytes else None, far)
    if hardware.network == "torus" and max(sizes) <= hardware.on_chip_bytes:
        fetch_s = max(sizes) / hardware.hbm_bytes_per_s
        if sum(sizes) <= hardware.on_chip_bytes:
            fetched_s = matmul_s(matmul, hardware, lhs_on_chip=True, rhs_on_chip=True)
        else:
            fetched_s = _with_s(matmul, hardware, OTHER[smaller])
        fetched_s += max(0.0, fetch_s - before_s)
        if fetched_s < dot_s:
            return fetched_s, max(0.0, before_s - fetch_s)
    return dot_s, before_s


def _with_s(matmul: Matmul, hardware: Hardware, held: Side | None, far: Side | None = None) -> float:
    """Seconds of a dot that finds one operand on chip, and the other if that takes little room beside it."""
    little_bytes = beside_bytes(side_bytes(matmul, held), hardware)
    lhs, rhs = (side == held or (side != far and side_bytes(matmul, side) <= little_bytes) for side in SIDES)
    return matmul_s(matmul, hardware, lhs_on_chip=lhs, rhs_on_chip=rhs)
