"""``python -m overlap`` and what it prints to: a pipe that nobody reads, an encoding that lacks a sign."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overlap import __main__

ROOT = Path(__file__).resolve().parent.parent.parent
PLAN = ["plan", "--pattern", "all_gather_dot", "--shape", "8192,8192,2048"]
ON_V5P = ["--hardware", "tpu_v5p", "--axis-size", "16"]


def run(stdout: Any, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-m", "overlap", *(arguments or (*PLAN, *ON_V5P))]
    return subprocess.run(command, env=variables, stdout=stdout, stderr=subprocess.PIPE, check=False)


def test_a_closed_pipe_ends_it_quietly() -> None:
    """As ``| head`` closes it."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = run(writes)
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_encoding_without_a_sign_gets_a_question_mark() -> None:
    done = run(subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?s" in done.stdout  # µs


def test_so_does_the_help() -> None:
    done = run(subprocess.PIPE, "plan", "--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"[M,K]?[K,N]" in done.stdout


def test_without_an_output_it_runs_all_the_same() -> None:
    """As after ``>&-``."""
    code = "import runpy, sys; sys.stdout = None; runpy.run_module('overlap', run_name='__main__')"
    command = [sys.executable, "-c", code, *PLAN, *ON_V5P]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=variables, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_gives_a_sentence() -> None:
    with open("/dev/full", "wb") as full:
        done = run(full)
    assert done.returncode == 2
    assert done.stderr == b"overlap: the output cannot be written: No space left on device\n"


def test_an_unknown_command_is_told_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["compile"])
    said = capsys.readouterr().err
    assert all(name in said for name in ("demo", "ab", "inspect", "calibrate", "plan", "split"))
    assert "tpu" not in said
