"""``policy="autotune"``: wall-clock times decide where devices are attached, alike in every process."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost_model import by_name
from overlap import autotune, overlap_collectives, verify
from overlap.schedule_cache import VARIABLE
from overlap.trial_target import COMPILE_ONLY, Target
from tests.overlap.mlp import check, hops, mesh_of, mlp, reference
from tests.overlap.test_multi_process import START, run
from tests.overlap.trial_programs import SCHEDULES, UNTOLD, Compiler, chain, gather, mapped, trials


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def racing(monkeypatch: pytest.MonkeyPatch, *times_us: float) -> list[int]:
    """Lets the programs that can run take these times, and counts those of each race."""
    raced: list[int] = []

    def race(runs: Any, *_: Any) -> list[float]:
        raced.append(sum(run is not None for run in runs))
        return [us / 1e6 if run else 0.0 for run, us in zip(runs, times_us, strict=True)]

    monkeypatch.setattr(autotune, "race", race)
    return raced


class TestRace:
    def test_takes_the_median_of_calls_in_turn(self) -> None:
        clock: list[float] = [0.0]
        order: list[str] = []

        def program(name: str, seconds: float) -> Any:
            def call(value: Any) -> Any:
                order.append(name)
                # One slow sample, which the median does not see.
                clock[0] += seconds * (100 if order.count(name) == 1 else 1)
                return value

            return call

        found = autotune.race(
            [program("a", 3.0), None, program("b", 2.0)], [np.zeros(1)], 2, clock=lambda: clock[0]
        )
        assert found == [3.0, 0.0, 2.0]
        assert order.count("a") == order.count("b") == 2 * autotune.ROUNDS
        assert order[:4] == ["a", "a", "b", "b"]
        assert order[4:8] == ["b", "b", "a", "a"], "the second round begins one further along"

    def test_a_time_that_varies_by_chance_gains_nothing(self) -> None:
        now = [0.0]

        def program(*seconds: float) -> Any:
            taken = itertools.cycle(seconds)

            def call(value: Any) -> Any:
                now[0] += next(taken)
                return value

            return call

        met: list[float] = []
        steady, lucky, faster = program(1.0), program(*(0.7, 1.4) * 9, 0.7, 0.7), program(0.9, 0.92)
        found = autotune.race(
            [steady, lucky, faster], [np.zeros(1)], 1, lambda: met.append(now[0]), clock=lambda: now[0]
        )
        assert found is not None
        original_s, lucky_s, faster_s = found
        assert original_s == pytest.approx(1.0)
        assert lucky_s > 1.0, "its median is 0.7"
        assert 0.9 <= faster_s <= 0.92 + 1e-9
        assert len(met) == 3 * autotune.ROUNDS

    def test_the_fastest_of_a_heat_go_on_as_all_processes_agree(self) -> None:
        now, called = [0.0], [0] * 7

        def program(number: int, seconds: float) -> Any:
            def call(value: Any) -> Any:
                called[number] += 1
                now[0] += seconds
                return value

            return call

        def agree(medians: list[float]) -> list[float]:
            assert medians == pytest.approx([1.0, 0.5, 0.6, np.inf, 0.7, 0.8, 0.9])
            return [1.0, 0.9, 0.6, np.inf, 0.8, 0.7, 0.5]

        runs = [program(n, s) for n, s in enumerate((1.0, 0.5, 0.6, 0.0, 0.7, 0.8, 0.9))]
        runs[3] = None
        found = autotune.race(runs, [np.zeros(1)], 1, agree=agree, clock=lambda: now[0])
        assert found == pytest.approx([1.0, 0.5, 0.6, 0.0, 0.7, 0.8, 0.9])
        heat, rounds = autotune.HEAT, autotune.ROUNDS
        assert called == [rounds, heat, rounds, 0, heat, heat, rounds]

    def test_a_call_that_fails_ends_it_in_all_processes_after_the_round(self) -> None:
        met: list[int] = []
        rounds: list[bool] = []

        def failing(value: Any) -> Any:
            raise MemoryError("of the host")

        def all_well(well: bool) -> bool:
            rounds.append(well)
            return well

        runs = [lambda value: value, failing, lambda value: value]
        assert autotune.race(runs, [np.zeros(1)], 1, lambda: met.append(1), all_well=all_well) is None
        assert rounds == [False]
        assert len(met) == 3, "the other processes wait for this one before each call of the round"
        told = iter([True, True, False])
        steady = [lambda value: value] * 2
        assert autotune.race(steady, [np.zeros(1)], 1, all_well=lambda well: next(told)) is None


class TestDecision:
    def test_measured_times_decide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        raced = racing(monkeypatch, 100, 90, 95, 70)
        trial = trials("autotune")(*chain())
        assert trial is not None
        assert trial.kind == "measured"
        # Whatever memory it needs: on CPU that is the host's.
        assert trial.choice == SCHEDULES[2]
        assert raced == [4]
        assert trials("autotune")(*chain()) == trial
        assert raced == [4], "the second comes from the cache"

    @pytest.mark.parametrize(
        ("rings_us", "run", "nearly"),
        [
            ((90, 95, 70), 2, None),
            ((90, 95, 88), 2, 0),
            ((105, 102, 130), None, 1),
            ((120, 111, 130), None, None),
            ((90, 0, 0), 0, None),
        ],
    )
    def test_a_ring_hardly_slower_than_what_is_run_is_told_of(
        self, rings_us: tuple[int, ...], run: int | None, nearly: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        racing(monkeypatch, 100, *rings_us)
        program, choices = chain()

        @jax.jit
        def failing_program(*_: Any) -> Any:
            raise ValueError("nothing can be made of it")

        failing: Any = dataclasses.replace(
            program,
            version=lambda s: program.version(s) if rings_us[choices.index(s)] else failing_program,
        )
        trial = trials("autotune")(failing, choices)
        assert trial is not None
        assert trial.choice == (None if run is None else choices[run])
        assert trial.nearly == (None if nearly is None else choices[nearly])
        if nearly is not None:
            assert trial.nearly_s == pytest.approx(rings_us[nearly] / 1e6)

    def test_fastest_ring_runs_and_computes_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            autotune, "race", lambda runs, *_: [1.0, *(0.5 + i / 10 for i in range(len(runs) - 1))]
        )
        function = overlap_collectives(
            mapped(gather, mesh_of()), policy="autotune", hardware=UNTOLD, strict=True
        )
        x, w = (np.arange(size, dtype=np.float32).reshape(-1, 16) / size for size in (512, 384))
        (site,) = function.explain(x, w.T).sites
        assert site.reason == "tried_faster"
        assert "Measured: 1000000 µs as written, 500000 µs as the best ring tried." in site.sentence
        assert hops(function, x, w.T) > 0
        check(function(x, w.T), x.astype(np.float64) @ w.T)

    @pytest.mark.parametrize("devices", [2, 4])
    def test_hops_of_two_cpu_devices_may_go_by_all_reduce(
        self, devices: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def race(runs: Any, *_: Any) -> list[float]:
            return [1.0, *(0.5 if "all-reduce(" in run.as_text() else 0.8 for run in runs[1:])]

        monkeypatch.setattr(autotune, "race", race)
        function = overlap_collectives(
            mapped(gather, mesh_of(devices)), policy="autotune", hardware="cpu", strict=True
        )
        x, w = (np.arange(size, dtype=np.float32).reshape(-1, 16) / size for size in (512, 384))
        (site,) = function.explain(x, w.T).sites
        assert site.reason == "tried_faster"
        assert (hops(function, x, w.T) == 0) == (devices == 2)
        assert ("all_reduce" in site.schedule) == (devices == 2)
        check(function(x, w.T), x.astype(np.float64) @ w.T)

    def test_programs_are_run_and_timed(self) -> None:
        found = trials("autotune")(*chain())
        assert found is not None
        assert found.kind == "measured"
        assert 0 < found.original_s < 60
        assert 0 < found.ring_s < 60

    def test_ring_that_cannot_run_is_passed_over_and_nothing_kept(
        self, monkeypatch: pytest.MonkeyPatch, cache: Path
    ) -> None:
        original = verify.compiled_for

        def compiled_for(program: Any, arguments: Any, target: Any) -> Any:
            if str(program.trace(*arguments).jaxpr).count("ppermute") == 3:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
            return original(program, arguments, target)

        monkeypatch.setattr(autotune, "compiled_for", compiled_for)
        raced = racing(monkeypatch, 100, 50, 80, 90)
        trial = trials("autotune")(*chain())
        assert trial is not None
        assert (trial.choice, trial.ring_s) == (SCHEDULES[1], 80e-6)
        assert raced == [3]
        assert not list(cache.iterdir())

    def test_what_fails_keeps_no_arrays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @jax.jit
        def failing_program(*_: Any) -> Any:
            raise ValueError("nothing can be made of it")

        program, choices = chain()
        monkeypatch.setattr(autotune, "race", lambda *_: None)
        failing = dataclasses.replace(program, version=lambda choice: failing_program)
        known = Target(mesh_of(), by_name("cpu"))
        gc.collect()
        before = len(jax.live_arrays())
        gc.disable()
        try:
            autotune.measured_times(failing, choices, known, lambda: None)
            assert len(jax.live_arrays()) == before
        finally:
            gc.enable()

    def test_chain_of_which_a_timed_call_fails_is_verified(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> Any:
            raise MemoryError("of the host")

        monkeypatch.setattr(autotune, "_sample_s", fail)
        monkeypatch.setattr("overlap.verify.modelled", Compiler(100, [60]))
        trial = trials("autotune")(*chain())
        assert trial is not None
        assert (trial.kind, trial.ring_s) == ("modelled", 60e-6)

    def test_chain_that_cannot_run_is_verified(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> Any:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory for the arguments")

        monkeypatch.setattr(autotune, "some", fail)
        monkeypatch.setattr("overlap.verify.modelled", Compiler(100, [60]))
        trial = trials("autotune")(*chain())
        assert trial is not None
        assert (trial.kind, trial.ring_s) == ("modelled", 60e-6)

    def test_devices_to_compile_for_only_are_verified(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Target, "attached", property(lambda target: False))
        raced = racing(monkeypatch, 100, 50, 50, 50)
        monkeypatch.setattr("overlap.verify.modelled", Compiler(100, [60]))
        trial = trials("autotune")(*chain())
        assert trial is not None
        assert (trial.kind, trial.ring_s) == ("modelled", 60e-6)
        assert not raced

    def test_devices_tell_whether_they_are_attached(self) -> None:
        class Device:
            client = type("Client", (), {"runtime_type": COMPILE_ONLY})

        class Mesh:
            devices = np.array([Device()], object)

        assert Target(mesh_of(), None).attached  # type: ignore[arg-type]
        assert not Target(Mesh(), None).attached  # type: ignore[arg-type]


def whole_race(monkeypatch: pytest.MonkeyPatch, whole_us: list[float], *, chain: float = 1.02) -> list[int]:
    """Lets the rings of a chain take so many times as long, each a tenth longer than the one before.

    A whole program takes given times. A program as written is whole if it has two collectives.
    """
    raced: list[int] = []

    def race(runs: Any, *_: Any) -> list[float]:
        text = runs[0].as_text()
        if text.count(" all-gather(") + text.count(" reduce-scatter(") < 2:
            return [1.0, *(chain * (1 + number / 10) for number in range(len(runs) - 1))]
        raced.append(len(runs))
        return [us / 1e6 for us in whole_us[: len(runs)]]

    monkeypatch.setattr(autotune, "race", race)
    return raced


def tuned(hardware: str) -> Any:
    """The MLP, decorated."""
    return overlap_collectives(jax.jit(mlp(mesh_of())), policy="autotune", hardware=hardware, strict=True)


class TestWholeProgram:
    def test_rings_that_gain_together_alone_are_taken_on_cpu_devices(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        raced = whole_race(monkeypatch, [100, 80, 90, 95])
        function = tuned("cpu")
        wanted = reference()
        sites = function.explain(*wanted.arguments).sites
        assert raced == [4], "as written, both rings, and each of them"
        assert [site.rewritten for site in sites] == [True, True]
        assert all("By itself it gains nothing, and within the program it does." in s.sentence for s in sites)
        check(function(*wanted.arguments), wanted.value())

    def test_a_ring_that_is_second_by_itself_may_be_the_faster_within_the_program(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        raced = whole_race(monkeypatch, [100, 110, 90, 95, 95], chain=0.8)
        function = tuned("cpu")
        wanted = reference()
        sites = function.explain(*wanted.arguments).sites
        assert raced == [5], "as written, both rings, the gather's second, and one ring fewer"
        assert [site.rewritten for site in sites] == [True, True]
        gather, scatter = (site.sentence for site in sites)
        assert "880000 µs as the best ring tried. By itself another ring is faster, and not within" in gather
        assert "800000 µs as the best ring tried." in scatter, "of two devices it has one ring"
        check(function(*wanted.arguments), wanted.value())

    def test_rings_that_gain_nothing_together_are_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        whole_race(monkeypatch, [100, 100, 101, 99.5])
        function = tuned("cpu")
        assert not any(site.rewritten for site in function.explain(*reference().arguments).sites)

    def test_on_devices_that_run_a_program_in_order_a_ring_has_to_gain_by_itself(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        raced = whole_race(monkeypatch, [100, 80, 90, 95])
        function = tuned("tpu_v5p")
        assert not any(site.rewritten for site in function.explain(*reference().arguments).sites)
        assert not raced

    def test_no_more_selections_are_run_than_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        raced = racing(monkeypatch, *[100] * (1 + autotune.SELECTIONS))
        program, _ = chain()
        whole: Any = dataclasses.replace(program, whole=True, version=lambda number: program.original)
        trial: Any = trials("autotune")(whole, tuple(range(10)))
        assert raced == [1 + autotune.SELECTIONS]
        assert trial.choice is None

    def test_what_cannot_run_whole_stays_as_the_chains_trials_say(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program, choices = chain()
        monkeypatch.setattr(autotune, "measured_times", lambda *_: None)
        assert trials("autotune")(dataclasses.replace(program, whole=True), choices) is None

    def test_whole_programs_of_arguments_that_lie_anywhere_are_run(self) -> None:
        program, choices = chain()
        x, w = program.arguments
        loose = dataclasses.replace(
            program, whole=True, arguments=(x, jax.ShapeDtypeStruct(w.shape, w.dtype))
        )
        found = trials("autotune")(loose, choices)
        assert found is not None
        assert found.kind == "measured"


def looping(x: Any) -> Any:
    """A loop that ends when a value says so."""
    return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x + 1, x)


def calling(x: Any) -> Any:
    """Code outside the program, in a loop."""
    called = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), x.dtype), x[0])
    return jax.lax.fori_loop(0, 2, lambda _, y: y + called, x)


def printing(x: Any) -> Any:
    """An effect."""
    jax.debug.print("{}", x)
    return x


def parting(x: Any) -> Any:
    """A sum that all devices come to if the argument is the same on all, which nothing says."""

    def body(x: Any) -> Any:
        return jax.lax.cond(x[0] > 3, lambda x: jax.lax.psum(x, "x") / 4, lambda x: x, x)

    spec = jax.sharding.PartitionSpec("x")
    return jax.shard_map(body, mesh=mesh_of(4), in_specs=spec, out_specs=spec, check_vma=False)(x)


def test_a_branch_that_only_computes_can_be_run_whole() -> None:
    argument = jax.ShapeDtypeStruct((4,), jnp.float32)
    branch = jax.jit(lambda x: jax.lax.cond(x[0] > 3, jnp.sin, jnp.cos, x))
    assert autotune.harmless(branch.trace(argument).jaxpr, [argument])


@pytest.mark.parametrize("function", [looping, calling, printing, parting])
def test_programs_that_do_more_than_compute_are_not_run_whole(function: Any) -> None:
    argument = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert not autotune.harmless(jax.jit(function).trace(argument).jaxpr, [argument])


def test_programs_of_large_arguments_are_not_run_whole() -> None:
    sharding = jax.sharding.NamedSharding(mesh_of(4), jax.sharding.PartitionSpec("x"))
    rows = autotune.WHOLE_BYTES // 4
    harmless = [
        autotune.harmless(jax.jit(lambda x: x + 1).trace(argument).jaxpr, [argument])
        for argument in (
            jax.ShapeDtypeStruct((4 * rows,), jnp.float32, sharding=sharding),
            jax.ShapeDtypeStruct((4 * rows + 4,), jnp.float32, sharding=sharding),
            jax.ShapeDtypeStruct((rows + 1,), jnp.float32),
        )
    ]
    assert harmless == [True, False, False]


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "uint8", "int32", "bool", "complex64"]
)
def test_arguments_have_values_of_some_variety_where_they_should_be(dtype: str) -> None:
    sharding = jax.sharding.NamedSharding(mesh_of(), jax.sharding.PartitionSpec("x"))
    array = autotune.some(jax.ShapeDtypeStruct((4, 16), jnp.dtype(dtype), sharding=sharding), 0)
    assert (array.shape, array.dtype, array.sharding) == ((4, 16), jnp.dtype(dtype), sharding)
    values = np.asarray(array).astype(np.complex64)
    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 1
    assert np.abs(values).max() <= 8


SCRIPT: Final = (
    START
    + """
import numpy as np
from jax.experimental import multihost_utils
from overlap import autotune
from tests.overlap.mlp import mesh_of, mlp, reference
from tests.overlap.trial_programs import UNTOLD, gather, mapped

os.environ["OVERLAP_CACHE_DIR"] = f"{what}/process_{index}"
wanted = reference()

def race(runs, values, calls, meet, *_):
    meet()
    # The programs do run, and the two processes disagree about which is the fastest.
    for run in runs:
        jax.block_until_ready(run(*values))
    times = [0.5 + number / 10 for number in range(1, len(runs))]
    return [1.0, *(times if index == 0 else times[::-1])]

def fail(*_):
    raise AssertionError("process 0 has it in its cache")

def decorated():
    function = overlap_collectives(
        jax.jit(mlp(mesh_of(4))), policy="autotune", hardware=UNTOLD, strict=True
    )
    result = multihost_utils.process_allgather(function(*wanted.arguments), tiled=True)
    report = json.loads(function.explain(*wanted.arguments).to_json())
    close = bool(np.allclose(result, wanted.value(), rtol=2e-5, atol=2e-5))
    return {"close": close, "sites": [[s["reason"], s["schedule"], s["sentence"]] for s in report["sites"]]}

def verified():
    chain = mapped(gather, mesh_of(4))
    function = overlap_collectives(chain, policy="verify", hardware=UNTOLD, strict=True)
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((32, 16), (16, 24))]
    return json.loads(function.explain(*shapes).to_json())["sites"][0]["sentence"]

autotune.race = race
first, modelled = decorated(), verified()
if index == 1:
    os.environ["OVERLAP_CACHE_DIR"] = f"{what}/empty"
autotune.race = fail
tell(first=first, second=decorated(), modelled=[modelled, verified()])
"""
)


def test_processes_that_measure_differently_decide_alike(tmp_path: Path) -> None:
    found = run(SCRIPT, str(tmp_path))
    for status, _, errors in found:
        assert status == 0, errors
    (one,), (other,) = (told for _, told, _ in found)
    assert one == other
    assert one["first"] == one["second"]
    # Found by compiling, and then in the cache of process 0; that of the other is empty.
    assert one["modelled"][0] == one["modelled"][1]
    assert "Modelled: " in one["modelled"][0]
    assert one["first"]["close"]
    assert [site[0] for site in one["first"]["sites"]] == ["tried_faster"] * 2
    # The first schedule is the fastest to process 0 and the slowest to process 1.
    assert all("600000 µs as the best ring tried" in site[2] for site in one["first"]["sites"])
    files = [sorted(path.name for path in (tmp_path / f"process_{i}").iterdir()) for i in range(2)]
    assert len(files[0]) == 4
    assert files[0] == files[1]
    kept = [
        [json.loads((tmp_path / f"process_{i}" / name).read_text()) for name in files[i]] for i in range(2)
    ]
    assert kept[0] == kept[1]


UNLIKE: Final = (
    START
    + """
from cost_model import by_name
from overlap import autotune, processes, verify
from overlap.trial_target import Target
from overlap.trial_times import Failed, Timed, Times
from tests.overlap.mlp import mesh_of
from tests.overlap.trial_programs import UNTOLD, Compiler, gather, mapped

shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((32, 16), (16, 24))]
sample_s, calls = autotune._sample_s, []

def failing(*arguments):
    # The program has run: what fails in one process alone is what comes after.
    found = sample_s(*arguments)
    calls.append(1)
    if index == 1 and len(calls) >= 5:
        raise MemoryError("of this host")
    return found

def sentence(policy):
    chain = mapped(gather, mesh_of(4))
    function = overlap_collectives(chain, policy=policy, hardware=UNTOLD, strict=True)
    return json.loads(function.explain(*shapes).to_json())["sites"][0]["sentence"]

os.environ["OVERLAP_CACHE_DIR"] = ""
autotune._sample_s = failing
verify.modelled = Compiler(100, [80]) if index == 0 else Compiler(MemoryError("of this host"), [])
told = {policy: sentence(policy) for policy in ("verify", "autotune")}

times = Times(Timed(1.0, None), (Failed("x" * 300, True),) * (100 if index == 1 else 60))
agreed = processes.agreed(times, range(100), Target(mesh_of(4), by_name("cpu")))
tell(**told, rings=len(agreed.rings), calls=len(calls))
"""
)


def test_processes_that_fail_differently_decide_alike() -> None:
    found = run(UNLIKE, "")
    for status, _, errors in found:
        assert status == 0, errors
    (one,), (other,) = (told for _, told, _ in found)
    assert one == other
    assert "Modelled: 100 µs as written, 80 µs as the best ring tried." in one["verify"]
    assert "Modelled: 100 µs as written, 80 µs as the best ring tried." in one["autotune"], "it is verified"
    assert one["rings"] == 60, "what process 0 found, though the other has more to tell"
