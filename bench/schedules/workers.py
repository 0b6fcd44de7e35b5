"""Measures rows in other processes: one that dies takes its row with it, and no other."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

MARK: Final = "ROW "
"""What the line with a worker's answer begins with: compilers print to the same stream."""

ROWS_PER_WORKER: Final = 8
"""After so many rows a worker is replaced: a process that has compiled much holds much memory."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one row.

    Attributes:
      name: of the row's case.
      content: the row's JSON; None if the worker died or ran out of time.
      error: what happened then.
      wall_s: measured.
    """

    name: str
    content: Mapping[str, Any] | None
    error: str
    wall_s: float


def answers(
    names: Sequence[str], command: Sequence[str], environment: Mapping[str, str], *, jobs: int, limit_s: float
) -> Iterator[Answer]:
    """What comes of every row, as it comes.

    Args:
      names: of the cases.
      command: starts a worker, which runs ``serve``.
      environment: of the workers.
      jobs: workers at a time.
      limit_s: after which a row is given up and its worker killed.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    found: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()
    stopped = threading.Event()
    pools = [_Worker(command, environment, limit_s) for _ in range(max(1, min(jobs, len(names))))]

    def work(worker: _Worker) -> None:
        with contextlib.suppress(queue.Empty):
            while not stopped.is_set():
                found.put(worker.ask(waiting.get_nowait()))
        worker.stop()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in pools]
    try:
        for thread in threads:
            thread.start()
        for _ in names:
            answer = found.get()
            if isinstance(answer, BaseException):
                raise answer
            yield answer
    finally:
        stopped.set()
        for worker in pools:
            worker.kill()
        for thread in threads:
            thread.join(timeout=10)


def serve(measure: Callable[[str], Mapping[str, Any]], lines: Iterable[str], out: IO[str]) -> None:
    """A worker: reads names of cases, line by line, and answers each with its row."""
    for line in lines:
        out.write(f"\n{MARK}{json.dumps(measure(line.strip()))}\n")
        out.flush()


class _Worker:
    """A process that measures rows, started when it is first asked and again after it has died."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> None:
        self.command, self.environment, self.limit_s = command, environment, limit_s
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None
        self.done = 0

    def ask(self, name: str) -> Answer:
        """Has one row measured."""
        start = time.perf_counter()
        late = threading.Event()
        content, error = None, ""
        try:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None

            def give_up() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(self.limit_s, give_up)
            timer.start()
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(f"{name}\n")
                    process.stdin.flush()
                answer = next((line for line in process.stdout if line.startswith(MARK)), None)
            finally:
                timer.cancel()
            if answer is not None:
                content = json.loads(answer.removeprefix(MARK))
            else:
                status = process.wait()
                said = f"took more than {self.limit_s:g} s" if late.is_set() else f"died, status {status}"
                error = f"the process {said}{self._last_words()}"
        except OSError as failure:
            error = f"no process could be started: {failure}"
        self.done += 1
        if content is None or self.done >= ROWS_PER_WORKER:
            self.stop()
        return Answer(name, content, error, time.perf_counter() - start)

    def stop(self) -> None:
        """Ends the process, if one runs."""
        self.kill()
        if self.process is not None:
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.errors):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self.process, self.errors, self.done = None, None, 0

    def kill(self) -> None:
        """Kills the process, if one runs."""
        process = self.process
        if process is not None and process.poll() is None:
            process.kill()

    def _started(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            self.process = subprocess.Popen(
                list(self.command),
                env=dict(self.environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
            )
        return self.process

    def _last_words(self) -> str:
        """The most telling of the last lines on stderr: a check that failed, else the last of all."""
        if self.errors is None:
            return ""
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        telling = [line for line in lines if "Check fail" in line or "Error" in line] or lines
        return f": {telling[-1][:200]}" if telling else ""


def interpreter(module: str) -> list[str]:
    """The command of a worker that is this Python running a module of the repository."""
    return [sys.executable, "-m", module, "--worker"]
