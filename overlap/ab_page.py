"""An A/B report as one self-contained HTML page: its tables, and the measured timelines of both variants."""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from overlap import timeline_page, units
from overlap.ab_report import ABReport
from overlap.timeline_figure import figure

_FILES: Final = resources.files("overlap")


def page(report: ABReport) -> str:
    """The page. It asks the network for nothing, and its security policy lets it run its own scripts only."""
    import jinja2
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(
        duration=units.duration, operation=units.short_operation, printable=units.printable
    )
    figures = _figures(report)
    # Without a timeline there is nothing to draw, and the page does without its scripts.
    sources = [get_plotlyjs(), _read("timeline_page.js")] if figures else []
    scripts = [timeline_page._inline(source) for source in sources]
    return environment.from_string(_read("ab_page.html.j2")).render(
        report=report,
        style=Markup(_read("timeline_page.css")),
        scripts=[Markup(script) for script in scripts],
        hashes=[timeline_page._hash(script) for script in scripts] or ["none"],
        figures=figures,
    )


def _figures(report: ABReport) -> list[dict[str, Any]]:
    """Both timelines in one figure, on one time axis; none where nothing was traced."""
    drawn = [
        (f"{v.name} on {v.timeline.topology}", v.timeline)
        for v in report.variants
        if v.timeline is not None and v.timeline.total_s > 0
    ]
    return [figure(drawn, "measured")] if drawn else []


def _read(name: str) -> str:
    return _FILES.joinpath(name).read_text("utf-8")
