"""Rings of sums that run at once: of some chips the compiler finds no order for the hops of many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cost_model import from_device_kind
from passes import shims
from passes.chains import AllGatherDot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from passes.graph import Op
    from passes.plan import Plan

_LIMITED: Final = ("tpu_v5e", "tpu_7x")
"""Chips whose compiler begins with the hops of several rings before it is done with those of one."""

_MOST: Final = 4
"""Hops that rings may hold between them. The compilers let one more be on its way, the one that goes on."""


class InFlight:
    """The rings of sums of one traced body.

    A ring of n pieces makes its next product when n - 1 of its hops are on their way: n - 2 are held by a
    ring that waits for one more. Where rings that do not need each other hold all that may be on their way,
    XLA:TPU finds nothing to go on with and refuses the program. So a ring waits for the end of earlier ones.

    Args:
      alone: whether no other body of the same computation has such rings, which could not be waited for.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self._alone = alone
        self._running: list[tuple[int, Sequence[Any]]] = []

    def may_start(self, aval: Any, held: int) -> bool:
        """Whether a ring that may hold so many hops, of values like this, may start them itself."""
        return self._alone or not held or not _limited(aval)

    def before(self, aval: Any, held: int) -> tuple[Any, ...]:
        """What such a ring is to wait for before its first product."""
        awaited: list[Any] = []
        while _limited(aval) and self._running and held + sum(n for n, _ in self._running) > _MOST:
            awaited += self._running.pop(0)[1]
        return tuple(awaited)

    def ended(self, held: int, sums: Sequence[Any]) -> None:
        """Tells of a ring that starts its hops itself, and of what it has made at its end."""
        if held:
            self._running.append((held, sums))


def rings_are_alone(plan: Plan) -> bool:
    """Whether one body at most of the computation that a plan begins has rings of sums."""
    return sum(_sums(part) for part in _parts(plan)) < 2


def own_computation(op: Op) -> bool:
    """Whether compilers order an operation's bodies each by itself, and make them no part of others."""
    if op.name == "scan":
        return bool(op.params["length"] > 1 and op.params["unroll"] == 1)
    return op.name in ("while", "cond")


def _parts(plan: Plan) -> Iterator[Plan]:
    """The bodies that become one computation, as often as they are called."""
    yield plan
    for index in plan.bodies:
        op = plan.flow.ops[index]
        if not own_computation(op):
            for body in plan.bodies_of(index) * int(op.params.get("unroll", 1)):
                yield from _parts(body)


def _sums(plan: Plan) -> bool:
    """Whether a body has rings of sums."""
    return any(
        ring.schedule.route == "ring" and not isinstance(ring.chain, AllGatherDot) for ring in plan.rings
    )


def _limited(aval: Any) -> bool:
    hardware = from_device_kind(shims.device_kind(aval) or "")
    return hardware is not None and hardware.name in _LIMITED
