"""What of this device's shard a gather sends: its parts, in the type in which they travel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax import lax

from passes import shims
from passes.chains import AllGatherDot
from passes.graph import Dataflow
from passes.hops import Places
from passes.wire import wire_dtype


def sent(
    flow: Dataflow, chain: AllGatherDot, places: Places, whole: Any, dim: int, bounds: Sequence[Fraction]
) -> list[Any]:
    """The parts of what travels between each bound and the next, shares of one dim, as they travel."""
    edges = [int(bound * whole.shape[dim]) for bound in bounds]
    dtype = _dtype(flow, chain)
    return [lax.convert_element_type(part, dtype) for part in slices(flow, chain, places, whole, dim, edges)]


def slices(
    flow: Dataflow, chain: AllGatherDot, places: Places, whole: Any, dim: int, edges: list[int]
) -> list[Any]:
    """The parts of what travels between each edge and the next, along one dim; not converted yet.

    TPU compilers make one copy of all slices of one size. Those of other sizes are a copy each that takes
    twice as long, and those that are then converted are copies after a conversion of the whole; unless where
    they start is computed, which makes each one copy that converts.
    """
    sizes = [end - start for start, end in itertools.pairwise(edges)]
    if len(sizes) == 1:
        return [whole]
    as_it_is = whole.dtype == _dtype(flow, chain)
    if (as_it_is and len(set(sizes)) == 1) or not _for_tpu(flow, chain):
        return [lax.slice_in_dim(whole, start, end, axis=dim) for start, end in itertools.pairwise(edges)]
    return [
        _computed_slice(places, whole, dim, start, size)
        for start, size in zip(edges[:-1], sizes, strict=True)
    ]


def passed_on(
    flow: Dataflow, chain: AllGatherDot, places: Places, arrived: Any, dim: int, start: int, size: int
) -> Any:
    """A part of what arrived, along one dim, to be sent on.

    For a TPU where it starts is computed, as in `slices`, unless elements are of a byte, which that slows.
    """
    if not _for_tpu(flow, chain) or arrived.dtype.itemsize == 1:
        return lax.slice_in_dim(arrived, start, start + size, axis=dim)
    return _computed_slice(places, arrived, dim, start, size)


def _computed_slice(places: Places, whole: Any, dim: int, start: int, size: int) -> Any:
    computed = lax.add(places.nothing, np.int32(start))
    return lax.dynamic_slice_in_dim(whole, computed, size, dim, allow_negative_indices=False)


def _dtype(flow: Dataflow, chain: AllGatherDot) -> Any:
    """The type in which what a chain gathers travels."""
    return wire_dtype(flow, chain) if _for_tpu(flow, chain) else flow.avals[chain.wire].dtype


def _for_tpu(flow: Dataflow, chain: AllGatherDot) -> bool:
    """Whether it travels between TPUs, and nothing differentiates it afterwards."""
    return not flow.differentiable and shims.on_tpu(flow.avals[chain.wire])
