"""Which chains become rings: competition for dots, rings that wait for one another, policies, determinism."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import overlap
import passes
from cost_model import Hardware, by_name
from passes import Site
from tests.passes import bodies, spmd

RNG = np.random.default_rng(0)
P = PartitionSpec
OVER_X = P("x")
V5P = "tpu_v5p"


def wide(array: Any) -> Any:
    return np.asarray(array, np.float64)


def gather(x: Any, dim: int = 0, axis: str = "x") -> Any:
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def scatter(y: Any, dim: int = 0) -> Any:
    return lax.psum_scatter(y, "x", scatter_dimension=dim, tiled=True)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def mapped(body: Any, mesh: Any, *specs: Any, out: Any = OVER_X) -> Any:
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))


def two_axes() -> Any:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def explained(
    jitted: Any, *shapes: tuple[int, ...], policy: Any = "always", dtype: Any = jnp.bfloat16
) -> tuple[Site, ...]:
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    overlapped = overlap.overlap_collectives(jitted, policy=policy, strict=True, hardware=V5P)
    return tuple(overlapped.explain(*args).sites)


def assert_winner(sites: tuple[Site, ...], winner: int) -> None:
    """One of two sites has the dot, and it is the one of larger predicted benefit."""
    won, lost = sites[winner], sites[1 - winner]
    assert won.rewritten and won.reason == "policy_always"
    assert not lost.rewritten and lost.reason == "dot_taken"
    assert won.estimate is not None and lost.estimate is not None
    assert won.estimate.benefit_s > lost.estimate.benefit_s
    assert "test_decide.py" in lost.sentence


# Two chains and one dot.

WIDE_X = ((8192, 1024), (1024, 512))
WIDE_W = ((512, 1024), (1024, 8192))


def both_gathered(x: Any, w: Any) -> Any:
    """x is gathered on its rows, w on its columns."""
    return gather(x) @ gather(w, 1)


def both_gathered_on_two_axes(x: Any, w: Any) -> Any:
    return gather(x) @ gather(w, 1, "y")


@pytest.mark.parametrize(("shapes", "winner"), [(WIDE_X, 0), (WIDE_W, 1)], ids=["x", "w"])
@pytest.mark.parametrize("axes", ["same", "different"])
def test_of_two_gathers_of_one_dot_the_one_of_larger_benefit_has_it(
    axes: str, shapes: Any, winner: int
) -> None:
    if axes == "same":
        jitted = mapped(both_gathered, spmd.mesh_of(4), P("x"), P(None, "x"))
    else:
        jitted = mapped(both_gathered_on_two_axes, two_axes(), P("x"), P(None, "y"))
    assert_winner(explained(jitted, *shapes), winner)


@pytest.mark.parametrize("policy", ["always", "never"])
@pytest.mark.parametrize(("rows", "columns"), [(3, 2), (1, 7)])
@pytest.mark.parametrize("axes", ["same", "different"])
def test_two_gathers_of_one_dot_give_the_right_values(
    axes: str, rows: int, columns: int, policy: Any
) -> None:
    if axes == "same":
        jitted = mapped(both_gathered, spmd.mesh_of(4), P("x"), P(None, "x"))
        copies = 4
    else:
        jitted = mapped(both_gathered_on_two_axes, two_axes(), P("x"), P(None, "y"))
        copies = 2
    x, w = normal(4 * rows, 5), normal(5, 4 * columns)
    overlapped = overlap.overlap_collectives(jitted, policy=policy, strict=True, hardware=V5P)
    assert sum(site.rewritten for site in overlapped.explain(x, w).sites) == (policy == "always")
    exact = np.tile(wide(x) @ w, (copies, 1))
    np.testing.assert_allclose(overlapped(x, w), exact, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("k_to_n", "winner"), [((8192, 1024), 0), ((1024, 8192), 1)], ids=["gather", "scatter"]
)
def test_of_a_gather_and_a_scatter_of_one_dot_the_one_of_larger_benefit_has_it(
    k_to_n: Any, winner: int
) -> None:
    k, n = k_to_n
    jitted = mapped(lambda x, w: scatter(gather(x) @ w), spmd.mesh_of(4), P("x"), P())
    sites = explained(jitted, (8192, k), (k, n), dtype=jnp.float32)
    assert [site.kind for site in sites] == ["all_gather_dot", "dot_reduce_scatter"]
    assert_winner(sites, winner)


def test_a_gather_and_a_scatter_of_one_dot_give_the_right_values() -> None:
    x, w = normal(4, 3, 5), normal(4, 5, 6)
    outcome = spmd.run_both(lambda x, w: scatter(gather(x) @ w), (x, w))
    assert sorted(site.reason for site in outcome.report.sites) == ["dot_taken", "policy_always"]
    g = np.concatenate(list(wide(x)))
    spmd.assert_as_good(outcome, spmd.psum_scatter([g @ b for b in wide(w)], 0))


def test_a_chain_that_loses_one_of_its_dots_keeps_the_others() -> None:
    x, w, y = normal(4, 3, 5), normal(4, 5, 2), normal(4, 2, 5)

    def body(x: Any, w: Any, y: Any) -> Any:
        columns = gather(w, 1)
        return gather(x) @ columns, y @ columns

    def spread(x: Any, w: Any, y: Any) -> Any:
        first, second = body(x, w, y)
        return first + second.sum(0)

    jitted = mapped(body, spmd.mesh_of(4), P("x"), P(None, "x"), P(), out=(P("x"), P("x")))
    sites = explained(jitted, (32768, 4096), (4096, 256), (512, 4096))
    assert all(site.rewritten for site in sites)
    (rows,) = (site for site in sites if site.result.startswith("bf16[32768"))
    (columns,) = (site for site in sites if site is not rows)
    assert [dot.split(" · ")[0] for site in (rows, columns) for dot in site.dots] == [
        "bf16[32768,4096]",
        "bf16[512,4096]",
    ]
    outcome = spmd.run_both(spread, (x, w, y))
    assert any(site.rewritten for site in outcome.report.sites)
    g, whole = np.concatenate(list(wide(x))), np.concatenate(list(wide(w)), 1)
    spmd.assert_as_good(outcome, [g @ whole + (b @ whole).sum(0) for b in wide(y)])


def test_a_chain_that_is_declined_leaves_its_dot_to_the_other() -> None:
    x, w = normal(4, 3, 5), normal(4, 5, 6)
    outcome = spmd.run_both(
        lambda x, w: scatter(gather(x) @ w), (x, w), policy=lambda site: site.kind == "dot_reduce_scatter"
    )
    gathered, scattered = outcome.report.sites
    assert not gathered.rewritten and gathered.reason in ("policy_declined", "dot_taken")
    assert scattered.rewritten and scattered.reason == "policy_accepted"
    outcome = spmd.run_both(
        lambda x, w: scatter(gather(x) @ w), (x, w), policy=lambda site: site.kind == "all_gather_dot"
    )
    gathered, scattered = outcome.report.sites
    assert gathered.rewritten and not scattered.rewritten


# Rings that wait for one another.


def circle(a: Any, b: Any, w: Any, v: Any) -> Any:
    """The ring of a has a dot that needs the ring of b, and the other way round."""
    ga, gb = gather(a), gather(b)
    a1, b1 = ga @ w, gb @ v
    a2 = ga @ jnp.tanh(b1[:5])
    b2 = gb @ jnp.sin(a1[:5])
    return a1 + b1 + a2 + b2


def test_of_two_rings_that_wait_for_one_another_one_is_given_up() -> None:
    a, b, w, v = normal(4, 3, 5), normal(4, 3, 5), normal(4, 5, 6), normal(4, 5, 6)
    outcome = spmd.run_both(circle, (a, b, w, v))
    first, second = outcome.report.sites
    assert sorted([first.reason, second.reason]) == ["depends_on_itself", "policy_always"]
    kept, given_up = (first, second) if first.rewritten else (second, first)
    assert kept.rewritten and not given_up.rewritten and "another ring" in given_up.sentence
    ga, gb = (np.concatenate(list(wide(x))) for x in (a, b))
    exact = []
    for x, y in zip(wide(w), wide(v), strict=True):
        a1, b1 = ga @ x, gb @ y
        exact.append(a1 + b1 + ga @ np.tanh(b1[:5]) + gb @ np.sin(a1[:5]))
    spmd.assert_as_good(outcome, exact)


def test_of_rings_that_wait_for_one_another_the_one_of_least_benefit_is_given_up() -> None:
    def body(a: Any, b: Any, w: Any, v: Any) -> Any:
        ga, gb = gather(a), gather(b)
        a1, b1 = ga @ w, gb @ v
        return a1, b1, ga @ jnp.tanh(b1[: ga.shape[1]]), gb @ jnp.sin(a1[: gb.shape[1]])

    def losers(ka: int, kb: int) -> list[int]:
        jitted = mapped(body, spmd.mesh_of(4), P("x"), P("x"), P(), P())
        sites = explained(jitted, (16384, ka), (16384, kb), (ka, 4096), (kb, 4096))
        assert sum(site.rewritten for site in sites) == 1
        benefits = [site.estimate.benefit_s for site in sites if site.estimate is not None]
        (loser,) = (i for i, site in enumerate(sites) if not site.rewritten)
        assert benefits[loser] == min(benefits)
        return [loser]

    assert losers(4096, 1024) == [1]
    assert losers(1024, 4096) == [0]


# Policies.


def gathers_of_three_kinds(x: Any, w: Any, y: Any) -> Any:
    """One gather with a dot that is large, one with a dot that is small, and one without."""
    return gather(x) @ w, gather(y) @ w[:8, :8], gather(y)[::-1]


THREE = ((16384, 4096), (4096, 4096), (32, 8))


def three(policy: Any) -> tuple[Site, ...]:
    jitted = mapped(gathers_of_three_kinds, spmd.mesh_of(4), P("x"), P(), P("x"))
    return explained(jitted, *THREE, policy=policy)


def test_never_keeps_every_chain() -> None:
    sites = three("never")
    assert [site.rewritten for site in sites] == [False] * 3
    assert [site.reason for site in sites][:2] == ["policy_never"] * 2
    assert all(site.estimate is not None for site in sites[:2])


def test_always_takes_every_chain_whatever_its_benefit() -> None:
    sites = three("always")
    assert [site.rewritten for site in sites] == [True, True, False]
    benefits = [site.estimate.benefit_s for site in sites[:2] if site.estimate is not None]
    assert benefits[0] > 0 > benefits[1]


def given(hardware: Hardware, kind: str | None) -> Hardware:
    """The same hardware for every kind of device."""
    return hardware


def test_verify_asks_as_much_as_auto_of_what_it_cannot_compile() -> None:
    """Of chains that are not alone in their program more may be asked."""
    careful = dataclasses.replace(by_name("tpu_v4"), least_gain=0.0, least_gain_beside=0.99)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 1024), (1024, 8192)))

    def body(x: Any, w: Any) -> Any:
        return gather(x) @ w, gather(2 * x) @ w

    jaxpr = mapped(body, spmd.mesh_of(4), OVER_X, P(), out=P()).trace(x, w).jaxpr
    for hardware, rewritten in ((careful, False), (dataclasses.replace(careful, least_gain_beside=0), True)):
        for policy in ("auto", "verify"):
            sites = passes.sites(passes.make_plan(jaxpr, policy, partial(given, hardware)))
            assert [site.rewritten for site in sites] == [rewritten] * 2


def test_auto_takes_no_ring_that_is_predicted_to_need_more_memory() -> None:
    """Two large dots that contract one gathered array: each would keep its float32 sum in main memory.

    Since that array is needed whole too, they are not cut into columns, which would keep less.
    """

    def body(x: Any, w: Any, v: Any) -> Any:
        whole = lax.all_gather(x, "x", axis=1, tiled=True)
        return whole @ w, whole @ v, whole

    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8192, 8192), (8192, 16384))]
    across, specs = P(None, "x"), (P(None, "x"),) * 3
    jaxpr = mapped(body, spmd.mesh_of(4), *specs, out=(across,) * 3).trace(*arrays, arrays[1]).jaxpr
    (site,) = passes.sites(passes.make_plan(jaxpr, "auto", partial(given, by_name("tpu_v5p"))))
    assert site.estimate is not None and site.estimate.benefit_s > 0.03 * site.estimate.original_s
    assert site.estimate.added_bytes > 8192 * 4096 * 4
    assert (site.rewritten, site.reason) == (False, "not_profitable")
    assert "more temporary memory" in site.sentence
    (site,) = passes.sites(passes.make_plan(jaxpr, "always", partial(given, by_name("tpu_v5p"))))
    assert site.rewritten


def test_auto_takes_just_the_chains_that_are_predicted_to_gain() -> None:
    sites = three("auto")
    assert [(site.rewritten, site.reason) for site in sites[:2]] == [
        (True, "profitable"),
        (False, "not_profitable"),
    ]
    assert not sites[2].rewritten
    for site in sites[:2]:
        assert site.estimate is not None and site.rewritten == (site.estimate.benefit_s > 0)


@pytest.mark.parametrize("wanted", ["f32[12,5]", "f32[12,4]"])
def test_a_callable_policy_is_asked_about_every_chain_and_obeyed(wanted: str) -> None:
    x, y, w, v = normal(4, 3, 5), normal(4, 3, 4), normal(4, 5, 6), normal(4, 4, 6)
    asked: list[Site] = []

    def policy(site: Site) -> bool:
        assert not site.rewritten
        asked.append(site)
        return site.result == wanted

    def body(x: Any, y: Any, w: Any, v: Any) -> Any:
        return gather(x) @ w + gather(y) @ v + gather(y)[::-1].sum()

    outcome = spmd.run_both(body, (x, y, w, v), policy=policy)
    assert {site.result for site in asked} == {"f32[12,5]", "f32[12,4]"}
    assert {site.kind for site in asked} == {"all_gather_dot"}
    assert all(site.dots and site.schedule and site.estimate is not None and site.source for site in asked)
    # It is told what the cost model alone would decide.
    assert {site.reason for site in asked} == {"not_profitable"}
    chains = [site for site in outcome.report.sites if site.dots]
    assert [site.rewritten for site in chains] == [site.result == wanted for site in chains]
    assert {site.reason for site in chains} == {"policy_accepted", "policy_declined"}
    gx, gy = (np.concatenate(list(wide(a))) for a in (x, y))
    exact = [gx @ a + gy @ b + gy.sum() for a, b in zip(wide(w), wide(v), strict=True)]
    spmd.assert_as_good(outcome, exact)


def plan_without_hardware(policy: Any) -> tuple[Site, ...]:
    x, w = normal(3, 5), normal(5, 6)
    jaxpr = bodies.shard_body(lambda x, w: gather(x) @ w, x, w)
    return tuple(passes.sites(passes.make_plan(jaxpr, policy, lambda *_: None)))


def test_on_unknown_hardware_auto_keeps_the_site_and_says_so() -> None:
    (site,) = plan_without_hardware("auto")
    assert not site.rewritten and site.reason == "unknown_hardware" and site.estimate is None


def test_on_unknown_hardware_the_other_policies_are_obeyed() -> None:
    seen: list[Site] = []
    assert [s.reason for s in plan_without_hardware("always") if s.rewritten] == ["policy_always"]
    assert [s.reason for s in plan_without_hardware("never") if not s.rewritten] == ["policy_never"]

    def accept(site: Site) -> bool:
        seen.append(site)
        return True

    (site,) = plan_without_hardware(accept)
    assert site.rewritten and site.reason == "policy_accepted"
    assert seen[0].estimate is None


# Every process decides alike.


def decisions() -> str:
    """What is decided about programs with ties and circles, as JSON."""

    def ties(x: Any, w: Any) -> Any:
        return gather(x) @ gather(w, 1) + gather(x) @ gather(w, 1)

    programs = [
        (mapped(ties, spmd.mesh_of(4), P("x"), P(None, "x")), [(64, 64), (64, 64)]),
        (mapped(circle, spmd.mesh_of(4), P("x"), P("x"), P(), P()), [(64, 5), (64, 5), (5, 8), (5, 8)]),
        (mapped(gathers_of_three_kinds, spmd.mesh_of(4), P("x"), P(), P("x")), list(THREE)),
    ]
    sites = [site for jitted, shapes in programs for site in explained(jitted, *shapes)]
    fields = ("kind", "dots", "rewritten", "reason", "schedule", "source")
    return json.dumps([[str(getattr(site, field)) for field in fields] for site in sites])


@pytest.mark.parametrize("seed", ["1", "271828"])
def test_another_process_with_another_hash_seed_decides_alike(seed: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", "from tests.passes.test_decide import decisions; print(decisions())"],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    here = json.loads(decisions())
    assert json.loads(done.stdout) == here
    assert {reason for _, _, _, reason, *_ in here} >= {"dot_taken", "depends_on_itself", "policy_always"}


def test_a_gain_that_is_too_small_is_told_with_what_it_should_be() -> None:
    hardware = dataclasses.replace(by_name("tpu_v5p"), least_gain=0.9)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def body(x: Any, w: Any) -> Any:
        return lax.all_gather(x, "x", tiled=True) @ w

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(PartitionSpec("x"), PartitionSpec()), out_specs=PartitionSpec(None, "x")
    )
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16384, 8192), (8192, 4096)))
    (site,) = overlap.overlap_collectives(mapped, hardware=hardware).explain(x, w).sites
    assert site.reason == "not_profitable" and site.estimate is not None
    gain = site.estimate.benefit_s / site.estimate.original_s
    assert f"It would gain {gain:.1%}, less than the 90% that a prediction may be off." in site.sentence
