"""Traces read back: device planes of TPUs and GPUs, a CPU's host events, and times that are counted by hand.

The traces are made by hand, as the text of an XSpace. Times are nanoseconds.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from overlap.device_activity import Activity, Directory, activity, bars, intersection, length, union
from overlap.hlo.parse import parse
from overlap.profile_events import ANNOTATION, Trace, of_variants, read_file

Event = tuple[str, int, int, Mapping[str, Any]]
"""Name, start and end in nanoseconds, stats."""


def plane(name: str, lines: Mapping[str, Sequence[Event]]) -> str:
    """A plane as the text of a protocol buffer."""
    stats = sorted({key for events in lines.values() for *_, found in events for key in found})
    names = sorted({event[0] for events in lines.values() for event in events})
    text = [f'planes {{ name: "{name}"']
    for line, events in lines.items():
        text.append(f'lines {{ name: "{line}"')
        for event, start, end, found in events:
            text.append(f"events {{ metadata_id: {names.index(event) + 1}")
            text.append(f"offset_ps: {start * 1000} duration_ps: {(end - start) * 1000}")
            for key, value in found.items():
                field = f"int64_value: {value}" if isinstance(value, int) else f'str_value: "{value}"'
                text.append(f"stats {{ metadata_id: {stats.index(key) + 1} {field} }}")
            text.append("}")
        text.append("}")
    for kind, found_names in (("event", names), ("stat", stats)):
        for i, each in enumerate(found_names, 1):
            text.append(f'{kind}_metadata {{ key: {i} value {{ id: {i} name: "{each}" }} }}')
    return "\n".join([*text, "}"])


def trace_of(tmp_path: Path, *planes: str) -> Trace:
    """The trace with these planes, written to a file and read back."""
    from jax.profiler import ProfileData

    path = tmp_path / "host.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace("\n".join(planes)))
    return read_file(path)


def call(variant: str, number: int, start: int, end: int) -> Event:
    """The host's event around a traced call."""
    return (f"{ANNOTATION}{variant}", start, end, {"step_num": number})


def host(*calls: Event) -> str:
    """The host's plane, with nothing but the calls."""
    return plane("/host:CPU", {"python": calls})


ASYNC = parse("""HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%fused (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %convolution.9 = f32[8]{0} convolution(%p.1, %p.1), dim_labels=bf_io->bf
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %copy.3 = f32[8]{0} copy(%p)
  %all-gather-start.7 = (f32[8]{0}, f32[8]{0}) all-gather-start(%p), dimensions={0}, metadata={op_name="jit(step)/all_gather" source_file="/src/train.py" source_line=12}
  %fusion.1 = f32[8]{0} fusion(%copy.3), kind=kOutput, calls=%fused
  %all-gather-done.2 = f32[8]{0} all-gather-done(%all-gather-start.7)
  ROOT %reduce-scatter.5 = f32[8]{0} reduce-scatter(%all-gather-done.2), dimensions={0}, metadata={op_name="jit(step)/psum_scatter" source_file="/src/train.py" source_line=20}
}
""")  # noqa: E501

NS = 1e-9


def tpu_ops(at: int) -> list[Event]:
    """The instructions of one run of ``ASYNC``, 100 ns long, as a TPU's trace has them."""
    # 0 ..10 copy | 10..12 start | 12..50 matmul | 50..55 nothing | 55..70 done | 70..90 reduce-scatter | idle
    return [
        ("%copy.3 = f32[8]{0} copy(f32[8]{0} %p)", at, at + 10, {}),
        ("%all-gather-start.7 = (f32[8]{0}, f32[8]{0}) all-gather-start(%p)", at + 10, at + 12, {}),
        ("%fusion.1 = f32[8]{0} fusion(%copy.3), kind=kOutput", at + 12, at + 50, {}),
        ("%all-gather-done.2 = f32[8]{0} all-gather-done(%all-gather-start.7)", at + 55, at + 70, {}),
        ("%reduce-scatter.5 = f32[8]{0} reduce-scatter(%all-gather-done.2)", at + 70, at + 90, {}),
    ]


def tpu_plane(*runs: int, device: int = 0) -> str:
    """A TPU's plane in which ``ASYNC`` runs at these times."""
    modules: list[Event] = [("jit_step(123)", at, at + 100, {"run_id": i}) for i, at in enumerate(runs)]
    ops = [op for at in runs for op in tpu_ops(at)]
    steps: list[Event] = [("0", at, at + 100, {}) for at in runs]
    return plane(f"/device:TPU:{device}", {"Steps": steps, "XLA Modules": modules, "XLA Ops": ops})


def check_async(found: Activity | None) -> None:
    """What a run of ``ASYNC`` on a TPU took, counted by hand."""
    assert found is not None
    assert found.span_s == pytest.approx(100 * NS)
    assert found.matmul_s == pytest.approx(38 * NS)
    # In flight from 10 to 70, and from 70 to 90; the matmul covers 12 to 50 of it, the copy nothing.
    assert found.collective_s == pytest.approx(80 * NS)
    assert found.both_s == pytest.approx(38 * NS)
    assert found.compute_only_s == pytest.approx(10 * NS)
    assert found.communication_only_s == pytest.approx(42 * NS)
    assert found.idle_s == pytest.approx(10 * NS)
    assert found.unknown == 0
    gather, scatter = found.collectives
    assert (gather.name, gather.opcode, gather.source) == (
        "all-gather-start.7",
        "all-gather",
        "/src/train.py:12",
    )
    assert (gather.executions, scatter.executions) == (1, 1)
    assert gather.in_flight_s == pytest.approx(60 * NS)
    assert gather.exposed_s == pytest.approx(22 * NS)
    assert (scatter.opcode, scatter.source) == ("reduce-scatter", "/src/train.py:20")
    assert scatter.exposed_s == pytest.approx(20 * NS)


def test_tpu_planes_give_exposed_and_hidden_time_per_collective(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        tpu_plane(1000, 2000, 3000, 4000),
        tpu_plane(1000, 2000, 3000, 4000, device=1),
        host(*(call(name, i, t, t + 500) for name, i, t in _calls(900))),
    )
    assert trace.source == "device planes"
    steps = of_variants(trace, {"original": "jit_step", "overlapped": "jit_step"})
    assert {name: sorted(found) for name, found in steps.items()} == {
        name: [(i, f"/device:TPU:{d}") for i in range(2) for d in range(2)] for name in steps
    }
    assert [e.start_ns for e in steps["overlapped"][1, "/device:TPU:0"]] == [4000]
    for found in steps.values():
        measured = activity(found.values(), Directory(ASYNC))
        check_async(measured)
        assert measured is not None
        assert (measured.steps, measured.devices) == (4, 2)


def _calls(first: int) -> list[tuple[str, int, int]]:
    """Two rounds of two variants, 1000 ns apart."""
    return [
        (name, i, first + 2000 * i + 1000 * j)
        for i in range(2)
        for j, name in enumerate(("original", "overlapped"))
    ]


def test_calls_and_executions_meet_in_order_where_the_device_s_clock_is_off(tmp_path: Path) -> None:
    late = 5000
    trace = trace_of(
        tmp_path,
        tpu_plane(*(1000 * i + late for i in range(1, 5))),
        host(*(call(name, i, t, t + 500) for name, i, t in _calls(900))),
    )
    steps = of_variants(trace, {"original": "jit_step", "overlapped": "jit_step"})
    assert [found[0].start_ns for found in steps["original"].values()] == [6000, 8000]
    assert [found[0].start_ns for found in steps["overlapped"].values()] == [7000, 9000]


def test_calls_and_executions_meet_by_time_where_some_were_not_recorded(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path, tpu_plane(2000, 4000), host(*(call(name, i, t, t + 500) for name, i, t in _calls(900)))
    )
    steps = of_variants(trace, {"original": "jit_step", "overlapped": "jit_step"})
    assert not steps["original"]
    assert sorted(number for number, _ in steps["overlapped"]) == [0, 1]


def test_programs_of_another_name_are_left_out(tmp_path: Path) -> None:
    other = plane("/device:TPU:0", {"XLA Modules": [("jit_copy(9)", 950, 960, {})], "XLA Ops": []})
    trace = trace_of(tmp_path, other, host(call("original", 0, 900, 1000)))
    assert of_variants(trace, {"original": "jit_step"}) == {"original": {}}
    (found,) = of_variants(trace, {"original": ""})["original"].values()
    assert [execution.module for execution in found] == ["jit_copy"]


def gpu_plane(at: int) -> str:
    """A GPU's plane: two streams, on which kernels say what instruction they are of."""

    def kernel(name: str, op: str, start: int, end: int) -> Event:
        return (name, at + start, at + end, {"hlo_op": op, "hlo_module": "jit_step", "correlation_id": 5})

    return plane(
        "/device:GPU:0",
        {
            "Stream #13(Compute)": [
                kernel("wrapped_copy", "copy.3", 0, 10),
                kernel("sm90_xmma_gemm", "fusion.1", 12, 50),
                ("MemcpyH2D", at + 92, at + 96, {}),
            ],
            "Stream #14(Compute)": [
                kernel("ncclDevKernel_AllGather_RING_LL(args)", "all-gather-start.7", 11, 60),
                kernel("ncclDevKernel_ReduceScatter_Sum_f32(args)", "reduce-scatter.5", 70, 90),
            ],
            # What XProf derives from the streams would count twice.
            "XLA Ops": [("fusion.1", at + 12, at + 50, {})],
        },
    )


def test_gpu_planes_give_what_ran_on_the_streams(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, gpu_plane(1000), host(call("original", 0, 900, 1200)))
    assert trace.source == "device planes"
    steps = of_variants(trace, {"original": "jit_step"})
    found = activity(steps["original"].values(), Directory(ASYNC))
    assert found is not None
    assert found.span_s == pytest.approx(96 * NS)
    assert found.matmul_s == pytest.approx(38 * NS)
    assert found.collective_s == pytest.approx(69 * NS)
    assert found.both_s == pytest.approx(38 * NS)
    assert found.compute_only_s == pytest.approx(14 * NS)
    assert found.communication_only_s == pytest.approx(31 * NS)
    assert found.idle_s == pytest.approx(13 * NS)
    assert {c.name: round(c.exposed_s / NS) for c in found.collectives} == {
        "all-gather-start.7": 11,
        "reduce-scatter.5": 20,
    }
    # The copy of an argument names no instruction: 4 of 10 + 38 + 4 + 49 + 20.
    assert found.unknown == pytest.approx(4 / 121)


def test_kernels_of_a_cuda_graph_go_by_their_own_names(tmp_path: Path) -> None:
    """As one H200 recorded them: all name the graph as their instruction."""

    def kernel(name: str, start: int, end: int) -> Event:
        graph = {"hlo_op": "command_buffer_1", "hlo_module": "jit_step", "cuda_graph_id": 10}
        return (name, 1000 + start, 1000 + end, graph)

    kernels = [
        kernel("nvjet_sm90_tst_256x64_64x5_1x2_h_bz_NNT", 0, 20),
        kernel("fusion_1", 20, 30),
        kernel("copy_3", 30, 34),
        kernel("ncclDevKernel_AllGather_RING_LL(args)", 34, 40),
    ]
    lines = {"Stream #14(Compute,Memset)": kernels}
    trace = trace_of(tmp_path, plane("/device:GPU:0", lines), host(call("original", 0, 900, 1200)))
    steps = of_variants(trace, {"original": "jit_step"})
    found = activity(steps["original"].values(), Directory(ASYNC))
    assert found is not None
    assert found.matmul_s == pytest.approx(30 * NS)  # cuBLAS's, and a fusion that holds a dot
    assert found.collective_s == pytest.approx(6 * NS)
    assert found.compute_only_s == pytest.approx(34 * NS)
    # A generated kernel is named after its instruction; those of libraries are not.
    assert found.unknown == pytest.approx(26 / 40)


def test_an_instruction_is_itself_where_a_kernel_of_another_is_called_so() -> None:
    text = """HloModule jit_f, is_scheduled=true

ENTRY %main (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %dot.1 = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %dot_1 = f32[8,8] negate(%dot.1)
}
"""
    directory = Directory(parse(text))
    assert (directory("dot.1").kind, directory("dot_1").kind) == ("matmul", "compute")


def test_kernels_outside_of_the_calls_are_left_out(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, gpu_plane(5000), host(call("original", 0, 900, 1200)))
    assert of_variants(trace, {"original": "jit_step"}) == {"original": {}}


def cpu_event(op: str, start: int, end: int, device: int, run: int = 1, module: str = "jit_step") -> Event:
    stats = {"hlo_op": op, "hlo_module": module, "program_id": 3, "run_id": run, "device_ordinal": device}
    return (op, start, end, stats)


def test_without_a_device_plane_host_events_are_told_as_such(tmp_path: Path) -> None:
    threads: dict[str, Sequence[Event]] = {
        "python": [call("original", 0, 900, 1200), ("PjRtExecutable::Execute", 905, 910, {})],
        # One thread runs instructions of two devices, and two threads run those of device 0 at once.
        "tf_XLAEigen/1": [cpu_event("copy.3", 1000, 1010, 0), cpu_event("reduce-scatter.5", 1020, 1050, 1)],
        "tf_XLAEigen/2": [cpu_event("fusion.1", 1010, 1040, 0), cpu_event("reduce-scatter.5", 1030, 1060, 0)],
    }
    trace = trace_of(tmp_path, plane("/host:CPU", threads))
    assert trace.source == "host events"
    steps = of_variants(trace, {"original": "jit_step"})["original"]
    assert sorted(steps) == [(0, "CPU 0"), (0, "CPU 1")]
    found = activity([steps[0, "CPU 0"]], Directory(ASYNC))
    assert found is not None
    assert [round(t / NS) for t in (found.span_s, found.compute_only_s, found.both_s)] == [60, 30, 10]
    both = activity(steps.values(), Directory(ASYNC))
    assert both is not None
    # Device 1 only communicated, for 30 ns: means over the two devices.
    assert [round(t / NS) for t in (both.span_s, both.communication_only_s)] == [45, 25]


LOOP = parse("""HloModule jit_loop, is_scheduled=true, entry_computation_layout={(s32[])->s32[]}

%body (b: s32[]) -> s32[] {
  %b = s32[] parameter(0)
  %collective-permute-start.1 = (s32[], s32[]) collective-permute-start(%b), source_target_pairs={{0,1}}
  %dot.4 = s32[] dot(%b, %b), lhs_contracting_dims={}, rhs_contracting_dims={}
  ROOT %collective-permute-done.1 = s32[] collective-permute-done(%collective-permute-start.1)
}

%condition (c: s32[]) -> pred[] {
  %c = s32[] parameter(0)
  ROOT %compare.1 = pred[] compare(%c, %c), direction=LT
}

ENTRY %main (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %while.8 = s32[] while(%p), condition=%condition, body=%body
}
""")


def loop_plane(turns: int) -> str:
    """A TPU runs ``LOOP``: a turn takes 40 ns; the permute is in flight for 30, the dot runs for 20."""
    ops: list[Event] = [("while.8", 1000, 1000 + 40 * turns, {})]
    for at in range(1000, 1000 + 40 * turns, 40):
        ops += [
            ("collective-permute-start.1", at, at + 1, {}),
            ("dot.4", at + 1, at + 21, {}),
            ("collective-permute-done.1", at + 21, at + 30, {}),
        ]
    return plane(
        "/device:TPU:0", {"XLA Modules": [("jit_loop(1)", 1000, 1000 + 40 * turns, {})], "XLA Ops": ops}
    )


def test_a_loop_is_what_runs_in_it_and_pairs_meet_in_every_turn(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, loop_plane(3), host(call("original", 0, 900, 1200)))
    steps = of_variants(trace, {"original": "jit_loop"})["original"]
    found = activity(steps.values(), Directory(LOOP))
    assert found is not None
    (permute,) = found.collectives
    assert (permute.executions, permute.opcode) == (3, "collective-permute")
    assert permute.in_flight_s == pytest.approx(90 * NS)
    assert permute.exposed_s == pytest.approx(30 * NS)
    assert found.idle_s == pytest.approx(30 * NS)
    assert found.matmul_s == found.both_s == pytest.approx(60 * NS)


def test_a_loop_of_which_only_the_whole_was_recorded_counts_as_compute(tmp_path: Path) -> None:
    lines: dict[str, Sequence[Event]] = {
        "XLA Modules": [("jit_loop(1)", 1000, 1050, {})],
        "XLA Ops": [("while.8", 1000, 1040, {})],
    }
    trace = trace_of(tmp_path, plane("/device:TPU:0", lines), host(call("original", 0, 900, 1200)))
    found = activity(of_variants(trace, {"original": "jit_loop"})["original"].values(), Directory(LOOP))
    assert found is not None
    assert found.compute_only_s == pytest.approx(40 * NS)
    assert found.idle_s == pytest.approx(10 * NS)


def test_a_pair_whose_done_comes_a_turn_later_is_matched_in_order(tmp_path: Path) -> None:
    ops: list[Event] = [
        ("collective-permute-start.1", 1000, 1001, {}),
        ("collective-permute-start.1", 1010, 1011, {}),
        ("collective-permute-done.1", 1020, 1021, {}),
        ("collective-permute-done.1", 1035, 1036, {}),
    ]
    lines: dict[str, Sequence[Event]] = {"XLA Modules": [("jit_loop(1)", 1000, 1040, {})], "XLA Ops": ops}
    trace = trace_of(tmp_path, plane("/device:TPU:0", lines))
    found = bars(trace.executions[0], Directory(LOOP))
    assert [(bar.start_ns, bar.end_ns) for bar in found] == [(1000, 1021), (1010, 1036)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", "collective"),
        ("all-gather.12", "collective"),
        ("reduce_scatter.7", "collective"),
        ("ppermute.3", "collective"),
        ("nvjet_tst_256x128", "matmul"),
        ("void cutlass::Kernel2<...>", "matmul"),
        ("dot_general.4", "matmul"),
        ("convolution.2", "matmul"),
        ("MemcpyD2D", "copy"),
        ("copy.4", "copy"),
        ("loop_add_fusion", "compute"),
        ("wrapped_add.1", "compute"),
        ("while.3", None),
    ],
)
def test_without_hlo_text_the_name_tells(name: str, kind: str | None) -> None:
    directory = Directory(None)
    assert directory(name).kind == kind
    assert name not in directory


def test_without_hlo_text_a_done_ends_the_start_of_its_number(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, loop_plane(2), host(call("original", 0, 900, 1200)))
    found = activity(of_variants(trace, {"original": ""})["original"].values(), Directory(None))
    assert found is not None
    assert found.collective_s == pytest.approx(60 * NS)
    assert found.unknown == 1


def test_no_steps_give_no_activity() -> None:
    assert activity([], Directory(None)) is None


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(b"no protocol buffer")
    with pytest.raises(ValueError, match=r"x\.xplane\.pb is no profile"):
        read_file(path)


def test_reading_lets_no_warning_of_the_profiler_s_types_out(tmp_path: Path) -> None:
    # With warnings as errors jaxlib 0.12 would abort the process.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trace_of(tmp_path, host(call("original", 0, 1, 2))).windows


def test_intervals() -> None:
    merged = union([(5, 7), (1, 3), (2, 4), (4, 5), (9, 9)])
    assert merged == [(1, 7)]
    assert union([(1, 2), (3, 4)]) == [(1, 2), (3, 4)]
    assert intersection([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 20)]) == [(1, 2), (3, 4), (6, 7), (8, 9)]
    assert length([(1, 2), (3, 7)]) == 5


def test_an_operation_that_starts_with_its_loop_is_inside_it(tmp_path: Path) -> None:
    lines: dict[str, Sequence[Event]] = {
        "XLA Modules": [("jit_loop(1)", 1000, 1050, {})],
        "XLA Ops": [("dot.4", 1000, 1020, {}), ("while.8", 1000, 1050, {})],
    }
    trace = trace_of(tmp_path, plane("/device:TPU:0", lines))
    assert [bar.name for bar in bars(trace.executions[0], Directory(LOOP))] == ["dot.4"]
