"""Tests that need the TPU compiler, and are skipped where there is none."""

from __future__ import annotations

import pytest

from overlap import tpu_target

needs_libtpu = pytest.mark.skipif(tpu_target.missing() is not None, reason=str(tpu_target.missing()))
