"""A benchmark of whole programs: its command line, its run over all of them, and what it writes."""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from bench.schedules import command, run, workers
from bench.steps import SomeStep, line, summary
from overlap import tpu_target

LIMIT_S: Final = 1200.0
"""After which a program is given up."""

SomeProgram = TypeVar("SomeProgram", bound=command.Named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark(Generic[SomeProgram, SomeStep]):
    """A benchmark of whole programs.

    Attributes:
      name: its module's in `bench`, and that of its results.
      about: its module's docstring.
      what: its programs are, in the plural.
      kind: the class of its rows.
      programs: all of them; given how many are drawn, and the seed, if they are.
      row: decides and compiles one.
      empty: a row without figures, from why there are none.
      document: the page, from the rows and the versions, and the seed, if they are drawn.
      draws: how many programs are drawn, and with which seed, unless told otherwise; None: none are.
    """

    name: str
    about: str | None
    what: str
    kind: type[SomeStep]
    programs: Callable[..., Iterable[SomeProgram]]
    row: Callable[[SomeProgram], SomeStep]
    empty: Callable[[SomeProgram, str], SomeStep]
    document: Callable[..., str]
    draws: tuple[int, int] | None = None

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Decides, compiles, prints, writes; the exit status is 2 without libtpu."""
        parser = command.parser(self.about, self.what)
        if self.draws is not None:
            count, seed = self.draws
            parser.add_argument(
                "--count", type=int, metavar="N", default=count, help=f"{self.what} drawn ({count})"
            )
            parser.add_argument("--seed", type=int, default=seed, help=f"of the draw ({seed})")
        options = parser.parse_args(argv)
        draw = () if self.draws is None else (options.count, options.seed)
        programs = {each.name: each for each in self.programs(*draw)}
        if options.worker:
            workers.serve(lambda name: dataclasses.asdict(self.row(programs[name])), sys.stdin, sys.stdout)
            return 0
        if options.rows:
            programs = {name: each for name, each in programs.items() if re.search(options.rows, name)}
        chosen = list(programs.values())
        status = command.nothing_to_measure(self.name, chosen, options, tpu_target.missing)
        if status is not None:
            return status
        made_with = run.versions("libtpu")
        rows = self._compiled(programs, options, made_with)
        print(f"\n{json.dumps(summary(rows), indent=1)}")
        if (folder := command.folder(options)) is not None:
            content = {
                "schema": 1,
                "kind": "modelled",
                "versions": made_with,
                **({} if self.draws is None else {"seed": options.seed}),
                "summary": summary(rows),
                "rows": [dataclasses.asdict(each) for each in rows],
            }
            run.write(folder, self.name, self.document(rows, made_with, *draw[1:]), content)
            print(f"\nWritten: {folder / self.name}.md and .json")
        return 0

    def _compiled(
        self, programs: Mapping[str, SomeProgram], options: argparse.Namespace, made_with: Mapping[str, str]
    ) -> list[SomeStep]:
        """The rows of all programs, in their order, by other processes, printed and kept as they come."""
        from rich.console import Console

        console = Console(highlight=False, width=None if sys.stdout.isatty() else run.PIPE_COLUMNS)
        kept = [] if options.resume is None else run.kept(options.resume, made_with)
        before = [self.kind(**row) for row in kept]
        known = {each.name: each for each in before if each.name in programs and not each.error}
        waiting = [name for name in programs if name not in known]
        asked = workers.interpreter(f"bench.{self.name}")
        if self.draws is not None:
            asked = [*asked, "--count", str(options.count), "--seed", str(options.seed)]
        environment = run.of_workers(tpu_target.ENVIRONMENT)
        answers = workers.answers(waiting, asked, environment, jobs=options.jobs, limit_s=LIMIT_S)
        for number, answer in enumerate(run.progress(console, answers, len(waiting), self.name), 1):
            if answer.content is None:
                found = self.empty(programs[answer.name], answer.error)
            else:
                found = self.kind(**answer.content)
            known[found.name] = found
            if options.resume is not None:
                run.keep(options.resume, dataclasses.asdict(found), made_with)
            console.print(f"{number}/{len(waiting)} {line(found)}", markup=False, soft_wrap=True)
        return [known[name] for name in programs]
