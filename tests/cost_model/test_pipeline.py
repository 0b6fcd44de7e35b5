"""The time of a psum in chunks, by hand and against its parts."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest

from cost_model import Axis, Directions, Hardware, Matmul, by_name, matmul_s
from cost_model.chain_sizes import IN_COLUMNS
from cost_model.form import Form
from cost_model.pipeline import (
    GATHERED,
    LOOPED,
    PLACING,
    ROUNDING,
    gather_after,
    last_gather_s,
    pipeline_estimate,
)
from cost_model.plain_chain import PlainChain, chain_of, forms, price, works
from cost_model.ring import estimate
from cost_model.ring_on_chip import LATE, late_s
from cost_model.ring_work import RingWork

V5P = by_name("tpu_v5p")
RING = Axis(V5P, 16)
V_BYTES = 8192 * 8192 * 2


def chunks(columns: int, k: int = 2048) -> tuple[PlainChain, Form]:
    chain = chain_of("dot_psum", 8192, k, 8192)
    return chain, Form(directions=2, columns=columns, across=True)


def of_strips(work: RingWork) -> RingWork:
    """The same rings, each chunk of which has a strip of the right operand to itself."""
    (piece,), (whole,) = work.piece, work.matmuls
    return dataclasses.replace(work, matmuls=(dataclasses.replace(whole, n=piece.n),))


def late_by(work: RingWork, axis: Axis) -> float:
    """What the first chunk's dots take longer while the right operand is fetched."""
    (piece,), (whole,) = work.piece, work.matmuls
    strip_bytes = dataclasses.replace(whole, n=piece.n).rhs_bytes
    dots = axis.size * work.dots
    return late_s(piece, "rhs", whole.rhs_bytes, dots, axis.hardware, waited_bytes=strip_bytes)


@pytest.mark.parametrize("columns", [2, 4, 8])
def test_a_communication_bound_psum_waits_for_the_wire_and_few_products(columns: int) -> None:
    chain, form = chunks(columns, k=512)
    priced = price(chain, form, RING)
    # V/W twice, less what stays on each device: 15 of 16 shards travel, half each way, by 9e10 B/s.
    wire_s = 2 * 15 * (V_BYTES / 16 / 2) / 9e10
    assert priced.hops_s == pytest.approx(wire_s)
    assert priced.overlapped_s > wire_s
    (work,) = works(chain, form, RING)
    chunk_s = estimate(dataclasses.replace(work, columns=1), RING).partials_s
    # The first chunk's products have but half of the hops beside them; of each other chunk the first step's,
    # and what copying its shards into place takes longer than the hops.
    rest_s = (columns - 1) * chunk_s / 8
    assert priced.overlapped_s <= (1 + 1e-9) * (wire_s + chunk_s + rest_s)


def test_only_the_last_gather_of_a_compute_bound_psum_is_exposed() -> None:
    chain, form = chunks(8, k=16384)
    priced = price(chain, form, RING)
    last_s = 15 * (V_BYTES / 16 / 2 / 8) / 9e10
    placed_s = PLACING[V5P.keeps_sums] * 2 * V_BYTES / V5P.hbm_bytes_per_s
    (work,) = works(chain, form, RING)
    scatter = estimate(work, RING)
    assert last_gather_s(work, V_BYTES, RING, across=True) == pytest.approx(last_s)
    assert priced.partials_s == pytest.approx(scatter.partials_s + placed_s)
    # Of the eight chunks' copies the last runs beside its gather.
    parts_s = scatter.partials_s + placed_s * 7 / 8 + last_s
    assert priced.overlapped_s == pytest.approx(IN_COLUMNS * parts_s, rel=1e-3)


@pytest.mark.parametrize("axis", [RING, Axis(by_name("tpu_7x"), 16)], ids=str)
def test_chunks_are_as_the_original_psum_before_the_rewrite(axis: Axis) -> None:
    chain, form = chunks(4)
    plain = price(chain, Form(directions=2), axis)
    priced = price(chain, form, axis)
    assert (priced.dot_s, priced.collective_s) == (plain.dot_s, plain.collective_s)


def test_where_hops_and_dots_take_turns_all_adds_up() -> None:
    hardware = dataclasses.replace(V5P, overlaps=False)
    axis = Axis(hardware, 16)
    chain, form = chunks(4)
    (work,) = works(chain, form, axis)
    priced = pipeline_estimate(work, V_BYTES, 2, axis, across=True)
    gather_s = 4 * last_gather_s(work, V_BYTES, axis, across=True)
    rings_s = estimate(of_strips(work), axis).overlapped_s + late_by(work, axis)
    assert priced.overlapped_s == pytest.approx(rings_s + gather_s)


def test_the_strip_of_an_operand_that_a_chunk_takes_is_on_chip_if_the_whole_fits() -> None:
    placed_s = PLACING[V5P.keeps_sums] * 2 * V_BYTES / V5P.hbm_bytes_per_s
    # [8192, 2048] by [2048, 8192]: 32 MiB of the right operand.
    chain, form = chunks(8)
    (work,) = works(chain, form, RING)
    near_s = estimate(of_strips(work), RING).partials_s + late_by(work, RING)
    assert price(chain, form, RING).partials_s == pytest.approx(near_s + placed_s)
    # [8192, 16384] by [16384, 8192]: 256 MiB, of which each chunk takes 32.
    chain, form = chunks(8, k=16384)
    (work,) = works(chain, form, RING)
    near_s, far_s = (estimate(each, RING).partials_s for each in (of_strips(work), work))
    assert near_s < 0.97 * far_s
    assert price(chain, form, RING).partials_s == pytest.approx(far_s + placed_s)


def test_a_strip_that_ends_within_a_tile_is_not_fetched() -> None:
    # [8192, 2048] by [2048, 8000]: each of 8 chunks takes 1000 columns, 7 tiles of 128 and a part of one.
    chain, form = chain_of("dot_psum", 8192, 2048, 8000), Form(directions=2, columns=8, across=True)
    (work,) = works(chain, form, RING)
    assert estimate(of_strips(work), RING).partials_s < 0.97 * estimate(work, RING).partials_s
    placed_s = PLACING[V5P.keeps_sums] * 2 * chain.moved_bytes / V5P.hbm_bytes_per_s
    partials_s = price(chain, form, RING).partials_s
    assert partials_s == pytest.approx(estimate(work, RING).partials_s + placed_s)


def test_blocks_that_begin_within_a_tile_may_be_read_from_main_memory() -> None:
    """Rows of 16 devices: 104 and 112 each, and a tile has 16; 34 MB of weights fit on chip."""
    axis = Axis(by_name("tpu_v6e"), 16)
    form = Form(directions=2, columns=8, across=True)
    within, aligned = (
        price(chain_of("dot_psum", rows, 1280, 13312), form, axis).partials_s for rows in (1664, 1792)
    )
    assert within > 2 * aligned


@pytest.mark.parametrize("columns", [2, 4, 8])
def test_of_few_chunks_they_are_read_on_chip_on_v5e(columns: int) -> None:
    """Blocks of 168 and 192 rows of 16 devices, as of ``x[2688, 640] @ w[640, 23424]``."""
    axis = Axis(by_name("tpu_v5e"), 16)
    form = Form(directions=2, columns=columns, across=True)
    within, aligned = (
        price(chain_of("dot_psum", rows, 640, 23552), form, axis).partials_s for rows in (2688, 3072)
    )
    assert (within > aligned) == (columns == 8)


def test_rows_are_cut_into_chunks_by_their_number_and_columns_by_their_width() -> None:
    found = forms(chain_of("dot_psum", 16 * 6, 512, 1024), RING)
    assert {form.columns for form in found if not form.across} == {1, 2}
    assert {form.columns for form in found if form.across} == {1, 2, 4}
    assert {form.columns for form in forms(chain_of("dot_psum", 96, 512, 1024, cut="n"), RING)} == {1}
    (work,) = works(chain_of("dot_psum", 96, 512, 1024), Form(columns=2), RING)
    assert work.piece[0].m == 96 * Fraction(1, 32) and work.piece[0].n == 1024


def test_blocks_that_all_chunks_have_in_common_are_held() -> None:
    chain, form = chunks(4)
    by_dot, early = (
        price(chain, dataclasses.replace(form, cut=cut), RING).added_bytes for cut in ("dot", "early")
    )
    assert early - by_dot == 8192 * 2048 * 2
    # Of two chunks' shards so many, in place of the whole product.
    assert by_dot == pytest.approx(2 * 4.5 * V_BYTES / 16 / 4 - V_BYTES)
    by_dot, early = (
        price(chain, dataclasses.replace(form, across=False, cut=cut), RING).added_bytes
        for cut in ("dot", "early")
    )
    assert early == by_dot


@pytest.mark.parametrize(
    ("chip", "size", "width", "slowness"),
    [
        ("tpu_v4", 30e6, 2, 2.6),
        ("tpu_v4", 30e6, 4, 1.4),
        ("tpu_v5p", 30e6, 2, 2.6),
        ("tpu_v5e", 30e6, 2, 0.6),
        ("tpu_v5e", 30e6, 4, 0.6),
        ("tpu_v5e", 90e6, 2, 2.6),
        ("tpu_v5e", 90e6, 4, 1.4),
        ("tpu_v6e", 50e6, 2, 0.6),
        ("h100", 30e6, 2, 1.0),
    ],
)
def test_a_psum_s_gathered_shards_are_copied(chip: str, size: float, width: float, slowness: float) -> None:
    axis = Axis(by_name(chip), 8)
    found = gather_after(size, width, axis)
    assert found.collective_s == axis.all_gather_s(size)
    assert found.partials_s == pytest.approx(slowness * 2 * size / axis.hardware.hbm_bytes_per_s)
    assert found.overlapped_s == pytest.approx(found.collective_s + found.partials_s)
    assert found.dot_s == found.hops_s == 0


@pytest.mark.parametrize(("width", "slowness"), [(2, 2.6), (4, 1.4)])
def test_what_another_core_sums_is_copied_before_the_rewrite_too(width: float, slowness: float) -> None:
    """The original's all_reduce of TPU7x, whose result never is where it is needed."""
    axis = Axis(by_name("tpu_7x"), 8)
    found = gather_after(3e6, width, axis)
    copied_s = slowness * 2 * 3e6 / axis.hardware.hbm_bytes_per_s
    assert found.partials_s == pytest.approx(copied_s)
    assert found.collective_s == pytest.approx(axis.all_gather_s(3e6) + copied_s)
    assert found.benefit_s == 0


@pytest.mark.parametrize(
    ("chip", "size", "slowness"), [("tpu_v5p", 30e6, 2.0), ("tpu_v6e", 30e6, 1.1), ("tpu_v6e", 200e6, 2.0)]
)
@pytest.mark.parametrize("width", [2, 4])
def test_a_sum_of_columns_is_turned_round_by_elements(
    chip: str, size: float, slowness: float, width: float
) -> None:
    axis = Axis(by_name(chip), 8)
    plain, turned = gather_after(size, width, axis), gather_after(size, width, axis, "ragged columns")
    turned_s = slowness * 2 * size * 4 / width / axis.hardware.hbm_bytes_per_s
    assert turned.partials_s == pytest.approx(turned_s)
    assert turned.collective_s == plain.collective_s


@pytest.mark.parametrize("name", ["tpu_v5p", "h100"])
def test_a_psum_s_sum_is_turned_where_its_columns_are_no_whole_tiles(name: str) -> None:
    axis, form = Axis(by_name(name), 8), Form(directions=2)
    for n, turned in ((8 * 256, False), (8 * 272, name != "h100"), (8 * 384, False)):
        chain = chain_of("dot_psum", 1024, 2048, n, cut="n")
        psum, scatter = price(chain, form, axis), estimate(works(chain, form, axis)[0], axis)
        gathered = gather_after(1024 * n * 2, 2, axis, "ragged columns" if turned else "columns")
        assert psum.partials_s - scatter.partials_s == pytest.approx(gathered.partials_s)


@pytest.mark.parametrize(("size", "near"), [(30e6, True), (42e6, False), (53e6, False)])
def test_a_sum_of_columns_leaves_the_chip_sooner_than_one_of_rows(size: float, near: bool) -> None:
    axis = Axis(by_name("tpu_v6e"), 8)
    rows, columns = (gather_after(size, 2, axis, blocks).partials_s for blocks in ("rows", "columns"))
    assert rows == pytest.approx(GATHERED[True] * 2 * size / axis.hardware.hbm_bytes_per_s)
    assert columns == pytest.approx(GATHERED[near] / GATHERED[True] * rows)


def test_where_no_dot_reads_a_part_of_what_is_on_chip_a_strip_is_not_fetched() -> None:
    chain, form = chunks(8, k=16384)
    hardware = dataclasses.replace(V5P, cuts_on_chip=False)
    axis = Axis(hardware, 16)
    (work,) = works(chain, form, axis)
    assert estimate(of_strips(work), axis).partials_s < 0.97 * estimate(work, axis).partials_s
    placed_s = PLACING[V5P.keeps_sums] * 2 * V_BYTES / V5P.hbm_bytes_per_s
    expected_s = estimate(work, axis).partials_s + placed_s
    assert price(chain, form, axis).partials_s == pytest.approx(expected_s)


V5E = by_name("tpu_v5e")


@pytest.mark.parametrize("hardware", [V5E, V5P], ids=str)
def test_dots_read_main_memory_until_what_they_read_strips_of_is_fetched(hardware: Hardware) -> None:
    piece, whole_bytes = Matmul(m=32, k=4096, n=1024, dtype="bfloat16"), 4096 * 4096 * 2
    near_s = matmul_s(piece, hardware, lhs_on_chip=True, rhs_on_chip=True)
    far_s = matmul_s(piece, hardware, lhs_on_chip=True)
    fetch_s = whole_bytes / hardware.hbm_bytes_per_s
    found_s = late_s(piece, "rhs", whole_bytes, 16, hardware, waited_bytes=0)
    far = round(found_s / (far_s - near_s))
    assert found_s == pytest.approx(far * (far_s - near_s))
    until_s = LATE[hardware.receives_on_chip] * fetch_s
    assert (far - 1) * far_s < until_s <= far * far_s
    # No more dots than there are; all of them, if it is fetched last; nothing if they waited for longer.
    assert late_s(piece, "rhs", 100 * whole_bytes, 3, hardware, waited_bytes=0) == pytest.approx(
        3 * (far_s - near_s)
    )
    assert late_s(piece, "rhs", whole_bytes, 16, hardware, waited_bytes=0, at_last=True) == pytest.approx(
        16 * (far_s - near_s)
    )
    assert late_s(piece, "rhs", whole_bytes, 16, hardware, waited_bytes=1e12) == 0.0


def test_large_dots_are_little_later_for_it() -> None:
    """They take as long as their products, wherever their operands are."""
    axis = Axis(V5E, 8)
    few, many = (
        price(chain_of("dot_psum", rows, 4096, 4096), Form(directions=2, columns=2, across=True), axis)
        for rows in (128, 16384)
    )
    plain = [price(chain_of("dot_psum", rows, 4096, 4096), Form(directions=2), axis) for rows in (128, 16384)]
    assert few.partials_s > 1.3 * plain[0].partials_s
    assert many.partials_s < 1.1 * plain[1].partials_s


def test_a_loop_of_many_single_dots_has_nothing_on_chip() -> None:
    def partials_s(size: int, columns: int, directions: Directions) -> float:
        form = Form(directions=directions, columns=columns, across=True)
        return price(chain_of("dot_psum", 32 * size, 4096, 4096), form, Axis(V5E, size)).partials_s

    # Twice as many devices and rows: twice as many dots of the same shape.
    assert partials_s(LOOPED, 4, 1) > 2.5 * partials_s(LOOPED // 2, 4, 1)
    assert partials_s(LOOPED, 2, 1) < 2.2 * partials_s(LOOPED // 2, 2, 1)
    assert partials_s(LOOPED, 4, 2) < 2.2 * partials_s(LOOPED // 2, 4, 2)


@pytest.mark.parametrize("across", [True, False])
def test_operands_of_float32_are_rounded_before_a_loop_of_chunks(across: bool) -> None:
    def partials_s(columns: int) -> float:
        form = Form(directions=2, columns=columns, across=across)
        return price(chain_of("dot_psum", 65536, 512, 1024, dtype="float32"), form, axis).partials_s

    axis = Axis(V5E, 8)
    operands_bytes = 4 * (65536 * 512 + 512 * 1024)
    rounding_s = ROUNDING * 1.5 * operands_bytes / V5E.hbm_bytes_per_s
    assert partials_s(4) - partials_s(2) > rounding_s
    h100 = Axis(dataclasses.replace(by_name("h100"), async_overhead_s=0.0), 8)
    chain = chain_of("dot_psum", 65536, 512, 1024, dtype="float32")
    two, four = (price(chain, Form(columns=n, across=across), h100).partials_s for n in (2, 4))
    assert four - two < ROUNDING * 1.5 * operands_bytes / h100.hardware.hbm_bytes_per_s
