"""Ring orders, against links counted hop by hop."""

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model import by_name
from cost_model.ring_order import RingOrder, ring_orders, ring_step_s
from cost_model.topology import Place, Topology

_V4, _V5E, _V5P, _7X, _H100 = map(by_name, ("tpu_v4", "tpu_v5e", "tpu_v5p", "tpu_7x", "h100"))

Groups = Sequence[Sequence[int]]


def busiest(topology: Topology, groups: Groups, orders: Sequence[RingOrder], directions: int) -> int:
    """Hops on the link that carries the most, with all rings in flight at once; on-chip hops not counted."""
    load: Counter[str] = Counter()
    for order in orders:
        for a, b in zip(order.order, order.order[1:] + order.order[:1], strict=True):
            for group in groups:
                for source, target in ((group[a], group[b]), (group[b], group[a]))[:directions]:
                    load.update(str(link) for link in topology.route(source, target) if link.kind != "chip")
    return max(load.values())


def longest(topology: Topology, groups: Groups, order: RingOrder) -> int:
    steps = zip(order.order, order.order[1:] + order.order[:1], strict=True)
    return max(len(topology.route(group[a], group[b])) for a, b in steps for group in groups)


@pytest.mark.parametrize(
    ("topology", "count"),
    [
        (Topology.torus((4, 4), _V5P), 2),
        (Topology.torus((2, 2, 4), _V5P), 2),
        (Topology.torus((4, 4, 4), _V5P), 3),
        (Topology.torus((4, 4, 8), _V5P), 3),
        (Topology.torus((16, 16), _V5E), 2),
        (Topology.torus((4, 4), _V5E), 1),
        (Topology.torus((2, 4), _V5E), 1),
        (Topology.torus((2, 2, 2), _V5P), 1),
        (Topology.torus((2, 2), _V5P), 1),
        (Topology.axis(16, _V5E), 1),
        (Topology.torus((2, 2, 1), _7X, cores=2), 1),
        (Topology.torus((4, 4), _7X, cores=2), 2),
    ],
    ids=str,
)
def test_rings_run_over_neighbours_and_share_no_link(topology: Topology, count: int) -> None:
    groups = [range(topology.size)]
    orders = ring_orders(topology, groups)
    assert len(orders) == count
    for order in orders:
        assert sorted(order.order) == list(range(topology.size))
        assert order.order[0] == 0
        assert longest(topology, groups, order) == 1
    assert busiest(topology, groups, orders, directions=2) == 1


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_orders_are_given_than_are_wanted(limit: int) -> None:
    cube = Topology.torus((4, 4, 4), _V5P)
    orders = ring_orders(cube, [range(64)], limit)
    assert len(orders) == limit
    assert busiest(cube, [range(64)], orders, directions=2) == 1


def test_an_axis_along_a_ring_keeps_its_order() -> None:
    for topology in (Topology.axis(8, _V5P), Topology.switch(8, _H100), Topology.axis(2, _V5E)):
        (order,) = ring_orders(topology, [range(topology.size)])
        assert order.is_identity
    snake = [0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4]
    (order,) = ring_orders(Topology.torus((4, 4), _V5E), [snake])
    assert order.is_identity
    cube = Topology.torus((4, 4, 4), _V5P)
    (order,) = ring_orders(cube, [range(i, i + 4) for i in range(0, 64, 4)])
    assert order.is_identity


@pytest.mark.parametrize("stride", [1, 4, 16])
def test_one_order_serves_all_groups_of_an_axis(stride: int) -> None:
    cube = Topology.torus((4, 4, 4), _V5P)
    taken = [d for d in range(64) if d // stride % 4 == 0]
    groups = [[device + stride * i for device in taken] for i in range(4)]
    orders = ring_orders(cube, groups)
    assert len(orders) == 2
    assert busiest(cube, groups, orders, directions=2) == 1


def test_two_rings_halve_the_step_of_one() -> None:
    topology, groups = Topology.torus((2, 2, 4), _V5P), [range(16)]
    orders = ring_orders(topology, groups)
    assert ring_step_s(orders, 1.8e9, topology, groups) == pytest.approx(1.8e9 / 4 / 9e10)
    assert ring_step_s(orders[:1], 1.8e9, topology, groups) == pytest.approx(1.8e9 / 2 / 9e10)
    assert ring_step_s(orders[:1], 1.8e9, topology, groups, directions=1) == pytest.approx(1.8e9 / 9e10)
    assert ring_step_s(orders, 8, topology, groups) == pytest.approx(1e-6)
    # In the mesh's own order a hop leads from the end of one column to the start of the next.
    own = RingOrder(order=tuple(range(16)))
    assert longest(topology, groups, own) == 3
    assert ring_step_s([own], 8, topology, groups) == pytest.approx(3e-6)


def test_cores_of_a_chip_follow_each_other() -> None:
    topology = Topology.torus((4, 4), _7X, cores=2)
    for order in ring_orders(topology, [range(32)]):
        for first, second in zip(order.order[::2], order.order[1::2], strict=True):
            assert first // 2 == second // 2


def test_groups_that_share_every_link_still_get_two_rings() -> None:
    topology = Topology.torus((4, 4), _7X, cores=2)
    groups = [range(0, 32, 2), range(1, 32, 2)]
    orders = ring_orders(topology, groups)
    assert len(orders) == 2
    assert [busiest(topology, groups, [order], directions=1) for order in orders] == [2, 2]
    assert busiest(topology, groups, orders, directions=2) == 2


def test_a_line_is_folded_so_that_no_hop_crosses_it() -> None:
    line = Topology.axis(8, _V5E)
    (order,) = ring_orders(line, [range(8)])
    assert order.order == (0, 1, 3, 5, 7, 6, 4, 2)
    assert (busiest(line, [range(8)], [order], directions=1), longest(line, [range(8)], order)) == (1, 2)
    assert busiest(line, [range(8)], [order], directions=2) == 2


def test_an_odd_grid_has_hops_of_two_links_at_most() -> None:
    grid = Topology.torus((3, 3), _V5E)
    (order,) = ring_orders(grid, [range(9)])
    assert longest(grid, [range(9)], order) == 2


def test_across_slices_a_ring_crosses_once_each_way() -> None:
    places = tuple(Place(i % 2, (i // 2 // 2, i // 2 % 2)) for i in range(8))
    topology = Topology(_V5P, "two slices, interleaved", places, (2, 2), (False, False))
    (order,) = ring_orders(topology, [range(8)])
    domains = [i % 2 for i in order.order]
    assert sum(a != b for a, b in zip(domains, domains[1:] + domains[:1], strict=True)) == 2


def test_behind_a_switch_opposite_hops_take_turns_unless_they_overlap() -> None:
    topology, groups = Topology.switch(8, _H100), [range(8)]
    orders = ring_orders(topology, groups)
    one_way = ring_step_s(orders, 4.5e8, topology, groups, directions=1)
    assert one_way == pytest.approx(1e-3)
    assert ring_step_s(orders, 4.5e8, topology, groups) == pytest.approx(one_way)


@given(st.permutations(range(16)), st.sampled_from([(4, 4), (2, 8), (2, 2, 4)]), st.sampled_from([4, 8, 16]))
def test_an_order_is_never_worse_than_the_axis_s_own(
    devices: list[int], shape: tuple[int, ...], size: int
) -> None:
    topology = Topology.torus(shape, _V5P)
    groups = [devices[i : i + size] for i in range(0, 16, size)]
    orders = ring_orders(topology, groups)
    for order in orders:
        assert sorted(order.order) == list(range(size))
    own = RingOrder(order=tuple(range(size)))
    step_s = ring_step_s(orders, 1e9, topology, groups)
    assert step_s <= ring_step_s([own], 1e9, topology, groups) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("groups", "limit", "message"),
    [
        ([], 1, "one size"),
        ([[]], 1, "one size"),
        ([[0, 1], [2]], 1, "one size"),
        ([[0, 4]], 1, "device 4"),
        ([[0, 1]], 0, "limit"),
    ],
)
def test_impossible_axes_are_refused(groups: Groups, limit: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ring_orders(Topology.axis(4, _V4), groups, limit)


def test_impossible_steps_are_refused() -> None:
    topology, groups = Topology.axis(4, _V4), [range(4)]
    orders = ring_orders(topology, groups)
    with pytest.raises(ValueError, match="orders"):
        ring_step_s((), 1.0, topology, groups)
    with pytest.raises(ValueError, match="bytes"):
        ring_step_s(orders, math.nan, topology, groups)
    with pytest.raises(ValueError, match="directions"):
        ring_step_s(orders, 1.0, topology, groups, directions=3)
