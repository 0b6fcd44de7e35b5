"""Compiling for TPUs without one: the real TPU compiler, and the environment in which it runs anywhere."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Mapping
from typing import Any, Final

ENVIRONMENT: Final[Mapping[str, str]] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
"""Environment of a process that compiles for TPUs; to be set before it imports JAX.

Keeps libtpu from looking for a TPU and for a cloud's metadata server, and quiet, and lets several processes
compile at once (otherwise all but one may fail on libtpu's lock file). The accelerator type need not be the
one that is compiled for.
"""


def missing() -> str | None:
    """Why there is no TPU compiler here, or None if there is one."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine.lower() not in ("x86_64", "amd64"):
        return f"the TPU compiler runs on x86-64 Linux only, and this is {machine} {system}"
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed; it comes with pip install 'overlap-collectives[tpu]'"
    return None


def devices(topology: str) -> list[Any]:
    """The devices of a TPU slice such as ``"v5p:2x2x4"``, to compile for and not to run on.

    The process must have been started with ``ENVIRONMENT``.
    """
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
