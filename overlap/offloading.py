"""Asking the TPU compiler to run the collectives of a program beside its matmuls."""

from __future__ import annotations

import os

import jax

from cost_model import Hardware
from cost_model.offload_options import offload_options as options_of
from overlap.given_hardware import given_hardware


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
