"""What trials compile for: the devices of a chain's mesh, and everything else that a result depends on."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import cost_model
import passes
from cost_model import Hardware
from passes import Excerpt

COMPILERS: Final = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-rocm7-plugin",
    "jax-rocm7-pjrt",
)
"""Distributions whose versions decide what is compiled."""

FLAGS: Final = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables that compilers read."""

COMPILE_ONLY: Final = "compile_only_runtime"
"""What the client of devices that are not there says of itself."""


@dataclass(frozen=True, slots=True)
class Target:
    """The devices that a chain is compiled for.

    Attributes:
      mesh: the chain's mesh.
      hardware: what the devices are.
      compiler_options: those of the user's ``jax.jit``.
    """

    mesh: Any
    hardware: Hardware
    compiler_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def devices(self) -> list[Any]:
        """The devices by partition: in the order of the flattened mesh."""
        return list(self.mesh.devices.flat)

    @property
    def attached(self) -> bool:
        """Whether programs can run on the devices, and not only be compiled for them."""
        return all(device.client.runtime_type != COMPILE_ONLY for device in self.devices)

    @property
    def processes(self) -> frozenset[int]:
        """The processes whose devices they are."""
        return frozenset(device.process_index for device in self.devices)

    def description(self) -> dict[str, Any]:
        """All that decides what a program is compiled to and how long that takes, as JSON values."""
        devices = self.devices
        return {
            "device_kind": devices[0].device_kind,
            "mesh_shape": list(self.mesh.devices.shape),
            "places": [_place(device) for device in devices],
            "hardware": json.loads(self.hardware.to_json()),
            "compiler": devices[0].client.platform_version,
            "versions": {name: version for name in COMPILERS if (version := _version(name))},
            "compiler_options": {name: repr(value) for name, value in sorted(self.compiler_options.items())},
            "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
        }


def _place(device: Any) -> list[Any]:
    """Where a device is, as far as the cost model asks."""
    coords = getattr(device, "coords", None)
    return [
        getattr(device, "slice_index", None) or 0,
        device.process_index,
        None if coords is None else list(coords),
        getattr(device, "core_on_chip", None) or 0,
    ]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def key(
    policy: str,
    jaxpr: Any,
    program: Excerpt[Any],
    choices: Sequence[object],
    description: Mapping[str, Any],
) -> str:
    """A name for a trial; equal where the result must be equal, in any process.

    Args:
      policy: how the trial takes its times.
      jaxpr: of the chain as written; where it stands in the user's code makes no difference.
      program: the chain.
      choices: the rings to try.
      description: of the target.
    """
    facts = {
        "policy": policy,
        "chain": _without_addresses(jaxpr.pretty_print(use_color=False)),
        "arguments": [[a.shape, str(a.dtype), str(a.sharding)] for a in program.arguments],
        "schedules": [repr(choice) for choice in choices],
        "compared": program.compared,
        "emitted": program.emitted,
        "target": description,
        "emission": emission(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _without_addresses(text: str) -> str:
    """The text of a jaxpr without the addresses of functions among its parameters."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


@functools.cache
def emission() -> str:
    """The version of the code that emits rings and times them: a digest of its sources, and of its tables.

    A number to be raised by hand would be forgotten, and old results then taken for those of new rings.
    """
    digest = hashlib.sha256()
    packages = [Path(package.__file__ or "").parent for package in (cost_model, passes)]
    folders = [*packages, Path(__file__).parent / "hlo"]
    names = ("verify.py", "autotune.py", "speedup.py", "compiled_memory.py", "meeting.py", "trial_times.py")
    own = [Path(__file__).with_name(name) for name in names]
    tables = sorted((packages[0] / "tables").glob("*.json"))
    for path in [*(path for folder in folders for path in sorted(folder.glob("*.py"))), *tables, *own]:
        digest.update(f"{path.parent.name}/{path.name}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
