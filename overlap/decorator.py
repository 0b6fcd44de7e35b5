"""The decorator: traces a jitted function, rewrites its jaxpr, and calls the result through ``jax.jit``."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, overload

import jax
from jax.extend import core as jex_core

import cost_model
import passes
from cost_model import Hardware
from overlap.report import Report
from passes import Plan, Policy, Site, shims

logger = logging.getLogger("overlap")


@overload
def overlap_collectives(
    fun: Callable[..., Any],
    *,
    hardware: str | Hardware | None = None,
    policy: Policy = "auto",
    strict: bool = False,
) -> Overlapped: ...


@overload
def overlap_collectives(
    fun: None = None,
    *,
    hardware: str | Hardware | None = None,
    policy: Policy = "auto",
    strict: bool = False,
) -> Callable[[Callable[..., Any]], Overlapped]: ...


def overlap_collectives(
    fun: Callable[..., Any] | None = None,
    *,
    hardware: str | Hardware | None = None,
    policy: Policy = "auto",
    strict: bool = False,
) -> Any:
    """Rewrites collectives next to matmuls into rings whose hops run beside partial matmuls.

    Use it on a function that came out of ``jax.jit`` (a plain callable is jitted first), bare or with arguments:

        @overlap_collectives
        @jax.jit
        def train_step(state, batch): ...

    Args:
      fun: the function. Its jit options (static arguments, donation, shardings, layouts, compiler options) are kept.
      hardware: what the cost model prices for: None (from the devices of the mesh), a name such as ``"tpu_v5p"``, or
        a ``cost_model.Hardware``.
      policy: ``"auto"`` rewrites where the cost model predicts a gain, ``"always"`` wherever it is legal, ``"never"``
        nowhere (the report still tells what would be predicted); a callable is asked per ``Site``.
      strict: raise if the pass fails, instead of running the original with a warning.

    Returns:
      An ``Overlapped``, called like ``fun``; or, without ``fun``, a decorator that makes one.

    Raises:
      ValueError: an unknown hardware name or policy; the message lists the valid ones.
      TypeError: ``fun`` or ``hardware`` is of a type that cannot be used.
    """
    if not callable(policy) and policy not in passes.POLICIES:
        names = ", ".join(repr(name) for name in passes.POLICIES)
        raise ValueError(f"unknown policy {policy!r}: give one of {names}, or a callable Site -> bool")
    if isinstance(hardware, str):
        hardware = cost_model.by_name(hardware)
    elif hardware is not None and not isinstance(hardware, Hardware):
        raise TypeError(f"hardware must be None, a name or a cost_model.Hardware, not {type(hardware).__name__}")
    if fun is None:
        return functools.partial(overlap_collectives, hardware=hardware, policy=policy, strict=strict)
    if not callable(fun):
        raise TypeError(f"overlap_collectives takes a function, not {type(fun).__name__}")
    return Overlapped(fun, hardware, policy, strict)


class Overlapped:
    """A jitted function with its collectives overlapped; made by ``overlap_collectives``.

    Called like the original, and like any jitted function under ``jax.grad``, ``jax.vmap``, ``jax.jit`` and the other
    transformations. Attributes of jitted functions that are not listed here (``clear_cache``, …) are those of the
    rewritten function.

    Attributes:
      original: the user's jitted function, unchanged.
    """

    original: Any

    def __init__(self, fun: Callable[..., Any], hardware: Hardware | None, policy: Policy, strict: bool) -> None:
        self.original = fun if shims.is_jitted(fun) else jax.jit(fun)
        self._hardware = hardware
        self._policy = policy
        self._strict = strict
        self._warned = False
        self._options = shims.jit_options(self.original)
        functools.update_wrapper(self, self.original)

        @functools.wraps(self.original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._traced(*args, **kwargs)

        self._call = jax.jit(call, **self._options.kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_call":
            raise AttributeError(name)
        return getattr(self._call, name)

    def __repr__(self) -> str:
        return f"<overlap_collectives of {self.original!r}>"

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(f).trace``, of the rewritten function."""
        return self._call.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(f).lower``, of the rewritten function."""
        return self._call.lower(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """What is decided about every collective of the program, and why. Traces; neither compiles nor runs.

        Args:
          *args, **kwargs: as for a call; ``jax.ShapeDtypeStruct`` will do.
        """
        traced = self.original.trace(*args, **kwargs)
        return Report(passes.sites(self._plan(traced.jaxpr)), name=self.__name__)

    def _plan(self, jaxpr: Any) -> Plan:
        return passes.make_plan(jaxpr, self._policy, self._hardware_of)

    def _hardware_of(self, device_kind: str | None) -> Hardware | None:
        if self._hardware is not None:
            return self._hardware
        return None if device_kind is None else cost_model.from_device_kind(device_kind)

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        """The body that jit traces: the user's function, traced and rewritten. Static arguments come as they are."""
        static = {i % len(args) for i in self._options.static_argnums if -len(args) <= i < len(args)}
        dynamic = [arg for i, arg in enumerate(args) if i not in static]
        named = {k: v for k, v in kwargs.items() if k not in self._options.static_argnames}

        def user(dynamic: list[Any], named: dict[str, Any]) -> Any:
            given = iter(dynamic)
            merged = [arg if i in static else next(given) for i, arg in enumerate(args)]
            return self.original.__wrapped__(*merged, **{**kwargs, **named})

        closed, shapes = jax.make_jaxpr(user, return_shape=True)(dynamic, named)
        leaves = jax.tree.leaves((dynamic, named))
        return jax.tree.unflatten(jax.tree.structure(shapes), self._run(closed, leaves))

    def _run(self, closed: Any, leaves: list[Any]) -> list[Any]:
        """Binds the rewritten program, or the original if the pass fails on it."""
        original = jex_core.jaxpr_as_fun(closed)
        try:
            plan = self._plan(closed)
            found = passes.sites(plan)
            if plan.changes:
                run = passes.rewritten(plan)
                run.__name__ = self.__name__
                results = list(jax.jit(run)(*leaves))
                self._log(found)
                return results
            self._log(found)
        except Exception as error:
            if self._strict:
                raise
            self._warn(error)
        return list(original(*leaves))

    def _log(self, found: tuple[Site, ...]) -> None:
        for site in found:
            verdict = "rewritten" if site.rewritten else "kept"
            logger.info("%s: %s over %s at %s: %s (%s) %s", self.__name__, site.kind, site.axis, site.source, verdict, site.reason, site.sentence)  # noqa: E501

    def _warn(self, error: Exception) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"overlap_collectives could not rewrite {self.__name__}; the original program runs instead. "
            f"Please report this, with the program: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
