"""The chip that a program's values are on, as far as the cost model knows it."""

from __future__ import annotations

from typing import Any

from cost_model import Hardware, from_device_kind
from passes import shims


def chip_of(aval: Any) -> Hardware | None:
    """The hardware of the mesh in a value's type; None where it is unknown, or the mesh has no devices."""
    return from_device_kind(shims.device_kind(aval) or "")
