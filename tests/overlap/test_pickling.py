"""Decorated functions that go to other processes."""

# mypy: allow-untyped-calls

import functools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from overlap import overlap_collectives
from tests.overlap.mlp import hops, mesh_of

ROOT = Path(__file__).parents[2]
X, W = np.arange(32, dtype=np.float32).reshape(8, 4), np.ones((4, 6), np.float32)


def gathered_dot(x: Any, w: Any, scale: float) -> Any:
    """A gather and its dot, scaled by a static number."""

    def body(x: Any, w: Any) -> Any:
        return lax.all_gather(x, "x", tiled=True) @ w

    specs = PartitionSpec("x"), PartitionSpec()
    mapped = jax.shard_map(body, mesh=mesh_of(), in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    return scale * mapped(x, w)


@functools.partial(overlap_collectives, policy="always", hardware="tpu_v5p")
@functools.partial(jax.jit, static_argnums=2)
def step(x: Any, w: Any, scale: float) -> Any:
    """As the decorator is written."""
    return gathered_dot(x, w, scale)


def rings_only(site: Any) -> bool:
    return bool(site.kind == "all_gather_dot")


def test_what_has_a_name_goes_by_it() -> None:
    assert pickle.loads(pickle.dumps(step)) is step


@pytest.mark.parametrize("policy", ["always", rings_only])
def test_what_has_none_is_jitted_and_decorated_anew_with_its_options(policy: Any) -> None:
    jitted = jax.jit(gathered_dot, static_argnums=2, donate_argnums=0)
    decorated = overlap_collectives(jitted, policy=policy, hardware="tpu_v5p", strict=True)
    again = pickle.loads(pickle.dumps(decorated))
    assert again is not decorated and again.hardware == decorated.hardware
    for function in (decorated, again):
        assert hops(function, X, W, 3.0) > 0
        np.testing.assert_allclose(function(jnp.array(X), W, 3.0), 3 * X @ W)
        donated = function.lower(X, W, 3.0).args_info[0][0].donated
        assert donated
        assert function.explain(X, W, 3.0).rewritten


def test_another_process_runs_it(tmp_path: Path) -> None:
    held = overlap_collectives(jax.jit(gathered_dot, static_argnums=2), policy="always", hardware="tpu_v5p")
    (tmp_path / "step").write_bytes(pickle.dumps(held))
    code = (
        "import pickle, sys, numpy as np\n"
        "step = pickle.load(open(sys.argv[1], 'rb'))\n"
        "x, w = np.arange(32, dtype=np.float32).reshape(8, 4), np.ones((4, 6), np.float32)\n"
        "print(float(step(x, w, 2.0).sum()), len(step.explain(x, w, 2.0).rewritten))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "step")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(float((2 * X @ W).sum())), "1"]


def test_a_jitted_function_that_was_pickled_by_itself_is_told_to_be_one() -> None:
    """As cloudpickle writes and reads one."""
    jitted: Any = jax.jit(gathered_dot, static_argnums=2)
    kind: Any = type(jitted)
    bare = kind.__new__(kind)
    bare.__setstate__(jitted.__getstate__())
    with pytest.raises(TypeError, match="a jitted function that was pickled and read back"):
        overlap_collectives(bare)
