"""The programs that a calibration times: loops of matmuls, copies and hops on all devices at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cost_model import Matmul, dtype_bytes
from passes.cpu_queue import behind, deferred
from passes.hops import first_bits, zero_of

STEPS: Final = 4
"""Hops beside matmuls in one iteration: what XLA:CPU runs side by side are programs, and bodies of loops, of
more than eight operations.
"""

QUEUED: Final = 8
"""Matmuls in one turn of a GPU's loop. XLA:GPU launches so many kernels at once, as one CUDA graph; the host
takes microseconds for each that it launches alone, and short matmuls wait for it.
"""

Run = Callable[[int], None]
"""Does a thing so many times on every device, and waits until it is done."""


class Programs(Protocol):
    """What can be timed."""

    def matmul(self, matmul: Matmul) -> Run:
        """One matmul after another, each waiting for the one before."""

    def copy(self, size: int) -> Run:
        """Reads and writes an array of so many bytes."""

    def hop(self, axis: str, size: int, *, both: bool) -> Run:
        """Every device sends so many bytes to its next neighbour; and as many to the one before, if both."""

    def beside(self, axis: str, size: int, matmul: Matmul) -> Run:
        """`STEPS` hops and matmuls as in a ring: a hop beside each matmul, the next ones wait for both."""


class MeshPrograms:
    """The programs on the devices of a mesh; in several processes each must make and run the same ones."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def matmul(self, matmul: Matmul) -> Run:
        """See `Programs`."""
        in_turn = QUEUED if self.mesh.devices.flat[0].platform == "gpu" else 1

        def loop(count: int, x: Any, w: Any) -> Any:
            def some(number: int, x: Any) -> Any:
                for _ in range(number):
                    x = _multiplied(x, w)
                return x

            x = lax.fori_loop(0, count // in_turn, lambda _, x: some(in_turn, x), x)
            return some(count % in_turn, x)

        return self._run(loop, *_operands(matmul))

    def copy(self, size: int) -> Run:
        """See `Programs`."""

        def loop(count: int, x: Any) -> Any:
            return lax.fori_loop(0, count, lambda _, x: x + 1, x)

        return self._run(loop, _bytes(size))

    def hop(self, axis: str, size: int, *, both: bool) -> Run:
        """See `Programs`."""
        onward, back = self._neighbours(axis)

        def loop(count: int, x: Any) -> Any:
            return lax.fori_loop(0, count, lambda _, x: lax.ppermute(x, axis, onward), x)

        def both_ways(count: int, x: Any, y: Any) -> Any:
            def step(_: Any, xy: Any) -> Any:
                return lax.ppermute(xy[0], axis, onward), lax.ppermute(xy[1], axis, back)

            return lax.fori_loop(0, count, step, (x, y))

        return self._run(both_ways, _bytes(size), _bytes(size)) if both else self._run(loop, _bytes(size))

    def beside(self, axis: str, size: int, matmul: Matmul) -> Run:
        """See `Programs`."""
        onward, _ = self._neighbours(axis)
        late = self.mesh.devices.flat[0].platform == "cpu"

        def loop(count: int, sent: Any, x: Any, w: Any) -> Any:
            zero = zero_of(lax.axis_index(axis))

            def steps(_: Any, carry: Any) -> Any:
                sent, x = carry
                for _ in range(STEPS):
                    # As rings send it there: see `passes.cpu_queue`.
                    copy = behind(sent, deferred(first_bits(sent) & zero)) if late else sent
                    sent = lax.ppermute(copy, axis, onward)
                    x = _multiplied(x, w, first_bits(sent) & zero)
                return sent, x

            return lax.fori_loop(0, count, steps, (sent, x))

        return self._run(loop, _bytes(size), *_operands(matmul))

    def _neighbours(self, axis: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Hops along a line, without that from the last to the first: it may be a longer way."""
        onward = [(place, place + 1) for place in range(self.mesh.shape[axis] - 1)]
        return onward, [(b, a) for a, b in onward]

    def _run(self, loop: Callable[..., Any], *shapes: tuple[tuple[int, ...], Any]) -> Run:
        """The loop, compiled, on arguments of these shapes and dtypes on every device."""
        everywhere = PartitionSpec(self.mesh.axis_names)
        sharding = NamedSharding(self.mesh, everywhere)

        def filled() -> Any:
            # Small values: products of products stay finite.
            return [
                jnp.full((self.mesh.size * shape[0], *shape[1:]), 1 if _whole(dtype) else 2.0**-12, dtype)
                for shape, dtype in shapes
            ]

        arguments = jax.jit(filled, out_shardings=sharding)()

        # A loop that knows its count: for one that does not, a GPU's host reads the condition before every
        # iteration, 16 µs on an H100.
        @functools.partial(jax.jit, static_argnums=0)
        def repeated(count: int, *arguments: Any) -> Any:
            return jax.shard_map(
                functools.partial(loop, count),
                mesh=self.mesh,
                in_specs=everywhere,
                out_specs=everywhere,
                check_vma=False,
            )(*arguments)

        def run(count: int) -> None:
            jax.block_until_ready(repeated(count, *arguments))

        return run


def _operands(matmul: Matmul) -> tuple[tuple[tuple[int, ...], Any], tuple[tuple[int, ...], Any]]:
    return ((matmul.m, matmul.k), matmul.dtype), ((matmul.k, matmul.n), matmul.dtype)


def _bytes(size: int) -> tuple[tuple[int, ...], Any]:
    return (max(1, round(size / dtype_bytes("float32"))),), jnp.float32


def _multiplied(x: Any, w: Any, nothing: Any = None) -> Any:
    """The left operand of the next matmul, which waits for this one: an element of the result is in it.

    Args:
      x, w: the operands of this one.
      nothing: an int32 0 that the next one is to wait for, too.
    """
    y = lax.optimization_barrier(
        jnp.dot(x, w, preferred_element_type=jnp.int32 if _whole(x.dtype) else x.dtype)
    )
    place = (0, 0) if nothing is None else (nothing, nothing)
    return lax.dynamic_update_slice(x, y[:1, :1].astype(x.dtype), place)


def _whole(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.integer))
