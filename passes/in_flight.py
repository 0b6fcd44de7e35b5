"""Rings of sums that run at once: of some chips the compiler finds no order for the hops of many."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, Final

from passes.chains import AllGatherDot
from passes.chip import chip_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from passes.graph import Op, Operand
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
    """Whether rings of sums of one body only can run at once, in the computation that a plan begins.

    They do where no other body has any, and where those of each body need all of the bodies before it, as a
    backward pass needs the forward pass's.
    """
    return sum(map(bool, map(_sums, _parts(plan)))) < 2 or _in_turn(plan)


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


def _sums(plan: Plan) -> frozenset[int]:
    """The collectives of a body that are rings of sums."""
    return frozenset(
        ring.chain.collective.op
        for ring in plan.rings
        if ring.schedule.route == "ring" and not isinstance(ring.chain, AllGatherDot)
    )


def _in_turn(plan: Plan) -> bool:
    """Whether the rings of sums of each body need those of all bodies before it."""
    count = 0

    def needed(plan: Plan, given: Sequence[int]) -> list[int] | None:
        """The rings so far that each result needs, as bits; None where rings may run beside other bodies'."""
        nonlocal count
        flow, sums, own = plan.flow, _sums(plan), 0
        needs = dict(zip(flow.inputs, given, strict=True))

        def of(operand: Operand) -> int:
            return needs.get(operand, 0) if isinstance(operand, int) else 0

        for index, op in flow.live.items():
            bits = functools.reduce(operator.or_, map(of, op.inputs), 0)
            results = [bits] * len(op.outputs)
            if index in sums:
                others = (1 << count) - 1 & ~own
                if bits & others != others:
                    return None
                own |= 1 << count
                results = [bits | 1 << count] * len(op.outputs)
                count += 1
            for body in () if own_computation(op) else plan.bodies_of(index):
                passed = op.inputs[len(op.inputs) - len(body.flow.inputs) :]
                made = needed(body, [of(operand) for operand in passed])
                if made is None or (op.name == "scan" and any(map(_sums, _parts(body)))):
                    return None
                results = made
            needs.update(zip(op.outputs, results, strict=True))
        return [of(operand) for operand in flow.outputs]

    return needed(plan, [0] * len(plan.flow.inputs)) is not None


def _limited(aval: Any) -> bool:
    hardware = chip_of(aval)
    return hardware is not None and hardware.name in _LIMITED
