"""Sets the process up before JAX starts: eight virtual CPU devices, a quiet libtpu, hypothesis."""

import itertools
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

DEVICES: Final = 8

UNOPTIMIZED: Final = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""XLA's own passes are as ever; LLVM makes code of their outcome in two thirds of the time, and of a small
program in one piece in a tenth less."""

PATIENT: Final = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
"""A machine may stand still for a while: after 40 s in a collective XLA would end the process."""

_DEVICE_FLAG: Final = "--xla_force_host_platform_device_count"
_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_FLAG)]

# Read from the file: importing the package would start JAX before this is set.
_TPU: Final = runpy.run_path(str(Path(__file__).parent.parent / "overlap" / "tpu_target.py"))

ENVIRONMENT: Final = {
    **_TPU["ENVIRONMENT"],
    # Trials of one run must not decide the next.
    "OVERLAP_CACHE_DIR": "",
    "XLA_FLAGS": " ".join([UNOPTIMIZED, PATIENT, *_flags, f"{_DEVICE_FLAG}={DEVICES}"]),
}

if "jax" in sys.modules:
    _other = [name for name, value in ENVIRONMENT.items() if os.environ.get(name) != value]
    if _other:
        raise pytest.UsageError(
            f"jax was imported before tests/conftest.py could set {', '.join(_other)}: a pytest plugin does "
            "that (see `pytest --trace-config`); run the tests with `make test`"
        )
os.environ.update(ENVIRONMENT)

# Every example may compile a program, so examples are few and none has a deadline.
settings.register_profile(
    "overlap",
    deadline=None,
    max_examples=25,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# In CI, which has an hour for all pairs of Python and jax, they are fewer still, and the same each time.
settings.register_profile("overlap-ci", settings.get_profile("overlap"), derandomize=True, max_examples=10)
settings.load_profile("overlap-ci" if os.environ.get("CI") else "overlap")


def pytest_report_header() -> str:
    """Which jax and which TPU compiler the tests run with."""
    from importlib import metadata

    def version(distribution: str) -> str:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return "not installed"

    return ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "libtpu", "numpy"))


def pytest_sessionstart() -> None:
    """Refuses to test on other devices than those asked for (an early plugin may have started JAX)."""
    import jax

    if jax.default_backend() != "cpu" or jax.device_count() != DEVICES:
        raise pytest.UsageError(f"the tests need {DEVICES} virtual CPU devices, JAX shows {jax.devices()}")


MOST_TESTS: Final = 100
"""Tests after which compiled programs are forgotten, be it within a module."""

_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _compiled_programs_are_let_go() -> Iterator[None]:
    """Forgets compiled programs now and then.

    Each maps memory, and a process that has mapped too often (``vm.max_map_count``) crashes in the compiler:
    so did one that ran all tests of ``passes`` and ``programs``. Those of the largest module alone map half
    as often as is usually allowed.
    """
    yield
    if next(_tests) % MOST_TESTS == 0 and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
