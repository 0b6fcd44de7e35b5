"""The packages that this one is built on, which have names that a user's own module may have too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PARTS = ("cost_model", "passes")


def check_parts() -> None:
    """Sees that the packages installed along with this one are those that an import finds.

    Raises:
      ImportError: another module of that name comes first, such as a ``passes.py`` beside the user's script.
    """
    home = Path(__file__).resolve().parent.parent
    for name in PARTS:
        spec = importlib.util.find_spec(name)
        found = spec.origin if spec is not None and spec.origin is not None else None
        if found is None or Path(found).resolve().parent.parent != home:
            place = "no such package is found" if found is None else f"`import {name}` finds {found} first"
            raise ImportError(
                f"overlap needs its own package `{name}` at {home / name}, but {place}: rename or move that "
                "module, or reinstall overlap-collectives if none of yours is called so",
                name=name,
            )
