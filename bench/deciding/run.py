"""A run: workers decide on all chains, then compile the sample's, program by program."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.deciding.chains import Drawn
from bench.deciding.rows import ORIGINAL, Compiled, Decided, Row
from bench.schedules import run as schedules_run
from bench.schedules import workers
from cost_model import Estimate
from overlap import tpu_target

if TYPE_CHECKING:
    from rich.console import Console

BATCH: Final = 200
"""Chains that a worker is asked about at a time where nothing is compiled."""

LIMIT_S: Final = 900.0
"""After which a program, or a batch of chains, is given up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Study:
    """A run's means: who works, and where what is compiled is kept.

    Attributes:
      module: run with ``--worker`` it answers as ``measure.answer`` does.
      jobs: workers at a time.
      made_with: versions, for the file.
      resume: the file of programs compiled, one JSON object a line; None for none.
    """

    module: str
    jobs: int
    made_with: Mapping[str, str]
    resume: Path | None = None

    def decide(self, drawn: Sequence[Drawn]) -> list[Decided]:
        """The model's decision on each chain."""
        return [Decided(**content) for content in self._each("decide", drawn)]

    def rows(self, sample: Sequence[Drawn], decided: Mapping[str, Decided], most: int) -> list[Row]:
        """The chains of the sample, with their predictions and what was compiled of them.

        Args:
          sample: the chains, in the order in which they are compiled.
          decided: name → decision, of the sample's chains at least.
          most: candidates that are compiled of each, by prediction; 0 for all. What the model chooses is.
        """
        predicted = self._each("predict", sample)
        rows = [
            Row(
                chain=chain,
                decided=decided[chain.name],
                predicted={schedule: Estimate(**terms) for schedule, terms in prices.items()},
            )
            for chain, prices in zip(sample, predicted, strict=True)
        ]
        wanted = {(row.chain.name, schedule): None for row in rows for schedule in programs_of(row, most)}
        compiled = self._compiled(list(wanted))
        return [
            dataclasses.replace(
                row,
                compiled={
                    schedule: compiled[row.chain.name, schedule] for schedule in programs_of(row, most)
                },
            )
            for row in rows
        ]

    def _each(self, what: str, drawn: Sequence[Drawn]) -> list[Any]:
        """What workers find of every chain without compiling anything.

        Raises:
          RuntimeError: a worker died.
        """
        console = self._console()
        batches = [
            json.dumps({what: [chain.name for chain in drawn[start : start + BATCH]]})
            for start in range(0, len(drawn), BATCH)
        ]
        found: dict[str, Any] = {}
        for answer in schedules_run.progress(console, self._answers(batches), len(batches), what):
            if answer.content is None:
                raise RuntimeError(f"{what}: {answer.error}")
            found[answer.name] = answer.content["found"]
        return list(itertools.chain.from_iterable(found[batch] for batch in batches))

    def _compiled(self, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Compiled]:
        """What is compiled of the programs, from the file where it is there."""
        console = self._console()
        done = {} if self.resume is None else compiled_before(self.resume, self.made_with)
        known = {key: done[key] for key in wanted if key in done}
        waiting = {
            json.dumps({"compile": name, "schedule": schedule}): (name, schedule)
            for name, schedule in wanted
            if (name, schedule) not in known
        }
        if known:
            console.print(f"{len(known)} of {len(wanted)} programs are in {self.resume}.")
        answers = schedules_run.progress(console, self._answers(list(waiting)), len(waiting), "programs")
        for number, answer in enumerate(answers, 1):
            name, schedule = key = waiting[answer.name]
            known[key] = (
                Compiled(**answer.content)
                if answer.content is not None
                else Compiled(name=name, schedule=schedule, error=answer.error, wall_s=answer.wall_s)
            )
            if self.resume is not None:
                schedules_run.keep(self.resume, dataclasses.asdict(known[key]), self.made_with)
            console.print(f"{number}/{len(waiting)} {line(known[key])}", markup=False, soft_wrap=True)
        return known

    def _answers(self, requests: Sequence[str]) -> Iterator[workers.Answer]:
        variables = schedules_run.of_workers(tpu_target.ENVIRONMENT)
        command = workers.interpreter(self.module)
        return workers.answers(requests, command, variables, jobs=self.jobs, limit_s=LIMIT_S)

    def _console(self) -> Console:
        from rich.console import Console

        width = None if sys.stdout.isatty() else schedules_run.PIPE_COLUMNS
        return Console(highlight=False, width=width)


def programs_of(row: Row, most: int) -> tuple[str, ...]:
    """What is compiled of a chain: as written, the model's choice, and the fastest rings by prediction."""
    best = list(row.predicted)[: most or None]
    return tuple(dict.fromkeys((ORIGINAL, row.decided.schedule, *best)))


def compiled_before(path: Path, made_with: Mapping[str, str]) -> dict[tuple[str, str], Compiled]:
    """What an earlier run compiled, failures left out.

    Raises:
      SystemExit: it was made with other versions.
    """
    found = (Compiled(**content) for content in schedules_run.kept(path, made_with))
    return {(each.name, each.schedule): each for each in found if not each.error}


def line(found: Compiled) -> str:
    """A program as it is printed when it is compiled."""
    result = f"FAILED {found.error}" if found.seconds is None else f"{found.seconds * 1e6:.1f} µs"
    return f"{found.name}, {found.schedule}: {result}, {found.wall_s:.0f} s"
