"""Hamiltonian cycles of grids and tori that share no edge: the closed tours on which rings of hops run.

A slice of chips, or a part of one, is a product of cycles (dimensions that wrap around) and paths. Two paths,
one of an even length, hold a cycle through all their points, and so do a cycle and a path. A product of k
cycles splits into k Hamiltonian cycles that use every edge once (two: Kotzig 1973, three: Foregger 1978);
they are found here by exchanging opposite edges of squares between tours until each tour is whole.
"""

import functools
import itertools
import random
from collections.abc import Iterator, Sequence

Point = tuple[int, ...]
Tour = tuple[Point, ...]

_PATIENCE = 1_000_000
"""Squares looked at before a split is given up: a second or so. Those of TPU slices take some thousands."""


@functools.lru_cache(maxsize=64)
def disjoint_tours(lengths: tuple[int, ...], closed: tuple[bool, ...], limit: int) -> tuple[Tour, ...]:
    """Edge-disjoint Hamiltonian cycles of a grid, as many as there can be but at most `limit`.

    Args:
      lengths: points along each dimension.
      closed: per dimension, whether its last point is next to the first; without effect below three points.
      limit: the most tours wanted, at least 1.

    Returns:
      tours through all points, each point once; consecutive ones, and the last and first, are neighbours. No
      tour if there is none: the grid is a line, or has no dimension that is closed or of an even length.
    """
    cycles, paths = _factors(lengths, closed)
    while len(cycles) > limit:
        cycles.sort(key=len)
        cycles[:2] = [_wound(cycles[0], cycles[1])]
    for path in paths:
        if not cycles:
            return ()
        cycles.sort(key=len)
        cycles[0] = _wound(cycles[0], path)
    if not cycles:
        return ()
    cycles.sort(key=len)
    tours = _split(tuple(map(len, cycles)))
    if not tours:
        return disjoint_tours(lengths, closed, len(cycles) - 1)
    return tuple(
        tuple(functools.reduce(_sum, (cycle[i] for cycle, i in zip(cycles, at, strict=True))) for at in tour)
        for tour in tours
    )


def snake(lengths: Sequence[int]) -> Tour:
    """A walk through all points of a grid in which consecutive ones are neighbours."""
    if not lengths:
        return ((),)
    inner = snake(lengths[1:])
    return tuple((i, *rest) for i in range(lengths[0]) for rest in (inner if i % 2 == 0 else inner[::-1]))


def _factors(lengths: Sequence[int], closed: Sequence[bool]) -> tuple[list[Tour], list[Tour]]:
    """The grid as a product of cycles, two paths made one cycle where one is even, and paths that are left.

    Points are given in all dimensions, 0 in those of other factors: a point of the grid is a sum of them.
    """
    cycles: list[Tour] = []
    paths: list[Tour] = []
    for dim, length in enumerate(lengths):
        points = tuple(
            tuple(i if other == dim else 0 for other in range(len(lengths))) for i in range(length)
        )
        if length > 2 and closed[dim]:
            cycles.append(points)
        elif length > 1:
            paths.append(points)
    paths.sort(key=len)
    while len(paths) > 1 and any(len(path) % 2 == 0 for path in paths):
        even = paths.pop(next(i for i, path in enumerate(paths) if len(path) % 2 == 0))
        cycles.append(_combed(even, paths.pop(0)))
    return cycles, paths


def _combed(columns: Tour, rows: Tour) -> Tour:
    """A cycle through the product of two paths, the first of even length: up and down, and back below."""
    teeth = [
        _sum(column, row)
        for i, column in enumerate(columns)
        for row in (rows[1:] if i % 2 == 0 else rows[:0:-1])
    ]
    return tuple(teeth + [_sum(column, rows[0]) for column in reversed(columns)])


def _wound(cycle: Tour, path: Tour) -> Tour:
    """A cycle through the product of a cycle and a path."""
    if len(cycle) % 2 == 0:
        return _combed(cycle, path)
    if len(path) % 2 == 0:
        return _combed(path, cycle)
    # Both are odd: the layers but the first make a tour, and the first is let in where they run side by side.
    tour = _combed(path[1:], (cycle[0], *cycle[1:]))
    first = [_sum(point, path[0]) for point in (cycle[1], cycle[0], *cycle[:1:-1])]
    return (tour[0], *first, *tour[1:])


def _sum(one: Point, other: Point) -> Point:
    return tuple(a + b for a, b in zip(one, other, strict=True))


@functools.lru_cache(maxsize=64)
def _split(lengths: tuple[int, ...]) -> tuple[Tour, ...]:
    """As many Hamiltonian cycles of a product of cycles as there are cycles; () if the search gives up."""
    if len(lengths) == 1:
        return (tuple((i,) for i in range(lengths[0])),)
    search = _Search(lengths)
    return search.tours() if search.succeeds() else ()


class _Search:
    """A torus whose edges have one of k colours, each point two edges of each; the tours are the colours.

    At first the colour of an edge is its dimension. In a square with two opposite edges of one colour and two
    of another the colours can be exchanged: where the opposite edges belong to two tours, they become one; in
    one tour that runs through them in the same sense, it remains one; else it falls into two.
    """

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.points = list(itertools.product(*map(range, lengths)))
        number = {point: i for i, point in enumerate(self.points)}
        self.dims = len(lengths)
        self.onward = [
            [
                number[(*point[:dim], (point[dim] + 1) % lengths[dim], *point[dim + 1 :])]
                for point in self.points
            ]
            for dim in range(self.dims)
        ]
        count = range(len(self.points))
        self.colour = [[dim for _ in count] for dim in range(self.dims)]
        self.next_to: list[list[list[int]]] = [[[] for _ in count] for _ in range(self.dims)]
        for dim, onward in enumerate(self.onward):
            for point, after in enumerate(onward):
                self.next_to[dim][point].append(after)
                self.next_to[dim][after].append(point)
        self.tour_of = [[-1 for _ in count] for _ in range(self.dims)]
        self.position = [[-1 for _ in count] for _ in range(self.dims)]
        self.left = [0] * self.dims
        for colour in range(self.dims):
            for point in count:
                if self.tour_of[colour][point] < 0:
                    self._follow(colour, point, self.left[colour])
                    self.left[colour] += 1
        self.fresh = len(self.points)

    def succeeds(self) -> bool:
        """Exchanges until every colour is one tour; False when patience ends first."""
        squares = [
            (point, dim, other)
            for point in range(len(self.points))
            for dim, other in itertools.combinations(range(self.dims), 2)
        ]
        # A fixed seed: every process must find the same tours.
        chance = random.Random(0)
        looked = 0
        worst = -2
        while max(self.left) > 1:
            exchanged = False
            for square in squares:
                looked += 1
                if self._gain(square) <= worst:
                    self._exchange(square)
                    exchanged = True
                    if worst == 0:
                        worst = -1
                        chance.shuffle(squares)
                        break
            if looked > _PATIENCE:
                return False
            if not exchanged:
                worst = min(worst + 1, 0)
        return True

    def tours(self) -> tuple[Tour, ...]:
        """The tours of all colours, once each is whole."""
        return tuple(
            tuple(self.points[point] for point in self._walk(colour, 0)) for colour in range(self.dims)
        )

    def _corners(self, square: tuple[int, int, int]) -> tuple[int, int, int, int]:
        point, dim, other = square
        along, across = self.onward[dim][point], self.onward[other][point]
        return point, along, self.onward[other][along], across

    def _gain(self, square: tuple[int, int, int]) -> int:
        """By how many the tours become more if the square's colours are exchanged; 9 where they cannot be."""
        _, dim, other = square
        a, b, c, d = self._corners(square)
        one, two = self.colour[dim][a], self.colour[other][a]
        if one == two or self.colour[dim][d] != one or self.colour[other][b] != two:
            return 9
        return self._change(one, a, b, d, c) + self._change(two, a, d, b, c)

    def _change(self, colour: int, a: int, b: int, d: int, c: int) -> int:
        """The change in tours of a colour that gives up edges a-b and d-c for a-d and b-c."""
        tour_of, position = self.tour_of[colour], self.position[colour]
        if tour_of[a] != tour_of[d]:
            return -1
        return 0 if self._ahead(position[a], position[b]) == self._ahead(position[d], position[c]) else 1

    @staticmethod
    def _ahead(start: int, end: int) -> bool:
        """Whether neighbours on a tour are passed in this order; one of position 0 may follow the last."""
        return end - start == 1 or start - end > 1

    def _exchange(self, square: tuple[int, int, int]) -> None:
        _, dim, other = square
        a, b, c, d = self._corners(square)
        one, two = self.colour[dim][a], self.colour[other][a]
        changes = self._change(one, a, b, d, c), self._change(two, a, d, b, c)
        self.colour[dim][a] = self.colour[dim][d] = two
        self.colour[other][a] = self.colour[other][b] = one
        self._join(one, ((a, b), (d, c)), ((a, d), (b, c)), changes[0])
        self._join(two, ((a, d), (b, c)), ((a, b), (d, c)), changes[1])

    def _join(
        self,
        colour: int,
        lost: tuple[tuple[int, int], ...],
        gained: tuple[tuple[int, int], ...],
        change: int,
    ) -> None:
        next_to = self.next_to[colour]
        for one, two in lost:
            next_to[one].remove(two)
            next_to[two].remove(one)
        for one, two in gained:
            next_to[one].append(two)
            next_to[two].append(one)
        self.left[colour] += change
        for start in (gained[0][0], gained[1][0])[: 2 if change > 0 else 1]:
            self._follow(colour, start, self.fresh)
            self.fresh += 1

    def _follow(self, colour: int, start: int, name: int) -> None:
        tour_of, position = self.tour_of[colour], self.position[colour]
        for at, point in enumerate(self._walk(colour, start)):
            tour_of[point], position[point] = name, at

    def _walk(self, colour: int, start: int) -> Iterator[int]:
        next_to = self.next_to[colour]
        before, here = next_to[start][1], start
        while True:
            yield here
            one, two = next_to[here]
            before, here = here, two if one == before else one
            if here == start:
                return
