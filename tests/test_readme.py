"""The README's figures are those of bench/results, and what it promises is there."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

import cost_model
from bench import gpu_steps

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


def against_xla(grid: dict[str, Any], version: str) -> str:
    """What the summary of a grid of compiled schedules says of a version."""
    (means,) = (means for means in grid["means"] if means["version"] == version)
    return (
        f"×{means['over_xla']:.2f} over XLA, {means['efficiency']:.0%} of the limit, "
        f"{len(grid['slower'][version])} rows slower, {len(grid['more_memory'][version])} with more memory"
    )


def summary() -> dict[str, tuple[str, str]]:
    """The first table's results and their kinds, by the name of the run that they are from."""
    programs, matmuls, overhead, gpu, steps_of_gpu, rolled, nets, rings, network, decisions = (
        json.loads((RESULTS / f"{name}.json").read_text())
        for name in (
            "programs",
            "matmul_model",
            "overhead",
            "gpu_schedules",
            "gpu_steps",
            "rolled_rings",
            "nets",
            "ring_model",
            "network",
            "decisions",
        )
    )
    judged = decisions["all"]
    compiled, drawn, tpu, offloaded, implied = (
        json.loads((RESULTS / f"{name}.json").read_text())["summary"]
        for name in (
            "tpu_programs",
            "layers",
            "tpu_schedules",
            "tpu_schedules_offloaded",
            "tpu_schedules_implied",
        )
    )
    chains, steps_alone = gpu_steps.apart(steps_of_gpu["rows"])
    off = {
        (what, version): statistics.median(gpu_steps.errors(rows, version))
        for what, rows, version in (
            ("chains", chains, "original"),
            ("chains", chains, "ring"),
            ("steps", steps_alone, "original"),
            ("steps", steps_alone, "auto"),
        )
    }
    (auto,) = (means for means in gpu["summary"]["means"] if means["version"] == "auto")
    (placed,) = (means for means in implied["means"] if means["version"] == "auto")
    (compiling,) = (means["compiling"] for means in tpu["means"] if means["version"] == "auto")
    took = {(row["pattern"], row["devices"], row["form"]): row for row in rolled["rows"]}
    patterns = {pattern for pattern, _, _ in took}
    growth = [
        took[pattern, 256, "rolled"]["compile_cpu_s"] / took[pattern, 16, "rolled"]["compile_cpu_s"]
        for pattern in patterns
    ]
    hops = [
        took[pattern, devices, "rolled"]["hop_s"] / took[pattern, devices, "unrolled"]["hop_s"] - 1
        for pattern in patterns
        for devices in (16, 64)
    ]
    decided = [row for row in programs["rows"] if row["policy"] == "auto" and row["modelled_before_s"]]
    gains = [row["modelled_before_s"] / row["modelled_after_s"] for row in decided]
    errors, wide = (
        [100 * chip["all"][which] for chip in matmuls["unseen"].values()] for which in ("median", "p95")
    )
    calls, rewriting = (
        [figure["value"] for figure in overhead["figures"] if figure["name"].startswith(start)]
        for start in ("call,", "rewriting")
    )
    even = [row for row in network["rows"] if row["ratio"] == 1]
    single = [row["variants"]["autotune"] for row in even if row["case"] != "mlp_step"]
    efficiency = statistics.median(variant["efficiency"] for variant in single)
    gain = statistics.geometric_mean(variant["speedup"]["ratio"] for variant in single)
    steps = [row["variants"]["autotune"]["speedup"]["ratio"] for row in even if row["case"] == "mlp_step"]
    apart = [
        abs(row["variants"][variant]["prediction_error"])
        for row in network["rows"]
        for variant in ("original", "auto")
    ]
    return {
        "network": (
            f"single chains ×{gain:.2f} and {efficiency:.0%} of the limit, MLP step "
            + " and ".join(f"×{ratio:.2f}" for ratio in steps),
            "measured",
        ),
        "network, predicted": (f"{statistics.median(apart):.0%} apart in the median", "modelled"),
        "programs": (f"×{min(gains):.2f} to ×{max(gains):.2f} in {len(gains)} programs", "modelled"),
        "gpu_schedules": (f"×{auto['over_original']:.2f} in {auto['rows']} rows", "modelled"),
        "gpu_steps": (
            f"{off['chains', 'original']:.1%} apart in the median for chains as written, "
            f"{off['chains', 'ring']:.1%} as rings; training steps {off['steps', 'original']:.1%}, "
            f"{off['steps', 'auto']:.1%} where rewritten",
            "measured",
        ),
        **{
            name: (against_xla(grid, version), "modelled")
            for name, grid, version in (
                ("tpu_schedules, auto", tpu, "auto"),
                ("tpu_schedules, verify", tpu, "verify"),
                ("tpu_schedules_offloaded, auto", offloaded, "auto"),
                ("tpu_schedules_offloaded, verify", offloaded, "verify"),
            )
        },
        "tpu_schedules_implied": (
            f"×{placed['over_original']:.2f} over the original, {placed['efficiency']:.0%} of the limit, "
            f"{len(implied['slower']['auto'])} rows slower, "
            f"{len(implied['more_memory']['auto'])} with more memory",
            "modelled",
        ),
        "tpu_schedules, compiling": (f"×{compiling:.1f}", "measured"),
        "nets": (
            f"×{nets['summary']['time']:.2f} (slowest ×{nets['summary']['slowest']:.2f}), "
            f"memory ×{nets['summary']['memory']:.2f}",
            "modelled",
        ),
        "ring_model, hidden": (f"{rings['hidden']['all']['hidden']:.0%} of the limit", "modelled"),
        "ring_model": (f"median error {rings['errors']['rings, all']['median']:.1%}", "modelled"),
        "tpu_programs": (
            f"×{compiled['time']:.2f} (slowest ×{compiled['slowest']:.2f}), "
            f"memory ×{compiled['memory']:.2f} (most ×{compiled['most_memory']:.2f})",
            "modelled",
        ),
        "layers": (
            f"×{drawn['time']:.2f} (slowest ×{drawn['slowest']:.2f}, {len(drawn['slower'])} of "
            f"{drawn['rewritten']} slower), memory ×{drawn['memory']:.2f} (most ×{drawn['most_memory']:.2f})",
            "modelled",
        ),
        "decisions": (
            f"{judged['share']:.1%} right, mean regret {judged['mean_regret']:.1%}, "
            f"{len(judged['losses'])} loss{'' if len(judged['losses']) == 1 else 'es'}",
            "modelled",
        ),
        "matmul_model": (
            f"median error {max(errors):.1f} %, 95th percentile {min(wide):.0f} % to {max(wide):.0f} % "
            f"on {len(errors)} chips",
            "modelled",
        ),
        "rolled, compiling": (f"×{min(growth):.2f} to ×{max(growth):.2f}", "measured"),
        "rolled, a hop": (f"{100 * min(hops):+.1f} % to {100 * max(hops):+.1f} %", "modelled"),
        "call": (f"{min(calls):.2f} µs to {max(calls):.2f} µs", "measured"),
        "rewriting": (f"×{min(rewriting):.2f} to ×{max(rewriting):.2f}", "measured"),
    }


@pytest.mark.parametrize("name", list(summary()))
def test_the_first_table_sums_up_the_last_runs_and_says_of_which_kind_they_are(name: str) -> None:
    result, kind = summary()[name]
    assert [row[2] for row in TABLED if len(row) == 4 and row[1] == result] == [kind]


@pytest.mark.parametrize("name", ["programs", "overhead", "rolled_rings"])
def test_results_say_what_they_were_made_with(name: str) -> None:
    assert "jax" in json.dumps(json.loads((RESULTS / f"{name}.json").read_text()))


def test_the_hardware_that_it_names_exists() -> None:
    assert 'hardware="tpu_v5p"' in README and "tpu_v5p" in cost_model.names()


def test_the_pages_that_it_links_to_exist() -> None:
    assert "(docs/patterns.md)" in README and (ROOT / "docs" / "patterns.md").is_file()
