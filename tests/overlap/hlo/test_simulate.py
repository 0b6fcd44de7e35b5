"""Modelled timelines of small schedules, computed by hand."""

from __future__ import annotations

import importlib
import itertools

import pytest

from cost_model import by_name
from cost_model.group_collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from cost_model.topology import Topology
from overlap.hlo.module import host_transfers
from overlap.hlo.parse import parse
from overlap.hlo.simulate import WALKED, simulate
from overlap.hlo.timeline import CollectiveTime, Timeline

TPU = by_name("tpu_v5p")
RING = Topology.axis(4, TPU)
"""Four chips, both ways round: 9e10 B/s each way."""

X = "f32[3375000]{0}"
X_BYTES = 13_500_000
HOP_S = 150e-6
"""Of X on one link."""

RIGHT = "{{0,1},{1,2},{2,3},{3,0}}"
LEFT = "{{0,3},{1,0},{2,1},{3,2}}"
TWO_RIGHT = "{{0,2},{1,3},{2,0},{3,1}}"
ALL = "replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1"


def cycles(micros: float) -> str:
    """The compiler's note of an instruction that takes so many microseconds at 1.75 GHz."""
    return f'backend_config={{"window_config":{{"estimated_cycles":"{round(micros * 1750)}"}}}}'


def start(name: str, operand: str, pairs: str = RIGHT) -> str:
    """A permute of X."""
    return (
        f"  %{name} = ({X}, {X}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) collective-permute-start(%{operand}), "
        f"channel_id=1, source_target_pairs={pairs}\n"
    )


def done(name: str, of: str) -> str:
    """Its end."""
    return f"  %{name} = {X} collective-permute-done(%{of})\n"


def work(name: str, operand: str, micros: float) -> str:
    """So many microseconds of compute."""
    return f"  %{name} = {X} add(%{operand}, %{operand}), {cycles(micros)}\n"


def rooted(body: str) -> str:
    """The instructions, the last of which is the root."""
    lines = body.splitlines()
    return "\n".join([*lines[:-1], lines[-1].replace("  %", "  ROOT %", 1)])


def text(body: str, others: str = "") -> str:
    """A module with these instructions behind one parameter %x, and other computations."""
    return (
        f"HloModule m, is_scheduled=true, num_partitions=4\n\n{others}\n"
        f"ENTRY %main {{\n  %x = {X} parameter(0)\n{rooted(body)}\n}}\n"
    )


def timed(body: str, others: str = "", topology: Topology = RING) -> Timeline:
    """The timeline of these instructions; what every timeline must satisfy holds."""
    timeline = simulate(parse(text(body, others)), TPU, topology)
    assert_consistent(timeline)
    return timeline


def assert_consistent(timeline: Timeline) -> None:
    """Compute, exposed time and waits for copies make the total; what is exposed is some collective's."""
    parts_s = timeline.compute_s + timeline.exposed_s + timeline.copy_wait_s
    assert parts_s == pytest.approx(timeline.total_s, rel=1e-9, abs=1e-15)
    exposed_s = sum(collective.exposed_s for collective in timeline.collectives)
    assert exposed_s == pytest.approx(timeline.exposed_s, rel=1e-9, abs=1e-15)
    assert any("modelled" in sentence for sentence in timeline.assumptions)


def by_name_of(timeline: Timeline) -> dict[str, CollectiveTime]:
    return {collective.name: collective for collective in timeline.collectives}


def test_five_instructions() -> None:
    """Start a hop of 150 µs, compute 100, wait for the rest, compute 20."""
    timeline = timed(start("s", "x") + work("m", "x", 100) + done("d", "s") + work("n", "d", 20))
    assert timeline.total_s == pytest.approx(170e-6)
    assert timeline.compute_s == pytest.approx(120e-6)
    assert timeline.exposed_s == pytest.approx(50e-6)
    assert timeline.peak_in_flight == 1
    (permute,) = timeline.collectives
    assert (permute.name, permute.opcode, permute.executions) == ("s", "collective-permute", 1)
    assert (permute.start_s, permute.end_s) == pytest.approx((0, 150e-6))
    assert permute.wire_s == pytest.approx(150e-6)
    assert permute.hidden_s == pytest.approx(100e-6)
    assert permute.exposed_s == pytest.approx(50e-6)
    assert permute.bytes_on_wire == X_BYTES
    assert permute.overlapped_with == ("m",)
    bars = {event.name: event for event in timeline.events}
    assert (bars["m"].stream, bars["n"].stream) == ("compute", "compute")
    assert bars["s"].stream == str(RING.route(0, 1)[0])
    assert (bars["m"].start_s, bars["m"].end_s) == pytest.approx((0, 100e-6))
    assert (bars["s"].start_s, bars["s"].end_s) == pytest.approx((0, 150e-6))
    assert (bars["n"].start_s, bars["n"].end_s) == pytest.approx((150e-6, 170e-6))


def test_a_hop_that_fits_behind_compute_is_not_exposed() -> None:
    timeline = timed(start("s", "x") + work("m", "x", 200) + done("d", "s"))
    assert timeline.exposed_s == 0
    assert timeline.total_s == pytest.approx(200e-6)
    assert timeline.collectives[0].hidden_s == pytest.approx(150e-6)


def test_permutes_in_one_direction_share_its_links() -> None:
    timeline = timed(start("s", "x") + start("t", "x") + done("d", "s") + done("e", "t"))
    assert timeline.total_s == pytest.approx(2 * HOP_S)
    permutes = by_name_of(timeline)
    assert permutes["s"].end_s == pytest.approx(HOP_S)
    assert permutes["t"].end_s == pytest.approx(2 * HOP_S)
    assert timeline.peak_in_flight == 2


def test_permutes_in_opposite_directions_do_not_meet() -> None:
    timeline = timed(start("s", "x") + start("t", "x", LEFT) + done("d", "s") + done("e", "t"))
    assert timeline.total_s == pytest.approx(HOP_S)
    assert [c.exposed_s for c in timeline.collectives] == pytest.approx([HOP_S, 0])


def test_a_distant_permute_takes_the_links_between() -> None:
    """Both neighbours' links carry two pairs each, in the one direction that ties go."""
    timeline = timed(start("s", "x", TWO_RIGHT) + done("d", "s"))
    assert timeline.total_s == pytest.approx(2 * HOP_S)
    crossed = timed(start("s", "x", TWO_RIGHT) + start("t", "x") + done("d", "s") + done("e", "t"))
    assert crossed.total_s == pytest.approx(3 * HOP_S)


def test_a_small_permute_takes_its_latency() -> None:
    small = (
        "  %s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%v), channel_id=1, "
        f"source_target_pairs={TWO_RIGHT}\n  %d = f32[8]{{0}} collective-permute-done(%s)\n"
    )
    timeline = timed("  %v = f32[8]{0} slice(%x), slice={[0:8]}\n" + small)
    assert timeline.exposed_s == pytest.approx(2 * TPU.hop_latency_s)


def test_a_permute_to_oneself_takes_no_link() -> None:
    timeline = timed(start("s", "x", "{{0,0},{1,1},{2,2},{3,3}}") + done("d", "s"))
    assert timeline.total_s == 0
    assert timeline.collectives[0].bytes_on_wire == 0


def test_a_synchronous_permute_is_exposed_completely() -> None:
    timeline = timed(
        work("m", "x", 30) + f"  %p = {X} collective-permute(%m), source_target_pairs={RIGHT}, channel_id=1\n"
    )
    assert timeline.exposed_s == pytest.approx(HOP_S)
    assert timeline.total_s == pytest.approx(HOP_S + 30e-6)


def test_a_synchronous_collective_waits_for_its_links() -> None:
    """A permute in flight delays an all_gather behind it, and not the other way round."""
    whole = f"  %g = f32[13500000]{{0}} all-gather(%x), {ALL}, dimensions={{0}}\n"
    alone = timed(whole)
    assert alone.total_s == pytest.approx(all_gather_s(4 * X_BYTES, ((0, 1, 2, 3),), RING))
    behind = timed(start("s", "x") + whole + done("d", "s"))
    assert behind.total_s == pytest.approx(HOP_S + alone.total_s)
    gather = by_name_of(behind)["g"]
    assert gather.exposed_s == pytest.approx(HOP_S + alone.total_s)
    assert gather.bytes_on_wire == 3 * X_BYTES
    assert gather.wire_s == pytest.approx(alone.total_s)


def test_an_asynchronous_all_gather_hides_behind_compute() -> None:
    pair = (
        f"  %g = ({X}, f32[13500000]{{0}}) all-gather-start(%x), {ALL}, dimensions={{0}}\n",
        "  %h = f32[13500000]{0} all-gather-done(%g)\n",
    )
    takes_s = all_gather_s(4 * X_BYTES, ((0, 1, 2, 3),), RING)
    timeline = timed(pair[0] + work("m", "x", 100) + pair[1])
    assert timeline.exposed_s == pytest.approx(takes_s - 100e-6)
    assert timeline.collectives[0].opcode == "all-gather"


def test_a_gather_has_none_of_its_links_before_all_of_them_are_free() -> None:
    """So that what follows it on a link that was free waits as long as on the others."""
    timeline = timed(
        start("p", "x")
        + f"  %g = ({X}, f32[13500000]{{0}}) all-gather-start(%x), {ALL}, dimensions={{0}}\n"
        + start("q", "x", LEFT)
        + done("d", "p")
        + "  %h = f32[13500000]{0} all-gather-done(%g)\n"
        + done("e", "q")
    )
    takes_s = all_gather_s(4 * X_BYTES, ((0, 1, 2, 3),), RING)
    assert timeline.total_s == pytest.approx(HOP_S + takes_s + HOP_S)


def test_a_generic_asynchronous_start_is_what_it_wraps() -> None:
    wrapped = f"""%wrapped {{
  %p = {X} parameter(0)
  ROOT %r = f32[843750]{{0}} reduce-scatter(%p), {ALL}, dimensions={{0}}, to_apply=%sum
}}
"""
    timeline = timed(
        f"  %s = (({X}), f32[843750]{{0}}, u32[]) async-start(%x), calls=%wrapped\n"
        + work("m", "x", 10)
        + "  %d = f32[843750]{0} async-done(%s)\n",
        SUM + wrapped,
    )
    takes_s = reduce_scatter_s(X_BYTES, ((0, 1, 2, 3),), RING)
    assert timeline.exposed_s == pytest.approx(takes_s - 10e-6)
    assert timeline.collectives[0].opcode == "reduce-scatter"


SUM = """%sum {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""

REDUCE = f"  %r = {X} all-reduce(%x), {ALL}, to_apply=%sum\n  %i = u32[] partition-id()\n"
CUT = "  %c = f32[843750]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={843750}\n"
CUT_FUSION = f"""%cut {{
  %p = {X} parameter(0)
  %i = u32[] parameter(1)
  ROOT %c = f32[843750]{{0}} dynamic-slice(%p, %i), dynamic_slice_sizes={{843750}}
}}
"""


def test_an_all_reduce_of_which_each_keeps_its_part_is_priced_as_a_reduce_scatter() -> None:
    expected_s = reduce_scatter_s(X_BYTES, ((0, 1, 2, 3),), RING)
    plain = timed(REDUCE + CUT, SUM)
    fused = timed(
        REDUCE + f"  %b = {X} bitcast(%r)\n  %c = f32[843750]{{0}} fusion(%b, %i), kind=kLoop, calls=%cut, "
        f"{cycles(17)}\n",
        SUM + CUT_FUSION,
    )
    for timeline in (plain, fused):
        assert timeline.total_s == pytest.approx(expected_s), "the cut is free"
        (collective,) = timeline.collectives
        assert collective.opcode == "all-reduce"
        assert collective.bytes_on_wire == X_BYTES * 3 // 4
        assert any("priced as a reduce-scatter" in sentence for sentence in timeline.assumptions)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_broadcast_brings_the_whole_array_to_every_device(devices: int) -> None:
    group = ",".join(map(str, range(devices)))
    told = timed(f"  %b = {X} collective-broadcast(%x), replica_groups={{{{{group}}}}}, channel_id=1\n")
    # Half of it either way round the ring.
    assert told.exposed_s == pytest.approx(HOP_S / 2)
    assert told.collectives[0].bytes_on_wire == X_BYTES


def test_an_all_reduce_that_something_else_uses_stays_one() -> None:
    expected_s = all_reduce_s(X_BYTES, ((0, 1, 2, 3),), RING)
    for rest in (work("m", "r", 20) + CUT, CUT + work("m", "r", 20), work("m", "r", 20)):
        timeline = timed(REDUCE + rest, SUM)
        assert timeline.exposed_s == pytest.approx(expected_s)
        assert timeline.collectives[0].bytes_on_wire == 2 * X_BYTES * 3 // 4
    timeline = timed(REDUCE + CUT + f"  %b = {X} bitcast(%r)\n", SUM)
    assert timeline.collectives[0].bytes_on_wire == 2 * X_BYTES * 3 // 4, "it is the result, too"
    half = "  %c = f32[1687500]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={1687500}\n"
    assert timed(REDUCE + half, SUM).exposed_s == pytest.approx(expected_s)


PART = "  %v = f32[843750]{0} slice(%x), slice={[0:843750]}\n  %i = u32[] partition-id()\n"
ZEROS = f"  %o = f32[] constant(0)\n  %z = {X} broadcast(%o), dimensions={{}}, {cycles(40)}\n"
PLACED = f"  %u = {X} dynamic-update-slice(%z, %v, %i)\n"
SUMMED = f"  %r = {X} all-reduce(%u), {ALL}, to_apply=%sum\n"
PLACE = f"""%place {{
  %z = {X} parameter(0)
  %v = f32[843750]{{0}} parameter(1)
  %i = u32[] parameter(2)
  ROOT %c = {X} dynamic-update-slice(%z, %v, %i)
}}
"""


def test_an_all_reduce_of_parts_placed_into_zeros_is_priced_as_an_all_gather() -> None:
    gathered_s = all_gather_s(X_BYTES, ((0, 1, 2, 3),), RING)
    sliced_s = 2 * X_BYTES / 4 / TPU.hbm_bytes_per_s
    plain = timed(PART + ZEROS + PLACED + SUMMED, SUM)
    fusion = f"  %u = {X} fusion(%z, %v, %i), kind=kLoop, calls=%place, {cycles(9)}\n"
    fused = timed(PART + ZEROS + fusion + SUMMED, SUM + PLACE)
    for timeline in (plain, fused):
        assert timeline.exposed_s == pytest.approx(gathered_s)
        assert timeline.compute_s == pytest.approx(sliced_s), "the zeros and the placing are free"
        assert timeline.collectives[0].bytes_on_wire == X_BYTES * 3 // 4
        assert any("priced as an all-gather" in sentence for sentence in timeline.assumptions)


def test_an_all_reduce_of_parts_placed_into_anything_else_stays_one() -> None:
    reduced_s = all_reduce_s(X_BYTES, ((0, 1, 2, 3),), RING)
    ones = ZEROS.replace("constant(0)", "constant(1)")
    onto_x = PLACED.replace("(%z", "(%x")
    half = PART.replace("843750", "1687500")
    for body in (PART + ones + PLACED, PART + onto_x, half + ZEROS + PLACED):
        assert timed(body + SUMMED, SUM).exposed_s == pytest.approx(reduced_s)


def looped(body: str, trips: int | None) -> tuple[str, str]:
    """A loop over %x, `trips` times: the instruction, and its computations."""
    carried = f"(s32[], {X})"
    limit = "get-tuple-element(%p), index=0" if trips is None else f"constant({trips})"
    others = f"""%body {{
  %p = {carried} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %x = {X} get-tuple-element(%p), index=1
{body.rstrip()}
  ROOT %next = {carried} tuple(%j, %x)
}}

%condition {{
  %p = {carried} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] {limit}
  ROOT %c = pred[] compare(%i, %n), direction=LT
}}
"""
    loop = (
        f"  %z = s32[] constant(0)\n  %first = {carried} tuple(%z, %x)\n"
        f"  %w = {carried} while(%first), condition=%condition, body=%body\n"
    )
    return loop, others


STEP = start("s", "x") + work("m", "x", 100) + done("d", "s")


@pytest.mark.parametrize("trips", [1, 2, 7, 5000])
def test_a_loop_runs_its_trip_count(trips: int) -> None:
    timeline = timed(*looped(STEP, trips))
    assert timeline.total_s == pytest.approx(trips * HOP_S)
    assert timeline.compute_s == pytest.approx(trips * 100e-6)
    (permute,) = timeline.collectives
    assert permute.executions == trips
    assert permute.bytes_on_wire == trips * X_BYTES
    assert permute.exposed_s == pytest.approx(trips * 50e-6)
    assert permute.hidden_s == pytest.approx(trips * 100e-6)
    assert permute.wire_s == pytest.approx(trips * HOP_S)
    assert (permute.start_s, permute.end_s) == pytest.approx((0, HOP_S)), "of the first execution"
    assert {event.name: event.repeats for event in timeline.events} == {"s": trips, "m": trips}


def test_a_loop_is_as_long_as_its_iterations_written_out() -> None:
    """Three permutes, two of which share a link, and a copy, issued and awaited in different orders."""
    near = "f32[3375000]{0:S(1)}"
    step = (
        start("s", "x")
        + f"  %k = ({near}, {X}, u32[]) copy-start(%x)\n"
        + work("m", "x", 40)
        + start("t", "x")
        + work("n", "x", 90)
        + done("d", "s")
        + f"  %l = {near} copy-done(%k)\n"
        + start("u", "x", LEFT)
        + work("o", "x", 35)
        + done("e", "t")
        + done("f", "u")
    )
    written = ""
    for turn in range(9):
        for name in ("s", "k", "m", "t", "n", "d", "l", "u", "o", "e", "f"):
            step_line = next(line for line in step.splitlines() if line.startswith(f"  %{name} ="))
            for of in ("s", "k", "t", "u"):
                step_line = step_line.replace(f"(%{of})", f"(%{of}{turn})")
            written += step_line.replace(f"  %{name} =", f"  %{name}{turn} =") + "\n"
    rolled, unrolled = timed(*looped(step, 9)), timed(written)
    assert rolled.total_s == pytest.approx(unrolled.total_s)
    assert rolled.exposed_s == pytest.approx(unrolled.exposed_s)
    assert rolled.copy_wait_s == pytest.approx(unrolled.copy_wait_s)
    hidden_s = sum(collective.hidden_s for collective in rolled.collectives)
    assert hidden_s == pytest.approx(sum(collective.hidden_s for collective in unrolled.collectives))


def test_nested_loops_multiply() -> None:
    inner, computations = looped(STEP, 6)
    outer, around = looped(inner, 5)
    for name in ("body", "condition"):
        around = around.replace(f"%{name} {{", f"%outer_{name} {{")
    outer = outer.replace("condition=%condition, body=%body", "condition=%outer_condition, body=%outer_body")
    timeline = timed(outer, computations + around)
    assert timeline.collectives[0].executions == 30
    assert timeline.total_s == pytest.approx(30 * HOP_S)
    assert {event.repeats for event in timeline.events} == {30}


def test_a_loop_of_unknown_length_runs_once_and_says_so() -> None:
    timeline = timed(*looped(STEP, None))
    assert timeline.collectives[0].executions == 1
    assert any("'w'" in sentence and "once" in sentence for sentence in timeline.assumptions)


def test_what_a_loop_leaves_on_the_links_delays_what_follows() -> None:
    """One permute in an iteration is never waited for in time: its link is busy when the loop ends."""
    loop, others = looped(STEP, WALKED + 1)
    timeline = timed(start("a", "x") + loop + done("b", "a"), others)
    first = by_name_of(timeline)["a"]
    assert first.end_s == pytest.approx(HOP_S)
    assert timeline.total_s == pytest.approx((WALKED + 2) * HOP_S), "each hop waits for the one before"


def test_what_is_left_after_a_period_of_three_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often iterations repeat, none is lost where the count of those walked at most is reached."""
    module = importlib.import_module("overlap.hlo.simulate")
    asked = itertools.count(1)
    # Compared with one before, then with two, then with three: only the last is said to be the same, once.
    monkeypatch.setattr(module, "same", lambda one, other: next(asked) == 6)
    timeline = timed(*looped(STEP, WALKED + 1))
    assert timeline.total_s == pytest.approx((WALKED + 1) * HOP_S)


def test_of_a_conditional_the_slowest_branch_runs() -> None:
    branches = "".join(
        f"%{name} {{\n  %x = {X} parameter(0)\n{rooted(work('m', 'x', micros))}\n}}\n"
        for name, micros in (("fast", 10), ("slow", 70))
    )
    timeline = timed(
        "  %p = pred[] constant(true)\n"
        f"  %c = {X} conditional(%p, %x, %x), true_computation=%fast, false_computation=%slow\n",
        branches,
    )
    assert timeline.total_s == pytest.approx(70e-6)
    assert any("slowest branch" in sentence for sentence in timeline.assumptions)


def test_a_call_runs_what_it_calls() -> None:
    called = f"%called {{\n  %x = {X} parameter(0)\n{rooted(work('m', 'x', 25))}\n}}\n"
    assert timed(f"  %c = {X} call(%x), to_apply=%called\n", called).total_s == pytest.approx(25e-6)


def test_waiting_for_a_copy_is_told_apart() -> None:
    near = "f32[3375000]{0:S(1)}"
    timeline = timed(f"  %k = ({near}, {X}, u32[]) copy-start(%x)\n" + f"  %l = {near} copy-done(%k)\n")
    assert timeline.copy_wait_s == pytest.approx(X_BYTES / TPU.hbm_bytes_per_s)
    assert timeline.exposed_s == 0


def test_an_asynchronous_collective_cut_into_fusions() -> None:
    """As the TPU compiler does it: a fusion starts it, one computes beside it, one waits."""
    whole, state = "f32[13500000]{0}", f"({X}, f32[13500000]{{0}}, u32[]{{:S(2)}})"
    gather = f"  %g = {whole} all-gather(%p), {ALL}, dimensions={{0}}\n"
    others = (
        f"%begin {{\n  %p = {X} parameter(0)\n{gather}"
        f'  ROOT %c = {state} custom-call(%g), custom_call_target="AsyncCollectiveStart"\n}}\n'
        f"%beside {{\n  %p = {X} parameter(0)\n  %q = u32[] parameter(1)\n{gather}  %m = {X} add(%p, %p)\n"
        f"  ROOT %t = ({X}, {X}, {whole}, u32[]) tuple(%m, %p, %g, %q)\n}}\n"
        f"%end {{\n  %p = {X} parameter(0)\n  %q = u32[] parameter(1)\n{gather}"
        f'  ROOT %c = {whole} custom-call(%p, %g), custom_call_target="AsyncCollectiveDone"\n}}\n'
    )
    body = (
        f"  %s = {state} fusion(%x), kind=kCustom, calls=%begin\n"
        f"  %s0 = {X} get-tuple-element(%s), index=0\n  %s2 = u32[] get-tuple-element(%s), index=2\n"
        f"  %b = ({X}, {X}, {whole}, u32[]) fusion(%s0, %s2), kind=kLoop, calls=%beside, {cycles(100)}\n"
        f"  %b1 = {X} get-tuple-element(%b), index=1\n  %b3 = u32[] get-tuple-element(%b), index=3\n"
        f"  %d = {whole} fusion(%b1, %b3), kind=kCustom, calls=%end\n"
    )
    timeline = timed(body, others)
    takes_s = all_gather_s(4 * X_BYTES, ((0, 1, 2, 3),), RING)
    assert timeline.compute_s == pytest.approx(100e-6)
    assert timeline.exposed_s == pytest.approx(takes_s - 100e-6)
    (collective,) = timeline.collectives
    assert (collective.name, collective.opcode, collective.executions) == ("s", "all-gather", 1)
    assert collective.overlapped_with == ("b",)


def test_collectives_that_one_start_begins_together_are_told_each() -> None:
    """As XLA:GPU sends what NCCL groups."""
    whole = "f32[13500000]{0}"
    both = f"({X}, {whole})"
    grouped = (
        f"%grouped {{\n  %p = {X} parameter(0)\n  %q = {X} parameter(1)\n"
        f"  %r = {X} all-reduce(%p), replica_groups={{{{0,1,2,3}}}}, to_apply=%sum\n"
        f"  %g = {whole} all-gather(%q), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}\n"
        f"  ROOT %t = {both} tuple(%r, %g)\n}}\n"
    )
    body = (
        f"  %s = (({X}, {X}), {both}) async-start(%x, %x), calls=%grouped\n"
        + work("m", "x", 100)
        + f"  %d = {both} async-done(%s)\n"
    )
    timeline = timed(body, SUM + grouped)
    assert [(c.name, c.opcode, c.executions) for c in timeline.collectives] == [
        ("r", "all-reduce", 1),
        ("g", "all-gather", 1),
    ]
    groups = ((0, 1, 2, 3),)
    takes_s = all_reduce_s(X_BYTES, groups, RING) + all_gather_s(4 * X_BYTES, groups, RING)
    assert timeline.total_s == pytest.approx(takes_s, rel=0.05)
    assert timeline.exposed_s == pytest.approx(timeline.total_s - 100e-6)


def test_a_send_and_its_receive_are_one_transfer() -> None:
    pairs = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2},{2,3},{3,0}}"}'
    timeline = timed(
        f"  %k = token[] after-all()\n  %r = ({X}, u32[], token[]) recv(%k), channel_id=7, {pairs}\n"
        f"  %s = ({X}, u32[], token[]) send(%x, %k), channel_id=7, {pairs}\n"
        + work("m", "x", 100)
        + f"  %d = ({X}, token[]) recv-done(%r), channel_id=7\n  %e = token[] send-done(%s), channel_id=7\n"
    )
    assert timeline.exposed_s == pytest.approx(50e-6)
    assert [(c.opcode, c.executions, c.bytes_on_wire) for c in timeline.collectives] == [("send", 1, X_BYTES)]


@pytest.mark.parametrize(
    ("notes", "said", "counted"),
    [
        ('{_xla_host_transfer_handler_name="tf_rendezvous"}', "of the host", (0, 2)),
        ('{_xla_host_transfer_handler_name="xla_megascale_runtime"}', "between slices", (2, 0)),
    ],
)
def test_what_the_host_sends_is_no_collective_and_is_said_to_have_no_price(
    notes: str, said: str, counted: tuple[int, int]
) -> None:
    """As of every callback: such a send has no pairs of source and target."""
    host = f"channel_id=7, is_host_transfer=true, frontend_attributes={notes}"
    body = (
        f"  %k = token[] after-all()\n  %r = ({X}, u32[], token[]) recv(%k), {host}\n"
        f"  %s = ({X}, u32[], token[]) send(%x, %k), {host}\n"
        + work("m", "x", 100)
        + f"  %d = ({X}, token[]) recv-done(%r), {host}\n  %e = token[] send-done(%s), {host}\n"
    )
    timeline = timed(body)
    assert timeline.total_s == timeline.compute_s == pytest.approx(100e-6)
    assert not timeline.collectives
    assert any(f"2 sends and receives {said}" in sentence for sentence in timeline.assumptions)
    assert not any("sends and receives" in sentence for sentence in timed(work("m", "x", 1)).assumptions)
    assert host_transfers(parse(text(body))) == counted


def test_the_host_s_memory_is_said_to_have_no_price_of_its_own() -> None:
    kept = X.replace("{0}", "{0:S(5)}")
    copied = f"  %s = ({kept}, {X}, u32[]) copy-start(%x)\n  %d = {kept} copy-done(%s)\n" + work("m", "x", 1)
    sentence = "Copies to and from the host's memory take the time of main memory's side alone."
    assert sentence in timed(copied).assumptions
    assert sentence not in timed(work("m", "x", 1)).assumptions


def test_a_receive_may_end_in_the_next_turn_of_a_loop() -> None:
    """Pipelined by the GPU compiler: each turn waits for what the one before sent, and sends anew."""
    pairs = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2},{2,3},{3,0}}"}'
    step = (
        "  %k = token[] after-all()\n"
        + work("m", "x", 100)
        + f"  %q = ({X}, u32[], token[]) opt-barrier(%p)\n"
        + f"  %d = ({X}, token[]) recv-done(%q), channel_id=7\n"
        + f"  %r = ({X}, u32[], token[]) recv(%k), channel_id=7, {pairs}\n"
        + f"  %s = ({X}, u32[], token[]) send(%x, %k), channel_id=7, {pairs}\n"
    )
    timeline = timed(*looped(step, 1000))
    assert timeline.total_s == pytest.approx(100e-6 + 999 * HOP_S)
    assert timeline.exposed_s == pytest.approx(999 * 50e-6)
    assert timeline.collectives[0].executions == 1000


def test_on_gpus_collectives_take_turns() -> None:
    gpu = by_name("h100")
    body = start("s", "x") + start("t", "x", LEFT) + done("d", "s") + done("e", "t")
    timeline = simulate(parse(text(body)), gpu, Topology.switch(4, gpu))
    # Each of them starts, in turn, and stops compute for a while, which hides as much.
    assert timeline.compute_s == pytest.approx(2 * gpu.async_overhead_s)
    assert timeline.total_s == pytest.approx(2 * X_BYTES / gpu.axis_bytes_per_s)
    assert f"stops compute for {gpu.async_overhead_s * 1e6:g} µs" in " ".join(timeline.assumptions)
    assert [e.opcode for e in timeline.events if e.kind == "compute"] == ["starting a collective"] * 2


def test_what_is_waited_for_at_once_stops_a_gpu_for_no_longer() -> None:
    gpu = by_name("h100")
    whole = f"  %g = {X} all-to-all(%x), {ALL}, dimensions={{0}}\n"
    timeline = simulate(parse(text(whole)), gpu, Topology.switch(4, gpu))
    assert timeline.compute_s == 0 < timeline.exposed_s


def test_on_cpus_nothing_is_hidden() -> None:
    cpu = by_name("cpu")
    timeline = simulate(parse(text(STEP)), cpu, Topology.switch(4, cpu))
    assert timeline.collectives[0].hidden_s == 0
    assert timeline.exposed_s == pytest.approx(X_BYTES / cpu.axis_bytes_per_s)


@pytest.mark.parametrize(
    "body, expected",
    [
        (start("s", "x") + done("d", "s") + "  %y = f32[3375000]{0} bitcast(%d)\n" + work("m", "y", 1), ""),
        (
            start("s", "x") + done("d", "s") + "  %y = f32[1500,2250]{1,0} bitcast(%d)\n"
            "  %w = f32[2250,8]{1,0} constant({...})\n"
            "  %m = f32[1500,8]{1,0} convolution(%y, %w), dim_labels=bf_io->bf\n",
            "feeds",
        ),
        (
            "  %y = f32[1500,2250]{1,0} bitcast(%x)\n  %w = f32[2250,2250]{1,0} constant({...})\n"
            "  %m = f32[1500,2250]{1,0} convolution(%y, %w), dim_labels=bf_io->bf\n"
            "  %v = f32[3375000]{0} bitcast(%m)\n" + start("s", "v") + done("d", "s"),
            "follows",
        ),
    ],
)
def test_matmuls_next_to_a_collective_are_found(body: str, expected: str) -> None:
    assert timed(body).collectives[0].next_to_dot == expected


def test_hardware_that_the_dump_does_not_tell_must_be_given() -> None:
    tiled = text("  %y = f32[16,128]{1,0:T(8,128)} broadcast(%x), dimensions={}\n")
    with pytest.raises(ValueError, match=r"give\s+hardware=, one of tpu_v4"):
        simulate(parse(tiled))
    called = text('  %y = f32[16,128]{1,0} custom-call(%x), custom_call_target="__cublas$gemm"\n')
    with pytest.raises(ValueError, match="hardware=, one of a100"):
        simulate(parse(called))
    assert simulate(parse(text(work("m", "x", 1)))).hardware == "cpu"
    with pytest.raises(ValueError, match="unknown hardware 'abacus'"):
        simulate(parse(tiled), "abacus")


def test_a_topology_says_what_hardware_it_joins() -> None:
    timeline = simulate(parse(text(STEP)), topology=RING)
    assert timeline.hardware == "tpu_v5p"
    assert timeline.total_s == pytest.approx(HOP_S)
    assert any("90 GB/s each way" in sentence for sentence in timeline.assumptions)


def test_other_hardware_on_a_topology_computes_at_its_own_pace() -> None:
    """Cycles at 1.5 GHz in place of 1.75, over the same links."""
    timeline = simulate(parse(text(STEP)), "tpu_v5e", RING)
    assert timeline.compute_s == pytest.approx(100e-6 * 1.75 / 1.5)
    assert timeline.collectives[0].wire_s == pytest.approx(HOP_S)


def test_a_topology_of_too_few_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="has 2 devices and module 'm' runs on 4"):
        simulate(parse(text(STEP)), TPU, Topology.axis(2, TPU))


def test_without_a_topology_the_groups_show_the_mesh() -> None:
    """Groups of stride 1 and of stride 4 on 8 devices: a mesh of 2 × 4."""
    module = parse(
        "HloModule m, is_scheduled=true, num_partitions=8\n\nENTRY %main {\n"
        f"  %x = {X} parameter(0)\n"
        "  %g = f32[13500000]{0} all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, "
        "use_global_device_ids=true, channel_id=1\n"
        f"  ROOT %p = {X} collective-permute(%x), channel_id=2, source_target_pairs="
        "{{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}\n}\n"
    )
    timeline = simulate(module, TPU)
    assert "2x4" in timeline.topology
    assert any("2×4" in sentence for sentence in timeline.assumptions)
    given = simulate(module, TPU, Topology.torus((2, 4), TPU))
    assert given.total_s == timeline.total_s


@pytest.mark.parametrize(("devices", "where"), [(8, "8 h100 behind one switch"), (16, "2 hosts of 8 h100")])
def test_without_a_topology_gpus_fill_hosts(devices: int, where: str) -> None:
    pairs = ",".join(f"{{{i},{(i + 8) % devices}}}" for i in range(devices))
    module = parse(
        f"HloModule m, is_scheduled=true, num_partitions={devices}\n\nENTRY %main {{\n"
        f"  %x = {X} parameter(0)\n"
        f"  ROOT %p = {X} collective-permute(%x), channel_id=2, source_target_pairs={{{pairs}}}\n}}\n"
    )
    timeline = simulate(module, "h100")
    assert timeline.topology.startswith(where)
    assert any(f"taken for {where}" in sentence for sentence in timeline.assumptions)


def test_a_start_that_is_given_its_data_later_sends_it_then() -> None:
    body = (
        '  %s = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%inner\n'
        + work("a", "x", 100)
        + f"  %u = (({X}), {X}) call-update(%s, %a)\n"
        + f"  %d = {X} call-done(%u)\n"
    )
    inner = (
        f"%inner (p: {X}) -> {X} {{\n  %p = {X} parameter(0)\n"
        f"  ROOT %r = {X} collective-permute(%p), channel_id=1, source_target_pairs={RIGHT}\n}}\n\n"
    )
    timeline = simulate(parse(text(body, inner)), TPU, RING)
    assert timeline.total_s == pytest.approx(100e-6 + HOP_S)
    assert timeline.exposed_s == pytest.approx(HOP_S)
