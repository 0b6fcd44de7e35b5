"""Sums over devices that are only added up: one sum, so that one ring stands in for all of them.

Differentiation of what several dots read, such as a block's input before its projections, sums the gradient
of every dot over the devices, and adds the sums up. ``psum(a) + psum(b)`` is ``psum(a + b)``: XLA writes it
so for TPUs and GPUs too (its passes all-reduce-reassociate and reduce-scatter-reassociate). It does not where
something else stands between, as in ``x + psum(a) + psum(b)``, a layer whose blocks are side by side.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Final

from passes.graph import REDUCTIONS, SCATTERS, Dataflow, Op, Operand

_ADDITIONS: Final = ("add", "add_any")


def summed_once(flow: Dataflow) -> Dataflow:
    """The graph with those sums as one, in the place of the last of the additions; values keep their numbers.

    What the other sums make is read by nothing then.
    """
    kinds = {value: kind for value, kind in _sums(flow) if _is_added(flow, value)}
    if len(kinds) < 2:
        return flow
    written = _Written(flow, kinds)
    lead: set[int] = set()
    for index, op in flow.live.items():
        if op.name in _ADDITIONS and any(operand in kinds or operand in lead for operand in _values(op)):
            if _is_added(flow, op.outputs[0]):
                lead.update(op.outputs)
            else:
                written.replace(index, lead)
    return written.flow() if written.summed else flow


class _Written:
    """The graph, with some additions replaced.

    Args:
      flow: the graph.
      kinds: results of sums over devices that are only added to something → what tells which can be one.
    """

    def __init__(self, flow: Dataflow, kinds: Mapping[int, Any]) -> None:
        self.old = flow
        self.kinds = kinds
        self.avals = list(flow.avals)
        self.summed: dict[int, int] = {}
        self.instead: dict[int, list[Op]] = {}

    def flow(self) -> Dataflow:
        """The new graph."""
        ops = tuple(op for index, op in enumerate(self.old.ops) for op in self.instead.get(index, (op,)))
        return dataclasses.replace(self.old, ops=ops, avals=tuple(self.avals), summed=self.summed)

    def replace(self, last: int, lead: Set[int]) -> None:
        """Has what an addition adds up, with those that lead to it, summed over the devices once.

        Args:
          last: the addition.
          lead: results of additions that are only added to something, with sums over devices in them.
        """
        additions, added = self._added(last, lead)
        groups: dict[Any, list[int]] = {}
        others: list[Operand] = []
        for operand in added:
            if isinstance(operand, int) and operand in self.kinds:
                groups.setdefault(self.kinds[operand], []).append(operand)
            else:
                others.append(operand)
        if all(len(group) == 1 for group in groups.values()):
            return
        (result,) = self.old.ops[last].outputs
        alone = len(groups) == 1 and not others
        spare = [self.old.ops[index] for index in additions]
        ops: list[Op] = []
        for *firsts, final in groups.values():
            if firsts:
                makers = [self.old.producer[value] for value in (*firsts, final)]
                ops += self._sum(makers, spare, result if alone else final)
                self.instead[makers[-1]] = []
                self.summed |= dict.fromkeys(firsts, result if alone else final)
        if not alone:
            totals = [group[-1] for group in groups.values()]
            ops += self._add([*totals, *others], spare, self.avals[result], result)
        self.instead |= {index: [] for index in additions} | {last: ops}

    def _added(self, last: int, lead: Set[int]) -> tuple[list[int], list[Operand]]:
        """The addition and those that lead to it, and what they add up, from left to right."""
        additions, added = [last], []
        waiting = [*reversed(self.old.ops[last].inputs)]
        while waiting:
            operand = waiting.pop()
            if isinstance(operand, int) and operand in lead:
                additions.append(self.old.producer[operand])
                waiting += reversed(self.old.ops[additions[-1]].inputs)
            else:
                added.append(operand)
        return additions, added

    def _sum(self, makers: Sequence[int], spare: list[Op], result: int) -> list[Op]:
        """Operations that make the result of several sums over devices as one."""
        parts = [self.old.ops[maker].inputs[0] for maker in makers]
        partial_sum = self._value(self.old.aval(parts[0]))
        additions = self._add(parts, spare, self.avals[partial_sum], partial_sum)
        total = self.old.ops[makers[-1]]
        return [*additions, dataclasses.replace(total, inputs=(partial_sum,), outputs=(result,))]

    def _add(self, added: Sequence[Operand], spare: list[Op], aval: Any, result: int) -> list[Op]:
        """Operations, of those that are spare, that add operands up into a value, from left to right."""
        made = [*(self._value(aval) for _ in added[2:]), result]
        pairs = zip((added[0], *made), added[1:], made, strict=False)
        return [
            dataclasses.replace(spare.pop(), inputs=(before, operand), outputs=(total,))
            for before, operand, total in pairs
        ]

    def _value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1


def _sums(flow: Dataflow) -> Iterator[tuple[int, Any]]:
    """The results of sums over devices, each with what tells which of them can be one."""
    for op in itertools.chain.from_iterable(flow.collectives.values()):
        if op.name in REDUCTIONS | SCATTERS and len(op.outputs) == len(_values(op)) == 1:
            (result,) = op.outputs
            yield result, (op.name, repr(sorted(op.params.items())), flow.avals[result])


def _is_added(flow: Dataflow, value: int) -> bool:
    """Whether a value is read by an addition, and nothing else."""
    users = flow.users[value]
    return len(users) == 1 and users[0] >= 0 and flow.ops[users[0]].name in _ADDITIONS


def _values(op: Op) -> list[int]:
    """What an operation reads, without literals."""
    return [operand for operand in op.inputs if isinstance(operand, int)]
