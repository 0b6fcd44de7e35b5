"""Hides communication behind matrix multiplication in JAX programs."""

from overlap.ab_profile import ab_profile
from overlap.ab_report import ABReport
from overlap.calibration import calibrate
from overlap.decorator import Overlapped, overlap_collectives
from overlap.inspection import Inspection, inspect
from overlap.report import Report
from passes import Site

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
    "overlap_collectives",
]
