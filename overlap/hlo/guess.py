"""What a dump tells of the machine it was compiled for, where the caller does not say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from cost_model import Hardware, by_name, names
from cost_model.topology import Topology
from overlap.hlo.groups import Groups
from overlap.hlo.module import COLLECTIVES, Module, Shape
from overlap.hlo.moves import Moves


def guess_hardware(module: Module) -> Hardware:
    """The hardware of a CPU's dump; TPUs and GPUs leave no word of their generation.

    Raises:
      ValueError: the dump is a TPU's or a GPU's; the message lists the names to choose from.
    """
    kind = platform(module)
    if kind == "cpu":
        return by_name("cpu")
    fitting = [name for name in names() if name.startswith("tpu_") == (kind == "TPU") and name != "cpu"]
    raise ValueError(
        f"module {module.name!r} was compiled for a {kind}, but its text does not say for which: give "
        f"hardware=, one of {', '.join(fitting)}"
    )


def guess_topology(module: Module, hardware: Hardware) -> tuple[Topology, str]:
    """A topology of the mesh axes that a module's collectives show, and the sentence that says so."""
    shape = mesh_shape(module)
    topology = Topology.logical(shape, hardware)
    each = "each axis of which is taken for a physical axis of its own"
    sentence = (
        f"No topology was given: the replica groups and permutes show a mesh of "
        f"{'×'.join(map(str, shape))} devices, {each if topology.shape else f'taken for {topology}'}."
    )
    return topology, sentence


def mesh_shape(module: Module) -> tuple[int, ...]:
    """Sizes of the mesh axes, slowest first, that groups and permutes show; one axis where they show none.

    The devices of a group along an axis are evenly spaced: the spacing, and spacing times size, are borders
    between axes. The devices that a permute joins are read as a group.
    """
    devices = module.num_partitions * module.num_replicas
    borders = {1, devices}
    for group in _groups(module):
        borders |= _borders(group)
    kept = [1]
    for border in sorted(borders):
        if border > kept[-1] and border % kept[-1] == 0 and devices % border == 0:
            kept.append(border)
    sizes = [after // before for before, after in pairwise(kept)]
    return tuple(reversed(sizes)) or (1,)


def _groups(module: Module) -> Iterator[tuple[int, ...]]:
    """One group of every kind of collective: that of the first device in it."""
    moves, seen = Moves(module), set[Groups]()
    for computation in module.computations.values():
        for instruction in computation.instructions:
            opcode = instruction.opcode.removesuffix("-start")
            if opcode not in COLLECTIVES or opcode == "recv" or instruction.is_host_transfer:
                continue
            if opcode in ("collective-permute", "send"):
                joined: Groups = moves.pairs(instruction)
                if joined not in seen:
                    yield from _cycles(moves.pairs(instruction))
            else:
                joined = moves.groups(instruction)
                if joined not in seen:
                    yield from (tuple(sorted(group)) for group in joined[:1])
            seen.add(joined)


def _cycles(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """The devices that a permute joins, directly or through others: of the first one's component."""
    joined: dict[int, set[int]] = {}
    for source, target in pairs:
        joined.setdefault(source, set()).add(target)
        joined.setdefault(target, set()).add(source)
    if not joined:
        return
    pending, seen = [min(joined)], set[int]()
    while pending:
        device = pending.pop()
        if device not in seen:
            seen.add(device)
            pending.extend(joined[device])
    yield tuple(sorted(seen))


def _borders(group: tuple[int, ...]) -> set[int]:
    """Spacings and spans of a group that lies along one axis, or several."""
    borders: set[int] = set()
    devices = list(group)
    while len(devices) > 1:
        spacing = devices[1] - devices[0]
        run = 1
        while run < len(devices) and devices[run] - devices[run - 1] == spacing:
            run += 1
        borders |= {spacing, spacing * run}
        devices = devices[::run]
    return borders


def platform(module: Module) -> str:
    """TPU, GPU or cpu: tilings and VMEM are a TPU's, cuBLAS calls and GPU notes a GPU's."""
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if any(shape.tiling or shape.memory_space == 1 for shape in _leaves(instruction.shape)):
                return "TPU"
            if instruction.custom_call_target.startswith(("__cublas", "__cudnn", "__triton", "__gpu")):
                return "GPU"
            config = instruction.backend_config
            if isinstance(config, dict) and not config.keys().isdisjoint(
                {"gemm_backend_config", "collective_backend_config", "fusion_backend_config"}
            ):
                return "GPU"
    return "cpu"


def _leaves(shape: Shape) -> Iterator[Shape]:
    if not shape.elements:
        yield shape
    for element in shape.elements:
        yield from _leaves(element)
