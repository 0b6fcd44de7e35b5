"""The network under a jaxpr: groups of devices along mesh axes, and what their places say of an axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from cost_model import Axis, by_name
from passes.collective import Collective
from passes.network import Network

V5P, V5E, H100 = by_name("tpu_v5p"), by_name("tpu_v5e"), by_name("h100")


def collective(*axes: str, size: int, groups: tuple[tuple[int, ...], ...] | None = None) -> Collective:
    return Collective(op=0, kind="all_gather", axes=axes, axis_size=size, groups=groups)


def mesh_of(shape: dict[str, int], coords: Iterable[tuple[int, ...] | None]) -> Any:
    """A mesh of devices that are nowhere but say where they are."""
    devices = np.empty(math.prod(shape.values()), object)
    for number, at in enumerate(coords):
        devices[number] = SimpleNamespace(id=number, coords=at, core_on_chip=0, slice_index=0)
    return SimpleNamespace(
        axis_names=tuple(shape), shape=shape, devices=devices.reshape(tuple(shape.values()))
    )


def virtual(**shape: int) -> Any:
    count = math.prod(shape.values())
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(AxisType.Auto,) * len(shape),
        devices=jax.devices()[:count],
    )


def grid(rows: int, columns: int) -> list[tuple[int, ...]]:
    return [(row, column, 0) for row in range(rows) for column in range(columns)]


def test_groups_are_the_lines_of_the_mesh_along_an_axis() -> None:
    network = Network(V5P, virtual(x=2, y=4))
    assert network.groups(collective("x", size=2)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert network.groups(collective("y", size=4)) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_groups_along_several_axes_count_the_first_axis_slowest() -> None:
    network = Network(V5P, virtual(x=2, y=2, z=2))
    assert network.groups(collective("x", "y", "z", size=8)) == (tuple(range(8)),)
    assert network.groups(collective("z", "x", size=4)) == ((0, 4, 1, 5), (2, 6, 3, 7))
    assert network.groups(collective("x", "z", size=4)) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_index_groups_are_taken_along_every_line() -> None:
    network = Network(V5P, virtual(x=2, y=4))
    halves = collective("y", size=2, groups=((0, 2), (3, 1)))
    assert network.groups(halves) == ((0, 2), (3, 1), (4, 6), (7, 5))


@pytest.mark.parametrize("axes", [("x",), ("y",), ("z",), ("x", "z"), ("z", "y"), ("y", "z", "x")])
def test_groups_are_those_that_jax_gathers_from(axes: tuple[str, ...]) -> None:
    """Independent of how the mesh is counted: each device gathers the numbers of its group, in order."""
    mesh = virtual(x=2, y=2, z=2)
    everywhere = jax.sharding.PartitionSpec(("x", "y", "z"))
    gathered = jax.jit(
        jax.shard_map(
            lambda number: jax.lax.all_gather(number, axes, tiled=True)[None],
            mesh=mesh,
            in_specs=everywhere,
            out_specs=everywhere,
        )
    )(np.arange(8))
    size = 2 ** len(axes)
    groups = Network(V5P, mesh).groups(collective(*axes, size=size))
    assert set(groups) == {tuple(map(int, row)) for row in np.asarray(gathered)}
    assert sorted(device for group in groups for device in group) == list(range(8))


def test_without_hardware_there_is_no_axis() -> None:
    assert Network(None, virtual(x=8)).axis(collective("x", size=8)) is None


@pytest.mark.parametrize(
    "network",
    [
        Network(V5P),
        Network(V5P, virtual(x=8)),
        Network(H100, mesh_of({"x": 8}, grid(2, 4))),
        Network(V5P, mesh_of({"x": 8}, [*grid(2, 4)[:7], None])),
    ],
    ids=["no mesh", "no coordinates", "a switch", "one without coordinates"],
)
def test_an_axis_whose_devices_do_not_say_where_they_are_is_a_ring_of_its_own(network: Network) -> None:
    axis = network.axis(collective("x", size=8))
    assert axis == Axis(network.hardware, 8)  # type: ignore[arg-type]


def test_an_axis_across_hosts_of_gpus_has_the_network_between_them() -> None:
    mesh = mesh_of({"hosts": 2, "x": 4}, [None] * 8)
    for number, device in enumerate(mesh.devices.flat):
        device.slice_index = number // 4
    network = Network(H100, mesh)
    inside, across = (network.axis(collective(name, size=size)) for name, size in (("x", 4), ("hosts", 2)))
    assert inside is not None and across is not None
    megabytes = 64e6
    assert inside.all_gather_s(megabytes) == pytest.approx(Axis(H100, 4).all_gather_s(megabytes))
    assert across.step_s(megabytes, 1) == pytest.approx(megabytes / H100.dcn_bytes_per_s, rel=0.02)
    unknown = dataclasses.replace(H100, dcn_bytes_per_s=0.0)
    assert Network(unknown, mesh).axis(collective("hosts", size=2)) == Axis(unknown, 2)


def test_orders_come_from_the_coordinates_of_the_devices() -> None:
    axis = Network(V5E, mesh_of({"x": 8}, grid(2, 4))).axis(collective("x", size=8))
    assert axis is not None and axis.topology is not None
    assert axis.groups == (tuple(range(8)),)
    (order,) = axis.orders
    # Out along one row of the 2x4 grid and back along the other: each hop to a neighbour.
    assert order.order == (0, 1, 2, 3, 7, 6, 5, 4)
    assert axis.step_s(0, 2) == pytest.approx(V5E.hop_latency_s)


def test_devices_in_the_order_of_the_ring_need_no_other() -> None:
    snake = [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0), (1, 3, 0), (1, 2, 0), (1, 1, 0), (1, 0, 0)]
    axis = Network(V5E, mesh_of({"x": 8}, snake)).axis(collective("x", size=8))
    assert axis is not None and [order.is_identity for order in axis.orders] == [True]


def test_each_axis_of_a_mesh_has_its_own_network() -> None:
    network = Network(V5P, mesh_of({"x": 4, "y": 4}, grid(4, 4)))
    rows, columns = network.axis(collective("x", size=4)), network.axis(collective("y", size=4))
    whole = network.axis(collective("x", "y", size=16))
    assert rows is not None and columns is not None and whole is not None
    assert rows.groups[0] == (0, 4, 8, 12) and columns.groups[0] == (0, 1, 2, 3)
    assert (len(rows.orders), len(columns.orders), len(whole.orders)) == (1, 1, 2)
    assert network.axis(collective("x", size=4)) is rows, "worked out once"


def test_axes_of_one_name_in_several_meshes_have_their_own_sizes() -> None:
    """One network serves all shard_maps of a program whose meshes tell no devices."""
    network = Network(V5P)
    assert [network.axis(collective("x", size=size)) for size in (4, 2)] == [Axis(V5P, 4), Axis(V5P, 2)]


def test_groups_of_an_axis_have_orders_of_their_own() -> None:
    network = Network(V5P, mesh_of({"x": 8}, grid(1, 8)))
    halves = network.axis(collective("x", size=4, groups=((0, 1, 2, 3), (4, 5, 6, 7))))
    whole = network.axis(collective("x", size=8))
    assert halves is not None and whole is not None
    assert (halves.size, whole.size) == (4, 8)
    assert whole.step_s(9e7, 2) == pytest.approx(0.5e-3)
    # Half of a ring is a line: its last device reaches the first over the others' links.
    assert halves.step_s(9e7, 2) > whole.step_s(9e7, 2)


def test_gpus_of_which_none_is_known_fill_hosts() -> None:
    for size in (8, 16):
        axis = Network(H100).axis(collective("x", size=size))
        assert axis == Axis.of_size(size, H100)
        assert (axis.topology is None) == (size == 8)
    one = SimpleNamespace(axis_names=("x",), shape={"x": 16}, devices=np.full(16, SimpleNamespace()))
    assert Network(H100, one).axis(collective("x", size=16)) == Axis(H100, 16), "behind one, as jax has it"


@pytest.mark.parametrize(
    ("name", "overlaps", "part"), [("tpu_v5p", True, 1), ("h100", True, 0.5), ("cpu", False, 0.5)]
)
def test_beside_others_a_chain_has_half_of_a_cache_and_on_cpu_counts_on_no_overlap(
    name: str, overlaps: bool, part: float
) -> None:
    hardware = dataclasses.replace(by_name(name), overlaps=True)
    network = Network(hardware, virtual(x=4))
    alone, beside = (network.axis(collective("x", size=4), alone=alone) for alone in (True, False))
    assert alone is not None and beside is not None
    assert alone.hardware == hardware
    assert beside.hardware.on_chip_bytes == part * hardware.on_chip_bytes
    assert beside.hardware.overlaps is overlaps
    assert beside.hardware.least_gain == max(hardware.least_gain, hardware.least_gain_beside)


def test_a_chain_beside_others_must_be_predicted_to_gain_more() -> None:
    hardware = by_name("tpu_v6e")
    assert hardware.least_gain < hardware.least_gain_beside
    for least_gain, beside_gain in ((0.03, 0.05), (0.1, 0.1)):
        network = Network(dataclasses.replace(hardware, least_gain=least_gain), virtual(x=4))
        axes = [network.axis(collective("x", size=4), alone=alone) for alone in (True, False)]
        assert [axis and axis.hardware.least_gain for axis in axes] == [least_gain, beside_gain]
