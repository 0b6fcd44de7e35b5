"""Judges the cost model's decisions: random chains, and for a sample the schedules of the TPU compiler.

    python -m bench.decisions                    draws, decides, compiles; writes bench/results/decisions.*
    python -m bench.decisions --resume FILE      keeps every program in FILE, and goes on where FILE ends
    python -m bench.decisions --rows 'v5e.*psum' some chains; writes nothing unless --output is given
    python -m bench.decisions --sample 0         decides only, in a minute

FILE stays good when only the cost model's prices change: what the new ones choose is then compiled too.
Needs libtpu, and no TPU. All times are modelled.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.deciding import chains, judgement, measure, plot, tables
from bench.deciding.run import Study
from bench.schedules import command, workers
from bench.schedules import run as schedules_run
from overlap import tpu_target

NAME: Final = "decisions"
DRAWS: Final = 2000
SAMPLE: Final = 150
CANDIDATES: Final = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Decides, compiles, prints, writes; the exit status is 1 where a goal is missed, 2 without libtpu."""
    options = parser().parse_args(argv)
    if options.worker:
        workers.serve(measure.answer, sys.stdin, sys.stdout)
        return 0
    drawn = [chain for chip in chains.CHIPS for chain in chains.draw(chip, options.draws, options.seed)]
    if options.rows:
        drawn = [chain for chain in drawn if re.search(options.rows, chain.name)]
    sample = chains.sample(drawn, options.sample)
    if options.list:
        print("\n".join(chain.name for chain in sample))
        return 0
    if (missing := tpu_target.missing()) is not None:
        print(f"{NAME}: {missing}", file=sys.stderr)
        return 2
    if not drawn:
        print(f"{NAME}: no chain matches {options.rows!r}", file=sys.stderr)
        return 2
    made_with = {**schedules_run.versions("libtpu"), "sources": measure.sources()}
    study = Study(f"bench.{NAME}", options.jobs, made_with, options.resume)
    decided = study.decide(drawn)
    if options.decisions is not None:
        lines = (json.dumps(dataclasses.asdict(each), ensure_ascii=False) for each in decided)
        options.decisions.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\n{tables.drawn_table(drawn, decided)}\n")
    if not sample:
        return 0
    by_name = {each.name: each for each in decided}
    rows = study.rows(sample, by_name, options.candidates)
    print(f"\n{tables.goals(rows)}\n\n{tables.scores(rows)}\n\n{tables.errors(rows)}\n\n{tables.wrong(rows)}")
    if (folder := command.folder(options)) is not None:
        page = tables.document(drawn, decided, rows, made_with, seed=options.seed, most=options.candidates)
        data = tables.content(drawn, decided, rows, made_with, seed=options.seed, most=options.candidates)
        schedules_run.write(folder, NAME, page, data)
        plot.draw(rows, folder / f"{NAME}.svg", title="Predicted times against the TPU compiler's schedules")
        print(f"\nWritten: {folder / NAME}.md, .json and .svg")
    return 0 if judgement.score(rows).met else 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = command.parser(__doc__, "chains")
    made.add_argument("--draws", type=_count, metavar="N", default=DRAWS, help=f"chains per chip ({DRAWS})")
    made.add_argument("--seed", type=int, default=chains.SEED, help=f"of the draws ({chains.SEED})")
    made.add_argument(
        "--sample", type=_count, metavar="N", default=SAMPLE, help=f"chains compiled, at least ({SAMPLE})"
    )
    made.add_argument(
        "--candidates",
        type=_count,
        metavar="N",
        default=CANDIDATES,
        help=f"rings compiled of each, by prediction ({CANDIDATES}); 0: all",
    )
    made.add_argument(
        "--decisions", type=Path, metavar="FILE", help="write every decision there, one JSON object a line"
    )
    return made


def _count(text: str) -> int:
    if (count := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{count} is negative")
    return count


if __name__ == "__main__":
    sys.exit(main())
