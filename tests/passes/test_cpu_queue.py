"""Gather rings for CPU devices: values, derivatives, what waits for what, and where they are tried."""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from cost_model import Axis, by_name
from passes.candidates import candidates
from passes.cpu_queue import Queue, behind, can_wait
from passes.hops import Places
from passes.schedule import RingSchedule
from tests.passes import bodies, spmd
from tests.passes.hop_count import hops
from tests.passes.ring_patterns import (
    PATTERNS,
    arguments,
    as_ring,
    assert_gradients_and_vmap,
    assert_values,
    few,
    jitted,
)

BLOCK = 6
GATHERS = [name for name in PATTERNS if name.startswith("gather")]
TILED = [name for name in GATHERS if PATTERNS[name].tiled]


def late(chains: int, directions: Any = 1) -> RingSchedule:
    return RingSchedule(directions=directions, chains=chains, late=True)


CASES = [(name, late(1)) for name in GATHERS] + [
    (name, schedule) for name in TILED for schedule in (late(2), late(1, 2))
]


@pytest.mark.parametrize(
    ("case", "axis_size", "dtype", "check_vma"),
    few(
        case=CASES,
        axis_size=(2, 4, 5),
        dtype=("float32", "bfloat16", "int32"),
        check_vma=(True, False),
    ),
)
def test_values(case: tuple[str, RingSchedule], axis_size: int, dtype: str, check_vma: bool) -> None:
    name, schedule = case
    jaxpr = assert_values(name, axis_size, BLOCK, schedule, dtype, check_vma=check_vma)
    last = 2 if name in TILED else 1
    assert hops(jaxpr, "ppermute") == (axis_size - 2 + last) * schedule.pieces


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["gather_free", "gather_contracting"])
def test_gradients_and_vmap(name: str, check_vma: bool) -> None:
    assert_gradients_and_vmap(name, 4, BLOCK, late(2), check_vma=check_vma)


def test_what_is_placed_late_varies_over_no_more_than_before() -> None:
    """Two dots wait for one another, of weights that differ along another axis and that do not."""

    def body(x: Any, w: Any, v: Any) -> Any:
        gathered = lax.all_gather(x, "x", tiled=True)
        return gathered @ w, gathered @ v

    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    specs = (P("x"), P(None, "y"), P())
    function = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P("x", "y"), P("x"))))
    given = arguments(((6, 8), (8, 6), (8, 4)), 1, "float32")
    x, w, v = (each[0] for each in given)
    with spmd.only_schedule(late(1)):
        results = as_ring(function)(x, w, v)
    for result, wanted in zip(results, function(x, w, v), strict=True):
        np.testing.assert_allclose(result, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint16", "int32", "float8_e5m2"]
)
def test_what_waits_is_the_same_to_the_bit(dtype: str) -> None:
    kind = jnp.dtype(dtype)
    assert can_wait(kind)
    bits = np.arange(256, dtype=np.uint8).repeat(kind.itemsize)
    value = bits.view(kind)
    held: Any = jax.jit(behind)(value, jnp.int32(0))
    assert held.dtype == kind
    np.testing.assert_array_equal(np.asarray(held).view(np.uint8), bits)


@pytest.mark.parametrize("dtype", ["bool", "complex64", "int4"])
def test_what_has_no_words_does_not_wait(dtype: str) -> None:
    value = jnp.zeros(3, dtype)
    assert not can_wait(value.dtype)
    assert behind(value, jnp.int32(0)) is value


def test_the_derivative_of_what_waits() -> None:
    slope = jax.grad(lambda x: jnp.sum(behind(x, jnp.int32(0)) ** 2))(jnp.arange(3.0))
    np.testing.assert_array_equal(slope, [0, 2, 4])


def late_body(name: str, block: int = BLOCK) -> Any:
    """The body per device of a pattern's late ring among four."""
    body = bodies.mapped_body(assert_values(name, 4, block, late(1), "float32", check_vma=True))
    return getattr(body, "jaxpr", body)


def ancestors(jaxpr: Any, wanted: Any, operand: int = 0) -> list[str]:
    """The primitives that lead to an operand of an equation."""
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    found, waiting = [], [wanted.invars[operand]]
    while waiting:
        var = waiting.pop()
        if not hasattr(var, "val") and var in makers:
            eqn = makers.pop(var)
            found.append(eqn.primitive.name)
            waiting.extend(eqn.invars)
    return found


def test_a_hop_sends_a_copy_that_waits_and_a_dot_reads_what_has_arrived() -> None:
    """The dot is ready three operations before the hop: XLA:CPU then gives it to another thread."""
    body = late_body("gather_free")
    sent = [ancestors(body, eqn) for eqn in body.eqns if eqn.primitive.name == "ppermute"]
    read = [ancestors(body, eqn) for eqn in body.eqns if eqn.primitive.name == "dot_general"]
    assert [names.count("sort") for names in sent] == [1, 2, 3, 4]
    assert [names.count("sort") for names in read] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("block", "sizes"), [(6, [3, 3]), (7, [4, 3]), (2, [1, 1]), (1, [1])])
def test_what_comes_last_comes_in_halves(block: int, sizes: list[int]) -> None:
    """The second is sent when the first has arrived, and the first one's dot is ready before."""
    body = late_body("gather_free", block)
    sent = [eqn for eqn in body.eqns if eqn.primitive.name == "ppermute"]
    assert [eqn.invars[0].aval.shape[0] for eqn in sent] == [block, block, *sizes]
    before = [ancestors(body, eqn).count("ppermute") for eqn in sent]
    assert before == list(range(len(sent)))
    dots = [eqn for eqn in body.eqns if eqn.primitive.name == "dot_general"]
    assert [ancestors(body, eqn).count("ppermute") for eqn in dots] == [0, *(n + 1 for n in before)]


def test_results_are_placed_when_all_has_arrived() -> None:
    names = [eqn.primitive.name for eqn in late_body("gather_free").eqns]
    last_hop = max(number for number, name in enumerate(names) if name == "ppermute")
    assert names.index("dynamic_update_slice") > last_hop


def test_blocks_that_dots_cut_out_are_kept() -> None:
    """Read when the last shard has arrived: what is sent would take their places, and wait for the dots."""
    body = late_body("gather_contracting")
    (kept,) = (eqn for eqn in body.eqns if eqn.primitive.name == "cond")
    shapes = [var.aval.shape for var in kept.invars]
    assert [shapes.count((rows, 3)) for rows in (BLOCK, BLOCK // 2)] == [3, 2]
    assert ancestors(body, kept).count("ppermute") == 4


def test_the_compiler_keeps_the_blocks() -> None:
    """It would read the whole again in place of blocks that are only read at the end."""
    pattern = PATTERNS["gather_contracting"]
    given = arguments(pattern.shapes(4, 64), 4, "float32")
    with spmd.only_schedule(late(1)):
        text = as_ring(jitted(pattern.body, len(given), 4)).lower(*given).compile().as_text()
    kept = re.search(r" conditional\(%?[\w.-]+, %?([\w.-]+), %?([\w.-]+)\)", text)
    assert kept
    held = [re.search(rf"%?{re.escape(name)} = \((.*?)\) tuple\(", text) for name in kept.groups()]
    found = [[each[1].count(f"f32[{rows},3]") for rows in (64, 32)] for each in held if each]
    assert sorted(found) == [[0, 0], [3, 2]]


@pytest.mark.parametrize("name", ["gather_free", "gather_of_three_dots"])
def test_dots_of_one_shard_run_one_by_one(name: str) -> None:
    body = late_body(name)
    dots = [eqn for eqn in body.eqns if eqn.primitive.name == "dot_general"]
    before = [max(ancestors(body, eqn, side).count("dot_general") for side in (0, 1)) for eqn in dots]
    each = len(dots) // 5
    assert before == [number % each for number in range(len(dots))]


def test_what_was_sent_before_is_kept() -> None:
    """Read along with the next value: XLA would not let go of it before, nor put the copy in its place."""

    def copies(x: Any) -> Any:
        (_, (match,)) = found
        queue = Queue(Places(match.collective))
        return queue.copy(lax.exp(queue.copy(x)))

    found = bodies.matched(PATTERNS["gather_free"].body, *two_operands(), axis_size=4)
    mapped = spmd.mesh_of(4)
    spec = P("x")
    jaxpr = jax.make_jaxpr(jax.shard_map(copies, mesh=mapped, in_specs=spec, out_specs=spec))(jnp.ones(8))
    body = bodies.mapped_body(jaxpr)
    body = getattr(body, "jaxpr", body)
    (exp,) = (number for number, eqn in enumerate(body.eqns) if eqn.primitive.name == "exp")
    assert body.invars[0] in [v for eqn in body.eqns[exp:] for v in eqn.invars if not hasattr(v, "val")]


def two_operands() -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in PATTERNS["gather_free"].shapes(4, BLOCK)]


@pytest.mark.parametrize("other", [{"unroll": 2}, {"joined": True}, {"across": True}, {"columns": 2}])
def test_rows_of_unrolled_rings_alone_are_placed_late(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="placed late"):
        RingSchedule(directions=2, late=True, **other)


PLAIN = "unidirectional"
LATE = f"{PLAIN}, placed late"


@pytest.mark.parametrize(
    ("hardware", "proposed", "searched"),
    [
        ("cpu", {LATE}, {PLAIN, LATE}),
        ("tpu_v5p", set(), set()),
    ],
)
def test_where_it_is_tried(hardware: str, proposed: set[str], searched: set[str]) -> None:
    flow, (match,) = bodies.matched(PATTERNS["gather_free"].body, *two_operands(), axis_size=4)
    assert isinstance(match.found, tuple)
    axis = Axis(dataclasses.replace(by_name(hardware), overlaps=True), 4)
    simple = {str(s) for s in candidates(flow, match.found[0], axis)}
    thorough = {str(s) for s in candidates(flow, match.found[0], axis, thorough=True)}
    if hardware == "cpu":
        assert (simple, thorough) == (proposed, searched)
    else:
        assert not [name for name in simple | thorough if "late" in name]
