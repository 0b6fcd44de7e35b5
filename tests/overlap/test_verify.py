"""``policy="verify"``: the ring that compiles to the fastest schedule is taken, if it gains and fits."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import gc
import io
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from overlap import overlap_collectives, tpu_target
from overlap.progress_bar import progress_bar
from overlap.schedule_cache import VARIABLE
from tests.libtpu import needs_libtpu
from tests.overlap.mlp import check, hops, mesh_of, mlp, reference
from tests.overlap.test_compile_only import ROOT
from tests.overlap.trial_programs import UNTOLD, Compiler, chain, gather, mapped, trials

NO_MEMORY = jax.errors.JaxRuntimeError("INTERNAL: the compiler gave up")


def compiler(monkeypatch: pytest.MonkeyPatch, *times: Any, **options: Any) -> Compiler:
    """The stand-in, put in the compiler's place."""
    stand_in = Compiler(*times, **options)
    monkeypatch.setattr("overlap.verify.modelled", stand_in)
    return stand_in


class TestChoice:
    def test_fastest_ring_is_chosen_and_all_are_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program, schedules = chain()
        used = compiler(monkeypatch, 100, [90, 70, 80])
        trial = trials()(program, schedules)
        assert trial is not None
        assert trial.choice == schedules[1]
        assert (trial.original_s, trial.ring_s, trial.kind) == (100e-6, 70e-6, "modelled")
        assert used.compiled == 1 + len(schedules)

    @pytest.mark.parametrize(("ring_us", "taken"), [(98.9, True), (99.1, False), (100, False), (130, False)])
    def test_a_ring_must_gain_one_percent(
        self, monkeypatch: pytest.MonkeyPatch, ring_us: float, taken: bool
    ) -> None:
        program, schedules = chain()
        compiler(monkeypatch, 100, [ring_us])
        trial = trials()(program, schedules)
        assert trial is not None
        assert (trial.choice is not None) == taken

    def test_ring_that_needs_more_memory_is_passed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program, schedules = chain()
        compiler(monkeypatch, 100, [90, 60, 80, 95], bytes_of=[1000, 900, 1001, 1000])
        trial = trials()(program, schedules)
        assert trial is not None
        assert (trial.choice, trial.ring_s) == (schedules[2], 80e-6)

    def test_no_ring_where_all_need_more_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program, schedules = chain()
        compiler(monkeypatch, 100, [90, 60, 80], bytes_of=[1000, 1001])
        trial = trials()(program, schedules)
        assert trial is not None
        assert (trial.choice, trial.ring_s) == (None, 60e-6)
        assert trial.note == "It needs 1 B more than the 1000 B of temporary memory as written."

    def test_memory_that_the_compiler_does_not_tell_rules_nothing_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program, schedules = chain()
        compiler(monkeypatch, 100, [60], bytes_of=[None, 1])
        trial = trials()(program, schedules)
        assert trial is not None
        assert trial.choice == schedules[0]

    def test_ring_that_cannot_be_compiled_is_passed_over_and_logged(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        program, schedules = chain()
        compiler(monkeypatch, 100, [NO_MEMORY, 80, 90])
        with caplog.at_level(logging.DEBUG, "overlap"):
            trial = trials()(program, schedules)
        assert trial is not None
        assert trial.choice == schedules[1]
        assert f"the ring {schedules[0]} is passed over: JaxRuntimeError: INTERNAL" in caplog.text

    def test_no_ring_where_none_can_be_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program, schedules = chain()
        compiler(monkeypatch, 100, [NO_MEMORY])
        trial = trials()(program, schedules)
        assert trial is not None
        assert (trial.choice, trial.ring_s) == (None, math.inf)

    def test_nothing_is_found_where_the_chain_as_written_cannot_be_compiled(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program, schedules = chain()
        used = compiler(monkeypatch, NO_MEMORY, [80])
        found = trials()
        assert found(program, schedules) is None
        assert found(program, schedules) is None
        assert used.compiled == 1

    @pytest.mark.parametrize(
        ("limit_us", "bytes_of", "tried"), [(60, [9, 9], 1), (60, [9, 10], 3), (58, [9, 9], 3)]
    )
    def test_a_ring_at_the_limit_that_fits_ends_the_search(
        self, monkeypatch: pytest.MonkeyPatch, limit_us: float, bytes_of: list[int], tried: int
    ) -> None:
        program, schedules = chain()
        used = compiler(monkeypatch, 100, [61], limit_us=limit_us, bytes_of=bytes_of)
        trials()(program, schedules)
        assert used.compiled == 1 + tried

    @pytest.mark.parametrize(
        ("compared", "rings_us", "tried", "chosen"),
        [
            (1, [90, 80, 70], 1, 0),
            (2, [90, 80, 70], 2, 1),
            (2, [80, 90, 70], 2, 0),
            (2, [90, NO_MEMORY, 70], 2, 0),
            (2, [NO_MEMORY, 101, 70], 3, 2),
        ],
    )
    def test_of_a_program_the_first_versions_are_compared_and_others_tried_if_none_gains(
        self, monkeypatch: pytest.MonkeyPatch, compared: int, rings_us: list[Any], tried: int, chosen: int
    ) -> None:
        program, schedules = chain()
        used = compiler(monkeypatch, 100, rings_us)
        trial = trials()(dataclasses.replace(program, whole=True, compared=compared), schedules)
        assert used.compiled == 1 + tried
        assert trial is not None
        assert trial.choice == schedules[chosen]


class TestPolicy:
    @pytest.mark.parametrize("fastest", [0, 2])
    def test_values_and_gradients_are_those_of_the_original(
        self, monkeypatch: pytest.MonkeyPatch, fastest: int
    ) -> None:
        times = [90.0, 90.0, 90.0]
        times[fastest] = 50
        compiler(monkeypatch, 100, times)
        wanted = reference()
        function = overlap_collectives(jax.jit(mlp()), policy="verify", hardware=UNTOLD, strict=True)
        check(function(*wanted.arguments), wanted.value())
        assert hops(function, *wanted.arguments) > 0
        gradients = jax.grad(lambda *a: (function(*a) * wanted.cotangent).sum(), argnums=(0, 1, 2))
        check(gradients(*wanted.arguments), wanted.gradients())

    def test_report_tells_both_times(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler(monkeypatch, 100, [60])
        function = overlap_collectives(jax.jit(mlp()), policy="verify", hardware=UNTOLD, strict=True)
        text = " ".join(function.explain(*reference().arguments).text(120).split())
        assert "2 of 2 collectives rewritten" in text
        assert "tried_faster (sites 1, 2): A ring was compiled for this target and found faster." in text
        assert "Modelled: 100 µs as written, 60 µs as the best ring tried." in text

    @pytest.mark.parametrize("wanted", [True, False])
    def test_garbage_is_collected_beside_trials_if_it_is_at_all(
        self, monkeypatch: pytest.MonkeyPatch, wanted: bool
    ) -> None:
        tried: list[bool] = []
        stand_in = Compiler(100, [80])

        def modelled(*arguments: Any) -> Any:
            tried.append(gc.isenabled())
            return stand_in(*arguments)

        monkeypatch.setattr("overlap.verify.modelled", modelled)
        function = overlap_collectives(jax.jit(mlp(mesh_of())), policy="verify", hardware=UNTOLD, strict=True)
        if not wanted:
            gc.disable()
        try:
            function.trace(*reference().arguments)
            assert gc.isenabled() == wanted
        finally:
            gc.enable()
        assert set(tried) == {wanted}

    def test_cost_model_decides_what_cannot_be_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler(monkeypatch, NO_MEMORY, [])
        arguments = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            for shape in ((8192, 8192), (8192, 32768), (32768, 8192))
        ]
        reports = [
            overlap_collectives(jax.jit(mlp()), policy=policy, hardware=UNTOLD, strict=True).explain(
                *arguments
            )  # type: ignore[call-overload]
            for policy in ("verify", "auto")
        ]
        assert reports[0] == reports[1]
        assert reports[0].rewritten

    def test_layers_that_are_alike_are_compiled_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def layers(x: Any, w: Any) -> Any:
            x = jnp.tanh(lax.all_gather(x, "x", tiled=True) @ w)
            x = x[:8] + lax.axis_index("x")
            return lax.all_gather(x, "x", tiled=True) @ w

        used = compiler(monkeypatch, 100, [60])
        function = overlap_collectives(
            mapped(layers, mesh_of()), policy="verify", hardware=UNTOLD, strict=True
        )
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 16), (16, 64))]
        report = function.explain(*arguments)
        function.lower(*arguments)
        assert [site.reason for site in report.sites] == ["tried_faster"] * 2
        assert used.originals == 2  # the chain, and the program

    def test_backward_pass_is_tried_where_nothing_of_the_forward_pass_is_rewritten(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forward = compiler(monkeypatch, 100, [130])
        wanted = reference()
        function = overlap_collectives(jax.jit(mlp()), policy="verify", hardware=UNTOLD, strict=True)
        gradients = jax.grad(lambda *a: (function(*a) * wanted.cotangent).sum(), argnums=(0, 1, 2))
        assert hops(function, *wanted.arguments) == 0
        assert forward.originals == 2
        compiler(monkeypatch, 100, [60])
        assert hops(gradients, *wanted.arguments) > 0
        check(gradients(*wanted.arguments), wanted.gradients())

    def test_unknown_hardware_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        used = compiler(monkeypatch, 100, [60])
        monkeypatch.setattr("cost_model.from_device_kind", lambda kind: None)
        report = overlap_collectives(jax.jit(mlp()), policy="verify").explain(*reference().arguments)
        assert {site.reason for site in report.sites} == {"unknown_hardware"}
        assert used.compiled == 0

    @pytest.mark.parametrize("policy", ["verify", "autotune"])
    def test_another_kind_s_schedules_tell_nothing(
        self, monkeypatch: pytest.MonkeyPatch, policy: Literal["verify", "autotune"]
    ) -> None:
        """XLA:CPU's of a TPU; what the cost model says stands, with one warning."""
        used = compiler(monkeypatch, 100, [60])
        monkeypatch.setattr("overlap.autotune.measurable", lambda target: False)
        arguments = reference().arguments
        auto = overlap_collectives(jax.jit(mlp()), hardware="tpu_v5p", strict=True).explain(*arguments)
        function = overlap_collectives(jax.jit(mlp()), policy=policy, hardware="tpu_v5p", strict=True)
        with pytest.warns(RuntimeWarning) as warned:
            assert function.explain(*arguments) == auto
            assert function.lower(*arguments)
        (warning,) = warned
        assert "compiles for the mesh's devices (cpu), whose schedules tell nothing of tpu_v5p" in str(
            warning.message
        )
        assert warning.filename == __file__
        assert used.compiled == 0

    def test_compiler_options_of_the_user_are_the_chains_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []

        def model(program: Any, arguments: Any, target: Any) -> Any:
            seen.append(dict(target.compiler_options))
            return Compiler(100, [60])(program, arguments, target)

        monkeypatch.setattr("overlap.verify.modelled", model)
        options = {"xla_embed_ir_in_executable": True}
        function = jax.jit(mlp(), compiler_options=options)
        overlap_collectives(function, policy="verify", hardware=UNTOLD).explain(*reference().arguments)
        assert seen
        assert all(each == options for each in seen)


def test_real_programs_are_timed_and_on_cpu_no_ring_is_faster() -> None:
    # On a CPU nothing runs beside compute, so that a ring only adds steps.
    function = overlap_collectives(mapped(gather, mesh_of()), policy="verify", strict=True)
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((32, 16), (16, 24)))
    (site,) = function.explain(x, w).sites
    assert site.reason == "tried_slower"
    assert "Modelled: " in site.sentence
    check(function(x, w), x.astype(np.float64) @ w)


class Terminal(io.StringIO):
    """A stream that says it is a terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    errors = Terminal(terminal)
    monkeypatch.setattr(sys, "stderr", errors)
    compiler(monkeypatch, 100, [60])
    trials()(*chain())
    if terminal:
        assert "compiling rings for all_gather at" in errors.getvalue()
        assert "4/4" in errors.getvalue()
    else:
        assert errors.getvalue() == ""


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_a_long_path_leaves_the_counts_of_a_bar_whole(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    errors = Terminal(True)
    monkeypatch.setattr(sys, "stderr", errors)
    with progress_bar(f"compiling rings for all_gather at {'/a/long/path' * 20}:1") as progress:
        progress(1, 12)
    assert "1/12" in errors.getvalue()
    assert "0:00:00" in errors.getvalue()
    assert "compiling rings" in errors.getvalue()


def test_progress_counts_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    errors = Terminal(True)
    monkeypatch.setattr(sys, "stderr", errors)
    with progress_bar("compiling [red]rings") as progress:
        progress(1, 3)
        progress(2, 3)
    assert "compiling [red]rings" in errors.getvalue()
    assert "2/3" in errors.getvalue()


SCRIPT = """
import json, sys
import jax, jax.extend.backend, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
from overlap import overlap_collectives
from tests.overlap.trial_programs import Compiler, chain, gather, mapped, trials

description = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
mesh = topologies.make_mesh(description, (4,), ("x",))
arguments = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    for shape, spec in (((8192, 8192), P("x")), ((8192, 32768), P(None, "x")))
]
function = overlap_collectives(mapped(gather, mesh), policy="verify", strict=True)
(site,) = function.explain(*arguments).sites
text = function.lower(*arguments).compile().as_text()
print(json.dumps({
    "reason": site.reason, "rewritten": site.rewritten, "schedule": site.schedule, "sentence": site.sentence,
    "permutes": text.count("collective-permute-start("), "backends": list(jax.extend.backend.backends()),
}))
"""


@needs_libtpu
def test_a_tpu_chain_is_rewritten_by_the_schedule_that_was_found_best(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        **tpu_target.ENVIRONMENT,
        "PYTHONPATH": str(ROOT),
        VARIABLE: str(tmp_path),
    }
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    # The chain with its schedules, and the program with the one that was chosen.
    files = [json.loads(path.read_text("utf-8")) for path in tmp_path.glob("*.json")]
    (whole,) = (content for content in files if "program" in content["conditions"])
    (kept,) = (content for content in files if "chain" in content["conditions"])
    assert len(whole["rings"]) == 1
    original = kept["original"]
    fitting = [
        ring
        for ring in kept["rings"]
        if "seconds" in ring and ring["temporary_bytes"] <= original["temporary_bytes"]
    ]
    best = min(fitting, key=lambda ring: ring["seconds"])
    assert best["seconds"] < original["seconds"] / 1.01
    assert told["schedule"] == best["schedule"]
    assert (told["reason"], told["rewritten"]) == ("tried_faster", True)
    assert (
        f"{original['seconds'] * 1e6:.0f} µs as written, {best['seconds'] * 1e6:.0f} µs" in told["sentence"]
    )
    assert told["permutes"] >= 3, "a ring of four devices has three hops at least"
    assert told["backends"] == ["cpu"], "no TPU backend may be started"
