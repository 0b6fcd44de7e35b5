"""The line of the user's code that an equation comes from, and the mesh of the context."""

from __future__ import annotations

import os
import re
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import passes
from passes import shims

CHECKOUT = Path(passes.__file__).parent.parent
JAX = Path(jax.__file__).parent
STANDARD = Path(sysconfig.get_paths()["stdlib"])


def line_of_code_in(path: Path) -> str:
    scope: dict[str, Any] = {}
    exec(compile("def user(x):\n    return x + 1", str(path), "exec"), scope)
    (equation,) = jax.make_jaxpr(scope["user"])(1.0).eqns
    return shims.source_line(equation)


@pytest.mark.parametrize(
    "path",
    [
        Path("/home/me/train.py"),
        CHECKOUT / "overlap_train.py",
        CHECKOUT / "passes_of_mine" / "train.py",
        JAX.parent / "jaxtyping" / "train.py",
        STANDARD / "site-packages" / "model" / "layers.py",
        STANDARD / "dist-packages" / "model" / "layers.py",
        STANDARD.with_name(STANDARD.name + "_of_mine") / "train.py",
    ],
    ids=str,
)
def test_lines_of_users_are_told(path: Path) -> None:
    assert line_of_code_in(path) == f"{path}:2 (user)"


@pytest.mark.parametrize(
    "path", [CHECKOUT / "passes" / "x.py", JAX / "x.py", STANDARD / "functools.py"], ids=str
)
def test_frames_of_jax_of_the_standard_library_and_our_own_are_passed_over(path: Path) -> None:
    assert line_of_code_in(path) == shims.UNKNOWN


def test_a_mesh_that_tells_its_shape_only_is_the_context_s_of_that_shape() -> None:
    devices = np.array(jax.devices()[:4])
    mesh, square = Mesh(devices, ("x",)), Mesh(devices.reshape(2, 2), ("x", "y"))
    assert shims.concrete_mesh(mesh) is mesh
    assert shims.concrete_mesh(mesh.abstract_mesh) is None
    with jax.set_mesh(mesh):
        assert shims.concrete_mesh(mesh.abstract_mesh) is mesh
        assert shims.concrete_mesh(square) is square
        assert shims.concrete_mesh(square.abstract_mesh) is None
        seen: list[Any] = []
        jax.jit(lambda: seen.append(shims.context_mesh())).trace()
        assert seen == [mesh]
    assert shims.context_mesh() is None


def test_a_jax_that_is_too_old_is_refused_with_what_to_do() -> None:
    for version in ((0, 10, 2), (0, 10, 2, 1), (0, 11, 0), (1, 0, 0), jax.__version_info__):
        shims.require_jax(version)
    for version in ((0, 10, 1), (0, 9, 99)):
        with pytest.raises(ImportError, match=r"needs jax 0\.10\.2 or newer.*--upgrade 'jax>=0\.10\.2'"):
            shims.require_jax(version)


def test_what_may_be_installed_is_what_is_taken() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["tpu"]]
    oldest = [found[1] for each in asked if (found := re.match(r"jax(?:\[tpu\])?>=([\d.]+)", each))]
    assert oldest == [".".join(map(str, shims.OLDEST_JAX))] * 2


@pytest.mark.parametrize("name", [shims.__file__, jax.__file__, os.__file__, "<frozen runpy>"])
def test_what_is_no_line_of_the_users(name: str) -> None:
    assert not shims.is_users(name)
    assert shims.is_users(__file__) and shims.is_users("<stdin>")
