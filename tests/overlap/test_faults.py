"""Whatever fails in the pass, the original program runs, once, with one warning that names the site.

Faults are injected with ``sys.settrace``: the n-th call of any function of ``passes/`` or ``cost_model/``
raises. So every function that a rewrite runs through is made to fail, without a list of them to keep.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import logging
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

import cost_model
import passes
from overlap import overlap_collectives
from overlap.warning import OverlapWarning
from passes import RewriteError, shims
from tests.overlap.mlp import SPECS, always, check, hops, mesh_of, mlp, reference

REF = reference()
FLOORS = tuple(str(Path(package.__file__).parent) for package in (passes, cost_model) if package.__file__)
MODULES = sorted(
    p.relative_to(Path(floor).parent).as_posix() for floor in FLOORS for p in Path(floor).glob("*.py")
)


class InjectedError(Exception):
    """The fault."""


@contextlib.contextmanager
def watching(on_call: Any) -> Iterator[None]:
    """Calls ``on_call(code)`` whenever a function of the two floors is entered."""

    def trace(frame: types.FrameType, event: str, arg: Any) -> None:
        if frame.f_code.co_filename.startswith(FLOORS):
            on_call(frame.f_code)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def fault(code: types.CodeType, call: int = 1) -> Iterator[None]:
    """The given call of a function raises; the context fails if there was no such call."""
    calls = 0

    def on_call(entered: types.CodeType) -> None:
        nonlocal calls
        if entered is code:
            calls += 1
            if calls == call:
                sys.settrace(None)  # What follows takes a third less time so.
                raise InjectedError(f"call {call} of {code.co_qualname}")

    with watching(on_call):
        yield
    assert calls >= call, f"{code.co_qualname} was called {calls} times"


def program(x: Any, w: Any, v: Any) -> Any:
    """Nested bodies around the chains, so that every stage of the pass has work."""
    y, _ = jax.lax.scan(lambda carry, _: (mlp()(carry, w, v) / 8, None), x, length=2)
    return jax.checkpoint(mlp())(y, w, v)


JITTED = jax.jit(program)


@functools.cache
def called_functions() -> dict[types.CodeType, int]:
    """The functions that rewriting ``program`` runs, and how often."""
    counts: collections.Counter[types.CodeType] = collections.Counter()
    decorated = overlap_collectives(JITTED, policy="always", hardware="tpu_v5p", strict=True)
    decorated.trace(*REF.arguments)
    with watching(lambda code: counts.update([code])):
        decorated = overlap_collectives(JITTED, policy="always", hardware=cost_model.by_name("tpu_v5p"))
        counts.clear()
        decorated.trace(*REF.arguments)
    # Read before the pass begins, as a key for jit's cache.
    del counts[shims.context_mesh.__code__], counts[shims.nothing_is_traced.__code__]
    return dict(counts)


def functions_of(module: str) -> list[types.CodeType]:
    return [code for code in called_functions() if code.co_filename.endswith(f"/{module}")]


def some_function_of(module: str) -> types.CodeType:
    return max(functions_of(module), key=lambda code: (called_functions()[code], code.co_qualname))


HARDWARE = cost_model.by_name("tpu_v5p")


@pytest.mark.parametrize("module", MODULES)
def test_a_fault_in_any_function_leaves_the_original_program(module: str) -> None:
    kept = overlap_collectives(JITTED, policy="never").lower(*REF.arguments).as_text()
    assert "collective_permute" not in kept
    for code in functions_of(module):
        # A generator is entered once more to be closed, where an exception goes nowhere.
        last = 1 if code.co_flags & inspect.CO_GENERATOR else called_functions()[code]
        for call in {1, last}:
            decorated = overlap_collectives(JITTED, policy="always", hardware=HARDWARE)
            with fault(code, call), pytest.warns(RuntimeWarning, match="InjectedError: call") as warned:
                lowered = decorated.lower(*REF.arguments)
            assert lowered.as_text() == kept, code.co_qualname
            assert len(warned) == 1, code.co_qualname


def test_most_modules_of_the_pass_are_run_by_the_program_under_test() -> None:
    # The cost model has much that a decision does not need: calibration, layers, tables.
    modules = [module for module in MODULES if module.startswith("passes/")]
    run = {module for module in modules if functions_of(module)}
    assert len(run) > len(modules) * 0.7


STAGES = ["graph", "match", "decide", "plan", "rewrite", "gather_ring", "scatter_ring"]
each_stage = pytest.mark.parametrize("stage", STAGES)


@each_stage
def test_results_are_those_of_the_original_in_a_call_and_under_jit_and_grad(stage: str) -> None:
    code = some_function_of(f"passes/{stage}.py")
    c = REF.cotangent

    def loss(f: Any) -> Any:
        return lambda *args: (f(*args) * c).sum()

    uses: dict[str, tuple[Any, Any]] = {
        "call": (lambda f: f, REF.value()),
        "jit": (jax.jit, REF.value()),
        "grad": (lambda f: jax.grad(loss(f), argnums=(0, 1, 2)), REF.gradients()),
        "jit of grad": (lambda f: jax.jit(jax.grad(loss(f), argnums=(0, 1, 2))), REF.gradients()),
    }
    jitted = jax.jit(mlp())
    for use, wanted in uses.values():
        decorated = overlap_collectives(jitted, policy="always", hardware=HARDWARE)
        with fault(code), pytest.warns(RuntimeWarning, match="InjectedError"):
            actual = use(decorated)(*REF.arguments)
        check(actual, wanted)
        check(use(decorated)(*REF.arguments), wanted)


@each_stage
def test_side_effects_happen_once(stage: str) -> None:
    seen: list[int] = []
    inner = mlp()

    def effectful(x: Any, w: Any, v: Any) -> Any:
        io_callback(lambda: seen.append(1), None)
        y = inner(x, w, v)
        io_callback(lambda: seen.append(2), None)
        return y

    decorated = overlap_collectives(jax.jit(effectful), policy="always", hardware=HARDWARE)
    with fault(some_function_of(f"passes/{stage}.py")), pytest.warns(RuntimeWarning):
        check(decorated(*REF.arguments), REF.value())
    jax.effects_barrier()
    assert sorted(seen) == [1, 2]


@each_stage
def test_strict_raises_the_error_itself(stage: str) -> None:
    decorated = overlap_collectives(jax.jit(mlp()), policy="always", hardware=HARDWARE, strict=True)
    with fault(some_function_of(f"passes/{stage}.py")), pytest.raises(InjectedError):
        decorated(*REF.arguments)


@pytest.mark.parametrize("strict", [False, True])
@each_stage
def test_explain_raises_the_error_itself(stage: str, strict: bool) -> None:
    decorated = overlap_collectives(jax.jit(mlp()), policy="always", hardware=HARDWARE, strict=strict)
    with fault(some_function_of(f"passes/{stage}.py")), pytest.raises(InjectedError):
        decorated.explain(*REF.arguments)


@pytest.mark.parametrize("stage, names", [("gather_ring", "all_gather"), ("scatter_ring", "reduce_scatter")])
def test_the_warning_names_the_site_and_asks_for_a_report(stage: str, names: str) -> None:
    (emit,) = (c for c in functions_of(f"passes/{stage}.py") if c.co_name.startswith("emit_"))
    decorated = overlap_collectives(jax.jit(mlp()), policy="always", hardware=HARDWARE)
    with fault(emit), pytest.warns(RuntimeWarning) as warned:
        decorated(*REF.arguments)
    (message,) = (str(w.message) for w in warned)
    assert f"could not rewrite mlp (at the {names} at " in message
    assert "mlp.py:" in message and "(shard_body)" in message
    assert "report" in message and "InjectedError" in message


def test_the_warning_comes_without_a_site_where_none_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise InjectedError("no frame of the pass is involved")

    monkeypatch.setattr(passes, "make_plan", broken)
    with pytest.warns(RuntimeWarning, match=r"could not rewrite mlp; the original .* report"):
        check(always(jax.jit(mlp()), strict=False)(*REF.arguments), REF.value())


def test_one_warning_however_often_the_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise InjectedError

    monkeypatch.setattr(passes, "make_plan", broken)
    decorated = always(jax.jit(mlp()), strict=False)
    with pytest.warns(RuntimeWarning) as warned:
        for rows in (8, 12, 16):
            ref = reference(rows=rows)
            check(decorated(*ref.arguments), ref.value())
    assert len(warned) == 1
    assert warned[0].filename == __file__, "the user's own line"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decorated = always(jax.jit(mlp()), strict=False)
        for rows in (8, 12):
            with pytest.raises(RuntimeWarning, match="could not rewrite mlp"):
                decorated(*reference(rows=rows).arguments)


def test_after_a_fault_another_shape_is_rewritten() -> None:
    decorated = always(jax.jit(mlp()), strict=False)
    with fault(some_function_of("passes/rewrite.py")), pytest.warns(RuntimeWarning):
        decorated(*REF.arguments)
    larger = reference(rows=16)
    check(decorated(*larger.arguments), larger.value())
    assert hops(decorated, *larger.arguments) > 0


def test_a_warning_that_the_user_made_an_error_is_no_fault() -> None:
    """Under verify the devices of a CPU's mesh tell nothing of a TPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decorated = always(jax.jit(mlp()), strict=False, policy="verify", hardware="tpu_v5p")
        for _ in range(2):
            with pytest.raises(RuntimeWarning, match=r"^policy='verify' compiles for the mesh's devices"):
                decorated(*REF.arguments)


def test_another_s_warning_that_is_an_error_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def deprecated(*plans: Any) -> Any:
        warnings.warn("jax.foo is deprecated", DeprecationWarning, stacklevel=1)

    monkeypatch.setattr(passes, "rewritten", deprecated)
    decorated = always(jax.jit(mlp()), strict=False)
    with (
        pytest.warns(OverlapWarning, match="could not rewrite mlp.* DeprecationWarning: jax.foo is"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", DeprecationWarning)
        check(decorated(*REF.arguments), REF.value())


def test_debug_nans_names_the_users_line() -> None:
    program = mlp()
    decorated = always(jax.jit(lambda *arguments: jnp.log(-jnp.abs(program(*arguments)) - 1)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as raised:
        decorated(*REF.arguments)
    assert any(f"It came out of the log at {__file__}" in note for note in raised.value.__notes__)


def test_a_rewritten_program_of_another_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "rewritten", lambda *plans: lambda *args: [args[0].astype(np.float16)])
    with pytest.warns(RuntimeWarning, match="RewriteError"):
        check(always(jax.jit(mlp()), strict=False)(*REF.arguments), REF.value())
    with pytest.raises(RewriteError, match="mlp"):
        always(jax.jit(mlp()))(*REF.arguments)


@pytest.mark.parametrize("strict", [False, True])
def test_an_error_of_the_users_own_policy_is_theirs(strict: bool) -> None:
    raised = InjectedError("undecided")

    def policy(site: Any) -> bool:
        raise raised

    decorated = overlap_collectives(jax.jit(mlp()), policy=policy, strict=strict)
    gradient = jax.grad(lambda *arguments: decorated(*arguments).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for use in (decorated, jax.jit(decorated), gradient, decorated.explain, decorated.lower):
            with pytest.raises(InjectedError) as caught:
                use(*REF.arguments)
            assert caught.value is raised


def test_a_policy_that_runs_out_of_answers_is_the_users_error() -> None:
    """StopIteration would end a loop of ours, and be taken for an error of the pass."""
    answers = iter(())
    decorated = overlap_collectives(jax.jit(mlp()), policy=lambda _: next(answers), hardware="tpu_v5p")
    for use in (decorated, decorated.explain):
        with pytest.raises(RuntimeError, match=r"the policy .*lambda.* raised StopIteration"):
            use(*REF.arguments)


def test_an_error_of_the_policy_about_the_derivative_is_the_users_too() -> None:
    asked: list[Any] = []

    def policy(site: Any) -> bool:
        asked.append(site)
        if len(asked) > forward:
            raise InjectedError("of a collective of the derivative")
        return True

    decorated = overlap_collectives(jax.jit(mlp()), policy=policy)
    forward = 2
    with pytest.raises(InjectedError, match="of a collective of the derivative"):
        jax.grad(lambda x: decorated(x, *REF.arguments[1:]).sum())(REF.arguments[0])
    assert len(asked) == 3


def test_a_logging_handler_that_raises_stops_no_call() -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise InjectedError("disk full")

    logger, handler = logging.getLogger("overlap"), Broken()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with pytest.warns(RuntimeWarning, match="disk full"):
            check(always(jax.jit(mlp()), strict=False)(*REF.arguments), REF.value())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize("strict", [False, True])
def test_the_users_own_exception_is_theirs(strict: bool) -> None:
    class OwnError(Exception):
        pass

    raised = OwnError("of the function itself")

    def broken(x: Any) -> Any:
        raise raised

    decorated = always(jax.jit(broken), strict=strict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for use in (decorated, jax.jit(decorated), jax.grad(decorated), decorated.explain, decorated.lower):
            with pytest.raises(OwnError) as caught:
                use(1.0)
            assert caught.value is raised


@pytest.mark.parametrize("strict", [False, True])
def test_an_exception_of_the_users_own_derivative_is_theirs(strict: bool) -> None:
    class OwnError(Exception):
        pass

    raised = OwnError("of the backward pass")

    def broken(residuals: None, cotangent: Any) -> Any:
        raise raised

    product = jax.custom_vjp(lambda h, v: h @ v)
    product.defvjp(lambda h, v: (h @ v, None), broken)

    def body(x: Any, w: Any, v: Any) -> Any:
        h = product(jax.lax.all_gather(x, "x", axis=0, tiled=True) @ w, v)
        return jax.lax.psum_scatter(h, "x", scatter_dimension=0, tiled=True)

    jitted = jax.jit(jax.shard_map(body, mesh=mesh_of(), in_specs=SPECS, out_specs=SPECS[0], check_vma=False))
    decorated = always(jitted, strict=strict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(decorated(*REF.arguments), jitted(*REF.arguments))
        with pytest.raises(OwnError) as caught:
            jax.grad(lambda x: decorated(x, *REF.arguments[1:]).sum())(REF.arguments[0])
        assert caught.value is raised


@pytest.mark.parametrize("strict", [False, True])
def test_what_has_no_derivative_in_jax_is_no_fault_of_the_pass(strict: bool) -> None:
    def body(x: Any, w: Any, v: Any) -> Any:
        return jax.lax.pmax(jax.lax.all_gather(x, "x", axis=0, tiled=True) @ w @ v, "x")

    jitted = jax.jit(jax.shard_map(body, mesh=mesh_of(), in_specs=SPECS, out_specs=P()))
    decorated = always(jitted, strict=strict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(decorated(*REF.arguments), jitted(*REF.arguments))
        with pytest.raises(NotImplementedError, match="pmax"):
            jax.grad(lambda x: decorated(x, *REF.arguments[1:]).sum())(REF.arguments[0])


def test_errors_of_jax_name_the_users_own_function_and_argument() -> None:
    def branching(flag: Any) -> Any:
        return 1 if flag else 2

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"branching at .* argument flag"):
        always(jax.jit(branching))(True)


def test_interrupts_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(passes, "make_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        always(jax.jit(mlp()), strict=False)(*REF.arguments)


def differentiable(x: Any, w: Any, v: Any) -> Any:
    h = jax.nn.relu(jax.lax.all_gather(x, "x", axis=0, tiled=True)) @ w
    return jax.lax.psum_scatter(h @ v, "x", scatter_dimension=0, tiled=True)


DIFFERENTIABLE = jax.jit(jax.shard_map(differentiable, mesh=mesh_of(), in_specs=SPECS, out_specs=SPECS[0]))


def check_gradient(f: Any) -> None:
    x, w, v = REF.arguments
    gradient = jax.grad(lambda w: (f(x, w, v) * REF.cotangent).sum())(w)
    check(gradient, np.maximum(REF.x, 0).T @ REF.c @ REF.v.T)


@functools.cache
def called_later() -> dict[types.CodeType, int]:
    """The functions that differentiating runs, each with how often the program itself runs it before."""
    forward: collections.Counter[types.CodeType] = collections.Counter()
    both: collections.Counter[types.CodeType] = collections.Counter()
    check_gradient(always(DIFFERENTIABLE))  # What is kept is not worked out again.
    decorated = always(DIFFERENTIABLE)
    with watching(lambda code: both.update([code])):
        check_gradient(decorated)
    decorated = always(DIFFERENTIABLE)
    with watching(lambda code: forward.update([code])):
        decorated.trace(*REF.arguments)
    # The functions that catch faults of the rest, and what jax calls to get there, cannot catch their own.
    rule = "with_derivative_of.<locals>."
    nets = {f"{rule}rule", f"{rule}backwards", f"{rule}derivative.<locals>.pull"}
    theirs = (
        "_or_else",
        "_transpose",
        "_split",
        "_invarying_primitive",
        "_barrier_primitive",
        "_marks",
        "_aligned",
    )
    later = [
        code
        for code in both
        if both[code] > forward[code]
        and not code.co_flags & inspect.CO_GENERATOR
        and code.co_qualname not in nets
        and not code.co_qualname.startswith(theirs)
    ]
    # Into the cost model there are few ways: one function of each of its modules.
    of_module = {code.co_filename: code for code in later}
    priced = [code for code in later if "cost_model" in code.co_filename]
    return {
        code: forward[code] for code in later if code not in priced or of_module[code.co_filename] is code
    }


PARTS = 4


@pytest.fixture
def compiled_once(tmp_path: Path) -> Iterator[None]:
    """Programs that are the same are compiled once: all faults lead to a few."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("part", range(PARTS))
def test_a_fault_while_the_program_is_differentiated_leaves_the_original(part: int) -> None:
    later = called_later()
    assert len(later) > PARTS, "the program is planned anew where it is differentiated"
    for code, before in list(later.items())[part::PARTS]:
        decorated = overlap_collectives(DIFFERENTIABLE, policy="always")
        with fault(code, before + 1), pytest.warns(RuntimeWarning, match="InjectedError"):
            check_gradient(decorated)
