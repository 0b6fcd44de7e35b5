"""The command line that the benchmarks of compiled schedules share."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from bench.schedules import run
from bench.schedules.case import Case
from bench.schedules.rows import ORIGINAL, VERSIONS, Row
from bench.schedules.run import RESULTS, ROOT


def parser(description: str | None, what: str = "rows") -> argparse.ArgumentParser:
    """Options of all of them."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument(
        "--rows", type=_regex, metavar="REGEX", help=f"only {what} whose name matches somewhere"
    )
    made.add_argument("--list", action="store_true", help="only print the rows' names")
    made.add_argument("--jobs", type=int, metavar="N", default=min(2, os.cpu_count() or 1), help="processes")
    made.add_argument("--resume", type=Path, metavar="FILE", help="rows done, one JSON object a line")
    made.add_argument(
        "--output", type=Path, metavar="FOLDER", help=f"default {RESULTS.relative_to(ROOT)}; with --rows none"
    )
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def grid_parser(description: str | None) -> argparse.ArgumentParser:
    """Those, and what the grids of cases have beside them."""
    made = parser(description)
    made.add_argument(
        "--versions",
        type=_versions,
        metavar="V,…",
        default=VERSIONS,
        help=f'only these beside the original: {", ".join(VERSIONS[1:])}; "verify" compiles most',
    )
    made.add_argument(
        "--renew", action="store_true", help="the other rows and versions stay as they are in bench/results"
    )
    return made


def _versions(text: str) -> tuple[str, ...]:
    wanted = text.split(",")
    if unknown := [name for name in wanted if name not in VERSIONS]:
        raise argparse.ArgumentTypeError(f"no version {unknown[0]!r}; there are {', '.join(VERSIONS)}")
    return tuple(version for version in VERSIONS if version in {ORIGINAL, *wanted})


class Named(Protocol):
    """What has a name."""

    @property
    def name(self) -> str:
        """What ``--list`` prints."""


def nothing_to_measure(
    name: str, cases: Sequence[Named], options: argparse.Namespace, missing: Callable[[], str | None]
) -> int | None:
    """The exit status where nothing is measured: the names are wanted, or something is not there; or None.

    Args:
      name: the benchmark's.
      cases: those chosen.
      options: the command line.
      missing: what says, in words, that the compiler is not there.
    """
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    said = missing()
    if said is None and not cases:
        said = f"no row matches {options.rows!r}; --list names them all"
    if said is None:
        return None
    print(f"{name}: {said}", file=sys.stderr)
    return 2


def chosen(cases: Sequence[Case], pattern: str | None) -> tuple[Case, ...]:
    """The cases whose names match; all without a pattern."""
    return tuple(case for case in cases if pattern is None or re.search(pattern, case.name))


def with_stored(
    rows: Sequence[Row], name: str, cases: Sequence[Case], options: argparse.Namespace
) -> list[Row]:
    """With ``--renew`` the rows of all cases that are stored or measured, else those that were measured.

    Args:
      rows: measured.
      name: the benchmark's.
      cases: all of its grid, in their order.
      options: the command line.
    """
    if not options.renew:
        return list(rows)
    known = {row.name: row for row in run.stored(name)}
    for row in rows:
        known[row.name] = known[row.name].renewed(row) if row.name in known else row
    return [known[case.name] for case in cases if case.name in known]


def folder(options: argparse.Namespace) -> Path | None:
    """Where to write; None for nowhere: a part of the rows does not replace the whole."""
    if options.output is not None:
        return Path(options.output)
    partial = options.rows and not getattr(options, "renew", False)
    return None if partial else RESULTS
