"""Compiler options that have collectives run beside the dots by themselves: see `Hardware.offloaded`.

On TPU7x the SparseCores run them by default. On v5p and v6e they do where the compiler is told so; on v4 it
then makes all_gathers asynchronous, and on v5e all_reduces a part of the dots beside them, as all_gathers are
by default (libtpu 0.0.42 and 0.0.50). Without, these are waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cost_model.hardware import OFFLOADABLE, Hardware


def offload_options(hardware: Hardware) -> dict[str, str]:
    """The compiler options that offload all collectives that can be.

    None where the compiler offloads them anyway, or knows no such options.
    """
    return {option: "true" for each, option in hardware.offload_options if each not in hardware.offloaded}


def compiled_with(hardware: Hardware, options: Mapping[str, Any]) -> Hardware:
    """The hardware as programs compiled with these options find it.

    A collective is offloaded where all its options are set, and not where one is turned off; where some are
    given, or none, it is as by default.

    Args:
      hardware: by default.
      options: names and values of compiler options, of ``jax.jit`` for example; all others are ignored.
    """
    offloaded = tuple(each for each in OFFLOADABLE if _is_offloaded(each, hardware, options))
    if set(offloaded) == set(hardware.offloaded):
        return hardware
    return dataclasses.replace(hardware, offloaded=offloaded)


def _is_offloaded(collective: str, hardware: Hardware, options: Mapping[str, Any]) -> bool:
    by_default = collective in hardware.offloaded
    known = [option for each, option in hardware.offload_options if each == collective]
    return all(_is_true(options.get(option, by_default)) for option in known) if known else by_default


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1")
