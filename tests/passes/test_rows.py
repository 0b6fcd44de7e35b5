"""Which dims are the rows of a TPU's tiles, in what rings send and put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes import rows

SHAPES = st.lists(st.integers(1, 300), min_size=2, max_size=5)


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((512, 4096), (0, 1)),
        ((2, 4096), (0, 1)),
        ((512, 8, 128), (0, 1, 2)),
        ((512, 2, 4096), (1, 0, 2)),
        ((3, 2, 4096), (0, 1, 2)),
        ((4, 64, 2, 128), (0, 2, 1, 3)),
    ],
)
def test_what_is_sent_fills_tiles_with_the_rows_of_a_dim_that_has_enough(
    shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    assert rows.sent(shape) == order


@pytest.mark.parametrize(
    ("shape", "dim", "order"),
    [
        ((4, 64, 16, 128), 1, (0, 1, 2, 3)),
        ((4, 64, 2, 128), 1, (0, 2, 1, 3)),
        ((64, 4, 2, 128), 0, (1, 2, 0, 3)),
        ((4, 64, 2, 448), 1, (0, 2, 1, 3)),
        ((4, 64, 2, 64), 1, None),
        ((4, 64, 2, 128), 3, None),
        ((4, 64, 2, 128), None, None),
        ((4, 63, 2, 128), 1, None),
    ],
)
def test_what_is_put_together_has_the_rows_of_that_dim_where_others_fill_no_tiles(
    shape: tuple[int, ...], dim: int | None, order: tuple[int, ...] | None
) -> None:
    assert rows.put_together(shape, dim) == order


@given(shape=SHAPES, dim=st.integers(0, 4))
def test_an_order_has_every_dim_once_and_columns_stay_columns(shape: list[int], dim: int) -> None:
    dims = list(range(len(shape)))
    for order in (rows.sent(shape), rows.put_together(shape, min(dim, len(shape) - 1))):
        assert order is None or (sorted(order) == dims and order[-1] == dims[-1])
