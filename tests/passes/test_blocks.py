"""Every block rule holds: an equation run on block j of its operands gives block j of its result."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from passes import shims
from passes.block_eval import Piece, run_on_piece
from passes.blocks import _RULES, RESULT, Blockwise, Call, block_params, blockwise
from passes.chains import BlockOp
from passes.collective import Collective
from passes.gather_match import call_of
from passes.graph import Dataflow, Literal, Operand, dataflow
from passes.hops import Places
from passes.results import aligned_p
from passes.schedule import WHOLE, Part
from tests.passes import bodies, spmd

RNG = np.random.default_rng(0)
HALVES = (Part(Fraction(0), Fraction(1, 2), 1), Part(Fraction(1, 2), Fraction(1, 2), -1))


def floats(*shape: int, low: float = 0.1, high: float = 0.9) -> np.ndarray:
    """Numbers that every function is defined for."""
    return RNG.uniform(low, high, shape).astype(np.float32)


def integers(*shape: int, high: int = 9) -> np.ndarray:
    return RNG.integers(1, high, shape).astype(np.int32)


def booleans(*shape: int) -> np.ndarray:
    return RNG.integers(0, 2, shape).astype(bool)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function with an equation of the primitive, and its arguments."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]


class Numbered(Places):
    """Devices by number, without a mesh: this one is number 0."""

    def after(self, distance: int) -> Any:
        return jnp.int32(distance % self.axis_size)


def of(fun: Callable[..., Any], *args: Any) -> Case:
    return Case(fun, args)


X, Y, Z = (floats(4, 6) for _ in range(3))
SMALL = tuple(floats(2, 3) for _ in range(3))  # for what takes long to compile
N, M = integers(4, 6), integers(4, 6, high=3)
B, C = booleans(4, 6), booleans(4, 6)
CUBE = floats(4, 6, 12)

UNARY_NAMES = """
abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square stop_gradient tan
tanh
"""
BINARY_NAMES = "add atan2 div eq ge gt le lt max min ne nextafter pow rem sub"
UNARY: dict[str, Callable[..., Any]] = {name: getattr(lax, name) for name in UNARY_NAMES.split()}
BINARY: dict[str, Callable[..., Any]] = {name: getattr(lax, name) for name in BINARY_NAMES.split()}

CASES: dict[str, list[Case]] = {
    **{name: [of(fun, X)] for name, fun in UNARY.items()},
    **{name: [of(fun, X, Y)] for name, fun in BINARY.items()},
    "mul": [of(lax.mul, X, Y), of(lambda x: lax.mul(x, np.float32(0.5)), X)],
    "igamma": [of(lax.igamma, *SMALL[:2])],
    "igammac": [of(lax.igammac, *SMALL[:2])],
    "acosh": [of(lax.acosh, X + 1)],
    "add_any": [of(jax.grad(lambda x: (jnp.sin(x) * jnp.cos(x)).sum()), X)],
    "and": [of(lax.bitwise_and, N, M), of(lax.bitwise_and, B, C)],
    "or": [of(lax.bitwise_or, N, M)],
    "xor": [of(lax.bitwise_xor, N, M)],
    "not": [of(lax.bitwise_not, N), of(lax.bitwise_not, B)],
    "clamp": [
        of(lambda x: lax.clamp(np.float32(0.3), x, np.float32(0.5)), X),
        of(lax.clamp, X * 0.5, Y, Z + 0.5),
    ],
    "clz": [of(lax.clz, N)],
    "complex": [of(lax.complex, X, Y)],
    "conj": [of(lax.conj, X + 1j * Y)],
    "imag": [of(lax.imag, X + 1j * Y)],
    "real": [of(lax.real, X + 1j * Y)],
    "convert_element_type": [of(lambda x: x.astype(jnp.bfloat16), X), of(lambda n: n.astype(jnp.float32), N)],
    "copy": [of(jnp.copy, X)],
    "integer_pow": [of(lambda x: x**3, X)],
    "log2": [of(jnp.log2, X)],
    "mulhi": [of(lax.mulhi, N, M)],
    "one_minus_square": [of(jax.grad(lambda x: jnp.tanh(x).sum()), X)],
    "name": [of(lambda x: checkpoint_name(x, "saved"), X)],
    "overlap_aligned": [of(lambda x: aligned_p.bind(x, jnp.zeros((), jnp.bool_)), X)],
    "polygamma": [of(lax.polygamma, np.full_like(X, 1), X)],
    "population_count": [of(lax.population_count, N)],
    "pvary": [of(lambda x: lax.pcast(x, "x", to="varying"), SMALL[0])],
    "reduce_precision": [of(lambda x: lax.reduce_precision(x, 5, 3), X)],
    "regularized_incomplete_beta": [of(lax.betainc, *SMALL)],
    "select_n": [of(lax.select_n, B, X, Y), of(lax.select_n, np.bool_(True), X, Y)],
    "shift_left": [of(lax.shift_left, N, M)],
    "shift_right_arithmetic": [of(lax.shift_right_arithmetic, -N, M)],
    "shift_right_logical": [of(lax.shift_right_logical, N, M)],
    **{
        f"reduce_{name}": [
            of(lambda x, f=fun: f(x, axis=1), CUBE),
            of(lambda x, f=fun: f(x, axis=(2, 0)), CUBE),
        ]
        for name, fun in {"sum": jnp.sum, "max": jnp.max, "min": jnp.min, "prod": jnp.prod}.items()
    },
    "reduce_and": [of(lambda b: jnp.all(b, axis=1), booleans(4, 6, 2))],
    "reduce_or": [of(lambda b: jnp.any(b, axis=1), booleans(4, 6, 2))],
    "reduce_xor": [of(lambda n: lax.reduce(n, np.int32(0), lax.bitwise_xor, (1,)), integers(4, 6, 2))],
    "argmax": [of(lambda x: lax.argmax(x, 1, np.int32), CUBE)],
    "argmin": [of(lambda x: lax.argmin(x, 0, np.int32), CUBE)],
    **{
        name: [of(lambda x, f=fun: f(x, axis=1), CUBE), of(lambda x, f=fun: f(x, axis=0, reverse=True), CUBE)]
        for name, fun in {
            "cumsum": lax.cumsum,
            "cumprod": lax.cumprod,
            "cummax": lax.cummax,
            "cummin": lax.cummin,
            "cumlogsumexp": lax.cumlogsumexp,
        }.items()
    },
    "split": [of(lambda x: lax.split(x, (2, 2, 8), axis=2), CUBE)],
    "transpose": [of(lambda x, p=p: lax.transpose(x, p), CUBE) for p in ((2, 0, 1), (1, 2, 0), (0, 2, 1))],
    "reshape": [
        of(lambda x, s=s: lax.reshape(x, s), CUBE)
        for s in ((24, 12), (4, 72), (2, 2, 6, 12), (4, 6, 3, 4), (288,), (4, 1, 6, 12), (8, 36))
    ]
    + [of(lambda x: lax.reshape(x, (24, 12), dimensions=(1, 0, 2)), CUBE)],
    "broadcast_in_dim": [
        of(lambda x: lax.broadcast_in_dim(x, (4, 2, 6), (0, 2)), X),
        of(lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)), floats(4, 1)),
        of(lambda x: lax.broadcast_in_dim(x, (4, 6), ()), np.float32(2)),
    ],
    "squeeze": [
        of(lambda x: lax.squeeze(x, (1,)), floats(4, 1, 6)),
        of(lambda x: lax.squeeze(x, (-1,)), X[..., None]),
    ],
    "concatenate": [
        of(lambda x, y: lax.concatenate([x, y], 1), X, floats(4, 2)),
        of(lambda x, y: lax.concatenate([x, y, x], 0), X, floats(2, 6)),
    ],
    "stack": [of(lambda x, y: jnp.stack([x, y], 1), X, Y), of(lambda x, y: jnp.stack([x, y, x]), X, Y)],
    "unstack": [of(lambda x, a=a: lax.unstack(x, axis=a), CUBE[:3, :, :3]) for a in (0, 1, 2)],
    "tile": [of(lambda x: jnp.tile(x, (1, 2)), X), of(lambda x: jnp.tile(x, (3, 1)), X)],
    "all_gather": [of(lambda x: lax.all_gather(x, "x", tiled=True), SMALL[0])],
    "reduce_scatter": [of(lambda x: lax.psum_scatter(x, "x", tiled=True), SMALL[0])],
    "rev": [of(lambda x: lax.rev(x, (1,)), CUBE), of(lambda x: lax.rev(x, (0, 2)), CUBE)],
    "sort": [
        of(lambda x: lax.sort(x, dimension=1), CUBE),
        of(lambda x, n: lax.sort([x, n], dimension=0, num_keys=1), X, N),
    ],
    "slice": [
        of(lambda x: lax.slice(x, (0, 2, 0), (4, 4, 12)), CUBE),
        of(lambda x: lax.slice(x, (1, 0, 0), (4, 6, 12), (1, 1, 3)), CUBE),
    ],
    "sharding_constraint": [
        of(lambda x: lax.with_sharding_constraint(x, NamedSharding(spmd.mesh_of(1), PartitionSpec("x"))), X)
    ],
    "pad": [
        of(lambda x: lax.pad(x, np.float32(7), ((0, 0, 0), (1, 2, 0), (0, 0, 1))), CUBE),
        of(lambda x: lax.pad(x, np.float32(7), ((-1, 1, 0), (0, 0, 0), (0, 0, 0))), CUBE),
    ],
    "dynamic_slice": [
        of(lambda x, i: lax.dynamic_slice(x, (0, i, 0), (4, 2, 12)), CUBE, np.int32(3)),
        of(lambda x, i: lax.dynamic_slice(x, (i, 0, i), (2, 6, 3)), CUBE, np.int32(1)),
    ],
}


HERE = sorted(name for name in CASES if name not in ("log2", "one_minus_square") or hasattr(lax, name))
"""Those that this version of jax has."""

IN_MESH = ("pvary", "all_gather", "reduce_scatter")
"""Primitives of a mesh axis: their cases run on one of a single device, where they change no value."""


@dataclasses.dataclass(frozen=True)
class Equation:
    """One equation of a traced program, with the values around it."""

    flow: Dataflow
    index: int
    env: dict[int, Any]

    @property
    def call(self) -> Call:
        return call_of(self.flow, self.flow.ops[self.index])

    @property
    def results(self) -> list[Any]:
        return [self.env[value] for value in self.flow.ops[self.index].outputs]

    def read(self, operand: Operand) -> Any:
        return operand.val if isinstance(operand, Literal) else self.env[operand]

    def on_piece(self, dims: Blockwise, block: int, blocks: int, part: Part) -> list[Any]:
        """The results of the equation on one piece of its blocked operands, cut out of the whole."""

        name = self.flow.ops[self.index].name

        def read(operand: Operand) -> Any:
            value = self.read(operand)
            return lax.pcast(value, "x", to="varying") if name in IN_MESH and name != "pvary" else value

        def run(*_: Any) -> list[Any]:
            pieces: dict[int, Any] = {}
            piece = Piece(Numbered(Collective(0, "all_gather", ("x",), blocks)), block, part)
            run_on_piece(self.flow, [BlockOp(self.index, dims)], pieces, piece, read)
            return [pieces[value] for value in self.flow.ops[self.index].outputs]

        return list(in_mesh(run, SMALL[0])) if name in IN_MESH else run()


def in_mesh(fun: Callable[..., Any], *args: Any) -> Any:
    """Runs a function where the mesh axis ``x`` is known (of one device, so that values stay whole)."""
    spec = PartitionSpec("x")

    def body(*args: Any) -> Any:
        return jax.tree.map(
            lambda a: lax.pcast(a, "x", to="varying") if not shims.varying_axes(jax.typeof(a)) else a,
            fun(*args),
        )

    return jax.shard_map(body, mesh=spmd.mesh_of(1), in_specs=PartitionSpec(), out_specs=spec)(*args)


def equations(primitive: str) -> Iterator[Equation]:
    """The first equation of the primitive in each of its cases, evaluated by plain JAX."""
    meshed = primitive in IN_MESH
    for case in CASES[primitive]:
        fun = functools.partial(in_mesh, case.fun) if meshed else case.fun
        jaxpr = jax.make_jaxpr(fun)(*case.args)
        flow = dataflow(bodies.mapped_body(jaxpr) if meshed else jaxpr)
        names = [op.name for op in flow.ops]
        assert primitive in names, f"{primitive} is not among {names}"
        index = names.index(primitive)
        env: dict[int, Any] = {**flow.constants, **dict(zip(flow.inputs, case.args, strict=True))}
        if meshed:
            env = dict.fromkeys(range(len(flow.avals)), case.args[0])
        for op in () if meshed else flow.ops[: index + 1]:
            values = [o.val if isinstance(o, Literal) else env[o] for o in op.inputs]
            out = op.eqn.primitive.bind(*values, **op.eqn.primitive.get_bind_params(op.params))
            env.update(zip(op.outputs, out if op.eqn.primitive.multiple_results else [out], strict=True))
        yield Equation(flow, index, env)


def sides(call: Call) -> Iterator[tuple[int, int, int]]:
    """Every side and dim of an equation with every number of blocks that the dim divides into."""
    for side, shape in ((RESULT, call.results[0]), *enumerate(call.operands)):
        for dim, size in enumerate(shape):
            yield from ((side, dim, blocks) for blocks in (2, 3) if size % blocks == 0)


def reduced(call: Call, side: int, dim: int) -> bool:
    """Whether a dim of an operand is one that a reduction removes, so that it has no blocks in the result."""
    return side != RESULT and dim in call.params.get("axes", ())


def cut(whole: Any, dim: int | None, block: int, blocks: int, part: Part) -> Any:
    """A piece of an array, by NumPy."""
    if dim is None:
        return whole
    size = whole.shape[dim] // blocks
    start = block * size + int(part.start * size)
    return np.take(np.asarray(whole), range(start, start + int(part.share * size)), dim)


def same(a: Any, b: Any) -> bool:
    """Equal, up to what another vectorisation of the same function may change."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if np.asarray(b).dtype.kind in "iub":
        return np.array_equal(np.asarray(a), np.asarray(b))
    wide = np.complex128 if np.iscomplexobj(b) else np.float64
    return np.allclose(np.asarray(a).astype(wide), np.asarray(b).astype(wide), rtol=2e-5, atol=1e-6)


def test_every_rule_has_a_case() -> None:
    assert set(_RULES) == set(CASES)


@pytest.mark.parametrize("primitive", HERE)
def test_an_equation_on_a_block_gives_that_block_of_its_result(primitive: str) -> None:
    granted = 0
    for equation in equations(primitive):
        tried: set[tuple[Blockwise, int]] = set()
        for side, dim, blocks in sides(equation.call):
            if reduced(equation.call, side, dim):
                continue
            dims = blockwise(primitive, equation.call, side, dim, blocks)
            if dims is None:
                continue
            granted += 1
            assert len(dims.operand_dims) == len(equation.call.operands)
            assert (dims.result_dim if side == RESULT else dims.operand_dims[side]) == dim
            if (dims, blocks) in tried:
                continue
            tried.add((dims, blocks))
            cuts = [
                s[d] for s, d in zip(equation.call.operands, dims.operand_dims, strict=True) if d is not None
            ]
            cuts += [shape[dims.result_dim] for shape in equation.call.results]
            halves = HALVES if all(size % (2 * blocks) == 0 for size in cuts) else ()
            for block in range(blocks):
                for part in (WHOLE, *halves):
                    got = equation.on_piece(dims, block, blocks, part)
                    for result, whole in zip(got, equation.results, strict=True):
                        wanted = cut(whole, dims.result_dim, block, blocks, part)
                        assert same(result, wanted), (
                            f"side {side}, dim {dim}, block {block} of {blocks}: {dims}"
                        )
    assert granted, "no case has a blockwise dim"


@pytest.mark.parametrize("primitive", HERE)
def test_rules_entered_from_an_operand_and_from_the_result_agree(primitive: str) -> None:
    for equation in equations(primitive):
        for side, dim, blocks in sides(equation.call):
            if reduced(equation.call, side, dim):
                continue
            dims = blockwise(primitive, equation.call, side, dim, blocks)
            if dims is None:
                continue
            assert blockwise(primitive, equation.call, RESULT, dims.result_dim, blocks) == dims
            for other, other_dim in enumerate(dims.operand_dims):
                if other_dim is not None:
                    assert blockwise(primitive, equation.call, other, other_dim, blocks) == dims


REFUSED: list[tuple[str, Callable[..., Any], tuple[Any, ...], int, int]] = [
    ("cumsum", lambda x: lax.cumsum(x, axis=1), (X,), 0, 1),
    ("cumlogsumexp", lambda x: lax.cumlogsumexp(x, axis=0), (X,), RESULT, 0),
    ("argmax", lambda x: lax.argmax(x, 1, np.int32), (X,), 0, 1),
    ("sort", lambda x: lax.sort(x, dimension=1), (X,), 0, 1),
    ("rev", lambda x: lax.rev(x, (0,)), (X,), 0, 0),
    ("split", lambda x: lax.split(x, (2, 4), axis=1), (X,), 0, 1),
    ("concatenate", lambda x: lax.concatenate([x, x], 0), (X,), 1, 0),
    ("concatenate", lambda x: lax.concatenate([x, x], 0), (X,), RESULT, 0),
    ("slice", lambda x: lax.slice(x, (0, 2), (4, 6)), (X,), 0, 1),
    ("slice", lambda x: lax.slice(x, (0, 0), (4, 6), (2, 1)), (X,), RESULT, 0),
    ("pad", lambda x: lax.pad(x, np.float32(0), ((1, 1, 0), (0, 0, 0))), (X,), 0, 0),
    ("pad", lambda x: lax.pad(x, np.float32(0), ((1, -1, 0), (0, 0, 0))), (X,), RESULT, 0),
    ("dynamic_slice", lambda x: lax.dynamic_slice(x, (np.int32(1), np.int32(0)), (2, 6)), (X,), 0, 0),
    ("reshape", lambda x: lax.reshape(x, (24,)), (X,), 0, 1),
    ("reshape", lambda x: lax.reshape(x, (6, 4)), (X,), 0, 1),
    ("reshape", lambda x: lax.reshape(x, (24,), dimensions=(1, 0)), (X,), 0, 0),
    ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (2, 6), (0, 1)), (floats(1, 6),), 0, 0),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]}-{case[3]}-{case[4]}")
def test_a_dim_whose_blocks_are_not_independent_is_refused(case: Any) -> None:
    primitive, fun, args, side, dim = case
    flow = dataflow(jax.make_jaxpr(fun)(*args))
    (op,) = (op for op in flow.ops if op.name == primitive)
    assert blockwise(primitive, call_of(flow, op), side, dim, 2) is None


def test_a_primitive_without_a_rule_is_refused() -> None:
    call = Call({}, ((4, 6),), ((4, 6),))
    assert blockwise("fft", call, 0, 0, 2) is None


def test_a_constraint_on_other_dims_is_that_of_each_block() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def dims_of(*entries: Any) -> list[int | None]:
        sharding = NamedSharding(mesh, PartitionSpec(*entries))
        call = Call({"sharding": sharding, "layout": None}, ((4, 6, 8),), ((4, 6, 8),))
        return [
            None if (dims := blockwise("sharding_constraint", call, 0, dim, 2)) is None else dims.result_dim
            for dim in range(3)
        ]

    assert dims_of("x") == [None, 1, 2]
    assert dims_of(None, ("x",), PartitionSpec.UNCONSTRAINED) == [0, None, 2]


@pytest.mark.parametrize("name", ["sharding", "out_sharding"])
def test_an_equation_with_a_sharding_of_its_own_is_refused(name: str) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    call = Call({name: NamedSharding(mesh, PartitionSpec("x", None))}, ((4, 6),), ((4, 6),))
    whole = Call({name: NamedSharding(mesh, PartitionSpec(None, None))}, ((4, 6),), ((4, 6),))
    assert blockwise("tanh", whole, 0, 0, 2) is not None
    assert blockwise("tanh", Call({name: None}, *((((4, 6),),) * 2)), 0, 0, 2) is not None
    assert blockwise("tanh", call, 0, 0, 2) is None


def test_operands_of_other_shapes_are_refused_in_elementwise_equations() -> None:
    for other in ((6,), (4, 2), (2, 6)):
        assert blockwise("add", Call({}, ((4, 6), other), ((4, 6),)), 0, 0, 2) is None


def test_a_share_that_is_no_whole_number_of_elements_is_an_error() -> None:
    call = Call({"new_sizes": (6, 4), "dimensions": None}, ((6, 2, 2),), ((6, 4),))
    dims = Blockwise((0,), 0)
    assert block_params("reshape", call, dims, Fraction(1, 2))["new_sizes"] == (3, 4)
    with pytest.raises(ValueError, match="not whole"):
        block_params("reshape", call, dims, Fraction(1, 4))


# Shapes and permutations at random, against a search through all dims of the other side.


def commuting_dims(
    fun: Callable[[np.ndarray], np.ndarray], source: tuple[int, ...], dim: int, blocks: int
) -> list[int]:
    """The result dims along which block j of the result holds just the elements of block j of the operand."""
    elements = np.arange(math.prod(source)).reshape(source)
    result = fun(elements)
    wanted = [set(block.flat) for block in np.split(elements, blocks, dim)]
    return [
        d
        for d, size in enumerate(result.shape)
        if size % blocks == 0 and [set(b.flat) for b in np.split(result, blocks, d)] == wanted
    ]


shapes = st.lists(st.sampled_from([1, 1, 2, 3, 4, 6]), min_size=1, max_size=4).map(tuple)


@st.composite
def reshapes(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same size: the second by shuffling the prime factors of the first into groups."""
    source = draw(shapes)
    rest = [p for size in source for p in {4: (2, 2), 6: (2, 3)}.get(size, (size,))]
    if draw(st.booleans()):
        rest = draw(st.permutations(rest))
    target: list[int] = []
    while rest:
        count = draw(st.integers(1, len(rest)))
        target.append(math.prod(rest[:count]))
        rest = rest[count:]
    return source, tuple(target)


@settings(max_examples=300)
@given(reshapes(), st.sampled_from([2, 3]))
@example(((4, 1, 6), (4, 6)), 2)
@example(((1, 4), (2, 2)), 2)
@example(((2, 6), (4, 3)), 2)
@example(((6, 4), (4, 6)), 2)
def test_reshape_keeps_the_blocks_of_just_the_dims_whose_blocks_stay_together(
    case: tuple[tuple[int, ...], tuple[int, ...]], blocks: int
) -> None:
    source, target = case
    call = Call({"new_sizes": target, "dimensions": None}, (source,), (target,))
    for side, shape, other in ((0, source, target), (RESULT, target, source)):
        for dim, size in enumerate(shape):
            if size % blocks:
                continue
            dims = blockwise("reshape", call, side, dim, blocks)
            possible = commuting_dims(functools.partial(np.reshape, shape=other), shape, dim, blocks)
            if dims is None:
                assert possible == []
            else:
                there, here = (dims.result_dim, dims.operand_dims[0])[:: 1 if side == 0 else -1]
                assert here == dim and there in possible
                back = blockwise("reshape", call, RESULT if side == 0 else 0, there, blocks)
                assert back == dims


@settings(max_examples=100)
@given(
    shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))),
    st.sampled_from([2, 3]),
)
def test_transpose_keeps_the_blocks_of_every_dim(case: Any, blocks: int) -> None:
    source, permutation = case
    target = tuple(source[d] for d in permutation)
    call = Call({"permutation": tuple(permutation)}, (source,), (target,))
    for dim, size in enumerate(source):
        if size % blocks == 0:
            dims = blockwise("transpose", call, 0, dim, blocks)
            assert dims is not None and dims.operand_dims == (dim,)
            assert commuting_dims(functools.partial(np.transpose, axes=permutation), source, dim, blocks) == [
                dims.result_dim
            ]
            assert blockwise("transpose", call, RESULT, dims.result_dim, blocks) == dims


@st.composite
def broadcasts(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    target = draw(shapes)
    placed = tuple(d for d in range(len(target)) if draw(st.booleans()))
    source = tuple(1 if draw(st.booleans()) else target[d] for d in placed)
    return source, target, placed


@settings(max_examples=200)
@given(broadcasts(), st.sampled_from([2, 3]))
def test_broadcast_keeps_the_blocks_of_the_dims_that_are_not_repeated(case: Any, blocks: int) -> None:
    source, target, placed = case
    call = Call({"broadcast_dimensions": placed, "shape": target, "sharding": None}, (source,), (target,))

    def broadcast(a: np.ndarray) -> np.ndarray:
        spread = [1] * len(target)
        for d, size in zip(placed, a.shape, strict=True):
            spread[d] = size
        return np.broadcast_to(a.reshape(spread), target)

    for dim, size in enumerate(source):
        if size % blocks == 0:
            dims = blockwise("broadcast_in_dim", call, 0, dim, blocks)
            assert dims is not None
            assert commuting_dims(broadcast, source, dim, blocks) == [dims.result_dim]
    for dim, size in enumerate(target):
        if size % blocks:
            continue
        dims = blockwise("broadcast_in_dim", call, RESULT, dim, blocks)
        assert dims is not None and dims.result_dim == dim
        elements = np.arange(math.prod(source)).reshape(source)
        if dims.operand_dims[0] is None:  # every block of the result is the same
            first, *others = np.split(broadcast(elements), blocks, dim)
            assert all(np.array_equal(first, other) for other in others)
        else:
            assert commuting_dims(broadcast, source, dims.operand_dims[0], blocks) == [dim]
