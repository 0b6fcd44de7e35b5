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
