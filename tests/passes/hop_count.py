"""How many hops a traced program makes, those in loops as often as they run."""

from __future__ import annotations

from typing import Any

from jax.extend import core as jex_core


def hops(jaxpr: Any, primitive: str = "ppermute") -> int:
    """Equations of a primitive in a jaxpr and those inside it, times the lengths of the loops around them."""
    total = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        total += eqn.primitive.name == primitive
        inner = sum(hops(each, primitive) for each in jex_core.jaxprs_in_params(eqn.params))
        total += inner * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
    return total
