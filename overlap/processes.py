"""What the processes of a job tell one another about trials, so that they decide alike."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from overlap.schedule_cache import record, times_of
from overlap.trial_target import Target
from overlap.trial_times import Times


def alike(target: Target) -> bool:
    """Whether trials for a target are those of several processes: of all in the job, at the same time.

    What one process tells the others takes them all, and so do devices that are attached: programs for others
    may be compiled in any process, alone.
    """
    everyone = set(range(jax.process_count()))
    return target.attached and len(target.processes) > 1 and target.processes == everyone


def agreed(times: Times | None, choices: Sequence[object], target: Target) -> Times | None:
    """What process 0 found, in every process; each must call this."""
    if not alike(target):
        return times
    text = b"null" if times is None else json.dumps(record("", times, choices)).encode()
    # All must hand in arrays of one shape, and their own texts may be of other lengths.
    (length,) = _of_process_0(np.array([len(text)]))
    message = np.frombuffer(text[:length].ljust(length), np.uint8)
    told = json.loads(_of_process_0(message).tobytes())
    return None if told is None else times_of(told, "", choices)


def of_process_0(target: Target, values: list[float]) -> list[float]:
    """Its values, in every process; each must call this."""
    return _of_process_0(np.array(values)).tolist() if alike(target) else values


def everywhere(target: Target, own: list[bool]) -> list[bool]:
    """Which of some statements hold in every process; each must call this."""
    if not alike(target):
        return own
    from jax.experimental import multihost_utils

    found = _apart(multihost_utils.process_allgather, np.array(own))
    return list(map(bool, np.all(found, axis=0).flat))


def _of_process_0(values: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    return _apart(multihost_utils.broadcast_one_to_all, values)


def _apart(exchange: Callable[[Any], Any], value: np.ndarray) -> np.ndarray:
    """Exchanges values among the processes, in a thread of its own.

    A function is being traced in this one, so what is called here would become part of its program.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: np.asarray(exchange(value))).result()
