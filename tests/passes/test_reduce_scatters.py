"""Strips that go by reduce_scatters in turn: values, derivatives, and where they are tried."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from cost_model import Axis, by_name
from passes import all_reduces
from passes.candidates import candidates
from passes.reduce_scatters import goes_by_reduce_scatters
from passes.schedule import RingSchedule
from tests.passes import bodies
from tests.passes.hop_count import hops
from tests.passes.ring_patterns import PATTERNS, assert_gradients_and_vmap, assert_values, few

BLOCK = 9
STRIPS = ("scatter", "scatter_columns")


def in_turn(pieces: int) -> RingSchedule:
    return RingSchedule(directions=1, route="reduce_scatter", chains=pieces, across=True)


@pytest.mark.parametrize(
    ("case", "axis_size", "dtype", "check_vma"),
    few(
        case=[(name, pieces) for name in STRIPS for pieces in (2, 3, 4)],
        axis_size=(2, 3),
        dtype=("float32", "int32", "bfloat16"),
        check_vma=(True, False),
    ),
)
def test_values(case: tuple[str, int], axis_size: int, dtype: str, check_vma: bool) -> None:
    name, pieces = case
    jaxpr = assert_values(name, axis_size, BLOCK, in_turn(pieces), dtype, check_vma=check_vma)
    assert not hops(jaxpr, "ppermute")
    assert hops(jaxpr, "reduce_scatter") == pieces


@pytest.mark.parametrize("name", STRIPS)
def test_values_of_strips_of_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As v5p and v6e make them of many rows: a barrier more for each."""
    plain = assert_values(name, 2, BLOCK, in_turn(3), "float32", check_vma=True)
    monkeypatch.setattr(all_reduces, "chip_of", lambda _: by_name("tpu_v5p"))
    monkeypatch.setattr(all_reduces, "cuts_apart", lambda *_: True)
    apart = assert_values(name, 2, BLOCK, in_turn(3), "float32", check_vma=True)
    assert barriers(apart) == barriers(plain) + 3


def barriers(jaxpr: Any) -> int:
    return str(jaxpr).count("barrier")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", STRIPS)
def test_gradients_and_vmap(name: str, check_vma: bool) -> None:
    assert_gradients_and_vmap(name, 2, BLOCK, in_turn(3), check_vma=check_vma)


def chain_of(name: str, columns: int | None = None) -> Any:
    """A chain on four devices, whose dot's other operand may have so many columns."""
    shapes = [list(shape) for shape in PATTERNS[name].shapes(4, 64)]
    shapes[1][-1] = columns or shapes[1][-1]
    avals = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    flow, (match,) = bodies.matched(PATTERNS[name].body, *avals, axis_size=4)
    assert isinstance(match.found, tuple)
    return flow, match.found[0]


@pytest.mark.parametrize(
    ("columns", "proposed"),
    [
        (8 * 128, {"8 reduce_scatters in turn, cut across"}),
        (16 * 128, {f"{n} reduce_scatters in turn, cut across" for n in (8, 16)}),
        (8 * 96, set()),  # no strips of whole tiles
    ],
)
def test_where_it_is_tried(columns: int, proposed: set[str]) -> None:
    flow, chain = chain_of("scatter", columns)
    axis = Axis(by_name("tpu_7x"), 4)
    for thorough in (False, True):
        found = candidates(flow, chain, axis, thorough=thorough)
        assert {str(s) for s in found if s.route != "ring"} == proposed
    elsewhere = candidates(flow, chain, Axis(by_name("tpu_v5p"), 4), thorough=True)
    assert all(s.route == "ring" for s in elsewhere)


def test_other_chains_do_not_go_so() -> None:
    """An untiled scatter's shards have a dim less than its sums; others have no rows of their own."""
    for name in ("scatter_untiled", "psum", "gather_free", "gather_contracting"):
        assert not goes_by_reduce_scatters(chain_of(name)[1])
    assert goes_by_reduce_scatters(chain_of("scatter_columns")[1])
