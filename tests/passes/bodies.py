"""Bodies of shard_map as jaxprs, to be matched on their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import PartitionSpec

from passes import match
from passes.graph import Dataflow, dataflow
from passes.match import Match
from tests.passes import spmd

Shapes = Sequence[tuple[tuple[int, ...], Any]]


def shard_body(body: Callable[..., Any], *shards: Any, axis_size: int = 4, check_vma: bool = True) -> Any:
    """The jaxpr of a per-device function of shards of these shapes and dtypes, over a mesh axis ``x``."""
    whole = [
        jax.ShapeDtypeStruct((axis_size * shape[0], *shape[1:]) if shape else shape, dtype)
        for shape, dtype in ((s.shape, s.dtype) for s in shards)
    ]
    specs = tuple(PartitionSpec("x") if s.shape else PartitionSpec() for s in shards)
    mapped = jax.shard_map(
        body, mesh=spmd.mesh_of(axis_size), in_specs=specs, out_specs=PartitionSpec("x"), check_vma=check_vma
    )
    return mapped_body(jax.make_jaxpr(mapped)(*whole))


def mapped_body(jaxpr: Any) -> Any:
    """The body of the first shard_map in a jaxpr."""
    return next(eqn for eqn in equations(jaxpr) if eqn.primitive.name == "shard_map").params["jaxpr"]


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of those inside it, calls before their bodies."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def matched(body: Callable[..., Any], *shards: Any, **options: Any) -> tuple[Dataflow, tuple[Match, ...]]:
    """The graph of a per-device function and what is matched in it."""
    jaxpr = shard_body(body, *shards, **options)
    return dataflow(jaxpr), match(jaxpr)
