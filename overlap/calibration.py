"""Measures the attached devices for the cost model: matmuls, memory, links, and what runs beside what."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from cost_model import Hardware, Matmul, Topology, matmul_s
from cost_model.calibration import AxisMeasured, Calibration, base_hardware, measured_hardware
from cost_model.fitting import HopFit, Timing, fit_hop, fit_matmuls, hidden, slope
from overlap.calibrate_programs import STEPS, MeshPrograms, Programs, Run
from overlap.progress_bar import Progress

Clock = Callable[[], float]
Key = TypeVar("Key", bound=Hashable)

OVERLAPPING: Final = 0.5
"""The share of a hop that must be hidden beside a matmul for the hardware to count as overlapping."""

OPPOSITE: Final = 1.5
"""Hops in both directions overlap if they take less than so many times one."""

MOST_REPEATS: Final = 256

FEWEST: Final = 2
"""Times that the shorter run of two does a thing: compilers unfold a loop of a single turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
      rounds: how often each thing is timed, all things in turn.
      target_s: how long one timed run should take, about; what is shorter is repeated.
      matmuls: (m, k, n) on each device.
      dtypes: of the matmuls, the most important first.
      copies: bytes of the arrays that are read and written.
      hops: bytes of messages.
    """

    rounds: int
    target_s: float
    matmuls: tuple[tuple[int, int, int], ...]
    dtypes: tuple[str, ...]
    copies: tuple[int, ...]
    hops: tuple[int, ...]


CPU_QUICK: Final = Effort(
    rounds=5,
    target_s=2e-3,
    matmuls=((8, 64, 64), (32, 128, 128), (64, 256, 256), (128, 256, 512), (256, 512, 512)),
    dtypes=("float32",),
    copies=(2**20, 2**22, 2**23),
    hops=(2**8, 2**12, 2**16, 2**20, 2**22),
)
CPU: Final = dataclasses.replace(
    CPU_QUICK,
    rounds=15,
    target_s=1e-2,
    matmuls=(
        *CPU_QUICK.matmuls,
        *((33, 256, 260), (129, 520, 512), (512, 512, 512), (256, 1024, 1024), (1024, 1024, 1024)),
    ),
    dtypes=("float32", "bfloat16"),
    copies=(2**22, 2**24, 2**26),
    hops=tuple(2**i for i in range(6, 25, 2)),
)
QUICK: Final = Effort(
    rounds=7,
    target_s=5e-3,
    matmuls=(
        *((8, 256, 256), (64, 1024, 1024), (136, 2048, 2048), (512, 4096, 4096), (264, 8192, 1152)),
        *((2048, 4096, 4096), (4096, 8192, 4096)),
    ),
    dtypes=("bfloat16", "float32"),
    copies=(2**26, 2**28, 2**29),
    hops=(2**10, 2**14, 2**18, 2**22, 2**26),
)
FULL: Final = dataclasses.replace(
    QUICK,
    rounds=21,
    target_s=2e-2,
    matmuls=(
        *QUICK.matmuls,
        *((16, 512, 512), (32, 4096, 4096), (72, 4224, 4096), (520, 2176, 4224), (1032, 4096, 1152)),
        *((128, 8192, 8192), (1024, 8192, 8192), (8192, 8192, 8192), (2056, 2304, 2176)),
        # Round sizes are what kernels are made for: an H100 multiplies others up to 20 % slower.
        *((232, 7808, 1856), (360, 4864, 640), (880, 3712, 384), (832, 5888, 3456), (1440, 6656, 2304)),
        *((2816, 320, 1792), (3456, 8704, 1408), (13824, 1152, 3072)),
    ),
    dtypes=("bfloat16", "float32", "int8"),
    copies=(2**26, 2**28, 2**29, 2**30),
    hops=tuple(2**i for i in range(8, 29, 2)),
)


def calibrate(
    *,
    mesh_shape: Sequence[int] | None = None,
    quick: bool = False,
    progress: Progress | None = None,
    effort: Effort | None = None,
) -> Calibration:
    """Measures all attached devices at once and fits the cost model's `Hardware` to them.

    In a job of several processes every process calls this, and every process gets the same numbers: those
    that process 0 measured.

    Args:
      mesh_shape: devices along each mesh axis whose links are measured; one axis of all devices if None.
      quick: fewer shapes and rounds: seconds rather than minutes.
      progress: is told how far it is.
      effort: what is measured, in place of what the platform and `quick` suggest.

    Raises:
      ValueError: `mesh_shape` is none, or does not have as many devices as there are, the platform is
        unknown, or the times are too noisy to tell anything.
    """
    shape = (jax.device_count(),) if mesh_shape is None else _sizes(mesh_shape)
    device = jax.devices()[0]
    kind, platform = device.device_kind, device.platform
    base = base_hardware(kind, platform)
    if math.prod(shape) != jax.device_count() or min(shape) < 1:
        raise ValueError(
            f"a mesh of {'x'.join(map(str, shape))} has {math.prod(shape)} devices, and "
            f"{jax.device_count()} are attached"
        )
    names = tuple(f"axis{number}" for number in range(len(shape)))
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    if effort is None:
        effort = (CPU_QUICK if quick else CPU) if platform == "cpu" else (QUICK if quick else FULL)
    session = _Session(mesh, MeshPrograms(mesh), base, effort, time.perf_counter, progress)
    return session.calibration(kind, platform)


def _sizes(mesh_shape: object) -> tuple[int, ...]:
    """The devices along each axis of a mesh, of one axis at least.

    Raises:
      ValueError: it is no shape of a mesh.
    """
    sizes = tuple(mesh_shape) if isinstance(mesh_shape, Iterable) else ()
    if not sizes or not all(isinstance(size, int | np.integer) for size in sizes):
        raise ValueError(f"mesh_shape is devices along each axis, such as (2, 4), got {mesh_shape!r}")
    return sizes


class _Session:
    """One calibration: what is measured on which mesh."""

    def __init__(
        self,
        mesh: Mesh,
        programs: Programs,
        base: Hardware,
        effort: Effort,
        clock: Clock,
        progress: Progress | None,
    ) -> None:
        self.mesh = mesh
        self.programs = programs
        self.base = base
        self.effort = effort
        self.clock = clock
        self.progress = progress
        self.axes = [name for name in mesh.axis_names if mesh.shape[name] > 1]
        first = len(effort.matmuls) * len(effort.dtypes) + len(effort.copies)
        first += len(effort.hops) * len(self.axes)
        self.total = (1 + effort.rounds) * (first + 5 * len(self.axes))
        self.done = 0

    def calibration(self, kind: str, platform: str) -> Calibration:
        """Measures, fits, and puts everything together."""
        matmuls = [
            Matmul(m=m, k=k, n=n, dtype=dtype)
            for dtype in self.effort.dtypes
            for m, k, n in self.effort.matmuls
        ]
        cases: dict[Any, tuple[Run, int]] = {}
        for matmul in matmuls:
            cases[matmul] = self.programs.matmul(matmul), self._repeats(matmul_s(matmul, self.base))
        for size in self.effort.copies:
            seconds = 2 * size / self.base.hbm_bytes_per_s
            cases["copy", size] = self.programs.copy(size), self._repeats(seconds)
        for axis in self.axes:
            for size in self.effort.hops:
                cases[axis, size] = (
                    self.programs.hop(axis, size, both=False),
                    self._repeats(self._hop_s(size)),
                )
        timed = self._timed(cases)
        hbm = 1 / slope([(2 * size, timed["copy", size].seconds) for size in self.effort.copies])
        fit = fit_matmuls([(m, timed[m].seconds) for m in matmuls], hbm, self.base.matmul_tile)
        fields: dict[str, Any] = {
            "hbm_bytes_per_s": hbm,
            "matmul_overhead_s": fit.overhead_s,
            "matmul_tile": fit.tile,
        }
        spread = {
            "matmul": statistics.median(timed[m].spread for m in matmuls),
            "copy": statistics.median(timed["copy", size].spread for size in self.effort.copies),
        }
        error = {"matmul": fit.error}
        found = []
        for axis in self.axes:
            hop = fit_hop([(size, timed[axis, size].seconds) for size in self.effort.hops])
            spread[f"hop along {axis}"] = statistics.median(
                timed[axis, size].spread for size in self.effort.hops
            )
            error[f"hop along {axis}"] = hop.error
            found.append(self._axis(axis, hop, {m: timed[m].seconds for m in matmuls}))
        fields |= _network(found, self.base)
        rates = [(dtype, fit.flops[dtype]) for dtype in self.effort.dtypes]
        hardware = measured_hardware(self.base, flops=rates, **fields)
        measured = {*fields, "peak_flops", "matmul_efficiency"}
        every = [field.name for field in dataclasses.fields(Hardware) if field.name not in _NAMES]
        return Calibration(
            hardware=hardware,
            device_kind=kind,
            platform=platform,
            devices=self.mesh.size,
            processes=jax.process_count(),
            jax_version=jax.__version__,
            dtypes=self.effort.dtypes,
            measured=tuple(field for field in every if field in measured),
            kept=tuple(field for field in every if field not in measured),
            spread=tuple(spread.items()),
            error=tuple(error.items()),
            axes=tuple(found),
        )

    def _axis(self, axis: str, hop: HopFit, matmuls: Mapping[Matmul, float]) -> AxisMeasured:
        """Whether opposite hops overlap along an axis, and whether hops and matmuls do."""
        large = max(self.effort.hops)
        one_s = max(hop.latency_s, large / hop.bytes_per_s)
        # A matmul and a message that take about as long: else noise in one is as much as the whole other.
        matmul = min(
            (m for m in matmuls if m.dtype == self.effort.dtypes[0]),
            key=lambda m: abs(math.log(matmuls[m] / one_s)),
        )
        size = 4 * round(min(4 * large, max(4096, matmuls[matmul] * hop.bytes_per_s)) / 4)
        hop_s = max(hop.latency_s, size / hop.bytes_per_s)
        timed = self._timed(
            {
                "one": (self.programs.hop(axis, large, both=False), self._repeats(one_s)),
                "both": (self.programs.hop(axis, large, both=True), self._repeats(2 * one_s)),
                "matmul": (self.programs.matmul(matmul), self._repeats(matmuls[matmul])),
                "hop": (self.programs.hop(axis, size, both=False), self._repeats(hop_s)),
                "beside": (
                    self.programs.beside(axis, size, matmul),
                    self._repeats(STEPS * (matmuls[matmul] + hop_s)),
                ),
            }
        )
        share = hidden(timed["matmul"].seconds, timed["hop"].seconds, timed["beside"].seconds / STEPS)
        return AxisMeasured(
            size=self.mesh.shape[axis],
            between=_between(self.mesh, axis, self.base),
            latency_s=hop.latency_s,
            bytes_per_s=hop.bytes_per_s,
            opposite_hops_overlap=timed["both"].seconds < OPPOSITE * timed["one"].seconds,
            overlaps=share >= OVERLAPPING,
        )

    def _hop_s(self, size: int) -> float:
        return max(self.base.hop_latency_s, size / self.base.axis_bytes_per_s)

    def _repeats(self, seconds: float) -> int:
        """How often a thing is done in one timed run. From figures that all processes have in common."""
        return repeats(seconds, self.effort.target_s)

    def _timed(self, cases: Mapping[Key, tuple[Run, int]]) -> dict[Key, Timing]:
        """Times cases in turn, round by round; the same result in every process."""

        def tell() -> None:
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.total)

        found = timings(cases, self.effort.rounds, self.clock, tell)
        values = agreed([(timing.seconds, timing.spread) for timing in found.values()])
        return {
            key: Timing(float(seconds), float(spread))
            for key, (seconds, spread) in zip(found, values, strict=True)
        }


_NAMES: Final = {"name", "device_kinds"}
"""Fields of `Hardware` that nobody measures."""


def repeats(seconds: float, target_s: float) -> int:
    """How often what takes so many seconds is done in one timed run that is to take `target_s`, about."""
    return max(1, min(MOST_REPEATS, round(target_s / seconds)))


def timings(
    cases: Mapping[Key, tuple[Run, int]], rounds: int, clock: Clock, tell: Callable[[], None]
) -> dict[Key, Timing]:
    """Seconds that each case takes once.

    All cases take turns, so that what slows the machine for a while slows them all. A run of 2 + n times less
    a run of two leaves out what it costs to start a program; where noise makes that nonsense, the run of
    2 + n times as a whole bounds it.

    Args:
      cases: what to run, and n.
      rounds: how often.
      clock: seconds.
      tell: is called after each, and after each was tried out.
    """
    for run, more in cases.values():
        run(FEWEST)
        run(FEWEST + more)
        tell()
    times: dict[Key, list[float]] = {key: [] for key in cases}
    for _ in range(rounds):
        for key, (run, more) in cases.items():
            start = clock()
            run(FEWEST)
            middle = clock()
            run(FEWEST + more)
            end = clock()
            once = ((end - middle) - (middle - start)) / more
            times[key].append(once if once > 0 else (end - middle) / (FEWEST + more))
            tell()
    return {key: Timing.of(of) for key, of in times.items()}


def agreed(values: Sequence[tuple[float, float]]) -> Any:
    """What process 0 has, in every process, to the last bit."""
    array = np.asarray(values, np.float64)
    if jax.process_count() == 1:
        return array
    from jax.experimental import multihost_utils

    # As bytes: jax would round float64 to float32.
    sent = multihost_utils.broadcast_one_to_all(np.frombuffer(array.tobytes(), np.uint8))
    return np.frombuffer(np.asarray(sent, np.uint8).tobytes(), np.float64).reshape(array.shape)


def _between(mesh: Mesh, axis: str, base: Hardware) -> str:
    """What joins the devices of an axis: the torus, a switch, or the network between slices or hosts."""
    topology = Topology.from_devices(mesh.devices, base)
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    lines = np.moveaxis(numbers, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    domains = [{topology.places[device].domain for device in line} for line in lines.tolist()]
    if any(len(each) > 1 for each in domains):
        return "network"
    return "switch" if base.network == "switch" else "ici"


def _network(axes: Sequence[AxisMeasured], base: Hardware) -> dict[str, Any]:
    """Fields of `Hardware` for the links: of each kind the slowest axis, as a ring over it has to wait."""
    near = [axis for axis in axes if axis.between != "network"]
    far = [axis for axis in axes if axis.between == "network"]
    fields: dict[str, Any] = {}
    if near:
        fields["link_bytes_per_s"] = min(axis.bytes_per_s for axis in near) / base.links_per_axis
        fields["hop_latency_s"] = max(axis.latency_s for axis in near)
    if far:
        fields["dcn_bytes_per_s"] = min(axis.bytes_per_s for axis in far)
        fields["dcn_latency_s"] = max(axis.latency_s for axis in far)
    if axes:
        fields["opposite_hops_overlap"] = all(axis.opposite_hops_overlap for axis in near or far)
        fields["overlaps"] = all(axis.overlaps for axis in near or far)
    return fields
