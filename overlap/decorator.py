"""The decorator: traces a jitted function, rewrites its jaxpr, and calls the result through ``jax.jit``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, overload

import jax

import passes
from cost_model import Hardware
from overlap.given_hardware import GivenHardware, given_hardware
from overlap.offloading import offload_hint
from overlap.report import Report
from overlap.rewriting import Rewriter
from overlap.trials import trials_for
from passes import Policy, shims


@overload
def overlap_collectives(
    fun: Callable[..., Any],
    *,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    policy: Policy = "auto",
    strict: bool = False,
) -> Overlapped: ...


@overload
def overlap_collectives(
    fun: None = None,
    *,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    policy: Policy = "auto",
    strict: bool = False,
) -> Callable[[Callable[..., Any]], Overlapped]: ...


def overlap_collectives(
    fun: Callable[..., Any] | None = None,
    *,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    policy: Policy = "auto",
    strict: bool = False,
) -> Any:
    """Rewrites collectives next to matmuls into rings whose hops run beside partial matmuls.

    Use it on a function that came out of ``jax.jit`` (a plain callable is jitted first), bare or with
    arguments:

        @overlap_collectives
        @jax.jit
        def train_step(state, batch): ...

    Args:
      fun: the function. Its jit options (static arguments, donation, shardings, layouts, compiler options, …)
        are kept; decisions go by those of ``offload_options`` among them. A function that was decorated
        already is decorated anew, with these arguments. A bound method gives a bound method.
      hardware: what the cost model prices for: None (from the devices of the mesh), a name such as
        ``"tpu_v5p"``, a file that ``python -m overlap calibrate`` wrote, or a ``cost_model.Hardware``. A file
        of another kind of device than the mesh's is an error of the call that traces the function.
      policy: ``"auto"`` rewrites where the cost model predicts a gain, ``"always"`` wherever it is legal,
        ``"never"`` nowhere (the report still tells what is predicted). ``"verify"`` compiles each chain and
        its few best rings for the mesh's devices (compile-only ones too), models the times of the schedules
        that the compiler chose, and rewrites where a ring is faster by more than 1 % and needs no more
        temporary memory. ``"autotune"`` does the same with wall-clock times on the attached devices; where
        there are none it verifies. Both keep what they find on disk (docs/policies.md), and go by the cost
        model where a chain cannot be compiled on its own. A callable is asked per ``Site`` and returns a
        bool; what it raises, a call of the function raises.
      strict: raise if the pass fails, instead of running the original with a warning.

    Returns:
      An ``Overlapped``, called like ``fun``; or, without ``fun``, a decorator that makes one.

    Raises:
      ValueError: an unknown hardware name or policy; the message lists the valid ones.
      TypeError: ``fun``, ``hardware`` or ``strict`` is of a type that cannot be used.
      RuntimeError: the options of the jitted function cannot be read, in a jax that keeps them elsewhere.
    """
    if not callable(policy) and policy not in passes.POLICIES:
        names = ", ".join(repr(name) for name in passes.POLICIES)
        raise ValueError(f"unknown policy {policy!r}: give one of {names}, or a callable Site -> bool")
    if not isinstance(strict, bool):
        raise TypeError(f"strict is True or False, got {strict!r}")
    given = given_hardware(hardware)

    def decorate(fun: Callable[..., Any]) -> Overlapped:
        function: Any = getattr(fun, "__func__", None)
        if isinstance(function, Overlapped) or shims.is_jitted(function):
            # The numbers of static and donated arguments count the instance, so it is bound again.
            return decorate(function).__get__(fun.__self__)  # type: ignore[attr-defined, no-any-return]
        if not callable(fun):
            raise TypeError(f"overlap_collectives takes a function, not {type(fun).__name__}")
        if _is_wrapped_elsewhere(fun):
            kind, instead = _wrapped_as(fun)
            raise TypeError(
                f"overlap_collectives takes a function, jitted by jax.jit or not at all, and this is {kind}. "
                f"{instead}"
            )
        return Overlapped(fun, given, policy, strict)

    return decorate if fun is None else decorate(fun)


class Overlapped:
    """A jitted function with its collectives overlapped; made by ``overlap_collectives``.

    Called like the original, and like any jitted function under ``jax.grad``, ``jax.vmap``, ``jax.jit`` and
    the other transformations. As a method it is bound like any function. Attributes of jitted functions that
    are not listed here (``eval_shape``, …) are those of the rewritten function.

    Attributes:
      original: the user's jitted function, unchanged.
      hardware: what the cost model prices for; None for that of the mesh's devices.
    """

    original: Any
    hardware: Hardware | None

    def __init__(
        self, fun: Callable[..., Any], hardware: GivenHardware, policy: Policy, strict: bool
    ) -> None:
        if isinstance(fun, Overlapped):
            fun = fun.original
        functools.update_wrapper(self, fun)
        self.original = fun if isinstance(fun, jax.stages.Wrapped) else jax.jit(fun)
        self.hardware = hardware.hardware
        self._decorated_with = hardware, policy, strict
        self._options = _jit_options(self.original)
        _check_referable(self.original.__wrapped__)
        compiler_options = self._options.kwargs.get("compiler_options", {})
        self._hardware_of = dataclasses.replace(hardware, compiler_options=compiler_options)
        self._rewriter = Rewriter(
            _name_of(self.original.__wrapped__),
            self._hardware_of,
            policy,
            strict,
            self._options.kwargs["inline"],
            trials_for(policy, self._hardware_of, compiler_options),
        )
        self._calls: dict[Any, Any] = {}
        self._inner: Any = jax.jit(
            self.original.__wrapped__,
            static_argnums=self._options.static_argnums,
            static_argnames=self._options.static_argnames,
            inline=self._options.kwargs["inline"],
        )

    @property
    def _call(self) -> Any:
        """The rewritten function, one for each mesh of the context: its devices decide what is rewritten.

        jax traces a function once for all meshes that differ in the order of their devices only. And one for
        calls within a program that is being traced, which may have a loop around it that the pass cannot see.
        """
        whole = shims.nothing_is_traced()
        key = shims.context_mesh(), whole
        if key not in self._calls:

            @functools.wraps(self.original)
            def call(*args: Any, **kwargs: Any) -> Any:
                return self._run(whole, args, kwargs)

            # Of several threads that come here at once the first one's is everybody's.
            return self._calls.setdefault(key, jax.jit(call, **self._options.kwargs))
        return self._calls[key]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _Method(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_call", "_calls"):
            raise AttributeError(name)
        return getattr(self._call, name)

    def __copy__(self) -> Overlapped:
        return self

    def __deepcopy__(self, memo: Any) -> Overlapped:
        """Itself, as of any function."""
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickled by its name, as any function, if it has one; else the function, jitted and decorated anew.

        Of a jitted function that was pickled jax keeps no more than that it can be called.
        """
        module, name = getattr(self, "__module__", None), getattr(self, "__qualname__", "")
        if module != "__main__" and _named(module, name) is self:
            return str(name)
        return _made_anew, (
            self.original.__wrapped__,
            {**self._options.kwargs},
            *self._decorated_with,
        )

    def __repr__(self) -> str:
        return f"<overlap_collectives of {self.original!r}>"

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(f).trace``, of the rewritten function."""
        return self._call.trace(*args, **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(f).lower``, of the rewritten function."""
        return self._call.lower(*args, **kwargs)

    def clear_cache(self) -> None:
        """As ``jax.jit(f).clear_cache``: the next call traces the function again."""
        for call in list(self._calls.values()):
            call.clear_cache()
        self._inner.clear_cache()

    def explain(self, /, *args: Any, **kwargs: Any) -> Report:
        """What is decided about every collective of the program, and why. Traces; neither compiles nor runs.

        The policies ``verify`` and ``autotune`` compile the chains that they have not tried yet, and the
        latter runs them: of several processes with one mesh, all must then call this.

        The rewritten program is traced too, so that what the report calls rewritten is what a call runs.

        Args:
          *args, **kwargs: as for a call; ``jax.ShapeDtypeStruct`` will do.

        Raises:
          Exception: whatever made the pass fail on this program. A call would warn and run the original; here
            nothing is at stake, and the error is what a report of it should show.
        """
        jaxpr = self.original.trace(*args, **kwargs).jaxpr
        with shims.hops_vary(shims.nothing_is_traced()), shims.nothing_is_folded():
            _, plan = self._rewriter.rewrite(jaxpr, jaxpr.in_avals)
        hint = offload_hint(self._hardware_of, plan.device_kinds)
        return Report(passes.sites(plan), name=self._rewriter.name, hint=hint)

    def _run(self, whole: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The body that jit traces: the user's program as rewritten.

        The rewritten program is traced on its own, and only one of the two programs is then called: whatever
        fails on the way leaves nothing behind in the program that is being traced.

        Args:
          whole: whether this is a program of its own, and no part of one that is being traced.
          args, kwargs: the arguments; static ones come as they are.
        """
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.original(*args, **kwargs)
        traced = self._inner.trace(*args, **kwargs)
        try:
            # Tracers that the user's function closes over come first among the arguments of its jaxpr.
            arguments = [*shims.closed_over(traced), *self._dynamic_leaves(args, kwargs)]
            with shims.hops_vary(whole), shims.nothing_is_folded():
                rewritten, plan = self._rewriter.rewrite(traced.jaxpr, arguments)
            unfolded = shims.nothing_is_folded()
            self._rewriter.log(plan)
        except Exception as error:
            self._rewriter.failed(error)
            rewritten = None
        if rewritten is None:
            return self._inner(*args, **kwargs)
        with unfolded:
            results = rewritten(*arguments)
        return jax.tree.unflatten(traced.out_tree, results)

    def _dynamic_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of the arguments that are not static, in the order of the jaxpr's."""
        static = {i % len(args) for i in self._options.static_argnums if -len(args) <= i < len(args)}
        dynamic = [arg for i, arg in enumerate(args) if i not in static]
        named = {name: arg for name, arg in kwargs.items() if name not in self._options.static_argnames}
        return jax.tree.leaves((dynamic, named))


class _Method:
    """An ``Overlapped`` bound to an instance: every way to use it takes the instance first.

    What is not listed here is the function's own, as of any bound method.
    """

    def __init__(self, function: Overlapped, instance: Any) -> None:
        self.__func__ = function
        self.__self__ = instance
        # These a class has of its own; the others are looked up when they are asked for.
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in (*functools.WRAPPER_ASSIGNMENTS, "__wrapped__"):
            raise AttributeError(name)
        return getattr(self.__func__, name)

    @property
    def original(self) -> Any:
        """The user's jitted function, bound."""
        return functools.partial(self.__func__.original, self.__self__)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__func__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """As of the function."""
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """As of the function."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """As of the function."""
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def explain(self, /, *args: Any, **kwargs: Any) -> Report:
        """As of the function."""
        return self.__func__.explain(self.__self__, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Method):
            return NotImplemented
        return self.__self__ is other.__self__ and self.__func__ is other.__func__

    def __hash__(self) -> int:
        return hash((id(self.__self__), self.__func__))

    def __repr__(self) -> str:
        return f"<bound method {self.__func__!r} of {self.__self__!r}>"


def _made_anew(
    fun: Callable[..., Any], options: dict[str, Any], hardware: GivenHardware, policy: Policy, strict: bool
) -> Overlapped:
    """What was pickled."""
    return Overlapped(jax.jit(fun, **options), hardware, policy, strict)


def _named(module: str | None, name: str) -> Any:
    """What a module has of such a qualified name; None if nothing."""
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _name_of(fun: Any) -> str:
    """What reports call a function; of one without a name its type's."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return str(getattr(fun, "__name__", type(fun).__name__))


def _check_referable(fun: Any) -> None:
    """Refuses a callable that takes no weak references: jitted a second time, it ends the process.

    Raises:
      TypeError: it is one.
    """
    try:
        weakref.ref(fun)
    except TypeError:
        raise TypeError(
            f"jax refers to functions weakly, and {type(fun).__name__} takes no weak reference: wrap it in a "
            "function, or give its class weakref_slot=True if it is a dataclass with slots"
        ) from None


def _is_wrapped_elsewhere(fun: Any) -> bool:
    """Whether a function is traced or compiled, or jitted by a library that takes arguments apart: flax."""
    if isinstance(fun, jax.stages.Traced | jax.stages.Compiled):
        return True
    if shims.is_jitted(fun) or type(fun).__module__.startswith(("jax", "overlap")):
        return False
    return isinstance(fun, jax.stages.Wrapped) or (hasattr(fun, "lower") and hasattr(fun, "__wrapped__"))


def _wrapped_as(fun: Any) -> tuple[str, str]:
    """What such a function is, and what to write instead."""
    if inspect.isfunction(fun):
        return (
            "compiled already, as by jax.pmap",
            "Write it with jax.shard_map, and decorate the jax.jit of that.",
        )
    if isinstance(fun, jax.stages.Traced):
        return "traced already, by .trace(...)", "Decorate the function, then trace that."
    if isinstance(fun, jax.stages.Compiled):
        return (
            "compiled already, by .lower(...).compile()",
            "Decorate the function, then lower and compile that.",
        )
    return (
        f"{type(fun).__module__.partition('.')[0]}'s {type(fun).__name__}",
        "Put it inside, as in nnx.jit(overlap_collectives(f)), or decorate a jax.jit of what is left of the "
        "arguments once they are split into arrays and the rest.",
    )


def _jit_options(fun: Any) -> shims.JitOptions:
    if shims.is_jitted(fun):
        with contextlib.suppress(AttributeError):
            return shims.jit_options(fun)
    if not hasattr(fun, "__wrapped__"):
        raise TypeError(
            "overlap_collectives was given a jitted function that was pickled and read back: jax keeps "
            "neither the function nor its options then. Pickle the function, and jit and decorate it "
            "where it is read; or decorate it first, and pickle that."
        )
    raise RuntimeError(
        f"overlap_collectives cannot read the jit options (static arguments, donation, …) of {fun!r}: "
        f"jax {jax.__version__} keeps them elsewhere than the versions it was made for. Please report this."
    )
