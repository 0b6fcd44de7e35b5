"""The benchmark of compiled training steps: what it compiles, and that its page is that of its rows."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bench import steps, tpu_programs
from bench.programs import PROGRAMS
from bench.schedules.run import RESULTS
from bench.steps import Step


def test_every_program_is_compiled_for_every_chip() -> None:
    found = tpu_programs.everything().values()
    chips = {each.slice.chip for each in found}
    assert chips == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    for chip in chips:
        assert [each.program for each in found if each.slice.chip == chip] == list(PROGRAMS)


def test_the_stored_page_is_that_of_the_stored_rows() -> None:
    content = json.loads((RESULTS / "tpu_programs.json").read_text())
    rows = [Step(**row) for row in content["rows"]]
    assert [row.name for row in rows] == list(tpu_programs.everything())
    assert steps.summary(rows) == content["summary"]
    assert tpu_programs.document(rows, content["versions"]) == (RESULTS / "tpu_programs.md").read_text()
    assert dataclasses.asdict(rows[0]) == content["rows"][0]


def test_names_can_be_listed_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert tpu_programs.BENCHMARK.main(["--list", "--rows", "v6e.*esm2"]) == 0
    assert capsys.readouterr().out.split("\n") == ["v6e:2x4 esm2_layer", ""]
