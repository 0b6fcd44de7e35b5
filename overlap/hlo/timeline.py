"""When each instruction of a schedule runs: the timeline of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["matmul", "compute", "copy", "collective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One bar of the timeline.

    Attributes:
      name: of the instruction.
      opcode: of the instruction; for a fusion, what it does, where one operation dominates.
      kind: what it counts as.
      stream: "compute", "memory" (asynchronous copies), or the name of the link direction it occupies.
      start_s, end_s: from the start of the program.
      op_name, source: the traced operation and its ``file:line``; empty where the dump has none.
      repeats: how often a loop runs it; the bar is its first run, drawn at its place.
    """

    name: str
    opcode: str
    kind: Kind
    stream: str
    start_s: float
    end_s: float
    op_name: str = ""
    source: str = ""
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTime:
    """The modelled times of one collective instruction, an asynchronous one from its start to its done.

    Attributes:
      name, opcode: of the instruction (of the start, where it is a pair; the opcode without ``-start``).
      op_name, source: the traced operation and its ``file:line``.
      bytes_on_wire: bytes that one device sends, in all executions.
      executions: how often it runs.
      start_s, end_s: of the first execution: when it was issued and when its last byte arrived.
      wire_s: seconds that it occupies its links, in all executions.
      exposed_s: seconds in which compute waited for it, in all executions.
      hidden_s: seconds of it that ran beside compute, in all executions.
      overlapped_with: names of the instructions that ran beside it.
      next_to_dot: "feeds" or "follows" where a matmul directly (through copies, bitcasts and casts) consumes
        or produces what it moves; "" otherwise.
    """

    name: str
    opcode: str
    op_name: str
    source: str
    bytes_on_wire: int
    executions: int
    start_s: float
    end_s: float
    wire_s: float
    exposed_s: float
    hidden_s: float
    overlapped_with: tuple[str, ...] = ()
    next_to_dot: Literal["feeds", "follows", ""] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run of a module on one device: modelled, or as `overlap.ab_profile` measured it.

    Attributes:
      module: the module's name.
      hardware, topology: what it was timed for, or on, in words.
      total_s: from the first instruction to the last.
      compute_s: in which the compute stream was busy.
      exposed_s: in which it waited for collectives.
      copy_wait_s: in which it waited for asynchronous copies; the three make `total_s`.
      collectives: in order of start.
      events: the bars of all streams, by start.
      peak_in_flight: most permutes (of any asynchronous kind) in flight at once.
      assumptions: what the times rest on, in sentences.
    """

    module: str
    hardware: str
    topology: str
    total_s: float
    compute_s: float
    exposed_s: float
    collectives: tuple[CollectiveTime, ...]
    events: tuple[Event, ...]
    peak_in_flight: int
    assumptions: tuple[str, ...]
    copy_wait_s: float = 0.0
