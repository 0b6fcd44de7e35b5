"""Every collective of one jaxpr with the chain it belongs to, or the reason why it belongs to none."""

from __future__ import annotations

import dataclasses
from typing import Any

from passes.chains import Chain
from passes.collective import Collective, read_collective, unsupported
from passes.gather_match import find_gather_chains
from passes.graph import Dataflow, dataflow
from passes.reasons import Reason
from passes.scatter_match import find_scatter_chain


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """One collective and what was found around it: a chain, or the reason why there is none."""

    collective: Collective
    found: Chain | Reason


def match(jaxpr: Any) -> tuple[Match, ...]:
    """Matches every all_gather, reduce_scatter, psum and all_to_all of a jaxpr, in program order.

    Args:
      jaxpr: an open or closed jaxpr; usually the body of a shard_map. Bodies of its inner scans, conditionals
        and uninlined calls are jaxprs of their own and are not entered.
    """
    return match_dataflow(dataflow(jaxpr))


def match_dataflow(flow: Dataflow) -> tuple[Match, ...]:
    """As ``match``, of a jaxpr that has been read already. The time is linear in its equations."""
    collectives = [c for i in range(len(flow.ops)) if (c := read_collective(flow, i)) is not None]
    found: dict[int, Chain | Reason] = {}
    for collective in collectives:
        reason = unsupported(flow, collective)
        if reason is not None:
            found[collective.op] = reason
    open_ones = [c for c in collectives if c.op not in found]
    found.update(find_gather_chains(flow, {c.op: c for c in open_ones if c.kind == "all_gather"}))
    found.update({c.op: find_scatter_chain(flow, c) for c in open_ones if c.kind == "reduce_scatter"})
    return tuple(Match(collective, found[collective.op]) for collective in collectives)
