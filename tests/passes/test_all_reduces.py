"""Pieces that go by all_reduces in turn: values, bits, derivatives, and how a block is cut."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, PartitionSpec

from cost_model import Axis, by_name
from overlap.hlo import Module, parse
from passes import cpu_queue, turns
from passes.candidates import candidates
from passes.chains import AllGatherDot, DotPsum, DotReduceScatter
from passes.schedule import RingSchedule
from passes.turns import pieces_of, shares
from tests.libtpu import needs_libtpu
from tests.passes import bodies, spmd
from tests.passes.hop_count import hops
from tests.passes.ring_patterns import (
    PATTERNS,
    arguments,
    as_ring,
    assert_close,
    assert_gradients_and_vmap,
    assert_values,
    exact,
    few,
    jitted,
)
from tests.passes.tpu_process import multiplies, told_by

BLOCK = 9
MOST = {"gather": 3, "scatter": 3, "psum": 6}
ACROSS = ("gather_contracting", "gather_untiled", "psum")


def in_turn(pieces: int, *, across: bool = False) -> RingSchedule:
    return RingSchedule(directions=1, route="all_reduce", chains=pieces, across=across)


def cases() -> Iterator[tuple[str, int, RingSchedule]]:
    for name, pattern in PATTERNS.items():
        kind = name.split("_")[0]
        if name == "psum_then_dot":
            continue
        for pieces in range(1, MOST[kind] + 1):
            for axis_size in (2, 4) if kind == "psum" else (2,):
                for across in (False, True) if name in ACROSS and pieces > 1 else (False,):
                    if pieces > 1 and not (pattern.tiled or across):
                        continue
                    yield name, axis_size, in_turn(pieces, across=across)


@pytest.mark.parametrize(
    ("case", "dtype", "check_vma"), few(case=cases(), dtype=("float32", "int32"), check_vma=(True, False))
)
def test_values(case: tuple[str, int, RingSchedule], dtype: str, check_vma: bool) -> None:
    name, axis_size, schedule = case
    jaxpr = assert_values(name, axis_size, BLOCK, schedule, dtype, check_vma=check_vma)
    kept = ("ppermute", "all_gather", "all_gather_invariant", "reduce_scatter")
    assert not any(hops(jaxpr, primitive) for primitive in kept)
    assert sum(hops(jaxpr, primitive) for primitive in ("psum", "psum_invariant")) == schedule.chains


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("schedule", [in_turn(4), in_turn(3, across=True)], ids=str)
def test_sums_behind_barriers(schedule: RingSchedule, check_vma: bool) -> None:
    """As on a TPU: elements of two bytes are no words whose bits could be waited for."""
    pattern = PATTERNS["psum"]
    x, w = arguments(pattern.shapes(4, BLOCK), 4, "bfloat16")
    function = jitted(pattern.body, 2, 4, check_vma=check_vma)
    with spmd.only_schedule(schedule):
        ring = as_ring(function)
        result = ring(x, w)
        slopes = jax.jit(jax.grad(lambda x, w: ring(x, w).astype("float32").sum(), (0, 1)))(x, w)
    assert_close(result, exact(pattern, (x, w)), "bfloat16")
    expected = jax.grad(lambda x, w: function(x, w).astype("float32").sum(), (0, 1))(x, w)
    for found, slope in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(found, "float32"), np.asarray(slope, "float32"), rtol=0.02, atol=0.02
        )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("name", "axis_size", "schedule"),
    [
        ("gather_free", 2, in_turn(3)),
        ("gather_contracting", 2, in_turn(3, across=True)),
        ("scatter", 2, in_turn(3)),
        ("psum", 4, in_turn(4)),
        ("psum", 4, in_turn(3, across=True)),
    ],
)
def test_gradients_and_vmap(name: str, axis_size: int, schedule: RingSchedule, check_vma: bool) -> None:
    assert_gradients_and_vmap(name, axis_size, BLOCK, schedule, check_vma=check_vma)


def per_device(f: Any, devices: int = 2) -> Any:
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    spec: Any = PartitionSpec("x")
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)


def test_a_value_arrives_to_the_bit() -> None:
    bits = np.array([0x7FC00001, 0xFF800000, 0x80000000, 0x00000001, 0xFFFFFFFF, 0x3F800000], np.uint32)
    value = bits.view(np.float32)
    swap: Any = per_device(lambda v: turns._swapped(v, ("x",)))
    np.testing.assert_array_equal(np.asarray(jax.jit(swap)(value)).view(np.uint32), np.roll(bits, 3))
    wait: Any = jax.jit(lambda v, zero: cpu_queue.behind(v, zero))
    np.testing.assert_array_equal(np.asarray(wait(value, jnp.int32(0))).view(np.uint32), bits)


def test_the_derivative_of_what_is_sent() -> None:
    def loss(x: Any) -> Any:
        sent: Any = per_device(lambda v: turns._swapped(cpu_queue.behind(v, jnp.int32(0)), ("x",)))
        return jnp.sum(sent(x) * jnp.arange(4.0))

    np.testing.assert_array_equal(jax.grad(loss)(jnp.zeros(4)), [2, 3, 0, 1])
    np.testing.assert_array_equal(jax.jvp(loss, (jnp.zeros(4),), (jnp.ones(4),))[1], 6)


def test_an_all_reduce_waits_for_the_one_before() -> None:
    """By data: XLA:CPU has no other order, and makes one of those that do not wait for each other."""
    pattern = PATTERNS["gather_free"]
    x, w = arguments(pattern.shapes(2, 64), 2, "float32")
    with spmd.only_schedule(in_turn(3)):
        text = as_ring(jitted(pattern.body, 2, 2)).lower(x, w).compile().as_text()
    assert text.count(" all-reduce(") == 3


def chain_of(name: str, axis_size: int, dtype: str) -> Any:
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape in PATTERNS[name].shapes(axis_size, BLOCK)]
    flow, (match,) = bodies.matched(PATTERNS[name].body, *avals, axis_size=axis_size)
    assert isinstance(match.found, tuple)
    return flow, match.found[0]


@given(
    name=st.sampled_from(["gather_free", "scatter", "psum"]),
    pieces=st.integers(1, 6),
    unit=st.integers(1, 1000),
)
def test_pieces_are_the_block(name: str, pieces: int, unit: int) -> None:
    kinds = {"gather_free": AllGatherDot, "scatter": DotReduceScatter, "psum": DotPsum}
    chain: Any = object.__new__(kinds[name])
    if pieces > unit:
        with pytest.raises(ValueError, match="cannot be cut"):
            pieces_of(chain, in_turn(pieces), unit)
        return
    found = pieces_of(chain, in_turn(pieces), unit)
    assert len(found) == pieces and found[0].start == 0
    assert sum(part.share for part in found) == 1
    for part, after in itertools.pairwise(found):
        assert part.start + part.share == after.start
    assert all(part.share > 0 and (part.share * unit).denominator == 1 for part in found)


def test_what_hides_a_piece_is_twice_as_large() -> None:
    kinds: tuple[Any, ...] = (AllGatherDot, DotReduceScatter, DotPsum)
    gather, scatter, psum = map(object.__new__, kinds)
    assert shares(gather, 3) == (Fraction(4, 7), Fraction(2, 7), Fraction(1, 7))
    assert shares(scatter, 3) == (Fraction(1, 7), Fraction(2, 7), Fraction(4, 7))
    assert shares(psum, 4) == (Fraction(1, 6), Fraction(1, 3), Fraction(1, 3), Fraction(1, 6))


BY_ROWS = {"1 all_reduce", "3 all_reduces in turn"}
BY_STRIPS = {"1 all_reduce", "3 all_reduces in turn, cut across"}


@pytest.mark.parametrize(
    ("name", "axis_size", "dtype", "hardware", "proposed"),
    [
        ("gather_free", 2, "float32", "cpu", BY_ROWS),
        ("gather_contracting", 2, "float32", "cpu", BY_STRIPS),
        ("gather_untiled", 2, "float32", "cpu", BY_STRIPS),
        ("scatter", 2, "int32", "cpu", BY_ROWS),
        ("scatter_untiled", 2, "float32", "cpu", {"1 all_reduce"}),
        ("psum", 4, "float32", "cpu", {f"{pieces} all_reduces in turn" for pieces in (5, 6)}),
        ("psum", 4, "float32", "tpu_v5p", set()),
        ("psum", 4, "bfloat16", "cpu", set()),
        ("gather_free", 4, "float32", "cpu", set()),
        ("gather_free", 2, "bfloat16", "cpu", set()),
    ],
)
def test_where_it_is_tried(name: str, axis_size: int, dtype: str, hardware: str, proposed: set[str]) -> None:
    flow, chain = chain_of(name, axis_size, dtype)
    axis = Axis(by_name(hardware), axis_size)
    thorough = {str(s) for s in candidates(flow, chain, axis, thorough=True) if s.route == "all_reduce"}
    assert thorough == proposed
    assert all(s.route != "all_reduce" for s in candidates(flow, chain, axis))
    if proposed:
        overlapping = Axis(dataclasses.replace(axis.hardware, overlaps=True), axis_size)
        assert {str(s) for s in candidates(flow, chain, overlapping)} == proposed


COMPILED = """
import json, sys
from unittest import mock
import jax, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from overlap import overlap_collectives, tpu_target
from passes.schedule import RingSchedule

mesh = Mesh(np.array(tpu_target.devices("tpu7x:2x2x1")), ("x",))
ins, out = (P(None, "x"), P("x")), P()
function = jax.jit(jax.shard_map(lambda x, w: lax.psum(x @ w, "x"), mesh=mesh, in_specs=ins, out_specs=out))
rows, contracted, columns, dtype = json.loads(sys.argv[1])
arguments = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    for shape, spec in zip(((rows, contracted), (contracted, columns)), ins)
]
schedule = RingSchedule(directions=1, route="all_reduce", **json.loads(sys.argv[2]))
with mock.patch("passes.prices.candidates", lambda *_, **__: (schedule,)):
    lowered = overlap_collectives(function, policy="always", strict=True).lower(*arguments)
print(json.dumps(lowered.compile().as_text()))
"""


def compiled(shape: tuple[int, int, int], dtype: str, **schedule: Any) -> Module:
    """A psum's pieces in turn, by the compiler of TPU7x: rows, contracted elements and columns."""
    return parse(told_by(COMPILED, json.dumps([*shape, dtype]), json.dumps(schedule)))


@needs_libtpu
@pytest.mark.parametrize("across", [False, True])
def test_no_piece_is_made_before_those_before_the_last_have_arrived(across: bool) -> None:
    """Else the compiler makes several beside the first, and has none to put beside the last ones."""
    module = compiled((1024, 32768, 1024), "float32", chains=8, across=across)
    made = arrived = 0
    for instruction in module.entry_computation.instructions:
        made += any(multiplies(module, called) for called in instruction.calls)
        arrived += instruction.opcode == "call-done"
        assert made - arrived <= 2
    assert made == arrived == 8


@needs_libtpu
def test_no_piece_is_turned_to_be_placed() -> None:
    """The compiler lays these columns out by columns where nothing says otherwise: 46 µs a piece."""
    module = compiled((8192, 24576, 12288), "bfloat16", chains=16)
    instructions = {i.name: i for i in module.entry_computation.instructions}
    copies = [i for i in instructions.values() if i.opcode == "copy"]
    assert not [i.name for i in copies if instructions[i.operands[0]].shape.layout != i.shape.layout]
