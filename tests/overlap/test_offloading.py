"""Compiler options that have collectives run beside dots by themselves, and what is decided by them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from cost_model import by_name
from overlap import offload_options, overlap_collectives
from tests.libtpu import needs_libtpu
from tests.passes.tpu_process import told_by


def psum(options: dict[str, str] | None = None) -> tuple[Any, tuple[Any, ...]]:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    body = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "x"), mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P()
    )
    shapes = ((4096, 32768), P(None, "x")), ((32768, 4096), P("x"))
    arguments = tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in shapes
    )
    return jax.jit(body, compiler_options=options), arguments


def schedule(function: Any, arguments: tuple[Any, ...], hardware: Any) -> str:
    (site,) = overlap_collectives(function, hardware=hardware, policy="auto").explain(*arguments).sites
    return site.schedule


@pytest.mark.parametrize("chip", ["tpu_v5e", "tpu_v5p", "tpu_v6e"])
def test_decisions_go_by_the_function_s_options(chip: str) -> None:
    assert "all_reduces" not in schedule(*psum(), chip)
    options = offload_options(chip)
    assert "all_reduces in turn" in schedule(*psum(options), chip)
    assert "all_reduces in turn" in schedule(*psum(options), by_name(chip))
    off = dict.fromkeys(options, "false")
    assert schedule(*psum(off), chip) == schedule(*psum(), chip)


def test_those_of_7x_can_be_turned_off() -> None:
    off = {option: "false" for _, option in by_name("tpu_7x").offload_options}
    assert "in turn" in schedule(*psum(), "tpu_7x")
    assert "in turn" not in schedule(*psum(off), "tpu_7x")


def test_attached_devices_and_names() -> None:
    assert offload_options() == {}  # of CPUs
    assert offload_options("tpu_v4") == {"xla_enable_async_all_gather": "true"}
    assert offload_options(by_name("tpu_v4")) == offload_options("tpu_v4")
    with pytest.raises(ValueError, match="unknown hardware 'v99'"):
        offload_options("v99")


def test_what_is_decorated_anew_keeps_them() -> None:
    function, arguments = psum(offload_options("tpu_v6e"))
    decorated = overlap_collectives(function, hardware="tpu_v6e")
    assert decorated.hardware == by_name("tpu_v6e")
    assert "all_reduces in turn" in schedule(decorated, arguments, "tpu_v6e")


def test_the_report_tells_where_none_is_set() -> None:
    def hint(options: dict[str, str] | None, hardware: Any) -> str:
        function, arguments = psum(options)
        return overlap_collectives(function, hardware=hardware).explain(*arguments).hint

    assert 'overlap.offload_options("tpu_v6e")' in hint(None, "tpu_v6e")
    own = dataclasses.replace(by_name("tpu_v6e"), name="mine")
    assert "On mine" in hint(None, own) and "overlap.offload_options(hardware)" in hint(None, own)
    options = offload_options("tpu_v6e")
    for chosen in (options, dict.fromkeys(options, "false")):
        assert hint(chosen, "tpu_v6e") == ""
    for hardware in ("tpu_7x", "h100", None):
        assert hint(None, hardware) == ""


SCRIPT = """
import json, re, sys
import jax, jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from overlap import offload_options, overlap_collectives, tpu_target
from overlap.hlo.parse import parse
from overlap.hlo.simulate import simulate
from cost_model import Topology, by_name

slice_name, chip, name = sys.argv[1:]
devices = tpu_target.devices(slice_name)
topology = Topology.from_devices(devices, by_name(chip))
mesh = Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))
SIZE = len(devices)
PROGRAMS = {
    "gather": (
        lambda x, w: x @ lax.all_gather(w, "x", axis=0, tiled=True),
        (P("x"), P("x")), P("x"), (1024 * SIZE, 4096), (4096, 14336),
    ),
    "psum": (
        lambda x, w: lax.psum(x @ w, "x"),
        (P(None, "x"), P("x")), P(), (4096, 2048 * SIZE), (2048 * SIZE, 4096),
    ),
}
body, specs, out, *shapes = PROGRAMS[name]
mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out)
arguments = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
    for shape, spec in zip(shapes, specs)
]
jitted = jax.jit(mapped, compiler_options=offload_options(chip))
decorated = overlap_collectives(jitted)
found = [decorated.explain(*arguments).sites[0].schedule]
for function in (jitted, decorated):
    module = parse(function.lower(*arguments).compile().as_text())
    found.append(simulate(module, topology=topology).exposed_s)
print(json.dumps(found))
"""


@needs_libtpu
@pytest.mark.parametrize(
    ("slice_name", "chip", "name"),
    [
        ("v4:2x2x1", "tpu_v4", "gather"),
        ("v5e:2x4", "tpu_v5e", "psum"),
        ("v5p:2x2x2", "tpu_v5p", "gather"),
        ("v6e:2x4", "tpu_v6e", "psum"),
    ],
)
def test_the_compiler_does_what_the_options_say(slice_name: str, chip: str, name: str) -> None:
    """Alone a collective is waited for; pieces of it, in turn, run beside the dots by themselves."""
    schedule, original_s, ours_s = told_by(SCRIPT, slice_name, chip, name)
    assert "in turn" in schedule
    assert ours_s < 0.7 * original_s
