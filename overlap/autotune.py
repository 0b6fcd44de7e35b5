"""``policy="autotune"``: runs a chain and its rings on the attached devices and takes the wall-clock time."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from overlap.compiled_memory import temporary_bytes
from overlap.meeting import meeting
from overlap.schedule_cache import record, times_of
from overlap.speedup import speedup
from overlap.trial_target import Target
from overlap.trial_times import Failed, Timed, Times
from overlap.verify import compiled_for, failed, one_line
from passes import Choice, Excerpt
from passes.graph import equations
from passes.shims import has_effects

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

MESSAGE_BYTES: Final = 1 << 14
"""Length of what process 0 tells the others."""


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
    return all(eqn.primitive.name not in HARMFUL for eqn in equations(jaxpr))


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
      The times, those of process 0 in every process: of the chain as written the median, of a ring what it
      takes at worst, see `race`. None where the chain as written cannot be run.
    """
    versions = [program.original, *map(program.version, choices)]
    everywhere = jax.NamedSharding(target.mesh, jax.P())
    arguments = tuple(
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding or everywhere) for a in program.arguments
    )
    runs: list[Any] = []
    for version in versions:
        try:
            runs.append(compiled_for(version, arguments, target))
        except Exception as error:
            runs.append(error)
        done()
    values: list[Any] = []
    try:
        values = [some(argument, number) for number, argument in enumerate(arguments)]
        jax.block_until_ready(values)
    except Exception as error:
        runs[0] = error
    # What one process cannot run, none may: the others would wait for it.
    runs = _where_all(target, runs)
    if isinstance(runs[0], Exception):
        logger.debug("the chain as written cannot be run: %s", one_line(runs[0]))
        return None
    for number, run in enumerate(runs):
        try:
            for _ in range(WARM_UPS if not isinstance(run, Exception) else 0):
                jax.block_until_ready(run(*values))
        except Exception as error:
            runs[number] = error
    runs = _where_all(target, runs)
    if isinstance(runs[0], Exception):
        logger.debug("the chain as written cannot be run: %s", one_line(runs[0]))
        return None
    runnable = [run if not isinstance(run, Exception) else None for run in runs]
    meet = meeting(target.mesh) if len(target.processes) > 1 else lambda: None
    seconds = race(
        runnable,
        values,
        _calls(target),
        meet,
        lambda medians: _of_process_0(target, np.array(medians)).tolist(),
    )
    found: list[Timed | Failed] = [
        failed(choice, run, lasting=False)
        if isinstance(run, Exception)
        else Timed(ring_s, _memory(run, target))
        for choice, run, ring_s in zip(choices, runs[1:], seconds[1:], strict=True)
    ]
    return agreed(Times(Timed(seconds[0], _memory(runs[0], target)), tuple(found)), choices, target)


def race(
    runs: Sequence[Callable[..., Any] | None],
    values: Sequence[Any],
    calls: int,
    meet: Callable[[], object] = lambda: None,
    agree: Callable[[list[float]], list[float]] = lambda medians: medians,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of one call of each function; 0 where there is none.

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
      clock: tells the time in seconds.
    """
    samples: list[list[float]] = [[] for _ in runs]
    racing = [number for number, run in enumerate(runs) if run is not None]
    for first in range(ROUNDS):
        if first == HEAT:
            medians = agree([statistics.median(taken or [math.inf]) for taken in samples])
            finalists = sorted(racing[1:], key=lambda number: medians[number])[:FINALISTS]
            racing = [0, *sorted(finalists)]
        for number in [*racing[first % len(racing) :], *racing[: first % len(racing)]]:
            run = runs[number]
            assert run is not None
            meet()
            begin_s = clock()
            results = None
            for _ in range(calls):
                results = run(*values)
            jax.block_until_ready(results)
            samples[number].append((clock() - begin_s) / calls)
    original_s = statistics.median(samples[0])
    return [original_s, *(_at_worst_s(samples[0], taken) for taken in samples[1:])]


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


def agreed(times: Times | None, choices: Sequence[object], target: Target) -> Times | None:
    """What process 0 found, in every process; each must call this."""
    if len(target.processes) == 1:
        return times
    text = "null" if times is None else json.dumps(record("", times, choices))
    message = np.frombuffer(text.encode().ljust(MESSAGE_BYTES), np.uint8)
    told = json.loads(_of_process_0(target, message).tobytes())
    return None if told is None else times_of(told, "", choices)


def _of_process_0(target: Target, values: np.ndarray) -> np.ndarray:
    """Its values, in every process; each must call this."""
    if len(target.processes) == 1:
        return values
    from jax.experimental import multihost_utils

    return _apart(multihost_utils.broadcast_one_to_all, values)


def _where_all(target: Target, runs: Sequence[Any]) -> list[Any]:
    """What can be run in every process; in place of the rest, the error or word of another's."""
    if len(target.processes) == 1:
        return list(runs)
    from jax.experimental import multihost_utils

    own = np.array([not isinstance(run, Exception) for run in runs])
    everywhere = _apart(multihost_utils.process_allgather, own)
    elsewhere = RuntimeError("it failed in another process")
    return [
        run if good or isinstance(run, Exception) else elsewhere
        for run, good in zip(runs, np.all(everywhere, axis=0).flat, strict=True)
    ]


def _apart(exchange: Callable[[Any], Any], value: np.ndarray) -> np.ndarray:
    """Exchanges values among the processes, in a thread of its own.

    A function is being traced in this one, so what is called here would become part of its program.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: np.asarray(exchange(value))).result()


def _calls(target: Target) -> int:
    """Calls in flight at once. On CPU one: programs that wait for the same threads can stop each other."""
    return 1 if target.devices[0].platform == "cpu" else CALLS
