"""The picture of a break-even: predicted times as written and as rings, over what they depend on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from cost_model.break_even import BreakEven
from overlap.units import digits, scale_of

WRITTEN, RINGS, PAYS = "#b45309", "#1d4ed8", "#dbeafe"


def draw(found: Sequence[BreakEven], path: str, title: str, least_gain: float) -> None:
    """Draws one panel per variable.

    Args:
      found: what to draw.
      path: where; the suffix says in which format.
      title: above all panels.
      least_gain: the part of the time as written from which on a gain is one.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
      ValueError: the suffix is of no format that it knows.
      OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure: Any = Figure(figsize=(4.6 * len(found), 4.2), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for panel, each in zip(panels, found, strict=True):
        _panel(panel, each)
    panels[0].set_ylabel("predicted time")
    # Below, where no line and no label is.
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"{title}\nshaded: rewriting pays, {least_gain:.0%} or more")
    figure.savefig(path, dpi=120)


def _panel(panel: Any, found: BreakEven) -> None:
    scale = 1e-9 if found.variable == "bandwidth" else 1.0
    x = [value * scale for value, _ in found.points]
    # Axis sizes are numbers on their own: lines between them say nothing.
    dots: Any = {"marker": "o", "markersize": 3} if found.variable == "axis_size" else {}
    panel.plot(x, [of.original_s for _, of in found.points], color=WRITTEN, label="as written", **dots)
    panel.plot(x, [of.overlapped_s for _, of in found.points], color=RINGS, label="best ring", **dots)
    panel.set_xscale("log", base=10 if found.variable == "bandwidth" else 2)
    times = [s for _, of in found.points for s in (of.original_s, of.overlapped_s)]
    if max(times) > 10 * min(times):
        panel.set_yscale("log")
        panel.yaxis.set_minor_formatter("")
    else:
        panel.set_ylim(0, 1.1 * max(times))
    panel.yaxis.set_major_formatter(_time)
    panel.set_xlim(x[0], x[-1])
    panel.xaxis.set_major_formatter(lambda value, _: _short(value))
    for low, high in _paying(found):
        panel.axvspan(low * scale, high * scale, color=PAYS, zorder=0, linewidth=0)
    panel.axvline(found.here * scale, color="0.4", linestyle=":", linewidth=1)
    panel.annotate(
        "here",
        (found.here * scale, 0.02),
        xycoords=("data", "axes fraction"),
        xytext=(3, 0),
        textcoords="offset points",
        color="0.3",
        fontsize=8,
    )
    for crossing in found.crossings:
        panel.axvline(crossing.at * scale, color=RINGS, linewidth=0.8)
        panel.annotate(
            _short(crossing.at * scale),
            (crossing.at * scale, 0.97),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            va="top",
            fontsize=8,
            color=RINGS,
        )
    panel.set_xlabel(
        {"tokens": "tokens per device", "axis_size": "devices on the axis", "bandwidth": "GB/s one way"}[
            found.variable
        ]
    )
    panel.spines[["top", "right"]].set_visible(False)


def _paying(found: BreakEven) -> list[tuple[float, float]]:
    """The ranges in which rewriting pays."""
    edges = [found.points[0][0], *(crossing.at for crossing in found.crossings), found.points[-1][0]]
    paying = found.pays_at_first
    ranges = []
    for low, high in itertools.pairwise(edges):
        if paying:
            ranges.append((low, high))
        paying = not paying
    return ranges


def _short(value: float) -> str:
    """Four digits at most, with k for thousands and M for millions."""
    for limit, unit in ((999_999.5, "M"), (9_999.5, "k")):
        if value >= limit:
            return f"{value / (1e6 if unit == 'M' else 1e3):.3g}{unit}"
    return f"{value:.4g}"


def _time(seconds: float, _: Any) -> str:
    scale, unit = scale_of(seconds)
    return f"{digits(seconds * scale).removesuffix('.00').removesuffix('.0')} {unit}"
