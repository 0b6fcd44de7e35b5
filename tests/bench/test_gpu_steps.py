"""What one GPU measured of programs for eight: as stored, and as the cost model prices it today."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu_matmuls, gpu_steps
from bench.schedules import grid
from bench.schedules.run import RESULTS
from cost_model import Matmul
from overlap.calibration import FULL, QUICK


def test_compute_of_stored_programs_is_priced_near_what_was_measured() -> None:
    rows, _ = gpu_steps.stored()
    assert [row.name for row in rows] == [case.name for case in grid.gpu_cases()]
    for version in gpu_steps.VERSIONS:
        off = [
            abs(figures["modelled_s"] / figures["measured_s"] - 1)
            for figures in (gpu_steps.priced(row)["versions"][version] for row in rows)
        ]
        assert statistics.median(off) < 0.06
        assert max(off) < 0.15


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
