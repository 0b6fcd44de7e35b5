"""The decorator: what can be decorated and how, the attributes, policies, hardware, the log."""

# mypy: allow-untyped-calls

import copy
import dataclasses
import functools
import gc
import inspect
import logging
import re
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cost_model
import overlap
from overlap import Overlapped, Report, Site, overlap_collectives
from tests.cost_model.test_calibration import CALIBRATION
from tests.overlap.mlp import always, check, hops, mesh_of, mlp, reference

REF = reference()


class JittedElsewhere:
    """As flax and equinox wrap a function: it can be called and lowered, and is none of jax.jit's."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        self.__wrapped__ = fun

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args)

    def lower(self, *args: Any) -> Any:
        return jax.jit(self.__wrapped__).lower(*args)


def test_what_another_library_has_jitted_is_refused_with_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"tests's JittedElsewhere.*nnx.jit\(overlap_collectives\(f\)\)"):
        overlap_collectives(JittedElsewhere(mlp()))


def struct(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@pytest.mark.parametrize(
    "decorate",
    [
        lambda f: overlap_collectives(jax.jit(f)),
        lambda f: overlap_collectives(f),
        lambda f: overlap_collectives()(jax.jit(f)),
        lambda f: overlap_collectives(policy="always")(jax.jit(f)),
        lambda f: overlap_collectives(policy="always", hardware="tpu_v5p", strict=True)(f),
        lambda f: overlap_collectives(jax.jit(f), hardware=cost_model.by_name("h100")),
        lambda f: overlap_collectives(functools.partial(jax.jit, donate_argnums=())(f)),
    ],
)
def test_bare_and_with_arguments_on_jitted_and_plain_functions(decorate: Callable[..., Any]) -> None:
    decorated = decorate(mlp())
    assert isinstance(decorated, Overlapped)
    check(decorated(*REF.arguments), REF.value())


def test_it_keeps_name_docstring_and_signature() -> None:
    @overlap_collectives
    @jax.jit
    def step(x: Any, *, scale: float = 2.0) -> Any:
        """Doubles."""
        return x * scale

    assert (step.__name__, step.__doc__) == ("step", "Doubles.")
    assert list(inspect.signature(step).parameters) == ["x", "scale"]
    assert "step" in repr(step)
    assert step.lower(1.0).as_text().startswith("module @jit_step")


def test_original_is_the_users_jitted_function() -> None:
    jitted = jax.jit(mlp())
    assert overlap_collectives(jitted).original is jitted
    plain = mlp()
    assert overlap_collectives(plain).original.__wrapped__ is plain


def test_decorating_twice_takes_the_later_arguments() -> None:
    kept = overlap_collectives(jax.jit(mlp()), policy="never")
    again = always(kept)
    assert again.original is kept.original
    assert hops(kept, *REF.arguments) == 0
    assert hops(again, *REF.arguments) > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: functools.partial(lambda a, b: a - b, 3.0),
        lambda: type("Callable", (), {"__call__": lambda self, b: 3.0 - b})(),
        lambda: functools.partial(jnp.subtract, 3.0),
        lambda: type("Owner", (), {"method": lambda self, b: 3.0 - b})().method,
    ],
)
def test_callables_that_are_no_plain_functions(make: Callable[[], Any]) -> None:
    function = make()
    assert always(function)(1.0) == 2.0
    assert always(jax.jit(function))(1.0) == 2.0
    assert always(function).explain(1.0).sites == ()


def test_methods_bind_and_so_do_their_attributes() -> None:
    class Layer:
        def __init__(self, w: Any, v: Any) -> None:
            self.w, self.v = w, v

        @always
        @functools.partial(jax.jit, static_argnums=0)
        def apply(self, x: Any) -> Any:
            """Applies."""
            return mlp()(x, self.w, self.v)

        @staticmethod
        @always
        @jax.jit
        def double(x: Any) -> Any:
            return 2 * x

        @classmethod
        @always
        @functools.partial(jax.jit, static_argnums=0)
        def name_length(cls, x: Any) -> Any:
            return x + len(cls.__name__)

    x, w, v = REF.arguments
    layer = Layer(w, v)
    check(layer.apply(x), REF.value())
    check(Layer.apply(layer, x), REF.value())
    check(jax.jit(layer.apply)(x), REF.value())
    check(layer.apply.original(x), REF.value())
    assert isinstance(Layer.apply, Overlapped)
    assert layer.apply.__doc__ == "Applies."
    assert layer.apply.__name__ == "apply" and layer.apply.__module__ == __name__
    assert list(inspect.signature(layer.apply).parameters) == ["x"]
    assert layer.apply._cache_size() > 0
    with pytest.raises(AttributeError):
        _ = layer.apply.nothing
    assert copy.deepcopy(Layer.apply) is Layer.apply and copy.copy(layer.apply) == layer.apply
    assert layer.apply.__self__ is layer
    assert layer.apply == layer.apply and hash(layer.apply) == hash(layer.apply)
    assert layer.apply != Layer(w, v).apply and layer.apply != Layer.name_length
    assert layer.apply.eval_shape(x).shape == (8, 6)
    assert layer.apply.explain(x) == Layer.apply.explain(layer, x)
    assert str(layer.apply.trace(x).jaxpr).count("ppermute") > 0
    assert "collective_permute" in layer.apply.lower(x).as_text()
    assert layer.double(3) == 6
    assert Layer.name_length(1) == 6
    assert Layer.apply._cache_size() > 0
    layer.apply.clear_cache()
    assert Layer.apply._cache_size() == 0


def test_keyword_arguments_may_be_called_self() -> None:
    decorated = always(jax.jit(lambda x, self: x + self))
    for use in (decorated, decorated.original):
        assert use(1, self=2) == 3
        assert use.trace(1, self=2).jaxpr.out_avals[0].shape == ()
        assert "module" in use.lower(1, self=2).as_text()
    assert decorated.explain(1, self=2).sites == ()


@dataclasses.dataclass(frozen=True, slots=True)
class Unreferable:
    """A callable that takes no weak references, which jax needs."""

    def __call__(self, x: Any) -> Any:
        return x + 1


@pytest.mark.parametrize("fun", [Unreferable(), np.add], ids=["dataclass with slots", "ufunc"])
def test_what_takes_no_weak_references_is_refused(fun: Any) -> None:
    """The process would end where jax jits it a second time."""
    with pytest.raises(
        TypeError, match=f"{type(fun).__name__} takes no weak reference: wrap it in a function"
    ):
        always(jax.jit(fun))


def test_a_bound_method_is_decorated_with_its_options() -> None:
    class Layer:
        @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
        def apply(self, x: Any) -> Any:
            return x + 1

        again = overlap_collectives(apply, policy="never", hardware="tpu_v5p")

    layer = Layer()
    for method in (layer.apply, layer.again):
        decorated = always(method)
        x = jnp.ones(3)
        np.testing.assert_array_equal(decorated(x), 2 * np.ones(3))
        assert x.is_deleted()
        assert decorated.__self__ is layer and decorated.hardware is None


def test_a_method_of_a_pytree_class_takes_self_as_an_argument() -> None:
    @functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "v"], meta_fields=[])
    class Weights:
        def __init__(self, w: Any, v: Any) -> None:
            self.w, self.v = w, v

        @always
        @jax.jit
        def apply(self, x: Any) -> Any:
            return mlp()(x, self.w, self.v)

    x, w, v = REF.arguments
    check(Weights(w, v).apply(x), REF.value())
    check(Weights(w, 2 * v).apply(x), 2 * REF.value())


def test_pytrees_keywords_defaults_and_none() -> None:
    calls = []

    @always
    @jax.jit
    def step(state: Any, batch: Any, /, scale: Any = 1.0, *more: Any, shift: Any = None, **named: Any) -> Any:
        calls.append(shift is None)
        y = mlp()(batch["x"], state[0], state[1]["v"]) * scale
        return {"y": y if shift is None else y + shift, "none": None, "more": (more, named)}

    x, w, v = REF.arguments
    state, batch = [w, {"v": v}], {"x": x}
    check(step(state, batch)["y"], REF.value())
    check(step(state, batch, 2.0)["y"], 2 * REF.value())
    check(step(state, batch, scale=3.0)["y"], 3 * REF.value())
    out = step(state, batch, 2.0, 4.0, (5.0,), shift=1.0, b={"c": 7.0}, a=6.0)
    check(out["y"], 2 * REF.value() + 1)
    assert out["none"] is None
    assert jax.tree.map(float, out["more"]) == ((4.0, (5.0,)), {"a": 6.0, "b": {"c": 7.0}})
    assert calls == [True, True, True, False]


def test_attributes_of_jitted_functions_are_there() -> None:
    decorated = always(jax.jit(mlp()))
    assert decorated.eval_shape(*REF.arguments).shape == (8, 6)
    decorated(*REF.arguments)
    assert decorated._cache_size() == 1
    with pytest.raises(AttributeError):
        _ = decorated.no_such_attribute
    assert copy.copy(decorated) is copy.deepcopy(decorated) is decorated


def test_trace_and_lower_are_of_the_rewritten_function() -> None:
    decorated = always(jax.jit(mlp()))
    structs = tuple(map(struct, REF.arguments))
    for arguments in (structs, REF.arguments):
        assert "ppermute" in str(decorated.trace(*arguments).jaxpr)
        text = decorated.lower(*arguments).as_text()
        assert "collective_permute" in text
        assert "all_gather" not in text and "reduce_scatter" not in text
    check(decorated.lower(*structs).compile()(*REF.arguments), REF.value())


def test_explain_takes_shapes_and_neither_compiles_nor_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    decorated = always(jax.jit(mlp()))
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    report = decorated.explain(*map(struct, REF.arguments))
    assert isinstance(report, Report)
    assert report.name == "mlp"
    assert [site.kind for site in report.sites] == ["all_gather_dot", "dot_reduce_scatter"]
    assert all(site.rewritten and site.reason == "policy_always" for site in report.sites)
    assert decorated._cache_size() == 0


def test_explain_and_a_call_trace_the_users_function_once() -> None:
    traced = []
    program = mlp()

    @always
    @jax.jit
    def step(x: Any, w: Any, v: Any) -> Any:
        traced.append(1)
        return program(x, w, v)

    step.explain(*REF.arguments)
    step(*REF.arguments)
    step.lower(*REF.arguments)
    assert len(traced) == 1
    step.clear_cache()
    step(*REF.arguments)
    assert len(traced) == 2


def test_arrays_that_the_function_closes_over() -> None:
    column = jnp.arange(8, dtype=jnp.float32)[:, None]
    decorated = always(jax.jit(lambda x, w, v: mlp()(x, w, v) + column))
    check(decorated(*REF.arguments), REF.value() + np.arange(8.0)[:, None])


def test_a_program_without_collectives_is_the_original() -> None:
    decorated = always(jax.jit(lambda a, b: (a @ b).sum()))
    x, w, _ = REF.arguments
    check(decorated(x, w), (REF.x @ REF.w).sum())
    assert decorated.explain(x, w).sites == ()


@pytest.mark.parametrize("policy", ["always", "never", lambda _: False], ids=["always", "never", "callable"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_decorated_function_is_freed_with_its_last_reference(policy: Any, nested: bool) -> None:
    def used() -> tuple[weakref.ref[Any], ...]:
        program, column = mlp(), jnp.arange(8, dtype=jnp.float32)[:, None]

        def shifted(y: Any) -> Any:
            return y + column

        shift = jax.jit(shifted) if nested else shifted
        decorated = always(jax.jit(lambda *arguments: shift(program(*arguments))), policy=policy)
        gradient = jax.grad(lambda *arguments: decorated(*arguments).sum())
        for use in (decorated, gradient, jax.jit(gradient)):
            use(*REF.arguments)
        return weakref.ref(decorated), weakref.ref(column)

    gone = used()
    gc.collect()
    assert [each() for each in gone] == [None, None], "with the arrays that it closes over"


def test_importing_the_decorator_leaves_the_tools_out() -> None:
    code = """
import sys, overlap
print([module for module in sys.modules if module.startswith("overlap.hlo")])
assert set(overlap.__all__) <= set(dir(overlap))
overlap.inspect, overlap.hlo.simulate, overlap.tpu_target.ENVIRONMENT
print([module for module in sys.modules if module.startswith("overlap.hlo")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = done.stdout.splitlines()
    assert before == "[]"
    assert "overlap.hlo.parse" in after
    with pytest.raises(AttributeError, match="'overlap' has no attribute 'profile'"):
        overlap.profile  # type: ignore[attr-defined]  # noqa: B018


def test_a_compiled_program_names_no_file_of_ours() -> None:
    decorated = always(jax.jit(mlp()))
    lowered = jax.jit(lambda *arguments: decorated(*arguments)).lower(*REF.arguments)
    named = set(re.findall(r'"([^"]+\.py)"', str(lowered.compile().as_text())))
    ours = tuple(
        str(Path(overlap.__file__).parents[1] / floor) for floor in ("overlap", "passes", "cost_model")
    )
    assert __file__ in named and not [path for path in named if path.startswith(ours)]


def test_under_disable_jit_the_users_python_runs() -> None:
    @always
    @jax.jit
    def absolute(x: Any) -> Any:
        return x if x > 0 else -x

    with jax.disable_jit():
        assert absolute(-3.0) == 3.0


# Policies and hardware.


def test_unknown_policy_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"'sometimes'.*'auto'.*'always'.*'never'.*callable"):
        overlap_collectives(mlp(), policy="sometimes")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="'auto'"):
        overlap_collectives(policy="sometimes")  # type: ignore[call-overload]


def test_unknown_hardware_names_the_valid_ones() -> None:
    with pytest.raises(ValueError) as raised:
        overlap_collectives(mlp(), hardware="abacus")
    assert "abacus" in str(raised.value)
    assert all(name in str(raised.value) for name in cost_model.names())


@pytest.mark.parametrize("wrong", [{"hardware": 5}, {"fun": 5}, {"strict": "no"}])
def test_wrong_types_are_type_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        overlap_collectives(**{"fun": mlp(), **wrong})


def test_policy_never_keeps_everything_and_still_predicts() -> None:
    decorated = overlap_collectives(jax.jit(mlp()), policy="never", hardware="tpu_v5p", strict=True)
    sites = decorated.explain(*REF.arguments).sites
    assert [(site.rewritten, site.reason) for site in sites] == [(False, "policy_never")] * 2
    assert all(site.estimate is not None for site in sites)
    assert hops(decorated, *REF.arguments) == 0
    check(decorated(*REF.arguments), REF.value())


def test_policy_auto_keeps_everything_on_cpu() -> None:
    decorated = overlap_collectives(jax.jit(mlp()), strict=True)
    sites = decorated.explain(*REF.arguments).sites
    assert [(site.rewritten, site.reason) for site in sites] == [(False, "not_profitable")] * 2
    assert hops(decorated, *REF.arguments) == 0


def test_policy_auto_decides_by_the_named_hardware() -> None:
    big = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 8192), (8192, 32768), (32768, 8192))
    ]
    decorated = overlap_collectives(jax.jit(mlp()), hardware="tpu_v5p", strict=True)
    gather = decorated.explain(*big).sites[0]
    assert (gather.rewritten, gather.reason) == (True, "profitable")
    assert hops(decorated, *big) > 0
    assert not any(site.rewritten for site in decorated.explain(*REF.arguments).sites)
    assert hops(decorated, *REF.arguments) == 0


def test_policy_callable_is_asked_per_site() -> None:
    asked: list[Site] = []

    def gathers_only(site: Site) -> bool:
        asked.append(site)
        return site.kind == "all_gather_dot"

    decorated = overlap_collectives(jax.jit(mlp()), policy=gathers_only, strict=True)
    sites = decorated.explain(*REF.arguments).sites
    explained = {(site.kind, site.path, site.source) for site in asked}
    assert [(s.rewritten, s.reason) for s in sites] == [(True, "policy_accepted"), (False, "policy_declined")]
    assert {site.kind for site in asked} == {"all_gather_dot", "dot_reduce_scatter"}
    asked.clear()
    check(decorated(*REF.arguments), REF.value())
    assert {(site.kind, site.path, site.source) for site in asked} == explained
    text = decorated.lower(*REF.arguments).as_text()
    assert "collective_permute" in text and "reduce_scatter" in text and "all_gather" not in text


def test_hardware_comes_from_the_kind_of_the_meshs_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []

    def lookup(kind: str) -> cost_model.Hardware:
        kinds.append(kind)
        return cost_model.by_name("tpu_v5p")

    monkeypatch.setattr(cost_model, "from_device_kind", lookup)
    guessed = overlap_collectives(mlp(), policy="never").explain(*REF.arguments)
    named = overlap_collectives(mlp(), policy="never", hardware="tpu_v5p").explain(*REF.arguments)
    assert set(kinds) == {jax.devices()[0].device_kind}
    assert guessed == named


@pytest.mark.parametrize("strict", [False, True])
def test_a_calibration_of_other_devices_is_refused_where_the_devices_are_known(
    tmp_path: Path, strict: bool
) -> None:
    path = tmp_path / "v5p.json"
    CALIBRATION.write(path)
    for decorated in (
        overlap_collectives(jax.jit(mlp()), hardware=str(path), strict=strict),
        overlap_collectives(hardware=str(path), strict=strict)(mlp()),
    ):
        for use in (decorated, jax.jit(decorated), decorated.explain):
            with pytest.raises(ValueError, match=r"v5p\.json was measured on 'TPU v5', .* here are 'cpu'"):
                use(*REF.arguments)
    everywhere = overlap_collectives(mlp(), hardware=CALIBRATION.hardware, policy="never")
    unknown = overlap_collectives(
        jax.jit(mlp(mesh_of().abstract_mesh.update(abstract_device=None))),  # type: ignore[arg-type]
        hardware=str(path),
    )
    dataclasses.replace(CALIBRATION, device_kind="cpu").write(path)
    here = overlap_collectives(mlp(), hardware=str(path), policy="never")
    assert here.explain(*REF.arguments) == everywhere.explain(*REF.arguments)
    assert all(site.estimate is not None for site in here.explain(*REF.arguments).sites)
    check(here(*REF.arguments), REF.value())
    unknown.explain(*map(struct, REF.arguments))


def test_unknown_device_kind_keeps_every_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "from_device_kind", lambda kind: None)
    decorated = overlap_collectives(jax.jit(mlp()), strict=True)
    sites = decorated.explain(*REF.arguments).sites
    assert [(site.rewritten, site.reason) for site in sites] == [(False, "unknown_hardware")] * 2
    assert all("hardware=" in site.sentence and site.estimate is None for site in sites)
    assert hops(decorated, *REF.arguments) == 0
    check(decorated(*REF.arguments), REF.value())


def test_a_mesh_that_does_not_know_its_devices_is_unknown_hardware() -> None:
    decorated = overlap_collectives(jax.jit(mlp(mesh_of().abstract_mesh.update(abstract_device=None))))  # type: ignore[arg-type]
    sites = decorated.explain(*map(struct, REF.arguments)).sites
    assert [site.reason for site in sites] == ["unknown_hardware"] * 2


def test_a_function_that_is_compiled_already_is_refused_with_what_to_do_instead() -> None:
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    with pytest.raises(
        TypeError, match=r"compiled already, by \.lower\(\.\.\.\)\.compile\(\)\. Decorate the"
    ):
        overlap_collectives(compiled)


def test_a_function_that_is_traced_already_is_refused_with_what_to_do_instead() -> None:
    traced = jax.jit(lambda x: x + 1).trace(1.0)
    with pytest.raises(
        TypeError, match=r"traced already, by \.trace\(\.\.\.\)\. Decorate the function, then"
    ):
        overlap_collectives(traced)


def test_reports_call_a_callable_object_by_its_type_and_a_partial_by_its_function() -> None:
    class Model:
        def __call__(self, x: Any) -> Any:
            return x + 1

    def step(rate: float, x: Any) -> Any:
        return rate * x

    for given, name in ((Model(), "Model"), (functools.partial(functools.partial(step), 2.0), "step")):
        for fun in (given, jax.jit(given)):
            assert str(overlap_collectives(fun).explain(1.0)).splitlines()[0].startswith(f"{name}: "), name


def test_a_function_that_pmap_compiled_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(TypeError, match=r"compiled already, as by jax\.pmap\. Write it with jax\.shard_map"):
        overlap_collectives(jax.pmap(lambda x: x))


def test_a_policy_that_says_neither_yes_nor_no_is_an_error() -> None:
    def undecided(site: Site) -> Any:
        return answer

    answer: Any
    answer = None  # no, as of ``site.estimate and …``
    assert not overlap_collectives(jax.jit(mlp()), policy=undecided).explain(*REF.arguments).rewritten
    for answer in ("no", 0, 1):
        decorated = overlap_collectives(jax.jit(mlp()), policy=undecided)
        with pytest.raises(TypeError, match=f"undecided must return True or False .* returned {answer!r}"):
            decorated(*REF.arguments)
    for answer in (np.True_, np.False_):
        sites = overlap_collectives(jax.jit(mlp()), policy=undecided).explain(*REF.arguments).sites
        assert {site.rewritten for site in sites} == {bool(answer)}


def test_a_file_that_is_not_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    missing = str(tmp_path / "nope.json")
    with pytest.raises(FileNotFoundError) as raised:
        overlap_collectives(jax.jit(mlp()), hardware=missing)
    assert str(raised.value) == f"{missing} cannot be read as hardware: No such file or directory"


def test_the_name_of_a_calibration_may_end_in_capitals(tmp_path: Path) -> None:
    loud = tmp_path / "V5P.JSON"
    CALIBRATION.write(loud)
    assert overlap_collectives(jax.jit(mlp()), hardware=str(loud)).hardware == CALIBRATION.hardware


# The log.


def test_the_log_tells_site_decision_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "overlap")
    decorated = overlap_collectives(
        jax.jit(mlp()), policy=lambda site: site.kind == "all_gather_dot", strict=True
    )
    decorated(*REF.arguments)
    decorated(*REF.arguments)
    lines = [r.getMessage() for r in caplog.records if r.name == "overlap"]
    assert len(lines) == 2, "once per trace, not per call"
    assert all(r.levelno == logging.INFO for r in caplog.records if r.name == "overlap")
    for line, kind, verdict, reason in zip(
        lines,
        ("all_gather_dot", "dot_reduce_scatter"),
        ("rewritten", "kept"),
        ("policy_accepted", "policy_declined"),
        strict=True,
    ):
        for part in ("mlp", kind, "over x", "mlp.py:", verdict, reason):
            assert part in line


def test_nothing_is_logged_above_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "overlap")
    always(jax.jit(mlp()))(*REF.arguments)
    assert not [r for r in caplog.records if r.name == "overlap"]


# Other versions of jax.


def test_a_jit_whose_options_cannot_be_read_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    jitted = jax.jit(mlp(), donate_argnums=0)

    class Future:
        """As a jitted function of a jax that keeps its options elsewhere."""

        __module__ = "jaxlib.future"
        __wrapped__ = staticmethod(mlp())
        trace = lower = eval_shape = __call__ = staticmethod(jitted)

    with pytest.raises(RuntimeError, match=r"jit options .* report"):
        overlap_collectives(Future())

    class OtherFields(Future):
        _jit_info = object()

    with pytest.raises(RuntimeError, match=rf"jax {jax.__version__}.* report"):
        overlap_collectives(OtherFields())


def test_importing_overlap_starts_no_backend() -> None:
    script = """
        import sys
        import jax
        import overlap
        from jax._src import xla_bridge
        assert not xla_bridge._backends, xla_bridge._backends
        assert not xla_bridge.backends_are_initialized()
        overlap.overlap_collectives(jax.jit(lambda x: x), hardware="tpu_v5p")
        assert not xla_bridge._backends, "decorating started a backend"
        loaded = {"rich", "libtpu", "optax", "hypothesis"} & set(sys.modules)
        assert not loaded, loaded
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
