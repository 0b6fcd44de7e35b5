"""The decorated function composes with JAX's transformations, on either side; values and effects stay."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import passes
from tests.overlap.mlp import SPECS, Function, always, check, hops, mesh_of, mlp, reference, shard_body

REF = reference()
TANGENTS = reference(seed=1).arguments
C = REF.cotangent


@dataclasses.dataclass(frozen=True)
class Transformation:
    """A transformation of ``mlp``.

    Attributes:
      apply: from a function of (x, w, v) to one of the same arguments, transformed.
      wanted: what it gives for REF, in float64.
    """

    apply: Any
    wanted: Any


def _tangents() -> tuple[Any, ...]:
    return tuple(map(jnp.asarray, TANGENTS))


def _loss(f: Function) -> Function:
    return lambda *args: (f(*args) * C).sum()


def _scan(f: Function) -> Function:
    def step(carry: Any, weights: Any) -> tuple[Any, Any]:
        y = f(carry, *weights)
        return y / 8, y.sum()

    def stacked(a: Any) -> Any:
        return jnp.stack([a, a / 2])

    return lambda x, w, v: lax.scan(step, x, (stacked(w), stacked(v)))


def _scanned() -> Any:
    carry, sums = REF.x, []
    for scale in (1, 0.5):
        y = dataclasses.replace(REF, x=carry, w=scale * REF.w, v=scale * REF.v).value()
        carry = y / 8
        sums.append(y.sum())
    return carry, np.array(sums)


def _branch(f: Function) -> Function:
    return lambda x, w, v: lax.cond(x[0, 0] > -9, f, lambda x, w, v: x, x, w, v)


def _loop(f: Function) -> Function:
    return lambda x, w, v: lax.fori_loop(0, 2, lambda _, carry: f(carry, w, v) / 8, x)


def _looped() -> Any:
    first = dataclasses.replace(REF, x=REF.value() / 8)
    return first.value() / 8


def _custom_vjp(f: Function) -> Function:
    @jax.custom_vjp
    def g(x: Any, w: Any, v: Any) -> Any:
        return f(x, w, v)

    def forward(x: Any, w: Any, v: Any) -> Any:
        return jax.vjp(f, x, w, v)

    g.defvjp(forward, lambda pull, c: pull(c))
    return jax.grad(_loss(g), argnums=(0, 1, 2))


GRADIENTS = REF.gradients()
TANGENT = REF.tangent(*(np.asarray(t, np.float64) for t in TANGENTS))

TRANSFORMATIONS = {
    "jit": Transformation(jax.jit, REF.value()),
    "grad": Transformation(lambda f: jax.grad(_loss(f), argnums=(0, 1, 2)), GRADIENTS),
    "value_and_grad": Transformation(
        lambda f: jax.value_and_grad(_loss(f), argnums=1), ((REF.value() * REF.c).sum(), GRADIENTS[1])
    ),
    "vjp": Transformation(lambda f: lambda *args: jax.vjp(f, *args)[1](C), GRADIENTS),
    "jvp": Transformation(lambda f: lambda *args: jax.jvp(f, args, _tangents()), (REF.value(), TANGENT)),
    "linearize": Transformation(lambda f: lambda *args: jax.linearize(f, *args)[1](*_tangents()), TANGENT),
    "vmap": Transformation(
        lambda f: (
            lambda x, w, v: jax.vmap(f, in_axes=(0, None, -1))(
                jnp.stack([x, 2 * x]), w, jnp.stack([v, 3 * v], axis=-1)
            )
        ),
        np.stack([REF.value(), 12 * REF.value()]),
    ),
    "vmap of grad": Transformation(
        lambda f: (
            lambda x, w, v: jax.vmap(jax.grad(_loss(f), argnums=1), in_axes=(None, 0, None))(
                x, jnp.stack([w, 2 * w]), v
            )
        ),
        np.stack([GRADIENTS[1], 2 * GRADIENTS[1]]),
    ),
    "scan": Transformation(_scan, _scanned()),
    "fori_loop": Transformation(_loop, _looped()),
    "cond": Transformation(_branch, REF.value()),
    "checkpoint": Transformation(lambda f: jax.grad(_loss(jax.checkpoint(f)), argnums=(0, 1, 2)), GRADIENTS),
    "checkpoint with a policy": Transformation(
        lambda f: jax.grad(
            _loss(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)), argnums=(0, 1, 2)
        ),
        GRADIENTS,
    ),
    "custom_vjp": Transformation(_custom_vjp, GRADIENTS),
    "jit of grad": Transformation(lambda f: jax.jit(jax.grad(_loss(f), argnums=(0, 1, 2))), GRADIENTS),
}

each = pytest.mark.parametrize("name", TRANSFORMATIONS)


@each
def test_transformation_of_the_decorated_function(name: str) -> None:
    t = TRANSFORMATIONS[name]
    transformed = t.apply(always(jax.jit(mlp())))
    check(transformed(*REF.arguments), t.wanted)
    assert hops(transformed, *REF.arguments) > 0


@each
def test_decorated_transformation(name: str) -> None:
    t = TRANSFORMATIONS[name]
    decorated = always(jax.jit(t.apply(mlp())))
    check(decorated(*REF.arguments), t.wanted)
    assert hops(decorated, *REF.arguments) > 0
    assert decorated.explain(*REF.arguments).rewritten


@pytest.mark.parametrize("name", ["grad", "vmap", "scan", "checkpoint"])
def test_decorated_on_both_sides(name: str) -> None:
    t = TRANSFORMATIONS[name]
    decorated = always(jax.jit(t.apply(always(jax.jit(mlp())))))
    check(decorated(*REF.arguments), t.wanted)
    assert hops(decorated, *REF.arguments) > 0


KEPT = pytest.mark.parametrize(
    "policy", ["never", lambda _: False], ids=["without its derivative", "and its derivative looked at"]
)
"""Policies under which nothing is rewritten."""


def test_decorated_on_both_sides_has_each_site_once() -> None:
    inner = always(jax.jit(mlp()), policy=lambda _: False)
    report = always(jax.jit(lambda *arguments: 2 * inner(*arguments))).explain(*REF.arguments)
    assert [site.kind for site in report.sites] == ["all_gather_dot", "dot_reduce_scatter"]
    assert len(report.rewritten) == 2


@KEPT
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformation_of_an_original_that_is_kept(name: str, policy: Any) -> None:
    t = TRANSFORMATIONS[name]
    transformed = t.apply(always(jax.jit(mlp()), policy=policy))
    check(transformed(*REF.arguments), t.wanted)
    assert hops(transformed, *REF.arguments) == 0


def test_a_program_without_collectives_is_not_traced_again_and_its_derivative_is_rewritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def columns(x: Any, w: Any) -> Any:
        return jnp.sin(
            jax.shard_map(jnp.dot, mesh=mesh_of(), in_specs=(P(), SPECS[1]), out_specs=SPECS[1])(x, w)
        )

    def refused(plan: passes.Plan) -> Any:
        raise AssertionError(f"{plan.path} is traced again")

    decorated, arguments = always(jax.jit(columns)), REF.arguments[:2]
    with monkeypatch.context() as patched:
        patched.setattr(passes, "rewritten", refused)
        check(decorated(*arguments), np.sin(REF.x @ REF.w))
    gradient = jax.grad(lambda *both: decorated(*both).sum(), argnums=(0, 1))
    slope = np.cos(REF.x @ REF.w)
    check(gradient(*arguments), (slope @ REF.w.T, REF.x.T @ slope))
    assert hops(gradient, *arguments) > 0


@KEPT
def test_an_argument_that_a_program_that_is_kept_never_reads(policy: Any) -> None:
    decorated = always(jax.jit(lambda unread, x, w, v: mlp()(x, w, v)), policy=policy)
    check(decorated({"unread": 1.0}, *REF.arguments), REF.value())
    gradient = jax.grad(lambda *args: (decorated(*args) * C).sum(), argnums=(0, 1, 2, 3))
    check(gradient(1.0, *REF.arguments), (np.zeros(()), *GRADIENTS))


def test_at_compile_time() -> None:
    """Constants' equations run at once there, but for those of a shard_map's body."""
    decorated = always(jax.jit(mlp()))
    arguments = tuple(map(jnp.asarray, REF.arguments))

    @jax.jit
    def scaled(factor: Any) -> Any:
        with jax.ensure_compile_time_eval():
            assert len(decorated.explain(*arguments).rewritten) == 2
            y = decorated(*arguments)
        return factor * y

    check(scaled(2.0), 2 * REF.value())
    assert hops(decorated, *arguments) > 0


def test_eval_shape_on_either_side() -> None:
    jitted = jax.jit(lambda *args: {"y": mlp()(*args), "none": None})
    shape = jax.eval_shape(always(jitted), *REF.arguments)
    assert shape == jax.eval_shape(jitted, *REF.arguments)
    decorated = always(jax.jit(lambda x, w, v: jnp.zeros(jax.eval_shape(mlp(), x, w, v).shape)))
    assert decorated(*REF.arguments).shape == (8, 6)


@pytest.mark.parametrize("policy", ["auto", "always", "never", "verify"])
def test_a_program_of_symbolic_shapes_is_exported_as_written(policy: Any) -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    x, w, v = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in REF.arguments)
    shapes = jax.ShapeDtypeStruct((4 * batch, x.shape[1]), x.dtype), w, v
    decorated = always(jax.jit(mlp()), policy=policy, hardware="tpu_v5p")
    derivative = jax.jit(jax.grad(lambda *args: decorated(*args).sum(), argnums=(0, 1, 2)))
    for function in (decorated, derivative):
        assert "permute" not in str(jax.export.export(function)(*shapes).mlir_module())
    assert [site.reason for site in decorated.explain(*shapes).sites] == ["symbolic_shape"] * 2


def test_weak_types_survive() -> None:
    jitted = jax.jit(lambda s, x, w, v: (2.0 * s, mlp()(x, w, v) * s))
    shapes = jax.eval_shape(always(jitted), 3.0, *REF.arguments)
    wanted = jax.eval_shape(jitted, 3.0, *REF.arguments)
    assert [s.weak_type for s in shapes] == [s.weak_type for s in wanted] == [True, False]


def test_second_derivatives() -> None:
    def curvature(f: Function) -> Function:
        inner = jax.grad(_loss(f), argnums=1)
        return jax.grad(lambda x, w, v: (inner(x, w, v) * TANGENTS[1]).sum(), argnums=1)

    # loss = sum((x w)² (c vᵀ)), so its Hessian applied to t is 2 xᵀ ((x t) * (c vᵀ)).
    t = np.asarray(TANGENTS[1], np.float64)
    wanted = 2 * REF.x.T @ ((REF.x @ t) * (REF.c @ REF.v.T))
    check(curvature(always(mlp()))(*REF.arguments), wanted)
    check(always(jax.jit(curvature(mlp())))(*REF.arguments), wanted)


@pytest.mark.parametrize("policy", ["always", "never", lambda _: False])
def test_second_derivatives_backward_over_forward(policy: Any) -> None:
    def curvature(f: Function) -> Function:
        def along(x: Any, w: Any, v: Any) -> Any:
            return jax.jvp(lambda x: f(x, w, v), (x,), _tangents()[:1])[1]

        return jax.grad(lambda *args: (along(*args) * C).sum(), argnums=(1, 2))

    # (x w)² v has the slope 2 (x w * t w) v along t.
    t, back = np.asarray(TANGENTS[0], np.float64), REF.c @ REF.v.T
    h, moved = REF.x @ REF.w, t @ REF.w
    wanted = (2 * (REF.x.T @ (moved * back) + t.T @ (h * back)), 2 * (h * moved).T @ REF.c)
    arguments = tuple(map(jnp.asarray, REF.arguments))
    check(curvature(always(jax.jit(mlp()), policy=policy))(*arguments), wanted)
    check(always(jax.jit(curvature(mlp())), policy=policy)(*arguments), wanted)


@pytest.mark.parametrize("jitted", [False, True])
def test_the_linear_map_of_linearize_finds_the_mesh_by_itself(jitted: bool) -> None:
    """Its arguments lie on one device, and no argument or constraint names the mesh."""
    linear = jax.linearize(always(jax.jit(mlp())), *REF.arguments)[1]
    check((jax.jit(linear) if jitted else linear)(*_tangents()), TANGENT)


# Transposes of functions that are linear in an argument: ``y w v`` in ``y``.


def _linear_body(y: Any, w: Any, v: Any) -> Any:
    return lax.psum_scatter(lax.all_gather(y, "x", tiled=True) @ w @ v, "x", tiled=True)


def _linear_map() -> Any:
    return jax.jit(jax.shard_map(_linear_body, mesh=mesh_of(), in_specs=SPECS, out_specs=P("x")))


def _transposed(f: Function, y: Any, w: Any, v: Any) -> Function:
    return lambda c: jax.linear_transpose(lambda y: f(y, w, v), y)(c)[0]


def test_linear_transpose_is_the_originals_rewritten() -> None:
    y, w, v = map(jnp.asarray, REF.arguments)
    transposed = _transposed(always(_linear_map()), y, w, v)
    for run in (transposed, jax.jit(transposed)):
        check(run(jnp.asarray(C)), REF.c @ (REF.w @ REF.v).T)
    assert hops(transposed, jnp.asarray(C)) >= 6


@KEPT
def test_linear_transpose_of_an_original_that_is_kept(policy: Any) -> None:
    y, w, v = map(jnp.asarray, REF.arguments)
    run = _transposed(always(_linear_map(), policy=policy), y, w, v)
    check(run(jnp.asarray(C)), REF.c @ (REF.w @ REF.v).T)


def test_linear_transpose_and_vmap() -> None:
    decorated = always(_linear_map())
    y, w, v = map(jnp.asarray, REF.arguments)
    ws, cs = jnp.stack([w, 3 * w]), jnp.stack([C, 2 * C])
    back = REF.c @ (REF.w @ REF.v).T
    check(jax.vmap(_transposed(decorated, y, w, v))(cs), np.stack([back, 2 * back]))
    check(jax.vmap(lambda w, c: _transposed(decorated, y, w, v)(c))(ws, cs), np.stack([back, 6 * back]))
    # Of the batched function, in an argument that is the same for all, and in one that is not.
    for ys, axis, wanted in ((y, None, 7 * back), (jnp.stack([y, y]), 0, np.stack([back, 6 * back]))):
        batched = jax.vmap(decorated, in_axes=(axis, 0, None))
        check(_transposed(batched, ys, ws, v)(cs), wanted)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="before jax 0.12 a transpose goes into whatever has an effect, as a psum has inside of shard_map",
)
@pytest.mark.parametrize("vma", [True, False])
def test_linear_transpose_inside_shard_map(vma: bool) -> None:
    decorated = always(jax.jit(_linear_body))

    def body(c: Any, w: Any, v: Any) -> Any:
        return _transposed(decorated, jax.typeof(c), w, v)(c)

    mapped = jax.shard_map(body, mesh=mesh_of(), in_specs=SPECS, out_specs=P("x"), check_vma=vma)
    check(jax.jit(mapped)(C, *REF.arguments[1:]), REF.c @ (REF.w @ REF.v).T)


def test_the_gradient_of_a_solver_around_it() -> None:
    """Of ``y + y w v / 100 = b``: its gradient by ``b`` solves the transposed system."""
    decorated = always(_linear_map())
    b, w, v = map(jnp.asarray, REF.arguments)

    def loss(b: Any) -> Any:
        solved, _ = jax.scipy.sparse.linalg.bicgstab(lambda y: y + decorated(y, w, v) / 100, b)
        return (solved * C).sum()

    system = np.eye(REF.w.shape[0]) + REF.w @ REF.v / 100
    check(jax.grad(loss)(b), REF.c @ np.linalg.inv(system).T)


def test_linear_transpose_with_a_result_of_another_kind() -> None:
    """Nothing comes back for keys of random numbers, nor for a result that the argument does not reach."""
    y, w, v = map(jnp.asarray, REF.arguments)

    def program(y: Any, w: Any, v: Any, key: Any) -> Any:
        return _linear_map()(y, w, v), jax.random.split(key), w * 2

    decorated = always(jax.jit(program))
    run = _transposed(lambda y, w, v: decorated(y, w, v, jax.random.key(0))[::2], y, w, v)
    check(run((jnp.asarray(C), jnp.zeros(w.shape))), REF.c @ (REF.w @ REF.v).T)


@jax.custom_vjp
def router_loss(x: Any) -> Any:
    """A value without a forward derivative."""
    return jnp.mean(x * x)


router_loss.defvjp(lambda x: (jnp.mean(x * x), x), lambda x, c: (2 * c * x / x.size,))


@pytest.mark.parametrize("inside", [False, True], ids=["outside of shard_map", "in shard_map"])
def test_what_is_not_used_needs_no_forward_derivative(inside: bool) -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        router_loss(x)
        return shard_body(x, w, v)

    def outside(x: Any, w: Any, v: Any) -> Any:
        router_loss(x)
        return mlp()(x, w, v)

    function = jax.shard_map(body, mesh=mesh_of(), in_specs=SPECS, out_specs=P("x")) if inside else outside
    decorated = always(jax.jit(function))
    assert hops(decorated, *REF.arguments)
    for transformed in (decorated, jax.jit(decorated)):
        check(jax.jvp(transformed, REF.arguments, _tangents())[1], TANGENT)
        check(jax.linearize(transformed, *REF.arguments)[1](*_tangents()), TANGENT)


# Closed-over tracers.


def test_closed_over_tracers_of_grad() -> None:
    def loss(x: Any, w: Any, v: Any) -> Any:
        inner = always(jax.jit(lambda w: mlp()(x, w, v)))
        return (inner(w) * C).sum()

    check(jax.grad(loss, argnums=(0, 1, 2))(*REF.arguments), GRADIENTS)
    check(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*REF.arguments), GRADIENTS)


@KEPT
def test_closed_over_tracers_of_a_program_that_is_kept(policy: Any) -> None:
    def loss(x: Any, w: Any, v: Any) -> Any:
        inner = always(jax.jit(lambda w: mlp()(x, w, v)), policy=policy)
        return (inner(w) * C).sum()

    check(jax.grad(loss, argnums=(0, 1, 2))(*REF.arguments), GRADIENTS)


def test_closed_over_tracers_of_vmap_and_scan() -> None:
    def mapped(scale: Any) -> Any:
        return always(jax.jit(lambda x, w, v: mlp()(x * scale, w, v)))(*REF.arguments)

    scales = jnp.array([1.0, 3.0])
    wanted = np.stack([REF.value(), 9 * REF.value()])
    check(jax.vmap(mapped)(scales), wanted)
    check(lax.map(mapped, scales), wanted)
    check(always(jax.jit(jax.vmap(mapped)))(scales), wanted)


def test_explain_sees_closed_over_tracers() -> None:
    reports = []

    def loss(x: Any, w: Any, v: Any) -> Any:
        inner = always(jax.jit(lambda w: mlp()(x, w, v)))
        reports.append(inner.explain(w))
        return inner(w).sum()

    jax.grad(loss)(*REF.arguments)
    assert len(reports[0].rewritten) == 2


# Meshes.


def test_decorated_inside_shard_map() -> None:
    mesh = mesh_of()
    inner = always(jax.jit(shard_body))
    outer = jax.jit(
        jax.shard_map(lambda x, w, v: inner(x, w, v), mesh=mesh, in_specs=SPECS, out_specs=P("x"))
    )
    check(outer(*REF.arguments), REF.value())
    assert hops(outer, *REF.arguments) > 0
    check(jax.grad(_loss(outer), argnums=(0, 1, 2))(*REF.arguments), GRADIENTS)
    check(always(outer)(*REF.arguments), REF.value())


@KEPT
def test_inside_shard_map_an_original_that_is_kept(policy: Any) -> None:
    inner = always(jax.jit(shard_body), policy=policy)
    outer = jax.shard_map(lambda *shards: inner(*shards), mesh=mesh_of(), in_specs=SPECS, out_specs=P("x"))
    check(jax.jit(outer)(*REF.arguments), REF.value())
    assert hops(outer, *REF.arguments) == 0
    check(jax.grad(_loss(outer), argnums=(0, 1, 2))(*REF.arguments), GRADIENTS)


@pytest.mark.parametrize("policy", ["always", "never"])
def test_a_result_that_the_loss_does_not_read_inside_shard_map(policy: str) -> None:
    inner = always(jax.jit(lambda x, w, v: (shard_body(x, w, v), 3 * x)), policy=policy)

    def unread(x: Any, w: Any, v: Any) -> Any:
        first, second = jax.grad(lambda x: (inner(x, w, v)[1] ** 2).sum())(x), inner(x, w, v)
        return first + 0 * second[0].sum(), jax.grad(lambda w: inner(x, w, v)[0].sum())(w)

    outer = jax.shard_map(unread, mesh=mesh_of(), in_specs=SPECS, out_specs=(P("x"), SPECS[1]))
    slope, weight = jax.jit(outer)(*REF.arguments)
    check(slope, 18 * REF.x)
    check(weight, dataclasses.replace(REF, c=np.ones_like(REF.c)).gradients()[1])


def test_a_result_that_the_loss_does_not_read_of_an_explicit_mesh() -> None:
    mesh = mesh_of(kind=AxisType.Explicit)
    given = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(REF.arguments, SPECS, strict=True)
    ]
    decorated = always(jax.jit(lambda x, w, v: (mlp(mesh)(x, w, v), 3 * x)))
    with jax.set_mesh(mesh):
        check(jax.jit(jax.grad(lambda x: (decorated(x, *given[1:])[1] ** 2).sum()))(given[0]), 18 * REF.x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_in_context(kind: AxisType) -> None:
    mesh = mesh_of(kind=kind)

    def program(x: Any, w: Any, v: Any) -> Any:
        return jax.shard_map(shard_body, in_specs=SPECS, out_specs=P("x"))(x, w, v) * 2

    with jax.set_mesh(mesh):
        given = [
            jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(REF.arguments, SPECS, strict=True)
        ]
        jitted = jax.jit(program)
        decorated = always(jitted)
        result = decorated(*given)
        check(result, 2 * REF.value())
        assert jax.typeof(result) == jax.typeof(jitted(*given))
        assert hops(decorated, *given) > 0
        gradients = jax.jit(jax.grad(lambda *a: (decorated(*a) * C).sum(), argnums=(0, 1, 2)))(*given)
        check(gradients, tuple(2 * g for g in GRADIENTS))
        assert decorated.explain(*given).rewritten


def test_explicit_sharding_of_arguments_survives_in_the_results_type() -> None:
    mesh = mesh_of(kind=AxisType.Explicit)
    given = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(REF.arguments, SPECS, strict=True)
    ]

    def program(x: Any, w: Any, v: Any) -> Any:
        return mlp(mesh)(x, w, v), x + 1

    jitted = jax.jit(program)
    with jax.set_mesh(mesh):
        actual, wanted = always(jitted)(*given), jitted(*given)
    check(actual, (REF.value(), REF.x + 1))
    assert [jax.typeof(a) for a in actual] == [jax.typeof(a) for a in wanted]


# Effects.


@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_run_once_a_call(ordered: bool) -> None:
    seen: list[float] = []

    def program(x: Any, w: Any, v: Any) -> Any:
        y = mlp(mesh_of(1 if ordered else 4))(x, w, v)
        io_callback(lambda s: seen.append(float(s)), None, y.sum(), ordered=ordered)
        return y

    decorated = always(jax.jit(program), policy=lambda site: True)
    for _ in range(2):
        check(decorated(*REF.arguments), REF.value())
    jax.effects_barrier()
    np.testing.assert_allclose(seen, [REF.value().sum()] * 2, rtol=1e-5)


def test_debug_print_inside_shard_map_prints_once_per_device(capfd: pytest.CaptureFixture[str]) -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        y = shard_body(x, w, v)
        jax.debug.print("shape {s}", s=y.shape[0])
        return y

    decorated = always(
        jax.jit(jax.shard_map(body, mesh=mesh_of(), in_specs=SPECS, out_specs=P("x"), check_vma=False))
    )
    check(decorated(*REF.arguments), REF.value())
    jax.effects_barrier()
    assert capfd.readouterr().out.count("shape 2") == 4


def test_mutable_array_argument() -> None:
    def program(counter: Any, x: Any, w: Any, v: Any) -> Any:
        counter[...] += 1.0
        return mlp()(x, w, v)

    counter = jax.new_ref(jax.device_put(jnp.zeros(()), NamedSharding(mesh_of(), P())))
    decorated = always(jax.jit(program))
    check(decorated(counter, *REF.arguments), REF.value())
    check(decorated(counter, *REF.arguments), REF.value())
    assert float(counter[...]) == 2.0


def test_random_keys_pass_through() -> None:
    jitted = jax.jit(lambda key, x, w, v: mlp()(x + jax.random.normal(key, x.shape), w, v))
    key = jax.random.key(0)
    noise = np.asarray(jax.random.normal(key, (8, 6)), np.float64)
    check(always(jitted)(key, *REF.arguments), dataclasses.replace(REF, x=REF.x + noise).value())
