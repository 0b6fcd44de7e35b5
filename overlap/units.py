"""Times, sizes and lists of numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them: 12.3 µs, 1.23 ms, 4.56 s. What is under half a nanosecond is 0."""
    if abs(seconds) < 5e-10:
        return "0 µs"
    scale, unit = scale_of(seconds)
    return f"{digits(seconds * scale)} {unit}"


def scale_of(seconds: float) -> tuple[float, str]:
    """The factor from seconds to the unit that suits a time, and the unit's name."""
    if seconds < 1e-3:
        return 1e6, "µs"
    return (1e3, "ms") if seconds < 1 else (1, "s")


def digits(value: float) -> str:
    """With three digits at least: 1.23, 12.3, 123, 1234; what is too little for that is 0.00."""
    rounded = float(f"{value:.3g}")  # 99.99 is written as 100
    return f"{value:.{0 if rounded >= 100 else 1 if rounded >= 10 else 2}f}"


def size(count: int) -> str:
    """Bytes in the unit that suits them: 512 B, 1.5 KiB, 126 MiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{count} B" if units[0] == "B" else f"{digits(value)} {units[0]}"


def percent(part: float, whole: float) -> str:
    """``part`` in hundredths of ``whole``: 47 %."""
    return f"{part / whole:.0%}".replace("%", " %") if whole > 0 else "0 %"


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers with runs drawn together: 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def printable(text: str) -> str:
    """The text of a dump, safe on a terminal: control characters and direction marks become ``\ufffd``."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def short_operation(op_name: str) -> str:
    """The path of a traced operation without the functions that it was jitted in."""
    parts = op_name.split("/")
    while len(parts) > 1 and parts[0].startswith(("jit(", "pjit(")):
        del parts[0]
    return "/".join(parts)
