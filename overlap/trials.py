"""Trials of chains: the policies ``verify`` and ``autotune``, with all that remembers what they found."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from cost_model import Hardware
from overlap import autotune, trial_target, verify
from overlap.processes import agreed
from overlap.progress_bar import progress_bar
from overlap.schedule_cache import ScheduleCache, default_directory
from overlap.trial_target import Target
from overlap.trial_times import Times, choose
from overlap.warning import warn
from passes import Choice, Excerpt, Trial, shims
from passes.graph import COLLECTIVES, equations

logger = logging.getLogger("overlap")

HardwareOf = Callable[[str | None], Hardware | None]


class Trials:
    """Compiles and times the schedules of chains, and their rings together, once: a ``passes.TryOut``.

    ``verify`` models the time of what the compiler made. ``autotune`` runs it; where the devices are not
    there, or belong to some of the job's processes only, it verifies. A chain whose mesh has devices of
    another kind than the hardware is not verified: the cost model decides. Where the devices are those of all
    processes of a job, these go by what process 0 found: they differ in what they measure, keep in their
    caches, and have memory to compile. All must then come to the same chains in the same order, as they do
    when they all run one program.

    Args:
      policy: which of the two.
      hardware_of: from the kind of a mesh's devices to hardware.
      compiler_options: those of the user's ``jax.jit``.
      cache: where results are kept; None for the user's.
    """

    def __init__(
        self,
        policy: Literal["verify", "autotune"],
        hardware_of: HardwareOf,
        compiler_options: Mapping[str, Any] | None = None,
        cache: ScheduleCache | None = None,
    ) -> None:
        self._policy = policy
        self._hardware_of = hardware_of
        self._compiler_options = compiler_options or {}
        self._cache = cache
        self._targets: dict[Any, tuple[Target, dict[str, Any]] | None] = {}
        self._found: dict[str, Times | None] = {}
        self._warned = False
        # Read before somebody edits the sources of the code that is running.
        trial_target.emission()

    def __call__(self, program: Excerpt[Choice], choices: tuple[Choice, ...], /) -> Trial[Choice] | None:
        """Which version of a part of a program to run; None where the part itself cannot be timed."""
        known = self._target(program)
        if known is None:
            return None
        target, description = known
        jaxpr = program.original.trace(*program.arguments).jaxpr  # type: ignore[attr-defined]
        times, kind = None, "measured"
        if self._policy == "autotune" and autotune.measurable(target):
            if program.whole:
                if not autotune.harmless(jaxpr, program.arguments):
                    return None
                choices = choices[: autotune.SELECTIONS]
            times = self._times("autotune", program, jaxpr, choices, target, description)
            if times is None and program.whole:
                return None
        if times is None:
            if not self._told_by_schedules(target):
                return None
            kind = "modelled"
            times = self._times("verify", program, jaxpr, choices, target, description)
        return None if times is None else choose(times, choices, kind)

    def _target(self, program: Excerpt[Any]) -> tuple[Target, dict[str, Any]] | None:
        """What a chain is compiled for; None if that is not known."""
        if program.mesh not in self._targets:
            self._targets[program.mesh] = self._make_target(program.mesh)
        return self._targets[program.mesh]

    def _make_target(self, mesh: Any) -> tuple[Target, dict[str, Any]] | None:
        if not isinstance(mesh, jax.sharding.Mesh):
            return None
        hardware = self._hardware_of(mesh.devices.flat[0].device_kind)
        if hardware is None:
            return None
        target = Target(mesh, hardware, self._compiler_options)
        return target, target.description()

    def _told_by_schedules(self, target: Target) -> bool:
        """Whether the schedules of the mesh's compiler are those of the hardware: else, with a warning, not.

        A given hardware need not be that of the devices, as where a laptop's mesh stands for a TPU's. GPUs
        of one maker have one compiler, however many products.
        """
        hardware, device = target.hardware, target.devices[0]
        if not hardware.device_kinds or device.device_kind in hardware.device_kinds:
            return True
        if device.platform == "gpu" and hardware.network == "switch":
            return True
        if not self._warned:
            warn(
                f"policy='verify' compiles for the mesh's devices ({device.device_kind}), whose schedules "
                f"tell nothing of {hardware.name}: the cost model decides, as under policy='auto'. Make the "
                f"mesh of devices of {hardware.name}; jax.experimental.topologies has such as are not there."
            )
            self._warned = True
        return False

    def _times(
        self,
        policy: Literal["verify", "autotune"],
        program: Excerpt[Choice],
        jaxpr: Any,
        choices: tuple[Choice, ...],
        target: Target,
        description: Mapping[str, Any],
    ) -> Times | None:
        """What is known or can be found of a chain."""
        key = trial_target.key(policy, jaxpr, program, choices, description)
        if key in self._found:
            return self._found[key]
        if self._cache is None:
            self._cache = ScheduleCache(default_directory())
        times = agreed(self._cache.load(key, choices), choices, target)
        if times is None:
            take = autotune.measured_times if policy == "autotune" else verify.modelled_times
            where = place(jaxpr)
            what = "the program of" if program.whole else "rings for"
            count, total = itertools.count(), 1 + len(choices)
            with progress_bar(f"compiling {what} {where}") as progress:

                def one_more() -> None:
                    progress(next(count), total)

                one_more()
                times = agreed(take(program, choices, target, one_more), choices, target)
            logger.debug("%s of %s: %s", policy, where, times)
            if times is not None and times.lasting:
                conditions = {
                    "policy": policy,
                    "program" if program.whole else "chain": where,
                    **{name: description[name] for name in ("device_kind", "mesh_shape", "versions")},
                }
                self._cache.store(key, times, choices, conditions)
        self._found[key] = times
        return times


def place(jaxpr: Any) -> str:
    """The first collective of a chain's program, and where it is in the user's code."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name in COLLECTIVES:
            line = shims.source_line(eqn)
            return f"{eqn.primitive.name} at {line}" if line != shims.UNKNOWN else eqn.primitive.name
    return "a chain"


def trials_for(policy: Any, hardware_of: HardwareOf, compiler_options: Mapping[str, Any]) -> Trials | None:
    """The trials of a decorated function; None where its policy needs none.

    Args:
      policy: see ``overlap_collectives``.
      hardware_of: from the kind of a mesh's devices to hardware.
      compiler_options: those of the function's ``jax.jit``.
    """
    if policy not in ("verify", "autotune"):
        return None
    return Trials(policy, hardware_of, compiler_options)
