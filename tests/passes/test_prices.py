"""Chains that are alike are priced once, and only those."""

# JAX leaves its collectives untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from cost_model import Axis, by_name
from cost_model.ring_work import Before
from passes import pricing, shims
from passes.chains import Chain
from passes.graph import Dataflow, dataflow
from passes.match import match_dataflow
from passes.network import Network
from passes.prices import Prices, likeness
from passes.pricing import pricer
from passes.schedule import RingSchedule
from tests.passes import bodies

ROWS, WIDTH = 16, 64


def chains_of(body: Callable[..., Any], *shards: Any) -> tuple[Dataflow, list[Chain]]:
    flow, matches = bodies.matched(body, *shards, axis_size=4)
    return flow, [match.found[0] for match in matches if isinstance(match.found, tuple)]


def shard(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


SHARDS = [shard(ROWS, WIDTH), shard(WIDTH, WIDTH), shard(WIDTH, WIDTH)]


def layer(x: Any, w: Any, v: Any) -> Any:
    hidden = jnp.tanh(lax.all_gather(x, "x", axis=0, tiled=True) @ w)
    return x + lax.psum_scatter(hidden @ v, "x", scatter_dimension=0, tiled=True)


def layers(count: int) -> Callable[..., Any]:
    def body(x: Any, w: Any, v: Any) -> Any:
        for _ in range(count):
            x = layer(x, w, v)
        return x

    return body


def gathered(x: Any, w: Any, dim: int = 0) -> Any:
    return lax.all_gather(x, "x", axis=dim, tiled=True) @ w


def one(body: Callable[..., Any], *shards: Any) -> Any:
    """The likeness of a body's only chain."""
    flow, (chain,) = chains_of(body, *shards)
    return likeness(flow, chain)


def test_layers_are_alike_and_a_gather_is_not_like_a_scatter() -> None:
    flow, chains = chains_of(layers(5), *SHARDS)
    assert len(chains) == 10
    assert len({likeness(flow, chain) for chain in chains}) == 2


def two_dots(x: Any, w: Any) -> Any:
    whole = lax.all_gather(x, "x", axis=0, tiled=True)
    return whole @ w + whole @ (2 * w)


def contracted(x: Any, w: Any) -> Any:
    return lax.all_gather(x, "x", axis=0, tiled=True).T @ w


def exact(x: Any, w: Any) -> Any:
    return jnp.matmul(lax.all_gather(x, "x", axis=0, tiled=True), w, precision=lax.Precision.HIGHEST)


def from_the_right(x: Any, w: Any) -> Any:
    return lax.dot_general(lax.all_gather(x, "x", axis=0, tiled=True), w, (((1,), (1,)), ((), ())))


def shifted(x: Any, w: Any) -> Any:
    return (lax.all_gather(x, "x", axis=0, tiled=True) + 1) @ w


BASE = [shard(16, 64), shard(64, 64)]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((gathered, shard(24, 64), shard(64, 64)), id="rows"),
        pytest.param((gathered, shard(16, 64), shard(64, 48)), id="columns"),
        pytest.param((gathered, *(shard(*s.shape, dtype=jnp.bfloat16) for s in BASE)), id="dtype"),
        *(pytest.param((body, *BASE)) for body in (two_dots, contracted, exact, from_the_right, shifted)),
    ],
)
def test_what_differs_in_a_chain_is_told(other: tuple[Any, ...]) -> None:
    flow, chains = chains_of(*other)
    assert likeness(flow, chains[0]) != one(gathered, *BASE)


def test_a_sum_that_is_scattered_next_is_priced_as_the_part_that_a_tpu_adds_up() -> None:
    """Its compiler scatters first, among four devices here, and a ring of the whole sum no longer pays."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("pod", "x"))

    def summed(x: Any, w: Any) -> Any:
        return lax.psum(x @ w, "pod")

    def scattered(x: Any, w: Any) -> Any:
        return lax.psum_scatter(summed(x, w), "x", scatter_dimension=0, tiled=True)

    def read_twice(x: Any, w: Any) -> Any:
        total = summed(x, w)
        return lax.psum_scatter(total, "x", scatter_dimension=0, tiled=True) + total[:1024]

    spec = PartitionSpec(("pod", "x"))
    whole = shard(8 * 4096, 1024, dtype=jnp.bfloat16), shard(8 * 1024, 4096, dtype=jnp.bfloat16)
    times, alike = {}, {}
    for body in (summed, scattered, read_twice):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=PartitionSpec("x"))
        flow = dataflow(bodies.mapped_body(jax.make_jaxpr(mapped)(*whole)))
        chain = match_dataflow(flow)[0].found[0]  # type: ignore[index]
        alike[body.__name__] = likeness(flow, chain)
        for hardware in ("tpu_v5p", "h100"):
            estimate, _ = Prices(flow, Network(by_name(hardware)), {}, alone=True).best(chain)
            assert estimate is not None
            times[body.__name__, hardware] = estimate.collective_s
    assert times["scattered", "tpu_v5p"] == pytest.approx(times["summed", "tpu_v5p"] / 4)
    assert times["read_twice", "tpu_v5p"] == times["summed", "tpu_v5p"]
    assert times["scattered", "h100"] == times["summed", "h100"]
    assert alike["summed"] == alike["read_twice"] != alike["scattered"]


def test_what_is_around_a_chain_does_not_matter() -> None:
    assert one(lambda x, w: gathered(jnp.exp(x), 2 * w) + 1, *BASE) == one(gathered, *BASE)


def test_an_operand_used_twice_is_not_like_two_operands() -> None:
    def own(x: Any, w: Any) -> Any:
        whole = lax.all_gather(x, "x", axis=0, tiled=True) * w[0, 0]
        return lax.dot_general(whole, whole, (((0,), (0,)), ((), ()))), w

    def others(x: Any, w: Any) -> Any:
        whole = lax.all_gather(x, "x", axis=0, tiled=True) * w[0, 0]
        return lax.dot_general(whole, w, (((0,), (0,)), ((), ())))

    assert one(own, shard(16, 64), shard(64, 64)) != one(others, shard(16, 64), shard(64, 64))


def test_each_kind_is_priced_once_and_as_by_itself() -> None:
    flow, chains = chains_of(layers(4), *SHARDS)
    network = Network(by_name("tpu_v5p"))
    prices = Prices(flow, network, {}, alone=False)
    with mock.patch("passes.prices.pricer", wraps=pricing.pricer) as pricer:
        best = [prices.best(chain) for chain in chains]
    assert pricer.call_count == 2
    assert best == [Prices(flow, network, {}, alone=False).best(chain) for chain in chains]
    assert best[0] != best[1]


@pytest.mark.skipif(not shims.EXPLICIT_STARTS, reason="the compiler of this jax places all starts itself")
def test_a_chain_that_may_not_start_its_hops_is_priced_apart() -> None:
    def body(x: Any, y: Any, w: Any) -> Any:
        return gathered(x, w), gathered(y, w)

    wide = [shard(2048, 2048, dtype=jnp.bfloat16)] * 3
    flow, chains = chains_of(body, *wide)
    same_in_every_turn = frozenset(o for o in flow.ops[chains[0].collective.op].inputs if isinstance(o, int))
    flow = dataclasses.replace(flow, steady=same_in_every_turn)
    network = Network(by_name("tpu_v5p"))
    alone = [Prices(flow, network, {}, alone=False).best(chain) for chain in chains]
    assert alone[0] != alone[1]
    for order in (1, -1):
        prices = Prices(flow, network, {}, alone=False)
        assert [prices.best(chain) for chain in chains[::order]] == alone[::order]


def test_what_is_on_chip_before_is_part_of_the_price() -> None:
    flow, chains = chains_of(layers(2), *SHARDS)
    before = {chains[0].collective.op: Before(1e6, stays=True)}
    prices = Prices(flow, Network(by_name("tpu_v5p")), before, alone=False)
    with mock.patch("passes.prices.pricer", wraps=pricing.pricer) as pricer:
        for chain in chains:
            prices.best(chain)
    assert pricer.call_count == 3


def test_what_cannot_be_hashed_is_priced_each_time() -> None:
    flow, chains = chains_of(layers(3), *SHARDS)
    prices = Prices(flow, Network(by_name("tpu_v5p")), {}, alone=False)
    expected = [prices.best(chain) for chain in chains]
    with mock.patch("passes.prices.likeness", lambda *_: []):
        assert [
            Prices(flow, Network(by_name("tpu_v5p")), {}, alone=False).best(c) for c in chains
        ] == expected


def test_without_hardware_the_last_schedule_is_taken() -> None:
    flow, chains = chains_of(layers(1), *SHARDS)
    estimate, schedule = Prices(flow, Network(None), {}, alone=False).best(chains[0])
    assert estimate is None
    assert schedule.directions == 2


@pytest.mark.parametrize(("chip", "apart"), [("tpu_v4", True), ("tpu_v5e", True), ("h100", False)])
def test_what_a_dot_s_result_is_combined_with_takes_a_pass_of_its_own_in_a_ring(
    chip: str, apart: bool
) -> None:
    """As written it is part of the dot, or on GPUs, whose matmuls are a library's, of one pass behind it."""

    def plain(x: Any, w: Any, factor: Any) -> Any:
        return lax.psum_scatter(x @ w, "x", scatter_dimension=0, tiled=True)

    def combined(x: Any, w: Any, factor: Any) -> Any:
        return lax.psum_scatter(x @ w * factor, "x", scatter_dimension=0, tiled=True)

    axis, size = Axis(by_name(chip), 4), 4096
    shards = (shard(size, 8 * size), shard(8 * size, size), shard(size, size))
    found = []
    for body in (plain, combined):
        flow, (chain,) = chains_of(body, *shards)
        found.append(pricer(flow, chain, axis)(RingSchedule(directions=2)))
    without, with_it = found
    assert without.original_s == with_it.original_s
    added_bytes = (with_it.partials_s - without.partials_s) * axis.hardware.hbm_bytes_per_s
    array_bytes = 4 * size * size
    # Three of four steps; the factor, which the program is given, may be made within the dot as written.
    assert added_bytes == pytest.approx(3 / 4 * (2 + 2 * apart) * array_bytes)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_transposed_product_is_that_of_the_operands_in_the_other_order(dim: int) -> None:
    """As jax has weights' gradients: TPU compilers transpose nothing, and the price is of what they make."""

    def direct(x: Any, y: Any) -> Any:
        return lax.psum_scatter(jnp.einsum("tm,tn->mn", x, y), "x", scatter_dimension=dim, tiled=True)

    def turned(x: Any, y: Any) -> Any:
        product = jnp.einsum("tn,tm->nm", y, x).T
        return lax.psum_scatter(product.astype(x.dtype), "x", scatter_dimension=dim, tiled=True)

    axis = Axis(by_name("tpu_v6e"), 4)
    schedule = RingSchedule(directions=2, chains=2)
    found = []
    for body in (direct, turned):
        flow, (chain,) = chains_of(body, shard(2048, 8192), shard(2048, 1024))
        found.append(pricer(flow, chain, axis)(schedule))
    assert found[0] == found[1]


def test_columns_that_fill_no_tile_take_as_long_as_those_that_do() -> None:
    """On v6e 64 of them took 388 us in all pieces, 128 took 192; main memory has them in tiles of 128."""

    def body(x: Any, w: Any) -> Any:
        return lax.psum_scatter(x @ w, "x", scatter_dimension=1, tiled=True)

    def partials_s(columns: int, **form: Any) -> float:
        flow, (chain,) = chains_of(body, shard(8192, 2048), shard(2048, 4 * columns))
        return pricer(flow, chain, Axis(by_name("tpu_v5e"), 4))(RingSchedule(directions=2, **form)).partials_s

    assert partials_s(256, chains=2) > 1.5 * partials_s(256)
    assert partials_s(512, chains=2) < 1.3 * partials_s(512)
    assert partials_s(256, chains=2, across=True) < 1.3 * partials_s(256)


def test_columns_of_a_gather_that_fill_no_tile_take_as_long_where_results_are_in_rows() -> None:
    """On v4 80 of them took as long as 128; a result of two dims its compiler may lay out by columns."""

    def body(x: Any, w: Any) -> Any:
        return x @ lax.all_gather(w, "x", axis=1, tiled=True)

    def partials_s(columns: int, *rows: int) -> float:
        shards = (shard(*rows, 8192, dtype=jnp.bfloat16), shard(8192, columns, dtype=jnp.bfloat16))
        flow, (chain,) = chains_of(body, *shards)
        hardware = by_name("tpu_v4").per_core(2)
        return pricer(flow, chain, Axis(hardware, 4))(RingSchedule(directions=1)).partials_s

    assert partials_s(80, 1, 1024) >= partials_s(128, 1, 1024) == partials_s(128, 1024)
    for columns in (80, 192):
        assert partials_s(columns, 1, 1024) > 1.05 * partials_s(columns, 1024)


def test_strips_of_the_rows_of_heads_that_fill_no_tile_take_as_long_as_tiles() -> None:
    def partials_s(chip: str, *heads: int) -> float:
        def body(x: Any, y: Any) -> Any:
            product = lax.dot_general(x, y, (((0,), (0,)), ((), ())))
            return lax.psum_scatter(product, "x", scatter_dimension=0, tiled=True)

        flow, (chain,) = chains_of(body, shard(4096, 2048), shard(4096, *heads))
        schedule = RingSchedule(directions=2, chains=2, across=True)
        return pricer(flow, chain, Axis(by_name(chip), 4))(schedule).partials_s

    assert partials_s("tpu_v6e", 48, 128) > 2 * partials_s("tpu_v6e", 48 * 128)
    assert partials_s("tpu_v6e", 12, 512) == partials_s("tpu_v6e", 12 * 512)
    assert partials_s("h100", 48, 128) == partials_s("h100", 48 * 128)


def test_what_dots_would_make_of_their_operands_is_added_to_a_ring_on_tpus() -> None:
    def plain(x: Any, w: Any) -> Any:
        return x @ lax.all_gather(w, "x", tiled=True)

    def cast(x: Any, w: Any) -> Any:
        return (x.astype(jnp.float32) * 2).astype(x.dtype) @ lax.all_gather(w, "x", tiled=True)

    for chip, added in (("tpu_v5e", True), ("h100", False)):
        network = Network(by_name(chip))
        found = []
        for body in (plain, cast):
            flow, (chain,) = chains_of(body, shard(2048, 4096), shard(1024, 4096))
            prices = Prices(flow, network, {}, alone=False)
            found.append(prices.of(chain, Axis(by_name(chip), 4))(RingSchedule(directions=2)))
        without, with_it = found
        passes_s = added * 2 * (4 * 2048 * 4096) / by_name(chip).hbm_bytes_per_s
        assert with_it.original_s == without.original_s
        assert with_it.overlapped_s - without.overlapped_s == pytest.approx(passes_s)


def test_a_norm_of_every_piece_takes_a_few_passes_each_on_tpus() -> None:
    """As written it takes as many once. On v6e they made a block of a small layer 6 % slower in rings."""

    def normed(x: Any, w: Any) -> Any:
        y = lax.all_gather(x, "x", tiled=True)
        return (y * lax.rsqrt((y * y).mean(-1, keepdims=True))) @ w

    def overlapped_s(body: Callable[..., Any], chip: str, overhead_s: float, **form: Any) -> float:
        flow, (chain,) = chains_of(body, shard(2048, 4096), shard(4096, 4096))
        hardware = dataclasses.replace(by_name(chip), copy_overhead_s=overhead_s)
        return pricer(flow, chain, Axis(hardware, 4))(RingSchedule(**form)).overlapped_s

    for form, pieces in (
        ({"directions": 1}, 4),
        ({"directions": 2}, 8),
        ({"directions": 2, "chains": 2}, 16),
    ):
        for chip, passes in (("tpu_v6e", 3), ("h100", 0)):
            dearer = [
                overlapped_s(body, chip, 1e-3, **form) - overlapped_s(body, chip, 0.0, **form)
                for body in (normed, gathered)
            ]
            assert dearer[0] - dearer[1] == pytest.approx(passes * (pieces - 1) * 1e-3), (form, chip)
