"""Compiling for TPUs in a process of its own, which sees CPUs only, and what is in what it makes."""

from __future__ import annotations

from typing import Any

from overlap import tpu_target
from overlap.hlo import Module
from tests.passes import script


def told_by(text: str, *arguments: str) -> Any:
    """What a script that compiles for TPUs prints as its last line, which is JSON."""
    return script.told_by(text, *arguments, environment=tpu_target.ENVIRONMENT)


def multiplies(module: Module, name: str) -> bool:
    """Whether a computation multiplies matrices."""
    computation = module.computation(name)
    return any(
        i.opcode in ("convolution", "dot") or any(multiplies(module, inner) for inner in i.calls)
        for i in computation.instructions
    )
