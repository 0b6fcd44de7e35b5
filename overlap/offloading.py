"""Asking the TPU compiler to run the collectives of a program beside its matmuls."""

from __future__ import annotations

import os
from collections.abc import Iterable

import jax

import cost_model
from cost_model import Hardware
from cost_model.offload_options import offload_options as options_of
from overlap.given_hardware import GivenHardware, given_hardware


def offload_options(hardware: str | os.PathLike[str] | Hardware | None = None) -> dict[str, str]:
    """Compiler options that have a TPU run collectives beside the matmuls, by themselves.

        jax.jit(train_step, compiler_options=overlap.offload_options())

    On v4, v5p and v6e the compiler waits for every collective but permutes unless it is told otherwise, and
    on v5e for all but permutes and all_gathers. With these options the SparseCores of v5p and v6e run
    all_gathers, all_reduces and reduce_scatters, v4's all_gathers are asynchronous, and v5e's matmuls run
    all_reduces. A decorated function is rewritten by what its options say. No options on other devices:
    TPU7x needs none, and the others know none.

    Args:
      hardware: as of the decorator; None for that of the attached devices, which starts jax's backend.

    Raises:
      ValueError, OSError, TypeError: it is no hardware, as of the decorator.
    """
    given = given_hardware(hardware)
    found = given(jax.devices()[0].device_kind if hardware is None else None)
    return {} if found is None else options_of(found)


def offload_hint(given: GivenHardware, device_kinds: Iterable[str | None]) -> str:
    """Tells of the options where a program has none of them, and its hardware has; else nothing.

    Args:
      given: what the function was decorated with, and its compiler options.
      device_kinds: of the devices of its meshes; None for one that is not known.
    """
    found = (given(kind) for kind in device_kinds)
    chips = {hardware.name: options_of(hardware) for hardware in found if hardware is not None}
    named = sorted(
        name
        for name, options in chips.items()
        if options and not options.keys() & given.compiler_options.keys()
    )
    if not named:
        return ""
    told = f'"{named[0]}"' if named[0] in cost_model.names() else "hardware"
    return (
        f"On {' and '.join(named)} collectives, kept ones too, can also run beside matmuls by themselves, if "
        f"the compiler is told so: jax.jit(…, compiler_options=overlap.offload_options({told})). Other sites "
        "are rewritten then. Time both."
    )
