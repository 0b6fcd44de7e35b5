"""Every collective of one jaxpr with the chains it may belong to, or the reason why it belongs to none."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from typing import Any

import jax
import numpy as np

from passes import shims
from passes.chains import AllGatherDot, Chain, DotPsum
from passes.collective import Collective, read_collective, unsupported
from passes.gather_match import find_gather_chains
from passes.graph import Dataflow, dataflow
from passes.invariance import Invariance
from passes.reasons import Code, Reason
from passes.scatter_match import find_scatter_chain
from passes.scattered_first import scatter_of


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """One collective and what was found around it.

    Attributes:
      collective: the collective.
      found: the chains it may become, of which one can be chosen; or the reason why there is none.
    """

    collective: Collective
    found: tuple[Chain, ...] | Reason


def match(jaxpr: Any) -> tuple[Match, ...]:
    """Matches every all_gather, reduce_scatter, psum and all_to_all of a jaxpr, in program order.

    Args:
      jaxpr: an open or closed jaxpr; usually the body of a shard_map. Bodies of its inner scans, conditionals
        and uninlined calls are jaxprs of their own and are not entered.

    Raises:
      TypeError: it is no jaxpr.
    """
    if not hasattr(shims.open_jaxpr(jaxpr)[0], "invars"):
        raise TypeError(f"match takes a jaxpr, such as jax.make_jaxpr(f)(x), not {type(jaxpr).__name__}")
    return match_dataflow(dataflow(jaxpr))


def match_dataflow(
    flow: Dataflow, replicas: Invariance | None = None, apart: Set[str] = frozenset()
) -> tuple[Match, ...]:
    """As ``match``, of a jaxpr that has been read already.

    ``replicas`` tells what is meant to be the same on several devices, if anything is known of the graph's
    inputs. Along the axes ``apart`` some devices may not come to this jaxpr when others do.

    The time is linear in its equations where what a collective gives soon meets a dot, as in layers.
    """
    collectives = [c for i in range(len(flow.ops)) if (c := read_collective(flow, i)) is not None]
    if not collectives:
        return ()
    if (reason := no_chains(flow)) is not None:
        return tuple(Match(collective, reason) for collective in collectives)
    found: dict[int, list[Chain]] = {}
    reasons: dict[int, list[Reason]] = {}
    open_ones: list[Collective] = []
    for collective in collectives:
        found[collective.op], reasons[collective.op] = [], []
        reason = unsupported(flow, collective) or _devices_apart(collective, apart)
        if reason is None:
            open_ones.append(collective)
        else:
            reasons[collective.op].append(reason)

    def note(op: int, outcome: Chain | Reason) -> None:
        if isinstance(outcome, Reason):
            reasons[op].append(outcome)
        else:
            found[op].append(outcome)

    invariance = Invariance(flow)
    gathered = {c.op: c for c in open_ones if c.kind in ("all_gather", "all_to_all")}
    if replicas is None:
        replicas = Invariance(flow, {})
    for op, chain in find_gather_chains(flow, gathered, invariance, replicas).items():
        note(op, chain)
    for collective in open_ones:
        if collective.kind == "reduce_scatter":
            note(collective.op, find_scatter_chain(flow, collective))
        elif collective.kind == "all_to_all":
            split = dataclasses.replace(collective, dim=flow.ops[collective.op].params["split_axis"])
            note(collective.op, find_scatter_chain(flow, split))
    psums = [c for c in open_ones if c.kind == "psum"]
    for op, outcome in _psum_chains(flow, psums, invariance, replicas):
        note(op, outcome)
    return tuple(Match(c, tuple(found[c.op]) or reasons[c.op][0]) for c in collectives)


def _devices_apart(collective: Collective, apart: Set[str]) -> Reason | None:
    """Why devices that take no part in a collective forbid hops, which need all; None if they do not."""
    if collective.groups is None:
        apart = apart - set(collective.axes)
    return Reason(Code.DEVICES_APART, f"They differ along {', '.join(sorted(apart))}.") if apart else None


def no_chains(flow: Dataflow) -> Reason | None:
    """Why no ring can be in a graph, whatever its collectives; None if rings can."""
    if (shape := _symbolic_shape(flow)) is not None:
        return Reason(Code.SYMBOLIC_SHAPE, f"One of its shapes is ({', '.join(map(str, shape))}).")
    if (dtype := _switched_off(flow)) is not None:
        off = f"{dtype} is in the program, and jax_enable_x64 is off where it is called."
        return Reason(Code.UNSUPPORTED_DTYPE, off)
    return None


def _symbolic_shape(flow: Dataflow) -> tuple[Any, ...] | None:
    """A shape of the graph that has a dim without a number (``jax.export.symbolic_shape``); None without."""
    shapes = (getattr(aval, "shape", ()) for aval in flow.avals)
    return next((shape for shape in shapes if not all(isinstance(size, int) for size in shape)), None)


def _switched_off(flow: Dataflow) -> Any | None:
    """An element type of the graph that JAX makes narrower outside ``enable_x64(True)``; None without."""
    dtypes = {getattr(aval, "dtype", None) for aval in flow.avals}
    numbers = sorted((dtype for dtype in dtypes if isinstance(dtype, np.dtype)), key=str)
    return next((dtype for dtype in numbers if jax.dtypes.canonicalize_dtype(dtype) != dtype), None)


def _psum_chains(
    flow: Dataflow, psums: list[Collective], invariance: Invariance, replicas: Invariance
) -> list[tuple[int, Chain | Reason]]:
    """The chains of each psum, one per dim that its sum can be scattered along.

    There are none where the compiler shards over other mesh axes: what a ring cuts or puts together by an
    all_gather it gathers over these as well (jax 0.10 and 0.12, CPU and TPU), and a psum it does not.
    """
    outcomes: list[tuple[int, Chain | Reason]] = []
    rounds: list[dict[int, DotPsum]] = []
    for psum in psums:
        result = flow.avals[flow.ops[psum.op].outputs[0]]
        shape = result.shape
        dims = [d for d, size in enumerate(shape) if size % psum.axis_size == 0]
        if not shape:
            outcomes.append((psum.op, Reason(Code.NO_DOT, "It sums a scalar.")))
        elif not dims:
            detail = f"No dim of {shape} divides by {psum.axis_size}."
            outcomes.append((psum.op, Reason(Code.INDIVISIBLE, detail)))
        elif not shims.all_manual(result):
            outcomes.append((psum.op, Reason(Code.SHARDED_ELSEWHERE)))
            dims = []
        after = scatter_of(flow, psum)
        scattered = 1 if after is None else after.axis_size
        chains = []
        for dim in dims:
            collective = dataclasses.replace(psum, dim=dim)
            scatter = find_scatter_chain(flow, collective)
            if isinstance(scatter, Reason):
                outcomes.append((psum.op, scatter))
            else:
                chains.append(
                    DotPsum(collective=collective, scatter=scatter, gather=None, scattered=scattered)
                )
        for number, chain in enumerate(chains):
            if number == len(rounds):
                rounds.append({})
            rounds[number][psum.op] = chain
    for chosen in rounds:
        collectives = {op: chain.collective for op, chain in chosen.items()}
        gathers = find_gather_chains(flow, collectives, invariance, replicas)
        for op, chain in chosen.items():
            outcomes.append((op, chain))
            gather = gathers[op]
            if isinstance(gather, AllGatherDot) and _types_allow(flow, gather):
                outcomes.append((op, dataclasses.replace(chain, gather=gather)))
    return outcomes


def _types_allow(flow: Dataflow, gather: AllGatherDot) -> bool:
    """Whether a ring may hand out what it must: what it assembles has a varying type, a psum has not."""
    source = flow.avals[flow.ops[gather.collective.op].inputs[0]]  # type: ignore[index]
    axes = shims.varying_axes(source) & set(gather.collective.axes)
    made = [*gather.handed_out, *(value for dot in gather.dots for value in flow.ops[dot.op].outputs)]
    return all(axes <= shims.varying_axes(flow.avals[value]) for value in made)
