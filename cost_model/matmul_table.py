"""What each TPU's compiler believes of its matrix unit and its memory: tables read from files.

From them `cost_model.windows` finds how long the compiler takes a matmul to be. The numbers are its own, of
its log (`bench/matmul_tables.py`), and they are beliefs: on every TPU it takes a bfloat16 result to leave at
a third of the rate of a float32 one, which is that of reading.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Final, Literal

from cost_model.chips import by_name
from cost_model.dtypes import parse_dtype
from cost_model.hardware import Hardware
from cost_model.typed import loads
from cost_model.windows import Rates, Unit

SCHEMA: Final = 5
"""Version of the files in `cost_model/tables`."""

FOLDER: Final = Path(__file__).with_name("tables")
CHIPS: Final = ("tpu_v4 core", "tpu_v5e", "tpu_v5p", "tpu_v6e", "tpu_7x")
"""Hardware with a table. A whole TPU v4 is taken as two cores that share the work."""

Kind = Literal["int8", "bfloat16", "float32"]
"""What the matrix unit computes in."""


def read(text: str) -> Rates:
    """The rates in the text of a file that `bench/matmul_tables.py` wrote.

    Raises:
      ValueError: the text is no JSON object, has another schema, or a rate is missing or impossible.
    """
    content: Any = loads(text)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f'a matmul table is a JSON object with "schema": {SCHEMA}')
    rates = content.get("rates")
    if not isinstance(rates, dict) or not isinstance(rates.get("units"), dict):
        raise ValueError('it has no "rates", or those have no "units"')
    units = {name: _unit(name, values) for name, values in rates["units"].items()}
    _check_names(rates, Rates, "its rates")
    return Rates(**{**rates, "units": units})


def _unit(name: str, values: Any) -> Unit:
    _check_names(values, Unit, f"the rates of {name}")
    registers = values["register_cycles"]
    if not isinstance(registers, list) or len(registers) != 3:
        raise ValueError(f"register_cycles of {name} must be three numbers, got {registers!r}")
    return Unit(**{**values, "register_cycles": tuple(registers)})


def _check_names(values: Any, of: type[Rates] | type[Unit], what: str) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{what} must be an object, got {values!r}")
    known = {field.name for field in dataclasses.fields(of)}
    if wrong := sorted(known ^ values.keys()):
        raise ValueError(f"{what} are incomplete or not known: {', '.join(wrong)}")


def table_of(hardware: Hardware) -> Rates | None:
    """The table of this hardware.

    None if it has none, or if its rates are not those of the chip of that name: measured or changed by hand,
    they say more than the compiler's beliefs.

    Raises:
      ValueError: the table's file is missing or damaged.
    """
    known = _known(hardware.name)
    if known is None:
        return None
    chip, table = known
    if hardware is not chip and (
        hardware.peak_flops != chip.peak_flops
        or hardware.hbm_bytes_per_s != chip.hbm_bytes_per_s
        or hardware.matmul_overhead_s != chip.matmul_overhead_s
        or hardware.matmul_efficiency != chip.matmul_efficiency
        or hardware.matmul_tile != chip.matmul_tile
    ):
        return None
    return table


def unit_of(dtype: str, hardware: Hardware) -> Kind | None:
    """What the matrix unit computes operands of this dtype in; None if it does not take them."""
    kind, bits = parse_dtype(dtype)
    if kind == "int":
        return "int8" if bits <= 8 else None
    if kind != "float" or bits > 32:
        return None
    if bits > 16:
        return "float32"
    narrow = bits <= 8 and hardware.flops_for(dtype) > hardware.flops_for("bfloat16")
    return "int8" if narrow else "bfloat16"


@functools.cache
def _known(name: str) -> tuple[Hardware, Rates] | None:
    whole_v4 = name == "tpu_v4"
    file_name = "tpu_v4 core" if whole_v4 else name
    if file_name not in CHIPS:
        return None
    path = FOLDER / f"{file_name.replace(' ', '_')}.json"
    try:
        table = read(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the table of matmul times of {file_name}, {path}, cannot be used: {error}. "
            "Reinstall overlap-collectives, or make it again: make bench-matmul"
        ) from error
    if whole_v4:
        return by_name(name), dataclasses.replace(table, clock_hz=2 * table.clock_hz)
    return (by_name("tpu_v4").per_core(2) if name == "tpu_v4 core" else by_name(name)), table
