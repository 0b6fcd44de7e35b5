"""Files that a command writes once it has measured: whether it can is asked before, not after minutes."""

from __future__ import annotations

import errno
import os
from pathlib import Path


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
