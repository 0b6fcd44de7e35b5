"""Compares schedules by the TPU compiler: original, XLA's own modes, the textbook ring and this library.

    python -m bench.tpu_schedules                   the whole grid; writes bench/results/tpu_schedules.*
    python -m bench.tpu_schedules --rows 'v5p.*mlp'  some rows; writes nothing unless --output is given
    python -m bench.tpu_schedules --resume FILE      keeps every row in FILE, and goes on where FILE ends

Needs libtpu, and no TPU. All times but those of compiling are modelled.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import overlap
from bench.schedules import grid, plot, summary, tables, workers
from bench.schedules.case import Case
from bench.schedules.rows import OURS, Row
from overlap import tpu_target

if TYPE_CHECKING:
    from rich.console import Console

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "results"
NAME: Final = "tpu_schedules"
TITLE: Final = "Schedules by the TPU compiler"
ROW_LIMIT_S: Final = 1800.0
"""After which a row is given up."""

CACHE: Final = "OVERLAP_CACHE_DIR"
"""Where ``policy="verify"`` keeps what it found; a new folder for each run unless it is set."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; the exit status is 1 where a figure is missed, 2 without libtpu."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", metavar="REGEX", help="only rows whose name matches somewhere")
    parser.add_argument("--list", action="store_true", help="only print the rows' names")
    parser.add_argument("--jobs", type=int, metavar="N", default=min(2, os.cpu_count() or 1))
    parser.add_argument("--resume", type=Path, metavar="FILE", help="rows done, one JSON object a line")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=f"default {RESULTS.relative_to(ROOT)}")
    parser.add_argument(
        "--no-verify", action="store_true", help='without policy="verify", which compiles most'
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if (missing := tpu_target.missing()) is not None:
        print(f"tpu_schedules: {missing}", file=sys.stderr)
        return 2
    cases = chosen(options.rows)
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if not cases:
        print(f"tpu_schedules: no row matches {options.rows!r}; --list names them all", file=sys.stderr)
        return 2
    if options.worker:
        return work(cases, verify=not options.no_verify)
    rows = run(cases, jobs=options.jobs, resume=options.resume, verify=not options.no_verify)
    found = summary.summarise(rows)
    print(f"\n{tables.headline(rows, found)}\n\n{tables.targets(found)}\n\n{tables.means(found)}\n")
    print(tables.misses(found))
    folder = options.output or (None if options.rows else RESULTS)
    if folder is not None:
        write(rows, found, folder)
        print(f"\nWritten: {folder / NAME}.md, .json and .svg")
    if options.rows or options.no_verify:
        return 0 if found.rows else 1
    return 0 if all(version in found.slower and found.met(version) for version in OURS) else 1


def chosen(pattern: str | None) -> tuple[Case, ...]:
    """The rows whose names match; all without a pattern."""
    return tuple(case for case in grid.tpu_cases() if pattern is None or re.search(pattern, case.name))


def run(cases: Sequence[Case], *, jobs: int, resume: Path | None, verify: bool) -> list[Row]:
    """The rows of the cases, in their order; each is printed, and kept in a file, as it comes."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    known = resumed(resume) if resume is not None else {}
    known = {case.name: known[case.name] for case in cases if case.name in known}
    waiting = {case.name: case for case in cases if case.name not in known}
    if known:
        console.print(f"{len(known)} of {len(cases)} rows are in {resume}.")
    with tempfile.TemporaryDirectory() as folder:
        environment = {CACHE: folder, **os.environ, **tpu_target.ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        command = workers.interpreter("bench.tpu_schedules") + (["--no-verify"] if not verify else [])
        answers = workers.answers(list(waiting), command, environment, jobs=jobs, limit_s=ROW_LIMIT_S)
        for number, answer in enumerate(progress(console, answers, len(waiting)), 1):
            row = row_of(waiting[answer.name], answer)
            known[row.name] = row
            if resume is not None:
                keep(resume, row)
            console.print(f"{number}/{len(waiting)} {line(row)}", markup=False, soft_wrap=True)
    return [known[case.name] for case in cases]


def row_of(case: Case, answer: workers.Answer) -> Row:
    """The row in a worker's answer; without one, a row that says why."""
    from bench.schedules.measure import described

    if answer.content is not None:
        return Row.from_dict(answer.content)
    return Row(**described(case), failures={"row": answer.error}, wall_s=answer.wall_s)


def work(cases: Sequence[Case], *, verify: bool) -> int:
    """What a worker process does: measures the rows whose names it reads."""
    from bench.schedules import measure

    by_name = {case.name: case for case in cases}
    meshes: dict[str, Any] = {}

    def row(name: str) -> Mapping[str, Any]:
        case = by_name[name]
        if str(case.slice) not in meshes:
            meshes[str(case.slice)] = measure.tpu_mesh(case.slice)
        return measure.measure(case, meshes[str(case.slice)], verify=verify).to_dict()

    workers.serve(row, sys.stdin, sys.stdout)
    return 0


def progress(console: Console, answers: Iterator[workers.Answer], total: int) -> Iterator[workers.Answer]:
    """The answers, with a bar on a terminal."""
    if not console.is_terminal:
        yield from answers
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("rows", total=total)
        for answer in answers:
            bar.advance(task)
            yield answer


def line(row: Row) -> str:
    """A row as it is printed when it comes."""
    if not row.measured:
        return f"{row.name}: FAILED {'; '.join(row.failures.values())}"
    cells = [f"{row.name}: {row.ratio:.2f}, limit {tables.micro(row.limit_s)} µs"]
    for version, title in tables.TITLES.items():
        if shown := tables.timed(row, version):
            cells.append(f"{title} {shown}")
    marks = [version for version in OURS if version in row.versions and summary.more_memory(row, version)]
    if marks:
        cells.append(f"MORE MEMORY ({', '.join(marks)})")
    return ", ".join([*cells, f"{row.wall_s:.0f} s"])


def resumed(path: Path) -> dict[str, Row]:
    """The rows of a file of an earlier run that did not fail; it must have been made with these versions."""
    if not path.exists():
        return {}
    found: dict[str, Row] = {}
    made_with = versions()
    made_with.pop("date")
    for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            content = json.loads(text)
        except json.JSONDecodeError:
            continue  # a line that was being written when the run was interrupted
        theirs = {name: version for name, version in content["versions"].items() if name != "date"}
        if theirs != made_with:
            raise SystemExit(
                f"{path}:{number} was made with {theirs}, and this is {made_with}: give another file"
            )
        row = Row.from_dict(content["row"])
        if row.measured and "row" not in row.failures:
            found[row.name] = row
    return found


def keep(path: Path, row: Row) -> None:
    """Adds a row to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        write_line(file, {"versions": versions(), "row": row.to_dict()})


def write_line(file: IO[str], content: Mapping[str, Any]) -> None:
    """One JSON object on a line of its own."""
    file.write(f"{json.dumps(content, ensure_ascii=False)}\n")


def versions() -> dict[str, str]:
    """What the figures were made with."""
    return {
        "overlap-collectives": overlap.__version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def write(rows: Sequence[Row], found: summary.Summary, folder: Path) -> None:
    """Writes the page, the data and the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    made_with = versions()
    page = tables.document(rows, found, made_with, title=TITLE, notes=tables.NOTES)
    (folder / f"{NAME}.md").write_text(page, encoding="utf-8")
    content = {
        "schema": 1,
        "versions": made_with,
        "notes": tables.NOTES,
        "rule": grid.__doc__,
        "summary": summary.to_dict(found),
        "rows": [row.to_dict() for row in rows],
    }
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / f"{NAME}.json").write_text(f"{text}\n", encoding="utf-8")
    plot.draw(rows, folder / f"{NAME}.svg", title=f"{TITLE}: modelled times against the limit")


if __name__ == "__main__":
    sys.exit(main())
