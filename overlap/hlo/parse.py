"""Reads HLO text: `parse(text)` gives the module, or says what is wrong and in which line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from overlap.hlo import attributes as text_of
from overlap.hlo.attributes import STRING, Frames, nested
from overlap.hlo.module import MOST_DEVICES, Computation, Instruction, Module
from overlap.hlo.shapes import Shape, parse_shape

_NAME: Final = r"[\w.\-]+"

# A shape is all up to the first opcode; `b(` is a buffer in a tuple of shapes, `parse_shape` judges the rest.
_INSTRUCTION: Final = re.compile(
    rf"\s*(ROOT )?%?({_NAME}) = ([^ ]++(?: (?!(?!b\()[a-z][a-z0-9\-]*\()[^ ]++)*+) ([a-z][a-z0-9\-]*)"
    rf"\(((?:[^()\"]++|{STRING}|{nested('()', 8)})*+)\)",
    re.ASCII | re.DOTALL,
)
_HEADER: Final = re.compile(rf"(ENTRY )?%?({_NAME})(?: (\(.*\)) -> (.*))? \{{", re.ASCII)
_END: Final = re.compile(rf"\}}(?:, execution_thread=({STRING}))?")
_MODULE: Final = re.compile(r"HloModule ([^\s,]+)")
_BEGINS: Final = re.compile(rf"\s*(?:ROOT )?%?{_NAME} = ", re.ASCII)
_OPERAND: Final = re.compile(
    rf"((?:[^(){{}}\[\],]++|{nested('()', 8)}|{nested('{}', 8)}|{nested('[]', 3)})++)(?:,|$)", re.ASCII
)
_WORD: Final = re.compile(rf"%?({_NAME})", re.ASCII)
_ROW: Final = re.compile(rf"{STRING}|\{{(?:\w+=\d{{1,18}} ?)*\}}", re.ASCII)
_NUMBER: Final = re.compile(r"(\w+)=(\d+)", re.ASCII)

_TABLES: Final = frozenset({"FileNames", "FunctionNames", "FileLocations", "StackFrames"})
_CALLS: Final = frozenset(
    {
        "calls",
        "to_apply",
        "condition",
        "body",
        "branch_computations",
        "true_computation",
        "false_computation",
        "called_computations",
        "select",
        "scatter",
    }
)
_LITERAL: Final = frozenset({"constant", "parameter"})
_NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "fusion": ("calls",),
    "call": ("to_apply",),
    "while": ("condition", "body"),
    "get-tuple-element": ("index",),
}

# Setting slots by their descriptors: a tenth of a frozen dataclass's own way, and lazy slots stay empty.
_SET: Final[Mapping[str, Any]] = {
    name: getattr(Instruction, name).__set__
    for name in (
        "name",
        "opcode",
        "shape",
        "operands",
        "literal",
        "calls",
        "attributes",
        "is_root",
        "line",
        "raw",
    )
}


class ParseError(ValueError):
    """A text that is no HLO module.

    Attributes:
      line: number of the line where it shows, from 1.
      text: that line.
    """

    def __init__(self, problem: str, line: int, text: str) -> None:
        shown = text if len(text) <= 160 else f"{text[:160]}…"
        super().__init__(f"line {line}: {problem}\n  {shown!r}")
        self.line = line
        self.text = text


def parse(text: str) -> Module:
    """Reads the text of an HLO module, as ``compiled.as_text()`` and ``--xla_dump_to`` give it.

    Args:
      text: of a TPU, GPU or CPU module, before or after optimisation, with or without a schedule.

    Returns:
      The module; what few readers need (``backend_config``, ``op_name``, source lines) is parsed when read.

    Raises:
      ParseError: the text is cut off, is no HLO, or names what it does not define.
    """
    return _Reader(text).module()


class _Reader:
    """One pass over the lines of a text."""

    def __init__(self, text: str) -> None:
        self.lines = text.replace("\r\n", "\n").split("\n")
        self.at = 0  # index of the next line
        self.frames = Frames()
        self.computations: dict[str, Computation] = {}
        self.shapes: dict[str, Shape] = {}
        self.entry = ""

    def error(self, problem: str, at: int | None = None) -> ParseError:
        """What is wrong with a line: the one just read, or the one at an index."""
        index = self.at - 1 if at is None else at
        index = max(0, min(index, len(self.lines) - 1))
        return ParseError(problem, index + 1, self.lines[index])

    def content(self) -> Iterator[str]:
        """The lines that are left, without the blank ones."""
        while self.at < len(self.lines):
            line = self.lines[self.at]
            self.at += 1
            if line and not line.isspace():
                yield line

    def module(self) -> Module:
        """The whole text."""
        name, attributes = self.first_line()
        for line in self.content():
            header = _HEADER.fullmatch(line.strip()) if line.rstrip().endswith("{") else None
            if header is not None:
                self.computation(header)
            elif line.strip() in _TABLES and not self.computations:
                self.table(line.strip())
            else:
                raise self.error("no computation begins like this")
        if not self.entry:
            raise self.error(
                "the text ends before the ENTRY computation: is it cut off?", len(self.lines) - 1
            )
        counts = {}
        for key in ("num_partitions", "replica_count"):
            count = text_of.number(attributes.pop(key, "1"))
            if not count:
                raise self.error(f"{key} is no number of devices", 0)
            counts[key] = count
        if math.prod(counts.values()) > MOST_DEVICES:
            raise self.error(f"{' × '.join(map(str, counts.values()))} devices are more than there are", 0)
        return Module(
            name=name,
            computations=self.computations,
            entry=self.entry,
            is_scheduled=attributes.pop("is_scheduled", "false") == "true",
            num_partitions=counts["num_partitions"],
            num_replicas=counts["replica_count"],
            attributes=attributes,
        )

    def first_line(self) -> tuple[str, dict[str, str]]:
        """Name and attributes of the module."""
        line = next(self.content(), "")
        match = _MODULE.match(line)
        if match is None:
            if any(character < " " and character not in "\t\f" for character in line):
                problem = "these are bytes, no text: is it a proto dump? Dump with --xla_dump_hlo_as_text"
            else:
                problem = "an HLO text begins with 'HloModule NAME'" if line else "the text is empty"
            raise self.error(problem)
        return match[1], self.attributes(line[match.end() :])

    def attributes(self, text: str) -> dict[str, str]:
        """The attributes of the line just read."""
        try:
            pairs = text_of.split(text)
        except ValueError as problem:
            raise self.error(str(problem)) from None
        attributes = dict(pairs)
        if len(attributes) < len(pairs):
            raise self.error("an attribute is given twice")
        return attributes

    def table(self, name: str) -> None:
        """One of the tables of source lines: numbered rows up to a blank line."""
        rows: dict[int, str] = {}
        while self.at < len(self.lines) and (row := self.lines[self.at].strip()):
            self.at += 1
            number, _, value = row.partition(" ")
            index = text_of.number(number)
            if index is None or _ROW.fullmatch(value) is None:
                raise self.error(f"no row of the table {name}")
            rows[index] = value
        frames = self.frames
        if name == "FileNames":
            files = {number: text_of.unquote(value) for number, value in rows.items()}
            self.frames = Frames(files, frames.locations, frames.frames)
            return
        fields = {number: {k: int(v) for k, v in _NUMBER.findall(value)} for number, value in rows.items()}
        if name == "FileLocations":
            locations = {n: (f.get("file_name_id", 0), f.get("line", 0)) for n, f in fields.items()}
            self.frames = Frames(frames.files, locations, frames.frames)
        elif name == "StackFrames":
            calls = {n: f.get("file_location_id", 0) for n, f in fields.items()}
            self.frames = Frames(frames.files, frames.locations, calls)

    def computation(self, header: re.Match[str]) -> None:
        """A computation, from behind its first line to its closing brace."""
        start = self.at - 1
        entry, name, signature, _ = header.groups()
        if name in self.computations:
            raise self.error(f"a second computation is called {name!r}")
        if entry and self.entry:
            raise self.error(f"a second ENTRY; the first is {self.entry!r}")
        instructions: dict[str, Instruction] = {}
        roots = parameters = 0
        lines = self.lines
        while True:
            if self.at >= len(lines):
                raise self.error(f"the computation {name!r} has no end: is the text cut off?", start)
            line = lines[self.at]
            self.at += 1
            if line.startswith("}"):
                break
            if not line or line.isspace():
                raise self.error(f"a blank line in the computation {name!r}: where is its closing brace?")
            more = 0
            if line.count("{") != line.count("}"):
                line, more = self.joined(line)
            instruction = self.instruction(line, instructions)
            self.at += more
            roots += instruction.is_root
            if instruction.opcode == "parameter":
                parameters += 1
            instructions[instruction.name] = instruction
        end = _END.fullmatch(line.rstrip())
        if end is None:
            raise self.error("no computation ends like this")
        if roots != 1:
            raise self.error(
                f"the computation {name!r} has {roots or 'no'} ROOT instructions; it needs one", start
            )
        if signature is not None and signature.count(": ") != parameters:
            raise self.error(
                f"the computation {name!r} has {parameters} parameters, its first line says others", start
            )
        thread = text_of.unquote(end[1]) if end[1] else "main"
        computation = Computation(name, tuple(instructions.values()), thread)
        numbers = [p.literal for p in computation.parameters]
        if numbers != [str(number) for number in range(parameters)]:
            raise self.error(f"the parameters of {name!r} are numbered {', '.join(numbers)}", start)
        self.computations[name] = computation
        if entry:
            self.entry = name

    def joined(self, line: str) -> tuple[str, int]:
        """The line just read with those that go on with it, and how many these are.

        A custom call's JSON is printed as its author wrote it, in several lines if need be.
        """
        parts, depth, at = [line], 0, self.at
        try:
            while (
                (depth := depth + text_of.depth(parts[-1])) > 0
                and at < len(self.lines)
                and _BEGINS.match(self.lines[at]) is None
            ):
                parts.append(self.lines[at])
                at += 1
        except ValueError as problem:
            raise self.error(str(problem)) from None
        if depth:
            raise self.error("'{' is not closed" if depth > 0 else "'}' closes nothing")
        return "\n".join(parts), at - self.at

    def instruction(self, line: str, before: Mapping[str, Instruction]) -> Instruction:
        """One instruction, which may read those before it in its computation."""
        match = _INSTRUCTION.match(line)
        if match is None:
            raise self.error("no instruction; '%name = shape opcode(operands), attributes' was expected")
        root, name, shape_text, opcode, arguments = match.groups()
        if name in before:
            raise self.error(f"a second instruction of this computation is called {name!r}")
        shape = self.shapes.get(shape_text)
        if shape is None:
            try:
                shape = self.shapes[shape_text] = parse_shape(shape_text)
            except ValueError as problem:
                raise self.error(str(problem)) from None
        literal = ""
        operands: tuple[str, ...] = ()
        if opcode in _LITERAL:
            literal = arguments
            if not literal or (opcode == "parameter" and text_of.number(literal) is None):
                raise self.error(f"{literal!r} is no {opcode}'s")
        elif arguments:
            operands = self.operands(arguments, before)
        end = match.end()
        attributes: dict[str, str] = {}
        config = metadata = ""
        calls: tuple[str, ...] = ()
        if end < len(line):
            attributes = self.attributes(line[end:])
            config = attributes.pop("backend_config", "")
            metadata = attributes.pop("metadata", "")
            for key in attributes:
                if key in _CALLS:
                    calls += self.called(key, attributes[key])
        if opcode in _NEEDS:
            self.complete(opcode, operands, calls, attributes, before)
        made: Instruction = object.__new__(Instruction)
        _SET["name"](made, name)
        _SET["opcode"](made, opcode)
        _SET["shape"](made, shape)
        _SET["operands"](made, operands)
        _SET["literal"](made, literal)
        _SET["calls"](made, calls)
        _SET["attributes"](made, attributes)
        _SET["is_root"](made, root is not None)
        _SET["line"](made, self.at)
        _SET["raw"](made, (config, metadata, self.frames))
        return made

    def complete(
        self,
        opcode: str,
        operands: tuple[str, ...],
        calls: tuple[str, ...],
        attributes: Mapping[str, str],
        before: Mapping[str, Instruction],
    ) -> None:
        """Holds that an instruction has what it cannot do without, and that it fits."""
        for key in _NEEDS[opcode]:
            if key not in attributes:
                raise self.error(f"a {opcode} needs {key}=")
        if opcode == "get-tuple-element":
            index = text_of.number(attributes["index"])
            if len(operands) != 1 or index is None or index >= len(before[operands[0]].shape.elements):
                raise self.error(f"the operand has no element {attributes['index']}")
        else:
            wanted = len(self.computations[calls[0]].parameters)
            if len(operands) != wanted:
                raise self.error(f"{len(operands)} operands for the {wanted} parameters of {calls[0]!r}")

    def operands(self, text: str, before: Mapping[str, Instruction]) -> tuple[str, ...]:
        """The names between an instruction's parentheses, each perhaps behind its shape."""
        if "/*" in text:
            first, *others = text.split("/*")
            text = first + "".join(other.partition("*/")[2] for other in others)
        if "[" in text or "(" in text:
            parts = _OPERAND.findall(text)
            if sum(map(len, parts)) + len(parts) - 1 != len(text):
                raise self.error("the operands are no list of names")
            words = [part.rsplit(None, 1)[-1] for part in parts if not part.isspace()]
        else:
            words = text.split(", ")
        names = tuple([word[1:] if word[:1] == "%" else word for word in words])
        for name in names:
            if name not in before:
                if _WORD.fullmatch(name) is None:
                    raise self.error(f"{name!r} is no name of an instruction")
                raise self.error(f"it reads {name!r}, which this computation does not define above")
        return names

    def called(self, key: str, value: str) -> tuple[str, ...]:
        """The computations that an attribute names."""
        listed = value[1:-1] if value[:1] == "{" else value
        names = []
        for word in listed.split(","):
            match = _WORD.fullmatch(word.strip())
            if match is None:
                raise self.error(f"{key} names no computation: {value[:40]!r}")
            if match[1] not in self.computations:
                raise self.error(f"{key} names {match[1]!r}, which the text does not define above")
            names.append(match[1])
        return tuple(names)
