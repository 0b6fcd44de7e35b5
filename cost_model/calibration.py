"""A calibration: hardware as measured, with where and how well; its file, and what is refused in one.

calibration = Calibration.read("calibration.json", device_kind=jax.devices()[0].device_kind)
overlap_collectives(step, hardware=calibration.hardware)
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

from cost_model.chips import by_name, from_device_kind
from cost_model.dtypes import parse_dtype
from cost_model.hardware import Hardware
from cost_model.typed import loads, typed

KIND: Final = "overlap-collectives calibration"
SCHEMA: Final = 1
"""Version of a calibration's JSON form."""


class OtherDevicesError(ValueError):
    """A calibration is of another kind of device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMeasured:
    """The links along one mesh axis.

    Attributes:
      size: devices on the axis.
      between: "ici", "switch", "network" (the data-centre network).
      latency_s: of the shortest message to a neighbour.
      bytes_per_s: one way.
      opposite_hops_overlap: whether hops in both directions took less than one and a half times one.
      overlaps: whether a hop beside a matmul was hidden by half at least.

    Raises:
      ValueError: a value is of another type.
    """

    size: int
    between: str
    latency_s: float
    bytes_per_s: float
    opposite_hops_overlap: bool
    overlaps: bool

    def __post_init__(self) -> None:
        for field, of in get_type_hints(type(self)).items():
            typed(getattr(self, field), of, f"{field} of an axis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Hardware as measured.

    Attributes:
      hardware: what the cost model takes.
      device_kind: of the devices, as JAX reports it.
      platform: JAX's, such as "gpu".
      devices, processes: how many took part.
      jax_version: that measured.
      dtypes: of the matmuls that were timed; the rates of others are derived from the first's.
      measured: the fields of `hardware` that were measured.
      kept: those that were not, where the chip's table (or, for a chip without one, a guess) has them.
      spread: per kind of measurement, the median over its times of their median absolute deviation, as a
        fraction: 0.01 is steady, above 0.2 the machine was busy with something else.
      error: per fit, the mean of |log(measured / fitted)|.
      axes: each mesh axis; none on a single device.

    Raises:
      ValueError: a value is impossible.
    """

    hardware: Hardware
    device_kind: str
    platform: str
    devices: int
    processes: int
    jax_version: str
    dtypes: tuple[str, ...]
    measured: tuple[str, ...]
    kept: tuple[str, ...]
    spread: tuple[tuple[str, float], ...]
    error: tuple[tuple[str, float], ...]
    axes: tuple[AxisMeasured, ...] = ()

    def __post_init__(self) -> None:
        for field, of in get_type_hints(type(self)).items():
            if field not in ("hardware", "axes", "spread", "error"):
                typed(getattr(self, field), of, field)
        for field in ("spread", "error"):
            for what, value in getattr(self, field):
                if not 0 <= typed(value, float, f"{field} of {what}") < math.inf:
                    raise ValueError(f"{field} of {what} must be finite and not negative, got {value!r}")
        for field in ("devices", "processes"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)!r}")
        for axis in self.axes:
            for what in ("size", "latency_s", "bytes_per_s"):
                if not 0 < getattr(axis, what) < math.inf:
                    raise ValueError(
                        f"{what} of an axis must be positive and finite, got {getattr(axis, what)!r}"
                    )
        for dtype in self.dtypes:
            parse_dtype(dtype)
        if not self.device_kind:
            raise ValueError("device_kind must name the devices that were measured")

    def to_json(self) -> str:
        """A JSON object that `from_json` reads back unchanged; it is the same in every process."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {
            "hardware": json.loads(self.hardware.to_json()),
            "spread": dict(self.spread),
            "error": dict(self.error),
            "axes": [dataclasses.asdict(axis) for axis in self.axes],
        }
        return json.dumps({"kind": KIND, "schema": SCHEMA, **fields}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: it is no calibration, of another schema, incomplete, or has a value that is impossible;
            the message says which.
        """
        try:
            fields: Any = loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is no JSON ({error})") from error
        if not isinstance(fields, dict) or fields.pop("kind", None) != KIND:
            raise ValueError(f'it is no calibration: a JSON object with "kind": "{KIND}"')
        if (schema := fields.pop("schema", None)) != SCHEMA or isinstance(schema, bool):
            raise ValueError(f"its schema is {schema!r}, and this version reads {SCHEMA}")
        known = {field.name for field in dataclasses.fields(cls)}
        if fields.keys() != known:
            missing, unknown = sorted(known - fields.keys()), sorted(fields.keys() - known)
            raise ValueError(
                f"its fields are not those of a calibration: missing {missing}, unknown {unknown}"
            )
        try:
            hardware = Hardware.from_fields(fields.pop("hardware"))
            if not isinstance(measured := fields.pop("axes"), list):
                raise ValueError(f"axes must be a list, got {measured!r}")
            axes = tuple(AxisMeasured(**axis) for axis in measured)
            fields |= {name: tuple(fields[name].items()) for name in ("spread", "error")}
            types = get_type_hints(cls)
            fields |= {
                name: typed(fields[name], types[name], name) for name in ("dtypes", "measured", "kept")
            }
            return cls(hardware=hardware, axes=axes, **fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"a field has a value of the wrong type ({error})") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str], device_kind: str | None = None) -> Calibration:
        """Reads a file that `write` wrote.

        Args:
          path: the file.
          device_kind: what the devices must be, as JAX reports it; None accepts any, as for a program that
            is compiled here to run elsewhere.

        Raises:
          ValueError: the file is none, or (`OtherDevicesError`) of another kind of device; the message says
            what to do.
          OSError: it cannot be read; the message is a sentence.
        """
        try:
            found = cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            # A subclass such as FileNotFoundError stays one.
            raise type(error)(f"{path} cannot be read as hardware: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(
                f"{path} cannot be used as hardware: {error}. {_AGAIN.format(path=path)}"
            ) from error
        if device_kind is not None:
            found.check(device_kind, path)
        return found

    def check(self, device_kind: str, path: str | os.PathLike[str]) -> None:
        """Refuses devices of another kind than those that were measured.

        Args:
          device_kind: as JAX reports it.
          path: the calibration's file, for the message.

        Raises:
          OtherDevicesError: they are of another kind; the message says what to do.
        """
        if not _alike(self.device_kind, device_kind):
            raise OtherDevicesError(
                f"{path} was measured on {self.device_kind!r}, and the devices here are {device_kind!r}. "
                + _AGAIN.format(path=path)
            )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON to a file, as a whole or not at all."""
        target = Path(path)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            beside.write_text(self.to_json() + "\n", encoding="utf-8")
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)


SUFFIX: Final = ".json"
"""How the name of a calibration's file ends, in letters of either case."""


def is_file_name(name: str) -> bool:
    """Whether a text given as hardware is the path of a calibration, not the name of a chip."""
    return name.lower().endswith(SUFFIX)


def hardware_of(name: str | os.PathLike[str], device_kind: str | None = None) -> Hardware:
    """The hardware of a name, or of a calibration's file: a path, or a text that ends in `.json`.

    Args:
      name: such as "tpu_v5p", "TPU v5 lite" (as JAX names the devices), or "calibration.json".
      device_kind: see `Calibration.read`.

    Raises:
      ValueError: the name is unknown, or the file of no use; the message says why.
      OSError: the file cannot be read.
    """
    if not isinstance(name, str) or is_file_name(name):
        return Calibration.read(name, device_kind).hardware
    try:
        return from_device_kind(name) or by_name(name)
    except ValueError as error:
        raise ValueError(f"{error}; or a file that calibrate wrote, whose name ends in .json") from None


_AGAIN: Final = "Measure again, on the devices in question: python -m overlap calibrate --out {path}"


def measured_hardware(
    base: Hardware,
    *,
    flops: Sequence[tuple[str, float]],
    **fields: Any,
) -> Hardware:
    """A chip's table with measured values in place of its own.

    Only the product of peak and efficiency can be measured. The efficiency stays what the first dtype reaches
    of its listed peak (1 where it exceeds it) and each measured dtype's peak is its rate over that; the peaks
    of dtypes that were not measured keep their ratio to the first's.

    Args:
      base: the table.
      flops: (dtype, FLOP/s reached), the most important first.
      **fields: other fields of `Hardware`, as measured.
    """
    first, reached = flops[0]
    listed = base.flops_for(first)
    efficiency = min(1.0, reached / listed)
    peaks = {dtype: rate * (reached / efficiency) / listed for dtype, rate in base.peak_flops}
    peaks |= {dtype: rate / efficiency for dtype, rate in flops}
    return dataclasses.replace(base, peak_flops=tuple(peaks.items()), matmul_efficiency=efficiency, **fields)


def base_hardware(device_kind: str, platform: str) -> Hardware:
    """The table of a chip to start from; for a chip without one a guess of its kind, under its own name.

    Args:
      device_kind: as JAX reports it.
      platform: as JAX reports it: "cpu", "gpu", "cuda", "rocm" or "tpu".

    Raises:
      ValueError: a platform that is none of these.
    """
    if (known := from_device_kind(device_kind)) is not None:
        return known
    like = {
        "cpu": "cpu",
        "gpu": "NVIDIA H200",
        "cuda": "NVIDIA H200",
        "rocm": "NVIDIA H200",
        "tpu": "TPU v5p",
    }
    if platform not in like:
        raise ValueError(f"the cost model has no table for {device_kind!r} of platform {platform!r}")
    base = from_device_kind(like[platform])
    assert base is not None
    name = "".join(c if c.isalnum() else "_" for c in device_kind.lower()).strip("_")
    return dataclasses.replace(base, name=name or platform, device_kinds=(device_kind,))


def _alike(one: str, other: str) -> bool:
    """Whether two device kinds are one chip: JAX has had several names for some."""
    known = from_device_kind(one), from_device_kind(other)
    return one == other or (known[0] is not None and known[0] == known[1])
