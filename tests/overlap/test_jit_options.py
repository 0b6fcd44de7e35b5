"""The decorated function is jitted as the original was: static arguments, donation, shardings, layouts."""

# mypy: allow-untyped-calls

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from overlap import overlap_collectives
from tests.overlap.mlp import SPECS, Function, always, check, hops, mesh_of, mlp, reference

REF = reference()


def powers(x: Any, w: Any, v: Any, power: int, *rest: Any, mode: str = "plain", flip: bool = False) -> Any:
    """``mlp`` under static arguments that Python branches on."""
    y = mlp()(x, w, v)
    for _ in range(power - 1):
        y = y * mlp()(x, w, v)
    if mode == "negated":
        y = -y
    return y[::-1] if flip else y


# Static arguments.


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 3, "static_argnames": ("mode", "flip")},
        {"static_argnums": (3,), "static_argnames": ["flip", "mode"]},
        {"static_argnames": ("power", "mode", "flip")},
        {"static_argnums": (3,), "static_argnames": ("power", "mode", "flip")},
    ],
)
def test_static_arguments_by_number_and_by_name(options: dict[str, Any]) -> None:
    decorated = always(jax.jit(powers, **options))
    check(decorated(*REF.arguments, 2), REF.value() ** 2)
    check(decorated(*REF.arguments, 1, mode="negated"), -REF.value())
    check(decorated(*REF.arguments, 1, flip=True, mode="plain"), REF.value()[::-1])
    assert hops(decorated, *REF.arguments, 2) == 2 * hops(decorated, *REF.arguments, 1) > 0
    assert len(decorated.explain(*REF.arguments, 3).sites) == 6


def test_static_argument_by_number_passed_by_keyword() -> None:
    decorated = always(jax.jit(powers, static_argnums=3))
    x, w, v = REF.arguments
    check(decorated(x, w, v, power=1), REF.value())
    check(decorated(x, v=v, power=2, w=w), REF.value() ** 2)


def test_negative_static_argnums() -> None:
    def f(x: Any, w: Any, v: Any, power: int) -> Any:
        return powers(x, w, v, power)

    decorated = always(jax.jit(f, static_argnums=-1))
    check(decorated(*REF.arguments, 2), REF.value() ** 2)

    def of_many(*args: Any) -> Any:
        return powers(*args)

    many = always(jax.jit(of_many, static_argnums=-1))
    check(many(*REF.arguments, 2), REF.value() ** 2)


def test_static_arguments_with_defaults_left_out() -> None:
    def f(x: Any, w: Any, v: Any, power: int = 2, mode: str = "plain") -> Any:
        return powers(x, w, v, power, mode=mode)

    decorated = always(jax.jit(f, static_argnums=(3, 4)))
    check(decorated(*REF.arguments), REF.value() ** 2)
    check(decorated(*REF.arguments, mode="negated"), -(REF.value() ** 2))
    check(decorated(*REF.arguments, 1), REF.value())


def test_static_argument_before_dynamic_ones() -> None:
    decorated = always(jax.jit(lambda power, x, w, v: powers(x, w, v, power), static_argnums=0))
    check(decorated(2, *REF.arguments), REF.value() ** 2)
    check(decorated(1, *REF.arguments), REF.value())


def test_unhashable_static_argument_is_jits_own_error() -> None:
    jitted = jax.jit(powers, static_argnums=3)
    with pytest.raises(ValueError, match="static") as expected:
        jitted(*REF.arguments, [1])
    with pytest.raises(ValueError) as actual:
        always(jitted)(*REF.arguments, [1])
    assert str(actual.value) == str(expected.value)


# Donation.


@pytest.mark.parametrize(
    "options",
    [
        {"donate_argnums": 0},
        {"donate_argnums": (0, 3)},
        {"donate_argnames": "x"},
        {"donate_argnames": ("x",)},
    ],
)
def test_donated_buffers_are_reused(options: dict[str, Any]) -> None:
    def step(x: Any, w: Any, v: Any, unrelated: Any) -> Any:
        return mlp()(x, w, v), unrelated + 1

    jitted = jax.jit(step, **options)
    decorated = always(jitted)
    mesh = mesh_of()
    shardings = [NamedSharding(mesh, spec) for spec in (*SPECS, P())]

    def arguments() -> list[Any]:
        unrelated = np.ones((4, 4), np.float32)
        return [jax.device_put(a, s) for a, s in zip((*REF.arguments, unrelated), shardings, strict=True)]

    given, taken = arguments(), arguments()
    jitted(*given)
    check(decorated(*taken)[0], REF.value())
    assert [a.is_deleted() for a in taken] == [a.is_deleted() for a in given]
    assert [a.is_deleted() for a in taken[:3]] == [True, False, False]
    aliased, wanted = (
        f.lower(*arguments()).compile().memory_analysis().alias_size_in_bytes  # type: ignore[union-attr]
        for f in (decorated, jitted)
    )
    assert aliased == wanted > 0


def test_donation_of_keyword_and_pytree_arguments() -> None:
    @always
    @functools.partial(jax.jit, donate_argnames="state")
    def step(batch: Any, *, state: Any) -> Any:
        return jax.tree.map(lambda s: s + batch, state)

    state = {"a": jnp.zeros(3), "b": [jnp.ones(3)]}
    out = step(jnp.ones(3), state=state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    check(out, {"a": np.ones(3), "b": [2 * np.ones(3)]})


def test_without_donation_arguments_live_on() -> None:
    given = [jnp.asarray(a) for a in REF.arguments]
    always(jax.jit(mlp()))(*given)
    assert not any(a.is_deleted() for a in given)


# Shardings and layouts.


@pytest.mark.parametrize("inputs", [None, SPECS, (P(), P(), None), (P(), None, P("x"))])
@pytest.mark.parametrize("output", [None, P(), P("x"), P(None, "x")])
def test_in_and_out_shardings(inputs: Any, output: Any) -> None:
    mesh = mesh_of(2)
    options: dict[str, Any] = {}
    if inputs is not None:
        options["in_shardings"] = tuple(s if s is None else NamedSharding(mesh, s) for s in inputs)
    if output is not None:
        options["out_shardings"] = {"y": NamedSharding(mesh, output), "rest": None}

    def step(x: Any, w: Any, v: Any) -> Any:
        return {"y": mlp(mesh)(x, w, v), "rest": x.sum()}

    jitted = jax.jit(step, **options)
    decorated = always(jitted)
    actual, wanted = decorated(*REF.arguments), jitted(*REF.arguments)
    check(actual["y"], REF.value())
    assert actual["y"].sharding.is_equivalent_to(wanted["y"].sharding, 2)
    compiled, original = (f.lower(*REF.arguments).compile() for f in (decorated, jitted))
    assert compiled.input_shardings == original.input_shardings
    assert decorated.explain(*REF.arguments).rewritten


def test_one_sharding_for_all_arguments_and_results() -> None:
    mesh = mesh_of()
    replicated = NamedSharding(mesh, P())
    decorated = always(jax.jit(mlp(mesh), in_shardings=replicated, out_shardings=replicated))
    result = decorated(*REF.arguments)
    check(result, REF.value())
    assert result.sharding.is_fully_replicated


def test_partition_specs_under_a_mesh_in_context() -> None:
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        decorated = always(jax.jit(mlp(mesh), in_shardings=SPECS, out_shardings=P()))
        result = decorated(*REF.arguments)
    check(result, REF.value())
    assert result.sharding.is_fully_replicated


def test_keyword_arguments_with_in_shardings_are_refused_as_by_jit() -> None:
    jitted = jax.jit(mlp(), in_shardings=tuple(NamedSharding(mesh_of(), s) for s in SPECS))
    x, w, v = REF.arguments
    with pytest.raises(ValueError, match="kwargs"):
        jitted(x, w, v=v)
    with pytest.raises(ValueError, match="kwargs"):
        always(jitted)(x, w, v=v)


def test_layouts_of_arguments_and_results() -> None:
    mesh = mesh_of()
    column_major = Layout(major_to_minor=(1, 0))
    formats = (Format(column_major, NamedSharding(mesh, SPECS[0])), None, None)
    out = Format(column_major, NamedSharding(mesh, P("x")))
    jitted = jax.jit(mlp(mesh), in_shardings=formats, out_shardings=out)
    decorated = always(jitted)
    x, w, v = REF.arguments
    x = jax.device_put(x, formats[0])
    result = decorated(x, w, v)
    check(result, REF.value())
    assert result.format.layout.major_to_minor == (1, 0)
    compiled, original = (f.lower(x, w, v).compile() for f in (decorated, jitted))
    assert compiled.input_formats == original.input_formats
    assert compiled.output_formats == original.output_formats


def test_layout_left_to_the_compiler() -> None:
    chosen = Format(Layout.AUTO)
    decorated = always(jax.jit(lambda x: x.T @ x, in_shardings=chosen, out_shardings=chosen))
    x = REF.arguments[0]
    compiled = decorated.lower(jax.ShapeDtypeStruct(x.shape, x.dtype)).compile()
    (given,), _ = compiled.input_formats
    check(compiled(jax.device_put(x, given)), REF.x.T @ REF.x)


# The rest.


def test_compiler_options_reach_the_compiler() -> None:
    options = {"xla_cpu_enable_fast_math": True}
    decorated = always(jax.jit(mlp(), compiler_options=options))
    check(decorated(*REF.arguments), REF.value())
    wrong = always(jax.jit(mlp(), compiler_options={"no_such_option": True}))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        wrong(*REF.arguments)


@pytest.mark.parametrize("keep", [False, True])
def test_keep_unused(keep: bool) -> None:
    def f(x: Any, w: Any, v: Any, unused: Any) -> Any:
        return mlp()(x, w, v)

    jitted = jax.jit(f, keep_unused=keep)
    for rewritten in (always(jitted), overlap_collectives(jitted, policy="never", strict=True)):
        text = rewritten.lower(*REF.arguments, np.ones(7, np.float32)).as_text()
        assert ("tensor<7xf32>" in text) == keep
        check(rewritten(*REF.arguments, 1.0), REF.value())


@pytest.mark.parametrize("inline", [False, True])
def test_inline(inline: bool) -> None:
    def calls(function: Function) -> list[Any]:
        equations = jax.make_jaxpr(function)(*REF.arguments).jaxpr.eqns
        return [e.params.get("inline") for e in equations if e.primitive.name == "jit"]

    jitted = jax.jit(mlp(), inline=inline)
    assert calls(always(jitted)) == calls(jitted)


# Retracing.


class Counted:
    """A function that counts how often Python runs it."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.function(*args, **kwargs)


def counts(function: Counted, call: Function, steps: list[Function]) -> list[int]:
    """The number of runs after each step."""
    found = []
    for step in steps:
        step(call)
        found.append(function.runs)
    return found


def in_x64(call: Function) -> Any:
    with jax.enable_x64(True):
        return call(np.ones(4), 2)


def under_mesh(call: Function) -> Any:
    with jax.set_mesh(mesh_of(kind=AxisType.Explicit)):
        return call(np.ones(4, np.float32), 2)


def with_highest_precision(call: Function) -> Any:
    with jax.default_matmul_precision("highest"):
        return call(np.ones(4, np.float32), 2)


STEPS: list[Function] = [
    lambda f: f(np.ones(4, np.float32), 2),
    lambda f: f(np.zeros(4, np.float32), 2),
    lambda f: f(jnp.ones(4), 2),
    lambda f: f(np.ones(5, np.float32), 2),
    lambda f: f(np.ones(4, np.float32), 3),
    lambda f: f(np.ones(4, np.float32), power=3),
    lambda f: f(np.ones(4, np.int32), 2),
    lambda f: f(1.0, 2),
    lambda f: f(jnp.float32(1.0), 2),
    lambda f: f(2.5, 2),
    lambda f: f({"a": 2.5}, 2),
    lambda f: f({"b": 2.5}, 2),
    lambda f: f({"b": 3.5}, 2),
    lambda f: f(jax.device_put(np.ones(4, np.float32), NamedSharding(mesh_of(), P("x"))), 2),
    lambda f: f(jax.device_put(np.ones(4, np.float32), jax.devices()[1]), 2),
    in_x64,
    in_x64,
    under_mesh,
    under_mesh,
    with_highest_precision,
    lambda f: f(np.ones(4, np.float32), 2),
    lambda f: jax.grad(lambda x: f(x, 2).sum())(jnp.ones(4)),
    lambda f: jax.grad(lambda x: f(x, 2).sum())(jnp.ones(4)),
    lambda f: jax.vmap(lambda x: f(x, 2))(jnp.ones((3, 4))),
    lambda f: jax.jit(lambda x: f(x, 2))(jnp.ones(4)),
    lambda f: f(np.ones(4, np.float32), 2),
    lambda f: f.clear_cache(),
    lambda f: f(np.ones(4, np.float32), 2),
]


def test_python_runs_exactly_when_it_would_under_jit() -> None:
    def f(x: Any, power: int) -> Any:
        return jax.tree.map(lambda leaf: leaf**power, x)

    plain, decorated = Counted(f), Counted(f)
    wanted = counts(plain, jax.jit(plain, static_argnums=1, static_argnames="power"), STEPS)
    actual = counts(decorated, always(jax.jit(decorated, static_argnums=1, static_argnames="power")), STEPS)
    assert actual == wanted


def test_a_warm_call_neither_traces_nor_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    decorated = always(jax.jit(mlp()))
    decorated(*REF.arguments)
    monkeypatch.setattr(decorated, "_run", None)
    monkeypatch.setattr(decorated, "_rewriter", None)
    check(decorated(*REF.arguments), REF.value())
    assert decorated._cache_size() == 1
