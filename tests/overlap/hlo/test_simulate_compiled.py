"""Timelines of what the compilers make of real programs: quantities that can be counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cost_model import by_name
from cost_model.topology import Topology
from overlap import overlap_collectives, tpu_target
from overlap.hlo.module import Computation, Module, estimated_cycles
from overlap.hlo.parse import parse
from overlap.hlo.simulate import simulate
from overlap.hlo.timeline import Timeline
from tests.libtpu import needs_libtpu
from tests.overlap.hlo.test_simulate import assert_consistent
from tests.overlap.mlp import mesh_of

ROOT = Path(__file__).resolve().parents[3]
TPU = by_name("tpu_v5p")

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
from overlap import overlap_collectives

topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
mesh = topologies.make_mesh(topology, (4,), ("x",))

def sharded(body, specs, out):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out))

def text(function, shapes, specs, options=None):
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs)
    ]
    return jax.jit(function).trace(*arguments).lower().compile(compiler_options=options).as_text()

rows, columns = (P("x"), P(None, "x")), (P(None, "x"), P("x"))
shapes = ((4096, 2048), (2048, 8192))
gather = sharded(lambda x, w: lax.all_gather(x, "x", tiled=True) @ w, rows, P(None, "x"))
scatter = sharded(lambda x, w: lax.psum_scatter(x @ w, "x", tiled=True), columns, P("x"))
layers = sharded(
    lambda x, w: lax.scan(
        lambda x, w: (lax.psum_scatter(lax.all_gather(x, "x", tiled=True) @ w, "x", tiled=True), None), x, w
    )[0],
    (P("x"), P()), P("x"),
)
post = {f"xla_tpu_{kind}_collective_matmul_mode": "post_spmd" for kind in ("all_gather", "reduce_scatter")}
print(json.dumps({
    "devices": [[device.device_kind, device.coords] for device in mesh.devices.flat],
    "dot": text(lambda x, w: x @ w, shapes, (P(), P())),
    "gather": text(gather, shapes, rows),
    "gather ring": text(overlap_collectives(gather, hardware="tpu_v5p", policy="always"), shapes, rows),
    "gather by XLA": text(gather, shapes, rows, post),
    "scatter": text(scatter, shapes, columns),
    "scan": text(layers, ((4096, 2048), (12, 2048, 2048)), (P("x"), P())),
}))
"""


@dataclass(frozen=True)
class Device:
    """What a timeline reads of a JAX device."""

    device_kind: str
    coords: list[int]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Texts by the real TPU compiler, for four chips of v5p in a ring, and their devices."""
    environment = {**os.environ, **tpu_target.ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def compiled(told: dict[str, Any]) -> dict[str, Module]:
    """The modules by name."""
    return {name: parse(text) for name, text in told.items() if name != "devices"}


@pytest.fixture(scope="module")
def devices(told: dict[str, Any]) -> list[Device]:
    """The devices, in the order of the mesh."""
    return [Device(kind, coords) for kind, coords in told["devices"]]


def cycles_of(computation: Computation) -> int:
    return sum(estimated_cycles(instruction) or 0 for instruction in computation.instructions)


def sent_bytes(timeline: Timeline) -> int:
    return sum(collective.bytes_on_wire for collective in timeline.collectives)


X_BYTES = 4096 * 2048 * 2
"""Of the array that the programs gather."""


@needs_libtpu
def test_compute_time_is_the_sum_of_the_compiler_s_cycles(
    compiled: dict[str, Module], devices: list[Device]
) -> None:
    module = compiled["dot"]
    timeline = simulate(module, topology=devices)
    assert (timeline.hardware, timeline.topology) == ("tpu_v5p", "2x2x1 tpu_v5p chips, no wraparound")
    assert_consistent(timeline)
    assert timeline.compute_s * TPU.clock_hz == pytest.approx(cycles_of(module.entry_computation))
    assert timeline.compute_s > 2 * 4096 * 2048 * 8192 / TPU.flops_for("bfloat16"), "no faster than the peak"
    assert any(event.kind == "matmul" for event in timeline.events)


@needs_libtpu
def test_an_all_gather_and_its_ring_send_the_same_bytes(
    compiled: dict[str, Module], devices: list[Device]
) -> None:
    whole, ring = (simulate(compiled[name], topology=devices) for name in ("gather", "gather ring"))
    for timeline in (whole, ring):
        assert_consistent(timeline)
        assert sent_bytes(timeline) == X_BYTES * 3 // 4
    assert [c.opcode for c in whole.collectives] == ["all-gather"]
    assert whole.collectives[0].next_to_dot == "feeds"
    assert whole.exposed_s == pytest.approx(X_BYTES * 3 / 4 / (2 * TPU.link_bytes_per_s)), (
        "two links into a chip"
    )
    assert {c.opcode for c in ring.collectives} == {"collective-permute"}
    assert ring.peak_in_flight == 2, "one half-shard each way"


@needs_libtpu
def test_xla_s_own_collective_matmul_hides_hops_on_a_ring(compiled: dict[str, Module]) -> None:
    ring = Topology.axis(4, TPU)
    timeline = simulate(compiled["gather by XLA"], TPU, ring)
    assert_consistent(timeline)
    assert {collective.opcode for collective in timeline.collectives} == {"collective-permute"}
    assert sent_bytes(timeline) >= X_BYTES * 3 // 4
    assert timeline.exposed_s < simulate(compiled["gather"], TPU, ring).exposed_s


@needs_libtpu
def test_on_a_square_of_chips_the_ways_of_both_directions_cross(
    compiled: dict[str, Module], devices: list[Device]
) -> None:
    """From (0,1) to (1,0) there is no link: two hops of the ring take a detour that others need."""
    assert [device.coords[:2] for device in devices] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    module = compiled["gather by XLA"]
    on_a_square, on_a_ring = simulate(module, topology=devices), simulate(module, TPU, Topology.axis(4, TPU))
    assert on_a_square.exposed_s > on_a_ring.exposed_s
    assert on_a_square.compute_s == pytest.approx(on_a_ring.compute_s)


@needs_libtpu
def test_a_scattered_sum_is_a_reduce_scatter_however_it_is_spelled(
    compiled: dict[str, Module], devices: list[Device]
) -> None:
    timeline = simulate(compiled["scatter"], topology=devices)
    assert_consistent(timeline)
    sums = [c for c in timeline.collectives if c.opcode in ("all-reduce", "reduce-scatter")]
    (collective,) = sums
    result_bytes = 4096 * 8192 * 2
    assert collective.bytes_on_wire == pytest.approx(result_bytes * 3 / 4, rel=0.05), "but for padding"
    assert collective.next_to_dot == "follows"


@needs_libtpu
def test_a_scan_runs_its_layers(compiled: dict[str, Module], devices: list[Device]) -> None:
    timeline = simulate(compiled["scan"], topology=devices)
    assert_consistent(timeline)
    assert {collective.executions for collective in timeline.collectives} == {12}
    gathers = [collective for collective in timeline.collectives if collective.opcode == "all-gather"]
    assert sum(gather.bytes_on_wire for gather in gathers) == 12 * X_BYTES * 3 // 4


@pytest.mark.parametrize("program", ["gather", "scatter"])
def test_cpu_rings_send_what_the_collective_did(program: str) -> None:
    mesh = mesh_of(8)
    bodies: dict[str, tuple[Any, Any, Any]] = {
        "gather": (lambda x, w: lax.all_gather(x, "x", tiled=True) @ w, (P("x"), P(None, "x")), P(None, "x")),
        "scatter": (lambda x, w: lax.psum_scatter(x @ w, "x", tiled=True), (P(None, "x"), P("x")), P("x")),
    }
    body, specs, out = bodies[program]
    function = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out))
    x, w = jnp.zeros((128, 64)), jnp.zeros((64, 256))
    moved_bytes = 4 * (x.size if program == "gather" else 128 * 256)
    for compiled in (function, overlap_collectives(function, policy="always", strict=True)):
        text = jax.jit(compiled).lower(x, w).compile().as_text()
        assert text is not None
        timeline = simulate(parse(text))
        assert_consistent(timeline)
        assert timeline.hardware == "cpu"
        assert sent_bytes(timeline) == moved_bytes * 7 // 8
        permutes = [c for c in timeline.collectives if c.opcode == "collective-permute"]
        # Of a gather what comes last comes in halves.
        assert len(permutes) == (0 if compiled is function else 8 if program == "gather" else 7)
        assert all(c.source.startswith(__file__) or not c.source for c in timeline.collectives)
