"""Modules read from text: of real compilers and by hand, and what must be refused with its line."""

import dataclasses
import inspect
import random
import re
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from overlap.hlo.module import (
    Instruction,
    Module,
    Shape,
    async_pairs,
    collective,
    collective_instruction,
    estimated_cycles,
)
from overlap.hlo.parse import ParseError, parse
from tests.libtpu import needs_libtpu
from tests.overlap.hlo.texts import GPU, SPARSECORE, cpu_mesh, cpu_text, tpu_texts

HOPS = 7


def ring(x: jax.Array) -> jax.Array:
    total = x @ x.T
    for _ in range(HOPS):
        x = lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)])  # the hop
        total = total + x @ x.T
    return total


@pytest.fixture(scope="module")
def cpu_ring() -> str:
    sharded = jax.shard_map(ring, mesh=cpu_mesh((8,), ("x",)), in_specs=P("x"), out_specs=P("x"))
    return cpu_text(sharded, jnp.ones((8 * 16, 32), jnp.float32))


@pytest.fixture(scope="module")
def tpu() -> dict[str, str]:
    return tpu_texts()


def everything(module: Module) -> list[Instruction]:
    return [i for c in module.computations.values() for i in c.instructions]


def lines_of_instructions(text: str) -> int:
    return len(re.findall(r"^ +(?:ROOT )?%?[\w.\-]+ = ", text, re.MULTILINE))


def test_a_cpu_module(cpu_ring: str) -> None:
    module = parse(cpu_ring)
    assert module.name == "jit_ring"
    assert module.is_scheduled
    assert (module.num_partitions, module.num_replicas) == (8, 1)
    assert len(everything(module)) == lines_of_instructions(cpu_ring)
    for computation in module.computations.values():
        assert computation.root.is_root
        assert [computation.instruction(i.name) for i in computation.instructions] == list(
            computation.instructions
        )
    permutes = [i for i in everything(module) if collective(module, i) == "collective-permute"]
    assert len(permutes) == HOPS
    assert {i.shape.bytes for i in permutes} == {16 * 32 * 4}
    lines, first = inspect.getsourcelines(ring)
    hop = first + next(n for n, line in enumerate(lines) if "# the hop" in line)
    assert {i.source for i in permutes} == {f"{Path(__file__)}:{hop}"}
    assert {i.op_name for i in permutes} == {"jit(ring)/shard_map/ppermute"}
    text_lines = cpu_ring.split("\n")
    assert all(f"{i.name} = " in text_lines[i.line - 1] for i in everything(module))


def test_before_optimisation_without_signatures_and_percent_signs() -> None:
    lowered = jax.jit(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=5)).lower(
        jnp.ones(3)
    )
    text = lowered.as_text("hlo")
    assert "%" not in text
    module = parse(text)
    assert not module.is_scheduled
    assert len(everything(module)) == lines_of_instructions(text)
    (loop,) = [i for i in everything(module) if i.opcode == "while"]
    assert [module.computation(name).root.shape.dtype for name in loop.calls] == ["pred", "tuple"]


def test_branches_of_a_conditional() -> None:
    branches = [lambda x: jnp.sin(x @ x), lambda x: x.T @ x, lambda x: x]
    text = cpu_text(lambda x, k: lax.switch(k, branches, x), jnp.ones((64, 64)), 1)
    module = parse(text)
    (switch,) = [i for i in everything(module) if i.opcode == "conditional"]
    assert len(switch.calls) == 3
    assert all(module.computation(name).root.shape == switch.shape for name in switch.calls)


def test_an_operation_name_of_any_characters_comes_back_as_it_was_written() -> None:
    name = 'a"b\\c{d}<script>alert(1)</script>\t\n é %x), metadata={op_name="evil"}'

    def hostile(x: jax.Array) -> jax.Array:
        with jax.named_scope(name):
            return jnp.sin(x) @ x

    module = parse(cpu_text(hostile, jnp.ones((64, 64))))
    assert f"jit(hostile)/{name}/sin" in {i.op_name for i in everything(module)}


def test_a_gpu_module() -> None:
    module = parse(GPU)
    main = module.entry_computation
    by_name = main.by_name
    assert [i.name for i in main.instructions if i.is_async_start] == ["cp-start", "ag-start"]
    assert async_pairs(main) == {"cp-start": "cp-done", "ag-start": "ag-done"}
    assert collective(module, by_name["cp-start"]) == "collective-permute"
    assert collective(module, by_name["cp-done"]) is None
    assert by_name["ag-start"].operands == ("cp-done", "small")
    assert by_name["ag-start"].shape.bytes == (128 * 64 + 4 + 256 * 64 + 8) * 4
    assert by_name["gemm"].backend_config["gemm_backend_config"]["note"] == 'a "brace": } {'
    assert (by_name["gemm"].source_file, by_name["gemm"].source_line) == ("/home/u/older.py", 7)
    assert by_name["cp-start"].source == '/home/a user/ring "2".py:12'
    assert by_name["top"].backend_config == '{is_stable = true, order = "TOTAL"}'
    assert by_name["top"].attributes["control-predecessors"] == "{%gemm, %ag-done}"
    assert by_name["small"].literal == "{1, 2, -3, 4e-05}"
    assert by_name["sum.1"].calls == ("region_0.0",)
    assert by_name["out"].operands == ("get-tuple-element.3", "get-tuple-element.3")
    assert by_name["param.1"].source == ""


def test_asynchronous_gathers_on_a_sparse_core_and_cut_into_fusions() -> None:
    module = parse(SPARSECORE)
    main = module.entry_computation
    assert module.computation("called_computation").execution_thread == "sparsecore"
    assert async_pairs(main) == {
        "call-start": "call-done",
        "async-collective-start": "async-collective-done",
    }
    found = {i.name: collective(module, i) for i in main.instructions if collective(module, i)}
    assert found == {"call-start": "all-gather", "async-collective-start": "all-gather"}
    assert [i.name for i in main.instructions if i.is_async_update] == ["call-update"]
    assert [i.name for i in main.instructions if i.is_async_step] == ["fusion.64"]
    inner = collective_instruction(module, main.instruction("call-start"))
    assert inner is not None and inner.name == "all-gather.2"


@pytest.mark.parametrize("updates", [0, 1, 3])
def test_a_generic_start_and_its_done_behind_updates(updates: int) -> None:
    shape = "((f32[8]{0}), f32[2]{0}, u32[])"
    chain = "".join(
        f"  %u{n} = {shape} async-update(%{f'u{n - 1}' if n else 's'}), calls=%wrapped\n"
        for n in range(updates)
    )
    text = f"""HloModule m

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%wrapped (w: f32[8]) -> f32[2] {{
  %w = f32[8]{{0}} parameter(0)
  ROOT %rs = f32[2]{{0}} reduce-scatter(%w), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, to_apply=%add
}}

ENTRY %main (p: f32[8]) -> f32[2] {{
  %p = f32[8]{{0}} parameter(0)
  %s = {shape} async-start(%p), calls=%wrapped
{chain}  ROOT %d = f32[2]{{0}} async-done(%{f"u{updates - 1}" if updates else "s"}), calls=%wrapped
}}
"""
    module = parse(text)
    assert async_pairs(module.entry_computation) == {"s": "d"}
    assert collective(module, module.entry_computation.instruction("s")) == "reduce-scatter"
    assert collective(module, module.entry_computation.instruction("d")) is None


def test_a_send_is_paired_through_a_tuple_and_the_right_element() -> None:
    text = """HloModule m

ENTRY %main (p: f32[8], t: token[]) -> (token[], (f32[8], token[])) {
  %p = f32[8]{0} parameter(0)
  %t = token[] parameter(1)
  %r = (f32[8]{0}, u32[], token[]) recv(%t), channel_id=1
  %s = (f32[8]{0}, u32[], token[]) send(%p, %t), channel_id=1
  %both = ((f32[8]{0}, u32[], token[]), (f32[8]{0}, u32[], token[])) tuple(%r, %s)
  %one = (f32[8]{0}, u32[], token[]) get-tuple-element(%both), index=1
  %sd = token[] send-done(%one), channel_id=1
  %rd = (f32[8]{0}, token[]) recv-done(%r), channel_id=1
  ROOT %o = (token[], (f32[8]{0}, token[])) tuple(%sd, %rd)
}
"""
    module = parse(text)
    assert async_pairs(module.entry_computation) == {"s": "sd", "r": "rd"}
    assert [collective(module, i) for i in module.entry_computation.instructions[2:4]] == ["recv", "send"]


@needs_libtpu
def test_a_ring_of_the_tpu_compiler(tpu: dict[str, str]) -> None:
    text = tpu["ring"]
    module = parse(text)
    assert module.is_scheduled
    assert len(everything(module)) == lines_of_instructions(text)
    main = module.entry_computation
    starts = [i for i in main.instructions if collective(module, i) == "collective-permute"]
    assert len(starts) == text.count("collective-permute-start(") == 7
    assert {i.shape.elements[0].bytes for i in starts} == {256 * 1024 * 2}
    pairs = async_pairs(main)
    assert {main.instruction(pairs[i.name]).opcode for i in starts} == {"collective-permute-done"}
    assert {array.memory_space for i in everything(module) for array in i.shape.arrays} >= {0, 1}
    products = [i for i in main.instructions if i.op_name.endswith("/dot_general") and i.opcode == "fusion"]
    assert products
    assert all((estimated_cycles(i) or 0) > 0 for i in products)
    cycles = [estimated_cycles(i) for i in everything(module)]
    assert sum(c for c in cycles if c) == sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))


@needs_libtpu
def test_gathers_that_the_tpu_compiler_cuts_into_fusions_are_told_once(tpu: dict[str, str]) -> None:
    module = parse(tpu["layers"])
    main = module.entry_computation
    channels = {i.attributes["channel_id"] for i in everything(module) if i.opcode.startswith("all-gather")}
    gathers = [i for i in main.instructions if collective(module, i) == "all-gather"]
    assert len(gathers) == len(channels)
    starts = [i.name for i in gathers if i.is_async_start]
    assert starts
    assert all(main.instruction(async_pairs(main)[name]).is_async_done for name in starts)


@needs_libtpu
def test_no_cut_of_a_tpu_module_is_read(tpu: dict[str, str]) -> None:
    text = tpu["scan"].rstrip()
    places = random.Random(0).sample(range(len(text)), 300)
    for at in places:
        with pytest.raises(ParseError):
            parse(text[:at])


def test_no_cut_at_a_line_of_a_cpu_module_is_read(cpu_ring: str) -> None:
    lines = cpu_ring.rstrip().split("\n")
    for count in range(len(lines)):
        with pytest.raises(ParseError):
            parse("\n".join(lines[:count]))


@pytest.mark.parametrize("text", [GPU, SPARSECORE])
def test_no_cut_at_a_byte_is_read(text: str) -> None:
    for at in range(len(text.rstrip())):
        with pytest.raises(ParseError):
            parse(text[:at])


def test_no_lost_line_of_an_instruction_that_is_read_goes_unnoticed(cpu_ring: str) -> None:
    module = parse(cpu_ring)
    lines = cpu_ring.split("\n")
    read = [
        i
        for c in module.computations.values()
        for i in c.instructions
        if any(i.name in j.operands for j in c.instructions)
    ]
    assert read
    for instruction in read:
        with pytest.raises(ParseError):
            parse("\n".join(lines[: instruction.line - 1] + lines[instruction.line :]))


GOOD = """HloModule m, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} add(%p, %p), metadata={op_name="x"}
  ROOT %r = f32[8]{0} all-reduce(%q), replica_groups={{0,1}}, to_apply=%add
}
"""


@pytest.mark.parametrize(
    "old, new, line, problem",
    [
        (GOOD, "", 1, "the text is empty"),
        (GOOD, "\n \n", 3, "the text is empty"),
        (GOOD, "\x08\x03\x12\x04jit_\x00", 1, "is it a proto dump"),
        ("HloModule m", "func.func @main", 1, "begins with 'HloModule NAME'"),
        ("num_partitions=2", "num_partitions=two", 1, "num_partitions is no number"),
        ("num_partitions=2", "frontend_attributes={a=", 1, "'{' is not closed"),
        ("%add (a: f32[], b: f32[])", "%add (a: f32[])", 3, "has 2 parameters"),
        ("parameter(1)", "parameter(2)", 3, "are numbered 0, 2"),
        (
            "%b = f32[] parameter(1)",
            "%a = f32[] parameter(1)",
            5,
            "second instruction of this computation is called 'a'",
        ),
        ("%b = f32[] parameter(1)", "%b = f99x[] parameter(1)", 5, "is no HLO type"),
        ("%b = f32[] parameter(1)", "%b = f32[] parameter(one)", 5, "is no parameter's"),
        ("ROOT %c", "%c", 3, "no ROOT"),
        ("  %q =", "  ROOT %q =", 9, "2 ROOT"),
        ("add(%a, %b)", "add(%a, %z)", 6, "reads 'z', which this computation does not define above"),
        ("add(%a, %b)", "add(%a %b)", 6, "is no name of an instruction"),
        ("add(%a, %b)", "add(%a, %b", 6, "no instruction"),
        ("add(%a, %b)", "add(%a, %b), x=}", 6, "'}' closes nothing"),
        ("add(%a, %b)", "add(%a, %b), dimensions", 6, "no attribute"),
        ("add(%a, %b)", "add(%a, %b), x=1, x=2", 6, "given twice"),
        ('{op_name="x"}', '{op_name="x}', 11, "a string is not closed"),
        ('{op_name="x"}', '{op_name="x"', 11, "'{' is not closed"),
        ("to_apply=%add", "to_apply=%sub", 12, "names 'sub', which the text does not define above"),
        ("to_apply=%add", "to_apply={}", 12, "names no computation"),
        ("%add (a", "%main (a", 9, "second computation is called 'main'"),
        ("%add (a", "ENTRY %add (a", 9, "a second ENTRY"),
        ("ENTRY ", "", 14, "ends before the ENTRY computation"),
        ("}\n\nENTRY", "\nENTRY", 7, "where is its closing brace?"),
        ("}\n\nENTRY", "}\n\ngarbage\nENTRY", 9, "no computation begins like this"),
        ("}\n\nENTRY", "}, what=1\n\nENTRY", 7, "no computation ends like this"),
        ("all-reduce(%q)", "get-tuple-element(%q), index=0", 12, "has no element 0"),
        ("all-reduce(%q)", "fusion(%q), calls=%add", 12, "1 operands for the 2 parameters of 'add'"),
        ("all-reduce(%q)", "while(%q)", 12, "a while needs condition="),
    ],
)
def test_what_is_refused_and_where(old: str, new: str, line: int, problem: str) -> None:
    parse(GOOD)
    text = GOOD.replace(old, new, 1)
    with pytest.raises(ParseError, match=re.escape(problem)) as error:
        parse(text)
    assert error.value.line == line
    assert error.value.text == text.split("\n")[line - 1]
    assert str(error.value).startswith(f"line {line}: ")


def test_more_devices_than_there_are_is_a_damaged_text() -> None:
    with pytest.raises(ParseError, match="2 × 99999999999 devices are more than there are"):
        parse(GOOD.replace("\n", ", replica_count=99999999999\n", 1))


def test_a_long_line_is_cut_in_the_message() -> None:
    with pytest.raises(ParseError) as error:
        parse(GOOD.replace("add(%a, %b)", f"add(%a, %{'z' * 10_000})"))
    assert len(str(error.value).split("\n")[-1]) < 200


def test_windows_line_ends_and_blanks_at_the_end() -> None:
    assert parse(GOOD.replace("\n", "\r\n") + "\r\n \r\n").computations == parse(GOOD).computations


def test_the_json_of_a_custom_call_may_take_several_lines() -> None:
    config = '{\n "a": [1,\n  {"b": "}"}],\n "c": "x = {"\n}'
    text = GOOD.replace(
        "  %q = f32[8]{0} add(%p, %p)", f"  %q = f32[8]{{0}} custom-call(%p), backend_config={config}"
    )
    module = parse(text)
    call = module.entry_computation.instruction("q")
    assert call.backend_config == {"a": [1, {"b": "}"}], "c": "x = {"}
    assert call.op_name == "x"
    assert [i.line for i in module.entry_computation.instructions] == [10, 11, 16]
    for at in range(len(text.rstrip())):
        with pytest.raises(ParseError):
            parse(text[:at])


def test_real_json_in_several_lines() -> None:
    def call(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        config = '{\n "deep": {"er": "}"},\n "list": [1, 2]\n}'
        return jax.ffi.ffi_call("f", shape, custom_call_api_version=2, legacy_backend_config=config)(x)  # type: ignore[return-value]

    module = parse(jax.jit(call).lower(jnp.ones(4)).as_text("hlo"))
    (found,) = [i for i in everything(module) if i.opcode == "custom-call"]
    assert found.backend_config == {"deep": {"er": "}"}, "list": [1, 2]}


@pytest.mark.parametrize(
    "printed, config",
    [
        ('"a\\nb\\"c\\303\\251"', 'a\nb"cé'),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{name = "a\\0Ab}\\22{", y = 3 : i64}', '{name = "a\\0Ab}\\22{", y = 3 : i64}'),
        ("{" * 12 + "}" * 12, "{" * 12 + "}" * 12),
    ],
)
def test_a_backend_config_that_is_no_json_is_its_text(printed: str, config: object) -> None:
    text = GOOD.replace("add(%p, %p)", f"custom-call(%p), backend_config={printed}")
    assert parse(text).entry_computation.instruction("q").backend_config == config


def test_operands_behind_their_shapes() -> None:
    long = "add((f32[8]{0:T(8,128)}, /*index=1*/u32[]) %p, f32[8]{0} p)"
    text = GOOD.replace("add(%p, %p)", long)
    assert parse(text).entry_computation.instruction("q").operands == ("p", "p")


def test_instructions_made_by_hand() -> None:
    made = Instruction(name="a", opcode="add", shape=Shape("f32", (2,)), operands=("x", "y"))
    assert (made.op_name, made.source, made.backend_config, dict(made.attributes)) == ("", "", None, {})
    assert dataclasses.replace(made, name="b").operands == ("x", "y")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "c"  # type: ignore[misc]


def test_parsed_instructions_compare_copy_and_print_as_whole_ones() -> None:
    one, other = (parse(GOOD).entry_computation.instruction("q") for _ in range(2))
    assert one == other
    assert dataclasses.replace(one, name="z").op_name == "x"
    assert "op_name='x'" in repr(other)
    with pytest.raises(AttributeError, match="has no 'nonsense'"):
        one.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_who_calls_a_computation() -> None:
    module = parse(GOOD)
    assert [(c.name, i.name) for c, i in module.callers["add"]] == [("main", "r")]


def test_memory_grows_with_the_text_and_not_faster() -> None:
    def peak(copies: int) -> int:
        line = '  %{0} = f32[8]{{0}} add(%p, %p), metadata={{op_name="jit(f)/add" stack_frame_id=1}}\n'
        body = "".join(line.format(f"n{n}") for n in range(copies))
        text = GOOD.replace("  %q", f"{body}  %q")
        tracemalloc.start()
        parse(text)
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)
    assert peak(8000) < 5 * peak(2000)
