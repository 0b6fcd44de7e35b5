"""Timelines made by hand, with round numbers, for tests of what shows them."""

from __future__ import annotations

from typing import Any

from overlap.hlo.timeline import CollectiveTime, Event, Kind, Timeline
from overlap.inspection import Inspection

US = 1e-6

ASSUMPTIONS = ("Links carry 90 GB/s each way.", "Matmuls take the compiler's estimated cycles at 1.75 GHz.")


def event(name: str, kind: Kind, stream: str, start_us: float, end_us: float, **others: Any) -> Event:
    """A bar, with its times in microseconds."""
    others = {"opcode": kind, "op_name": f"jit(f)/{name}", "source": "/src/model.py:12", **others}
    return Event(name=name, kind=kind, stream=stream, start_s=start_us * US, end_s=end_us * US, **others)


def collective(
    name: str, opcode: str, start_us: float, end_us: float, exposed_us: float, **others: Any
) -> Any:
    """A collective, with its times in microseconds, that occupies its links all the time."""
    wire_s = (end_us - start_us) * US
    fields: dict[str, Any] = {
        "op_name": f"jit(f)/shard_map/{opcode}",
        "source": "/src/model.py:7",
        "bytes_on_wire": 1536,
        "executions": 1,
        "wire_s": wire_s,
        "hidden_s": wire_s - exposed_us * US,
        **others,
    }
    return CollectiveTime(
        name=name,
        opcode=opcode,
        start_s=start_us * US,
        end_s=end_us * US,
        exposed_s=exposed_us * US,
        **fields,
    )


def timeline(events: Any, collectives: Any, total_us: float, **others: Any) -> Timeline:
    """A timeline whose totals are those of its parts."""
    fields: dict[str, Any] = {
        "module": "jit_f",
        "hardware": "tpu_v5p",
        "topology": "2x2x1",
        "compute_s": sum(e.end_s - e.start_s for e in events if e.stream == "compute"),
        "exposed_s": sum(c.exposed_s for c in collectives),
        "peak_in_flight": 2,
        "assumptions": ASSUMPTIONS,
        **others,
    }
    return Timeline(events=tuple(events), collectives=tuple(collectives), total_s=total_us * US, **fields)


def before() -> Timeline:
    """An all-gather of 60 µs on two links, and then a matmul of 40 µs."""
    return timeline(
        [
            event("all-gather.3", "collective", "x+", 0, 60, opcode="all-gather"),
            event("all-gather.3", "collective", "x-", 0, 60, opcode="all-gather"),
            event("fusion.1", "matmul", "compute", 60, 100),
        ],
        [collective("all-gather.3", "all-gather", 0, 60, 60, next_to_dot="feeds")],
        100,
        peak_in_flight=0,
    )


def after() -> Timeline:
    """A ring: two matmuls of 20 µs, a hop beside the first and the half of another exposed after it."""
    return timeline(
        [
            event("permute.1", "collective", "x+", 0, 20, opcode="collective-permute"),
            event("fusion.1", "matmul", "compute", 0, 20),
            event("permute.2", "collective", "x+", 20, 30, opcode="collective-permute"),
            event("copy.1", "copy", "memory", 20, 25),
            event("fusion.2", "matmul", "compute", 30, 50),
            event("add.1", "compute", "compute", 50, 55, repeats=3),
        ],
        [
            collective("permute.1", "collective-permute", 0, 20, 0, overlapped_with=("fusion.1",)),
            collective("permute.2", "collective-permute", 20, 30, 10, next_to_dot="feeds"),
        ],
        55,
        peak_in_flight=1,
    )


def inspection() -> Inspection:
    """Both, as before and after."""
    return Inspection("f", (("before", before()), ("after", after())))
