"""Element types by name."""

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


@pytest.mark.parametrize("dtype", ["", "float", "key<fry>", "16", "bfloat16 "])
def test_what_is_not_a_dtype_name_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        dtype_bytes(dtype)
