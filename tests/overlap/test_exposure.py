"""Waits are found where compute stands still for collectives, and nowhere else."""

from __future__ import annotations

import dataclasses

import pytest

from overlap.exposure import ITERATIONS, WAIT, by_exposed_time, gaps, hint, streams
from tests.overlap.timelines import US, after, before, collective, event, timeline


class TestGaps:
    def test_the_whole_of_a_synchronous_collective_is_a_wait(self) -> None:
        (wait,) = gaps(before())
        assert (wait.kind, wait.start_s, wait.end_s) == (WAIT, 0, 60 * US)
        assert wait.collectives == ("all-gather.3",)

    def test_a_hop_beside_compute_is_none(self) -> None:
        (wait,) = gaps(after())
        assert (wait.start_s, wait.end_s) == (20 * US, 30 * US)
        assert wait.collectives == ("permute.2",)

    def test_a_wait_lasts_until_the_message_arrives_though_its_link_is_free_before(self) -> None:
        events = [
            event("permute", "collective", "x+", 0, 3),
            event("dot", "matmul", "compute", 8, 10),
        ]
        (wait,) = gaps(timeline(events, [collective("permute", "collective-permute", 0, 8, 8)], 10))
        assert (wait.start_s, wait.end_s) == (0, 8 * US)

    def test_waiting_for_a_copy_is_none_though_a_hop_is_on_the_way(self) -> None:
        events = [
            event("copy", "copy", "memory", 0, 10),
            event("permute", "collective", "x+", 0, 30),
            event("dot", "matmul", "compute", 10, 40),
        ]
        assert not gaps(timeline(events, [collective("permute", "collective-permute", 0, 30, 0)], 40))

    def test_waiting_for_a_hop_and_then_for_a_copy_is_one_until_the_hop_arrives(self) -> None:
        events = [
            event("copy", "copy", "memory", 0, 10),
            event("permute", "collective", "x+", 0, 6),
            event("dot", "matmul", "compute", 10, 40),
        ]
        (wait,) = gaps(timeline(events, [collective("permute", "collective-permute", 0, 6, 6)], 40))
        assert (wait.start_s, wait.end_s) == (0, 6 * US)

    def test_a_wait_at_the_end_is_seen(self) -> None:
        events = [event("dot", "matmul", "compute", 0, 5), event("psum", "collective", "x+", 5, 9)]
        (wait,) = gaps(timeline(events, [collective("psum", "all-reduce", 5, 9, 4)], 9))
        assert (wait.start_s, wait.end_s) == (5 * US, 9 * US)

    def test_the_iterations_of_a_loop_that_are_not_drawn_are_no_wait(self) -> None:
        events = [
            event("dot", "matmul", "compute", 0, 10, repeats=4),
            event("permute", "collective", "x+", 0, 15, repeats=4),
            event("add", "compute", "compute", 40, 45),
        ]
        (rest,) = gaps(timeline(events, [collective("permute", "collective-permute", 0, 15, 0)], 45))
        assert (rest.kind, rest.repeats) == (ITERATIONS, 4)
        assert (rest.start_s, rest.end_s) == (10 * US, 40 * US)

    def test_names_all_that_are_on_the_way_in_order(self) -> None:
        hops = [collective(f"hop.{i}", "collective-permute", i, 10 + i, 0) for i in range(3)]
        (wait,) = gaps(timeline([event("dot", "matmul", "compute", 12, 20)], hops, 20))
        assert wait.collectives == ("hop.0", "hop.1", "hop.2")


class TestStreams:
    def test_compute_comes_first_then_copies_then_links_by_name(self) -> None:
        events = [
            event("b", "collective", "y+", 0, 1),
            event("a", "collective", "x-", 0, 1),
            event("c", "copy", "memory", 0, 1),
        ]
        assert list(streams(timeline(events, [], 1))) == ["compute", "memory", "x-", "y+"]

    def test_bars_that_overlap_get_lanes_of_their_own(self) -> None:
        spans = [(0, 10), (5, 15), (10, 20), (15, 16)]
        events = [event(f"e{i}", "collective", "x+", *span) for i, span in enumerate(spans)]
        lanes = streams(timeline(events, [], 20))["x+"]
        assert [[e.name for e in lane] for lane in lanes] == [["e0", "e2"], ["e1", "e3"]]


class TestHints:
    @pytest.mark.parametrize(
        ("opcode", "place", "words"),
        [
            ("all-gather", "feeds", "feeds a dot: could be decomposed into a ring"),
            ("reduce-scatter", "follows", "follows a dot: could be decomposed into a ring"),
            ("all-reduce", "follows", "reduce-scatter ring"),
            ("all-to-all", "feeds", "feeds a dot: could be decomposed"),
            ("collective-permute", "feeds", "issued earlier"),
        ],
    )
    def test_an_exposed_collective_beside_a_dot_gets_one(self, opcode: str, place: str, words: str) -> None:
        assert words in hint(collective("c", opcode, 0, 5, 5, next_to_dot=place))

    def test_others_get_none(self) -> None:
        assert not hint(collective("c", "all-gather", 0, 5, 0, next_to_dot="feeds"))
        assert not hint(collective("c", "all-gather", 0, 5, 1e-9, next_to_dot="feeds"))
        assert not hint(collective("c", "all-gather", 0, 5, 5))

    def test_the_most_exposed_come_first(self) -> None:
        some = [collective(f"c{e}{s}", "all-gather", s, s + 5, e) for e, s in ((1, 0), (3, 9), (3, 4))]
        assert [c.name for c in by_exposed_time(timeline([], some, 20))] == ["c34", "c39", "c10"]

    def test_equals_that_rounding_tells_apart_are_in_order_of_start(self) -> None:
        some = [collective("first", "all-gather", 0, 30, 30), collective("second", "all-gather", 40, 70, 30)]
        some[1] = dataclasses.replace(some[1], exposed_s=some[1].exposed_s * (1 + 1e-15))
        assert some[1].exposed_s > some[0].exposed_s
        assert [c.name for c in by_exposed_time(timeline([], some, 70))] == ["first", "second"]
