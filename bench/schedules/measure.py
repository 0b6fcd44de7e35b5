"""Compiles every version of a case's program, and times the schedules that the compiler chose."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import importlib.util
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import passes
from bench.schedules import grid, programs
from bench.schedules.case import Case, Slice
from bench.schedules.rows import AUTO, AUTOMATIC, ORIGINAL, POST_SPMD, TEXTBOOK, VERIFY, Figures, Row
from cost_model import Topology, by_name
from overlap import overlap_collectives, tpu_target
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

_NAME: Final = re.compile(r"module @\S+")

NOT_OURS: Final[Mapping[str, Any]] = {"schedule": "", "rewritten": 0, "sites": 0, "sentences": ()}
"""What there is to say of decisions where the library made none."""


def can_verify() -> bool:
    """Whether the library can try schedules out on the compiler."""
    return "verify" in passes.POLICIES and importlib.util.find_spec("overlap.verify") is not None


def tpu_mesh(where: Slice) -> Mesh:
    """The mesh of a slice's compile-only devices, laid along physical rings where jax can."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name=where.topology)
    names = where.axis_names
    try:
        devices = topologies.make_mesh(topology, where.mesh_shape, names).devices
    except (AssertionError, NotImplementedError, ValueError):  # of v4, where each core is a device
        devices = np.array(tpu_target.devices(where.topology)).reshape(where.mesh_shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def measure(case: Case, mesh: Mesh, *, verify: bool = True) -> Row:
    """The row of a case. A version that does not compile leaves its error; the others are not affected.

    Args:
      case: what to measure.
      mesh: of devices of its slice.
      verify: whether to measure ``policy="verify"`` too, if the library has it.
    """
    start = time.perf_counter()
    problem = programs.problem(case)
    original = programs.manual(problem, mesh)
    # The library's programs call what they keep: so does this, that a kept program is seen to be the same.
    plain = programs.called(problem, mesh, original)
    versions: dict[str, tuple[Callable[[], Any], Mapping[str, str] | None]] = {
        ORIGINAL: (lambda: plain, None),
        AUTOMATIC: (lambda: programs.automatic(problem, mesh), None),
        POST_SPMD: (lambda: plain, POST_SPMD_OPTIONS),
        TEXTBOOK: (lambda: programs.textbook(problem, mesh), None),
        AUTO: (lambda: overlap_collectives(original, policy="auto", strict=True), None),
    }
    if verify and can_verify():
        versions[VERIFY] = (lambda: overlap_collectives(original, policy="verify", strict=True), None)
    hardware = by_name(case.slice.hardware)
    topology = Topology.from_devices(mesh.devices, hardware)
    operands = programs.operands(problem, mesh)
    figures: dict[str, Figures] = {}
    failures: dict[str, str] = {}
    compiled: dict[tuple[str, bool], Figures] = {}
    for version, (make, options) in versions.items():
        try:
            figures[version] = compiled_figures(make(), operands, topology, options, compiled)
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
    known: dict[tuple[str, bool], Figures] | None = None,
) -> Figures:
    """Compiles a jitted function, or one of ours, and times its schedule.

    Args:
      function: the program.
      operands: types of its arguments, sharded.
      topology: the devices' network.
      options: the compiler's, beside its defaults.
      known: figures of what was compiled before, by its text and whether it had options; is added to.
        The same program is not compiled twice: all its figures but the search are those of the first time.
    """
    known = {} if known is None else known
    begin = time.perf_counter()
    decided = decisions(function, operands) if isinstance(function, Overlapped) else {}
    searched = time.perf_counter()
    lowered = function.trace(*operands).lower()
    program = _NAME.sub("", lowered.as_text()), options is not None
    if program in known:
        return dataclasses.replace(known[program], **{**NOT_OURS, **decided}, search_s=searched - begin)
    compiled = lowered.compile(compiler_options=dict(options) if options else None)
    done = time.perf_counter()
    module = parse(compiled.as_text())
    timeline = simulate(module, topology=topology)
    sceptical = simulate(module, topology=topology, elementwise="bandwidth")
    known[program] = Figures(
        total_s=timeline.total_s,
        sceptical_s=sceptical.total_s,
        compute_s=timeline.compute_s,
        exposed_s=timeline.exposed_s,
        copy_wait_s=timeline.copy_wait_s,
        **matmuls(module, timeline),
        link_s=busiest_link_s(timeline),
        temp_bytes=int(compiled.memory_analysis().temp_size_in_bytes),
        search_s=searched - begin,
        compile_s=done - searched,
        **decided,
    )
    return known[program]


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
