"""Tiles: how long a dot takes whose windows must divide its rows."""

from __future__ import annotations

import pytest

from cost_model.tile import LARGE, PLACED_SLOWNESS, placed_slowness, tile_rows


def test_rows_of_a_tile() -> None:
    assert [tile_rows(size) for size in (4, 2, 1)] == [16, 16, 32]


@pytest.mark.parametrize("rows", [8 * 11 * 29, 8 * 313, 16 * 313, 8 * 467, 16 * 467])
def test_rows_that_no_good_window_divides_take_longer(rows: int) -> None:
    assert placed_slowness(rows, 4096, 8192) == PLACED_SLOWNESS
    assert placed_slowness(rows, LARGE, 8192) == placed_slowness(rows, 4096, LARGE) == 1


@pytest.mark.parametrize(
    "rows",
    [8, 128, 1024, 8 * 263, 8 * 5 * 7 * 11, 8 * 7 * 59, 16 * 11 * 29, 4096, 3 * 4096, 7473, 16 * 8 * 79],
)
def test_other_rows_do_not(rows: int) -> None:
    assert placed_slowness(rows, 4096, 8192) == 1
