"""Element types by name: their kind and their width, without importing JAX or ml_dtypes."""

import functools
import re
from typing import Final, Literal

Kind = Literal["float", "int", "complex", "bool"]

_NAME: Final = re.compile(r"(?P<kind>b?float|u?int|complex)(?P<bits>\d+)(?P<format>_\w+)?")
_KINDS: Final[dict[str, tuple[Kind, tuple[int, ...]]]] = {
    "float": ("float", (4, 6, 8, 16, 32, 64)),
    "bfloat": ("float", (16,)),
    "int": ("int", (1, 2, 4, 8, 16, 32, 64)),
    "uint": ("int", (1, 2, 4, 8, 16, 32, 64)),
    "complex": ("complex", (64, 128)),
}
"""Kind and widths in bits, by what a name begins with."""

_SHORT: Final = re.compile(r"(bf|fp|f|i|s|u|c)(\d+)")
_LONG: Final = {
    "bf": "bfloat",
    "fp": "float",
    "f": "float",
    "i": "int",
    "s": "int",
    "u": "uint",
    "c": "complex",
}
"""What names are that others write shorter, HLO for one."""

KNOWN: Final = ", ".join(
    ("bool", *(f"{name}{'/'.join(map(str, widths))}" for name, (_, widths) in _KINDS.items()))
)
"""The names there are, in words."""


@functools.cache
def parse_dtype(dtype: str) -> tuple[Kind, int]:
    """Kind and width in bits of a dtype as JAX names it: `("float", 8)` for `"float8_e4m3fn"`.

    Raises:
      ValueError: the name is not that of a numeric dtype or of bool.
      TypeError: it is no text.
    """
    if not isinstance(dtype, str):
        raise TypeError(f"a dtype is given by its name, such as 'bfloat16', got {dtype!r}")
    if dtype == "bool":
        return "bool", 8
    if match := _NAME.fullmatch(dtype):
        (kind, widths), bits = _KINDS[match["kind"]], int(match["bits"])
        # Floats of a byte or less come in several formats, such as float8_e4m3fn.
        if bits in widths and (match["format"] is None or (match["kind"] == "float" and bits <= 8)):
            return kind, bits
    meant = ";"
    if (short := _SHORT.fullmatch(dtype)) and int(short[2]) in _KINDS[_LONG[short[1]]][1]:
        meant = f", did you mean '{_LONG[short[1]]}{short[2]}'?"
    raise ValueError(f"unknown dtype {dtype!r}{meant} known: {KNOWN} (and formats such as float8_e4m3fn)")


def dtype_bytes(dtype: str) -> float:
    """Bytes per element, packed: 2 for `"bfloat16"`, 0.5 for `"int4"`. Raises as `parse_dtype`."""
    return parse_dtype(dtype)[1] / 8
