"""The efficiency of every row as a picture: a panel per pattern, a column per row, grouped by slice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.schedules.programs import PATTERNS
from bench.schedules.rows import AUTO, ORIGINAL, TEXTBOOK, VERIFY, Row

MARKS: Final = (
    (TEXTBOOK, "textbook ring", "#c4c4c4", "x"),
    (ORIGINAL, "original", "#7a7a7a", "_"),
    ("xla", "better of XLA's modes", "#e08214", "D"),
    (AUTO, "this library, auto", "#4393c3", "o"),
    (VERIFY, "this library, verify", "#08519c", "^"),
)
"""Version, what the legend calls it, colour, marker."""


def draw(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Writes the picture, in the format that the path's suffix names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in rows if row.measured]
    patterns = [pattern for pattern in PATTERNS if any(row.pattern == pattern for row in measured)]
    columns = 2 if len(patterns) > 1 else 1
    lines = -(-len(patterns) // columns)
    figure, panels = pyplot.subplots(
        max(lines, 1), columns, figsize=(8.5 * columns, 2.9 * max(lines, 1) + 0.9), squeeze=False, sharey=True
    )
    slices = list(dict.fromkeys(row.slice for row in measured))
    for panel in panels.flat[len(patterns) :]:
        panel.set_visible(False)
    for panel, pattern in zip(panels.flat, patterns, strict=False):
        shown = sorted(
            (row for row in measured if row.pattern == pattern), key=lambda row: slices.index(row.slice)
        )
        for version, label, colour, marker in MARKS:
            points = [
                (at, row.limit_s / time)
                for at, row in enumerate(shown)
                if (time := row.xla_s() if version == "xla" else row.total_s(version))
            ]
            if points:
                at, values = zip(*points, strict=True)
                panel.scatter(at, values, label=label, color=colour, marker=marker, s=30, zorder=3)
        panel.axhline(1.0, color="#b2182b", linewidth=1.2, label="limit", zorder=2)
        panel.set_title(pattern, loc="left", fontsize=11, fontweight="bold")
        panel.set_ylim(0, 1.1)
        panel.set_xlim(-0.6, max(len(shown), 1) - 0.4)
        panel.set_ylabel("efficiency: limit / time")
        panel.grid(axis="y", color="#e6e6e6", zorder=0)
        starts = [at for at, row in enumerate(shown) if at == 0 or shown[at - 1].slice != row.slice]
        for start in starts[1:]:
            panel.axvline(start - 0.5, color="#d0d0d0", linewidth=0.8, zorder=1)
        ends = [*starts[1:], len(shown)]
        panel.set_xticks([(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)])
        panel.set_xticklabels(
            [shown[start].slice for start in starts],
            fontsize=7.5,
            rotation=35,
            ha="right",
            rotation_mode="anchor",
        )
        panel.tick_params(axis="x", length=0)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    handles: dict[str, Any] = {}
    for panel in panels.flat:
        found, labels = panel.get_legend_handles_labels()
        handles.update(zip(labels, found, strict=True))
    figure.suptitle(title, fontsize=12)
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=6, frameon=False)
    figure.tight_layout(rect=(0, 0.045 if lines > 1 else 0.1, 1, 0.985))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
