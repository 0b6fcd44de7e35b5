"""What compilers hide as written is not counted as a ring's gain, and they do hide it."""

# JAX leaves its collectives untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from cost_model import by_name
from overlap import overlap_collectives
from passes import Site, decide
from tests.libtpu import needs_libtpu
from tests.passes import spmd
from tests.passes.tpu_process import told_by

P = PartitionSpec
TOKENS, WIDTH, HIDDEN = 8192, 4096, 16384
"""Tokens are those of one device."""


def gather(w: Any) -> Any:
    return lax.all_gather(w, "x", axis=1, tiled=True)


def fsdp(x: Any, up: Any, down: Any) -> Any:
    """Both weights are gathered; nothing waits for the second one until the first has been multiplied."""
    return jnp.maximum(x @ gather(up), 0) @ gather(down)


def lone(x: Any, up: Any, down: Any) -> Any:
    return x @ gather(up)


def out_of_order(x: Any, up: Any, down: Any) -> Any:
    """The first weight has no chain, since what is done to it needs all of it."""
    return jnp.maximum(x @ lax.cumsum(gather(up), axis=1), 0) @ gather(down)


def gradients(x: Any, up: Any, down: Any) -> Any:
    """Each weight's gradient is summed; only the first sum has dots that do not wait for it."""
    hidden = x @ up
    y = hidden @ down
    return lax.psum(hidden.T @ y, "x"), lax.psum(x.T @ (y @ down.T), "x")


def looped(x: Any, up: Any, down: Any) -> Any:
    """Many dots in a loop, and a gather that does not wait for them."""

    def step(carry: Any, _: None) -> Any:
        return jnp.maximum(carry @ up @ down, 0), None

    return lax.scan(step, x, None, length=8)[0] @ gather(up)


def shapes_of(body: Callable[..., Any], devices: int) -> tuple[Any, Any, Any]:
    """Shapes of whole arguments, their specs, and that of the results."""
    shapes = ((devices * TOKENS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    if body is gradients:
        return shapes, (P("x"), P(), P()), P()
    if body is looped:
        return shapes, (P("x"), P(), P()), P("x")
    return shapes, (P("x"), P(None, "x"), P(None, "x")), P("x")


def sites(body: Callable[..., Any], hardware: str, policy: Any = "auto", shrunk: int = 1) -> tuple[Site, ...]:
    shapes, specs, out = shapes_of(body, 4)
    shapes = tuple(tuple(size // shrunk for size in shape) for shape in shapes)
    mapped = jax.shard_map(body, mesh=spmd.mesh_of(4), in_specs=specs, out_specs=out, check_vma=False)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return overlap_collectives(jax.jit(mapped), policy=policy, hardware=hardware).explain(*arguments).sites


def hidden_share(site: Site) -> float:
    assert site.estimate is not None
    return site.estimate.hidden_s / site.estimate.collective_s


@pytest.mark.parametrize("chip", ["tpu_v5e", "tpu_7x", "h100"])
def test_a_second_weight_is_gathered_beside_the_first_ones_dot(chip: str) -> None:
    first, second = sites(fsdp, chip, "never")
    assert hidden_share(first) == 0
    assert second.estimate is not None
    # All of it, but for what it stops a GPU for.
    stopped_s = by_name(chip).async_overhead_s
    assert hidden_share(second) == pytest.approx(1 - stopped_s / second.estimate.collective_s)
    assert second.estimate.original_s == pytest.approx(second.estimate.dot_s + stopped_s)


@pytest.mark.parametrize("chip", ["tpu_v4", "tpu_v5p", "tpu_v6e", "cpu"])
def test_where_collectives_run_alone_nothing_is_hidden(chip: str) -> None:
    assert all(hidden_share(site) == 0 for site in sites(fsdp, chip, "never"))


def test_what_is_alone_with_its_dots_is_not_hidden() -> None:
    (site,) = sites(lone, "tpu_7x", "never")
    assert hidden_share(site) == 0


def test_only_what_the_hardware_runs_beside_dots_is_hidden() -> None:
    """v5e's dots run all_gathers only; 7x and GPUs sum up beside dots that do not wait for the sum."""
    assert all(hidden_share(site) == 0 for site in sites(gradients, "tpu_v5e", "never"))
    for chip in ("tpu_7x", "h100"):
        first, second = sites(gradients, chip, "never")
        assert hidden_share(first) > 0
        assert hidden_share(second) == pytest.approx(0, abs=1e-9)


def test_gpus_exchange_beside_dots_too() -> None:
    def exchanged(x: Any, up: Any, down: Any) -> Any:
        return lax.all_to_all(x @ up, "x", 1, 0, tiled=True), 2 * x @ up

    for chip, hidden in (("h100", True), ("tpu_7x", False)):
        (site,) = (s for s in sites(exchanged, chip, "never") if s.kind == "dot_all_to_all")
        assert (hidden_share(site) > 0) == hidden


def test_a_ring_that_would_save_what_is_hidden_is_not_made() -> None:
    """On v6e, whose compiler hides nothing, the same program has it."""
    _, site = sites(out_of_order, "tpu_v5e")
    assert site.reason == "hidden_as_written"
    assert not site.rewritten
    assert "100% is hidden" in site.sentence
    _, site = sites(out_of_order, "tpu_v6e")
    assert site.reason == "profitable"


@pytest.mark.parametrize("chip", ["tpu_v5e", "tpu_7x"])
def test_beside_a_ring_nothing_is_hidden(chip: str) -> None:
    """With a ring for the first weight the second one's pays too; both save what is exposed as written."""
    first, second = sites(fsdp, chip)
    assert (first.reason, second.reason) == ("profitable", "profitable")
    assert "nothing would hide" in second.sentence
    assert first.estimate is not None
    assert second.estimate is not None
    dots_s = first.estimate.dot_s + second.estimate.dot_s
    rings_s = first.estimate.overlapped_s + second.estimate.overlapped_s
    saved_s = first.estimate.benefit_s + second.estimate.benefit_s
    assert saved_s == pytest.approx(first.estimate.collective_s + dots_s - rings_s)


def test_rings_that_lose_together_what_was_hidden_are_not_made() -> None:
    """Each gains beside the other, but the second weight is gathered beside the first one's dot as it is."""
    both = sites(fsdp, "tpu_v5e", shrunk=4)
    assert [(site.rewritten, site.reason) for site in both] == [(False, "not_profitable")] * 2
    assert all("all together gain too little" in site.sentence for site in both)
    first, _ = sites(fsdp, "tpu_v5e", lambda site: site.reason == "profitable", shrunk=4)
    assert first.reason == "policy_accepted"


def scattered(x: Any, up: Any, down: Any) -> Any:
    return lax.psum_scatter(x @ up, "x", scatter_dimension=1, tiled=True)


def beside_another(x: Any, up: Any, down: Any) -> Any:
    """The same, while a weight is gathered that has no chain."""
    return scattered(x, up, down) + lax.cumsum(gather(down), axis=1)[0, 0]


def test_rings_that_expose_what_is_none_are_not_made_if_that_loses_more() -> None:
    (alone,) = sites(scattered, "tpu_v5e")
    assert alone.reason == "profitable"
    ring, weight = sites(beside_another, "tpu_v5e")
    assert (ring.kind, weight.kind) == ("dot_reduce_scatter", "all_gather")
    assert ring.reason == "not_profitable"
    assert "all together gain too little" in ring.sentence
    (ring, _) = sites(beside_another, "tpu_v6e")
    assert ring.reason == "profitable"


def test_reductions_hide_collectives_too_on_tpus() -> None:
    """A norm's sums of the tokens are passes of their own over them."""

    def normed(x: Any, up: Any, down: Any) -> Any:
        return x / jnp.sum(x.astype(jnp.float32), 1, keepdims=True).astype(x.dtype) @ gather(up)

    assert hidden_share(sites(lone, "tpu_7x", "never")[0]) == 0
    assert 0 < hidden_share(sites(normed, "tpu_7x", "never")[0]) < 0.5
    assert hidden_share(sites(normed, "h100", "never")[0]) == 0


def test_a_users_policy_is_asked_once_for_each_chain() -> None:
    asked: list[Site] = []

    def policy(site: Site) -> bool:
        asked.append(site)
        return site.reason == "profitable"

    first, second = sites(fsdp, "tpu_v5e", policy)
    assert [site.reason for site in asked] == ["profitable", "hidden_as_written"]
    assert (first.reason, second.reason) == ("policy_accepted", "policy_declined")


def test_what_is_in_a_body_hides_nothing() -> None:
    (site,) = (site for site in sites(looped, "tpu_7x", "never") if site.kind == "all_gather_dot")
    assert hidden_share(site) == 0


def test_other_collectives_are_left_out() -> None:
    """Keys have no bytes to tell, and groups of different sizes no time."""

    def body(x: Any, up: Any, down: Any) -> Any:
        keys = lax.all_gather(jax.random.split(jax.random.key(lax.axis_index("x")), 2), "x")
        total = lax.psum(jnp.sum(x), "x", axis_index_groups=[[0], [1, 2, 3]])
        return fsdp(x, up, down) + jax.random.normal(keys[0, 0]).astype(x.dtype) + total

    reasons = [site.reason for site in sites(body, "tpu_7x")]
    assert sorted(reasons) == ["profitable", "profitable", "unsupported_dtype", "unsupported_groups"]


def test_sizes_not_yet_known_have_no_time() -> None:
    shapes, specs, out = shapes_of(fsdp, 4)
    mapped = jax.shard_map(fsdp, mesh=spmd.mesh_of(4), in_specs=specs, out_specs=out, check_vma=False)
    shapes = (jax.export.symbolic_shape(f"4*rows, {WIDTH}"), *shapes[1:])
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    found = overlap_collectives(jax.jit(mapped), hardware="tpu_7x", strict=True).explain(*arguments)
    assert {site.reason for site in found.sites} == {"symbolic_shape"}


SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from cost_model import Topology, by_name
from overlap import overlap_collectives, tpu_target
from overlap.hlo.parse import parse
from overlap.hlo.simulate import simulate
from tests.passes.test_hidden import fsdp, gradients, shapes_of

slice_name, chip = sys.argv[1:]
devices = np.array(tpu_target.devices(slice_name))
mesh, hardware = Mesh(devices, ("x",)), by_name(chip)
found = {}
for body in (fsdp, gradients):
    shapes, ins, out = shapes_of(body, devices.size)
    function = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, ins)
    ]
    estimates = [s.estimate for s in overlap_collectives(function, policy="never").explain(*arguments).sites]
    module = parse(function.lower(*arguments).compile().as_text())
    timeline = simulate(module, hardware, Topology.from_devices(devices, hardware))
    found[body.__name__] = (
        sum(e.collective_s for e in estimates), sum(e.hidden_s for e in estimates), timeline.exposed_s
    )
print(json.dumps(found))
"""


@needs_libtpu
@pytest.mark.parametrize(
    ("slice_name", "chip"), [("v5e:2x4", "tpu_v5e"), ("tpu7x:2x2x1", "tpu_7x"), ("v6e:2x4", "tpu_v6e")]
)
def test_compilers_leave_exposed_what_is_said(slice_name: str, chip: str) -> None:
    """The price of a sum on 7x has the copies around it, which the compiler may hide."""
    for name, (whole_s, hidden_s, exposed_s) in told_by(SCRIPT, slice_name, chip).items():
        assert whole_s - hidden_s == pytest.approx(exposed_s, rel=0.3), name


def test_what_a_later_ring_exposes_is_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third gather is hidden beside the rings of the first round, exposed beside those of the second.

    All together they lose, and so none is made in the end.
    """

    def multiplied(y: Any, w: Any) -> Any:
        return jnp.tanh(lax.all_gather(y, "x", axis=0, tiled=True) @ w.T @ w)[: y.shape[0]]

    def weighted(y: Any, w: Any) -> Any:
        return y @ lax.all_gather(w, "x", axis=0, tiled=True)

    def body(x: Any, *w: Any) -> Any:
        b, c = jnp.sin(x), jnp.cos(x)
        b = jnp.tanh(multiplied(x, w[0]))
        b = jnp.tanh(weighted(b, w[1]))
        b = jnp.tanh(multiplied(b, w[2]))
        c = jnp.tanh(multiplied(b, w[3]))
        return jnp.tanh(weighted(x, w[4])) + b + c

    mapped = jax.shard_map(
        body, mesh=spmd.mesh_of(4), in_specs=(P("x"),) * 6, out_specs=P("x"), check_vma=False
    )
    shapes = [(8192, 4096), *[(4096, 4096)] * 5]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def reasons() -> set[str]:
        overlapped = overlap_collectives(jax.jit(mapped), hardware="tpu_v5e", strict=True)
        return {site.reason for site in overlapped.explain(*arguments).sites}

    assert reasons() == {"not_profitable"}
    monkeypatch.setattr(decide, "_if_all_pay", lambda decisions, exposed_s, hardware: decisions)
    assert reasons() == {"profitable"}
