"""The time of rings: where they pay, where they do not, and what the model charges."""

import dataclasses
import itertools
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model import Hardware, Matmul, RingWork, best, by_name, estimate, matmul_s, names, ring_hop_s

_V5P, _V5E, _H100, _CPU = by_name("tpu_v5p"), by_name("tpu_v5e"), by_name("h100"), by_name("cpu")


def _gather(rows: int, k: int, n: int, axis_size: int) -> RingWork:
    """x[rows/P, k] gathered on its rows, then times w[k, n], bfloat16."""
    shard_bytes = rows // axis_size * k * 2
    return RingWork(
        collective="all_gather",
        axis_size=axis_size,
        shard_bytes=shard_bytes,
        collective_shard_bytes=shard_bytes,
        matmuls=(Matmul(m=rows, k=k, n=n),),
        partials=(Matmul(m=rows // axis_size, k=k, n=n),),
    )


def _scatter(rows: int, k: int, n: int, axis_size: int) -> RingWork:
    """x[rows, k] times w[k, n], then reduced and scattered on rows, bfloat16, additions not fused."""
    shard_bytes = rows // axis_size * n * 2
    return dataclasses.replace(
        _gather(rows, k, n, axis_size),
        collective="reduce_scatter",
        shard_bytes=shard_bytes,
        collective_shard_bytes=shard_bytes,
        accumulates=True,
        accumulate_bytes=3 * shard_bytes,
    )


# Modelled with the TPU compiler's schedules: x[8192,8192]·w[8192,32768], gathered on rows over 16 chips.
@pytest.mark.parametrize(
    ("name", "unrewritten_s", "ring_s"),
    [("tpu_v5e", 2851e-6, 1534e-6), ("tpu_v5p", 1329e-6, 771e-6), ("tpu_v6e", 1054e-6, 749e-6)],
)
def test_the_estimate_agrees_with_compiled_schedules(name: str, unrewritten_s: float, ring_s: float) -> None:
    directions, priced = best(_gather(8192, 8192, 2048, 16), by_name(name))
    assert directions == 2
    assert priced.original_s == pytest.approx(unrewritten_s, rel=0.05)
    assert priced.overlapped_s == pytest.approx(ring_s, rel=0.1)


@pytest.mark.parametrize("work", [_gather(8192, 8192, 2048, 16), _scatter(8192, 2048, 8192, 16)])
def test_a_large_matmul_pays_on_v5p(work: RingWork) -> None:
    assert best(work, _V5P)[1].benefit_s > 0.2 * best(work, _V5P)[1].original_s


@pytest.mark.parametrize("work", [_gather(128, 256, 256, 16), _scatter(128, 256, 256, 16)])
def test_a_tiny_matmul_does_not_pay(work: RingWork) -> None:
    for hardware in (_V5P, _V5E, _H100):
        assert best(work, hardware)[1].benefit_s < 0


def test_an_estimate_adds_up() -> None:
    work = _gather(8192, 8192, 2048, 16)
    priced = estimate(work, _V5P, directions=1)
    assert priced.original_s == priced.dot_s + priced.collective_s
    assert priced.benefit_s == priced.original_s - priced.overlapped_s
    assert priced.dot_s == matmul_s(work.matmuls[0], _V5P)
    assert priced.hops_s == pytest.approx(15 * work.shard_bytes / 9e10)
    assert priced.hop_latency_s == pytest.approx(15e-6)


def test_one_step_of_a_communication_bound_ring_is_exposed() -> None:
    work = _gather(8192, 8192, 256, 16)
    priced = estimate(work, _V5P, directions=1)
    assert priced.overlapped_s == pytest.approx(priced.hops_s + matmul_s(work.partials[0], _V5P))


def test_a_compute_bound_ring_takes_as_long_as_its_partial_dots() -> None:
    priced = estimate(_gather(8192, 8192, 16384, 16), _V5P, directions=2)
    assert priced.overlapped_s == pytest.approx(priced.partials_s)


def test_two_directions_halve_a_hop_only_with_wraparound() -> None:
    assert ring_hop_s(1e7, 16, _V5E, directions=2) == ring_hop_s(1e7, 16, _V5E, directions=1) / 2
    assert ring_hop_s(1e7, 8, _V5E, directions=2) == ring_hop_s(1e7, 8, _V5E, directions=1)
    assert ring_hop_s(1e7, 8, _H100, directions=2) == pytest.approx(ring_hop_s(1e7, 8, _H100, directions=1))


def test_behind_a_switch_two_directions_pay_the_latency_twice() -> None:
    assert ring_hop_s(1, 8, _H100, directions=2) == 2 * _H100.hop_latency_s
    assert best(_gather(8192, 8192, 2048, 8), _H100)[0] == 1


def test_without_wraparound_the_last_hop_crosses_the_whole_line() -> None:
    assert ring_hop_s(1, 8, _V5E, directions=1) == pytest.approx(7e-6)
    assert ring_hop_s(1, 16, _V5E, directions=1) == pytest.approx(1e-6)
    assert best(_gather(8192, 8192, 2048, 8), _V5E)[0] == 1


def test_a_unidirectional_scatter_ring_waits_for_its_additions() -> None:
    work = _scatter(8192, 512, 8192, 16)
    fused = dataclasses.replace(work, accumulates=False)
    add_s = work.accumulate_bytes / _V5P.hbm_bytes_per_s
    waiting = (
        estimate(work, _V5P, directions=1).overlapped_s - estimate(fused, _V5P, directions=1).overlapped_s
    )
    assert waiting == pytest.approx(15 * add_s)
    both_ways = (
        estimate(work, _V5P, directions=2).overlapped_s - estimate(fused, _V5P, directions=2).overlapped_s
    )
    assert both_ways < waiting / 2


def test_handing_out_the_gathered_array_costs_its_copies() -> None:
    work = _gather(8192, 8192, 16384, 16)
    handing_out = dataclasses.replace(work, hands_out_gathered=True)
    copies_s = 16 * 2 * work.shard_bytes / _V5P.hbm_bytes_per_s
    plain, copied = (estimate(each, _V5P, directions=1).overlapped_s for each in (work, handing_out))
    assert copied - plain == pytest.approx(copies_s)


def test_halves_given_are_used_in_place_of_halves_along_m() -> None:
    work = _gather(8192, 8192, 16384, 16)
    same = dataclasses.replace(work, half_partials=tuple(partial.halved() for partial in work.partials))
    slower = dataclasses.replace(work, half_partials=work.partials)
    assert estimate(same, _V5P, directions=2) == estimate(work, _V5P, directions=2)
    assert estimate(slower, _V5P, directions=2).partials_s > estimate(work, _V5P, directions=2).partials_s


def test_an_operand_too_large_for_the_chip_is_read_in_every_step() -> None:
    work = _gather(1024, 8192, 2048, 16)
    roomy, cramped = (dataclasses.replace(_V5P, on_chip_bytes=size) for size in (1e9, 1e6))
    rereading = estimate(work, cramped, directions=1).partials_s
    assert rereading == pytest.approx(16 * matmul_s(work.partials[0], cramped))
    assert estimate(work, roomy, directions=1).partials_s < rereading


def test_a_ring_may_send_a_narrower_dtype_than_the_collective_did() -> None:
    work = _gather(8192, 8192, 2048, 16)
    wide = dataclasses.replace(work, collective_shard_bytes=2 * work.shard_bytes)
    plain, widened = (estimate(each, _V5P, directions=2) for each in (work, wide))
    assert widened.overlapped_s == plain.overlapped_s
    assert widened.collective_s == pytest.approx(2 * plain.collective_s)


def test_an_axis_of_one_device_gains_nothing() -> None:
    for name in names():
        assert best(_gather(1024, 1024, 1024, 1), by_name(name))[1].benefit_s == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"axis_size": 0},
        {"shard_bytes": -1},
        {"shard_bytes": float("nan")},
        {"collective": "psum"},
        {"partials": ()},
    ],
)
def test_impossible_work_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(_gather(1024, 1024, 1024, 4), **bad)


_WORKS = st.builds(
    lambda make, rows, k, n, axis_size: make(rows * axis_size * 2, k, n, axis_size),
    st.sampled_from([_gather, _scatter]),
    st.integers(1, 4096),
    st.integers(1, 1 << 15),
    st.integers(1, 1 << 15),
    st.integers(2, 32),
)


@given(_WORKS, st.booleans())
def test_nothing_pays_on_cpu(work: RingWork, wide: bool) -> None:
    if wide:
        work = dataclasses.replace(work, collective_shard_bytes=2 * work.shard_bytes)
    assert best(work, _CPU)[1].benefit_s <= 0


@given(_WORKS, st.sampled_from([by_name(name) for name in names()]), st.sampled_from([1, 2]))
def test_a_ring_never_beats_the_dots_or_its_hops(
    work: RingWork, hardware: Hardware, directions: Literal[1, 2]
) -> None:
    priced = estimate(work, hardware, directions=directions)
    slack = 1 - 1e-9
    assert priced.overlapped_s >= priced.dot_s * slack
    assert priced.overlapped_s >= max(priced.partials_s, priced.hops_s) * slack
    assert priced.hops_s >= priced.hop_latency_s * slack


@given(_WORKS, st.sampled_from([by_name(name) for name in names()]), st.floats(1, 10))
def test_more_bytes_on_the_wire_are_never_faster(work: RingWork, hardware: Hardware, factor: float) -> None:
    heavier = dataclasses.replace(work, shard_bytes=work.shard_bytes * factor)
    assert best(heavier, hardware)[1].overlapped_s >= best(work, hardware)[1].overlapped_s


def test_the_benefit_grows_from_loss_to_gain_with_the_number_of_rows() -> None:
    signs = [
        best(_gather(rows, 8192, 2048, 16), _V5P)[1].benefit_s > 0 for rows in (32, 128, 512, 2048, 8192)
    ]
    assert not signs[0] and signs[-1]
    assert sum(before != after for before, after in itertools.pairwise(signs)) == 1
