"""Compiled programs as data: reads an HLO dump, and times the schedule that the compiler chose."""

from overlap.hlo.module import Computation, Instruction, Module, Shape

__all__ = ["Computation", "Instruction", "Module", "Shape"]
