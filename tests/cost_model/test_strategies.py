"""Parallelism strategies: the scaling book's tables and numbers, the priced layer, the mesh split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_model import by_name
from cost_model.axis import Axis
from cost_model.form import Form
from cost_model.layer import Pass, Split, backward, forward, reduction
from cost_model.layer_time import pass_time
from cost_model.mesh_split import (
    IN_SLICE,
    Layout,
    axis_on,
    best_splits,
    layouts,
    pod_axis,
    state_bytes,
)
from cost_model.plain_chain import PlainChain, forms
from cost_model.ring_order import ring_step_s
from cost_model.strategies import (
    STRATEGIES,
    Model,
    best_fsdp,
    data_tokens_per_device,
    fsdp_tensor_tokens_per_device,
    intensity,
    layer_bytes,
    most_tensor,
    nearest_divisor,
    pod_tokens,
    tokens_per_pod,
)
from cost_model.topology import Topology
from cost_model.walk import walk_step_s

V5P = by_name("tpu_v5p")
B, D, F = 48_000, 8192, 32_768
MLP = Model(layers=48, d_model=D, d_ff=F, tokens=B)
ESM2 = Model(layers=48, d_model=5120, d_ff=4 * 5120, tokens=8192, heads=40, head_dim=128)


class TestTheBook:
    """Worked numbers of "How to Parallelize a Transformer for Training"."""

    def test_a_v5p_does_2550_flops_per_byte_of_an_axis(self) -> None:
        assert intensity(V5P) == pytest.approx(2550)

    @pytest.mark.parametrize("name", ["h100", "tpu_v5p"])
    def test_a_byte_of_a_gathered_array_takes_as_long_as_those_flops(self, name: str) -> None:
        """Of many devices, of which each lacks nearly all of it."""
        hardware = replace(by_name(name), switch_devices=0)
        seconds_per_byte = Axis(hardware, 1024).all_gather_s(1e12) / 1e12
        assert intensity(hardware) == pytest.approx(
            hardware.flops_for("bfloat16") * seconds_per_byte, rel=0.002
        )

    def test_data_parallelism_needs_2550_tokens_per_chip_on_one_axis_and_850_on_three(self) -> None:
        assert data_tokens_per_device(V5P) == pytest.approx(2550)
        assert data_tokens_per_device(V5P, axes=3) == pytest.approx(850)

    @pytest.mark.parametrize("axes", [1, 2])
    def test_tensor_parallelism_is_bound_by_compute_while_y_is_below_axes_f_over_2550(
        self, axes: int
    ) -> None:
        assert most_tensor(V5P, F, axes=axes) == pytest.approx(axes * F / 2550)

    def test_of_64_chips_fsdp_has_16_and_tensor_4(self) -> None:
        best = best_fsdp(tokens=B, d_ff=F, devices=64, fsdp_axes=2, tensor_axes=1)
        assert best == pytest.approx(13.69, abs=0.01)  # the book rounds its inputs and says 13.9
        assert best == pytest.approx(13.9, rel=0.02)
        assert nearest_divisor(best, 64) == 16

    def test_that_split_is_what_trying_all_divisors_finds(self) -> None:
        def seconds(x: int) -> float:
            # Activations pass one dimension's links, weights those of two.
            activations = layer_bytes("tensor", tokens=B / x, d_model=D, d_ff=F).forward
            weights = layer_bytes("fsdp", tokens=B, d_model=D, d_ff=F / (64 / x)).forward
            return activations / 1 + weights / 2

        assert min((2**i for i in range(7)), key=seconds) == 16
        assert min(range(1, 64), key=seconds) == round(
            best_fsdp(tokens=B, d_ff=F, devices=64, fsdp_axes=2, tensor_axes=1)
        )

    def test_both_together_need_400_tokens_per_chip(self) -> None:
        needed = fsdp_tensor_tokens_per_device(V5P, F, fsdp_axes=2, tensor_axes=1)
        assert needed == pytest.approx(4 * 2550**2 / (2 * F)) == pytest.approx(400, rel=0.01)

    def test_pods_need_76_000_tokens(self) -> None:
        assert pod_tokens(3.8e18, 5e13) == 76_000
        assert tokens_per_pod(V5P) == pytest.approx(76_000, rel=0.05)

    @pytest.mark.parametrize(
        ("strategy", "forward_bytes", "backward_bytes"),
        [
            ("data", 0, 8 * D * F),
            ("fsdp", 4 * D * F, 8 * D * F),
            ("tensor", 4 * B * D, 4 * B * D),
            ("fsdp_tensor", 4 * B * D / 16 + 4 * D * F / 4, 8 * B * D / 16 + 8 * D * F / 4),
        ],
    )
    def test_bytes_per_layer(self, strategy: Any, forward_bytes: float, backward_bytes: float) -> None:
        found = layer_bytes(strategy, tokens=B, d_model=D, d_ff=F, x=16, y=4)
        assert (found.forward, found.backward) == (forward_bytes, backward_bytes)

    def test_twice_the_width_of_elements_is_twice_the_bytes(self) -> None:
        for strategy in STRATEGIES:
            narrow, wide = (
                layer_bytes(strategy, tokens=B, d_model=D, d_ff=F, x=4, y=4, dtype=dtype)
                for dtype in ("bfloat16", "float32")
            )
            assert (wide.forward, wide.backward) == (2 * narrow.forward, 2 * narrow.backward)

    @pytest.mark.parametrize("bad", [{"tokens": 0}, {"tokens": math.nan}, {"x": 0}, {"d_model": -1}])
    def test_impossible_sizes_are_refused(self, bad: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="positive"):
            layer_bytes("fsdp", **{"tokens": 1, "d_model": 1, "d_ff": 1, **bad})

    def test_an_unknown_strategy_and_an_unknown_network_are_refused(self) -> None:
        with pytest.raises(ValueError, match="known: data, fsdp"):
            layer_bytes("magic", tokens=1, d_model=1, d_ff=1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="physical dimension"):
            data_tokens_per_device(V5P, axes=0)

    @pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
    def test_impossible_sizes_and_rates_are_refused_by_name(self, bad: float) -> None:
        asked: dict[str, Callable[[], object]] = {
            "tokens": lambda: best_fsdp(tokens=bad, d_ff=1, devices=1),
            "d_ff": lambda: best_fsdp(tokens=1, d_ff=bad, devices=1),
            "devices": lambda: best_fsdp(tokens=1, d_ff=1, devices=bad),
            "value": lambda: nearest_divisor(bad, 8),
            "flops": lambda: pod_tokens(bad, 1),
            "bytes_per_s": lambda: pod_tokens(1, bad),
        }
        for name, ask in asked.items():
            with pytest.raises(ValueError, match=f"{name} must be positive and finite, got {bad}"):
                ask()
        widths: Any = bad
        for of_width in (most_tensor, fsdp_tensor_tokens_per_device):
            with pytest.raises(ValueError, match="d_ff must be positive"):
                of_width(V5P, widths)

    def test_what_is_no_count_and_no_hardware_is_refused(self) -> None:
        name: Any = "tpu_v5p"
        half: Any = 1.5
        for of in (intensity, tokens_per_pod):
            with pytest.raises(TypeError, match="hardware must be a Hardware"):
                of(name)
        with pytest.raises(TypeError, match=r"axes must be a whole number, got 1\.5"):
            data_tokens_per_device(V5P, axes=half)
        with pytest.raises(TypeError, match=r"count must be a whole number, got 1\.5"):
            nearest_divisor(1, half)
        with pytest.raises(ValueError, match="count must be positive"):
            nearest_divisor(3, 0)


def moved(of: Pass, axis: str) -> float:
    """Bytes V of a pass's collectives over an axis, an all-reduce counted twice."""
    doubled = ("dot_psum", "all_reduce")
    return sum(2 * m.elements * (2 if m.pattern in doubled else 1) for m in of.moves if m.axis == axis)


class TestTheLayer:
    @pytest.mark.parametrize(("x", "y"), [(4, 1), (1, 4), (16, 4)])
    def test_its_bytes_are_the_table_s(self, x: int, y: int) -> None:
        split = Split(fsdp=x, tensor=y)
        forth, back = forward(MLP, split), backward(MLP, split)
        weights = 4 * D * F / y if x > 1 else 0
        activations = 4 * B * D / x if y > 1 else 0
        assert moved(forth, "fsdp") == weights and moved(back, "fsdp") == 2 * weights
        # The forward's gathered input is shared, as in the table's row of tensor parallelism alone.
        assert moved(forth, "tensor") == moved(back, "tensor") == activations

    def test_data_parallelism_reduces_gradients_once(self) -> None:
        split = Split(data=16)
        assert moved(forward(MLP, split), "data") == 0
        assert moved(backward(MLP, split), "data") == 8 * D * F
        many = Split(data=16, microbatches=2)
        assert moved(backward(MLP, many), "data") == 0
        assert moved(reduction(MLP, many), "data") == 8 * D * F

    def test_pods_reduce_what_a_device_has_of_the_gradients(self) -> None:
        split = Split(pods=2, fsdp=8, data=2)
        assert moved(backward(MLP, split), "pods") == 8 * D * F / 16

    @pytest.mark.parametrize("split", [Split(), Split(fsdp=4), Split(tensor=4), Split(fsdp=4, tensor=4)])
    def test_its_flops_are_shared_evenly(self, split: Split) -> None:
        forth, back = (sum(dot.flops for dot in of(MLP, split).dots.values()) for of in (forward, backward))
        assert forth * split.devices == 4 * B * D * F
        assert back * split.devices == 8 * B * D * F

    def test_esm2_on_2_by_4(self) -> None:
        """Sizes of ESM-2 15B's encoder layer, activations [batch_X, seq, embed_Y]."""
        assert ESM2.parameters == pytest.approx(15.1e9, rel=0.01)
        layer = forward(ESM2, Split(fsdp=2, tensor=4))
        sizes = {name: (dot.m, dot.k, dot.n) for name, dot in layer.dots.items()}
        rows = 8192 // 2
        assert sizes == {
            "attention q": (rows, 5120, 10 * 128),
            "attention k": (rows, 5120, 10 * 128),
            "attention v": (rows, 5120, 10 * 128),
            "attention out": (rows, 10 * 128, 5120),
            "mlp in": (rows, 5120, 5120),
            "mlp out": (rows, 5120, 5120),
        }
        gather = layer.moves[0]
        assert gather.dots == (("attention q", "k"), ("attention k", "k"), ("attention v", "k"))
        # The same activations pass for half of the MLP's FLOPs: attention waits the longer part of its time.
        axes: Any = {"fsdp": Axis(V5P, 2), "tensor": Axis(V5P, 4)}
        timed = pass_time(layer, axes, V5P, "bfloat16")
        share = {}
        for block in ("attention", "mlp"):
            dots = {name: dot for name, dot in layer.dots.items() if name.startswith(block)}
            moves = tuple(move for move in layer.moves if block in move.what)
            part = pass_time(Pass(dots, moves), axes, V5P, "bfloat16")
            share[block] = part.communication_s / part.plain_s
        assert share["attention"] > share["mlp"]
        assert timed.overlapped_s < timed.plain_s

    def test_grouped_queries_and_gates_change_the_matrices(self) -> None:
        model = Model(
            layers=1,
            d_model=64,
            d_ff=256,
            tokens=128,
            heads=8,
            head_dim=8,
            kv_heads=2,
            gated=True,
            sequence=32,
        )
        dots = forward(model, Split(tensor=2)).dots
        assert (dots["attention q"].n, dots["attention k"].n) == (32, 8)
        assert dots["mlp gate"].n == dots["mlp in"].n == 128
        scores = dots["attention scores"]
        assert (scores.batch, scores.m, scores.k, scores.n) == (4 * 4, 32, 8, 32)
        assert model.parameters == 64 * (64 + 2 * 16 + 64) + 3 * 64 * 256

    @pytest.mark.parametrize("copies", [1, 2, 3, 4, 6, 8])
    def test_every_token_of_a_device_attends_to_one_sequence(self, copies: int) -> None:
        model = Model(layers=1, d_model=64, d_ff=256, tokens=3 * 64, heads=2, head_dim=8, sequence=64)
        dots = forward(model, Split(data=copies)).dots
        for name in ("attention scores", "attention values"):
            dot = dots[name]
            assert dot.batch * dot.m == 2 * model.tokens // copies
            assert {dot.n, dot.k} == {8, 64}


class TestThePrice:
    def test_ring_overlap_lies_between_the_sum_and_the_maximum(self) -> None:
        axes: Any = {"fsdp": Axis(V5P, 16), "tensor": Axis(V5P, 4)}
        for of in (forward, backward):
            timed = pass_time(of(MLP, Split(fsdp=16, tensor=4)), axes, V5P, "bfloat16")
            assert timed.plain_s == pytest.approx(timed.compute_s + timed.communication_s)
            assert timed.ideal_s == max(timed.compute_s, timed.communication_s)
            assert timed.ideal_s < timed.overlapped_s < timed.plain_s

    def test_a_dot_belongs_to_one_ring(self) -> None:
        axes: Any = {"fsdp": Axis(V5P, 16), "tensor": Axis(V5P, 4)}
        timed = pass_time(backward(MLP, Split(fsdp=16, tensor=4)), axes, V5P, "bfloat16")
        rung = [name for move in timed.moves if move.ring for name, _ in move.move.dots]
        assert rung and len(rung) == len(set(rung))

    def test_hardware_that_overlaps_nothing_gains_nothing_ideal_aside(self) -> None:
        cpu = by_name("cpu")
        timed = pass_time(forward(MLP, Split(fsdp=4)), {"fsdp": Axis(cpu, 4)}, cpu, "bfloat16")
        assert timed.overlapped_s == timed.plain_s

    @pytest.mark.parametrize(("axes", "tokens"), [(1, 2550), (3, 850)])
    def test_a_priced_layer_turns_compute_bound_near_the_book_s_threshold(
        self, axes: int, tokens: int
    ) -> None:
        shape = (64, 1, 1) if axes == 1 else (4, 4, 4)
        layout = Layout(shape, tuple((1, 1, length, 1) for length in shape))

        def bound_by_compute(per_chip: int) -> bool:
            model = Model(layers=1, d_model=D, d_ff=F, tokens=64 * per_chip)
            on = axis_on(layout, "fsdp", V5P)
            timed = pass_time(forward(model, Split(fsdp=64)), {"fsdp": on}, V5P, "bfloat16")
            return timed.compute_s > timed.communication_s

        # Matmuls of two operands in main memory reach 86 % of the peak, which lowers the threshold as much.
        assert not bound_by_compute(int(0.8 * tokens))
        assert bound_by_compute(int(1.05 * tokens))


class TestTheSplit:
    @pytest.mark.parametrize("shape", [(4,), (4, 4), (2, 6)])
    def test_layouts_give_every_device_to_an_axis(self, shape: tuple[int, ...]) -> None:
        found = list(layouts(shape, V5P, ("fsdp", "tensor")))
        assert len(set(found)) == len(found)
        for layout in found:
            assert math.prod(layout.size(axis) for axis in IN_SLICE) == math.prod(shape)
        sizes = {layout.size("tensor") for layout in found}
        assert sizes == {d for d in range(1, math.prod(shape) + 1) if math.prod(shape) % d == 0}

    def test_an_axis_through_whole_dimensions_has_all_their_links(self) -> None:
        layout = Layout((4, 4, 4), ((1, 1, 4, 1), (1, 1, 4, 1), (1, 1, 1, 4)))
        both, one = axis_on(layout, "fsdp", V5P), axis_on(layout, "tensor", V5P)
        assert (both.size, one.size) == (16, 4)
        # (P-1)/P·V through two directions of two dimensions, or of one.
        assert both.all_gather_s(1e9) == pytest.approx(15 / 16 * 1e9 / (4 * 9e10))
        assert one.all_gather_s(1e9) == pytest.approx(3 / 4 * 1e9 / (2 * 9e10))
        assert layout.describe("fsdp") == "x, y" and layout.describe("tensor") == "z"

    @pytest.mark.parametrize(
        ("shape", "hardware"), [((2, 4), "tpu_7x"), ((4,), "tpu_7x"), ((2, 4, 2), "tpu_v5p")]
    )
    def test_an_axis_has_the_links_that_its_groups_have_on_the_whole_slice(
        self, shape: tuple[int, ...], hardware: str
    ) -> None:
        """Of a chip of two devices both send, whichever of them an axis joins."""
        of = by_name(hardware).on_slice(math.prod(shape))
        slice_of = Topology.torus(shape, of, cores=of.devices_per_chip)
        lengths = (*shape, *[of.devices_per_chip] * (of.devices_per_chip > 1))
        for layout, (number, axis) in itertools.product(layouts(shape, of), enumerate(IN_SLICE)):
            groups: dict[Any, list[tuple[Any, int]]] = {}
            for device, at in enumerate(itertools.product(*map(range, lengths))):
                strides = [math.prod(parts[number + 1 :]) for parts in layout.parts]
                place = tuple(
                    i // stride % parts[number]
                    for i, stride, parts in zip(at, strides, layout.parts, strict=True)
                )
                rest = tuple(i - j * stride for i, j, stride in zip(at, place, strides, strict=True))
                groups.setdefault(rest, []).append((place, device))
            joined = tuple(tuple(device for _, device in sorted(group)) for group in groups.values())
            if len(joined[0]) == 1:
                continue
            found, wanted = axis_on(layout, axis, of), Axis.of(slice_of, joined)
            for sent in (0.0, 1e9):
                assert found.all_gather_s(sent) == pytest.approx(wanted.all_gather_s(sent))
                assert found.all_reduce_s(sent) == pytest.approx(wanted.all_reduce_s(sent))
                assert found.permute_s(sent, 1) == pytest.approx(wanted.permute_s(sent, 1))

    def test_two_axes_that_share_a_dimension_share_its_links(self) -> None:
        layout = Layout((16,), ((1, 1, 4, 4),))
        outer, inner = axis_on(layout, "fsdp", V5P), axis_on(layout, "tensor", V5P)
        # Neighbours of the outer axis are 4 chips apart: 4 groups use every link.
        assert outer.groups[0] == (0, 4, 8, 12) and inner.groups[0] == (0, 1, 2, 3)
        assert outer.step_s(1e9, 1) == pytest.approx(4e9 / 9e10)
        assert layout.describe("fsdp") == "4 of 16 along x"

    @pytest.mark.parametrize(
        ("shape", "hardware"),
        [
            ((16,), "tpu_v5e"),
            ((8, 8), "tpu_v5p"),
            ((4, 6), "tpu_v5p"),
            ((4, 4, 8), "tpu_v4"),
            ((4, 8), "tpu_7x"),
        ],
    )
    def test_what_is_found_on_a_part_of_a_slice_is_so_on_all_of_it(
        self, shape: tuple[int, ...], hardware: str
    ) -> None:
        every = {
            axis_on(layout, axis, by_name(hardware))
            for layout in layouts(shape, by_name(hardware))
            for axis in IN_SLICE
        }
        assert any(axis.cell is not None for axis in every)
        for axis in every:
            if axis.topology is None:
                continue
            whole = Axis.of(axis.topology, axis.groups)
            assert axis == whole and whole.cell is None
            for rings, directions in itertools.product(range(1, len(axis.orders) + 1), (1, 2)):
                for sent in (0.0, 1e3, 12_345_678.9):
                    step_s = ring_step_s(
                        axis.orders[:rings], sent, axis.topology, axis.groups, directions=directions
                    )
                    assert axis.step_s(sent, directions, rings) == step_s  # type: ignore[arg-type]
            if axis.walks:
                step_s = walk_step_s(axis.walks, 1e7 / 3, axis.topology, axis.groups)
                assert axis.step_s(1e7 / 3, 2, walks=True) == step_s
            for distance in (1, 2, axis.size // 2, axis.size - 1):
                assert axis.permute_s(1e7, distance) == whole.permute_s(1e7, distance)

    def test_the_dimensions_that_an_axis_has_all_of_come_first(self) -> None:
        layout = Layout((4, 16, 4), ((1, 1, 4, 1), (1, 8, 2, 1), (1, 1, 4, 1)))
        assert layout.describe("fsdp") == "x, z, and 2 of 16 along y"
        assert layout.describe("data") == "8 of 16 along y" and layout.describe("tensor") == ""
        shared = Layout((4, 4), ((1, 1, 2, 2), (1, 1, 2, 2)))
        assert shared.describe("fsdp") == "2 of 4 along x, and 2 of 4 along y"

    def test_the_fastest_split_comes_first_and_none_is_missing(self) -> None:
        steps = best_splits(MLP, V5P, (4, 4), goal="overlapped")
        assert {(s.split.fsdp, s.split.tensor) for s in steps} == {(16 // y, y) for y in (1, 2, 4, 8, 16)}
        assert [s.step_s() for s in steps] == sorted(s.step_s() for s in steps)
        for step in steps:
            assert step.step_s("ideal") <= step.step_s("overlapped") <= step.step_s("plain")

    def test_it_tells_how_far_it_is_and_prices_the_forms_it_is_told(self) -> None:
        told: list[tuple[int, int]] = []
        one = (Form(),)
        steps = best_splits(
            MLP, V5P, (4, 4), among=lambda *_: one, progress=lambda done, total: told.append((done, total))
        )
        assert told == [(number, len(told)) for number in range(1, len(told) + 1)]
        passes = [each for step in steps for each in (step.forward, step.backward)]
        assert {move.ring for each in passes for move in each.moves} == {"", str(one[0])}

    def test_the_compiler_s_place_of_the_starts_is_told_to_the_prices(self) -> None:
        seen = set()

        def among(chain: PlainChain, axis: Axis) -> tuple[Form, ...]:
            seen.add(chain.starts_implied)
            return forms(chain, axis)

        best_splits(MLP, V5P, (4,), among=among, starts_implied=True)
        assert seen == {True}

    def test_on_a_slice_that_overlaps_nothing_hops_are_not_hidden(self) -> None:
        """As on a whole pod of v5e, though each axis has but a part of it."""
        v5e = by_name("tpu_v5e")
        assert v5e.synchronous_chips == 256
        able = replace(v5e, synchronous_chips=0)
        pod, other = (
            {s.split: s.step_s() for s in best_splits(MLP, hardware, (16, 16))} for hardware in (v5e, able)
        )
        assert all(pod[split] >= other[split] for split in other)
        assert max(pod[split] / other[split] for split in other) > 1.1

    def test_memory_rules_out_copies_of_all_weights(self) -> None:
        model = Model(layers=48, d_model=D, d_ff=F, tokens=2**20)
        free = best_splits(model, V5P, (4, 4), axes=("data", "fsdp"))
        tight = best_splits(model, V5P, (4, 4), axes=("data", "fsdp"), memory_bytes=40e9)
        assert free[0].state_bytes > 40e9
        assert state_bytes(model, Split(data=16)) == 48 * 2 * D * F * 10
        assert tight and all(step.state_bytes <= 40e9 for step in tight)
        least = r"tensor 16, which needs the least memory, needs 15 GiB .* memory_bytes 1000000$"
        with pytest.raises(ValueError, match=least):
            best_splits(model, V5P, (4, 4), memory_bytes=1e6)
        for none in (math.nan, 0, -1.0):
            with pytest.raises(ValueError, match=r"memory_bytes .* leaves no room"):
                best_splits(model, V5P, (4, 4), memory_bytes=none)

    def test_a_pipeline_pays_for_its_bubble(self) -> None:
        steps = best_splits(MLP, V5P, (4,), axes=("pipeline",), microbatches=(1, 4, 100))
        by_count = {step.split.microbatches: step for step in steps}
        assert set(by_count) == {1, 4, 100}
        for count, step in by_count.items():
            each = step.forward.compute_s + step.backward.compute_s
            # Four stages of twelve layers: count + 3 slots.
            assert step.step_s("ideal") == pytest.approx((count + 3) * 12 * each)
            assert step.step_s("plain") > step.step_s("ideal")
            sent = B // count * D * 2
            assert step.boundary_s == pytest.approx(sent / 9e10)
            # Activations forth and their gradients back, in every slot.
            boundaries_s = (count + 3) * 2 * step.boundary_s
            assert step.step_s("plain") == pytest.approx(step.step_s("ideal") + boundaries_s)

    def test_pods_add_their_all_reduce(self) -> None:
        model = Model(layers=2, d_model=D, d_ff=F, tokens=2**20)
        one, two = (best_splits(model, V5P, (4, 4), axes=("fsdp",), pods=pods)[0] for pods in (1, 2))
        (in_first, out_first) = (move for move in two.backward.moves if move.move.axis == "pods")
        # Both halves of an all-reduce between two: half of a device's share out, twice.
        assert in_first.seconds == out_first.seconds == pytest.approx(2 * (2 * D * F / 16) / 2 / 6.25e9)
        assert not [move for move in one.backward.moves if move.move.axis == "pods"]
        assert pod_axis(V5P, 1).size == 1

    def test_a_model_that_cannot_be_divided_is_refused_with_the_reason(self) -> None:
        with pytest.raises(ValueError, match="tokens 7 cannot be cut into"):
            best_splits(Model(layers=1, d_model=64, d_ff=64, tokens=7), V5P, (4,), axes=("fsdp",))
        with pytest.raises(ValueError, match="heads 6 cannot be cut into 4"):
            best_splits(Model(layers=1, d_model=64, d_ff=64, tokens=8, heads=6), V5P, (4,), axes=("tensor",))
        with pytest.raises(ValueError, match="unknown mesh axis"):
            best_splits(MLP, V5P, (4,), axes=("time",))  # type: ignore[arg-type]
        for none in ((), (0,)):
            with pytest.raises(ValueError, match=r"microbatches .*: give at least one number"):
                best_splits(MLP, V5P, (2, 2), microbatches=none)
        with pytest.raises(ValueError, match="unknown goal 'foo'; known: plain, overlapped, ideal"):
            best_splits(MLP, V5P, (4,), goal="foo")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="unknown goal 'foo'"):
            best_splits(MLP, V5P, (4,))[0].step_s("foo")  # type: ignore[arg-type]
        for shape in ((), (4, 0), (4, -1)):
            with pytest.raises(ValueError, match="at least 1 chip along each dimension, got"):
                best_splits(MLP, V5P, shape)
        with pytest.raises(ValueError, match=r"4x4; its devices cannot be divided over \(\)"):
            best_splits(MLP, V5P, (4, 4), axes=())

    def test_behind_a_switch_and_with_two_devices_per_chip(self) -> None:
        assert best_splits(MLP, by_name("h100"), (8,))[0].split.devices == 8
        two = best_splits(MLP, by_name("tpu_7x"), (2, 2))
        assert {step.split.devices for step in two} == {8}

    def test_gpus_of_several_hosts_reach_each_other_through_the_network(self) -> None:
        h100, topology = by_name("h100"), Topology.logical((32,), by_name("h100"))
        number = np.arange(32).reshape(2, 2, 8)  # data, fsdp, tensor: see `IN_SLICE`
        layout = next(layout for layout in layouts((32,), h100) if layout.parts == ((1, *number.shape),))
        for dim, axis in enumerate(("data", "fsdp", "tensor")):
            groups = np.moveaxis(number, dim, -1).reshape(-1, number.shape[dim])
            every = Axis.of(topology, tuple(map(tuple, groups.tolist())))
            found = axis_on(layout, axis, h100)  # type: ignore[arg-type]
            for full_bytes in (1e3, 1e9):
                assert found.all_gather_s(full_bytes) == every.all_gather_s(full_bytes)
                assert found.step_s(full_bytes, 1) == every.step_s(full_bytes, 1)
            assert found.within_domain == (axis == "tensor")

    @pytest.mark.parametrize(
        "bad",
        [
            {"layers": 0},
            {"tokens": 0},
            {"tokens": math.nan},
            {"heads": -1},
            {"heads": 6, "kv_heads": 4},
            {"kv_heads": 4},
            {"kv_heads": 0},
            {"sequence": 32},
            {"dtype": "soft"},
        ],
    )
    def test_impossible_models_are_refused(self, bad: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            Model(**{"layers": 1, "d_model": 64, "d_ff": 64, "tokens": 8, **bad})

    def test_impossible_splits_are_refused(self) -> None:
        with pytest.raises(ValueError, match="fsdp 0: an axis has one device at least"):
            Split(fsdp=0)
        with pytest.raises(ValueError, match="microbatches 0: a step has one microbatch at least"):
            Split(microbatches=0)

    def test_what_is_no_whole_number_or_no_model_is_refused(self) -> None:
        given: Any = {"layers": 1, "d_model": 64, "d_ff": 64, "tokens": 8}
        with pytest.raises(ValueError, match=r"tokens must be below 2\*\*63, got a number of 1329 bits"):
            Model(**{**given, "tokens": 10**400})
        with pytest.raises(TypeError, match=r"tokens must be a whole number, got 8\.5"):
            Model(**{**given, "tokens": 8.5})
        with pytest.raises(TypeError, match=r"fsdp must be a whole number, got 2\.5"):
            Split(fsdp=2.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"hardware must be a Hardware, .*, got 'tpu_v5p'"):
            best_splits(MLP, "tpu_v5p", (4,))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="model must be a Model"):
            best_splits(given, V5P, (4,))
        with pytest.raises(TypeError, match=r"a slice's length must be a whole number, got 2\.5"):
            best_splits(MLP, V5P, (2.5,))  # type: ignore[arg-type]
