"""The grid covers what it should, rows add up to their summary, and a worker that dies takes only its row."""

# mypy: allow-untyped-calls

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from bench import gpu_schedules, tpu_schedules
from bench.schedules import command, grid, measure, plot, programs, run, summary, tables, workers
from bench.schedules.case import H100, SLICES, TOKENS, WIDTHS, Case, Slice, Width
from bench.schedules.order import order
from bench.schedules.rows import AUTO, AUTOMATIC, ORIGINAL, POST_SPMD, TEXTBOOK, VERIFY, Figures, Row
from cost_model import by_name
from overlap import tpu_target
from overlap.hlo.parse import parse
from tests.libtpu import needs_libtpu

VERSIONS = {"overlap-collectives": "0", "jax": "1", "date": "2026-01-01"}


def figures(total_s: float, **changes: Any) -> Figures:
    given = {
        "total_s": total_s,
        "sceptical_s": total_s,
        "compute_s": total_s,
        "exposed_s": 0.0,
        "copy_wait_s": 0.0,
        "matmul_s": total_s,
        "matmuls": 1,
        "matmul_type": "bf16[8,8]",
        "link_s": 0.0,
        "temp_bytes": 100,
        "search_s": 0.0,
        "compile_cpu_s": 1.0,
    }
    return Figures(**{**given, **changes})


def row(name: str, *, matmul_s: float = 1.0, links_s: float = 1.0, **versions: Figures) -> Row:
    return Row(
        name=name,
        chip="v5p",
        slice="v5p:2x2x2",
        pattern="gather_free",
        width="llama3-8b",
        tokens=128,
        dtype="bfloat16",
        axis_size=8,
        matmul_s=matmul_s,
        links_s=links_s,
        versions=versions,
    )


# The grid.


def test_the_grid_has_at_least_120_different_rows_of_every_slice_pattern_and_size() -> None:
    cases = grid.tpu_cases()
    assert len(cases) >= 120
    assert len({case.name for case in cases}) == len(cases)
    cells = Counter((case.slice, case.pattern) for case in cases)
    # The gradient is left out on the mesh of two axes.
    assert len(cells) == len(SLICES) * len(programs.PATTERNS) - 2
    widths = Counter(case.width for case in cases if case.dtype == "bfloat16")
    assert set(widths) == set(WIDTHS)
    assert max(widths.values()) <= 2 * min(widths.values())
    assert set(Counter(case.tokens for case in cases)) == set(TOKENS)
    for dtype in ("int8", "float32"):
        assert len({case.width for case in cases if case.dtype == dtype}) == 1
        assert {case.slice.chip for case in cases if case.dtype == dtype} == {where.chip for where in SLICES}
    assert all(8 <= case.slice.devices <= 64 for case in cases)


def test_communication_is_within_the_limits_of_the_rule() -> None:
    ratios = [grid.estimated_ratio(case) for case in grid.tpu_cases()]
    assert all(0.1 <= ratio <= 5 for ratio in ratios)
    assert sum(0.3 <= ratio <= 3 for ratio in ratios) > 0.75 * len(ratios)


def test_the_ratio_of_a_gather_is_that_of_bytes_over_links_to_flops_over_the_peak() -> None:
    where = Slice(topology="v5e:2x4", hardware="tpu_v5e", mesh_shape=(8,))
    case = Case(slice=where, pattern="gather_free", width=Width("w", 1024, 8192, False), tokens=512)
    # 4096 rows of 1024 in bfloat16, 7/8 of which enter a corner chip of the 2 × 4 grid by two links.
    links_s = 7 / 8 * 4096 * 1024 * 2 / (2 * 4.5e10)
    dots_s = 2 * 4096 * 1024 * 1024 / 1.97e14
    assert grid.estimated_ratio(case) == pytest.approx(links_s / dots_s)


def test_an_all_reduce_moves_twice_the_bytes_of_a_scatter() -> None:
    where = SLICES[0]
    scatter = Case(slice=where, pattern="scatter_free", width=WIDTHS[0], tokens=1024)
    psum = Case(slice=where, pattern="psum", width=WIDTHS[0], tokens=1024)
    assert grid.estimated_ratio(psum) == pytest.approx(2 * grid.estimated_ratio(scatter))


def test_groups_are_lines_of_the_mesh_along_the_axis() -> None:
    by_rows, by_columns = (
        Slice(topology="t", hardware="tpu_v5p", mesh_shape=(2, 4), axis=axis) for axis in (1, 0)
    )
    assert grid.groups(by_rows) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert grid.groups(by_columns) == ((0, 4), (1, 5), (2, 6), (3, 7))


# The programs.


@pytest.mark.parametrize("pattern", programs.PATTERNS)
@pytest.mark.parametrize("mesh_shape", [(8,), (2, 4)])
def test_all_forms_of_a_pattern_compute_the_same(pattern: str, mesh_shape: tuple[int, ...]) -> None:
    where = Slice(topology="cpu", hardware="cpu", mesh_shape=mesh_shape, axis=len(mesh_shape) - 1)
    width = Width("small", 16, 64, pattern == "mlp")
    case = Case(slice=where, pattern=pattern, width=width, tokens=2, dtype="float32")
    problem = programs.problem(case)
    devices = np.array(jax.devices()[:8]).reshape(mesh_shape)
    mesh = Mesh(devices, where.axis_names, axis_types=(AxisType.Auto,) * len(mesh_shape))
    generator = np.random.default_rng(0)
    operands = [
        jax.device_put(generator.normal(size=shape).astype(np.float32), NamedSharding(mesh, spec))
        for shape, spec in zip(problem.shapes, problem.in_specs, strict=True)
    ]
    manual = programs.manual(problem, mesh)
    forms = [programs.automatic(problem, mesh), programs.textbook(problem, mesh)]
    forms.append(programs.called(manual, problem, mesh))
    wanted = jax.tree.leaves(manual(*operands))
    for form in forms:
        for got, want in zip(jax.tree.leaves(form(*operands)), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-3 * float(np.abs(want).max()))


def test_a_dot_of_a_manual_program_has_the_flops_that_the_ratio_counts() -> None:
    case = Case(slice=H100, pattern="mlp_grad", width=Width("w", 64, 128, True), tokens=4)
    problem = programs.problem(case)
    devices = np.array(jax.devices()[:8])
    program = programs.manual(problem, Mesh(devices, ("x",), axis_types=(AxisType.Auto,)))
    analysis = program.trace(*problem_types(problem)).lower().compile().cost_analysis()
    # Elementwise work is a few per cent at these widths.
    assert problem.flops < analysis["flops"] < 1.25 * problem.flops


def problem_types(problem: programs.Problem) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, problem.dtype) for shape in problem.shapes]


# The summary.


def test_means_are_geometric_and_of_the_rows_that_count() -> None:
    counted = [
        row("a", original=figures(2.0), xla_automatic=figures(4.0), auto=figures(1.0)),
        row("b", original=figures(2.0), xla_post_spmd=figures(1.0), auto=figures(4.0, sceptical_s=2.0)),
    ]
    ignored = [
        row("little", links_s=0.29, original=figures(2.0), auto=figures(2.0)),
        row("much", links_s=3.01, original=figures(9.0), auto=figures(9.0)),
    ]
    found = summary.summarise([*counted, *ignored])
    means = found.of(AUTO)
    assert (found.rows, found.counted) == (4, 2)
    assert means is not None
    assert means.rows == 2
    assert means.efficiency == pytest.approx(math.sqrt(1.0 * 0.25))
    assert means.over_xla == pytest.approx(math.sqrt(4.0 * 0.25))
    assert means.over_xla_sceptical == pytest.approx(math.sqrt(4.0 * 0.5))
    assert means.over_original == pytest.approx(math.sqrt(2.0 * 0.5))


def test_compiling_is_compared_where_it_was_measured() -> None:
    rows = [
        row("a", original=figures(1.0), auto=figures(1.0, compile_cpu_s=2.0), verify=figures(1.0)),
        row("b", original=figures(1.0, compile_cpu_s=2.0), auto=figures(1.0, compile_cpu_s=16.0)),
        row("c", original=figures(1.0), auto=figures(1.0, compile_cpu_s=None)),
        row("d", original=figures(1.0), verify=figures(1.0, compile_cpu_s=None)),
    ]
    assert summary.means_of(rows, AUTO).compiling == pytest.approx(4.0)
    assert math.isnan(summary.means_of(rows[3:], VERIFY).compiling)
    told = tables.costs(rows).splitlines()[-1].split("|")
    assert [cell.strip() for cell in told[8:11]] == ["1.0", "", ""]


def test_the_better_of_two_modes_counts() -> None:
    measured = row("a", original=figures(3.0), xla_automatic=figures(2.0), xla_post_spmd=figures(1.5))
    assert measured.xla_s() == 1.5
    assert row("b", original=figures(3.0)).xla_s() is None


def test_the_limit_is_the_longer_of_matmuls_and_links() -> None:
    assert row("a", matmul_s=2.0, links_s=1.0).limit_s == 2.0
    assert row("a", matmul_s=2.0, links_s=3.0).limit_s == 3.0
    assert row("a", matmul_s=2.0, links_s=3.0).ratio == 1.5


def test_one_per_cent_slower_is_not_slower_and_any_byte_is_more_memory() -> None:
    just = row("just", original=figures(1.0), auto=figures(1.0099, temp_bytes=100))
    over = row("over", original=figures(1.0), auto=figures(1.011, temp_bytes=5000))
    found = summary.summarise([just, over])
    assert found.slower == {AUTO: ("over",)}
    assert found.more_memory == {AUTO: ("over",)}
    assert not found.met(AUTO)


def test_figures_are_met_where_all_are() -> None:
    good = row("a", original=figures(2.0), xla_automatic=figures(2.0), auto=figures(1.0), verify=figures(1.0))
    assert summary.summarise([good]).met(AUTO)
    assert summary.summarise([good]).met(VERIFY)
    failed = Row.from_dict({**good.to_dict(), "name": "b", "failures": {AUTO: "it broke"}})
    assert not summary.summarise([good, failed]).met(AUTO)
    assert summary.summarise([good, failed]).met(VERIFY)


def test_a_miss_tells_where_the_time_went() -> None:
    slow = figures(
        2.0, compute_s=1.5, matmul_s=1.2, exposed_s=0.5, matmuls=32, matmul_type="bf16[128,1792]", link_s=1.35
    )
    found = summary.missed(row("a", original=figures(3.0), auto=slow), AUTO)
    assert found is not None
    assert found.what == "efficiency 0.50"
    assert found.reason == (
        "exposed 25%; the busiest link works 1.35 × the bytes' share of all links; elementwise work and "
        "copies 15%; partial matmuls take 1.20 × the whole: 32 of bf16[128,1792]"
    )


def test_a_kept_row_gives_the_reason_of_the_decision() -> None:
    kept = figures(2.0, matmul_s=1.0, compute_s=1.0, exposed_s=1.0, sites=1, sentences=("It would not pay.",))
    found = summary.missed(row("a", original=figures(2.0), auto=kept), AUTO)
    assert found is not None
    assert found.reason == "kept: It would not pay.; exposed 50%"


def test_a_row_at_the_limit_misses_nothing() -> None:
    assert summary.missed(row("a", original=figures(2.0), auto=figures(1.0)), AUTO) is None


# The output.


def measured_rows() -> list[Row]:
    names = (ORIGINAL, AUTOMATIC, POST_SPMD, TEXTBOOK, AUTO, VERIFY)
    good = {name: figures(1.2e-3 + 1e-4 * number) for number, name in enumerate(names)}
    return [
        row("v5p:2x2x2 gather_free one", matmul_s=1e-3, links_s=5e-4, **good),
        Row.from_dict({**row("v5p:2x2x2 gather_free two").to_dict(), "failures": {"row": "died, status -6"}}),
    ]


def test_page_and_data_say_the_same(tmp_path: Path) -> None:
    rows = measured_rows()
    found = summary.summarise(rows)
    page = tables.document(rows, found, VERSIONS, title="T", notes=tables.NOTES)
    run.write(tmp_path, "t", page, tables.content(rows, found, VERSIONS, notes=tables.NOTES))
    content = json.loads((tmp_path / "t.json").read_text())
    assert (tmp_path / "t.md").read_text() == page
    assert [Row.from_dict(entry) for entry in content["rows"]] == rows
    for means in content["summary"]["means"]:
        if means["version"] in (AUTO, VERIFY):
            assert f"{means['efficiency']:.3f} (**below**" in page
    (line,) = re.findall(r"^\| v5p:2x2x2 gather_free one \| 0\.50 \| 1000 \|.*$", page, re.M)
    for version, efficiency in content["rows"][0]["efficiency"].items():
        time = content["rows"][0]["versions"][version]["total_s"]
        assert f"{time * 1e6:.0f} ({efficiency:.2f})" in line
    assert "wraparound in z is assumed" in page
    assert content["versions"] == VERSIONS
    assert content["rule"] == grid.__doc__


def test_a_failed_row_is_listed_and_counts_nowhere() -> None:
    rows = measured_rows()
    found = summary.summarise(rows)
    assert (found.rows, found.counted) == (1, 1)
    assert found.failures == (("v5p:2x2x2 gather_free two", "row", "died, status -6"),)
    page = tables.document(rows, found, VERSIONS, title="T", notes=())
    assert "| v5p:2x2x2 gather_free two | row | died, status -6 |" in page
    assert tpu_schedules.line(rows[1]) == "v5p:2x2x2 gather_free two: FAILED died, status -6"


def test_the_picture_is_drawn_of_the_rows_that_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "p.svg"
    plot.draw(measured_rows(), path, title="Efficiency")
    assert "<svg" in path.read_text()
    plot.draw(measured_rows()[1:], path, title="nothing measured")


def test_an_interrupted_run_goes_on_where_its_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good, failed = measured_rows()
    run.keep(path, good.to_dict(), VERSIONS)
    run.keep(path, failed.to_dict(), VERSIONS)
    with path.open("a") as file:
        file.write('{"versions": {"jax"')
    later = {**VERSIONS, "date": "2026-01-02"}
    assert run.resumed(path, later) == {good.name: good}
    run.keep(path, {**good.to_dict(), "name": "three"}, later)
    assert list(run.resumed(path, later)) == [good.name, "three"]
    with pytest.raises(SystemExit, match="give another file"):
        run.resumed(path, {**VERSIONS, "jax": "2"})
    assert run.resumed(tmp_path / "none", VERSIONS) == {}


def test_a_version_that_is_measured_anew_replaces_its_figures_alone() -> None:
    before = row("a", original=figures(2.0), auto=figures(1.0), verify=figures(0.9))
    again = row("a", original=figures(2.0), auto=figures(0.8))
    both = before.renewed(again)
    assert (both.total_s(AUTO), both.total_s(VERIFY)) == (0.8, 0.9)
    broken = Row.from_dict({**again.to_dict(), "versions": {}, "failures": {AUTO: "it broke"}})
    assert set(before.renewed(broken).versions) == {ORIGINAL, VERIFY}
    assert before.renewed(broken).failures == {AUTO: "it broke"}
    assert before.renewed(broken).renewed(again).failures == {}


def test_a_renewal_keeps_what_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    first, second, third, *_ = cases = grid.tpu_cases()
    stored = [row(case.name, original=figures(2.0), auto=figures(1.0)) for case in (first, second)]
    (tmp_path / "b.json").write_text(json.dumps({"rows": [each.to_dict() for each in stored]}))
    measured = [row(case.name, auto=figures(0.5)) for case in (third, second)]
    renewing = command.grid_parser(None).parse_args(["--rows", "x", "--versions", AUTO, "--renew"])
    assert renewing.versions == (ORIGINAL, AUTO)
    found = command.with_stored(measured, "b", cases, renewing)
    assert [each.name for each in found] == [case.name for case in (first, second, third)]
    assert [each.total_s(AUTO) for each in found] == [1.0, 0.5, 0.5]
    assert command.folder(renewing) is not None
    plain = command.grid_parser(None).parse_args(["--rows", "x"])
    assert command.with_stored(measured, "b", cases, plain) == measured
    assert command.folder(plain) is None


def test_the_page_says_when_what_was_measured() -> None:
    today = figures(1.0, date="2026-12-01")
    plain = row("a", original=today, xla_automatic=today, xla_post_spmd=today, textbook=today, auto=today)
    assert tables.dates([plain]) == ["`verify` was not measured in this run."]
    whole = plain.renewed(row("a", verify=today))
    assert tables.dates([whole]) == []
    (said,) = tables.dates([whole, row("b", auto=figures(1.0))])
    assert "`auto` 2026-11-24 or before (1), 2026-12-01 (1)" in said


def test_a_version_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.grid_parser(None).parse_args(["--versions", "auto,fast"])
    assert "no version 'fast'; there are original" in capsys.readouterr().err


# Workers.

WORKER = """
import os, sys, time
from bench.schedules import workers
def measure(name):
    if name == "dies":
        print("Check failed: something", file=sys.stderr, flush=True)
        os.abort()
    if name == "hangs":
        time.sleep(60)
    print("a compiler talks", end="")
    return {"name": name, "process": os.getpid()}
workers.serve(measure, sys.stdin, sys.stdout)
"""


def environment() -> Iterator[tuple[str, str]]:
    import os

    yield from os.environ.items()
    yield "PYTHONPATH", str(run.ROOT)


def test_a_worker_that_dies_takes_only_its_row_along() -> None:
    names = ["one", "dies", "two", "three"]
    command = [sys.executable, "-c", WORKER]
    found = {a.name: a for a in workers.answers(names, command, dict(environment()), jobs=1, limit_s=60)}
    assert set(found) == set(names)
    assert found["dies"].content is None
    assert "died, status -6: Check failed: something" in found["dies"].error
    processes = {name: content_of(found[name])["process"] for name in ("one", "two", "three")}
    assert processes["one"] != processes["two"] == processes["three"]


def test_a_row_that_takes_too_long_is_given_up() -> None:
    command = [sys.executable, "-c", WORKER]
    found = {
        a.name: a for a in workers.answers(["hangs", "one"], command, dict(environment()), jobs=1, limit_s=5)
    }
    assert "took more than 5 s" in found["hangs"].error
    assert content_of(found["one"])["name"] == "one"


def content_of(answer: workers.Answer) -> Mapping[str, Any]:
    assert answer.content is not None, answer.error
    return answer.content


# The commands.


def test_without_libtpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tpu_target, "missing", lambda: "libtpu is not installed")
    assert tpu_schedules.main([]) == 2
    assert "libtpu is not installed" in capsys.readouterr().err


def test_rows_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert tpu_schedules.main(["--list", "--rows", "v5p:4x4x4@4 .*mlp"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown
    assert all(line.startswith("v5p:4x4x4@4 mlp ") for line in shown)


def test_a_part_of_the_rows_does_not_replace_the_results() -> None:
    parser = command.parser(None)
    assert command.folder(parser.parse_args(["--rows", "mlp"])) is None
    assert command.folder(parser.parse_args([])) == run.RESULTS
    assert command.folder(parser.parse_args(["--rows", "mlp", "--output", "x"])) == Path("x")


# The order of a GPU's schedule.


def test_orders_show_what_lies_between_start_and_done() -> None:
    text = """HloModule m, is_scheduled=true, num_partitions=2

ENTRY %main (x: f32[64,64], w: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %w = f32[64,64]{1,0} parameter(1)
  %s1 = (f32[64,64], f32[64,64]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %m1 = f32[64,64]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d1 = f32[64,64]{1,0} collective-permute-done(%s1)
  %s2 = (f32[64,64], f32[64,64]) collective-permute-start(%d1), source_target_pairs={{0,1},{1,0}}
  %d2 = f32[64,64]{1,0} collective-permute-done(%s2)
  %m2 = f32[64,64]{1,0} dot(%d2, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %sum = f32[64,64]{1,0} add(%m1, %m2)
}
"""
    found = order(parse(text), by_name("h100"))
    assert found.text == "S M D S D M"
    assert found.permutes == 2
    assert found.idle == ("s2",)


def test_a_gpu_row_that_breaks_a_demand_is_told_with_its_order() -> None:
    bad = figures(1.0, order="S D M", permutes=1, idle=("s",), schedule="unidirectional", temp_bytes=5000)
    found = gpu_schedules.demands(row("a", original=figures(2.0), auto=bad))
    assert found == [
        (AUTO, "1 of 1 permutes have no matmul beside them: S D M (unidirectional)"),
        (AUTO, "4900 bytes more temporary memory than the original's 0.0 MB: S D M (unidirectional)"),
    ]
    # Each of a few buffers more is rounded up.
    good = figures(1.0, order="S M D M", permutes=1, temp_bytes=100 + summary.ROUNDING_BYTES)
    assert gpu_schedules.demands(row("a", original=figures(2.0), auto=good)) == []


def test_the_gpu_rows_have_every_pattern_in_two_sizes() -> None:
    cases = Counter(case.pattern for case in grid.gpu_cases())
    assert cases == dict.fromkeys(programs.PATTERNS, 2)


# With the compiler.


@needs_libtpu
def test_a_row_is_measured_by_the_compiler() -> None:
    where = SLICES[4]
    case = Case(slice=where, pattern="gather_free", width=Width("w", 1024, 8192, False), tokens=256)
    wanted = {ORIGINAL, AUTOMATIC, POST_SPMD, TEXTBOOK, AUTO}
    found = measure.measure(case, measure.tpu_mesh(where), wanted)
    assert not found.failures
    assert set(found.versions) == wanted
    assert found.versions[ORIGINAL].matmuls == 1
    assert found.matmul_s == found.versions[ORIGINAL].matmul_s > 0
    assert found.versions[TEXTBOOK].matmuls == 8
    for version in (ORIGINAL, AUTO):
        version_figures = found.versions[version]
        spent = version_figures.compute_s + version_figures.exposed_s + version_figures.copy_wait_s
        assert spent == pytest.approx(version_figures.total_s)
