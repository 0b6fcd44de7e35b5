"""Element types by name: their kind and their width, without importing JAX or ml_dtypes."""

import functools
import re
from typing import Literal

Kind = Literal["float", "int", "complex", "bool"]

_NAME = re.compile(r"(?P<kind>b?float|u?int|complex)(?P<bits>\d+)(_\w+)?")
_KINDS: dict[str, Kind] = {
    "float": "float",
    "bfloat": "float",
    "int": "int",
    "uint": "int",
    "complex": "complex",
}


@functools.cache
def parse_dtype(dtype: str) -> tuple[Kind, int]:
    """Kind and width in bits of a dtype as JAX names it: `("float", 8)` for `"float8_e4m3fn"`.

    Raises:
      ValueError: the name is not that of a numeric dtype or of bool.
    """
    if dtype == "bool":
        return "bool", 8
    if match := _NAME.fullmatch(dtype):
        return _KINDS[match["kind"]], int(match["bits"])
    raise ValueError(f"unknown dtype {dtype!r}: expected a name such as 'bfloat16' or 'int8'")


def dtype_bytes(dtype: str) -> float:
    """Bytes per element, packed: 2 for `"bfloat16"`, 0.5 for `"int4"`. Raises ValueError as `parse_dtype`."""
    return parse_dtype(dtype)[1] / 8
