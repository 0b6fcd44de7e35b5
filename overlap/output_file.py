"""Files that are written: a command that measures asks whether it can before, not after minutes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes a file, in UTF-8, and returns its path.

    Raises:
      TypeError: ``path`` is no path.
      OSError: it cannot be written; it has the path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"give the path of the file to write, not {type(path).__name__}")
    target = Path(path)
    try:
        target.write_text(text, "utf-8")
    except OSError as error:
        error.filename = error.filename or os.fspath(path)  # none of a disk that is full
        raise
    return target


def check_outputs(
    files: Mapping[str, str | os.PathLike[str] | None],
    *,
    read: Iterable[str | os.PathLike[str] | None] = (),
) -> None:
    """Refuses files that could not all be written. Nothing is written.

    Args:
      files: option, such as "--html", → the file that it names; None where it is not given.
      read: files that are read, and would be lost; None for one that is not given.

    Raises:
      ValueError: an option names no file, two the same, or one of those that are read.
      OSError: a file cannot be written there; it has the path.
    """
    options: dict[str, str] = {}
    inputs = {os.path.realpath(path) for path in read if path is not None}
    for option, path in files.items():
        if path is None:
            continue
        if not str(path):
            raise ValueError(f"{option} names no file: give it the path of one")
        check_writable(path)
        # What is no regular file, such as /dev/null, loses nothing.
        one = os.path.realpath(path)
        if one in inputs:
            raise ValueError(f"{option} names {path}, which is read: name another file")
        if one in options and not (os.path.exists(one) and not os.path.isfile(one)):
            raise ValueError(f"{options[one]} and {option} name one file, {path}: give each its own")
        options[one] = option


def check_directory(path: str | os.PathLike[str]) -> None:
    """Raises OSError, with the path, if there is no such directory and none can be made. None is made."""
    target = Path(path)
    there = next(each for each in (target, *target.absolute().parents) if each.exists())
    reason = 0
    if not there.is_dir():
        reason = errno.ENOTDIR
    elif not os.access(there, os.W_OK):
        reason = errno.EACCES
    if reason:
        raise OSError(reason, os.strerror(reason), str(path))


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises OSError, with the path, if no file can be written there. Nothing is written."""
    target = Path(path)
    reason = 0
    if target.is_dir():
        reason = errno.EISDIR
    elif not target.parent.is_dir():
        reason = errno.ENOENT
    elif not os.access(target if target.exists() else target.parent, os.W_OK):
        reason = errno.EACCES
    if reason:
        raise OSError(reason, os.strerror(reason), str(path))
