"""A/B profiles of programs that run here: arguments, failures, the report's forms, the command."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import overlap
from overlap import ABReport, ab_command, ab_profile, overlap_collectives
from tests.overlap.documented import undocumented
from tests.overlap.mlp import SPECS, always, mesh_of, mlp, reference

ROOT = Path(__file__).resolve().parents[2]

HOPS: Final = 4 + 3
"""Those of the MLP's two rings of four: a gather's last one comes in halves."""

quick = partial(ab_profile, rounds=2, warmup=1, traced_rounds=0)
"""A profile in little time."""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces without a directory of their own go where pytest removes them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def arguments() -> list[Any]:
    mesh = mesh_of()
    return [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(reference().arguments, SPECS, strict=True)
    ]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[ABReport, Path]:
    """A traced profile of ``mlp``, and the directory that it was given."""
    directory = tmp_path_factory.mktemp("trace")
    report = ab_profile(
        always(jax.jit(mlp())), *arguments(), rounds=6, warmup=2, traced_rounds=2, trace_dir=directory
    )
    return report, directory


def test_both_variants_are_timed_in_turn_and_their_results_agree(profiled: tuple[ABReport, Path]) -> None:
    report, _ = profiled
    assert [len(v.times_s) for v in report.variants] == [6, 6]
    assert all(time_s > 0 for v in report.variants for time_s in v.times_s)
    assert report.speedup is not None and report.speedup.low is not None and report.speedup.high is not None
    assert report.speedup.low <= report.speedup.ratio <= report.speedup.high
    assert report.agreement.agreed
    assert not report.failures


def test_the_trace_tells_what_each_variant_did(profiled: tuple[ABReport, Path]) -> None:
    report, _ = profiled
    assert report.source == "host events"
    for variant in report.variants:
        found = variant.activity
        assert found is not None
        assert (found.steps, found.devices) == (2 * 4, 4)
        parts = found.compute_only_s, found.communication_only_s, found.both_s, found.idle_s
        assert sum(parts) == pytest.approx(found.span_s)
        assert found.matmul_s > 0
        assert found.collective_s == pytest.approx(found.communication_only_s + found.both_s)
        assert found.unknown == 0
    opcodes = [[c.opcode for c in v.activity.collectives] for v in report.variants if v.activity]
    assert sorted(opcodes[0]) == ["all-gather", "reduce-scatter"]
    assert opcodes[1] == ["collective-permute"] * HOPS
    for variant in report.variants:
        assert variant.activity is not None
        assert all("tests/overlap/mlp.py:" in c.source for c in variant.activity.collectives)
        assert all(c.executions == 1 for c in variant.activity.collectives)


def test_the_trace_stays_where_it_was_asked_for(profiled: tuple[ABReport, Path]) -> None:
    report, directory = profiled
    assert report.trace_dir == str(directory)
    assert len(list(directory.rglob("*.xplane.pb"))) == 1
    assert list(directory.rglob("*.trace.json.gz"))


@pytest.mark.parametrize("named", [False, True])
def test_an_interrupted_profile_leaves_no_directory_that_nobody_named(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("overlap.ab_profiling._traced", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ab_profile(
            always(jax.jit(mlp())),
            *reference().arguments,
            rounds=1,
            trace_dir=tmp_path / "mine" if named else None,
        )
    assert [path.name for path in tmp_path.iterdir()] == (["mine"] if named else [])


def test_the_trace_is_free_of_python_s_frames(profiled: tuple[ABReport, Path]) -> None:
    (trace,) = profiled[1].rglob("*.xplane.pb")
    data = trace.read_bytes()
    assert b"overlap.ab_profile original" in data
    assert not re.search(rb"\$\w+\.py:\d+", data)


def test_a_second_profile_in_the_same_directory_reads_its_own_trace(tmp_path: Path) -> None:
    for rounds in (2, 1):
        report = ab_profile(
            always(jax.jit(lambda x: x @ x)),
            jnp.ones((8, 8)),
            rounds=1,
            traced_rounds=rounds,
            trace_dir=tmp_path,
        )
        assert report.original.activity is not None
        assert report.original.activity.steps == rounds


def test_the_table_says_what_was_measured_and_on_what(profiled: tuple[ABReport, Path]) -> None:
    report, directory = profiled
    text = str(report)
    # Of the eight devices that there are.
    assert text.startswith("mlp on 4 × cpu (cpu)")
    assert "over 4 devices" in text.replace("\n", " ")
    for words in (
        "HOST EVENTS",
        "communication alone",
        "bootstrap interval",
        "Results agree",
        "mlp.py:",
        "2 of 2 collectives rewritten",
        f"Trace: {directory}",
    ):
        assert words in text
    narrow = report.text(60)
    assert max(map(len, narrow.replace(f"Trace: {directory}", "").splitlines())) <= 60


def test_json_holds_every_figure(profiled: tuple[ABReport, Path]) -> None:
    report, _ = profiled
    data = json.loads(report.to_json())
    assert undocumented(data, "profiling.md", "## The JSON") == set()
    assert data["schema"] == 1
    assert data["versions"] == {"overlap": overlap.__version__, "jax": jax.__version__}
    assert data["original"]["times_s"] == list(report.original.times_s)
    assert report.overlapped.activity is not None
    assert data["overlapped"]["activity"]["both_s"] == report.overlapped.activity.both_s
    assert len(data["overlapped"]["activity"]["collectives"]) == HOPS
    assert data["agreement"]["agreed"] is True
    assert data["verdict"] == report.verdict


def test_the_page_holds_both_timelines_and_fetches_nothing(
    profiled: tuple[ABReport, Path], tmp_path: Path
) -> None:
    report, _ = profiled
    html = report.to_html(tmp_path / "page.html").read_text("utf-8")
    start = html.index('id="figures">') + len('id="figures">')
    (figure,) = json.loads(html[start : html.index("</script>", start)])
    assert len([name for name in figure["layout"] if name.startswith("yaxis")]) == 2
    bars = [text for trace in figure["data"] for text in trace["hovertext"]]
    for variant in report.variants:
        assert variant.timeline is not None
        assert all(any(event.name in bar for bar in bars) for event in variant.timeline.events)
    assert "measured, from" in bars[0]
    drawn = json.dumps(figure) + html[: html.index("<style>")] + html[html.index("<main>") : start]
    assert "modelled" not in drawn
    assert "default-src 'none'" in html
    assert "<link" not in html and " src=" not in html[: html.index("<main>")]


def test_the_timeline_of_a_variant_is_one_round_on_one_device(profiled: tuple[ABReport, Path]) -> None:
    report, _ = profiled
    timeline = report.original.timeline
    assert timeline is not None
    assert min(event.start_s for event in timeline.events) == 0
    assert max(event.end_s for event in timeline.events) == pytest.approx(timeline.total_s)
    assert sorted(e.opcode for e in timeline.events if e.kind == "collective") == [
        "all-gather",
        "reduce-scatter",
    ]
    assert timeline.topology == "CPU 0, traced round 2"


# Arguments.


def test_donated_arguments_are_copied_and_the_caller_s_stay() -> None:
    @overlap_collectives
    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        return {"w": state["w"] + batch}, batch.sum()

    state, batch = {"w": jnp.arange(8.0)}, jnp.ones(8)
    report = quick(step, state, batch)
    assert not report.failures
    assert report.agreement.agreed
    np.testing.assert_array_equal(state["w"], np.arange(8.0))
    assert not batch.is_deleted()


def test_what_lies_on_no_device_in_particular_goes_to_those_of_the_rest() -> None:
    """A training state: sharded weights, and a counter and a key that nobody has placed."""

    @overlap_collectives
    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: Any) -> Any:
        w, count, key = state
        return w + mlp()(x, w, jnp.ones((12, 6))).sum(), count + 1, jax.random.split(key, 1)[0]

    x, w, _ = reference().arguments
    placed = jax.device_put(w, NamedSharding(mesh_of(), SPECS[1]))
    state = placed, jnp.zeros((), jnp.int32), jax.random.key(0)
    report = quick(step, state, x)
    assert not report.failures
    assert report.agreement.agreed and not any(leaf.is_deleted() for leaf in state)


def test_donated_keys_of_random_numbers_are_copied() -> None:
    step = overlap_collectives(jax.jit(lambda key: jax.random.split(key, 1)[0], donate_argnums=0))
    key = jax.random.key(3)
    assert not quick(step, key).failures
    assert not key.is_deleted()


def test_static_and_named_arguments_reach_the_function() -> None:
    seen: list[Any] = []

    @overlap_collectives
    @partial(jax.jit, static_argnums=1, static_argnames="flag", donate_argnames="y")
    def f(x: Any, power: int, *, y: Any, flag: str) -> Any:
        seen.append((power, flag))
        return x**power + y

    y = jnp.ones(3)
    report = quick(f, jnp.arange(3.0), 2, y=y, flag="on")
    assert not report.failures
    assert set(seen) == {(2, "on")}
    assert not y.is_deleted()


def test_a_bound_method_is_profiled_with_its_instance() -> None:
    class Model:
        scale = 3.0

        @overlap_collectives
        @partial(jax.jit, static_argnums=0)
        def apply(self, x: Any) -> Any:
            return self.scale * x

    report = quick(Model().apply, jnp.ones(2))
    assert (report.name, report.failures) == ("apply", ())
    assert report.agreement.agreed


def test_a_function_that_returns_nothing_is_timed_to_its_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    waits: list[int] = []

    @overlap_collectives
    @jax.jit
    def log(x: Any) -> None:
        jax.debug.callback(calls.append, x.sum(), ordered=True)

    wait = jax.effects_barrier
    # A CPU may run the effects within the call; other devices do not.

    def barrier() -> None:
        wait()
        waits.append(len(calls))

    monkeypatch.setattr(jax, "effects_barrier", barrier)
    report = quick(log, jnp.ones(4))
    assert [len(v.times_s) for v in report.variants] == [2, 2]
    # After a warm-up and two rounds of each variant.
    assert waits == [1, 2, 3, 4, 5, 6]
    assert report.agreement.agreed is None
    assert "returns nothing" in str(report)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rounds": 0}, ValueError, "rounds must be 1 at least, not 0"),
        ({"warmup": 0}, ValueError, "warmup must be 1 at least, not 0"),
        ({"traced_rounds": -1}, ValueError, "traced_rounds must be 0 at least, not -1"),
        ({"rounds": 2.5}, TypeError, "rounds must be an integer, not 2.5"),
        ({"warmup": True}, TypeError, "warmup must be an integer, not True"),
    ],
)
def test_numbers_of_rounds_are_checked(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ab_profile(always(jax.jit(jnp.sin)), 1.0, **options)


def test_a_function_that_is_not_decorated_is_refused() -> None:
    with pytest.raises(TypeError, match="decorated with overlap_collectives"):
        ab_profile(jax.jit(jnp.sin), 1.0)


def test_arguments_that_are_no_arrays_are_refused() -> None:
    function = always(jax.jit(jnp.sin))
    with pytest.raises(TypeError, match="not ShapeDtypeStructs"):
        ab_profile(function, jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda x: ab_profile(function, x))(1.0)
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(TypeError, match="was deleted"):
        ab_profile(function, gone)


def test_a_trace_directory_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        ab_profile(always(jax.jit(jnp.sin)), 1.0, trace_dir=tmp_path / "file" / "trace")


# Failures.


class Broken:
    """A jitted function that fails in one variant: where it is called from its original, or else."""

    def __init__(self, stage: str, variant: str) -> None:
        self.function = overlap_collectives(jax.jit(lambda x: x @ x))
        target = self.function.original if variant == "original" else self.function._call
        self.calls = 0
        self.target, self.stage = target, stage

    def lower(self, *args: Any) -> Any:
        if self.stage == "compilation":
            raise RuntimeError("no room in VMEM")
        return self.target.lower(*args)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.stage == "warm-up" or (self.stage == "timed rounds" and self.calls == 3):
            raise RuntimeError("out of memory")
        return self.target(*args)


@pytest.mark.parametrize("variant", ["original", "overlapped"])
@pytest.mark.parametrize(
    ("stage", "error", "times"),
    [
        ("compilation", "RuntimeError: no room in VMEM", 0),
        ("warm-up", "RuntimeError: out of memory", 0),
        ("timed rounds", "RuntimeError: out of memory", 1),
    ],
)
def test_a_variant_that_fails_is_named_and_the_other_s_figures_stand(
    stage: str, error: str, times: int, variant: str
) -> None:
    broken = Broken(stage, variant)
    if variant == "original":
        broken.function.original = broken
    else:
        broken.function._calls[None, True] = broken
    report = ab_profile(broken.function, jnp.ones((4, 4)), rounds=4, warmup=1, traced_rounds=1)
    ((name, failure),) = report.failures
    assert (name, failure.stage, failure.error) == (variant, stage, error)
    failed, other = report.variants if variant == "original" else report.variants[::-1]
    assert len(failed.times_s) == times
    assert len(other.times_s) == 4
    assert other.activity is not None
    assert failed.activity is None
    text = str(report)
    assert f"The {variant} variant failed in {stage}: {error}" in text.replace("\n", " ")
    assert f"{variant} (failed)" in text
    json.loads(report.to_json())
    if times == 0:
        assert report.speedup is None
        assert f"the {variant} variant failed" in report.verdict
        assert report.agreement.agreed is None


def test_a_function_that_always_fails_is_reported_twice(tmp_path: Path) -> None:
    @overlap_collectives
    @jax.jit
    def wrong(x: Any) -> Any:
        return x @ jnp.ones(7)

    report = quick(wrong, jnp.ones((4, 4)))
    assert [(name, failure.stage) for name, failure in report.failures] == [
        ("original", "compilation"),
        ("overlapped", "compilation"),
    ]
    assert "No speed-up" in str(report)
    assert "original variant failed" in report.to_html(tmp_path / "x.html").read_text("utf-8")


def test_results_that_differ_are_told() -> None:
    function = overlap_collectives(jax.jit(lambda x: x))
    function._calls[None, True] = jax.jit(lambda x: x + 1)
    report = quick(function, jnp.ones(3))
    assert report.agreement.agreed is False
    sentence = report.agreement.sentence
    assert sentence.startswith("Results do NOT agree: the result (float32[3], by 1.0e+00) differs beyond")
    assert "do NOT agree" in str(report)


def test_a_profiler_that_is_in_use_costs_the_device_times_only(tmp_path: Path) -> None:
    with jax.profiler.trace(tmp_path / "mine"):
        report = ab_profile(always(jax.jit(jnp.sin)), jnp.ones(3), rounds=6, trace_dir=tmp_path / "other")
    assert len(report.original.times_s) == 6
    assert report.speedup is not None
    assert report.source is None and report.trace_dir is None
    assert "the profiler failed" in str(report)
    assert not report.failures
    assert not (tmp_path / "other").exists()


def test_a_profiler_that_writes_nothing_is_not_taken_for_an_older_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = always(jax.jit(jnp.sin))
    ab_profile(function, jnp.ones(3), rounds=1, traced_rounds=1, trace_dir=tmp_path)
    monkeypatch.setattr(jax.profiler, "trace", lambda *_, **__: contextlib.nullcontext())
    report = ab_profile(function, jnp.ones(3), rounds=1, traced_rounds=1, trace_dir=tmp_path)
    assert report.source is None
    assert "it wrote nothing" in str(report)


def test_a_trace_that_cannot_be_read_costs_the_device_times_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(path: Path) -> Any:
        raise ValueError("cut off")

    monkeypatch.setattr(sys.modules["overlap.ab_profiling"], "read_file", unreadable)
    report = ab_profile(always(jax.jit(jnp.sin)), jnp.ones(3), rounds=2, traced_rounds=1, trace_dir=tmp_path)
    assert "cut off" in str(report)
    assert len(report.overlapped.times_s) == 2


def test_without_a_rewrite_the_report_says_that_the_programs_are_the_same() -> None:
    function = overlap_collectives(jax.jit(mlp()), policy="never")
    report = quick(function, *arguments())
    assert "None of the 2 collectives is rewritten" in str(report).replace("\n", " ")
    assert "nothing was traced" in str(report)


def test_a_program_without_collectives_is_said_to_be_one() -> None:
    report = quick(always(jax.jit(jnp.sin)), jnp.ones(3))
    assert "This program has no collective" in str(report)


def test_a_page_needs_a_path(profiled: tuple[ABReport, Path]) -> None:
    with pytest.raises(TypeError, match="give the path of the file to write, not NoneType"):
        profiled[0].to_html(None)  # type: ignore[arg-type]


def test_a_program_of_one_device_is_told_as_such() -> None:
    report = quick(always(jax.jit(jnp.sin)), jax.device_put(jnp.ones(3), jax.devices()[5]))
    assert report.title == "sin on cpu (cpu)"
    assert report.conditions.devices == 1
    assert "Virtual CPU devices" not in str(report)


def test_few_rounds_are_told_to_be_too_few() -> None:
    assert "may be noise" in quick(always(jax.jit(jnp.sin)), jnp.ones(3)).verdict


# The command line.

SCRIPT = """
import jax, jax.numpy as jnp
from overlap import overlap_collectives

@overlap_collectives
@jax.jit
def step(x):
    return x @ x

def profile():
    return step, (jnp.ones((8, 8)),)

def named():
    return overlap_collectives(jax.jit(lambda *, x: x @ x)), (), {"x": jnp.ones((8, 8))}

@overlap_collectives
@jax.jit
def ready(x):
    return x @ x

ready.example_args = lambda: (jnp.ones((4, 4)),)

@overlap_collectives
@jax.jit
def wrong(x):
    return x @ jnp.ones(7)

wrong.example_args = (jnp.ones((4, 4)),)
NUMBER = 3

hungry = overlap_collectives(jax.jit(lambda x: x))
hungry.example_args = lambda rows: (jnp.ones((rows, 4)),)

def needy(rows):
    return ready, (jnp.ones((rows, 4)),)

def bare():
    return step

def raises():
    return step, (jnp.ones(3) @ jnp.ones(4),)

unlucky = overlap_collectives(jax.jit(lambda x: x))
unlucky.example_args = lambda: 1 / 0
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module ``ab_script`` in the current directory."""
    (tmp_path / "ab_script.py").write_text(SCRIPT)
    (tmp_path / "ab_missing.py").write_text("import a_library_that_nobody_has\n")
    (tmp_path / "ab_breaks.py").write_text("import json\njson.loads('{')\n")
    (tmp_path / "ab_damaged.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield
    sys.path[:] = before
    sys.modules.pop("ab_script", None)


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("name", ["profile", "named", "ready"])
def test_a_target_gives_function_and_arguments(name: str) -> None:
    function, args, kwargs = ab_command.resolve(f"ab_script:{name}")
    assert not quick(function, *args, **kwargs).failures


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("ab_script", "module:function"),
        ("ab_script:", "module:function"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("ab_missing:f", "ab_missing imports 'a_library_that_nobody_has'"),
        ("ab_script:nobody", "no 'nobody' in ab_script"),
        ("ab_script:step", "example_args"),
        ("ab_script:NUMBER", "no function but int"),
        ("ab_script:bare", "must return (decorated function, arguments)"),
        ("ab_script:needy", "ab_script:needy takes arguments (missing a required argument: 'rows')"),
        ("ab_script:hungry", "ab_script:hungry.example_args takes arguments"),
        ("ab_script.py:profile", "name the module, not its file: ab_script:profile, run in "),
        ("../t/ab_script:profile", "'../t/ab_script' is no module's name"),
    ],
)
def test_a_target_that_cannot_be_run_is_explained(
    target: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from overlap.__main__ import main

    assert main(["ab", target]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("target", "failed", "first", "last"),
    [
        ("ab_script:raises", "ab_script:raises", "in raises", "TypeError: "),
        ("ab_script:unlucky", "ab_script:unlucky.example_args", "in <lambda>", "ZeroDivisionError: "),
        ("ab_breaks:f", "importing ab_breaks", "in <module>", "json.decoder.JSONDecodeError: "),
        ("ab_damaged:f", "importing ab_damaged", "line 1", "SyntaxError: "),
    ],
)
def test_a_target_that_raises_is_traced_from_its_own_line_on(
    target: str, failed: str, first: str, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from overlap.__main__ import main

    assert main(["ab", target]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"overlap ab: {failed} failed:"
    frames = [line for line in lines if line.startswith("  File ")]
    assert f"{target.partition(':')[0]}.py" in frames[0] and first in frames[0]
    assert any(line.startswith(last) for line in lines)


@pytest.mark.usefixtures("script")
def test_the_command_prints_the_report_and_writes_its_other_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from overlap.__main__ import main

    options = ["--rounds", "2", "--warmup", "1", "--traced-rounds", "1", "--trace-dir", "trace"]
    assert main(["ab", "ab_script:profile", *options, "--json", "r.json", "--html", "r.html"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step on ")
    assert json.loads((tmp_path / "r.json").read_text("utf-8"))["name"] == "step"
    assert "<main>" in (tmp_path / "r.html").read_text("utf-8")
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


@pytest.mark.usefixtures("script")
def test_the_command_s_status_tells_failures(capsys: pytest.CaptureFixture[str]) -> None:
    from overlap.__main__ import main

    assert main(["ab", "ab_script:wrong", "--rounds", "1"]) == 1
    assert "failed in compilation" in capsys.readouterr().out
    assert main(["ab", "ab_script:profile", "--rounds", "0"]) == 2
    assert "--rounds must be 1 at least, not 0" in capsys.readouterr().err
    for option, least in (("--warmup", 1), ("--traced-rounds", 0)):
        assert main(["ab", "ab_script:profile", option, "-1"]) == 2
        assert f"{option} must be {least} at least, not -1" in capsys.readouterr().err


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_what_cannot_be_written_is_told_before_anything_runs(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from overlap.__main__ import main

    monkeypatch.setattr("overlap.ab_command.ab_profile", lambda *_, **__: pytest.fail("it ran"))
    for path, words in (("no/such/file", "No such file or directory"), (".", "Is a directory")):
        assert main(["ab", "ab_script:profile", option, path]) == 2
        assert f"cannot write {path}: {words}" in capsys.readouterr().err
    assert main(["ab", "ab_script:profile", option, ""]) == 2
    assert f"{option} names no file" in capsys.readouterr().err


@pytest.mark.usefixtures("script")
def test_outputs_of_one_name_and_a_trace_in_a_file_are_told_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from overlap.__main__ import main

    monkeypatch.setattr("overlap.ab_command.ab_profile", lambda *_, **__: pytest.fail("it ran"))
    assert main(["ab", "ab_script:profile", "--html", "same", "--json", "./same"]) == 2
    assert "--json and --html name one file" in capsys.readouterr().err
    assert main(["ab", "ab_script:profile", "--html", "ab_script.py"]) == 2
    assert (
        "--html names ab_script.py, which is read" in capsys.readouterr().err
        and Path("ab_script.py").read_text()
    )
    for path in ("ab_script.py", "ab_script.py/trace"):
        assert main(["ab", "ab_script:profile", "--trace-dir", path]) == 2
        assert capsys.readouterr().err == f"overlap ab: cannot write {path}: Not a directory\n"
    assert main(["ab", "ab_script:profile", "--trace-dir", ""]) == 2
    assert "--trace-dir names no directory" in capsys.readouterr().err


@pytest.mark.usefixtures("script")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_disk_that_is_full_in_the_end_is_told(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    from overlap.__main__ import main

    assert (
        main(["ab", "ab_script:profile", "--rounds", "1", "--traced-rounds", "0", option, "/dev/full"]) == 2
    )
    assert capsys.readouterr().err == "overlap ab: cannot write /dev/full: No space left on device\n"


def test_a_process_that_turns_warnings_into_errors_survives_the_profiler(tmp_path: Path) -> None:
    (tmp_path / "ab_script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "error", "-m", "overlap", "ab", "ab_script:profile", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--trace-dir", str(tmp_path / "trace")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "HOST EVENTS" in done.stdout
