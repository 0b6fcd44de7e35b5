"""The time of rings: where they pay, where they do not, and what the model charges for each form."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model import (
    Axis,
    Directions,
    Estimate,
    Hardware,
    Matmul,
    RingWork,
    Topology,
    by_name,
    estimate,
    matmul_s,
    names,
)
from cost_model.form import Form
from cost_model.plain_chain import PlainChain, PlainDot, chain_of, price
from cost_model.ring import FORESEEN, SHARDS_HELD, TURNING, TURNING_S
from cost_model.ring_copies import (
    COPYING_WHOLE,
    CUTTING,
    CUTTING_BETWEEN_TILES,
    CUTTING_COLUMNS,
    CUTTING_RIGHT,
    CUTTING_ROWS,
    CUTTING_SHARED_COLUMNS,
    HALVING_NARROW,
    JOINING,
    JOINING_BLOCKS,
    JOINING_MORE,
    LAYING_OUT,
    SLICING_NARROW,
    between_tiles_bytes,
    copies_at_once_s,
    copies_s,
    cutting_s,
    entering_s,
    gathered_between_tiles_s,
    halving_s,
    rounding_s,
)
from cost_model.ring_on_chip import on_chip
from cost_model.ring_work import Cut

_V5P, _V5E, _H100, _CPU = by_name("tpu_v5p"), by_name("tpu_v5e"), by_name("h100"), by_name("cpu")

_PLAIN = Hardware(
    name="plain",
    peak_flops=(("bfloat16", 1e12),),
    hbm_bytes_per_s=1e9,
    link_bytes_per_s=1e9,
    hop_latency_s=1e-6,
    network="torus",
    wraparound_multiple=1,
    matmul_efficiency=1.0,
    matmul_overhead_s=1e-6,
    matmul_tile=(1, 1, 1),
    on_chip_bytes=1.0,
    keeps_sums=True,
    fuses_additions=False,
    slicing=0.0,
)
"""Hardware on which every time below can be worked out by hand."""

_M = Matmul(m=1000, k=1000, n=1000)
"""2e9 FLOPs, 6e6 bytes: on the hardware above 6 ms of memory against 2 ms of compute."""

_M_S = 6e-3 + 1e-6

_SUM_S = 8e-3 + 1e-6
"""The same with a bfloat16 sum of the result's 2e6 bytes that is read too."""


def _scatter_of_columns(axis: Axis, n: int, **form: Any) -> RingWork:
    """x[1024, 2048] times w[2048, P * n * pieces], scattered by columns: a piece has n of them."""
    pieces = form.get("directions", 1) * form.get("chains", 1)
    whole = Matmul(m=1024, k=2048, n=axis.size * n * pieces)
    return RingWork(
        collective="reduce_scatter",
        shard_bytes=whole.result_bytes / axis.size,
        collective_shard_bytes=whole.result_bytes / axis.size,
        matmuls=(whole,),
        piece=(Matmul(m=1024, k=2048, n=n),),
        accumulator="bfloat16",
        **{"fused": False, **form},
    )


def _gather(
    rows: int, k: int, n: int, axis_size: int, directions: Directions = 1, chains: int = 1, **form: Any
) -> RingWork:
    """x[rows/P, k] gathered on its rows, then times w[k, n], bfloat16."""
    shard_bytes = rows // axis_size * k * 2
    return RingWork(
        collective="all_gather",
        shard_bytes=shard_bytes,
        collective_shard_bytes=shard_bytes,
        matmuls=(Matmul(m=rows, k=k, n=n),),
        piece=(Matmul(m=math.ceil(rows / axis_size / (directions * chains)), k=k, n=n),),
        directions=directions,
        chains=chains,
        **form,
    )


def _scatter(
    rows: int, k: int, n: int, axis_size: int, directions: Directions = 1, chains: int = 1, **form: Any
) -> RingWork:
    """x[rows, k] times w[k, n], then reduced and scattered on rows, bfloat16."""
    shard_bytes = rows // axis_size * n * 2
    return dataclasses.replace(
        _gather(rows, k, n, axis_size, directions, chains),
        collective="reduce_scatter",
        shard_bytes=shard_bytes,
        collective_shard_bytes=shard_bytes,
        **form,
    )


def _best(
    make: Any, rows: int, k: int, n: int, axis_size: int, hardware: Hardware
) -> tuple[RingWork, Estimate]:
    """The better of one direction and two, the first of equals."""
    axis = Axis(hardware, axis_size)
    works = [make(rows, k, n, axis_size, directions) for directions in (1, 2)]
    return max(((work, estimate(work, axis)) for work in works), key=lambda priced: priced[1].benefit_s)


def _benefit_s(make: Any, rows: int, k: int, n: int, axis_size: int, hardware: Hardware) -> float:
    return _best(make, rows, k, n, axis_size, hardware)[1].benefit_s


# Modelled with the TPU compiler's schedules: x[8192,8192]·w[8192,32768], gathered on rows over 16 chips.
@pytest.mark.parametrize(
    ("name", "unrewritten_s", "ring_s"),
    [("tpu_v5e", 2851e-6, 1534e-6), ("tpu_v5p", 1329e-6, 771e-6), ("tpu_v6e", 1054e-6, 749e-6)],
)
def test_the_estimate_agrees_with_compiled_schedules(name: str, unrewritten_s: float, ring_s: float) -> None:
    work, priced = _best(_gather, 8192, 8192, 2048, 16, by_name(name))
    assert work.directions == 2
    assert priced.original_s == pytest.approx(unrewritten_s, rel=0.05)
    assert priced.overlapped_s == pytest.approx(ring_s, rel=0.1)


# Its mirror, scattered on rows: two sums per direction, so that each hop has a matmul beside it.
@pytest.mark.parametrize(("name", "ring_s"), [("tpu_v5e", 1707e-6), ("tpu_v5p", 902e-6)])
def test_the_estimate_of_a_scatter_agrees_with_compiled_schedules(name: str, ring_s: float) -> None:
    priced = estimate(_scatter(8192, 2048, 8192, 16, 2, 2), Axis(by_name(name), 16))
    assert priced.overlapped_s == pytest.approx(ring_s, rel=0.1)


@pytest.mark.parametrize(
    ("make", "rows", "k", "n"), [(_gather, 8192, 8192, 2048), (_scatter, 8192, 2048, 8192)]
)
def test_a_large_matmul_pays_on_v5p(make: Any, rows: int, k: int, n: int) -> None:
    # A scatter hides its hops behind the dots of another sum only.
    priced = estimate(make(rows, k, n, 16, 2, 2), Axis(_V5P, 16))
    assert priced.benefit_s > 0.15 * priced.original_s


@pytest.mark.parametrize("make", [_gather, _scatter])
def test_a_tiny_matmul_does_not_pay(make: Any) -> None:
    for hardware in (_V5P, _V5E, _H100):
        assert _benefit_s(make, 128, 256, 256, 16, hardware) < 0


def test_an_estimate_adds_up() -> None:
    work = _gather(8192, 8192, 2048, 16)
    priced = estimate(work, Axis(_V5P, 16))
    assert priced.original_s == priced.dot_s + priced.collective_s
    assert priced.benefit_s == priced.original_s - priced.overlapped_s
    assert priced.dot_s == matmul_s(work.matmuls[0], _V5P, rhs_on_chip=True)
    assert priced.hops_s == pytest.approx(15 * work.shard_bytes / 9e10)
    assert priced.hop_latency_s == pytest.approx(15e-6)


def test_one_step_of_a_communication_bound_ring_is_exposed() -> None:
    work = _gather(8192, 8192, 256, 16)
    priced = estimate(work, Axis(_V5P, 16))
    # The weights of 4 MiB are on chip, and the shard of 8 MiB is too large to be there too.
    first_s = matmul_s(work.piece[0], _V5P, rhs_on_chip=True)
    assert priced.overlapped_s == pytest.approx(priced.hops_s + first_s)


def test_a_compute_bound_ring_takes_as_long_as_its_partial_dots() -> None:
    priced = estimate(_gather(8192, 8192, 16384, 16, 2), Axis(_V5P, 16))
    assert priced.overlapped_s == pytest.approx(priced.partials_s)


# Forms of rings, by hand. A ring of 4: three hops, four steps. `_M` is the piece, whatever its share.


def _work(**changes: Any) -> RingWork:
    form: dict[str, Any] = {
        "collective": "all_gather",
        "shard_bytes": 12e6,
        "collective_shard_bytes": 12e6,
        "matmuls": (dataclasses.replace(_M, m=4000),),
        "piece": (_M,),
    }
    return RingWork(**{**form, **changes})


def _by_hand(**changes: Any) -> Estimate:
    return estimate(_work(**changes), Axis(_PLAIN, 4))


def test_the_piece_takes_what_the_tests_below_say() -> None:
    assert matmul_s(_M, _PLAIN) == pytest.approx(_M_S)


@pytest.mark.parametrize(
    ("form", "dots", "wire_s"),
    [
        ({}, 1, 12e-3),
        ({"directions": 2}, 2, 6e-3),  # Half a shard each way at once.
        ({"chains": 2}, 2, 12e-3),  # One half, then the other, on the same link.
        ({"directions": 2, "chains": 2}, 4, 6e-3),
        ({"directions": 2, "joined": True}, 1, 6e-3),
        ({"directions": 2, "chains": 2, "joined": True}, 1, 6e-3),
    ],
    ids=str,
)
def test_a_step_of_a_gather_ring(form: Any, dots: int, wire_s: float) -> None:
    priced = _by_hand(**form)
    # Joining reads and writes the shard's 12e6 bytes, and the 2e6 of the result.
    step_s = dots * _M_S + (JOINING * 28e-3 if form.get("joined") else 0)
    assert priced.hops_s == pytest.approx(3 * wire_s)
    assert priced.partials_s == pytest.approx(4 * step_s)
    assert priced.overlapped_s == pytest.approx(step_s + 3 * max(step_s, wire_s))


@pytest.mark.parametrize(
    ("form", "dots", "hop_s"),
    [
        ({}, 1, 12e-3),
        ({"directions": 2}, 2, 6e-3),
        ({"chains": 2}, 2, 6e-3),
        ({"directions": 2, "chains": 2}, 4, 3e-3),
    ],
    ids=str,
)
@pytest.mark.parametrize("apart_bytes", [0, 2e6])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_of_a_scatter_ring(
    form: Any, dots: int, hop_s: float, fused: bool, apart_bytes: float
) -> None:
    priced = _by_hand(
        collective="reduce_scatter", fused=fused, apart_bytes=apart_bytes, accumulator="bfloat16", **form
    )
    chains = form.get("chains", 1)
    add_s = apart_bytes / 1e9
    dot_s = _SUM_S if fused else _M_S
    # A dot that adds to a sum waits for it; one whose result is added later does not.
    step_s = max(dots * dot_s, dot_s + hop_s if fused else 0, chains * hop_s) + add_s
    assert priced.hops_s == pytest.approx(3 * chains * hop_s)
    assert priced.partials_s == pytest.approx(dots * _M_S + 3 * (dots * dot_s + add_s))
    assert priced.overlapped_s == pytest.approx(dots * _M_S + 3 * step_s)


@pytest.mark.parametrize("hop_parts", [0.5, 1.2, 1.7, 5.0])
def test_half_of_what_comes_last_is_multiplied_beside_a_hop(hop_parts: float) -> None:
    """Step by step: a dot begins when the one before it is done and its shard, or half of one, is there."""
    hop_s = hop_parts * _M_S
    priced = _by_hand(shard_bytes=hop_s * 1e9, halved=True)
    at_s = begin_s = max(_M_S, hop_s) + max(_M_S, hop_s)
    at_s += _M_S
    for arrives_s in (begin_s + hop_s / 2, begin_s + hop_s):
        at_s = max(at_s, arrives_s) + _M_S / 2
    assert priced.overlapped_s == pytest.approx(at_s)
    whole = _by_hand(shard_bytes=hop_s * 1e9)
    assert priced.overlapped_s <= whole.overlapped_s
    assert dataclasses.replace(priced, overlapped_s=0) == dataclasses.replace(whole, overlapped_s=0)


def test_where_nothing_overlaps_halves_gain_nothing() -> None:
    plain = dataclasses.replace(_PLAIN, overlaps=False)
    assert estimate(_work(halved=True), Axis(plain, 4)) == estimate(_work(), Axis(plain, 4))


_HALF = dataclasses.replace(_M, m=500)
_HALF_S = 4e-3 + 1e-6
"""Half the rows of the piece: 4e6 bytes."""


@pytest.mark.parametrize(("shard_bytes", "hop_s"), [(4e6, 4e-3), (12e6, 12e-3), (40e6, 40e-3)])
def test_whole_shards_go_half_way_round_both_ways(shard_bytes: float, hop_s: float) -> None:
    """Of 4 devices: the own shard, its two neighbours', and the fourth's in halves."""
    priced = _by_hand(directions=2, shard_bytes=shard_bytes, halves=(_HALF,))
    dots_s = [_M_S, 2 * _M_S, 2 * _HALF_S]
    assert priced.partials_s == pytest.approx(sum(dots_s))
    assert priced.hops_s == pytest.approx(hop_s + hop_s / 2)
    assert priced.hops_s == pytest.approx(_by_hand(directions=2, shard_bytes=shard_bytes).hops_s)
    assert priced.hop_latency_s == pytest.approx(2e-6)
    wanted_s = max(dots_s[0], hop_s) + max(dots_s[1], hop_s / 2) + dots_s[2]
    assert priced.overlapped_s == pytest.approx(wanted_s)


@pytest.mark.parametrize(
    ("form", "wire_s", "beside"),
    [
        ({}, 12e-3, 1),  # The only dot is beside the hop, whatever the compiler takes it for.
        ({"directions": 2}, 4e-3, 1),
        ({"directions": 2}, 20e-3, 1),
        ({"directions": 2}, 40e-3, 2),
        ({"directions": 2, "chains": 2}, 20e-3, 1),
        ({"directions": 2, "chains": 2}, 40e-3, 2),
        ({"directions": 2, "chains": 2}, 400e-3, 4),
    ],
    ids=str,
)
def test_a_compiler_that_places_the_starts_puts_few_dots_beside_a_hop(
    form: Any, wire_s: float, beside: int
) -> None:
    """It takes a hop of 40 ms for one of 10, which is two dots of 6."""
    form = {**form, "shard_bytes": 1e9 * wire_s * form.get("directions", 1)}
    dots_s = form.get("directions", 1) * form.get("chains", 1) * _M_S
    assert FORESEEN == 1 / 4
    priced = _by_hand(**form, starts_implied=True)
    assert priced.hops_s == pytest.approx(3 * wire_s)
    assert priced.overlapped_s == pytest.approx(4 * dots_s + 3 * max(0.0, wire_s - beside * _M_S))
    started = _by_hand(**form)
    assert started.overlapped_s == pytest.approx(dots_s + 3 * max(dots_s, wire_s))


def test_of_an_odd_number_nothing_goes_in_halves() -> None:
    priced = estimate(_work(directions=2, halves=(_HALF,)), Axis(_PLAIN, 5))
    assert priced.partials_s == pytest.approx(5 * _M_S)
    assert priced.hops_s == pytest.approx(2 * 12e-3)
    assert priced.overlapped_s == pytest.approx(12e-3 + 2 * _M_S + 2 * _M_S)


def test_halves_are_cut_out_before_their_hop() -> None:
    cutting = dataclasses.replace(_PLAIN, slicing=1.5)
    work = _work(directions=2, halves=(_HALF,))
    extra_s = estimate(work, Axis(cutting, 4)).overlapped_s - estimate(work, Axis(_PLAIN, 4)).overlapped_s
    assert extra_s == pytest.approx(1.5 * 2 * 12e-3)
    odd_s = [estimate(work, Axis(hardware, 5)).overlapped_s for hardware in (cutting, _PLAIN)]
    assert odd_s[0] == odd_s[1]


@pytest.mark.parametrize(
    "form",
    [{}, {"directions": 2, "joined": True}, {"directions": 2, "collective": "reduce_scatter"}],
    ids=str,
)
def test_only_whole_shards_of_a_gather_go_half_way_round(form: Any) -> None:
    with pytest.raises(ValueError, match="half way round"):
        _work(halves=(_HALF,), **form)


def test_a_hop_that_a_dot_waits_for_is_hidden_by_another_sum_s_dot() -> None:
    scatter: dict[str, Any] = {"collective": "reduce_scatter", "shard_bytes": 4e6, "accumulator": "bfloat16"}
    one = _by_hand(**scatter)
    two = _by_hand(**scatter, chains=2)
    apart = _by_hand(**scatter, fused=False)
    assert one.overlapped_s == pytest.approx(_M_S + 3 * (_SUM_S + 4e-3))
    assert two.overlapped_s == pytest.approx(2 * _M_S + 3 * 2 * _SUM_S)
    assert apart.overlapped_s == pytest.approx(4 * _M_S)


def test_a_gather_ring_adds_its_partial_sums_beside_the_hop() -> None:
    hidden = _by_hand(apart_bytes=2e6)
    assert hidden.overlapped_s == pytest.approx(_M_S + 3 * 12e-3)
    assert hidden.partials_s == pytest.approx(4 * _M_S + 3 * 2e-3)
    shown = _by_hand(shard_bytes=0, apart_bytes=2e6)
    assert shown.overlapped_s == pytest.approx(_M_S + 3 * (_M_S + 2e-3))


def test_columns_run_one_after_the_other_each_with_its_part_of_the_shard() -> None:
    priced = _by_hand(columns=3)
    assert priced.hops_s == pytest.approx(3 * 3 * 4e-3)
    assert priced.hop_latency_s == pytest.approx(3 * 3 * 1e-6)
    assert priced.partials_s == pytest.approx(3 * 4 * _M_S)
    assert priced.overlapped_s == pytest.approx(3 * (_M_S + 3 * _M_S))


def test_a_chain_pays_the_latency_of_its_own_hop() -> None:
    assert _by_hand(shard_bytes=0).hops_s == pytest.approx(3e-6)
    assert _by_hand(shard_bytes=0, chains=2).hops_s == pytest.approx(6e-6)
    assert _by_hand(shard_bytes=0, directions=2).hops_s == pytest.approx(3e-6)


def _summing(hardware: Hardware, **form: Any) -> Estimate:
    """A gather along K: the pieces' float32 results, of 4e6 bytes, are added up."""
    whole = dataclasses.replace(_M, k=4000)
    return estimate(_work(matmuls=(whole,), shard_bytes=0, **form), Axis(hardware, 4))


def test_an_accumulator_too_large_for_the_chip_is_read_and_written_by_every_dot() -> None:
    # Operands of 4e6 bytes; the first dot makes the sum, of 4e6 bytes, and the last the result, of 2e6.
    assert _summing(_PLAIN).partials_s == pytest.approx(4 * 1e-6 + 8e-3 + 2 * 12e-3 + 10e-3)
    holding = dataclasses.replace(_PLAIN, on_chip_bytes=8e6, cuts_on_chip=False)
    assert _summing(holding).partials_s == pytest.approx(_M_S + 3 * (4e-3 + 1e-6))
    # Joined, the blocks of 2e6 bytes of the other operand are copied too.
    joined = _summing(_PLAIN, directions=2, joined=True)
    blocks_s = 4 * 2 * JOINING_BLOCKS * 2e-3
    assert joined.partials_s == pytest.approx(_M_S + 3 * (12e-3 + 1e-6) + blocks_s)
    roomy = dataclasses.replace(holding, keeps_sums=False)
    near = _summing(roomy, directions=2, joined=True)
    assert near.partials_s == pytest.approx(_M_S + 3 * (12e-3 + 1e-6))


def test_accumulators_of_pieces_must_fit_on_the_chip_together() -> None:
    holding = dataclasses.replace(_PLAIN, on_chip_bytes=8e6, cuts_on_chip=False)
    one, apart = (_summing(holding, directions=2, accumulators=count) for count in (1, 2))
    assert one.partials_s == pytest.approx(2 * (_M_S + 3 * (4e-3 + 1e-6)))
    assert apart.partials_s == pytest.approx(2 * (_M_S + 3 * (12e-3 + 1e-6)))


@pytest.mark.parametrize(
    ("form", "needed_bytes"),
    [
        ({}, 2 * 4e6 + 4e6),  # Two of three shards, and the float32 sum of a bfloat16 result.
        ({"columns": 4}, (2 * 4e6 + 4e6) / 4),  # Those of one column.
        ({"cut": "apart"}, 2 * 4e6 + 4e6 + 2 * 2e6),  # This step's block of an operand, and the next one's.
        ({"cut": "apart", "columns": 4}, (2 * 4e6 + 4e6) / 4 + 4 * 2e6),  # All blocks.
        ({"accumulator": "bfloat16"}, 2 * 4e6 + 2e6),
        ({"collective": "reduce_scatter"}, 2 * 4e6),
    ],
    ids=str,
)
def test_a_ring_needs_room_for_what_travels_and_for_sums(form: Any, needed_bytes: float) -> None:
    whole = dataclasses.replace(_M, k=4000)
    work = _work(matmuls=(whole,), shard_bytes=4e6, collective_shard_bytes=4e6, **form)
    assert estimate(work, Axis(_PLAIN, 4)).added_bytes == pytest.approx(needed_bytes - 4 * 4e6, abs=1.0)


_ROOMY = dataclasses.replace(_PLAIN, on_chip_bytes=1e8)
"""The same with room on chip; how long a matmul takes there does not depend on where its operands are."""


@pytest.mark.parametrize(
    ("form", "hardware", "needed_bytes"),
    [
        ({}, {}, 0.0),  # Two shards of 4e6 bytes fill 0.6 of 2e7 at most, and a sum of 4e6 stays there.
        ({"columns": 2}, {}, 0.0),
        ({"accumulators": 2}, {}, 0.0),
        ({"joined": True, "chains": 2}, {}, 8e6),
        ({"collective": "reduce_scatter"}, {}, 8e6),
        # The operand whose blocks are read is on chip, and leaves no room for the sum of 4e6.
        ({}, {"on_chip_bytes": 1e7}, 2e6 + 4e6),
        ({"columns": 2}, {"on_chip_bytes": 1e6}, 3.4e6 + 2e6),
        ({}, {"receives_on_chip": False}, 0.0),
        ({}, {"receives_on_chip": False, "on_chip_bytes": 1e7}, 8e6 + 4e6),
        ({}, {"keeps_sums": False}, 4e6),
        ({"columns": 2}, {"keeps_sums": False}, 2e6),
        ({}, {"receives_on_chip": False, "keeps_sums": False}, 8e6 + 4e6),
        ({}, {"network": "switch"}, 8e6),
    ],
    ids=str,
)
def test_sums_and_shards_that_stay_on_chip_take_no_memory(
    form: Any, hardware: Any, needed_bytes: float
) -> None:
    whole = dataclasses.replace(_M, k=4000)
    work = _work(matmuls=(whole,), shard_bytes=4e6, collective_shard_bytes=1e6, **form)
    keeps = dataclasses.replace(_PLAIN, on_chip_bytes=2e7)
    axis = Axis(dataclasses.replace(keeps, **hardware), 4)
    assert estimate(work, axis).added_bytes == pytest.approx(needed_bytes - 4e6)


@pytest.mark.parametrize(("devices", "shards"), [(2, 1), (3, 2), (4, 2), (6, 4), (16, SHARDS_HELD)])
def test_the_first_shard_has_gone_when_the_last_comes(devices: int, shards: float) -> None:
    work = _work(shard_bytes=4e6, collective_shard_bytes=4e6)
    needed_bytes = estimate(work, Axis(_PLAIN, devices)).added_bytes + devices * 4e6
    assert needed_bytes == pytest.approx(shards * 4e6)


def test_the_first_dot_waits_for_the_operand_that_all_pieces_share() -> None:
    """The weights' 2e6 bytes; a hop of 6e6 bytes that the dots do not hide gives them time to come.

    The first dot reads its own shard where that is, in 2 ms more; where its hop lasts longer, that is hidden.
    """
    whole = Matmul(m=4000, k=1000, n=1000)
    near, far = (
        estimate(_work(matmuls=(whole,), shard_bytes=0), Axis(hardware, 4)) for hardware in (_ROOMY, _PLAIN)
    )
    dots_s = 4 * (near_s := matmul_s(_M, _ROOMY, lhs_on_chip=True, rhs_on_chip=True))
    assert near.overlapped_s == pytest.approx(2e-3 + 2e-3 + dots_s)
    assert far.overlapped_s == pytest.approx(4 * _M_S)
    bound = estimate(_work(matmuls=(whole,), shard_bytes=6e6), Axis(_ROOMY, 4))
    assert bound.overlapped_s == pytest.approx(near_s + 3 * 6e-3)


def test_an_operand_of_the_original_may_be_fetched_while_the_collective_runs() -> None:
    def original(shard_bytes: float) -> Estimate:
        return estimate(_work(shard_bytes=shard_bytes, collective_shard_bytes=shard_bytes), Axis(_ROOMY, 4))

    whole = dataclasses.replace(_M, m=4000)
    near_s, far_s = (matmul_s(whole, _ROOMY, lhs_on_chip=near, rhs_on_chip=True) for near in (True, False))
    assert original(1e9).dot_s == pytest.approx(near_s)
    # What is gathered arrives there; the other 2e6 bytes are waited for.
    assert original(0).dot_s == pytest.approx(near_s + 2e-3, rel=1e-3)
    assert near_s < 0.6 * far_s


@pytest.mark.parametrize(
    ("form", "copied_bytes"),
    [
        ({"cut": "dot"}, 0.0),
        ({"cut": "apart"}, CUTTING * 1e6),  # Of a row block of 2e6 bytes half, per direction.
        ({"cut": "early"}, CUTTING * 1e6),
    ],
    ids=str,
)
def test_a_block_that_is_cut_out_is_copied(form: Any, copied_bytes: float) -> None:
    """Of a scatter of 8000 rows on 4 devices both ways: 1000 rows of 500 elements are a piece."""
    work = _scatter(8000, 500, 1000, 4, 2, fused=False)
    plain = estimate(work, Axis(_PLAIN, 4))
    cut = estimate(dataclasses.replace(work, **form), Axis(_PLAIN, 4))
    # On chip there is no room, so nothing is gained.
    assert cut.partials_s - plain.partials_s == pytest.approx(4 * 2 * 2 * copied_bytes / 1e9)
    copying = dataclasses.replace(_PLAIN, copy_overhead_s=1e-3)
    slower = estimate(dataclasses.replace(work, **form), Axis(copying, 4))
    copies = 4 * 2 if copied_bytes else 0
    assert slower.partials_s - cut.partials_s == pytest.approx(1e-3 * copies)


def test_every_hop_stops_the_device() -> None:
    """A ring of four has three steps with hops, of two pieces if they go both ways."""
    stops = dataclasses.replace(_PLAIN, async_overhead_s=1e-3)
    scatter = _scatter(8000, 500, 1000, 4, 2, fused=False)
    # Half way round, with two devices each way: one step of whole shards, and one of halves.
    halfway = _work(directions=2, halves=(_HALF,))
    for work, hops in ((_gather(4000, 1000, 1000, 4), 3), (scatter, 6), (halfway, 4)):
        plain, stopped = (estimate(work, Axis(each, 4)) for each in (_PLAIN, stops))
        assert stopped.partials_s - plain.partials_s == pytest.approx(hops * 1e-3)
        taking_turns = dataclasses.replace(_PLAIN, overlaps=False)
        assert estimate(work, Axis(dataclasses.replace(stops, overlaps=False), 4)) == estimate(
            work, Axis(taking_turns, 4)
        )


def test_kernels_beside_a_librarys_matmuls_place_what_a_gather_makes() -> None:
    work = _gather(4000, 1000, 1000, 4)
    plain = estimate(work, Axis(_PLAIN, 4))
    alone = estimate(work, Axis(dataclasses.replace(_PLAIN, lone_matmuls=True, copy_overhead_s=1e-3), 4))
    # The result, 8e6 bytes, is read and written once more, in four kernels.
    assert alone.partials_s - plain.partials_s == pytest.approx(2 * 8e-3 + 4 * 1e-3)
    assert alone.dot_s == plain.dot_s


def test_kernels_beside_a_librarys_matmuls_add_partial_sums_up() -> None:
    whole = Matmul(m=1000, k=4000, n=1000)
    work = dataclasses.replace(
        _gather(1000, 4000, 1000, 4), matmuls=(whole,), piece=(dataclasses.replace(whole, k=1000),)
    )
    unfused = dataclasses.replace(_PLAIN, keeps_sums=False)
    plain = estimate(work, Axis(unfused, 4))
    alone = estimate(work, Axis(dataclasses.replace(unfused, lone_matmuls=True, copy_overhead_s=1e-3), 4))
    # Three times both float32 summands are read and the sum is written, by an own kernel, where the matmul
    # read one and wrote the sum.
    assert alone.partials_s - plain.partials_s == pytest.approx(3 * (2 * 4e-3 + 1e-3))
    scatter = _scatter(4000, 500, 1000, 4, fused=False, apart_bytes=6e6)
    plain, alone = (
        estimate(scatter, Axis(dataclasses.replace(unfused, lone_matmuls=lone, copy_overhead_s=1e-3), 4))
        for lone in (False, True)
    )
    assert alone.partials_s - plain.partials_s == pytest.approx(3 * 1e-3)


def test_as_written_each_dot_of_a_sum_but_the_first_reads_the_sum_so_far() -> None:
    one = _scatter(4000, 500, 1000, 4)
    three = dataclasses.replace(one, matmuls=one.matmuls * 3, piece=one.piece * 3)
    plain = dataclasses.replace(_PLAIN, on_chip_bytes=1.0)
    alone, summed = (estimate(work, Axis(plain, 4)) for work in (one, three))
    # 4000 × 1000 sums in bfloat16.
    first_s = alone.dot_s - matmul_s(one.matmuls[0], plain)
    assert summed.dot_s == pytest.approx(first_s + 3 * matmul_s(one.matmuls[0], plain) + 2 * 8e-3)
    gathered = dataclasses.replace(_gather(4000, 500, 1000, 4))
    two = dataclasses.replace(gathered, matmuls=gathered.matmuls * 2, piece=gathered.piece * 2)
    assert estimate(two, Axis(plain, 4)).dot_s < 2 * estimate(gathered, Axis(plain, 4)).dot_s + 1e-9


def test_a_block_that_was_cut_out_is_on_chip_if_it_fits_there() -> None:
    whole = Matmul(m=8000, k=500, n=1000)
    work = _scatter(8000, 500, 1000, 4, 2, fused=False)
    roomy = dataclasses.replace(_PLAIN, on_chip_bytes=4e6)  # For the block, not for the whole operand.
    dot, early = (
        estimate(dataclasses.replace(work, cut=cut), Axis(roomy, 4)).partials_s for cut in ("dot", "early")
    )
    piece = dataclasses.replace(whole, m=1000)
    far_s, near_s = (matmul_s(piece, roomy, lhs_on_chip=near, rhs_on_chip=True) for near in (False, True))
    assert dot == pytest.approx(1e-3 + 8 * far_s)
    assert early == pytest.approx(1e-3 + 8 * (near_s + 2 * CUTTING * 1e-3))


def test_a_gather_s_dots_cut_blocks_out_of_what_does_not_travel() -> None:
    """x[1000, 4000] · w[4000, 500]: of x each step's block has 2e6 bytes, a shard of w 1e6."""
    whole = Matmul(m=1000, k=4000, n=500)
    piece = dataclasses.replace(whole, k=1000)
    work = _work(matmuls=(whole,), piece=(piece,), shard_bytes=1e6, collective_shard_bytes=1e6)
    plain, apart = (
        estimate(dataclasses.replace(work, cut=cut), Axis(_PLAIN, 4)).partials_s for cut in ("dot", "apart")
    )
    cut_s = 2 * (CUTTING_COLUMNS[0] + CUTTING_COLUMNS[1] / 2) * 2e-3
    assert apart - plain == pytest.approx(4 * cut_s)
    in_columns = dataclasses.replace(work, columns=2)
    plain, apart = (
        estimate(dataclasses.replace(in_columns, cut=cut), Axis(_PLAIN, 4)).partials_s
        for cut in ("dot", "apart")
    )
    assert apart - plain == pytest.approx(4 * cut_s)


def test_matrices_whose_rows_are_no_whole_tiles_are_laid_out_anew() -> None:
    """x[16, 1000, 1000] gathered on its batch dim, times w[16, 1000, 500]: results of 1e6 bytes a matrix."""

    def laid_out_s(m: int, batch: int, itemsize: int, columns: int = 500) -> float:
        out_dtype = "bfloat16" if itemsize == 2 else "float32"
        whole = Matmul(batch=batch, m=m, k=1000, n=500, out_dtype=out_dtype)
        piece = dataclasses.replace(whole, batch=1, n=columns)
        work = _work(matmuls=(whole,), piece=(piece,), chains=500 // columns)
        return copies_s(work, batch, _PLAIN, cut_out=False)

    assert laid_out_s(1000, 16, 2) == pytest.approx(LAYING_OUT * 2 * 1e-3)
    assert laid_out_s(1001, 8, 4) == pytest.approx(LAYING_OUT * 2 * 2.002e-3)
    assert laid_out_s(1001, 16, 2, columns=250) == pytest.approx(LAYING_OUT * 2 * 1.001e-3)
    assert laid_out_s(1001, 8, 2, columns=250) == pytest.approx(LAYING_OUT * 2 * 1.001e-3)
    for as_it_is in ((1008, 16, 2), (1000, 8, 2), (1000, 8, 4), (1000, 16, 2, 250), (1001, 4, 4)):
        assert laid_out_s(*as_it_is) == 0


def test_blocks_that_are_cut_at_once_are_cut_beside_the_first_hop() -> None:
    """x[1000, 4000] · w[4000, 500], in strips of w that share blocks of x: 8e6 bytes of these are copied."""
    whole = Matmul(m=1000, k=4000, n=500)
    strip = dataclasses.replace(whole, k=1000, n=250)
    copied_s = 2 * 8e-3 * (CUTTING_SHARED_COLUMNS[0] + CUTTING_SHARED_COLUMNS[1] / 2)

    def exposed_s(hop_s: float) -> float:
        sizes = {"shard_bytes": hop_s * 1e9, "collective_shard_bytes": hop_s * 1e9}
        work = _work(matmuls=(whole,), piece=(strip,), sides=("rhs",), directions=2, **sizes)
        plain, apart = (
            estimate(dataclasses.replace(work, cut=cut), Axis(_PLAIN, 4)) for cut in ("dot", "apart")
        )
        assert apart.partials_s - plain.partials_s == pytest.approx(copied_s)
        return apart.overlapped_s - plain.overlapped_s

    assert exposed_s(1e-6) == pytest.approx(copied_s)
    assert exposed_s(1.0) == pytest.approx(0.0)


def test_a_gather_cuts_its_shard_before_the_first_hop() -> None:
    slow = dataclasses.replace(_PLAIN, slicing=1.5)

    def before_s(**changes: Any) -> float:
        work = _work(**changes)
        return estimate(work, Axis(slow, 4)).overlapped_s - estimate(work, Axis(_PLAIN, 4)).overlapped_s

    cut_s = 1.5 * 2 * _work().shard_bytes / 1e9
    assert before_s() == 0
    for changes in ({"directions": 2}, {"chains": 3}, {"columns": 2}, {"columns": 2, "directions": 2}):
        assert before_s(**changes) == pytest.approx(cut_s)
    assert before_s(collective="reduce_scatter", chains=2) == 0


def test_joining_the_pieces_of_several_dots_takes_longer() -> None:
    def joined(count: int, hardware: Hardware) -> float:
        whole = Matmul(m=4000, k=1000, n=1000)
        work = _work(matmuls=(whole,) * count, piece=(_M,) * count, shard_bytes=2e6, directions=2)
        both = (dataclasses.replace(work, joined=joined) for joined in (False, True))
        apart, together = (estimate(each, Axis(hardware, 4)).partials_s for each in both)
        return together - apart

    slow = dataclasses.replace(_PLAIN, joining=3.0)
    dots_s = 4 * _M_S  # One dot of a step in place of two, which are as large here.
    assert joined(1, _PLAIN) + dots_s == pytest.approx(4 * 2 * JOINING * 4e-3)
    assert joined(1, slow) + dots_s == pytest.approx(3 * 4 * 2 * JOINING * 4e-3)
    assert joined(2, _PLAIN) + 2 * dots_s == pytest.approx(4 * 2 * JOINING_MORE * 6e-3)


def test_a_ring_that_needs_no_more_memory_comes_before_a_faster_one() -> None:
    fast = dataclasses.replace(_by_hand(), overlapped_s=1e-3, added_bytes=1.0)
    lean = dataclasses.replace(fast, overlapped_s=2e-3, added_bytes=0.0)
    faster = dataclasses.replace(lean, overlapped_s=1.5e-3)
    assert sorted((faster, lean, fast), key=lambda priced: priced.rank) == [fast, lean, faster]


def test_what_every_dot_shares_is_on_the_chip_if_it_fits() -> None:
    fitting = dataclasses.replace(_PLAIN, on_chip_bytes=2e6)
    too_small = dataclasses.replace(_PLAIN, on_chip_bytes=2e6 - 1)
    roomy = dataclasses.replace(_PLAIN, on_chip_bytes=2e6 + 16 * 2e6)
    assert estimate(_work(), Axis(fitting, 4)).partials_s == pytest.approx(4 * (4e-3 + 1e-6))
    assert estimate(_work(), Axis(too_small, 4)).partials_s == pytest.approx(4 * _M_S)
    # What arrives is there too if it takes little of the room that is left: an eighth.
    assert estimate(_work(), Axis(roomy, 4)).partials_s == pytest.approx(4 * (2e-3 + 1e-6))


def test_of_what_several_dots_share_as_much_is_on_the_chip_as_fits() -> None:
    whole = dataclasses.replace(_M, m=4000)
    work = _work(matmuls=(whole, whole), piece=(_M, _M), shard_bytes=0, collective_shard_bytes=0)
    one = dataclasses.replace(_PLAIN, on_chip_bytes=3e6)
    both = dataclasses.replace(_PLAIN, on_chip_bytes=4e6)
    waited_s, near_s = 2e-3, 4e-3 + 1e-6
    assert estimate(work, Axis(one, 4)).partials_s == pytest.approx(waited_s + 4 * (near_s + _M_S))
    # The second dot's is fetched while the first runs, as far as that takes as long.
    assert estimate(work, Axis(both, 4)).partials_s == pytest.approx(waited_s + 4 * 2 * near_s)
    short = dataclasses.replace(_M, m=100)
    work = dataclasses.replace(work, piece=(short, short), matmuls=(dataclasses.replace(_M, m=400),) * 2)
    short_s = 0.4e-3 + 1e-6
    assert estimate(work, Axis(both, 4)).partials_s == pytest.approx(2 * waited_s - short_s + 4 * 2 * short_s)


def test_what_arrives_is_read_by_the_first_dot_where_it_does_not_come_to_the_chip() -> None:
    roomy = dataclasses.replace(_PLAIN, on_chip_bytes=1e9, receives_on_chip=False)
    whole = dataclasses.replace(_M, m=4000)
    one = _work(matmuls=(whole,), shard_bytes=0, collective_shard_bytes=0)
    two = dataclasses.replace(one, matmuls=(whole, whole), piece=(_M, _M))
    far_s, near_s = 4e-3 + 1e-6, 2e-3 + 1e-6
    assert estimate(one, Axis(roomy, 4)).partials_s == pytest.approx(2e-3 + 4 * far_s)
    assert estimate(two, Axis(roomy, 4)).partials_s == pytest.approx(2e-3 + 4 * (far_s + near_s))


def test_results_that_grow_on_the_chip_leave_it_at_the_end() -> None:
    whole = dataclasses.replace(_M, m=4000)
    work = _work(matmuls=(whole,), shard_bytes=0, collective_shard_bytes=0, directions=2)
    # Results of 8e6 bytes, beside 2e6 that all dots share; a step has two dots, as large as one here.
    growing = dataclasses.replace(_PLAIN, on_chip_bytes=10e6, results_on_chip=1.0)
    brought_s, waited_s = 8e-3, 2e-3
    near_s = matmul_s(_M, _PLAIN, rhs_on_chip=True, result_on_chip=True)
    far_s = matmul_s(_M, _PLAIN, rhs_on_chip=True)
    # The last dot finds the rest gone, and writes to main memory.
    grown_s = waited_s + 7 * near_s + far_s + brought_s
    assert estimate(work, Axis(growing, 4)).partials_s == pytest.approx(grown_s)
    # Beside two little shards the chip may be full.
    assert estimate(work, Axis(dataclasses.replace(growing, results_on_chip=0.9), 4)) == estimate(
        work, Axis(growing, 4)
    )
    too_small = dataclasses.replace(growing, on_chip_bytes=9.99e6)
    none = dataclasses.replace(growing, results_on_chip=0.0)
    assert on_chip(work, 4, too_small).results == on_chip(work, 4, none).results == (False,)
    # Where they do not grow, shards arrive in their place; the first dot reads the device's own elsewhere.
    own_s = _M.lhs_bytes / _PLAIN.hbm_bytes_per_s
    arrived_s = matmul_s(_M, _PLAIN, lhs_on_chip=True, rhs_on_chip=True)
    assert estimate(work, Axis(none, 4)).partials_s == pytest.approx(waited_s + own_s + 8 * arrived_s)
    for shard_bytes, grows in ((1e4, True), (1e5, False)):
        carried = dataclasses.replace(work, shard_bytes=shard_bytes, collective_shard_bytes=shard_bytes)
        roomy = dataclasses.replace(growing, on_chip_bytes=10.1e6, results_on_chip=0.9)
        assert on_chip(carried, 4, roomy).results == (grows,)


def test_the_only_result_leaves_while_the_last_dot_waits_for_its_hop() -> None:
    whole = dataclasses.replace(_M, m=4000)
    one = _work(matmuls=(whole,), shard_bytes=1e4, collective_shard_bytes=1e4)
    roomy = dataclasses.replace(_PLAIN, on_chip_bytes=1e9, results_on_chip=1.0)
    dots = estimate(one, Axis(roomy, 4))
    short = Axis(dataclasses.replace(roomy, link_bytes_per_s=1e12), 4)
    brought_s = whole.result_bytes / roomy.hbm_bytes_per_s
    in_main = dataclasses.replace(short.hardware, results_on_chip=0.0, places_slowly=True)
    stays = dataclasses.replace(short.hardware, places_slowly=True)
    # No hop to wait for: all of it is seen. In main memory's stead shards arrive, but for the first.
    own_s = _M.lhs_bytes / roomy.hbm_bytes_per_s
    seen_s = estimate(one, Axis(stays, 4)).overlapped_s - estimate(one, Axis(in_main, 4)).overlapped_s
    assert seen_s == pytest.approx(brought_s - own_s)
    # Hops that last longer than the dots and that: nothing is.
    slow = dataclasses.replace(stays, link_bytes_per_s=1e4 / (10 * dots.partials_s))
    unseen = dataclasses.replace(in_main, link_bytes_per_s=slow.link_bytes_per_s)
    assert estimate(one, Axis(slow, 4)).overlapped_s == pytest.approx(
        estimate(one, Axis(unseen, 4)).overlapped_s
    )


def test_results_of_several_dots_leave_beside_those_of_the_others() -> None:
    whole = dataclasses.replace(_M, m=4000)
    placing = dataclasses.replace(_PLAIN, on_chip_bytes=1e9, results_on_chip=1.0, places_slowly=True)
    for count in (1, 2, 3):
        work = _work(
            matmuls=(whole,) * count,
            piece=(_M,) * count,
            shard_bytes=0,
            collective_shard_bytes=0,
            directions=2,
        )
        grown, written = (
            estimate(work, Axis(hardware, 4)).partials_s
            for hardware in (placing, dataclasses.replace(placing, results_on_chip=0.0))
        )
        brought_s = whole.result_bytes / placing.hbm_bytes_per_s
        beside_s = (count - 1) * 2 * matmul_s(_M, placing, lhs_on_chip=True, rhs_on_chip=True)
        hidden_s = max(0.0, (count - 1) * brought_s - beside_s)
        # In main memory's stead shards arrive, but for the first.
        own_s = _M.lhs_bytes / placing.hbm_bytes_per_s
        assert grown - written == pytest.approx(brought_s + hidden_s - own_s)


@pytest.mark.parametrize(("columns", "late"), [(100, False), (256, True), (1024, False)])
def test_what_later_matmuls_share_comes_late_if_it_is_little(columns: int, late: bool) -> None:
    """x[400, 1000] gathered on rows for two weights of 0.2, 0.5 or 2 MB: two steps' dots read the second."""
    whole = Matmul(m=400, k=1000, n=columns)
    piece = dataclasses.replace(whole, m=100)
    roomy = dataclasses.replace(_PLAIN, on_chip_bytes=1e9)
    work = _work(matmuls=(whole,) * 2, piece=(piece,) * 2, shard_bytes=0, collective_shard_bytes=0)
    near_s, far_s, own_far_s = (
        matmul_s(piece, roomy, lhs_on_chip=lhs, rhs_on_chip=rhs)
        for lhs, rhs in ((True, True), (True, False), (False, True))
    )
    weight_s = whole.rhs_bytes / roomy.hbm_bytes_per_s
    waited_s = weight_s + max(0.0, weight_s - near_s)
    own_s = (1 + late) * (own_far_s - near_s)
    wanted_s = waited_s + own_s + 8 * near_s + late * 2 * (far_s - near_s)
    assert estimate(work, Axis(roomy, 4)).partials_s == pytest.approx(wanted_s)


def test_of_what_just_fits_on_the_chip_the_worse_is_taken() -> None:
    """v6e, 94 MiB that all dots share, where sums have no room beside it: 440 µs in place of 206."""
    v6e = by_name("tpu_v6e")
    found: list[float] = []
    for rows in (2112, 2192, 2240):
        whole = Matmul(m=rows, k=22528, n=640, dtype="bfloat16", out_dtype="bfloat16")
        piece = dataclasses.replace(whole, k=704)
        shard_bytes = 1408 * 640 * 2
        work = RingWork(
            collective="all_gather",
            shard_bytes=shard_bytes,
            collective_shard_bytes=shard_bytes,
            matmuls=(whole,),
            piece=(piece,),
            directions=2,
        )
        found.append(estimate(work, Axis(v6e, 16)).overlapped_s)
    assert found[0] > 1.8 * found[2]
    assert found[1] > 1.8 * found[2]


@pytest.mark.parametrize("name", ["tpu_v5p", "tpu_v6e"])
def test_columns_of_a_scatter_fill_up_tiles(name: str) -> None:
    axis = Axis(by_name(name), 8)
    width = axis.hardware.matmul_tile[2]

    def ring(n: int, **form: Any) -> Estimate:
        return estimate(_scatter_of_columns(axis, n, **form), axis)

    for form in ({"directions": 2, "fused": True}, {"chains": 2, "fused": True}):
        exact, filled = ring(width, **form), ring(width + 16, **form)
        assert filled.partials_s == pytest.approx(ring(2 * width, **form).partials_s, rel=0.02)
        assert filled.partials_s > 1.3 * exact.partials_s
        assert filled.hops_s < 1.3 * exact.hops_s


def test_products_that_are_turned_round_take_longer_to_add_up() -> None:
    """On v5p, where additions are no part of the dots: 16 more columns than a tile has."""
    axis = Axis(_V5P, 8)

    def added_s(n: int) -> float:
        works = (_scatter_of_columns(axis, n, apart_bytes=each) for each in (4e6, 0.0))
        more, none = (estimate(work, axis).partials_s for work in works)
        return (more - none) / 7 * _V5P.hbm_bytes_per_s

    assert added_s(128) == pytest.approx(4e6)
    assert added_s(144) == pytest.approx(TURNING[False] * 4e6)
    turned, added = (
        dataclasses.replace(_scatter_of_columns(axis, 144), fused=fused) for fused in (False, True)
    )
    step_s = (estimate(turned, axis).partials_s - estimate(added, axis).partials_s) / 7
    assert step_s < TURNING_S[False]  # since those that are added to at once fill up tiles
    on_v6e = Axis(by_name("tpu_v6e"), 8)
    wide, none = (_scatter_of_columns(on_v6e, 144, apart_bytes=each) for each in (4e6, 0.0))
    difference_s = estimate(wide, on_v6e).partials_s - estimate(none, on_v6e).partials_s
    added_bytes = difference_s / 7 * on_v6e.hardware.hbm_bytes_per_s
    assert added_bytes == pytest.approx(on_v6e.hardware.adding * 4e6)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "slower"),
    [
        (24, 500, "bfloat16", True),
        (32, 500, "bfloat16", False),  # Whole tiles of 16 rows.
        (24, 1000, "bfloat16", False),  # The dots take all columns.
        (264, 500, "bfloat16", False),  # Not few.
        (24, 500, "float32", False),  # Whole tiles of 8 rows.
        (20, 500, "float32", True),
    ],
)
def test_dots_of_few_rows_between_tiles_and_of_some_columns_are_slower(
    rows: int, columns: int, dtype: str, slower: bool
) -> None:
    whole = Matmul(m=4 * rows, k=1000, n=1000, dtype=dtype)
    work = _work(
        collective="reduce_scatter",
        matmuls=(whole,),
        piece=(dataclasses.replace(whole, m=rows, n=columns),),
        chains=1000 // columns,
    )
    price_s, slower_s = (
        estimate(work, Axis(dataclasses.replace(_PLAIN, between_tiles=factor), 4)).partials_s
        for factor in (1.0, 2.0)
    )
    assert slower_s == pytest.approx((2 if slower else 1) * price_s)


def test_blocks_of_what_was_fetched_whole_are_cut_out_sooner() -> None:
    """Of x[8000, 500], 8e6 bytes, or x[1000, 4000], where the chip keeps sums and has room for it."""
    roomy = dataclasses.replace(_PLAIN, on_chip_bytes=8e6, copy_overhead_s=1.0)
    keeping_none = dataclasses.replace(roomy, keeps_sums=False)
    rows = _scatter(8000, 500, 1000, 4, 2, fused=False, cut="early")
    piece = Matmul(m=1000, k=1000, n=500)
    columns = _work(
        matmuls=(dataclasses.replace(piece, k=4000),),
        piece=(piece,),
        shard_bytes=1e6,
        collective_shard_bytes=1e6,
        cut="apart",
    )
    halves = dataclasses.replace(columns, chains=2, piece=(dataclasses.replace(piece, k=500),))
    strips = dataclasses.replace(columns, chains=2, piece=(dataclasses.replace(piece, n=250),))
    # The lhs travels, of which 4e6 bytes are gathered.
    right = dataclasses.replace(
        columns,
        matmuls=(Matmul(m=500, k=4000, n=1000),),
        piece=(Matmul(m=500, k=1000, n=1000),),
    )
    apart = CUTTING_COLUMNS[0] + CUTTING_COLUMNS[1] / 2  # of bfloat16
    copied = [
        (rows, roomy, 2 * CUTTING_ROWS * 2e-3),
        (rows, keeping_none, 2 * CUTTING * 2e-3 + 2.0),
        (columns, roomy, 2 * apart * 2e-3),
        (columns, keeping_none, 2 * apart * 2e-3 + 1.0),
        (halves, roomy, 2 * apart * 2e-3),
        (strips, roomy, 0.0),
        (right, roomy, 2 * CUTTING_RIGHT * 2e-3),
        (right, keeping_none, 2 * CUTTING_RIGHT * 2e-3 + 1.0),
        (rows, _PLAIN, 2 * CUTTING * 2e-3),
    ]
    for work, hardware, seconds in copied:
        assert copies_s(work, 4, hardware, cut_out=False) == pytest.approx(seconds)
    # A block that both strips of the other operand read is cut once, from main memory.
    across = _scatter(8000, 500, 1000, 4, 2, fused=False, cut="early")
    across = dataclasses.replace(across, piece=(dataclasses.replace(across.matmuls[0], m=2000, n=500),))
    assert copies_s(across, 4, keeping_none, cut_out=False) == pytest.approx(2 * CUTTING * 2e-3 + 2.0)
    assert copies_s(across, 4, roomy, cut_out=False) == pytest.approx(2 * 2 * CUTTING_ROWS * 2e-3)
    # What strips of the other operand share is cut once, for all four steps.
    shared = CUTTING_SHARED_COLUMNS[0] + CUTTING_SHARED_COLUMNS[1] / 2
    assert copies_at_once_s(strips, 4, roomy) == pytest.approx(4 * 2 * shared * 2e-3)
    assert not any(copies_at_once_s(other, 4, roomy) for other in (rows, columns, halves, right))
    # Where an earlier chunk's blocks are still there, they are not cut out again; on chip they are not.
    assert copies_s(rows, 4, keeping_none, cut_out=True) == 0
    assert copies_s(rows, 4, roomy, cut_out=True) == pytest.approx(2 * CUTTING_ROWS * 2e-3)


def test_shards_of_a_byte_take_longer_to_cut_and_to_halve() -> None:
    """8e6 bytes are read and written, at 1e9 a second."""

    def cut_s(dtype: str, slicing: float) -> tuple[float, float]:
        whole = Matmul(m=4000, k=1000, n=1000, dtype=dtype)
        work = _work(matmuls=(whole,), piece=(dataclasses.replace(whole, m=500),), shard_bytes=4e6)
        hardware = dataclasses.replace(_PLAIN, slicing=slicing)
        return cutting_s(work, hardware), halving_s(work, hardware)

    assert cut_s("bfloat16", 1.5) == pytest.approx((1.5 * 8e-3, 1.5 * 8e-3))
    assert cut_s("int8", 1.5) == pytest.approx(
        (SLICING_NARROW * 8e-3, HALVING_NARROW * SLICING_NARROW * 8e-3)
    )
    assert cut_s("int8", 4.0) == pytest.approx((4.0 * 8e-3, HALVING_NARROW * 4.0 * 8e-3))


def test_products_that_are_padded_less_by_columns_are_turned_round() -> None:
    """By the schedule of a psum in 16 columns (v5p): a dot of 507 µs, and 34 to turn what it makes."""
    v5p = by_name("tpu_v5p")
    whole = Matmul(m=11008, k=19584, n=25600)
    turned, plain = (
        estimate(
            _work(
                collective="reduce_scatter",
                shard_bytes=2 * 2752 * n,
                matmuls=(whole,),
                piece=(dataclasses.replace(whole, m=2752, n=n),),
                chains=25600 // n,
                fused=False,
                apart_bytes=3 * 4 * 2752 * n,
            ),
            Axis(v5p, 4),
        ).partials_s
        for n in (1600, 3200)
    )
    assert turned > 1.05 * plain


def test_rows_that_no_good_window_divides_take_longer_to_place() -> None:
    def partials_s(rows: int, **form: Any) -> float:
        piece = Matmul(m=rows, k=4096, n=8192)
        whole = dataclasses.replace(piece, m=4 * rows)
        work = _work(matmuls=(whole,), piece=(piece,), shard_bytes=0, **form)
        return estimate(work, Axis(_V5P, 4)).partials_s

    assert partials_s(8 * 1039) > 1.2 * partials_s(8 * 1040)
    joined: Any = {"directions": 2, "joined": True}
    assert partials_s(8 * 1039, **joined) < 1.05 * partials_s(8 * 1040, **joined)
    # Two pieces are of some rows more and less.
    assert partials_s(8 * 1039, directions=2) < 2.2 * partials_s(8 * 1040)


def test_pieces_that_are_no_whole_tiles_are_priced_as_those_that_they_are_cut_into() -> None:
    """Half of 75 tiles of columns: 38 tiles and 37."""
    whole = Matmul(m=2048, k=4096, n=9600)
    pieces = [dataclasses.replace(whole, n=n) for n in (4800, 38 * 128, 37 * 128)]
    mean_s, *each_s = (
        estimate(
            _work(matmuls=(whole,), piece=(piece,), shard_bytes=0, directions=2, collective="reduce_scatter"),
            Axis(_V5P, 4),
        ).partials_s
        for piece in pieces
    )
    assert mean_s == pytest.approx(sum(each_s) / 2, rel=0.02)


def test_a_batch_s_other_operand_is_on_the_chip_whole_if_it_fits_there() -> None:
    """x[8, 1000, 1000] · w[8, 1000, 500]: w travels, x has 16e6 bytes."""
    whole = Matmul(batch=8, m=1000, k=1000, n=500)
    piece = dataclasses.replace(whole, batch=2)
    work = _work(matmuls=(whole,), piece=(piece,), shard_bytes=2e6, collective_shard_bytes=2e6)
    fitting = dataclasses.replace(_PLAIN, on_chip_bytes=32e6, receives_on_chip=False)
    cramped = dataclasses.replace(fitting, on_chip_bytes=32e6 - 1)
    near_s, far_s = (matmul_s(piece, _PLAIN, lhs_on_chip=near) for near in (True, False))
    assert estimate(work, Axis(fitting, 4)).partials_s == pytest.approx(16e-3 + 4 * near_s)
    assert estimate(work, Axis(cramped, 4)).partials_s == pytest.approx(4 * far_s)


def test_pieces_are_counted_over_directions_rings_and_chains() -> None:
    assert _work().pieces == 1
    assert _work(directions=2, rings=3, chains=2, columns=4).pieces == 12


def test_hops_and_dots_take_turns_where_nothing_overlaps() -> None:
    alone = dataclasses.replace(_PLAIN, overlaps=False)
    priced = estimate(_work(directions=2, chains=2, apart_bytes=1e6), Axis(alone, 4))
    assert priced.overlapped_s == pytest.approx(4 * _M_S + 3 * (4 * _M_S + 1e-3 + 6e-3))
    wide = estimate(_work(collective_shard_bytes=24e6), Axis(alone, 4))
    assert wide.hops_s == pytest.approx(3 * 24e-3)


def test_the_original_is_the_whole_collective_and_the_whole_dots() -> None:
    priced = _by_hand()
    assert priced.dot_s == pytest.approx(1e-6 + 18e-3)  # 8e6 + 2e6 + 8e6 bytes
    assert priced.collective_s == pytest.approx(18e-3)  # three shards by two links
    assert _by_hand(collective="reduce_scatter").collective_s == pytest.approx(18e-3)


def test_estimates_of_parts_add_up() -> None:
    one, other = _by_hand(), _by_hand(directions=2)
    both = one + other
    assert both.benefit_s == pytest.approx(one.benefit_s + other.benefit_s)
    assert both.partials_s == one.partials_s + other.partials_s


# What the hardware makes of directions.


def test_behind_a_switch_and_along_a_line_one_direction_is_as_good() -> None:
    assert _best(_gather, 8192, 8192, 2048, 8, _H100)[0].directions == 1
    # So many rows that even half of a shard is read from main memory.
    assert _best(_gather, 32768, 8192, 2048, 8, _V5E)[0].directions == 1


def test_a_scatter_ring_waits_for_additions_that_are_not_fused() -> None:
    axis, add_bytes = Axis(_V5P, 16), 3 * 1024 * 1024 * 8
    for directions in (1, 2):
        fused = _scatter(8192, 512, 8192, 16, directions)
        apart = dataclasses.replace(fused, apart_bytes=add_bytes)
        waiting = estimate(apart, axis).overlapped_s - estimate(fused, axis).overlapped_s
        assert waiting == pytest.approx(15 * add_bytes / _V5P.hbm_bytes_per_s)


def test_handing_out_the_gathered_array_costs_its_copies() -> None:
    work, axis = _gather(8192, 8192, 16384, 16), Axis(_V5P, 16)
    handing_out = dataclasses.replace(work, hands_out_gathered=True)
    copies_s = 16 * 2 * work.shard_bytes / _V5P.hbm_bytes_per_s
    plain, copied = (estimate(each, axis).overlapped_s for each in (work, handing_out))
    assert copied - plain == pytest.approx(copies_s)


def test_pieces_are_priced_as_they_are_given() -> None:
    axis = Axis(_V5P, 16)
    rows, columns = (
        dataclasses.replace(_gather(8192, 8192, 16384, 16, 2), piece=(piece,))
        for piece in (Matmul(m=256, k=8192, n=16384), Matmul(m=512, k=8192, n=8192))
    )
    whole = dataclasses.replace(rows, piece=(Matmul(m=512, k=8192, n=16384),))
    # The weights are too large for the chip, and the shards are not small.
    piece_s = matmul_s(rows.piece[0], _V5P)
    assert estimate(rows, axis).partials_s == pytest.approx(2 * 16 * piece_s + entering_s(rows, _V5P))
    assert estimate(columns, axis).partials_s > 0
    assert estimate(whole, axis).partials_s > 1.3 * estimate(rows, axis).partials_s


def test_an_operand_too_large_for_the_chip_is_read_in_every_step() -> None:
    work = _gather(1024, 8192, 2048, 16)
    roomy, cramped = (dataclasses.replace(_V5P, on_chip_bytes=size) for size in (1e9, 1e6))
    rereading = estimate(work, Axis(cramped, 16)).partials_s
    assert rereading == pytest.approx(16 * matmul_s(work.piece[0], cramped))
    assert estimate(work, Axis(roomy, 16)).partials_s < rereading


def test_a_ring_may_send_a_narrower_dtype_than_the_collective_did() -> None:
    axis = Axis(_V5P, 16)
    work = _gather(8192, 8192, 2048, 16, 2)
    wide = dataclasses.replace(work, collective_shard_bytes=2 * work.shard_bytes)
    plain, widened = (estimate(each, axis) for each in (work, wide))
    assert widened.overlapped_s == plain.overlapped_s
    assert widened.collective_s == pytest.approx(2 * plain.collective_s)


def test_an_axis_of_one_device_gains_nothing() -> None:
    for name in names():
        assert estimate(_gather(1024, 1024, 1024, 1), Axis(by_name(name), 1)).benefit_s == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"directions": 3},
        {"rings": 0},
        {"chains": 0},
        {"columns": 0},
        {"shard_bytes": -1},
        {"collective_shard_bytes": -1},
        {"accumulators": 0},
        {"apart_bytes": -1},
        {"collective": "psum"},
        {"piece": ()},
    ],
    ids=str,
)
def test_impossible_work_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        _work(**bad)


def test_bytes_that_are_no_number_are_refused() -> None:
    with pytest.raises(ValueError):
        _by_hand(shard_bytes=float("nan"))
    with pytest.raises(ValueError, match="axis_size"):
        estimate(_work(), Axis(_PLAIN, 0))


_SHAPES = st.tuples(
    st.sampled_from([_gather, _scatter]),
    st.integers(1, 1024),
    st.integers(1, 1 << 15),
    st.integers(1, 1 << 15),
    st.integers(2, 32),
)
_FORMS = st.tuples(st.sampled_from([1, 2]), st.integers(1, 2))
_HARDWARE = st.sampled_from([by_name(name) for name in names()])


def _drawn(shape: Any, form: Any) -> tuple[RingWork, int]:
    make, rows, k, n, axis_size = shape
    return make(rows * axis_size * 4, k, n, axis_size, *form), axis_size


@given(_SHAPES, _FORMS, st.booleans())
def test_nothing_pays_on_cpu(shape: Any, form: Any, wide: bool) -> None:
    work, axis_size = _drawn(shape, form)
    if wide:
        work = dataclasses.replace(work, collective_shard_bytes=2 * work.shard_bytes)
    assert estimate(work, Axis(_CPU, axis_size)).benefit_s <= 0


@given(_SHAPES, _FORMS, _HARDWARE)
def test_a_ring_never_beats_the_matrix_unit_or_its_hops(shape: Any, form: Any, hardware: Hardware) -> None:
    work, axis_size = _drawn(shape, form)
    priced = estimate(work, Axis(hardware, axis_size))
    slack = 1 - 1e-9
    flops = sum(matmul.flops for matmul in work.matmuls)
    assert priced.overlapped_s >= flops / hardware.flops_for("bfloat16") * slack
    assert priced.overlapped_s >= max(priced.partials_s, priced.hops_s) * slack
    assert priced.overlapped_s <= (priced.partials_s + priced.hops_s) / slack
    assert priced.hops_s >= priced.hop_latency_s * slack


@given(_SHAPES, _FORMS, _HARDWARE, st.floats(1, 10))
def test_more_bytes_on_the_wire_are_never_faster(
    shape: Any, form: Any, hardware: Hardware, factor: float
) -> None:
    work, axis_size = _drawn(shape, form)
    heavier = dataclasses.replace(work, shard_bytes=work.shard_bytes * factor)
    axis = Axis(hardware, axis_size)
    assert estimate(heavier, axis).overlapped_s >= estimate(work, axis).overlapped_s


def test_the_benefit_grows_from_loss_to_gain_with_the_number_of_rows() -> None:
    signs = [_benefit_s(_gather, rows, 8192, 2048, 16, _V5P) > 0 for rows in (32, 128, 512, 2048, 8192)]
    assert not signs[0] and signs[-1]
    assert sum(before != after for before, after in itertools.pairwise(signs)) == 1


@pytest.mark.parametrize(
    ("rows", "pieces", "across", "copied"),
    [
        (800, 2, False, False),  # 416 and 384
        (800, 2, True, False),
        (96, 2, False, True),  # 48 each
        (96, 3, False, False),
        (96, 2, True, False),
        (400, 1, False, True),
        (400, 2, True, True),
    ],
)
def test_pieces_of_elements_of_a_byte_that_begin_within_a_tile_copy_the_whole(
    rows: int, pieces: int, across: bool, copied: bool
) -> None:
    def found(itemsize: float, cut: Cut, chip: str = "tpu_v6e") -> float:
        return between_tiles_bytes(
            1e6, rows, itemsize, 16, by_name(chip), pieces=pieces, across=across, cut=cut
        )

    assert found(1, "dot") == (2 * COPYING_WHOLE * pieces * 1e6 if copied else 0)
    assert found(1, "early") == (2 * CUTTING_BETWEEN_TILES * 1e6 / 16 if copied else 0)
    assert found(2, "dot") == found(1, "dot", "h100") == 0


def _axis(chip: str, *shape: int) -> Axis:
    return Axis.of(Topology.torus(shape, by_name(chip)), (tuple(range(math.prod(shape))),))


_WIDE = PlainDot(Matmul(m=408, k=15616, n=7040), "k", operand="lhs")


@pytest.mark.parametrize(
    ("chain", "axis", "compiled_us", "within"),
    [
        # The weights are rounded to travel, and arrive on chip so; rings are not sure to round blocks of 384.
        (
            chain_of("all_gather_dot", 10816, 6144, 9088, dtype="float32", cut="k", operand="rhs"),
            _axis("tpu_v5e", 4, 4),
            7671,
            0.01,
        ),
        (
            chain_of("all_gather_dot", 736, 1024, 5120, dtype="float32", cut="k", operand="rhs"),
            _axis("tpu_v5e", 2, 4),
            155,
            0.05,
        ),
        # Shards of 976 columns are no whole tiles, and are laid out beside each other once they are there.
        (
            PlainChain(pattern="all_gather_dot", dots=(_WIDE, _WIDE), elements=408 * 15616, free="m"),
            _axis("tpu_v6e", 4, 4),
            506,
            0.07,
        ),
    ],
    ids=str,
)
def test_a_gather_as_written_has_copies_of_its_own(
    chain: PlainChain, axis: Axis, compiled_us: float, within: float
) -> None:
    """As the TPU compiler's schedules have it; without them 12,087, 146 and 428 µs were said."""
    assert price(chain, Form(), axis).original_s * 1e6 == pytest.approx(compiled_us, rel=within)


def test_what_is_laid_out_by_columns_needs_no_laying_out() -> None:
    """Columns of many rows are: shards of 280 of 3624 rows, not of 976 of 408."""
    for rows, columns, copied in ((408, 976, True), (3624, 280, False), (408, 1024, False)):
        whole = Matmul(m=rows, k=16 * columns, n=1024)
        shard_bytes = rows * columns * 2
        work = RingWork(
            collective="all_gather",
            shard_bytes=shard_bytes,
            collective_shard_bytes=shard_bytes,
            matmuls=(whole,),
            piece=(dataclasses.replace(whole, k=columns),),
            sides=("lhs",),
        )
        copies_s = gathered_between_tiles_s(work, 16, _V5E)
        assert (copies_s > 2 * 16 * shard_bytes / _V5E.hbm_bytes_per_s) == copied
        assert copied or not copies_s
        assert gathered_between_tiles_s(work, 16, _H100) == 0


def test_rounding_is_counted_once_of_a_whole_shard_and_as_a_part_of_cutting_one() -> None:
    rounding_s_ = rounding_s(1e6, _V5E)
    assert rounding_s_ == pytest.approx(_V5E.rounding * 3e6 / _V5E.hbm_bytes_per_s)
    assert rounding_s(1e6, _H100) == 0
    whole = _work(shard_bytes=1e6, rounds=True)
    assert entering_s(whole, _V5E) == rounding_s_
    both = _work(shard_bytes=1e6, rounds=True, directions=2)
    assert entering_s(both, _V5E) == entering_s(_work(shard_bytes=1e6, directions=2), _V5E) > 0


@pytest.mark.parametrize(
    ("form", "compiled_us"),
    [(Form(directions=2, columns=2, cut="early"), 133), (Form(directions=2, columns=2), 123)],
    ids=str,
)
def test_blocks_of_chunks_that_are_cut_early_are_cut_before_all_hops(form: Form, compiled_us: float) -> None:
    """Of an operand of 24 MB that a v6e has room for; the first was said to take 110 µs."""
    chain = chain_of("dot_psum", 6784, 1792, 640)
    found = price(chain, form, _axis("tpu_v6e", 2, 4))
    assert found.overlapped_s * 1e6 == pytest.approx(compiled_us, rel=0.06)


def test_a_ring_of_sums_holds_few_shards() -> None:
    """As of ``x[504, 2048] @ w[2048, 8448]``, w gathered along K: 26.7 MB as compiled, of sums 17 MB."""
    chain = chain_of("all_gather_dot", 504, 2048, 8448, cut="k", operand="rhs")
    found = price(chain, Form(directions=2, across=True), _axis("tpu_v5p", 2, 2, 2))
    assert 26.7e6 <= found.added_bytes + 2048 * 8448 * 2 <= 28e6
