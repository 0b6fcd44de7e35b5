"""Differences between jax versions, and the few private jax names the pass cannot do without.

Nothing else in the project imports ``jax._src``. Functions here say why the public API does not suffice, or
belong to one that does.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config, core, source_info_util
from jax._src.mesh import get_concrete_mesh
from jax.extend import core as jex_core
from jax.extend.core import primitives
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from passes import rows

OLDEST_JAX: Final = (0, 10, 2)
"""Older ones name the parameters of equations otherwise."""


def require_jax(version: tuple[int, ...]) -> None:
    """Raises an ImportError, which says what to do, if this version of jax is too old."""
    if version < OLDEST_JAX:
        oldest, found = (".".join(map(str, numbers)) for numbers in (OLDEST_JAX, version))
        raise ImportError(
            f"overlap-collectives needs jax {oldest} or newer, and this is jax {found}: "
            f"pip install --upgrade 'jax>={oldest}'"
        )


require_jax(jax.__version_info__)

JaxprEqn = Any
NameStack = Any

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SKIPPED = (
    *(os.path.join(_ROOT, floor, "") for floor in ("overlap", "passes", "cost_model")),
    os.path.join(os.path.dirname(os.path.abspath(jax.__file__)), ""),
)
_STANDARD = os.path.join(sysconfig.get_paths()["stdlib"], "")
_INSTALLED = tuple(os.path.join(_STANDARD, name, "") for name in ("site-packages", "dist-packages"))
"""What is installed for all users lies inside the standard library, and is none of it."""


UNKNOWN = "unknown"
"""The source line of an equation that no frame of the user's made."""


@contextlib.contextmanager
def equation_scope(eqn: JaxprEqn, prefix: NameStack | None = None) -> Iterator[None]:
    """Binds in this context carry the equation's source line, name scopes and config context.

    ``jax.named_scope`` can add a scope but can neither set a source line nor re-enter a transform scope
    such as ``jvp(...)``, so this takes what ``jax.core.eval_jaxpr`` itself uses.
    """
    stack = source_info_util.current_name_stack()
    if prefix is not None:
        stack = stack + prefix
    stack = stack + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def call_scope(eqn: JaxprEqn, prefix: NameStack | None) -> NameStack:
    """The name scopes that the body of an inlined ``jit`` equation runs under."""
    name = eqn.params.get("name")
    own = eqn.source_info.name_stack
    own = own if name is None else own.extend(f"jit({name})")
    return own if prefix is None else prefix + own


def source_line(eqn: JaxprEqn) -> str:
    """``file:line (function)`` of the innermost user frame of the equation, or ``"unknown"``.

    The traceback object is an attribute of every equation and its ``frames`` need no private import.
    """
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if is_users(frame.file_name):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return UNKNOWN


def placed_on(eqn: JaxprEqn) -> str | None:
    """What an equation is to run on, if not on the device's cores: a ``compute_on`` of jax 0.10 around it.

    In jax 0.12 that is a call.
    """
    return getattr(eqn.ctx, "compute_type", None)


def is_users(file_name: str) -> bool:
    """Whether a file is none of this library, of jax or of Python."""
    if file_name.startswith("<frozen "):
        return False
    path = os.path.abspath(file_name)
    standard = path.startswith(_STANDARD) and not path.startswith(_INSTALLED)
    return not standard and not path.startswith(_SKIPPED)


def open_jaxpr(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """The equations-holding jaxpr and its constants, of an open or a closed jaxpr (one class in jax 0.12)."""
    consts = tuple(getattr(jaxpr, "consts", ()))
    return getattr(jaxpr, "jaxpr", jaxpr), consts


def like(original: Any, closed: Any) -> Any:
    """``closed`` in the form in which ``original`` was given: open jaxprs stay open (jax 0.10)."""
    if hasattr(original, "consts") or type(original) is type(closed):
        return closed
    if closed.consts:
        raise ValueError("the rewritten body of an equation that takes no constants has constants")
    return closed.jaxpr


def calling(closed: Any, name: str) -> Callable[..., list[Any]]:
    """A function that calls a closed jaxpr as a jitted function of that name would, and traces nothing anew.

    jax has no public way to make such a call: it is one of a small function, with the jaxpr in its place. A
    jaxpr with constants of its own is traced anew. Arguments that it never reads are left out: they need not
    be there.
    """
    body, constants = open_jaxpr(closed)
    if constants:
        return jex_core.jaxpr_as_fun(closed)  # type: ignore[no-any-return]
    body, read = partial_eval.dce_jaxpr(body, [True] * len(body.outvars))
    closed = jex_core.ClosedJaxpr(body, ())  # type: ignore[attr-defined, unused-ignore]
    params = jax.make_jaxpr(jax.jit(lambda value: value + 1))(0).eqns[0].params
    counts = {"in": len(closed.in_avals), "out": len(closed.out_avals), "donated": len(closed.in_avals)}
    each = {
        key: value * counts[side] for key, value in params.items() if (side := key.split("_")[0]) in counts
    }
    params = {**params, **each, "jaxpr": closed, "name": name}
    return lambda *arguments: primitives.jit_p.bind(*itertools.compress(arguments, read), **params)


def without_dead_code(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A function without what its results do not need: ``jax.jit`` drops that, a part's lowering does not."""

    def live(*arguments: Any) -> list[Any]:
        body, constants = open_jaxpr(jax.make_jaxpr(function)(*arguments))
        body, read = partial_eval.dce_jaxpr(body, [True] * len(body.outvars))
        needed = itertools.compress(arguments, read)
        return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(body, constants))(*needed)  # type: ignore[attr-defined, no-any-return, unused-ignore]

    return live


def loop_constants(eqn: JaxprEqn, body: str) -> int:
    """How many first arguments of a loop's body (named by its parameter) never change.

    Parameters of equations are private: jax 0.12 counts a scan's in another one than 0.10.
    """
    params = eqn.params
    if eqn.primitive.name == "scan":
        return int(params["num_consts"] if "num_consts" in params else len(params["ft_in"].unpack()[0]))
    return int(params["cond_nconsts" if body == "cond_jaxpr" else "body_nconsts"])


def loop_carried(eqn: JaxprEqn) -> slice:
    """Which operands a loop carries from one iteration to the next; what they become is its first results."""
    params = eqn.params
    if eqn.primitive.name == "scan":
        first = loop_constants(eqn, "jaxpr")
        count = params["num_carry"] if "num_carry" in params else len(params["ft_in"].unpack()[1])
        return slice(first, first + count)
    return slice(params["cond_nconsts"] + params["body_nconsts"], len(eqn.invars))


def loop_operands(eqn: JaxprEqn, body: str) -> Sequence[int]:
    """The loop's operands that the arguments of a body (named by its parameter) are at first, in order.

    Of a while loop the constants of the condition come first, then those of the body.
    """
    if eqn.primitive.name == "scan":
        return range(len(eqn.invars))
    constants = eqn.params["cond_nconsts"]
    after = loop_carried(eqn).start
    rest = range(after, len(eqn.invars))
    return [*(range(constants) if body == "cond_jaxpr" else range(constants, after)), *rest]


def loop_unchanged(eqn: JaxprEqn, body: str) -> frozenset[int]:
    """Which arguments of a loop's body (named by its parameter) are the same in every iteration.

    Those are its constants, and what it carries and returns as it came: the cotangent of a running sum, say.
    """
    step = "jaxpr" if eqn.primitive.name == "scan" else "body_jaxpr"
    inner, _ = open_jaxpr(eqn.params[step])
    argument = dict(zip(loop_operands(eqn, step), inner.invars, strict=True))
    carried = range(len(eqn.invars))[loop_carried(eqn)]
    kept = {i for i, result in zip(carried, inner.outvars, strict=False) if result is argument[i]}
    constants = loop_constants(eqn, body)
    operands = enumerate(loop_operands(eqn, body))
    return frozenset(position for position, i in operands if position < constants or i in kept)


def has_effects(eqn_or_jaxpr: Any) -> bool:
    """Whether an equation must keep its place among others: naming a mesh axis is no such effect.

    jax exports no class of that effect, so it is told by its name.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn_or_jaxpr.effects)


def is_literal(atom: Any) -> bool:
    """Whether a jaxpr's operand is a literal and not a variable.

    Of the class in ``jax.extend``, that is: `graph.Literal` is the dataflow graph's own.
    """
    return isinstance(atom, jex_core.Literal)


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes over which a value differs, as its type says (empty under check_vma=False).

    A type says it in another attribute since jax 0.12.
    """
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying) if manual is not None else frozenset(getattr(aval, "vma", ()))


def as_invarying(value: Any, axes: Sequence[str]) -> Any:
    """A value that is the same on all devices along the axes, with a type that says so.

    jax gives that type only to the results of its own psum and all_gather. Not differentiable.
    """
    return _INVARYING.bind(value, axes=tuple(axes))


def _invarying_type(aval: Any, *, axes: tuple[str, ...]) -> Any:
    kept = varying_axes(aval) - set(axes)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return aval.update(manual_axis_type=manual.update(varying=kept))
    return aval.update(vma=kept)


def _invarying_primitive() -> jex_core.Primitive:
    primitive = jex_core.Primitive("overlap_invarying")
    primitive.def_abstract_eval(_invarying_type)
    primitive.def_impl(lambda value, *, axes: value)
    mlir.register_lowering(primitive, lambda context, value, *, axes: [value])

    def batched(values: Any, dims: Any, *, axes: tuple[str, ...]) -> Any:
        return primitive.bind(*values, axes=axes), dims[0]

    batching.primitive_batchers[primitive] = batched
    return primitive


_INVARYING = _invarying_primitive()


def vmap_over(axis_data: Any) -> Callable[..., Any]:
    """``jax.vmap`` over the axis of which a rule for batching is told, with its name and mesh axes.

    The public rules are told of its size alone.
    """
    name = {} if axis_data.name is core.no_axis_name else {"axis_name": axis_data.name}
    return partial(jax.vmap, axis_size=axis_data.size, spmd_axis_name=axis_data.spmd_name or None, **name)


def named_axes(eqn: JaxprEqn) -> frozenset[Any]:
    """The axes that an equation names and does not bind, as a psum does: their effects are told by that name.

    A ppermute has none.
    """
    effects = {effect.name for effect in eqn.effects if type(effect).__name__ == "NamedAxisEffect"}
    name = eqn.params.get("axis_name", ())
    return frozenset(effects.union(name if isinstance(name, tuple | list) else (name,)))


def in_front(axis_data: Any, value: Any, axis: int | None) -> Any:
    """A value with that axis in front, where ``vmap`` maps over one of its own or over none.

    What is the same along an axis that lies on a mesh axis of type Explicit is then sharded over that.
    """
    return batching.bdim_at_front(value, axis, axis_data.size, axis_data.explicit_mesh_axis)


def one_of(value: Any, axis: int) -> Any:
    """One of the equal parts of a value along an axis, which is not sharded then: no part of one that is."""
    sharding = jax.typeof(value).sharding
    entries = [*sharding.spec.partitions, *[None] * (value.ndim - len(sharding.spec.partitions))]
    if entries[axis] is not None:
        entries[axis] = None
        value = reshard(value, NamedSharding(sharding.mesh, PartitionSpec(*entries)))
    return lax.index_in_dim(value, 0, axis, keepdims=False)


def batched_type(axis_data: Any, aval: Any) -> Any:
    """The type of a value with that axis in front, sharded and varying as before: no public way keeps it."""
    return core.unmapped_aval(axis_data.size, 0, aval, axis_data.explicit_mesh_axis)


def barrier(*values: Any) -> tuple[Any, ...]:
    """``lax.optimization_barrier`` of values that keep their types: before jax 0.12 it joins those.

    It makes each vary over all that another one varies over, and nothing public takes that back.
    """
    if jax.__version_info__ >= (0, 12):
        return tuple(lax.optimization_barrier(values))
    leaves, structure = jax.tree.flatten(values)
    if len({varying_axes(jax.typeof(leaf)) for leaf in leaves}) < 2:
        return tuple(lax.optimization_barrier(values))
    return tuple(jax.tree.unflatten(structure, _BARRIER.bind(*leaves)))


def _barrier_primitive() -> jex_core.Primitive:
    primitive = jex_core.Primitive("overlap_barrier")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *types: types)
    primitive.def_impl(lambda *values: values)
    mlir.register_lowering(primitive, lambda _, *values: stablehlo.OptimizationBarrierOp(values).results)

    def batched(values: Any, dims: Any) -> Any:
        return primitive.bind(*values), dims

    def pushed(primals: Any, tangents: Any) -> Any:
        return primitive.bind(*primals), barrier(*map(ad.instantiate_zeros, tangents))

    batching.primitive_batchers[primitive] = batched
    ad.primitive_jvps[primitive] = pushed
    ad.primitive_transposes[primitive] = lambda cotangents, *_: barrier(
        *map(ad.instantiate_zeros, cotangents)
    )
    return primitive


_BARRIER = _barrier_primitive()


def device_kind(aval: Any) -> str | None:
    """The ``device_kind`` of the mesh in a value's type; None where the mesh does not know its devices."""
    device = aval.sharding.mesh.abstract_device
    return None if device is None else str(device.device_kind)


def context_mesh() -> Mesh | None:
    """The mesh that ``jax.set_mesh`` set, while a function is traced too; None if there is none.

    ``jax.sharding.get_mesh`` refuses to tell it while a function is traced.
    """
    mesh = get_concrete_mesh()
    return None if mesh.empty else mesh


def concrete_mesh(mesh: Mesh | AbstractMesh) -> Mesh | None:
    """A shard_map's mesh with its devices; if it tells a shape only the context's, as jax itself takes it."""
    if isinstance(mesh, Mesh):
        return mesh
    context = context_mesh()
    return context if context is not None and context.shape == mesh.shape else None


@dataclass(frozen=True, slots=True)
class JitOptions:
    """What the user's ``jax.jit`` was told.

    Attributes:
      kwargs: keyword arguments with which ``jax.jit`` makes an equal wrapper of another function.
      static_argnums: positions of static arguments.
      static_argnames: names of static arguments.
    """

    kwargs: Mapping[str, Any]
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]


def closed_over(traced: Any) -> tuple[Any, ...]:
    """The tracers that a function closes over: the first arguments of its traced jaxpr."""
    return tuple(traced._consts)


def uninitialised(shape: tuple[int, ...], aval: Any, *, differentiable: bool) -> Any:
    """An array of a type's dtype, to be overwritten. Filling it with zeros costs time, but sometimes must be.

    If the type's mesh has axes of type Explicit the array is of that mesh too: jax refuses to write what is
    of such a mesh into one that is of none.

    Before jax 0.12 ``lax.empty`` gives a batched array under ``vmap`` whatever it is used for, and
    ``jax.jacfwd`` refuses a result that depends on one.
    """
    explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
    sharding = aval.sharding if explicit else None
    if differentiable and jax.__version_info__ < (0, 12):
        return lax.full(shape, 0, aval.dtype, sharding=sharding)
    return lax.empty(shape, aval.dtype, out_sharding=sharding)


def explicit_starts(aval: Any) -> bool:
    """Whether hops of a program with this value may be started explicitly: jax ≥ 0.12, TPU and GPU.

    On CPU such a start works, but a barrier that takes it along ends the process (jax 0.12.0).
    """
    return _START is not None and _platform(aval) in ("tpu", "gpu")


def all_manual(aval: Any) -> bool:
    """Whether ``shard_map`` is manual over all axes, of several devices, of the mesh in a value's type."""
    mesh = aval.sharding.mesh
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return all(kind is AxisType.Manual or mesh.shape[name] == 1 for name, kind in kinds)


def start_ppermute(value: Any, names: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Any:
    """Starts a ``ppermute`` and gives a future of its result, for ``finish_ppermute``.

    Not exported by jax yet. Unlike a plain ``ppermute``, whose start the compiler places, it can be tied to
    the operand of the matmul that is to run beside it.
    """
    assert _START is not None
    with _named_by_loop():
        return _START(_as_sent(value), names, pairs)


def finish_ppermute(future: Any) -> Any:
    """What has arrived."""
    with _named_by_loop():
        value = future.done()
    return _as_sent(value)


def _as_sent(value: Any) -> Any:
    """The value of a hop that is started, laid out alike before and after.

    The TPU compiler lays the operand and the result of a started hop out apart, and then refuses where they
    differ.
    """
    return laid_out(value, _sent_order(jax.typeof(value), value.shape))


def _sent_order(aval: Any, shape: tuple[int, ...]) -> rows.Order:
    return rows.sent(shape) if on_tpu(aval) else tuple(range(len(shape)))


_VARIES: contextvars.ContextVar[bool] = contextvars.ContextVar("varies", default=False)

_NUMBERED: Final = "start "

_FIRST_CHANNEL: Final = 1 << 16
"""Of those that starts are on: jax's own have smaller numbers."""

_ATTRIBUTES: Final = "mhlo.frontend_attributes"

_CONFIG: Final = "async_collective_config"
"""The one of those attributes in which jax says what a start sends where, in JSON."""

_STAYS: Final = "overlap_stays"
"""In the name of a hop that may be in a loop unseen: see ``_staying``."""


@contextlib.contextmanager
def hops_vary(vary: bool = True) -> Iterator[None]:
    """Where hops are traced of which none sends the same in all iterations of a loop around it; or may.

    None does in the body of a loop of ours, and where a program is traced as a whole.
    """
    token = _VARIES.set(vary)
    try:
        yield
    finally:
        _VARIES.reset(token)


def all_is_seen() -> bool:
    """Whether what is traced is all that there is around the hops: see `hops_vary`."""
    return _VARIES.get()


def _named_by_loop() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if _VARIES.get() else jax.named_scope(_STAYS)


def nothing_is_folded() -> contextlib.AbstractContextManager[None]:
    """Where equations of constants are traced like any others, within ``jax.ensure_compile_time_eval()`` too.

    There jax runs them at once, which those of a shard_map's body cannot be.
    """
    return config.eager_constant_folding(False)  # type: ignore[no-any-return, unused-ignore]


def nothing_is_traced() -> bool:
    """Whether what is called now is a program of its own, and no part of one that is being traced."""
    return core.trace_state_clean()  # type: ignore[no-any-return, unused-ignore]


def row_major(value: Any) -> Any:
    """The value, laid out by rows; complex numbers are left to the compiler."""
    return laid_out(value, tuple(range(value.ndim)))


def laid_out(value: Any, dims: tuple[int, ...]) -> Any:
    """The value with its dims in this order in memory, the major ones first.

    Complex numbers are left to the compiler, which first takes them apart, and refuses a layout for them.
    """
    from jax.experimental.layout import Layout, with_layout_constraint

    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return value
    return with_layout_constraint(value, Layout(major_to_minor=dims))


def on_tpu(aval: Any) -> bool:
    """Whether a program with this value is for TPUs."""
    return _platform(aval) == "tpu"


def on_gpu(aval: Any) -> bool:
    """Whether a program with this value is for GPUs."""
    return _platform(aval) == "gpu"


def _platform(aval: Any) -> str | None:
    kind = (device_kind(aval) or "").lower()
    if kind.startswith("tpu"):
        return "tpu"
    return "gpu" if "nvidia" in kind else None


def _ppermute_start() -> Callable[..., Any] | None:
    """jax's ``ppermute_start``, where it has one, made to work under ``vmap``, for which jax has no rules."""
    from jax._src import core
    from jax._src.lax import parallel

    future = getattr(core, "AbstractFuture", None)
    start = getattr(parallel, "ppermute_start", None)
    # jax 0.10 has the start, but no barrier that takes its future.
    lowers = hasattr(parallel, "_ppermute_lowering") and hasattr(parallel, "_async_done_lowering")
    if jax.__version_info__ < (0, 12) or future is None or start is None or not lowers:
        return None

    def mapped(size: int, axis: int | None, aval: Any) -> Any:
        return aval.update(inner_aval=core.mapped_aval(size, axis, aval.inner_aval))

    def unmapped(size: int, axis: int | None, explicit: Any, aval: Any) -> Any:
        return aval.update(inner_aval=core.unmapped_aval(size, axis, aval.inner_aval, explicit))

    core.aval_mapping_handlers.setdefault(future, (mapped, unmapped))
    for primitive, batched in (
        (parallel.ppermute_start_p, _start_batched),
        (parallel.ppermute_done_p, _done_batched),
    ):
        if primitive not in batching.fancy_primitive_batchers:
            batching.primitive_batchers[primitive] = partial(batched, primitive)
    mlir.register_lowering(parallel.ppermute_start_p, _told_apart, cacheable=False)
    for platform in ("cuda", "rocm"):
        mlir.register_lowering(parallel.ppermute_start_p, _on_own_channel, platform, cacheable=False)
    mlir.register_lowering(parallel.ppermute_done_p, _awaited, cacheable=False)
    return start  # type: ignore[no-any-return]


def _start_batched(primitive: Any, values: Any, dims: Any, **params: Any) -> tuple[Any, int]:
    """Starts one hop for all, of values of which the new dim is the first.

    jax lays it out as the first one wherever it is, and XLA:GPU refuses a start of what is then not laid out
    by rows.
    """
    (value,), (dim,) = values, dims
    if dim:
        value = jnp.moveaxis(value, dim, 0)
        order = _sent_order(jax.typeof(value), value.shape[1:])
        value = laid_out(value, (0, *(1 + each for each in order)))
    return primitive.bind(value, **params), 0


def _done_batched(primitive: Any, values: Any, dims: Any, **params: Any) -> tuple[Any, int]:
    return primitive.bind(*values, **params), dims[0]


def _told_apart(ctx: Any, value: Any, **params: Any) -> Any:
    """Lowers a start to an operation that the compiler takes for no other: it has a number of its own.

    jax names the pairs in a frontend attribute, which XLA leaves out when it looks for operations that are
    the same: of two starts of one operand along different axes, or both ways round, it keeps one, and devices
    get the wrong shard (jax 0.12, TPU and GPU). Of two that are the same in truth, such as those of sums that
    are all zero, it keeps one too, and ends the process over what is left, two that wait for it. It does
    compare what the backend is told, and reads nothing there.
    """
    from jax._src.lax import parallel

    lower: Callable[..., Any] = parallel._ppermute_lowering
    (future,) = lower(ctx, value, is_async=True, **params)
    # A dict of the module's own: each process numbers its starts alike.
    number = next(ctx.module_context.cached_primitive_lowerings.setdefault(_told_apart, itertools.count()))
    future.owner.attributes["backend_config"] = mlir.ir.StringAttr.get(f"{_NUMBERED}{number}")
    if _is_layout(value):
        _staying(ctx, value)
    return [_staying(ctx, future)]


def _on_own_channel(ctx: Any, value: Any, **params: Any) -> Any:
    """Lowers a start for GPUs, whose compiler soon reads the pairs and forgets all else that it was told.

    What is left are permutes like any others, and two of one value along the same pairs are the same, unless
    they are on channels of their own. Nothing else rests on which channel it is.
    """
    (future,) = _told_apart(ctx, value, **params)
    start = future.owner.attributes
    told = {entry.name: entry.attr for entry in start[_ATTRIBUTES]}
    config = json.loads(told[_CONFIG].value)
    if "channel_id" in config:
        number = int(start["backend_config"].value.removeprefix(_NUMBERED))
        config["channel_id"] = _FIRST_CHANNEL + number
        told[_CONFIG] = mlir.ir.StringAttr.get(json.dumps(config))
        start[_ATTRIBUTES] = mlir.ir.DictAttr.get(told)
    return [future]


def _awaited(ctx: Any, future: Any) -> Any:
    """Lowers what waits for a start."""
    from jax._src.lax import parallel

    module: Any = parallel
    (value,) = module._async_done_lowering("collective-permute-done", ctx, future)
    return [_staying(ctx, value)]


def _is_layout(value: Any) -> bool:
    """Whether a value is lowered to the custom call that lays it out: see `row_major`."""
    attributes = getattr(value.owner, "attributes", {})
    return "call_target_name" in attributes and attributes["call_target_name"].value == "LayoutConstraint"


def _staying(ctx: Any, result: Any) -> Any:
    """The result of an operation that the compiler is to leave in the loop that it is in.

    XLA moves the start of a hop out of a loop that sends the same in every iteration, even one around the
    whole of our program, and leaves in it what waits for the hop: the process ends. What may have an effect
    it moves nowhere, and keeps: so both halves of a hop may, where the loop is not seen. Elsewhere they may
    not, for what has an effect is kept in one order with all else that has (a tensor-parallel MLP's gradient
    on v5p: 5 % slower, 12 % more memory). So may the layout of what is sent: moved out of the loop it holds
    no longer within, and a start of what is narrow is refused.
    """
    if _STAYS in str(ctx.name_stack):
        result.owner.attributes["has_side_effect"] = mlir.ir.BoolAttr.get(True)
    return result


_START = _ppermute_start()

EXPLICIT_STARTS = _START is not None
"""Whether this jax can start hops explicitly at all."""


for _path in _SKIPPED[:-1]:
    # What jax says of a line, in messages and dumps, is to be of the user's, not of ours.
    source_info_util.register_exclusion(_path)


def is_jitted(fun: Any) -> bool:
    """Whether ``fun`` came out of ``jax.jit``."""
    return hasattr(fun, "_jit_info") and hasattr(fun, "__wrapped__")


def jit_options(fun: Any) -> JitOptions:
    """Reads the options back from a function that came out of ``jax.jit``.

    jax offers no public way: a jitted function shows its traced parameters, but not its static
    arguments, and only a wrapper with the same options keeps jit's own caching and call path.
    """
    info = fun._jit_info
    kwargs: dict[str, Any] = {
        "static_argnums": info.static_argnums,
        "static_argnames": info.static_argnames,
        "donate_argnums": info.donate_argnums,
        "keep_unused": info.keep_unused,
        "inline": info.inline,
        "out_shardings": _with_layouts(info, "out"),
    }
    if info.user_specified_in_shardings or any(leaf is not None for leaf in info.in_layouts_leaves):
        kwargs["in_shardings"] = _with_layouts(info, "in")
    if info.donate_argnames:
        kwargs["donate_argnames"] = info.donate_argnames
    if info.compiler_options_kvs:
        kwargs["compiler_options"] = dict(info.compiler_options_kvs)
    for name in ("device", "backend"):
        if getattr(info, name) is not None:
            kwargs[name] = getattr(info, name)
    return JitOptions(kwargs, tuple(info.static_argnums), tuple(info.static_argnames))


def _with_layouts(info: Any, side: str) -> Any:
    """The shardings of one side as the user gave them, joined with their layouts."""
    from jax.experimental.layout import Format

    shardings = getattr(info, f"{side}_shardings_leaves")
    layouts = getattr(info, f"{side}_layouts_leaves")
    leaves = list(shardings)
    if any(layout is not None for layout in layouts):
        leaves = [
            sharding if layout is None else Format(layout, sharding)
            for layout, sharding in zip(layouts, shardings, strict=True)
        ]
    return jax.tree.unflatten(getattr(info, f"{side}_shardings_treedef"), leaves)
