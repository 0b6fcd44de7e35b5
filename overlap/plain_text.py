"""What rich prints, as plain text."""

from __future__ import annotations

import io
import shutil
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDEST: Final = 120
"""Columns that no table needs more of, however wide the terminal."""


def columns(not_a_terminal: int) -> int:
    """The terminal's columns, at most ``WIDEST``; ``not_a_terminal`` where there is none."""
    found = shutil.get_terminal_size((not_a_terminal, 24)).columns
    return min(found, WIDEST) if sys.stdout.isatty() else not_a_terminal


def plain_text(*parts: RenderableType, width: int) -> str:
    """The parts below one another, without colours, in lines that do not exceed ``width``."""
    from rich.console import Console

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
