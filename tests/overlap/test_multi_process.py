"""Two processes over loopback, with gloo: losses, decisions, an A/B profile, and the death of one."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import pytest

ROOT: Final = Path(__file__).resolve().parents[2]

PROCESSES: Final = 2
DEVICES: Final = 4
"""Of both together: rings then have hops within a process and hops between the two."""

LIMIT_S: Final = 120
"""Seconds after which the processes count as hanging."""

STEPS: Final = 4
HEARTBEAT_S: Final = 10
DIED: Final = 9
"""Exit status of the process that dies."""

PROGRAM: Final = """
import dataclasses, functools, jax
from bench.programs import fsdp_mlp, megatron_mlp

def training(name):
    # A training step of the program, jitted, and its arguments; the same in every process.
    program = {
        "megatron": dataclasses.replace(megatron_mlp.SEQUENCE_PARALLEL, mesh_shape=(1, 4)),
        "fsdp": dataclasses.replace(fsdp_mlp.PROGRAM, mesh_shape=(4,)),
    }[name]
    mesh = program.make_mesh(jax.devices()[:4])
    loss = jax.value_and_grad(program.make_loss(mesh))

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(weights, x):
        value, gradient = loss(weights, x)
        return jax.tree.map(lambda w, g: w - 0.05 * g, weights, gradient), value

    return train_step, lambda: program.arguments(mesh)

def losses(step, arguments, steps):
    weights, x = arguments()
    found = []
    for _ in range(steps):
        weights, value = step(weights, x)
        found.append(float(value))
    return found
"""

START: Final = f"""
import json, os, sys
import jax

index, port, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    f"127.0.0.1:{{port}}", {PROCESSES}, index, initialization_timeout={LIMIT_S},
    heartbeat_timeout_seconds={HEARTBEAT_S}, shutdown_timeout_seconds={HEARTBEAT_S},
)
from overlap import ab_profile, overlap_collectives
{PROGRAM}
def tell(**what):
    # On a line of its own, whatever gloo is printing.
    os.write(1, ("\\nTOLD " + json.dumps(what) + "\\n").encode())
"""

TRAIN: Final = (
    START
    + f"""
for name in ("megatron", "fsdp"):
    original, arguments = training(name)
    always = overlap_collectives(original, policy="always", strict=True)
    auto = overlap_collectives(original, hardware="tpu_v5p", strict=True)
    tell(
        name=name,
        original=losses(original, arguments, {STEPS}),
        overlapped=losses(always, arguments, {STEPS}),
        always=always.explain(*arguments()).to_json(),
        auto=auto.explain(*arguments()).to_json(),
        program=always.lower(*arguments()).as_text(),
    )
report = ab_profile(always, *arguments(), rounds=2, warmup=1, traced_rounds=1, trace_dir=what)
tell(name="report", text=str(report), main=report.is_main, json=report.to_json())
"""
)

DIE: Final = (
    START
    + f"""
original, arguments = training("megatron")
step = overlap_collectives(original, policy="always", strict=True) if what == "overlapped" else original
weights, x = arguments()
weights, loss = step(weights, x)
tell(loss=float(loss))
if index == 1:
    os._exit({DIED})
try:
    while True:
        weights, loss = step(weights, x)
        float(loss)
except jax.errors.JaxRuntimeError as error:
    tell(error=str(error))
    # JAX would wait for the dead process before it ends this one, too.
    os._exit(0)
"""
)


def run(script: str, argument: str) -> list[tuple[int, list[Any], str]]:
    """Runs the script in two processes; of each the exit status, what it told, and its errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with contextlib.ExitStack() as stack:
        started = []
        for i in range(PROCESSES):
            environment = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": str(ROOT),
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // PROCESSES}",
                # Decisions that followed the order of a set would differ.
                "PYTHONHASHSEED": str(i + 1),
            }
            # Files, not pipes: a process that waits until its pipe is read would let the other wait too.
            out, errors = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            process = subprocess.Popen(
                [sys.executable, "-c", script, str(i), port, argument],
                env=environment,
                cwd=ROOT,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
            stack.callback(_kill, process)
            started.append((process, out, errors))
        end_s = time.monotonic() + LIMIT_S
        return [
            (process.wait(max(0.0, end_s - time.monotonic())), _told(out), _text(errors))
            for process, out, errors in started
        ]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _told(out: IO[str]) -> list[Any]:
    lines = _text(out).splitlines()
    return [json.loads(line.removeprefix("TOLD ")) for line in lines if line.startswith("TOLD ")]


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What each of the two processes told, by name, and the directory of their traces."""
    directory = tmp_path_factory.mktemp("traces")
    found = run(TRAIN, str(directory))
    for status, _, errors in found:
        assert status == 0, errors
    return [{told["name"]: told for told in each} for _, each, _ in found], directory


def each(told: Sequence[dict[str, Any]], program: str, what: str) -> list[Any]:
    """What each process told of a program."""
    return [process[program][what] for process in told]


@pytest.mark.parametrize("program", ["megatron", "fsdp"])
def test_losses_are_those_of_the_original_in_both_processes(
    trained: tuple[list[dict[str, Any]], Path], program: str
) -> None:
    told, _ = trained
    names: dict[str, Any] = {}
    exec(PROGRAM, names)
    # In one process, here.
    wanted = names["losses"](*names["training"](program), STEPS)
    assert wanted[-1] < wanted[0]
    for variant in ("original", "overlapped"):
        one, other = each(told, program, variant)
        assert one == other
        np.testing.assert_allclose(one, wanted, rtol=1e-5)


@pytest.mark.parametrize("program", ["megatron", "fsdp"])
def test_decisions_and_programs_are_the_same_in_both_processes(
    trained: tuple[list[dict[str, Any]], Path], program: str
) -> None:
    told, _ = trained
    for what in ("always", "auto", "program"):
        one, other = each(told, program, what)
        assert one == other
    sites = json.loads(each(told, program, "always")[0])["sites"]
    assert any(site["rewritten"] for site in sites)


def test_each_process_profiles_its_own_devices_and_the_first_reports(
    trained: tuple[list[dict[str, Any]], Path],
) -> None:
    told, directory = trained
    assert each(told, "report", "main") == [True, False]
    for i, text in enumerate(each(told, "report", "text")):
        assert f"process {i} of 2" in text
        assert ("process 0 has the report" in text) == (i == 1)
    for i, report in enumerate(map(json.loads, each(told, "report", "json"))):
        assert report["agreement"]["agreed"] is True
        assert report["conditions"]["devices"] == DEVICES
        assert report["trace_dir"] == str(directory / f"process_{i}")
        assert len(list((directory / f"process_{i}").rglob("*.xplane.pb"))) == 1
        for variant in ("original", "overlapped"):
            assert report[variant]["failure"] is None
            assert len(report[variant]["times_s"]) == 2
            assert report[variant]["activity"]["devices"] == DEVICES // PROCESSES


@pytest.mark.parametrize("variant", ["original", "overlapped"])
def test_a_process_that_dies_leaves_the_other_with_jax_s_error(variant: str) -> None:
    (status, told, errors), (died, before, _) = run(DIE, variant)
    assert died == DIED
    assert [set(each) for each in before] == [{"loss"}]
    # JAX's error, raised in Python; or JAX's distributed service ended the process, because its peer died.
    if status == 0:
        assert [set(each) for each in told] == [{"loss"}, {"error"}]
        assert "loo" in told[1]["error"] or "UNAVAILABLE" in told[1]["error"] or "closed" in told[1]["error"]
    else:
        assert "JAX distributed service detected fatal errors" in errors
