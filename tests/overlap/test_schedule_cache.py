"""The cache of trials: hits, what makes a key, damage, several processes, directories that cannot be used."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType

import cost_model
from cost_model import by_name
from overlap.schedule_cache import VARIABLE, ScheduleCache, default_directory, record, times_of
from overlap.trial_target import Target, emission, key
from overlap.trial_times import Failed, Timed, Times
from passes import RingSchedule
from tests.overlap.mlp import mesh_of
from tests.overlap.test_compile_only import ROOT
from tests.overlap.trial_programs import SCHEDULES, Compiler, chain, gather, trials

TIMES = Times(Timed(1e-4, 100), (Timed(0.1 + 0.2, None), Failed("INTERNAL: no", True)))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that is the cache."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def try_once(monkeypatch: pytest.MonkeyPatch, *times: Any) -> tuple[Any, int]:
    """What new trials, as of a new process, find of the chain, and how many programs they compile."""
    used = Compiler(*times)
    monkeypatch.setattr("overlap.verify.modelled", used)
    return trials()(*chain()), used.compiled


def test_a_hit_compiles_nothing_and_gives_the_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, compiled = try_once(monkeypatch, 100, [80, 70.123456789, 90])
    assert compiled == 1 + len(SCHEDULES)
    again, compiled = try_once(monkeypatch, 100, [200])
    assert compiled == 0
    assert again == first
    assert again.choice == SCHEDULES[1]
    assert [path.suffix for path in directory.iterdir()] == [".json"]


def test_a_compiler_s_refusal_is_kept_and_another_failure_is_not(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_once(monkeypatch, 100, [80, TypeError("a fault of the pass"), 90])
    assert not directory.exists()
    refused = jax.errors.JaxRuntimeError("INTERNAL: no\nstack")
    first, _ = try_once(monkeypatch, 100, [80, refused, 90])
    (kept,) = directory.iterdir()
    assert json.loads(kept.read_text("utf-8"))["rings"][1]["failure"] == "JaxRuntimeError: INTERNAL: no stack"
    assert try_once(monkeypatch, 100, [1]) == (first, 0)


GOOD = record("k", TIMES, SCHEDULES)


def changed(**changes: Any) -> str:
    """A file's text with some fields changed."""
    return json.dumps({**GOOD, **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "\x00\xff",
        "[" * 100_000,
        "null",
        "[]",
        changed(schema=2),
        changed(key="another"),
        changed(original=None),
        changed(original={"seconds": "1", "temporary_bytes": 0}),
        changed(original={"seconds": True, "temporary_bytes": 0}),
        changed(original={"seconds": 0, "temporary_bytes": 0}),
        changed(original={"seconds": -1.0, "temporary_bytes": 0}),
        changed(original={"seconds": math.nan, "temporary_bytes": 0}),
        changed(original={"seconds": math.inf, "temporary_bytes": 0}),
        changed(original={"seconds": 10**400, "temporary_bytes": 0}),
        changed(original={"seconds": 1, "temporary_bytes": -1}),
        changed(original={"seconds": 1, "temporary_bytes": 1.5}),
        changed(original={"seconds": 1}),
        changed(rings=None),
        changed(rings=[1]),
        changed(rings=[{"schedule": "another", "seconds": 1, "temporary_bytes": 0}]),
        changed(rings=[{**GOOD["rings"][1], "schedule": str(SCHEDULES[0]), "failure": 3}]),
        changed(rings=[{**GOOD["rings"][1], "schedule": str(SCHEDULES[0]), "lasting": None}]),
        changed(rings=GOOD["rings"] * 2),
    ],
    ids=range(25),
)
def test_a_damaged_file_is_ignored_with_a_warning_and_rewritten(tmp_path: Path, text: str) -> None:
    cache = ScheduleCache(tmp_path)
    (tmp_path / "k.json").write_text(text, "utf-8")
    with pytest.warns(RuntimeWarning, match=r"k\.json is damaged .*: it is ignored"):
        assert cache.load("k", SCHEDULES) is None
    cache.store("k", TIMES, SCHEDULES, {})
    assert cache.load("k", SCHEDULES) == TIMES


def test_a_damaged_file_is_tried_anew(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = try_once(monkeypatch, 100, [80])
    (kept,) = directory.iterdir()
    kept.write_text(kept.read_text("utf-8")[:-20], "utf-8")
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert try_once(monkeypatch, 100, [80]) == (first, 1 + len(SCHEDULES))
    assert try_once(monkeypatch, 100, [80]) == (first, 0)


seconds = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
timed = st.builds(Timed, seconds, st.none() | st.integers(0))
failures = st.builds(Failed, st.text(), st.booleans())


@given(st.builds(Times, timed, st.lists(timed | failures, max_size=3).map(tuple)))
def test_what_is_kept_comes_back_to_the_last_digit(times: Times) -> None:
    assert times_of(json.loads(json.dumps(record("k", times, SCHEDULES))), "k", SCHEDULES) == times


@pytest.mark.parametrize("inside", ["", "below"])
def test_a_directory_that_cannot_be_used_costs_one_warning(tmp_path: Path, inside: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    cache = ScheduleCache(file / inside if inside else file)
    with pytest.warns(RuntimeWarning, match="cannot be kept in .*OVERLAP_CACHE_DIR") as caught:
        for name in ("a", "b"):
            assert cache.load(name, SCHEDULES) is None
            cache.store(name, TIMES, SCHEDULES, {})
    assert len(caught) == 1


WRITER = """
import sys
from pathlib import Path
from overlap.schedule_cache import ScheduleCache
from overlap.trial_times import Timed, Times
from tests.overlap.trial_programs import SCHEDULES

cache = ScheduleCache(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for number in range(1, 401):
    timed = Timed(number / 1000, int(sys.argv[2]))
    cache.store("k", Times(timed, (timed,) * 3), SCHEDULES, {"padding": "x" * number * 50})
"""


def test_where_warnings_are_errors_a_damaged_file_does_not_end_the_trials(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of several processes one would end alone, and the others would wait."""
    (tmp_path / "key.json").write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ScheduleCache(tmp_path).load("key", SCHEDULES) is None
        ScheduleCache(tmp_path / "key.json").store("key", TIMES, SCHEDULES, {})
    assert "is damaged" in caplog.text and "cannot be kept in" in caplog.text


def test_processes_that_write_at_once_leave_whole_files(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(size)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for size in (1, 2)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    cache = ScheduleCache(tmp_path)
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(writer.poll() is None for writer in writers):
            found = cache.load("k", SCHEDULES)
            # One writer's times throughout, never a mixture.
            assert found is None or {found.original, *found.rings} == {found.original}
            seen.add(found)
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert len(seen - {None}) > 1
    last = cache.load("k", SCHEDULES)
    assert last is not None
    assert last.original.seconds == 0.4
    assert [path.name for path in tmp_path.iterdir()] == ["k.json"]


class TestDirectory:
    def test_is_the_one_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "/some/where")
        assert default_directory() == Path("/some/where")

    def test_is_none_if_the_home_it_names_is_not_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "~no-such-user/cache")
        with pytest.warns(RuntimeWarning, match=r"OVERLAP_CACHE_DIR names ~no-such-user/cache \("):
            assert default_directory() is None

    def test_is_none_if_the_name_is_empty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "")
        assert default_directory() is None
        cache = ScheduleCache(None)
        cache.store("k", TIMES, SCHEDULES, {})
        assert cache.load("k", SCHEDULES) is None

    @pytest.mark.parametrize(
        ("named", "expected"),
        [
            ("/caches", "/caches/overlap-collectives"),
            ("relative", "/home/me/.cache/overlap-collectives"),
            (None, "/home/me/.cache/overlap-collectives"),
        ],
    )
    def test_is_in_the_user_s_cache(
        self, monkeypatch: pytest.MonkeyPatch, named: str | None, expected: str
    ) -> None:
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if named is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert default_directory() == Path(expected)


def key_of(
    *,
    body: Any = gather,
    mesh: Any = None,
    rows: int = 32,
    schedules: Any = SCHEDULES,
    policy: str = "verify",
    target: Target | None = None,
    differentiable: bool = False,
) -> str:
    """The key of a chain."""
    mesh = mesh_of() if mesh is None else mesh
    program, _ = chain(body, mesh=mesh, rows=rows, differentiable=differentiable)
    jaxpr = program.original.trace(*program.arguments).jaxpr  # type: ignore[attr-defined]
    target = Target(mesh, by_name("tpu_v5p")) if target is None else target
    return key(policy, jaxpr, program, schedules, target.description())


def key_on_two_axes() -> str:
    """The key of a chain on a mesh of two axes, as by one version of the sources."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    with mock.patch("overlap.trial_target.emission", lambda: ""):
        return key_of(mesh=mesh)


def devices(**changes: Any) -> Any:
    """A stand-in for a mesh of four TPU devices in a row, with some of their attributes changed."""
    client = SimpleNamespace(platform_version="compiler 1", runtime_type="")
    fields: dict[str, Any] = {
        "device_kind": "TPU v5",
        "process_index": 0,
        "core_on_chip": 0,
        "client": client,
    }
    listed = [SimpleNamespace(**{**fields, "coords": (x, 0, 0), "id": x, **changes}) for x in range(4)]
    array = np.empty(4, object)
    array[:] = listed
    return array


def target(array: Any, **options: Any) -> Target:
    """A target of these devices."""
    return Target(SimpleNamespace(devices=array), by_name("tpu_v5p"), **options)


class TestKey:
    def test_is_the_same_wherever_the_chain_stands(self) -> None:
        names: dict[str, Any] = {}
        lines = ["from jax import lax", "def other(a, b):", "    y = lax.all_gather(a, 'x', tiled=True)"]
        exec(compile("\n" * 70 + "\n".join([*lines, "    return y @ b"]), "elsewhere.py", "exec"), names)
        assert key_of(body=names["other"]) == key_of()

    def test_is_the_same_in_another_process(self) -> None:
        script = "from tests.overlap.test_schedule_cache import *; print(key_on_two_axes())"
        # The order of a set, such as that of the manual axes, follows the seed.
        environments = [{**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed} for seed in "15"]
        command = [sys.executable, "-c", script]
        told = {
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            for environment in environments
        }
        assert told == {f"{key_on_two_axes()}\n"}

    def test_tells_shapes_meshes_schedules_and_policies_apart(self) -> None:
        across = RingSchedule(directions=2, chains=2)
        different = [
            key_of(),
            key_of(rows=64),
            key_of(mesh=mesh_of(8)),
            key_of(schedules=SCHEDULES[:2]),
            key_of(schedules=(*SCHEDULES[:2], across)),
            key_of(policy="autotune"),
            key_of(differentiable=True),
            key_of(body=lambda x, w: jnp.tanh(lax.all_gather(x, "x", tiled=True)) @ w),
            key_of(body=lambda x, w: lax.all_gather(x, "x", tiled=True).astype(jnp.bfloat16) @ w),
        ]
        assert len(set(different)) == len(different)

    def test_is_the_same_on_a_terminal_where_jax_prints_in_colour(self) -> None:
        script = (
            "import jax, sys; from tests.overlap.test_schedule_cache import *; "
            "print(ascii(str(jax.make_jaxpr(lambda x: x + 1)(1.0))), key_on_two_axes(), file=sys.stderr)"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
        terminal, its_end = os.openpty()
        try:
            done = subprocess.run(
                [sys.executable, "-c", script],
                env=environment,
                stdout=its_end,
                stderr=subprocess.PIPE,
                text=True,
                check=True,
            )
        finally:
            os.close(its_end)
            os.close(terminal)
        assert "\\x1b[" in done.stderr
        assert done.stderr.split()[-1] == key_on_two_axes()

    def test_is_the_same_whatever_stands_around_the_chain(self) -> None:
        assert key_of(body=lambda x, w: jnp.tanh(gather(x + 1, 2 * w))) == key_of()

    def test_tells_versions_and_flags_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        different = [key_of()]
        for name in ("jax", "jaxlib", "libtpu"):
            with monkeypatch.context() as patch:
                patch.setattr(
                    "overlap.trial_target._version",
                    lambda wanted, name=name: "0.0" if wanted == name else "1",
                )
                different.append(key_of())
        with monkeypatch.context() as patch:
            patch.setattr("overlap.trial_target.emission", lambda: "another")
            different.append(key_of())
        with monkeypatch.context() as patch:
            patch.setenv("LIBTPU_INIT_ARGS", "--xla_some_flag=true")
            different.append(key_of())
        assert len(set(different)) == 6

    def test_tells_the_tables_of_the_cost_model_apart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tables = shutil.copytree(Path(str(cost_model.__file__)).parent, tmp_path / "cost_model") / "tables"
        monkeypatch.setattr(cost_model, "__file__", str(tmp_path / "cost_model" / "__init__.py"))
        as_it_is = emission.__wrapped__()
        assert as_it_is == emission()
        for table in sorted(tables.iterdir()):
            table.write_text(f"{table.read_text()} ")
            assert emission.__wrapped__() != as_it_is
            as_it_is = emission.__wrapped__()

    def test_tells_devices_apart(self) -> None:
        compiler = SimpleNamespace(platform_version="compiler 2", runtime_type="")
        slower = dataclasses.replace(by_name("tpu_v5p"), hop_latency_s=1e-5)
        in_order = devices()
        different = [
            key_of(target=target(in_order)),
            key_of(target=target(in_order[::-1])),
            key_of(target=target(in_order.reshape(2, 2))),
            key_of(target=target(devices(device_kind="TPU v4"))),
            key_of(target=target(devices(slice_index=1))),
            key_of(target=target(devices(client=compiler))),
            key_of(target=target(in_order, compiler_options={"xla_tpu_flag": True})),
            key_of(target=dataclasses.replace(target(in_order), hardware=slower)),
        ]
        assert len(set(different)) == len(different)
        # Numbers of devices are arbitrary; places are not.
        assert key_of(target=target(devices(id=7))) == different[0]
