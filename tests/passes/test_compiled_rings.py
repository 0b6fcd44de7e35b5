"""What the TPU compiler makes of rings: it takes every form, and hops run beside matmuls."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from overlap.hlo import Computation, Instruction, Module, parse, trip_count
from passes import shims
from tests.libtpu import needs_libtpu
from tests.passes.tpu_process import multiplies, told_by

AXIS_SIZE = 8

FORMS: dict[str, dict[str, Any]] = {
    "gather": {"directions": 2},
    "gather one way, joined": {"directions": 1, "chains": 2, "joined": True},
    "gather half way": {"directions": 2, "halfway": True},
    "gather rolled": {"directions": 2, "unroll": 2},
    "gather along two orders": {
        "directions": 2,
        "orders": ((0, 1, 2, 3, 7, 6, 5, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
    },
    "sums": {"directions": 2},
    "sums in columns": {"directions": 2, "columns": 2},
    "activated sums of blocks cut apart": {"directions": 2, "cut": "apart"},
    "sums of blocks cut apart": {"directions": 2, "across": True, "cut": "apart"},
    "scatter": {"directions": 2, "chains": 2},
    "scatter one way": {"directions": 1, "chains": 2, "wire": "operand"},
    "scatter of blocks cut apart": {"directions": 2, "chains": 2, "cut": "apart"},
    "scatter of blocks cut early": {"directions": 2, "chains": 2, "cut": "early"},
    "scatter across": {"directions": 2, "across": True},
    "scatter rolled": {"directions": 2, "chains": 2, "unroll": 2},
    "scatter of one sum": {"directions": 1},
    "psum": {"directions": 2},
    "psum rolled": {"directions": 2, "chains": 2, "unroll": 2},
    "gather along walks": {"directions": 1, "walks": 3},
    "scatter along walks": {"directions": 1, "walks": 3, "wire": "operand"},
    "scatter along walks through cores": {"directions": 1, "walks": 2},
    "psum along walks": {"directions": 1, "walks": 3},
}
"""Rings by what they are for; the first word is the pattern. Walks are of so many dimensions."""

LEFT_ALONE = ("gather one way, joined",)
"""Where the compiler places the starts, it puts both hops that go one way before the same end of a matmul."""

CHUNKS: dict[str, dict[str, Any]] = {
    "psum in chunks of rows": {"directions": 2, "columns": 2},
    "psum in chunks of columns": {"directions": 2, "columns": 4, "across": True},
}
"""Psums each of whose chunks is gathered while the next is scattered: see `FORMS`."""

SCRIPT = """
import json, sys
from unittest import mock
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from overlap import overlap_collectives, tpu_target
from cost_model.walk import gray_walks
from passes.schedule import RingSchedule

mesh = Mesh(np.array(tpu_target.devices("v5e:2x4")), ("x",))
rows, columns = P("x"), P(None, "x")
patterns = {
    "gather": (lambda x, w: lax.all_gather(x, "x", tiled=True) @ w, (rows, columns), columns),
    "sums": (lambda x, w: lax.all_gather(x, "x", axis=1, tiled=True) @ w, (columns, columns), columns),
    "activated": (
        lambda x, w: lax.all_gather(x, "x", axis=1, tiled=True) @ jnp.tanh(w), (columns, columns), columns
    ),
    "scatter": (lambda x, w: lax.psum_scatter(x @ w, "x", tiled=True), (columns, rows), rows),
    "psum": (lambda x, w: lax.psum(x @ w, "x"), (columns, rows), P()),
}
texts = {}
for name, form in json.loads(sys.argv[1]).items():
    body, ins, out = patterns[name.split()[0]]
    walks = gray_walks(tuple(range(8)), form.pop("walks", 1))
    form["orders"] = tuple(map(tuple, form.get("orders", ()))) or (walks if len(walks) > 1 else ())
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((1024, 1024), (1024, 2048)), ins)
    ]
    function = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=out))
    with mock.patch("passes.prices.candidates", lambda *_, **__: (RingSchedule(**form),)):
        lowered = overlap_collectives(function, policy="always", strict=True).lower(*arguments)
    texts[name] = lowered.compile().as_text()
print(json.dumps(texts))
"""


@cache
def compiled() -> dict[str, Module]:
    """Every form's scheduled module, compiled in a process of its own that only sees CPUs."""
    return {name: parse(text) for name, text in told_by(SCRIPT, json.dumps(FORMS | CHUNKS)).items()}


def runs(module: Module) -> dict[str, int]:
    """How often each computation of the entry and of its loops runs."""
    counts = {module.entry: 1}
    for instruction in module.entry_computation.instructions:
        if instruction.opcode == "while":
            times = trip_count(module, instruction) or 0
            counts.update(dict.fromkeys(instruction.calls, times))
    return counts


def exposed(module: Module, computation: Computation) -> list[str]:
    """The hops whose done comes before any matmul that follows their start."""
    waiting: dict[str, bool] = {}
    found = []
    for instruction in computation.instructions:
        if instruction.opcode == "collective-permute-start":
            waiting[instruction.name] = False
        elif instruction.opcode == "collective-permute-done":
            (start,) = instruction.operands
            if not waiting.pop(start):
                found.append(start)
        elif instruction.opcode in ("convolution", "dot") or (
            instruction.opcode == "fusion" and any(multiplies(module, name) for name in instruction.calls)
        ):
            waiting = dict.fromkeys(waiting, True)
    assert not waiting, "every hop that starts is waited for"
    return found


def places(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction writes a part of an array, and multiplies nothing."""
    if instruction.opcode == "fusion":
        inner = [i for name in instruction.calls for i in module.computation(name).instructions]
        return any(places(module, i) for i in inner) and not any(
            multiplies(module, name) for name in instruction.calls
        )
    return instruction.opcode == "dynamic-update-slice"


def placed_alone(module: Module, computation: Computation) -> int:
    """How often a computation places something while no hop is on its way."""
    in_flight = found = 0
    for instruction in computation.instructions:
        in_flight += instruction.opcode == "collective-permute-start"
        in_flight -= instruction.opcode == "collective-permute-done"
        found += not in_flight and places(module, instruction)
    return found


def instructions(module: Module) -> list[Instruction]:
    """Those of all computations that run one by one."""
    return [each for name in runs(module) for each in module.computation(name).instructions]


def placed_by_loops(module: Module) -> int:
    """How many fusions do nothing but place something, which compilers make slow loops of."""
    return sum(each.opcode == "fusion" and places(module, each) for each in instructions(module))


def permutes(module: Module) -> int:
    """Hops of one device, those in loops as often as they run."""
    return sum(
        times * sum(i.opcode == "collective-permute-start" for i in module.computation(name).instructions)
        for name, times in runs(module).items()
    )


@needs_libtpu
@pytest.mark.parametrize("name", FORMS)
def test_the_compiler_takes_a_ring_and_keeps_its_hops(name: str) -> None:
    form, module = FORMS[name], compiled()[name]
    rings = form.get("walks") or max(1, len(form.get("orders", ())))
    pieces = form["directions"] * form.get("chains", 1) * rings
    assert module.is_scheduled
    hops = AXIS_SIZE // 2 if form.get("halfway") else AXIS_SIZE - 1
    assert permutes(module) == pieces * form.get("columns", 1) * hops


@needs_libtpu
@pytest.mark.parametrize("name", [name for name in FORMS if shims.EXPLICIT_STARTS or name not in LEFT_ALONE])
def test_every_hop_has_a_matmul_beside_it(name: str) -> None:
    """Where the compiler places the starts too: the products for a scatter's pieces take turns."""
    module = compiled()[name]
    assert [hop for each in runs(module) for hop in exposed(module, module.computation(each))] == []


@needs_libtpu
@pytest.mark.skipif(not shims.EXPLICIT_STARTS, reason="without starts of their own psums go in one chunk")
@pytest.mark.parametrize("name", CHUNKS)
def test_what_is_gathered_of_a_chunk_is_placed_beside_the_hops_of_the_next(name: str) -> None:
    form, module = CHUNKS[name], compiled()[name]
    assert permutes(module) == 2 * form["directions"] * form["columns"] * (AXIS_SIZE - 1)
    alone = sum(
        times * placed_alone(module, module.computation(each)) for each, times in runs(module).items()
    )
    # What comes last of all, by both ways, has no hop to hide behind.
    assert alone <= form["directions"]


@needs_libtpu
@pytest.mark.skipif(not shims.EXPLICIT_STARTS, reason="without starts of their own psums go in one chunk")
@pytest.mark.parametrize("name", CHUNKS)
def test_shards_of_a_psum_are_placed_by_writes_of_their_own(name: str) -> None:
    assert placed_by_loops(compiled()[name]) == 0


@needs_libtpu
@pytest.mark.parametrize("form", FORMS)
def test_where_blocks_are_is_computed_from_scalars(form: str) -> None:
    """A table would be a buffer in main memory, and reading it a transfer from there."""
    tables = [
        instruction
        for instruction in instructions(compiled()[form])
        for array in instruction.shape.arrays
        if array.dtype in ("s32", "u32") and array.size > 1
    ]
    assert not tables


@needs_libtpu
@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith("sums")])
def test_sums_are_added_up_in_the_matmuls(name: str) -> None:
    """Else every sum is read and written apart, in each step."""
    apart = [
        instruction
        for instruction in instructions(compiled()[name])
        if instruction.opcode == "add" and any(array.size > 1 for array in instruction.shape.arrays)
    ]
    assert not apart


@needs_libtpu
def test_blocks_that_are_cut_apart_are_cut_out_step_by_step() -> None:
    """Else one fusion makes the blocks of all steps, and all of them are kept."""
    module = compiled()["activated sums of blocks cut apart"]
    fusions = [i for i in module.entry_computation.instructions if i.opcode == "fusion"]
    assert max(len(fusion.shape.arrays) for fusion in fusions) <= 2
