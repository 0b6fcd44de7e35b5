"""The form of rings: the part of a ring schedule that has a price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

from cost_model.axis import Directions
from cost_model.offloaded import in_words
from cost_model.ring_work import Cut


class AnyForm(Protocol):
    """What prices ask of a `Form`, or of a ring schedule; see there."""

    @property
    def route(self) -> Literal["ring", "exchange", "all_gather", "all_reduce", "reduce_scatter"]: ...
    @property
    def directions(self) -> Directions: ...
    @property
    def rings(self) -> int: ...
    @property
    def walks(self) -> bool: ...
    @property
    def chains(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def across(self) -> bool: ...
    @property
    def joined(self) -> bool: ...
    @property
    def halfway(self) -> bool: ...
    @property
    def late(self) -> bool: ...
    @property
    def cut(self) -> Cut: ...
    @property
    def wide_wire(self) -> bool: ...
    @property
    def pieces(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the rings of a chain run. See `RingWork` for what is not told here.

    Attributes:
      route: a ring; an exchange, where each block goes straight to where it belongs; or by which collectives
        pieces go in turn. See `offloaded`.
      across: whether pieces are cut along another dim than the gathered or scattered one.
      halfway: whether whole shards of a gather go half way round, both ways.
      late: whether what comes last of a gather comes in halves, one after the other.
      wide_wire: whether partial sums of narrow floats travel in float32.
    """

    route: Literal["ring", "exchange", "all_gather", "all_reduce", "reduce_scatter"] = "ring"
    directions: Directions = 1
    rings: int = 1
    walks: bool = False
    chains: int = 1
    columns: int = 1
    across: bool = False
    joined: bool = False
    halfway: bool = False
    late: bool = False
    cut: Cut = "dot"
    wide_wire: bool = False

    @property
    def pieces(self) -> int:
        """Pieces of a shard, and so of a step."""
        return self.directions * self.rings * self.chains

    def __str__(self) -> str:
        if self.route == "exchange":
            return "exchange"
        if self.route != "ring":
            return in_words(self.route, self.chains, across=self.across)
        words = ["unidirectional" if self.directions == 1 else "bidirectional"]
        if self.rings > 1:
            words.append(f"{self.rings} {'walks' if self.walks else 'rings'}")
        words += cut_in_words(self)
        if self.late:
            words.append("placed late")
        if self.wide_wire:
            words.append("float32 wire")
        return ", ".join(words)


EXCHANGE: Final = Form(route="exchange")
"""The one form of an all_to_all chain."""


def cut_in_words(form: AnyForm) -> list[str]:
    """How a ring's blocks are cut, as forms and schedules say it; nothing where they are not."""
    said = {
        f"{form.chains} chains": form.chains > 1,
        f"{form.columns} columns": form.columns > 1,
        "cut across": form.across,
        "joined": form.joined,
        "half way": form.halfway,
        f"cut {form.cut}": form.cut != "dot",
    }
    return [words for words, so in said.items() if so]
