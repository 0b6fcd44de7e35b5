"""Chains to be tried, and a stand-in for the compiler that tells given times."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import passes
from cost_model import Hardware, by_name
from overlap.trial_times import Timed
from overlap.trials import Trials
from overlap.verify import Modelled
from passes import Excerpt, RingSchedule
from tests.overlap.mlp import mesh_of

P = PartitionSpec

SCHEDULES = (
    RingSchedule(directions=1),
    RingSchedule(directions=2),
    RingSchedule(directions=2, joined=True),
)
"""What is tried of a chain here, whatever the cost model would propose."""


UNTOLD = dataclasses.replace(by_name("tpu_v5p"), device_kinds=())
"""A hardware whose rings are worth pricing, and whose schedules any devices' compiler may tell."""


def hardware_of(kind: str | None) -> Hardware:
    return UNTOLD


def gather(x: Any, w: Any) -> Any:
    """What one device does: a chain of one dot."""
    return lax.all_gather(x, "x", axis=0, tiled=True) @ w


def mapped(body: Callable[..., Any], mesh: Any) -> Any:
    """The body of one device as a jitted function."""
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P(None, "x")))


def chain(
    body: Callable[..., Any] = gather, *, mesh: Any = None, rows: int = 32, differentiable: bool = False
) -> tuple[Excerpt[RingSchedule], tuple[RingSchedule, ...]]:
    """The first chain of a function of x[rows, 16] and w[16, 24], as a trial gets it, and schedules."""
    found: list[Excerpt[RingSchedule]] = []
    function = mapped(body, mesh_of() if mesh is None else mesh)
    jaxpr = function.trace(
        jax.ShapeDtypeStruct((rows, 16), jnp.float32), jax.ShapeDtypeStruct((16, 24), jnp.float32)
    ).jaxpr
    passes.make_plan(
        jaxpr,
        "verify",
        hardware_of,
        differentiable=differentiable,
        try_out=lambda program, _: found.append(program),
    )
    return found[0], SCHEDULES


class Compiler:
    """Stands in for ``verify.modelled``: tells the original's time, then those of its rings, for every chain.

    Args:
      original_us: microseconds of the chain as written.
      rings_us: of its rings, in order; an exception is raised; the last is repeated.
      limit_us: the limit that no ring beats.
      bytes_of: temporary bytes of the original and of each ring; the last is repeated.
    """

    def __init__(
        self,
        original_us: float | Exception,
        rings_us: Sequence[float | Exception],
        *,
        limit_us: float = 0.001,
        bytes_of: Sequence[int | None] = (0,),
    ) -> None:
        self.times_us = [original_us, *rings_us]
        self.limit_us = limit_us
        self.bytes_of = bytes_of
        self.compiled = 0
        self.originals = 0
        self._next = 0

    def __call__(self, program: Any, arguments: Any, target: Any) -> Modelled:
        self.compiled += 1
        if "ppermute" not in str(program.trace(*arguments).jaxpr):
            self._next = 0
            self.originals += 1
        us = self.times_us[min(self._next, len(self.times_us) - 1)]
        size = self.bytes_of[min(self._next, len(self.bytes_of) - 1)]
        self._next += 1
        if isinstance(us, Exception):
            raise us
        return Modelled(Timed(us / 1e6, size), self.limit_us / 1e6)


def trials(policy: Any = "verify", **options: Any) -> Trials:
    """Trials for the hardware above."""
    return Trials(policy, hardware_of, **options)
