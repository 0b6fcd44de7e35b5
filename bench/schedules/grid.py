"""The grid: which cases are measured, chosen by a rule that knows sizes and no outcome.

A cell is a slice and a pattern. Its candidates are all widths with all numbers of tokens. Cells are counted
through, and each begins at another candidate, so that over the grid every width and every number of tokens
comes up about as often. Of a cell are taken

1. the first candidate in which communication is 0.3 to 3 times compute; if there is none, 0.1 to 5 times;
2. in every fifth cell also the next of another width in which it is 0.1 to 5 times, and not 0.3 to 3.

The ratio is an estimate: the bytes over all links of the axis (``cost_model.group_collectives``) over the
FLOPs at the chip's peak. A candidate for which a device would hold more than ``HELD_BYTES`` is left out.

Element types other than bfloat16 are of one width, ``OTHER_WIDTH``: each pattern of ``OTHER_PATTERNS`` on the
first slice of each chip, with the tokens of rule 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

import cost_model
from bench.schedules import programs
from bench.schedules.case import H100, SLICES, TOKENS, WIDTHS, Case, Slice, Width
from bench.schedules.programs import PATTERNS, Moved
from cost_model import Topology
from cost_model.group_collectives import Groups, all_gather_s
from overlap import tpu_slice

MOST: Final = (0.3, 3.0)
"""Communication over compute in most rows, and in those that the summary's means are of."""

WIDEST: Final = (0.1, 5.0)
"""Communication over compute in every row, as estimated."""

HELD_BYTES: Final = 8 * 10**9
"""Half the memory of the smallest device (a v5e chip, a v4 core)."""

EXTRA: Final = 5
"""Every so many cells have a second row; prime to the number of patterns, so that all patterns get some."""

OTHER_DTYPES: Final = ("int8", "float32")
OTHER_WIDTH: Final = WIDTHS[1]
OTHER_PATTERNS: Final = ("gather_free", "gather_contracting", "scatter_free")

GPU_TOKENS: Final = (1024, 4096)


def tpu_cases() -> tuple[Case, ...]:
    """The rows for TPUs, in the order in which they are run: chips take turns, so that a part is a sample."""
    cells: dict[tuple[int, int], list[Case]] = {}
    for number, (where, pattern) in enumerate(itertools.product(SLICES, PATTERNS)):
        if where.others > 1 and pattern == "mlp_grad":
            continue  # gradients of the weights would add sums over the mesh's other axis
        turn = number % len(PATTERNS), number // len(PATTERNS)
        cells[turn] = list(_of_cell(where, pattern, number))
    others = [list(_of_other_dtypes(where)) for where in _first_of_each_chip()]
    in_turn = itertools.zip_longest(*(cells[turn] for turn in sorted(cells)))
    ranked = itertools.chain(*in_turn, *itertools.zip_longest(*others))
    return tuple(case for case in ranked if case is not None)


def gpu_cases(where: Slice = H100) -> tuple[Case, ...]:
    """The rows for eight GPUs: every pattern in two sizes of alternating widths."""
    return tuple(
        Case(slice=where, pattern=pattern, width=WIDTHS[(number + turn) % len(WIDTHS)], tokens=tokens)
        for turn, tokens in enumerate(GPU_TOKENS)
        for number, pattern in enumerate(PATTERNS)
    )


def estimated_ratio(case: Case) -> float:
    """Communication over compute, both at the chip's published rates."""
    problem = programs.problem(case)
    topology = estimated_topology(case.slice)
    peak = topology.hardware.flops_for(case.dtype)
    return moved_s(problem.moved, topology, groups(case.slice)) / (problem.flops / peak)


def moved_s(moved: tuple[Moved, ...], topology: Topology, groups: Groups) -> float:
    """Seconds that the collectives' bytes take over all link directions of the axis: the least possible.

    An all-reduce counts as a reduce-scatter and an all-gather.
    """
    return sum(
        (2 if one.kind == "all_reduce" else 1) * all_gather_s(one.full_bytes, groups, topology)
        for one in moved
    )


def groups(where: Slice) -> tuple[tuple[int, ...], ...]:
    """The devices that communicate with each other, by their position in the flattened mesh."""
    numbers = np.arange(where.devices).reshape(where.mesh_shape)
    lines = np.moveaxis(numbers, where.axis, -1).reshape(-1, where.axis_size)
    return tuple(tuple(int(device) for device in line) for line in lines)


@lru_cache
def estimated_topology(where: Slice) -> Topology:
    """The links between the devices of a slice, without asking the compiler for them."""
    hardware = cost_model.by_name(where.hardware)
    if hardware.network == "switch":
        return Topology.switch(where.devices, hardware)
    _, shape = tpu_slice.read_shape(where.topology)
    devices: Any = tpu_slice.devices(hardware, shape, where.devices, where.mesh_shape)
    return Topology.from_devices(devices, hardware)


def _of_cell(where: Slice, pattern: str, number: int) -> Iterator[Case]:
    """The rows of a cell, of which there are at most two."""
    fit = _fitting(_candidates(where, pattern, number))
    first = _first(fit)
    if first is None:
        return
    yield first
    if number % EXTRA == 0:
        for case, ratio in fit:
            if case.width != first.width and within(ratio, WIDEST) and not within(ratio, MOST):
                yield case
                return


def _first(fit: Sequence[tuple[Case, float]]) -> Case | None:
    """Rule 1, of candidates with their ratios."""
    for limits in (MOST, WIDEST):
        for case, ratio in fit:
            if within(ratio, limits):
                return case
    return None


def _candidates(where: Slice, pattern: str, number: int) -> Iterator[Case]:
    """Every width with every number of tokens once, from a beginning that depends on the cell's number.

    Successive candidates differ in both.
    """
    count = math.lcm(len(WIDTHS), len(TOKENS))
    for step in range(count):
        width: Width = WIDTHS[(number + number // len(PATTERNS) + step) % len(WIDTHS)]
        tokens = TOKENS[(3 * number + step) % len(TOKENS)]
        yield Case(slice=where, pattern=pattern, width=width, tokens=tokens)


def _of_other_dtypes(where: Slice) -> Iterator[Case]:
    for number, (dtype, pattern) in enumerate(itertools.product(OTHER_DTYPES, OTHER_PATTERNS)):
        turned = [TOKENS[(3 * number + step) % len(TOKENS)] for step in range(len(TOKENS))]
        cases = [
            Case(slice=where, pattern=pattern, width=OTHER_WIDTH, tokens=tokens, dtype=dtype)
            for tokens in turned
        ]
        if (chosen := _first(_fitting(cases))) is not None:
            yield chosen


def _fitting(cases: Iterable[Case]) -> list[tuple[Case, float]]:
    """The cases that a device has memory for, with their ratios."""
    return [
        (case, estimated_ratio(case))
        for case in cases
        if programs.problem(case).held_bytes(case) <= HELD_BYTES
    ]


def _first_of_each_chip() -> tuple[Slice, ...]:
    return tuple({where.chip: where for where in reversed(SLICES)}.values())[::-1]


def within(value: float, limits: tuple[float, float]) -> bool:
    """Whether a value is between two limits."""
    return limits[0] <= value <= limits[1]
