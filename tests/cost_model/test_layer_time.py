"""Which of a layer's collectives become rings."""

from __future__ import annotations

import pytest

from cost_model import Axis, Estimate, by_name
from cost_model.layer import AxisName, Move, Pass
from cost_model.layer_time import pass_time
from cost_model.matmul import Matmul
from cost_model.plain_chain import PlainChain


@pytest.mark.parametrize("first", ["fsdp", "tensor"])
def test_a_dot_that_two_rings_want_is_in_that_which_gains_more(first: AxisName) -> None:
    second: AxisName = "tensor" if first == "fsdp" else "fsdp"
    gains: dict[AxisName, float] = {"fsdp": 1e-3, "tensor": 2e-3}

    def price(_: PlainChain, axis: AxisName) -> tuple[str, Estimate]:
        return axis, Estimate(
            dot_s=5e-3,
            collective_s=5e-3,
            partials_s=0.0,
            hops_s=0.0,
            hop_latency_s=0.0,
            overlapped_s=1e-2 - gains[axis],
        )

    moves = tuple(
        Move(what=axis, axis=axis, pattern="all_gather_dot", elements=1 << 24, dots=(("dot", "k"),))
        for axis in (first, second)
    )
    v5p = by_name("tpu_v5p")
    axes: dict[AxisName, Axis] = {axis: Axis(v5p, 4) for axis in gains}
    layer = Pass({"dot": Matmul(m=4096, k=4096, n=4096)}, moves)
    found = {move.move.axis: move for move in pass_time(layer, axes, v5p, "bfloat16", price).moves}
    assert {axis: move.ring for axis, move in found.items()} == {"tensor": "tensor", "fsdp": ""}
    assert found["tensor"].saved_s == pytest.approx(2e-3)
    assert found["fsdp"].saved_s == 0.0
