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
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be a whole number, got {value!r}") from None
