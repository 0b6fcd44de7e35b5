"""The README's figures are those of bench/results, and what it promises is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cost_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "bench" / "results"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


TABLED = [cells(line) for line in README.splitlines() if line.startswith("|")]


def test_every_program_is_tabled_with_the_figures_of_the_last_run() -> None:
    lines = (RESULTS / "programs.md").read_text().splitlines()
    decided = [row for row in map(cells, lines) if len(row) == 6 and row[2] == "auto"]
    assert decided
    for program, mesh, _, rewritten, kept, times in decided:
        assert [f"`{program}`", mesh, rewritten, kept, times] in TABLED


def test_what_it_costs_is_tabled_with_the_figures_of_the_last_run() -> None:
    lines = (RESULTS / "overhead.md").read_text().splitlines()
    measured = [row for row in map(cells, lines) if len(row) == 6 and row[3] not in ("figure", "-")]
    measured = [row for row in measured if not set(row[0]) <= {"-"}]
    assert measured
    for name, base, full, figure, target, _ in measured:
        assert [name, base, full, figure, target] in TABLED


@pytest.mark.parametrize("name", ["programs", "overhead"])
def test_results_say_what_they_were_made_with(name: str) -> None:
    assert "jax" in json.dumps(json.loads((RESULTS / f"{name}.json").read_text()))


def test_the_hardware_that_it_names_exists() -> None:
    assert 'hardware="tpu_v5p"' in README and "tpu_v5p" in cost_model.names()


def test_the_pages_that_it_links_to_exist() -> None:
    assert "(docs/patterns.md)" in README and (ROOT / "docs" / "patterns.md").is_file()
