"""Programs of a collective with its dots, what they give, and choices of schedules for them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import overlap
import passes
from cost_model import by_name
from passes.schedule import RingSchedule
from tests.passes import spmd

Numbers = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A program per device, and what it gives.

    Attributes:
      body: of a device's arguments; returns one or more arrays.
      shapes: of the arguments, for P devices and blocks of b elements.
      reference: from lists of the devices' float64 arguments to the devices' results, per array.
      columns: whether what travels can be cut into columns, or a psum's blocks into chunks.
      across: whether the pieces can be cut along another dim than the gathered or scattered one.
      tiled: whether blocks of b elements can be cut; else they are of one.
    """

    body: Callable[..., Any]
    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]]
    reference: Callable[..., list[spmd.Shards]]
    columns: bool = False
    across: bool = False
    tiled: bool = True


ACROSS = 9
"""Elements of the dim along which a pattern can be cut across."""


def gather(x: Any, dim: int = 0, *, tiled: bool = True) -> Any:
    return lax.all_gather(x, "x", axis=dim, tiled=tiled)


def scatter(y: Any, dim: int = 0, *, tiled: bool = True) -> Any:
    return lax.psum_scatter(y, "x", scatter_dimension=dim, tiled=tiled)


def per_device(f: Callable[..., Any], *arguments: Any) -> spmd.Shards:
    return [f(*each) for each in zip(*arguments, strict=True)]


def three_dots(g: Any, w: Any, v: Any, u: Any) -> Any:
    """Dots of one gathered array on its free dim, from the other side, and on its contracting dim."""
    return g @ w, v @ g.T, u @ g


def two_sums(einsum: Any, g: Any, w: Any, v: Any) -> Any:
    """Dots that contract one gathered array, which is the left operand of one and the right of the other."""
    return einsum("mk,kn->mn", g, w), einsum("nk,mk->nm", v, g)


def two_batches(einsum: Any, g: Any, w: Any, v: Any) -> Any:
    """Dots of one gathered batch, the left operand of one and the right of the other."""
    return einsum("bmk,bkn->bmn", g, w), einsum("bnk,bmk->bnm", v, g)


def pairs(f: Callable[..., Any], *arguments: Any) -> list[spmd.Shards]:
    """Of a function of several results, each one's of all devices."""
    return [list(results) for results in zip(*per_device(f, *arguments), strict=True)]


PATTERNS = {
    "gather_free": Pattern(
        lambda x, w: gather(x) @ w,
        lambda p, b: ((b, 4), (4, 5)),
        lambda x, w: [per_device(np.matmul, spmd.all_gather(x, 0), w)],
    ),
    "gather_contracting": Pattern(
        lambda x, w: gather(x, 1) @ w,
        lambda p, b: ((9, b), (p * b, 3)),
        lambda x, w: [per_device(np.matmul, spmd.all_gather(x, 1), w)],
        columns=True,
        across=True,
    ),
    "gather_batch": Pattern(
        lambda x, w: jnp.einsum("bmk,bkn->bmn", gather(x), w),
        lambda p, b: ((b, 9, 3), (p * b, 3, 4)),
        lambda x, w: [per_device(np.matmul, spmd.all_gather(x, 0), w)],
        across=True,
    ),
    "gather_of_three_dots": Pattern(
        lambda x, w, v, u: three_dots(gather(x), w, v, u),
        lambda p, b: ((b, 4), (4, 3), (2, 4), (3, p * b)),
        lambda x, *others: pairs(three_dots, spmd.all_gather(x, 0), *others),
    ),
    "gather_contracting_twice": Pattern(
        lambda x, w, v: two_sums(jnp.einsum, gather(x, 1), w, v),
        lambda p, b: ((9, b), (p * b, 3), (2, p * b)),
        lambda x, *others: pairs(lambda *each: two_sums(np.einsum, *each), spmd.all_gather(x, 1), *others),
        columns=True,
        across=True,
    ),
    "gather_batch_twice": Pattern(
        lambda x, w, v: two_batches(jnp.einsum, gather(x), w, v),
        lambda p, b: ((b, 9, 3), (p * b, 3, 4), (p * b, 2, 3)),
        lambda x, *others: pairs(lambda *each: two_batches(np.einsum, *each), spmd.all_gather(x, 0), *others),
        across=True,
    ),
    "gather_untiled": Pattern(
        lambda x, w: jnp.einsum("pmk,pkn->mn", gather(x, tiled=False), w),
        lambda p, b: ((9, 3), (p, 3, 4)),
        lambda x, w: [
            per_device(lambda g, w: np.einsum("pmk,pkn->mn", g, w), spmd.all_gather(x, 0, tiled=False), w)
        ],
        across=True,
        tiled=False,
    ),
    "scatter": Pattern(
        lambda x, w: scatter(x @ w),
        lambda p, b: ((p * b, 3), (3, 9)),
        lambda x, w: [spmd.psum_scatter(per_device(np.matmul, x, w), 0)],
        across=True,
    ),
    "scatter_columns": Pattern(
        lambda x, w: scatter(x @ w, 1),
        lambda p, b: ((9, 3), (3, p * b)),
        lambda x, w: [spmd.psum_scatter(per_device(np.matmul, x, w), 1)],
        across=True,
    ),
    "scatter_transposed": Pattern(
        lambda x, w: scatter(-jnp.transpose(w.T @ x.T)),
        lambda p, b: ((p * b, 3), (3, 9)),
        lambda x, w: [spmd.psum_scatter(per_device(lambda x, w: -(x @ w), x, w), 0)],
        across=True,
    ),
    "scatter_untiled": Pattern(
        lambda x, w: scatter(x @ w, 1, tiled=False),
        lambda p, b: ((9, 3), (3, p)),
        lambda x, w: [spmd.psum_scatter(per_device(np.matmul, x, w), 1, tiled=False)],
        across=True,
        tiled=False,
    ),
    "psum": Pattern(
        lambda x, w: lax.psum(x @ w, "x"),
        lambda p, b: ((p * b, 3), (3, 9)),
        lambda x, w: [spmd.psum(per_device(np.matmul, x, w))],
        across=True,
        columns=True,
    ),
    "psum_then_dot": Pattern(
        lambda x, w, v: lax.psum(x @ w, "x") @ v,
        lambda p, b: ((p * b, 3), (3, 11), (11, 2)),
        lambda x, w, v: [per_device(np.matmul, spmd.psum(per_device(np.matmul, x, w)), v)],
    ),
}

OPTIONS: dict[str, tuple[Any, ...]] = {
    "axis_size": (2, 3, 4, 8),
    "directions": (1, 2),
    "chains": (1, 2),
    "orders": (0, 1, 2),
    "unroll": (0, 1, 2, 3, 4),
    "dtype": ("float32", "bfloat16", "int32"),
    "check_vma": (True, False),
}
GATHERS = {
    **OPTIONS,
    "joined": (False, True),
    "columns": (1, 2, 3),
    "across": (False, True),
    "cut": ("dot", "apart"),
}
SCATTERS = {
    **OPTIONS,
    "across": (False, True),
    "wire": ("float32", "operand"),
    "cut": ("dot", "apart", "early"),
}
PSUMS = {**SCATTERS, "joined": (False, True), "columns": (1, 3, 9)}


def options_of(name: str) -> dict[str, tuple[Any, ...]]:
    kind = dict({"gather": GATHERS, "psum": PSUMS}.get(name.split("_")[0], SCATTERS))
    if "columns" in kind and not PATTERNS[name].columns:
        kind["columns"] = (1,)
    return kind


def pairwise(options: dict[str, tuple[Any, ...]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Few combinations in which every two choices of different options occur together."""
    rng = random.Random(seed)

    def pairs(choice: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(choice.items(), 2))

    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(options, 2)
        for x, y in itertools.product(options[a], options[b])
    }
    while missing:
        first = sorted(missing, key=repr)[0]
        tried = [
            {name: dict(first).get(name, rng.choice(values)) for name, values in options.items()}
            for _ in range(100)
        ]
        best = max(tried, key=lambda choice: len(missing & pairs(choice)))
        missing -= pairs(best)
        yield best


def few(**options: Iterable[Any]) -> list[Any]:
    """A test's parameters: few combinations in which every two choices occur together."""
    chosen = pairwise({name: tuple(values) for name, values in options.items()})
    return [pytest.param(*c.values(), id="-".join(_labels(c.values()))) for c in chosen]


def _labels(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        yield from map(str, value if isinstance(value, tuple) else (value,))


def orders_of(count: int, axis_size: int, seed: int = 1) -> tuple[tuple[int, ...], ...]:
    """So many different orders, none of them the places' own where there are others."""
    rng = random.Random(seed)
    if count == 0:
        return ()
    places = list(range(axis_size))
    found = {tuple(places[::-1])}
    while len(found) < min(count, 2 if axis_size == 2 else count):
        rng.shuffle(places)
        found.add(tuple(places))
    return tuple(sorted(found, reverse=True))[:count]


def schedule_of(name: str, choice: dict[str, Any], block: int) -> RingSchedule:
    """The schedule that was chosen, with fewer rings, chains and directions where blocks are too small."""
    unit = block if PATTERNS[name].tiled else 1
    if choice.get("across") and PATTERNS[name].across:
        unit = ACROSS // choice.get("columns", 1)
    known = {field.name for field in dataclasses.fields(RingSchedule)} - {"orders"}
    schedule = RingSchedule(
        **{name: value for name, value in choice.items() if name in known},
        orders=orders_of(choice["orders"], choice["axis_size"]),
    )
    if name == "psum":
        # On an axis of 3 the sum may be scattered along the dim of 9 elements too, in blocks of 3.
        three = choice["axis_size"] == 3
        columns = math.gcd(schedule.columns, ACROSS if schedule.across else block, 3 if three else 0)
        if columns > 1:
            unit = 1 if three else block if schedule.across else block // columns
            schedule = dataclasses.replace(schedule, unroll=0)
        else:
            unit = min(3 if three else ACROSS, ACROSS if schedule.across else block)
        schedule = dataclasses.replace(schedule, columns=columns)
    for fewer in ({"chains": 1}, {"orders": schedule.orders[:1]}, {"directions": 1}):
        if schedule.pieces > unit:
            schedule = dataclasses.replace(schedule, **fewer)  # type: ignore[arg-type]
    return schedule


def arguments(
    shapes: tuple[tuple[int, ...], ...], axis_size: int, dtype: str, leading: tuple[int, ...] = ()
) -> Numbers:
    """Random arguments of all devices."""
    rng = np.random.default_rng(3)
    drawn = [rng.normal(size=(*leading, axis_size, *shape)) for shape in shapes]
    if dtype == "int32":
        return tuple(np.asarray(3 * each, dtype) for each in drawn)
    return tuple(np.asarray(jnp.asarray(each, dtype)) for each in drawn)


def jitted(body: Callable[..., Any], count: int, axis_size: int, *, check_vma: bool = True) -> Any:
    """The program of all devices, on arrays whose first dim is the device's."""

    def on_device(*stacked: Any) -> Any:
        return jax.tree.map(lambda out: out[None], body(*(each[0] for each in stacked)))

    spec = PartitionSpec("x")
    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=spmd.mesh_of(axis_size),
            in_specs=(spec,) * count,
            out_specs=spec,
            check_vma=check_vma,
        )
    )


def rewritten_jaxpr(
    body: Callable[..., Any], given: Sequence[Any], hardware: str, *, differentiable: bool = False
) -> Any:
    """What ``always`` makes of a body's program, for some hardware."""
    axis_size = len(given[0])
    plan = passes.make_plan(
        jitted(body, len(given), axis_size, check_vma=False).trace(*given).jaxpr,
        "always",
        lambda kind: by_name(hardware),
        differentiable=differentiable,
    )
    return jax.make_jaxpr(passes.rewritten(plan))(*given)


def as_ring(function: Any) -> Any:
    return overlap.overlap_collectives(function, policy="always", strict=True, hardware="tpu_v5p")


def exact(pattern: Pattern, given_arguments: Numbers) -> list[Any]:
    wide = [list(np.asarray(each, np.float64)) for each in given_arguments]
    return [np.stack(result) for result in pattern.reference(*wide)]


def assert_close(results: Any, references: list[Any], arguments_dtype: str, roundings: int = 1) -> None:
    """Equal for integers; else within so many roundings of the largest sums, and those of float32 dots."""
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == len(references)
    for result, reference in zip(results, references, strict=True):
        assert result.dtype == arguments_dtype and result.shape == reference.shape
        scale = np.abs(reference).max()
        unit = 0.0 if arguments_dtype == "int32" else 2e-6
        if arguments_dtype == "bfloat16":
            unit = roundings * 2.0**-8
        np.testing.assert_allclose(
            np.asarray(result, np.float64),
            reference,
            rtol=0,
            atol=2 * unit * scale,
            err_msg=str(result.dtype),
        )


def assert_values(
    name: str, axis_size: int, block: int, schedule: RingSchedule, dtype: str, *, check_vma: bool
) -> Any:
    """Of a pattern's program with this schedule: those of the float64 reference. Gives its jaxpr."""
    pattern = PATTERNS[name]
    given = arguments(pattern.shapes(axis_size, block), axis_size, dtype)
    function = jitted(pattern.body, len(given), axis_size, check_vma=check_vma)
    with spmd.only_schedule(schedule):
        ring = as_ring(function)
        (site,) = ring.explain(*given).sites
        results = ring(*given)
        jaxpr = jax.make_jaxpr(ring)(*given)
    assert site.rewritten and site.schedule == str(schedule)
    assert_close(results, exact(pattern, given), dtype)
    return jaxpr


def assert_gradients_and_vmap(
    name: str, axis_size: int, block: int, schedule: RingSchedule, *, check_vma: bool
) -> None:
    """Of a pattern's program of two arguments with this schedule: as those of float64, as written."""
    pattern = PATTERNS[name]
    given = arguments(pattern.shapes(axis_size, block), axis_size, "float32")
    (result,) = exact(pattern, given)
    weights = np.random.default_rng(5).normal(size=result.shape).astype(np.float32)
    function = jitted(pattern.body, 2, axis_size, check_vma=check_vma)

    def loss(run: Any) -> Any:
        return lambda x, w: (weights * run(x, w)).sum()

    with jax.enable_x64(True):
        expected = jax.grad(loss(function), (0, 1))(*(jnp.asarray(each, "float64") for each in given))
        expected = [np.asarray(each) for each in expected]
    x, w = given
    with spmd.only_schedule(schedule):
        ring = as_ring(function)
        results = jax.jit(jax.grad(loss(ring), (0, 1)))(x, w)
        mapped = jax.vmap(ring)(np.stack([x, 2 * x]), np.stack([w, w]))
    assert_close(results, expected, "float32", 4)
    assert_close(mapped, [np.stack([result, 2 * result])], "float32")
