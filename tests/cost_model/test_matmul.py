"""The time of a matmul, against the TPU compiler's estimates and its own laws."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_model import Hardware, Matmul, by_name, matmul_s, names

_SIZES = st.integers(1, 1 << 16)
_HARDWARE = st.sampled_from([by_name(name) for name in names()])


def _efficiency(matmul: Matmul, hardware: Hardware) -> float:
    seconds = matmul_s(matmul, hardware, rhs_on_chip=True)
    return matmul.flops / hardware.flops_for(matmul.dtype) / seconds


# From the TPU compiler's estimated cycles of [M,8192]·[8192,2048] in bfloat16, weights in VMEM.
@pytest.mark.parametrize(
    ("name", "m", "fraction"),
    [
        ("tpu_v5p", 8192, 0.96),
        ("tpu_v5p", 1024, 0.92),
        ("tpu_v5p", 512, 0.87),
        ("tpu_v5p", 256, 0.80),
        ("tpu_v5p", 128, 0.70),
        ("tpu_v5p", 64, 0.57),
        ("tpu_v5e", 8192, 0.966),
        ("tpu_v5e", 1024, 0.932),
        ("tpu_v5e", 256, 0.864),
        ("tpu_v5e", 64, 0.701),
        ("tpu_v6e", 8192, 0.864),
        ("tpu_v6e", 1024, 0.771),
        ("tpu_v6e", 256, 0.587),
        ("tpu_v6e", 64, 0.271),
    ],
)
def test_efficiency_falls_with_m_as_the_tpu_compiler_has_it(name: str, m: int, fraction: float) -> None:
    assert _efficiency(Matmul(m=m, k=8192, n=2048), by_name(name)) == pytest.approx(fraction, rel=0.07)


def test_flops_and_bytes_count_each_operand_once_and_the_batch() -> None:
    matmul = Matmul(batch=3, m=4, k=5, n=6, dtype="bfloat16", out_dtype="float32")
    assert matmul.flops == 2 * 3 * 4 * 5 * 6
    assert matmul.bytes == 3 * (2 * (4 * 5 + 5 * 6) + 4 * 4 * 6)


def test_a_matrix_times_a_few_rows_takes_as_long_as_reading_the_matrix() -> None:
    # The compiler's estimate, 341764 cycles, is 72 % of the bandwidth.
    v5e = by_name("tpu_v5e")
    assert matmul_s(Matmul(m=64, k=8192, n=8192), v5e, lhs_on_chip=True) == pytest.approx(
        341764 / 1.5e9, rel=0.05
    )
    h100 = by_name("h100")
    reading_s = 8192 * 8192 * 2 / h100.hbm_bytes_per_s
    assert matmul_s(Matmul(m=8, k=8192, n=8192), h100) == pytest.approx(reading_s + 6e-6, rel=0.01)


@pytest.mark.parametrize("name", ["tpu_v5e", "h100"])
def test_each_array_on_chip_saves_time(name: str) -> None:
    hardware, matmul = by_name(name), Matmul(m=128, k=128, n=16384)
    whole_s = matmul_s(matmul, hardware)
    assert matmul_s(matmul, hardware, rhs_on_chip=True) < whole_s
    assert matmul_s(matmul, hardware, lhs_on_chip=True) < whole_s
    assert matmul_s(matmul, hardware, result_on_chip=True) < whole_s
    assert matmul_s(matmul, hardware, lhs_on_chip=True, rhs_on_chip=True) < matmul_s(
        matmul, hardware, rhs_on_chip=True
    )


@pytest.mark.parametrize("name", ["tpu_v5p", "h100"])
def test_an_accumulator_costs_its_reading_alone(name: str) -> None:
    hardware = by_name(name)
    matmul = Matmul(m=4096, k=128, n=8192, out_dtype="float32")
    plain_s = matmul_s(matmul, hardware)
    read_s = matmul_s(matmul, hardware, accumulator="float32") - plain_s
    least_s = 4 * 4096 * 8192 / hardware.hbm_bytes_per_s
    assert least_s * 0.99 < read_s < 2 * least_s
    assert matmul_s(matmul, hardware, accumulator="float32", accumulator_on_chip=True) == plain_s


@pytest.mark.parametrize("name", ["tpu_v5e", "h100"])
def test_an_operand_is_read_at_its_own_width(name: str) -> None:
    hardware, wide = by_name(name), Matmul(m=128, k=8192, n=8192, dtype="float32")
    weights = dataclasses.replace(wide, rhs_dtype="bfloat16")
    rows = dataclasses.replace(wide, lhs_dtype="bfloat16")
    assert (weights.rhs_bytes, weights.lhs_bytes) == (wide.rhs_bytes / 2, wide.lhs_bytes)
    assert (rows.rhs_bytes, rows.lhs_bytes) == (wide.rhs_bytes, wide.lhs_bytes / 2)
    assert matmul_s(weights, hardware) < matmul_s(rows, hardware) < matmul_s(wide, hardware)


def test_operands_on_chip_need_no_reading() -> None:
    v5e, matmul = by_name("tpu_v5e"), Matmul(m=8, k=8192, n=8192)
    assert matmul_s(matmul, v5e, rhs_on_chip=True) < matmul_s(matmul, v5e) / 4


def test_small_dimensions_are_padded_to_the_tile() -> None:
    v5p = by_name("tpu_v5p")
    for hardware in (v5p, dataclasses.replace(v5p, hbm_bytes_per_s=1e18)):
        padded_s, narrow_s, wide_s = (
            matmul_s(Matmul(m=4096, k=16384, n=n), hardware, lhs_on_chip=True, rhs_on_chip=True)
            for n in (128, 120, 256)
        )
        assert narrow_s == pytest.approx(padded_s, rel=0.07)
        assert wide_s > 1.8 * padded_s


def test_rates_that_were_measured_count_for_more_than_the_table() -> None:
    measured = dataclasses.replace(by_name("tpu_v5p"), matmul_efficiency=0.5, matmul_overhead_s=1e-6)
    matmul = Matmul(m=8192, k=8192, n=8192)
    assert matmul_s(matmul, measured) == pytest.approx(1e-6 + matmul.flops / (0.5 * 4.59e14))


def test_an_empty_matmul_is_free() -> None:
    assert matmul_s(Matmul(m=0, k=8, n=8), by_name("tpu_v5p")) == 0


@pytest.mark.parametrize("bad", [{"m": -1}, {"batch": -1}, {"dtype": "bf16"}, {"out_dtype": "wide"}])
def test_impossible_matmuls_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(Matmul(m=8, k=8, n=8), **bad)


@pytest.mark.parametrize("bad", [{"m": 1.5}, {"k": math.nan}, {"n": "8"}, {"batch": None}, {"m": 2.0}])
def test_sizes_are_whole_numbers(bad: dict[str, Any]) -> None:
    (field,) = bad
    with pytest.raises(TypeError, match=f"a matmul's {field} must be a whole number, got"):
        dataclasses.replace(Matmul(m=8, k=8, n=8), **bad)


def test_a_name_is_no_hardware() -> None:
    with pytest.raises(TypeError, match=r"hardware must be a Hardware, .*, got 'h100'"):
        matmul_s(Matmul(m=8, k=8, n=8), "h100")  # type: ignore[arg-type]


def test_numpy_s_whole_numbers_are_as_good_and_do_not_overflow() -> None:
    size: Any = np.int32(2**15)
    matmul = Matmul(m=size, k=size, n=size)
    assert matmul == Matmul(m=2**15, k=2**15, n=2**15) and matmul.flops == 2**46


def test_pieces_share_the_operand_that_is_not_cut() -> None:
    whole = Matmul(batch=2, m=64, k=32, n=16)
    assert dataclasses.replace(whole, m=8).stationary(whole) == "rhs"
    assert dataclasses.replace(whole, n=2).stationary(whole) == "lhs"
    assert dataclasses.replace(whole, k=4).stationary(whole) is None
    assert dataclasses.replace(whole, batch=1).stationary(whole) is None
    assert dataclasses.replace(whole, m=8, n=2).stationary(whole) is None
    assert (whole.lhs_bytes, whole.rhs_bytes) == (2 * 64 * 32 * 2, 2 * 32 * 16 * 2)


@given(_SIZES, _SIZES, _SIZES, st.integers(0, 1 << 12), _HARDWARE)
def test_a_larger_matmul_is_never_faster(m: int, k: int, n: int, more: int, hardware: Hardware) -> None:
    matmul = Matmul(m=m, k=k, n=n)
    for dim in ("m", "k", "n"):
        larger = dataclasses.replace(matmul, **{dim: getattr(matmul, dim) + more})
        assert matmul_s(larger, hardware) >= matmul_s(matmul, hardware)


@given(_SIZES, _SIZES, _SIZES, _HARDWARE)
def test_two_halves_take_longer_than_the_whole(m: int, k: int, n: int, hardware: Hardware) -> None:
    matmul = Matmul(m=m, k=k, n=n)
    half = dataclasses.replace(matmul, m=math.ceil(m / 2))
    assert 2 * matmul_s(half, hardware) > matmul_s(matmul, hardware)
