"""Timelines as tables for a terminal: collectives by exposed time, totals, hints, assumptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from overlap import units
from overlap.exposure import by_exposed_time, hint, is_exposed
from overlap.hlo.timeline import CollectiveTime, Timeline
from overlap.plain_text import plain_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from overlap.inspection import Inspection

OPERATION: Final = 28
"""Characters of an operation's path that are shown."""

ROWS: Final = 20
"""Collectives of a program that are listed where not all are asked for: the most exposed ones."""


def renderables(inspection: Inspection, *, rows: int | None = ROWS) -> Iterator[RenderableType]:
    """A table per program, how the programs compare, and what the times rest on.

    Args:
      inspection: the programs.
      rows: most collectives per program; None for all.
    """
    from rich.padding import Padding
    from rich.text import Text

    for title, timeline in inspection.titled:
        yield Text.assemble((units.printable(title), "bold"), f": {_totals(timeline)}")
        yield Text()
        if not timeline.collectives:
            yield Padding(Text("No collectives in this program."), (0, 0, 1, 2))
            continue
        ordered = by_exposed_time(timeline)
        shown = ordered[:rows]
        yield _table(shown)
        if rest := ordered[len(shown) :]:
            exposed_s = sum(collective.exposed_s for collective in rest)
            yield Text(
                f"… and {len(rest)} more, together exposed for {units.duration(exposed_s)} (modelled)."
            )
        yield Text()
        if hints := [(f"{units.ranges(numbers)}:", said) for said, numbers in _hints(shown)]:
            yield _list(hints)
            yield Text()
    if len(inspection.programs) > 1:
        yield Text(comparison(inspection), style="bold")
        yield Text()
    assumptions = dict.fromkeys(text for _, timeline in inspection.programs for text in timeline.assumptions)
    yield Text("The modelled times rest on this:")
    yield _list([("-", units.printable(text)) for text in assumptions])


def comparison(inspection: Inspection) -> str:
    """How the programs compare, in a sentence: ``original → overlapped, modelled: 1.33 ms → 771 µs …``."""
    labels = " → ".join(label for label, _ in inspection.programs)
    timelines = [timeline for _, timeline in inspection.programs]
    total = " → ".join(units.duration(timeline.total_s) for timeline in timelines)
    exposed = " → ".join(units.duration(timeline.exposed_s) for timeline in timelines)
    return f"{labels}, modelled: {total}{speed_up(timelines)}, of which exposed {exposed}."


def speed_up(timelines: list[Timeline]) -> str:
    """`` (1.72 × as fast)``, of the last timeline over the first; empty where it cannot be told."""
    first, last = timelines[0].total_s, timelines[-1].total_s
    return f" ({first / last:.2f} × as fast)" if first > 0 and last > 0 else ""


def machine(timeline: Timeline) -> str:
    """What a timeline was timed for: the topology, which mostly names the hardware, or both."""
    if timeline.hardware in timeline.topology:
        return timeline.topology
    return f"{timeline.hardware} ({timeline.topology})"


def _totals(timeline: Timeline) -> str:
    in_flight = timeline.peak_in_flight
    transfers = "1 transfer" if in_flight == 1 else f"{in_flight} transfers"
    return (
        f"{units.duration(timeline.total_s)} modelled for {units.printable(machine(timeline))}; "
        f"compute {units.duration(timeline.compute_s)}, exposed "
        f"communication {units.duration(timeline.exposed_s)} "
        f"({units.percent(timeline.exposed_s, timeline.total_s)}); at most {transfers} in flight."
    )


def text(inspection: Inspection, width: int, *, rows: int | None = ROWS) -> str:
    """What ``renderables`` gives, as plain text of which no line exceeds ``width``."""
    return plain_text(*renderables(inspection, rows=rows), width=width)


def _list(items: list[tuple[str, str]]) -> RenderableType:
    """Paragraphs, each with a mark before it."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1, 0, 0))
    for mark, said in items:
        grid.add_row(Text(mark, style="bold"), Text(said))
    return Padding(grid, (0, 0, 0, 2), expand=False)


def _table(collectives: list[CollectiveTime]) -> Table:
    """A row of two lines per collective."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("#", justify="right")
    table.add_column("collective\noperation", overflow="fold")
    table.add_column("source ×runs\nopcode", overflow="fold")
    table.add_column("exposed\nhidden\n(modelled)", justify="right", no_wrap=True)
    table.add_column("on the links\n(modelled)\nbytes sent", justify="right", no_wrap=True)
    for number, collective in enumerate(collectives, 1):
        runs = f" ×{collective.executions}" if collective.executions != 1 else ""
        source = _file(collective.source) or "unknown source"
        exposed = units.duration(collective.exposed_s)
        table.add_row(
            Text(str(number)),
            Text(f"{units.printable(collective.name)}\n{units.printable(_operation(collective))}"),
            Text(f"{units.printable(source)}{runs}\n{units.printable(collective.opcode)}"),
            Text.assemble(
                (exposed, "bold red" if is_exposed(collective) else "green"),
                f"\n{units.duration(collective.hidden_s)}",
            ),
            Text(f"{units.duration(collective.wire_s)}\n{units.size(collective.bytes_on_wire)}"),
        )
    return table


def _file(source: str) -> str:
    """``file:line`` without the folders."""
    return source.replace("\\", "/").rsplit("/", 1)[-1]


def _operation(collective: CollectiveTime) -> str:
    """The end of the operation's path, of as many parts as there is room for."""
    parts = units.short_operation(collective.op_name).split("/")
    shown = parts.pop()
    while parts and len(parts[-1]) + len(shown) + len("…//") <= OPERATION:
        shown = f"{parts.pop()}/{shown}"
    return f"…/{shown}" if parts else shown


def _hints(collectives: list[CollectiveTime]) -> Iterable[tuple[str, list[int]]]:
    """Each hint, and the numbers of the rows that it is for."""
    found: dict[str, list[int]] = {}
    for number, collective in enumerate(collectives, 1):
        if said := hint(collective):
            found.setdefault(said, []).append(number)
    return found.items()
