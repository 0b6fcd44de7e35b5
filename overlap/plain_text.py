"""What rich prints, as plain text."""

from __future__ import annotations

import io
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Final

from cost_model.whole import whole

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDEST: Final = 120
"""Columns that no table needs more of, however wide the terminal."""


PIPE_COLUMNS: Final = 80
"""Width of what a command prints where there is no terminal."""


def columns(not_a_terminal: int) -> int:
    """The terminal's columns, at most ``WIDEST``; ``not_a_terminal`` where there is none."""
    found = shutil.get_terminal_size((not_a_terminal, 24)).columns
    return min(found, WIDEST) if sys.stdout.isatty() else not_a_terminal


def printable(text: str) -> str:
    """The text with question marks for signs that stdout lacks: `print` must not fail in a user's job."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def wrapped(text: str, width: int) -> str:
    """The text in lines that do not exceed ``width``.

    What goes on in another line stands below the words of the first: behind the time that it begins with, if
    it does.
    """
    lines = []
    for line in text.split("\n"):
        begins = re.match(r" *(?:[\d,.]+ µs  )?", line)
        indent = len(begins[0]) if begins else 0
        indent += 0 if "µs" in line[:indent] else 2
        parts = textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        lines += parts or [""]
    return "\n".join(lines)


def plain_text(*parts: RenderableType, width: int) -> str:
    """The parts below one another, without colours, in lines that do not exceed ``width``.

    Raises:
      ValueError: nothing is so narrow.
      TypeError: the width is no whole number.
    """
    from rich.console import Console

    if whole(width, "width") < 1:
        raise ValueError(f"width must be at least 1 column, got {width}")

    console = Console(
        file=io.StringIO(),
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))
