"""What ``hardware=`` of the decorator means, for the devices of a mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cost_model
from cost_model import Calibration, Hardware
from cost_model.calibration import is_file_name
from cost_model.offload_options import compiled_with


@dataclass(frozen=True, slots=True)
class GivenHardware:
    """The hardware that was given, whatever the devices are, unless it was measured on another kind.

    Attributes:
      hardware: None for that of the devices.
      calibration: the one that the hardware was read from; None if it comes from elsewhere. Devices are not
        known before a program is traced, so it is then that they are compared.
      path: its file.
      compiler_options: those of the program, which say what collectives are offloaded.
    """

    hardware: Hardware | None
    calibration: Calibration | None = None
    path: str = ""
    compiler_options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, device_kind: str | None) -> Hardware | None:
        """The hardware of devices of this kind (None if not known); None if that is not known.

        Raises:
          OtherDevicesError: it was measured on devices of another kind.
        """
        if self.calibration is not None and device_kind is not None:
            self.calibration.check(device_kind, self.path)
        found = self.hardware
        if found is None and device_kind is not None:
            found = cost_model.from_device_kind(device_kind)
        return None if found is None else compiled_with(found, self.compiler_options)


def given_hardware(hardware: object) -> GivenHardware:
    """Reads the argument; see ``overlap_collectives``.

    Raises:
      ValueError: an unknown name, or a file of no use.
      OSError: the file cannot be read.
      TypeError: it is no hardware.
    """
    if isinstance(hardware, os.PathLike) or (isinstance(hardware, str) and is_file_name(hardware)):
        calibration = Calibration.read(hardware)
        return GivenHardware(calibration.hardware, calibration, os.fspath(hardware))
    if isinstance(hardware, str):
        return GivenHardware(cost_model.hardware_of(hardware))
    if hardware is None or isinstance(hardware, Hardware):
        return GivenHardware(hardware)
    raise TypeError(
        f"hardware must be None, a name, a path or a cost_model.Hardware, not {type(hardware).__name__}"
    )
