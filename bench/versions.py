"""What a page was made with, as every benchmark says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def spelled(versions: Mapping[str, Any]) -> str:
    """The names with their versions, such as ``"python 3.12.1, jax 0.12.0.1"``."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())
