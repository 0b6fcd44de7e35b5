"""The processes of the network benchmark: started on hosts or over loopback, told what to do, and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from bench.network_links import Host

ROOT: Final = Path(__file__).resolve().parent.parent
PORT: Final = 9911
TOLD: Final = b"TOLD "

THREADS: Final = 2
"""XLA's threads per process: the one that runs a collective waits in it, and another has to compute.

More take turns on the core with the threads that send and receive, which then wait longer for it.
"""

DEVICE_COUNT: Final = "--xla_force_host_platform_device_count"
"""The flag that gives a process more than one device; not here."""

LIMIT_S: Final = 3600.0
"""Seconds after which a command counts as hanging."""

SHOWN: Final = 3000
"""Characters of a failed process's errors that are shown."""


class JobError(RuntimeError):
    """A process failed, ended or hangs; the message has its last words."""


def environment(threads: int, cache: str) -> dict[str, str]:
    """The environment of the processes.

    Args:
      threads: of XLA's pool; it would take the number of cores the process may use, which is one.
      cache: where ``autotune`` keeps what it finds.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flag for flag in flags if not flag.startswith(DEVICE_COUNT)),
        "PYTHONPATH": str(ROOT),
        "NPROC": str(threads),
        "OVERLAP_CACHE_DIR": cache,
    }


def worker_command(index: int, processes: int, coordinator: str) -> list[str]:
    """The command line of one process."""
    return [sys.executable, "-m", "bench.network_worker", str(index), str(processes), coordinator]


def replies(text: bytes) -> list[Any]:
    """What a process told, among all else that it printed; a line that is not ended yet does not count."""
    lines = text.split(b"\n")[:-1]
    return [json.loads(line.removeprefix(TOLD)) for line in lines if line.startswith(TOLD)]


@dataclasses.dataclass(slots=True)
class _Process:
    started: subprocess.Popen[bytes]
    errors: IO[bytes]
    printed: bytes = b""
    read: int = 0

    @property
    def pipe(self) -> int:
        """Where it prints."""
        assert self.started.stdout is not None
        return self.started.stdout.fileno()


class Job:
    """Processes that do the same commands together.

    Attributes:
      jax: their version of it.
    """

    def __init__(self, processes: Sequence[_Process]) -> None:
        self._processes = processes
        self.jax = str(self.hear()[0]["jax"])

    def do(self, what: str, **arguments: Any) -> list[dict[str, Any]]:
        """Tells every process to do something; returns their replies, by process.

        Raises:
          JobError: a process failed, ended, or takes longer than ``LIMIT_S``.
        """
        line = json.dumps({"do": what, **arguments}).encode() + b"\n"
        for number, process in enumerate(self._processes):
            assert process.started.stdin is not None
            try:
                process.started.stdin.write(line)
                process.started.stdin.flush()
            except OSError:
                self._fail(number, "has ended")
        return self.hear()

    def hear(self) -> list[dict[str, Any]]:
        """The next reply of every process."""
        end_s = time.monotonic() + LIMIT_S
        return [self._next(number, end_s) for number in range(len(self._processes))]

    def _next(self, number: int, end_s: float) -> dict[str, Any]:
        process = self._processes[number]
        while len(told := replies(process.printed)) <= process.read:
            # All are read, so that none waits for its pipe while another is waited for.
            pipes = {p.pipe: p for p in self._processes}
            ready, _, _ = select.select(list(pipes), [], [], 1.0)
            for pipe in ready:
                text = os.read(pipe, 1 << 16)
                pipes[pipe].printed += text
                if not text:
                    ended = next(n for n, p in enumerate(self._processes) if p.pipe == pipe)
                    self._fail(ended, "has ended")
            if time.monotonic() > end_s:
                self._fail(number, f"has not replied for {LIMIT_S:.0f} s")
        reply: dict[str, Any] = told[process.read]
        process.read += 1
        if "failure" in reply:
            raise JobError(f"process {number} failed:\n{reply['failure']}")
        return reply

    def _fail(self, number: int, what: str) -> None:
        errors = self._processes[number].errors
        errors.seek(0)
        said = errors.read().decode(errors="replace")[-SHOWN:]
        raise JobError(f"process {number} {what}; it said:\n{said}")


@contextlib.contextmanager
def job(hosts: Sequence[Host] | None, processes: int, threads: int = THREADS) -> Iterator[Job]:
    """Starts the processes, and ends them whatever happens.

    Args:
      hosts: where they run, one each; None for all on this machine, over loopback.
      processes: how many.
      threads: of XLA's pool in each.

    Raises:
      JobError: they cannot join each other.
    """
    coordinator = f"{hosts[0].address}:{PORT}" if hosts else f"127.0.0.1:{_free_port()}"
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="overlap-network-"))
        started: list[_Process] = []
        for index in range(processes):
            command = worker_command(index, processes, coordinator)
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                hosts[index].command(command) if hosts else command,
                env=environment(threads, os.path.join(cache, str(index))),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            stack.callback(_end, process)
            started.append(_Process(process, errors))
        yield Job(started)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def slowest(told: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The times of a race: of each round those of the process that took longest."""
    names = told[0]["times_s"]
    return {
        name: [max(times) for times in zip(*(reply["times_s"][name] for reply in told), strict=True)]
        for name in names
    }
