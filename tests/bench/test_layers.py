"""The benchmark of drawn training steps: what it draws, and that its page is that of its rows."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

import pytest

from bench import layers, steps
from bench.schedules.run import RESULTS
from bench.steps import Step


def test_a_draw_is_the_same_again_and_takes_chips_in_turn() -> None:
    found = layers.drawn(20, 3)
    assert found == layers.drawn(20, 3) != layers.drawn(20, 4)
    assert found[:10] == layers.drawn(10, 3)
    assert len({each.name for each in found}) == 20
    assert set(Counter(each.slice.chip for each in found).values()) == {4}


def test_every_dim_is_divided_evenly_over_the_devices() -> None:
    for each in layers.drawn(50, 3):
        program = each.program
        sizes, axes = program.sizes["real"], dict(zip(program.axis_names, program.mesh_shape, strict=True))
        assert math.prod(axes.values()) == each.slice.devices
        heads = ("H", "F", "V") if each.choices.over_tensor else ()
        sequence = ("S",) if each.choices.over_sequence else ()
        assert all(sizes[dim] % axes["tensor"] == 0 for dim in (*heads, *sequence))
        assert not each.choices.over_fsdp or sizes["B"] % axes["fsdp"] == sizes["D"] % axes["fsdp"] == 0


def test_the_stored_page_is_that_of_the_stored_rows() -> None:
    content = json.loads((RESULTS / "layers.json").read_text())
    rows = [Step(**row) for row in content["rows"]]
    assert [row.name for row in rows] == [each.name for each in layers.drawn(len(rows), content["seed"])]
    assert steps.summary(rows) == content["summary"]
    page = layers.document(rows, content["versions"], content["seed"])
    assert page == (RESULTS / "layers.md").read_text()
    assert dataclasses.asdict(rows[0]) == content["rows"][0]


def test_names_can_be_listed_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert layers.BENCHMARK.main(["--list", "--count", "5"]) == 0
    assert capsys.readouterr().out.splitlines() == [each.name for each in layers.drawn(5, layers.SEED)]
