"""Times and sizes are written with three digits, in the unit that suits them; numbers in runs."""

from __future__ import annotations

import pytest

from overlap import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (1e-22, "0 µs"),
        (1.234e-6, "1.23 µs"),
        (99.96e-6, "100 µs"),
        (123.4e-6, "123 µs"),
        (1.329e-3, "1.33 ms"),
        (2, "2.00 s"),
        (1234, "1234 s"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (125829120, "120 MiB")]
)
def test_size(count: int, text: str) -> None:
    assert units.size(count) == text


def test_percent() -> None:
    assert units.percent(47, 100) == "47 %"
    assert units.percent(0, 0) == "0 %"


def test_printable_leaves_no_control_characters() -> None:
    assert units.printable("a\x1b[31m\u202eµ→\n") == "a�[31m�µ→�"


def test_short_operation_leaves_out_the_functions_it_was_jitted_in() -> None:
    assert units.short_operation("jit(f)/jit(g)/shard_map/dot_general") == "shard_map/dot_general"
    assert units.short_operation("jit(f)") == "jit(f)"
    assert units.short_operation("") == ""


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([1, 2], "1, 2"), ([1, 2, 3, 7, 9, 10, 11, 12], "1-3, 7, 9-12")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert units.ranges(numbers) == text
