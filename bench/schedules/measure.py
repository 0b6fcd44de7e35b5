"""Compiles every version of a case's program, and times the schedules that the compiler chose."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import datetime
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from bench.schedules import grid, programs
from bench.schedules.case import Case, Slice
from bench.schedules.order import order
from bench.schedules.rows import (
    AUTO,
    AUTOMATIC,
    ORIGINAL,
    POST_SPMD,
    TEXTBOOK,
    VERIFY,
    VERSIONS,
    Figures,
    Row,
)
from cost_model import Topology, by_name
from cost_model.offload_options import offload_options
from overlap import overlap_collectives, tpu_target
from overlap.compiled_memory import temporary_bytes
from overlap.decorator import Overlapped
from overlap.exposure import COMPUTE, MEMORY
from overlap.hlo.module import Module
from overlap.hlo.parse import parse
from overlap.hlo.shapes import Shape
from overlap.hlo.simulate import simulate
from overlap.hlo.timeline import Timeline

POST_SPMD_OPTIONS: Final[Mapping[str, str]] = {
    "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
    "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
}
"""With these XLA:TPU rewrites collectives of manual programs, as it does by default of automatic ones."""

H100_ENVIRONMENT: Final[Mapping[str, str]] = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
}
"""Environment of a process that compiles for H100s without one."""

H100_TARGET: Final = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 9 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""XLA's GpuTargetConfig of one H100 SXM."""

_NAME: Final = re.compile(r"module @\S+")

Known = dict[tuple[str, frozenset[tuple[str, str]]], Figures]
"""What was compiled before: by its text and its options."""

NOT_OURS: Final[Mapping[str, Any]] = {"schedule": "", "rewritten": 0, "sites": 0, "sentences": ()}
"""What there is to say of decisions where the library made none."""


def tpu_mesh(where: Slice) -> Mesh:
    """The mesh of a slice's compile-only devices."""
    return mesh_of(where.topology, where.mesh_shape, where.axis_names)


def mesh_of(slice_name: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """A mesh of a TPU slice's compile-only devices, laid along physical rings where jax can."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=slice_name)
    try:
        devices = topologies.make_mesh(topology, shape, names).devices
    except (AssertionError, NotImplementedError, ValueError):  # of v4, where each core is a device
        devices = np.array(tpu_target.devices(slice_name)).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def h100_mesh() -> Mesh:
    """Eight H100s behind one switch, to compile for; the process must have ``H100_ENVIRONMENT``."""
    from jax.experimental import topologies

    described = topologies.get_topology_desc(platform="cuda", target_config=H100_TARGET, topology="1x1x8")
    return Mesh(np.array(described.devices), ("x",), axis_types=(AxisType.Auto,))


def measure(case: Case, mesh: Mesh, wanted: Collection[str] = VERSIONS, *, offloaded: bool = False) -> Row:
    """The row of a case. A version that does not compile leaves its error; the others are not affected.

    Args:
      case: what to measure.
      mesh: of devices of its slice.
      wanted: the versions to measure; of a row's limit the original is needed.
      offloaded: whether programs are compiled with the chip's `offload_options`. Those that are not this
        library's are compiled without them too, and the faster one counts, with the memory of the one with
        them, and the matmuls of the one whose matmuls take less.
    """
    start = time.perf_counter()
    hardware = by_name(case.slice.hardware)
    options = offload_options(hardware) if offloaded else {}
    problem = programs.problem(case)
    original = programs.manual(problem, mesh)
    plain = programs.called(original, problem, mesh)
    asked = programs.compiled_with(original, problem, mesh, options)
    both: tuple[Mapping[str, str], ...] = ({}, options) if options else ({},)
    versions: dict[str, tuple[Callable[[], Any], Sequence[Mapping[str, str]]]] = {
        ORIGINAL: (lambda: plain, both),
        AUTOMATIC: (lambda: programs.automatic(problem, mesh), both),
        TEXTBOOK: (lambda: programs.textbook(problem, mesh), both),
        AUTO: (lambda: overlap_collectives(asked, policy="auto", strict=True), (options,)),
    }
    if hardware.name.startswith("tpu"):
        versions[POST_SPMD] = (lambda: plain, [{**POST_SPMD_OPTIONS, **each} for each in both])
    versions[VERIFY] = (lambda: overlap_collectives(asked, policy="verify", strict=True), (options,))
    topology = Topology.from_devices(mesh.devices, hardware)
    operands = programs.operands(problem, mesh)
    figures: dict[str, Figures] = {}
    failures: dict[str, str] = {}
    compiled: Known = {}
    for version, (make, ways) in versions.items():
        if version not in wanted:
            continue
        try:
            found = [compiled_figures(make(), operands, topology, way, compiled) for way in ways]
            fastest = min(found, key=lambda each: each.total_s)
            figures[version] = dataclasses.replace(
                fastest, temp_bytes=found[-1].temp_bytes, matmul_s=min(each.matmul_s for each in found)
            )
        except Exception as error:  # whatever the compiler or the library raises belongs into the row
            failures[version] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
    jax.clear_caches()
    return Row(
        **described(case),
        matmul_s=figures[ORIGINAL].matmul_s if ORIGINAL in figures else 0.0,
        links_s=grid.moved_s(problem.moved, topology, grid.groups(case.slice)),
        versions=figures,
        failures=failures,
        wall_s=time.perf_counter() - start,
    )


def described(case: Case) -> dict[str, Any]:
    """The fields of a row that say what its case is."""
    return {
        "name": case.name,
        "chip": case.slice.chip,
        "slice": str(case.slice),
        "pattern": case.pattern,
        "width": case.width.name,
        "tokens": case.tokens,
        "dtype": case.dtype,
        "axis_size": case.slice.axis_size,
    }


def compiled_figures(
    function: Any,
    operands: Sequence[Any],
    topology: Topology,
    options: Mapping[str, str] | None = None,
    known: Known | None = None,
) -> Figures:
    """Compiles a jitted function, or one of ours, and times its schedule.

    Args:
      function: the program.
      operands: types of its arguments, sharded.
      topology: the devices' network.
      options: the compiler's, beside its defaults.
      known: figures of what was compiled before, by its text and its options; is added to.
        The same program is not compiled twice: all its figures but the search are those of the first time.
    """
    known = {} if known is None else known
    begin = time.perf_counter()
    decided = decisions(function, operands) if isinstance(function, Overlapped) else {}
    searched, before_s = time.perf_counter(), time.process_time()
    lowered = function.trace(*operands).lower(lowering_platforms=platforms(topology))
    program = _NAME.sub("", lowered.as_text()), frozenset((options or {}).items())
    if program in known:
        return dataclasses.replace(known[program], **{**NOT_OURS, **decided}, search_s=searched - begin)
    compiled = lowered.compile(compiler_options=dict(options) if options else None)
    compile_cpu_s = time.process_time() - before_s
    module = parse(compiled.as_text())
    timeline = simulate(module, topology=topology)
    sceptical = simulate(module, topology=topology, elementwise="bandwidth")
    found = order(module, topology.hardware)
    known[program] = Figures(
        total_s=timeline.total_s,
        sceptical_s=sceptical.total_s,
        compute_s=timeline.compute_s,
        exposed_s=timeline.exposed_s,
        copy_wait_s=timeline.copy_wait_s,
        **matmuls(module, timeline),
        link_s=busiest_link_s(timeline),
        temp_bytes=temporary_bytes(compiled) or 0,
        search_s=searched - begin,
        compile_cpu_s=compile_cpu_s,
        order=found.text,
        permutes=found.permutes,
        idle=found.idle,
        date=today(),
        **decided,
    )
    return known[program]


def today() -> str:
    """The date, in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def platforms(topology: Topology) -> tuple[str, ...]:
    """What to lower for: the process itself runs on a CPU."""
    return ("cuda",) if topology.hardware.network == "switch" else ("tpu",)


def matmuls(module: Module, timeline: Timeline) -> dict[str, Any]:
    """Time and number of a schedule's matmuls, and the result type that takes the most time."""
    seconds: dict[str, float] = {}
    count = 0
    types = {
        instruction.name: type_of(instruction.shape)
        for computation in module.computations.values()
        for instruction in computation.instructions
    }
    for event in timeline.events:
        if event.kind == "matmul":
            took_s = (event.end_s - event.start_s) * event.repeats
            seconds[types[event.name]] = seconds.get(types[event.name], 0.0) + took_s
            count += event.repeats
    return {
        "matmul_s": sum(seconds.values()),
        "matmuls": count,
        "matmul_type": max(seconds, key=lambda name: seconds[name], default=""),
    }


def type_of(shape: Shape) -> str:
    """The largest array of a result, such as ``"bf16[128,1792]"``."""
    array = max(shape.arrays, key=lambda array: array.size, default=shape)
    return f"{array.dtype}[{','.join(map(str, array.dims))}]"


def busiest_link_s(timeline: Timeline) -> float:
    """Seconds in which the busiest link direction is occupied."""
    links: dict[str, float] = {}
    for event in timeline.events:
        if event.stream not in (COMPUTE, MEMORY):
            took_s = (event.end_s - event.start_s) * event.repeats
            links[event.stream] = links.get(event.stream, 0.0) + took_s
    return max(links.values(), default=0.0)


def decisions(function: Overlapped, operands: Sequence[Any]) -> dict[str, Any]:
    """What the library decided about the program's collectives."""
    sites = function.explain(*operands).sites
    return {
        "schedule": "; ".join(site.schedule if site.rewritten else "kept" for site in sites),
        "rewritten": sum(site.rewritten for site in sites),
        "sites": len(sites),
        "sentences": tuple(dict.fromkeys(s.sentence for s in sites if not s.rewritten)),
    }
