"""A run over cases: workers measure rows, which are printed and kept in a file as they come."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import overlap
from bench.schedules import measure, workers
from bench.schedules.case import Case, Slice
from bench.schedules.rows import Row

if TYPE_CHECKING:
    from rich.console import Console

ROOT: Final = Path(__file__).resolve().parent.parent.parent
RESULTS: Final = ROOT / "bench" / "results"

ROW_LIMIT_S: Final = 1800.0
"""After which a row is given up."""

CACHE: Final = "OVERLAP_CACHE_DIR"
"""Where ``policy="verify"`` keeps what it found; a new folder for each run unless it is set."""

PIPE_COLUMNS: Final = 200
"""Width of what is printed where there is no terminal."""


def run(
    cases: Sequence[Case],
    *,
    module: str,
    environment: Mapping[str, str],
    made_with: Mapping[str, str],
    line: Callable[[Row], str],
    jobs: int,
    resume: Path | None,
    wanted: Sequence[str],
    arguments: Sequence[str] = (),
) -> list[Row]:
    """The rows of the cases, in their order.

    Args:
      cases: what to measure.
      module: run with ``--worker`` it is a worker: see ``work``.
      environment: of the workers, beside this process's.
      made_with: versions, for the file.
      line: a row as it is printed when it comes.
      jobs: workers at a time.
      resume: the file of rows done; None for none.
      wanted: the versions that are measured.
      arguments: of workers, beside these.

    Raises:
      SystemExit: the file was made with other versions.
    """
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    done = resumed(resume, made_with) if resume is not None else {}
    known = {case.name: done[case.name] for case in cases if case.name in done}
    waiting = {case.name: case for case in cases if case.name not in known}
    if known:
        console.print(f"{len(known)} of {len(cases)} rows are in {resume}.")
    with tempfile.TemporaryDirectory() as folder:
        variables = {CACHE: folder, **of_workers(environment)}
        command = [*workers.interpreter(module), "--versions", ",".join(wanted), *arguments]
        answers = workers.answers(list(waiting), command, variables, jobs=jobs, limit_s=ROW_LIMIT_S)
        for number, answer in enumerate(progress(console, answers, len(waiting), "rows"), 1):
            row = row_of(waiting[answer.name], answer)
            known[row.name] = row
            if resume is not None:
                keep(resume, row.to_dict(), made_with)
            console.print(f"{number}/{len(waiting)} {line(row)}", markup=False, soft_wrap=True)
    return [known[case.name] for case in cases]


def of_workers(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of workers: this process's, and more."""
    return {**os.environ, **more, "PYTHONPATH": str(ROOT)}


def row_of(case: Case, answer: workers.Answer) -> Row:
    """The row in a worker's answer; without one, a row that says why."""
    if answer.content is not None:
        return Row.from_dict(answer.content)
    return Row(**measure.described(case), failures={"row": answer.error}, wall_s=answer.wall_s)


def work(
    cases: Sequence[Case],
    mesh_of: Callable[[Slice], Any],
    wanted: Sequence[str],
    *,
    offloaded: bool = False,
) -> None:
    """What a worker process does: measures the rows whose names it reads, as `measure.measure` has it."""
    by_name = {case.name: case for case in cases}
    meshes: dict[str, Any] = {}

    def row(name: str) -> Mapping[str, Any]:
        case = by_name[name]
        if str(case.slice) not in meshes:
            meshes[str(case.slice)] = mesh_of(case.slice)
        return measure.measure(case, meshes[str(case.slice)], wanted, offloaded=offloaded).to_dict()

    workers.serve(row, sys.stdin, sys.stdout)


def resumed(path: Path, made_with: Mapping[str, str]) -> dict[str, Row]:
    """The rows of a file of an earlier run, those that failed left out.

    Raises:
      SystemExit: it was made with other versions.
    """
    rows = (Row.from_dict(content) for content in kept(path, made_with))
    return {row.name: row for row in rows if not row.failures}


def stored(name: str) -> list[Row]:
    """The rows in the repository's results of a benchmark; none if there are no results."""
    path = RESULTS / f"{name}.json"
    return (
        [Row.from_dict(row) for row in json.loads(path.read_text("utf-8"))["rows"]] if path.exists() else []
    )


def kept(path: Path, made_with: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
    """The rows of a file of an earlier run, as JSON; none if there is no file.

    Raises:
      SystemExit: it was made with other versions.
    """
    if not path.exists():
        return
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            content = json.loads(text)
        except json.JSONDecodeError:
            continue  # a line that was being written when the run was interrupted
        theirs, ours = (
            {k: v for k, v in of.items() if k != "date"} for of in (content["versions"], made_with)
        )
        if theirs != ours:
            raise SystemExit(f"{path}:{number} was made with {theirs}, and this is {ours}: give another file")
        yield content["row"]


def keep(path: Path, row: Mapping[str, Any], made_with: Mapping[str, str]) -> None:
    """Adds a row to the file, on a line of its own even after one that was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"versions": dict(made_with), "row": dict(row)}, ensure_ascii=False)
    cut_short = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_short else "") + text + "\n")


def versions(*compilers: str) -> dict[str, str]:
    """What the figures are made with.

    Args:
      *compilers: distributions beside jax.
    """
    return {
        "overlap-collectives": overlap.__version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", *compilers)},
        "date": measure.today(),
    }


def write(folder: Path, name: str, page: str, content: Mapping[str, Any]) -> None:
    """Writes the page and the data."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


def progress(
    console: Console, answers: Iterator[workers.Answer], total: int, what: str
) -> Iterator[workers.Answer]:
    """The answers, with a bar on a terminal that says what they are of."""
    if not console.is_terminal:
        yield from answers
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        for answer in answers:
            bar.advance(task)
            yield answer
