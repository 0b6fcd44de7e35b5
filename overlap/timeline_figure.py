"""A program's timelines as a Plotly figure: streams as rows, one trace of bars per kind, one time axis."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from overlap import units
from overlap.exposure import COMPUTE, ITERATIONS, WAIT, Gap, gaps, streams
from overlap.hlo.timeline import Event, Timeline

How = Literal["modelled", "measured"]
"""How the times of a timeline were found."""

KINDS: Final = {
    "matmul": ("matmul", "0,114,178"),
    "compute": ("other compute", "86,180,233"),
    "copy": ("copy", "0,158,115"),
    "collective": ("communication", "230,159,0"),
    WAIT: ("exposed wait for communication", "213,94,0"),
    ITERATIONS: ("further iterations of a loop", "128,128,128"),
}
"""Name and colour (red, green, blue) of each kind of bar; readers of any colour vision can tell these apart.

The palette is that of Okabe and Ito, "Color Universal Design", 2008.
"""

_TINT: Final = 0.2
"""Opacity of the ground on which gaps are hatched."""

_HATCHES: Final = {WAIT: "/", ITERATIONS: "."}

_SHADES: Final = (1.0, 0.76)
"""Opacities that touching bars have in turn, so that one can be told from the next."""

ROW_PX: Final = 30
"""Height of a row."""

GAP_PX: Final = 54
"""Height between the rows of two programs, for the two lines of the lower one's title."""

TOP_PX: Final = 74
"""Height above the rows: the legend and a title."""

BOTTOM_PX: Final = 66
"""Height below the rows: the time axis."""

HOVER_COLUMNS: Final = 88
"""Characters in a line of a tooltip."""

TITLE_COLUMNS: Final = 44
"""Characters of a program's title above its rows, for windows of 500 px; the tables have it whole."""


@dataclass(frozen=True, slots=True)
class _Bar:
    row: int
    start_s: float
    end_s: float
    hover: str
    shade: float = _SHADES[0]


def figure(programs: Sequence[tuple[str, Timeline]], how: How = "modelled") -> dict[str, Any]:
    """The data and the layout, without the colours of text and grid: those are the reader's choice.

    Every text in it is escaped, as Plotly reads some HTML in texts. What takes no time has no bar.

    Args:
      programs: titles and timelines, drawn one above the other.
      how: how their times were found; every time is called so.
    """
    scale, unit = units.scale_of(max(timeline.total_s for _, timeline in programs))
    drawn = [_rows(timeline, how) for _, timeline in programs]
    heights = [len(labels) * ROW_PX for labels, _ in drawn]
    inner = sum(heights) + GAP_PX * (len(programs) - 1)
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "bargap": 0,
        "hovermode": "closest",
        "dragmode": "pan",
        "height": inner + TOP_PX + BOTTOM_PX,
        "margin": {"l": 20, "r": 20, "t": TOP_PX, "b": BOTTOM_PX},
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1 + (TOP_PX - 26) / inner,
            "yanchor": "bottom",
            "itemclick": "toggle",
        },
        "annotations": [],
        "xaxis": {
            "title": {"text": f"time, {unit} ({how})", "font": {"size": 13}, "standoff": 12},
            "range": [0, max(timeline.total_s for _, timeline in programs) * scale * 1.01],
            "anchor": "free",
            "position": 0,
            "showgrid": True,
            "zeroline": False,
        },
    }
    top = inner
    legend: set[str] = set()
    for number, ((title, timeline), (labels, bars), height) in enumerate(
        zip(programs, drawn, heights, strict=True), 1
    ):
        axis = "y" if number == 1 else f"y{number}"
        layout["yaxis" + axis[1:]] = {
            "domain": [(top - height) / inner, top / inner],
            "range": [len(labels) - 0.5, -0.5],
            "tickvals": list(range(len(labels))),
            "ticktext": [escaped(label) for label in labels],
            "fixedrange": True,
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
            "anchor": "x",
        }
        text = (
            f"<b>{escaped(_cut(title, TITLE_COLUMNS))}</b><br>{units.duration(timeline.total_s)} {how}, "
            f"exposed {units.duration(timeline.exposed_s)}"
        )
        layout["annotations"].append(
            {
                "text": text,
                "showarrow": False,
                "xref": "paper",
                "yref": "paper",
                "x": 0,
                "y": top / inner,
                "xanchor": "left",
                "yanchor": "bottom",
                "align": "left",
            }
        )
        for kind, (name, colour) in KINDS.items():
            if bars[kind]:
                data.append(_trace(name, colour, bars[kind], axis, scale, kind, kind not in legend))
                legend.add(kind)
        top -= height + GAP_PX
    return {"data": data, "layout": layout}


def _trace(
    name: str, colour: str, bars: Sequence[_Bar], axis: str, scale: float, kind: str, first: bool
) -> dict[str, Any]:
    """All bars of one kind in one program: drawing as many as there are events takes no more traces."""
    # Plotly widens narrow bars to a pixel unless they are translucent: a row of them would look busy.
    marker: dict[str, Any] = {"color": f"rgba({colour},0.99)", "line": {"width": 0}}
    if kind in _HATCHES:
        ground, hatch = f"rgba({colour},{_TINT})", f"rgb({colour})"
        marker["pattern"] = {
            "shape": _HATCHES[kind],
            "fgcolor": hatch,
            "bgcolor": ground,
            "size": 7,
            "solidity": 0.35 if kind == WAIT else 0.12,
        }
    else:
        marker["opacity"] = [bar.shade for bar in bars]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "legendgroup": kind,
        "legendrank": list(KINDS).index(kind) + 1,
        "showlegend": first,
        "xaxis": "x",
        "yaxis": axis,
        "y": [bar.row for bar in bars],
        "base": [_rounded(bar.start_s * scale) for bar in bars],
        "x": [_rounded((bar.end_s - bar.start_s) * scale) for bar in bars],
        "width": 0.76,
        "hovertext": [bar.hover for bar in bars],
        "hoverinfo": "text",
        "marker": marker,
    }


def _rows(timeline: Timeline, how: How) -> tuple[list[str], dict[str, list[_Bar]]]:
    """The labels of the rows, and the bars of each kind."""
    labels: list[str] = []
    bars: dict[str, list[_Bar]] = {kind: [] for kind in KINDS}
    for stream, lanes in streams(timeline).items():
        if stream == COMPUTE:
            for gap in gaps(timeline):
                bars[gap.kind].append(_Bar(len(labels), gap.start_s, gap.end_s, _gap_hover(gap, how)))
        for lane, events in enumerate(lanes):
            for event, shade in _shaded([event for event in events if event.end_s > event.start_s]):
                bar = _Bar(len(labels), event.start_s, event.end_s, _hover(event, how), shade)
                bars[event.kind].append(bar)
            labels.append(stream if lane == 0 else "")
    return labels, bars


def _shaded(lane: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """The bars of a lane with their opacities: of two that touch and are of one kind, the second differs."""
    shade, last = 0, None
    for event in lane:
        touches = last is not None and last.kind == event.kind and event.start_s <= last.end_s * (1 + 1e-9)
        shade = 1 - shade if touches else 0
        yield event, _SHADES[shade]
        last = event


def _hover(event: Event, how: How) -> str:
    what = f"{event.opcode}, {KINDS[event.kind][0]}" if event.opcode != event.name else KINDS[event.kind][0]
    runs = f"first of {event.repeats} runs in a loop" if event.repeats != 1 else ""
    lines = [what, _span(event.start_s, event.end_s, how), runs, event.op_name, event.source]
    return _lines(event.name, lines)


def _gap_hover(gap: Gap, how: How) -> str:
    if gap.kind == ITERATIONS:
        why = f"of {gap.repeats} runs of the loop before, only the first is drawn"
    else:
        more = " …" if len(gap.collectives) > 6 else ""
        why = f"compute waits; on the way: {', '.join(gap.collectives[:6])}{more}"
    return _lines(gap.kind, [_span(gap.start_s, gap.end_s, how), why])


def _span(start_s: float, end_s: float, how: How) -> str:
    took, start, end = (units.duration(time_s) for time_s in (end_s - start_s, start_s, end_s))
    return f"{took} {how}, from {start} to {end}"


def _lines(title: str, lines: Iterable[str]) -> str:
    wrapped = [part for line in lines if line for part in _wrapped(line)]
    return "<br>".join([f"<b>{escaped(_cut(title, HOVER_COLUMNS))}</b>", *map(escaped, wrapped)])


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, HOVER_COLUMNS, max_lines=4, placeholder=" …", break_on_hyphens=False)


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - 1] + "…"


def escaped(text: str) -> str:
    """For Plotly's texts, in which ``<b>`` and ``&lt;`` mean something, and quotation marks nothing."""
    return html.escape(units.printable(text), quote=False)


def _rounded(value: float) -> float:
    return float(f"{value:.9g}")
