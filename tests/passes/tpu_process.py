"""Compiling for TPUs in a process of its own, which sees CPUs only, and what is in what it makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from overlap import tpu_target
from overlap.hlo import Module

ROOT = Path(__file__).resolve().parents[2]


def told_by(script: str, *arguments: str) -> Any:
    """What a script prints as its last line, which is JSON."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **tpu_target.ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def multiplies(module: Module, name: str) -> bool:
    """Whether a computation multiplies matrices."""
    computation = module.computation(name)
    return any(
        i.opcode in ("convolution", "dot") or any(multiplies(module, inner) for inner in i.calls)
        for i in computation.instructions
    )
