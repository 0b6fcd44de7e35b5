"""Tiles: where pieces begin and end, and windows that divide them."""

from __future__ import annotations

import itertools

import pytest

from cost_model.tile import WIDER, has_window, piece_edges, placed_edges, tile_rows


def test_rows_of_a_tile() -> None:
    assert [tile_rows(size) for size in (4, 2, 1)] == [16, 16, 32]


def test_pieces_begin_and_end_with_tiles() -> None:
    assert piece_edges(4096, 2, 16, placed=False) == (0, 2048, 4096)
    assert piece_edges(3624, 2, 16, placed=False) == (0, 1824, 3624)
    # Of 75 tiles of columns one piece has 38 and the other 37.
    assert piece_edges(9600, 2, 128, placed=False) == (0, 4864, 9600)
    # Where no good window divides the rows, the edge moves if it is for a place.
    assert piece_edges(16 * 1039, 2, 16, placed=False) == (0, 8 * 1039, 16 * 1039)
    moved = piece_edges(16 * 1039, 2, 16, placed=True)
    assert moved != (0, 8 * 1039, 16 * 1039)
    assert all(has_window(last - first) for first, last in itertools.pairwise(moved))


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
