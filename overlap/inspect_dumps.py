"""Finds the scheduled modules in files and in the directories that ``--xla_dump_to`` fills."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlap.hlo.module import Module
from overlap.hlo.parse import ParseError, parse
from overlap.units import printable

SUFFIX: Final = "after_optimizations.txt"
"""How XLA ends the name of the dump that is of use: ``cpu_…``, ``gpu_…``, on TPU without either."""

TEXT_SUFFIXES: Final = (".txt", ".hlo")
"""Names that ``compiled.as_text()`` may have been saved under."""

_PROTO_SUFFIXES: Final = (".pb", ".binpb", ".pbtxt", ".textproto", ".hlo_snapshot")
_GZIP: Final = b"\x1f\x8b"
_HEADER: Final = "HloModule"
_SCHEDULED: Final = "is_scheduled=true"


class DumpError(Exception):
    """A path from which no module can be had; the message is a sentence that says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Dump:
    """A module and the file that it was read from."""

    path: Path
    module: Module


def find(path: Path) -> list[Path]:
    """The files of the modules at a path: itself, or those of a dump directory, by name.

    A directory without any ``after_optimizations.txt`` may hold texts under other names; those that begin
    like a scheduled module are taken.

    Raises:
      DumpError: nothing is there, or nothing that could be read.
    """
    try:
        if not path.is_dir():
            if not path.exists():
                raise DumpError(f"{path}: there is no such file or directory.")
            if path.is_char_device() or path.is_block_device():
                raise DumpError(f"{path}: this is a device, not a file.")
            return [path]
        files = sorted(entry for entry in path.iterdir() if entry.is_file())
        found = [file for file in files if _unzipped(file).endswith(SUFFIX)]
        texts = [file for file in files if _unzipped(file).endswith(TEXT_SUFFIXES)]
        found = found or [file for file in texts if _begins_like_a_schedule(file)]
    except OSError as error:
        raise DumpError(_cannot_read(path, error)) from error
    if found:
        return found
    if not files:
        raise DumpError(
            f"{path}: the directory is empty; run the program with XLA_FLAGS=--xla_dump_to={path}."
        )
    if any(_is_proto(file) for file in files):
        raise DumpError(f"{path}: it holds modules as protocol buffers only. {_AS_TEXT}")
    raise DumpError(
        f"{path}: none of its {len(files)} files is a module after optimizations (…{SUFFIX}). "
        "XLA_FLAGS=--xla_dump_to writes those when a program compiles; one that comes from jax's compilation "
        "cache (jax_compilation_cache_dir) does not."
    )


def read(path: Path) -> Dump:
    """The module in a file, which may be compressed by gzip.

    Raises:
      DumpError: the file cannot be read, or is no scheduled module in the text form of HLO.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DumpError(_cannot_read(path, error)) from error
    if data.startswith(_GZIP):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise DumpError(f"{path}: this is compressed by gzip, and damaged: {error}") from error
    if not data.strip():
        raise DumpError(f"{path}: the file is empty.")
    try:
        if b"\0" in data[:4096]:
            raise UnicodeError("a null character")
        text = data.decode("utf-8-sig")
    except UnicodeError as error:
        what = "a protocol buffer" if _is_proto(path) else "binary"
        raise DumpError(f"{path}: this is {what}, not text. {_AS_TEXT}") from error
    if _is_proto(path):
        raise DumpError(f"{path}: this is a protocol buffer in text form, not HLO. {_AS_TEXT}")
    if (other := _other_language(text)) is not None:
        raise DumpError(
            f"{path}: this is {other}, from before the compiler. Inspect what it makes of it: "
            "jitted.lower(…).compile().as_text()."
        )
    # A text from before optimizations need not be one that can be parsed.
    header = text.split("\n", 1)[0]
    if header.startswith(_HEADER) and _SCHEDULED not in header:
        raise DumpError(
            f"{path}: the module is not scheduled, so nothing says in which order it runs. Give the "
            f"dump from after optimizations (…{SUFFIX}), or compiled.as_text()."
        )
    try:
        return Dump(path, parse(text))
    except ParseError as error:
        raise DumpError(f"{path}: " + "\n".join(map(printable, str(error).split("\n")))) from error


def pairs(found: Sequence[Sequence[Dump]]) -> Iterator[tuple[Dump, ...]]:
    """What to show together: before and after where there are two paths, else each module alone.

    Two paths of one module each are a pair, whatever the names; of two directories, modules of one name are,
    in order of appearance. What has no counterpart stands alone.
    """
    if len(found) != 2:
        yield from ((dump,) for dumps in found for dump in dumps)
        return
    before, after = (list(dumps) for dumps in found)
    if len(before) == len(after) == 1:
        yield before[0], after[0]
        return
    for dump in before:
        match = next((other for other in after if other.module.name == dump.module.name), None)
        if match is None:
            yield (dump,)
        else:
            after.remove(match)
            yield dump, match
    yield from ((dump,) for dump in after)


_AS_TEXT: Final = (
    "inspect reads HLO text: dump with XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text', or save "
    "compiled.as_text()."
)


def _is_proto(path: Path) -> bool:
    return path.name.endswith(_PROTO_SUFFIXES)


def _unzipped(file: Path) -> str:
    """The file's name, without the ending that says that it is compressed."""
    return file.name.removesuffix(".gz")


def _begins_like_a_schedule(file: Path) -> bool:
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rb") as stream:
            first = stream.readline(1 << 16)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return False
    return first.startswith(_HEADER.encode()) and _SCHEDULED.encode() in first


def _other_language(text: str) -> str | None:
    """The name of the other form of a program that people may have at hand, or None."""
    start = text.lstrip()[:2000]
    if start.startswith(("module @", "module {", "#loc", "module attributes")):
        return "StableHLO"
    return "a jaxpr" if start.startswith("{ lambda") else None


def _cannot_read(path: Path, error: OSError) -> str:
    return f"{path}: cannot be read ({error.strerror or error})."
