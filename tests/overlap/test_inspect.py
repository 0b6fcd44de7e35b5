"""``overlap.inspect`` compiles both versions of a decorated function, for devices that need not be there."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import cost_model
import overlap
from overlap import tpu_slice, tpu_target
from overlap.inspection import devices_of
from tests.libtpu import needs_libtpu
from tests.overlap import timelines
from tests.overlap.calibrations import calibration

ROOT = Path(__file__).resolve().parents[2]
ROWS, COLUMNS = PartitionSpec("x"), PartitionSpec(None, "x")
DEVICES = 4


def mesh() -> Mesh:
    return jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])


def gather() -> Any:
    """A jitted all-gather that feeds a dot."""

    @jax.jit
    @jax.shard_map(mesh=mesh(), in_specs=(ROWS, COLUMNS), out_specs=COLUMNS)
    def gather(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, "x", tiled=True) @ w

    return gather


def shapes(size: int = 512) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((size, size), jnp.float32)] * 2


class TestInspect:
    def test_compiles_a_decorated_function_and_its_original(self) -> None:
        found = overlap.inspect(overlap.overlap_collectives(gather(), policy="always"), *shapes())
        assert found.name == "gather"
        assert [label for label, _ in found.programs] == ["original", "overlapped"]
        original, overlapped = (timeline for _, timeline in found.programs)
        assert [c.opcode for c in original.collectives] == ["all-gather"]
        assert [c.opcode for c in overlapped.collectives] == ["collective-permute"] * DEVICES
        sent = 512 * 512 * 4 * (DEVICES - 1) // DEVICES
        for timeline in (original, overlapped):
            assert sum(c.bytes_on_wire for c in timeline.collectives) == sent
            assert all(c.source.startswith(f"{__file__}:") for c in timeline.collectives)

    def test_takes_arrays_and_runs_nothing(self) -> None:
        def ran(_: Any) -> None:
            raise AssertionError("it ran")

        def noisy(x: jax.Array) -> jax.Array:
            jax.debug.callback(ran, x)
            return x + 1

        found = overlap.inspect(noisy, jnp.ones(8))
        assert [label for label, _ in found.programs] == [""]
        assert found.collectives == 0

    def test_a_function_that_is_not_decorated_is_shown_alone(self) -> None:
        found = overlap.inspect(gather(), *shapes())
        assert [label for label, _ in found.programs] == [""]
        assert found.titled[0][0] == "jit_gather"

    def test_the_decorator_s_hardware_is_modelled_or_another_that_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.json"
        calibration(dataclasses.replace(cost_model.by_name("tpu_v5e"), name="mine")).write(path)
        decorated = overlap.overlap_collectives(gather(), policy="always", hardware="tpu_v5p")

        def hardware(**options: Any) -> set[str]:
            found = overlap.inspect(decorated, *shapes(), **options)
            return {timeline.hardware for _, timeline in found.programs}

        assert hardware() == {"tpu_v5p"}
        assert hardware(hardware="h100") == {"h100"}
        assert hardware(hardware=path) == hardware(hardware=str(path)) == {"mine"}
        mine = overlap.overlap_collectives(gather(), hardware=path).hardware
        assert mine is not None and mine.name == "mine"
        ((_, plain),) = overlap.inspect(gather(), *shapes(), hardware="TPU v5p").programs
        assert plain.hardware == "tpu_v5p" and plain.topology.startswith("4 ")
        assert plain.assumptions[0].startswith("The program is the compiler's for cpu, its schedule too")
        ((_, plain),) = overlap.inspect(gather(), *shapes()).programs
        assert plain.hardware == "cpu"
        with pytest.raises(ValueError, match="unknown hardware 'abacus'"):
            overlap.inspect(gather(), *shapes(), hardware="abacus")

    def test_a_method_is_inspected_with_its_instance(self) -> None:
        class Model:
            bias = 3.0

            @overlap.overlap_collectives
            def apply(self, x: jax.Array) -> jax.Array:
                return x + self.bias

        jax.tree_util.register_static(Model)
        assert overlap.inspect(Model().apply, jnp.ones(8)).name == "apply"

    def test_keyword_and_static_arguments_are_those_of_a_call(self) -> None:
        jitted = jax.jit(lambda x, *, n: x * n, static_argnames="n")
        assert overlap.inspect(overlap.overlap_collectives(jitted), jnp.ones(4), n=3).collectives == 0

    def test_what_is_no_function(self) -> None:
        with pytest.raises(TypeError, match=r"takes a function, not int"):
            overlap.inspect(3)  # type: ignore[arg-type]

    def test_what_cannot_be_traced_raises_as_a_call_would(self) -> None:
        def wrong(x: jax.Array) -> jax.Array:
            raise LookupError("nothing there")

        with pytest.raises(LookupError, match="nothing there"):
            overlap.inspect(wrong, jnp.ones(4))


class TestInspection:
    def test_prints_a_table_of_80_columns(self) -> None:
        lines = str(timelines.inspection()).splitlines()
        assert max(map(len, lines)) <= 80
        assert any(line.startswith("before → after, modelled: 100 µs → 55.0 µs") for line in lines)

    def test_a_notebook_gets_the_page_in_a_frame_without_privileges(self) -> None:
        shown = timelines.inspection()._repr_html_()
        assert shown.startswith('<iframe sandbox="allow-scripts" ')
        assert shown.count("<") == 2, "the page is escaped, so that nothing of it is the notebook's"

    def test_json_can_be_read_back(self) -> None:
        told = json.loads(timelines.inspection().to_json())
        before, after = told["inspections"][0]["programs"]
        assert [before["exposed_s"], after["exposed_s"]] == pytest.approx([60e-6, 10e-6])
        assert [c["name"] for c in after["collectives"]] == ["permute.2", "permute.1"]
        assert "modelled" in told["times"]

    def test_files_need_a_path(self) -> None:
        found = timelines.inspection()
        for write in (found.to_html, found.trace):
            with pytest.raises(TypeError, match="give the path of the file to write, not NoneType"):
                write(None)  # type: ignore[arg-type]

    def test_needs_a_program(self) -> None:
        with pytest.raises(ValueError, match="needs a program"):
            overlap.Inspection("f", ())


class TestDevices:
    def test_a_mesh_tells_their_order(self) -> None:
        devices = jax.devices()[:4]
        turned = Mesh([devices[i] for i in (2, 0, 3, 1)], ("x",))
        shardings = [SingleDeviceSharding(devices[0]), NamedSharding(turned, ROWS)]
        assert [device.id for device in devices_of(shardings)] == [2, 0, 3, 1]

    def test_without_a_mesh_they_come_by_id(self) -> None:
        assert devices_of([SingleDeviceSharding(jax.devices()[3])]) == [jax.devices()[3]]
        assert devices_of([None]) == []


class TestSlice:
    @pytest.mark.parametrize(
        ("text", "read"),
        [
            ("v5p:2x2x4", ("tpu_v5p", (2, 2, 4))),
            ("tpu7x:2x2x1", ("tpu_7x", (2, 2, 1))),
            ("16", (None, (16,))),
        ],
    )
    def test_shapes(self, text: str, read: Any) -> None:
        assert tpu_slice.read_shape(text) == read

    @pytest.mark.parametrize("text", ["", "x", "2x", "0x2", "2x2x2x2", "v5p:", "v5p:2,2"])
    def test_what_is_no_shape(self, text: str) -> None:
        with pytest.raises(ValueError, match="no shape of a slice"):
            tpu_slice.read_shape(text)

    def test_no_slice_is_larger_than_a_pod(self) -> None:
        assert tpu_slice.read_shape("tpu7x:16x24x24") == ("tpu_7x", (16, 24, 24))
        with pytest.raises(ValueError, match="too large: the largest pod has 9,216 chips"):
            tpu_slice.read_shape("v5p:100x100x100")

    @pytest.mark.parametrize("text", ["v5e:4x4x4", "v6e:8x32", "v5e:17", "v5p:24x24x16", "v4:4x4x512"])
    def test_no_slice_is_larger_than_a_pod_of_its_chips(self, text: str) -> None:
        with pytest.raises(ValueError, match=f"{text} is no slice of tpu_.*: its pods have 16×"):
            tpu_slice.slice_on(text, None)

    @pytest.mark.parametrize("text", ["v5e:4x4x1", "v6e:16x16", "v5p:16x20x28", "v4:4x4x256", "16x24x24"])
    def test_slices_of_a_pod(self, text: str) -> None:
        _, shape = tpu_slice.slice_on(text, None if ":" in text else cost_model.by_name("tpu_7x"))
        assert "x".join(map(str, shape)) == text.split(":")[-1]


SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
import cost_model, overlap
from overlap import tpu_slice

def laid(name, mesh_shape):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    mesh = topologies.make_mesh(topology, mesh_shape, tuple("xyz"[: len(mesh_shape)]))
    hardware, shape = tpu_slice.read_shape(name)
    own = tpu_slice.devices(cost_model.by_name(hardware), shape, mesh.size, mesh_shape)
    return mesh, [(d.coords, d.core_on_chip) for d in own], [
        (tuple(d.coords), d.core_on_chip) for d in mesh.devices.flat
    ]

same = {}
for name, shape in [("v5p:2x2x4", (16,)), ("v5p:2x2x4", (4, 4)), ("v5e:4x4", (16,)), ("tpu7x:2x2x1", (8,))]:
    _, own, real = laid(name, shape)
    same[f"{name} {shape}"] = own == real

mesh, _, _ = laid("v5p:2x2x1", (4,))
@overlap.overlap_collectives(policy="always", strict=True)
@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P(None, "x"))
def gather(x, w):
    return jax.lax.all_gather(x, "x", tiled=True) @ w

args = [
    jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    for spec in (P("x"), P(None, "x"))
]
found = overlap.inspect(gather, *args)
found.trace(sys.argv[1])
print(json.dumps({"same": same, **json.loads(found.to_json())["inspections"][0]}))
"""


@needs_libtpu
def test_for_a_pod_that_is_not_there(tmp_path: Path) -> None:
    environment = {**os.environ, **tpu_target.ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "trace.json")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert all(told["same"].values()), told["same"]
    original, overlapped = told["programs"]
    for program in (original, overlapped):
        assert program["hardware"] == "tpu_v5p"
        assert sum(c["bytes_on_wire"] for c in program["collectives"]) == 4096 * 4096 * 2 * 3 // 4
    (one,) = original["collectives"]
    assert one["opcode"] == "all-gather"
    assert one["exposed_s"] == pytest.approx(one["wire_s"]), "a synchronous one is waited for"
    assert one["hint"].startswith("feeds a dot")
    assert {c["opcode"] for c in overlapped["collectives"]} == {"collective-permute"}
    names = {e["args"].get("name") for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    links = {name for name in names if name and re.match(r"[xyz][+-]", name)}
    assert links, "the links have threads of their own"
