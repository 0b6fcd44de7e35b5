"""Hides communication behind matrix multiplication in JAX programs."""

from overlap.decorator import Overlapped, overlap_collectives
from overlap.report import Report
from passes import Site

__version__ = "0.1.0"

__all__ = ["Overlapped", "Report", "Site", "overlap_collectives"]
