"""What a ring puts together of three dims is laid out by rows on TPUs, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from passes import shims
from passes.schedule import RingSchedule
from tests.passes import bodies, spmd
from tests.passes.ring_patterns import gather, rewritten_jaxpr

AXIS_SIZE = 4

BODIES: dict[str, tuple[Callable[..., Any], RingSchedule]] = {
    "gather": (lambda x, w: gather(x, 1) @ w, RingSchedule(directions=1)),
    "columns": (lambda x, w: x @ gather(w, 0), RingSchedule(directions=1, columns=2)),
    "strips": (
        lambda x, w: jnp.einsum("bmk,bkn->bmn", gather(x), jnp.tile(w[None], (4 * x.shape[0], 1, 1))),
        RingSchedule(directions=2, across=True),
    ),
    "psum": (lambda x, w: lax.psum(x @ w, "x"), RingSchedule(directions=1, columns=2)),
}


def traced(name: str, rows: int, *, differentiable: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """The rewritten program of a pattern, and its arguments: `[2, rows, 8]` times `[8, 256]`."""
    body, schedule = BODIES[name]
    rng = np.random.default_rng(0)
    inner = 8 * AXIS_SIZE if name == "columns" else 8
    shapes = ((AXIS_SIZE, 2, rows, inner), (AXIS_SIZE, 8, 256))
    given = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)
    with spmd.only_schedule(schedule):
        return rewritten_jaxpr(body, given, "tpu_v5p", differentiable=differentiable), given


def pinned(jaxpr: Any) -> set[tuple[int, ...]]:
    """The last three dims of what is laid out by rows."""
    equations = (eqn for eqn in bodies.equations(jaxpr) if eqn.primitive.name == "layout_constraint")
    return {eqn.outvars[0].aval.shape[-3:] for eqn in equations}


@pytest.mark.parametrize("name", BODIES)
def test_results_of_whole_tiles_are_laid_out_by_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not pinned(traced(name, 16)[0]), "on CPU"
    monkeypatch.setattr(shims, "on_tpu", lambda aval: True)
    results = {"gather": (2, 64, 256), "strips": (8, 16, 256)}
    assert pinned(traced(name, 16)[0]) == {results.get(name, (2, 16, 256))}
    assert not pinned(traced(name, 16, differentiable=True)[0])


def test_results_whose_rows_are_no_whole_tiles_are_left_to_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shims, "on_tpu", lambda aval: True)
    assert not pinned(traced("psum", 8)[0])


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        pytest.param((8, 16, 128), (0, 1, 2, 3), id="heads that fill tiles"),
        pytest.param((8, 2, 128), (0, 2, 1, 3), id="few heads"),
        pytest.param((8, 1, 448), (0, 2, 1, 3), id="rows that nearly fill tiles"),
        pytest.param((8, 16, 64), None, id="rows of half a tile"),
        pytest.param((3, 2, 128), None, id="nothing fills a tile"),
    ],
)
def test_the_dim_that_is_put_together_is_the_rows_where_heads_are_too_few(
    shape: tuple[int, int, int], order: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else pieces of a few tokens may be laid out by tokens, 128 of which fill a tile (v4)."""
    tokens, heads, width = shape
    monkeypatch.setattr(shims, "on_tpu", lambda aval: True)

    def body(x: Any, w: Any) -> Any:
        return jnp.einsum("bsd,dhk->bshk", gather(x, 1), w)

    x = np.zeros((AXIS_SIZE, 2, tokens, 8), np.float32)
    w = np.zeros((AXIS_SIZE, 8, heads, width), np.float32)
    with spmd.only_schedule(RingSchedule(directions=1)):
        jaxpr = rewritten_jaxpr(body, (x, w), "tpu_v5p")
    found = {
        eqn.params["layout"].major_to_minor
        for eqn in bodies.equations(jaxpr)
        if eqn.primitive.name == "layout_constraint" and eqn.outvars[0].aval.ndim == 4
    }
    assert found == ({order} if order else set())


def test_tokens_are_the_rows_of_strips_of_a_gate_and_what_it_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows of two, strips of 896 columns were copied for 81 us each (v5e)."""
    monkeypatch.setattr(shims, "on_tpu", lambda aval: True)

    def body(x: Any, w: Any) -> Any:
        return jnp.einsum("bsd,dgf->bsgf", x, gather(w))

    x, w = np.zeros((AXIS_SIZE, 2, 16, 32), np.float32), np.zeros((AXIS_SIZE, 8, 2, 1024), np.float32)
    with spmd.only_schedule(RingSchedule(directions=1, route="all_gather", chains=2, across=True)):
        jaxpr = rewritten_jaxpr(body, (x, w), "tpu_v5e")
    found = [
        (eqn.outvars[0].aval.shape, eqn.params["layout"].major_to_minor)
        for eqn in bodies.equations(jaxpr)
        if eqn.primitive.name == "layout_constraint"
    ]
    assert found == [((2, 16, 2, 512), (0, 2, 1, 3))] * 2


def transposed(x: Any, w: Any) -> Any:
    """As an attention's heads are moved behind its tokens before the last dot."""
    heads = jnp.transpose(x.reshape(2, 2, -1, 128), (0, 2, 1, 3)).reshape(2, -1, 256)
    return lax.psum_scatter(heads @ w, "x", scatter_dimension=1, tiled=True)


def pins_on(
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    body: Callable[..., Any],
    given: Any,
    schedule: RingSchedule,
) -> list[tuple[int, ...]]:
    """The shapes that a rewritten body lays out by rows, were it for these devices."""
    monkeypatch.setattr(shims, f"on_{platform}", lambda aval: True)
    with spmd.only_schedule(schedule):
        jaxpr = rewritten_jaxpr(body, given, "h100")
    equations = (eqn for eqn in bodies.equations(jaxpr) if eqn.primitive.name == "layout_constraint")
    return [eqn.outvars[0].aval.shape for eqn in equations]


@pytest.mark.parametrize("body", [transposed, lambda x, w: transposed(jnp.sin(x), w)], ids=["moved", "made"])
@pytest.mark.parametrize("unroll", [0, 1])
def test_what_is_transposed_is_laid_out_once_for_all_blocks_of_a_scatter(
    body: Callable[..., Any], unroll: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (np.zeros((AXIS_SIZE, 2, 64 * 256), np.float32), np.zeros((AXIS_SIZE, 256, 128), np.float32))
    schedule = RingSchedule(directions=1, unroll=unroll)
    assert pins_on(monkeypatch, "tpu", body, given, schedule) == [(2, 64, 256)]

    def as_it_is(x: Any, w: Any) -> Any:
        return lax.psum_scatter(jnp.sin(x).reshape(2, -1, 256) @ w, "x", scatter_dimension=1, tiled=True)

    assert not pins_on(monkeypatch, "tpu", as_it_is, given, schedule)


@pytest.mark.parametrize(("heads", "pinned"), [(4, [(64, 4, 128)]), (16, [])])
@pytest.mark.parametrize("unroll", [0, 1])
def test_weights_of_few_heads_are_laid_out_once_for_all_columns_of_a_sum(
    heads: int, pinned: list[tuple[int, ...]], unroll: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(y: Any, w: Any) -> Any:
        product = jnp.einsum("bshk,dhk->bsd", y, w)
        return lax.psum_scatter(product, "x", scatter_dimension=2, tiled=True)

    given = (np.zeros((AXIS_SIZE, 2, 8, heads, 128), np.float32), np.zeros((AXIS_SIZE, 64, heads, 128)))
    schedule = RingSchedule(directions=1, unroll=unroll)
    assert pins_on(monkeypatch, "tpu", body, given, schedule) == pinned


def test_on_gpus_each_piece_of_three_dims_is_turned_once_for_all_its_dots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(x: Any, w: Any) -> Any:
        whole = gather(x, 1)
        return whole @ w, whole @ (2 * w), whole @ (3 * w)

    x, w = (np.zeros(shape, np.float32) for shape in ((AXIS_SIZE, 2, 16, 8), (AXIS_SIZE, 8, 256)))
    schedule = RingSchedule(directions=1, route="all_gather", chains=2)
    assert pins_on(monkeypatch, "gpu", body, (x, w), schedule) == [(2, 32, 8)] * 2


def test_on_gpus_what_is_transposed_is_turned_once_for_all_pieces_of_a_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w = np.zeros((AXIS_SIZE, 2, 64 * 256), np.float32), np.zeros((AXIS_SIZE, 256, 128), np.float32)
    schedule = RingSchedule(directions=1, route="reduce_scatter", chains=2, across=True)
    assert pins_on(monkeypatch, "gpu", transposed, (x, w), schedule) == [(2, 64, 256)]


def test_what_is_cut_into_blocks_for_a_gather_s_dots_is_laid_out_by_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(x: Any, w: Any) -> Any:
        made = x.reshape(-1, 8) @ w  # [64, 256]
        return (gather(w[:4] * 2) * made[:16]) @ w.T

    x, w = np.zeros((AXIS_SIZE, 2, 32, 8), np.float32), np.zeros((AXIS_SIZE, 8, 256), np.float32)
    assert (16, 256) in pins_on(monkeypatch, "tpu", body, (x, w), RingSchedule(directions=1))
