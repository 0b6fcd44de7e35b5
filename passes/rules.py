"""Which form of ring suits which chip, from what its compiler was seen to make of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final, Literal

from cost_model import Axis, Hardware, from_device_kind
from cost_model.form import Form
from cost_model.forms import MOST_PIECES
from cost_model.plain_chain import PlainChain
from cost_model.plain_chain import forms as forms_of
from passes import shims

Pattern = Literal["gather", "scatter"]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The form of a chip's rings for one pattern; directions, rings and columns are left to the cost model.

    Attributes:
      evidence: the run of a benchmark that supports it.
      chains: see ``RingSchedule``.
      across: see ``RingSchedule``; taken where the chain allows it.
      joined: see ``RingSchedule``; None leaves it to the cost model.
      most_pieces: how many hops may be in flight at once.
    """

    evidence: str
    chains: int = 1
    across: bool = False
    joined: bool | None = None
    most_pieces: int = MOST_PIECES

    def admitted(
        self, forms: Iterable[Form], *, gathers: bool, dots: int, explicit: bool
    ) -> tuple[Form, ...]:
        """The forms with which chains are priced.

        Of a scatter the rule's own comes first, as it is the one to take of equal prices.

        Args:
          forms: of rings, and of pieces that go by collectives in turn, which are always priced.
          gathers: whether the chains gather, or scatter.
          dots: how many dots they have.
          explicit: whether hops are started explicitly.
        """
        rings, in_turn = [], []
        for form in forms:
            if form.route != "ring":
                in_turn.append(form)
            elif form.pieces <= self.most_pieces and (
                self._gathers(form, dots, explicit=explicit) if gathers else self._scatters(form)
            ):
                rings.append(form)
        if not gathers:
            rings.sort(key=lambda form: (form.chains, form.across) != (self.chains, self.across))
        return (*rings, *in_turn)

    def _gathers(self, form: Form, dots: int, *, explicit: bool) -> bool:
        """Whether a gather is priced with a form.

        Where the compiler places the starts, it puts few of them before the matmuls that could hide them:
        with three dots a ring half way took 1.25 times as long as priced (v4).
        """
        if form.halfway:
            return not self.joined and (explicit or dots == 1)
        return form.across or self.joined is None or form.joined == (self.joined and form.pieces > 1)

    def _scatters(self, form: Form) -> bool:
        """Whether a scatter is priced with a form, or a psum, whose chunks all are."""
        if form.columns > 1:
            return True
        if form.across:
            # A third of a block's rows may be few, and cutting across may copy much: the prices decide.
            return (form.walks and form.chains == 1) or (self.across and form.chains == self.chains)
        return form.chains in (1, self.chains)


_RUN: Final = "bench/results/tpu_schedules.md"
_IMPLIED_RUN: Final = "bench/results/tpu_schedules_implied.md"

EXPLICIT: Final[dict[tuple[str, Pattern], Rule]] = {
    ("tpu_v4", "gather"): Rule(_RUN),
    ("tpu_v4", "scatter"): Rule(_RUN, chains=2, across=True),
    ("tpu_v5e", "gather"): Rule(_RUN),
    ("tpu_v5e", "scatter"): Rule(_RUN, chains=2, across=True),
    ("tpu_v5p", "gather"): Rule(_RUN),
    ("tpu_v5p", "scatter"): Rule(_RUN, chains=2, across=True),
    ("tpu_v6e", "gather"): Rule(_RUN),
    ("tpu_v6e", "scatter"): Rule(_RUN, chains=2, across=True),
    ("tpu_7x", "gather"): Rule(_RUN),
    ("tpu_7x", "scatter"): Rule(_RUN, chains=2, across=True),
}
"""Where hops are started explicitly (jax 0.12 or newer)."""

IMPLIED: Final[dict[tuple[str, Pattern], Rule]] = {
    **EXPLICIT,
    ("tpu_v5p", "gather"): Rule(_RUN, joined=True),
    ("tpu_v5p", "scatter"): Rule(_IMPLIED_RUN, chains=2, across=True, most_pieces=2),
    ("tpu_v6e", "scatter"): Rule(_IMPLIED_RUN, chains=2, across=True, most_pieces=2),
    ("tpu_7x", "scatter"): Rule(_IMPLIED_RUN, chains=2, across=True, most_pieces=2),
}
"""Where the compiler places the starts: it places some too late to hide a hop behind more than one matmul.

Of more than two pieces on v5p and v6e rings of scatters then took up to 1.6 times as long as written.
"""

DEFAULT: Final[dict[Pattern, Rule]] = {
    "gather": Rule("bench/results/gpu_schedules.md"),
    "scatter": Rule("bench/results/gpu_schedules.md"),
}


def rule(hardware: Hardware, *, gathers: bool, explicit: bool) -> Rule:
    """The rule for chains that gather, or that scatter, on some hardware.

    It is the compiler's, and so that of the kind of device: one core of a chip, or a chip whose rates were
    measured, has a name of its own.

    Args:
      hardware: where the rings run.
      gathers: which of the two.
      explicit: whether hops are started explicitly.
    """
    pattern: Pattern = "gather" if gathers else "scatter"
    kinds = map(from_device_kind, hardware.device_kinds)
    chip = next((known.name for known in kinds if known is not None), hardware.name)
    table = EXPLICIT if explicit else IMPLIED
    return table.get((chip, pattern), DEFAULT[pattern])


def considered(chain: PlainChain, axis: Axis) -> tuple[Form, ...]:
    """The forms of rings that the pass prices: those of the chip's rule."""
    explicit, gathers, every = shims.EXPLICIT_STARTS, chain.gathers, forms_of(chain, axis)
    known = rule(axis.hardware, gathers=gathers, explicit=explicit)
    return known.admitted(every, gathers=gathers, dots=len(chain.dots), explicit=explicit) or every
