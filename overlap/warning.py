"""Warnings that point at the user's own line."""

from __future__ import annotations

import inspect
import warnings

from passes import shims


class OverlapWarning(RuntimeWarning):
    """What the library tells a user; as an error it is the user's, and no fault of the pass."""


def warn(message: str) -> None:
    """Warns, as of the innermost line that is neither of this library, nor of jax or Python."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and not shims.is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, OverlapWarning, stacklevel=level if frame is not None else 2)
