"""The best way to divide a model over a slice: every split over every choice of its dimensions.

A mesh axis takes a part of some of the slice's dimensions; the tensor axis has the nearest neighbours, then
come fsdp, data and pipeline. What its links are, and which of them it shares, is read from the topology.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from cost_model.axis import Axis
from cost_model.collectives import check_hardware
from cost_model.dtypes import dtype_bytes
from cost_model.hardware import Hardware
from cost_model.layer import AxisName, Split, backward, forward, reduction
from cost_model.layer_time import PassTime, pass_time
from cost_model.plain_chain import Forms, PlainChain, best
from cost_model.ring import Estimate
from cost_model.ring_order import Groups
from cost_model.strategies import Model
from cost_model.topology import Topology
from cost_model.whole import whole

IN_SLICE: Final[tuple[AxisName, ...]] = ("pipeline", "data", "fsdp", "tensor")
"""The mesh axes within a slice, from the slowest to the fastest changing coordinate."""

STATE_BYTES: Final = 8
"""Bytes per weight of Adam's two moments in float32, beside the weight itself."""

Goal = Literal["plain", "overlapped", "ideal"]
GOALS: Final[tuple[Goal, ...]] = get_args(Goal)
Parts = tuple[int, ...]
Dims = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which part of each dimension of a slice every mesh axis has.

    Attributes:
      shape: chips along each dimension; behind a switch, the number of devices.
      parts: per dimension of `shape` the devices of each axis of `IN_SLICE`, whose product it is. One more
        dimension stands for the devices of a chip, where there are several.
    """

    shape: tuple[int, ...]
    parts: tuple[Parts, ...]

    def size(self, axis: AxisName) -> int:
        """Devices on a mesh axis."""
        return math.prod(parts[IN_SLICE.index(axis)] for parts in self.parts)

    def describe(self, axis: AxisName) -> str:
        """The part of the slice that an axis has: "x, z, and 2 of 4 along y". Empty of one device."""
        number = IN_SLICE.index(axis)
        # What it has all of comes first: "2 of 4 along y, z" reads as if it were 2 of each.
        entire, part = [], []
        for dim, parts in enumerate(self.parts):
            if parts[number] == 1:
                continue
            name = "xyzw"[dim] if dim < len(self.shape) else "the chip's devices"
            length = math.prod(parts)
            if parts[number] == length:
                entire.append(name)
            else:
                part.append(f"{parts[number]} of {length} along {name}")
        *words, last = [*entire, *part] or [""]
        return ", ".join([*words, f"and {last}" if words and part else last])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A training step of a model divided in one way.

    Attributes:
      model, split, layout: what is divided, how, and where it lies.
      forward, backward: of one layer and microbatch.
      reduction: of one layer at the end of a step of several microbatches.
      boundary_s: a microbatch's activations sent to the next stage.
      state_bytes: weights and optimizer state of all its layers on one device, without activations.
    """

    model: Model
    split: Split
    layout: Layout
    forward: PassTime
    backward: PassTime
    reduction: PassTime
    boundary_s: float
    state_bytes: float

    def step_s(self, goal: Goal = "overlapped") -> float:
        """Seconds of a step.

        A pipeline of Z stages works through m microbatches in m + Z - 1 slots, each way. Stage boundaries are
        exposed but in the ideal; rings do nothing for them.

        Raises:
          ValueError: the goal is unknown.
        """
        _check_goal(goal)
        slots = self.split.microbatches + self.split.pipeline - 1
        layers = self.model.layers // self.split.pipeline
        once = _seconds(self.forward, goal) + _seconds(self.backward, goal)
        boundary_s = 0.0 if goal == "ideal" else 2 * self.boundary_s
        return slots * (layers * once + boundary_s) + layers * _seconds(self.reduction, goal)

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives of a step on one device, hidden or not."""
        layers = self.model.layers // self.split.pipeline
        each = self.forward.communication_s + self.backward.communication_s
        return layers * (self.split.microbatches * each + self.reduction.communication_s)


def best_splits(
    model: Model,
    hardware: Hardware,
    shape: Sequence[int],
    *,
    axes: Sequence[AxisName] = ("fsdp", "tensor"),
    pods: int = 1,
    microbatches: Sequence[int] = (1,),
    memory_bytes: float = math.inf,
    goal: Goal = "overlapped",
    among: Forms | None = None,
    starts_implied: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[StepTime, ...]:
    """All splits of a model over a slice, the best layout of each, the fastest first.

    Args:
      model: what is trained.
      hardware: one device; of a chip with several devices, one of them.
      shape: chips of a slice along each dimension; behind a switch, `(devices,)`.
      axes: mesh axes within the slice that may have more than one device.
      pods: slices, data parallel over the network between them.
      microbatches: numbers to try where there is a pipeline.
      memory_bytes: what the weights and the optimizer's state of a device may take at most.
      goal: what is to be short; of equal steps the one that communicates less.
      among: the forms of rings to consider; all if None.
      starts_implied: see `PlainChain`.
      progress: told after each layout how many are done, and how many there are.

    Returns:
      one `StepTime` per split that the model allows.

    Raises:
      ValueError: no split fits; the message says why the last one does not, or what the one that takes the
        least memory needs. Or an axis or the goal is unknown, the slice has no devices, there is no slice or
        no memory, or the tokens cannot be cut over the pods.
      TypeError: the model or the hardware is none, or a number of chips or pods no whole number.
    """
    _check_goal(goal)
    if not isinstance(model, Model):
        raise TypeError(f"model must be a Model, got {model!r}")
    check_hardware(hardware)
    shape = tuple(whole(length, "a slice's length") for length in shape)
    if not shape or min(shape) < 1:
        raise ValueError(f"a slice has at least 1 chip along each dimension, got {shape}")
    if whole(pods, "pods") < 1:
        raise ValueError(f"pods {pods}: there is at least 1")
    if model.tokens % pods:
        raise ValueError(f"tokens {model.tokens} cannot be cut evenly over pods {pods}")
    if not memory_bytes > 0:  # so that it refuses NaN too
        raise ValueError(f"memory_bytes {memory_bytes!r} leaves no room for any weight")
    if unknown := [axis for axis in axes if axis not in IN_SLICE]:
        raise ValueError(f"unknown mesh axis {unknown[0]!r}; known: {', '.join(IN_SLICE)}")
    if len(set(axes)) < len(axes):
        raise ValueError(f"a mesh axis stands twice in {', '.join(axes)}")
    microbatches = tuple(microbatches)
    if not microbatches or min(whole(count, "microbatches") for count in microbatches) < 1:
        raise ValueError(f"microbatches {microbatches!r}: give at least one number, from 1 on")
    slice_of = _Slice(hardware, shape, pods, among, starts_implied)
    found: dict[Split, StepTime] = {}
    misfit = f"its devices cannot be divided over {tuple(axes)}"
    least: Split | None = None
    every = tuple(layouts(slice_of.shape, hardware, axes))
    for number, layout in enumerate(every, 1):
        sizes = {axis: layout.size(axis) for axis in IN_SLICE}
        for count in microbatches if sizes["pipeline"] > 1 else (1,):
            split = Split(pods=pods, microbatches=count, **sizes)
            if here := split.misfit(model):
                misfit = f"the last tried, {split}: {here}"
                continue
            if state_bytes(model, split) > memory_bytes:
                least = min(least or split, split, key=lambda of: state_bytes(model, of))
                continue
            step = slice_of.step(model, split, layout)
            if split not in found or _rank(step, goal) < _rank(found[split], goal):
                found[split] = step
        if progress is not None:
            progress(number, len(every))
    if not found:
        if least is not None:
            misfit = (
                f"{least}, which needs the least memory, needs {state_bytes(model, least) / 2**30:.3g} GiB "
                f"of a device for weights and Adam's state, more than memory_bytes {memory_bytes:.10g}"
            )
        where = f"{'x'.join(map(str, shape))}" + (f" in each of {pods} pods" if pods > 1 else "")
        raise ValueError(f"the model fits no split of {where}; {misfit}")
    return tuple(sorted(found.values(), key=lambda step: _rank(step, goal)))


def layouts(
    shape: tuple[int, ...], hardware: Hardware, axes: Sequence[AxisName] = IN_SLICE
) -> Iterator[Layout]:
    """Every way to divide the dimensions of a slice between mesh axes, equal ones in one order only."""
    dims = [*shape, *([hardware.devices_per_chip] if hardware.devices_per_chip > 1 else [])]
    allowed = [axis in axes for axis in IN_SLICE]
    seen = set()
    for parts in itertools.product(*(tuple(_factors(length, allowed)) for length in dims)):
        key = (*sorted(zip(shape, parts[: len(shape)], strict=True)), parts[len(shape) :])
        if key not in seen:
            seen.add(key)
            yield Layout(shape, parts)


def state_bytes(model: Model, split: Split) -> float:
    """Bytes of a device's weights and their optimizer state."""
    share = split.fsdp * split.tensor * split.pipeline
    return model.parameters / share * (dtype_bytes(model.dtype) + STATE_BYTES)


def axis_on(layout: Layout, axis: AxisName, hardware: Hardware) -> Axis:
    """A mesh axis of a layout, with its links. Chips of dimensions that it has no part of do not matter."""
    return _axis(_dims(layout, axis), hardware)


def _dims(layout: Layout, axis: AxisName) -> Dims:
    """What an axis has of each dimension: chips along it (0 within a chip), length, its part, its stride.

    In one order, whichever dimensions they are: the links are the same. The devices of a chip share its
    links, so that they count for an axis that has no part of them, too: each of them is in a group of it.
    """
    number = IN_SLICE.index(axis)
    alone = layout.size(axis) == 1
    found = (
        (
            length if dim < len(layout.shape) else 0,
            math.prod(parts),
            parts[number],
            math.prod(parts[number + 1 :]) if parts[number] > 1 else 1,
        )
        for dim, (length, parts) in enumerate(zip((*layout.shape, 0), layout.parts, strict=False))
        if parts[number] > 1 or not (alone or dim < len(layout.shape))
    )
    return tuple(sorted(found, reverse=True))


class _Slice:
    """Prices steps on one kind of slice, each chain on each axis once."""

    def __init__(
        self,
        hardware: Hardware,
        shape: tuple[int, ...],
        pods: int,
        among: Forms | None,
        starts_implied: bool,
    ) -> None:
        if hardware.network == "switch":
            shape = (math.prod(shape),)
        else:
            hardware = hardware.on_slice(math.prod(shape))
        self.hardware = hardware
        self.shape = shape
        self.pods = pod_axis(hardware, pods)
        self.among = among
        self.starts_implied = starts_implied
        self._rings: dict[tuple[PlainChain, AxisName | Dims], tuple[str, Estimate]] = {}

    def step(self, model: Model, split: Split, layout: Layout) -> StepTime:
        dims: dict[AxisName, Dims] = {axis: _dims(layout, axis) for axis in IN_SLICE}
        axes: dict[AxisName, Axis] = {axis: _axis(of, self.hardware) for axis, of in dims.items()}
        axes["pods"] = self.pods

        def price(chain: PlainChain, axis: AxisName) -> tuple[str, Estimate]:
            # Two axes are compared by what they have of the slice: to compare their links takes long.
            key = chain, axis if axis == "pods" else dims[axis]
            if key not in self._rings:
                started = replace(chain, starts_implied=self.starts_implied)
                among = self.among and self.among(started, axes[axis])
                form, priced = best(started, axes[axis], among)
                self._rings[key] = str(form), priced
            return self._rings[key]

        forth, back, end = (
            pass_time(of(model, split), axes, self.hardware, model.dtype, price)
            for of in (forward, backward, reduction)
        )
        tokens = model.tokens // (split.copies * split.microbatches)
        sent = tokens * model.d_model // split.tensor * dtype_bytes(model.dtype)
        return StepTime(
            model=model,
            split=split,
            layout=layout,
            forward=forth,
            backward=back,
            reduction=end,
            boundary_s=_boundary_s(sent, axes["pipeline"]),
            state_bytes=state_bytes(model, split),
        )


def pod_axis(hardware: Hardware, pods: int) -> Axis:
    """The axis between slices: every device has its share of the data-centre network.

    Raises:
      ValueError: there are several and the hardware has no such network.
    """
    if pods > 1 and not hardware.dcn_bytes_per_s:
        raise ValueError(f"hardware {hardware.name!r} has no dcn_bytes_per_s: no network between pods")
    if pods == 1:
        return Axis(hardware, 1)
    network = replace(
        hardware,
        network="switch",
        link_bytes_per_s=hardware.dcn_bytes_per_s,
        links_per_axis=1,
        hop_latency_s=hardware.dcn_latency_s or hardware.hop_latency_s,
    )
    return Axis(network, pods)


@functools.lru_cache(maxsize=1024)
def _axis(dims: Dims, hardware: Hardware) -> Axis:
    """An axis by what it has of the dimensions: see `_dims`."""
    size = math.prod(part for _, _, part, _ in dims)
    if size == 1:
        return Axis(hardware, size)
    topology, groups = _laid(dims, hardware)
    if hardware.network == "switch":
        return Axis.of(topology, groups) if topology.domains > 1 else Axis(hardware, size)
    # No group leaves its part of a dimension of which it has a part: one part is as good as all.
    cells = tuple(
        (part * stride, part * stride, part, stride) if chips else (chips, length, part, stride)
        for chips, length, part, stride in dims
    )
    return Axis.of(topology, groups, None if cells == dims else _laid(cells, hardware, dims))


def _laid(dims: Dims, hardware: Hardware, within: Dims = ()) -> tuple[Topology, Groups]:
    """The chips of some dimensions, and the groups of the axis there.

    Args:
      dims: see `_dims`.
      hardware: the device.
      within: of parts of longer dimensions, those: a part does not wrap around.
    """
    lengths = tuple(length for _, length, _, _ in dims)
    cores = next((length for chips, length, _, _ in dims if not chips), 1)
    shape = tuple(chips for chips, *_ in dims if chips) or (1,)
    open_ends = tuple(
        chips < whole_dim[0] for (chips, *_), whole_dim in zip(dims, within or dims, strict=True) if chips
    )
    topology = _topology(shape, hardware, cores, open_ends or (False,))
    groups: dict[Parts, list[tuple[Parts, int]]] = {}
    for device, at in enumerate(itertools.product(*map(range, lengths))):
        place = tuple(i // stride % part for i, (_, _, part, stride) in zip(at, dims, strict=True))
        rest = tuple(i - j * stride for i, j, (_, _, _, stride) in zip(at, place, dims, strict=True))
        groups.setdefault(rest, []).append((place, device))
    return topology, tuple(tuple(device for _, device in sorted(group)) for group in groups.values())


@functools.lru_cache(maxsize=64)
def _topology(
    shape: tuple[int, ...], hardware: Hardware, cores: int, open_ends: tuple[bool, ...]
) -> Topology:
    """The chips of some of the dimensions, one and the same for all axes there; or hosts of GPUs."""
    if hardware.network == "switch":
        return Topology.logical(shape, hardware)
    wraparound = [
        not ends and hardware.has_wraparound(length) for length, ends in zip(shape, open_ends, strict=True)
    ]
    return Topology.torus(shape, hardware, cores=cores, wraparound=wraparound)


def _boundary_s(sent_bytes: float, axis: Axis) -> float:
    return axis.permute_s(sent_bytes, 1) if axis.size > 1 else 0.0


def _factors(length: int, allowed: Sequence[bool]) -> Iterator[Parts]:
    """Every way to write a length as a product, with a factor above 1 only where it is allowed."""
    if len(allowed) == 1:
        if length == 1 or allowed[0]:
            yield (length,)
        return
    for first in range(1, length + 1) if allowed[0] else (1,):
        if length % first == 0:
            for rest in _factors(length // first, allowed[1:]):
                yield first, *rest


def _check_goal(goal: str) -> None:
    if goal not in GOALS:
        raise ValueError(f"unknown goal {goal!r}; known: {', '.join(GOALS)}")


def _seconds(of: PassTime, goal: Goal) -> float:
    return {"plain": of.plain_s, "overlapped": of.overlapped_s, "ideal": of.ideal_s}[goal]


def _rank(step: StepTime, goal: Goal) -> tuple[float, float]:
    return step.step_s(goal), step.communication_s
