"""The compiler's log of matmuls: its lines are understood, and it still says what the tables say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench import matmul_log
from bench.matmul_log import Tried, searches
from cost_model.matmul_table import FOLDER
from passes import shims
from tests.libtpu import needs_libtpu

SOURCE = "I1130 16:28:00.5{}    3515 spatial_major_convolution.cc:{}] {}"

LINES = [
    (5034, "SpatialMajorConvolution::ComputeWindowConfigInternal called for fusion"),
    (3340, "VmemToUseForPotentialWindows: max_vmem=33030144 compilation_retry_count=0"),
    (2495, "activations_window_size: 12288"),
    (2680, "Transfer cost for activations 0*k32Byte in cmem? false in vmem? true"),
    (2749, "Transfer cost for kernel 3072*k32Byte in cmem? false in vmem? false"),
    (2794, "Transfer cost for output 192*k32Byte"),
    (2891, "activations_fusion_cycles 0 kernel_fusion_cycles 12 output_fusion_cycles 1"),
    (2960, "activations_transfer_cycles 0 kernel_transfer_cycles 1305 output_transfer_cycles 2106"),
    (2995, "kernel window: [48, 1] output window: [1, 1] activations window: [1, 3] bytes/cycle: 936"),
    (3162, "total_cycles: 269698113 single_mxu_cycles: 1088 compute_cycles 1090 remaining_iterations 163840"),
    (5094, "SpatialMajorConvolution::Generated Candidate: out=1,1 kern=48,1 cycles=269 vmem_needed=315392"),
]

FOUND = Tried(
    rows=8,
    k=384,
    columns=128,
    lhs_near=True,
    rhs_near=False,
    lhs_cycles=0,
    rhs_cycles=1305,
    result_cycles=2106,
    sum_cycles=1,
    unit_cycles=1088,
    compute_cycles=1090,
    vmem_bytes=315392,
    cycles=269698113,
)


def _log(lines: list[tuple[int, str]], thread: str = "3515") -> list[str]:
    return [
        SOURCE.format(number, line, text).replace("3515", thread) for number, (line, text) in enumerate(lines)
    ]


def test_the_terms_of_windows_are_read() -> None:
    (search,) = searches("\n".join([*_log(LINES), "something else", *_log(LINES[2:])]))
    assert search.room_bytes == 33030144
    assert search.tried == (FOUND, FOUND)


def test_threads_that_write_at_once_are_told_apart() -> None:
    pairs = zip(_log(LINES), _log(LINES, thread="3516"), strict=True)
    assert [search.tried for search in searches("\n".join(line for pair in pairs for line in pair))] == [
        (FOUND,),
        (FOUND,),
    ]


def test_windows_that_do_not_fit_are_left_out() -> None:
    """Of those the log says little, and no cycles."""
    short = [line for line in LINES if line[0] not in (2680, 2749, 2794, 2891, 2960, 2995, 3162)]
    (search,) = searches("\n".join(_log([*LINES, *short[2:]])))
    assert search.tried == (FOUND,)


@pytest.mark.parametrize("log", ["", "I1130 something happened", "\n".join(_log(LINES[:2]))])
def test_a_log_without_windows_is_refused(log: str) -> None:
    with pytest.raises(ValueError, match="tells of no windows"):
        searches(log)


@needs_libtpu
@pytest.mark.skipif(
    not shims.EXPLICIT_STARTS,
    reason="tables are made with the libtpu of jax 0.12; that of 0.10 logs otherwise",
)
def test_the_compiler_still_believes_what_a_table_says() -> None:
    """Of a v5e: what it logs may change with its version, and the table is to be made anew then."""
    check = (
        "import json, os; from overlap import tpu_target; os.environ.update(tpu_target.ENVIRONMENT);"
        "from bench import matmul_log; os.environ.update(matmul_log.ENVIRONMENT);"
        "from bench import matmul_tables; print(json.dumps(matmul_tables.rates_of('tpu_v5e')))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    kept = json.loads((FOLDER / "tpu_v5e.json").read_text("utf-8"))["rates"]
    assert found["units"]["bfloat16"] == kept["units"]["bfloat16"]
    for name in ("vmem_bytes", "read_cycles", "write_cycles", "bytes_per_cycle", "sum_cycles", "clock_hz"):
        assert found[name] == pytest.approx(kept[name], rel=1e-3), name


def test_what_is_logged_is_caught() -> None:
    check = (
        "import os; from bench.matmul_log import logged;"
        "print(repr(logged(lambda: os.write(2, b'to the log'))))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "'to the log'"
    assert matmul_log.ENVIRONMENT["TPU_VMODULE"].startswith(matmul_log.SOURCE)
