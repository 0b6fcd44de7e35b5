"""What compilers hide as written: collectives that devices run beside dots that do not wait for them.

Such a collective costs what it leaves the dots waiting for, and a ring in its place can save no more.
Compiled training steps leave as much exposed as the list schedule of their dots, collectives and, on TPUs,
reductions: of 20 steps on 7x (16 drawn by bench/layers.py, 4 of bench/programs, jax 0.12) what is hidden of
a kind of collective is off by 3.1 % of the step in the mean (3.5 % without the reductions, and 4.6 % were all
in the program's order), and so do small programs for v5e. XLA:GPU leaves dots and collectives in the
program's order. v4, v5p and v6e hide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from typing import Final

from cost_model import Axis, Estimate, Hardware, Matmul, matmul_s
from cost_model.list_schedule import Step, list_schedule
from cost_model.offloaded import Beside, runs_beside
from passes.blocks import REDUCTIONS
from passes.chains import Chain
from passes.collective import Collective, unsupported
from passes.dots import matmul
from passes.graph import Dataflow, Op
from passes.network import Network

_NAMES: Final[Mapping[str, Beside]] = {
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "psum": "all_reduce",
    "reduce_scatter": "reduce_scatter",
}

REDUCING: Final = 2.5
"""How many times longer than reading an array as float32 its reduction takes, as a pass of its own, on TPUs:
2.5 on v5e, of a norm's sums and a softmax's, and 2.2 on 7x, by their compilers' estimates."""

_FLOAT32_BYTES: Final = 4


class Hidden:
    """The collectives of a jaxpr beside its dots.

    What is computed element by element takes no time here, and so hides nothing, and neither does what is in
    the bodies of operations, or collectives of forms that are not decomposed.

    Args:
      flow: the dataflow graph.
      network: the devices that it runs on.
      collectives: all collectives.
      known_s: number of a collective → its seconds, where a chain's price has them.
    """

    def __init__(
        self,
        flow: Dataflow,
        network: Network,
        collectives: Iterable[Collective],
        known_s: Mapping[int, float],
    ) -> None:
        self._flow, self._network = flow, network
        self._seconds: dict[int, float] = {}
        self._beside: set[int] = set()
        hardware = network.hardware
        if hardware is None or not (hardware.offloaded or hardware.lone_matmuls):
            return
        for collective in collectives:
            axis = None if unsupported(flow, collective) else network.axis(collective)
            if axis is None:
                continue
            known = known_s.get(collective.op)
            self._seconds[collective.op] = _collective_s(flow, collective, axis) if known is None else known
            if runs_beside(_NAMES[collective.kind], axis):
                self._beside.add(collective.op)

    def seconds(self, rings: Iterable[tuple[Chain, Estimate]] = ()) -> Mapping[int, float]:
        """Number of a collective → the seconds that dots beside it save; 0 of those that are left out.

        Of how long they run beside it, that is what is longer than it stops the device for.

        Args:
          rings: chains that become rings, with their prices. No other collective runs beside their dots: on
            v5e one that could was seen to wait for the last ones, which are short.
        """
        if not self._beside:
            return {}
        times = {op: (0.0 if op in self._beside else s, s) for op, s in self._seconds.items()}
        times.update((dot, (s, 0.0)) for dot, s in self._dots_s.items())
        for chain, priced in rings:
            dot_s = priced.overlapped_s / len(chain.dots)
            times[chain.collective.op] = 0.0, 0.0
            times.update((dot.op, (dot_s, dot_s)) for dot in chain.dots)
        times.update((op, (s, 0.0)) for op, s in self._passes_s.items())
        steps = [Step(needs, *times.get(op, (0.0, 0.0))) for op, needs in self._needs.items()]
        scheduled = list_schedule(steps, by_need=self._network.leaves_for_last)
        exposed_s = dict(zip(self._needs, scheduled.exposed_s, strict=True))
        stops_s = self._hardware.stops_s
        return {op: max(0.0, times[op][1] - exposed_s[op] - stops_s) for op in self._beside}

    @property
    def _hardware(self) -> Hardware:
        """Known where a collective runs beside dots."""
        assert self._network.hardware is not None
        return self._network.hardware

    @cached_property
    def _needs(self) -> Mapping[int, tuple[int, ...]]:
        """The operations, and of each the positions among them of those whose results it reads."""
        numbers = {index: number for number, index in enumerate(self._flow.live)}
        return {index: tuple(numbers[op] for op in self._flow.before(index)) for index in numbers}

    @cached_property
    def _dots_s(self) -> Mapping[int, float]:
        """Seconds of each dot; those that are alike are priced once."""
        hardware = self._hardware
        priced = cache(lambda of: matmul_s(of, hardware))
        dots = (index for index, op in self._flow.live.items() if op.name == "dot_general")
        return {index: priced(self._matmul(self._flow.ops[index])) for index in dots}

    @cached_property
    def _passes_s(self) -> Mapping[int, float]:
        """Seconds of each reduction, where it was seen to be a pass over an array that hides collectives."""
        hardware = self._hardware
        if hardware.network != "torus":
            return {}
        element_s = REDUCING * _FLOAT32_BYTES / hardware.hbm_bytes_per_s
        reductions = ((index, op) for index, op in self._flow.live.items() if op.name in REDUCTIONS)
        return {index: self._flow.aval(op.inputs[0]).size * element_s for index, op in reductions}

    def _matmul(self, op: Op) -> Matmul:
        lhs, rhs = map(self._flow.aval, op.inputs)
        result = self._flow.avals[op.outputs[0]]
        numbers = op.params["dimension_numbers"]
        return matmul(numbers, lhs.shape, rhs.shape, lhs.dtype, rhs.dtype, result.dtype)


def _collective_s(flow: Dataflow, collective: Collective, axis: Axis) -> float:
    """Seconds of a collective that no chain has."""
    (value,) = flow.ops[collective.op].outputs
    full_bytes = flow.bytes_of(value) * (axis.size if collective.kind == "reduce_scatter" else 1)
    if collective.kind == "all_to_all":
        return axis.all_to_all_s(axis.size * full_bytes)
    return {
        "all_gather": axis.all_gather_s,
        "psum": axis.all_reduce_s,
        "reduce_scatter": axis.reduce_scatter_s,
    }[collective.kind](full_bytes)
