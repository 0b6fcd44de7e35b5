"""Where devices are and the links between them, against distances and counts made by hand."""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model import by_name
from cost_model.topology import Place, Topology
from overlap import tpu_target
from tests.libtpu import needs_libtpu

_V4, _V5E, _V5P, _7X = by_name("tpu_v4"), by_name("tpu_v5e"), by_name("tpu_v5p"), by_name("tpu_7x")
_H100, _CPU = by_name("h100"), by_name("cpu")


@dataclass(frozen=True)
class Device:
    """What a topology reads of a JAX device."""

    coords: list[int] | None = None
    core_on_chip: int | None = None
    slice_index: int | None = None
    process_index: int = 0


def tpus(*shape: int, cores: int = 1, slices: int = 1, low: int = 0) -> list[Device]:
    """Devices as the TPU runtime lists them: the first coordinate fastest, cores of a chip together."""
    return [
        Device([low + at for at in reversed(backwards)], core, number)
        for number in range(slices)
        for backwards in itertools.product(*map(range, reversed(shape)))
        for core in range(cores)
    ]


def names(topology: Topology, source: int, target: int) -> list[str]:
    return [str(link) for link in topology.route(source, target)]


@pytest.mark.parametrize(
    ("hardware", "shape", "wraparound"),
    [
        (_V5E, (4, 4, 1), (False, False, False)),
        (_V5E, (8, 16, 1), (False, True, False)),
        (_V5P, (2, 2, 4), (False, False, True)),
        (_V5P, (4, 8, 12), (True, True, True)),
        (_V4, (2, 2, 1), (False, False, False)),
    ],
)
def test_a_dimension_wraps_around_at_its_full_length_only(
    hardware: Any, shape: tuple[int, ...], wraparound: tuple[bool, ...]
) -> None:
    topology = Topology.from_devices(tpus(*shape), hardware)
    assert (topology.shape, topology.wraparound) == (shape, wraparound)
    assert Topology.torus(shape, hardware).wraparound == wraparound


def test_gpus_are_no_torus() -> None:
    with pytest.raises(ValueError, match="h100 has no torus: its devices are behind a switch"):
        Topology.torus((4,), _H100)


def test_a_part_of_a_slice_has_no_wraparound_where_the_slice_goes_on() -> None:
    slices = tpus(8, 4, 4, slices=2)
    for device in slices:
        object.__setattr__(device, "client", SimpleNamespace(devices=lambda: slices))
    half = [device for device in slices if device.coords is not None and device.coords[0] < 4]
    for part, wraparound in ((half, (False, True, True)), (slices, (True, True, True))):
        assert Topology.from_devices(part, _V5P).wraparound == wraparound
    assert Topology.from_devices(half, _V5P, wraparound=(True, True, True)).wraparound == (True, True, True)
    assert Topology.from_devices(half[:64], _V5P).size == 64


def test_coordinates_count_from_the_slice_s_own_corner() -> None:
    topology = Topology.from_devices(tpus(2, 4, low=2), _V5E)
    assert topology.shape == (2, 4)
    assert topology.places[1] == Place(0, (1, 0), 0)


def test_a_message_goes_dimension_by_dimension() -> None:
    topology = Topology.from_devices(tpus(2, 2, 4), _V5P)
    assert names(topology, 0, 15) == ["x+ (0,0,0)→(1,0,0)", "y+ (1,0,0)→(1,1,0)", "z- (1,1,0)→(1,1,3)"]
    assert names(topology, 15, 0) == ["x- (1,1,3)→(0,1,3)", "y- (0,1,3)→(0,0,3)", "z+ (0,0,3)→(0,0,0)"]
    assert names(topology, 5, 5) == []


def test_half_way_round_a_message_goes_up() -> None:
    ring = Topology.axis(4, _V5P)
    assert names(ring, 3, 1) == ["x+ (3)→(0)", "x+ (0)→(1)"]
    assert names(ring, 1, 3) == ["x+ (1)→(2)", "x+ (2)→(3)"]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_routes_are_the_shortest_and_hang_together(shape: list[int], data: st.DataObject) -> None:
    wraparound = [n > 2 and data.draw(st.booleans()) for n in shape]
    topology = Topology.torus(shape, _V5P, wraparound=wraparound)
    devices = st.integers(0, topology.size - 1)
    source, target = data.draw(devices), data.draw(devices)
    ends = [topology.places[device].coords for device in (source, target)]
    distance = sum(
        min(abs(a - b), n - abs(a - b)) if wraps else abs(a - b)
        for a, b, n, wraps in zip(*ends, shape, wraparound, strict=True)
    )
    route = topology.route(source, target)
    assert len(route) == distance
    at = ends[0]
    for link in route:
        assert link.source is not None and link.target is not None
        assert link.source.coords == at
        at = link.target.coords
        assert (link.step, at) in list(topology.neighbours(link.source.coords))
    assert at == ends[1]


def test_two_chips_have_one_link_each_way() -> None:
    topology = Topology.torus((2,), _V5P)
    assert list(topology.neighbours((0,))) == [("x+", (1,))]
    with pytest.raises(ValueError, match="no wraparound"):
        Topology.torus((2,), _V5P, wraparound=(True,))


def test_cores_of_a_chip_reach_each_other_on_the_chip_and_share_its_links() -> None:
    topology = Topology.from_devices(tpus(2, 2, 1, cores=2), _7X)
    assert topology.size == 8
    assert topology.hardware is _7X
    assert names(topology, 0, 1) == ["chip (0,0,0) 0→1"]
    assert names(topology, 0, 2) == names(topology, 1, 3) == ["x+ (0,0,0)→(1,0,0)"]
    on_chip = topology.route(0, 1)[0]
    assert topology.link_bytes_per_s(on_chip) == _7X.hbm_bytes_per_s


def test_a_core_of_a_chip_described_as_one_device_has_half_of_it() -> None:
    core = Topology.from_devices(tpus(2, 2, 1, cores=2), _V4).hardware
    assert core.flops_for("bfloat16") == 1.375e14
    assert (core.hbm_bytes_per_s, core.devices_per_chip) == (6e11, 2)
    assert (core.link_bytes_per_s, core.clock_hz) == (4.5e10, 1.05e9)
    assert Topology.from_devices(tpus(2, 2, 1), _V4).hardware is _V4


def test_slices_are_joined_by_the_data_centre_network() -> None:
    topology = Topology.from_devices(tpus(2, 2, slices=2), _V5P)
    assert str(topology) == "2 slices of 2x2 tpu_v5p chips, no wraparound"
    route = topology.route(1, 6)
    assert names(topology, 1, 6) == ["(1,0)→network", "network→slice 1 (0,1)"]
    assert topology.link_bytes_per_s(route[0]) == 6.25e9
    assert topology.latency_s(1, 6) == pytest.approx(1e-5)
    assert names(topology, 5, 4) == ["slice 1 x- (1,0)→(0,0)"]
    # Two messages into one device share its way in.
    assert topology.permute_s([(0, 4), (1, 4)], 6.25e6) == pytest.approx(2e-3)


def test_gpus_of_a_process_share_a_switch() -> None:
    topology = Topology.from_devices([Device(process_index=i // 4) for i in range(8)], _H100)
    assert names(topology, 1, 3) == ["device 1→switch", "switch→device 3"]
    assert names(topology, 1, 6) == ["device 1→network", "network→host 1 device 2"]
    assert topology.latency_s(1, 3) == _H100.hop_latency_s
    assert topology.link_bytes_per_s(topology.route(1, 3)[0]) == pytest.approx(4.5e11)
    assert topology.link_bytes_per_s(topology.route(1, 6)[0]) == 5e10


@pytest.mark.parametrize("processes", [2, 8])
def test_gpus_of_a_host_share_a_switch_whatever_their_process(processes: int) -> None:
    devices = [Device(process_index=i * processes // 8, slice_index=i // 4) for i in range(8)]
    topology = Topology.from_devices(devices, _H100)
    assert str(topology) == "2 hosts of 4 h100, each behind one switch"
    assert names(topology, 1, 3) == ["device 1→switch", "switch→device 3"]
    assert names(topology, 1, 6) == ["device 1→network", "network→host 1 device 2"]


def test_gpus_of_which_only_the_number_is_known_fill_hosts() -> None:
    topology = Topology.logical((4, 5), _H100)
    assert str(topology) == "3 hosts of up to 8 h100, each behind one switch"
    assert [place.domain for place in topology.places] == [0] * 8 + [1] * 8 + [2] * 4
    assert topology.domains == 3
    assert names(topology, 7, 8) == ["device 7→network", "network→host 1 device 0"]
    assert str(Topology.axis(8, _H100)) == "8 h100 behind one switch"
    for larger in ({"switch_devices": 72}, {"switch_devices": 0}, {"dcn_bytes_per_s": 0.0}):
        assert Topology.axis(16, dataclasses.replace(_H100, **larger)).domains == 1
    # Where jax tells the hosts, those are.
    assert Topology.from_devices([Device() for _ in range(16)], _H100).domains == 1


def test_cpu_devices_share_one_memory_whatever_their_process() -> None:
    topology = Topology.from_devices([Device(process_index=i) for i in range(4)], _CPU)
    assert str(topology) == "4 cpu behind one switch"


def test_devices_without_coordinates_on_a_torus_are_taken_for_the_mesh_they_form() -> None:
    class Mesh(list[Device]):
        shape = (2, 4)

        @property
        def flat(self) -> list[Device]:
            return [Device()] * 8

    assert Topology.from_devices([Device()] * 4, _V5P) == Topology.axis(4, _V5P)
    assert Topology.from_devices(Mesh(), _V5P) == Topology.logical((2, 4), _V5P)
    assert Topology.logical((2, 4), _H100) == Topology.switch(8, _H100)


def test_an_axis_of_unknown_place_is_a_ring_a_line_or_a_switch() -> None:
    assert Topology.axis(16, _V5E).wraparound == (True,)
    assert Topology.axis(8, _V5E).wraparound == (False,)
    assert Topology.axis(8, _H100).shape == ()


def test_load_counts_the_messages_on_each_link() -> None:
    line = Topology.axis(4, _V5E)
    load = line.load([(0, 1), (1, 2), (2, 3), (3, 0)])
    assert {str(link): count for link, count in load.items()} == {
        "x+ (0)→(1)": 1,
        "x+ (1)→(2)": 1,
        "x+ (2)→(3)": 1,
        "x- (3)→(2)": 1,
        "x- (2)→(1)": 1,
        "x- (1)→(0)": 1,
    }
    assert max(line.load([(0, 2), (1, 3)]).values()) == 2


def test_a_permute_takes_its_busiest_link_or_its_longest_latency() -> None:
    ring, line = Topology.axis(16, _V5E), Topology.axis(4, _V5E)
    assert ring.permute_s([(i, (i + 1) % 16) for i in range(16)], 45e6) == pytest.approx(1e-3)
    assert line.permute_s([(0, 2), (1, 3)], 45e6) == pytest.approx(2e-3)
    assert line.permute_s([(i, (i + 1) % 4) for i in range(4)], 8) == pytest.approx(3e-6)
    assert line.permute_s([(2, 2)], 1e9) == line.permute_s([], 1e9) == 0


def test_latency_rules_below_45_kilobytes() -> None:
    line = Topology.axis(4, _V5E)
    assert line.permute_s([(0, 1)], 44e3) == 1e-6
    assert line.permute_s([(0, 1)], 46e3) > 1e-6


def test_a_topology_can_be_given_by_hand() -> None:
    places = tuple(Place(0, coords) for coords in ((0, 0), (1, 0), (1, 1), (0, 1)))
    topology = Topology(_V5P, "a square", places, (2, 2), (False, False))
    assert set(topology.load([(i, (i + 1) % 4) for i in range(4)]).values()) == {1}
    assert str(topology) == "a square"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"places": ()}, "at least one device"),
        ({"places": (Place(0, (0,)), Place(0, (0,)))}, "in one place"),
        ({"places": (Place(0, (4,)),)}, "outside"),
        ({"places": (Place(0, ()),)}, "outside"),
        ({"wraparound": ()}, "wraparound"),
        ({"places": (Place(0, (0,)), Place(1, (0,)))}, "dcn_bytes_per_s"),
    ],
)
def test_an_impossible_topology_is_refused(change: dict[str, Any], message: str) -> None:
    topology = Topology.axis(4, dataclasses.replace(_V5P, dcn_bytes_per_s=0.0))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(topology, **change)


def test_impossible_questions_are_refused() -> None:
    line = Topology.axis(4, _V5E)
    with pytest.raises(ValueError, match="device 4"):
        line.route(0, 4)
    with pytest.raises(ValueError, match="bytes"):
        line.permute_s([(0, 1)], -1.0)
    with pytest.raises(ValueError, match="at least one device"):
        Topology.from_devices([], _V5E)
    with pytest.raises(ValueError, match="at least one chip"):
        Topology.torus((0, 4), _V5E)


@needs_libtpu
@pytest.mark.parametrize(
    ("slice_name", "hardware", "shape", "wraparound", "cores"),
    [
        ("v4:2x2x1", _V4, (2, 2, 1), (False, False, False), 2),
        ("v5e:4x4", _V5E, (4, 4, 1), (False, False, False), 1),
        ("v5p:2x2x4", _V5P, (2, 2, 4), (False, False, True), 1),
        ("tpu7x:2x2x1", _7X, (2, 2, 1), (False, False, False), 2),
    ],
)
def test_the_tpu_compiler_s_own_devices_are_read(
    slice_name: str, hardware: Any, shape: tuple[int, ...], wraparound: tuple[bool, ...], cores: int
) -> None:
    devices = tpu_target.devices(slice_name)
    topology = Topology.from_devices(devices, hardware)
    assert (topology.shape, topology.wraparound) == (shape, wraparound)
    assert topology.size == len(devices) == math.prod(shape) * cores
    assert topology.hardware.devices_per_chip == cores
    assert [place.coords for place in topology.places] == [tuple(device.coords) for device in devices]


def test_equal_topologies_hash_alike() -> None:
    assert hash(Topology.torus((4, 4), _V5P)) == hash(Topology.torus((4, 4), _V5P))


@given(data=st.data())
def test_a_permute_costs_what_its_routes_and_their_links_do(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    wraps = [length > 2 and data.draw(st.booleans()) for length in shape]
    one = Topology.torus(shape, _V5P, cores=data.draw(st.integers(1, 2)), wraparound=wraps)
    places = (*one.places, *(place._replace(domain=1) for place in one.places))
    topology = dataclasses.replace(one, places=places)
    device = st.integers(0, topology.size - 1)
    pairs = data.draw(st.lists(st.tuples(device, device)))
    loads = topology.load(pairs).items()
    assert topology.permute_cost(pairs) == (
        max((topology.latency_s(*pair) for pair in pairs), default=0),
        max((count / topology.link_bytes_per_s(link) for link, count in loads), default=0),
    )
