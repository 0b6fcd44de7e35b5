"""The time of one pass through a transformer layer: as it stands, with rings, and at best.

`plain` runs every collective and every matmul one after the other. `overlapped` makes rings, as this
library does: each collective next to a dot is priced as rings of every form; those that gain most, and the
chip's `least_gain` at least, are taken first, and a dot belongs to one of them; the other collectives stay
as they are, with nothing beside them. `ideal` is the scaling book's max(compute, communication) of the whole
pass. A compiler that runs collectives beside other layers' matmuls lies between `plain` and `ideal`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cost_model.axis import Axis
from cost_model.dtypes import dtype_bytes
from cost_model.hardware import Hardware
from cost_model.layer import AxisName, Move, Pass
from cost_model.matmul import matmul_s
from cost_model.on_chip import Side
from cost_model.plain_chain import PlainChain, PlainDot, best, pays
from cost_model.ring import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveTime:
    """What became of one collective.

    Attributes:
      move: the collective.
      seconds: as it is.
      ring: the form of the rings that replace it; empty where it stays.
      saved_s: what they save.
    """

    move: Move
    seconds: float
    ring: str = ""
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Seconds of a pass through one layer.

    Attributes:
      compute_s: all dots.
      moves: the collectives.
    """

    compute_s: float
    moves: tuple[MoveTime, ...]

    @property
    def communication_s(self) -> float:
        """All collectives, as they are."""
        return sum((move.seconds for move in self.moves), 0.0)

    @property
    def plain_s(self) -> float:
        """Dots and collectives one after the other."""
        return self.compute_s + self.communication_s

    @property
    def overlapped_s(self) -> float:
        """With rings where they gain."""
        return self.plain_s - sum(move.saved_s for move in self.moves)

    @property
    def ideal_s(self) -> float:
        """The longer of compute and communication: everything hidden behind everything."""
        return max(self.compute_s, self.communication_s)


Price = Callable[[PlainChain, AxisName], tuple[str, Estimate]]
"""The best rings of a chain along a mesh axis: their form in words, and their price."""


def pass_time(
    of: Pass, axes: Mapping[AxisName, Axis], hardware: Hardware, dtype: str, price: Price | None = None
) -> PassTime:
    """Prices one pass.

    Args:
      of: the pass.
      axes: the mesh axes that its collectives use.
      hardware: of the matmuls.
      dtype: of what is sent.
      price: prices a chain's rings, to be given if it remembers them; by default each anew.
    """

    def fresh(chain: PlainChain, axis: AxisName) -> tuple[str, Estimate]:
        form, priced = best(chain, axes[axis])
        return str(form), priced

    rings: list[tuple[float, int, str]] = []
    seconds: list[float] = []
    for number, move in enumerate(of.moves):
        chain = _chain(of, move, dtype)
        if chain is None:
            seconds.append(axes[move.axis].all_reduce_s(move.elements * dtype_bytes(dtype)))
            continue
        form, priced = (price or fresh)(chain, move.axis)
        seconds.append(priced.collective_s)
        if pays(priced, axes[move.axis].hardware):
            rings.append((priced.benefit_s, -number, form))
    taken: set[str] = set()
    saved: dict[int, tuple[float, str]] = {}
    for benefit_s, negative, form in sorted(rings, reverse=True):
        names = {name for name, _ in of.moves[-negative].dots}
        if not names & taken:
            taken |= names
            saved[-negative] = benefit_s, form
    return PassTime(
        compute_s=sum((matmul_s(dot, hardware) for dot in of.dots.values()), 0.0),
        moves=tuple(
            MoveTime(
                move=move,
                seconds=seconds[number],
                ring=saved.get(number, (0.0, ""))[1],
                saved_s=saved.get(number, (0.0, ""))[0],
            )
            for number, move in enumerate(of.moves)
        ),
    )


def _chain(of: Pass, move: Move, dtype: str) -> PlainChain | None:
    if move.pattern == "all_reduce":
        return None
    # A contracting dim of a weight is gathered with that; else what is gathered are activations, the lhs.
    operand: Side = "rhs" if move.free == "n" else "lhs"
    return PlainChain(
        pattern=move.pattern,
        dots=tuple(
            PlainDot(of.dots[name], cut, move.apart, operand if cut == "k" else None)
            for name, cut in move.dots
        ),
        elements=move.elements,
        dtype=dtype,
        free=move.free,
    )
