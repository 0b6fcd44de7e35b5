"""The command ``python -m overlap ab module:function``: an A/B profile from the command line."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import jax

from overlap.ab_profiling import TRACED_ROUNDS, ab_profile
from overlap.decorator import Overlapped
from overlap.output_file import check_directory, check_outputs, write_text

FEWEST: Final = {"--rounds": 1, "--warmup": 1, "--traced-rounds": 0}
"""The least that each option may be."""


class TargetError(ValueError):
    """What the command line names cannot be profiled; the message tells why, and what would do."""


def add_commands(commands: Any) -> None:
    """Adds ``ab`` to argparse's subcommands."""
    parser = commands.add_parser(
        "ab",
        help="measure a function with the rewrite and without, in turn",
        description=(
            "Runs a decorated function and its original in turn, traces both with jax.profiler, and reports "
            "step times, where the time went, the speed-up with its interval, and whether the results agree. "
            "Exits with 0 if both ran and no result differs, 1 if not, 2 if there is nothing to run."
        ),
        epilog=(
            "TARGET is importable from the current directory. It is a function without arguments that "
            "returns (decorated function, arguments) or (decorated function, arguments, keyword arguments); "
            "or a decorated function with an attribute example_args: the tuple of its arguments, or a "
            "function without arguments that returns it."
        ),
    )
    parser.add_argument("target", metavar="TARGET", help="module:function, such as train:profile")
    parser.add_argument("--rounds", type=int, default=10, help="timed calls of each variant (default: 10)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed calls before that (default: 2)")
    parser.add_argument(
        "--traced-rounds",
        type=int,
        default=TRACED_ROUNDS,
        help=f"traced calls of each (default: {TRACED_ROUNDS})",
    )
    parser.add_argument(
        "--trace-dir", metavar="DIR", help="where the trace goes (default: a temporary directory)"
    )
    parser.add_argument("--html", metavar="FILE", help="write the page with both timelines there")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Profiles the target, prints the report, and returns the exit status."""
    from rich.console import Console

    try:
        _check_numbers(arguments)
        function, args, kwargs = resolve(arguments.target)
        if jax.process_index() == 0:
            measured = getattr(sys.modules[arguments.target.partition(":")[0]], "__file__", None)
            check_outputs({"--json": arguments.json, "--html": arguments.html}, read=[measured])
        if arguments.trace_dir == "":
            raise ValueError("--trace-dir names no directory: give it the path of one")
        if arguments.trace_dir is not None and arguments.traced_rounds:
            check_directory(arguments.trace_dir)
    except ValueError as error:
        print(f"overlap ab: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"overlap ab: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    try:
        report = ab_profile(
            function,
            *args,
            rounds=arguments.rounds,
            warmup=arguments.warmup,
            traced_rounds=arguments.traced_rounds,
            trace_dir=arguments.trace_dir,
            **kwargs,
        )
    except OSError as error:
        where = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"overlap ab: cannot write {where}", file=sys.stderr)
        return 2
    except (TypeError, ValueError) as error:
        print(f"overlap ab: {error}", file=sys.stderr)
        return 2
    if report.is_main:
        if sys.stdout.isatty():
            Console(highlight=False).print(report)
        else:
            print(report.text())
        try:
            if arguments.json is not None:
                write_text(arguments.json, report.to_json() + "\n")
            if arguments.html is not None:
                report.to_html(arguments.html)
        except OSError as error:
            print(f"overlap ab: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
            return 2
    return 1 if report.failures or report.agreement.agreed is False else 0


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Refuses numbers of rounds that are too small, in the words of the command line.

    Raises:
      ValueError: one is.
    """
    for option, least in FEWEST.items():
        number = getattr(arguments, option.removeprefix("--").replace("-", "_"))
        if number < least:
            raise ValueError(f"{option} must be {least} at least, not {number}")


def resolve(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The decorated function that a target names, and the arguments to call it with.

    Args:
      target: ``module:function``; the name may be dotted (``module:Class.method``).

    Raises:
      TargetError: there is no such thing, it gives no function and arguments, or it raises; then the message
        holds the traceback, from the target's own line on.
    """
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise TargetError(f"name what to profile as module:function, not {target!r}")
    if module_name.endswith(".py"):
        file = Path(module_name)
        raise TargetError(
            f"name the module, not its file: {file.stem}:{path}, run in {file.parent.resolve()}"
        )
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise TargetError(f"{module_name!r} is no module's name: name one on Python's path, as train:profile")
    # As ``python -m`` has it; an installed entry point has not.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise TargetError(f"there is no module {error.name!r} on Python's path or in {here}") from error
        raise TargetError(f"{module_name} imports {error.name!r}, which is not installed") from error
    except Exception as error:
        raise TargetError(_failed(f"importing {module_name}", error)) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise TargetError(f"{target}: there is no {name!r} in {module_name}")
        found = getattr(found, name)
    function = getattr(found, "__func__", found)
    if isinstance(function, Overlapped):
        example, named = getattr(found, "example_args", None), f"{target}.example_args"
        if example is None:
            raise TargetError(
                f"{target} has no arguments to run with: set its attribute example_args to a tuple, or to a "
                "function that returns one; or name a function that returns (decorated function, arguments)"
            )
        return found, _tuple(_called(example, named) if callable(example) else example, named), {}
    if not callable(found):
        raise TargetError(f"{target} is no function but {type(found).__name__}")
    given = _called(found, target)
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise TargetError(
            f"{target} must return (decorated function, arguments), not {type(given).__name__}"
            + (f" of {len(given)}" if isinstance(given, tuple) else "")
        )
    kwargs = given[2] if len(given) == 3 else {}
    if not isinstance(kwargs, dict):
        raise TargetError(f"the keyword arguments of {target} must be a dict, not {type(kwargs).__name__}")
    return given[0], _tuple(given[1], f"the arguments of {target}"), kwargs


def _called(function: Any, what: str) -> Any:
    """What a function without arguments returns."""
    try:
        inspect.signature(function).bind()
    except ValueError:
        pass  # of some builtins there is no signature
    except TypeError as error:
        raise TargetError(
            f"{what} takes arguments ({error}): name a function without, that returns (decorated function, "
            "arguments)"
        ) from error
    try:
        return function()
    except Exception as error:
        raise TargetError(_failed(what, error)) from error


def _failed(what: str, error: Exception) -> str:
    """What failed, with the error's traceback: without the frames that led to the target's own."""
    frames = error.__traceback__
    while frames is not None and _leads_there(frames):
        frames = frames.tb_next
    shown = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return f"{what} failed:\n{shown}"


def _leads_there(frame: TracebackType) -> bool:
    """Whether a frame is this file's, or the importer's."""
    file = frame.tb_frame.f_code.co_filename
    return file in (__file__, importlib.__file__) or file.startswith("<frozen importlib")


def _tuple(args: Any, what: str) -> tuple[Any, ...]:
    if not isinstance(args, tuple | list):
        raise TargetError(f"{what} must be a tuple, not {type(args).__name__}")
    return tuple(args)
