"""What the TPU compiler's log says of the windows that it tries for a matmul."""

# mypy: allow-untyped-calls

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SOURCE: Final = "spatial_major_convolution"
"""Of the compiler, what logs the windows."""

ENVIRONMENT: Final[Mapping[str, str]] = {
    "TPU_MIN_LOG_LEVEL": "0",
    "TPU_STDERR_LOG_LEVEL": "0",
    "TPU_VMODULE": f"{SOURCE}=10",
}
"""Environment in which the compiler logs them; to be set before JAX is imported."""

_LINE: Final = re.compile(rf"^\S+ \S+ +(\d+) {SOURCE}\.cc:\d+\] (.*)$")
_NUMBER: Final = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Windows that the compiler tried for a matmul without a batch.

    Attributes:
      rows, k, columns: of the windows, multiples of 8 and of 128.
      lhs_near, rhs_near: whether that operand is on chip.
      lhs_cycles, rhs_cycles, result_cycles: in which a window of it moves.
      sum_cycles: in which partial sums are added up, where K is cut.
      unit_cycles: of the matrix unit alone.
      compute_cycles: with what registers take.
      vmem_bytes: on chip.
      cycles: of all windows, the compiler's estimate.
    """

    rows: int
    k: int
    columns: int
    lhs_near: bool
    rhs_near: bool
    lhs_cycles: int
    rhs_cycles: int
    result_cycles: int
    sum_cycles: int
    unit_cycles: int
    compute_cycles: int
    vmem_bytes: int
    cycles: int


@dataclass(frozen=True, slots=True)
class Search:
    """All windows that were tried for one matmul, and the bytes on chip that there are for them."""

    room_bytes: int
    tried: tuple[Tried, ...]


def logged(run: Callable[[], object]) -> str:
    """What a call writes to the standard error of this process, which the compiler logs to."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        kept = os.dup(2)
        with path.open("wb") as file:
            os.dup2(file.fileno(), 2)
            try:
                run()
            finally:
                os.dup2(kept, 2)
                os.close(kept)
        return path.read_text("utf-8", errors="replace")


def searches(log: str) -> list[Search]:
    """The searches in a log, in their order.

    Raises:
      ValueError: there is none, or its lines are not as expected: another version of the compiler.
    """
    found = [_search(lines) for lines in _by_search(log)]
    if not found or not any(search.tried for search in found):
        raise ValueError(f"the log tells of no windows: {log[-500:]!r}")
    return found


def _by_search(log: str) -> Iterator[list[str]]:
    """The lines of every search: threads write theirs among those of others."""
    running: dict[str, list[str]] = {}
    for line in log.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        thread, text = match.groups()
        if "::ComputeWindowConfigInternal called" in text:
            if thread in running:
                yield running[thread]
            running[thread] = []
        elif thread in running:
            running[thread].append(text)
    yield from running.values()


def _search(lines: list[str]) -> Search:
    room_bytes, tried, terms = 0, [], dict[str, Any]()
    for text in lines:
        if text.startswith("VmemToUseForPotentialWindows:"):
            room_bytes = _numbers(text)[0]
        elif text.startswith("activations_window_size:"):
            terms = {}
        elif text.startswith(("Transfer cost for activations", "Transfer cost for kernel")):
            side = "lhs" if "activations" in text else "rhs"
            terms[f"{side}_near"] = "? true" in text
        elif text.startswith("activations_fusion_cycles"):
            terms["sum_cycles"] = _numbers(text)[2]
        elif text.startswith("activations_transfer_cycles"):
            names = ("lhs_cycles", "rhs_cycles", "result_cycles")
            terms |= zip(names, _numbers(text), strict=True)
        elif text.startswith("kernel window:"):
            # [K / 8, columns / 128], [rows / 8, columns / 128] and [rows / 8, K / 128]
            _, columns, rows, _, _, k = _numbers(text)[:6]
            terms |= {"rows": 8 * rows, "k": 128 * k, "columns": 128 * columns}
        elif "single_mxu_cycles" in text:
            terms["cycles"], terms["unit_cycles"], terms["compute_cycles"], _ = _numbers(text)
        elif "Generated Candidate:" in text and "cycles" in terms:
            tried.append(Tried(vmem_bytes=_numbers(text)[-1], **terms))
    return Search(room_bytes, tuple(tried))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(text.replace("k32Byte", ""))]
