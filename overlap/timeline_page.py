"""Timelines as one self-contained HTML page that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from overlap import units
from overlap.exposure import by_exposed_time, hint, is_exposed
from overlap.hlo.timeline import Timeline
from overlap.timeline_figure import figure
from overlap.timeline_table import comparison, machine, speed_up

if TYPE_CHECKING:
    from markupsafe import Markup

    from overlap.inspection import Inspection

_FILES: Final = resources.files("overlap")


def page(inspections: Sequence[Inspection]) -> str:
    """The page of some programs: for each its timelines, totals and collectives, and the assumptions.

    Texts of the dump come in as text: Jinja escapes those in the markup, ``figure`` those in the drawing, and
    the page's security policy lets no script run but the page's own two, and nothing be fetched.

    Args:
      inspections: the programs, in order.
    """
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(
        duration=units.duration,
        size=units.size,
        operation=units.short_operation,
        printable=units.printable,
        hint=hint,
        is_exposed=is_exposed,
        path=_breakable,
    )
    template = environment.from_string(_read("timeline_page.html.j2"))
    scripts = [_inline(get_plotlyjs()), _inline(_read("timeline_page.js"))]
    return template.render(
        title=", ".join(dict.fromkeys(units.printable(inspection.name) for inspection in inspections)),
        style=Markup(_read("timeline_page.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=[_hash(script) for script in scripts],
        figures=[figure(inspection.titled) for inspection in inspections],
        sections=[_section(inspection) for inspection in inspections],
    )


def _section(inspection: Inspection) -> dict[str, Any]:
    timelines = [timeline for _, timeline in inspection.programs]
    scale, _ = units.scale_of(max(timeline.total_s for timeline in timelines))
    return {
        "name": inspection.name,
        "comparison": comparison(inspection) if len(timelines) > 1 else "",
        "speed_up": speed_up(timelines) if len(timelines) > 1 else "",
        "totals": _totals(inspection.programs),
        "programs": [(title, timeline, by_exposed_time(timeline)) for title, timeline in inspection.titled],
        "assumptions": list(dict.fromkeys(text for timeline in timelines for text in timeline.assumptions)),
        "scale": scale,
    }


def _totals(programs: Sequence[tuple[str, Timeline]]) -> list[tuple[str, list[str]]]:
    """The rows of the table of totals: what, and its value in each program."""

    def row(what: str, values: list[str]) -> tuple[str, list[str]]:
        return what, values

    timelines = [timeline for _, timeline in programs]
    return [
        row("total, modelled", [units.duration(t.total_s) for t in timelines]),
        row("compute, modelled", [units.duration(t.compute_s) for t in timelines]),
        row(
            "exposed communication, modelled",
            [f"{units.duration(t.exposed_s)} ({units.percent(t.exposed_s, t.total_s)})" for t in timelines],
        ),
        row("waits for copies, modelled", [units.duration(t.copy_wait_s) for t in timelines]),
        row("collectives", [f"{len(t.collectives)}" for t in timelines]),
        row(
            "bytes sent by a device",
            [units.size(sum(c.bytes_on_wire for c in t.collectives)) for t in timelines],
        ),
        row("most transfers in flight", [f"{t.peak_in_flight}" for t in timelines]),
        row("modelled for", [machine(t) for t in timelines]),
    ]


def _breakable(text: str) -> Markup:
    """A path as markup that may be broken after its slashes."""
    from markupsafe import Markup, escape

    return Markup("/<wbr>").join(escape(part) for part in units.printable(text).split("/"))


def _read(name: str) -> str:
    return _FILES.joinpath(name).read_text("utf-8")


def _inline(script: str) -> str:
    """A script as it may stand between script tags.

    Raises:
      ValueError: it holds what would end the tag; escaping that depends on where in the script it is.
    """
    for end in ("</script", "<!--"):
        if end in script.lower():
            raise ValueError(f"a script of the page holds {end!r} and cannot be put into it")
    return script


def _hash(script: str) -> str:
    """The script's name in a Content-Security-Policy, which allows this text alone.

    A parser of HTML reads every line break as a line feed, before the script is hashed.
    """
    text = script.replace("\r\n", "\n").replace("\r", "\n")
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
