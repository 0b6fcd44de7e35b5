"""Collectives over groups of devices, against the scaling book's numbers and links counted by hand."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model import Hardware, by_name, collectives, group_collectives
from cost_model.group_collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s
from cost_model.topology import Topology

_V4, _V5E, _V5P, _7X, _H100 = map(by_name, ("tpu_v4", "tpu_v5e", "tpu_v5p", "tpu_7x", "h100"))
_COLLECTIVES = (all_gather_s, reduce_scatter_s, all_reduce_s, all_to_all_s)

Groups = tuple[tuple[int, ...], ...]


def everyone(size: int) -> Groups:
    return (tuple(range(size)),)


def along(shape: tuple[int, ...], dims: tuple[int, ...]) -> Groups:
    """Groups of a torus's devices that differ in these dimensions only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in range(math.prod(shape)):
        coords: list[int] = []
        rest = device
        for length in reversed(shape):
            rest, at = divmod(rest, length)
            coords.insert(0, at)
        groups.setdefault(tuple(c for d, c in enumerate(coords) if d not in dims), []).append(device)
    return tuple(map(tuple, groups.values()))


def links_in_use(seconds: float, full_bytes: float, size: int, hardware: Hardware) -> float:
    """How many links a chip would receive its (P-1)/P through, at once."""
    return full_bytes * (size - 1) / size / seconds / hardware.link_bytes_per_s


def test_v5e_axis_of_4_gathers_along_a_line() -> None:
    shape, groups = (8, 4), along((8, 4), (1,))
    line = Topology.torus(shape, _V5E)
    assert all_gather_s(2048 * 8192 * 2, groups, line) == pytest.approx(560e-6, rel=0.005)
    ring = Topology.torus(shape, _V5E, wraparound=(False, True))
    assert all_gather_s(34e6, groups, ring, book=True) == pytest.approx(377e-6, rel=0.005)
    assert all_gather_s(256 * 256 * 2, groups, line) == pytest.approx(3e-6)


def test_v4_cube_gathers_over_one_axis_and_over_two() -> None:
    cube = Topology.torus((4, 4, 4), _V4)
    x, xy = along((4, 4, 4), (0,)), along((4, 4, 4), (0, 1))
    assert all_gather_s(1024 * 4096 // 4 * 2, x, cube, book=True) == pytest.approx(23e-6, rel=0.02)
    assert all_gather_s(1024 * 4096 * 2, xy, cube, book=True) == pytest.approx(46e-6, rel=0.02)
    assert all_reduce_s(1024 // 4 * 4096 // 4 * 2, x, cube, book=True) == pytest.approx(11.6e-6, rel=0.01)
    assert all_gather_s(128 * 2, x, cube) == pytest.approx(2e-6)


def test_only_what_a_chip_lacks_has_to_arrive() -> None:
    ring = Topology.axis(4, _V5P)
    assert all_gather_s(1.8e9, everyone(4), ring) == pytest.approx(0.75e-2)
    assert all_gather_s(1.8e9, everyone(4), ring, book=True) == pytest.approx(1e-2)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16, 32])
@pytest.mark.parametrize("hardware", [_V4, _V5E, _V5P, _H100], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("full_bytes", [1e2, 1e6, 1e9])
@pytest.mark.parametrize("book", [False, True])
def test_one_axis_alone_agrees_with_the_formulas_for_axes(
    size: int, hardware: Hardware, full_bytes: float, book: bool
) -> None:
    alone = Topology.switch if hardware.network == "switch" else Topology.axis
    groups, topology = everyone(size), alone(size, hardware)
    expected = collectives.all_gather_s(full_bytes, size, hardware, book=book)
    assert all_gather_s(full_bytes, groups, topology, book=book) == pytest.approx(expected)
    assert reduce_scatter_s(full_bytes, groups, topology, book=book) == pytest.approx(expected)
    expected = collectives.all_reduce_s(full_bytes, size, hardware, book=book)
    assert all_reduce_s(full_bytes, groups, topology, book=book) == pytest.approx(expected)
    exchange_s = collectives.all_to_all_s(full_bytes, size, hardware)
    assert all_to_all_s(full_bytes, groups, topology) == pytest.approx(exchange_s)


def test_an_all_to_all_on_a_ring_takes_a_quarter_of_the_gather() -> None:
    ring = Topology.axis(8, _V4)
    quarter = all_gather_s(64e6, everyone(8), ring, book=True) / 4
    assert all_to_all_s(64e6, everyone(8), ring) == pytest.approx(quarter)


@pytest.mark.parametrize(
    ("hardware", "shape", "links"),
    [
        (_V5E, (2, 4), 2),
        (_V5E, (4, 4), 2),
        (_V5E, (16, 16), 4),
        (_V5E, (8, 16), 3),
        (_V5P, (2, 2, 4), 4),
        (_V5P, (2, 2, 2), 3),
        (_V5P, (4, 4, 4), 6),
    ],
)
def test_a_slice_gathers_over_all_links_of_its_least_linked_chip(
    hardware: Hardware, shape: tuple[int, ...], links: int
) -> None:
    size = math.prod(shape)
    seconds = all_gather_s(1e9, everyone(size), Topology.torus(shape, hardware))
    assert links_in_use(seconds, 1e9, size, hardware) == pytest.approx(links)


def test_planes_of_a_cube_do_not_disturb_each_other() -> None:
    cube = Topology.torus((4, 4, 4), _V5P)
    for dims in ((0, 1), (1, 2), (0, 2)):
        seconds = all_gather_s(1e9, along((4, 4, 4), dims), cube)
        assert links_in_use(seconds, 1e9, 16, _V5P) == pytest.approx(4)


def test_groups_that_interleave_share_their_links() -> None:
    ring = Topology.axis(8, _V4)
    alone = all_gather_s(1e9, ((0, 2, 4, 6),), ring)
    both = all_gather_s(1e9, ((0, 2, 4, 6), (1, 3, 5, 7)), ring)
    assert links_in_use(alone, 1e9, 4, _V4) == pytest.approx(2)
    assert both == pytest.approx(2 * alone)


def test_half_of_a_ring_is_a_line() -> None:
    ring = Topology.axis(16, _V5E)
    halves = (tuple(range(8)), tuple(range(8, 16)))
    assert links_in_use(all_gather_s(1e9, halves, ring), 1e9, 8, _V5E) == pytest.approx(1)
    assert all_gather_s(8, halves, ring) == pytest.approx(7e-6)


def test_groups_of_any_form_share_the_links_between_them() -> None:
    grid = Topology.torus((2, 4), _V5E)
    # Each end of the grid holds a device of both groups: two links for 3/4 of V twice.
    mixed = ((0, 1, 2, 7), (4, 5, 6, 3))
    assert all_gather_s(4.5e9, mixed, grid) == pytest.approx(2 * 0.75 * 4.5e9 / 2 / 4.5e10)


def test_cores_of_a_chip_receive_over_its_links_together() -> None:
    shape = (4, 4, 4)
    topology = Topology.torus(shape, _7X, cores=2)
    whole = all_gather_s(1e9, everyone(128), topology)
    assert whole == pytest.approx(1e9 * 126 / 128 / (6 * 9e10))
    apart = all_gather_s(1e9, (tuple(range(0, 128, 2)), tuple(range(1, 128, 2))), topology)
    assert links_in_use(apart, 1e9, 64, _7X) == pytest.approx(3)
    pairs = tuple((2 * chip, 2 * chip + 1) for chip in range(64))
    assert all_gather_s(1e9, pairs, topology) == pytest.approx(0.5e9 / _7X.hbm_bytes_per_s)


def test_across_hosts_the_network_between_them_decides() -> None:
    class Gpu:
        def __init__(self, host: int) -> None:
            self.process_index = host

    topology = Topology.from_devices([Gpu(i // 8) for i in range(16)], _H100)
    within = (tuple(range(8)), tuple(range(8, 16)))
    assert all_gather_s(1e9, within, topology) == pytest.approx(1e9 * 7 / 8 / 4.5e11)
    assert all_gather_s(1e9, everyone(16), topology) == pytest.approx(
        max(1e9 * 15 / 16 / (4.5e11 + 5e10), 0.5e9 / (8 * 5e10))
    )
    across = tuple((i, i + 8) for i in range(8))
    assert all_gather_s(1e9, across, topology) == pytest.approx(0.5e9 / 5e10)
    assert all_gather_s(8, across, topology) == pytest.approx(1e-5)
    assert all_to_all_s(1e9, everyone(16), topology) == pytest.approx(1e9 / 32 / 5e10)


def test_a_small_all_reduce_pays_the_latency_once() -> None:
    topology = Topology.axis(8, _H100)
    assert all_reduce_s(8, everyone(8), topology) == _H100.hop_latency_s
    assert all_reduce_s(1e9, everyone(8), topology) == 2 * all_gather_s(1e9, everyone(8), topology)


@pytest.mark.parametrize("collective", _COLLECTIVES)
def test_groups_of_one_communicate_nothing(collective: Callable[..., float]) -> None:
    assert collective(1e9, ((0,), (1,)), Topology.axis(2, _V4)) == 0


@pytest.mark.parametrize("collective", _COLLECTIVES)
@pytest.mark.parametrize(
    ("full_bytes", "groups"),
    [
        (-1.0, ((0, 1),)),
        (math.nan, ((0, 1),)),
        (1.0, ((),)),
        (1.0, ((0, 0),)),
        (1.0, ((0, 1), (1, 2))),
        (1.0, ((0, 9),)),
    ],
)
def test_impossible_groups_and_bytes_are_refused(
    collective: Callable[..., float], full_bytes: float, groups: Groups
) -> None:
    with pytest.raises(ValueError):
        collective(full_bytes, groups, Topology.axis(4, _V4))


def test_a_pods_cuts_are_found_once_however_fast_its_links_are(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = along((4, 4), (0,))
    before_s = all_gather_s(1e9, groups, Topology.torus((4, 4), _V5E))
    faster = dataclasses.replace(_V5E, link_bytes_per_s=2 * _V5E.link_bytes_per_s)
    monkeypatch.setattr(group_collectives, "_boxes", None)
    after_s = all_gather_s(1e9, groups, Topology.torus((4, 4), faster))
    assert after_s == pytest.approx(before_s / 2)


@pytest.mark.parametrize("wraps", [True, False], ids=["torus", "line in x"])
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("axis", range(3))
def test_boxes_that_are_the_same_again_change_nothing(
    axis: int, cores: int, wraps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (8, 6, 3)
    topology = Topology.torus(shape, _V5P, cores=cores, wraparound=(wraps, True, True))
    mesh = np.arange(topology.size).reshape(4, 12, -1)
    groups = np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis]).tolist()

    def figures() -> list[float]:
        group_collectives._network.cache_clear()
        group_collectives._cuts.cache_clear()
        return [collective(1e9, groups, topology) for collective in _COLLECTIVES]

    found = figures()
    asked = []

    def none_is(*_: Any) -> list[int]:
        asked.append(shape)
        return list(shape)

    monkeypatch.setattr(group_collectives, "_repeats", none_is)
    assert figures() == pytest.approx(found, rel=1e-12)
    assert asked


def every_other(length: int, count: int, stride: int) -> Groups:
    """Groups along a dimension of so many devices each, that stand a stride apart."""
    return tuple(
        tuple(block + first + stride * at for at in range(count))
        for block in range(0, length, count * stride)
        for first in range(stride)
    )


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("length", [8, 12, 16, 24])
def test_no_run_of_chips_is_a_tighter_cut(length: int, wraps: bool) -> None:
    topology = Topology.torus((length,), _V5P, wraparound=(wraps,))
    for count in (n for n in range(2, length + 1) if length % n == 0):
        for stride in (s for s in range(1, length // count + 1) if length // count % s == 0):
            groups = every_other(length, count, stride)
            gathered_s = exchanged_s = 0.0
            for start, run in itertools.product(range(length), range(1, length)):
                ends = 2 if wraps else (start > 0) + (start + run < length)
                if not ends or not (wraps or start + run <= length):
                    continue
                inside = {(start + at) % length for at in range(run)}
                held = [len(inside.intersection(group)) for group in groups]
                speed = ends * _V5P.axis_bytes_per_s
                gathered_s = max(gathered_s, sum((count - n) / count for n in held if n) / speed)
                exchanged_s = max(exchanged_s, sum(n * (count - n) / count**2 for n in held) / speed)
            assert all_gather_s(1e9, groups, topology) == pytest.approx(1e9 * gathered_s)
            assert all_to_all_s(1e9, groups, topology) == pytest.approx(1e9 * exchanged_s)


def test_strided_parts_of_two_dimensions_share_the_links_of_what_they_span() -> None:
    """4 of 16 along both dimensions, two apart: into 4 x 4 chips lead 16 links."""
    topology = Topology.torus((16, 16), by_name("tpu_v6e"))
    rows = every_other(16, 4, 2)
    groups = tuple(tuple(16 * a + b for a in one for b in other) for one in rows for other in rows)
    inside = {16 * a + b for a in range(6, 10) for b in range(6, 10)}
    lacking = sum(16 - n for group in groups if (n := len(inside.intersection(group)))) / 16
    least_s = 1e9 * lacking / (16 * topology.hardware.axis_bytes_per_s)
    assert all_gather_s(1e9, groups, topology) >= least_s * (1 - 1e-9)


def test_groups_repeat_along_a_dimension_that_wraps_around() -> None:
    def repeats(groups: Groups, topology: Topology) -> list[int]:
        return group_collectives._repeats(groups, topology.places, topology.shape, topology.wraparound)

    torus = Topology.torus((8, 4), _V5P, wraparound=(True, True))
    assert repeats(along((8, 4), (0,)), torus) == [1, 1]
    quarters = tuple(tuple(range(start, start + 8)) for start in range(0, 32, 8))  # two rows of chips each
    assert repeats(quarters, torus) == [2, 1]
    assert repeats(((0, 1, 2),), torus) == [8, 4]
    line = Topology.torus((8, 4), _V5P, wraparound=(False, True))
    assert repeats(along((8, 4), (0,)), line) == [8, 1]


@given(st.permutations(range(16)), st.sampled_from([2, 4, 8, 16]), st.sampled_from([(4, 4), (2, 8), (16,)]))
def test_a_gather_is_never_slower_than_a_ring_of_hops(
    devices: list[int], size: int, shape: tuple[int, ...]
) -> None:
    topology = Topology.torus(shape, _V5E)
    groups = tuple(tuple(devices[i : i + size]) for i in range(0, 16, size))
    shard_bytes = 45e6
    hops = [(group[i], group[(i + 1) % size]) for group in groups for i in range(size)]
    back = [(target, source) for source, target in hops]
    ring_s = (size - 1) * min(
        topology.permute_s(hops, shard_bytes), topology.permute_s(hops + back, shard_bytes / 2)
    )
    assert all_gather_s(size * shard_bytes, groups, topology) <= ring_s * (1 + 1e-9)
