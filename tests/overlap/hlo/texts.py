"""HLO texts for the tests: compiled here and now, and two written by hand."""

# ruff: noqa: E501 (an instruction is one line)

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

ROOT: Final = Path(__file__).resolve().parents[3]


def cpu_text(function: Any, *args: Any) -> str:
    """What the CPU compiler makes of a function."""
    return str(jax.jit(function).lower(*args).compile().as_text())


def cpu_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """The virtual CPU devices as a mesh."""
    return Mesh(np.array(jax.devices()).reshape(shape), names)


TPU_PROGRAMS: Final = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices)
ring_mesh = Mesh(devices, ("x",))
grid = Mesh(devices.reshape(2, 4), ("a", "b"))

def arg(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

def ring(x, w):
    parts = []
    for hop in range(8):
        ahead = lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)]) if hop < 7 else x
        ahead, x = lax.optimization_barrier((ahead, x))
        parts.append(x @ w)
        x = ahead
    return jnp.concatenate(parts)

def nested(x):
    def inner(i, y):
        return jnp.tanh(y @ y)
    return lax.fori_loop(0, 3, lambda i, y: lax.fori_loop(i * 0 + 2, 12, inner, y) * 2, x)

def layers(x, w):
    for i in range(3):
        x = jax.nn.relu(x @ w[i])
    return x

programs = {
    "ring": (
        jax.shard_map(ring, mesh=ring_mesh, in_specs=(P("x"), P()), out_specs=P("x")),
        arg(ring_mesh, (8 * 256, 1024), "x"), arg(ring_mesh, (1024, 1024)),
    ),
    "scan": (lambda x: lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=7)[0],
             arg(ring_mesh, (256, 256))),
    "nested": (nested, arg(ring_mesh, (256, 256))),
    "layers": (layers, arg(grid, (4096, 2048), ("a", "b")), arg(grid, (3, 2048, 2048), None, "b")),
}
print(json.dumps({name: jax.jit(f).trace(*args).lower().compile().as_text()
                  for name, (f, *args) in programs.items()}))
"""


@functools.cache
def tpu_texts() -> dict[str, str]:
    """What the TPU compiler makes of a ring of 7 hops, of loops, and of three layers with gathered weights."""
    from overlap import tpu_target

    environment = {**os.environ, **tpu_target.ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TPU_PROGRAMS]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    texts: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return texts


GPU: Final = r"""HloModule jit_ring, is_scheduled=true, entry_computation_layout={(f32[128,64]{1,0})->f32[128,128]{1,0}}, num_partitions=8

FileNames
1 "/home/a user/ring \"2\".py"

FunctionNames
1 "<module>"
2 "ring"

FileLocations
1 {file_name_id=1 function_name_id=1 line=40 end_line=40 column=3 end_column=9}
2 {file_name_id=1 function_name_id=2 line=12 end_line=12 column=8 end_column=20}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}


%region_0.0 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main.1 (param.1: f32[128,64]) -> f32[128,128] {
  %param.1 = f32[128,64]{1,0} parameter(0), sharding={devices=[8,1]<=[8]}, metadata={op_name="x"}
  %cp-start = ((f32[128,64]{1,0}), f32[128,64]{1,0}) collective-permute-start(%param.1), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}, metadata={op_name="jit(ring)/ppermute" scheduling_name="cp-start" stack_frame_id=2}, backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":false,"backend":"DEFAULT"}}
  %gemm = (f32[128,128]{1,0}, s8[4194304]{0}) custom-call(%param.1, %param.1), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(ring)/dot_general" source_file="/home/u/older.py" source_line=7}, backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},"epilogue":"DEFAULT","note":"a \"brace\": } {"},"wait_on_operation_queues":[]}
  %get-tuple-element.3 = f32[128,128]{1,0} get-tuple-element(%gemm), index=0
  %cp-done = f32[128,64]{1,0} collective-permute-done(%cp-start), metadata={op_name="jit(ring)/ppermute" stack_frame_id=2}
  %ag-start = ((f32[128,64]{1,0}, f32[4]{0}), (f32[256,64]{1,0}, f32[8]{0})) all-gather-start(%cp-done, %small), channel_id=2, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, use_global_device_ids=true
  %ag-done = (f32[256,64]{1,0}, f32[8]{0}) all-gather-done(%ag-start)
  %top = (f32[16,5]{1,0}, s32[16,5]{1,0}) custom-call(%cp-done), custom_call_target="__gpu$TopK", api_version=API_VERSION_TYPED_FFI, backend_config={is_stable = true, order = "TOTAL"}, control-predecessors={%gemm, %ag-done}
  %sum.1 = f32[64]{0} all-reduce(%small), replica_groups=mesh['a'=2,'b'=4] {'a'}, channel_id=3, use_global_device_ids=true, to_apply=%region_0.0
  ROOT %out = f32[128,128]{1,0} add(%get-tuple-element.3, /*index=1*/%get-tuple-element.3)
}
""".replace("  %cp-start", "  %small = f32[4]{0} constant({1, 2, -3, 4e-05})\n  %cp-start", 1)
"""A GPU module in few lines, after jax 0.12's dumps for an H100."""

SPARSECORE: Final = """HloModule jit_f, is_scheduled=true, num_partitions=8

%called_computation (param_0.7: f32[64,64]) -> f32[256,64] {
  %param_0.7 = f32[64,64]{1,0:T(8,128)} parameter(0)
  ROOT %all-gather.2 = f32[256,64]{1,0:T(8,128)} all-gather(%param_0.7), channel_id=1, replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}, use_global_device_ids=true
}, execution_thread="sparsecore"

%fused_computation.17 (p.0: bf16[256,256]) -> (bf16[256,256], bf16[256,512], u32[]) {
  %p.0 = bf16[256,256]{1,0} parameter(0)
  %all-gather.34 = bf16[256,512]{1,0} all-gather(%p.0), channel_id=7, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={1}, use_global_device_ids=true
  %flag = u32[]{:S(2)} constant(0)
  ROOT %t.0 = (bf16[256,256]{1,0}, bf16[256,512]{1,0}, u32[]{:S(2)}) tuple(%p.0, %all-gather.34, %flag)
}

%async_collective_fusion.64 (p.1: bf16[256,256], p.2: bf16[256,512], p.3: u32[]) -> (bf16[256,256], bf16[256,256], bf16[256,512], u32[]) {
  %p.1 = bf16[256,256]{1,0} parameter(0)
  %p.2 = bf16[256,512]{1,0} parameter(1)
  %p.3 = u32[]{:S(2)} parameter(2)
  %convolution.31 = bf16[256,256]{1,0} convolution(%p.1, %p.1), dim_labels=bf_io->bf
  %all-gather.36 = bf16[256,512]{1,0} all-gather(%p.1), channel_id=7, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={1}, use_global_device_ids=true
  ROOT %t.1 = (bf16[256,256]{1,0}, bf16[256,256]{1,0}, bf16[256,512]{1,0}, u32[]{:S(2)}) tuple(%convolution.31, %p.1, %all-gather.36, %p.3)
}

%fused_computation.20 (p.4: bf16[256,256], p.5: bf16[256,512], p.6: u32[]) -> bf16[256,512] {
  %p.4 = bf16[256,256]{1,0} parameter(0)
  %p.5 = bf16[256,512]{1,0} parameter(1)
  %p.6 = u32[]{:S(2)} parameter(2)
  ROOT %all-gather.40 = bf16[256,512]{1,0} all-gather(%p.4), channel_id=7, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={1}, use_global_device_ids=true
}

ENTRY %main (x: f32[64,64], y: bf16[256,256]) -> bf16[256,512] {
  %x = f32[64,64]{1,0:T(8,128)} parameter(0)
  %y = bf16[256,256]{1,0} parameter(1)
  %call-start = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%called_computation
  %call-update = ((f32[64,64]{1,0:T(8,128)}), f32[256,64]{1,0:T(8,128)}) call-update(%call-start, %x)
  %async-collective-start = (bf16[256,256]{1,0}, bf16[256,512]{1,0}, u32[]{:S(2)}) fusion(%y), kind=kCustom, calls=%fused_computation.17
  %g.0 = bf16[256,256]{1,0} get-tuple-element(%async-collective-start), index=0
  %g.1 = bf16[256,512]{1,0} get-tuple-element(%async-collective-start), index=1
  %g.2 = u32[]{:S(2)} get-tuple-element(%async-collective-start), index=2
  %fusion.64 = (bf16[256,256]{1,0}, bf16[256,256]{1,0}, bf16[256,512]{1,0}, u32[]{:S(2)}) fusion(%g.0, %g.1, %g.2), kind=kOutput, calls=%async_collective_fusion.64
  %g.4 = bf16[256,256]{1,0} get-tuple-element(%fusion.64), index=1
  %g.5 = bf16[256,512]{1,0} get-tuple-element(%fusion.64), index=2
  %g.6 = u32[]{:S(2)} get-tuple-element(%fusion.64), index=3
  %call-done = f32[256,64]{1,0:T(8,128)} call-done(%call-update)
  ROOT %async-collective-done = bf16[256,512]{1,0} fusion(%g.4, %g.5, %g.6), kind=kCustom, calls=%fused_computation.20
}
"""
"""Two forms of asynchronous gathers of the TPU compiler: on a sparse core, and cut into fusions."""
