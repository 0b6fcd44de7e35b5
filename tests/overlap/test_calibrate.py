"""``python -m overlap calibrate``: fake devices give their figures back; real ones, in two processes too."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from cost_model import Hardware, Matmul, by_name
from cost_model.calibration import Calibration
from cost_model.matmul import matmul_s
from overlap import __main__, overlap_collectives
from overlap.calibrate_programs import STEPS, MeshPrograms, Run
from overlap.calibration import QUICK, Effort, _Session, calibrate, timings

ROOT: Final = Path(__file__).resolve().parents[2]

START_S: Final = 3e-5
"""What it costs a fake device to start a program."""

TINY: Final = Effort(
    rounds=2,
    target_s=1e-4,
    matmuls=((8, 32, 32), (16, 64, 64), (64, 64, 128)),
    dtypes=("float32",),
    copies=(2**12, 2**22),
    hops=(2**6, 2**10, 2**14),
)


class FakePrograms:
    """Devices that take as long as some hardware does, by a clock of their own."""

    def __init__(self, truth: Hardware, noise: float = 0.02, slow: float = 0.05) -> None:
        self.truth = truth
        self.noise = noise
        self.slow = slow
        self.now = 0.0
        self.chance = random.Random(0)

    def clock(self) -> float:
        return self.now

    def takes(self, seconds: float) -> Run:
        def run(count: int) -> None:
            slow = 5 if self.chance.random() < self.slow else 1
            self.now += START_S + count * seconds * slow * self.chance.lognormvariate(0, self.noise)

        return run

    def hop_s(self, size: int) -> float:
        return max(self.truth.hop_latency_s, size / self.truth.axis_bytes_per_s)

    def matmul(self, matmul: Matmul) -> Run:
        return self.takes(matmul_s(matmul, self.truth))

    def copy(self, size: int) -> Run:
        return self.takes(2 * size / self.truth.hbm_bytes_per_s)

    def hop(self, axis: str, size: int, *, both: bool) -> Run:
        turns = 2 if both and not self.truth.opposite_hops_overlap else 1
        return self.takes(turns * self.hop_s(size))

    def beside(self, axis: str, size: int, matmul: Matmul) -> Run:
        parts = self.hop_s(size), matmul_s(matmul, self.truth)
        return self.takes(STEPS * (max(parts) if self.truth.overlaps else sum(parts)))


def mesh(*shape: int) -> Mesh:
    """A mesh of virtual CPU devices, axes a, b, …"""
    count = int(np.prod(shape))
    return jax.make_mesh(
        shape,
        tuple("ab"[: len(shape)]),
        axis_types=(AxisType.Auto,) * len(shape),
        devices=jax.devices()[:count],
    )


def measured(
    truth: Hardware, base: Hardware, on: Mesh, kind: str = "cpu", platform: str = "cpu"
) -> Calibration:
    programs = FakePrograms(truth)
    return _Session(on, programs, base, QUICK, programs.clock, None).calibration(kind, platform)


class TestFakeDevices:
    def test_figures_come_back_from_noisy_times(self) -> None:
        truth = dataclasses.replace(
            by_name("h200"),
            peak_flops=(("bfloat16", 7e14), ("float32", 3e14)),
            matmul_overhead_s=6e-6,
            hbm_bytes_per_s=4e12,
            link_bytes_per_s=2e10,
            hop_latency_s=1.2e-5,
            opposite_hops_overlap=True,
            network="torus",
        )
        base = dataclasses.replace(by_name("h200"), network="torus")
        found = measured(truth, base, mesh(2, 4))
        hardware = found.hardware
        for dtype in ("bfloat16", "float32"):
            reached = hardware.matmul_efficiency * hardware.flops_for(dtype)
            assert reached == pytest.approx(truth.matmul_efficiency * truth.flops_for(dtype), rel=0.05)
        for field in ("matmul_overhead_s", "hbm_bytes_per_s", "link_bytes_per_s", "hop_latency_s"):
            assert getattr(hardware, field) == pytest.approx(getattr(truth, field), rel=0.08), field
        assert hardware.matmul_tile == truth.matmul_tile
        assert hardware.overlaps and hardware.opposite_hops_overlap
        assert [axis.size for axis in found.axes] == [2, 4]
        assert all(value < 0.1 for _, value in (*found.spread, *found.error))
        assert {"link_bytes_per_s", "overlaps", "matmul_tile", "peak_flops"} <= set(found.measured)
        assert not set(found.measured) & set(found.kept)

    @pytest.mark.parametrize("overlaps", [True, False])
    def test_what_runs_beside_what_is_found_out(self, overlaps: bool) -> None:
        truth = dataclasses.replace(by_name("cpu"), overlaps=overlaps, opposite_hops_overlap=not overlaps)
        (axis,) = measured(truth, by_name("cpu"), mesh(4)).axes
        assert axis.overlaps is overlaps
        assert axis.opposite_hops_overlap is not overlaps

    def test_one_device_keeps_the_network_of_the_table_and_says_so(self) -> None:
        base = by_name("h200")
        truth = dataclasses.replace(base, link_bytes_per_s=1.0, hbm_bytes_per_s=4.2e12)
        found = measured(truth, base, mesh(1), "NVIDIA H200", "gpu")
        assert found.axes == ()
        for field in ("link_bytes_per_s", "hop_latency_s", "overlaps", "opposite_hops_overlap"):
            assert field in found.kept
            assert getattr(found.hardware, field) == getattr(base, field)
        assert found.hardware.hbm_bytes_per_s == pytest.approx(4.2e12, rel=0.05)

    def test_all_cases_take_turns_and_starting_costs_nothing(self) -> None:
        programs = FakePrograms(by_name("cpu"), noise=0, slow=0)
        order: list[str] = []

        def noted(name: str, seconds: float) -> Run:
            run = programs.takes(seconds)

            def both(count: int) -> None:
                order.append(name)
                run(count)

            return both

        ticks: list[float] = []
        found = timings(
            {"a": (noted("a", 1e-6), 10), "b": (noted("b", 3e-6), 5)},
            3,
            programs.clock,
            lambda: ticks.append(programs.now),
        )
        assert order == ["a", "a", "b", "b"] * 4
        assert found["a"].seconds == pytest.approx(1e-6)
        assert found["b"].seconds == pytest.approx(3e-6)
        assert len(ticks) == 8

    def test_times_that_get_shorter_with_more_work_are_bounded_not_negative(self) -> None:
        stamps = iter([0.0, 1.0, 1.5])
        found = timings({"a": (lambda count: None, 4)}, 1, lambda: next(stamps), lambda: None)
        assert found["a"].seconds == pytest.approx(0.5 / 6)


@pytest.fixture(scope="module")
def tiny() -> Calibration:
    """A real calibration of the eight virtual devices."""
    return calibrate(effort=TINY)


class TestRealDevices:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
    def test_programs_run_on_every_device(self, dtype: str) -> None:
        programs = MeshPrograms(mesh(2, 4))
        for run in (
            programs.matmul(Matmul(m=8, k=16, n=24, dtype=dtype)),
            programs.copy(1000),
            programs.hop("a", 64, both=False),
            programs.hop("b", 64, both=True),
            programs.beside("b", 64, Matmul(m=8, k=16, n=24, dtype=dtype)),
        ):
            run(1)
            run(3)
            # A GPU's host reads the condition of other loops before every turn.
            traced = str(jax.make_jaxpr(lambda run=run: run(3) or 0)())
            assert "length=3" in traced and "while" not in traced

    def test_all_devices_are_measured_with_progress(self) -> None:
        told: list[tuple[int, int]] = []
        found = calibrate(effort=TINY, mesh_shape=(2, 4), progress=lambda *counts: told.append(counts))
        assert [done for done, _ in told] == list(range(1, len(told) + 1))
        assert told[-1][0] == told[-1][1]
        assert found.device_kind == "cpu" and found.devices == 8 and len(found.axes) == 2
        assert Calibration.from_json(found.to_json()) == found
        # The rest of the library takes it.
        overlap_collectives(lambda x: x, hardware=found.hardware)

    def test_a_mesh_of_other_devices_than_there_are_is_refused(self) -> None:
        with pytest.raises(ValueError, match="a mesh of 3x4 has 12 devices, and 8 are attached"):
            calibrate(effort=TINY, mesh_shape=(3, 4))
        with pytest.raises(ValueError, match=r"such as \(2, 4\), got '2x2'"):
            calibrate(effort=TINY, mesh_shape="2x2")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"such as \(2, 4\), got \(\)"):
            calibrate(effort=TINY, mesh_shape=())
        with pytest.raises(ValueError, match=r"such as \(2, 4\), got 8"):
            calibrate(effort=TINY, mesh_shape=8)  # type: ignore[arg-type]


def environment(devices: int) -> dict[str, str]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


NAMED: Final = ("--coordinator", "127.0.0.1:9", "--processes", "2")
"""Options of a job of two, but for the number of the process."""


class TestTheCommand:
    def test_a_quick_run_on_two_devices_writes_what_hardware_takes(self, tmp_path: Path) -> None:
        out = tmp_path / "cpu.json"
        done = subprocess.run(
            [sys.executable, "-m", "overlap", "calibrate", "--quick", "--out", str(out)],
            env=environment(2),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found = Calibration.read(out, device_kind="cpu")
        assert (found.devices, found.processes, len(found.axes)) == (2, 1, 1)
        assert "Measured on 2 × cpu" in done.stdout and "GB/s one way" in done.stdout
        assert "kept from the table of cpu" in done.stdout
        # No bar where nobody watches.
        assert "measuring" not in done.stderr + done.stdout

    def test_two_processes_agree_to_the_last_bit(self, tmp_path: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        program = f"""
import sys, jax
from overlap import calibrate_command
from overlap.calibration import Effort, calibrate
from tests.overlap.test_calibrate import TINY
import argparse
index = int(sys.argv[1])
calibrate_command._join(argparse.Namespace(
    coordinator="127.0.0.1:{port}", processes=2, process=index, distributed=False))
found = calibrate(effort=TINY)
open(f"{{sys.argv[2]}}/{{index}}.json", "w").write(found.to_json())
"""
        running = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(index), str(tmp_path)],
                env=environment(1),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        ]
        for process in running:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
        one, other = ((tmp_path / f"{index}.json").read_text() for index in range(2))
        assert one == other
        found = Calibration.from_json(one)
        assert (found.devices, found.processes) == (2, 2)

    def test_without_a_file_the_json_goes_to_stdout_alone(
        self, tiny: Calibration, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("overlap.calibrate_command.calibrate", lambda **_: tiny)
        assert __main__.main(["calibrate"]) == 0
        out, errors = capsys.readouterr()
        assert json.loads(out) == json.loads(tiny.to_json())
        assert errors.startswith("Measured on 8 × cpu")
        assert max(map(len, errors.splitlines())) <= 80
        assert ", ".join(tiny.kept) in " ".join(errors.split())

    def test_what_libraries_print_is_kept_out_of_the_json(
        self, tiny: Calibration, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def chatty(**_: Any) -> Calibration:
            os.write(1, b"[Gloo] Rank 0 is connected\n")
            return tiny

        monkeypatch.setattr("overlap.calibrate_command.calibrate", chatty)
        assert __main__.main(["calibrate"]) == 0
        out, errors = capfd.readouterr()
        assert json.loads(out) == json.loads(tiny.to_json()) and "[Gloo] Rank 0" in errors

    def test_figures_are_not_lost_with_a_disk_that_is_full_in_the_end(
        self,
        tiny: Calibration,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("overlap.calibrate_command.calibrate", lambda **_: tiny)
        monkeypatch.setattr(Calibration, "write", full)
        out_file = tmp_path / "out.json"
        assert __main__.main(["calibrate", "--out", str(out_file)]) == 2
        out, errors = capsys.readouterr()
        assert json.loads(out[out.index("{") :]) == json.loads(tiny.to_json())
        assert f"{out_file} cannot be written (No space left on device): what would stand" in errors

    def test_noisy_times_come_with_a_warning(
        self, tiny: Calibration, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for spread, warned in ((0.5, True), (0.01, False)):
            one = dataclasses.replace(tiny, spread=(("matmul", spread),))
            monkeypatch.setattr("overlap.calibrate_command.calibrate", lambda one=one, **_: one)
            assert __main__.main(["calibrate"]) == 0
            assert ("Warning" in capsys.readouterr().err) is warned

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--mesh", "2y4"], "no shape of a mesh"),
            (["--mesh", "3x3"], "9 devices, and 8 are attached"),
            (["--process", "1"], "belong together"),
            ([*NAMED, "--process", "5"], "--process 5 is none of --processes 2, which count from 0"),
            ([*NAMED, "--process", "-1"], "--process -1 is none of --processes 2"),
            (["--coordinator", "here", *NAMED[2:], "--process", "0"], "--coordinator here is no HOST:PORT"),
            (["--out", ""], "--out names no file"),
        ],
    )
    def test_options_of_no_use_give_a_sentence(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert __main__.main(["calibrate", *arguments]) == 2
        out, errors = capsys.readouterr()
        assert out == "" and errors.startswith("overlap calibrate: ") and message in errors

    def test_a_job_that_jax_does_not_find_is_to_be_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def alone() -> None:
            raise ValueError("coordinator_address should be defined.")

        monkeypatch.setattr(jax.distributed, "initialize", alone)
        monkeypatch.setattr(jax.config, "update", lambda *_: None)
        assert __main__.main(["calibrate", "--distributed"]) == 2
        assert capsys.readouterr().err == (
            "overlap calibrate: --distributed: JAX does not find the other processes by itself "
            "(coordinator_address should be defined): name them with --coordinator, --processes and "
            "--process\n"
        )

    def test_a_file_that_cannot_be_written_gives_a_sentence_before_it_measures(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.setattr("overlap.calibrate_command.calibrate", lambda **_: pytest.fail("it measured"))
        assert __main__.main(["calibrate", "--out", "mine.txt"]) == 2
        assert "whose names end in .json, not --out mine.txt" in capsys.readouterr().err
        assert __main__.main(["calibrate", "--out", str(tmp_path / "no" / "where.JSON")]) == 2
        assert "cannot be written (No such file or directory)" in capsys.readouterr().err
