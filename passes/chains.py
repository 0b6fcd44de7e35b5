"""Chains: a collective with the dots it can overlap with, as found in a dataflow graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from passes.blocks import Blockwise
from passes.collective import Collective
from passes.dots import DotDims


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
class ShardReduction:
    """A reduction over the gathered dim, done before the ring: each device's own shard, then across devices.

    Attributes:
      op: the reduction.
      collective: the all_gather whose result is reduced.
      path: operations from the gathered value to the reduction's operand, in program order.
      absorbed: operations that nothing but reductions needs any more.
    """

    op: int
    collective: Collective
    path: tuple[BlockOp, ...]
    absorbed: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """Operations that it replaces."""
        return (*self.absorbed, self.op)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllGatherDot:
    """``all_gather → … → dot_general``: one gather with every dot that its ring feeds.

    An all_to_all whose result is multiplied is such a chain too (each block comes straight from its owner),
    and so is the second half of a psum.

    Attributes:
      collective: the all_gather, all_to_all or psum.
      blocked: the dim along which each value of the chain is cut into one block per device.
      before: operations that each device applies to its own shard before the first hop.
      wire: the value whose shards travel: the narrowest between the gather and its dots.
      after: operations that are applied to each shard on arrival, in program order.
      dots: the dots, in program order.
      reductions: reductions over the gathered dim between the gather and its dots.
      handed_out: values of the chain that are also needed whole; the ring assembles them.
      again: operations of the chain that also run outside of the ring, on what it hands out.
      epilogue: operations that are applied to each block of the dots' results, in program order.
      unplaced: results of dots and of the epilogue that nothing else needs: they are never assembled.
      alike: the dots whose results are the same on several devices: all have to make a block of them by equal
        dots, for larger and smaller ones need not add up in the same order.
    """

    collective: Collective
    blocked: Mapping[int, int]
    before: tuple[BlockOp, ...]
    wire: int
    after: tuple[BlockOp, ...]
    dots: tuple[BlockOp, ...]
    reductions: tuple[ShardReduction, ...]
    handed_out: tuple[int, ...]
    again: frozenset[int] = frozenset()
    epilogue: tuple[BlockOp, ...] = ()
    unplaced: frozenset[int] = frozenset()
    alike: frozenset[int] = frozenset()

    @property
    def kind(self) -> str:
        """Name of the pattern."""
        return f"{self.collective.kind}_dot"

    @property
    def ops(self) -> tuple[int, ...]:
        """Operations that the ring runs, block by block, and the collective."""
        return (self.collective.op, *(b.op for b in (*self.before, *self.after, *self.dots, *self.epilogue)))

    @property
    def members(self) -> tuple[int, ...]:
        """Operations that the ring replaces."""
        return tuple(op for op in self.ops if op not in self.again)

    @property
    def summed(self) -> tuple[BlockOp, ...]:
        """The dots whose results of all blocks are added up."""
        return tuple(dot for dot in self.dots if dot.dims.result_dim is None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DotReduceScatter:
    """``dot_general → … → reduce_scatter``: one reduce_scatter with the dots that make its partial sums.

    A dot whose result goes into an all_to_all is such a chain too (nothing is summed), and so is the first
    half of a psum.

    Attributes:
      collective: the reduce_scatter, all_to_all or psum; its ``dim`` is the one that the operand is cut
        along.
      body: the operations between the dots and the collective, dots included, in program order.
      dots: the dots, in program order.
    """

    collective: Collective
    body: tuple[BlockOp, ...]
    dots: tuple[BlockOp, ...]

    @property
    def kind(self) -> str:
        """Name of the pattern."""
        return f"dot_{self.collective.kind}"

    @property
    def ops(self) -> tuple[int, ...]:
        """Operations that the ring runs, block by block, and the collective."""
        return (*(b.op for b in self.body), self.collective.op)

    @property
    def members(self) -> tuple[int, ...]:
        """Operations that the ring replaces: all that it runs."""
        return self.ops


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DotPsum:
    """``dot_general → … → psum``: a reduce_scatter ring, then the gather of what it leaves on each device.

    Attributes:
      collective: the psum; its ``dim`` is the one that the sum is scattered along and gathered again.
      scatter: the chain of the dots before it.
      gather: the chain of the dots after it, whose ring gathers the sum; None if a plain all_gather does.
      scattered: into how many parts the sum is cut by a reduce_scatter, over other axes, that alone reads it;
        1 where none does.
    """

    collective: Collective
    scatter: DotReduceScatter
    gather: AllGatherDot | None
    scattered: int = 1

    @property
    def kind(self) -> str:
        """Name of the pattern."""
        return "dot_psum"

    @property
    def dots(self) -> tuple[BlockOp, ...]:
        """The dots on both sides, in program order."""
        return (*self.scatter.dots, *(self.gather.dots if self.gather else ()))

    @property
    def ops(self) -> tuple[int, ...]:
        """Operations that the rings run, block by block, and the collective."""
        return (*self.scatter.ops, *(self.gather.ops[1:] if self.gather else ()))

    @property
    def members(self) -> tuple[int, ...]:
        """Operations that the rings replace."""
        return (*self.scatter.members, *(self.gather.members[1:] if self.gather else ()))


@dataclasses.dataclass(frozen=True, slots=True)
class Lone:
    """A collective among one device: it disappears."""

    collective: Collective

    @property
    def members(self) -> tuple[int, ...]:
        """Operations that it replaces."""
        return (self.collective.op,)


Chain = AllGatherDot | DotReduceScatter | DotPsum


def summed_dots(chain: DotReduceScatter | DotPsum) -> tuple[BlockOp, ...]:
    """The dots before a chain's sum."""
    return chain.scatter.dots if isinstance(chain, DotPsum) else chain.dots


def reductions(chain: Chain) -> tuple[ShardReduction, ...]:
    """The reductions over the gathered dim that a chain takes over."""
    return chain.reductions if isinstance(chain, AllGatherDot) else ()


def run_again(chain: Chain) -> frozenset[int]:
    """The operations of a chain that also run outside of its ring."""
    gather = chain.gather if isinstance(chain, DotPsum) else chain
    return gather.again if isinstance(gather, AllGatherDot) else frozenset()
