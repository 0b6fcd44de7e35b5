"""What is made again rather than kept for the backward pass: which values, for whom, to the same results."""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cost_model import by_name
from overlap import overlap_collectives
from passes.chains import Chain
from passes.graph import Dataflow
from passes.made_again import MadeAgain, made_again
from tests.libtpu import needs_libtpu
from tests.passes import bodies, spmd
from tests.passes.tpu_process import told_by

ROWS, WIDTH, HIDDEN = 4, 6, 10
SPECS = (P("x"), *(P(None, "x"), P("x")) * 2)
V5P = by_name("tpu_v5p")

Activation = Callable[[Any], Any]


def mlp(activation: Activation) -> Callable[..., Any]:
    """The loss of layers, given the weights of each: up and down."""

    def loss(x: Any, *weights: Any) -> Any:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            hidden = activation(lax.all_gather(x, "x", axis=0, tiled=True) @ up)
            x = lax.psum_scatter(hidden @ down, "x", scatter_dimension=0, tiled=True)
        return jnp.mean(x * x)

    return loss


def silu(h: Any) -> Any:
    return h / (1 + jnp.exp(-h))


def within(activation: Activation, layers: int = 2) -> tuple[Dataflow, list[Chain]]:
    """The body whose forward and backward pass are in one shard_map, and its chains."""
    shapes = ((ROWS, WIDTH), *((WIDTH, HIDDEN), (HIDDEN, WIDTH)) * layers)
    shards = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    body = jax.grad(mlp(activation), tuple(range(len(shapes))))
    flow, matches = bodies.matched(body, *shards, axis_size=2, check_vma=False)
    return flow, [match.found[0] for match in matches if isinstance(match.found, tuple)]


def names(flow: Dataflow, found: MadeAgain) -> list[str]:
    return sorted(flow.ops[op].name for op in set(found.makers.values()))


def found_for(flow: Dataflow, chains: list[Chain], rings: int) -> MadeAgain:
    """What is made again if the second chain, or the first ones, are rings."""
    ringed = chains[1:2] if rings == 1 else chains[:rings]
    return made_again(flow, ringed, [chain for chain in chains if chain not in ringed], {})


def test_an_activation_and_its_derivative_are_made_again_of_the_dot_s_result() -> None:
    flow, chains = within(silu)
    scatter = chains[1]
    assert scatter.kind == "dot_reduce_scatter"
    found = found_for(flow, chains, 1)
    (root,) = found.roots
    assert flow.ops[flow.producer[root]].name == "dot_general"
    (activation,) = (v for v in flow.ops[scatter.dots[0].op].inputs if v in found.makers)
    forward = [op for op in flow.live if op < scatter.collective.op]
    assert {op for op in forward if flow.ops[op].name in ("exp", "neg")} <= set(found.makers.values())
    assert max(found.makers.values()) < chains[2].collective.op
    # The weight's gradient reads the activation, and what multiplies the gradient that comes back the rest.
    assert all(reader > scatter.collective.op for reader in found.readers)
    assert isinstance(activation, int)
    readers = {flow.ops[user].name for user in flow.users[activation] if user in found.readers}
    assert readers & {"dot_general", "transpose"}
    assert not found.results


def test_what_a_later_ring_reads_is_made_again_for_it() -> None:
    flow, chains = within(silu)
    alone = found_for(flow, chains, 1)
    found = found_for(flow, chains, len(chains))
    (activation,) = (v for v in flow.ops[chains[1].dots[0].op].inputs if v in alone.makers)
    assert activation in found.makers
    assert found.makers.keys() == alone.makers.keys()
    in_rings = {op for chain in chains for op in chain.members}
    assert found.readers & in_rings
    assert not found.readers & {op for chain in chains[:2] for op in chain.members}


def scattered(y: Any) -> Any:
    return lax.psum_scatter(y, "x", scatter_dimension=0, tiled=True)


def sums_of(body: Callable[..., Any]) -> tuple[Dataflow, list[Chain]]:
    """A body given x [4, 6], up [6, 10] and down [10, 6], and its chains."""
    shards = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 6), (6, 10), (10, 6))]
    flow, matches = bodies.matched(body, *shards, axis_size=2, check_vma=False)
    return flow, [match.found[0] for match in matches if isinstance(match.found, tuple)]


def test_what_dots_read_before_a_ring_of_the_backward_pass_does_is_made_again() -> None:
    def body(x: Any, up: Any, down: Any) -> Any:
        normal = jnp.sin(x)
        y = scattered(normal @ up @ down)
        return scattered(y.T @ y), normal

    flow, chains = sums_of(body)
    _, normal = flow.outputs
    assert isinstance(normal, int)
    found = made_again(flow, chains, (), {normal: True})
    assert found.results == {normal}
    assert names(flow, found) == ["sin"]
    assert not made_again(flow, chains, (), {normal: False}).makers
    assert not made_again(flow, [], chains, {normal: True}).makers

    def within(x: Any, up: Any, down: Any) -> Any:
        normal = jnp.sin(x)
        y = scattered(normal @ up @ down)
        z = scattered(y.T @ y)
        return scattered(lax.dot_general(normal, jnp.concatenate([z, z[:1]]), (((0,), (0,)), ((), ()))))

    flow, chains = sums_of(within)
    found = made_again(flow, chains, (), {})
    assert names(flow, found) == ["sin"]
    assert found.readers == {chains[-1].dots[0].op}


def test_what_one_sum_comes_after_is_not_made_again_for_a_ring() -> None:
    def body(x: Any, up: Any, down: Any) -> Any:
        normal = jnp.sin(x)
        return scattered(normal @ up @ down), normal

    flow, chains = sums_of(body)
    _, normal = flow.outputs
    assert isinstance(normal, int)
    assert not made_again(flow, chains, (), {normal: True}).makers


def test_nothing_is_made_again_where_that_spares_nothing() -> None:
    """Of a relu there are the activation, as large as what it is made of, and a mask, which is kept."""
    flow, chains = within(jax.nn.relu)
    assert found_for(flow, chains, 1) == MadeAgain()


def test_a_mask_is_kept_and_not_what_it_is_made_of() -> None:
    def body(x: Any, up: Any, down: Any) -> Any:
        h = x @ up
        mask = (x @ (up + 1)) > 0
        a = lax.select(mask, jnp.sin(h), 0 * h)
        y = scattered(a @ down)
        return scattered(y.T @ y), a, lax.select(mask, jnp.cos(h), 0 * h)

    flow, (ring, other) = sums_of(body)
    rings, kept = [ring], [other]
    later = {value for value in flow.outputs[1:] if isinstance(value, int)}
    found = made_again(flow, rings, kept, dict.fromkeys(later, False))
    assert found.results == later
    makers = {flow.ops[flow.producer[root]].name: flow.avals[root].dtype.name for root in found.roots}
    assert makers == {"dot_general": "float32", "gt": "bool"}


def test_nothing_is_made_again_without_a_ring_of_a_sum() -> None:
    flow, chains = within(silu)
    assert made_again(flow, chains[:1], chains[1:], {}) == MadeAgain()
    assert made_again(flow, (), chains, {}) == MadeAgain()


def test_what_the_backward_pass_begins_with_is_not_made_again() -> None:
    flow, chains = within(silu)
    last = [chain for chain in chains if chain.kind == "dot_reduce_scatter"][1]
    others = [chain for chain in chains if chain is not last]
    assert not made_again(flow, [last], others, {}).makers
    flow, chains = within(silu, layers=1)
    assert not found_for(flow, chains, 1).makers


def test_nothing_is_made_again_where_dots_read_a_dot_s_result_or_an_argument() -> None:
    flow, chains = within(lambda h: h)
    assert not found_for(flow, chains, 1).makers


def test_results_are_made_again_if_they_are_read_later() -> None:
    def body(x: Any, up: Any, down: Any) -> Any:
        h = x @ up
        slope, a = jnp.cos(h), jnp.sin(h)
        y = scattered(a @ down)
        return scattered(y.T @ y), a, slope, h

    flow, (ring, other) = sums_of(body)
    rings, kept = [ring], [other]
    _, a, slope, h = flow.outputs
    assert isinstance(a, int)
    assert isinstance(slope, int)
    assert isinstance(h, int)

    def made(*later: int) -> MadeAgain:
        return made_again(flow, rings, kept, dict.fromkeys(later, False))

    assert made() == MadeAgain()
    assert made(a, slope).results == {a, slope}
    assert made(a, slope, h).results == {a, slope, h}
    assert made(a, slope, h).roots == {h}
    # One for one spares nothing; with the other kept anyway it does.
    assert not made(slope).results
    assert made(slope, h).results == {slope, h}
    # After the last sum as well, but not for a ring, which would read it soon, and as a whole.
    assert made_again(flow, rings, (), {a: False, slope: False}).results == {a, slope}
    assert not made_again(flow, rings, (), {a: True, slope: True}).results


# In programs.


def step(activation: Activation, devices: int, *, within: bool = False) -> Any:
    """The gradient of an MLP, its passes in a shard_map each or within one."""
    loss = mlp(activation)
    mesh = spmd.mesh_of(devices)
    if within:

        def body(*shards: Any) -> Any:
            value, slopes = jax.value_and_grad(loss, tuple(range(len(SPECS))))(*shards)
            return value[None], slopes

        return jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=SPECS, out_specs=(P("x"), SPECS), check_vma=False)
        )
    mapped = jax.shard_map(lambda *s: loss(*s)[None], mesh=mesh, in_specs=SPECS, out_specs=P("x"))
    return jax.jit(jax.value_and_grad(lambda *given: jnp.sum(mapped(*given)), tuple(range(len(SPECS)))))


def arguments(devices: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    layer = ((WIDTH, HIDDEN * devices), (HIDDEN * devices, WIDTH))
    shapes = ((ROWS * devices, WIDTH), *layer * 2)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


class First:
    """A policy that rewrites the first chain of a sum that it is asked about."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, site: Any) -> bool:
        first = site.kind == "dot_reduce_scatter" and not self.asked
        self.asked = self.asked or first
        return first


@pytest.mark.parametrize("policy", ["always", "first"])
@pytest.mark.parametrize("inside", [False, True], ids=["two shard_maps", "one shard_map"])
@pytest.mark.parametrize("activation", [silu, jax.nn.gelu, jax.nn.silu, jnp.tanh, jax.nn.relu])
def test_losses_and_gradients_stay_the_same(activation: Activation, inside: bool, policy: str) -> None:
    devices = 2
    given = arguments(devices)
    function = step(activation, devices, within=inside)
    ring = overlap_collectives(
        function, policy=First() if policy == "first" else "always", hardware=V5P, strict=True
    )
    loss, gradients = ring(*given)
    with jax.enable_x64(True):
        expected, slopes = function(*(each.astype(np.float64) for each in given))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for found, wanted in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_long_activations_are_made_again_too() -> None:
    """As long as jax itself can take: nothing is done by recursion."""

    def long(h: Any) -> Any:
        h = jnp.sin(h)
        for _ in range(500):
            h = h * 0.99 + 0.1
        return h

    devices = 2
    given = arguments(devices)
    function = step(long, devices)
    loss, _ = overlap_collectives(function, policy=First(), hardware=V5P, strict=True)(*given)
    np.testing.assert_allclose(loss, function(*given)[0], rtol=1e-4)


def barriers(function: Any, *given: Any) -> list[tuple[tuple[int, ...], ...]]:
    """The shapes of what each barrier of a program holds back, of those that hold one value."""
    found = [
        tuple(var.aval.shape for var in eqn.invars)
        for eqn in bodies.equations(jax.make_jaxpr(function)(*given))
        if eqn.primitive.name == "optimization_barrier"
    ]
    return [shapes for shapes in found if len(shapes) == 1]


@pytest.mark.parametrize("inside", [False, True], ids=["two shard_maps", "one shard_map"])
def test_the_dot_s_result_alone_is_kept_on_tpus(inside: bool) -> None:
    devices = 2
    given = arguments(devices)
    root = (ROWS * devices, HIDDEN)

    def of(hardware: Any) -> list[Any]:
        function = step(silu, devices, within=inside)
        return barriers(overlap_collectives(function, policy=First(), hardware=hardware), *given)

    assert of(V5P) == [(root,)]
    assert of(by_name("cpu")) == []
    assert of(by_name("h100")) == []


def test_what_a_loop_stacks_or_a_program_gives_is_not_made_again() -> None:
    devices = 2

    def layers(x: Any, ups: Any, downs: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            up, down = weights
            hidden = silu(lax.all_gather(x, "x", axis=0, tiled=True) @ up)
            return lax.psum_scatter(hidden @ down, "x", scatter_dimension=0, tiled=True), None

        return lax.scan(layer, x, (ups, downs))[0]

    specs = (P("x"), P(None, None, "x"), P(None, "x"))
    mapped = jax.shard_map(layers, mesh=spmd.mesh_of(devices), in_specs=specs, out_specs=P("x"))
    x, up, down, *_ = arguments(devices)
    given = (x, np.stack([up, up]), np.stack([down, down]))
    looped = jax.grad(lambda *g: jnp.sum(mapped(*g)), (0, 1, 2))
    assert barriers(overlap_collectives(jax.jit(looped), policy=First(), hardware=V5P), *given) == []

    def shown(x: Any, up: Any, down: Any, *more: Any) -> Any:
        hidden = silu(lax.all_gather(x, "x", axis=0, tiled=True) @ up)
        y = lax.psum_scatter(hidden @ down, "x", scatter_dimension=0, tiled=True)
        return mlp(silu)(y, *more)[None], hidden, jnp.cos(hidden)

    out = (P("x"), P(None, "x"), P(None, "x"))
    plain = jax.jit(jax.shard_map(shown, mesh=spmd.mesh_of(devices), in_specs=SPECS, out_specs=out))
    assert barriers(overlap_collectives(plain, policy=First(), hardware=V5P), *arguments(devices)) == []


SCRIPT = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from overlap import overlap_collectives, tpu_target
from overlap.compiled_memory import temporary_bytes
from passes.made_again import MadeAgain
import passes.plan

mesh = Mesh(np.array(tpu_target.devices("v4:2x2x1")), ("x",))
specs = (P("x"), (P(None, "x"), P("x")), (P(None, "x"), P("x")))


def body(x, *layers):
    for up, down in layers:
        hidden = jax.nn.silu(lax.all_gather(x, "x", axis=0, tiled=True) @ up)
        x = lax.psum_scatter(hidden @ down, "x", scatter_dimension=0, tiled=True)
    return jnp.mean(x.astype(jnp.float32) ** 2)[None]


mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x"))
function = jax.jit(jax.grad(lambda *given: jnp.sum(mapped(*given)), argnums=(1, 2)))
shapes = ((8192, 512), ((512, 16384), (16384, 512)), ((512, 16384), (16384, 512)))
given = jax.tree.map(
    lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)),
    shapes,
    specs,
    is_leaf=lambda each: isinstance(each, tuple) and isinstance(each[0], int),
)


def compiled():
    count = []

    def forward(site):
        count.append(site.kind == "dot_reduce_scatter")
        return count[-1] and sum(count) <= 2

    ring = overlap_collectives(function, policy=forward, strict=True)
    return ring.trace(*given).lower(lowering_platforms=("tpu",)).compile()


again = temporary_bytes(compiled())
passes.plan.made_again = lambda *_: MadeAgain()
print(json.dumps([again, temporary_bytes(compiled())]))
"""


@needs_libtpu
def test_less_memory_is_needed() -> None:
    again, kept = told_by(SCRIPT)
    assert again < 0.9 * kept
