"""Windows of a TPU's matmuls: formulas by hand, and the best of all windows by brute force."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model import by_name
from cost_model.matmul_table import CHIPS, table_of
from cost_model.windows import Fused, Near, Rates, Unit, _least, cycles

UNIT = Unit(
    start_cycles=100,
    depth=128,
    rows_per_cycle=4,
    least_rows=32,
    copy_bytes=2,
    register_cycles=(0.0, 0.0, 0.0),
)

RATES = Rates(
    clock_hz=1e9,
    cores=1,
    lanes=128,
    vmem_bytes=1e9,
    bytes_per_cycle=1000,
    read_cycles=50,
    write_cycles=70,
    read_together=False,
    exact=False,
    adding_vmem_bytes=0,
    sum_cycles=1,
    convert_cycles=0.25,
    near_row_cycles=0,
    near_window_cycles=0,
    near_bytes_per_cycle=0,
    retries=False,
    near_leaves="never",
    units=dict.fromkeys(("int8", "bfloat16", "float32"), UNIT),
)


def dot(m: int, k: int, n: int, **more: Any) -> Fused:
    widths = {"unit": "bfloat16", "lhs_width": 2.0, "rhs_width": 2.0, "out_width": 2.0}
    return Fused(**{"batch": 1, "m": m, "k": k, "n": n, **widths, **more})


def _one_window(m: int, k: int, n: int) -> float:
    """By hand: both operands arrive, one window is computed, and the result leaves at a third of the rate."""
    reading = 50 + m * k * 2 / 1000 + 50 + k * n * 2 / 1000
    return reading + 100 + k / 128 * n / 128 * max(m, 32) / 4 + 70 + 6 * m * n / 1000


def test_a_matmul_of_one_window_by_hand() -> None:
    assert cycles(dot(8, 128, 128), RATES) == pytest.approx(_one_window(8, 128, 128))
    near = cycles(dot(8, 128, 128, lhs_near=True, rhs_near=True, result_near=True), RATES)
    assert near == pytest.approx(100 + 32 / 4)


@pytest.mark.parametrize(
    ("near_leaves", "last_bytes", "rows_bytes", "columns_bytes"),
    [("never", 0, 0, 0), ("between", 0, 4, 0), ("short", 4, 4, 4), ("whole", 6, 6, 6)],
)
def test_a_result_on_chip_leaves_as_its_compiler_counts_it(
    near_leaves: Near, last_bytes: int, rows_bytes: int, columns_bytes: int
) -> None:
    """Two windows of rows, or of columns, of which the matrix unit is done long before they have left."""

    def leaving(of_element: int, elements: int) -> float:
        return 70 + of_element * elements / 1000 if of_element else 0.0

    def least(m: int, n: int) -> float:
        elements = m * n // 2  # two windows fit, and one that is twice as large does not
        held = 8 * elements + UNIT.copy_bytes * (m * 128 + 128 * n)
        rates = dataclasses.replace(RATES, near_leaves=near_leaves, vmem_bytes=held)
        return cycles(dot(m, 128, n, lhs_near=True, rhs_near=True, result_near=True), rates)

    for m, n, between_bytes in ((4096, 128, rows_bytes), (32, 16384, columns_bytes)):
        rows, columns = (m / 2, n) if n == 128 else (m, n / 2)
        compute = 100 + columns / 128 * max(rows, 32) / 4
        elements = m * n // 2
        by_hand = compute + leaving(last_bytes, elements) + max(compute, leaving(between_bytes, elements))
        assert least(m, n) <= by_hand * (1 + 1e-9)
        if between_bytes:
            assert least(m, n) > compute + leaving(last_bytes, elements) + compute


@pytest.mark.parametrize(("near_leaves", "counted"), [("between", False), ("short", False), ("whole", True)])
def test_a_float32_result_on_chip_leaves_where_all_of_it_counts(near_leaves: Near, counted: bool) -> None:
    of = dot(64, 128, 128, lhs_near=True, rhs_near=True, result_near=True, out_width=4.0)
    found = cycles(of, dataclasses.replace(RATES, near_leaves=near_leaves))
    assert found == pytest.approx(100 + 64 / 4 + counted * (70 + 4 * 64 * 128 / 1000))


def test_windows_that_turn_out_not_to_fit_are_tried_again_with_less() -> None:
    """By the log of v7x's compiler: 219 to 187 thousand cycles; those of even rows are as before."""
    table = table_of(by_name("tpu_7x"))
    assert table is not None and table.retries
    once = dataclasses.replace(table, retries=False)
    odd, even = (dot(m, 5120, 128) for m in (18728, 18944))
    assert cycles(odd, table) > 1.1 * cycles(odd, once)
    assert cycles(odd, table) == pytest.approx(217_149, rel=0.06)
    assert cycles(even, table) == cycles(even, once)
    # Not for int8, whose rows are packed otherwise.
    narrow = dataclasses.replace(odd, unit="int8", lhs_width=1.0, rhs_width=1.0)
    assert cycles(narrow, table) == cycles(narrow, once)


def test_copied_rows_that_crowd_out_the_rest_are_tried_with_far_less() -> None:
    """By the log of v7x's compiler: 75 thousand cycles, and 636 thousand once they did not fit twice."""
    table = table_of(by_name("tpu_7x"))
    assert table is not None
    odd, even = (dot(m, 3968, 1920, rhs_near=True, placed="rows") for m in (1768, 1776))
    assert cycles(odd, table) > 1.5 * cycles(odd, dataclasses.replace(table, retries=False))
    assert cycles(even, table) == cycles(even, dataclasses.replace(table, retries=False))
    # What is not put into its place in a larger array is not; nor is less than that.
    assert cycles(dataclasses.replace(odd, placed=None), table) < 1.2 * cycles(even, table)
    odd, even = (dataclasses.replace(each, k=1984) for each in (odd, even))
    assert cycles(odd, table) < 1.2 * cycles(even, table)


def test_a_result_of_one_window_has_no_second_buffer() -> None:
    """By the log of v5p's compiler: 339,188 cycles; a float32 result holds the sum itself."""
    table = table_of(by_name("tpu_v5p"))
    assert table is not None
    wide = {"unit": "float32", "lhs_width": 4.0, "rhs_width": 4.0}
    assert cycles(dot(2152, 22912, 640, **wide, out_width=4.0), table) == pytest.approx(339_188, rel=0.02)


def test_windows_of_few_columns_are_tried_where_little_is_contracted() -> None:
    """By the log of v7x's compiler: all of 11,520 rows, and 256 of 18,944 columns."""
    table = table_of(by_name("tpu_7x"))
    assert table is not None
    assert cycles(dot(11520, 128, 18944, rhs_near=True), table) == pytest.approx(851_304, rel=1e-3)


def test_a_result_laid_out_by_columns_leaves_windows_of_whole_tiles() -> None:
    """By the log of v5p's compiler: 887,354 cycles, for 743,472 of one that is laid out as it comes."""
    table = table_of(by_name("tpu_v5p"))
    assert table is not None
    turned = dot(2752, 19584, 1600, out_width=4.0, by_columns=True)
    assert cycles(turned, table) == pytest.approx(887_354, rel=1e-3)
    assert cycles(dataclasses.replace(turned, by_columns=False), table) < 760_000
    # Also one whose rows are whole tiles is.
    assert dot(256, 128, 256, by_columns=True).turned and not dot(256, 128, 256).turned


def test_k_is_cut_if_nothing_else_fits_by_hand() -> None:
    """Partial sums are added up, a cycle for each register, and half a one to make bfloat16 of it."""
    m, n = 8, 128
    # The sums, a copy of each window, of 16 rows at least, and two buffers of what arrives.
    fits_half = dataclasses.replace(
        RATES, vmem_bytes=8 * m * n + 2 * (16 * 128 + 128 * n) + 2 * 2 * (m * 128 + 128 * n)
    )
    left, right = 50 + 2 * m * 128 / 1000, 50 + 2 * 128 * n / 1000
    compute, sums, leaving = 100 + 32 / 4, 1.5 * m * n / 1024, 70 + 6 * m * n / 1000
    in_two = left + right + compute + sums + leaving + max(compute, left + right)
    assert cycles(dot(m, 256, n), fits_half) == pytest.approx(in_two)


def _brute(of: Fused, rates: Rates) -> float:
    """The best of all windows of multiples of 8 and 128, by the formulas of the module's docstring."""
    unit, best = rates.units[of.unit], math.inf
    for rows, k, columns in itertools.product(
        range(8, of.m + 8, 8), range(128, of.k + 128, 128), range(128, of.n + 128, 128)
    ):
        down, deep, across = -(-of.m // rows), -(-of.k // k), -(-of.n // columns)
        elements = rows * k, k * columns, rows * columns
        held = (6 if down == across == 1 else 8) * elements[2] + unit.copy_bytes * (
            -(-rows // 16) * 16 * k + elements[1]
        )
        for side, near, steps in ((0, of.lhs_near, down), (1, of.rhs_near, across)):
            held += 0 if near else (1 if deep == steps == 1 else 2) * 2 * elements[side]
        if held > rates.vmem_bytes:
            continue
        a = 0.0 if of.lhs_near else rates.read_cycles + 2 * elements[0] / rates.bytes_per_cycle
        b = 0.0 if of.rhs_near else rates.read_cycles + 2 * elements[1] / rates.bytes_per_cycle
        o = rates.write_cycles + 6 * elements[2] / rates.bytes_per_cycle
        c = unit.start_cycles + k / 128 * columns / 128 * max(rows, unit.least_rows) / unit.rows_per_cycle
        f = elements[2] / 1024 * 1.5
        if deep == 1:
            found = a + b + c + o + across * (down - 1) * max(c, a + o)
            found += (across - 1) * max(c, (a if down > 1 else 0.0) + b + o)
        else:
            tiles = down * across
            found = a + b + c + f + o + (tiles - 1) * max(c + f, a + b + o)
            found += tiles * (deep - 1) * max(c, a + b)
        best = min(best, found)
    return best


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(2, 60).map(lambda number: 8 * number),
    k=st.integers(1, 6).map(lambda number: 128 * number),
    n=st.integers(1, 6).map(lambda number: 128 * number),
    near=st.sampled_from([(False, False), (True, False), (False, True)]),
    vmem_bytes=st.sampled_from([6e5, 1.2e6, 4e6, 1e9]),
)
def test_the_search_finds_about_the_best_of_all_windows(
    m: int, k: int, n: int, near: tuple[bool, bool], vmem_bytes: float
) -> None:
    """It tries a small part of them; none it finds can be better than the best, and few are much worse."""
    of = dot(m, k, n, lhs_near=near[0], rhs_near=near[1])
    if of.turned:
        return
    rates = dataclasses.replace(RATES, vmem_bytes=vmem_bytes)
    best = _brute(of, rates)
    assert best * (1 - 1e-9) <= cycles(of, rates) <= 1.03 * best


@given(st.integers(1, 3000), st.sampled_from([1, 8, 128]))
def test_windows_are_the_least_of_each_count(size: int, step: int) -> None:
    units = -(-size // step)
    wanted = {min(step * min(w for w in range(1, units + 1) if -(-units // w) == c), size)
              for c in {-(-units // w) for w in range(1, units + 1)}}  # fmt: skip
    assert set(_least(size, (step,))) == wanted


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_a_place_leaves_less_choice(chip: str, along: Any) -> None:
    """Windows must divide 8 · 1039 rows, or 83 · 128 columns, of which only very small or large ones do."""
    rates = table_of(by_name("tpu_v4").per_core(2) if chip == "tpu_v4 core" else by_name(chip))
    assert rates is not None
    prime = dot(8 * 1039, 4096, 83 * 128)
    assert cycles(dataclasses.replace(prime, placed=along), rates) > 1.02 * cycles(prime, rates)
    good = dot(8 * 840, 4096, 60 * 128)
    assert cycles(dataclasses.replace(good, placed=along), rates) <= 1.03 * cycles(good, rates)


@pytest.mark.parametrize("chip", CHIPS)
def test_what_is_on_chip_takes_no_longer(chip: str) -> None:
    rates = table_of(by_name("tpu_v4").per_core(2) if chip == "tpu_v4 core" else by_name(chip))
    assert rates is not None
    far = dot(4096, 4096, 4096, accumulator_width=4.0)
    near: list[dict[str, Any]] = [
        {side: True} for side in ("lhs_near", "rhs_near", "result_near", "accumulator_near")
    ]
    for change in near:
        # On v4 what is in CMEM is brought to VMEM, which takes the matrix unit a little.
        assert cycles(dataclasses.replace(far, **change), rates) <= 1.02 * cycles(far, rates)


def test_a_matmul_may_be_laid_out_turned() -> None:
    assert not dot(4096, 512, 4096).turned
    assert dot(4096, 512, 1000).turned  # 1000 columns would be padded to 1024, as rows they are not
    turned, wide = dot(4096, 512, 1000), dot(1000, 512, 4096)
    assert cycles(turned, RATES) == pytest.approx(cycles(wide, RATES), rel=0.3)


def test_two_cores_share_the_windows() -> None:
    large = dot(8192, 8192, 8192)
    two = dataclasses.replace(RATES, cores=2, vmem_bytes=16e6)
    one = dataclasses.replace(two, cores=1)
    assert cycles(large, two) == pytest.approx(cycles(large, one) / 2, rel=0.02)


def test_sizes_that_fit_nowhere_have_a_time_all_the_same() -> None:
    tiny = dataclasses.replace(RATES, vmem_bytes=1000)
    assert 0 < cycles(dot(64, 512, 512), tiny) < math.inf


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bytes_per_cycle": 0}, "bytes_per_cycle"),
        ({"read_cycles": -1}, "read_cycles"),
        ({"vmem_bytes": math.nan}, "vmem_bytes"),
        ({"cores": True}, "cores"),
        ({"units": {"bfloat16": UNIT}}, "units"),
        ({"units": {**RATES.units, "int8": dataclasses.replace(UNIT, depth=0)}}, "depth"),
    ],
    ids=str,
)
def test_impossible_rates_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(RATES, **change)
