"""A module of the user's that has the name of a package of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from overlap.parts import PARTS

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("name", PARTS)
def test_a_module_of_the_same_name_is_named_and_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").touch()
    (tmp_path / "train.py").write_text(f"import sys; sys.path.append({str(ROOT)!r}); import overlap")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith(f"ImportError: overlap needs its own package `{name}` at {ROOT / name}, but ")
    assert f"finds {tmp_path / name}.py first: rename or move that module" in message


def test_a_folder_without_modules_is_in_nobodys_way(tmp_path: Path) -> None:
    for name in PARTS:
        (tmp_path / name).mkdir()
    (tmp_path / "train.py").write_text(f"import sys; sys.path.append({str(ROOT)!r}); import overlap")
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True)
