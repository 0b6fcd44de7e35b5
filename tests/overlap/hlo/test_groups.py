"""Replica groups and pairs in every printing: against lists written by hand and JAX's own meshes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from overlap.hlo.groups import parse_groups, replica_groups, source_target_pairs
from overlap.hlo.module import Computation, Instruction, Module, Shape, collective
from overlap.hlo.parse import parse
from tests.overlap.hlo.texts import GPU, cpu_mesh, cpu_text


@pytest.mark.parametrize(
    "text, groups",
    [
        ("{}", ()),
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{3}}", ((3,),)),
        ("{{0, 2}, {1, 3}}", ((0, 2), (1, 3))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[1,8]<=[8]", (tuple(range(8)),)),
        ("[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=8] {'x'}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['x'=8] {'x':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['x'=8] {'x':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,0,2) {'x'}", ((3, 0), (1, 2))),
        ("mesh['x'=4], device_ids=([2,2]T(1,0)) {'x'}", ((0, 2, 1, 3),)),
        ("mesh[axis_0=2,axis_1=2] {axis_1}", ((0, 1), (2, 3))),
        ("@mesh<u=2,v=3> {u}", ((0, 3), (1, 4), (2, 5))),
        ("@mesh<x=2,y=2>, device_ids=(3,1,0,2) {y}", ((3, 1), (0, 2))),
    ],
)
def test_groups_as_compilers_print_them(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(text) == groups


@pytest.mark.parametrize(
    "mesh, iota",
    [
        ("mesh['a'=8] {'a':(1)2}", "[4,2]<=[2,4]T(1,0)"),
        ("mesh['a'=8] {'a':(1)4}", "[2,4]<=[4,2]T(1,0)"),
        ("mesh['a'=8] {'a':(2)2}", "[4,2]<=[2,2,2]T(0,2,1)"),
        ("mesh['a'=8] {'a':(2)4}", "[2,4]<=[8]"),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", "[2,4]<=[2,2,2]T(1,2,0)"),
        ("mesh['a'=6,'b'=6] {'a':(3)2,'b':(3)2}", "[9,4]<=[3,2,3,2]T(0,2,1,3)"),
    ],
)
def test_sub_axes_are_the_iota_groups_that_xla_gives_for_them(mesh: str, iota: str) -> None:
    """The pairs that xla/hlo/ir/replica_group_test.cc holds to be equal, and one counted by hand."""
    assert parse_groups(mesh) == parse_groups(iota)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{{0,1}",
        "{{0,1},}",
        "0,1",
        "[2,4]<=[7]",
        "[2,4]<=[4,2]T(0,0)",
        "[2,4]<=[4,2]T(1)",
        "[1,9999999999999]<=[9999999999999]",
        "mesh['x'=8]",
        "mesh['x'=8] {'y'}",
        "mesh['x'=8] {'x':(3)2}",
        "mesh['x'=8] {'x':(0)2}",
        "mesh['x'=8] {'x','x'}",
        "mesh['x'=8], device_ids=(1,2) {'x'}",
    ],
)
def test_what_are_no_groups(text: str) -> None:
    with pytest.raises(ValueError):
        parse_groups(text)


def module(opcode: str, replicas: int, partitions: int, **attributes: str) -> Module:
    instruction = Instruction("c", opcode, Shape("f32", (8,)), attributes=attributes, is_root=True)
    main = Computation("main", (instruction,))
    return Module("m", {"main": main}, "main", num_partitions=partitions, num_replicas=replicas)


GLOBAL = {"channel_id": "1", "use_global_device_ids": "true"}


@pytest.mark.parametrize(
    "opcode, replicas, partitions, attributes, groups",
    [
        ("all-reduce", 1, 4, GLOBAL | {"replica_groups": "{{0,1},{2,3}}"}, ((0, 1), (2, 3))),
        ("all-reduce", 2, 2, GLOBAL | {"replica_groups": "{{0,3},{1,2}}"}, ((0, 3), (1, 2))),
        ("all-reduce", 2, 2, {"replica_groups": "{{0,1}}"}, ((0, 2), (1, 3))),
        ("all-reduce", 2, 2, {"replica_groups": "{}"}, ((0, 2), (1, 3))),
        ("all-reduce", 2, 2, {"replica_groups": "{{0,1}}", "channel_id": "1"}, ((0, 1, 2, 3),)),
        ("all-reduce", 2, 2, {"replica_groups": "{{0},{1}}", "channel_id": "1"}, ((0, 1), (2, 3))),
        ("all-to-all", 2, 2, {"replica_groups": "{{0,1}}", "channel_id": "1"}, ((0, 1), (2, 3))),
        ("all-to-all", 1, 4, {"replica_groups": "{{0,2},{1,3}}", "channel_id": "1"}, ((0, 2), (1, 3))),
        ("all-to-all", 4, 1, {"replica_groups": "{{0,2},{1,3}}"}, ((0, 2), (1, 3))),
        ("all-gather-start", 1, 1, {"replica_groups": "{{0,1},{2,3}}"}, ((0, 1), (2, 3))),
        ("collective-broadcast", 1, 4, {"channel_id": "1"}, ((0, 1, 2, 3),)),
    ],
)
def test_devices_of_replicas_and_partitions(
    opcode: str, replicas: int, partitions: int, attributes: dict[str, str], groups: Any
) -> None:
    whole = module(opcode, replicas, partitions, **attributes)
    assert replica_groups(whole, whole.entry_computation.root) == groups


def test_no_collective_has_no_groups() -> None:
    whole = module("add", 1, 4)
    with pytest.raises(ValueError, match=r"c \(add\) is no collective"):
        replica_groups(whole, whole.entry_computation.root)


def test_the_groups_of_a_compiled_program_are_the_rows_of_its_mesh() -> None:
    mesh = cpu_mesh((2, 2, 2), ("a", "b", "c"))
    axes: list[tuple[str, ...]] = [("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("a", "b", "c")]

    for names in axes:
        text = cpu_text(
            jax.shard_map(
                lambda x, names=names: lax.psum(x, names),
                mesh=mesh,
                in_specs=P(("a", "b", "c")),
                out_specs=P(),
                check_vma=False,
            ),
            jnp.ones((8, 4)),
        )
        whole = parse(text)
        found = [
            replica_groups(whole, i)
            for i in whole.entry_computation.instructions
            if collective(whole, i) == "all-reduce"
        ]
        ids = np.arange(8).reshape(2, 2, 2)
        moved = [i for i, name in enumerate("abc") if name in names]
        rows = ids.transpose([i for i in range(3) if i not in moved] + moved).reshape(-1, 2 ** len(names))
        assert [sorted(map(sorted, groups)) for groups in found] == [sorted(map(sorted, rows.tolist()))], (
            names
        )


def test_both_printings_in_one_module() -> None:
    whole = parse(GPU)
    by_name = whole.entry_computation.by_name
    assert replica_groups(whole, by_name["ag-start"]) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert replica_groups(whole, by_name["sum.1"]) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_the_pairs_of_a_compiled_permute() -> None:
    pairs = [(0, 3), (3, 1), (5, 0), (7, 7)]
    text = cpu_text(
        jax.shard_map(
            lambda x: lax.ppermute(x, "x", pairs),
            mesh=cpu_mesh((8,), ("x",)),
            in_specs=P("x"),
            out_specs=P("x"),
        ),
        jnp.ones((8, 4)),
    )
    permutes = [i for i in parse(text).entry_computation.instructions if i.opcode == "collective-permute"]
    assert [source_target_pairs(i) for i in permutes] == [tuple(pairs)]


@pytest.mark.parametrize(
    "note",
    [
        "{_xla_send_recv_source_target_pairs={{0,1},{1,2}}}",
        '{a="b",_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}',
    ],
)
def test_the_pairs_of_a_send_stand_in_its_notes(note: str) -> None:
    send = Instruction("s", "send", Shape("token"), attributes={"frontend_attributes": note})
    assert source_target_pairs(send) == ((0, 1), (1, 2))


@pytest.mark.parametrize("text", ["", "{{0,1},{2}}", "{{0,1}", "[2,2]<=[4]"])
def test_what_are_no_pairs(text: str) -> None:
    with pytest.raises(ValueError):
        source_target_pairs(
            Instruction("p", "collective-permute", Shape("f32"), attributes={"source_target_pairs": text})
        )
