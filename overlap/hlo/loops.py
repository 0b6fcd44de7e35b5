"""How often a while loop runs: as the compiler noted it, else from its condition and its counter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from overlap.hlo.attributes import number
from overlap.hlo.module import Computation, Instruction, Module

_COPIES: Final = frozenset({"copy", "bitcast", "reshape", "broadcast", "opt-barrier", "convert"})
_WIDE: Final = frozenset({"s32", "u32", "s64", "u64"})
_FLIPPED: Final = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "EQ": "EQ", "NE": "NE"}
_OPPOSITE: Final = {"LT": "GE", "LE": "GT", "GT": "LE", "GE": "LT", "EQ": "NE", "NE": "EQ"}
_DEPTH: Final = 200  # calls within calls; no compiler nests them so deep


@dataclass(frozen=True, slots=True)
class _Linear:
    """A value of one turn of a loop: ``carried[index] + offset``; a number where `index` is None."""

    index: int | None
    offset: int


@dataclass(frozen=True, slots=True)
class _Tuple:
    """A tuple of values; None where nothing is known of one."""

    elements: tuple[_Value, ...]


@dataclass(frozen=True, slots=True)
class _Carried:
    """All that a loop carries: its parameter."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    """``left direction right``."""

    left: _Linear
    direction: str
    right: _Linear


_Value = _Linear | _Tuple | _Carried | _Comparison | None


def trip_count(module: Module, while_instruction: Instruction) -> int | None:
    """How often a loop's body runs each time the loop is reached.

    The compiler's ``known_trip_count`` where it is noted. Else the condition is read as a comparison of a
    counter with a number, the body for the counter's step, and the loop's operand for its start; each may lie
    behind tuples, copies, fusions and calls, and a number may be carried unchanged through the loop or loops
    around it.

    Returns:
      The count; None where it is not known before the program runs, or the loop never ends.
    """
    noted = _noted(while_instruction)
    if noted is not None:
        return noted
    called = bodies(module, while_instruction)
    if called is None:
        return None
    condition, body = called
    turn = _Turn(module)
    start = _Start(turn, while_instruction)
    count = _derived(turn, start, condition, body, _Carried())
    # Rarely a step or a bound is itself carried: then every carried number that stays as it was is put in.
    return count if count is not None else _derived(turn, start, condition, body, start.carried())


def _derived(
    turn: _Turn, start: _Start, condition: Computation, body: Computation, carried: _Value
) -> int | None:
    """The count from condition, step and start, where the loop carries this."""
    test = turn.value(condition, condition.root, (carried,))
    if isinstance(test, _Linear) and test.index is None:
        return 0 if test.offset == 0 else None
    if not isinstance(test, _Comparison):
        return None
    left, right = start.settle(test.left), start.settle(test.right)
    direction = test.direction
    if left.index is None and right.index is not None:
        left, right, direction = right, left, _FLIPPED[direction]
    if right.index is not None:
        return None
    if left.index is None:
        return None if _holds(left.offset, direction, right.offset) else 0
    first = start.number(left.index)
    step = turn.step(body, left.index, carried)
    if first is None or step is None:
        return None
    return _count(first + left.offset, step, direction, right.offset)


def bodies(module: Module, while_instruction: Instruction) -> tuple[Computation, Computation] | None:
    """A loop's condition and body; None where the module has them not."""
    names = [while_instruction.attributes.get(key, "").lstrip("%") for key in ("condition", "body")]
    if not all(names):
        names = list(while_instruction.calls)
    found = [module.computations[name] for name in names if name in module.computations]
    return (found[0], found[1]) if len(found) == 2 else None


def _noted(instruction: Instruction) -> int | None:
    """The compiler's own count."""
    config = instruction.backend_config
    known = config.get("known_trip_count") if isinstance(config, dict) else None
    return number(known.get("n")) if isinstance(known, dict) else None


def _holds(left: int, direction: str, right: int) -> bool:
    """Whether a comparison of numbers is true."""
    return {
        "LT": left < right,
        "LE": left <= right,
        "GT": left > right,
        "GE": left >= right,
        "EQ": left == right,
        "NE": left != right,
    }[direction]


def _count(first: int, step: int, direction: str, bound: int) -> int | None:
    """Turns of ``for (i = first; i direction bound; i += step)``; None where it never ends."""
    if not _holds(first, direction, bound):
        return 0
    if direction == "EQ":
        return 1 if step else None
    distance = bound - first
    if direction == "NE":
        return distance // step if step and distance % step == 0 and distance // step > 0 else None
    if step == 0 or (step > 0) != (direction in ("LT", "LE")):
        return None  # would end by overflow at the earliest
    turns = -(-distance // step)
    return turns + 1 if direction in ("LE", "GE") and distance % step == 0 else turns


class _Start:
    """What a loop carries when it starts."""

    def __init__(self, turn: _Turn, loop: Instruction) -> None:
        self.turn = turn
        self.value: _Value = None
        self.around: Instruction | None = None
        self.width = len(loop.shape.elements)
        called = bodies(turn.module, loop)
        self.body = called[1] if called else None
        home = next((c for c in turn.module.computations.values() if c.by_name.get(loop.name) is loop), None)
        if home is None or not loop.operands:
            return
        arguments: tuple[_Value, ...] = ()
        callers = turn.module.callers.get(home.name, ())
        if len(callers) == 1:
            caller, call = callers[0]
            if call.opcode == "while":
                self.around = call
                arguments = (_Carried(),)
            elif call.opcode == "call":
                arguments = tuple(turn.value(caller, caller.by_name[name], ()) for name in call.operands)
        operand = home.by_name.get(loop.operands[0])
        if operand is not None:
            self.value = turn.value(home, operand, arguments)

    def number(self, index: int) -> int | None:
        """What is carried at an index when the loop starts."""
        value = _element(self.value, index)
        if not isinstance(value, _Linear):
            return None
        if value.index is None:
            return value.offset
        # It comes out of what a loop around this one carries: known if that loop leaves it as it was.
        if self.around is None:
            return None
        outer = _Start(self.turn, self.around).settle(value)
        return outer.offset if outer.index is None else None

    def carried(self) -> _Tuple:
        """What the loop carries in every turn: numbers, where they are known and stay as they are."""
        return _Tuple(tuple(self.settle(_Linear(index, 0)) for index in range(self.width)))

    def settle(self, value: _Linear) -> _Linear:
        """A number where a turn leaves what is carried as it was, and the start is known."""
        if value.index is None or self.body is None or self.turn.step(self.body, value.index) != 0:
            return value
        first = self.number(value.index)
        return value if first is None else _Linear(None, first + value.offset)


class _Turn:
    """What instructions give in one turn of a loop, if it is a number, a carried value, or a comparison."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.results: dict[tuple[str, tuple[_Value, ...]], _Value] = {}

    def step(self, body: Computation, index: int, carried: _Value = _Carried()) -> int | None:
        """By how much a turn changes what is carried at an index; None where that is no fixed number."""
        root = body.root
        if root.opcode == "tuple":
            if index >= len(root.operands):
                return None
            result = self.value(body, body.by_name[root.operands[index]], (carried,))
        else:
            result = _element(self.value(body, root, (carried,)), index)
        return result.offset if isinstance(result, _Linear) and result.index == index else None

    def value(
        self,
        computation: Computation,
        instruction: Instruction,
        arguments: tuple[_Value, ...],
        depth: int = 0,
    ) -> _Value:
        """What an instruction gives.

        Args:
          computation: that it stands in.
          instruction: the one asked for; only what it depends on is looked at.
          arguments: of the computation, by number; none where nothing is known of them.
          depth: how many calls deep this is.
        """
        values: dict[str, _Value] = {}
        visited: set[str] = set()
        pending = [instruction]
        while pending:  # no recursion along operands: a chain of them may be long
            at = pending[-1]
            if at.name in values:
                pending.pop()
                continue
            needed = () if at.opcode in ("while", "conditional") or at.shape.size > 1 else at.operands
            if at.name not in visited:
                visited.add(at.name)
                missing = [
                    computation.by_name[n] for n in needed if n not in visited and n in computation.by_name
                ]
                if missing:
                    pending.extend(missing)
                    continue
            values[at.name] = self.apply(at, [values.get(name) for name in needed], arguments, depth)
            pending.pop()
        return values[instruction.name]

    def apply(
        self, instruction: Instruction, operands: list[_Value], arguments: tuple[_Value, ...], depth: int
    ) -> _Value:
        """What an instruction makes of its operands."""
        if instruction.opcode == "parameter":
            place = number(instruction.literal or 0)
            return arguments[place] if place is not None and place < len(arguments) else None
        if instruction.opcode not in ("fusion", "call"):
            return _apply(instruction, operands)
        called = self.module.computations.get(instruction.calls[0]) if len(instruction.calls) == 1 else None
        if called is None or depth >= _DEPTH or instruction.shape.size > 1:
            return None
        key = called.name, tuple(operands)
        if key not in self.results:  # else calls that call twice would cost twice as much with every level
            self.results[key] = self.value(called, called.root, key[1], depth + 1)
        return self.results[key]


def _element(value: _Value, index: int) -> _Value:
    """An element of a tuple."""
    if isinstance(value, _Carried):
        return _Linear(index, 0)
    if isinstance(value, _Tuple) and index < len(value.elements):
        return value.elements[index]
    return None


def _apply(instruction: Instruction, operands: list[_Value]) -> _Value:
    """What an instruction that calls nothing makes of its operands."""
    opcode = instruction.opcode
    if opcode == "constant":
        return _literal(instruction.literal)
    if opcode == "tuple":
        return _Tuple(tuple(operands))
    if not operands:
        return None
    first = operands[0]
    match opcode:
        case "get-tuple-element":
            return _element(first, int(instruction.attributes.get("index", "-1")))
        case "add" | "subtract" | "multiply" if len(operands) == 2:
            return _arithmetic(opcode, first, operands[1])
        case "compare" if len(operands) == 2:
            direction = instruction.attributes.get("direction", "")
            if isinstance(first, _Linear) and isinstance(operands[1], _Linear) and direction in _FLIPPED:
                return _Comparison(first, direction, operands[1])
            return None
        case "not" if isinstance(first, _Comparison):
            return _Comparison(first.left, _OPPOSITE[first.direction], first.right)
        case "copy-start":
            return _Tuple((first,))
        case "copy-done":
            return _element(first, 0)
        case "convert" if instruction.shape.dtype not in _WIDE:
            return None  # fewer bits could change the number
        case _ if opcode in _COPIES and len(operands) == 1:
            return first
        case _:
            return None


def _literal(text: str) -> _Value:
    """The number that a constant holds; None for an array of several, or a fraction."""
    inner = text.strip("{} ")
    if inner in ("true", "false"):
        return _Linear(None, int(inner == "true"))
    size = number(inner.removeprefix("-"))
    return None if size is None else _Linear(None, -size if inner.startswith("-") else size)


def _arithmetic(opcode: str, left: _Value, right: _Value) -> _Value:
    """A sum, difference or product that stays linear."""
    if not isinstance(left, _Linear) or not isinstance(right, _Linear):
        return None
    if opcode == "add" and None in (left.index, right.index):
        return _Linear(right.index if left.index is None else left.index, left.offset + right.offset)
    if opcode == "subtract" and right.index is None:
        return _Linear(left.index, left.offset - right.offset)
    if opcode == "subtract" and left.index == right.index:
        return _Linear(None, left.offset - right.offset)
    if opcode == "multiply" and left.index is None and right.index is None:
        return _Linear(None, left.offset * right.offset)
    return None
