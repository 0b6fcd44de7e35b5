"""A computation as the steps that its schedule takes: what each instruction asks of which stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from overlap.hlo.costs import Cost, Costs
from overlap.hlo.loops import bodies, trip_count
from overlap.hlo.module import Computation, Instruction, Module, async_pairs, collective_instruction
from overlap.hlo.moves import Move, Moves

What = Literal[
    "compute", "copy_start", "copy_done", "send", "receive", "arrive", "exchange", "loop", "call", "branch"
]


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction that takes time, or may.

    Attributes:
      what: "compute" occupies the compute stream; "copy_start" and "copy_done" an asynchronous copy; "send" a
        transfer, "receive" announces one, "arrive" waits for it, "exchange" does both; "loop", "call" and
        "branch" run other computations.
      instruction, computation: which, and where it stands.
      key: of the pair's start, for what belongs to one; a receive's and a send's is their channel.
      cost: of computing or copying.
      move: of transfers.
      called: computations to run.
      trips: of a loop; None if unknown.
    """

    what: What
    instruction: Instruction
    computation: str
    key: tuple[str, str] = ("", "")
    cost: Cost | None = None
    move: Move | None = None
    called: tuple[str, ...] = ()
    trips: int | None = None

    @property
    def name(self) -> str:
        """The instruction's."""
        return self.instruction.name


_DONE_TARGET: Final = "AsyncCollectiveDone"
_START_TARGET: Final = "AsyncCollectiveStart"


class Steps:
    """The steps of each computation of a module, read once each."""

    def __init__(self, module: Module, costs: Costs) -> None:
        self._module = module
        self._costs = costs
        self._moves = Moves(module)
        self._steps: dict[str, tuple[Step, ...]] = {}

    def of(self, name: str) -> tuple[Step, ...]:
        """The steps of a computation, in schedule order; what takes no time is left out."""
        known = self._steps.get(name)
        if known is None:
            known = self._steps[name] = tuple(self._read(self._module.computation(name)))
        return known

    def _read(self, computation: Computation) -> Iterator[Step]:
        names = computation.by_name
        starts = {done: start for start, done in async_pairs(computation).items()}
        free = {name for i in computation.instructions for name in self._moves.free(computation, i)}
        for i in computation.instructions:
            where = computation.name
            if i.is_host_transfer:
                continue
            if i.is_async_done:
                if i.opcode in ("send-done", "recv-done"):  # the start may stand in an earlier turn of a loop
                    start = names.get(starts.get(i.name, ""), i)
                    yield Step("arrive", i, where, _channel(start, i))
                elif i.name in starts:
                    start = names[starts[i.name]]
                    what = self._pair(start)
                    if what != "call":
                        done: What = "copy_done" if what == "copy" else "arrive"
                        group = self._group(start)
                        keys = [_key(*member) for member in group] or [_key(computation, start)]
                        yield from (Step(done, i, where, key) for key in keys)
            elif i.is_async_update:
                # A start without operands (TPU 7x's sparse cores) makes ready; its update brings data.
                start = names[i.operands[0]]
                if start.is_async_start and not start.operands and len(i.operands) > 1:
                    yield self._start(computation, start)
            elif i.is_async_start:
                if group := self._group(i):
                    for home, member in group:
                        asked = self._moves.of(home, member)
                        yield Step("send", member, home.name, _key(home, member), move=asked)
                elif i.operands or not self._fed_later(computation, i):
                    yield self._start(computation, i)
            elif i.opcode == "while":
                condition, body = bodies(self._module, i) or (None, None)
                called = tuple(part.name for part in (condition, body) if part is not None)
                yield Step("loop", i, where, called=called, trips=trip_count(self._module, i))
            elif i.opcode == "call":
                yield Step("call", i, where, called=i.calls[:1])
            elif i.opcode == "conditional":
                yield Step("branch", i, where, called=i.calls)
            elif (asked := self._moves.of(computation, i)) is not None:
                yield from self._fused_or_plain(computation, i, asked)
            else:
                cost = self._costs.cost(computation, i)
                if cost.seconds > 0 and not (i.name in free and cost.kind == "copy"):
                    yield Step("compute", i, where, cost=cost)

    def _group(self, start: Instruction) -> list[tuple[Computation, Instruction]]:
        """The collectives that a generic start begins together, each with where it stands; none if one only.

        So XLA:GPU sends what NCCL groups.
        """
        called = [self._module.computation(name) for name in start.calls if start.opcode == "async-start"]
        found = [
            (home, i)
            for home in called
            for i in home.instructions
            if collective_instruction(self._module, i) is not None
        ]
        return found if len(found) > 1 else []

    def _fed_later(self, computation: Computation, start: Instruction) -> bool:
        return any(
            i.is_async_update and i.operands[0] == start.name and len(i.operands) > 1
            for i in computation.instructions
        )

    def _pair(self, start: Instruction) -> Literal["copy", "move", "call"]:
        """What an asynchronous start begins: a copy, a transfer, or a computation that runs as if called."""
        if start.opcode in ("send", "recv") or collective_instruction(self._module, start) is not None:
            return "move"
        if start.opcode in _COPY_STARTS:
            return "copy"
        inside = {
            i.opcode
            for name in start.calls
            for i in self._module.computation(name).instructions
            if i.opcode not in ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")
        }
        return "copy" if inside <= _COPIES else "call"

    def _start(self, computation: Computation, i: Instruction) -> Step:
        where, key = computation.name, _key(computation, i)
        kind = self._pair(i)
        if kind == "copy":
            seconds = self._costs.copy_s(computation, i)
            return Step(
                "copy_start", i, where, key, cost=Cost(seconds, "copy", i.opcode.removesuffix("-start"))
            )
        if kind == "call":
            return Step("call", i, where, called=i.calls[:1])
        asked = self._moves.of(computation, i)
        if i.opcode == "recv":
            return Step("receive", i, where, key, move=asked)
        return Step("exchange" if _is_sync(i) else "send", i, where, key, move=asked)

    def _fused_or_plain(self, computation: Computation, i: Instruction, asked: Move) -> Iterator[Step]:
        """A collective that has no start: plain; or a fusion that starts, carries on, ends or contains one.

        The TPU compiler cuts an asynchronous all_gather into fusions: one that starts it, some that compute
        beside it (with their own estimate), one that waits for its end.
        """
        where = computation.name
        if i.opcode != "fusion":
            yield Step("exchange", i, where, _key(computation, i), move=asked)
            return
        targets = self._targets(i)
        if _START_TARGET in targets:
            yield Step("send", i, where, _key(computation, i), move=asked)
            return
        start = self._fused_start(computation, i)
        if start is None:
            yield Step("exchange", i, where, _key(computation, i), move=asked)
        cost = self._costs.cost(computation, i)
        if cost.estimated and cost.seconds > 0:
            yield Step("compute", i, where, cost=cost)
        if start is not None and _DONE_TARGET in targets:
            yield Step("arrive", i, where, _key(computation, start))

    def _targets(self, fusion: Instruction) -> set[str]:
        called = self._module.computation(fusion.calls[0])
        return {i.custom_call_target for i in called.instructions}

    def _fused_start(self, computation: Computation, fusion: Instruction) -> Instruction | None:
        """The fusion that started the collective which `fusion` carries on or ends."""
        names = computation.by_name
        pending, seen = list(fusion.operands), set[str]()
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            value = names[name]
            if value.opcode in ("get-tuple-element", "tuple", "bitcast", "opt-barrier"):
                pending.extend(value.operands)
            elif value.opcode == "fusion" and collective_instruction(self._module, value) is not None:
                if _START_TARGET in self._targets(value):
                    return value
                pending.extend(value.operands)
        return None


_COPY_STARTS: Final = frozenset(
    {"copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start"}
)
_COPIES: Final = frozenset({"copy", "slice", "dynamic-slice", "dynamic-update-slice"})


def _key(computation: Computation, instruction: Instruction) -> tuple[str, str]:
    if instruction.opcode in ("send", "recv"):
        return _channel(instruction, instruction)
    return (computation.name, instruction.name)


def _channel(*instructions: Instruction) -> tuple[str, str]:
    """What a send, its receive and their dones have in common; a name where the text has no channel."""
    for instruction in instructions:
        if "channel_id" in instruction.attributes:
            return ("channel", instruction.attributes["channel_id"])
    return ("channel", instructions[0].name)


def _is_sync(start: Instruction) -> bool:
    """Whether the GPU compiler says of a start that it is none: the stream waits for it at once."""
    config = start.backend_config
    notes = config.get("collective_backend_config") if isinstance(config, Mapping) else None
    return isinstance(notes, Mapping) and notes.get("is_sync") is True
