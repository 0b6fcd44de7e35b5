"""What the programs of one layer have in common: a loss inside `jax.shard_map` and its gradients."""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Size = Literal["small", "real"]
"""For tests on virtual CPU devices, in float32; or real widths in bfloat16, to be compiled, not run."""

DTYPES: Final[Mapping[Size, Any]] = {"small": jnp.float32, "real": jnp.bfloat16}


@dataclass(frozen=True, slots=True)
class Operand:
    """A weight, or the input.

    Attributes:
      dims: its dims' names, separated by spaces.
      spec: how it is sharded.
      fan_in: names of the dims whose product is one over the variance of its values.
      float32: whether it is so in both sizes.
    """

    dims: str
    spec: P
    fan_in: str = ""
    float32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A step of training one layer: `(weights, x) → (loss, (gradients of weights, gradient of x))`.

    Attributes:
      name: of the program.
      mesh_shape: sizes of the mesh's axes.
      axis_names: their names.
      sizes: for each size, every dim's.
      operands: weights, a tree of operands, and the input.
      local_loss: the loss `(weights, x)` as one device computes it.
      local_gradients: where the program differentiates inside its shard_map: loss and gradients, as one
        device computes them. By default it differentiates the shard_map.
    """

    name: str
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    sizes: Mapping[Size, Mapping[str, int]]
    operands: tuple[Any, Operand]
    local_loss: Callable[[Any, Array], Array]
    local_gradients: Callable[[Any, Array], tuple[Array, Any]] | None = None

    @property
    def specs(self) -> tuple[Any, P]:
        """The shardings of weights and input."""
        return jax.tree.map(lambda operand: operand.spec, self.operands)

    def make_mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The program's mesh, over `devices` (default: this machine's)."""
        types = (AxisType.Auto,) * len(self.axis_names)
        return jax.make_mesh(self.mesh_shape, self.axis_names, axis_types=types, devices=devices)

    def make_loss(self, mesh: Mesh) -> Callable[[Any, Array], Array]:
        """The differentiable loss `(weights, x) → float32 scalar` of global, sharded arrays."""
        return jax.shard_map(self.local_loss, mesh=mesh, in_specs=self.specs, out_specs=P())

    def make(self, mesh: Mesh) -> Any:
        """The jitted step."""
        if self.local_gradients is None:
            return jax.jit(jax.value_and_grad(self.make_loss(mesh), argnums=(0, 1)))
        out_specs = (P(), self.specs)
        return jax.jit(
            jax.shard_map(
                self.local_gradients, mesh=mesh, in_specs=self.specs, out_specs=out_specs, check_vma=False
            )
        )

    def shapes(self, mesh: Mesh, size: Size) -> tuple[Any, jax.ShapeDtypeStruct]:
        """Weights and input as `ShapeDtypeStruct`s with shardings."""

        def shape(operand: Operand) -> jax.ShapeDtypeStruct:
            dims = tuple(self.sizes[size][name] for name in operand.dims.split())
            dtype = jnp.float32 if operand.float32 else DTYPES[size]
            return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, operand.spec))

        return jax.tree.map(shape, self.operands)

    def arguments(self, mesh: Mesh, size: Size = "small", seed: int = 0) -> tuple[Any, Array]:
        """Weights and input placed on the mesh; the values depend on the size and the seed alone."""
        rng = np.random.default_rng(seed)

        def values(operand: Operand, like: jax.ShapeDtypeStruct) -> Array:
            fan_in = math.prod(self.sizes[size][name] for name in operand.fan_in.split())
            array = rng.normal(size=like.shape, scale=fan_in**-0.5).astype(like.dtype)
            return jax.device_put(array, like.sharding)

        return jax.tree.map(values, self.operands, self.shapes(mesh, size))


# What their layers use.


def gather(x: Array, axis: str, dim: int) -> Array:
    """Undo the sharding of a dim over a mesh axis."""
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def scatter(x: Array, axis: str, dim: int) -> Array:
    """Sum partial sums over a mesh axis, each device keeping its part of a dim."""
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def mean_square(y: Array) -> Array:
    """The loss of the part of the output that one device has, in float32."""
    return jnp.mean(jnp.square(y.astype(jnp.float32)))
