"""Tables of figures on a terminal, a name before those of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def figures_table(first: str, *others: str) -> Table:
    """A table of names on the left and figures on the right, without rows.

    Args:
      first: header of the names.
      *others: headers of the figures.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first, overflow="fold")
    for header in others:
        table.add_column(header, justify="right", overflow="fold")
    return table
