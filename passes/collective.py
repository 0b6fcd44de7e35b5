"""One collective equation: its axis, its dim, and whether a ring can stand in for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from passes.blocks import shards
from passes.graph import COLLECTIVES, GATHERS, REDUCTIONS, SCATTERS, Dataflow, Op
from passes.reasons import Code, Reason


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A collective equation read into the field's terms.

    Attributes:
      op: its number in the dataflow graph.
      kind: ``all_gather``, ``reduce_scatter``, ``psum`` or ``all_to_all``.
      axes: mesh axes, major to minor.
      axis_size: devices that take part: all along the axes, or those of one group.
      mesh_sizes: every axis of the collective with its size, in the mesh's order.
      groups: the groups of devices, by index along the axes, that communicate among themselves; None: all do.
      dim: the dim that is made of one block per device: the gathered dim of an all_gather's result, the
        scatter dim of a reduce_scatter's or psum's operand, the concat dim of an all_to_all's result.
      tiled: whether that dim is cut into blocks (True) or is one of size ``axis_size`` (False).
    """

    op: int
    kind: str
    axes: tuple[str, ...]
    axis_size: int
    mesh_sizes: tuple[tuple[str, int], ...] = ()
    groups: tuple[tuple[int, ...], ...] | None = None
    dim: int = -1
    tiled: bool = True

    @property
    def axis(self) -> str:
        """The axes' names, joined by commas."""
        return ",".join(self.axes)


_DECOMPOSED = frozenset({"all_gather", "reduce_scatter", "psum", "psum_invariant", "all_to_all"})


def read_collective(flow: Dataflow, index: int) -> Collective | None:
    """The collective that an operation is, or None (also for a psum over no mesh axis)."""
    op = flow.ops[index]
    if op.name not in COLLECTIVES:
        return None
    axes = mesh_axes(op)
    if not axes:
        return None
    mesh = _mesh(flow, op)
    size = math.prod(mesh.get(axis, 1) for axis in axes)
    groups = op.params.get("axis_index_groups")
    if groups is not None:
        groups = tuple(tuple(int(device) for device in group) for group in groups)
        size = max(map(len, groups))
    if op.name in GATHERS:
        kind, dim = "all_gather", op.params["all_gather_dimension"]
    elif op.name in SCATTERS:
        kind, dim = "reduce_scatter", op.params["scatter_dimension"]
    elif op.name in REDUCTIONS:
        kind, dim = "psum", -1
    else:
        kind, dim = "all_to_all", op.params["concat_axis"]
    # An all_to_all equation is always tiled: lax.all_to_all puts the reshapes of an untiled one around it.
    tiled = kind == "all_to_all" or op.params.get("tiled", True)
    mesh_sizes = tuple((name, length) for name, length in mesh.items() if name in axes)
    return Collective(index, kind, axes, size, mesh_sizes, groups, dim, tiled)


def mesh_axes(op: Any) -> tuple[str, ...]:
    """The mesh axes of a collective (an equation or operation), major to minor; one may be named bare."""
    return tuple(str(axis) for axis in _axes(op) if not isinstance(axis, int))


def _axes(op: Any) -> Iterable[Any]:
    """All axes of a collective; a number is a dim of its operand, of a vmap with an axis name."""
    names = op.params["axes"] if "axes" in op.params else op.params["axis_name"]
    return names if isinstance(names, tuple | list) else (names,)


def _same_as(flow: Dataflow, collective: Collective) -> str:
    """Where an equal collective is whose result is used in place of this one's; nothing if there is none."""
    op = flow.ops[collective.op]
    first = next(other for other in flow.collectives[op.name, op.inputs] if other.params == op.params)
    if first is not op:
        return f"It is the same as the {collective.kind} at {first.source}."
    return ""


def unsupported(flow: Dataflow, collective: Collective) -> Reason | None:
    """Why no ring of ours can stand in for the collective, whatever is around it; None if one can."""
    op = flow.ops[collective.op]
    if (total := flow.summed.get(op.outputs[0])) is not None:
        return Reason(Code.SUMMED_ONCE, f"The other is at {flow.ops[flow.producer[total]].source}.")
    if collective.op not in flow.live:
        return Reason(Code.UNUSED, _same_as(flow, collective))
    if op.name not in _DECOMPOSED or len(op.outputs) != 1:
        return Reason(Code.UNSUPPORTED_COLLECTIVE, f"It is {op.name} of {len(op.outputs)} value(s).")
    if not {name for name, _ in collective.mesh_sizes}.issuperset(_axes(op)):
        return Reason(Code.UNSUPPORTED_COLLECTIVE, "It is over an axis of a vmap too.")
    if len({len(group) for group in collective.groups or ()}) > 1:
        return Reason(Code.UNSUPPORTED_GROUPS)
    if collective.axis_size == 1:
        if op.name == "psum_invariant":
            return Reason(Code.UNSUPPORTED_COLLECTIVE, "Among one device it only changes the value's type.")
        return Reason(Code.AXIS_SIZE_ONE)
    aval = flow.avals[op.outputs[0]]
    if not aval.size:
        return Reason(Code.EMPTY)
    if not isinstance(aval.dtype, np.dtype) or aval.dtype == np.bool_ or of_two_bits(aval.dtype):
        return Reason(Code.UNSUPPORTED_DTYPE, f"It is {aval.dtype}.")
    return None


def of_two_bits(dtype: Any) -> bool:
    """Whether numbers have two bits: over a barrier of such libtpu 0.0.50 ends the process."""
    return dtype in (jnp.int2, jnp.uint2)


def explicitly_sharded(aval: Any) -> bool:
    """Whether a value is sharded, by its type, over a mesh axis of type Explicit."""
    return shards(getattr(aval, "sharding", None))


def _mesh(flow: Dataflow, op: Op) -> dict[str, int]:
    return dict(flow.avals[op.outputs[0]].sharding.mesh.shape)
