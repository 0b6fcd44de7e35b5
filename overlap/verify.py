"""``policy="verify"``: compiles a chain and its rings, and times the schedules that the compiler chose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from overlap.compiled_memory import temporary_bytes
from overlap.trial_target import Target
from overlap.trial_times import GAIN, Failed, Timed, Times
from passes import Choice, Excerpt

logger = logging.getLogger("overlap")

NEAR_LIMIT: Final = 0.03
"""How close to the limit a ring must be for the other schedules not to be compiled."""

ERROR_LENGTH: Final = 300
"""Characters of a compiler's error that are kept."""


@dataclass(frozen=True, slots=True)
class Modelled:
    """A compiled program and the modelled time of its schedule.

    Attributes:
      timed: time and memory.
      limit_s: what no ring of this chain beats by much: the compute or the wire, whichever takes longer.
    """

    timed: Timed
    limit_s: float


def compiled_for(program: Any, arguments: Sequence[Any], target: Target) -> Any:
    """The program compiled for the target.

    Raises:
      Exception: whatever tracing or compiling raises.
    """
    options = dict(target.compiler_options)
    if len(target.processes) > 1 and target.devices[0].platform == "gpu":
        # Else the compiler waits until every process of the job compiles this, and some have it cached.
        options.setdefault("xla_gpu_shard_autotuning", False)
    return program.trace(*arguments).lower().compile(compiler_options=options or None)


def modelled(program: Any, arguments: Sequence[Any], target: Target) -> Modelled:
    """Compiles a program and models the time of its schedule.

    Raises:
      Exception: whatever compiling raises, or reading and timing what came out.
    """
    from cost_model import Topology
    from overlap.hlo.module import host_transfers
    from overlap.hlo.parse import parse
    from overlap.hlo.simulate import simulate

    compiled = compiled_for(program, arguments, target)
    topology = Topology.from_devices(target.mesh.devices, target.hardware)
    module = parse(compiled.as_text())
    between_slices, _ = host_transfers(module)
    if between_slices:
        raise ValueError("what travels between slices has no price in a compiled schedule")
    timeline = simulate(module, target.hardware, topology)
    # An all_reduce does twice the work of the reduce_scatter that may be all that was asked for.
    wire_s = sum(c.wire_s / (2 if c.opcode == "all-reduce" else 1) for c in timeline.collectives)
    timed = Timed(timeline.total_s, temporary_bytes(compiled))
    return Modelled(timed, max(timeline.compute_s, wire_s))


def modelled_times(
    program: Excerpt[Choice],
    choices: Sequence[Choice],
    target: Target,
    done: Callable[[], None],
) -> Times | None:
    """The modelled times of a chain and of its rings, until one is as good as can be.

    Of a whole program it is enough that a version gains.

    Args:
      program: the chain.
      choices: the rings to try, the most promising first.
      target: what to compile for.
      done: called after each program.

    Returns:
      The times; None where the chain as written cannot be compiled and timed.
    """
    try:
        original = modelled(program.original, program.arguments, target)
    except Exception as error:
        logger.debug("the chain as written cannot be timed: %s", one_line(error))
        return None
    done()
    enough_s = (1 + NEAR_LIMIT) * original.limit_s
    if program.whole:
        enough_s = original.timed.seconds / (1 + GAIN)
    rings: list[Timed | Failed] = []
    for choice in choices:
        ring: Timed | Failed
        try:
            ring = modelled(program.version(choice), program.arguments, target).timed
        except Exception as error:
            ring = Failed(one_line(error), lasting=isinstance(error, jax.errors.JaxRuntimeError))
            log_failed(choice, ring)
        else:
            logger.debug("%s: %s", choice, ring)
        rings.append(ring)
        done()
        if len(rings) >= program.compared and any(
            isinstance(ring, Timed) and ring.fits(original.timed) and ring.seconds <= enough_s
            for ring in rings
        ):
            break
    return Times(original.timed, tuple(rings))


def log_failed(choice: object, ring: Failed) -> None:
    """Tells of a ring that failed."""
    logger.debug("the ring %s is passed over: %s", choice, ring.error)


def one_line(error: Exception) -> str:
    """An error in one line of bounded length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_LENGTH]
