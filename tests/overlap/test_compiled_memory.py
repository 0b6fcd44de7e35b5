"""The memory of compiled programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from overlap.compiled_memory import temporary_bytes


def program(**sizes: int) -> Any:
    """A compiled program whose compiler tells these sizes."""
    return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes))


def told(temporary: int, allotted: int) -> Any:
    """One of 30 bytes of arguments and 20 of results, 10 of them the same."""
    return program(
        temp_size_in_bytes=temporary,
        total_allocation_bytes=allotted,
        argument_size_in_bytes=30,
        output_size_in_bytes=20,
        alias_size_in_bytes=10,
    )


@pytest.mark.parametrize(
    ("temporary", "allotted", "expected"),
    [(100, 140, 100), (100, 90, 50), (100, 150, 100), (100, 0, 100), (100, 35, 0), (0, 90, 0)],
)
def test_the_smaller_of_two_figures_counts(temporary: int, allotted: int, expected: int) -> None:
    assert temporary_bytes(told(temporary, allotted)) == expected


def test_a_compiler_may_tell_one_figure_or_none() -> None:
    assert temporary_bytes(program(temp_size_in_bytes=7)) == 7
    assert temporary_bytes(program()) is None
    assert temporary_bytes(SimpleNamespace(memory_analysis=lambda: None)) is None


def test_a_real_program_needs_room_for_what_it_passes_on() -> None:
    """One that needs nothing beside its result, and one whose first product is held for the second."""
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    one = temporary_bytes(jax.jit(lambda x: x @ x).lower(x).compile())
    two = temporary_bytes(jax.jit(lambda x: (x @ x) @ x).lower(x).compile())
    assert one is not None and two is not None
    assert two - one >= 4 * 256 * 256
