"""Whole numbers as callers give them: an int, or what Python takes for one, such as numpy's."""

from __future__ import annotations

import operator
from typing import Any


def whole(value: Any, what: str) -> int:
    """The number as an int.

    Args:
      value: what a caller gives.
      what: how an error calls it.

    Raises:
      TypeError: it is no whole number: a float, even 2.0, NaN, a text, None.
      ValueError: it has more than 63 bits, more than anything there is to count.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be a whole number, got {value!r}") from None
    if number.bit_length() > 63:
        raise ValueError(f"{what} must be below 2**63, got a number of {number.bit_length()} bits")
    return number
