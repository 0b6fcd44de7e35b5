"""The memory that a compiled program needs, as its compiler tells it."""

from __future__ import annotations

from typing import Any


def temporary_bytes(compiled: Any) -> int | None:
    """What a compiled program needs per device beside arguments and results; None where it does not tell.

    The compiler tells it in two ways, of which the smaller counts. XLA:TPU's ``temp_size_in_bytes`` of a
    program with many permutes in flight is more than what it allots: on a v4 core of 16.4 GB a program of
    18.4 GB compiles, whose allocations are 12.5 GB, arguments and results among them.
    """
    analysis = compiled.memory_analysis()
    size = getattr(analysis, "temp_size_in_bytes", None)
    if size is None:
        return None
    allotted = getattr(analysis, "total_allocation_bytes", 0)
    if not allotted:  # as of jax 0.10, which has no such figure
        return int(size)
    lasting = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return max(0, min(int(size), int(allotted - lasting)))
