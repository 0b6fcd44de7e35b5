"""How far long work is: a bar on a terminal's standard error, and nothing elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

Progress = Callable[[int, int], None]
"""Is told how many things are done, of how many."""

COUNTS_WIDTH: Final = 44
"""Characters of a bar's line beside its description."""


@contextlib.contextmanager
def progress_bar(description: str) -> Iterator[Progress]:
    """A bar that is gone when the work is done."""
    from rich.console import Console

    console = Console(stderr=True, force_jupyter=False)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    # A long path gives way, not what tells how far it is.
    width = max(console.width - COUNTS_WIDTH, 1)
    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=width)),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
