"""The cache of trials on disk: one JSON file per chain and target, safe with several processes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from overlap.trial_times import Failed, Timed, Times
from overlap.warning import warn

logger = logging.getLogger("overlap")

SCHEMA: Final = 1
"""Version of the files."""

VARIABLE: Final = "OVERLAP_CACHE_DIR"
"""Environment variable that names the directory; empty for no cache on disk."""


def default_directory() -> Path | None:
    """Where trials are kept: ``$OVERLAP_CACHE_DIR``, or a directory in the user's cache; None for nowhere."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        try:
            return Path(named).expanduser() if named else None
        except RuntimeError as error:
            _warn(f"{VARIABLE} names {named} ({error}): nothing is kept, and each process tries all anew")
            return None
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "")
        parent = home / "AppData" / "Local"
    elif sys.platform == "darwin":
        base, parent = "", home / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        parent = home / ".cache"
    # A relative path there is to be ignored (XDG Base Directory Specification).
    return (Path(base) if os.path.isabs(base) else parent) / "overlap-collectives"


class ScheduleCache:
    """What trials found, by key, in a directory. Without a usable one nothing is kept, with one warning.

    Args:
      directory: made when something is kept; None for no cache.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._warned = False

    def load(self, key: str, choices: Sequence[object]) -> Times | None:
        """What was kept for a key; None if nothing was, or, with a warning, nothing that can be used."""
        if self._directory is None:
            return None
        path = self._path(self._directory, key)
        try:
            return times_of(json.loads(path.read_bytes()), key, choices)
        except FileNotFoundError:
            return None
        except (ValueError, OverflowError, RecursionError) as error:
            _warn(f"{path} is damaged ({error}): it is ignored, and the schedules are tried again")
            return None
        except OSError as error:
            self._unusable(error)
            return None

    def store(self, key: str, times: Times, choices: Sequence[object], conditions: Mapping[str, Any]) -> None:
        """Keeps what was found for a key, all of it or nothing.

        Args:
          key: of the trial.
          times: what it found.
          choices: that it tried.
          conditions: what readers of the file may want to know; never read back.
        """
        if self._directory is None:
            return
        text = json.dumps({**record(key, times, choices), "conditions": conditions}, indent=1)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # On the same file system, so that taking the name is one step.
            descriptor, draft = tempfile.mkstemp(dir=self._directory, prefix=".", suffix=".draft")
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(draft, self._path(self._directory, key))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(draft)
                raise
        except OSError as error:
            self._unusable(error)

    def _path(self, directory: Path, key: str) -> Path:
        return directory / f"{key}.json"

    def _unusable(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        _warn(
            f"the schedules that were tried cannot be kept in {self._directory} ({error}), so that every "
            f"process tries them anew; {VARIABLE} names another directory, or none if it is empty"
        )


def _warn(message: str) -> None:
    """Warns of a file or directory. Where warnings are errors it is logged.

    Raised it would end the trials of this process, and others, whose files are in order, would wait for it.
    """
    try:
        warn(message)
    except RuntimeWarning:
        logger.warning(message)


def record(key: str, times: Times, choices: Sequence[object]) -> dict[str, Any]:
    """What was found, as JSON values."""
    return {
        "schema": SCHEMA,
        "key": key,
        "original": _timed_record(times.original),
        "rings": [
            {
                "schedule": str(choice),
                **(_failed_record(ring) if isinstance(ring, Failed) else _timed_record(ring)),
            }
            for choice, ring in zip(choices, times.rings, strict=False)
        ],
    }


def _failed_record(failed: Failed) -> dict[str, Any]:
    return {"failure": failed.error, "lasting": failed.lasting}


def _timed_record(timed: Timed) -> dict[str, Any]:
    return {"seconds": timed.seconds, "temporary_bytes": timed.temporary_bytes}


def times_of(data: Any, key: str, choices: Sequence[object]) -> Times:
    """Reads what ``record`` made.

    Raises:
      ValueError: it is of another schema, key or schedules, or a value is missing or impossible.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or data.get("key") != key:
        raise ValueError(f"no object of schema {SCHEMA} and of its own key")
    rings = data.get("rings")
    if not isinstance(rings, list) or not all(isinstance(ring, dict) for ring in rings):
        raise ValueError("its rings are no list of objects")
    named = [str(choice) for choice in choices]
    if [ring.get("schedule") for ring in rings] != named[: len(rings)]:
        raise ValueError("its schedules are others")
    return Times(_timed(data.get("original")), tuple(map(_ring, rings)))


def _ring(data: dict[str, Any]) -> Timed | Failed:
    if "failure" not in data:
        return _timed(data)
    error, lasting = data["failure"], data.get("lasting")
    if not isinstance(error, str) or not isinstance(lasting, bool):
        raise ValueError(f"the failure {error!r} is no text, or {lasting!r} is neither true nor false")
    return Failed(error, lasting)


def _timed(data: Any) -> Timed:
    if not isinstance(data, dict):
        raise ValueError("a time is no object")
    seconds, size = data.get("seconds"), data.get("temporary_bytes", -1)
    # A bool is a number to Python, not here.
    if (
        not isinstance(seconds, int | float)
        or isinstance(seconds, bool)
        or not (size is None or type(size) is int)
    ):
        raise ValueError(f"{seconds!r} s and {size!r} bytes are no numbers")
    return Timed(float(seconds), size)
