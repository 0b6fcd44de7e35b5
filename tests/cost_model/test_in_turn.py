"""Pieces that travel in turn: one way of dots, one of hops."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cost_model import by_name
from cost_model.in_turn import in_turn_estimate

CPU = by_name("cpu")
OVERLAPS = dataclasses.replace(CPU, overlaps=True)
SECONDS = st.floats(0.001, 10.0)


def priced(pattern: str, own: float, pieces: list[float], hops: list[float], hardware: Any = OVERLAPS) -> Any:
    return in_turn_estimate(
        gathers=pattern == "gather",
        dot_s=own + sum(pieces),
        collective_s=sum(hops),
        own_s=own,
        pieces_s=pieces,
        hops_s=hops,
        latency_s=0.0,
        hardware=hardware,
    )


def test_by_hand() -> None:
    # Own dots beside the first hop; a piece's beside the next one's hop; the last piece's alone.
    assert priced("gather", 7, [4, 2, 1], [8, 4, 2]).overlapped_s == pytest.approx(8 + 4 + 2 + 1)
    assert priced("gather", 20, [4, 2, 1], [8, 4, 2]).overlapped_s == pytest.approx(27)
    # The first piece's dots alone, then hops, the own block's dots beside the last.
    assert priced("scatter", 7, [1, 2, 4], [2, 4, 8]).overlapped_s == pytest.approx(1 + 2 + 4 + 8)
    assert priced("scatter", 70, [1, 2, 4], [2, 4, 8]).overlapped_s == pytest.approx(77)
    # The dots of the first two pieces, then the hops of all but the first.
    assert priced("psum", 0, [1, 2, 2, 1], [1, 2, 2, 1]).overlapped_s == pytest.approx(1 + 2 + 2 + 2 + 1)


@given(
    st.sampled_from(["gather", "scatter", "psum"]), SECONDS, st.lists(st.tuples(SECONDS, SECONDS), min_size=1)
)
def test_between_the_limit_and_turns(pattern: Any, own: float, steps: list[tuple[float, float]]) -> None:
    pieces, hops = map(list, zip(*steps, strict=True))
    own = 0.0 if pattern == "psum" else own
    found = priced(pattern, own, pieces, hops)
    taking_turns = priced(pattern, own, pieces, hops, CPU)
    assert max(found.partials_s, found.hops_s) <= found.overlapped_s + 1e-9
    assert found.overlapped_s <= taking_turns.overlapped_s + 1e-9
    assert taking_turns.overlapped_s == pytest.approx(found.partials_s + found.hops_s)


@given(st.sampled_from(["gather", "scatter", "psum"]), st.lists(SECONDS, min_size=2, max_size=6))
def test_the_longest_way(pattern: Any, times: list[float]) -> None:
    """The longest way through what waits for what."""
    half = len(times) // 2
    pieces, hops = times[:half], times[half : 2 * half]
    own = 0.0 if pattern == "psum" else 1.0
    found = priced(pattern, own, pieces, hops).overlapped_s
    if pattern == "gather":
        arrivals = list(itertools.accumulate(hops))
        ends = [own + sum(pieces), *(at + sum(pieces[number:]) for number, at in enumerate(arrivals))]
    else:
        made = list(itertools.accumulate(pieces))
        ends = [own + sum(pieces), *(at + sum(hops[number:]) for number, at in enumerate(made))]
    assert found == pytest.approx(max(ends))


@pytest.mark.parametrize("pattern", ["gather", "scatter", "psum"])
@pytest.mark.parametrize("own", [0.0, 20.0])
def test_every_hop_beside_dots_stops_the_device(pattern: Any, own: float) -> None:
    """Of a gather without a shard of its own the first has none beside it, of a sum so the last."""
    stops = dataclasses.replace(OVERLAPS, async_overhead_s=1.0)
    pieces, hops = [30.0, 30.0, 30.0], [1.0, 1.0, 1.0]
    found, plain = (priced(pattern, own, pieces, hops, each) for each in (stops, OVERLAPS))
    beside = 3 if own else 2
    assert found.partials_s - plain.partials_s == pytest.approx(beside)
    assert found.overlapped_s - plain.overlapped_s == pytest.approx(beside)
    in_turns = dataclasses.replace(CPU, async_overhead_s=1.0)
    assert priced(pattern, own, pieces, hops, in_turns) == priced(pattern, own, pieces, hops, CPU)


def test_each_piece_has_a_hop() -> None:
    with pytest.raises(ValueError, match="one hop and is placed once, got 2 pieces, 1 hops and 2"):
        priced("gather", 1, [1, 1], [1])
