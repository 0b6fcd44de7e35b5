"""Traces hold every bar once, in threads in which no two overlap, as Perfetto wants them."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from overlap.inspection import Inspection
from tests.overlap.timelines import collective, event, inspection, timeline


def written(inspected: Inspection, folder: Path) -> list[dict[str, Any]]:
    """The events of the trace file of an inspection."""
    events: list[dict[str, Any]] = json.loads(inspected.trace(folder / "trace.json").read_text())[
        "traceEvents"
    ]
    return events


def threads(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(process, thread) → its complete events."""
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            process = names[e["pid"], 0, "process_name"]["name"]
            thread = names[e["pid"], e["tid"], "thread_name"]["name"]
            found[process, thread].append(e)
    return found


def test_every_program_is_a_process_and_every_stream_a_thread(tmp_path: Path) -> None:
    found = threads(written(inspection(), tmp_path))
    before, after = (f"{label} (jit_f), modelled for tpu_v5p (2x2x1)" for label in ("before", "after"))
    assert {key: [e["name"] for e in events] for key, events in found.items()} == {
        (before, "compute"): ["fusion.1"],
        (before, "exposed waits"): ["exposed wait"],
        (before, "x+"): ["all-gather.3"],
        (before, "x-"): ["all-gather.3"],
        (after, "compute"): ["fusion.1", "fusion.2", "add.1"],
        (after, "exposed waits"): ["exposed wait"],
        (after, "memory"): ["copy.1"],
        (after, "x+"): ["permute.1", "permute.2"],
    }


def test_times_are_microseconds_and_arguments_tell_operation_and_source(tmp_path: Path) -> None:
    (add,) = (e for e in written(inspection(), tmp_path) if e["name"] == "add.1")
    assert (add["ts"], add["dur"], add["cat"]) == (50, 5, "compute")
    assert add["args"] == {
        "opcode": "compute",
        "operation": "jit(f)/add.1",
        "source": "/src/model.py:12",
        "runs": "3",
    }


def test_nothing_overlaps_within_a_thread_though_transfers_share_a_link(tmp_path: Path) -> None:
    # Thirds of nanoseconds: what touches must still touch when rounded.
    hops = [event(f"hop.{i}", "collective", "x+", i / 3000, (i + 2) / 3000) for i in range(300)]
    dots = [event(f"dot.{i}", "matmul", "compute", i / 3000, (i + 1) / 3000) for i in range(300)]
    permutes = [collective(f"hop.{i}", "collective-permute", i / 3000, (i + 2) / 3000, 0) for i in range(300)]
    found = threads(written(Inspection("f", (("", timeline(hops + dots, permutes, 0.101)),)), tmp_path))
    assert {thread for _, thread in found} == {"compute", "x+", "x+ (2)"}
    assert sum(len(events) for events in found.values()) == 600
    for events in found.values():
        events.sort(key=lambda e: (e["ts"], e["dur"]))
        for one, other in pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-9


def test_says_that_times_are_modelled_and_what_they_rest_on(tmp_path: Path) -> None:
    trace = json.loads(inspection().trace(tmp_path / "trace.json").read_text())
    assert trace["otherData"]["times"] == "modelled, not measured"
    assert "90 GB/s" in trace["otherData"]["assumptions"]


def test_times_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    endless = timeline([event("dot", "matmul", "compute", 0, float("inf"))], [], 1)
    with pytest.raises((ValueError, OverflowError)):
        Inspection("f", (("", endless),)).trace(tmp_path / "trace.json")
