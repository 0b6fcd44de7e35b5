"""Tests of exchanges in place of an all_to_all."""

import dataclasses

import pytest

from cost_model import Matmul, all_to_all_s, by_name, exchange_estimate
from cost_model.exchange import exchange_s

V5P = by_name("tpu_v5p")
H100 = by_name("h100")


def priced(hardware_name: str, rows: int, axis_size: int = 8) -> float:
    whole = Matmul(m=rows, k=4096, n=8192)
    part = dataclasses.replace(whole, m=rows // axis_size)
    return exchange_estimate(
        axis_size=axis_size,
        block_bytes=part.m * whole.k * 2,
        matmuls=(whole,),
        partials=(part,),
        hardware=by_name(hardware_name),
    ).benefit_s


def test_a_block_goes_the_shorter_way_round_and_shares_its_links() -> None:
    block_bytes = 9e7  # 1 ms on one link of v5p
    times = [exchange_s(block_bytes, 8, V5P, distance=d) for d in range(8)]
    assert times == pytest.approx([0, 1e-3, 2e-3, 3e-3, 4e-3, 3e-3, 2e-3, 1e-3])


def test_behind_a_switch_every_distance_is_one_hop() -> None:
    times = {exchange_s(1e8, 8, H100, distance=d) for d in range(1, 8)}
    assert len(times) == 1


def test_small_blocks_take_the_latency_of_the_way() -> None:
    assert exchange_s(0, 8, V5P, distance=3) == pytest.approx(3 * V5P.hop_latency_s)


def test_an_exchange_pays_behind_a_switch_when_the_dots_are_long_enough() -> None:
    assert priced("h100", 65536) > 0 > priced("h100", 64)


def test_nothing_pays_on_cpu() -> None:
    assert priced("cpu", 65536) <= 0


def test_the_original_is_the_all_to_all_and_the_dots() -> None:
    whole = Matmul(m=1024, k=1024, n=1024)
    estimate = exchange_estimate(
        axis_size=4, block_bytes=1e6, matmuls=(whole,), partials=(whole,), hardware=V5P
    )
    assert estimate.collective_s == all_to_all_s(16e6, 4, V5P)
    assert estimate.overlapped_s >= max(estimate.partials_s, estimate.hops_s)


def test_estimates_add_up_part_by_part() -> None:
    whole = Matmul(m=1024, k=1024, n=1024)
    one = exchange_estimate(axis_size=4, block_bytes=1e6, matmuls=(whole,), partials=(whole,), hardware=V5P)
    two = one + one
    assert two.benefit_s == pytest.approx(2 * one.benefit_s)
    assert two.original_s == pytest.approx(2 * one.original_s)


def test_an_axis_without_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="axis_size"):
        exchange_estimate(axis_size=0, block_bytes=1, matmuls=(), partials=(), hardware=V5P)
