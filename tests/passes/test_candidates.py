"""Which schedules are proposed for a chain: no more pieces than fit, and only forms that apply."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from jax import lax

from cost_model import Axis, Topology, by_name, names
from cost_model.forms import COLUMNS, LEAST_COLUMN, LONGEST_UNROLLED, MOST_PIECES
from passes import rules, shims
from passes.candidates import EXCHANGE, UNROLL, as_run, candidates
from passes.chains import AllGatherDot, Chain, DotPsum
from passes.graph import Dataflow
from passes.rules import DEFAULT, EXPLICIT, IMPLIED, rule
from passes.schedule import RingSchedule, across, divisions, parts, tile_rows
from tests.passes import bodies

HARDWARE = [by_name(name) for name in names()]
V5P = by_name("tpu_v5p")


def shard(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def chain_of(body: Callable[..., Any], *shards: Any, axis_size: int = 4) -> tuple[Dataflow, Chain]:
    """The largest chain of a program with one collective."""
    flow, (match,) = bodies.matched(body, *shards, axis_size=axis_size, check_vma=False)
    assert isinstance(match.found, tuple), match.found
    return flow, match.found[0]


def gather_free(block: int = 8, axis_size: int = 4) -> tuple[Dataflow, Chain]:
    def body(x: Any, w: Any) -> Any:
        return lax.all_gather(x, "x", tiled=True) @ w

    return chain_of(body, shard(block, 16), shard(16, 8), axis_size=axis_size)


def gather_contracting(rows: int = 64, block: int = 8) -> tuple[Dataflow, Chain]:
    def body(x: Any, w: Any) -> Any:
        return lax.all_gather(x, "x", axis=1, tiled=True) @ w

    return chain_of(body, shard(rows, block), shard(4 * block, 8))


def gather_contracting_twice(rows: int = 64, block: int = 8) -> tuple[Dataflow, Chain]:
    """Two dots that contract what is gathered, as gate and up of an MLP do; the second from the right."""

    def body(x: Any, w: Any, v: Any) -> Any:
        x = lax.all_gather(x, "x", axis=1, tiled=True)
        return x @ w, jnp.einsum("nk,mk->nm", v, x)

    return chain_of(body, shard(rows, block), shard(4 * block, 8), shard(8, 4 * block))


def gather_of_other_roles() -> tuple[Dataflow, Chain]:
    """Of two dots one contracts what is gathered, and one keeps it."""

    def body(x: Any, w: Any, v: Any) -> Any:
        x = lax.all_gather(x, "x", axis=1, tiled=True)
        return x @ w, x.T @ v

    return chain_of(body, shard(64, 8), shard(32, 8), shard(64, 8))


def scatter(block: int = 8, n: int = 16, dtype: Any = jnp.bfloat16) -> tuple[Dataflow, Chain]:
    def body(x: Any, w: Any) -> Any:
        return lax.psum_scatter(x @ w, "x", tiled=True)

    return chain_of(body, shard(4 * block, 6, dtype=dtype), shard(6, n, dtype=dtype))


def scatter_transposed(block: int = 8, n: int = 16) -> tuple[Dataflow, Chain]:
    """As jax makes the gradient of a weight: the product is transposed, and of another type perhaps."""

    def body(x: Any, w: Any) -> Any:
        gradient = jnp.einsum("kn,mk->nm", w, x).T
        return lax.psum_scatter(gradient.astype(jnp.float32), "x", tiled=True)

    return chain_of(body, shard(4 * block, 6), shard(6, n))


def scatter_reshaped() -> tuple[Dataflow, Chain]:
    """What a reshape makes of a product is no strip of it."""

    def body(x: Any, w: Any) -> Any:
        return lax.psum_scatter((x @ w).reshape(32, 4, 4), "x", tiled=True)

    return chain_of(body, shard(32, 6), shard(6, 16))


def scatter_of_two_dots() -> tuple[Dataflow, Chain]:
    def body(x: Any, w: Any) -> Any:
        return lax.psum_scatter(x @ w + (2 * x) @ w, "x", tiled=True)

    return chain_of(body, shard(32, 6), shard(6, 16))


def psum(block: int = 8) -> tuple[Dataflow, Chain]:
    return chain_of(lambda x, w: lax.psum(x @ w, "x"), shard(4 * block, 6), shard(6, 16))


def psum_then_dot(block: int = 8) -> tuple[Dataflow, Chain]:
    def body(x: Any, w: Any, v: Any) -> Any:
        return lax.psum(x @ w, "x") @ v

    return chain_of(body, shard(4 * block, 6), shard(6, 16), shard(16, 4))


def exchange() -> tuple[Dataflow, Chain]:
    def body(x: Any, w: Any) -> Any:
        return lax.all_to_all(x, "x", 0, 1, tiled=True) @ w

    return chain_of(body, shard(8, 4), shard(16, 8))


CHAINS = {
    f.__name__: f
    for f in (
        gather_free,
        gather_contracting,
        gather_contracting_twice,
        gather_of_other_roles,
        scatter,
        scatter_transposed,
        scatter_reshaped,
        scatter_of_two_dots,
        psum,
        psum_then_dot,
        exchange,
    )
}
AXES = {
    "ring": Axis(V5P, 4),
    "line": Axis(by_name("tpu_v5e"), 4),
    "switch": Axis(by_name("h100"), 4),
    "cpu": Axis(by_name("cpu"), 4),
    "reordered": Axis.of(Topology.torus((2, 2), by_name("tpu_v6e")), ((0, 1, 2, 3),)),
    "cube": Axis.of(Topology.torus((2, 2, 2), V5P), (tuple(range(8)),)),
    "three rings": Axis.of(Topology.torus((4, 4, 4), V5P), (tuple(range(64)),)),
}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_thorough_search_has_what_the_rule_has(chain: str, axis: str) -> None:
    flow, found = CHAINS[chain]()
    few = candidates(flow, found, AXES[axis])
    many = candidates(flow, found, AXES[axis], thorough=True)
    assert 0 < len(few) <= len(many)
    assert set(few) <= set(many)
    assert len(set(few)) == len(few) and len(set(many)) == len(many)


@given(
    st.sampled_from([gather_free, gather_contracting, scatter, psum, psum_then_dot]),
    st.integers(1, 9),
    st.sampled_from(sorted(AXES)),
    st.booleans(),
)
def test_there_are_never_more_pieces_than_a_block_has_parts(
    make: Any, block: int, axis: str, thorough: bool
) -> None:
    flow, chain = make(block=block)
    assert divisions(flow, chain) == block
    for schedule in candidates(flow, chain, AXES[axis], thorough=thorough):
        assert schedule.pieces <= MOST_PIECES
        # The other dim of the scattered dots here has 16 elements.
        assert schedule.pieces <= (16 if schedule.across else block)


@pytest.mark.parametrize(
    ("make", "cuts"),
    [
        (gather_contracting, {"dot", "apart"}),
        (gather_free, {"dot"}),
        (scatter, {"dot", "early"}),
        (psum, {"dot", "early"}),
        (exchange, {"dot"}),
    ],
)
@pytest.mark.parametrize("thorough", [False, True])
def test_blocks_may_be_cut_by_the_dot_or_before_it(make: Any, cuts: set[str], thorough: bool) -> None:
    flow, chain = make()
    for hardware, expected in (("tpu_v5p", cuts), ("tpu_v5e", cuts), ("h100", {"dot"})):
        found = candidates(flow, chain, Axis(by_name(hardware), 4), thorough=thorough)
        assert {schedule.cut for schedule in found} == expected


@pytest.mark.parametrize(("dtype", "rows"), [("int8", 32), ("bfloat16", 16), ("float32", 16)])
def test_uneven_pieces_begin_at_the_tiles_of_the_narrowest_operand(dtype: str, rows: int) -> None:
    flow, chain = scatter(block=1024, dtype=jnp.dtype(dtype))
    assert tile_rows(flow, chain) == rows
    three = RingSchedule(directions=1, chains=3)
    starts = [int(part.start * 1024) for part in parts(three, divisions(flow, chain), tile_rows(flow, chain))]
    assert all(start % rows == 0 for start in starts) and starts[1] % 128


def test_a_block_of_one_part_is_not_cut() -> None:
    (schedule,) = {s.pieces for s in candidates(*gather_free(block=1), AXES["ring"], thorough=True)}
    assert schedule == 1


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("chain", [name for name in CHAINS if name != "exchange"])
def test_where_one_hop_is_in_flight_at_a_time_nothing_is_cut(chain: str, thorough: bool) -> None:
    assert not AXES["switch"].hardware.opposite_hops_overlap
    flow, chained = CHAINS[chain]()
    found = candidates(flow, chained, AXES["switch"], thorough=thorough)
    assert {schedule.pieces for schedule in found} == {1}
    # A psum in chunks has a hop of the gather in flight beside one of the scatter.
    assert not isinstance(chained, DotPsum) or {schedule.columns for schedule in found} == {1}


@pytest.mark.parametrize("thorough", [False, True])
def test_one_piece_is_neither_joined_nor_cut_across(thorough: bool) -> None:
    for make, axis in itertools.product(CHAINS.values(), AXES.values()):
        for schedule in candidates(*make(), axis, thorough=thorough):
            assert schedule.pieces > 1 or not (schedule.joined or schedule.across)


def test_blocks_that_cannot_be_cut_may_be_cut_across() -> None:
    flow, chain = scatter(block=1)
    assert {s.pieces for s in candidates(flow, chain, AXES["ring"], thorough=True) if not s.across} == {1}
    assert {s.pieces for s in candidates(flow, chain, AXES["ring"], thorough=True) if s.across} == {2, 4}


def test_pieces_across_fit_into_the_other_dim() -> None:
    flow, chain = scatter(block=8, n=3)
    assert {s.pieces for s in candidates(flow, chain, AXES["ring"], thorough=True) if s.across} == {2}


@pytest.mark.usefixtures("explicit_starts")
@pytest.mark.parametrize("chain", CHAINS)
def test_only_what_has_another_dim_is_cut_across_or_in_columns(chain: str) -> None:
    flow, found = CHAINS[chain]()
    schedules = candidates(flow, found, AXES["ring"], thorough=True)
    scattered = found.scatter if isinstance(found, DotPsum) else found
    possible = across(flow, scattered) is not None
    gathers = ("gather_contracting", "gather_contracting_twice")
    cut = (*gathers, "scatter", "scatter_transposed", "psum", "psum_then_dot")
    assert possible == (chain in cut)
    assert any(s.across for s in schedules) == possible
    assert all(s.columns == 1 or not s.across for s in schedules), "too narrow here"
    # The rows of a psum's blocks make chunks; the chain here is the one without the dot after it.
    assert any(s.columns > 1 for s in schedules) == chain.startswith("psum")
    assert any(s.joined for s in schedules) == (isinstance(found, AllGatherDot) and chain != "exchange")


@pytest.mark.parametrize(
    ("rows", "columns"), [(511, {1}), (512, {1, 2}), (1024, {1, 2, 4}), (4096, {1, 2, 4, 8, 16})]
)
def test_columns_are_wide_enough_for_the_matrix_unit(rows: int, columns: set[int]) -> None:
    assert LEAST_COLUMN == 256 and max(COLUMNS) == 16
    for thorough, make in itertools.product((False, True), (gather_contracting, gather_contracting_twice)):
        flow, chain = make(rows)
        found = candidates(flow, chain, AXES["ring"], thorough=thorough)
        assert {schedule.columns for schedule in found} == columns


def test_several_dots_are_cut_along_the_dim_that_they_all_keep() -> None:
    flow, chain = gather_contracting_twice()
    cut = across(flow, chain)
    assert cut is not None
    assert (cut.dim, cut.operands, cut.result_dims) == (0, (0, 1), (0, 1))


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_long_rings_are_rolled(known: bool, thorough: bool) -> None:
    flow, chain = gather_free()
    for size, unroll in ((LONGEST_UNROLLED, 0), (LONGEST_UNROLLED + 1, UNROLL)):
        longer = _resized(chain, size)
        found = candidates(flow, longer, Axis(V5P, size) if known else None, thorough=thorough)
        assert {schedule.unroll for schedule in found} == {unroll}


def _resized(chain: Chain, axis_size: int) -> Any:
    """The chain on an axis of another size, as far as the choice of schedules looks at it."""
    assert isinstance(chain, AllGatherDot)
    return dataclasses.replace(chain, collective=dataclasses.replace(chain.collective, axis_size=axis_size))


def test_the_orders_of_an_axis_are_used_one_by_one_and_together() -> None:
    flow, chain = gather_free(block=8)
    axis = AXES["three rings"]
    orders = tuple(order.order for order in axis.orders)
    assert len(orders) == 3
    found = {(s.directions, s.orders) for s in candidates(flow, chain, axis, thorough=True)}
    # Four pieces at most, so that three rings run one way only.
    assert found == {(1, orders[:1]), (2, orders[:1]), (1, orders[:2]), (2, orders[:2]), (1, orders)}


@pytest.mark.usefixtures("explicit_starts")
@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("make", [gather_free, gather_contracting, scatter, psum, psum_then_dot])
def test_the_walks_of_a_cube_are_used_together_and_one_way(make: Any, thorough: bool) -> None:
    axis = AXES["cube"]
    flow, chain = make()
    found = [s for s in candidates(flow, chain, axis, thorough=thorough) if s.walks]
    assert len(axis.walks) == 3
    assert {(s.directions, s.chains, s.unroll, s.orders) for s in found} == {(1, 1, 0, axis.walks)}
    assert all(str(s).endswith("3 walks") for s in found)
    # Too many pieces for blocks of two.
    assert not any(s.walks for s in candidates(*gather_free(block=2), axis, thorough=thorough))


def test_rolled_rings_follow_no_walks() -> None:
    flow, chain = gather_free()
    found = candidates(flow, _resized(chain, LONGEST_UNROLLED + 1), AXES["cube"], thorough=True)
    assert found and not any(s.walks for s in found)


def test_a_ring_in_the_axis_s_own_order_needs_none() -> None:
    flow, chain = gather_free()
    straight = Axis.of(Topology.axis(4, V5P), ((0, 1, 2, 3),))
    assert {s.orders for s in candidates(flow, chain, straight, thorough=True)} == {()}
    assert {s.orders for s in candidates(flow, chain, AXES["reordered"])} == {((0, 1, 3, 2),)}


def test_sums_travel_as_the_collective_would_send_them() -> None:
    flow, chain = scatter()
    assert {s.wire for s in candidates(flow, chain, AXES["cpu"])} == {"float32"}
    narrow = candidates(flow, chain, AXES["ring"])
    assert {s.wire for s in narrow} == {"operand"}
    # On virtual CPU devices the program runs as is right there, whatever hardware it is priced for.
    assert {as_run(flow, chain, s).wire for s in narrow} == {"float32"}
    with mock.patch.object(shims, "device_kind", lambda _: "TPU v5"):
        assert tuple(as_run(flow, chain, s) for s in narrow) == narrow


def test_what_is_differentiated_afterwards_is_priced_as_it_will_run() -> None:
    """Its rings start no hops themselves, and what they gather is not rounded."""
    with mock.patch.object(shims, "EXPLICIT_STARTS", True):
        flow, chain = psum()
        assert any(s.columns > 1 for s in candidates(flow, chain, AXES["ring"], thorough=True))
        later = dataclasses.replace(flow, differentiable=True)
        assert not any(s.columns > 1 for s in candidates(later, chain, AXES["ring"], thorough=True))
        flow, chain = gather_free()
        v5p = Axis(V5P, 4)
        assert {s.joined for s in candidates(flow, chain, v5p) if s.pieces > 1} == {False, True}
        later = dataclasses.replace(flow, differentiable=True)
        assert {s.joined for s in candidates(later, chain, v5p) if s.pieces > 1} == {True}


def test_an_all_to_all_is_exchanged() -> None:
    for axis in (None, AXES["ring"], AXES["three rings"]):
        assert candidates(*exchange(), axis) == (EXCHANGE,)
    assert str(EXCHANGE) == "exchange"


def test_without_explicit_starts_a_tpu_s_psum_is_not_run_in_chunks() -> None:
    """Before jax 0.12 the compiler places the starts, and hides too few of the hops of two chunks."""
    for explicit in (True, False):
        with mock.patch.object(shims, "EXPLICIT_STARTS", explicit):
            found = candidates(*psum(), AXES["ring"], thorough=True)
        assert any(s.columns > 1 for s in found) == explicit


@pytest.fixture
def explicit_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shims, "EXPLICIT_STARTS", True)


@pytest.mark.usefixtures("explicit_starts")
@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize(("n", "across"), [(16, set()), (512, {2}), (1024, {2, 4}), (2048, {2, 4, 8})])
@pytest.mark.parametrize(("block", "rows"), [(1, set()), (6, {2}), (8, {2, 4, 8}), (9, set())])
def test_a_psum_is_run_in_equal_chunks_of_rows_or_columns(
    block: int, rows: set[int], n: int, across: set[int], thorough: bool
) -> None:
    flow, chain = chain_of(lambda x, w: lax.psum(x @ w, "x"), shard(4 * block, 6), shard(6, n))
    assert chain.collective.dim == 0
    found = [s for s in candidates(flow, chain, AXES["ring"], thorough=thorough) if s.columns > 1]
    assert {s.columns for s in found if not s.across} == rows
    assert {s.columns for s in found if s.across} == across
    assert all(2 * s.pieces <= MOST_PIECES and s.chains == 1 for s in found)
    # Of chunks of one row none goes both ways.
    assert all(s.pieces * s.columns <= block for s in found if not s.across)


@pytest.mark.usefixtures("explicit_starts")
def test_a_psum_scattered_along_its_last_dim_is_not_run_in_chunks() -> None:
    flow, (match,) = bodies.matched(
        lambda x, w: lax.psum(x @ w, "x"), shard(32, 6), shard(6, 2048), axis_size=4, check_vma=False
    )
    assert isinstance(match.found, tuple)
    for chain in match.found:
        found = candidates(flow, chain, AXES["ring"], thorough=True)
        assert any(s.columns > 1 for s in found) == (chain.collective.dim == 0)
    assert {chain.collective.dim for chain in match.found} == {0, 1}


def test_a_long_axis_s_psum_is_not_run_in_chunks() -> None:
    flow, chain = psum()
    longer = dataclasses.replace(
        chain, collective=dataclasses.replace(chain.collective, axis_size=LONGEST_UNROLLED + 1)
    )
    found = candidates(flow, longer, Axis(V5P, LONGEST_UNROLLED + 1), thorough=True)  # type: ignore[arg-type]
    assert {s.columns for s in found} == {1}


def test_without_hardware_the_last_schedule_goes_both_ways_where_it_can() -> None:
    assert candidates(*gather_free()) == (RingSchedule(directions=1), RingSchedule(directions=2))
    assert candidates(*gather_free(block=1)) == (RingSchedule(directions=1),)


# Rules.


@pytest.mark.parametrize("hardware", HARDWARE, ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("explicit", [True, False])
def test_what_a_rule_says_is_proposed(hardware: Any, explicit: bool) -> None:
    axis = Axis(hardware, 4)
    with mock.patch.object(shims, "EXPLICIT_STARTS", explicit):
        for make in (gather_free, scatter):
            flow, chain = make()
            known = rule(hardware, gathers=make is not scatter, explicit=explicit)
            found = candidates(flow, chain, axis)
            assert any((s.chains, s.across) == (known.chains, known.across) for s in found)
            assert {s.directions for s in found} == ({1, 2} if hardware.opposite_hops_overlap else {1})
            joined = {s.joined for s in found if s.pieces > 1 and not s.across}
            if make is scatter or not joined:
                assert joined <= {False}
            else:
                assert joined == ({False, True} if known.joined is None else {known.joined})


@pytest.mark.parametrize(("hardware", "most"), [(V5P, 2), (by_name("tpu_v6e"), 2), (by_name("tpu_v5e"), 4)])
def test_where_the_compiler_places_the_starts_few_sums_are_on_their_way_at_once(
    hardware: Any, most: int
) -> None:
    """A search that compiles them tries more."""
    flow, chain = scatter()
    for explicit in (True, False):
        with mock.patch.object(shims, "EXPLICIT_STARTS", explicit):
            found = candidates(flow, chain, Axis(hardware, 4))
            thorough = candidates(flow, chain, Axis(hardware, 4), thorough=True)
        assert max(s.pieces for s in found) == (4 if explicit else most)
        assert max(s.pieces for s in thorough) == 4


def test_every_tpu_has_rules_and_the_others_the_default() -> None:
    for table, explicit in ((EXPLICIT, True), (IMPLIED, False)):
        assert {name for name, _ in table} == {name for name in names() if name.startswith("tpu")}
        assert {pattern for _, pattern in table} == {"gather", "scatter"}
        for hardware, (pattern, default) in itertools.product(HARDWARE, DEFAULT.items()):

            def of(hardware: Any, gathers: bool = pattern == "gather", explicit: bool = explicit) -> Any:
                return rule(hardware, gathers=gathers, explicit=explicit)

            known = of(hardware)
            assert (known is default) != hardware.name.startswith("tpu")
            # A topology of TPU v4 is of cores, and what was measured has a name of its own too.
            assert of(hardware.per_core(2)) is known
            assert of(dataclasses.replace(hardware, name="measured")) is known
            assert of(dataclasses.replace(hardware, device_kinds=())) is known


def test_a_rule_names_the_run_that_supports_it_and_fits_the_limit() -> None:
    for known in (*EXPLICIT.values(), *IMPLIED.values(), *rules.DEFAULT.values()):
        assert known.evidence.startswith("bench/results/") and known.evidence.endswith(".md")
        assert 1 <= known.chains <= MOST_PIECES // 2, "both ways must fit"
