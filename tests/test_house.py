"""The house stands: three floors that import downwards only, one home for private jax, docstrings, types."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent

FLOORS: Final = ("cost_model", "passes", "overlap")
"""From the ground up: each imports those before it."""

OUTSIDE: Final = {
    "cost_model": frozenset({"numpy"}),
    "passes": frozenset({"jax", "networkx", "numpy"}),
    "overlap": frozenset(
        {"jax", "jinja2", "markupsafe", "matplotlib", "networkx", "numpy", "plotly", "rich"}
    ),
}
"""The libraries that each floor may import. The demo's program and optimiser come in from outside."""

DEMO: Final = frozenset({"bench", "optax"})
"""What the demo alone may import."""

TOP: Final = frozenset(
    {*FLOORS, "bench", "docs", "tests", "LICENSE", "Makefile", "README.md", "pyproject.toml"}
)
"""What stands at the top of the repository, beside files whose names begin with a dot."""

OF_ONE_PROCESS: Final = frozenset(
    {
        *("environ", "environb", "getenv", "getpid", "gethostname", "uname", "cpu_count"),
        *("time", "monotonic", "perf_counter", "process_time", "urandom", "uuid4"),
        *("process_index", "process_count", "local_devices", "local_device_count", "memory_stats"),
    }
)
"""What differs from one process of a job to another: decisions that read it would part, and the job hang."""

MODULES: Final = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
DECIDING: Final = [
    path for path in MODULES if path.relative_to(ROOT).parts[0] != "overlap" and path.stem != "calibration"
]
"""The modules that decisions come from; `calibration` also writes files."""

SOURCES: Final = sorted(
    [
        *MODULES,
        *(ROOT / "bench").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / ".ci").rglob("*.py"),
    ]
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function, under its full name."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(ast.literal_eval(arg)) for arg in node.args if isinstance(arg, ast.Constant))


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout: there is no list of what is tracked")
def test_nothing_else_stands_at_the_top() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = {path.split("/")[0] for path in tracked.stdout.split("\0") if path and path[0] != "."}
    assert names == TOP


def test_every_floor_was_looked_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_go_down_the_floors_only(path: Path) -> None:
    floor = path.relative_to(ROOT).parts[0]
    below = set(FLOORS[: FLOORS.index(floor) + 1])
    allowed = below | OUTSIDE[floor] | sys.stdlib_module_names
    if "demo" in path.relative_to(ROOT).as_posix():
        allowed |= DEMO
    assert {module.split(".")[0] for module in imported(path)} <= allowed


@pytest.mark.parametrize("path", [path for path in SOURCES if name(path) != "passes/shims.py"], ids=name)
def test_private_jax_is_reached_through_the_shims_only(path: Path) -> None:
    assert not [module for module in imported(path) if f"{module}.".startswith("jax._src.")]


@pytest.mark.parametrize("path", DECIDING, ids=name)
def test_decisions_read_nothing_that_another_process_may_see_otherwise(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    taken = {module.rsplit(".", 1)[-1] for module in imported(path)}
    taken |= {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert not OF_ONE_PROCESS & (read | taken)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_file_says_its_subject_in_one_sentence(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring, "no docstring"
    lines = docstring.splitlines()
    assert lines[0].endswith("."), "the docstring's first line is no sentence"
    assert lines[1:2] in ([], [""]), "a blank line follows the docstring's first"


@pytest.mark.parametrize("floor", FLOORS)
def test_a_package_is_typed(floor: str) -> None:
    assert (ROOT / floor / "py.typed").is_file()


@pytest.mark.parametrize("floor", FLOORS)
def test_the_names_that_a_package_offers_exist(floor: str) -> None:
    package = importlib.import_module(floor)
    assert package.__all__
    assert sorted(set(package.__all__)) == sorted(package.__all__)
    assert not [name for name in package.__all__ if not hasattr(package, name)]


def test_the_version_is_the_distribution_s() -> None:
    import tomllib

    import overlap

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert overlap.__version__ == project["version"]
