"""The report: every collective of a program, what was decided about it and why, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import jax

from cost_model import Estimate
from cost_model.typed import loads
from overlap import units
from overlap.plain_text import columns, plain_text, printable
from passes import Code, Reason, Site

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

SCHEMA: Final = 3
"""Version of the JSON form of ``Report``."""

NOT_A_TERMINAL: Final = 100
"""Columns of the table where there is no terminal to ask."""


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What is decided about every collective of one program; ``Overlapped.explain`` makes it.

    ``str(report)`` is a table that fits the terminal (100 columns where there is none), without colours;
    ``rich.print(report)`` shows it in colour, and a notebook as HTML. Where stdout's encoding lacks a sign,
    ``str`` has a question mark; ``text`` has the sign.

    Attributes:
      sites: one per collective of the program, in program order.
      name: the function's name.
      hint: what else may be tried with this program on its hardware; empty if nothing is known.
    """

    sites: tuple[Site, ...]
    name: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))

    @property
    def rewritten(self) -> tuple[Site, ...]:
        """The sites that rings replace."""
        return tuple(site for site in self.sites if site.rewritten)

    @property
    def kept(self) -> tuple[Site, ...]:
        """The sites that stay as they are."""
        return tuple(site for site in self.sites if not site.rewritten)

    @property
    def saved_s(self) -> float:
        """Modelled seconds that the rings save in one call: each site's benefit times how often it runs."""
        return sum((site.estimate.benefit_s * site.count for site in self.rewritten if site.estimate), 0.0)

    def __repr__(self) -> str:
        return f"<Report of {self._title}: {len(self.rewritten)} of {_counted(self.sites)} rewritten>"

    def __str__(self) -> str:
        return printable(self.text())

    def text(self, width: int | None = None) -> str:
        """The table, its totals and the reasons, as plain text.

        Args:
          width: columns that no line exceeds; None for the terminal's, or 100 where there is none.
        """
        return plain_text(self, width=columns(NOT_A_TERMINAL) if width is None else width)

    def _repr_html_(self) -> str:
        """The table, its totals and the reasons, in a notebook."""
        from overlap.html_table import html_table

        if not self.sites:
            return html_table((), (), [self._nothing])
        shorter = _shorter(self.sites)
        below = [f"{self._title}: {self._totals}", self._note]
        for code, numbers, sentence, details in _reasons(self.sites):
            lines = [f"{code} ({_numbered(numbers)}): {shorter(sentence)}"]
            lines += [f"{units.ranges(where)}: {shorter(detail)}" for detail, where in details]
            below.append("\n".join(lines))
        if self.hint:
            below.append(self.hint)
        rows = [_cells(number, site, shorter, " → ") for number, site in enumerate(self.sites, 1)]
        return html_table(_COLUMNS, rows, below)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.padding import Padding
        from rich.text import Text

        if not self.sites:
            yield Text(self._nothing)
            return
        shorter = _shorter(self.sites)
        yield _table(self.sites, shorter, options.max_width)
        yield Text()
        yield Text.assemble((f"{self._title}: ", "bold"), self._totals)
        yield Text(self._note)
        for code, numbers, sentence, details in _reasons(self.sites):
            yield Text()
            yield Text.assemble((code, "bold"), f" ({_numbered(numbers)}): {shorter(sentence)}")
            for detail, where in details:
                yield Padding(Text(f"{units.ranges(where)}: {shorter(detail)}"), (0, 0, 0, 4), expand=False)
        if self.hint:
            yield Text()
            yield Text(self.hint)

    @property
    def _title(self) -> str:
        return self.name or "program"

    @property
    def _nothing(self) -> str:
        return f"{self._title}: no all_gather, reduce_scatter, psum or all_to_all in this program."

    @property
    def _note(self) -> str:
        hidden = any(site.estimate is not None and site.estimate.hidden_s > 0 for site in self.sites)
        loops = any("while" in site.path.split("/") for site in self.sites)
        return _NOTE + (_HIDDEN if hidden else "") + (_WHILE if loops else "")

    @property
    def _totals(self) -> str:
        text = f"{len(self.rewritten)} of {_counted(self.sites)} rewritten"
        priced = [(site.estimate, site.count) for site in self.rewritten if site.estimate]
        if priced:
            before_s = sum(estimate.original_s * count for estimate, count in priced)
            change = "saved" if self.saved_s >= 0 else "lost"
            text += (
                f"; modelled, per call: {units.duration(abs(self.saved_s))} {change} "
                f"of the {units.duration(before_s)} that they take"
            )
        if missing := len(self.rewritten) - len(priced):
            text += f"; {missing} without an estimate"
        return text + "."

    def to_json(self) -> str:
        """A JSON object: ``schema``, ``versions`` (of those that made it), ``name``, ``hint`` and ``sites``.

        Times are seconds. ``from_json`` reads it back unchanged.
        """
        from overlap import __version__

        return json.dumps(
            {
                "schema": SCHEMA,
                "versions": {"overlap": __version__, "jax": jax.__version__},
                "name": self.name,
                "hint": self.hint,
                "sites": [_site_to_dict(site) for site in self.sites],
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Reads what ``to_json`` wrote.

        Raises:
          ValueError: ``text`` is no JSON object, has another schema, or a field that is missing, unknown or
            of the wrong type; the message names it.
        """
        try:
            data = loads(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"a report must be JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"a report must be a JSON object, not {_json_type(data)}")
        if data.get("schema") != SCHEMA or isinstance(data["schema"], bool):
            raise ValueError(f"a report of schema {SCHEMA} is expected, not {data.get('schema')!r}")
        types = {"schema": int, "versions": dict, "name": str, "hint": str, "sites": list}
        _check(data, types, "the report")
        sites = tuple(_site_from_dict(site, f"site {i}") for i, site in enumerate(data["sites"], 1))
        return cls(sites, data["name"], data["hint"])


# The table.

_NOTE = (
    "Times are modelled, in µs for one execution: the collective and its dots → as a ring (× speed-up). "
    "Those of a kept site are what a ring in its place would take."
)
_HIDDEN = " What other dots hide of a collective as written is left out."
_WHILE = " The bodies of while loops are counted once."


_COLUMNS = (
    "#",
    "collective\naxis (size) ×runs",
    "where",
    "operand\n→ result",
    "decision\nreason",
    "modelled µs\nschedule",
)
_TYPES, _DECISION, _SCHEDULE = 3, 4, 5


def _cells(number: int, site: Site, shorter: _Shorter, to: str) -> tuple[str, ...]:
    """What stands in each of the columns, in two lines."""
    runs = f" ×{site.count}" if site.count != 1 else ""
    file, function = _place(shorter(site.source))
    return (
        str(number),
        f"{site.kind}\n{site.axis} ({site.axis_size}){runs}",
        f"{file}\n{function}",
        f"{site.operand}\n→ {site.result}",
        f"{'rewritten' if site.rewritten else 'kept'}\n{site.reason}",
        f"{_times(site.estimate, to)}\n{site.schedule}",
    )


def _table(sites: tuple[Site, ...], shorter: _Shorter, width: int) -> Table:
    """A row of two lines per site."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows, widths, roomy = _layout(sites, shorter, width)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, int(roomy), 0, 0))
    for column, whole in widths.items():
        table.add_column(
            _COLUMNS[column], justify="right" if column == 0 else "left", overflow="fold", width=whole
        )
    for row, site in zip(rows, sites, strict=True):
        cells = {column: Text(row[column]) for column in widths}
        decision = cells[_DECISION]
        decision.stylize("bold green" if site.rewritten else "yellow", 0, decision.plain.index("\n"))
        table.add_row(*cells.values())
    return table


def _layout(
    sites: tuple[Site, ...], shorter: _Shorter, width: int
) -> tuple[list[tuple[str, ...]], dict[int, int | None], bool]:
    """The cells, the columns that are shown, with their widths, and whether there is room for wider gaps.

    Of the last column only schedules are broken, at blanks; of the others nothing. Types are left out where
    there is no room for them, and names are broken (widths of None) where there is none for these.
    """
    from rich.cells import cell_len

    def cells(roomy: bool) -> list[tuple[str, ...]]:
        # The box puts one column between two cells, padding another.
        to = " → " if roomy else "→"
        return [_cells(number, site, shorter, to) for number, site in enumerate(sites, 1)]

    def longest(texts: Iterable[str]) -> int:
        return max(map(cell_len, texts), default=0)

    rows_of = {roomy: cells(roomy) for roomy in (True, False)}
    for typed, roomy in itertools.product((True, False), repeat=2):
        rows = rows_of[roomy]
        shown = [column for column in range(_SCHEDULE) if typed or column != _TYPES]
        widths = {
            column: longest(line for row in (_COLUMNS, *rows) for line in row[column].splitlines())
            for column in shown
        }
        kept_whole = (part for row in rows for part in _unbroken(row[_SCHEDULE]))
        least = max(longest(_COLUMNS[_SCHEDULE].splitlines()), longest(kept_whole))
        if sum(widths.values()) + len(widths) * (1 + int(roomy)) + least <= width:
            return rows, {**widths, _SCHEDULE: None}, roomy
    return rows_of[False], dict.fromkeys((*shown, _SCHEDULE)), False


def _unbroken(cell: str) -> list[str]:
    """Of times and a schedule: the times, and the schedule's words."""
    times, _, schedule = cell.partition("\n")
    return [times, *schedule.split()]


def _counted(sites: tuple[Site, ...]) -> str:
    return "1 collective" if len(sites) == 1 else f"{len(sites)} collectives"


def _times(estimate: Estimate | None, to: str) -> str:
    if estimate is None:
        return ""
    before, after = estimate.original_s, estimate.overlapped_s
    ratio = f" ×{before / after:.2f}" if after > 0 else ""
    return f"{_micros(before)}{to}{_micros(after)}{ratio}"


def _micros(seconds: float) -> str:
    return units.digits(seconds * 1e6)


def _place(source: str) -> tuple[str, str]:
    """``file:line`` and function of ``file:line (function)``: the innermost that has a name."""
    found = re.fullmatch(r"(.*) \((.*)\)", source, re.DOTALL)
    if found is None:
        return source, ""
    named = [name for name in found[2].split(".<locals>.") if not name.startswith("<")]
    return found[1], named[-1] if named else found[2]


class _Shorter:
    """Shortens the paths in texts, each to the shortest end that no other path shares."""

    _PATH = re.compile(r"(?:[A-Za-z]:)?[^\s()]*[/\\][^\s()/\\]+(?=:\d)")

    def __init__(self, texts: Iterable[str]) -> None:
        self.short: dict[str, str] = {}
        paths = {found for text in texts for found in self._PATH.findall(text)}
        parts = {path: re.split(r"[/\\]", path) for path in paths}
        for path, own in parts.items():
            others = [other for name, other in parts.items() if name != path]
            lengths = range(1, len(own) + 1)
            unique = (n for n in lengths if all(other[-n:] != own[-n:] for other in others))
            self.short[path] = "/".join(own[-next(unique, len(own)) :])

    def __call__(self, text: str) -> str:
        return self._PATH.sub(lambda found: self.short.get(found[0], found[0]), text)


def _shorter(sites: tuple[Site, ...]) -> _Shorter:
    """Shortens what the table shows of these sites."""
    return _Shorter(text for site in sites for text in (site.source, site.sentence))


def _reasons(
    sites: tuple[Site, ...],
) -> Iterator[tuple[str, list[int], str, list[tuple[str, list[int]]]]]:
    """Per reason, as they appear: code, site numbers, what it means, and each detail with its sites."""
    numbers: dict[str, list[int]] = {}
    details: dict[str, dict[str, list[int]]] = {}
    meanings: dict[str, str] = {}
    for number, site in enumerate(sites, 1):
        meaning = _meaning(site)
        numbers.setdefault(site.reason, []).append(number)
        meanings.setdefault(site.reason, meaning)
        detail = site.sentence.removeprefix(meaning).strip()
        if detail:
            details.setdefault(site.reason, {}).setdefault(detail, []).append(number)
    for code, where in numbers.items():
        special = list(details.get(code, {}).items())
        if len(special) == 1 and special[0][1] == where:
            yield code, where, f"{meanings[code]} {special[0][0]}".lstrip(), []
        else:
            yield code, where, meanings[code], special


def _meaning(site: Site) -> str:
    """What all sites with this code share of the sentence; nothing for a code of another version."""
    try:
        meaning = Reason(Code(site.reason)).sentence
    except ValueError:
        return ""
    return meaning if site.sentence.startswith(meaning) else ""


def _numbered(numbers: list[int]) -> str:
    return f"{'site' if len(numbers) == 1 else 'sites'} {units.ranges(numbers)}"


# JSON.

_SITE_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "kind": str,
    "axis": str,
    "axis_size": int,
    "source": str,
    "path": str,
    "count": int,
    "operand": str,
    "result": str,
    "dots": list,
    "rewritten": bool,
    "reason": str,
    "sentence": str,
    "schedule": str,
    "estimate": (dict, type(None)),
}
_ESTIMATE_FIELDS = tuple(field.name for field in dataclasses.fields(Estimate))
_DERIVED = ("original_s", "benefit_s")
"""What an estimate tells beyond its fields; written for readers of the JSON, and not read back."""


def _site_to_dict(site: Site) -> dict[str, Any]:
    data: dict[str, Any] = {name: getattr(site, name) for name in _SITE_TYPES}
    if site.estimate is not None:
        data["estimate"] = {name: getattr(site.estimate, name) for name in (*_ESTIMATE_FIELDS, *_DERIVED)}
    return data


def _site_from_dict(data: Any, what: str) -> Site:
    _check(data, _SITE_TYPES, what)
    for i, dot in enumerate(data["dots"]):
        if not isinstance(dot, str):
            raise ValueError(f"dots[{i}] of {what} must be a string, not {_json_type(dot)}")
    estimate = data["estimate"]
    if estimate is not None:
        _check(
            estimate, dict.fromkeys((*_ESTIMATE_FIELDS, *_DERIVED), (int, float)), f"the estimate of {what}"
        )
        estimate = Estimate(**{name: estimate[name] for name in _ESTIMATE_FIELDS})
    return Site(**{**data, "dots": tuple(data["dots"]), "estimate": estimate})


def _check(data: Any, types: Mapping[str, type | tuple[type, ...]], what: str) -> None:
    """Raises ValueError unless ``data`` is an object with exactly these fields, of these types."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} must be a JSON object, not {_json_type(data)}")
    if missing := [name for name in types if name not in data]:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    if unknown := [name for name in data if name not in types]:
        raise ValueError(f"{what} has unknown fields: {', '.join(unknown)}")
    for name, expected in types.items():
        # A bool is an int to Python, not to JSON.
        if not isinstance(data[name], expected) or (isinstance(data[name], bool) and expected is not bool):
            options = expected if isinstance(expected, tuple) else (expected,)
            wanted = " or ".join(dict.fromkeys(_JSON_NAMES[option] for option in options))
            raise ValueError(f"{name} of {what} must be {wanted}, not {_json_type(data[name])}")
        if isinstance(data[name], int) and data[name].bit_length() > sys.float_info.max_exp:
            raise ValueError(f"{name} of {what} is too large: it has {data[name].bit_length()} bits")


_JSON_NAMES: Mapping[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def _json_type(value: Any) -> str:
    return _JSON_NAMES.get(type(value), type(value).__name__)
