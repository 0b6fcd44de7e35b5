"""One collective equation: its axis, its dim, and whether a ring can stand in for it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from passes.graph import COLLECTIVES, GATHERS, REDUCTIONS, SCATTERS, Dataflow, Op
from passes.reasons import Code, Reason


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A collective equation read into the field's terms.

    Attributes:
      op: its number in the dataflow graph.
      kind: ``all_gather``, ``reduce_scatter``, ``psum`` or ``all_to_all``.
      axes: mesh axes, major to minor.
      axis_size: devices that take part.
      dim: gathered or scatter dim of the whole array; -1 for the other kinds.
      tiled: whether the dim is cut into shards (True) or is a new one of size ``axis_size`` (False).
    """

    op: int
    kind: str
    axes: tuple[str, ...]
    axis_size: int
    dim: int = -1
    tiled: bool = True


def read_collective(flow: Dataflow, index: int) -> Collective | None:
    """The collective that an operation is, or None (also for a psum over no mesh axis)."""
    op = flow.ops[index]
    if op.name not in COLLECTIVES:
        return None
    names = op.params["axes"] if "axes" in op.params else op.params["axis_name"]
    names = names if isinstance(names, tuple | list) else (names,)
    axes = tuple(str(name) for name in names if not isinstance(name, int))
    if not axes:
        return None
    mesh = _mesh(flow, op)
    size = op.params.get("axis_size") or math.prod(mesh.get(axis, 1) for axis in axes)
    if op.name in GATHERS:
        return Collective(
            index, "all_gather", axes, size, op.params["all_gather_dimension"], op.params["tiled"]
        )
    if op.name in SCATTERS:
        return Collective(
            index, "reduce_scatter", axes, size, op.params["scatter_dimension"], op.params["tiled"]
        )
    return Collective(index, "psum" if op.name in REDUCTIONS else "all_to_all", axes, size)


def unsupported(flow: Dataflow, collective: Collective) -> Reason | None:
    """Why no ring of ours can stand in for the collective, whatever is around it; None if one can."""
    op = flow.ops[collective.op]
    if op.name not in ("all_gather", "reduce_scatter"):
        detail = f"({op.name})" if op.name != collective.kind else ""
        return Reason(Code.UNSUPPORTED_COLLECTIVE, detail)
    if op.params.get("axis_index_groups") is not None:
        return Reason(Code.UNSUPPORTED_GROUPS)
    if len(collective.axes) != 1:
        return Reason(Code.UNSUPPORTED_AXES, f"Its axes are {', '.join(collective.axes)}.")
    if collective.axis_size == 1:
        return Reason(Code.AXIS_SIZE_ONE)
    aval = flow.avals[op.outputs[0]]
    if not aval.size:
        return Reason(Code.EMPTY)
    if not isinstance(aval.dtype, np.dtype) or aval.dtype == np.bool_:
        return Reason(Code.UNSUPPORTED_DTYPE, f"It is {aval.dtype}.")
    return None


def explicitly_sharded(aval: Any) -> bool:
    """Whether a value is sharded, by its type, over a mesh axis of type Explicit."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and any(entry is not None for entry in sharding.spec)


def _mesh(flow: Dataflow, op: Op) -> dict[str, int]:
    return dict(flow.avals[op.outputs[0]].sharding.mesh.shape)
