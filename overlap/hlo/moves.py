"""What a collective instruction moves: how many bytes, among whom, and as which operation it is priced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from overlap.hlo.groups import Groups, replica_groups, source_target_pairs
from overlap.hlo.module import Computation, Instruction, Module, collective_instruction
from overlap.hlo.uses import Uses

Pairs = tuple[tuple[int, int], ...]

PADDING: Final = 1.1
"""The part of an array that a device keeps may exceed 1/P by this factor: the compiler pads."""

_THROUGH: Final = frozenset(
    {"bitcast", "copy", "copy-start", "copy-done", "reshape", "convert", "all-reduce-done", "async-done"}
)
"""Opcodes that hand on all of a value, perhaps elsewhere or as another type."""


@dataclass(frozen=True, slots=True)
class Move:
    """One execution of a collective.

    Attributes:
      operation: the collective's opcode, such as ``"all-gather"``.
      priced_as: the operation whose time it takes: ``"reduce-scatter"`` for an all_reduce of which every
        device keeps its part only, ``"all-gather"`` for one of parts that are placed into zeros.
      full_bytes: for a permute, what a device sends to each of its targets; for an all-to-all, the arrays of
        all devices of a group together; else the whole array, as in `cost_model`.
      groups: devices by position in the device assignment; empty for permutes.
      pairs: (source, target) of a permute.
    """

    operation: str
    priced_as: str
    full_bytes: int
    groups: Groups = ()
    pairs: Pairs = ()


class Moves:
    """What the collectives of a module move; groups and pairs are read once for each printing."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._uses = Uses()
        self._pairs: dict[str, Pairs] = {}
        self._groups: dict[tuple[str, str, str, bool], Groups] = {}

    def pairs(self, permute: Instruction) -> Pairs:
        """(source, target) of a permute or send."""
        text = permute.attributes.get("source_target_pairs")
        if text is None:
            return source_target_pairs(permute)
        known = self._pairs.get(text)
        if known is None:
            known = self._pairs[text] = source_target_pairs(permute)
        return known

    def groups(self, collective: Instruction) -> Groups:
        """Groups of devices of any other collective."""
        attributes = collective.attributes
        key = (
            collective.opcode,
            attributes.get("replica_groups", ""),
            attributes.get("use_global_device_ids", ""),
            "channel_id" in attributes,
        )
        known = self._groups.get(key)
        if known is None:
            known = self._groups[key] = replica_groups(self._module, collective)
        return known

    def of(self, computation: Computation, instruction: Instruction) -> Move | None:
        """What an instruction moves: a collective, a start, or a fusion around one; None for all else."""
        inner = collective_instruction(self._module, instruction)
        if inner is None:
            return None
        home = computation if inner is instruction else self._home(instruction, inner)
        operation = inner.opcode.removesuffix("-start")
        if operation == "recv":
            return Move(operation, operation, 0)
        names = home.by_name
        operand_bytes = sum(names[o].shape.bytes for o in _data(operation, inner))
        if operation in ("collective-permute", "send"):
            return Move(operation, "collective-permute", operand_bytes, pairs=self.pairs(inner))
        groups = self.groups(inner)
        size = max((len(group) for group in groups), default=1)
        if operation in ("all-gather", "all-to-all", "ragged-all-to-all"):
            priced_as = "all-gather" if operation == "all-gather" else "all-to-all"
            return Move(operation, priced_as, operand_bytes * size, groups)
        disguised = self._disguised(home, inner) if operation == "all-reduce" else None
        return Move(operation, disguised[0] if disguised else operation, operand_bytes, groups)

    def free(self, computation: Computation, instruction: Instruction) -> frozenset[str]:
        """Names of the instructions that are part of a collective which is priced as another."""
        if instruction.opcode.removesuffix("-start") != "all-reduce":
            return frozenset()
        disguised = self._disguised(computation, instruction)
        return disguised[1] if disguised else frozenset()

    def _disguised(
        self, home: Computation, all_reduce: Instruction
    ) -> tuple[Literal["reduce-scatter", "all-gather"], frozenset[str]] | None:
        """What an all_reduce really does, and the instructions around it that make it so.

        The TPU compiler may spell a reduce_scatter as an all_reduce of which each device cuts out its part,
        and an all_gather as a sum of arrays that are zero but for a device's own part.
        """
        size = max((len(group) for group in self.groups(all_reduce)), default=1)
        whole_bytes = sum(home.by_name[o].shape.bytes for o in all_reduce.operands)
        most_bytes = whole_bytes * PADDING / size
        kept = self._kept(home, all_reduce)
        if size > 1 and kept and max(taken for _, taken in kept) <= most_bytes:
            return "reduce-scatter", frozenset(user.name for user, _ in kept)
        placed = self._placed(home, all_reduce) if len(all_reduce.operands) == 1 else None
        if size > 1 and placed and placed[0] <= most_bytes:
            return "all-gather", placed[1]
        return None

    def _placed(self, home: Computation, all_reduce: Instruction) -> tuple[int, frozenset[str]] | None:
        """Bytes of the part that is placed into zeros to be reduced, and what does so; None if nothing."""
        value = self._source(home, all_reduce.operands[0])
        base: Instruction | None
        if value.opcode == "dynamic-update-slice":
            part, base = home.by_name[value.operands[1]], home.by_name[value.operands[0]]
        elif value.opcode == "fusion" and value.calls:
            fused = self._module.computation(value.calls[0])
            root = self._source(fused, fused.root.name)
            if root.opcode != "dynamic-update-slice":
                return None
            part, base = fused.by_name[root.operands[1]], self._source(fused, root.operands[0])
            if base.opcode == "parameter":
                base = home.by_name[value.operands[int(base.literal)]]
            elif self._is_zero(fused, base):
                base = None
        else:
            return None
        if base is not None and not self._is_zero(home, base):
            return None
        made = [value, *([base] if base is not None else [])]
        return part.shape.bytes, frozenset(i.name for i in made if len(self._uses.of(home, i.name)) == 1)

    def _source(self, computation: Computation, name: str) -> Instruction:
        """What a value is, behind bitcasts and copies."""
        value = computation.by_name[name]
        while value.opcode in ("bitcast", "copy", "reshape") and value.operands:
            value = computation.by_name[value.operands[0]]
        return value

    def _is_zero(self, computation: Computation, value: Instruction) -> bool:
        """Whether an array is filled with zeros: a constant, its broadcast, or a fusion of these."""
        value = self._source(computation, value.name)
        if value.opcode == "broadcast":
            return self._is_zero(computation, computation.by_name[value.operands[0]])
        if value.opcode == "fusion" and value.calls:
            fused = self._module.computation(value.calls[0])
            if fused.root.opcode == "broadcast" and fused.root.operands:
                filler = fused.by_name[fused.root.operands[0]]
                if filler.opcode == "parameter":
                    return self._is_zero(
                        computation, computation.by_name[value.operands[int(filler.literal)]]
                    )
                return self._is_zero(fused, filler)
        return value.opcode == "constant" and value.literal in ("0", "-0", "0.0", "-0.0")

    def _home(self, outer: Instruction, inner: Instruction) -> Computation:
        """The computation that `inner` stands in, somewhere inside what `outer` calls."""
        for name in outer.calls:
            computation = self._module.computation(name)
            if computation.by_name.get(inner.name) is inner:
                return computation
            for instruction in computation.instructions:
                if instruction.calls and collective_instruction(self._module, instruction) is inner:
                    return self._home(instruction, inner)
        raise KeyError(f"{inner.name!r} is not inside {outer.name!r}")

    def _kept(
        self, computation: Computation, instruction: Instruction
    ) -> list[tuple[Instruction, int]] | None:
        """The slices that use a value, with the bytes they take; None if something uses it otherwise."""
        found: list[tuple[Instruction, int]] = []
        pending = [instruction]
        while pending:
            value = pending.pop()
            if value.is_root:
                return None
            for user, position in self._uses.of(computation, value.name):
                if user.opcode in _THROUGH:
                    pending.append(user)
                elif user.opcode == "dynamic-slice" and position == 0:
                    found.append((user, user.shape.bytes))
                elif user.opcode == "fusion" and user.calls:
                    fused = self._module.computation(user.calls[0])
                    inside = self._kept(fused, fused.parameters[position])
                    if not inside:
                        return None
                    found.append((user, max(taken for _, taken in inside)))
                else:
                    return None
        return found


def _data(operation: str, inner: Instruction) -> tuple[str, ...]:
    """The operands that travel: not a send's token, a permute's buffer, or the offsets of ragged rows."""
    if operation in ("send", "ragged-all-to-all") or "slice_sizes" in inner.attributes:
        return inner.operands[:1]
    return inner.operands
