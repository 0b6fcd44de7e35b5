"""A place in a program where the processes of a job wait for one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh


def meeting(mesh: Mesh) -> Callable[[], Any]:
    """What waits until all processes of a mesh have called it.

    They leave what they did before at different times; one that is late would count as slow communication.
    """
    names = mesh.axis_names
    here = jax.NamedSharding(mesh, jax.P(names))
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, names), mesh=mesh, in_specs=jax.P(names), out_specs=jax.P()
    )
    ones = np.ones(mesh.size, np.float32)
    token = jax.make_array_from_callback(ones.shape, here, lambda index: ones[index])
    everyone = jax.jit(total).lower(token).compile()
    return lambda: jax.block_until_ready(everyone(token))
