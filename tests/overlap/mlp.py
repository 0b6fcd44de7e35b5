"""A sharded two-matmul program with one chain of each kind, and its float64 NumPy reference."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from overlap import Overlapped, overlap_collectives

Function = Callable[..., Any]

always: Callable[..., Any] = functools.partial(overlap_collectives, policy="always", strict=True)
"""The decorator as most tests want it: everything legal is rewritten, and a failure is an error."""

SPECS = (P("x"), P(None, "x"), P("x"))
"""How the arguments of ``mlp`` are sharded; its result is as the first."""


def mesh_of(devices: int = 4, kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of one axis ``x``."""
    return jax.make_mesh((devices,), ("x",), axis_types=(kind,), devices=jax.devices()[:devices])


def shard_body(x: Any, w: Any, v: Any) -> Any:
    """What one device does: ``all_gather → dot``, a square, ``dot → reduce_scatter``."""
    h = lax.all_gather(x, "x", axis=0, tiled=True) @ w
    return lax.psum_scatter((h * h) @ v, "x", scatter_dimension=0, tiled=True)


def mlp(mesh: Mesh | None = None) -> Function:
    """``(x w)² v``, as a function of global arrays, not jitted."""
    mesh = mesh_of() if mesh is None else mesh

    def mlp(x: Any, w: Any, v: Any) -> Any:
        return jax.shard_map(shard_body, mesh=mesh, in_specs=SPECS, out_specs=P("x"))(x, w, v)

    return mlp


@dataclasses.dataclass(frozen=True)
class Reference:
    """The values and derivatives of ``mlp`` in float64.

    Attributes:
      x, w, v: the arguments, of shapes [8, 6], [6, 12] and [12, 6].
      c: cotangent of the result, of shape [8, 6].
    """

    x: Any
    w: Any
    v: Any
    c: Any

    @property
    def arguments(self) -> tuple[Any, Any, Any]:
        """The arguments in float32."""
        x, w, v = (np.asarray(a, np.float32) for a in (self.x, self.w, self.v))
        return x, w, v

    @property
    def cotangent(self) -> Any:
        """The cotangent in float32."""
        return np.asarray(self.c, np.float32)

    def value(self) -> Any:
        """The result."""
        return (self.x @ self.w) ** 2 @ self.v

    def gradients(self) -> tuple[Any, Any, Any]:
        """Of ``sum(result * c)``, by the arguments."""
        h = self.x @ self.w
        dh = 2 * h * (self.c @ self.v.T)
        return dh @ self.w.T, self.x.T @ dh, (h**2).T @ self.c

    def tangent(self, dx: Any, dw: Any, dv: Any) -> Any:
        """Of the result, by tangents of the arguments."""
        h = self.x @ self.w
        return (2 * h * (dx @ self.w + self.x @ dw)) @ self.v + h**2 @ dv


def reference(seed: int = 0, rows: int = 8) -> Reference:
    """Random arguments whose float32 copies are exact."""
    rng = np.random.default_rng(seed)
    shapes = ((rows, 6), (6, 12), (12, 6), (rows, 6))
    return Reference(*(rng.integers(-8, 9, shape) / 8.0 for shape in shapes))


def check(actual: Any, wanted: Any) -> None:
    """Compares pytrees of arrays to float32 rounding."""
    structure: Any = jax.tree.structure(actual)
    assert structure == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=2e-5, atol=2e-5)


def hops(function: Any, *args: Any, **kwargs: Any) -> int:
    """How many ``ppermute`` equations the function's program holds, in nested jaxprs too."""
    traced = function.trace if isinstance(function, Overlapped) else jax.jit(function).trace
    return str(traced(*args, **kwargs).jaxpr).count("ppermute")
