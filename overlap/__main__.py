"""The command line: ``python -m overlap``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import overlap
from overlap import ab_command, calibrate_command, demo, inspect_command, plan_command


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
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help()
        return 0
    # A pipe in an encoding without arrows gets question marks, not a traceback.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
