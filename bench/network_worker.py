"""One process of the network benchmark: does what it is told on stdin, and tells what it found.

Every process gets the same commands, a JSON object per line, and does the same. Replies go to stdout, one
line each, after ``TOLD``: other libraries print there, too. Times are taken in every process; a call begins
when all processes are ready for it.
"""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from bench.network_cases import AXIS, CASES, Sizes, jitted
from cost_model import Hardware
from overlap import overlap_collectives
from overlap.calibration import CPU_QUICK, calibrate
from overlap.meeting import meeting

TOLD: Final = "TOLD "

ALONE: Final = ("compute", "communication")
POLICIES: Final[Mapping[str, Any]] = {"auto": "auto", "autotune": "autotune", "always": "always"}
"""The variants that are this library's, and their policies."""

WARM_UPS: Final = 2
TIMEOUT_S: Final = 120


class Worker:
    """What one process keeps between commands."""

    def __init__(self, devices: int) -> None:
        self.mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
        self.meet = meeting(self.mesh)
        self.meet()

    def value(self, shape: tuple[int, ...], spec: Any, seed: int) -> Any:
        """An array of values of both signs; the same as a whole, however it is sharded."""
        sharding = jax.NamedSharding(self.mesh, spec)
        drawn = np.random.default_rng(seed).standard_normal(shape, np.float32) / np.sqrt(shape[-1])
        return jax.make_array_from_callback(shape, sharding, lambda index: drawn[index])

    def race(self, runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
        """Seconds of each run, in turn: A B C …, and backwards every other round."""
        for run in runs.values():
            for _ in range(WARM_UPS):
                jax.block_until_ready(run())
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(rounds):
            for name in list(runs) if turn % 2 else reversed(list(runs)):
                self.meet()
                start = time.perf_counter()
                jax.block_until_ready(runs[name]())
                times[name].append(time.perf_counter() - start)
        return times

    def calibrate(self, matmuls: Sequence[Sequence[int]], hops: Sequence[int], rounds: int) -> dict[str, Any]:
        """The hardware as measured, and how well that went."""
        effort = dataclasses.replace(
            CPU_QUICK,
            rounds=rounds,
            matmuls=tuple((m, k, n) for m, k, n in matmuls),
            copies=(2**22, 2**23, 2**24),
            hops=tuple(hops),
        )
        found = calibrate(effort=effort)
        return {
            "hardware": json.loads(found.hardware.to_json()),
            "overlaps": found.hardware.overlaps,
            "spread": dict(found.spread),
            "error": dict(found.error),
        }

    def hops(self, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
        """Times of one hop of so many bytes, by size."""
        devices = self.mesh.size
        pairs = [(i, (i + 1) % devices) for i in range(devices)]
        hop = jax.jit(
            jax.shard_map(
                lambda x: lax.ppermute(x, AXIS, pairs), mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS)
            )
        )
        values = {str(size): self.value((devices, size // 4), P(AXIS), 0) for size in sizes}
        return {"times_s": self.race({k: functools.partial(hop, v) for k, v in values.items()}, rounds)}

    def case(
        self,
        name: str,
        rows: int,
        inner: int,
        outer: int,
        variants: Sequence[str],
        hardware: Any,
        rounds: int,
    ) -> dict[str, Any]:
        """Races a case's variants; says how the library decided, and how far results are apart."""
        versions = CASES[name].versions(Sizes(rows, inner, outer), self.mesh.size)
        priced = None if hardware is None else Hardware.from_json(json.dumps(hardware))
        runs: dict[str, Callable[[], Any]] = {}
        sites: dict[str, Any] = {}
        for variant in variants:
            version = versions[variant if variant in versions else "original"]
            arguments = [self.value(o.shape, o.spec, number) for number, o in enumerate(version.operands)]
            function: Any = jitted(version, self.mesh, checked=variant == "original" or variant in POLICIES)
            if variant in POLICIES:
                function = overlap_collectives(
                    function, hardware=priced, policy=POLICIES[variant], strict=True
                )
                sites[variant] = json.loads(function.explain(*arguments).to_json())["sites"]
            runs[variant] = functools.partial(function, *arguments)
        apart = {
            variant: difference(runs["original"](), run())
            for variant, run in runs.items()
            if "original" in runs and variant not in (*ALONE, "original")
        }
        return {"times_s": self.race(runs, rounds), "sites": sites, "apart": apart}


def difference(wanted: Any, got: Any) -> float:
    """The largest difference of this process's shards, relative to the largest value."""
    worst = 0.0
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
            scale = float(jnp.max(jnp.abs(a.data))) or 1.0
            worst = max(worst, float(jnp.max(jnp.abs(a.data - b.data))) / scale)
    return worst


def tell(reply: Mapping[str, Any]) -> None:
    """Replies."""
    os.write(1, ("\n" + TOLD + json.dumps(reply) + "\n").encode())


def main(argv: Sequence[str]) -> int:
    """Joins the job and does as told, until stdin ends."""
    index, devices, coordinator = int(argv[0]), int(argv[1]), argv[2]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, devices, index, initialization_timeout=TIMEOUT_S)
    worker = Worker(devices)
    tell({"jax": jax.__version__})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            tell(getattr(worker, command.pop("do"))(**command))
        except Exception:
            tell({"failure": traceback.format_exc()})
    # The others may be gone already; jax would wait for them.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
