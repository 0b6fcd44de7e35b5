"""Timelines as Trace Event JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from overlap.exposure import COMPUTE, gaps, streams
from overlap.hlo.timeline import Event, Timeline
from overlap.timeline_table import machine

if TYPE_CHECKING:
    from overlap.inspection import Inspection


def trace_events(inspections: Sequence[Inspection]) -> dict[str, Any]:
    """The trace of some programs, as the object to write as JSON.

    A program is a process; a stream is a thread, or several where its transfers overlap, so that no two
    events of a thread do. Times are microseconds, to the nanosecond. Format: Trace Event Format, Google,
    "JSON Object Format", with complete (``X``) and metadata (``M``) events.
    """
    programs = [program for inspection in inspections for program in inspection.titled]
    events = [event for pid, program in enumerate(programs, 1) for event in _program(pid, *program)]
    notes = dict.fromkeys(text for _, timeline in programs for text in timeline.assumptions)
    return {
        "displayTimeUnit": "ns",
        "otherData": {"times": "modelled, not measured", "assumptions": "\n".join(notes)},
        "traceEvents": events,
    }


def to_json(inspections: Sequence[Inspection]) -> str:
    """What to write into a file for Perfetto."""
    return json.dumps(trace_events(inspections), separators=(",", ":"), allow_nan=False)


def _program(pid: int, title: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _metadata(pid, 0, "process_name", name=f"{title}, modelled for {machine(timeline)}")
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    tid = 0
    for stream, lanes in streams(timeline).items():
        for lane, events in enumerate(lanes, 1):
            tid += 1
            yield from _thread(pid, tid, stream if lane == 1 else f"{stream} ({lane})")
            for event in events:
                yield _bar(pid, tid, event)
        if stream == COMPUTE:
            tid += 1
            yield from _thread(pid, tid, "exposed waits")
            for gap in gaps(timeline):
                arguments = {"on the way": ", ".join(gap.collectives)}
                if gap.repeats != 1:
                    arguments["runs in all"] = str(gap.repeats)
                yield _complete(pid, tid, gap.kind, "gap", gap.start_s, gap.end_s, arguments)


def _thread(pid: int, tid: int, name: str) -> Iterator[dict[str, Any]]:
    yield _metadata(pid, tid, "thread_name", name=name)
    yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)


def _metadata(pid: int, tid: int, what: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments}


def _bar(pid: int, tid: int, event: Event) -> dict[str, Any]:
    arguments = {"opcode": event.opcode, "operation": event.op_name, "source": event.source}
    if event.repeats != 1:
        arguments["runs"] = str(event.repeats)
    return _complete(pid, tid, event.name, event.kind, event.start_s, event.end_s, arguments)


def _complete(
    pid: int, tid: int, name: str, category: str, start_s: float, end_s: float, arguments: dict[str, str]
) -> dict[str, Any]:
    # Both ends are rounded, not the duration: what follows in a thread must not begin before this ends.
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": category,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": {what: said for what, said in arguments.items() if said},
    }
