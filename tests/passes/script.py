"""Scripts that are run in a process of their own, with an environment that counts before jax starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def told_by(text: str, *arguments: str, environment: Mapping[str, str]) -> Any:
    """What a script prints as its last line, which is JSON."""
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments],
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
