"""One variant of an A/B profile while it is run: compiled, called with fresh arguments, timed, traced."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from overlap import agreement
from overlap.ab_report import Failure, Stage
from overlap.agreement import Results
from overlap.hlo.module import Module
from overlap.hlo.parse import parse
from overlap.inspection import devices_of
from overlap.profile_events import ANNOTATION

T = TypeVar("T")


@dataclasses.dataclass
class Run:
    """A variant while it is being measured. After a failure its methods do nothing.

    Attributes:
      name: "original" or "overlapped".
      function: the jitted function, called and lowered with ``args`` and ``kwargs``.
      times_s, compile_s, failure: as in ``Variant``.
      hlo, module: the compiled program's text, and what was read of it; empty and None where it is not known.
      devices: those that the compiled program runs on, of all processes; empty where they are not known.
      donates: whether calls delete arguments, as far as is known.
      donated: which leaves of the arguments they delete; None before the first call.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    times_s: list[float] = dataclasses.field(default_factory=list)
    compile_s: float | None = None
    failure: Failure | None = None
    hlo: str = ""
    module: Module | None = None
    devices: tuple[Any, ...] = ()
    donates: bool = True
    donated: frozenset[int] | None = None

    def compile(self) -> None:
        """Compiles it, which the calls make use of, and keeps the program's text."""

        def body() -> None:
            start_s = time.perf_counter()
            lowered = self.function.lower(*self.args, **self.kwargs)
            compiled = lowered.compile()
            self.compile_s = time.perf_counter() - start_s
            # Not every platform tells these, and the calls do not depend on them.
            with contextlib.suppress(Exception):
                self.donates = bool(lowered.donate_argnums)
            with contextlib.suppress(Exception):
                self.hlo = compiled.as_text() or ""
            with contextlib.suppress(Exception):
                shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
                self.devices = tuple(devices_of(shardings))

        self._attempt("compilation", body)
        with contextlib.suppress(ValueError):
            self.module = parse(self.hlo) if self.hlo else None

    def results(self) -> Results | None:
        """The first call, and its results on the host; None if it failed."""

        def body() -> Results:
            args, kwargs = self._arguments()
            results = _ready(self.function(*args, **kwargs))
            # What was deleted was donated, and will be next time; the others need not be copied again.
            leaves = jax.tree.leaves((args, kwargs))
            self.donated = frozenset(
                i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and leaf.is_deleted()
            )
            return agreement.fetch(results)

        return self._attempt("warm-up", body)

    def warm_up(self) -> None:
        """A further call."""

        def body() -> None:
            args, kwargs = self._arguments()
            _ready(self.function(*args, **kwargs))

        self._attempt("warm-up", body)

    def time(self) -> None:
        """One call, timed."""

        def body() -> None:
            args, kwargs = self._arguments()
            start_s = time.perf_counter()
            results = _ready(self.function(*args, **kwargs))
            self.times_s.append(time.perf_counter() - start_s)
            del results

        self._attempt("timed rounds", body)

    def trace(self, number: int) -> None:
        """One call, marked in the trace."""

        def body() -> None:
            args, kwargs = self._arguments()
            with jax.profiler.StepTraceAnnotation(f"{ANNOTATION}{self.name}", step_num=number):
                _ready(self.function(*args, **kwargs))

        self._attempt("traced rounds", body)

    def _arguments(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of the next call: those that it will delete are copies, and ready."""
        if not self.donates or (self.donated is not None and not self.donated):
            return self.args, self.kwargs
        leaves, tree = jax.tree.flatten((self.args, dict(self.kwargs)))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, jax.Array) and (self.donated is None or i in self.donated):
                # What is committed nowhere stays so: it goes to the devices of the others.
                where = leaf.sharding if leaf.committed else None
                leaves[i] = jax.device_put(leaf, where, may_alias=False)
        jax.block_until_ready([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return args, kwargs

    def _attempt(self, stage: Stage, body: Callable[[], T]) -> T | None:
        """Runs a body unless the variant has failed, and keeps the failure."""
        if self.failure is not None:
            return None
        try:
            return body()
        except Exception as error:
            self.failure = Failure(stage=stage, error=f"{type(error).__name__}: {error}".strip())
            return None


def _ready(results: Any) -> Any:
    """Waits for results and, where there are none, for the effects of the call."""
    jax.block_until_ready(results)
    if not jax.tree.leaves(results):
        jax.effects_barrier()
    return results
