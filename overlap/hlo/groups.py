"""Which devices talk to which: replica groups and the pairs of a permute, in every printing."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Final

import numpy as np

from overlap.hlo.attributes import unquote
from overlap.hlo.module import MOST_DEVICES, Instruction, Module, collective_instruction

Groups = tuple[tuple[int, ...], ...]
"""Numbers of devices, by group."""

_LIST: Final = re.compile(r"\{\s*(?:\{[\d,\s]*\}\s*(?:,\s*(?=\{))?)*\}")
_GROUP: Final = re.compile(r"\{([\d,\s]*)\}")
_IOTA: Final = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS_NAME: Final = r"(?:'(?:[^'\\]|\\.)*'|[\w.\-]+)"
_SIZES: Final = rf"{_AXIS_NAME}=\d+(?:,{_AXIS_NAME}=\d+)*"
_REF: Final = rf"{_AXIS_NAME}(?::\(\d+\)\d+)?"
_MESH: Final = re.compile(
    rf"(?:mesh\[({_SIZES})\]|@\w*<({_SIZES})>)"
    rf"(?:, ?device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? ?\{{({_REF}(?:,{_REF})*)\}}"
)
_SIZE: Final = re.compile(rf"({_AXIS_NAME})=(\d+)")
_AXIS: Final = re.compile(rf"({_AXIS_NAME})(?::\((\d+)\)(\d+))?")


def replica_groups(module: Module, instruction: Instruction) -> Groups:
    """The groups of devices among which a collective moves data, by their numbers in the program.

    A device's number is ``replica · num_partitions + partition``, its place in the program's device
    assignment. What the printed numbers mean depends on ``channel_id`` and ``use_global_device_ids`` as in
    XLA's ``GetCollectiveOpGroupMode`` (xla/service/collective_ops_utils.h): replicas, partitions, or devices.

    Args:
      module: that it belongs to.
      instruction: a collective, its start, or what wraps one (a generic asynchronous start, a fusion).

    Returns:
      The groups; where none are printed, all devices that take part form one.

    Raises:
      ValueError: it is no collective with groups, or they are printed as nothing that is known.
    """
    found = collective_instruction(module, instruction)
    if found is None:
        raise ValueError(f"{instruction.name} ({instruction.opcode}) is no collective")
    listed = parse_groups(found.attributes.get("replica_groups", "{}"))
    replicas, partitions = module.num_replicas, module.num_partitions
    channel = "channel_id" in found.attributes
    if channel and found.attributes.get("use_global_device_ids") == "true":
        return listed or (tuple(range(replicas * partitions)),)
    by_partition = channel and found.opcode.removesuffix("-start") not in _REDUCING
    count = partitions if by_partition else replicas
    if any(member >= count for group in listed for member in group):
        return listed  # a module that does not say how many devices run it
    listed = listed or (tuple(range(count)),)
    if by_partition:
        return tuple(tuple(r * partitions + p for p in group) for r in range(replicas) for group in listed)
    if channel:
        return tuple(tuple(r * partitions + p for r in group for p in range(partitions)) for group in listed)
    return tuple(tuple(r * partitions + p for r in group) for p in range(partitions) for group in listed)


_REDUCING: Final = frozenset({"all-gather", "all-reduce", "reduce-scatter"})
"""Those with ``use_global_device_ids``; without it their groups are of replicas, each with all partitions."""


def source_target_pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """From which device to which a permute, a send or a recv moves data.

    The numbers are those of partitions (of replicas, where it has no channel); in a program of one replica
    or one partition that is a device's number.

    Raises:
      ValueError: the instruction has no pairs, or they are printed as nothing that is known.
    """
    text = instruction.attributes.get("source_target_pairs", "")
    if not text:  # a pipelined permute that was cut into send and recv keeps them as a note
        notes = instruction.attributes.get("frontend_attributes", "")
        match = re.search(r'_xla_send_recv_source_target_pairs=("[^"]*"|\{(?:\{[^{}]*\},?\s*)*\})', notes)
        text = unquote(match[1]) if match else ""
    if not text:
        raise ValueError(f"{instruction.name} ({instruction.opcode}) has no pairs of source and target")
    if _LIST.fullmatch(text) is None:
        raise ValueError(f"unknown pairs of source and target: {text[:80]!r}")
    pairs = []
    for group in _GROUP.findall(text[1:-1]):
        numbers = _numbers(group)
        if len(numbers) != 2:
            raise ValueError(f"a pair of {len(numbers)} devices in {text[:80]!r}")
        pairs.append((numbers[0], numbers[1]))
    return tuple(pairs)


def parse_groups(text: str) -> Groups:
    """Reads groups as HLO prints them.

    Args:
      text: ``{{0,1},{2,3}}``; ``[2,4]<=[4,2]T(1,0)`` (the devices 0…7 shaped [4,2], transposed, read as 2
        groups of 4); or ``mesh['a'=2,'b'=4] {'b'}`` (of devices shaped [2,4], those that differ in b only),
        with sub-axes ``'b':(2)2`` (of b cut into 2, 2 and what is left, the second) and an order of devices
        ``, device_ids=([4,2]T(1,0))`` or ``, device_ids=(3,1,0,2)`` before the braces.

    Raises:
      ValueError: it is none of these, or its numbers do not fit together.
    """
    if _LIST.fullmatch(text):
        return tuple(_numbers(group) for group in _GROUP.findall(text[1:-1]))
    match = _IOTA.fullmatch(text)
    if match is not None:
        return _rows(_iota(_numbers(match[2]), _numbers(match[3] or ""), text), _numbers(match[1]), text)
    match = _MESH.fullmatch(text)
    if match is not None:
        return _mesh(match)
    raise ValueError(f"unknown replica groups: {text[:80]!r}")


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers between commas."""
    return tuple(int(number) for number in text.split(",") if number.strip())


def _iota(dims: tuple[int, ...], order: tuple[int, ...], text: str) -> np.ndarray:
    """The numbers from 0, shaped and transposed."""
    if order and sorted(order) != list(range(len(dims))):
        raise ValueError(f"no permutation of the dimensions in {text[:80]!r}")
    if math.prod(dims) > MOST_DEVICES:
        raise ValueError(f"{math.prod(dims)} devices in {text[:80]!r}")
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose(order) if order else numbers


def _rows(numbers: np.ndarray, dims: tuple[int, ...], text: str) -> Groups:
    """The groups, one per row of what is shaped [groups, devices of a group]."""
    if math.prod(dims) != numbers.size or not numbers.size:
        raise ValueError(f"{numbers.size} devices do not make the groups of {text[:80]!r}")
    return tuple(tuple(int(n) for n in row) for row in numbers.reshape(-1, math.prod(dims[1:])))


def _mesh(match: re.Match[str]) -> Groups:
    """The groups along axes of a mesh, as XLA's MeshAxesReplicaGroupList (xla/hlo/ir/replica_group.h)."""
    text = match[0]
    sizes = {name.strip("'"): int(size) for name, size in _SIZE.findall(match[1] or match[2])}
    dims = tuple(sizes.values())
    if match[3]:
        devices = _iota(_numbers(match[3]), _numbers(match[4] or ""), text)
    else:
        devices = np.array(_numbers(match[5])) if match[5] else _iota(dims, (), text)
    if devices.size != math.prod(dims):
        raise ValueError(f"{devices.size} devices do not make the mesh of {text[:80]!r}")

    # Each axis is cut where a sub-axis begins or ends: by the number of pieces before that place.
    wanted: list[tuple[str, int, int]] = []
    cuts = {name: {1, size} for name, size in sizes.items()}
    for quoted, before, length in _AXIS.findall(match[6]):
        name = quoted.strip("'")
        if name not in sizes:
            raise ValueError(f"the mesh has no axis {name!r} in {text[:80]!r}")
        first = int(before) if before else 1
        last = first * int(length) if length else sizes[name]
        wanted.append((name, first, last))
        cuts[name] |= {first, last}
    pieces: dict[tuple[str, int], int] = {}
    for name, places in cuts.items():
        for start, end in pairwise(sorted(places)):
            if start == 0 or end % start:
                raise ValueError(f"the axis {name!r} cannot be cut like that: {text[:80]!r}")
            pieces[name, start] = end // start
    order = list(pieces)
    inside = [
        order.index(piece)
        for name, first, last in wanted
        for piece in order
        if piece[0] == name and first <= piece[1] < last
    ]
    if len(set(inside)) < len(inside):
        raise ValueError(f"an axis is named twice in {text[:80]!r}")
    outside = [index for index in range(len(order)) if index not in inside]
    shaped = devices.reshape(tuple(pieces.values())).transpose([*outside, *inside])
    length = math.prod(pieces[order[index]] for index in inside)
    return _rows(shaped, (devices.size // length, length), text)
