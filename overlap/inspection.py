"""``overlap.inspect``: what the compiler made of a function, with the rewrite and without."""

from __future__ import annotations

import dataclasses
import html
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax

from cost_model import Hardware, hardware_of
from overlap.decorator import Overlapped
from overlap.exposure import by_exposed_time, hint
from overlap.hlo.timeline import Timeline
from overlap.output_file import write_text
from overlap.plain_text import columns, printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

SCHEMA: Final = 1
"""Version of the JSON form of an ``Inspection``."""

NOT_A_TERMINAL: Final = 80
"""Columns of the table where there is no terminal to ask."""

FRAME_PX: Final = 720
"""Height of the page in a notebook."""


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The modelled timelines of one program, or of two versions of it; ``overlap.inspect`` makes it.

    ``print(inspection)`` shows the collectives by exposed time, ``rich.print`` does so in colour, and a
    notebook shows the page of ``to_html``. All times are modelled.

    Attributes:
      name: of the program.
      programs: (label, timeline) of each version, such as "original" and "overlapped"; the label of a lone
        one may be empty.
    """

    name: str
    programs: tuple[tuple[str, Timeline], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "programs", tuple(self.programs))
        if not self.programs:
            raise ValueError("an inspection needs a program")

    @property
    def titled(self) -> tuple[tuple[str, Timeline], ...]:
        """Title and timeline of each program; the title is its label with the module's name."""
        return tuple((f"{label} ({t.module})" if label else t.module, t) for label, t in self.programs)

    @property
    def collectives(self) -> int:
        """How many collective instructions the programs have together."""
        return sum(len(timeline.collectives) for _, timeline in self.programs)

    def __str__(self) -> str:
        return printable(self.text())

    def text(self, width: int | None = None) -> str:
        """The table as plain text.

        Args:
          width: columns that no line exceeds; None for the terminal's, or 80 where there is none.
        """
        from overlap import timeline_table

        return timeline_table.text(self, columns(NOT_A_TERMINAL) if width is None else width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from overlap import timeline_table

        yield from timeline_table.renderables(self)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes one page that needs no network: timelines, totals, collectives, assumptions.

        Args:
          path: of the file, which is replaced if it exists.

        Returns:
          The path.

        Raises:
          TypeError: ``path`` is no path.
        """
        from overlap.timeline_page import page

        return write_text(path, page([self]))

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Writes Trace Event JSON, which https://ui.perfetto.dev opens.

        Args:
          path: of the file, which is replaced if it exists.

        Returns:
          The path.

        Raises:
          TypeError: ``path`` is no path.
        """
        from overlap import trace_events

        return write_text(path, trace_events.to_json([self]))

    def to_json(self) -> str:
        """The figures as JSON; docs/inspect.md lists the fields. Times are seconds."""
        return to_json([self])

    def _repr_html_(self) -> str:
        """The page, in a frame of its own that can reach neither the notebook nor the network."""
        from overlap.timeline_page import page

        content = html.escape(page([self]))
        style = f"width:100%;height:{FRAME_PX}px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{content}"></iframe>'


def inspect(
    fun: Callable[..., Any],
    *args: Any,
    hardware: str | os.PathLike[str] | Hardware | None = None,
    **kwargs: Any,
) -> Inspection:
    """Compiles a function, and its original if it is decorated, and models when each instruction runs.

    Nothing is run. The function is compiled for the devices of its arguments (those of a mesh that is there
    to compile for only will do) or of the meshes that it uses, else for the default ones.

    Args:
      fun: what ``overlap_collectives`` returned, for both versions of it; or any other function, jitted or
        not, for that one alone.
      *args, **kwargs: as for a call; ``jax.ShapeDtypeStruct``, with shardings where they matter, will do.
      hardware: what is modelled, as the decorator takes it: a name, a file of ``calibrate``, or a
        ``cost_model.Hardware``. If None, what the decorator was given, else that of the devices.

    Returns:
      The timelines: of "original" and "overlapped", or of the one version.

    Raises:
      TypeError: ``fun`` is no function.
      ValueError: the hardware is unknown.
      Exception: whatever tracing or compiling raises.
    """
    if not callable(fun):
        raise TypeError(f"overlap.inspect takes a function, not {type(fun).__name__}")
    if isinstance(method := getattr(fun, "__func__", None), Overlapped):
        return inspect(method, fun.__self__, *args, hardware=hardware, **kwargs)  # type: ignore[attr-defined]
    if isinstance(hardware, str | os.PathLike):
        hardware = hardware_of(hardware)
    if isinstance(fun, Overlapped):
        hardware = hardware or fun.hardware
        versions = [("original", fun.original), ("overlapped", fun)]
    else:
        versions = [("", fun if isinstance(fun, jax.stages.Wrapped) else jax.jit(fun))]
    compiled = {label: version.trace(*args, **kwargs).lower().compile() for label, version in versions}
    return inspect_compiled(str(getattr(fun, "__name__", type(fun).__name__)), compiled, hardware)


def inspect_compiled(name: str, programs: Mapping[str, Any], hardware: Hardware | None = None) -> Inspection:
    """As ``inspect``, for programs that are compiled already.

    Args:
      name: of the program.
      programs: label → what ``lower(…).compile()`` returned, for each version.
      hardware: what is modelled; None for that of the devices.
    """
    timelines = ((label, _timeline(compiled, hardware)) for label, compiled in programs.items())
    return Inspection(name, tuple(timelines))


def _timeline(compiled: Any, hardware: Hardware | None) -> Timeline:
    """The timeline of a compiled program, on the devices that it is compiled for if no hardware is named."""
    from overlap.hlo.parse import parse
    from overlap.hlo.simulate import simulate

    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices, module = devices_of(shardings), parse(compiled.as_text())
    if hardware is None or not devices:
        return simulate(module, hardware, devices or None)
    # Devices without coordinates do not say where those of a torus would be.
    placed = hardware.network == "switch" or hasattr(devices[0], "coords")
    timeline = simulate(module, hardware, devices if placed else None)
    kind = devices[0].device_kind
    if kind in hardware.device_kinds:
        return timeline
    said = f"The program is the compiler's for {kind}, its schedule too, with the rates of {hardware.name}."
    return dataclasses.replace(timeline, assumptions=(said, *timeline.assumptions))


def devices_of(shardings: Sequence[Any]) -> list[Any]:
    """The devices that run a program, in the order of its partitions, from the shardings of its values.

    Only a mesh tells the order; without one, devices come by id.
    """
    known = [sharding for sharding in shardings if isinstance(sharding, jax.sharding.Sharding)]
    for sharding in known:
        mesh = getattr(sharding, "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh) and mesh.size > 1:
            return list(mesh.devices.flat)
    devices: list[Any] = max((list(sharding.device_set) for sharding in known), key=len, default=[])
    return sorted(devices, key=lambda device: device.id)


def to_json(inspections: Sequence[Inspection]) -> str:
    """The figures of some inspections as one JSON object; docs/inspect.md lists the fields."""
    from overlap import __version__

    return json.dumps(
        {
            "schema": SCHEMA,
            "versions": {"overlap": __version__, "jax": jax.__version__},
            "times": "modelled, in seconds",
            "inspections": [_inspection_to_dict(inspection) for inspection in inspections],
        },
        indent=2,
    )


def _inspection_to_dict(inspection: Inspection) -> dict[str, Any]:
    programs = [{"label": label, **_timeline_to_dict(t)} for label, t in inspection.programs]
    return {"name": inspection.name, "programs": programs}


def _timeline_to_dict(timeline: Timeline) -> dict[str, Any]:
    names = [
        field.name for field in dataclasses.fields(timeline) if field.name not in ("collectives", "events")
    ]
    return {
        **{name: getattr(timeline, name) for name in names},
        "collectives": [{**dataclasses.asdict(c), "hint": hint(c)} for c in by_exposed_time(timeline)],
    }
