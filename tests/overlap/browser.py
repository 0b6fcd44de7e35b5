"""A headless Chromium for tests of pages: what a page becomes, what it looks like, whom it asks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

BROWSER: Final = next((path for name in NAMES if (path := shutil.which(name))), None)

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium is installed (on Debian: apt-get install chromium)"
)

DARK: Final = "--blink-settings=preferredColorScheme=0"
"""Makes the page believe that its reader prefers dark colours."""


def run(page: Path, *flags: str) -> str:
    """Opens a page, waits until its scripts are done, and returns what the browser printed."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--virtual-time-budget=10000",
            f"--user-data-dir={profile}",
            *flags,
            page.resolve().as_uri(),
        ]
        environment = {**os.environ, "HOME": profile}
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=180, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def dom(page: Path, *flags: str) -> str:
    """The page's document as the scripts left it."""
    return run(page, "--dump-dom", *flags)


def screenshot(page: Path, to: Path, *flags: str) -> bytes:
    """A picture of the page, as PNG."""
    run(page, f"--screenshot={to}", "--window-size=640,700", *flags)
    return to.read_bytes()


def asked_for(page: Path, log: Path) -> list[str]:
    """What the page asks the network for; every name leads nowhere.

    Args:
      page: the page.
      log: where the browser may write down all that its network stack does. It asks for things of its own
        accord too, which have no origin.
    """
    dom(page, f"--log-net-log={log}", "--host-resolver-rules=MAP * ~NOTFOUND")
    events = json.loads(log.read_text("utf-8"))["events"]
    said = [event.get("params", {}) for event in events]
    asked = [(what["url"], what["initiator"]) for what in said if "url" in what and "initiator" in what]
    return [url for url, initiator in asked if initiator != "not an origin" and not url.startswith("file:")]
