"""What travels to a TPU's dots is rounded as they round it; all else travels as it is."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import passes
from cost_model import Axis, by_name
from cost_model.plain_chain import LEAST_ROUNDED, chain_of
from overlap import overlap_collectives
from passes import shims
from passes.chains import AllGatherDot
from passes.pricing import gather_sizes, pricer
from passes.schedule import RingSchedule
from passes.wire import gathered_dtype, wire_dtype
from tests.passes import bodies, spmd
from tests.passes.ring_patterns import jitted

SIZE = LEAST_ROUNDED
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def gathered(x: Any, axis: int = 0) -> Any:
    """The whole of an array from its shards."""
    return lax.all_gather(x, "x", axis=axis, tiled=True)


def dot(x: Any, w: Any) -> Any:
    """Rows are gathered."""
    return gathered(x) @ w


def matched(body: Callable[..., Any], *shapes: tuple[int, int], dtype: Any = F32) -> tuple[Any, AllGatherDot]:
    """The graph and the largest chain of a per-device function."""
    flow, (match,) = bodies.matched(
        body, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), check_vma=False
    )
    assert isinstance(match.found, tuple), match.found
    chain = match.found[0]
    assert isinstance(chain, AllGatherDot)
    return flow, chain


def needed(x: Any, w: Any) -> Any:
    """The gathered value is handed out too."""
    whole = gathered(x)
    return whole @ w, whole


def shared(x: Any, w: Any, after: Callable[[Any], Any] = jnp.transpose) -> Any:
    """Two dots take the gathered value."""
    whole = gathered(x)
    return whole @ w, after(whole) @ (w if after is jnp.tanh else jnp.tile(w, (4, 1)))


LARGE = ((SIZE, SIZE), (SIZE, SIZE))


@pytest.mark.parametrize(
    ("body", "shapes"),
    [
        (dot, LARGE),
        (lambda x, w: gathered(x, 1) @ w, ((SIZE, SIZE), (4 * SIZE, SIZE))),
        (lambda x, w: w @ gathered(x).T, LARGE),
        (lambda x, w: jnp.tanh(gathered(x)) @ w, LARGE),  # the shard is, before it is sent
        (shared, LARGE),
    ],
)
def test_float32_operands_of_large_dots_travel_rounded(body: Any, shapes: Any) -> None:
    assert wire_dtype(*matched(body, *shapes)) == BF16


@pytest.mark.parametrize(
    ("body", "shapes"),
    [
        (dot, ((SIZE - 1, SIZE), (SIZE, SIZE))),
        (dot, ((SIZE, SIZE - 1), (SIZE - 1, SIZE))),
        (dot, ((SIZE, SIZE), (SIZE, SIZE - 1))),
        (lambda x, w: lax.dot(gathered(x), w, precision="highest"), LARGE),
        (lambda x, w: lax.dot(gathered(x), w, precision=("default", "high")), LARGE),
        (lambda x, w: lax.dot(gathered(x), w, precision="BF16_BF16_F32_X3"), LARGE),
        (lambda x, w: shared(x, w, jnp.tanh), LARGE),
        (needed, LARGE),
    ],
    ids=["rows", "depth", "columns", "highest", "mixed", "algorithm", "arithmetic", "needed"],
)
def test_what_dots_may_not_round_travels_as_it_is(body: Any, shapes: Any) -> None:
    assert wire_dtype(*matched(body, *shapes)) == F32


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_other_types_travel_as_they_are(dtype: str) -> None:
    assert wire_dtype(*matched(dot, *LARGE, dtype=jnp.dtype(dtype))) == jnp.dtype(dtype)


def permuted(jaxpr: Any) -> set[Any]:
    """The types of all that hops."""
    return {eqn.invars[0].aval.dtype for eqn in bodies.equations(jaxpr) if eqn.primitive.name == "ppermute"}


@pytest.mark.parametrize(
    "schedule",
    [
        RingSchedule(directions=2),
        RingSchedule(directions=2, joined=True),
        RingSchedule(directions=1, unroll=1),
    ],
    ids=str,
)
def test_a_ring_for_tpus_sends_rounded_operands(
    monkeypatch: pytest.MonkeyPatch, schedule: RingSchedule
) -> None:
    rng = np.random.default_rng(5)
    x, w = (rng.normal(size=(4, SIZE, SIZE)).astype(np.float32) for _ in range(2))
    function = jitted(dot, 2, 4)
    monkeypatch.setattr(shims, "on_tpu", lambda aval: True)
    with spmd.only_schedule(schedule):
        ring = overlap_collectives(function, policy="always", hardware="tpu_v5p", strict=True)
        assert permuted(jax.make_jaxpr(ring)(x, w)) == {BF16}
        result = ring(x, w)
        # What jax may differentiate is left as it is: the way back would round cotangents.
        jaxpr = function.trace(x, w).jaxpr
        plan = passes.make_plan(jaxpr, "always", lambda kind: by_name("tpu_v5p"), differentiable=True)
        assert permuted(jax.make_jaxpr(passes.rewritten(plan))(x, w)) == {F32}
    rounded = np.asarray(jnp.asarray(x, BF16), np.float64).reshape(-1, SIZE)
    expected = np.stack([rounded @ each.astype(np.float64) for each in w])
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


def test_a_ring_for_others_sends_float32() -> None:
    x, w = (np.ones((4, SIZE, SIZE), np.float32) for _ in range(2))
    with spmd.only_schedule(RingSchedule(directions=2)):
        ring = overlap_collectives(jitted(dot, 2, 4), policy="always", hardware="tpu_v5p", strict=True)
        assert permuted(jax.make_jaxpr(ring)(x, w)) == {F32}


@pytest.mark.parametrize(("hardware", "halved"), [("tpu_v5p", True), ("h100", False)])
def test_prices_count_the_bytes_that_travel(hardware: str, halved: bool) -> None:
    axis = Axis(by_name(hardware), 4)
    prices = []
    for dtype in (F32, BF16):
        flow, chain = matched(dot, (8 * SIZE, SIZE), LARGE[1], dtype=dtype)
        prices.append(pricer(flow, chain, axis)(RingSchedule(directions=1)).collective_s)
    assert (prices[0] == prices[1]) == halved
    plain = [chain_of("all_gather_dot", 32 * SIZE, SIZE, SIZE, dtype=d) for d in ("float32", "bfloat16")]
    assert (plain[0].wire_bytes(axis) == plain[1].wire_bytes(axis)) == halved


def test_pieces_by_all_gathers_are_priced_as_they_travel() -> None:
    exact = partial(lax.dot, precision="highest")
    for hardware, rounds in (("tpu_7x", True), ("h100", False)):
        axis = Axis(by_name(hardware), 4)
        pieces = RingSchedule(directions=1, route="all_gather", chains=2)
        prices = []
        for multiply in (lax.dot, exact):
            flow, chain = matched(lambda x, w, by=multiply: by(gathered(x), w), (8 * SIZE, SIZE), LARGE[1])
            prices.append(pricer(flow, chain, axis)(pieces))
        assert (prices[0] == prices[1]) != rounds


@pytest.mark.parametrize("pattern_axis", [0, 1])
def test_what_arrives_rounded_is_multiplied_so(pattern_axis: int) -> None:
    axis = Axis(by_name("tpu_v5p"), 4)

    def body(x: Any, w: Any) -> Any:
        return gathered(x, pattern_axis) @ w

    shape = (SIZE, 4 * SIZE) if pattern_axis == 0 else (4 * SIZE, SIZE)
    flow, chain = matched(body, shape, (4 * SIZE, SIZE))
    (whole,) = gather_sizes(flow, chain, axis).dots(Fraction(1), Fraction(1))
    assert (whole.dtype, whole.lhs_dtype, whole.rhs_dtype) == ("float32", "bfloat16", None)


def test_a_small_chain_is_priced_as_it_travels() -> None:
    axis = Axis(by_name("tpu_v5p"), 4)
    plain = chain_of("all_gather_dot", 4 * SIZE, SIZE, SIZE - 1, dtype="float32")
    assert plain.wire_bytes(axis) == plain.moved_bytes


@pytest.mark.parametrize(("chip", "cast_first"), [("tpu_v4", True), ("tpu_v5e", True), ("h100", False)])
def test_a_cast_to_fewer_bytes_goes_before_the_gather_as_written_on_tpus(chip: str, cast_first: bool) -> None:
    """XLA's TPU compiler moves it there, and a ring that does too gains nothing by it."""

    def after(x: Any, w: Any) -> Any:
        return gathered(x).astype(BF16) @ w.astype(BF16)

    def before(x: Any, w: Any) -> Any:
        return gathered(x.astype(BF16)) @ w.astype(BF16)

    axis = Axis(by_name(chip), 4)
    cast, narrow = (
        pricer(*matched(body, (8192, 4096), (4096, 4096)), axis)(RingSchedule(directions=2))
        for body in (after, before)
    )
    assert cast.overlapped_s == narrow.overlapped_s
    ratio = cast.collective_s / narrow.collective_s
    assert ratio == 1 if cast_first else 1 < ratio <= 2


def test_other_casts_stay_where_they_are() -> None:
    def body(x: Any, w: Any) -> Any:
        return jnp.exp(gathered(x)).astype(BF16) @ w.astype(BF16)

    flow, chain = matched(body, (SIZE, SIZE), (SIZE, SIZE))
    assert gathered_dtype(flow, chain) == F32

    def wider(x: Any, w: Any) -> Any:
        return gathered(x).astype(F32) @ w.astype(F32)

    assert gathered_dtype(*matched(wider, (SIZE, SIZE), (SIZE, SIZE), dtype=BF16)) == BF16
