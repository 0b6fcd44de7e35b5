"""Tests of exchanges in place of an all_to_all."""

import dataclasses
from unittest import mock

import pytest

from cost_model import Axis, Hardware, Matmul, Topology, all_to_all_s, by_name, exchange_estimate, matmul_s

V5P, H100 = by_name("tpu_v5p"), by_name("h100")
THOUSAND = Matmul(m=1024, k=1024, n=1024)


def priced(hardware: Hardware, rows: int, axis_size: int = 8) -> float:
    whole = Matmul(m=rows, k=4096, n=8192)
    part = dataclasses.replace(whole, m=rows // axis_size)
    return exchange_estimate(
        block_bytes=part.m * whole.k * 2,
        matmuls=(whole,),
        partials=(part,),
        axis=Axis(hardware, axis_size),
    ).benefit_s


def test_an_exchange_pays_behind_a_switch_when_the_dots_are_long_enough() -> None:
    assert priced(H100, 65536) > 0 > priced(H100, 64)


def test_nothing_pays_on_cpu() -> None:
    assert priced(by_name("cpu"), 65536) <= 0


def test_each_exchange_runs_beside_the_dots_of_a_step() -> None:
    part = matmul_s(THOUSAND, V5P)
    # One millisecond per link: 1, 2, 1 on a ring of four.
    long = exchange_estimate(block_bytes=9e7, matmuls=(THOUSAND,), partials=(THOUSAND,), axis=Axis(V5P, 4))
    assert part < 1e-3
    assert long.hops_s == pytest.approx(4e-3)
    assert long.hop_latency_s == pytest.approx(4e-6)
    assert long.partials_s == pytest.approx(4 * part)
    assert long.overlapped_s == pytest.approx(part + 4e-3)
    short = exchange_estimate(block_bytes=1, matmuls=(THOUSAND,), partials=(THOUSAND,), axis=Axis(V5P, 4))
    assert short.overlapped_s == pytest.approx(4 * part)


def test_each_exchange_stops_the_device() -> None:
    stops = dataclasses.replace(V5P, async_overhead_s=1e-3)
    short, stopped = (
        exchange_estimate(block_bytes=1, matmuls=(THOUSAND,), partials=(THOUSAND,), axis=Axis(each, 4))
        for each in (V5P, stops)
    )
    assert stopped.overlapped_s - short.overlapped_s == pytest.approx(3e-3)
    assert stopped.partials_s - short.partials_s == pytest.approx(3e-3)


def test_exchanges_and_dots_take_turns_where_nothing_overlaps() -> None:
    alone = dataclasses.replace(V5P, overlaps=False)
    turns = exchange_estimate(block_bytes=9e7, matmuls=(THOUSAND,), partials=(THOUSAND,), axis=Axis(alone, 4))
    assert turns.overlapped_s == pytest.approx(turns.partials_s + turns.hops_s)


def test_the_original_is_the_all_to_all_and_the_dots() -> None:
    estimate = exchange_estimate(
        block_bytes=1e6, matmuls=(THOUSAND,), partials=(THOUSAND,), axis=Axis(V5P, 4)
    )
    assert estimate.collective_s == all_to_all_s(16e6, 4, V5P)
    assert estimate.dot_s == matmul_s(THOUSAND, V5P)
    assert estimate.overlapped_s >= max(estimate.partials_s, estimate.hops_s)


def test_blocks_of_known_devices_go_over_their_links() -> None:
    # On a 2x4 grid counted row by row, device 3 and device 4 are not neighbours.
    grid = Axis.of(Topology.torus((2, 4), by_name("tpu_v5e")), (tuple(range(8)),))
    line = Axis(by_name("tpu_v5e"), 8)
    near, far = (
        exchange_estimate(block_bytes=1e7, matmuls=(), partials=(), axis=axis).hops_s for axis in (grid, line)
    )
    assert 0 < near < far


def test_each_distance_is_looked_at_once() -> None:
    axis = Axis.of(Topology.torus((2, 3), V5P), (tuple(range(6)),))
    with mock.patch.object(
        Topology, "permute_cost", autospec=True, side_effect=Topology.permute_cost
    ) as cost:
        for block_bytes in (1e6, 2e6):
            exchange_estimate(block_bytes=block_bytes, matmuls=(), partials=(), axis=axis)
    assert cost.call_count == 5


def test_estimates_add_up_part_by_part() -> None:
    one = exchange_estimate(block_bytes=1e6, matmuls=(THOUSAND,), partials=(THOUSAND,), axis=Axis(V5P, 4))
    two = one + one
    assert two.benefit_s == pytest.approx(2 * one.benefit_s)
    assert two.original_s == pytest.approx(2 * one.original_s)


def test_an_axis_without_devices_and_negative_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="axis_size"):
        exchange_estimate(block_bytes=1, matmuls=(), partials=(), axis=Axis(V5P, 0))
    with pytest.raises(ValueError, match="bytes"):
        exchange_estimate(block_bytes=-1, matmuls=(), partials=(), axis=Axis(V5P, 4))
    with pytest.raises(ValueError, match="bytes"):
        Axis.of(Topology.axis(4, V5P), (tuple(range(4)),)).permute_s(-1, 1)
