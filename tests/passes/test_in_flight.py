"""Rings of sums that do not need each other: the TPU compiler finds an order for the hops of all."""

from __future__ import annotations

import pytest

from passes import shims
from tests.libtpu import needs_libtpu
from tests.passes.tpu_process import told_by

SCRIPT = """
import json
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from overlap import overlap_collectives, tpu_target
from passes.schedule import RingSchedule
from tests.passes.spmd import only_schedule

def scatter(x, w):
    return lax.psum_scatter(x @ w, "y", tiled=True)

def psum(x, w):
    return lax.psum(x @ w, "y")

def rings(function, *arrays):
    half = len(arrays) // 2
    return [function(x, w) for x, w in zip(arrays[:half], arrays[half:])]

def mapped(mesh, body):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("y"), out_specs=P("y"), check_vma=False))

def several(mesh, function, count):
    "So many in one body."
    return overlapped(mapped(mesh, partial(rings, function)))

def calls(mesh, function, count):
    "A rewritten function that is called so often."
    return jax.jit(partial(rings, overlapped(mapped(mesh, function))))

def maps(mesh, function, count):
    "As many bodies of one program."
    return overlapped(jax.jit(partial(rings, mapped(mesh, function))))

def in_turn(mesh, function, count):
    "As many bodies, each of what the one before has made."
    step = mapped(mesh, function)
    def body(*arrays):
        factor = jnp.bfloat16(1)
        for x, w in zip(arrays[:count], arrays[count:]):
            factor = step(x * factor, w).sum()
        return factor
    return overlapped(jax.jit(body))

def unrolled(mesh, function, count):
    "As many iterations of a loop, written out by jax."
    def body(x, *others):
        step = lambda factor, w: (factor + 1, function(x * factor, w))
        return lax.scan(step, jnp.bfloat16(1), jnp.stack(others[-count:]), unroll=count)[1]
    return overlapped(mapped(mesh, body))

overlapped = partial(overlap_collectives, policy="always", strict=True)

def started(make, topology, schedule, count, function=scatter):
    "How many hops of a compiled program of so many rings were started explicitly."
    devices = np.array(tpu_target.devices(topology))
    mesh = Mesh(devices, ("y",))
    arguments = [
        jax.ShapeDtypeStruct((devices.size * rows, width), jnp.bfloat16, sharding=NamedSharding(mesh, P("y")))
        for rows, width in [(256, 64)] * count + [(64, 128)] * count
    ]
    with only_schedule(schedule):
        lowered = make(mesh, function, count).lower(*arguments)
    lowered.compile()
    return lowered.as_text().count('@"collective-permute-start"')

both_ways = RingSchedule(directions=2, chains=2, wire="operand")
"""

COMPILED = """
three = RingSchedule(directions=1, chains=3, wire="operand")
chunks = RingSchedule(directions=1, columns=2, wire="operand")
print(json.dumps([
    started(several, "v5e:2x2", both_ways, 4) / (4 * 4 * 3),
    started(several, "tpu7x:2x2x1", both_ways, 4) / (4 * 4 * 7),
    started(several, "v5e:2x2", three, 6) / (6 * 3 * 3),
    started(several, "v5e:2x2", chunks, 6, psum) > 0,
]))
"""

BODIES = """
makers = (in_turn, calls, maps, unrolled)
print(json.dumps([started(make, "v5e:2x2", both_ways, 3) > 0 for make in makers]))
"""


@pytest.mark.skipif(not shims.EXPLICIT_STARTS, reason="the compiler of this jax places the starts itself")
@needs_libtpu
def test_rings_of_one_body_wait_for_each_other() -> None:
    """XLA began with hops of three rings of four pieces, could go on with none, and refused the program."""
    assert told_by(SCRIPT + COMPILED) == [1, 1, 1, True]


@pytest.mark.skipif(not shims.EXPLICIT_STARTS, reason="the compiler of this jax places the starts itself")
@needs_libtpu
def test_rings_that_cannot_wait_for_each_other_do_not_start_their_hops() -> None:
    """The compiler places the starts in what is called elsewhere too, or has other bodies beside it.

    Not where each body needs what the one before it has made.
    """
    assert told_by(SCRIPT + BODIES) == [True, False, False, False]
