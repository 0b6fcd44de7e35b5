"""The programs of the network benchmark: each as written, as a textbook ring, and its two halves alone."""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

AXIS: Final = "x"
ITEM_BYTES: Final = 4
"""Everything is float32."""

INNER: Final = 2048
"""K, and the MLP's model width."""

OUTER: Final = 2048
"""N, and a device's part of the MLP's hidden width."""

ROWS_MULTIPLE: Final = 128
"""Rows are a multiple of this for every device, so that shards can be cut into pieces."""

Body = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Of the matmuls on one device: [rows, inner] · [inner, outer], after a gather or before a scatter."""

    rows: int
    inner: int = INNER
    outer: int = OUTER


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """An array: its shape as a whole, and how it is sharded."""

    shape: tuple[int, ...]
    spec: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """One way to run a case, or a part of it.

    Attributes:
      body: what one device does, with its shards.
      operands: its arguments.
      out_specs: how its results are sharded.
      gradient: whether the program is the loss (the sum of what the devices return) and its gradient.
    """

    body: Body
    operands: tuple[Operand, ...]
    out_specs: Any
    gradient: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A program of the benchmark.

    Attributes:
      title: what it is, in words.
      dots: its matmuls of [rows, inner] · [inner, outer] or as large, forward and backward.
      sends: how many times [rows, inner] or [rows, outer] is gathered or scattered.
      versions: gives ``original``, ``textbook``, ``compute`` and ``communication``, given the sizes and the
        number of devices.
    """

    title: str
    dots: int
    sends: int
    versions: Callable[[Sizes, int], Mapping[str, Version]]

    def flops(self, sizes: Sizes) -> float:
        """Of one device."""
        return 2.0 * self.dots * sizes.rows * sizes.inner * sizes.outer

    def sent_bytes(self, sizes: Sizes, devices: int) -> float:
        """What each device sends: every collective leaves out one of as many shards as there are devices."""
        width = max(sizes.inner, sizes.outer)
        return self.sends * sizes.rows * width * ITEM_BYTES * (devices - 1) / devices


def rows_for(case: Case, target_s: float, flops_per_s: float, devices: int) -> int:
    """The rows with which the case computes for about so long."""
    unit = ROWS_MULTIPLE * devices
    per_row = case.flops(Sizes(rows=1))
    return unit * max(1, round(target_s * flops_per_s / per_row / unit))


def rate_for(case: Case, sizes: Sizes, devices: int, compute_s: float, ratio: float) -> float:
    """The link rate, in bytes per second, at which communication takes ``ratio`` times as long as compute."""
    return case.sent_bytes(sizes, devices) / (ratio * compute_s)


def jitted(version: Version, mesh: Any, *, checked: bool) -> Any:
    """The version as a jitted function of whole arrays."""
    specs = tuple(operand.spec for operand in version.operands)
    mapped = jax.shard_map(
        version.body, mesh=mesh, in_specs=specs, out_specs=version.out_specs, check_vma=checked
    )
    if not version.gradient:
        return jax.jit(mapped)
    return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(mapped(*args)), argnums=tuple(range(len(specs)))))


# Textbook rings, as a user would write them by hand: one shard per hop, in a loop over the hops.


def _left(devices: int) -> list[tuple[int, int]]:
    return [(i, (i - 1) % devices) for i in range(devices)]


def ring_gather(shard: Any, devices: int, take_in: Callable[[Any, Any, Any], Any], result: Any) -> Any:
    """Sends shards round; ``take_in(result, shard, owner)`` is called for each."""
    here = lax.axis_index(AXIS)
    for step in range(devices):
        result = take_in(result, shard, (here + step) % devices)
        if step + 1 < devices:
            shard = lax.ppermute(shard, AXIS, _left(devices))
    return result


def ring_gather_dot(x: Any, w: Any, devices: int) -> Any:
    """Gather on rows, and the dot of the gathered."""
    rows = x.shape[0]

    def place(result: Any, shard: Any, owner: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(result, shard @ w, owner * rows, 0)

    return ring_gather(x, devices, place, jnp.zeros((rows * devices, w.shape[1]), x.dtype))


def ring_contract(x: Any, w: Any, devices: int) -> Any:
    """Gather on the contracting dim, and the dot of the gathered."""
    width = x.shape[1]

    def add(result: Any, shard: Any, owner: Any) -> Any:
        return result + shard @ lax.dynamic_slice_in_dim(w, owner * width, width, 0)

    return ring_gather(x, devices, add, jnp.zeros((x.shape[0], w.shape[1]), x.dtype))


def ring_scatter(x: Any, w: Any, devices: int) -> Any:
    """The dot, and the sums of its rows scattered."""
    here, rows = lax.axis_index(AXIS), x.shape[0] // devices
    total: Any = None
    for step in range(devices):
        block = lax.dynamic_slice_in_dim(x, ((here + devices - 1 - step) % devices) * rows, rows, 0) @ w
        total = block if total is None else lax.ppermute(total, AXIS, _right(devices)) + block
    return total


def _right(devices: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % devices) for i in range(devices)]


def ring_place(shard: Any, devices: int) -> Any:
    """A gather on rows, by hops."""
    rows = shard.shape[0]

    def place(result: Any, part: Any, owner: Any) -> Any:
        return lax.dynamic_update_slice_in_dim(result, part, owner * rows, 0)

    return ring_gather(shard, devices, place, jnp.zeros((rows * devices, *shard.shape[1:]), shard.dtype))


# The cases.


def gathered(x: Any, dim: int = 0) -> Any:
    """The shards of all devices."""
    return lax.all_gather(x, AXIS, axis=dim, tiled=True)


def scattered(y: Any) -> Any:
    """The sum over all devices, its rows scattered."""
    return lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True)


def _gather_free(sizes: Sizes, devices: int) -> dict[str, Version]:
    x = Operand((sizes.rows, sizes.inner), P(AXIS))
    w = Operand((sizes.inner, sizes.outer * devices), P(None, AXIS))
    out = P(None, AXIS)
    return {
        "original": Version(lambda x, w: gathered(x) @ w, (x, w), out),
        "textbook": Version(lambda x, w: ring_gather_dot(x, w, devices), (x, w), out),
        "compute": Version(lambda x, w: x @ w, (dataclasses.replace(x, spec=P()), w), out),
        "communication": Version(gathered, (x,), P()),
    }


def _gather_contracting(sizes: Sizes, devices: int) -> dict[str, Version]:
    x = Operand((sizes.rows, sizes.inner), P(None, AXIS))
    w = Operand((sizes.inner, sizes.outer * devices), P(None, AXIS))
    out = P(None, AXIS)
    return {
        "original": Version(lambda x, w: gathered(x, 1) @ w, (x, w), out),
        "textbook": Version(lambda x, w: ring_contract(x, w, devices), (x, w), out),
        "compute": Version(lambda x, w: x @ w, (dataclasses.replace(x, spec=P()), w), out),
        "communication": Version(lambda x: gathered(x, 1), (x,), P()),
    }


def _scatter(sizes: Sizes, devices: int) -> dict[str, Version]:
    x = Operand((sizes.rows, sizes.inner * devices), P(None, AXIS))
    w = Operand((sizes.inner * devices, sizes.outer), P(AXIS))
    y = Operand((sizes.rows * devices, sizes.outer), P(AXIS))
    return {
        "original": Version(lambda x, w: scattered(x @ w), (x, w), P(AXIS)),
        "textbook": Version(lambda x, w: ring_scatter(x, w, devices), (x, w), P(AXIS)),
        "compute": Version(lambda x, w: x @ w, (x, w), P(AXIS)),
        "communication": Version(scattered, (y,), P(AXIS)),
    }


def _psum(sizes: Sizes, devices: int) -> dict[str, Version]:
    scatter = _scatter(sizes, devices)
    x, w = scatter["original"].operands
    (y,) = scatter["communication"].operands
    return {
        "original": Version(lambda x, w: lax.psum(x @ w, AXIS), (x, w), P()),
        "textbook": Version(lambda x, w: ring_place(ring_scatter(x, w, devices), devices), (x, w), P()),
        "compute": scatter["compute"],
        "communication": Version(lambda y: lax.psum(y, AXIS), (y,), P()),
    }


def _shared_gather(sizes: Sizes, devices: int) -> dict[str, Version]:
    x = Operand((sizes.rows, sizes.inner), P(AXIS))
    half = Operand((sizes.inner, sizes.outer // 2 * devices), P(None, AXIS))
    out = (P(None, AXIS), P(None, AXIS))

    def both(x: Any, v: Any, w: Any) -> Any:
        return x @ v, x @ w

    def ring(x: Any, v: Any, w: Any) -> Any:
        rows = x.shape[0]

        def place(results: Any, shard: Any, owner: Any) -> Any:
            return tuple(
                lax.dynamic_update_slice_in_dim(result, part, owner * rows, 0)
                for result, part in zip(results, both(shard, v, w), strict=True)
            )

        blank = tuple(jnp.zeros((rows * devices, weight.shape[1]), x.dtype) for weight in (v, w))
        return ring_gather(x, devices, place, blank)

    return {
        "original": Version(lambda x, v, w: both(gathered(x), v, w), (x, half, half), out),
        "textbook": Version(ring, (x, half, half), out),
        "compute": Version(both, (dataclasses.replace(x, spec=P()), half, half), out),
        "communication": Version(gathered, (x,), P()),
    }


def _mlp(sizes: Sizes, devices: int) -> dict[str, Version]:
    x = Operand((sizes.rows, sizes.inner), P(AXIS))
    up = Operand((sizes.inner, sizes.outer * devices), P(None, AXIS))
    down = Operand((sizes.outer * devices, sizes.inner), P(AXIS))
    operands = (x, up, down)

    def loss(y: Any) -> Any:
        return jnp.mean(y * y)[None]

    def original(x: Any, up: Any, down: Any) -> Any:
        return loss(scattered(jax.nn.relu(gathered(x) @ up) @ down))

    def textbook(x: Any, up: Any, down: Any) -> Any:
        return loss(ring_scatter(jax.nn.relu(ring_gather_dot(x, up, devices)), down, devices))

    def alone(x: Any, up: Any, down: Any) -> Any:
        def local(x: Any, up: Any, down: Any) -> Any:
            return loss(jax.nn.relu(x @ up) @ down)[0]

        value, gradients = jax.value_and_grad(local, argnums=(0, 1, 2))(x, up, down)
        return value[None], gradients

    def communication(x: Any) -> Any:
        for _ in range(2):
            x = scattered(gathered(x))
        return x

    whole = (dataclasses.replace(x, spec=P()), up, down)
    return {
        "original": Version(original, operands, P(AXIS), gradient=True),
        "textbook": Version(textbook, operands, P(AXIS), gradient=True),
        "compute": Version(alone, whole, (P(AXIS), (P(), P(None, AXIS), P(AXIS)))),
        "communication": Version(communication, (x,), P(AXIS)),
    }


CASES: Final[Mapping[str, Case]] = {
    "gather_free": Case("gather on a free dim", 1, 1, _gather_free),
    "gather_contracting": Case("gather on the contracting dim", 1, 1, _gather_contracting),
    "scatter": Case("scatter", 1, 1, _scatter),
    "psum": Case("psum", 1, 2, _psum),
    "shared_gather": Case("gather shared by two dots", 1, 1, _shared_gather),
    "mlp_step": Case("MLP, forward and backward", 6, 4, _mlp),
}
"""By name; the first five are single chains."""
