"""One mesh axis: what a step of rings, a hop and a collective take, with and without known places."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from cost_model import Axis, Topology, all_gather_s, all_reduce_s, all_to_all_s, by_name, ring_hop_s
from cost_model import group_collectives as groups_of
from cost_model.axis import exchange_s
from cost_model.mesh_split import pod_axis

V5P, V5E, H100 = by_name("tpu_v5p"), by_name("tpu_v5e"), by_name("h100")
MS = 9e7
"""Bytes that a link of v5p carries in a millisecond."""


def whole_slice(*shape: int) -> Axis:
    """The axis that runs through all chips of a v5p slice, in the order of their numbers."""
    topology = Topology.torus(shape, V5P)
    return Axis.of(topology, (tuple(range(topology.size)),))


@pytest.mark.parametrize("groups", [(), ((), ())])
def test_an_axis_of_groups_has_a_device(groups: Any) -> None:
    with pytest.raises(ValueError, match="an axis has at least one group, of at least one device"):
        Axis.of(Topology.torus((4,), V5P), groups)


def test_two_devices_are_neighbours_once() -> None:
    own = dataclasses.replace(V5P, wraparound_multiple=1)
    placed = Axis.of(Topology.torus((2,), own), ((0, 1),))
    for directions in (1, 2):
        assert Axis(own, 2).step_s(1e9, directions) == pytest.approx(placed.step_s(1e9, directions))


def test_an_axis_of_known_size_lies_over_hosts_where_a_switch_is_too_small() -> None:
    h100 = by_name("h100")
    for size, hardware in ((8, h100), (64, dataclasses.replace(h100, switch_devices=0)), (64, V5P)):
        assert Axis.of_size(size, hardware) == Axis(hardware, size)
    hosts = Axis.of_size(16, h100)
    assert hosts.size == 16 and not hosts.within_domain
    # One way round each host is entered by one of its devices, through the network.
    assert hosts.step_s(1e8, 1) == pytest.approx(1e8 / h100.dcn_bytes_per_s)
    # Half of the array comes into a host, by the ways of all of its devices.
    assert hosts.all_gather_s(1e10) >= 0.5e10 / (8 * h100.dcn_bytes_per_s)


@pytest.mark.parametrize("size", [0, -1])
def test_an_axis_has_a_device(size: int) -> None:
    with pytest.raises(ValueError, match=f"axis_size must be at least 1, got {size}"):
        Axis(V5P, size)


@pytest.mark.parametrize("size", [math.nan, 2.5, "4", None])
def test_an_axis_size_is_a_whole_number(size: Any) -> None:
    with pytest.raises(TypeError, match="axis_size must be a whole number, got"):
        Axis(V5P, size)


def test_numpy_s_whole_numbers_are_as_good() -> None:
    axis = Axis(V5P, np.int32(4))  # type: ignore[arg-type]
    assert axis == Axis(V5P, 4) and type(axis.size) is int


def test_a_name_is_no_hardware() -> None:
    name: Any = "tpu_v5p"
    for refused in (lambda: Axis(name, 4), lambda: ring_hop_s(1, 4, name, directions=1)):
        with pytest.raises(TypeError, match=r"hardware must be a Hardware, such as by_name\('tpu_v5p'\)"):
            refused()


def test_a_ring_runs_in_one_or_two_directions() -> None:
    with pytest.raises(ValueError, match="1 or 2 directions, got 3"):
        ring_hop_s(1, 4, V5P, directions=3)  # type: ignore[arg-type]


def test_what_is_kept_of_an_axis_is_what_its_groups_cost() -> None:
    topology = Topology.torus((4, 4, 2), V5P)
    axes = [
        Axis.of(topology, tuple(tuple(range(first, first + 8)) for first in range(0, 32, 8))),
        Axis.of(topology, tuple(tuple(range(first, 32, 4)) for first in range(4))),
    ]
    for axis, full_bytes in itertools.product(axes, (0.0, 1e3, 12_345_678.9, 1e12 / 7)):
        of = axis.groups, topology
        assert axis.all_gather_s(full_bytes) == groups_of.all_gather_s(full_bytes, *of)
        assert axis.all_reduce_s(full_bytes) == groups_of.all_reduce_s(full_bytes, *of)
    assert len({*axes, dataclasses.replace(axes[0])}) == 2
    for wrong in (math.nan, -1.0, math.inf):
        for asked in (axes[0].all_gather_s, axes[0].all_reduce_s, lambda sent: axes[0].step_s(sent, 1)):
            with pytest.raises(ValueError, match="bytes must be finite and not negative"):
                asked(wrong)


# Hops and steps without known places.


def test_two_directions_halve_a_hop_only_with_wraparound() -> None:
    assert ring_hop_s(1e7, 16, V5E, directions=2) == ring_hop_s(1e7, 16, V5E, directions=1) / 2
    assert ring_hop_s(1e7, 8, V5E, directions=2) == ring_hop_s(1e7, 8, V5E, directions=1)
    assert ring_hop_s(1e7, 8, H100, directions=2) == pytest.approx(ring_hop_s(1e7, 8, H100, directions=1))


def test_behind_a_switch_two_directions_pay_the_latency_twice() -> None:
    assert ring_hop_s(1, 8, H100, directions=2) == 2 * H100.hop_latency_s
    assert ring_hop_s(1, 8, H100, directions=1) == H100.hop_latency_s


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_behind_a_switch_both_directions_leave_by_one_link(size: int, overlap: bool) -> None:
    hardware = dataclasses.replace(H100, opposite_hops_overlap=overlap)
    alone, placed = Axis(hardware, size), Axis.of(Topology.switch(size, hardware), (tuple(range(size)),))
    assert alone.step_s(1e9, 2) == pytest.approx(placed.step_s(1e9, 2))
    assert (size - 1) * alone.step_s(1e9, 2) >= all_gather_s(size * 1e9, size, hardware)


def test_two_directions_between_pods_share_a_device_s_network() -> None:
    pods = pod_axis(V5P, 4)
    assert 3 * pods.step_s(1e9, 2) >= all_gather_s(4e9, 4, pods.hardware)


def test_without_wraparound_the_last_hop_crosses_the_whole_line() -> None:
    assert ring_hop_s(1, 8, V5E, directions=1) == pytest.approx(7e-6)
    assert ring_hop_s(1, 16, V5E, directions=1) == pytest.approx(1e-6)


def test_a_step_on_an_axis_of_unknown_place_is_a_hop_of_its_own_ring() -> None:
    axis = Axis(V5P, 8)
    assert axis.step_s(MS, 1) == pytest.approx(1e-3)
    assert axis.step_s(MS, 2) == pytest.approx(0.5e-3)
    assert axis.orders == ()


def test_collectives_on_an_axis_of_unknown_place_are_those_of_a_ring_of_its_own() -> None:
    axis = Axis(V5E, 16)
    assert axis.all_gather_s(1e9) == all_gather_s(1e9, 16, V5E) == axis.reduce_scatter_s(1e9)
    assert axis.all_reduce_s(1e9) == all_reduce_s(1e9, 16, V5E)
    assert axis.all_to_all_s(1e9) == all_to_all_s(1e9, 16, V5E)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_the_same_axis_costs_the_same_with_and_without_its_devices(size: int) -> None:
    axis = Axis(V5P, size)
    placed = Axis.of(Topology.axis(size, V5P), (tuple(range(size)),))
    for moved_bytes in (1e3, 1e6, 1e9):
        assert axis.all_gather_s(moved_bytes) == pytest.approx(placed.all_gather_s(moved_bytes))
        assert axis.all_reduce_s(moved_bytes) == pytest.approx(placed.all_reduce_s(moved_bytes))
        assert axis.all_to_all_s(moved_bytes) == pytest.approx(placed.all_to_all_s(moved_bytes))


def test_one_device_waits_for_nobody() -> None:
    for axis in (Axis(V5P, 1), Axis.of(Topology.torus((2, 2), V5P), ((0,), (1,), (2,), (3,)))):
        assert axis.size == 1 and axis.orders == ()
        assert axis.step_s(1e9, 2) == 0 == axis.permute_s(1e9, 1)


# Exchanges.


def test_a_block_goes_the_shorter_way_round_and_shares_its_links() -> None:
    times = [exchange_s(MS, 8, V5P, distance=d) for d in range(8)]
    assert times == pytest.approx([0, 1e-3, 2e-3, 3e-3, 4e-3, 3e-3, 2e-3, 1e-3])


def test_along_a_line_a_block_that_wraps_crosses_it() -> None:
    # 3 of 8 go back over 5 links; 3 blocks share the link in the middle.
    assert exchange_s(MS / 2, 8, V5E, distance=3) == pytest.approx(3e-3)
    assert exchange_s(0, 8, V5E, distance=3) == pytest.approx(5e-6)


def test_behind_a_switch_every_distance_is_one_hop() -> None:
    times = {exchange_s(1e8, 8, H100, distance=d) for d in range(1, 8)}
    assert len(times) == 1


def test_small_blocks_take_the_latency_of_the_way() -> None:
    assert exchange_s(0, 8, V5P, distance=3) == pytest.approx(3 * V5P.hop_latency_s)


def test_a_distance_is_counted_round_the_axis() -> None:
    axis = Axis(V5P, 8)
    assert axis.permute_s(MS, 9) == axis.permute_s(MS, 1) == pytest.approx(1e-3)
    assert axis.permute_s(MS, 8) == 0


# Axes of known devices.


def test_a_ring_of_neighbours_is_priced_as_the_book_does() -> None:
    known = Axis.of(Topology.axis(8, V5P), (tuple(range(8)),))
    unknown = Axis(V5P, 8)
    assert known.size == 8 and known.hardware == V5P
    for directions in (1, 2):
        assert known.step_s(MS, directions) == pytest.approx(unknown.step_s(MS, directions))
    assert [known.permute_s(MS, d) for d in range(8)] == pytest.approx(
        [unknown.permute_s(MS, d) for d in range(8)]
    )


def test_rings_that_share_no_link_share_the_shard() -> None:
    axis = whole_slice(4, 4)
    assert len(axis.orders) == 2
    # By hand: one order, one way, is one hop on a link; two ways halve it, two orders halve it again.
    assert axis.step_s(MS, 1, 1) == pytest.approx(1e-3)
    assert axis.step_s(MS, 2, 1) == pytest.approx(0.5e-3)
    assert axis.step_s(MS, 2, 2) == pytest.approx(0.25e-3)
    assert axis.step_s(0, 2, 2) == pytest.approx(1e-6)


def test_an_order_spares_a_hop_the_way_round_a_corner() -> None:
    axis = whole_slice(4, 4)
    counted = dataclasses.replace(axis.orders[0], order=tuple(range(16)))
    assert not any(order.is_identity for order in axis.orders)
    # From the end of a row to the start of the next: two links.
    assert dataclasses.replace(axis, orders=(counted,)).step_s(0, 1) == pytest.approx(2e-6)
    assert axis.step_s(0, 1, 1) == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "overlaps"),
    [
        ("tpu_v5e", (16, 16), False),
        ("tpu_v5e", (8, 16), True),
        ("tpu_v6e", (16, 16), True),
        ("tpu_v5p", (4, 8, 8), True),
    ],
)
def test_full_pods_of_v5e_overlap_nothing(name: str, shape: tuple[int, ...], overlaps: bool) -> None:
    topology = Topology.torus(shape, by_name(name))
    lines = tuple(tuple(range(start, start + shape[-1])) for start in range(0, topology.size, shape[-1]))
    assert Axis.of(topology, lines).hardware.overlaps is overlaps
    assert Axis.of(topology, tuple((i,) for i in range(topology.size))).hardware.overlaps is overlaps


def test_all_groups_of_an_axis_hop_at_once() -> None:
    slice_ = Topology.torus((4, 4), V5P)
    rows = tuple(tuple(range(4 * row, 4 * row + 4)) for row in range(4))
    axis = Axis.of(slice_, rows)
    assert axis.size == 4 and axis.groups == rows
    assert axis.orders[0].is_identity
    assert axis.step_s(MS, 1) == pytest.approx(1e-3)
    # Two groups over the same columns: {0,2} and {1,3} of a row pass each other on its links.
    crossing = Axis.of(slice_, tuple((row + at, row + at + 2) for row in (0, 4, 8, 12) for at in (0, 1)))
    assert crossing.permute_s(MS, 1) > 1e-3


def test_collectives_of_known_devices_are_those_of_their_links() -> None:
    axis = whole_slice(4, 4)
    assert axis.topology is not None
    assert axis.all_gather_s(1e9) == groups_of.all_gather_s(1e9, axis.groups, axis.topology)
    assert axis.all_gather_s(1e9) < all_gather_s(1e9, 16, V5P)
    assert axis.all_reduce_s(1e9) == groups_of.all_reduce_s(1e9, axis.groups, axis.topology)
    assert axis.all_to_all_s(1e9) == groups_of.all_to_all_s(1e9, axis.groups, axis.topology)


def test_devices_that_are_cores_have_a_core_s_rates() -> None:
    v4 = by_name("tpu_v4")
    topology = Topology.torus((2, 2, 1), v4, cores=2)
    axis = Axis.of(topology, (tuple(range(8)),))
    assert axis.hardware == v4.per_core(2)
    assert axis.hardware.flops_for("bfloat16") == v4.flops_for("bfloat16") / 2
