"""Chains: a collective with the dots it can overlap with, as found in a dataflow graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from passes.blocks import Blockwise
from passes.dots import DotDims

Kind = Literal["all_gather_dot", "dot_reduce_scatter"]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockOp:
    """An operation of a chain that is run on each block.

    Attributes:
      op: its number in the dataflow graph.
      dims: along which dims it acts block by block; ``DotDims`` for a dot.
    """

    op: int
    dims: Blockwise | DotDims


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllGatherDot:
    """``all_gather → … → dot_general``: one gather with every dot that its ring feeds.

    Attributes:
      collective: number of the all_gather operation.
      axis: mesh axis; ``axis_size`` devices.
      blocked: the dim along which each value of the chain is cut into one block per device.
      before: operations that each device applies to its own shard before the first hop.
      wire: the value whose shards travel: the narrowest between the gather and its dots.
      after: operations that are applied to each shard on arrival, in program order.
      dots: the dots, in program order.
      handed_out: values of the chain that are also needed whole; the ring assembles them.
    """

    collective: int
    axis: str
    axis_size: int
    blocked: Mapping[int, int]
    before: tuple[BlockOp, ...]
    wire: int
    after: tuple[BlockOp, ...]
    dots: tuple[BlockOp, ...]
    handed_out: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        """Name of the pattern."""
        return "all_gather_dot"

    @property
    def members(self) -> tuple[int, ...]:
        """Operations that the ring replaces."""
        return (self.collective, *(b.op for b in (*self.before, *self.after, *self.dots)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DotReduceScatter:
    """``dot_general → … → reduce_scatter``: one reduce_scatter with the dots that make its partial sums.

    Attributes:
      collective: number of the reduce_scatter operation.
      axis: mesh axis; ``axis_size`` devices.
      blocked: the dim along which each value of the chain is cut into one block per device.
      body: the operations between the dots and the collective, dots included, in program order.
      dots: the dots, in program order.
    """

    collective: int
    axis: str
    axis_size: int
    blocked: Mapping[int, int]
    body: tuple[BlockOp, ...]
    dots: tuple[BlockOp, ...]

    @property
    def kind(self) -> Kind:
        """Name of the pattern."""
        return "dot_reduce_scatter"

    @property
    def members(self) -> tuple[int, ...]:
        """Operations that the ring replaces."""
        return (*(b.op for b in self.body), self.collective)


Chain = AllGatherDot | DotReduceScatter
