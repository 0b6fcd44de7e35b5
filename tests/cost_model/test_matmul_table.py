"""Matmul times on TPU: true to the compiler on shapes no table was made from; tables refused if damaged."""

import functools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from cost_model import Hardware, Matmul, by_name, matmul_s, matmul_table
from cost_model.matmul_table import CHIPS, FOLDER, read, table_of, unit_of
from cost_model.windows import Rates

UNSEEN = Path(__file__).with_name("matmul_unseen.json")

MEDIAN = 0.005
P95 = 0.12


def _hardware(chip: str) -> Hardware:
    return by_name("tpu_v4").per_core(2) if chip == "tpu_v4 core" else by_name(chip)


@functools.cache
def _unseen() -> dict[str, list[list[Any]]]:
    found: dict[str, list[list[Any]]] = json.loads(UNSEEN.read_text("utf-8"))
    return found


def _errors(chip: str) -> list[float]:
    """Relative errors on random shapes: see bench/matmul_samples.py."""
    hardware = _hardware(chip)
    errors = []
    for batch, m, k, n, dtype, out_dtype, lhs, rhs, result, added, width, cycles, kind in _unseen()[chip]:
        placed = kind == "placed"
        seconds = matmul_s(
            Matmul(batch=batch, m=m, k=k, n=n, dtype=dtype, out_dtype=out_dtype),
            hardware,
            lhs_on_chip=lhs != 0,
            rhs_on_chip=rhs != 0,
            result_on_chip=result != 0,
            accumulator={0: None, 2: "bfloat16", 4: "float32"}[width],
            accumulator_on_chip=bool(added),
            placed="rows" if placed else None,
        )
        errors.append(abs(seconds * hardware.clock_hz / cycles - 1))
    return errors


@pytest.mark.parametrize("chip", CHIPS)
def test_unseen_shapes_take_what_the_compiler_estimates(chip: str) -> None:
    errors = sorted(_errors(chip))
    assert statistics.median(errors) <= MEDIAN
    assert errors[math.ceil(0.95 * len(errors)) - 1] <= P95


@pytest.mark.parametrize("chip", CHIPS)
def test_a_table_tells_where_it_comes_from(chip: str) -> None:
    content = json.loads((FOLDER / f"{chip.replace(' ', '_')}.json").read_text("utf-8"))
    assert content["chip"] == chip
    assert content["rates"]["clock_hz"] == _hardware(chip).clock_hz
    assert set(content["made"]["versions"]) == {"jax", "jaxlib", "libtpu"}


# Estimated cycles of steps of rings on v5e, at 1.5 GHz: compiled by bench/matmul_samples.py.
@pytest.mark.parametrize(
    ("where", "out_dtype", "cycles"),
    [
        ({"lhs_on_chip": True, "rhs_on_chip": True, "placed": "rows"}, "bfloat16", 38215),
        ({"rhs_on_chip": True, "placed": "rows"}, "bfloat16", 41656),
        (
            {
                "lhs_on_chip": True,
                "rhs_on_chip": True,
                "accumulator": "bfloat16",
                "accumulator_on_chip": True,
            },
            "bfloat16",
            38215,
        ),
        (
            {
                "lhs_on_chip": True,
                "rhs_on_chip": True,
                "accumulator": "float32",
                "accumulator_on_chip": True,
                "result_on_chip": True,
            },
            "float32",
            33024,
        ),
        ({"rhs_on_chip": True, "accumulator": "float32", "result_on_chip": True}, "float32", 40590),
    ],
    ids=["placed", "placed, rows in HBM", "scattered", "summed in VMEM", "summed from HBM"],
)
def test_the_steps_of_rings_take_what_the_compiler_estimates(where: Any, out_dtype: str, cycles: int) -> None:
    step = Matmul(m=512, k=2048, n=2048, out_dtype=out_dtype)
    assert matmul_s(step, by_name("tpu_v5e"), **where) * 1.5e9 == pytest.approx(cycles, rel=0.01)


@pytest.mark.parametrize(
    ("chip", "m", "k", "n", "cycles"),
    [
        # K stays whole: strips of 1024 columns of the weight, beside which 528 rows at a time are read.
        ("tpu_v6e", 65536, 3072, 20480, 25_741_000),
        ("tpu_v5p", 87856, 3328, 25984, 71_116_000),
        # K is cut into 4 parts: every fourth leaves a tile of 1528 rows and 1280 columns.
        ("tpu_v6e", 131072, 4096, 16384, 54_985_824),
        ("tpu_v5e", 131072, 4096, 16384, 164_884_000),
        ("tpu_v6e", 131072, 8192, 16384, 93_732_000),
    ],
)
def test_large_matmuls_take_what_the_compiler_estimates(
    chip: str, m: int, k: int, n: int, cycles: float
) -> None:
    """Both operands are in main memory."""
    hardware = _hardware(chip)
    assert hardware.clock_hz is not None
    found = matmul_s(Matmul(m=m, k=k, n=n), hardware) * hardware.clock_hz
    assert found == pytest.approx(cycles, rel=0.002)


def test_a_whole_v4_works_as_two_cores_do() -> None:
    v4, matmul = by_name("tpu_v4"), Matmul(m=8192, k=8192, n=8192)
    assert matmul_s(matmul, v4) == pytest.approx(matmul_s(matmul, v4.per_core(2)) / 2, rel=0.02)


def test_other_hardware_has_no_table() -> None:
    assert table_of(by_name("h100")) is None
    assert table_of(by_name("cpu")) is None


@pytest.mark.parametrize(
    ("dtype", "chip", "unit"),
    [
        ("bfloat16", "tpu_v5e", "bfloat16"),
        ("float16", "tpu_v5e", "bfloat16"),
        ("float32", "tpu_v5e", "float32"),
        ("int8", "tpu_v5e", "int8"),
        ("float8_e4m3fn", "tpu_v5e", "bfloat16"),
        ("float8_e4m3fn", "tpu_7x", "int8"),
        ("float64", "tpu_v5e", None),
        ("int32", "tpu_v5e", None),
        ("complex64", "tpu_v5e", None),
    ],
)
def test_the_matrix_unit_computes_in_few_dtypes(dtype: str, chip: str, unit: str | None) -> None:
    assert unit_of(dtype, by_name(chip)) == unit


def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "tpu_v5e.json").read_text("utf-8"))
    return content


def test_a_table_is_read_as_it_is_written() -> None:
    table = read(json.dumps(_content()))
    assert isinstance(table, Rates)
    assert table.lanes == 128
    assert table == table_of(by_name("tpu_v5e"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 1}, "schema"),
        ({"rates": None}, "rates"),
        ({"rates": {"units": None}}, "units"),
        ({"rates": {"units": {}}}, "units"),
        ({"rates": {"bytes_per_cycle": 0}}, "bytes_per_cycle"),
        ({"rates": {"read_cycles": -1}}, "read_cycles"),
        ({"rates": {"vmem_bytes": math.nan}}, "vmem_bytes"),
        ({"rates": {"clock_hz": math.inf}}, "clock_hz"),
        ({"rates": {"write_cycles": "soon"}}, "write_cycles"),
        ({"rates": {"write_cycles": True}}, "write_cycles"),
        ({"unit": {"depth": 0}}, "depth"),
        ({"unit": {"least_rows": -8}}, "least_rows"),
        ({"unit": {"register_cycles": [1, 2]}}, "register_cycles"),
        ({"unit": {"register_cycles": 3}}, "register_cycles"),
        ({"unit": {"colour": 1}}, "colour"),
        ({"rates": {"lanes": 0}}, "lanes"),
        ({"rates": {"colour": 1}}, "colour"),
    ],
    ids=str,
)
def test_a_damaged_table_is_refused(change: dict[str, Any], said: str) -> None:
    content = _content()
    if isinstance(rates := change.get("rates"), dict):
        change = {"rates": {**content["rates"], **rates}}
    elif isinstance(unit := change.get("unit"), dict):
        units = content["rates"]["units"]
        units = {**units, "bfloat16": {**units["bfloat16"], **unit}}
        change = {"rates": {**content["rates"], "units": units}}
    with pytest.raises(ValueError, match=said):
        read(json.dumps({**content, **change}))


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 3, "rates": {'])
def test_half_a_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read(text)


def test_a_file_that_cannot_be_used_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_table, "FOLDER", tmp_path)
    (tmp_path / "tpu_v5e.json").write_text("{}")
    matmul_table._known.cache_clear()
    try:
        for chip in ("tpu_v5e", "tpu_v5p"):
            with pytest.raises(ValueError, match=rf"{chip}\.json, cannot be used.*make bench-matmul"):
                matmul_s(Matmul(m=8, k=8, n=8), by_name(chip))
    finally:
        matmul_table._known.cache_clear()
