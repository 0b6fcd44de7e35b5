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


def scatter_of(flow: Dataflow, total: Collective) -> Collective | None:
    """The reduce_scatter, over other axes, that alone reads a sum; None where there is none."""
    (value,) = flow.ops[total.op].outputs
    readers = flow.users[value]
    after = read_collective(flow, readers[0]) if len(readers) == 1 and readers[0] >= 0 else None
    if after is None or after.kind != "reduce_scatter" or {*after.axes} & {*total.axes}:
        return None
    return after


def sums_before_scatters(flow: Dataflow) -> tuple[Pair, ...]:
    """The sums and reduce_scatters, one directly after the other, that may change places."""
    found = []
    for index in flow.live:
        total = read_collective(flow, index)
        if total is None or total.kind != "psum" or not _among_all(flow, total):
            continue
        scatter = scatter_of(flow, total)
        if scatter is None or not scatter.tiled or not _among_all(flow, scatter):
            continue
        if isinstance(flow.ops[index].inputs[0], int):
            found.append((index, scatter.op))
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


def _among_all(flow: Dataflow, collective: Collective) -> bool:
    """Whether all devices of its axes take part, and a ring could stand in for it."""
    return collective.groups is None and unsupported(flow, collective) is None
