"""A site: one collective of the user's program, what was decided about it, and why."""

from __future__ import annotations

import dataclasses

from cost_model import Estimate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One collective equation of the program.

    Attributes:
      kind: the chain's pattern (``all_gather_dot``, ``dot_reduce_scatter``), or the collective alone
        (``all_gather``, ``reduce_scatter``, ``psum``, ``all_to_all``) where there is no chain.
      axis: mesh axis; several are joined by commas, major to minor.
      axis_size: devices that take part.
      source: ``file:line (function)`` of the collective in the user's program.
      path: the calls that the equation is in, such as ``shard_map/scan``.
      count: how often one call of the program runs it; bodies of ``while`` loops count once.
      operand: type of the collective's operand, such as ``bf16[256,4096]``.
      result: type of its result.
      dots: per dot of the chain, the types of its operands and its source line.
      rewritten: whether a ring replaces it.
      reason: stable code of why, or why not. A policy that is asked about the site finds what ``"auto"``
        would decide.
      sentence: the reason in words.
      schedule: how the ring runs; empty where there is no chain.
      estimate: predicted times; None where there is no chain or the hardware is unknown.
    """

    kind: str
    axis: str
    axis_size: int
    source: str
    path: str
    count: int
    operand: str
    result: str
    dots: tuple[str, ...]
    rewritten: bool
    reason: str
    sentence: str
    schedule: str
    estimate: Estimate | None
