"""``python -m overlap inspect``: tables, JSON, page and trace of compiled programs, and errors for people."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec
from rich.cells import cell_len

from cost_model import by_name
from overlap import __main__, overlap_collectives
from tests.overlap.calibrations import calibration
from tests.overlap.documented import undocumented

ROOT = Path(__file__).resolve().parents[2]
DEVICES = 4
SHAPE = (1024, 1024)


@cache
def texts() -> tuple[str, str]:
    """An all-gather that feeds a dot, as compiled for CPUs: as it is, and as a ring."""
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    rows, columns = PartitionSpec("x"), PartitionSpec(None, "x")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(rows, columns), out_specs=columns)
    def gather(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, "x", tiled=True) @ w

    ring = overlap_collectives(gather, policy="always", strict=True)
    arguments = [jax.ShapeDtypeStruct(SHAPE, jnp.float32)] * 2
    return compiled(gather, *arguments), compiled(ring, *arguments)


def compiled(function: Any, *arguments: Any) -> str:
    """The text of a jitted function as compiled."""
    return str(function.lower(*arguments).compile().as_text())


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The two texts as files."""
    paths = [tmp_path / "before.hlo", tmp_path / "after.hlo"]
    for path, text in zip(paths, texts(), strict=True):
        path.write_text(text)
    return [str(path) for path in paths]


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints, when all is well."""
    status = __main__.main(["inspect", *arguments])
    out, errors = capsys.readouterr()
    assert status == 0, errors
    return out


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says on stderr when it fails."""
    assert __main__.main(["inspect", *arguments]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith("overlap inspect: ")
    assert "Traceback" not in errors
    return errors


class TestTables:
    def test_lists_the_collectives_with_source_lines_totals_and_hints(
        self, files: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = inspect(capsys, files[0])
        # Each device gets what the others hold of the gathered array.
        sent = SHAPE[0] * SHAPE[1] * 4 * (DEVICES - 1) // DEVICES
        assert f"{sent / 2**20:.2f} MiB" in out
        assert f"{Path(__file__).name}:" in out
        assert "1: feeds a dot: could be decomposed into a ring" in " ".join(out.split())
        assert "exposed communication" in out
        assert "modelled" in out.splitlines()[0]

    def test_compares_two_files_as_before_and_after(
        self, files: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = inspect(capsys, *files)
        assert "before (jit_gather):" in out
        assert "after (jit_gather):" in out
        assert "before → after, modelled:" in out
        rows = [line for line in out.splitlines() if " collective-permute " in line]
        assert len(rows) == DEVICES, "a hop less than devices, the last one in halves"

    def test_fits_80_columns_without_colours_in_a_pipe(self, files: list[str]) -> None:
        command = [sys.executable, "-m", "overlap", "inspect", *files]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert max(map(cell_len, done.stdout.splitlines())) <= 80
        assert "\x1b" not in done.stdout
        assert not [line for line in done.stdout.splitlines() if line != line.rstrip()]

    def test_a_reader_who_stops_early_causes_no_traceback(self, files: list[str]) -> None:
        inspect = f'"{sys.executable}" -m overlap inspect {" ".join(files * 40)}'
        command = f"( {inspect}; echo $? >&2 ) | head -1"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(
            command, shell=True, capture_output=True, encoding="utf-8", timeout=100, env=environment
        )
        assert done.stderr == f"{__main__.CLOSED}\n"
        assert len(done.stdout.splitlines()) == 1

    def test_a_directory_tells_how_many_modules_have_no_collectives(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        quiet = compiled(jax.jit(jnp.sin), 1.0)
        for name, text in (("f", texts()[0]), ("g", quiet), ("h", quiet)):
            (tmp_path / f"module_0000.jit_{name}.cpu_after_optimizations.txt").write_text(text)
        out = inspect(capsys, str(tmp_path))
        assert "2 more modules have no collectives." in out

    def test_a_program_without_collectives_says_so(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "f.hlo").write_text(compiled(jax.jit(jnp.sin), 1.0))
        assert "No collectives in this program." in inspect(capsys, str(tmp_path / "f.hlo"))

    def test_lists_the_most_exposed_and_all_if_asked(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
        def hops(x: jax.Array) -> jax.Array:
            for _ in range(25):
                x = jnp.sin(jax.lax.ppermute(x, "x", [(i, (i + 1) % DEVICES) for i in range(DEVICES)]))
            return x

        path = tmp_path / "hops.hlo"
        path.write_text(compiled(hops, jnp.ones(8)))
        out = inspect(capsys, str(path))
        assert out.count(" collective-permute ") == 20
        assert "… and 5 more" in out
        assert inspect(capsys, str(path), "--all").count(" collective-permute ") == 25


class TestFiles:
    def test_json_has_the_documented_fields(
        self, files: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        told = json.loads(inspect(capsys, "--json", *files))
        assert undocumented(told, "inspect.md", "## The JSON") == set()
        (inspection,) = told["inspections"]
        before, after = inspection["programs"]
        assert (before["label"], after["label"]) == ("before", "after")
        assert before["total_s"] == pytest.approx(
            before["compute_s"] + before["exposed_s"] + before["copy_wait_s"]
        )
        assert sum(c["bytes_on_wire"] for c in before["collectives"]) == 3 * 2**20
        assert sum(c["executions"] for c in after["collectives"]) == DEVICES

    def test_writes_page_and_trace(
        self, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        page, trace = tmp_path / "page.html", tmp_path / "trace.json"
        out = inspect(capsys, *files, "--html", str(page), "--trace", str(trace))
        assert f"Wrote {page}\nWrote {trace}\n" in out
        assert page.read_text("utf-8").startswith("<!doctype html>")
        assert {e["ph"] for e in json.loads(trace.read_text())["traceEvents"]} == {"M", "X"}

    def test_json_is_all_there_is_on_stdout(
        self, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        json.loads(inspect(capsys, *files, "--json", "--trace", str(tmp_path / "trace.json")))

    def test_what_cannot_be_written(
        self, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said = complaint(capsys, files[0], "--html", str(tmp_path / "no" / "page.html"))
        assert "cannot be written (No such file or directory)" in said
        assert "--html names no file" in complaint(capsys, files[0], "--html", "")

    def test_two_outputs_to_one_file_are_refused_before_anything_is_read(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        one = str(tmp_path / "one")
        (tmp_path / "link").symlink_to(one)
        for other in (one, str(tmp_path / "link")):
            said = complaint(capsys, "/no/dump", "--html", one, "--trace", other)
            assert "--html and --trace name one file" in said
        assert not (tmp_path / "one").exists()

    @pytest.mark.parametrize("option", ["--html", "--trace"])
    def test_what_is_read_is_not_written_over(
        self, option: str, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "link").symlink_to(files[0])
        text = Path(files[0]).read_bytes()
        for named in (files[0], str(tmp_path / "link")):
            said = complaint(capsys, files[0], option, named)
            assert f"{option} names {named}, which is read: name another file" in said
        calibration = str(tmp_path / "mine.json")
        assert "which is read" in complaint(capsys, files[0], "--hardware", calibration, option, calibration)
        assert Path(files[0]).read_bytes() == text

    def test_two_outputs_to_nowhere_lose_nothing(
        self, files: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        inspect(capsys, files[0], "--html", os.devnull, "--trace", os.devnull)


class TestOptions:
    def test_an_empty_path_is_not_the_current_directory(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            __main__.main(["inspect", ""])
        assert ended.value.code == 2
        assert "is empty: name HLO text, or a dump directory" in capsys.readouterr().err

    def test_hardware_and_topology_are_told(
        self, files: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = inspect(capsys, files[0], "--topology", "v5p:2x2x1")
        assert "tpu_v5p" in out.splitlines()[0]
        assert "as jax.make_mesh lays it" in " ".join(out.split())

    def test_hardware_may_be_a_calibration_on_a_slice_too(
        self, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "mine.json"
        calibration(dataclasses.replace(by_name("tpu_v5p"), link_bytes_per_s=1e9)).write(path)
        for options in ([], ["--topology", "2x2x1"], ["--topology", "v5p:2x2x1"]):
            told = json.loads(inspect(capsys, files[0], "--json", "--hardware", str(path), *options))
            ((program,),) = (each["programs"] for each in told["inspections"])
            assert program["hardware"] == "tpu_v5p"
            assert " 1 GB/s each way" in " ".join(program["assumptions"])
        missing = tmp_path / "no.json"
        said = complaint(capsys, files[0], "--hardware", str(missing))
        assert said == (f"overlap inspect: {missing} cannot be read as hardware: No such file or directory\n")

    def test_a_text_of_no_such_compiler_is_told(
        self, files: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        for hardware in ("tpu_v5p", "h100", "cpu"):
            told = json.loads(inspect(capsys, files[0], "--json", "--hardware", hardware))
            first = told["inspections"][0]["programs"][0]["assumptions"][0]
            words = f"if it is XLA:CPU's, so is the schedule, at the rates of {hardware}."
            assert (words in first) == (hardware != "cpu")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--hardware", "mine"], "or a file that calibrate wrote, whose name ends in .json"),
            (["--hardware", "tpu_v99"], "unknown hardware 'tpu_v99'"),
            (["--topology", "4by4"], "'4by4' is no shape of a slice, such as 4x4x4"),
            (["--topology", "2x2"], "needs --hardware"),
            (["--topology", "v5p:2x2x1", "--hardware", "tpu_v4"], "is tpu_v5p, and --hardware says tpu_v4"),
            (["--topology", "v5p:2x2x4"], "is not where a program of 4 devices runs"),
            (["--topology", "2x2", "--hardware", "h100"], "h100 is no TPU"),
        ],
    )
    def test_options_that_make_no_sense(
        self, files: list[str], capsys: pytest.CaptureFixture[str], options: list[str], words: str
    ) -> None:
        assert words in complaint(capsys, files[0], *options)

    def test_a_path_that_is_not_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "/no/dump: there is no such file or directory." in complaint(capsys, "/no/dump")

    def test_a_truncated_file(self, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        path = Path(files[0])
        path.write_text(texts()[0][:-200])
        assert "before.hlo: line " in complaint(capsys, files[0])

    def test_an_element_type_that_is_none(self, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        path = Path(files[0])
        path.write_text(texts()[0].replace("f32[", "bf99["))
        said = complaint(capsys, files[0])
        assert "before.hlo: line " in said and "'bf99' is no HLO type" in said
