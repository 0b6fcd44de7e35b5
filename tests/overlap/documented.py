"""Whether the fields of a JSON document are those that a page of docs/ lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def undocumented(data: Any, page: str, beginning: str) -> set[str]:
    """The fields, at any depth, that a page does not name between that text and the next heading."""
    _, found, after = (DOCS / page).read_text("utf-8").partition(beginning)
    assert found, f"docs/{page} has no {beginning!r}"
    section = re.split(r"^(?:## |The JSON of )", after, maxsplit=1, flags=re.MULTILINE)[0]
    return set(_fields(data)) - set(re.findall(r"`([\w ]+)`", section))


def _fields(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        yield from data
    if isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from _fields(value)
