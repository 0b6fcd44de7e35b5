"""Random chains: a collective with its dots, of sizes drawn with a seed.

Patterns and, of each pattern, the chip's slices take turns, so that every chip has as many chains of each
pattern. Sizes are even in the logarithm. Rows are multiples of 8, all else of 128; of what is cut along K the
shards are multiples of 128, or in one of four of 8. A chain is drawn again if

- communication is not ``RATIO`` times compute, as ``grid`` estimates it from published rates;
- a device would hold more than ``grid.HELD_BYTES``, results included;
- it has been drawn already, or its dot is one of those from which the tables of matmuls were made or judged.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from bench.matmul_samples import Sample
from bench.schedules import grid, programs
from bench.schedules.case import SLICES, Case, Slice, Width
from bench.schedules.programs import AXIS, RESULT, Problem
from bench.schedules.run import RESULTS
from cost_model.dtypes import dtype_bytes

SEED: Final = 20284
"""Not 20260 to 20283, 777 or 778, to whose chains prices were fitted: the sample is to be unseen."""

RATIO: Final = (0.05, 10.0)
"""Communication over compute, as estimated."""

ROWS: Final = (8, 65536)
WIDTHS: Final = (128, 32768)
"""Between what M, and what K and N are drawn, on one device."""

PATTERNS: Final = (
    "gather_free",
    "gather_contracting",
    "gather_batch",
    "gather_shared",
    "gather_features",
    "scatter_free",
    "psum",
)
"""Those of the grid of schedules, and activations that are gathered along the features that dots contract."""

CONTRACTING: Final = ("gather_contracting", "gather_features")
"""The patterns that gather what is contracted: weights, and activations."""

DTYPES: Final = {"bfloat16": 8, "int8": 1, "float32": 1}
"""How often each comes up, of ten."""

TILE_ROWS: Final = 8
LANES: Final = 128
ODD_SHARDS: Final = 0.25
"""How often shards along K are no multiples of ``LANES``, as those of a width of 5120 over 16 devices."""

CHIPS: Final = tuple(dict.fromkeys(where.chip for where in SLICES))
_SLICES: Final = {str(where): where for where in SLICES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One chain.

    Attributes:
      slice: where it runs.
      pattern: a name of ``PATTERNS``.
      m, k, n: of its dot on one device before the rewrite: after a gather, before a scatter.
      count: dots that share a gather (of `gather_features` one or more), or entries of the batch; else 1.
      dtype: of what is multiplied.
    """

    slice: Slice
    pattern: str
    m: int
    k: int
    n: int
    count: int = 1
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """All of it, such as ``"v5e:4x4 gather_shared 3*4096x512x1024 bfloat16"``."""
        count = f"{self.count}*" if self.count > 1 else ""
        return f"{self.slice} {self.pattern} {count}{self.m}x{self.k}x{self.n} {self.dtype}"

    @classmethod
    def from_name(cls, name: str) -> Drawn:
        """The chain of a name.

        Raises:
          ValueError: it is no chain's name.
        """
        where, pattern, sizes, dtype = name.split(" ")
        count, _, shape = sizes.rpartition("*")
        m, k, n = map(int, shape.split("x"))
        if where not in _SLICES or pattern not in PATTERNS:
            raise ValueError(f"{name!r} is no chain's name")
        return cls(slice=_SLICES[where], pattern=pattern, m=m, k=k, n=n, count=int(count or 1), dtype=dtype)

    @property
    def chip(self) -> str:
        """The chip's short name."""
        return self.slice.chip

    @property
    def case(self) -> Case:
        """The case of the grid of schedules that computes the like: sizes stand for a width and tokens."""
        p = self.slice.axis_size
        tokens, d, f = {
            "gather_free": (self.m // p, self.k, self.n * p),
            "gather_shared": (self.m // p, self.k, self.n * p),
            "gather_features": (self.m, self.k, self.n),
            "gather_contracting": (self.m, self.k, self.n),
            "gather_batch": (self.m, self.k, 4 * self.n),
            "scatter_free": (self.m // p, self.n, self.k * p),
            "psum": (self.m // p, self.n, self.k * p),
        }[self.pattern]
        like = {"gather_shared": "gather_free", "gather_features": "gather_contracting"}
        pattern = like.get(self.pattern, self.pattern)
        width = Width("drawn", d, f, gated=False)
        return Case(slice=self.slice, pattern=pattern, width=width, tokens=tokens, dtype=self.dtype)


def problem(chain: Drawn) -> Problem:
    """The chain's program, of whole arrays."""
    one = programs.problem(chain.case)
    shared = {"gather_shared": _rows, "gather_features": _features}.get(chain.pattern)
    if shared is None:
        return one
    return dataclasses.replace(
        shared(chain, one),
        automatic=lambda mesh: lambda x, *weights: _dots(x, weights),
        flops=chain.count * one.flops,
    )


def _rows(chain: Drawn, one: Problem) -> Problem:
    """``all_gather(x) @ w`` for each w.

    Args:
      chain: what was drawn.
      one: the problem of one such dot.
    """
    x, w = one.shapes
    return dataclasses.replace(
        one,
        shapes=(x, *[w] * chain.count),
        in_specs=(one.in_specs[0], *[P(None, AXIS)] * chain.count),
        out_specs=(one.out_specs,) * chain.count,
        manual=lambda x, *weights: _dots(lax.all_gather(x, AXIS, axis=0, tiled=True), weights),
        textbook=lambda x, *weights: programs.ring_rows_dots(x, weights, chain.slice.axis_size),
    )


def _features(chain: Drawn, one: Problem) -> Problem:
    """``all_gather(x, along its features) @ w`` for each w, of which each device has other columns.

    Args:
      chain: what was drawn.
      one: the problem of the same dot whose weights are gathered.
    """
    p, (moved,) = chain.slice.axis_size, one.moved

    def textbook(x: Array, *weights: Array) -> tuple[Array, ...]:
        columns = x.shape[1]
        totals = [jnp.zeros((x.shape[0], w.shape[1]), RESULT[chain.dtype]) for w in weights]
        for owner, shard in programs.ring_gather(x, p):
            for number, w in enumerate(weights):
                block = lax.dynamic_slice_in_dim(w, owner * columns, columns, 0)
                totals[number] = totals[number] + programs.dot(shard, block)
        return tuple(totals)

    return dataclasses.replace(
        one,
        shapes=((chain.m, chain.k), *[(chain.k, chain.n * p)] * chain.count),
        in_specs=(P(None, AXIS),) * (1 + chain.count),
        out_specs=(P(None, AXIS),) * chain.count,
        manual=lambda x, *weights: _dots(lax.all_gather(x, AXIS, axis=1, tiled=True), weights),
        textbook=textbook,
        moved=(dataclasses.replace(moved, full_bytes=moved.full_bytes * chain.m // chain.n),),
    )


def _dots(x: Array, weights: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(programs.dot(x, w) for w in weights)


def ratio(chain: Drawn) -> float:
    """Communication over compute, both at the chip's published rates."""
    made, topology = problem(chain), grid.estimated_topology(chain.slice)
    dots_s = made.flops / topology.hardware.flops_for(chain.dtype)
    return grid.moved_s(made.moved, topology, grid.groups(chain.slice)) / dots_s


def held_bytes(chain: Drawn) -> float:
    """Bytes that a device holds at least: operands, the largest array that is moved, and results."""
    results = chain.count * chain.m * chain.n * dtype_bytes(RESULT[chain.dtype])
    return problem(chain).held_bytes(chain.case) + results


def draw(chip: str, count: int, seed: int = SEED) -> tuple[Drawn, ...]:
    """So many different chains of a chip; fewer are the first of more."""
    chance = random.Random(f"{seed}/{chip}")
    slices = [where for where in SLICES if where.chip == chip]
    found: dict[str, Drawn] = {}
    number = 0
    while len(found) < count:
        pattern = PATTERNS[number % len(PATTERNS)]
        where = slices[number // len(PATTERNS) % len(slices)]
        chain = _draw_one(chance, where, pattern)
        if _admitted(chain) and chain.name not in found:
            found[chain.name] = chain
            number += 1
    return tuple(found.values())


def sample(chains: Sequence[Drawn], least: int) -> tuple[Drawn, ...]:
    """At least so many of the chains, as many of every chip and pattern, evenly by their ratios.

    What is decided about a chain has no say. Chips and patterns take turns, so that a part is a sample too.
    """
    strata: dict[tuple[str, str], list[Drawn]] = {}
    for chain in chains:
        strata.setdefault((chain.chip, chain.pattern), []).append(chain)
    each = math.ceil(least / len(strata)) if strata else 0
    taken = [list(_spread(sorted(stratum, key=ratio), each)) for stratum in strata.values()]
    for number, stratum in enumerate(taken):
        random.Random(number).shuffle(stratum)
    return tuple(
        stratum[turn]
        for turn in range(max(map(len, taken), default=0))
        for stratum in taken
        if turn < len(stratum)
    )


def _spread(chains: Sequence[Drawn], count: int) -> Iterator[Drawn]:
    """The middle of each of so many equal parts."""
    count = min(count, len(chains))
    for number in range(count):
        yield chains[(2 * number + 1) * len(chains) // (2 * count)]


def _draw_one(chance: random.Random, where: Slice, pattern: str) -> Drawn:
    p = where.axis_size
    dtype = chance.choices(list(DTYPES), list(DTYPES.values()))[0]
    rows_cut = pattern not in (*CONTRACTING, "gather_batch")
    k_grain = LANES
    if pattern in CONTRACTING:
        k_grain = p * (TILE_ROWS if chance.random() < ODD_SHARDS else LANES)
    m = _size(chance, ROWS, p * TILE_ROWS if rows_cut else TILE_ROWS)
    k, n = _size(chance, WIDTHS, k_grain), _size(chance, WIDTHS, LANES)
    shared = {"gather_shared": (2, 3), "gather_features": (1, 1, 2, 3)}
    count = p if pattern == "gather_batch" else chance.choice(shared.get(pattern, (1,)))
    return Drawn(slice=where, pattern=pattern, m=m, k=k, n=n, count=count, dtype=dtype)


def _size(chance: random.Random, limits: tuple[int, int], grain: int) -> int:
    """A multiple of the grain between the limits, even in the logarithm."""
    low, high = max(limits[0], grain), limits[1]
    return max(1, round(math.exp(chance.uniform(math.log(low), math.log(high))) / grain)) * grain


def _admitted(chain: Drawn) -> bool:
    batch = chain.count if chain.pattern == "gather_batch" else 1
    return (
        held_bytes(chain) <= grid.HELD_BYTES
        and grid.within(ratio(chain), RATIO)
        and (batch, chain.m, chain.k, chain.n) not in known_dots()
    )


@functools.cache
def known_dots() -> frozenset[tuple[int, int, int, int]]:
    """Batch, M, K and N of all matmuls from which tables were made or by which they were judged."""
    found: set[tuple[int, int, int, int]] = set()
    for path in sorted((RESULTS / "matmul_samples").glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            dots: Iterator[Any] = (Sample.from_list(fields).dot for fields in json.loads(line)["samples"])
            found.update((dot.batch, dot.m, dot.k, dot.n) for dot in dots)
    return frozenset(found)
