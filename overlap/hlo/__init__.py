"""Compiled programs as data: reads an HLO dump, and times the schedule that the compiler chose."""

from overlap.hlo.loops import trip_count
from overlap.hlo.module import Computation, Instruction, Module, Shape
from overlap.hlo.parse import ParseError, parse
from overlap.hlo.simulate import simulate
from overlap.hlo.timeline import CollectiveTime, Event, Timeline

__all__ = [
    "CollectiveTime",
    "Computation",
    "Event",
    "Instruction",
    "Module",
    "ParseError",
    "Shape",
    "Timeline",
    "parse",
    "simulate",
    "trip_count",
]
