"""Tiles: how long a dot takes whose windows must divide its rows."""

from __future__ import annotations

import itertools

import pytest

from cost_model.tile import LARGE, MOST_SLOWNESS, WIDER, has_window, placed_edges, placed_slowness, tile_rows


def test_rows_of_a_tile() -> None:
    assert [tile_rows(size) for size in (4, 2, 1)] == [16, 16, 32]


@pytest.mark.parametrize(
    ("rows", "slowness"),
    [(8 * 11 * 29, 1.138), (8 * 313, 1.126), (16 * 313, 1.752), (8 * 467, 1.434), (16 * 467, 2.368)],
)
def test_rows_that_no_good_window_divides_take_longer(rows: int, slowness: float) -> None:
    assert placed_slowness(rows, 4096, 8192) == pytest.approx(slowness)
    assert placed_slowness(rows, LARGE, 8192) == placed_slowness(rows, 4096, LARGE) == 1


@pytest.mark.parametrize(
    "rows",
    [8, 128, 1024, 8 * 263, 8 * 5 * 7 * 11, 8 * 7 * 59, 16 * 11 * 29, 4096, 3 * 4096, 7473, 16 * 8 * 79],
)
def test_other_rows_do_not(rows: int) -> None:
    assert placed_slowness(rows, 4096, 8192) == 1


def test_the_more_rows_the_more_time_is_lost() -> None:
    slow = [placed_slowness(8 * prime, 4096, 8192) for prime in (313, 467, 751, 1039, 2081)]
    assert slow == sorted(slow)
    assert slow[0] < slow[1] < slow[2] < slow[3] == slow[4] == MOST_SLOWNESS


def test_of_several_pieces_some_rows_more_or_less_have_windows() -> None:
    assert placed_slowness(8 * 1039, 4096, 8192, pieces=1) == MOST_SLOWNESS
    assert placed_slowness(8 * 1039, 4096, 8192, pieces=2) == 1


@pytest.mark.parametrize("columns", [False, True])
def test_pieces_with_good_windows_stay_as_they_are(columns: bool) -> None:
    edges = [0, 8192, 16384]
    assert placed_edges(edges, 128 if columns else 16) == edges


@pytest.mark.parametrize(
    ("edges", "grain"),
    [
        ([0, 8 * 1039, 16 * 1039], 16),
        ([0, 8 * 467, 16 * 467], 16),
        ([0, 8 * 467, 16 * 467], 32),
        ([0, 16768, 33392], 128),  # rows of which not all fill tiles of columns
        ([0, 83 * 128, 2 * 83 * 128], 128),
        ([0, 41 * 128, 82 * 128], 128),
        ([0, 54 * 128, 107 * 128, 160 * 128], 128),
    ],
)
def test_edges_are_moved_to_where_windows_divide_the_pieces(edges: list[int], grain: int) -> None:
    columns = grain == 128 and edges[-1] % 128 == 0
    moved = placed_edges(edges, grain)
    assert (moved[0], moved[-1], len(moved)) == (0, edges[-1], len(edges))
    assert all(edge % grain == 0 for edge in moved[:-1])
    sizes = [last - first for first, last in itertools.pairwise(moved)]
    assert all(has_window(size, columns=columns) for size in sizes)
    assert max(sizes) <= WIDER * edges[-1] / len(sizes)


def test_edges_stay_where_no_other_pieces_have_windows() -> None:
    prime = [0, 8 * 1039]
    assert placed_edges(prime, 16) == prime
    halves = [0, 8 * 1039, 16 * 1039]
    assert placed_edges(halves, 8 * 1039) == halves
