"""What of a ring's partial dots is held on chip, and in what order TPU compilers put it there."""

import dataclasses
import math
from typing import Any

import pytest

from cost_model import Axis, Hardware, Matmul, RingWork, Topology, by_name, estimate
from cost_model.chain_sizes import IN_COLUMNS
from cost_model.form import Form
from cost_model.matmul import matmul_s
from cost_model.plain_chain import PlainChain, PlainDot, price
from cost_model.ring_on_chip import on_chip, sum_near, sums_stay
from cost_model.ring_work import Before

ROOM: Hardware = dataclasses.replace(
    by_name("tpu_v5e"),
    on_chip_bytes=10e6,
    results_on_chip=0.9,
    places_slowly=False,
)
"""A chip with room for 10 MB, that holds all it can."""

X_BYTES, W_BYTES = 8e6, 4e6


def scatter(*, across: bool = False, **form: Any) -> RingWork:
    """x[4000, 1000] times w[1000, 2000] in bfloat16, scattered on rows to 4 devices both ways.

    Blocks of x are cut out of its 8e6 bytes; the 4e6 of w are shared by all steps, a half by each direction
    where the pieces are cut across.
    """
    whole = Matmul(m=4000, k=1000, n=2000)
    piece = dataclasses.replace(whole, m=1000, n=1000) if across else dataclasses.replace(whole, m=500)
    return RingWork(
        collective="reduce_scatter",
        shard_bytes=4e6,
        collective_shard_bytes=4e6,
        matmuls=(whole,),
        piece=(piece,),
        directions=2,
        **form,
    )


def gather(**form: Any) -> RingWork:
    """x[1000, 4000] times w[4000, 500] in bfloat16, w gathered along K on 4 devices: x has 8e6 bytes."""
    whole = Matmul(m=1000, k=4000, n=500)
    return RingWork(
        collective="all_gather",
        shard_bytes=1e6,
        collective_shard_bytes=1e6,
        matmuls=(whole,),
        piece=(dataclasses.replace(whole, k=1000),),
        **form,
    )


def gathers(whole: Matmul, piece: Matmul, dots: int = 1, **form: Any) -> RingWork:
    """Shards of 2e6 bytes of x[4000, 1000], or of a batch of 4, gathered for so many such dots."""
    return RingWork(
        collective="all_gather",
        shard_bytes=2e6,
        collective_shard_bytes=2e6,
        matmuls=(whole,) * dots,
        piece=(piece,) * dots,
        **form,
    )


def placed(work: RingWork, hardware: Hardware, **changes: Any) -> tuple[tuple[bool, bool], float]:
    """What is near of the only dot, and the bytes that are held."""
    found = on_chip(work, 4, dataclasses.replace(hardware, **changes))
    return found.near[0], found.held_bytes


@pytest.mark.parametrize("across", [False, True])
def test_the_largest_operand_that_fits_is_fetched_before_what_is_read_most_often(across: bool) -> None:
    work = scatter(across=across)
    assert placed(work, ROOM) == ((True, False), X_BYTES)
    # Beside w, of which strips are read, two sums of 2e6 bytes come and go.
    room_bytes = X_BYTES + W_BYTES + (4e6 if across else 0)
    assert placed(work, ROOM, on_chip_bytes=room_bytes) == ((True, True), X_BYTES + W_BYTES)
    assert placed(work, ROOM, on_chip_bytes=room_bytes - 1) == ((True, False), X_BYTES)
    elsewhere = dataclasses.replace(ROOM, on_chip_bytes=X_BYTES + W_BYTES, receives_on_chip=False)
    assert placed(work, elsewhere) == ((True, True), X_BYTES + W_BYTES)
    # Too large for the chip, it leaves room for the other.
    assert placed(work, elsewhere, on_chip_bytes=X_BYTES - 1) == ((False, True), W_BYTES)


def test_what_blocks_are_cut_out_of_is_fetched_before_what_strips_are_read_of() -> None:
    """However small it is, where both do not fit."""

    def of_few_rows(across: bool) -> RingWork:
        work = scatter(across=across)
        matmuls, piece = (
            tuple(dataclasses.replace(matmul, m=matmul.m // 4) for matmul in each)
            for each in (work.matmuls, work.piece)
        )
        return dataclasses.replace(work, matmuls=matmuls, piece=piece)

    x_bytes = X_BYTES / 4
    assert placed(of_few_rows(True), ROOM, on_chip_bytes=W_BYTES) == ((True, False), x_bytes)
    assert placed(of_few_rows(False), ROOM, on_chip_bytes=W_BYTES)[0][1]
    assert placed(of_few_rows(True), ROOM, on_chip_bytes=W_BYTES + 2 * x_bytes)[0] == (True, True)


def test_what_is_cut_out_beforehand_does_not_take_the_place_of_what_is_shared() -> None:
    assert placed(scatter(cut="early"), ROOM) == ((True, True), W_BYTES)


def test_a_gather_s_dots_find_the_other_operand_there_if_it_fits() -> None:
    assert placed(gather(), ROOM, on_chip_bytes=X_BYTES)[0] == (True, False)
    assert placed(gather(), ROOM, on_chip_bytes=X_BYTES)[1] == X_BYTES
    assert placed(gather(), ROOM, on_chip_bytes=X_BYTES - 1) == ((False, False), 0)


def test_a_whole_shard_that_a_step_s_only_dot_contracts_is_fetched_by_some_compilers() -> None:
    """Of 1e6 bytes; x, of 8e6, does not fit, so that half of the room is what is asked for."""
    assert placed(gather(), ROOM, on_chip_bytes=2e6) == ((False, False), 0)
    assert placed(gather(), ROOM, on_chip_bytes=2e6, fetches_shards=True) == ((False, True), 0)
    fetching = dataclasses.replace(ROOM, on_chip_bytes=2e6, fetches_shards=True, receives_on_chip=False)
    assert placed(gather(), fetching) == ((False, True), 0)
    assert on_chip(gather(), 4, fetching).arriving is None
    whole = Matmul(m=1000, k=4096, n=512)  # whose pieces fill tiles
    filling = dataclasses.replace(gather(), matmuls=(whole,), piece=(dataclasses.replace(whole, k=1024),))
    little = dataclasses.replace(fetching, on_chip_bytes=40e6, fetches_sums=True)
    assert on_chip(filling, 4, little).near[0][1]
    assert on_chip(filling, 4, little).arriving is None
    assert on_chip(filling, 4, dataclasses.replace(little, fetches_shards=False)).arriving == "rhs"
    assert placed(gather(), fetching, on_chip_bytes=2e6 - 1) == ((False, False), 0)
    assert placed(gather(chains=2), fetching) == ((False, False), 0)
    assert placed(gather(columns=2), fetching) == ((False, False), 0)


def test_little_shards_are_fetched_by_some_compilers_unless_they_are_cut_into_columns() -> None:
    """Pieces of 5e5 bytes where 1e6 may be there beside x, which is held."""
    fetching = dataclasses.replace(ROOM, on_chip_bytes=X_BYTES + 16e6, receives_on_chip=False)
    for fetches, columns, near in ((True, 1, True), (False, 1, False), (True, 2, False)):
        hardware = dataclasses.replace(fetching, fetches_shards=fetches)
        assert placed(gather(chains=2, columns=columns), hardware)[0] == (True, near)


def test_what_is_cut_out_for_all_columns_of_what_does_not_fit_takes_the_room() -> None:
    small = dataclasses.replace(ROOM, on_chip_bytes=X_BYTES - 1)
    for columns, cut, hardware, room_is_taken in (
        (2, "apart", small, True),
        (2, "early", small, True),
        (1, "apart", small, False),
        (2, "dot", small, False),
        (2, "apart", ROOM, False),
        (2, "apart", dataclasses.replace(small, receives_on_chip=False), False),
    ):
        work = gather(columns=columns, cut=cut)
        held_bytes = placed(work, hardware)[1]
        assert (held_bytes == hardware.on_chip_bytes) == room_is_taken
        assert sums_stay(work, 1e5, held_bytes, hardware) != room_is_taken


def test_each_of_several_dots_waits_for_its_own_operand() -> None:
    """w of 1e6 bytes each, and x of 8e6 of which a dot cuts its blocks where it lies."""
    whole = Matmul(m=4000, k=1000, n=500)
    work = gathers(whole, dataclasses.replace(whole, m=1000), 2)
    assert on_chip(work, 4, ROOM).awaited_bytes == (1e6, 1e6)
    for cuts in (True, False):
        roomy = dataclasses.replace(ROOM, on_chip_bytes=20e6, cuts_on_chip=cuts)
        assert on_chip(gather(), 4, roomy).awaited_bytes == (X_BYTES,)
    assert on_chip(scatter(), 4, dataclasses.replace(ROOM, on_chip_bytes=20e6)).awaited_bytes == (
        X_BYTES + W_BYTES,
    )


def test_what_several_dots_read_arrives_there_if_it_fits_beside_what_is_held() -> None:
    """x[4000, 1000] gathered on rows, times two of w[1000, 500]: shards of 2e6 bytes, 1e6 of each w."""
    whole = Matmul(m=4000, k=1000, n=500)
    piece = dataclasses.replace(whole, m=1000)

    def near(dots: int, **changes: Any) -> tuple[tuple[bool, bool], ...]:
        work = gathers(whole, piece, dots)
        return on_chip(work, 4, dataclasses.replace(ROOM, **changes)).near

    # For one dot three shards must have room beside w, and beside the 4e6 bytes of a result that grows there.
    assert near(1, on_chip_bytes=11e6) == near(1, on_chip_bytes=7e6, results_on_chip=0.0) == ((True, True),)
    assert near(1, on_chip_bytes=11e6 - 1) == ((False, True),)
    assert near(1, receives_on_chip=False) == ((False, True),)
    assert near(2) == ((True, True), (True, True))
    assert near(2, receives_on_chip=False) == ((False, True), (True, True))
    # Beside the 2e6 bytes of both w, a third of the room is enough.
    assert near(2, on_chip_bytes=8e6) == ((True, True), (True, True))
    assert near(2, on_chip_bytes=8e6 - 1) == ((False, True), (False, True))
    # With no room for any w, of 40e6 bytes, a thirteenth.
    whole, piece = (dataclasses.replace(each, n=20_000) for each in (whole, piece))
    assert near(2, on_chip_bytes=26e6) == ((True, False), (True, False))
    assert near(2, on_chip_bytes=26e6 - 1) == ((False, False), (False, False))


@pytest.mark.parametrize(
    ("m", "k", "dtype", "arrives"),
    [
        (256, 1024, "bfloat16", True),
        (8, 1024, "bfloat16", True),
        (12, 1024, "bfloat16", False),
        (256, 1000, "bfloat16", False),
        (32, 1024, "int8", True),
        (16, 1024, "int8", False),
    ],
)
def test_what_arrives_in_main_memory_is_fetched_if_it_fills_tiles_but_for_a_step_s_first_dot(
    m: int, k: int, dtype: str, arrives: bool
) -> None:
    """x[4·m·pieces, k] gathered on rows, times w[k, 512], on a chip on which nothing arrives."""
    hardware = dataclasses.replace(ROOM, on_chip_bytes=100e6, receives_on_chip=False, fetches_sums=True)
    for pieces in (1, 2, 4):
        whole = Matmul(m=4 * m * pieces, k=k, n=512, dtype=dtype)
        piece = dataclasses.replace(whole, m=m)
        work = gathers(whole, piece, directions=min(pieces, 2), rings=max(1, pieces // 2))
        found = on_chip(work, 4, hardware)
        assert found.arriving == ("lhs" if arrives else None)
        assert found.near == ((arrives, True),)
        assert on_chip(work, 4, ROOM).arriving is None
        waits = on_chip(work, 4, dataclasses.replace(hardware, fetches_sums=False))
        assert (waits.arriving, waits.near) == (None, ((False, True),))
        near_s, far_s = (
            matmul_s(piece, hardware, lhs_on_chip=lhs, rhs_on_chip=True) for lhs in (True, False)
        )
        first = far_s + (pieces - 1) * (near_s if arrives else far_s)
        slow = dataclasses.replace(hardware, link_bytes_per_s=1e15, results_on_chip=0.0)
        priced = estimate(dataclasses.replace(work, shard_bytes=0), Axis(slow, 4))
        waited_s = whole.rhs_bytes / hardware.hbm_bytes_per_s
        assert priced.partials_s == pytest.approx(4 * first + waited_s, rel=0.03)


def test_strips_of_what_is_contracted_are_cut_where_tiles_begin() -> None:
    """w[4096, 1920] gathered along K: four strips of 480 columns are cut where tiles begin, eight are not."""
    hardware = dataclasses.replace(ROOM, on_chip_bytes=100e6, receives_on_chip=False, fetches_sums=True)
    whole = Matmul(m=256, k=4096, n=1920)
    for n, arriving in ((480, "rhs"), (240, None)):
        work = dataclasses.replace(
            gather(directions=2, rings=2),
            shard_bytes=whole.rhs_bytes / 4,
            matmuls=(whole,),
            piece=(dataclasses.replace(whole, k=1024, n=n),),
        )
        assert on_chip(work, 4, hardware).arriving == arriving


def test_where_dots_read_no_blocks_of_what_is_on_chip_only_what_is_shared_is_held() -> None:
    # w[1000, 6000] is the larger operand, and all blocks of x have it in common.
    wide = dataclasses.replace(scatter(), matmuls=(Matmul(m=4000, k=1000, n=6000),))
    wide = dataclasses.replace(wide, piece=(dataclasses.replace(wide.matmuls[0], m=500),))
    assert placed(wide, ROOM, on_chip_bytes=100e6)[0] == (True, True)
    assert placed(wide, ROOM, on_chip_bytes=100e6, cuts_on_chip=False)[0] == (False, True)


@pytest.mark.parametrize("across", [False, True])
def test_blocks_of_what_is_fetched_before_all_else_are_read_there_by_every_compiler_s_dots(
    across: bool,
) -> None:
    work = scatter(across=across)
    assert placed(work, ROOM, cuts_on_chip=False) == ((True, False), X_BYTES)
    # Each direction's half of the other operand is not held with it.
    both_fit = placed(work, ROOM, on_chip_bytes=20e6, cuts_on_chip=False)
    assert both_fit == (((True, False), X_BYTES) if across else ((True, True), X_BYTES + W_BYTES))


def test_sums_that_travel_stay_on_chip_only_where_they_arrive_there() -> None:
    work = scatter(cut="early")
    little = 0.5e6  # a sixteenth of the room is 625 kB
    assert sums_stay(work, little, 0, ROOM)
    assert not sums_stay(work, 0.7e6, 0, ROOM)
    # Two of each direction's find room where blocks have not been cut before.
    assert sums_stay(scatter(), 1e6, 6e6, ROOM)
    assert not sums_stay(scatter(), 1e6, 6e6 + 1, ROOM)
    assert not sums_stay(scatter(chains=2), 1e6, 6e6, ROOM)
    slow = dataclasses.replace(ROOM, places_slowly=True)
    assert sums_stay(scatter(), 1e6, 6e6, slow)
    assert not sums_stay(work, little, 0, slow)
    assert not sums_stay(work, little, 0, dataclasses.replace(ROOM, receives_on_chip=False))
    assert not sums_stay(work, little, 0, dataclasses.replace(ROOM, results_on_chip=0.0))


def test_sums_of_a_gather_stay_if_all_of_them_fit_and_one_more() -> None:
    """Beside the sum that a dot reads it makes the next; 1.05 of 10e6 bytes may be taken."""
    far = dataclasses.replace(ROOM, receives_on_chip=False, results_on_chip=0.0)
    assert sums_stay(gather(), 5.2e6, 0, far)
    assert not sums_stay(gather(), 5.3e6, 0, far)
    assert not sums_stay(gather(accumulators=2), 3.6e6, 0, far)
    assert not sums_stay(gather(), 1e6, 0, dataclasses.replace(far, keeps_sums=False))
    # Of four dots' sums one is made at a time.
    whole = Matmul(m=1000, k=4000, n=500)
    four = gathers(whole, dataclasses.replace(whole, k=1000), 4)
    assert sums_stay(four, 8.3e6, 0, far)
    assert not sums_stay(four, 8.5e6, 0, far)


def test_sums_of_a_gather_stay_beside_what_is_held_if_there_is_room() -> None:
    assert sums_stay(gather(), 1e6, 8.4e6, ROOM)
    assert not sums_stay(gather(), 1e6, 8.6e6, ROOM)
    assert not sums_stay(gather(accumulators=2), 1e6, 8.4e6, ROOM)


def test_of_several_dots_every_other_operand_is_fetched_that_fits() -> None:
    """Shards of 2e6 bytes, cut along K, and 4e6 of what each dot multiplies them with."""
    whole = Matmul(m=1000, k=4000, n=500)
    for dots, room, held in ((2, 8e6, 8e6), (2, 8e6 - 1, 4e6), (3, 8e6, 8e6)):
        work = gathers(whole, dataclasses.replace(whole, k=1000), dots)
        assert on_chip(work, 4, dataclasses.replace(ROOM, on_chip_bytes=room)).held_bytes == held


@pytest.mark.parametrize(
    ("topology", "dots", "sizes", "form", "compiled_us"),
    [
        ((4, 4), 2, (1024, 16384, 1792), Form(), 1204),
        ((4, 4), 2, (1024, 16384, 1792), Form(directions=2), 2064),
        ((4, 4), 1, (1024, 16384, 3584), Form(), 1070),
        ((4, 4), 1, (1024, 16384, 3584), Form(directions=2, across=True), 1174),
        ((2, 4), 1, (512, 28672, 2048), Form(directions=2, across=True), 561),
        ((4, 4), 2, (1024, 16384, 1792), Form(columns=2), 1341),
        ((4, 4), 2, (1024, 16384, 1792), Form(directions=2, across=True), 1362),
        ((4, 4), 3, (1760, 4096, 256), Form(directions=2, across=True), 179),
        ((2, 4), 3, (352, 31744, 256), Form(directions=2, across=True), 278),
    ],
)
def test_sums_that_weights_leave_no_room_for_are_read_from_main_memory(
    topology: tuple[int, ...], dots: int, sizes: tuple[int, int, int], form: Form, compiled_us: float
) -> None:
    """Activations gathered along the features that dots contract, as the TPU compiler's schedules have it.

    The weights fill the memory of a v5e. Of the first the model once said 816 µs, of the second 765.
    """
    hardware, (m, k, n) = by_name("tpu_v5e"), sizes
    axis = Axis.of(Topology.torus(topology, hardware), (tuple(range(math.prod(topology))),))
    chain = PlainChain(
        pattern="all_gather_dot",
        dots=(PlainDot(Matmul(m=m, k=k, n=n), "k"),) * dots,
        elements=m * k,
        free="m",
    )
    parts_s = price(chain, form, axis).overlapped_s / (IN_COLUMNS if form.columns > 1 else 1)
    assert parts_s * 1e6 == pytest.approx(compiled_us, rel=0.045)


@pytest.mark.parametrize(
    ("changes", "pieces", "result_bytes", "grows", "leaving"),
    [
        ({}, 2, 4e5, True, False),  # The sums of both pieces stay, and little results with them.
        ({}, 2, 8e5, False, True),
        ({}, 1, 4e5, False, True),
        ({"keeps_sums": False}, 2, 4e5, False, True),
        ({"network": "switch"}, 1, 4e5, False, False),
    ],
)
def test_results_of_sums_leave_with_the_last_dots_unless_they_are_little(
    changes: dict[str, Any], pieces: int, result_bytes: float, grows: bool, leaving: bool
) -> None:
    """x[200, 4000] gathered along what w[4000, n] contracts."""
    hardware = dataclasses.replace(ROOM, **changes)
    whole = Matmul(m=200, k=4000, n=int(result_bytes / 400))
    piece = dataclasses.replace(whole, k=1000, m=200 // pieces)
    work = gathers(whole, piece, directions=pieces, accumulators=pieces)
    found = on_chip(dataclasses.replace(work, shard_bytes=4e5), 4, hardware)
    assert (found.results, found.leaving) == ((grows,), leaving)


@pytest.mark.parametrize("joined", [False, True])
def test_results_of_rows_grow_there_beside_what_is_held(joined: bool) -> None:
    """x[4000, 1000] gathered on rows, times w[1000, 500]: results of 4e6 bytes beside the 1e6 of w."""
    whole = Matmul(m=4000, k=1000, n=500)
    work = gathers(whole, dataclasses.replace(whole, m=1000), joined=joined)
    roomy = dataclasses.replace(ROOM, on_chip_bytes=5e6 / 0.9 + 1)
    assert on_chip(work, 4, roomy).results == (not joined,)
    assert on_chip(work, 4, dataclasses.replace(roomy, on_chip_bytes=5e6 / 0.9 - 1)).results == (False,)
    assert on_chip(work, 4, dataclasses.replace(roomy, results_on_chip=0.0)).results == (False,)


def test_of_several_results_the_last_grow_there_that_fit() -> None:
    """As of v6e's ``2 * x[1792, 128] @ w[128, 13824]``: 50 MB each, of which 87 may be there."""
    whole = Matmul(m=4000, k=1000, n=500)
    work = gathers(whole, dataclasses.replace(whole, m=1000), dots=3)
    for room_bytes, grow in (
        (15e6, (True, True, True)),
        (14e6, (False, True, True)),
        (7e6, (False, False, True)),
    ):
        roomy = dataclasses.replace(ROOM, on_chip_bytes=room_bytes, results_on_chip=1.0)
        assert on_chip(work, 4, roomy).results == grow
    fast = dataclasses.replace(ROOM, on_chip_bytes=7e6, results_on_chip=1.0)
    slow = dataclasses.replace(fast, results_on_chip=0.0)
    assert estimate(work, Axis(fast, 4)).partials_s < estimate(work, Axis(slow, 4)).partials_s


def test_results_of_a_batch_grow_there_as_rows_do() -> None:
    """x[4, 1000, 1000] gathered on its batch dim, times w[4, 1000, 500]: results of 4e6 bytes."""
    whole = Matmul(batch=4, m=1000, k=1000, n=500)
    work = gathers(whole, dataclasses.replace(whole, batch=1))
    roomy = dataclasses.replace(ROOM, on_chip_bytes=1e7)
    share = (4e6 + on_chip(work, 4, roomy).held_bytes) / 1e7
    assert on_chip(work, 4, roomy).results == (True,)
    assert on_chip(work, 4, dataclasses.replace(roomy, results_on_chip=share)).results == (True,)
    assert on_chip(work, 4, dataclasses.replace(roomy, results_on_chip=share - 0.01)).results == (False,)


@pytest.mark.parametrize(
    ("form", "grow"),
    [
        ({"accumulators": 2}, True),
        ({"accumulators": 1}, False),
        ({"joined": True}, False),
        ({"columns": 2}, False),
        ({"joined": True, "columns": 2}, True),
    ],
)
def test_results_of_sums_grow_there_if_each_piece_or_joined_column_has_its_own_and_they_stay(
    form: dict[str, Any], grow: bool
) -> None:
    """Results of 1e6 bytes, sums of 2e6 each."""
    work = gather(directions=2, **form)
    roomy = dataclasses.replace(ROOM, results_on_chip=1.0, on_chip_bytes=1e8)
    # Whole tiles of one column are written to main memory by the last dots.
    assert on_chip(work, 4, roomy).results == (grow and work.columns > 1,)
    none = dataclasses.replace(roomy, keeps_sums=False)
    assert on_chip(work, 4, none).results == (False,)


def test_results_of_sums_grow_there_where_each_column_makes_some_of_their_rows() -> None:
    """x[1000, 4000] gathered along what w[4000, 500] contracts, in columns of 500 of its rows."""
    whole = Matmul(m=1000, k=4000, n=500)
    roomy = dataclasses.replace(ROOM, results_on_chip=1.0, on_chip_bytes=1e8)
    for m, columns, grow in ((500, 2, True), (1000, 2, False), (1000, 1, False)):
        piece = dataclasses.replace(whole, k=1000, m=m)
        assert on_chip(gathers(whole, piece, columns=columns), 4, roomy).results == (grow,)


def test_what_long_dots_read_does_not_arrive_on_chip() -> None:
    """x[4096, 4096] gathered on rows: 1024 of them, times w[4096, n], are 8.4e6 * n operations."""
    roomy = dataclasses.replace(ROOM, on_chip_bytes=1e9, results_on_chip=0.0)
    for n, near in ((28_000, True), (29_000, False)):
        whole = Matmul(m=4096, k=4096, n=n)
        work = gathers(whole, dataclasses.replace(whole, m=1024))
        assert on_chip(work, 4, roomy).near == ((near, True),)


def test_blocks_cut_early_for_all_pieces_are_read_where_they_are_unless_all_fit() -> None:
    """x[4000, 1000] of 8e6 bytes, of which both directions read blocks of 2e6."""
    for room, slow, near in ((8e6, False, True), (8e6 - 1, False, False), (8e6 - 1, True, True)):
        hardware = dataclasses.replace(ROOM, on_chip_bytes=room, places_slowly=slow)
        assert on_chip(scatter(cut="early", across=True), 4, hardware).near[0][0] == near


def test_what_a_batch_s_dots_read_by_blocks_is_held_before_all_else() -> None:
    """x[4, 1000, 1000] times w[4, 1000, 500], w gathered on its batch dim: x is the larger, of 8e6 bytes."""
    whole = Matmul(batch=4, m=1000, k=1000, n=500)
    work = gathers(whole, dataclasses.replace(whole, batch=1))
    work = dataclasses.replace(work, shard_bytes=1e6, collective_shard_bytes=1e6)
    assert on_chip(work, 4, dataclasses.replace(ROOM, on_chip_bytes=8e6)).held_bytes == 8e6
    assert on_chip(work, 4, dataclasses.replace(ROOM, on_chip_bytes=8e6 - 1)).held_bytes == 0
    assert on_chip(work, 4, dataclasses.replace(ROOM, on_chip_bytes=8e6, cuts_on_chip=False)).held_bytes == 0


def test_sums_that_do_not_stay_may_be_fetched_beside_the_dots_of_others() -> None:
    far = dataclasses.replace(ROOM, on_chip_bytes=9e6, keeps_sums=False, fetches_sums=True)
    two = gather(directions=2, accumulators=2)
    assert sum_near(two, 3e6, 0, far) == (True, False)
    assert sum_near(two, 3e6 + 1, 0, far) == (False, False)
    assert sum_near(gather(directions=2), 1e3, 0, far) == (False, False)
    assert sum_near(gather(), 1e3, 0, far) == (False, False)
    assert sum_near(two, 3e6, 0, dataclasses.replace(far, fetches_sums=False)) == (False, False)
    assert sum_near(two, 0.5e6, 0, ROOM) == (True, True)


def test_after_another_ring_no_operand_is_fetched_before_all_else() -> None:
    first, later = (placed(scatter(before=Before(size)), ROOM) for size in (None, 0.0))
    assert first == ((True, False), X_BYTES)
    assert later == ((False, True), W_BYTES)


def held_after(before_bytes: float | None, *, rows: int = 500, stays: bool = False) -> tuple[float, float]:
    """What is held of w beside a scatter's dots, and awaited, after a ring that holds so much on chip."""
    piece = Matmul(m=rows, k=1000, n=2000)
    work = scatter(before=Before(before_bytes, stays))
    # x, from which the blocks are cut, is not to come first.
    work = dataclasses.replace(work, piece=(piece,), cut="apart")
    found = on_chip(work, 4, dataclasses.replace(ROOM, on_chip_bytes=6e6))
    return found.held_bytes, sum(found.awaited_bytes)


def test_what_fits_beside_what_the_ring_before_holds_is_not_awaited() -> None:
    assert held_after(None) == (W_BYTES, W_BYTES)
    assert held_after(0.0) == (W_BYTES, 0.0)
    assert held_after(6e6 - W_BYTES) == (W_BYTES, 0.0)


def test_what_does_not_is_fetched_beside_the_dots_of_a_step_if_they_take_as_long() -> None:
    step_s = 2 * matmul_s(Matmul(m=500, k=1000, n=2000), ROOM, lhs_on_chip=True, rhs_on_chip=True)
    assert step_s > W_BYTES / ROOM.hbm_bytes_per_s
    assert held_after(6e6) == (W_BYTES, W_BYTES)
    assert held_after(6e6, rows=10) == (0.0, 0.0)
    assert held_after(6e6 - W_BYTES, rows=10) == (W_BYTES, 0.0)


def test_nothing_takes_the_place_of_what_stays_for_a_backward_pass() -> None:
    assert held_after(6e6, stays=True) == (0.0, 0.0)
    assert held_after(6e6 - W_BYTES, stays=True) == (W_BYTES, 0.0)
