"""Hides communication behind matrix multiplication in JAX programs."""

import importlib
from typing import TYPE_CHECKING, Any

from overlap.parts import check_parts

check_parts()

from overlap.decorator import Overlapped, overlap_collectives  # noqa: E402
from overlap.report import Report  # noqa: E402
from passes import Site  # noqa: E402

if TYPE_CHECKING:
    from overlap import hlo as hlo
    from overlap import tpu_target as tpu_target
    from overlap.ab_profiling import ab_profile
    from overlap.ab_report import ABReport
    from overlap.calibration import calibrate
    from overlap.inspection import Inspection, inspect
    from overlap.offloading import offload_options

__version__ = "0.1.0"

__all__ = [
    "ABReport",
    "Inspection",
    "Overlapped",
    "Report",
    "Site",
    "ab_profile",
    "calibrate",
    "inspect",
    "offload_options",
    "overlap_collectives",
]

_TOOLS = {
    "ABReport": "ab_report",
    "Inspection": "inspection",
    "ab_profile": "ab_profiling",
    "ab_report": "ab_report",
    "calibrate": "calibration",
    "calibration": "calibration",
    "hlo": "hlo",
    "inspect": "inspection",
    "inspection": "inspection",
    "offload_options": "offloading",
    "offloading": "offloading",
    "tpu_target": "tpu_target",
}
"""What a decorated function does without, and the module that it is in, or is: imported when asked for."""


def __getattr__(name: str) -> Any:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_TOOLS[name]}")
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
