"""An independent reference: one NumPy function per device, collectives on lists of float64 arrays."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import overlap
from overlap import Report
from passes.candidates import candidates
from passes.schedule import RingSchedule

Shards = list[Any]


def all_gather(shards: Shards, dim: int, *, tiled: bool = True) -> Shards:
    """What every device holds after an all_gather."""
    gathered = np.concatenate(shards, dim) if tiled else np.stack(shards, dim)
    return [gathered] * len(shards)


def psum_scatter(shards: Shards, dim: int, *, tiled: bool = True) -> Shards:
    """What every device holds after a reduce_scatter."""
    total = sum(shards[1:], start=shards[0])
    if tiled:
        return list(np.split(total, len(shards), dim))
    return [np.take(total, i, dim) for i in range(len(shards))]


def psum(shards: Shards) -> Shards:
    """What every device holds after a psum."""
    return [sum(shards[1:], start=shards[0])] * len(shards)


def mesh_of(axis_size: int) -> Mesh:
    """A mesh of one axis ``x``."""
    return jax.make_mesh((axis_size,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:axis_size])


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a body gave, with and without the pass: arrays of shape [devices, ...]."""

    original: Any
    rewritten: Any
    report: Report
    overlapped: Any
    jitted: Any


def run_both(
    body: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    check_vma: bool = True,
    policy: Any = "always",
    hardware: Any = "tpu_v5p",
) -> Outcome:
    """Runs a per-device body on stacked shards (leading dim: device), as it is and rewritten."""
    axis_size = len(arguments[0])
    spec = PartitionSpec("x")

    def shard_body(*stacked: Any) -> Any:
        out = body(*(a[0] for a in stacked))
        return jax.tree.map(lambda o: o[None], out)

    jitted = jax.jit(
        jax.shard_map(
            shard_body,
            mesh=mesh_of(axis_size),
            in_specs=(spec,) * len(arguments),
            out_specs=spec,
            check_vma=check_vma,
        )
    )
    overlapped = overlap.overlap_collectives(jitted, policy=policy, strict=True, hardware=hardware)
    return Outcome(
        jitted(*arguments), overlapped(*arguments), overlapped.explain(*arguments), overlapped, jitted
    )


@contextlib.contextmanager
def only_directions(directions: int) -> Iterator[None]:
    """Takes only schedules of so many directions, where the chain allows it."""

    def only(*args: Any, **kwargs: Any) -> tuple[RingSchedule, ...]:
        all_of_them = candidates(*args, **kwargs)
        return tuple(s for s in all_of_them if s.directions == directions) or all_of_them

    with mock.patch("passes.prices.candidates", only):
        yield


@contextlib.contextmanager
def only_schedule(*schedules: RingSchedule) -> Iterator[None]:
    """Takes one of these schedules for every chain, whatever it is."""
    with (
        mock.patch("passes.prices.candidates", lambda *_, **__: schedules),
        mock.patch("passes.prices.as_run", lambda flow, chain, schedule: schedule),
    ):
        yield


def tolerance(dtype: Any) -> float:
    """Relative error that rounding in a dtype allows for sums of a few dozen terms."""
    return {"float64": 1e-12, "float32": 2e-5}.get(np.dtype(dtype).name, 0.0)


def assert_as_good(outcome: Outcome, reference: Shards) -> None:
    """The result is the reference within rounding; for narrow floats, within 1.1 x the original's error."""
    exact = np.stack([np.asarray(r, np.float64) for r in reference])
    original, rewritten = (np.asarray(a).astype(np.float64) for a in (outcome.original, outcome.rewritten))
    assert outcome.rewritten.dtype == outcome.original.dtype
    assert rewritten.shape == exact.shape
    if outcome.original.dtype.itemsize >= 4 or outcome.original.dtype.kind in "iu":
        allowed = tolerance(outcome.original.dtype) * max(1.0, np.abs(exact).max())
        np.testing.assert_allclose(rewritten, exact, rtol=0, atol=allowed)
    else:
        # Arrays here are small, so the original may be exact by luck: half a last unit is allowed.
        error, allowed = (np.sqrt(np.mean((a - exact) ** 2)) for a in (rewritten, original))
        half_unit = float(jnp.finfo(outcome.original.dtype).eps) / 2 * np.abs(exact).max()
        assert error <= max(1.1 * allowed, half_unit)
