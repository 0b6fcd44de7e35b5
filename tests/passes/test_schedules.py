"""Every schedule gives the values of the collective: forms, axis sizes, orders, loops, dtypes, transforms."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from cost_model.tile import LANES, TILE_ROWS, tile_rows
from cost_model.walk import gray_walks
from passes import shims
from passes.schedule import RingSchedule, parts
from tests.passes import spmd
from tests.passes.hop_count import hops
from tests.passes.ring_patterns import (
    GATHERS,
    PATTERNS,
    arguments,
    as_ring,
    assert_close,
    assert_values,
    exact,
    few,
    jitted,
    options_of,
    pairwise,
    scatter,
    schedule_of,
)


def cases() -> Iterator[Any]:
    """For patterns of one kind every pair of choices with one another, and with each pattern."""
    kinds: dict[Any, list[str]] = {}
    for name in PATTERNS:
        kinds.setdefault(tuple(options_of(name).items()), []).append(name)
    for options, names in kinds.items():
        for choice in pairwise({"name": tuple(names), **dict(options)}):
            name = choice.pop("name")
            if name == "psum_then_dot" and choice["dtype"] == "bfloat16":
                # Sums are rounded before the next dot: that is another program's precision.
                choice["dtype"] = "float32"
            label = "-".join(f"{value}" for value in choice.values())
            yield pytest.param(name, choice, id=f"{name}-{label}")


@pytest.mark.parametrize(("name", "choice"), list(cases()))
def test_a_schedule_gives_the_values_of_the_collective(name: str, choice: dict[str, Any]) -> None:
    pattern, axis_size, dtype = PATTERNS[name], choice["axis_size"], choice["dtype"]
    # Nine is cut into 1, 2, 4 and 8 pieces, most of them of different sizes.
    block = 9
    given_arguments = arguments(pattern.shapes(axis_size, block), axis_size, dtype)
    schedule = schedule_of(name, choice, block)
    function = jitted(pattern.body, len(given_arguments), axis_size, check_vma=choice["check_vma"])
    with spmd.only_schedule(schedule):
        ring = as_ring(function)
        (site,) = ring.explain(*given_arguments).sites
        results = ring(*given_arguments)
        sent = hops(jax.make_jaxpr(ring)(*given_arguments))
    assert site.rewritten and site.schedule == str(schedule)
    one = schedule.pieces * (axis_size - 1)
    if name == "psum_then_dot":
        assert sent == one + one // schedule.chains
    else:
        # A psum in columns is gathered by hops too.
        ways = 2 if name == "psum" and schedule.columns > 1 else 1
        assert sent == ways * one * schedule.columns
    roundings = axis_size + 1 if schedule.wire == "operand" else 1
    assert_close(results, exact(pattern, given_arguments), dtype, roundings)


def test_all_choices_meet_in_pairs() -> None:
    chosen = list(pairwise(GATHERS))
    for a, b in itertools.combinations(GATHERS, 2):
        met = {(choice[a], choice[b]) for choice in chosen}
        assert met == set(itertools.product(GATHERS[a], GATHERS[b]))


# Precision.


def _scatter_errors(axis_size: int, schedule: RingSchedule) -> tuple[Any, Any, Any]:
    """Elementwise errors of a bfloat16 scatter ring, its exact sums, and the sums of its terms' sizes."""
    rng = np.random.default_rng(11)
    x, w = (
        np.asarray(jnp.asarray(rng.normal(size=(axis_size, *shape)), "bfloat16"))
        for shape in ((8 * axis_size, 16), (16, 24))
    )
    with spmd.only_schedule(schedule):
        result = as_ring(jitted(lambda x, w: scatter(x @ w), 2, axis_size))(x, w)
    products = [a @ b for a, b in zip(x.astype(np.float64), w.astype(np.float64), strict=True)]
    reference = np.stack(spmd.psum_scatter(products, 0))
    sizes = np.stack(spmd.psum_scatter([np.abs(each) for each in products], 0))
    return np.abs(np.asarray(result, np.float64) - reference), np.abs(reference), sizes


@pytest.mark.parametrize(
    "form", [{}, {"chains": 2}, {"across": True}, {"chains": 2, "across": True}, {"unroll": 2}], ids=str
)
def test_a_narrow_wire_rounds_once_per_hop(form: Any) -> None:
    """Each hop rounds a partial sum, at most the sum of its terms' sizes, by half a unit of bfloat16: 2^-9
    of a power of two above it, at most 2^-8 of itself. The result is rounded once more."""
    axis_size = 8
    half_unit = 2.0**-8
    error, sums, sizes = _scatter_errors(axis_size, RingSchedule(directions=2, wire="operand", **form))
    bound = (axis_size - 1) * half_unit * (1 + half_unit) ** axis_size * sizes + half_unit * sums
    assert (error <= bound + 1e-5 * sizes).all()
    wide_error, *_ = _scatter_errors(axis_size, RingSchedule(directions=2, wire="float32", **form))
    assert (wide_error <= half_unit * sums + 1e-5 * sizes).all()
    assert np.sqrt(np.mean(wide_error**2)) < 0.7 * np.sqrt(np.mean(error**2))


# Walks, on eight chips or on four with two cores.


WALKED: tuple[dict[str, Any], ...] = (
    {},
    {"joined": True},
    {"across": True, "wire": "operand"},
    {"chains": 2},
)


@pytest.mark.parametrize(
    ("name", "form", "dimensions"),
    [
        pytest.param(name, form, 3 - (place + number) % 2, id=f"{name}-{'-'.join(form)}")
        for place, (name, pattern) in enumerate(PATTERNS.items())
        for number, form in enumerate(WALKED)
        if pattern.tiled and set(form) <= set(options_of(name))
    ],
)
def test_walks_give_the_values_of_the_collective(name: str, form: dict[str, Any], dimensions: int) -> None:
    pattern, axis_size = PATTERNS[name], 8
    given_arguments = arguments(pattern.shapes(axis_size, 10), axis_size, "float32")
    walks = gray_walks((5, 0, 3, 6, 1, 7, 2, 4), dimensions)
    schedule = RingSchedule(directions=1, orders=walks, **form)
    function = jitted(pattern.body, len(given_arguments), axis_size, check_vma=False)
    with spmd.only_schedule(schedule):
        ring = as_ring(function)
        results = ring(*given_arguments)
        sent = hops(jax.make_jaxpr(ring)(*given_arguments))
    once = schedule.pieces * (axis_size - 1)
    assert sent == once + (once // schedule.chains if name == "psum_then_dot" else 0)
    assert_close(results, exact(pattern, given_arguments), "float32")


def test_walks_within_groups_of_a_mesh_s_axes() -> None:
    """Groups of four of eight devices, which walk along the mesh's second axis or its first."""
    walks = gray_walks((0, 1, 3, 2), 2)
    rng = np.random.default_rng(2)
    x, w = rng.normal(size=(8, 5, 4)).astype(np.float32), rng.normal(size=(4, 3)).astype(np.float32)
    devices = np.array(jax.devices()[:8])
    for axes, shape in ((("y", "x"), (2, 4)), (("x", "y"), (4, 2))):
        mesh = jax.sharding.Mesh(devices.reshape(shape), axes, axis_types=(AxisType.Auto,) * 2)

        def body(x: Any, w: Any) -> Any:
            return (lax.all_gather(x[0], "x", tiled=True) @ w)[None]

        spec = PartitionSpec(axes)
        function = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec))
        with spmd.only_schedule(RingSchedule(directions=1, orders=walks)):
            ring = as_ring(function)
            assert hops(jax.make_jaxpr(ring)(x, w)) == 2 * 3
            results = ring(x, w)
        lines = np.arange(8).reshape(shape)
        lines = lines if axes[1] == "x" else lines.T
        for line in lines:
            whole = np.concatenate(x[line].astype(np.float64)) @ w
            for device in line:
                np.testing.assert_allclose(results[device], whole, atol=1e-5)


@pytest.mark.parametrize("other", [{"directions": 2}, {"unroll": 2}, {"route": "exchange"}], ids=str)
def test_walks_are_neither_rolled_nor_turned_round(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="walks"):
        RingSchedule(**{"directions": 1, "orders": gray_walks((0, 1, 2, 3), 2), **other})


# Whole shards both ways, each half way round.


FORMED: dict[str, dict[str, Any]] = {"plain": {}, "chains": {"chains": 2}, "apart": {"cut": "apart"}}
HALVED = [name for name, pattern in PATTERNS.items() if pattern.tiled and name.startswith("gather")]


@pytest.mark.parametrize(
    ("name", "form", "axis_size", "ordered"),
    few(
        name=HALVED,
        form=("plain bfloat16", "chains int32", "apart float32"),
        axis_size=(2, 3, 4, 5, 8),
        ordered=(False, True),
    ),
)
def test_whole_shards_half_way_round(name: str, form: str, axis_size: int, ordered: bool) -> None:
    """Of nine elements halves are not equal; along two orders each has a part of every shard."""
    kind, dtype = form.split()
    pattern = PATTERNS[name]
    orders = (tuple(range(axis_size))[::-1], tuple(range(axis_size))) if ordered else ()
    given_arguments = arguments(pattern.shapes(axis_size, 9), axis_size, dtype)
    function = jitted(pattern.body, len(given_arguments), axis_size)
    schedule = RingSchedule(directions=2, halfway=True, orders=orders, **FORMED[kind])
    with spmd.only_schedule(schedule):
        ring = as_ring(function)
        (site,) = ring.explain(*given_arguments).sites
        results = ring(*given_arguments)
        sent = hops(jax.make_jaxpr(ring)(*given_arguments))
    assert site.rewritten and "half way" in site.schedule
    assert sent == schedule.pieces * (axis_size // 2)
    assert_close(results, exact(pattern, given_arguments), dtype)


def test_a_gather_half_way_round_has_its_gradient() -> None:
    rng = np.random.default_rng(4)
    x, w = rng.normal(size=(4, 6, 5)).astype(np.float32), rng.normal(size=(4, 5, 3)).astype(np.float32)
    body = jitted(lambda x, w: jnp.sin(PATTERNS["gather_free"].body(x, w)), 2, 4)
    with spmd.only_schedule(RingSchedule(directions=2, halfway=True)):
        gradients = jax.grad(lambda *a: as_ring(body)(*a).sum(), (0, 1))(x, w)
    whole = x.reshape(24, 5).astype(np.float64)
    outer = [np.cos(whole @ each) for each in w.astype(np.float64)]
    wanted = sum(back @ each.T for back, each in zip(outer, w.astype(np.float64), strict=True))
    np.testing.assert_allclose(gradients[0], wanted.reshape(x.shape), atol=1e-4)
    for gradient, back in zip(gradients[1], outer, strict=True):
        np.testing.assert_allclose(gradient, whole.T @ back, atol=1e-4)


@pytest.mark.parametrize(
    "other", [{"directions": 1}, {"unroll": 2}, {"across": True}, {"joined": True}], ids=str
)
def test_half_way_round_go_whole_shards_both_ways(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="half way round"):
        RingSchedule(**{"directions": 2, "halfway": True, **other})


# Pieces.


@pytest.mark.parametrize(
    ("pieces", "unit", "sizes"),
    [
        (3, 1024, [352, 336, 336]),
        (3, 4096, [1376, 1360, 1360]),
        (3, 1536, [512, 512, 512]),
        (3, 128, [48, 48, 32]),
        (2, 1025, [528, 497]),
        (2, 744, [384, 360]),
        (2, 752, [376, 376]),
        (4, 9, [3, 2, 2, 2]),
        (3, 4, [2, 1, 1]),
        (5, 5, [1, 1, 1, 1, 1]),
    ],
)
def test_pieces_that_are_not_equal_begin_at_a_tile(pieces: int, unit: int, sizes: list[int]) -> None:
    divided = parts(RingSchedule(directions=1, chains=pieces), unit)
    assert [part.share * unit for part in divided] == sizes
    assert [part.start * unit for part in divided] == [sum(sizes[:number]) for number in range(pieces)]


@pytest.mark.parametrize(
    ("pieces", "unit", "sizes"),
    [
        (2, 800, [416, 384]),
        (2, 1024, [512, 512]),
        (4, 544, [160, 128, 128, 128]),
        (3, 672, [224, 224, 224]),
        (2, 96, [48, 48]),  # too few rows for tiles that are not too uneven
    ],
)
def test_pieces_of_elements_of_a_byte_begin_at_a_tile(pieces: int, unit: int, sizes: list[int]) -> None:
    """Else the TPU compiler copies all of what they are cut out of: v6e, 800 rows: 36 ms in place of 1.5."""
    divided = parts(RingSchedule(directions=1, chains=pieces), unit, tile_rows(1))
    assert [part.share * unit for part in divided] == sizes


@pytest.mark.parametrize(
    ("unit", "sizes"),
    [
        (6272, [3200, 3072]),
        (1152, [640, 512]),
        (1024, [512, 512]),
        (384, [192, 192]),
        (640, [320, 320]),  # 384 and 256 would make each hop a fifth longer
        (896, [448, 448]),
    ],
)
def test_columns_begin_at_a_lane_where_they_can(unit: int, sizes: list[int]) -> None:
    assert [part.share * unit for part in parts(RingSchedule(directions=2), unit, LANES)] == sizes


@pytest.mark.parametrize(
    ("unit", "grain", "sizes"),
    [
        (16 * 1039, TILE_ROWS, [8304, 8320]),
        (16 * 1024, TILE_ROWS, [8192, 8192]),
        (166 * LANES, LANES, [81 * LANES, 85 * LANES]),
    ],
)
def test_pieces_that_are_put_into_place_have_sizes_that_windows_divide(
    unit: int, grain: int, sizes: list[int]
) -> None:
    """Else dots may take several times as long: v5p, 2 · 8312 rows: 6.8 ms in place of 3.2."""
    both_ways = RingSchedule(directions=2)
    assert [part.share * unit for part in parts(both_ways, unit, grain, placed=True)] == sizes
    assert [part.share * unit for part in parts(both_ways, unit, grain)] == [unit / 2, unit / 2]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5000))
def test_pieces_are_the_block_and_none_is_much_larger_than_the_others(
    chains: int, rings: int, unit: int
) -> None:
    schedule = RingSchedule(directions=1, chains=chains, orders=((0, 1),) * rings)
    if schedule.pieces > unit:
        return
    divided = parts(schedule, unit)
    assert sum(part.share for part in divided) == 1
    assert all(part.share > 0 for part in divided)
    assert max(part.share for part in divided) * schedule.pieces * 2 <= 3 + Fraction(
        2 * schedule.pieces, unit
    )


@pytest.mark.parametrize("name", ["gather_free", "gather_of_three_dots"])
@pytest.mark.parametrize(("chains", "sizes"), [(1, [3728, 3744]), (2, [3744, 3744, 3744, 3712])])
def test_pieces_of_such_sizes_come_to_their_places(name: str, chains: int, sizes: list[int]) -> None:
    pattern, unit = PATTERNS[name], 16 * 467 * chains
    schedule = RingSchedule(directions=2, chains=chains)
    assert [part.share * unit for part in parts(schedule, unit, placed=True)] == sizes
    given = arguments(pattern.shapes(4, unit), 4, "float32")
    with spmd.only_schedule(schedule):
        assert_close(as_ring(jitted(pattern.body, len(given), 4))(*given), exact(pattern, given), "float32")


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("rows", [33392, 33394])
def test_strips_of_such_sizes_come_to_their_places(rows: int, columns: int) -> None:
    """33392 = 16 · 2087 rows of which no two halves have windows; and columns of unequal size."""
    pattern = PATTERNS["gather_contracting"]
    given = arguments(((rows, 2), (8, 3)), 4, "float32")
    with spmd.only_schedule(RingSchedule(directions=2, columns=columns, across=True)):
        assert_close(as_ring(jitted(pattern.body, 2, 4))(*given), exact(pattern, given), "float32")


def test_strips_of_rows_are_even_where_those_of_columns_fill_tiles() -> None:
    """The largest piece sets the pace of all hops: 320 and 256 rows of 576 took 8 % longer (v6e)."""
    pattern = PATTERNS["gather_contracting"]
    given = arguments(((576, 2), (8, 3)), 4, "float32")
    with spmd.only_schedule(RingSchedule(directions=2, across=True)):
        program = str(jax.make_jaxpr(as_ring(jitted(pattern.body, 2, 4)))(*given))
    assert set(re.findall(r"f32\[([0-9]+),2\][^=\n]*= ppermute", program)) == {"288"}


# Transforms.

FORMS = {
    "both_ways": RingSchedule(directions=2),
    "chains": RingSchedule(directions=2, chains=2, across=True, joined=True),
    "rolled": RingSchedule(directions=2, unroll=1),
    "reordered": RingSchedule(directions=1, orders=((2, 0, 3, 1),)),
    "two_rings_rolled": RingSchedule(directions=2, unroll=1, orders=((0, 2, 1, 3), (3, 0, 1, 2))),
    "walks": RingSchedule(directions=1, orders=gray_walks((2, 0, 3, 1), 2)),
    "walk_through_cores": RingSchedule(directions=1, orders=gray_walks((1, 3, 0, 2), 1)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["gather_free", "gather_contracting", "scatter", "psum_then_dot"])
def test_a_ring_under_vmap(name: str, form: str) -> None:
    pattern = PATTERNS[name]
    given_arguments = arguments(pattern.shapes(4, 4), 4, "float32", (3,))
    function = jitted(pattern.body, len(given_arguments), 4)
    with spmd.only_schedule(FORMS[form]):
        mapped = jax.vmap(as_ring(function))
        assert hops(jax.make_jaxpr(mapped)(*given_arguments)) > 0
        results = mapped(*given_arguments)
    references = [exact(pattern, tuple(each[i] for each in given_arguments))[0] for i in range(3)]
    assert_close(results, [np.stack(references)], "float32")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["gather_free", "gather_contracting", "scatter"])
def test_the_gradient_of_a_ring(name: str, check_vma: bool, form: str) -> None:
    pattern = PATTERNS[name]
    x, w = arguments(pattern.shapes(4, 4), 4, "float32")
    (result,) = exact(pattern, (x, w))
    weights = np.random.default_rng(5).normal(size=result.shape).astype(np.float32)
    function = jitted(pattern.body, 2, 4, check_vma=check_vma)
    with spmd.only_schedule(FORMS[form]):
        ring = as_ring(function)
        gradient = jax.grad(lambda x, w: (weights * ring(x, w)).sum(), (0, 1))
        assert hops(jax.make_jaxpr(gradient)(x, w)) > 0
        results = jax.jit(gradient)(x, w)
    wide_x, wide_w, cotangents = (list(np.asarray(each, np.float64)) for each in (x, w, weights))
    if name == "scatter":
        whole = np.concatenate(cotangents)
        expected = [[whole @ b.T for b in wide_w], [a.T @ whole for a in wide_x]]
    else:
        dim = 0 if name == "gather_free" else 1
        gathered = np.concatenate(wide_x, dim)
        total = sum(c @ b.T for c, b in zip(cotangents, wide_w, strict=True))
        expected = [np.split(total, 4, dim), [gathered.T @ c for c in cotangents]]
    assert_close(results, [np.stack(each) for each in expected], "float32", 4)


@pytest.mark.parametrize("form", ["reordered", "two_rings_rolled"])
@pytest.mark.parametrize("name", ["gather_free", "gather_contracting", "scatter"])
def test_a_long_order_is_read_from_an_array(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of more than 64 devices is: here one of four."""
    monkeypatch.setattr("passes.hops.LONGEST_PACKED", 3)
    pattern = PATTERNS[name]
    x, w = arguments(pattern.shapes(4, 4), 4, "float32")
    with spmd.only_schedule(FORMS[form]):
        jaxpr = str(jax.make_jaxpr(as_ring(jitted(pattern.body, 2, 4)))(x, w))
    assert re.search(r"i32\[1\]\S* = dynamic_slice", jaxpr)
    test_a_ring_under_vmap(name, form)
    for check_vma in (True, False):
        test_the_gradient_of_a_ring(name, check_vma, form)


CHUNKS = {
    "both_ways": RingSchedule(directions=2, columns=2),
    "one_way_across": RingSchedule(directions=1, columns=3, across=True),
    "two_rings": RingSchedule(directions=1, columns=2, orders=((0, 2, 1, 3), (3, 0, 1, 2))),
    "walks": RingSchedule(directions=1, columns=2, orders=gray_walks((2, 0, 3, 1), 2)),
}


@pytest.mark.parametrize("form", CHUNKS)
def test_a_psum_in_chunks_under_vmap(form: str) -> None:
    pattern = PATTERNS["psum"]
    given_arguments = arguments(pattern.shapes(4, 4), 4, "float32", (3,))
    with spmd.only_schedule(CHUNKS[form]):
        mapped = jax.vmap(as_ring(jitted(pattern.body, 2, 4)))
        assert hops(jax.make_jaxpr(mapped)(*given_arguments)) > 0
        results = mapped(*given_arguments)
    references = [exact(pattern, tuple(each[i] for each in given_arguments))[0] for i in range(3)]
    assert_close(results, [np.stack(references)], "float32")


@pytest.mark.parametrize("form", CHUNKS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_gradient_of_a_psum_in_chunks_is_that_of_the_psum(check_vma: bool, form: str) -> None:
    pattern = PATTERNS["psum"]
    x, w = arguments(pattern.shapes(4, 4), 4, "float32")
    (result,) = exact(pattern, (x, w))
    weights = np.random.default_rng(5).normal(size=result.shape).astype(np.float32)
    function = jitted(pattern.body, 2, 4, check_vma=check_vma)
    with spmd.only_schedule(CHUNKS[form]):
        ring = as_ring(function)
        gradient = jax.grad(lambda x, w: (weights * ring(x, w)).sum(), (0, 1))
        assert hops(jax.make_jaxpr(gradient)(x, w)) > 0
        results = jax.jit(gradient)(x, w)
    # Every device's result has the sum's every term: its cotangents add up.
    total = np.asarray(weights, np.float64).sum(0)
    expected = [
        np.stack([total @ b.T for b in np.asarray(w, np.float64)]),
        np.stack([a.T @ total for a in np.asarray(x, np.float64)]),
    ]
    assert_close(results, expected, "float32", 4)


@pytest.mark.parametrize("form", CHUNKS)
def test_the_sum_in_chunks_is_known_to_be_the_same_everywhere(form: str) -> None:
    """Only a result that does not vary over the axis may leave the program unsharded."""
    axis_size = 4
    x, w = arguments(((16, 12), (12, 9)), 1, "float32")
    spec: Any = jax.sharding.PartitionSpec
    summed = jax.jit(
        jax.shard_map(
            lambda x, w: jax.lax.psum(x @ w, "x"),
            mesh=spmd.mesh_of(axis_size),
            in_specs=(spec(None, "x"), spec("x")),
            out_specs=spec(),
        )
    )
    with spmd.only_schedule(CHUNKS[form]):
        ring = as_ring(summed)
        assert hops(jax.make_jaxpr(ring)(x[0], w[0])) > 0
        result = ring(x[0], w[0])
    assert result.sharding.is_fully_replicated
    exactly = np.asarray(x[0], np.float64) @ np.asarray(w[0], np.float64)
    for shard in result.addressable_shards:
        np.testing.assert_allclose(np.asarray(shard.data), exactly, rtol=0, atol=1e-5 * np.abs(exactly).max())


@pytest.mark.parametrize(("columns", "across"), [(2, False), (2, True)])
def test_chunks_of_different_sizes_are_refused(columns: int, across: bool) -> None:
    pattern = PATTERNS["psum"]
    given_arguments = arguments(pattern.shapes(4, 9), 4, "float32")
    schedule = RingSchedule(directions=1, columns=columns, across=across)
    with spmd.only_schedule(schedule), pytest.raises(ValueError, match="equal chunks"):
        as_ring(jitted(pattern.body, 2, 4))(*given_arguments)


# Sums that arrive before the product that adds to them, as on TPU.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["scatter", "psum_then_dot"])
def test_sums_may_arrive_before_the_product(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "on_tpu", lambda aval: True)
    pattern = PATTERNS[name]
    given_arguments = arguments(pattern.shapes(4, 5), 4, "float32")
    with spmd.only_schedule(FORMS[form]):
        results = as_ring(jitted(pattern.body, len(given_arguments), 4))(*given_arguments)
    assert_close(results, exact(pattern, given_arguments), "float32")


# Hops that are started explicitly.

explicit_only = pytest.mark.skipif(
    not shims.EXPLICIT_STARTS, reason=f"jax {jax.__version__} has no explicit start that a barrier takes"
)


@pytest.fixture
def explicit_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit starts on CPU, without barriers: one that takes a future along ends the process there."""
    monkeypatch.setattr(shims, "explicit_starts", lambda aval: True)
    for emitter in ("gather_ring", "scatter_ring", "psum_pipeline"):
        monkeypatch.setattr(f"passes.{emitter}.tie", lambda *values: values)
    monkeypatch.setattr("passes.scatter_ring.tie_typed", lambda _, *values: values)


EXPLICIT = {
    "one_piece": RingSchedule(directions=1),
    "narrow": RingSchedule(directions=2, wire="operand"),
    "columns": RingSchedule(directions=2, columns=2),
    "rolled_by_two": RingSchedule(directions=2, chains=2, unroll=2),
    **{name: form for name, form in FORMS.items() if name != "both_ways"},
}
SPAN = {name: 4 if form.orders else 8 for name, form in EXPLICIT.items()}


@explicit_only
@pytest.mark.usefixtures("explicit_starts")
@pytest.mark.parametrize("form", EXPLICIT)
@pytest.mark.parametrize(
    ("name", "on_tpu"),
    [
        ("gather_free", True),
        ("gather_contracting", False),
        ("scatter", True),
        ("scatter", False),
        ("psum_then_dot", True),
        ("psum", True),
        ("psum", False),
    ],
)
def test_explicit_starts_give_the_values_of_the_collective(
    name: str, on_tpu: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shims, "on_tpu", lambda aval: on_tpu)
    pattern, axis_size, schedule = PATTERNS[name], SPAN[form], EXPLICIT[form]
    if not pattern.columns:
        schedule = dataclasses.replace(schedule, columns=1)
    # Chunks are equal, pieces need not be.
    given_arguments = arguments(pattern.shapes(axis_size, 6 if name == "psum" else 5), axis_size, "float32")
    function = jitted(pattern.body, len(given_arguments), axis_size, check_vma=form != "narrow")
    with spmd.only_schedule(schedule):
        ring = as_ring(function)
        assert hops(jax.make_jaxpr(ring)(*given_arguments), "ppermute_start") > 0
        results = ring(*given_arguments)
    assert_close(results, exact(pattern, given_arguments), "float32")


@explicit_only
@pytest.mark.usefixtures("explicit_starts")
@pytest.mark.parametrize("form", ["chains", "rolled"])
@pytest.mark.parametrize("name", ["gather_free", "scatter"])
def test_explicit_starts_under_vmap(name: str, form: str) -> None:
    pattern = PATTERNS[name]
    given_arguments = arguments(pattern.shapes(4, 4), 4, "float32", (3,))
    with spmd.only_schedule(FORMS[form]):
        mapped = jax.vmap(as_ring(jitted(pattern.body, 2, 4)), in_axes=(0, None))
        x, w = given_arguments[0], given_arguments[1][0]
        assert hops(jax.make_jaxpr(mapped)(x, w), "ppermute_start") > 0
        results = mapped(x, w)
    references = [exact(pattern, (each, w))[0] for each in x]
    assert_close(results, [np.stack(references)], "float32")


@explicit_only
@pytest.mark.usefixtures("explicit_starts")
@pytest.mark.parametrize("name", ["gather_free", "scatter"])
def test_the_gradient_of_explicit_starts(name: str) -> None:
    pattern = PATTERNS[name]
    x, w = arguments(pattern.shapes(4, 4), 4, "float32")
    function = jitted(pattern.body, 2, 4)
    with spmd.only_schedule(FORMS["chains"]):
        ring = as_ring(function)
        results = jax.grad(lambda x, w: (ring(x, w) ** 2).sum(), (0, 1))(x, w)
    plain = jax.grad(lambda x, w: (function(x, w) ** 2).sum(), (0, 1))(x, w)
    assert_close(results, [np.asarray(each, np.float64) for each in plain], "float32", 4)


# Anything else.


@st.composite
def drawn(draw: Any) -> tuple[str, dict[str, Any], int]:
    name = draw(st.sampled_from(sorted(PATTERNS)))
    choice = {option: draw(st.sampled_from(values)) for option, values in options_of(name).items()}
    return name, {**choice, "dtype": "float32"}, draw(st.integers(1, 10))


@settings(max_examples=15, deadline=None)
@given(drawn())
def test_any_schedule_of_any_block_gives_the_values(case: tuple[str, dict[str, Any], int]) -> None:
    name, choice, block = case
    pattern, axis_size = PATTERNS[name], choice["axis_size"]
    given_arguments = arguments(pattern.shapes(axis_size, block), axis_size, "float32")
    function = jitted(pattern.body, len(given_arguments), axis_size, check_vma=choice["check_vma"])
    with spmd.only_schedule(schedule_of(name, choice, block)):
        ring = as_ring(function)
        results = ring(*given_arguments)
        assert [site.rewritten for site in ring.explain(*given_arguments).sites] == [True]
    assert_close(results, exact(pattern, given_arguments), "float32")


def test_more_pieces_than_a_block_has_parts_are_refused() -> None:
    pattern = PATTERNS["gather_free"]
    given_arguments = arguments(pattern.shapes(4, 3), 4, "float32")
    with (
        spmd.only_schedule(RingSchedule(directions=2, chains=2)),
        pytest.raises(ValueError, match=r"3 part\(s\) cannot be cut into 4"),
    ):
        as_ring(jitted(pattern.body, 2, 4))(*given_arguments)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gather_free", RingSchedule(directions=2, unroll=2)),
        ("gather_contracting", RingSchedule(directions=1, unroll=2)),
        ("scatter", RingSchedule(directions=2, unroll=2)),
        ("psum", RingSchedule(directions=1, columns=2)),
    ],
    ids=["gather_free", "gather_contracting", "scatter", "psum"],
)
def test_loops_count_in_int32_where_numbers_are_wide(name: str, schedule: RingSchedule) -> None:
    with jax.enable_x64(True):
        assert_values(name, 8, 10, schedule, "float64", check_vma=True)
