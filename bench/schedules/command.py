"""The command line that the benchmarks of compiled schedules share."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.schedules.case import Case
from bench.schedules.run import RESULTS, ROOT


def parser(description: str | None, what: str = "rows") -> argparse.ArgumentParser:
    """Options of all of them."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--rows", metavar="REGEX", help=f"only {what} whose name matches somewhere")
    made.add_argument("--list", action="store_true", help="only print the rows' names")
    made.add_argument("--jobs", type=int, metavar="N", default=min(2, os.cpu_count() or 1), help="processes")
    made.add_argument("--resume", type=Path, metavar="FILE", help="rows done, one JSON object a line")
    made.add_argument(
        "--output", type=Path, metavar="FOLDER", help=f"default {RESULTS.relative_to(ROOT)}; with --rows none"
    )
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


def grid_parser(description: str | None) -> argparse.ArgumentParser:
    """Those, and what the grids of cases have beside them."""
    made = parser(description)
    made.add_argument("--no-verify", action="store_true", help='without policy="verify", which compiles most')
    return made


def nothing_to_measure(
    name: str, cases: Sequence[Case], options: argparse.Namespace, missing: Callable[[], str | None]
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


def folder(options: argparse.Namespace) -> Path | None:
    """Where to write; None for nowhere: a part of the rows does not replace the whole."""
    if options.output is not None:
        return Path(options.output)
    return None if options.rows else RESULTS
