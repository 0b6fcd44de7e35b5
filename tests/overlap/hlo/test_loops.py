"""Trip counts: of loops that compilers made, and of every form of counter, condition and start."""

from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from overlap.hlo.loops import trip_count
from overlap.hlo.module import Instruction, Module
from overlap.hlo.parse import parse
from tests.libtpu import needs_libtpu
from tests.overlap.hlo.texts import cpu_text, tpu_texts


def loops(module: Module) -> list[Instruction]:
    return [i for c in module.computations.values() for i in c.instructions if i.opcode == "while"]


def unannotated(text: str) -> str:
    """As if the compiler had not counted."""
    return text.replace('"known_trip_count"', '"nobody_counted"')


X = jnp.ones((64, 64))

PROGRAMS: list[tuple[Any, int | None]] = [
    (lambda x: lax.scan(lambda c, _: (jnp.tanh(c @ c), c.sum()), x, None, length=7), 7),
    (lambda x: lax.fori_loop(2, 11, lambda i, c: jnp.sin(c) * i, x), 9),
    (lambda x: lax.while_loop(lambda t: t[0] > 3, lambda t: (t[0] - 4, jnp.sin(t[1] @ t[1])), (30, x)), 7),
    (lambda x: lax.while_loop(lambda t: t[0] <= 20, lambda t: (t[0] + 5, jnp.sin(t[1] @ t[1])), (5, x)), 4),
    (
        lambda x: lax.while_loop(
            lambda t: jnp.not_equal(t[0], 9), lambda t: (t[0] + 3, jnp.sin(t[1] @ t[1])), (0, x)
        ),
        3,
    ),
    (lambda x: lax.while_loop(lambda t: jnp.sum(t) > 3, lambda t: jnp.sin(t), x), None),
]


@pytest.mark.parametrize("function, count", PROGRAMS)
def test_loops_of_the_cpu_compiler(function: Any, count: int | None) -> None:
    text = cpu_text(function, X)
    module = parse(text)
    assert [trip_count(module, loop) for loop in loops(module)] == [count]
    derived = parse(unannotated(text))
    assert [trip_count(derived, loop) for loop in loops(derived)] == [count]


def test_a_count_that_is_an_argument_is_not_known() -> None:
    module = parse(cpu_text(lambda x, n: lax.fori_loop(0, n, lambda i, c: jnp.sin(c @ c) * i, x), X, 5))
    assert [trip_count(module, loop) for loop in loops(module)] == [None]


@needs_libtpu
def test_loops_of_the_tpu_compiler() -> None:
    texts = tpu_texts()
    assert "known_trip_count" not in texts["scan"]
    scan = parse(texts["scan"])
    assert [trip_count(scan, loop) for loop in loops(scan)] == [7]
    nested = parse(texts["nested"])
    assert sorted(str(trip_count(nested, loop)) for loop in loops(nested)) == ["10", "3"]


def loop(
    condition: str = "ROOT %lt = pred[] compare(%i, %n), direction=LT",
    body: str = "%next = s32[] add(%i, %one)",
    start: str = "0",
    bound: str = "10",
    config: str = "",
    extra: str = "",
) -> Module:
    """A loop whose counter is element 0 and whose bound, as carried, is element 1."""
    return parse(f"""HloModule m, is_scheduled=true
{extra}
%cond (c: (s32[], s32[])) -> pred[] {{
  %c = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=1
  %ten = s32[] constant(10)
  {condition}
}}

%body (b: (s32[], s32[])) -> (s32[], s32[]) {{
  %b = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %n = s32[] get-tuple-element(%b), index=1
  %one = s32[] constant(1)
  {body}
  ROOT %t = (s32[], s32[]) tuple(%next, %n)
}}

ENTRY %main (x: s32[]) -> (s32[], s32[]) {{
  %x = s32[] parameter(0)
  %start = s32[]{{:T(128)}} constant({start})
  %bound = s32[] constant({bound})
  %copy = s32[] copy(%bound)
  %init = (s32[], s32[]) tuple(%start, %copy)
  ROOT %loop = (s32[], s32[]) while(%init), condition=%cond, body=%body{config}
}}
""")


def counted(module: Module) -> int | None:
    return trip_count(module, module.entry_computation.root)


@pytest.mark.parametrize(
    "direction, start, step, bound, count",
    [
        ("LT", 0, 1, 10, 10),
        ("LT", 0, 3, 10, 4),
        ("LT", 10, 1, 10, 0),
        ("LT", 3, -1, 10, None),
        ("LT", 3, 0, 10, None),
        ("LE", 0, 1, 10, 11),
        ("LE", 0, 3, 10, 4),
        ("LE", 0, 5, 10, 3),
        ("LE", 11, 1, 10, 0),
        ("GT", 10, -1, 0, 10),
        ("GT", 10, -3, 0, 4),
        ("GT", -5, -1, 0, 0),
        ("GT", 10, 1, 0, None),
        ("GE", 10, -1, 0, 11),
        ("GE", 10, -3, 0, 4),
        ("NE", 0, 2, 10, 5),
        ("NE", 0, 3, 10, None),
        ("NE", 10, 3, 10, 0),
        ("EQ", 10, 3, 10, 1),
        ("EQ", 9, 3, 10, 0),
        ("EQ", 10, 0, 10, None),
    ],
)
def test_directions_and_steps(direction: str, start: int, step: int, bound: int, count: int | None) -> None:
    steps = 0
    value = start
    compare: Any = {
        "LT": int.__lt__,
        "LE": int.__le__,
        "GT": int.__gt__,
        "GE": int.__ge__,
        "NE": int.__ne__,
    }.get(direction, int.__eq__)
    while steps < 100 and compare(value, bound):
        steps, value = steps + 1, value + step
    assert count == (steps if steps < 100 else None), "the table itself"

    body = f"%s = s32[] constant({step})\n  %next = s32[] add(%s, %i)"
    condition = f"ROOT %c1 = pred[] compare(%i, %n), direction={direction}"
    assert counted(loop(condition, body, str(start), str(bound))) == count
    flipped = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
    condition = f"ROOT %c1 = pred[] compare(%n, %i), direction={flipped}"
    assert counted(loop(condition, body, str(start), str(bound))) == count


@pytest.mark.parametrize(
    "condition, body, count",
    [
        ("ROOT %lt = pred[] compare(%i, %ten), direction=LT, type=SIGNED", "%next = s32[] add(%i, %one)", 10),
        (
            "%m = s32[] subtract(%ten, %i)\n  ROOT %r = pred[] compare(%m, %ten), direction=GT",
            "%next = s32[] add(%i, %one)",
            None,
        ),
        (
            "%m = s32[] add(%i, %ten)\n  ROOT %r = pred[] compare(%m, %ten), direction=LE",
            "%next = s32[] add(%i, %one)",
            1,
        ),
        (
            "%ge = pred[] compare(%i, %n), direction=GE\n  ROOT %r = pred[] not(%ge)",
            "%next = s32[] add(%i, %one)",
            10,
        ),
        (
            "ROOT %lt = pred[] compare(%i, %n), direction=LT",
            "%two = s32[] add(%one, %one)\n  %next = s32[] add(%i, %two)",
            5,
        ),
        ("ROOT %lt = pred[] compare(%i, %n), direction=LT", "%next = s32[] multiply(%i, %one)", None),
        ("ROOT %lt = pred[] compare(%i, %n), direction=LT", "%next = s32[] add(%i, %n)", 1),
        (
            "ROOT %lt = pred[] compare(%i, %n), direction=LT",
            "%m = s32[] subtract(%i, %one)\n  %next = s32[] subtract(%i, %m)",
            None,
        ),
        ("ROOT %f = pred[] constant(false)", "%next = s32[] add(%i, %one)", 0),
        ("ROOT %f = pred[] constant(true)", "%next = s32[] add(%i, %one)", None),
        (
            "ROOT %f = pred[] fusion(%i, %n), kind=kLoop, calls=%less",
            "%next = s32[] fusion(%i), kind=kLoop, calls=%up",
            10,
        ),
        ("ROOT %f = pred[] call(%i, %n), to_apply=%less", "%next = s32[] call(%i), to_apply=%up", 10),
        ("ROOT %f = pred[] fusion(%c), kind=kLoop, calls=%whole", "%next = s32[] add(%i, %one)", 10),
    ],
)
def test_forms_of_condition_and_step(condition: str, body: str, count: int | None) -> None:
    extra = """
%less (l: s32[], r: s32[]) -> pred[] {
  %l = s32[] parameter(0)
  %r = s32[] parameter(1)
  ROOT %o = pred[] compare(%l, %r), direction=LT
}

%up (u: s32[]) -> s32[] {
  %u = s32[] parameter(0)
  %k = s32[] constant(1)
  %w = s32[] copy(%u)
  ROOT %o = s32[] add(%w, %k)
}

%whole (c: (s32[], s32[])) -> pred[] {
  %c = (s32[], s32[]) parameter(0)
  %l = s32[] get-tuple-element(%c), index=0
  %r = s32[] get-tuple-element(%c), index=1
  ROOT %o = pred[] compare(%l, %r), direction=LT
}
"""
    assert counted(loop(condition, body, extra=extra)) == count


def test_the_compilers_count_goes_first() -> None:
    noted = ', backend_config={"known_trip_count":{"n":"42"},"known_init_step":{"init":"0","step":"1"}}'
    assert counted(loop(config=noted)) == 42
    assert counted(loop(config=', backend_config={"known_trip_count":{"n":"many"}}')) == 10


def test_a_start_that_is_not_known() -> None:
    module = loop()
    text = "\n".join(
        line.replace("tuple(%start, %copy)", "tuple(%x, %copy)") for line in LOOP_TEXT.splitlines()
    )
    assert counted(module) == 10
    assert counted(parse(text)) is None


LOOP_TEXT = """HloModule m

%cond (c: (s32[], s32[])) -> pred[] {
  %c = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=1
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (b: (s32[], s32[])) -> (s32[], s32[]) {
  %b = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %n = s32[] get-tuple-element(%b), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], s32[]) tuple(%next, %n)
}

%outer_cond (oc: (s32[], s32[])) -> pred[] {
  %oc = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%oc), index=0
  %three = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %three), direction=LT
}

%outer_body (ob: (s32[], s32[])) -> (s32[], s32[]) {
  %ob = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%ob), index=0
  %n = s32[] get-tuple-element(%ob), index=1
  %two = s32[] constant(2)
  %init = (s32[], s32[]) tuple(%two, %n)
  %inner = (s32[], s32[]) while(%init), condition=%cond, body=%body
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], s32[]) tuple(%next, %n)
}

ENTRY %main (x: s32[]) -> (s32[], s32[]) {
  %x = s32[] parameter(0)
  %start = s32[] constant(0)
  %copy = s32[] constant(10)
  %init = (s32[], s32[]) tuple(%start, %copy)
  ROOT %loop = (s32[], s32[]) while(%init), condition=%outer_cond, body=%outer_body
}
"""


def test_a_bound_carried_through_the_loop_around_it() -> None:
    module = parse(LOOP_TEXT)
    inner = module.computation("outer_body").instruction("inner")
    assert trip_count(module, inner) == 8
    assert counted(module) == 3


def test_calls_that_call_twice_do_not_double_the_work_with_every_level() -> None:
    levels = 60
    text = ["%f0 (p: s32[]) -> s32[] {", "  ROOT %p = s32[] parameter(0)", "}", ""]
    for level in range(1, levels):
        text += [
            f"%f{level} (p: s32[]) -> s32[] {{",
            "  %p = s32[] parameter(0)",
            f"  %a = s32[] call(%p), to_apply=%f{level - 1}",
            f"  %b = s32[] call(%p), to_apply=%f{level - 1}",
            "  %d = s32[] subtract(%a, %b)",
            "  ROOT %s = s32[] add(%b, %d)",
            "}",
            "",
        ]
    body = f"%j = s32[] add(%i, %one)\n  %next = s32[] call(%j), to_apply=%f{levels - 1}"
    assert counted(loop(body=body, extra="\n".join(text))) == 10
