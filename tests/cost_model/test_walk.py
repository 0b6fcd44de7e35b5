"""Walks through boxes of lengths 2, against links counted hop by hop and shards followed one by one."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model import Axis, Topology, Walk, by_name, ring_orders, ring_step_s, ring_walks, walk_step_s
from cost_model.walk import gray_walks

_V4, _V5E, _V5P, _7X, _H100 = map(by_name, ("tpu_v4", "tpu_v5e", "tpu_v5p", "tpu_7x", "h100"))

CUBES = [
    Topology.torus((2, 2, 2), _V5P),
    Topology.torus((2, 2, 2), _7X, cores=2),
    Topology.torus((2, 2, 2), _V4, cores=2),
]


def followed(walk: Walk) -> list[list[int]]:
    """Per step and device, whose shard it has: every hop is done, one after the other."""
    size = len(walk.order)
    found = [list(range(size))]
    for step in range(size - 1):
        arrived = [-1] * size
        for source, target in walk.hop(step, step + 1):
            arrived[target] = found[-1][source]
        found.append(arrived)
    return found


def load(
    topology: Topology, groups: Sequence[Sequence[int]], walks: Sequence[Walk], step: int
) -> Counter[str]:
    """How many shards cross each link between chips in a step of all walks."""
    return Counter(
        str(link)
        for walk in walks
        for source, target in walk.hop(step, step + 1)
        for group in groups
        for link in topology.route(group[source], group[target])
        if link.kind != "chip"
    )


@pytest.mark.parametrize("topology", CUBES, ids=str)
def test_every_hop_of_three_walks_uses_every_link_of_a_cube_once(topology: Topology) -> None:
    groups = [range(topology.size)]
    walks = ring_walks(topology, groups)
    assert len(walks) == 3
    for step in range(topology.size - 1):
        # Eight chips, three links each way.
        assert sorted(load(topology, groups, walks, step).values()) == [1] * 24


@given(st.permutations(range(16)), st.sampled_from([(1, 4), (2, 3), (4, 2), (1, 3)]))
def test_every_shard_reaches_every_device_once(order: list[int], box: tuple[int, int]) -> None:
    cores, dimensions = box
    size = cores << dimensions
    for walk in gray_walks(tuple(index for index in order if index < size), dimensions):
        steps = followed(walk)
        assert [tuple(step) for step in steps] == [walk.owners(distance) for distance in range(size)]
        assert walk.owners(-1) == walk.owners(size - 1)
        for device in range(size):
            assert {step[device] for step in steps} == set(range(size))


@pytest.mark.parametrize("topology", CUBES, ids=str)
def test_sums_can_go_every_walk_backwards(topology: Topology) -> None:
    for walk in ring_walks(topology, [range(topology.size)]):
        for step in range(topology.size - 1):
            back = {(target, source) for source, target in walk.hop(step, step + 1)}
            assert set(walk.hop(step + 1, step)) == back


@pytest.mark.parametrize("topology", CUBES, ids=str)
def test_walks_are_one_and_a_half_times_as_fast_as_one_ring_both_ways(topology: Topology) -> None:
    groups = [range(topology.size)]
    walks, orders = ring_walks(topology, groups), ring_orders(topology, groups)
    assert len(orders) == 1
    step_s = walk_step_s(walks, 1.8e9, topology, groups)
    assert step_s == pytest.approx(1.8e9 / 3 / topology.hardware.axis_bytes_per_s)
    assert ring_step_s(orders, 1.8e9, topology, groups) == pytest.approx(1.5 * step_s)
    assert walk_step_s(walks, 8, topology, groups) == pytest.approx(topology.hardware.hop_latency_s)


def test_walks_follow_the_chips_however_the_mesh_counts_them() -> None:
    devices = [5, 0, 3, 6, 1, 7, 2, 4]
    topology = Topology.torus((2, 2, 2), _V5P)
    walks = ring_walks(topology, [devices])
    assert len(walks) == 3
    for step in range(7):
        assert set(load(topology, [devices], walks, step).values()) == {1}


def test_a_cube_of_every_second_chip_has_walks_too() -> None:
    topology = Topology.torus((4, 4, 4), _V5P)
    corners = [device for device in range(64) if not {device // 16, device // 4 % 4, device % 4} & {1, 3}]
    walks = ring_walks(topology, [corners])
    assert len(walks) == 3
    assert max(max(load(topology, [corners], walks, step).values()) for step in range(7)) == 1


@pytest.mark.parametrize(
    ("topology", "groups"),
    [
        (Topology.torus((2, 2), _V5E), [range(4)]),
        (Topology.torus((2, 4), _V5E), [range(8)]),
        (Topology.torus((2, 2, 4), _V5P), [range(16)]),
        (Topology.torus((2, 2, 2, 2), _V5P), [range(16)]),
        (Topology.torus((2, 2, 2), _V5P), [range(0, 4), range(4, 8)]),
        (Topology.torus((2, 2, 2), _V5P), [range(7)]),
        (Topology.axis(8, _V5P), [range(8)]),
        (Topology.axis(2, _V5P), [range(2)]),
        (Topology.switch(8, _H100), [range(8)]),
    ],
    ids=str,
)
def test_no_walks_where_rings_along_orders_are_as_fast_or_chips_are_no_cube(
    topology: Topology, groups: Sequence[Sequence[int]]
) -> None:
    assert ring_walks(topology, groups) == ()


def test_an_axis_prices_its_walks() -> None:
    cube = Axis.of(Topology.torus((2, 2, 2), _V5P), (tuple(range(8)),))
    assert len(cube.walks) == 3
    assert cube.step_s(2.7e9, 1, 3, walks=True) == pytest.approx(0.9e9 / 9e10)
    assert cube.step_s(2.7e9, 2, 1) == pytest.approx(1.35e9 / 9e10)
    assert Axis.of(Topology.torus((2, 2), _V5P), ((0, 1, 2, 3),)).walks == ()
    assert Axis.of(Topology.torus((2, 2), _V5P), ((0,), (1,))).walks == ()


@pytest.mark.parametrize(
    ("order", "dims", "message"),
    [
        ((0, 1, 2, 3), (0, 0, 1, 0), "once to every chip"),
        ((0, 1, 2, 3), (0, 1, 0, 0), "once to every chip"),
        ((0, 1, 2, 3, 4), (0, 1, 0, 1), "5 devices"),
        (tuple(range(12)), (0, 1, 0, 1), "12 devices"),
    ],
)
def test_impossible_walks_are_refused(order: tuple[int, ...], dims: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Walk(order, dims)


def test_impossible_steps_of_walks_are_refused() -> None:
    topology, groups = CUBES[0], [range(8)]
    with pytest.raises(ValueError, match="walks"):
        walk_step_s((), 1.0, topology, groups)
    with pytest.raises(ValueError, match="bytes"):
        walk_step_s(ring_walks(topology, groups), math.inf, topology, groups)
