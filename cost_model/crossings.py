"""How many messages at once cross the busiest link of a torus.

Links are numbers here: a permute on a pod crosses 50,000 of them, and an exchange has as many permutes as an
axis has devices.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

Way = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A slice, where in it a message starts, and how many links it goes up (negative: down) in each dimension."""


def busiest_link(shape: tuple[int, ...], ways: Iterable[Way]) -> int:
    """The most messages that cross one direction of one link, if each goes its way dimension by dimension."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    crossed: defaultdict[tuple[int, bool], Counter[int]] = defaultdict(Counter)
    for domain, source, ahead in ways:
        chip = domain * math.prod(shape) + sum(map(math.prod, zip(source, strides, strict=True)))
        for dim, (at, along) in enumerate(zip(source, ahead, strict=True)):
            length, stride = shape[dim], strides[dim]
            line = chip - at * stride
            chips = [line + (at + i) % length * stride for i in range(0, along, 1 if along > 0 else -1)]
            crossed[dim, along > 0].update(chips)
            chip = line + (at + along) % length * stride
    return max((max(counts.values(), default=0) for counts in crossed.values()), default=0)
