"""Decides on chains as the library does, and compiles what it decides between."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jax
from jax.sharding import Mesh

import cost_model
import overlap
import passes
from bench.deciding import chains
from bench.deciding.chains import Drawn
from bench.deciding.rows import ORIGINAL, Compiled, Decided
from bench.schedules import decided, measure, programs
from bench.schedules.case import Slice
from cost_model import Estimate, Topology
from overlap import verify
from overlap.compiled_memory import temporary_bytes
from overlap.hlo.parse import parse
from overlap.hlo.simulate import simulate
from overlap.trial_target import Target
from passes import RingSchedule, Trial, shims

ONLY_PREDICTING: Final = frozenset(
    {
        f"passes/{name}.py"
        for name in ("candidates", "decide", "hidden", "pricing", "rules", "reasons", "site")
    }
    | {
        f"cost_model/{name}.py"
        for name in (
            "break_even",
            "calibration",
            "chain_sizes",
            "exchange",
            "explanation",
            "fitting",
            "form",
            "forms",
            "in_turn",
            "layer",
            "layer_time",
            "list_schedule",
            "matmul",
            "matmul_table",
            "mesh_split",
            "offloaded",
            "on_chip",
            "pipeline",
            "plain_chain",
            "ring",
            "ring_copies",
            "ring_on_chip",
            "ring_work",
            "strategies",
            "windows",
        )
    }
)
"""Sources that decide which schedules there are and how they are priced, and not how a schedule is compiled
and timed: what was compiled stays good when they change."""


def decide(chain: Drawn) -> Decided:
    """What ``policy="auto"`` decides: the plan of the chain's program, as ``explain`` and a call make it."""
    _, decision = decided.decision_of(decided.plan_of(_original(chain), operands_of(chain), "auto"))
    if decision.ring is None or decision.estimate is None:
        raise ValueError(f"{chain.name}: no ring is priced, {decision.reason.sentence}")
    return Decided(
        name=chain.name,
        rewritten=decision.rewritten,
        reason=str(decision.reason.code),
        schedule=decided.name_of(decision.ring.chain, decision.ring.schedule),
        original_s=decision.estimate.original_s,
        ring_s=decision.estimate.overlapped_s,
    )


def predict(chain: Drawn) -> dict[str, Estimate]:
    """Schedule → prediction of every candidate that a search would consider, the fastest first."""
    return {name: priced for name, (_, priced) in candidates_of(chain).items()}


def compile_one(chain: Drawn, schedule: str) -> Compiled:
    """The chain as written (``ORIGINAL``) or as one ring, compiled and timed as ``policy="verify"`` does.

    A ring is put into the program in the same way as one that the library chooses.
    """
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        mesh, operands = mesh_of(chain.slice), operands_of(chain)
        program = _original(chain)
        if schedule != ORIGINAL:
            program = forced(chain, candidates_of(chain)[schedule][0])
        hardware = cost_model.by_name(chain.slice.hardware)
        compiled = verify.compiled_for(program, operands, Target(mesh, hardware))
        module = parse(compiled.as_text())
        timeline = simulate(module, hardware, Topology.from_devices(mesh.devices, hardware))
        found = {
            "seconds": timeline.total_s,
            "compute_s": timeline.compute_s,
            "matmul_s": measure.matmuls(module, timeline)["matmul_s"],
            "exposed_s": timeline.exposed_s,
            "copy_wait_s": timeline.copy_wait_s,
            "temporary_bytes": temporary_bytes(compiled),
        }
    except Exception as failure:  # whatever the compiler or the library raises belongs into the row
        found = {"error": verify.one_line(failure)}
    jax.clear_caches()
    return Compiled(name=chain.name, schedule=schedule, **found, wall_s=time.perf_counter() - start)


def sources() -> str:
    """A digest of the sources that make of a schedule a compiled program and its modelled time."""
    digest = hashlib.sha256()
    for path in read_sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def read_sources() -> Iterator[Path]:
    """The files of that digest."""
    top = Path(overlap.__file__ or "").parent.parent
    for folder in ("cost_model", "passes", "overlap/hlo"):
        for path in sorted((top / folder).glob("*.py")):
            if path.relative_to(top).as_posix() not in ONLY_PREDICTING:
                yield path
    for name in (
        "overlap/verify",
        "bench/deciding/chains",
        "bench/deciding/measure",
        "bench/schedules/programs",
        "bench/schedules/decided",
    ):
        yield top / f"{name}.py"


@functools.cache
def mesh_of(where: Slice) -> Mesh:
    """Compile-only devices of a slice; made once."""
    return measure.tpu_mesh(where)


def operands_of(chain: Drawn) -> tuple[Any, ...]:
    """The types of the arguments of the chain's program, sharded."""
    return programs.operands(chains.problem(chain), mesh_of(chain.slice))


def _original(chain: Drawn) -> Any:
    """The chain's program as written."""
    return programs.manual(chains.problem(chain), mesh_of(chain.slice))


def candidates_of(chain: Drawn) -> dict[str, tuple[RingSchedule, Estimate]]:
    """Name → schedule and price, the fastest first: those of a search, and the one that is decided for."""
    plan = decided.plan_of(_original(chain), operands_of(chain), "auto")
    return decided.candidates_of(plan, mesh_of(chain.slice), cost_model.by_name(chain.slice.hardware))


def forced(chain: Drawn, schedule: RingSchedule) -> Callable[..., Any]:
    """The chain's program with a ring of this schedule, jitted."""
    taken: Trial[RingSchedule] = Trial(schedule, 1.0, 0.5, "modelled")
    plan = decided.plan_of(_original(chain), operands_of(chain), "verify", lambda *_: taken)
    run = passes.rewritten(plan)

    def program(*operands: Any) -> Any:
        with shims.hops_vary():  # as in a call, for it is the whole program
            return tuple(run(*operands))

    return jax.jit(program)


def answer(request: str) -> Mapping[str, Any]:
    """What a worker finds.

    Args:
      request: JSON, of ``compile`` (a chain's name) and ``schedule``; or of ``decide`` or ``predict``, the
        names of chains. The answer to ``compile`` is a ``Compiled``, to the others one item per name.
    """
    asked = json.loads(request)
    if "compile" in asked:
        return dataclasses.asdict(compile_one(Drawn.from_name(asked["compile"]), asked["schedule"]))
    if "decide" in asked:
        found = [dataclasses.asdict(decide(Drawn.from_name(name))) for name in asked["decide"]]
    else:
        found = [
            {
                schedule: dataclasses.asdict(priced)
                for schedule, priced in predict(Drawn.from_name(name)).items()
            }
            for name in asked["predict"]
        ]
    jax.clear_caches()
    return {"found": found}
