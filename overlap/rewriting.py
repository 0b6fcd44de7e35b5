"""What the pass does to the programs of one decorated function: plans them, and jits what comes of it."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.extend import core as jex_core

import passes
from cost_model import Hardware, OtherDevicesError
from overlap.failure import of_policy, report_request
from overlap.warning import OverlapWarning, warn
from passes import Policy, TryOut, shims

logger = logging.getLogger("overlap")

P = ParamSpec("P")
T = TypeVar("T")


def _with_room(function: Callable[P, T]) -> Callable[P, T]:
    """The function, of which all calls further in find room in one piece of Python's stack.

    CPython keeps frames in pieces of 16 KiB and gives an empty one back to the system at once: where a piece
    ends among the calls of a loop, each costs two system calls (measured: a rewrite took up to 1.9 times as
    long, by how deep the caller was). A frame of this size gets a piece to itself, and leaves as much free.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=1 << 16)
    return functools.wraps(function)(call)


class Rewriter:
    """Rewrites jaxprs by the arguments of the decorator.

    The derivative of a rewritten program asks it again, so it must know nothing of the function itself: jax
    keeps a traced program for as long as the function that was traced lives, and a function that its own
    program refers to would live on for ever, with all arrays that it closes over.

    Args:
      name: of the function, for programs, the log and warnings.
      hardware_of: from the kind of a mesh's devices to hardware.
      policy, strict: see ``overlap_collectives``.
      inline: that of the function's ``jax.jit``.
      try_out: for the policies ``verify`` and ``autotune``.
    """

    def __init__(
        self,
        name: str,
        hardware_of: Callable[[str | None], Hardware | None],
        policy: Policy,
        strict: bool,
        inline: bool,
        try_out: TryOut | None,
    ) -> None:
        self.name = name
        self._hardware_of = hardware_of
        self._policy = policy
        self._strict = strict
        self._inline = inline
        self._try_out = try_out
        self._warned = False

    @_with_room
    def rewrite(
        self, jaxpr: Any, arguments: Sequence[Any]
    ) -> tuple[Callable[..., list[Any]] | None, passes.Plan]:
        """The rewritten program, jitted and traced (None where nothing is rewritten), and its plan."""
        with self._collecting():
            # An effect may not run within a function that has a derivative of its own.
            guarded = not shims.has_effects(jaxpr)
            plan = self._plan(jaxpr, differentiable=not guarded)
            if not plan.changes and not (guarded and self._backward_may_pay(plan)):
                return None, plan
            run = passes.rewritten(plan) if plan.changes else shims.calling(jaxpr, self.name)
            if guarded:
                run = self._with_derivative(jaxpr, run)
            return self._jitted(run, jaxpr, arguments), plan

    def log(self, plan: passes.Plan) -> None:
        """Tells what became of each collective."""
        for site in passes.sites(plan) if logger.isEnabledFor(logging.INFO) else ():
            verdict = "rewritten" if site.rewritten else "kept"
            what = f"{site.kind} over {site.axis} at {site.source}"
            logger.info("%s: %s: %s (%s). %s", self.name, what, verdict, site.reason, site.sentence)

    def failed(self, error: Exception) -> None:
        """What follows a failure of the pass: strict functions raise it, others warn and run the original.

        What is the user's to mend is always raised: an error of the policy, a calibration of other devices, a
        warning of ours that they made an error.
        """
        if self._strict or of_policy(error) or isinstance(error, OtherDevicesError | OverlapWarning):
            raise error
        if not self._warned:
            warn(report_request(self.name, error))
            self._warned = True

    def _collecting(self) -> contextlib.AbstractContextManager[None]:
        """Garbage collection waits for a rewrite; not for trials, which run for minutes on a full device."""
        return _without_garbage_collection() if self._try_out is None else contextlib.nullcontext()

    def _plan(self, jaxpr: Any, *, differentiable: bool) -> passes.Plan:
        """What is to become of a jaxpr, by the function's policy."""

        def by(policy: passes.Policy) -> passes.Plan:
            return passes.make_plan(
                jaxpr,
                policy,
                self._hardware_of,
                differentiable=differentiable,
                try_out=self._try_out,
            )

        plan = by(self._policy)
        return plan if self._try_out is None else passes.tried_whole(plan, by("auto"), self._try_out)

    def _with_derivative(self, jaxpr: Any, run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """A rewritten program whose derivative, and the derivative's own, are rewritten in their turn."""
        return passes.with_derivative_of(jaxpr, run, self._rewrite_derivative, self.failed)

    @_with_room
    def _rewrite_derivative(self, jaxpr: Any) -> Callable[..., list[Any]]:
        """A part of the program's derivative, rewritten; as it is if the pass fails on it.

        Hops that are started explicitly jax cannot differentiate: the part carries its own derivative then.
        Elsewhere jax differentiates the rings, which leave out what it cannot (see ``shims.uninitialised``).
        """
        try:
            guarded = shims.EXPLICIT_STARTS
            plan = self._plan(jaxpr, differentiable=not guarded)
            self.log(plan)
            if plan.changes:
                run = passes.rewritten(plan)
                if guarded:
                    run = self._with_derivative(jaxpr, run)
                return self._jitted(run, jaxpr, jaxpr.in_avals)
        except Exception as error:
            self.failed(error)
        return jex_core.jaxpr_as_fun(jaxpr)  # type: ignore[no-any-return]

    def _jitted(
        self, run: Callable[..., list[Any]], jaxpr: Any, arguments: Sequence[Any]
    ) -> Callable[..., list[Any]]:
        """``run`` jitted, traced, and found to be of the type of the program it stands for."""
        run.__name__ = self.name
        jitted = jax.jit(run, inline=self._inline)
        results = jitted.trace(*arguments).jaxpr.out_avals
        if list(results) != list(jaxpr.out_avals):
            raise passes.RewriteError(f"in {self.name}: results are {results}, not {jaxpr.out_avals}")
        return jitted  # type: ignore[no-any-return]

    def _backward_may_pay(self, plan: passes.Plan) -> bool:
        """Whether a program in which nothing is rewritten may have a derivative in which something is."""
        if self._policy == "never":
            return False
        hardware = [self._hardware_of(kind) for kind in plan.device_kinds]
        if self._policy == "auto":
            return any(known is not None and known.overlaps for known in hardware)
        if self._policy in ("verify", "autotune"):
            return any(known is not None for known in hardware)
        return bool(hardware)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Puts off garbage collection: a rewrite makes many objects, and nearly all of them stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
