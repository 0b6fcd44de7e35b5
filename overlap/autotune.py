"""``policy="autotune"``: runs a chain and its rings on the attached devices and takes the wall-clock time."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from overlap.compiled_memory import temporary_bytes
from overlap.meeting import meeting
from overlap.processes import everywhere, of_process_0
from overlap.speedup import speedup
from overlap.trial_target import Target
from overlap.trial_times import Failed, Timed, Times
from overlap.verify import compiled_for, log_failed, one_line
from passes import Choice, Excerpt
from passes.graph import equations
from passes.shims import has_effects, named_axes

logger = logging.getLogger("overlap")

WARM_UPS: Final = 2
"""Calls of each program before the timed ones."""

HEAT: Final = 6
"""Samples of each program; all programs take turns."""

FINALISTS: Final = 2
"""Rings that are timed further: the fastest of the heat."""

ROUNDS: Final = 20
"""Samples of the chain as written and of each finalist, those of the heat among them."""

CALLS: Final = 4
"""Calls per sample, sent off one after the other so that the device does not wait for the host."""

SELECTIONS: Final = 7
"""Selections of a whole program's rings that are timed at most."""

WHOLE_BYTES: Final = 1 << 30
"""Bytes per device that the arguments of a whole program may have; the user's own lie beside them."""

HARMFUL: Final = frozenset(
    {"while", "pure_callback", "io_callback", "debug_callback", "debug_print", "ffi_call"}
)
"""Primitives that keep a whole program from being run: with arguments that are not the user's, a loop may
never end, and code outside the program may do anything.
"""


@dataclass(frozen=True, slots=True)
class Runnable:
    """A compiled version of a chain.

    Attributes:
      run: calls it.
      temporary_bytes: see `Timed`.
    """

    run: Callable[..., Any]
    temporary_bytes: int | None


def measurable(target: Target) -> bool:
    """Whether the programs of a target can be timed: its devices are there, and all processes take part.

    Processes must decide alike, so what one of them measured is told to all; that takes them all.
    """
    if not target.attached:
        return False
    return target.processes in ({jax.process_index()}, set(range(jax.process_count())))


def harmless(jaxpr: Any, arguments: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Whether a whole program can be run to time it: it only computes, and its arguments are not large."""
    shards = [a.sharding.shard_shape(a.shape) if a.sharding else a.shape for a in arguments]
    own = sum(math.prod(shard) * a.dtype.itemsize for shard, a in zip(shards, arguments, strict=True))
    if own > WHOLE_BYTES or has_effects(jaxpr):
        return False
    return not any(eqn.primitive.name in HARMFUL or _may_part(eqn) for eqn in equations(jaxpr))


def _may_part(eqn: Any) -> bool:
    """Whether it is a branch with a collective in it: by arguments that are not the user's, some devices only
    may come there, and wait for the others for ever.
    """
    return eqn.primitive.name == "cond" and any(
        named_axes(inner) for branch in eqn.params["branches"] for inner in equations(branch)
    )


def measured_times(
    program: Excerpt[Choice],
    choices: Sequence[Choice],
    target: Target,
    done: Callable[[], None],
) -> Times | None:
    """The wall-clock times of a chain and of its rings, run in turn.

    Args:
      program: the chain; or a whole program, whose arguments lie everywhere where it does not say.
      choices: the rings to try.
      target: what to run on; ``measurable``.
      done: called after each program.

    Returns:
      The times by this process's clock: of the chain as written the median, of a ring what it takes at
      worst, see `race`. None where the chain as written cannot be run, or a timed call fails.
    """
    replicated = jax.NamedSharding(target.mesh, jax.P())
    arguments = tuple(
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding or replicated) for a in program.arguments
    )
    # In place of what fails stands the error's text: an error itself holds the arrays of all its frames.
    runs: list[Runnable | str] = []
    for choice in (None, *choices):
        try:
            version = program.original if choice is None else program.version(choice)
            compiled = compiled_for(version, arguments, target)
            runs.append(Runnable(compiled, _memory(compiled, target)))
        except Exception as error:
            runs.append(one_line(error))
        done()
    values: list[Any] = []
    meet: Callable[[], object] = _alone
    try:
        values = [some(argument, number) for number, argument in enumerate(arguments)]
        jax.block_until_ready(values)
        if len(target.processes) > 1:
            meet = meeting(target.mesh)
    except Exception as error:
        runs[0] = one_line(error)
    # What one process cannot run, none may: the others would wait for it.
    runs = _where_all(target, runs)
    if isinstance(runs[0], str):
        logger.debug("the chain as written cannot be run: %s", runs[0])
        return None
    for number, each in enumerate(runs):
        if isinstance(each, Runnable):
            try:
                for _ in range(WARM_UPS):
                    jax.block_until_ready(each.run(*values))
            except Exception as error:
                runs[number] = one_line(error)
    runs = _where_all(target, runs)
    if isinstance(runs[0], str):
        logger.debug("the chain as written cannot be run: %s", runs[0])
        return None
    try:
        seconds = race(
            [each.run if isinstance(each, Runnable) else None for each in runs],
            values,
            _calls(target),
            meet,
            lambda medians: of_process_0(target, medians),
            lambda well: everywhere(target, [well])[0],
        )
        return None if seconds is None else _times(runs, seconds, choices)
    except Exception as error:
        logger.debug("the chain and its rings cannot be timed: %s", one_line(error))
        return None


def _times(runs: Sequence[Runnable | str], seconds: Sequence[float], choices: Sequence[object]) -> Times:
    """What was found of the chain, first, and its rings."""
    original, *rings = (
        Failed(each, lasting=False) if isinstance(each, str) else Timed(run_s, each.temporary_bytes)
        for each, run_s in zip(runs, seconds, strict=True)
    )
    assert isinstance(original, Timed)
    for choice, ring in zip(choices, rings, strict=True):
        if isinstance(ring, Failed):
            log_failed(choice, ring)
    return Times(original, tuple(rings))


def _alone() -> None:
    """Where one process meets: nobody is waited for."""


def race(
    runs: Sequence[Callable[..., Any] | None],
    values: Sequence[Any],
    calls: int,
    meet: Callable[[], object] = _alone,
    agree: Callable[[list[float]], list[float]] = lambda medians: medians,
    all_well: Callable[[bool], bool] = lambda well: well,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float] | None:
    """Seconds of one call of each function; 0 where there is none. None where a call failed.

    After a heat of all, the first goes on with the fastest of the others.

    Of the first it is the median. Of the others it is what they take at worst: the first's median over the
    lower bound of their speed-up (`overlap.speedup`), so that a time which varies by chance gains nothing.

    They run in turn, and a round begins one further along than the last: what disturbs the machine for a
    while disturbs them all.

    Args:
      runs: the functions; there is a first.
      values: their arguments.
      calls: per sample.
      meet: called before each sample.
      agree: from the medians of the heat to those that all processes go by.
      all_well: from whether a round went well here to whether it did in all processes. One in which a call
        failed goes on to the end of the round: the others would wait where they meet.
      clock: tells the time in seconds.
    """
    samples: list[list[float]] = [[] for _ in runs]
    racing = [number for number, run in enumerate(runs) if run is not None]
    for first in range(ROUNDS):
        if first == HEAT:
            medians = agree([statistics.median(taken or [math.inf]) for taken in samples])
            finalists = sorted(racing[1:], key=lambda number: medians[number])[:FINALISTS]
            racing = [0, *sorted(finalists)]
        well = True
        for number in [*racing[first % len(racing) :], *racing[: first % len(racing)]]:
            run = runs[number]
            assert run is not None
            meet()
            try:
                samples[number].append(_sample_s(run, values, calls, clock))
            except Exception as error:
                logger.debug("a call fails: %s", one_line(error))
                well = False
        if not all_well(well):
            return None
    original_s = statistics.median(samples[0])
    return [original_s, *(_at_worst_s(samples[0], taken) for taken in samples[1:])]


def _sample_s(
    run: Callable[..., Any], values: Sequence[Any], calls: int, clock: Callable[[], float]
) -> float:
    begin_s = clock()
    results = None
    for _ in range(calls):
        results = run(*values)
    jax.block_until_ready(results)
    return (clock() - begin_s) / calls


def _at_worst_s(original: Sequence[float], ring: Sequence[float]) -> float:
    found = speedup(original, ring)
    if found is None:
        return 0.0
    return statistics.median(original) / (found.ratio if found.low is None else found.low)


def _memory(compiled: Any, target: Target) -> int | None:
    """A program's temporary memory; on CPU None: it is the host's, and no ring needs much of that."""
    return None if target.devices[0].platform == "cpu" else temporary_bytes(compiled)


def some(argument: jax.ShapeDtypeStruct, seed: int) -> Any:
    """Values of an argument, placed as it says: of both signs, or 0 to 7 for integers.

    Zeros would not do: accelerators compute with them in less power, and so at a higher clock.
    """

    def make() -> Any:
        uniform = jax.random.uniform(jax.random.key(seed), argument.shape, jnp.float32, -1, 1)
        if argument.dtype == jnp.bool_:
            return uniform > 0
        if jnp.issubdtype(argument.dtype, jnp.integer):
            return (4 * uniform + 4).astype(argument.dtype)
        return uniform.astype(argument.dtype)

    # Compiled ahead: a call would become part of a program that is being traced.
    return jax.jit(make, out_shardings=argument.sharding).lower().compile()()


def _where_all(target: Target, runs: Sequence[Runnable | str]) -> list[Runnable | str]:
    """What can be run in every process; in place of the rest, the error or word of another's."""
    good = everywhere(target, [isinstance(each, Runnable) for each in runs])
    return [
        each if well or isinstance(each, str) else "it failed in another process"
        for each, well in zip(runs, good, strict=True)
    ]


def _calls(target: Target) -> int:
    """Calls in flight at once. On CPU one: programs that wait for the same threads can stop each other."""
    return 1 if target.devices[0].platform == "cpu" else CALLS
