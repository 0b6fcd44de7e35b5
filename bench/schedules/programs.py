"""The patterns: each as manual code, as automatic sharding, and as the textbook ring, of the same arrays."""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.schedules.case import Case

AXIS: Final = "x"
"""The mesh axis that is communicated over."""

RESULT: Final = {"bfloat16": "bfloat16", "float32": "float32", "int8": "int32"}
"""Dtype of a dot's result, by that of its operands."""

_BYTES: Final = {"bfloat16": 2, "float32": 4, "int8": 1, "int32": 4}


@dataclass(frozen=True, slots=True)
class Moved:
    """What one collective of the manual program moves.

    Attributes:
      kind: "all_gather", "reduce_scatter" or "all_reduce".
      full_bytes: of the whole array, as in ``cost_model.group_collectives``.
    """

    kind: str
    full_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One case, to be compiled.

    Attributes:
      dtype: of the operands.
      shapes: of the operands, over all devices.
      in_specs, out_specs: how operands and results are sharded in every form of the program.
      manual: what one device does, with collectives.
      automatic: the same of whole arrays, given the mesh, without collectives.
      textbook: what one device does, with the ring as it is usually written.
      moved: the collectives of the manual program.
      flops: of the dots, on one device.
      differentiated: whether the program is the gradient of the mean square, with respect to every operand.
    """

    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    in_specs: tuple[P, ...]
    out_specs: Any
    manual: Callable[..., Any]
    automatic: Callable[[Mesh], Callable[..., Any]]
    textbook: Callable[..., Any]
    moved: tuple[Moved, ...]
    flops: int
    differentiated: bool = False

    def held_bytes(self, case: Case) -> int:
        """Bytes that a device holds at least: its operands and the largest array that a collective moves."""
        sizes = dict(zip(case.slice.axis_names, case.slice.mesh_shape, strict=True))
        own = 0
        for shape, spec in zip(self.shapes, self.in_specs, strict=True):
            axes = [axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))]
            shards = math.prod(sizes[axis] for axis in axes if axis is not None)
            own += math.prod(shape) // shards * _BYTES[self.dtype]
        return own + max(moved.full_bytes for moved in self.moved)


# The textbook ring.


def _left(size: int) -> list[tuple[int, int]]:
    return [((device + 1) % size, device) for device in range(size)]


def ring_gather(shard: Array, size: int) -> Iterator[tuple[Array, Array]]:
    """Each shard of the axis as it comes by, with its owner: ``x = ppermute(x)``, one way."""
    index = lax.axis_index(AXIS)
    for step in range(size):
        if step:
            shard = lax.ppermute(shard, AXIS, _left(size))
        yield lax.rem(index + step, size), shard


def ring_scatter(partial: Callable[[Array], Array], size: int) -> Array:
    """The sum over the axis of ``partial(owner)``, of which every device gets its own."""
    index = lax.axis_index(AXIS)
    total = partial(lax.rem(index + size - 1, size))
    for step in range(1, size):
        total = lax.ppermute(total, AXIS, [(b, a) for a, b in _left(size)])
        total = total + partial(lax.rem(index + size - 1 - step, size))
    return total


def ring_rows_dots(x: Array, weights: tuple[Array, ...], size: int) -> tuple[Array, ...]:
    """``all_gather(x) @ w`` for each w: x [t, D], w [D, f] → [size·t, f]."""
    rows = x.shape[0]
    outs = [jnp.zeros((size * rows, w.shape[1]), _result(x)) for w in weights]
    for owner, shard in ring_gather(x, size):
        for number, w in enumerate(weights):
            outs[number] = lax.dynamic_update_slice_in_dim(outs[number], dot(shard, w), owner * rows, 0)
    return tuple(outs)


def ring_dot_scatter(x: Array, w: Array, size: int) -> Array:
    """``psum_scatter(x @ w)``: x [size·t, f], w [f, D] → [t, D]."""
    rows = x.shape[0] // size
    return ring_scatter(lambda owner: dot(lax.dynamic_slice_in_dim(x, owner * rows, rows, 0), w), size)


# The patterns. One device has t tokens; the axis has p devices, so that t·p rows are gathered.


def dot(x: Array, w: Array) -> Array:
    """``x @ w``, of the type that results have."""
    return jnp.matmul(x, w, preferred_element_type=_result(x))


def _result(x: Array) -> Any:
    return jnp.dtype(RESULT[x.dtype.name])


def _gather(x: Array) -> Array:
    return lax.all_gather(x, AXIS, axis=0, tiled=True)


def _scatter(x: Array) -> Array:
    return lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True)


class _Sizes:
    """The numbers of a case, and its two ways to shard rows: over all devices, or the other axis alone."""

    def __init__(self, case: Case) -> None:
        self.p, self.others = case.slice.axis_size, case.slice.others
        self.t, self.d, self.f = case.tokens, case.width.d_model, case.width.d_ff
        self.rows = self.t * self.p * self.others
        self.size, self.result_size = _BYTES[case.dtype], _BYTES[RESULT[case.dtype]]
        # A TPU's compiler rounds float32 operands of dots to bfloat16 before it gathers them.
        rounds = case.dtype == "float32" and case.slice.hardware.startswith("tpu")
        self.gathered_size = _BYTES["bfloat16"] if rounds else self.size
        self.whole: Any = "data" if self.others > 1 else None
        self.sharded: Any = ("data", AXIS) if self.others > 1 else AXIS


def gather_free(case: Case) -> Problem:
    """``all_gather(x) @ w_up``: rows are gathered, and are the dot's free dim."""
    n = _Sizes(case)
    return Problem(
        dtype=case.dtype,
        shapes=((n.rows, n.d), (n.d, n.f)),
        in_specs=(P(n.sharded), P(None, AXIS)),
        out_specs=P(n.whole, AXIS),
        manual=lambda x, w: dot(_gather(x), w),
        automatic=lambda mesh: dot,
        textbook=lambda x, w: ring_rows_dots(x, (w,), n.p)[0],
        moved=(Moved("all_gather", n.t * n.p * n.d * n.gathered_size),),
        flops=2 * n.t * n.d * n.f,
    )


def gather_contracting(case: Case) -> Problem:
    """``x @ all_gather(w_up)``: FSDP's weights, sharded and gathered along the contracting dim."""
    n = _Sizes(case)

    def textbook(x: Array, w: Array) -> Array:
        columns, total = w.shape[0], jnp.zeros((x.shape[0], w.shape[1]), _result(x))
        for owner, shard in ring_gather(w, n.p):
            total = total + dot(lax.dynamic_slice_in_dim(x, owner * columns, columns, 1), shard)
        return total

    return Problem(
        dtype=case.dtype,
        shapes=((n.rows, n.d), (n.d, n.f)),
        in_specs=(P(n.sharded), P(AXIS)),
        out_specs=P(n.sharded),
        manual=lambda x, w: dot(x, _gather(w)),
        automatic=lambda mesh: dot,
        textbook=textbook,
        moved=(Moved("all_gather", n.d * n.f * n.gathered_size),),
        flops=2 * n.t * n.d * n.f,
    )


def gather_batch(case: Case) -> Problem:
    """``einsum("etd,edf->etf", x, all_gather(w))``: weights of p experts, of a quarter of the width each."""
    n = _Sizes(case)
    f = n.f // 4

    def textbook(x: Array, w: Array) -> Array:
        out = jnp.zeros((*x.shape[:2], w.shape[2]), _result(x))
        for owner, shard in ring_gather(w, n.p):
            part = dot(lax.dynamic_slice_in_dim(x, owner, 1, 0), shard)
            out = lax.dynamic_update_slice_in_dim(out, part, owner, 0)
        return out

    return Problem(
        dtype=case.dtype,
        shapes=((n.p, n.rows, n.d), (n.p, n.d, f)),
        in_specs=(P(None, n.sharded), P(AXIS)),
        out_specs=P(None, n.sharded),
        manual=lambda x, w: dot(x, _gather(w)),
        automatic=lambda mesh: dot,
        textbook=textbook,
        moved=(Moved("all_gather", n.p * n.d * f * n.gathered_size),),
        flops=2 * n.p * n.t * n.d * f,
    )


def gather_shared(case: Case) -> Problem:
    """One ``all_gather(x)`` for the three dots of multi-head attention: queries, keys, values."""
    n = _Sizes(case)

    def manual(x: Array, *weights: Array) -> tuple[Array, ...]:
        whole = _gather(x)
        return tuple(dot(whole, w) for w in weights)

    return Problem(
        dtype=case.dtype,
        shapes=((n.rows, n.d), *[(n.d, n.d)] * 3),
        in_specs=(P(n.sharded), *[P(None, AXIS)] * 3),
        out_specs=(P(n.whole, AXIS),) * 3,
        manual=manual,
        automatic=lambda mesh: lambda x, *ws: tuple(dot(x, w) for w in ws),
        textbook=lambda x, *ws: ring_rows_dots(x, ws, n.p),
        moved=(Moved("all_gather", n.t * n.p * n.d * n.gathered_size),),
        flops=2 * n.t * n.d * 3 * n.d,
    )


def scatter_free(case: Case) -> Problem:
    """``psum_scatter(x @ w_down)``: partial sums are scattered along rows, the dot's free dim."""
    n = _Sizes(case)
    return Problem(
        dtype=case.dtype,
        shapes=((n.rows, n.f), (n.f, n.d)),
        in_specs=(P(n.whole, AXIS), P(AXIS)),
        out_specs=P(n.sharded),
        manual=lambda x, w: _scatter(dot(x, w)),
        automatic=lambda mesh: dot,
        textbook=lambda x, w: ring_dot_scatter(x, w, n.p),
        moved=(Moved("reduce_scatter", n.t * n.p * n.d * n.result_size),),
        flops=2 * n.t * n.d * n.f,
    )


def psum(case: Case) -> Problem:
    """``psum(x @ w_down)``: Megatron's row-parallel linear layer without sequence parallelism."""
    n = _Sizes(case)
    return Problem(
        dtype=case.dtype,
        shapes=((n.rows, n.f), (n.f, n.d)),
        in_specs=(P(n.whole, AXIS), P(AXIS)),
        out_specs=P(n.whole),
        manual=lambda x, w: lax.psum(dot(x, w), AXIS),
        automatic=lambda mesh: dot,
        textbook=lambda x, w: _gather(ring_dot_scatter(x, w, n.p)),
        moved=(Moved("all_reduce", n.t * n.p * n.d * n.result_size),),
        flops=2 * n.t * n.d * n.f,
    )


def mlp(case: Case) -> Problem:
    """Megatron's MLP with sequence parallelism: gather, dots up, activation, dot down, scatter."""
    n = _Sizes(case)
    ups = 2 if case.width.gated else 1

    def activation(up: tuple[Array, ...]) -> Array:
        return jax.nn.silu(up[0]) * up[1] if ups == 2 else jax.nn.gelu(up[0])

    def manual(x: Array, down: Array, *up: Array) -> Array:
        whole = _gather(x)
        return _scatter(dot(activation(tuple(dot(whole, w) for w in up)), down))

    def automatic(mesh: Mesh) -> Callable[..., Any]:
        hidden = NamedSharding(mesh, P(n.whole, AXIS))

        def whole(x: Array, down: Array, *up: Array) -> Array:
            ups = tuple(lax.with_sharding_constraint(dot(x, w), hidden) for w in up)
            return dot(activation(ups), down)

        return whole

    def textbook(x: Array, down: Array, *up: Array) -> Array:
        return ring_dot_scatter(activation(ring_rows_dots(x, up, n.p)), down, n.p)

    whole_bytes = n.t * n.p * n.d * n.size
    return Problem(
        dtype=case.dtype,
        shapes=((n.rows, n.d), (n.f, n.d), *[(n.d, n.f)] * ups),
        in_specs=(P(n.sharded), P(AXIS), *[P(None, AXIS)] * ups),
        out_specs=P(n.sharded),
        manual=manual,
        automatic=automatic,
        textbook=textbook,
        moved=(Moved("all_gather", whole_bytes), Moved("reduce_scatter", whole_bytes)),
        flops=2 * n.t * n.d * n.f * (ups + 1),
    )


def mlp_grad(case: Case) -> Problem:
    """The same under ``jax.grad``: three times the FLOPs, a gather and a scatter each way."""
    forward = mlp(case)
    return replace(forward, moved=forward.moved * 2, flops=3 * forward.flops, differentiated=True)


PATTERNS: Final[dict[str, Callable[[Case], Problem]]] = {
    "gather_free": gather_free,
    "gather_contracting": gather_contracting,
    "gather_batch": gather_batch,
    "gather_shared": gather_shared,
    "scatter_free": scatter_free,
    "psum": psum,
    "mlp": mlp,
    "mlp_grad": mlp_grad,
}


def problem(case: Case) -> Problem:
    """What there is to compile for a case."""
    return PATTERNS[case.pattern](case)


# The programs.


def operands(problem: Problem, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The types of the program's arguments, sharded."""
    return tuple(
        jax.ShapeDtypeStruct(shape, problem.dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(problem.shapes, problem.in_specs, strict=True)
    )


def manual(problem: Problem, mesh: Mesh) -> Any:
    """The program as it is written by hand, jitted: the original."""
    return _jitted(problem, mesh, _mapped(problem, mesh, problem.manual))


def textbook(problem: Problem, mesh: Mesh) -> Any:
    """The program with the usual ring, jitted."""
    return _jitted(problem, mesh, _mapped(problem, mesh, problem.textbook, check_vma=False))


def automatic(problem: Problem, mesh: Mesh) -> Any:
    """The program of whole arrays, jitted with shardings: the compiler puts the collectives in."""
    return _jitted(problem, mesh, problem.automatic(mesh))


def _mapped(
    problem: Problem, mesh: Mesh, body: Callable[..., Any], *, check_vma: bool = True
) -> Callable[..., Any]:
    return jax.shard_map(
        body, mesh=mesh, in_specs=problem.in_specs, out_specs=problem.out_specs, check_vma=check_vma
    )


def called(jitted: Any, problem: Problem, mesh: Mesh) -> Any:
    """The same program as a call within one, which is how this library's programs hold what they keep."""
    body = jax.jit(jitted.__wrapped__)

    def program(*operands: Array) -> Any:
        return body(*operands)

    return jax.jit(program, **_shardings(problem, mesh))


def compiled_with(jitted: Any, problem: Problem, mesh: Mesh, options: Mapping[str, str]) -> Any:
    """The same program, jitted with compiler options."""
    return jax.jit(jitted.__wrapped__, compiler_options=dict(options), **_shardings(problem, mesh))


def _jitted(problem: Problem, mesh: Mesh, whole: Callable[..., Any]) -> Any:
    if problem.differentiated:
        forward = whole

        def loss(*operands: Array) -> Array:
            return jnp.mean(jnp.square(forward(*operands).astype(jnp.float32)))

        whole = jax.grad(loss, argnums=tuple(range(len(problem.shapes))))

    def program(*operands: Array) -> Any:
        return whole(*operands)

    return jax.jit(program, **_shardings(problem, mesh))


def _shardings(problem: Problem, mesh: Mesh) -> dict[str, Any]:
    results = problem.in_specs if problem.differentiated else problem.out_specs

    def shardings(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)

    return {"in_shardings": shardings(problem.in_specs), "out_shardings": shardings(results)}


def _is_spec(value: Any) -> bool:
    return isinstance(value, P)
