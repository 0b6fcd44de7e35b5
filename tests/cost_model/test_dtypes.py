"""Element types by name."""

import re
from typing import Any

import ml_dtypes
import pytest

from cost_model.dtypes import dtype_bytes, parse_dtype


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bfloat16", 2), ("float32", 4), ("float8_e4m3fn", 1), ("int4", 0.5), ("bool", 1), ("complex64", 8)],
)
def test_a_dtype_name_tells_its_size(dtype: str, size: float) -> None:
    assert dtype_bytes(dtype) == size


def test_bfloat16_is_a_float() -> None:
    assert parse_dtype("bfloat16") == ("float", 16)


@pytest.mark.parametrize(
    "dtype",
    [
        "",
        "float",
        "key<fry>",
        "16",
        "bfloat16 ",
        "float99",
        "float128",
        "bfloat8",
        "int3",
        "float32_e8",
        "bf16",
    ],
)
def test_what_is_not_a_dtype_name_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=r"unknown dtype .*[;?] known: .*bfloat16, int1/2/4/8/16/32/64, "):
        dtype_bytes(dtype)


@pytest.mark.parametrize(
    ("short", "long"),
    [("bf16", "bfloat16"), ("f32", "float32"), ("fp8", "float8"), ("s8", "int8"), ("bf32", "")],
)
def test_what_others_write_shorter_is_guessed(short: str, long: str) -> None:
    meant = f", did you mean '{long}'?" if long else ";"
    with pytest.raises(ValueError, match=re.escape(f"unknown dtype {short!r}{meant} known: ")):
        dtype_bytes(short)


@pytest.mark.parametrize("dtype", [None, 16, float])
def test_a_dtype_is_given_by_its_name(dtype: Any) -> None:
    with pytest.raises(TypeError, match="a dtype is given by its name, such as 'bfloat16', got"):
        dtype_bytes(dtype)


def test_every_numeric_type_of_jax_s_is_known() -> None:
    names = [name for name in dir(ml_dtypes) if re.match(r"(bfloat|float|u?int)\d", name)]
    for name in [*names, "float16", "float32", "float64", "complex64", "complex128", "uint64"]:
        assert dtype_bytes(name) > 0
