"""The benchmark of decided programs: what is stored, and so in the README, is what is decided today."""

# mypy: allow-untyped-calls

from __future__ import annotations

import json

import jax
import pytest

from bench import programs_table
from bench.schedules.run import RESULTS

TIMES = ("modelled_before_s", "modelled_after_s")


def test_what_is_stored_is_what_is_decided_today() -> None:
    stored = json.loads((RESULTS / "programs.json").read_text())
    if jax.__version__ != (made_with := stored["versions"]["jax"]):
        pytest.skip(f"what is stored was made with jax {made_with}, whose gradients have other equations")
    today = [row.to_dict() for row in programs_table.rows(("auto",))]
    wanted = [row for row in stored["rows"] if row["policy"] == "auto"]
    for row in wanted:
        row |= {time: pytest.approx(row[time]) for time in TIMES}
    assert today == wanted, "make it anew: python -m bench.programs_table, then the README's figures"
