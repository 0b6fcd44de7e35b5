"""Chains are drawn as the rule says, hand-made rows add up to their judgement, and a small run works."""

# mypy: allow-untyped-calls

import dataclasses
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from bench import decisions
from bench.deciding import chains, judgement, measure, plot, run, tables
from bench.deciding.chains import CHIPS, Drawn, draw, sample
from bench.deciding.judgement import score
from bench.deciding.rows import ORIGINAL, Compiled, Decided, Row
from bench.schedules import programs
from bench.schedules.case import SLICES, Slice
from bench.schedules.run import RESULTS, ROOT
from cost_model import Estimate
from overlap import overlap_collectives, tpu_target
from tests.libtpu import needs_libtpu

V5E = next(where for where in SLICES if str(where) == "v5e:4x4")
CHAIN = Drawn(slice=V5E, pattern="gather_free", m=4096, k=1024, n=512)

# Drawing.


def test_a_seed_draws_the_same_chains_again_and_another_seed_others() -> None:
    first = draw("v5e", 120, seed=1)
    assert first == draw("v5e", 120, seed=1)
    assert first[:50] == draw("v5e", 50, seed=1)
    assert not {c.name for c in first} & {c.name for c in draw("v5e", 120, seed=2)}


@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_has_two_thousand_different_chains_within_the_limits(chip: str) -> None:
    drawn = draw(chip, 2000)
    assert len({chain.name for chain in drawn}) == 2000
    assert {chain.chip for chain in drawn} == {chip}
    patterns = Counter(chain.pattern for chain in drawn)
    assert set(patterns) == set(chains.PATTERNS) and max(patterns.values()) - min(patterns.values()) <= 1
    assert {chain.slice for chain in drawn} == {where for where in SLICES if where.chip == chip}
    dtypes = Counter(chain.dtype for chain in drawn)
    assert dtypes["bfloat16"] > 1500 and min(dtypes["int8"], dtypes["float32"]) > 100
    for chain in drawn:
        p = chain.slice.axis_size
        cut = p if chain.pattern in ("gather_free", "gather_shared", "scatter_free", "psum") else 1
        assert chain.m % (8 * cut) == 0 and 8 <= chain.m <= 70000
        assert chain.n % 128 == 0 and 128 <= chain.n <= 33000
        assert chain.k % (8 * p if chain.pattern in chains.CONTRACTING else 128) == 0
        assert 64 <= chain.k <= 34000
        assert chain.count == (p if chain.pattern == "gather_batch" else chain.count)
        shared = {"gather_shared": (2, 3), "gather_features": (1, 2, 3)}
        assert chain.count in shared.get(chain.pattern, (1, p))
        assert 0.05 <= chains.ratio(chain) <= 10
        operand = chain.m * chain.k + chain.k * chain.n
        assert operand <= 8e9  # a byte each at least


def test_no_chain_is_of_a_dot_that_the_tables_were_made_from(monkeypatch: pytest.MonkeyPatch) -> None:
    known = chains.known_dots()
    assert len(known) > 1000
    # The first shape that the benchmark's own file lists.
    path = next((RESULTS / "matmul_samples").glob("tpu_v5e.table.jsonl"))
    batch, m, k, n = json.loads(path.read_text().splitlines()[0])["samples"][0][:4]
    assert (batch, m, k, n) in known
    victim = draw("v6e", 1)[0]
    monkeypatch.setattr(chains, "known_dots", lambda: frozenset({(1, victim.m, victim.k, victim.n)}))
    assert victim not in draw("v6e", 6)


def test_a_name_says_all_about_a_chain() -> None:
    assert CHAIN.name == "v5e:4x4 gather_free 4096x1024x512 bfloat16"
    for chain in (drawn for chip in CHIPS for drawn in draw(chip, 12)):
        assert Drawn.from_name(chain.name) == chain
    with pytest.raises(ValueError, match="no chain's name"):
        Drawn.from_name("v5e:4x4 unheard_of 4096x1024x512 bfloat16")


def test_the_ratio_is_that_of_bytes_over_links_to_flops_over_the_peak() -> None:
    # 15/16 of 4096 rows of 1024 in bfloat16 enter a corner chip of the 4 × 4 grid by two links of 45 GB/s.
    links_s = 15 / 16 * 4096 * 1024 * 2 / (2 * 4.5e10)
    dots_s = 2 * 4096 * 1024 * 512 / 1.97e14
    assert chains.ratio(CHAIN) == pytest.approx(links_s / dots_s)
    shared = dataclasses.replace(CHAIN, pattern="gather_shared", count=3)
    assert chains.ratio(shared) == pytest.approx(links_s / dots_s / 3)


def test_the_sample_has_as_many_of_every_chip_and_pattern_and_of_all_ratios() -> None:
    drawn = [chain for chip in CHIPS for chain in draw(chip, 280)]
    taken = sample(drawn, 150)
    assert len(taken) == len(set(taken)) == 175
    strata = Counter((chain.chip, chain.pattern) for chain in taken)
    assert set(strata.values()) == {5} and len(strata) == 35
    # The beginning has one of each.
    assert len({(chain.chip, chain.pattern) for chain in taken[:35]}) == 35
    for chip, pattern in strata:
        ratios = sorted(chains.ratio(c) for c in drawn if (c.chip, c.pattern) == (chip, pattern))
        found = sorted(chains.ratio(c) for c in taken if (c.chip, c.pattern) == (chip, pattern))
        assert found == [ratios[rank] for rank in (4, 12, 20, 28, 36)]
    assert sample(drawn, 0) == ()
    assert len(sample(drawn[:3], 100)) == 3


@pytest.mark.parametrize("pattern", chains.PATTERNS)
def test_a_program_multiplies_what_its_name_says_on_every_device(pattern: str) -> None:
    where = Slice(topology="v5e:2x4", hardware="tpu_v5e", mesh_shape=(8,))
    count = {"gather_shared": 3, "gather_features": 2, "gather_batch": 8}.get(pattern, 1)
    chain = Drawn(slice=where, pattern=pattern, m=128, k=64, n=32, count=count, dtype="float32")
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",), axis_types=(AxisType.Auto,))
    made = chains.problem(chain)
    program = programs.manual(made, mesh)
    jaxpr = str(program.trace(*programs.operands(made, mesh)).jaxpr)
    batch, dots = (8, 1) if pattern == "gather_batch" else (1, count)
    shape = "8,128,32" if batch > 1 else "128,32"
    assert (
        jaxpr.count(f"f32[{shape}] = dot_general") + jaxpr.count(f"f32[{shape}]{{V:x}} = dot_general") == dots
    )
    assert made.flops == 2 * 128 * 64 * 32 * batch * dots
    chance = np.random.default_rng(0)
    values = [chance.standard_normal(shape).astype(np.float32) for shape in made.shapes]
    placed = [
        jax.device_put(value, NamedSharding(mesh, spec))
        for value, spec in zip(values, made.in_specs, strict=True)
    ]
    with jax.default_matmul_precision("highest"):
        found = jax.tree.leaves(program(*placed))
    assert len(found) == dots
    for result, w in zip(found, values[1:], strict=True):
        expected = np.matmul(values[0].astype(np.float64), w.astype(np.float64))
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


# Judging. Times are in seconds: the numbers are easy, and only their proportions count.


def priced(seconds: float) -> Estimate:
    return Estimate(
        dot_s=0.5,
        collective_s=0.5,
        partials_s=seconds,
        hops_s=0.3,
        hop_latency_s=0.0,
        overlapped_s=seconds,
    )


def row(
    *,
    on: bool,
    predicted: tuple[float, float],
    original_s: float | None = 1.0,
    rings: dict[str, float | None] | None = None,
    **chain: Any,
) -> Row:
    """A row whose model finds ring "a" best, predicted = (as written, ring "a")."""
    rings = {"a": 0.9} if rings is None else rings
    made = dataclasses.replace(CHAIN, **chain)
    times = {ORIGINAL: original_s, **rings}
    return Row(
        chain=made,
        decided=Decided(
            name=made.name,
            rewritten=on,
            reason="",
            schedule="a",
            original_s=predicted[0],
            ring_s=predicted[1],
        ),
        predicted={"a": priced(predicted[1]), "b": priced(2 * predicted[1])},
        compiled={
            schedule: Compiled(
                name=made.name, schedule=schedule, seconds=s, error="" if s is not None else "no room"
            )
            for schedule, s in times.items()
        },
    )


ON_AND_FASTER = row(on=True, predicted=(1.0, 0.8), rings={"a": 0.9, "b": 0.75})
ON_AND_SLOWER = row(on=True, predicted=(1.0, 0.9), rings={"a": 1.1, "b": 1.2}, m=8192)
OFF_AND_LITTLE_LOST = row(on=False, predicted=(1.0, 0.97), rings={"a": 0.96}, m=16384)
OFF_AND_MUCH_LOST = row(on=False, predicted=(1.0, 1.1), rings={"a": 1.3, "b": 0.8}, pattern="psum")
OFF_AND_NONE_FASTER = row(on=False, predicted=(1.0, 1.1), rings={"a": 1.0}, pattern="scatter_free")


@pytest.mark.parametrize(
    ("judged", "right", "strictly", "regret", "loses"),
    [
        (ON_AND_FASTER, True, True, 0.9 / 0.75 - 1, False),
        (ON_AND_SLOWER, False, False, 0.1, True),
        (OFF_AND_LITTLE_LOST, True, False, 1 / 0.96 - 1, False),
        (OFF_AND_MUCH_LOST, False, False, 0.25, False),
        (OFF_AND_NONE_FASTER, True, True, 0.0, False),
    ],
)
def test_a_decision_is_judged_by_what_was_compiled(
    judged: Row, right: bool, strictly: bool, regret: float, loses: bool
) -> None:
    assert judgement.right(judged) is right
    assert judgement.right(judged, least_gain=0.0) is strictly
    assert judgement.regret(judged) == pytest.approx(regret)
    assert judgement.loses(judged) is loses


def test_a_gain_of_exactly_what_auto_asks_for_makes_off_wrong() -> None:
    assert not judgement.right(row(on=False, predicted=(1.0, 1.0), rings={"a": 0.95}))
    assert judgement.right(row(on=False, predicted=(1.0, 1.0), rings={"a": 0.951}))


def test_rows_come_to_shares_regrets_and_errors() -> None:
    rows = [ON_AND_FASTER, ON_AND_SLOWER, OFF_AND_LITTLE_LOST, OFF_AND_MUCH_LOST, OFF_AND_NONE_FASTER]
    found = score(rows)
    assert (found.rows, found.on, found.right, found.right_strictly) == (5, 2, 3, 2)
    assert (found.share, found.share_strictly) == (0.6, 0.4)
    assert found.mean_regret == pytest.approx((0.2 + 0.1 + 1 / 24 + 0.25 + 0.0) / 5)
    assert found.max_regret == pytest.approx(0.25)
    assert found.losses == (ON_AND_SLOWER.chain.name,)
    # 0.8 for 0.9, 0.9 for 1.1, 0.97 for 0.96, 1.1 for 1.3, 1.1 for 1.0
    assert found.ring.count == 5 and found.ring.median == pytest.approx(0.1 / 0.9)
    assert found.ring.bias == pytest.approx(-0.1 / 0.9)
    assert found.rings.count == 8
    assert found.original.median == 0.0
    assert not found.met
    assert score([OFF_AND_NONE_FASTER]).ring.median == pytest.approx(0.1)


def test_the_ninetieth_percentile_is_of_sizes_and_the_bias_has_its_sign() -> None:
    found = judgement.spread([-0.5, -0.1, 0.2, -0.3, 0.4])
    assert (found.count, found.median, found.bias) == (5, 0.3, -0.1)
    assert found.p90 == pytest.approx(0.4 + 0.6 * 0.1)
    assert math.isnan(judgement.spread([]).median)


def test_goals_are_met_where_all_are_and_missed_where_one_is() -> None:
    good = row(on=True, predicted=(1.0, 0.8), rings={"a": 0.82})
    assert score([good]).met
    assert not score([good] * 30 + [ON_AND_SLOWER]).met  # 96.8 % right
    assert not score([good] * 99 + [ON_AND_SLOWER]).met  # 99 % right, with a loss
    assert not score([row(on=True, predicted=(1.0, 0.7), rings={"a": 0.82})]).met  # ring 15 % off
    assert not score([row(on=True, predicted=(1.0, 0.8), rings={"a": 0.82, "b": 0.8})]).met  # regret 2.5 %
    assert not score([]).met


def test_what_does_not_compile_is_wrong_if_chosen_and_says_nothing_as_written() -> None:
    failed = row(on=True, predicted=(1.0, 0.8), rings={"a": None, "b": 0.9})
    assert not judgement.right(failed)
    assert judgement.regret(failed) is None and not judgement.loses(failed)
    assert failed.failures == {"a": "no room"}
    found = score([failed, row(on=True, predicted=(1.0, 0.8), original_s=None)])
    assert (found.rows, found.right) == (1, 0)
    assert math.isnan(found.mean_regret) and not found.met
    others_fail = row(on=False, predicted=(1.0, 1.2), rings={"a": None})
    assert judgement.right(others_fail) and judgement.regret(others_fail) == 0


def test_the_interval_of_a_share_is_wilsons() -> None:
    # Newcombe (1998), Statistics in Medicine 17, table I: 81 of 263 and 0 of 20.
    assert judgement.interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert judgement.interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


# The page.


def test_the_page_and_the_picture_show_every_row(tmp_path: Path) -> None:
    failed = row(on=True, predicted=(1.0, 0.8), rings={"a": None}, k=2048)
    rows = [ON_AND_FASTER, ON_AND_SLOWER, OFF_AND_MUCH_LOST, failed]
    drawn, decided = [r.chain for r in rows], [r.decided for r in rows]
    versions = {"jax": "1", "date": "2026-01-01"}
    page = tables.document(drawn, decided, rows, versions, seed=3, most=8)
    for each in rows:
        assert each.chain.name in page
    assert "| decisions that are right | 25.0% | ≥ 97% | **missed** |" in page
    assert "| losses | 1 | none | **missed** |" in page
    assert f"| {ON_AND_SLOWER.chain.name} | wrong, loss | on |" in page
    assert f"| {failed.chain.name} | a | no room |" in page
    assert "jax 1" in page and "Seed 3" in page and "the 8 best" in page
    content = json.loads(json.dumps(tables.content(drawn, decided, rows, versions, seed=3, most=8)))
    assert content["goals"] == {"right": 0.97, "mean_regret": 0.02, "losses": 0, "median_ring_error": 0.08}
    assert content["versions"] == versions and content["all"]["losses"] == [ON_AND_SLOWER.chain.name]
    assert set(content["patterns"]) == {"gather_free", "psum"}
    assert content["sample"][3]["compiled"]["a"]["error"] == "no room"
    assert content["sample"][0]["predicted"]["a"]["overlapped_s"] == 0.8
    assert "| +37.5% | 1100000 |" in tables.ring_parts(
        [row(on=False, predicted=(1.0, 1.1), rings={"a": 0.8})]
    )
    plot.draw(rows, tmp_path / "p.svg", title="t")
    assert "<svg" in (tmp_path / "p.svg").read_text()
    plot.draw([], tmp_path / "none.svg", title="nothing")


def test_a_sample_in_which_nothing_compiled_has_a_page_too() -> None:
    none = row(on=True, predicted=(1.0, 0.8), original_s=None, rings={"a": None})
    page = tables.document([none.chain], [none.decided], [none], {}, seed=1, most=0)
    assert "0 of 0 decisions" in page and "all of a search" in page
    assert json.loads(json.dumps(tables.content([], [], [none], {}, seed=1, most=0), allow_nan=False))


# Runs.


def test_as_written_the_chosen_and_the_best_predicted_are_compiled() -> None:
    made = dataclasses.replace(
        ON_AND_FASTER, predicted={"b": priced(0.7), "c": priced(0.75), "a": priced(0.8)}
    )
    assert run.programs_of(made, 1) == (ORIGINAL, "a", "b")
    assert run.programs_of(made, 2) == (ORIGINAL, "a", "b", "c")
    assert run.programs_of(made, 0) == (ORIGINAL, "a", "b", "c")


def test_what_is_compiled_stays_good_when_prices_change_and_not_when_rings_do() -> None:
    assert all((ROOT / name).exists() for name in measure.ONLY_PREDICTING)
    names = {path.relative_to(ROOT).as_posix() for path in measure.read_sources()}
    assert {"passes/gather_ring.py", "cost_model/topology.py", "overlap/hlo/simulate.py"} <= names
    assert not names & {"cost_model/ring.py", "passes/pricing.py"}


def test_without_libtpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tpu_target, "missing", lambda: "libtpu is not installed")
    assert decisions.main(["--draws", "6"]) == 2
    assert "libtpu is not installed" in capsys.readouterr().err


def test_the_sample_is_listed_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tpu_target, "missing", lambda: "libtpu is not installed")
    assert decisions.main(["--draws", "12", "--sample", "12", "--list", "--rows", "^v4"]) == 0
    assert capsys.readouterr().out.splitlines() == [c.name for c in sample(draw("v4", 12), 12)]


def overlapped(chain: Drawn) -> Any:
    original = programs.manual(chains.problem(chain), measure.mesh_of(chain.slice))
    return overlap_collectives(original, policy="auto", strict=True)


@needs_libtpu
@pytest.mark.parametrize("pattern", ["gather_shared", "psum"])
def test_a_ring_that_is_compiled_is_the_one_that_a_call_runs(pattern: str) -> None:
    chain = next(c for c in draw("v5e", 120) if c.pattern == pattern and measure.decide(c).rewritten)
    chosen = measure.candidates_of(chain)[measure.decide(chain).schedule][0]

    def body(program: Any) -> list[str]:
        text = program.trace(*measure.operands_of(chain)).lower().as_text()
        lines = [line.strip() for line in text.splitlines()]
        (begin,) = [number for number, line in enumerate(lines) if "sdy.manual_computation" in line]
        (end,) = [number for number, line in enumerate(lines) if line.startswith("sdy.return")]
        # Constants are numbered through the whole program, which has others besides.
        names: dict[str, str] = {}
        return [
            re.sub(r"%\w+", lambda found: names.setdefault(found[0], f"%{len(names)}"), line)
            for line in lines[begin + 1 : end + 1]
        ]

    ours = body(measure.forced(chain, chosen))
    assert sum("dot_general" in line for line in ours) >= chain.slice.axis_size
    assert ours == body(overlapped(chain))


@needs_libtpu
def test_a_decision_is_the_one_that_explain_tells() -> None:
    drawn = [chain for chip in ("v5e", "v5p") for chain in draw(chip, 12)]
    decided = [measure.decide(chain) for chain in drawn]
    for chain, found in zip(drawn, decided, strict=True):
        (site,) = overlapped(chain).explain(*measure.operands_of(chain)).sites
        assert site.estimate is not None
        assert site.rewritten == found.rewritten
        assert site.schedule == found.schedule.removesuffix(", along dim 1")
        assert (site.estimate.original_s, site.estimate.overlapped_s) == (found.original_s, found.ring_s)
        prices = measure.predict(chain)
        assert prices[found.schedule] == site.estimate
        times = [each.overlapped_s for each in prices.values()]
        assert times == sorted(times)
    assert {found.rewritten for found in decided} == {True, False}


@needs_libtpu
def test_a_small_run_compiles_writes_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, out = tmp_path / "programs.jsonl", tmp_path / "out"
    # The smallest chain of those that are drawn: its compilation takes least.
    name = min((c for c in draw("v5e", 12) if c.pattern == "gather_free"), key=lambda c: c.m * c.k * c.n).name
    command = ["--draws", "12", "--sample", "1", "--candidates", "1", "--jobs", "1", "--rows", name]
    command += ["--resume", str(kept), "--output", str(out)]
    assert decisions.main(command) in (0, 1)
    lines = [json.loads(line)["row"] for line in kept.read_text().splitlines()]
    assert len(lines) >= 2 and all(line["name"] == name and line["seconds"] > 0 for line in lines)
    (found,) = json.loads((out / "decisions.json").read_text())["sample"]
    assert found["name"] == name
    assert {schedule: each["seconds"] for schedule, each in found["compiled"].items()} == {
        line["schedule"]: line["seconds"] for line in lines
    }
    for each in found["compiled"].values():
        assert 0 < each["matmul_s"] <= each["compute_s"] * (1 + 1e-9)  # Sums in another order.
        assert each["compute_s"] < each["seconds"]
        assert each["seconds"] == pytest.approx(
            each["compute_s"] + each["exposed_s"] + each["copy_wait_s"], rel=0.1
        )
    assert name in (out / "decisions.md").read_text() and (out / "decisions.svg").exists()
    printed = capsys.readouterr().out
    assert "decisions that are right" in printed
    before = kept.read_text()
    assert decisions.main(command) in (0, 1)
    assert f"{len(lines)} of {len(lines)} programs are in" in capsys.readouterr().out
    assert kept.read_text() == before
    versions = json.loads(before.splitlines()[0])["versions"]
    with pytest.raises(SystemExit, match="give another file"):
        run.compiled_before(kept, {**versions, "sources": "others"})
