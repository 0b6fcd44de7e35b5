"""The command line: ``python -m overlap``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import overlap
from overlap import ab_command, calibrate_command, demo, inspect_command, plan_command, split_command

CLOSED: Final = 141
"""The exit status where nobody reads the output any more: a shell's of a program that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m overlap",
        description="Hides communication behind matrix multiplication in JAX programs.",
    )
    parser.add_argument("--version", action="version", version=f"overlap-collectives {overlap.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    demo.add_commands(commands)
    ab_command.add_commands(commands)
    inspect_command.add_commands(commands)
    calibrate_command.add_commands(commands)
    plan_command.add_commands(commands)
    split_command.add_commands(commands)
    # Python has no stream for what was closed before it began (>&-).
    nowhere = Path(os.devnull)
    sys.stdout, sys.stderr = sys.stdout or nowhere.open("w"), sys.stderr or nowhere.open("w")
    # A pipe in an encoding without arrows gets question marks, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help()
        return 0
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever reads has seen enough, as `head` has. What Python would still flush at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except OSError as error:
        if error.filename is not None:
            raise
        # A disk that is full, of what the output is redirected to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"overlap: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
