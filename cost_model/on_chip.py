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
      stays: whether its result stays there, and is not written to main memory.
    """

    seconds: float
    waited_s: float = 0.0
    on_chip: tuple[Side, ...] = ()
    stays: bool = False


def wholes(
    matmuls: tuple[Matmul, ...],
    hardware: Hardware,
    before_s: float,
    sent: Side | None = None,
    placed: Along | None = None,
    *,
    summed: bool = False,
    again: Side | None = None,
) -> tuple[Whole, ...]:
    """The whole dots.

    A TPU's compiler brings an operand of a program's first dot on chip before the program begins, and waits
    for it, whether or not that is faster: the largest that fits, of those that no collective makes. It is
    fetched again for the program's next run before this one ends ("cross-program prefetch"), and its place is
    nobody else's: what a later dot finds on chip has room beside it, and beside what the dot before has. (So
    it was in all of 49 compiled chains of several dots, of all chips.)

    Of a later dot the smaller operand is fetched beside other work, if it fits. So may the larger be, beside
    it or in its place, if that is faster; the dot waits if it takes longer than what runs before.

    Args:
      matmuls: the dots.
      hardware: where they run.
      before_s: what runs before them.
      sent: the operand of the first dot that a collective before it has made.
      placed: where they put their results into larger arrays; see `matmul_s`.
      summed: whether a collective adds up their results, which it finds on chip, where it brings what it
        makes there, if they fit beside the operands.
      again: the operand of the first dot that others like it have read before; None where it is the first.
    """
    found: list[Whole] = []
    kept_bytes = fetched_bytes = 0.0
    for number, matmul in enumerate(matmuls):
        far = None if number or hardware.receives_on_chip else sent
        if again is not None and not number and side_bytes(matmul, again) <= hardware.on_chip_bytes:
            dot = _whole(matmul, hardware, _beside(matmul, hardware, again, far), placed)
        elif number or again is not None or hardware.network != "torus":
            room_bytes = hardware.on_chip_bytes - kept_bytes - fetched_bytes
            dot, before_s = _later(matmul, hardware, before_s, far, placed, room_bytes)
        else:
            dot, before_s = _first(matmul, hardware, before_s, sent, placed, summed)
        near_bytes = max((side_bytes(matmul, side) for side in dot.on_chip if side != sent), default=0.0)
        if number:
            fetched_bytes = near_bytes
        elif hardware.network == "torus":
            kept_bytes = near_bytes
        found.append(dot)
    return tuple(found)


def wholes_s(
    matmuls: tuple[Matmul, ...],
    hardware: Hardware,
    before_s: float,
    sent: Side | None = None,
    placed: Along | None = None,
    again: Side | None = None,
) -> float:
    """Seconds of the whole dots: see `wholes`."""
    dots = wholes(matmuls, hardware, before_s, sent, placed, again=again)
    return sum((dot.seconds for dot in dots), 0.0)


def _first(
    matmul: Matmul,
    hardware: Hardware,
    before_s: float,
    sent: Side | None,
    placed: Along | None,
    summed: bool,
) -> tuple[Whole, float]:
    """A TPU program's first dot, with what it waits for, and how much time there is to fetch more.

    What has been sent is on chip if it arrives there, and has room beside the other operand.
    """
    own = [side for side in SIDES if side != sent and side_bytes(matmul, side) <= hardware.on_chip_bytes]
    held = max(own, key=lambda side: side_bytes(matmul, side), default=None)
    fetch_s = side_bytes(matmul, held) / hardware.hbm_bytes_per_s
    near = [side for side in (held,) if side is not None]
    if before_s:
        near = list(_beside(matmul, hardware, held, None if hardware.receives_on_chip else sent))
    both_bytes = side_bytes(matmul, sent) + side_bytes(matmul, held)
    arrives = hardware.receives_on_chip and both_bytes <= hardware.on_chip_bytes
    if sent is not None and sent not in near and arrives:
        near.append(sent)
    room_bytes = hardware.results_on_chip * hardware.on_chip_bytes - sum(side_bytes(matmul, s) for s in near)
    stays = summed and hardware.receives_on_chip and matmul.result_bytes <= room_bytes
    dot = _whole(matmul, hardware, tuple(near), placed, max(0.0, fetch_s - before_s), stays=stays)
    return dot, max(0.0, before_s - fetch_s) + dot.seconds - dot.waited_s


def _later(
    matmul: Matmul,
    hardware: Hardware,
    before_s: float,
    far: Side | None,
    placed: Along | None,
    room_bytes: float,
) -> tuple[Whole, float]:
    """A dot that something runs before, and how much of that is left to fetch more beside it.

    Args:
      matmul: the dot.
      hardware: where it runs.
      before_s: what runs before.
      far: the operand that cannot be on chip.
      placed: where it puts its result.
      room_bytes: for its operands on chip.
    """
    sizes = [math.inf if side == far else side_bytes(matmul, side) for side in SIDES]
    smaller = SIDES[0] if sizes[0] < sizes[1] else SIDES[1]
    held = smaller if min(sizes) <= room_bytes else None
    dot = _whole(matmul, hardware, _beside(matmul, hardware, held, far), placed)
    if hardware.network == "torus" and max(sizes) <= room_bytes:
        fetch_s = max(sizes) / hardware.hbm_bytes_per_s
        both = sum(sizes) <= room_bytes
        near = SIDES if both else _beside(matmul, hardware, OTHER[smaller])
        fetched = _whole(matmul, hardware, near, placed, max(0.0, fetch_s - before_s))
        if fetched.seconds < dot.seconds:
            return fetched, max(0.0, before_s - fetch_s) + fetched.seconds - fetched.waited_s
    return dot, before_s + dot.seconds


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
    *,
    stays: bool = False,
) -> Whole:
    """A dot that finds those operands on chip once it has waited so long; its result may stay there."""
    lhs, rhs = ("lhs" in near, "rhs" in near)
    dot_s = matmul_s(matmul, hardware, lhs_on_chip=lhs, rhs_on_chip=rhs, placed=placed, result_on_chip=stays)
    spared = stays and not hardware.places_slowly
    return Whole(seconds=dot_s + waited_s, waited_s=waited_s, on_chip=near, stays=spared)
