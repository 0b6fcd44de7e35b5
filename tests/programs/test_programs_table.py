"""The table of programs is printed and written, with every program and what it was made with."""

# mypy: allow-untyped-calls

import json
from pathlib import Path

import jax
import pytest

from bench import programs_table
from bench.programs import PROGRAMS


def test_the_table_has_every_program_under_both_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert programs_table.main(["--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    content = json.loads((tmp_path / "programs.json").read_text())
    assert content["versions"]["jax"] == jax.__version__
    names = [*(program.name for program in PROGRAMS), "decoder"]
    assert [(row["program"], row["policy"]) for row in content["rows"]] == [
        (name, policy) for name in names for policy in ("auto", "always")
    ]
    for row in content["rows"]:
        kept = sum(group["sites"] for group in row["kept"])
        assert row["sites"] == sum(row["rewritten"].values()) + kept
        assert row["program"] in shown
        assert f"| {row['program']} |" in (tmp_path / "programs.md").read_text()


def test_a_ring_that_auto_takes_is_predicted_to_pay() -> None:
    found = [row for row in programs_table.rows() if row.policy == "auto"]
    taken = [row for row in found if any(site.rewritten for site in row.report.sites)]
    assert len(taken) > len(found) / 2
    assert all(row.after_s < row.before_s for row in taken)
    assert all(row.after_s == row.before_s for row in found if row not in taken)
