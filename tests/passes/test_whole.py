"""The whole program is tried with its rings, and keeps those that gain together."""

# mypy: allow-untyped-calls

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import passes
from cost_model import by_name
from passes import Code, Excerpt, RingSchedule, Trial
from passes.whole import Selection, tried_whole
from tests.passes import spmd

ONE, TWO = RingSchedule(directions=1), RingSchedule(directions=2)

SHAPES = ((32, 16), (16, 24), (24, 16))
SPECS = (P("x"), P(None, "x"), P("x"))


def layer(x: Any, w: Any, v: Any) -> Any:
    """A chain of each kind on one device."""
    h = jnp.tanh(lax.all_gather(x, "x", tiled=True) @ w)
    return lax.psum_scatter(h @ v, "x", tiled=True)


def program(x: Any, w: Any, v: Any) -> Any:
    """The layer on a mesh."""
    return jax.shard_map(layer, mesh=spmd.mesh_of(4), in_specs=SPECS, out_specs=P("x"))(x, w, v)


@dataclasses.dataclass
class Tried:
    """Tells of each chain what ``chains`` says, and takes of the whole program what ``take`` does.

    Attributes:
      take: from the selections that are proposed to the one taken; None for the program as written.
      chains: the trial of a chain.
      wholes: what the whole program was tried with.
    """

    take: Callable[[tuple[Selection, ...]], Selection | None]
    chains: Trial[RingSchedule]
    wholes: list[tuple[Excerpt[Selection], tuple[Selection, ...]]] = dataclasses.field(default_factory=list)

    def __call__(self, excerpt: Excerpt[Any], choices: tuple[Any, ...]) -> Trial[Any]:
        if not excerpt.whole:
            return self.chains
        self.wholes.append((excerpt, choices))
        return Trial(self.take(choices), 100e-6, 90e-6, "modelled")


LEAN = Trial(ONE, 100e-6, 80e-6, "modelled")
LARGER = Trial(ONE, 100e-6, 80e-6, "modelled", larger=TWO, larger_s=60e-6)
ONLY_LARGER: Trial[RingSchedule] = Trial(None, 100e-6, 60e-6, "modelled", larger=TWO, larger_s=60e-6)


def planned(
    tried: Tried,
    function: Callable[..., Any] = program,
    shapes: tuple[Any, ...] = SHAPES,
    predicted: passes.Policy = "auto",
    hardware: str = "tpu_v5p",
) -> passes.Plan:
    """The plan of a function under a policy that tries.

    Args:
      predicted: the policy whose rings are those of the cost model; "auto" has none at such small shapes.
      hardware: by name.
    """
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.jit(function).trace(*arguments).jaxpr
    plan = passes.make_plan(jaxpr, "verify", lambda kind: by_name(hardware), try_out=tried)
    model = passes.make_plan(jaxpr, predicted, lambda kind: by_name(hardware))
    return tried_whole(plan, model, tried)


def schedules(selection: Selection) -> list[RingSchedule]:
    """Of its rings, in program order."""
    return [schedule for _, _, schedule in selection.rings]


def first(selections: tuple[Selection, ...]) -> Selection:
    """The first one."""
    return selections[0]


def values(seed: int = 0) -> list[np.ndarray]:
    """Arguments of the program."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def exact(x: np.ndarray, w: np.ndarray, v: np.ndarray) -> Any:
    """What the program computes."""
    return np.tanh(x.astype(np.float64) @ w) @ v.astype(np.float64)


def test_all_rings_come_first_and_then_one_fewer() -> None:
    tried = Tried(first, LEAN)
    plan = planned(tried)
    ((_, selections),) = tried.wholes
    assert list(map(schedules, selections)) == [[ONE, ONE], [ONE], [ONE]]
    assert len(set(selections)) == 3
    assert [site.rewritten for site in passes.sites(plan)] == [True, True]
    assert {site.reason for site in passes.sites(plan)} == {str(Code.TRIED_FASTER)}


def pods(x: Any, w: Any) -> Any:
    """A sum over pods that is scattered inside each: the two change places where the scatter has a ring."""

    def body(x: Any, w: Any) -> Any:
        return lax.psum_scatter(lax.psum(x @ w, "pod"), "x", tiled=True)

    mesh = jax.make_mesh((2, 4), ("pod", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])
    specs = (P(None, ("pod", "x")), P(("pod", "x")))
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"))(x, w)


def test_what_the_model_turns_round_is_not_tried_where_the_trial_does_not() -> None:
    tried = Tried(first, Trial(None, 100e-6, 120e-6, "modelled"))
    plan = planned(tried, pods, ((8, 64), (64, 8)), predicted="always")
    assert not tried.wholes
    assert [site.kind for site in passes.sites(plan)] == ["dot_psum", "reduce_scatter"]
    assert {site.rewritten for site in passes.sites(plan)} == {False}


def test_what_the_trial_turns_round_is_tried_as_such() -> None:
    tried = Tried(first, LEAN)
    plan = planned(tried, pods, ((8, 64), (64, 8)), predicted="never")
    ((excerpt, (selection,)),) = tried.wholes
    assert [(site.kind, site.rewritten) for site in passes.sites(plan)] == [
        ("dot_reduce_scatter", True),
        ("psum", False),
    ]
    x, w = (np.random.default_rng(1).normal(size=size).astype(np.float32) for size in ((8, 64), (64, 8)))
    for function in (excerpt.original, excerpt.version(selection)):
        np.testing.assert_allclose(function(x, w)[0], x.astype(np.float64) @ w, atol=1e-4)


def test_larger_rings_come_before_the_lean_ones() -> None:
    tried = Tried(first, LARGER)
    plan = planned(tried)
    ((_, selections),) = tried.wholes
    assert list(map(schedules, selections))[:4] in (
        [[TWO, TWO], [ONE, TWO], [TWO, ONE], [ONE, ONE]],
        [[TWO, TWO], [TWO, ONE], [ONE, TWO], [ONE, ONE]],
    )
    assert len(selections) == 6
    assert [site.schedule for site in passes.sites(plan)] == [str(TWO)] * 2
    assert all("needs more memory, and not within the program" in s.sentence for s in passes.sites(plan))


def test_a_ring_that_is_larger_only_can_be_taken_for_the_program() -> None:
    tried = Tried(first, ONLY_LARGER)
    plan = planned(tried)
    assert [site.rewritten for site in passes.sites(plan)] == [True, True]
    run = jax.jit(passes.rewritten(plan))
    given = values()
    assert str(run.trace(*given).jaxpr).count("ppermute") > 0
    np.testing.assert_allclose(run(*given)[0], exact(*given), atol=1e-4)


CLOSE: Trial[RingSchedule] = Trial(ONE, 100e-6, 80e-6, "measured", nearly=TWO, nearly_s=81e-6)


def test_rings_hardly_slower_by_themselves_are_tried_together_on_cpu_devices() -> None:
    tried = Tried(lambda selections: selections[1], CLOSE)
    plan = planned(tried, hardware="cpu")
    ((_, selections),) = tried.wholes
    assert list(map(schedules, selections)) == [[ONE, ONE], [TWO, TWO], [ONE], [ONE]]
    assert [site.schedule for site in passes.sites(plan)] == [str(TWO)] * 2
    assert all("another ring is faster, and not within" in site.sentence for site in passes.sites(plan))
    given = values()
    np.testing.assert_allclose(jax.jit(passes.rewritten(plan))(*given)[0], exact(*given), atol=1e-4)


def test_on_devices_that_run_a_program_in_order_the_second_ring_is_not_tried() -> None:
    tried = Tried(first, CLOSE)
    planned(tried)
    ((_, selections),) = tried.wholes
    assert list(map(schedules, selections)) == [[ONE, ONE], [ONE], [ONE]]


NOTHING: Trial[RingSchedule] = Trial(None, 100e-6, 110e-6, "modelled")


def test_the_rings_of_the_cost_model_are_compared_with_the_fastest_of_each_chain() -> None:
    tried = Tried(lambda selections: selections[1], Trial(TWO, 100e-6, 80e-6, "modelled"))
    plan = planned(tried, predicted="always")
    ((whole, selections),) = tried.wholes
    assert whole.compared == 2
    assert schedules(selections[0]) == [TWO, TWO]
    assert len(selections[1].rings) == 2
    assert TWO not in schedules(selections[1])
    sites = passes.sites(plan)
    assert [site.schedule for site in sites] == list(map(str, schedules(selections[1])))
    assert {site.reason for site in sites} == {str(Code.TRIED_FASTER)}
    assert all("Of the program: Modelled: 100 µs as written, 90 µs" in site.sentence for site in sites)
    given = values()
    np.testing.assert_allclose(jax.jit(passes.rewritten(plan))(*given)[0], exact(*given), atol=1e-4)


def test_the_rings_of_the_cost_model_are_tried_where_no_chain_gained_by_itself() -> None:
    tried = Tried(first, NOTHING)
    plan = planned(tried, predicted="always")
    ((whole, selections),) = tried.wholes
    assert whole.compared == len(selections) == 1
    assert [site.rewritten for site in passes.sites(plan)] == [True, True]
    assert not planned(Tried(first, NOTHING)).changes


def test_what_the_cost_model_would_have_chosen_too_is_compiled_once() -> None:
    def chosen(excerpt: Excerpt[Any], choices: tuple[Any, ...]) -> Trial[Any]:
        if excerpt.whole:
            compared.append(excerpt.compared)
        return Trial(choices[0], 100e-6, 80e-6, "modelled")

    compared: list[int] = []
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]
    jaxpr = jax.jit(program).trace(*arguments).jaxpr
    plan = passes.make_plan(jaxpr, "verify", lambda kind: by_name("tpu_v5p"), try_out=chosen)
    assert tried_whole(plan, plan, chosen).changes
    assert compared == [1]


def test_larger_rings_alone_are_not_run_where_they_do_not_fit() -> None:
    plan = planned(Tried(lambda _: None, ONLY_LARGER))
    assert not plan.changes
    assert {site.reason for site in passes.sites(plan)} == {str(Code.TRIED_SLOWER)}


@pytest.mark.parametrize("taken", [1, 2])
def test_a_ring_given_up_is_kept_with_a_reason_and_the_rest_runs(taken: int) -> None:
    tried = Tried(lambda selections: selections[taken], LEAN)
    plan = planned(tried)
    ((_, selections),) = tried.wholes
    sites = passes.sites(plan)
    kept = [site for site in sites if not site.rewritten]
    assert [site.reason for site in kept] == [str(Code.TRIED_TOGETHER)]
    assert "Modelled: 100 µs as written, 90 µs as the best tried." in kept[0].sentence
    assert sum(site.rewritten for site in sites) == len(selections[taken].rings) == 1
    given = values()
    np.testing.assert_allclose(jax.jit(passes.rewritten(plan))(*given)[0], exact(*given), atol=1e-4)


def test_nothing_is_rewritten_where_no_selection_gains() -> None:
    plan = planned(Tried(lambda _: None, LEAN))
    assert not plan.changes
    assert {site.reason for site in passes.sites(plan)} == {str(Code.TRIED_TOGETHER)}


def test_the_program_stays_as_planned_where_it_cannot_be_compiled() -> None:
    tried = Tried(first, LEAN)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]
    plan = passes.make_plan(
        jax.jit(program).trace(*arguments).jaxpr, "verify", lambda kind: by_name("tpu_v5p"), try_out=tried
    )
    assert plan.changes
    assert tried_whole(plan, plan, lambda program, choices: None) is plan


def test_the_program_is_given_as_written_and_as_chosen_on_sharded_arguments() -> None:
    tried = Tried(first, LEAN)
    planned(tried, lambda x, w, v, c: program(x, w, v) * c, (*SHAPES, (32, 16)))
    ((whole, selections),) = tried.wholes
    assert [argument.sharding and argument.sharding.spec for argument in whole.arguments] == [*SPECS, None]
    assert whole.mesh is spmd.mesh_of(4) or whole.mesh == spmd.mesh_of(4)
    given = [*values(), np.full((32, 16), 2.0, np.float32)]
    hops = []
    for version in (whole.original, *map(whole.version, selections)):
        hops.append(str(version.trace(*whole.arguments).jaxpr).count("ppermute"))  # type: ignore[attr-defined]
        np.testing.assert_allclose(version(*given)[0], 2 * exact(*given[:3]), atol=1e-4)
    assert hops[0] == 0
    assert hops[1] == hops[2] + hops[3]
    assert min(hops[1:]) > 0


def test_a_program_of_one_chain_is_tried_as_a_program_too() -> None:
    def gather(x: Any, w: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            return lax.all_gather(x, "x", tiled=True) @ w

        mapped = jax.shard_map(body, mesh=spmd.mesh_of(4), in_specs=SPECS[:2], out_specs=P(None, "x"))
        return mapped(x, w)

    tried = Tried(first, LEAN)
    assert planned(tried, gather, SHAPES[:2]).changes
    ((_, selections),) = tried.wholes
    assert list(map(schedules, selections)) == [[ONE]]
    assert not planned(Tried(lambda _: None, LEAN), gather, SHAPES[:2]).changes


def test_rings_in_the_body_of_a_loop_are_found_and_given_up() -> None:
    def looped(x: Any, w: Any, v: Any) -> Any:
        def body(x: Any, w: Any, v: Any) -> Any:
            return lax.scan(lambda x, _: (layer(x, w, v), None), x, None, length=3)[0]

        return jax.shard_map(body, mesh=spmd.mesh_of(4), in_specs=SPECS, out_specs=P("x"))(x, w, v)

    tried = Tried(lambda selections: selections[1], LEAN)
    plan = planned(tried, looped)
    assert sum(site.rewritten for site in passes.sites(plan)) == 1
    given = values()
    wanted = given[0]
    for _ in range(3):
        wanted = exact(wanted, *given[1:])
    np.testing.assert_allclose(jax.jit(passes.rewritten(plan))(*given)[0], wanted, atol=1e-3)


def test_chains_that_share_a_dot_do_not_both_take_it() -> None:
    def body(x: Any, w: Any) -> Any:
        # Both operands of the dot are gathered: it can be in the ring of one of them.
        return lax.all_gather(x, "x", tiled=True) @ lax.all_gather(w, "x", tiled=True)

    def both(x: Any, w: Any) -> Any:
        mapped = jax.shard_map(
            body, mesh=spmd.mesh_of(4), in_specs=(P("x"), P("x")), out_specs=P(), check_vma=False
        )
        return mapped(x, w)

    for chains in (LEAN, LARGER, ONLY_LARGER):
        tried = Tried(first, chains)
        plan = planned(tried, both, SHAPES[:2])
        assert [len(selection.rings) for selection in tried.wholes[0][1]] == [1] * len(tried.wholes[0][1])
        assert sum(site.rewritten for site in passes.sites(plan)) == 1
        x, w = values()[:2]
        np.testing.assert_allclose(jax.jit(passes.rewritten(plan))(x, w)[0], x @ w, atol=1e-4)


def test_no_more_than_so_many_selections_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("passes.whole.MOST", 2)
    tried = Tried(first, LARGER)
    planned(tried)
    assert len(tried.wholes[0][1]) == 2
