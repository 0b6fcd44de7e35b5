"""A table of texts as HTML, for notebooks; what stands in the texts is never markup."""

from __future__ import annotations

import html
from collections.abc import Sequence

_CELL = "text-align:left;vertical-align:top;padding:0.2em 0.8em"


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], paragraphs: Sequence[str]) -> str:
    """The table, and paragraphs below it.

    Args:
      head: a title for each column.
      rows: a text for each column; of several lines each stands below the one before.
      paragraphs: texts, likewise.
    """

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(f'<{tag} style="{_CELL}">{_lines(text)}</{tag}>' for text in texts)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    below = "".join(f"<p>{_lines(text)}</p>" for text in paragraphs)
    table = f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    return f"<div>{table}{below}</div>"


def _lines(text: str) -> str:
    return "<br>".join(html.escape(line) for line in text.split("\n"))
