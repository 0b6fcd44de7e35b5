"""The time of collectives, against the scaling book's worked numbers."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model import (
    Hardware,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    by_name,
    hop_s,
    names,
    reduce_scatter_s,
)

_V4, _V5E, _H100 = by_name("tpu_v4"), by_name("tpu_v5e"), by_name("h100")
_V5E_RING = dataclasses.replace(_V5E, wraparound_multiple=4)
_COLLECTIVES = (all_gather_s, reduce_scatter_s, all_reduce_s, all_to_all_s)


def test_v5e_axis_of_4_gathers_along_a_line() -> None:
    assert all_gather_s(2048 * 8192 * 2, 4, _V5E) == pytest.approx(560e-6, rel=0.005)


def test_the_same_axis_with_wraparound_would_gather_both_ways() -> None:
    assert all_gather_s(2048 * 8192 * 2, 4, _V5E_RING, book=True) == pytest.approx(373e-6, rel=0.005)
    assert all_gather_s(34e6, 4, _V5E_RING, book=True) == pytest.approx(377e-6, rel=0.005)


def test_small_gathers_are_bound_by_the_latency_of_their_hops() -> None:
    assert all_gather_s(256 * 256 * 2, 4, _V5E) == pytest.approx(3e-6)
    assert all_gather_s(128 * 2, 4, _V4) == pytest.approx(2e-6)


def test_v4_ring_gathers_at_the_speed_of_both_directions() -> None:
    assert all_gather_s(1024 * 4096 // 4 * 2, 4, _V4, book=True) == pytest.approx(23e-6, rel=0.02)


def test_only_what_a_device_lacks_has_to_arrive() -> None:
    assert all_gather_s(1e9, 4, _V4) == pytest.approx(0.75 * all_gather_s(1e9, 4, _V4, book=True))
    assert all_gather_s(1e9, 4, _V5E) == all_gather_s(1e9, 4, _V5E, book=True)
    assert all_reduce_s(1e9, 4, _V4) == pytest.approx(2 * all_gather_s(1e9, 4, _V4))


def test_all_reduce_is_two_gathers() -> None:
    assert all_reduce_s(1024 // 4 * 4096 // 4 * 2, 4, _V4, book=True) == pytest.approx(11.6e-6, rel=0.01)


def test_latency_rules_below_45_kilobytes() -> None:
    assert hop_s(44e3, _V5E) == _V5E.hop_latency_s
    assert hop_s(46e3, _V5E) > _V5E.hop_latency_s


def test_distance_multiplies_latency_but_not_bytes() -> None:
    assert hop_s(1, _V5E, distance=3) == pytest.approx(3e-6)
    assert hop_s(45e6, _V5E, distance=3) == hop_s(45e6, _V5E) == pytest.approx(1e-3)
    assert hop_s(1, _H100, distance=7) == hop_s(1, _H100)
    assert hop_s(1e6, _V5E, distance=0) == 0


def test_an_all_to_all_on_a_ring_takes_a_quarter_of_the_gather() -> None:
    assert all_to_all_s(64e6, 8, _V4) == pytest.approx(all_gather_s(64e6, 8, _V4, book=True) / 4)


def test_an_all_to_all_on_a_line_of_two_swaps_one_block() -> None:
    assert all_to_all_s(4e6, 2, _V5E) == pytest.approx(1e6 / 4.5e10)


def test_behind_a_switch_a_device_receives_all_other_shards_through_its_own_links() -> None:
    assert all_gather_s(80e6, 8, _H100) == pytest.approx(70e6 / 4.5e11)
    assert all_to_all_s(80e6, 8, _H100) == pytest.approx(70e6 / 8 / 4.5e11)
    assert all_gather_s(8, 8, _H100) == _H100.hop_latency_s


@pytest.mark.parametrize("collective", _COLLECTIVES)
@pytest.mark.parametrize("name", names())
def test_an_axis_of_one_device_communicates_nothing(
    collective: Callable[[float, int, Hardware], float], name: str
) -> None:
    assert collective(1e9, 1, by_name(name)) == 0


@pytest.mark.parametrize("collective", _COLLECTIVES)
@pytest.mark.parametrize(("size", "axis_size"), [(-1.0, 4), (math.nan, 4), (math.inf, 4), (1.0, 0)])
def test_impossible_sizes_are_refused(
    collective: Callable[[float, int, Hardware], float], size: float, axis_size: int
) -> None:
    with pytest.raises(ValueError):
        collective(size, axis_size, _V4)


@pytest.mark.parametrize("collective", _COLLECTIVES)
def test_a_size_that_is_no_whole_number_and_a_name_of_hardware_are_refused(collective: Any) -> None:
    with pytest.raises(TypeError, match=r"axis_size must be a whole number, got 2\.5"):
        collective(1e6, 2.5, _V4)
    with pytest.raises(TypeError, match=r"hardware must be a Hardware, .*, got 'tpu_v5p'"):
        collective(1e6, 4, "tpu_v5p")


def test_a_distance_is_a_whole_number_and_not_negative() -> None:
    with pytest.raises(ValueError, match="distance"):
        hop_s(1, _V4, distance=-1)
    with pytest.raises(TypeError, match="distance must be a whole number, got nan"):
        hop_s(1, _V4, distance=math.nan)  # type: ignore[arg-type]


@given(
    st.sampled_from(_COLLECTIVES),
    st.sampled_from([by_name(name) for name in names()]),
    st.integers(2, 64),
    st.floats(0, 1e12),
    st.floats(1, 10),
)
def test_more_bytes_are_never_faster(
    collective: Callable[[float, int, Hardware], float],
    hardware: Hardware,
    axis_size: int,
    size: float,
    factor: float,
) -> None:
    shorter = collective(size, axis_size, hardware)
    assert 0 < shorter <= collective(size * factor, axis_size, hardware)


@given(st.integers(2, 64), st.floats(0, 1e12))
def test_a_line_is_never_faster_than_a_ring(axis_size: int, size: float) -> None:
    ring = dataclasses.replace(_V5E, wraparound_multiple=1)
    line = dataclasses.replace(_V5E, wraparound_multiple=0)
    for collective in _COLLECTIVES:
        assert collective(size, axis_size, line) >= collective(size, axis_size, ring) * (1 - 1e-9)
