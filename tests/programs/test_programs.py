"""Each program's loss and gradients are right, rewritten or not, and what stays has its reason."""

# mypy: allow-untyped-calls, no-warn-return-any

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from bench.programs import PROGRAMS
from bench.programs.program import Program
from overlap import overlap_collectives

ROOT: Final = Path(__file__).resolve().parents[2]

TOLERANCE: Final = 1e-4
"""Of each array's largest value, in float32."""

each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


# The same layers on whole arrays: no mesh, in their arguments' dtype.


def standardised(x: Array, epsilon: float) -> Array:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def gelu(x: Array) -> Array:
    return x / (1 + jnp.exp(-np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)))


def mlp(w: Any, x: Array) -> Array:
    return x + gelu(standardised(x, 1e-6) * w.norm @ w.up) @ w.down


def two_mlps(blocks: Any, x: Array) -> Array:
    for w in blocks:
        x = mlp(w, x)
    return x


def attention(q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    """Of one head, [B, S, h] each."""
    seq, width = q.shape[-2:]
    turns = np.exp(1j * np.outer(np.arange(seq), 10_000.0 ** (-np.arange(width // 2) / (width // 2))))

    def rotated(x: Array) -> Array:
        turned = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turns
        return jnp.concatenate([turned.real, turned.imag], -1)

    scores = rotated(q) @ rotated(k).mT / np.sqrt(width)
    if causal:
        scores = jnp.where(np.arange(seq)[None, :] > np.arange(seq)[:, None], -1e30, scores)
    return jax.nn.softmax(scores) @ v


def decoder_layer(w: Any, x: Array) -> Array:
    y = standardised(x, 1e-6) * w.attention_norm
    heads, kv_heads = w.query.shape[1], w.key.shape[1]
    for head in range(heads):
        kv = head * kv_heads // heads
        q, k, v = y @ w.query[:, head], y @ w.key[:, kv], y @ w.value[:, kv]
        x = x + attention(q, k, v, causal=True) @ w.output[head]
    y = standardised(x, 1e-6) * w.mlp_norm
    gate = y @ w.gate
    return x + (gate / (1 + jnp.exp(-gate)) * (y @ w.up)) @ w.down


def encoder_layer(w: Any, x: Array) -> Array:
    def norm(x: Array, w: Any) -> Array:
        return standardised(x - x.mean(-1, keepdims=True), 1e-5) * w.scale + w.bias

    y = norm(x, w.attention_norm)
    for head in range(w.query.kernel.shape[1]):
        q, k, v = (y @ p.kernel[:, head] + p.bias[head] for p in (w.query, w.key, w.value))
        x = x + attention(q, k, v, causal=False) @ w.output.kernel[head]
    x = x + w.output.bias
    hidden = gelu(norm(x, w.mlp_norm) @ w.up.kernel + w.up.bias)
    return x + hidden @ w.down.kernel + w.down.bias


def experts(w: Any, x: Array) -> Array:
    """One token at a time; each of 8 groups of tokens has its own queues."""
    y = standardised(x, 1e-6) * w.norm
    logits = y @ w.router
    choice = np.argmax(np.asarray(jax.lax.stop_gradient(logits)), -1)
    tokens, count = logits.shape
    capacity = 2 * (tokens // 8) // count
    in_group = choice.reshape(8, -1)
    before = np.array([[(g[:i] == g[i]).sum() for i in range(len(g))] for g in in_group]).reshape(-1)
    assert 0 < (before >= capacity).sum() < tokens / 2, (
        "the test needs some tokens that are over, and some not"
    )
    kept = np.where(before < capacity, 1.0, 0.0)
    chance = jax.nn.softmax(logits)[np.arange(tokens), choice] * kept
    out = jnp.zeros_like(x)
    for e in range(count):
        out += np.where(choice == e, 1.0, 0.0)[:, None] * (gelu(y @ w.up[e]) @ w.down[e])
    return x + chance[:, None] * out


REFERENCES: Final[Mapping[str, Callable[[Any, Array], Array]]] = {
    "data_parallel": mlp,
    "data_parallel_pmean": mlp,
    "fsdp_mlp": mlp,
    "megatron_mlp": two_mlps,
    "megatron_mlp_sequence": two_mlps,
    "megatron_mlp_norm_behind": two_mlps,
    "fsdp_tensor_layer": decoder_layer,
    "esm2_layer": encoder_layer,
    "mixture_of_experts": experts,
    "two_pods": mlp,
    "two_pods_scatter_first": mlp,
}


@cache
def reference(program: Program) -> Any:
    """Loss and gradients, in float64 on one device, of the program at its small size."""
    arguments = program.arguments(program.make_mesh())
    w, x = jax.tree.map(lambda a: np.asarray(a, np.float64), arguments)

    def loss(w: Any, x: Array) -> Array:
        return (REFERENCES[program.name](w, x) ** 2).mean()

    with jax.enable_x64(True):
        w, x = jax.tree.map(jnp.asarray, (w, x))
        found = jax.value_and_grad(loss, argnums=(0, 1))(w, x)
        assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float64)}
        return jax.tree.map(np.asarray, found)


def assert_same(actual: Any, expected: Any) -> None:
    def check(path: tuple[object, ...], a: Array, e: np.ndarray) -> None:
        error = np.abs(np.asarray(a, np.float64) - e).max()
        where = jax.tree_util.keystr(path)
        assert a.shape == e.shape and np.abs(e).max() > 0, where
        assert error <= TOLERANCE * np.abs(e).max(), f"{where}: {error}"

    jax.tree_util.tree_map_with_path(check, actual, expected)


@each_program
def test_loss_and_gradients_equal_the_unsharded_float64_reference(program: Program) -> None:
    mesh = program.make_mesh()
    loss, grads = program.make(mesh)(*program.arguments(mesh))
    assert loss.dtype == jnp.float32
    assert_same((loss, grads), reference(program))


@each_program
def test_rewritten_loss_and_gradients_equal_the_reference(program: Program) -> None:
    mesh = program.make_mesh()
    step = overlap_collectives(program.make(mesh), policy="always", strict=True, hardware="tpu_v5p")
    assert_same(step(*program.arguments(mesh)), reference(program))


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.local_gradients is None], ids=lambda program: program.name
)
def test_gradients_of_the_rewritten_loss_equal_the_reference(program: Program) -> None:
    mesh = program.make_mesh()
    loss = overlap_collectives(program.make_loss(mesh), policy="always", strict=True, hardware="tpu_v5p")
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    assert_same(step(*program.arguments(mesh)), reference(program))


# What is rewritten.

REWRITTEN: Final[Mapping[str, Mapping[str, int]]] = {
    "data_parallel": {"dot_psum": 2},
    "data_parallel_pmean": {"dot_psum": 2},
    "fsdp_mlp": {"all_gather_dot": 4, "dot_reduce_scatter": 2},
    "megatron_mlp": {"dot_psum": 8},
    "megatron_mlp_sequence": {"all_gather_dot": 4, "dot_reduce_scatter": 4, "dot_psum": 4},
    "megatron_mlp_norm_behind": {"all_gather_dot": 4, "dot_reduce_scatter": 2, "dot_psum": 4},
    "fsdp_tensor_layer": {"all_gather_dot": 9, "dot_reduce_scatter": 9},
    "esm2_layer": {"all_gather_dot": 8, "dot_reduce_scatter": 6},
    "mixture_of_experts": {"all_to_all_dot": 4, "dot_psum": 1},
    "two_pods": {"all_gather_dot": 2, "dot_reduce_scatter": 2},
    "two_pods_scatter_first": {"all_gather_dot": 2, "dot_reduce_scatter": 2},
}
"""How many sites of each kind."""

NOT_NEXT_TO_A_DOT: Final[Mapping[str, Mapping[str, int]]] = {
    # The loss, and the norms' scales.
    "data_parallel": {"psum": 2},
    "data_parallel_pmean": {"psum": 2},
    "fsdp_mlp": {"psum": 2},
    "megatron_mlp": {"psum": 3},
    "megatron_mlp_sequence": {"psum": 3},
    "megatron_mlp_norm_behind": {"psum": 3},
    "mixture_of_experts": {"psum": 2},
    # And the sums of squares over the sharded width, forward and backward.
    "fsdp_tensor_layer": {"psum": 7},
    # The loss, the biases and the norms. A layer norm of the gathered width has a derivative that needs the
    # whole width too, so that nothing can be scattered before.
    "esm2_layer": {"psum": 11},
    # The loss and the norm; and weights' gradients over the pods, which are scattered first.
    "two_pods": {"psum": 4},
    # The norm is summed over both axes, one after the other; weights over the pods, once they are scattered.
    "two_pods_scatter_first": {"psum": 5},
}
"""How many sites of each kind are kept because of that."""

ESCAPING: Final[Mapping[str, Mapping[str, int]]] = {
    "megatron_mlp_norm_behind": {"reduce_scatter": 2},
    "esm2_layer": {"reduce_scatter": 2},
}
"""How many sites have a partial sum that the derivative of the norm behind a gather needs whole."""

DOT_TAKEN: Final[Mapping[str, Mapping[str, int]]] = {
    "fsdp_tensor_layer": {"all_gather_dot": 2, "dot_reduce_scatter": 2},
    "esm2_layer": {"all_gather_dot": 2, "dot_reduce_scatter": 2},
}
"""How many sites of each kind share all their dots with other rings: weights are gathered over one axis,
and the activations that they multiply are gathered or scattered over the other."""


@each_program
def test_every_collective_is_rewritten_or_kept_for_its_reason(program: Program) -> None:
    mesh = program.make_mesh()
    step = overlap_collectives(program.make(mesh), policy="always", strict=True, hardware="tpu_v5p")
    report = step.explain(*program.shapes(mesh, "small"))
    assert Counter(site.kind for site in report.rewritten) == REWRITTEN[program.name]
    kept = Counter((site.kind, site.reason) for site in report.kept)
    expected = {(kind, "no_dot"): count for kind, count in NOT_NEXT_TO_A_DOT[program.name].items()}
    expected |= {(kind, "dot_taken"): count for kind, count in DOT_TAKEN.get(program.name, {}).items()}
    expected |= {(kind, "partial_sum_escapes"): n for kind, n in ESCAPING.get(program.name, {}).items()}
    assert kept == expected


@each_program
def test_real_widths_leave_only_dots_that_are_taken_besides(program: Program) -> None:
    mesh = program.make_mesh()
    step = overlap_collectives(program.make(mesh), policy="always", strict=True, hardware="tpu_v5p")
    report = step.explain(*program.shapes(mesh, "real"))
    kept = Counter(site.kind for site in report.kept if site.reason == "no_dot")
    assert kept == NOT_NEXT_TO_A_DOT[program.name]
    escaping = Counter(site.kind for site in report.kept if site.reason == "partial_sum_escapes")
    assert escaping == ESCAPING.get(program.name, {})
    assert {site.reason for site in report.kept} <= {"no_dot", "dot_taken", "partial_sum_escapes"}


# What the programs say of themselves.


def test_names_are_unique_and_each_program_has_a_reference() -> None:
    names = [program.name for program in PROGRAMS]
    assert len(names) == len(set(names))
    assert set(names) == set(REFERENCES)


@each_program
def test_shapes_describe_the_arguments(program: Program) -> None:
    mesh = program.make_mesh()

    def described(tree: object) -> object:
        return jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), tree)

    assert described(program.arguments(mesh)) == described(program.shapes(mesh, "small"))


def test_importing_the_programs_starts_no_backend() -> None:
    script = (
        "import bench.programs; from jax._src import xla_bridge as b; assert not b.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
