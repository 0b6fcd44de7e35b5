"""Values as JSON gives them, checked against the types that dataclasses declare."""

import json
import numbers
import reprlib
from typing import Any, Final, Literal, get_args, get_origin

_NAMES: Final[dict[Any, str]] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}


_NUMBERS: Final[dict[Any, Any]] = {float: numbers.Real, int: numbers.Integral}
"""As numpy's are, and not only Python's own."""


def loads(text: str) -> Any:
    """What the JSON says.

    Raises:
      ValueError: it is none, or nested too deep to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def typed(value: Any, of: Any, what: str) -> Any:
    """The value, lists as tuples, if it is of a type: of text, numbers and truth, and of tuples of them.

    A bool is an int to Python, and a text is a sequence of texts; of a description of hardware neither is
    meant.

    Args:
      value: from JSON, or what a caller gives.
      of: the type as declared.
      what: how an error calls it.

    Raises:
      ValueError: it is of another type, or a number too large for a float.
    """
    if get_origin(of) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{what} must be a list, got {reprlib.repr(value)}")
        kinds = get_args(of)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        if len(kinds) != len(value):
            raise ValueError(f"{what} must be a list of {len(kinds)}, got {reprlib.repr(value)}")
        parts = enumerate(zip(value, kinds, strict=True))
        return tuple(typed(part, kind, f"{what}[{i}]") for i, (part, kind) in parts)
    kind = str if get_origin(of) is Literal else of
    right = isinstance(value, _NUMBERS.get(kind, kind))
    if not right or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{what} must be {_NAMES[kind]}, got {reprlib.repr(value)}")
    if kind in (int, float):
        try:
            as_float = float(value)
        except OverflowError:
            raise ValueError(f"{what} is too large, got {reprlib.repr(value)}") from None
        if kind is float:
            return value if isinstance(value, int | float) else as_float
    return int(value) if kind is int else value
