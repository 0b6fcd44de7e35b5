"""The guide's program prints what the guide says that it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import overlap

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "guide.md").read_text()


def block(language: str, start: str) -> str:
    """The block of the guide that starts so."""
    return next(b for b in re.findall(rf"```{language}\n(.*?)```", GUIDE, re.S) if b.startswith(start))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What ``python train.py`` prints, and the report of the same program with 256 rows."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "train.py").write_text(block("python", "import jax"))
    fewer = "import train; print(train.step.explain(*train.shapes(256)))"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    first, second = (
        subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            check=True,
        ).stdout
        for command in (("train.py",), ("-c", fewer))
    )
    return first, second


def test_the_report_is_what_the_program_prints(printed: tuple[str, str]) -> None:
    assert printed[0].split() == block("text", "   collective").split()


def test_the_site_that_is_kept_is_in_the_report_of_fewer_rows(printed: tuple[str, str]) -> None:
    assert " ".join(block("text", "1  all_gather_dot").split()) in " ".join(printed[1].split())


def test_the_collectives_of_the_compiled_program_are_those_that_inspect_lists() -> None:
    names: dict[str, Any] = {}
    exec(compile(block("python", "import jax"), str(ROOT / "train.py"), "exec"), names)
    found = str(overlap.inspect(names["step"].original, *names["shapes"](), hardware="tpu_v5p"))
    # Compute is as the version of XLA's CPU compiler has it.
    _, listed = block("text", "jit_step: ").split("in flight.\n")
    assert " ".join(listed.split()) in " ".join(found.split())
