"""Collectives that another core runs: which, in how many pieces, and what they take."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cost_model import Axis, Hardware, Matmul, Topology, by_name, matmul_s, offloaded, pipeline
from cost_model.explanation import explain
from cost_model.form import Form
from cost_model.offload_options import compiled_with, offload_options
from cost_model.offloaded import counts, cuts_apart, in_words, is_offloaded, sums_whole
from cost_model.plain_chain import chain_of, forms, price
from cost_model.topology import Place

TPU7X, H100 = by_name("tpu_7x"), by_name("h100")
AXIS = Axis(TPU7X, 8)


@given(st.integers(1, 1 << 16), st.sampled_from([1, 16, 128]), st.booleans())
def test_pieces_are_equal_and_of_whole_grains(size: int, grain: int, few: bool) -> None:
    found = list(counts(size, grain, TPU7X, few=few))
    assert len(found) == len(set(found)) <= (3 if few else 2)
    assert all(size % (pieces * grain) == 0 and (2 if few else 8) <= pieces <= 16 for pieces in found)
    if size % (8 * grain) == 0:
        assert found


def test_of_kernels_there_are_few_pieces() -> None:
    assert list(counts(4096, 128, H100)) == [2, 4, 8]
    assert list(counts(4 * 128, 128, H100, few=True)) == [2, 4]


def test_pieces_of_a_sum_on_a_gpu_by_hand() -> None:
    """Columns of the weight are copied for each dot, and the last reduce_scatter has nothing beside it."""
    chain, axis = chain_of("dot_reduce_scatter", 16384, 8192, 8192), Axis(H100, 8)
    found = price(chain, Form(route="reduce_scatter", chains=4, across=True), axis)
    copy_s = H100.copy_overhead_s + 2 * 2 * 8192 * 2048 / H100.hbm_bytes_per_s
    dots_s = 4 * (copy_s + matmul_s(Matmul(m=16384, k=8192, n=2048), H100))
    together_s = H100.copy_overhead_s + 2 * 2 * 2048 * 8192 / H100.hbm_bytes_per_s
    hop_s = axis.reduce_scatter_s(2 * 16384 * 2048)
    dots_s += 3 * H100.async_overhead_s
    assert found.partials_s == pytest.approx(dots_s + together_s)
    assert found.overlapped_s == pytest.approx(dots_s + hop_s + together_s)


@pytest.mark.parametrize("hardware", [H100, TPU7X], ids=lambda hardware: hardware.name)
def test_what_is_gathered_is_put_together_where_it_is_needed_whole(hardware: Hardware) -> None:
    """By a copy of each piece; XLA:GPU needs memory for it."""
    axis, form = Axis(hardware, 8), Form(route="all_gather", chains=4)
    gathered_bytes = 2 * 16384 * 8192
    plain, whole = (
        price(chain_of("all_gather_dot", 16384, 8192, 8192, handed_out=handed_out), form, axis)
        for handed_out in (False, True)
    )
    starts_s = 4 * hardware.copy_overhead_s if hardware == H100 else 0.0
    copies_s = 2 * gathered_bytes / hardware.hbm_bytes_per_s + starts_s
    assert whole.partials_s - plain.partials_s == pytest.approx(copies_s)
    kept_bytes = gathered_bytes if hardware == H100 else 0
    assert whole.added_bytes - plain.added_bytes == pytest.approx(kept_bytes)


@pytest.mark.parametrize(("rows", "is_near"), [(4096, True), (16384, False)])
def test_a_product_on_chip_takes_no_memory_that_pieces_could_save(rows: int, is_near: bool) -> None:
    """Nor do its pieces, unless they are many (v5e)."""
    v5e = by_name("tpu_v5e")
    asked = Axis(compiled_with(v5e, offload_options(v5e)), 16)
    chain, product_bytes = chain_of("dot_psum", rows, 28672, 8192), 2 * rows * 8192
    for pieces, across in itertools.product((8, 16), (False, True)):
        found = price(chain, Form(route="all_reduce", chains=pieces, across=across), asked)
        held_bytes = 2 / pieces * product_bytes if pieces == 16 or not is_near else 0.0
        assert found.added_bytes == held_bytes - (0 if is_near else product_bytes)


def test_a_gpus_all_reduce_in_pieces_needs_memory_that_the_whole_does_not() -> None:
    """It adds up in place, and so a table does not propose it."""
    chain = chain_of("dot_psum", 16384, 8192, 8192)
    assert all(form.route == "ring" for form in forms(chain, Axis(H100, 8)))
    asked = Axis(dataclasses.replace(H100, offloaded=("all_reduce",)), 8)
    found = [price(chain, form, asked) for form in forms(chain, asked) if form.route == "all_reduce"]
    assert found and all(priced.added_bytes > 0 for priced in found)


def test_a_gpu_reduces_and_scatters_integers_as_others() -> None:
    assert sums_whole("int32", AXIS) and not sums_whole("int32", Axis(H100, 8))


def test_words() -> None:
    assert in_words("all_gather", 1, across=False) == "1 all_gather"
    assert in_words("reduce_scatter", 8, across=True) == "8 reduce_scatters in turn, cut across"
    assert in_words("all_reduce", 16, across=True) == "16 all_reduces in turn, cut across"
    assert str(Form(route="all_gather", chains=4)) == "4 all_gathers in turn"


def topology(domains: int) -> Topology:
    """Four chips of two devices, in so many slices."""
    places = [
        Place(domain, (chip,), core)
        for domain in range(domains)
        for chip in range(4 // domains)
        for core in range(2)
    ]
    return Topology(TPU7X, "by hand", tuple(places), (4 // domains,), (False,))


def test_what_leaves_a_slice_is_not_offloaded() -> None:
    assert is_offloaded("all_gather", AXIS) and is_offloaded("all_reduce", AXIS)
    assert not is_offloaded("all_gather", Axis(by_name("tpu_v5p"), 8))
    one, two = (Axis.of(topology(n), (tuple(range(8)),)) for n in (1, 2))
    assert is_offloaded("all_gather", one) and not is_offloaded("all_gather", two)
    within = Axis.of(topology(2), ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert is_offloaded("all_gather", within)


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        ("all_gather_dot", {}),
        ("all_gather_dot", {"cut": "k", "operand": "rhs"}),
        ("dot_psum", {}),
        ("dot_reduce_scatter", {}),
    ],
)
def test_between_the_limit_and_one_after_the_other(pattern: str, options: dict[str, str]) -> None:
    chain = chain_of(pattern, 16384, 8192, 16384, **options)  # type: ignore[arg-type]
    found = [form for form in forms(chain, AXIS) if form.route != "ring"]
    assert found
    for form in found:
        priced = price(chain, form, AXIS)
        assert max(priced.hops_s, priced.partials_s - 1e-12) <= priced.overlapped_s
        assert priced.overlapped_s < priced.partials_s + priced.hops_s
        assert priced.original_s == pytest.approx(price(chain, Form(), AXIS).original_s)
        # A gather's pieces of rows are held beside the whole; a psum's need less than the whole.
        assert priced.added_bytes < (2 * 16384 * 16384 if pattern == "all_gather_dot" else 0)


@pytest.mark.parametrize("hardware", [H100, TPU7X], ids=lambda hardware: hardware.name)
def test_pieces_of_rows_are_cut_on_a_tpu_before_the_first_goes(
    hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, form = chain_of("all_gather_dot", 16384, 8192, 8192), Form(route="all_gather", chains=4)
    found = price(chain, form, Axis(hardware, 8))
    monkeypatch.setattr(offloaded, "CUTTING", 0.0)
    uncut = price(chain, form, Axis(hardware, 8))
    shard_bytes = 2 * 16384 * 8192 / 8
    cut_s = 1.3 * 2 * shard_bytes / hardware.hbm_bytes_per_s if hardware == TPU7X else 0.0
    assert found.partials_s - uncut.partials_s == pytest.approx(cut_s)
    assert found.overlapped_s - uncut.overlapped_s == pytest.approx(cut_s)


def test_strips_that_a_tpu_makes_in_their_place_need_no_memory() -> None:
    """Two gathered pieces are held at a time, and what is cut out; on GPUs also the result once more."""
    chain = chain_of("all_gather_dot", 16384, 8192, 16384, cut="k", operand="rhs")
    form = Form(route="all_gather", chains=8, across=True)
    moved_bytes, result_bytes = 2 * 8192 * 16384, 2 * 16384 * 16384
    placed, copied = price(chain, form, AXIS), price(chain, form, Axis(H100, 8))
    assert placed.added_bytes == pytest.approx((2 / 8 + 1 / 8 - 1) * moved_bytes)
    assert copied.added_bytes == pytest.approx(placed.added_bytes + result_bytes)


def test_what_becomes_of_a_piece_of_rows_takes_memory_unless_it_is_placed_from_the_chip() -> None:
    """Products of 4 MB stay on a TPU7x until they are placed, those of 67 MB do not."""
    form = Form(route="all_gather", chains=4)
    for rows, stays in ((1024, True), (16384, False)):
        moved_bytes, product_bytes = 2 * rows * 8192, 2 * rows * 8192 / 4
        chain = chain_of("all_gather_dot", rows, 8192, 8192)
        for hardware in (TPU7X, H100):
            kept_bytes = 0.0 if stays and hardware == TPU7X else product_bytes
            added_bytes = price(chain, form, Axis(hardware, 8)).added_bytes
            assert added_bytes == pytest.approx((2 / 4 - 1) * moved_bytes + kept_bytes)


def test_strips_that_a_tpu_makes_in_their_place_are_not_copied() -> None:
    """After the last piece there are its dots, and on GPUs all that is put together."""
    chain = chain_of("all_gather_dot", 16384, 8192, 16384, cut="k", operand="rhs")
    form = Form(route="all_gather", chains=8, across=True)
    for hardware in (TPU7X, H100):
        axis = Axis(hardware, 8)
        priced = price(chain, form, axis)
        dots_s = 8 * matmul_s(Matmul(m=16384, k=8192, n=2048), hardware)
        copied_s = 2 * 2 * 16384 * 16384 / hardware.hbm_bytes_per_s
        after_s = priced.overlapped_s - dots_s - axis.all_gather_s(2 * 8192 * 2048)
        assert (after_s > copied_s) == (hardware is H100)


def test_what_the_compiler_may_round_is_priced_at_half_its_size() -> None:
    """As in the chain as written. The dots are too small to be sure of it."""
    form = Form(route="all_gather", chains=8, across=True)
    exact, rounded = (
        price(chain_of("all_gather_dot", 256, 8192, 16384, cut="k", operand="rhs", dtype=dtype), form, AXIS)
        for dtype in ("float32", "bfloat16")
    )
    assert exact.hops_s == pytest.approx(rounded.hops_s)
    assert exact.collective_s == pytest.approx(rounded.collective_s)


def test_strips_are_read_from_main_memory_where_nothing_arrives_on_chip() -> None:
    chain = chain_of("all_gather_dot", 16384, 8192, 8192, cut="k", operand="rhs")
    form = Form(route="all_gather", chains=8, across=True)
    arrives = Axis(dataclasses.replace(TPU7X, receives_on_chip=True), 8)
    assert price(chain, form, arrives).partials_s < 0.97 * price(chain, form, AXIS).partials_s


def test_nothing_goes_in_turn_where_nothing_runs_beside_dots() -> None:
    """As on a full pod of v5e."""
    chain = chain_of("all_gather_dot", 16384, 8192, 16384, cut="k", operand="rhs")
    for hardware in (TPU7X, by_name("tpu_v5e")):
        assert any(form.route == "all_gather" for form in forms(chain, Axis(hardware, 8)))
        waiting = Axis(dataclasses.replace(hardware, overlaps=False), 8)
        assert all(form.route == "ring" for form in forms(chain, waiting))


def test_other_collectives_have_no_such_forms() -> None:
    chain = chain_of("dot_psum", 16384, 8192, 16384)
    elsewhere = Axis(dataclasses.replace(TPU7X, offloaded=("all_gather",)), 8)
    assert all(form.route == "ring" for form in forms(chain, elsewhere))


def test_only_known_collectives_can_be_offloaded() -> None:
    with pytest.raises(ValueError, match=r"'tpu_7x': offloaded names collectives of .*, not \['permute'\]"):
        dataclasses.replace(TPU7X, offloaded=("permute",))


@pytest.mark.parametrize("form", [Form(), Form(route="reduce_scatter", chains=8, across=True)], ids=str)
def test_of_integers_sparse_cores_make_an_all_reduce(form: Form) -> None:
    """Each device keeps its block of it, so that a reduce_scatter takes twice as long."""
    prices = {}
    for dtype in ("int32", "float32"):
        chain = chain_of("dot_reduce_scatter", 8192, 4096, 4096, dtype=dtype)
        prices[dtype] = price(chain, form, AXIS)
        assert explain(chain, AXIS).collective.seconds == pytest.approx(prices[dtype].collective_s)
    moved_bytes = 4 * 8192 * 4096
    assert prices["float32"].collective_s == pytest.approx(AXIS.reduce_scatter_s(moved_bytes))
    assert prices["int32"].collective_s == pytest.approx(AXIS.all_reduce_s(moved_bytes))
    if form.route == "reduce_scatter":
        assert prices["int32"].hops_s == pytest.approx(8 * AXIS.all_reduce_s(moved_bytes / 8))
    elsewhere = Axis(by_name("tpu_v5p"), 8)
    assert sums_whole("int32", AXIS) and not sums_whole("float32", AXIS)
    assert not sums_whole("int32", elsewhere)


def test_pieces_of_a_sum_are_placed_as_a_whole_sum_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is copied to where it is needed, as the original's sum is: in all as long."""
    chain, form = chain_of("dot_psum", 16384, 8192, 16384), Form(route="all_reduce", chains=8)
    placed_s = price(chain, form, AXIS).partials_s
    whole_s = pipeline.copied_sum_s(chain.moved_bytes, 2, AXIS)
    assert whole_s == pytest.approx(2.6 * 2 * chain.moved_bytes / TPU7X.hbm_bytes_per_s)
    monkeypatch.setattr(pipeline, "GATHERED", {False: 0.0, True: 0.0})
    assert placed_s - price(chain, form, AXIS).partials_s == pytest.approx(whole_s)


def test_strips_of_many_rows_copy_what_they_read_of_the_other_operand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy of 2 · 2 bytes of each of its elements, and 2 · M operations with each: 11067 rows on v5p."""
    v5p = compiled_with(by_name("tpu_v5p"), offload_options(by_name("tpu_v5p")))
    assert cuts_apart(11068, "bfloat16", v5p) and not cuts_apart(11066, "bfloat16", v5p)
    assert not cuts_apart(1 << 20, "bfloat16", TPU7X) and not cuts_apart(1 << 20, "bfloat16", H100)
    form = Form(route="reduce_scatter", chains=8, across=True)
    for rows, apart in ((8192, False), (16384, True)):
        chain, axis = chain_of("dot_reduce_scatter", rows, 4096, 8192), Axis(v5p, 8)
        found = price(chain, form, axis)
        with monkeypatch.context() as patched:
            patched.setattr("cost_model.offloaded.cuts_apart", lambda *_: False)
            copies_s = found.partials_s - price(chain, form, axis).partials_s
        assert copies_s == pytest.approx(2 * 2 * 4096 * 8192 / v5p.hbm_bytes_per_s if apart else 0.0)


@pytest.mark.parametrize(("width", "in_turn"), [(2048, True), (2048 + 64, False)])
def test_rows_go_in_turn_where_those_of_the_result_are_whole_tiles(width: int, in_turn: bool) -> None:
    found = forms(chain_of("all_gather_dot", 16384, 8192, width), AXIS)
    assert any(form.route == "all_gather" for form in found) == in_turn
    elsewhere = forms(chain_of("all_gather_dot", 16384, 8192, width), Axis(H100, 8))
    assert any(form.route == "all_gather" for form in elsewhere)


def test_where_every_permute_waits_one_direction_waits_for_the_other() -> None:
    v5e = by_name("tpu_v5e")
    on_pod = v5e.on_slice(256)
    assert v5e.overlaps and v5e.opposite_hops_overlap and v5e.on_slice(64) is v5e
    assert not on_pod.overlaps and not on_pod.opposite_hops_overlap
    # Compiled, such a ring took 142 ms, and the program as written 124 (v5e:16x16).
    chain = chain_of("dot_reduce_scatter", 65536, 8192, 16384)
    found = explain(chain, Axis(on_pod, 16))
    assert not found.pays and all(form.directions == 1 for form in forms(chain, Axis(on_pod, 16)))


def test_an_all_to_all_is_an_exchange_and_no_ring() -> None:
    found = explain(chain_of("all_to_all_dot", 8192, 2048, 8192), Axis(by_name("tpu_v5p"), 8))
    assert str(found.best.form) == found.to_json()["candidates"][0]["name"] == "exchange"
    assert "As an exchange: " in str(found) and "ring," not in str(found)
