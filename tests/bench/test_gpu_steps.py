"""What one GPU measured of programs for eight: as stored, and as the cost model prices it today."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_matmuls, gpu_steps
from bench.schedules import grid, programs
from bench.schedules.case import Case, Slice, Width
from bench.schedules.rows import AUTO, ORIGINAL
from bench.schedules.run import RESULTS
from cost_model import Matmul
from overlap import overlap_collectives
from overlap.calibration import FULL, QUICK
from tests.passes import spmd


@pytest.fixture(scope="module")
def priced() -> list[dict[str, Any]]:
    """The stored rows at today's prices."""
    rows, made_with = gpu_steps.stored()
    where = gpu_steps.sliced(made_with["device_kind"])
    assert [row.name for row in rows] == list(gpu_steps.to_measure(where))
    return [gpu_steps.priced(row, where) for row in rows]


def test_compute_of_stored_programs_is_priced_near_what_was_measured(priced: list[dict[str, Any]]) -> None:
    cases, steps = gpu_steps.apart(priced)
    assert len(cases) == len(grid.gpu_cases())
    for group, version, median, most in (
        (cases, ORIGINAL, 0.09, 0.16),
        (cases, gpu_steps.RING, 0.06, 0.16),
        (steps, ORIGINAL, 0.06, 0.20),
        (steps, AUTO, 0.06, 0.11),
    ):
        off = gpu_steps.errors(group, version)
        assert statistics.median(off) < median
        assert max(off) < most


def test_what_rings_add_to_whole_steps_is_priced_as_it_was_measured(priced: list[dict[str, Any]]) -> None:
    """Their dots, copies and stops together, over all steps in which there are some."""
    rewritten = [each["versions"] for each in priced if AUTO in each["versions"]]
    added = {
        kind: sum(of[AUTO][kind] - of[ORIGINAL][kind] for of in rewritten)
        for kind in ("measured_s", "modelled_s")
    }
    assert added["modelled_s"] == pytest.approx(added["measured_s"], rel=0.2)


def test_stored_results_are_those_of_todays_prices(tmp_path: Path) -> None:
    """After a change of prices: python -m bench.gpu_steps --stored, and the same of bench.gpu_matmuls."""
    for module in (gpu_steps, gpu_matmuls):
        assert module.main(["--stored", "--out", str(tmp_path)]) == 0
        page = f"{module.NAME}.md"
        assert (tmp_path / page).read_text() == (RESULTS / page).read_text()


@pytest.mark.parametrize("module", ["gpu_steps", "gpu_matmuls"])
def test_without_a_gpu_they_say_so(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{module}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=RESULTS.parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr


def test_drawn_matmuls_are_not_those_that_calibrations_time() -> None:
    known = {shape for effort in (QUICK, FULL) for shape in effort.matmuls}
    drawn = gpu_matmuls.drawn()
    timed = [*drawn, *map(gpu_matmuls.piece, drawn)]
    assert not known & {(matmul.m, matmul.k, matmul.n) for matmul in timed}
    assert gpu_matmuls.piece(Matmul(m=64, k=2, n=3)).m == 8
    stored = json.loads((RESULTS / "gpu_matmuls.json").read_text())["matmuls"]
    assert [Matmul(**of["matmul"]) for of in stored] == drawn


def test_a_program_is_measured_in_all_its_versions_and_kept(tmp_path: Path) -> None:
    """On virtual CPU devices: the second run takes the first one's rows, and runs nothing."""
    where = Slice(topology="cpu:4", hardware="h200", mesh_shape=(4,))
    case = Case(slice=where, pattern="mlp", width=Width("narrow", 64, 128, gated=False), tokens=8)
    problem, mesh = programs.problem(case), spmd.mesh_of(4)
    original = programs.manual(problem, mesh)
    made = {
        ORIGINAL: original,
        gpu_steps.RING: overlap_collectives(original, policy="always", strict=True),
    }

    def measure() -> gpu_steps.Measured:
        return gpu_steps.row(case.name, made, programs.operands(problem, mesh))

    kept, made_with = tmp_path / "rows.jsonl", {"jax": "1"}
    (first,) = gpu_steps.measured({case.name: measure}, kept, made_with)
    assert list(first.versions) == list(first.programs) == [ORIGINAL, gpu_steps.RING]
    assert all(of["measured_s"] > 0 for of in first.versions.values())
    assert not any("metadata=" in text for text in first.programs.values())
    (again,) = gpu_steps.measured({case.name: pytest.fail}, kept, made_with)
    assert again == first
    priced = gpu_steps.priced(first, where)["versions"]
    assert priced[ORIGINAL]["permutes"] == 0 < priced[gpu_steps.RING]["permutes"]
