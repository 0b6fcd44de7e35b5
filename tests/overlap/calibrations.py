"""A calibration of hardware that nobody measured, for tests that need its file."""

from __future__ import annotations

from cost_model import Calibration, Hardware


def calibration(hardware: Hardware) -> Calibration:
    """The hardware as if it had been measured."""
    return Calibration(
        hardware=hardware,
        device_kind=hardware.device_kinds[0],
        platform="tpu",
        devices=4,
        processes=1,
        jax_version="0.10.2",
        dtypes=("bfloat16",),
        measured=(),
        kept=(),
        spread=(),
        error=(),
    )
