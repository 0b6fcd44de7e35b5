"""Sums over some axes that are then scattered over others: scattered first, so that the scatter has its dots.

Differentiation of weights that are sharded inside a pod and the same in all sums a whole gradient over the
pods, then scatters it inside each. The two commute; the other way round a dot comes before the scatter, which
becomes a ring, and only a device's own part travels between pods. (A TPU's compiler turns them round too, but
makes no ring.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from passes.collective import Collective, read_collective, unsupported
from passes.graph import Dataflow

Pair = tuple[int, int]
"""The numbers of a sum and of the reduce_scatter that alone reads it."""


def sums_before_scatters(flow: Dataflow) -> tuple[Pair, ...]:
    """The sums and reduce_scatters, one directly after the other, that may change places."""
    found = []
    for index in flow.live:
        scatter = _collective(flow, index, "reduce_scatter")
        if scatter is None or not scatter.tiled:
            continue
        before = next(flow.before(index), None)
        total = None if before is None else _collective(flow, before, "psum")
        if before is None or total is None or {*total.axes} & {*scatter.axes}:
            continue
        (whole,), (between,) = flow.ops[before].inputs, flow.ops[before].outputs
        if isinstance(whole, int) and flow.users[between] == (index,):
            found.append((before, index))
    return tuple(found)


def scattered_first(flow: Dataflow, pairs: Iterable[Pair]) -> Dataflow:
    """The graph with these pairs turned round; all numbers stay, of operations and of values."""
    ops, avals = list(flow.ops), list(flow.avals)
    for total, scatter in pairs:
        (whole,), (between,) = ops[total].inputs, ops[total].outputs
        (result,) = ops[scatter].outputs
        assert isinstance(whole, int)
        avals[between] = avals[whole].update(shape=avals[result].shape)
        ops[total], ops[scatter] = (
            dataclasses.replace(ops[scatter], inputs=(whole,), outputs=(between,)),
            dataclasses.replace(ops[total], inputs=(between,), outputs=(result,)),
        )
    return dataclasses.replace(flow, ops=tuple(ops), avals=tuple(avals))


def _collective(flow: Dataflow, index: int, kind: str) -> Collective | None:
    """The operation as a collective of that kind among all devices of its axes, if a ring could be one."""
    found = read_collective(flow, index)
    if found is None or found.kind != kind or found.groups is not None or unsupported(flow, found):
        return None
    return found
