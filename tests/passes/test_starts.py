"""Hops that are started explicitly keep their pairs, whatever else is sent of the same value."""

from __future__ import annotations

import pytest

from overlap.hlo import parse
from passes import shims
from tests.libtpu import needs_libtpu
from tests.passes.tpu_process import told_by

SCRIPT = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from overlap import overlap_collectives, tpu_target

mesh = Mesh(np.array(tpu_target.devices("v5e:2x2")).reshape(2, 2), ("x", "y"))
ins, outs = (P(("x", "y")), P(), P()), (P("y"), P("x"))

def body(x, w, v):
    return lax.all_gather(x, "x", tiled=True) @ w, lax.all_gather(x, "y", tiled=True) @ v

arguments = [
    jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P(("x", "y")))),
    *[jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P()))] * 2,
]
function = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))
lowered = overlap_collectives(function, policy="always", strict=True).lower(*arguments)
print(json.dumps(lowered.compile().as_text()))
"""


@pytest.mark.skipif(not shims.EXPLICIT_STARTS, reason="the compiler of this jax places the starts itself")
@needs_libtpu
def test_one_shard_sent_along_two_axes_arrives_along_both() -> None:
    """XLA once took the second start for the first: the same operand, and pairs that it did not look at."""
    module = parse(told_by(SCRIPT))
    starts = [i for i in module.entry_computation.instructions if i.opcode == "collective-permute-start"]
    pairs = {start.attributes["source_target_pairs"] for start in starts}
    assert pairs == {"{{0,2},{2,0},{1,3},{3,1}}", "{{0,1},{1,0},{2,3},{3,2}}"}


MESHES = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from overlap import overlap_collectives, tpu_target

mesh = Mesh(np.array(tpu_target.devices("v5e:2x2")).reshape(2, 2), ("x", "y"))

def compiled(body, shapes, ins, shardings, manual=("x", "y"), dtype=jnp.bfloat16):
    mapped = jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=P("x"), axis_names={*manual})
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, shardings)
    ]
    lowered = overlap_collectives(jax.jit(mapped), policy="always", strict=True).lower(*arguments)
    return lowered.as_text().count('@"collective-permute-start"'), lowered.compile().as_text()

square, replicated = ((1024, 1024), (1024, 1024)), (P("x"), P())

def scatter(x, w):
    return lax.psum_scatter(jnp.tile(x, (2, 1)) @ w, "x", tiled=True)
"""

NOT_STARTED = """
def permutes(*program, **options):
    started, text = compiled(*program, **options)
    return [started, *map(text.count, ("collective-permute-start(", "all-gather(", "all-gather-start("))]

def mlp(x, w, v):
    h = jnp.tanh(lax.all_gather(x, "x", tiled=True) @ w)
    return lax.psum_scatter(h @ v, "x", tiled=True)

def running_sum(x, w):
    return lax.scan(lambda c, _: (c + scatter(x, w), None), x, length=3)[0]

def gradient(x, w):
    def loss(x, w):
        step = lambda c, _: (c + (jnp.tanh(lax.all_gather(x, "x", tiled=True)) @ w).sum(), None)
        return lax.scan(step, jnp.bfloat16(0) * x.sum() * w.sum(), length=3)[0]
    return jax.grad(loss)(x, w)

tensors = (P(None, "x"), P("x", None))
print(json.dumps({
    "auto axis": permutes(
        mlp, ((256, 256), (256, 512), (512, 256)), (P("x"), *tensors), (P("x", "y"), *tensors), manual="x"
    ),
    "same in every iteration": permutes(running_sum, square, replicated, replicated),
    "carried unchanged": permutes(gradient, square, replicated, replicated),
    "complex": permutes(scatter, square, replicated, replicated, dtype=jnp.complex64),
}))
"""

ALL_ZERO = """
from passes.schedule import RingSchedule
from tests.passes.spmd import only_schedule

def scatter(x, w):
    partial = (jnp.tile(x, (2, 1)) @ w).astype(jnp.int8)
    return lax.psum_scatter(partial * jnp.int8(0), "x", tiled=True)

with only_schedule(RingSchedule(directions=2, chains=2)):
    started, text = compiled(scatter, square, replicated, replicated)
print(json.dumps([started, text.count("collective-permute-start("), text.count("collective-permute-done(")]))
"""


@needs_libtpu
def test_compilers_take_rings_whose_hops_may_not_be_started_explicitly() -> None:
    """The TPU compiler refuses hops started within a mesh of other axes too, or gathers all that they send.

    It refuses, or ends the process over, hops started of what is the same in every iteration of a loop.
    """
    told = told_by(MESHES + NOT_STARTED)
    assert all(started == 0 and permutes > 0 for started, permutes, *_ in told.values()), told
    assert told["auto axis"][2:] == [0, 0], "nothing is gathered along y"


@pytest.mark.skipif(not shims.EXPLICIT_STARTS, reason="the compiler of this jax places the starts itself")
@needs_libtpu
def test_equal_sums_are_sent_each_by_a_hop_of_its_own() -> None:
    """XLA once took the starts of all four pieces, sums of zeros, for one; the process ended over it."""
    assert told_by(MESHES + ALL_ZERO) == [4, 4, 4]


SLICES = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from overlap import overlap_collectives
from passes.network import several_slices

told = []
for slices in (1, 2):
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=slices)
    devices = sorted(topology.devices, key=lambda device: getattr(device, "slice_index", 0))
    mesh = Mesh(np.array(devices).reshape(slices, 4), ("pod", "x"))
    ins = (P(("pod", "x")), P(None, "x"))
    body = lambda x, w: lax.all_gather(x, "x", tiled=True) @ w
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((slices * 1024, 512), (512, 1024)), ins)
    ]
    function = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=P("pod", "x"), check_vma=False))
    lowered = overlap_collectives(function, policy="always", strict=True).lower(*arguments)
    started = lowered.as_text().count('@"collective-permute-start"')
    permutes = lowered.compile().as_text().count("collective-permute-start(")
    told.append([several_slices(mesh), started, permutes])
print(json.dumps(told))
"""


@needs_libtpu
def test_a_ring_within_one_of_several_slices_starts_no_hop_itself() -> None:
    """The compiler of jax 0.12 ended the process, wherever the ring was."""
    one, two = told_by(SLICES)
    assert one[0] is False and (one[1] > 0) == shims.EXPLICIT_STARTS
    assert two[:2] == [True, 0]
    assert one[2] > 0 and two[2] > 0


LOOP_AROUND = """
def layer(x, w):
    return jnp.tanh(x @ lax.all_gather(w, "x", tiled=True))

step = overlap_collectives(
    jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))),
    policy="always",
    strict=True,
)
arguments = [jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))] * 2
looped = jax.jit(lambda x, w: lax.fori_loop(0, 3, lambda _, x: step(x, w), x))
found = []
for function in (step, looped, overlap_collectives(looped, policy="always", strict=True)):
    lowered = function.lower(*arguments)
    said = [line for line in lowered.as_text().splitlines() if '@"collective-permute-' in line]
    permutes = lowered.compile().as_text().count("collective-permute-start(")
    found.append([permutes, len(said), sum("has_side_effect = true" in line for line in said)])
print(json.dumps(found))
"""


@pytest.mark.skipif(not shims.EXPLICIT_STARTS, reason="the compiler of this jax places the starts itself")
@needs_libtpu
def test_a_loop_around_the_rewritten_function_keeps_both_halves_of_its_hops() -> None:
    """XLA once moved the start of a hop out of the loop, and left its end in it: the process ended.

    Without a loop around it neither half is kept in its place, which would cost time.
    """
    assert told_by(MESHES + LOOP_AROUND) == [[1, 2, 0], [1, 2, 2], [1, 2, 2]]


NARROW = """
def layer(x, w):
    return x * (x @ lax.all_gather(w, "x", tiled=True)).sum().astype(x.dtype)

step = overlap_collectives(
    jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))),
    policy="always",
    strict=True,
)
arguments = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    for shape in ((64, 512), (512, 8))
]
looped = jax.jit(lambda x, w: lax.fori_loop(0, 3, lambda _, x: step(x, w), x))
print(json.dumps(looped.lower(*arguments).compile().as_text().count("collective-permute-start(")))
"""


@needs_libtpu
def test_a_loop_around_the_rewritten_function_keeps_the_layout_of_what_it_sends() -> None:
    """XLA once moved it out of the loop, laid narrow weights out otherwise within, and refused the start."""
    assert told_by(MESHES + NARROW) == 1


ROLLED = """
import re
from unittest import mock
from passes import RingSchedule

mesh = Mesh(np.array(tpu_target.devices("v5p:2x2x2")), ("x",))
mapped = jax.shard_map(
    lambda x, w: lax.psum_scatter(x @ w, "x", tiled=True),
    mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P("x"),
)
arguments = [
    jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    for spec in (P(None, "x"), P("x"))
]
schedule = RingSchedule(directions=2, unroll=2)
with mock.patch("passes.prices.candidates", lambda *_, **__: (schedule,)):
    lowered = overlap_collectives(jax.jit(mapped), policy="always", strict=True).lower(*arguments)
done, late = set(), []
for line in lowered.as_text().splitlines():
    if found := re.search(r'collective-permute-done"\\((%\\S+?)\\)', line):
        done.add(found[1])
    elif "optimization_barrier" in line:
        operands = re.findall(r"%[\\w#]+", line.split("optimization_barrier")[1].split(":")[0])
        late += [operand for operand in operands if operand in done]
print(json.dumps([len(done), late]))
"""


@pytest.mark.skipif(not shims.EXPLICIT_STARTS, reason="the compiler of this jax places the starts itself")
@needs_libtpu
def test_no_hop_of_a_rolled_scatter_is_tied_once_it_is_done() -> None:
    """The TPU compiler ends the process over a future that is tied and then not used."""
    ended, tied_late = told_by(MESHES + ROLLED)
    assert ended > 4 and tied_late == []


GATED = """
import re

def layer(x, w):
    return jnp.einsum("bd,dgf->bgf", x, lax.all_gather(w, "x", tiled=True))

def gradient(x, w):
    return jax.grad(lambda w: (layer(x, w).astype(jnp.float32) ** 2).sum())(w)

def sent(body, *sizes, axes=None):
    specs = P("x"), P("x")
    function = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)
    ours = overlap_collectives(jax.jit(function), policy="always", strict=True)
    if axes is not None:
        specs = [P(*[None] * (axis == 0), *spec) for spec, axis in zip(specs, axes)]
    arguments = [
        jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for size, spec in zip(sizes, specs)
    ]
    called = ours if axes is None else jax.jit(jax.vmap(ours, axes))
    text = called.lower(*arguments).compile().as_text()
    hops = re.findall(r"= \\((\\S+), .* collective-permute-start\\(", text)
    return sorted({re.sub(r".*{(.*?):.*", r"\\1", hop) for hop in hops})

x, w = (256, 512), (512, 2, 1024)
print(json.dumps([
    sent(layer, x, w),
    sent(gradient, x, w),
    sent(layer, x, (3, *w), axes=(None, 0)),
    sent(layer, x, (512, 3, 2, 1024), axes=(None, 1)),
]))
"""


@pytest.mark.skipif(not shims.EXPLICIT_STARTS, reason="the compiler of this jax places the starts itself")
@needs_libtpu
def test_a_gate_with_what_it_gates_is_sent_by_the_rows_of_each() -> None:
    """Two rows fill a quarter of a tile: an addition of what arrived took 70 us for 7 MB (v6e)."""
    assert told_by(MESHES + GATED) == [["2,0,1"], ["2,0,1"], ["3,1,2,0"], ["3,1,2,0"]]
