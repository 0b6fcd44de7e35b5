"""The benchmark of programs of several chains: what it draws, and how it sums up."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from bench import nets, steps
from bench.nets import Net, Row
from bench.schedules.case import SLICES, WIDTHS, Case
from bench.schedules.run import RESULTS


def test_a_draw_is_the_same_again_and_takes_chips_and_gradients_in_turn() -> None:
    found = nets.drawn(20, 3)
    assert found == nets.drawn(20, 3) != nets.drawn(20, 4)
    assert len({net.name for net in found}) == 20
    turns = Counter((net.case.slice.chip, net.case.pattern) for net in found)
    assert set(turns.values()) == {2} and len(turns) == 10
    assert all(net.case.slice.others == 1 for net in found if net.case.pattern == "mlp_grad")


def test_layers_follow_each_other_each_with_its_weights() -> None:
    case = Case(slice=SLICES[0], pattern="mlp", width=WIDTHS[0], tokens=128)
    one, three = (Net(case=case, layers=layers).problem() for layers in (1, 3))
    assert three.shapes == (one.shapes[0], *one.shapes[1:] * 3)
    assert three.flops == 3 * one.flops and len(three.moved) == 3 * len(one.moved)
    assert three.out_specs == three.in_specs[0]


ROWS = [
    Row(
        name="a", chip="v5e", layers=1, gradient=False, rewritten=2, sites=2, original_s=1.0, auto_s=0.8,
        saved_s=0.3, original_bytes=10, auto_bytes=5,
    ),
    Row(
        name="b", chip="v5e", layers=2, gradient=True, rewritten=1, sites=4, original_s=2.0, auto_s=2.1,
        saved_s=0.1, original_bytes=10, auto_bytes=12,
    ),
    Row(name="c", chip="v4", layers=1, gradient=True, sites=4, original_s=1.0, auto_s=1.0),
    Row(name="d", chip="v4", layers=1, gradient=True, error="died"),
]  # fmt: skip


def test_a_summary_is_of_nets_with_rings_and_names_the_slower_ones() -> None:
    found = steps.summary(ROWS)
    assert (found["nets"], found["rewritten"]) == (4, 2)
    assert found["slower"] == ["b"] == found["more_memory"]
    assert found["time"] == pytest.approx((0.8 * 1.05) ** 0.5, abs=1e-4)
    # Predicted 0.7 and 1.9, compiled 0.8 and 2.1.
    assert (found["off_median"], found["off_p90"]) == (0.1, 0.1)
    assert steps.summary(ROWS[2:]) == {"nets": 2, "rewritten": 0}
    page = nets.document(ROWS, {"jax": "1"}, 3)
    assert "d: FAILED died" in page and "| v4 | 0 of 2 |" in page


def test_the_stored_page_is_that_of_the_stored_rows() -> None:
    content = json.loads((RESULTS / "nets.json").read_text())
    rows = [Row(**row) for row in content["rows"]]
    assert [row.name for row in rows] == [net.name for net in nets.drawn(len(rows), content["seed"])]
    assert steps.summary(rows) == content["summary"]
    page = nets.document(rows, content["versions"], content["seed"])
    assert page == (RESULTS / "nets.md").read_text()
    assert dataclasses.asdict(rows[0]) == content["rows"][0]


def test_names_can_be_listed_without_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert nets.BENCHMARK.main(["--list", "--count", "5"]) == 0
    assert capsys.readouterr().out.splitlines() == [net.name for net in nets.drawn(5, nets.SEED)]
