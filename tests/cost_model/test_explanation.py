"""Predictions term by term: the terms add up, are the cost model's own, and are said in words."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest

from cost_model import Topology, by_name, names
from cost_model.axis import Axis
from cost_model.break_even import break_evens
from cost_model.explanation import LISTED, explain
from cost_model.form import Form
from cost_model.matmul import Matmul, matmul_s
from cost_model.pipeline import GATHERED, gather_after, placing_s
from cost_model.plain_chain import PATTERNS, PlainChain, PlainDot, chain_of, forms, pays, price, works
from cost_model.ring import estimate
from cost_model.ring_copies import COPYING_WHOLE, CUTTING_BETWEEN_TILES

V5P = dataclasses.replace(
    by_name("tpu_v5p"), name="like v5p", matmul_efficiency=0.965, matmul_overhead_s=3.7e-6
)
"""Hardware without a table of its own: its matmuls are a roofline."""
RING = Axis(V5P, 16)
ON_V5P = Axis(by_name("tpu_v5p"), 16)


def gather(m: int = 8192, k: int = 8192, n: int = 2048) -> PlainChain:
    return chain_of("all_gather_dot", m, k, n)


class TestTerms:
    @pytest.mark.parametrize("hardware", ["tpu_v5p", "tpu_v5e", "h100", "cpu"])
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_prologue_steady_state_and_epilogue_are_the_whole_ring(self, pattern: Any, hardware: str) -> None:
        chain, axis = chain_of(pattern, 4096, 2048, 1024), Axis(by_name(hardware), 8)
        found = explain(chain, axis)
        for candidate in found.candidates:
            parts = candidate.prologue_s, candidate.steady_s, candidate.epilogue_s
            assert min(parts) >= 0
            assert sum(parts) == pytest.approx(candidate.estimate.overlapped_s)
            # A psum's gathered sum is copied after the ring, or while the next column's runs.
            copied_s = gather_after(4096 * 1024 * 2, 2, axis).partials_s
            if pattern == "dot_psum" and candidate.form.columns > 1:
                (work,) = works(chain, candidate.form, axis)
                copied_s = placing_s(work, 4096 * 1024 * 2, axis, across=candidate.form.across)
            dots_s = candidate.estimate.partials_s - (copied_s if pattern == "dot_psum" else 0)
            assert candidate.step_dots_s * candidate.steps == pytest.approx(dots_s)
            assert candidate.step_hop_s * candidate.hops == pytest.approx(candidate.estimate.hops_s)
        ranks = [candidate.estimate.rank for candidate in found.candidates]
        assert ranks == sorted(ranks, reverse=True)
        best, least_gain = found.best.estimate, by_name(hardware).least_gain
        assert best == found.candidates[0].estimate
        gains = best.benefit_s >= least_gain * best.original_s
        assert found.pays == (gains and best.added_bytes <= 0)

    @pytest.mark.parametrize("hardware", names())
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_dots_and_collective_are_what_every_form_is_compared_with(
        self, pattern: Any, hardware: str
    ) -> None:
        axes = [Axis(by_name(hardware), 16)]
        if by_name(hardware).network == "torus":
            axes.append(Axis.of(Topology.torus((4, 4), by_name(hardware)), (tuple(range(16)),)))
        sizes = (8192, 8192, 2048), (1024, 640, 640), (16384, 256, 16384)
        for axis, size, dtype in itertools.product(axes, sizes, ("bfloat16", "float32", "int8")):
            found = explain(chain_of(pattern, *size, dtype=dtype), axis)
            terms_s = sum(dot.seconds for dot in found.dots) + found.collective.seconds
            terms_s += found.collective.copies_s
            for candidate in found.candidates:
                assert candidate.estimate.original_s == pytest.approx(terms_s, rel=1e-9)

    def test_of_several_dots_too(self) -> None:
        """Those of a sum read the sum before, and of two gathered matrices one is on chip for each."""
        for pattern, axis in itertools.product(("all_gather_dot", "dot_reduce_scatter"), (RING, ON_V5P)):
            dot = PlainDot(Matmul(m=4096, k=2048, n=1024), "m")
            chain = PlainChain(pattern=pattern, dots=(dot, dot), elements=4096 * 2048)  # type: ignore[arg-type]
            found = explain(chain, axis)
            assert sum(term.seconds for term in found.dots) == pytest.approx(found.best.estimate.dot_s)

    def test_a_dot_is_told_with_what_it_finds_on_chip(self) -> None:
        gathered, scattered = (
            explain(chain_of(pattern, 8192, 8192, 2048), ON_V5P)
            for pattern in ("all_gather_dot", "dot_reduce_scatter")
        )
        near = matmul_s(Matmul(m=8192, k=8192, n=2048), by_name("tpu_v5p"), rhs_on_chip=True)
        assert gathered.dots[0].on_chip == ("rhs",) and gathered.dots[0].seconds == near
        assert "bfloat16, right operand on chip: " in str(gathered)
        # Nothing runs before it: it waits for 32 MiB.
        assert scattered.dots[0].waited_s == pytest.approx(2**25 / by_name("tpu_v5p").hbm_bytes_per_s)
        assert scattered.dots[0].seconds == pytest.approx(near + scattered.dots[0].waited_s)
        assert "right operand on chip after 12.1 µs of waiting: " in str(scattered)
        for found in (gathered, scattered):
            of_peak = 2 * 8192 * 8192 * 2048 / by_name("tpu_v5p").flops_for("bfloat16")
            assert found.dots[0].efficiency == pytest.approx(of_peak / found.dots[0].seconds)

    @pytest.mark.parametrize("hardware", names())
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_no_dot_is_shorter_than_what_any_matmul_costs(self, pattern: Any, hardware: str) -> None:
        for dtype in ("bfloat16", "int8", "float64"):
            (dot,) = explain(chain_of(pattern, 64, 64, 64, dtype=dtype), Axis(by_name(hardware), 4)).dots
            assert 0 <= dot.overhead_s <= dot.seconds

    def test_what_may_be_rounded_says_that_it_is(self) -> None:
        found = explain(chain_of("all_gather_dot", 1024, 640, 640, dtype="float32"), RING)
        assert found.collective.full_bytes == 1024 * 640 * 2
        assert "all_gather of 1.2 MiB, rounded to bfloat16, " in str(found)

    def test_a_gather_of_128_mib_by_hand(self) -> None:
        found = explain(gather(), RING, [Form(directions=2)])
        (dot,) = found.dots
        assert dot.seconds == matmul_s(Matmul(m=8192, k=8192, n=2048), V5P, rhs_on_chip=True)
        assert dot.bound == "compute"
        # 15 shards through both directions of a v5p ring.
        assert found.collective.full_bytes == 8192 * 8192 * 2
        assert found.collective.seconds == pytest.approx(15 / 16 * 8192 * 8192 * 2 / 1.8e11)
        assert found.collective.bound == "bandwidth"
        # Half a shard of 8 MiB each way.
        assert found.best.step_hop_s == pytest.approx(2**22 / 9e10)
        assert found.best.hop_bound == "bandwidth"
        assert (found.best.steps, found.best.hops) == (16, 15)
        assert found.best.partials == (Matmul(m=256, k=8192, n=2048),)
        assert found.best.prologue_s == 0
        assert found.best.epilogue_s == pytest.approx(found.best.step_dots_s)

    def test_a_dtype_without_a_rate_is_said_to_have_none(self) -> None:
        said = "No rate of float64 is known on like v5p: the slowest of those listed is taken."
        wide = chain_of("all_gather_dot", 8192, 8192, 2048, dtype="float64")
        assert said in str(explain(wide, RING))
        assert "No rate of" not in str(explain(gather(), RING))

    def test_what_is_bound_by_memory_or_latency_says_so(self) -> None:
        found = explain(gather(m=16, k=8192, n=8192), RING, [Form()])
        assert found.dots[0].bound == "memory"
        tiny = explain(gather(m=16, k=128, n=128), RING, [Form()])
        assert tiny.collective.bound == tiny.best.hop_bound == "latency"
        assert tiny.collective.seconds == pytest.approx(8e-6)
        assert not tiny.pays

    def test_a_psum_gathers_after_its_ring(self) -> None:
        psum = explain(chain_of("dot_psum", 8192, 512, 8192), RING, [Form(directions=2, chains=2)])
        scatter = explain(
            chain_of("dot_reduce_scatter", 8192, 512, 8192), RING, [Form(directions=2, chains=2)]
        )
        gathered_s = RING.all_gather_s(8192 * 8192 * 2)
        copied_s = GATHERED[False] * 2 * 8192 * 8192 * 2 / V5P.hbm_bytes_per_s
        assert psum.best.epilogue_s == pytest.approx(gathered_s + copied_s)
        assert psum.best.prologue_s == scatter.best.prologue_s > 0
        assert psum.best.estimate.benefit_s == pytest.approx(scatter.best.estimate.benefit_s - copied_s)

    def test_blocks_that_lie_apart_are_copied_before_a_scatter_s_dots(self) -> None:
        axis = Axis(by_name("h100"), 8)
        rows, columns = (
            works(chain_of("dot_reduce_scatter", 4096, 4096, 4096, cut=cut), Form(), axis)[0]
            for cut in ("m", "n")
        )
        copied_bytes = columns.apart_bytes - rows.apart_bytes
        assert copied_bytes == 2 * 4096 * 4096 * 2 / 8
        copied_s = 7 * copied_bytes / axis.hardware.hbm_bytes_per_s
        without = dataclasses.replace(columns, apart_bytes=rows.apart_bytes)
        difference_s = estimate(columns, axis).partials_s - estimate(without, axis).partials_s
        assert difference_s == pytest.approx(copied_s)

    @pytest.mark.parametrize("name", [name for name in names() if by_name(name).network == "torus"])
    def test_tpus_read_a_psum_s_where_they_are_unless_chunks_share_them(self, name: str) -> None:
        axis = Axis(by_name(name), 8)

        def copied_bytes(pattern: Any, form: Form) -> float:
            """What is copied of columns, above what is added up of them and of rows alike."""
            columns, rows = (
                works(chain_of(pattern, 4096, 4096, 4096, cut=cut), form, axis)[0] for cut in ("n", "m")
            )
            return columns.apart_bytes - rows.apart_bytes

        a_block_bytes = 2 * 4096 * 4096 * 2 / 8
        assert copied_bytes("dot_psum", Form()) == 0
        assert copied_bytes("dot_psum", Form(columns=2)) == a_block_bytes / 2
        assert copied_bytes("dot_reduce_scatter", Form()) == a_block_bytes

    @pytest.mark.parametrize(
        ("m", "dtype", "hardware", "whole"),
        [
            (16 * 64, "int8", "tpu_v5p", False),
            (16 * 40, "int8", "tpu_v5p", True),
            (16 * 40, "bfloat16", "tpu_v5p", False),
            (16 * 40, "int8", "h100", False),
        ],
    )
    def test_pieces_of_bytes_that_begin_within_a_tile_are_copies_of_the_whole(
        self, m: int, dtype: str, hardware: str, whole: bool
    ) -> None:
        chain = chain_of("dot_reduce_scatter", m, 512, 1024, dtype=dtype)
        axis = Axis(by_name(hardware), 16)
        for form in (Form(), Form(directions=2), Form(cut="early"), Form(directions=2, cut="early")):
            (work,) = works(chain, form, axis)
            added = 0 if work.fused else 3 * work.shard_bytes * (1 if dtype == "int8" else 2)
            copied_bytes = COPYING_WHOLE * form.pieces * m * 512
            if form.cut == "early":  # only the blocks, however many pieces they have
                copied_bytes = CUTTING_BETWEEN_TILES * m * 512 / 16
            assert work.apart_bytes - added == pytest.approx(2 * copied_bytes if whole else 0)

    def test_what_may_be_rounded_is_taken_to_be_in_the_original(self) -> None:
        small, large = (
            works(chain_of("all_gather_dot", 16 * m, 640, 640, dtype="float32"), Form(), RING)[0]
            for m in (64, 640)
        )
        assert small.collective_shard_bytes == small.shard_bytes / 2 == 64 * 640 * 2
        assert large.collective_shard_bytes == large.shard_bytes == 640 * 640 * 2

    def test_words_tell_every_term(self) -> None:
        text = str(explain(gather(), RING))
        for words in (
            "all_gather of 128.0 MiB, bound by bandwidth",
            "[8192,8192]·[8192,2048] bfloat16, right operand on chip: 96% of the peak, bound by compute",
            "prologue",
            "steady state: 15 ×",
            "epilogue",
            "rewriting pays",
            "a ring of its own",
        ):
            assert words in text
        assert "left as it is" in str(explain(gather(m=16, k=128, n=128), RING))
        assert "take turns" in str(explain(gather(), Axis(by_name("cpu"), 4)))
        assert "stops this hardware for 10.0 µs" in str(explain(gather(), Axis(by_name("h100"), 4)))
        assert "stops this hardware" not in str(explain(gather(), Axis(by_name("tpu_v5p"), 4)))
        assert "a line, no wraparound" in str(explain(gather(), Axis(by_name("tpu_v5e"), 4)))

    def test_forms_are_listed_the_fastest_first_and_apart_by_the_memory_that_they_need(self) -> None:
        found = explain(chain_of("all_gather_dot", 4096, 2048, 1024, cut="k"), ON_V5P)
        light, heavy = str(found).split("\n\n")[3:5]
        assert light.startswith("Other forms, the fastest first:")
        assert heavy.startswith("Forms that need more memory than as written, which come last, ")
        for group, needs_more in ((light, False), (heavy, True)):
            others = [c for c in found.candidates[1:] if (c.estimate.added_bytes > 0) == needs_more]
            *rows, last = group.split("\n")[1:]
            times = [float(row.split()[0].replace(",", "")) for row in rows]
            assert times == sorted(times) and len(times) == LISTED < len(others)
            assert last == f"  … {len(others) - LISTED} more: --json"
        few = explain(chain_of("all_gather_dot", 4096, 2048, 1024, cut="m"), Axis(by_name("h100"), 16))
        assert "more: --json" not in str(few)

    def test_figures_are_json(self) -> None:
        found = explain(gather(), RING)
        figures = json.loads(json.dumps(found.to_json()))
        assert figures["candidates"][0]["estimate"]["overlapped_s"] == found.best.estimate.overlapped_s
        assert figures["original_s"] == found.best.estimate.original_s
        assert figures["pays"] is True

    def test_one_device_has_nothing_to_explain(self) -> None:
        with pytest.raises(ValueError, match="at least 2"):
            explain(gather(), Axis(V5P, 1))

    @pytest.mark.parametrize(
        ("cut", "size", "said"),
        [
            ("m", 7, "M = 8192 cannot be cut evenly over 7 devices"),
            ("k", 24, "K = 8192 cannot be cut evenly over 24 devices"),
            ("n", 3, "N = 2048 cannot be cut evenly over 3 devices"),
        ],
    )
    def test_what_cannot_be_cut_evenly_has_no_price(self, cut: Any, size: int, said: str) -> None:
        def chain(m: int) -> PlainChain:
            return chain_of("all_gather_dot", m, 8192, 2048, cut=cut)

        axis = Axis(V5P, size)
        with pytest.raises(ValueError, match=said):
            explain(chain(8192), axis)
        with pytest.raises(ValueError, match=said):
            break_evens(chain, axis, 8192)
        batched = PlainChain(
            pattern="dot_psum", dots=(PlainDot(Matmul(batch=9, m=8, k=8, n=8), "batch"),), elements=9 * 64
        )
        assert batched.misfit(3) == ""
        assert batched.misfit(2) == "batch = 9 cannot be cut evenly over 2 devices"

    def test_what_is_no_chain_or_no_axis_is_refused(self) -> None:
        nothing: Any = None
        with pytest.raises(TypeError, match="axis must be an Axis, such as Axis"):
            explain(gather(), V5P)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="chain must be a PlainChain, as chain_of makes, got None"):
            explain(nothing, RING)

    def test_no_form_is_not_every_form(self) -> None:
        with pytest.raises(ValueError, match="among names no form"):
            explain(gather(), RING, ())


class TestForms:
    def test_an_axis_of_several_rings_has_forms_for_each(self) -> None:
        slice_of = Topology.torus((4, 4), V5P)
        axis = Axis.of(slice_of, (tuple(range(16)),))
        assert {form.rings for form in forms(gather(), axis)} == {1, 2}
        assert {form.rings for form in forms(gather(), RING)} == {1}

    def test_pieces_are_no_smaller_than_a_row(self) -> None:
        assert {form.pieces for form in forms(gather(m=16), RING)} == {1}
        assert {form.pieces for form in forms(gather(m=32), RING)} == {1, 2}

    def test_columns_are_for_contracting_gathers_that_are_wide_enough(self) -> None:
        def columns(m: int) -> set[int]:
            chain = chain_of("all_gather_dot", m, 4096, 512, cut="k")
            return {form.columns for form in forms(chain, RING)}

        assert columns(256) == {1}
        assert columns(1024) == {1, 2, 4}
        assert {form.columns for form in forms(gather(), RING)} == {1}

    def test_a_chain_that_cannot_be_is_refused(self) -> None:
        with pytest.raises(ValueError, match="not k"):
            chain_of("dot_reduce_scatter", 8, 8, 8, cut="k")
        with pytest.raises(ValueError, match="the rhs's dims are k or n, and m is cut"):
            chain_of("all_gather_dot", 8, 8, 8, cut="m", operand="rhs")
        with pytest.raises(ValueError, match="dot_psum gathers no operand: leave operand 'lhs' out"):
            chain_of("dot_psum", 8, 8, 8, operand="lhs")
        with pytest.raises(ValueError, match="at least 1"):
            chain_of("all_gather_dot", 0, 8, 8)
        for size in (float("nan"), 8.0, "8"):
            with pytest.raises(TypeError, match="K must be a whole number, got"):
                chain_of("all_gather_dot", 8, size, 8)  # type: ignore[arg-type]
        operand: Any = "zz"
        with pytest.raises(ValueError, match="operand is lhs or rhs, got 'zz'"):
            chain_of("all_gather_dot", 8, 8, 8, cut="k", operand=operand)
        with pytest.raises(ValueError, match="cut is m, k or n, got 'z'"):
            chain_of("all_gather_dot", 8, 8, 8, cut="z")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="unknown pattern"):
            PlainChain(pattern="dot", dots=(PlainDot(Matmul(m=1, k=1, n=1), "m"),), elements=1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="at least one dot"):
            PlainChain(pattern="dot_psum", dots=(), elements=1)


@pytest.mark.parametrize("hardware", ["tpu_v4", "tpu_v5e", "tpu_v6e", "tpu_v5p", "tpu_7x", "h100"])
@pytest.mark.parametrize(("m", "k", "n"), [(8192, 1024, 8192), (16384, 256, 16384)])
def test_no_term_of_a_psum_is_negative_in_any_form(hardware: str, m: int, k: int, n: int) -> None:
    """What the gathers of its columns place is no part of the steps' dots."""
    found = explain(chain_of("dot_psum", m, k, n), Axis(by_name(hardware), 8))
    for each in found.candidates:
        assert min(each.step_dots_s, each.prologue_s, each.steady_s, each.epilogue_s) >= 0, each.form


@pytest.mark.parametrize("hardware", ["tpu_v5e", "tpu_v5p", "h100"])
@pytest.mark.parametrize(("m", "columns"), [(16, False), (8192, False), (8192, True)])
def test_a_psum_as_written_takes_as_long_as_the_all_reduce(hardware: str, m: int, columns: bool) -> None:
    """Of few bytes each device may send its whole array to all others: not two collectives in turn."""
    axis = Axis(by_name(hardware), 8)
    chain = chain_of("dot_psum", m, 4096, 2048)
    form = Form(columns=4, across=True) if columns else Form()
    assert price(chain, form, axis).collective_s == pytest.approx(axis.all_reduce_s(m * 2048 * 2))
    assert explain(chain, axis).collective.seconds == pytest.approx(axis.all_reduce_s(m * 2048 * 2))


class TestBreakEven:
    def test_either_side_of_a_crossing_has_its_sign(self) -> None:
        tokens, sizes, bandwidth = break_evens(lambda m: gather(m), RING, 8192)
        assert [each.variable for each in (tokens, sizes, bandwidth)] == ["tokens", "axis_size", "bandwidth"]
        assert tokens.here == 512 and sizes.here == 16 and bandwidth.here == 9e10

        def gain(rows: int) -> float:
            found = explain(gather(rows * 16), RING).best.estimate
            return found.benefit_s / found.original_s

        (crossing,) = tokens.crossings
        assert crossing.pays_above
        assert gain(int(crossing.at)) >= V5P.least_gain > gain(int(crossing.at) - 1)
        assert tokens.pays == "sometimes"

    def test_fast_links_leave_nothing_to_hide(self) -> None:
        *_, bandwidth = break_evens(lambda m: gather(m), RING, 8192)
        *_, crossing = bandwidth.crossings
        assert not crossing.pays_above and crossing.at > 9e10
        for factor, paying in ((0.99, True), (1.01, False)):
            speed = crossing.at * factor
            hardware = dataclasses.replace(V5P, link_bytes_per_s=speed)
            assert explain(gather(), Axis(hardware, 16)).pays is paying

    def test_a_network_between_hosts_is_as_many_times_as_fast_as_the_links(self) -> None:
        h100 = by_name("h100")
        *_, bandwidth = break_evens(lambda m: gather(m, 8192, 8192), Axis.of_size(16, h100), 8192)
        for speed, priced in bandwidth.points:
            factor = speed / h100.axis_bytes_per_s
            faster = dataclasses.replace(
                h100,
                link_bytes_per_s=factor * h100.link_bytes_per_s,
                dcn_bytes_per_s=factor * h100.dcn_bytes_per_s,
            )
            found = explain(gather(8192, 8192, 8192), Axis.of_size(16, faster)).best.estimate
            assert priced.collective_s == pytest.approx(found.collective_s)

    def test_hardware_that_overlaps_nothing_never_pays(self) -> None:
        found = break_evens(lambda m: gather(m, 512, 512), Axis(by_name("cpu"), 4), 512)
        assert {each.pays for each in found} == {"never"}
        assert all(not each.crossings for each in found)

    def test_a_given_slice_keeps_its_axis(self) -> None:
        axis = Axis.of(Topology.torus((4, 4), V5P), (tuple(range(16)),))
        found = break_evens(lambda m: gather(m), axis, 8192, resize=False)
        assert [each.variable for each in found] == ["tokens", "bandwidth"]
        here = dict(found[0].points)[512.0]
        assert here == explain(gather(), axis).best.estimate

    def test_where_m_is_not_cut_all_rows_are_on_every_device(self) -> None:
        def chain(m: int) -> PlainChain:
            return chain_of("all_gather_dot", m, 8192, 2048, cut="k", operand="rhs")

        tokens, *_ = break_evens(chain, RING, 512)
        assert tokens.here == 512
        assert dict(tokens.points)[512.0] == explain(chain(512), RING).best.estimate

    @pytest.mark.parametrize(("m", "k", "n"), [(8192, 8192, 2048), (4096, 4096, 4096), (16384, 2048, 1024)])
    @pytest.mark.parametrize("name", ["h100", "tpu_v5p"])
    def test_right_before_an_axis_size_that_is_told_it_is_not_so_yet(
        self, name: str, m: int, k: int, n: int
    ) -> None:
        hardware = by_name(name)
        _, sizes, _ = break_evens(lambda rows: gather(rows, k, n), Axis(hardware, 8), m)
        priced = {int(size): pays(estimate, hardware) for size, estimate in sizes.points}
        for crossing in sizes.crossings:
            at = int(crossing.at)
            assert priced[at] is crossing.pays_above
            assert priced[at - 1] is not crossing.pays_above

    def test_axis_sizes_over_which_the_dot_cannot_be_cut_are_left_out(self) -> None:
        _, sizes, _ = break_evens(lambda m: chain_of("dot_psum", m, 512, 6 * 512, cut="n"), RING, 512)
        assert [size for size, _ in sizes.points] == [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
        _, sizes, _ = break_evens(lambda m: chain_of("dot_psum", m, 512, 2048, cut="n"), RING, 512)
        assert [size for size, _ in sizes.points] == [2, 4, 8, 16, 32, 64, 128]

    def test_what_is_of_no_use_is_refused(self) -> None:
        some: Any = gather()
        with pytest.raises(TypeError, match="chain_for is a function from rows to their chain"):
            break_evens(some, RING, 8192)
        with pytest.raises(TypeError, match="axis must be an Axis"):
            break_evens(lambda m: gather(m), V5P, 8192)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"M must be a whole number, got 8192\.0"):
            break_evens(lambda m: gather(m), RING, 8192.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="M must be at least 1, got 0"):
            break_evens(lambda m: gather(m), RING, 0)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_more_bytes_never_shorten_the_collective(pattern: Any) -> None:
    small, large = (price(chain_of(pattern, m, 1024, 1024), Form(), RING) for m in (1024, 4096))
    assert small.collective_s < large.collective_s


def test_beside_other_rings_more_must_be_gained() -> None:
    """As in a program of several (`passes.network`): alone 3 % is enough on v5p, there 5 %."""
    axis = Axis(by_name("tpu_v5p"), 4)
    less, more = (explain(chain_of("dot_psum", rows, 640, 2560), axis) for rows in (16384, 65536))
    assert less.pays and more.pays
    assert str(less).splitlines()[-1] == (
        "Beside other rings in one program, which share what is on chip, it must gain 5%: "
        "there it is left as it is."
    )
    assert "Beside other rings" not in str(more)
