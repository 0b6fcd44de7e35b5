"""Finds the supported pairs of Python and jax on this machine, and makes a virtual environment for one.

    pairs.py first          the pair that `make test` runs
    pairs.py others         those that `make test-all` adds
    pairs.py python PAIR    sets the pair's environment up under .venv/ and prints its interpreter
    pairs.py gpu            the same with XLA's GPU compiler (no CUDA, no GPU), for the newest pair found

Needs the standard library only. The answer goes to stdout, what is going on to stderr. $PYTHON, where set, is
the interpreter of the first pair.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TextIO

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venv"

Version = tuple[int, int]
SUPPORTED: dict[Version, str] = {(3, 11): "jax==0.10.2", (3, 12): "jax"}
"""The pairs under test: a Python, and the jax to install on it. A bare `jax` is the newest."""

NEWEST = "jax"
"""For a Python newer than those under test, where it is the only one or was asked for."""

_NEWER = ("python3.13", "python3.14")

_PROBE = """
import ensurepip, sys, venv
assert sys.implementation.name == "cpython" and sys.version_info.releaselevel == "final"
print(sys.version_info[0], sys.version_info[1], sys.executable, sep="\\n")
"""


def main(arguments: list[str]) -> int:
    """Answers one command; the exit status."""
    if arguments == ["first"]:
        print(tag(first()))
    elif arguments == ["others"]:
        print("\n".join(tag(version) for version in others()))
    elif len(arguments) == 2 and arguments[0] == "python":
        print(environment(arguments[1]))
    elif arguments == ["gpu"]:
        print(environment(tag(max((first(), *others()))), gpu=True))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


def tag(version: Version) -> str:
    """`py311-jax0.10.2`, `py312-jax`."""
    return "py{}{}-{}".format(*version, SUPPORTED.get(version, NEWEST).replace("==", ""))


def first() -> Version:
    """The first supported Python found; without one, the oldest of the newer ones."""
    asked = os.environ.get("PYTHON")
    if asked:
        found = probe(asked)
        if found is None or found[0] < min(SUPPORTED):
            fail(f"PYTHON={asked} is no working CPython of {dotted(min(SUPPORTED))} or newer with venv")
        return found[0]
    newer: list[Version] = []
    for version, _ in interpreters():
        if version in SUPPORTED:
            return version
        newer.append(version)
    if not newer:
        fail(
            f"no CPython of {dotted(min(SUPPORTED))} or newer with venv and ensurepip was found "
            "(on Debian, install python3-venv); name one with PYTHON=..."
        )
    return min(newer)


def others() -> list[Version]:
    """The supported pairs found, without the first."""
    known = first()
    found = {version for version, _ in interpreters()} | {known}
    for version in SUPPORTED:
        if version not in found:
            say(f"no Python {dotted(version)} was found: {tag(version)} is not tested")
    return [version for version in SUPPORTED if version in found - {known}]


def environment(pair: str, *, gpu: bool = False) -> Path:
    """The interpreter of the pair's virtual environment, which is made or brought up to date first.

    Args:
      pair: its tag.
      gpu: the environment with XLA's GPU compiler, which is apart: jax would look for GPUs in every process.
    """
    name = f"{pair}-gpu" if gpu else pair
    folder = VENVS / name
    python = folder / "bin" / "python"
    stamp = folder / "ready"
    version = next((v for v in {*SUPPORTED, *(v for v, _ in interpreters())} if tag(v) == pair), None)
    if version is None:
        fail(f"no such pair here: {pair}")
    wanted = hashlib.sha256(
        "\0".join([str(ROOT), (ROOT / "pyproject.toml").read_text("utf-8"), name]).encode()
    ).hexdigest()
    with locked(VENVS / f"{name}.lock"):
        if stamp.is_file() and stamp.read_text() == wanted and probe(str(python)):
            return python
        stamp.unlink(missing_ok=True)
        say(f"setting up {folder.relative_to(ROOT)} (a few minutes the first time)")
        if not probe(str(python)):
            create(folder, version)
        log = folder / "pip.log"
        install(python, SUPPORTED.get(version, NEWEST), "[test]" if gpu else "[test,tpu]", log)
        if gpu:
            add_gpu_compiler(python, log)
        elif subprocess.run([str(python), "-c", "import libtpu"], capture_output=True).returncode != 0:
            say(
                "libtpu is not available on this machine: what needs the TPU compiler is skipped, and says so"
            )
        stamp.write_text(wanted)
    return python


def create(folder: Path, version: Version) -> None:
    """Makes a virtual environment with the first interpreter of that version that can."""
    said = ""
    for found, executable in interpreters():
        if found == version:
            command = [executable, "-m", "venv", "--clear", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode == 0:
                return
            said += f"{executable} -m venv: {done.stdout}{done.stderr}"
    fail(f"no Python {dotted(version)} that can make a virtual environment was found\n{said}")


def install(python: Path, jax: str, extras: str, log: Path) -> None:
    """Installs the project in place, with everything that the demo and the tests need."""
    with log.open("w") as out:
        pip(python, ["--upgrade", "-e", f"{ROOT}{extras}", jax], out)


def add_gpu_compiler(python: Path, log: Path) -> None:
    """Adds XLA's GPU compiler, of jax's version, without the CUDA libraries, which only running needs."""
    command = [str(python), "-c", "from importlib import metadata; print(metadata.version('jax'))"]
    jax = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    with log.open("a") as out:
        pip(python, ["--no-deps", *(f"jax-cuda12-{part}=={jax}" for part in ("plugin", "pjrt"))], out)


def pip(python: Path, arguments: list[str], out: TextIO) -> None:
    """Runs pip install."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = Path(out.name).read_text("utf-8").splitlines(keepends=True)
        fail("".join(said[-30:]) + f"pip failed; all it said is in {out.name}")


def interpreters() -> Iterator[tuple[Version, str]]:
    """Every CPython on this machine that is new enough and has venv, as it was found: PATH first."""
    seen: set[str] = set()
    for candidate in candidates():
        found = probe(candidate)
        if found is None or found[0] < min(SUPPORTED):
            continue
        version, executable = found
        if os.path.realpath(executable) not in seen:
            seen.add(os.path.realpath(executable))
            yield version, executable


def candidates() -> Iterator[str]:
    """Commands that may be a Python; shims that lead nowhere and broken installs among them."""
    if os.environ.get("PYTHON"):
        yield os.environ["PYTHON"]
    names = ["python3", "python", *(f"python{dotted(v)}" for v in SUPPORTED), *_NEWER]
    folders = [*os.get_exec_path(), "/usr/local/bin", "/usr/bin", "/opt/homebrew/bin"]
    for name in names:
        for folder in dict.fromkeys(folders):
            path = shutil.which(name, path=folder)
            if path:
                yield path
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    uv = os.path.expanduser("~/.local/share/uv/python")
    yield from sorted(glob.glob(f"{pyenv}/versions/*/bin/python3"))
    yield from sorted(glob.glob(f"{uv}/*/bin/python3"))


def probe(command: str) -> tuple[Version, str] | None:
    """The version and path of an interpreter; None if it does not run or lacks what venv needs."""
    try:
        done = subprocess.run(
            [command, "-c", _PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    major, minor, executable = done.stdout.split("\n")[:3]
    return (int(major), int(minor)), executable


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps a second run on the same tree waiting while the first sets an environment up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            import fcntl
        except ImportError:
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def dotted(version: Version) -> str:
    return "{}.{}".format(*version)


def say(line: str) -> None:
    print(f"overlap-collectives: {line}", file=sys.stderr, flush=True)


def fail(line: str) -> NoReturn:
    say(line)
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
