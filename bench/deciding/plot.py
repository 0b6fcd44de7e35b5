"""Predicted against compiled: times as written, times of rings, and the gains on which decisions rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.deciding.judgement import ASKED, RING_ERROR, grouped, judged
from bench.deciding.rows import Row
from cost_model.hardware import LEAST_GAIN

COLOURS: Final = ("#4393c3", "#e08214", "#1b7837", "#9970ab", "#b2182b")
"""Of the chips, in their order."""

FAINT: Final = "#c4c4c4"
GAINS: Final = (-0.6, 0.7)
"""What the panel of gains shows; what lies outside is drawn at its edge."""


def draw(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Writes the picture, in the format that the path's suffix names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (written, rings, gains) = pyplot.subplots(1, 3, figsize=(17.0, 6.0))
    for panel, name in ((written, "as written"), (rings, "rings")):
        _times(panel, name)
    _decisions(gains)
    rows = judged(rows)
    others = [
        (seconds, row.predicted[schedule].overlapped_s)
        for row in rows
        for schedule, seconds in row.rings_s.items()
        if schedule != row.decided.schedule
    ]
    _scatter(rings, others, color=FAINT, label="other rings compiled", s=10, zorder=2)
    for (chip, group), colour in zip(
        grouped(rows, lambda row: row.chain.chip).items(), COLOURS, strict=False
    ):
        look = {"color": colour, "label": chip, "s": 18, "zorder": 3}
        _scatter(written, [(_known(row.original_s), row.decided.original_s) for row in group], **look)
        compiled = [row for row in group if row.decided.schedule in row.rings_s]
        both = [(row.rings_s[row.decided.schedule], row.decided.ring_s) for row in compiled]
        _scatter(rings, both, **look)
        found = [1 - row.rings_s[row.decided.schedule] / _known(row.original_s) for row in compiled]
        gains.scatter(
            [_within(gain) for gain in found], [_within(row.decided.gain) for row in compiled], **look
        )
    handles: dict[str, Any] = {}
    for panel in (written, rings, gains):
        found_handles, labels = panel.get_legend_handles_labels()
        handles.update(zip(labels, found_handles, strict=True))
    figure.suptitle(title, fontsize=12)
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=9, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 0.98))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _times(panel: Any, name: str) -> None:
    """A panel of times, both axes logarithmic, with the diagonal."""
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_title(name, loc="left", fontsize=11, fontweight="bold")
    panel.set_xlabel("compiled, µs")
    panel.set_ylabel("predicted, µs")
    panel.axline((1.0, 1.0), (10.0, 10.0), color="#7a7a7a", linewidth=1.0, zorder=1)
    for factor in (1 - RING_ERROR, 1 + RING_ERROR):
        panel.axline((1.0, factor), (10.0, 10.0 * factor), color="#d0d0d0", linewidth=0.8, zorder=1)
    panel.grid(color="#eeeeee", zorder=0)


def _decisions(panel: Any) -> None:
    """The panel of gains: what is on lies above the band. Wrong decisions are in the shaded corners."""
    panel.set_title(
        "gain of the ring that is predicted to be best", loc="left", fontsize=11, fontweight="bold"
    )
    panel.set_xlabel("compiled, part of the time as written")
    panel.set_ylabel("predicted; on above the red band, off below")
    panel.set_xlim(*GAINS)
    panel.set_ylim(*GAINS)
    panel.axline((0.0, 0.0), (1.0, 1.0), color="#7a7a7a", linewidth=1.0, zorder=1)
    panel.axhspan(ASKED[0], ASKED[-1], color="#b2182b", alpha=0.5, linewidth=0, zorder=1)
    panel.axvline(0.0, color="#d0d0d0", linewidth=0.8, zorder=1)
    low, high = GAINS
    for x, y in (((low, 0.0), (ASKED[-1], high)), ((LEAST_GAIN, high), (low, ASKED[0]))):
        panel.fill_between(x, *y, color="#fbe9e7", linewidth=0, zorder=0)


def _scatter(panel: Any, pairs: Sequence[tuple[float, float]], **look: Any) -> None:
    if pairs:
        compiled, predicted = zip(*pairs, strict=True)
        panel.scatter([s * 1e6 for s in compiled], [s * 1e6 for s in predicted], **look)


def _known(seconds: float | None) -> float:
    assert seconds is not None
    return seconds


def _within(gain: float) -> float:
    return min(max(gain, GAINS[0]), GAINS[1])
