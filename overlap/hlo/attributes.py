"""What stands behind an instruction's parentheses: attributes, metadata, the compiler's notes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

STRING: Final = r'"(?:[^"\\]++|\\.)*+"'
"""Pattern of a quoted string."""


def nested(brackets: str, depth: int) -> str:
    """Pattern of a pair of brackets with what stands between them; pairs of a kind nest `depth` deep."""
    left, right = map(re.escape, brackets)
    inside = rf'[^{left}{right}"]++|{STRING}'
    pattern = rf"{left}(?:{inside})*+{right}"
    for _ in range(depth):
        pattern = rf"{left}(?:{inside}|{pattern})*+{right}"
    return pattern


_PIECE: Final = rf"""[^,"{{}}()\[\]]++|{STRING}|{nested("{}", 8)}|{nested("()", 3)}|{nested("[]", 3)}"""
# A comma inside a value has no blank behind it, but for the one before a mesh's order of devices.
_ATTRIBUTE: Final = re.compile(
    rf", ([\w.\-]+)=((?:{_PIECE}|,(?! )|, (?=device_ids=\())++)", re.DOTALL | re.ASCII
)
_TOKEN: Final = re.compile(rf'{STRING}|[{{}}()\[\]",]', re.DOTALL)
_KEY: Final = re.compile(r"([\w.\-]+)=", re.ASCII)
_DEVICES: Final = ", device_ids=("  # goes on with the value before it: a mesh and the order of its devices
_CLOSES: Final = {"}": "{", ")": "(", "]": "["}

_FIELD: Final = re.compile(
    rf"([\w\-]+)=({STRING}|[{{](?:[^{{}}\"]++|{STRING})*+[}}]|[^\s{{}}\"]+)", re.DOTALL
)
_ESCAPE: Final = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_LETTERS: Final = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


@dataclass(frozen=True, slots=True)
class Frames:
    """A module's tables of source lines: by number, as ``stack_frame_id`` gives it."""

    files: Mapping[int, str] = field(default_factory=dict)
    locations: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Number of the file and the line, by number of the location."""
    frames: Mapping[int, int] = field(default_factory=dict)
    """Number of the location, by number of the frame."""

    def source(self, frame: int) -> tuple[str, int]:
        """File and line of a frame's innermost call; "" and 0 where the tables do not say."""
        file, line = self.locations.get(self.frames.get(frame, 0), (0, 0))
        name = self.files.get(file, "")
        return (name, line) if name else ("", 0)


def split(text: str) -> list[tuple[str, str]]:
    """Cuts ``, kind=kLoop, calls=%f, metadata={…}`` into names and values as printed.

    Raises:
      ValueError: brackets or quotes do not match, or a value has no name; says which.
    """
    pairs = _ATTRIBUTE.findall(text)
    if sum(len(name) + len(value) + 3 for name, value in pairs) == len(text):
        return pairs
    return _split_slowly(text)


def _split_slowly(text: str) -> list[tuple[str, str]]:
    """As `split`, for brackets at any depth, and to say what is wrong."""
    opened: list[str] = []
    cuts: list[int] = []
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == '"':
            raise ValueError("a string is not closed")
        if token in "{([":
            opened.append(token)
        elif token in _CLOSES:
            if not opened or opened.pop() != _CLOSES[token]:
                raise ValueError(f"{token!r} closes nothing")
        elif token == "," and not opened and _is_cut(text, match.start()):
            cuts.append(match.start())
    if opened:
        raise ValueError(f"{opened[-1]!r} is not closed")
    if text.strip() and (not cuts or text[: cuts[0]].strip()):
        raise ValueError(f"no attribute: {text[:40]!r}")
    pairs = []
    for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        part = text[start + 1 : end].strip()
        key = _KEY.match(part)
        if key is None or key.end() == len(part):
            raise ValueError(f"no attribute: {part[:40]!r}")
        pairs.append((key[1], part[key.end() :]))
    return pairs


def _is_cut(text: str, at: int) -> bool:
    """Whether a comma stands between two attributes."""
    return text.startswith(", ", at) and not text.startswith(_DEVICES, at)


def depth(text: str) -> int:
    """How many braces a text opens and does not close; strings do not count.

    Raises:
      ValueError: a string is not closed.
    """
    opened = 0
    for match in _TOKEN.finditer(text):
        if match[0] == '"':
            raise ValueError("a string is not closed")
        opened += (match[0] == "{") - (match[0] == "}")
    return opened


def unquote(text: str) -> str:
    r"""The string that ``"a\"b\n\303\251"`` spells; text without quotes is returned as it is."""
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return text
    if "\\" not in text:
        return text[1:-1]

    def character(match: re.Match[bytes]) -> bytes:
        octal, hexadecimal, letter = match.groups()
        if octal:
            return bytes([int(octal, 8) & 255])
        if hexadecimal:
            return bytes([int(hexadecimal, 16)])
        return _LETTERS.get(letter, letter)

    raw = _ESCAPE.sub(character, text[1:-1].encode("utf-8", "surrogatepass"))
    return raw.decode("utf-8", "replace")


def number(value: object) -> int | None:
    """The count that a text or a JSON value spells; None for all else, and for too many digits."""
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    return int(text) if text.isdecimal() and len(text) < 19 else None


def notes(text: str) -> Any:
    """A ``backend_config``: parsed where it is JSON, quoted or not, else its text; None if there is none."""
    if not text:
        return None
    plain = unquote(text)
    try:
        return json.loads(plain)
    except (ValueError, RecursionError):
        return plain


def metadata(text: str, frames: Frames) -> tuple[str, str, int]:
    """Name of the traced operation, file and line, from ``{op_name="…" stack_frame_id=2}`` or the older
    ``{op_name="…" source_file="…" source_line=3}``; "" and 0 where unknown."""
    fields: dict[str, str] = dict(_FIELD.findall(text, 1, len(text) - 1)) if text else {}
    name, file = unquote(fields.get("op_name", "")), unquote(fields.get("source_file", ""))
    if file:
        return name, file, number(fields.get("source_line")) or 0
    return name, *frames.source(number(fields.get("stack_frame_id")) or 0)
