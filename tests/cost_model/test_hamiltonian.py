"""Tours of grids and tori: through every point, over neighbours only, no edge used twice."""

import itertools
import math
import subprocess
import sys

import pytest

from cost_model.hamiltonian import Tour, disjoint_tours, snake

_GRIDS = [
    ((2, 2), (False, False), 1),
    ((2, 4), (False, False), 1),
    ((4, 4), (False, False), 1),
    ((3, 4), (False, False), 1),
    ((2, 2, 2), (False, False, False), 1),
    ((16,), (True,), 1),
    ((8, 16), (False, True), 1),
    ((3, 3), (True, False), 1),
    ((4, 4), (True, True), 2),
    ((2, 2, 4), (False, False, True), 2),
    ((1, 4, 12), (False, True, True), 2),
    ((5, 7), (True, True), 2),
    ((16, 16), (True, True), 2),
    ((2, 4, 4), (False, True, True), 2),
    ((4, 4, 4), (True, True, True), 3),
    ((4, 4, 8), (True, True, True), 3),
    ((4, 8, 8), (True, True, True), 3),
    ((8, 8, 8), (True, True, True), 3),
]


def edges(tour: Tour, lengths: tuple[int, ...], closed: tuple[bool, ...]) -> set[frozenset[tuple[int, ...]]]:
    """The edges of a tour, each checked to join two neighbours."""
    found = set()
    for one, other in zip(tour, (*tour[1:], tour[0]), strict=True):
        apart = [
            min(abs(a - b), n - abs(a - b)) if wraps else abs(a - b)
            for a, b, n, wraps in zip(one, other, lengths, closed, strict=True)
        ]
        assert sum(apart) == 1, f"{one} and {other} are no neighbours"
        found.add(frozenset((one, other)))
    return found


@pytest.mark.parametrize(("lengths", "closed", "count"), _GRIDS)
def test_tours_visit_every_point_and_share_no_edge(
    lengths: tuple[int, ...], closed: tuple[bool, ...], count: int
) -> None:
    for limit in (1, 2, 3):
        tours = disjoint_tours(lengths, closed, limit)
        assert len(tours) == min(limit, count)
        for tour in tours:
            assert len(set(tour)) == len(tour) == math.prod(lengths)
        used = [edges(tour, lengths, closed) for tour in tours]
        assert len(set().union(*used)) == sum(map(len, used)) == len(tours) * math.prod(lengths)


def test_tours_of_a_torus_use_every_edge_once() -> None:
    tours = disjoint_tours((4, 4, 4), (True, True, True), 3)
    assert len(set().union(*(edges(tour, (4, 4, 4), (True, True, True)) for tour in tours))) == 3 * 64


@pytest.mark.parametrize("lengths", [(4,), (3, 3), (5, 3), (3, 3, 3), (1, 1)])
def test_lines_and_odd_grids_have_no_tour(lengths: tuple[int, ...]) -> None:
    assert disjoint_tours(lengths, (False,) * len(lengths), 2) == ()


def test_a_dimension_of_two_has_one_edge_even_where_it_is_called_closed() -> None:
    assert disjoint_tours((2,), (True,), 1) == ()


def test_a_snake_walks_over_neighbours() -> None:
    walk = snake((3, 2, 4))
    assert len(set(walk)) == 24
    for one, other in itertools.pairwise(walk):
        assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) == 1


def test_every_process_finds_the_same_tours() -> None:
    code = (
        "from cost_model.hamiltonian import disjoint_tours; print(disjoint_tours((4, 4, 8), (True,) * 3, 3))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] == f"{disjoint_tours((4, 4, 8), (True,) * 3, 3)}\n"
