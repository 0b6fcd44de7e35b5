"""The dataflow graph: values and their users, calls that chains cross, effects in order."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
from jax import lax

from passes.graph import Dataflow, Literal, dataflow
from tests.passes import bodies

X = jax.ShapeDtypeStruct((3, 5), jnp.float32)
W = jax.ShapeDtypeStruct((5, 5), jnp.float32)


def names(flow: Dataflow) -> list[str]:
    return [op.name for op in flow.ops]


def graph_of(fun: Any, *args: Any) -> Dataflow:
    return dataflow(jax.make_jaxpr(fun)(*args))


def test_the_graph_is_acyclic_and_in_program_order() -> None:
    def body(x: Any, w: Any) -> Any:
        h = jnp.tanh(lax.all_gather(x, "x", axis=0, tiled=True) @ w)
        return lax.psum_scatter(h * h @ w, "x", scatter_dimension=0, tiled=True)

    flow = dataflow(bodies.shard_body(body, X, W))
    assert list(flow.live.items()) == list(enumerate(flow.ops))
    graph: nx.DiGraph[int] = nx.DiGraph(flow.edges())
    assert nx.is_directed_acyclic_graph(graph)
    assert all(a < b for a, b in graph.edges)
    assert all(set(flow.before(i)) == set(graph.predecessors(i)) for i in graph)
    gather, first, *_, scatter = (
        i for i, op in enumerate(flow.ops) if op.name not in ("tanh", "mul", "pvary")
    )
    assert nx.has_path(graph, gather, first) and nx.has_path(graph, first, scatter)
    assert not nx.has_path(graph, scatter, gather)


def test_values_know_their_producer_and_their_users_once_per_operand() -> None:
    flow = graph_of(lambda x, y: (lax.mul(x, x), lax.tanh(y)), X, X)
    x, y = flow.inputs
    multiply, tanh = names(flow).index("mul"), names(flow).index("tanh")
    assert x not in flow.producer and y not in flow.producer
    assert flow.users[x] == (multiply, multiply) and flow.users[y] == (tanh,)
    for output, op in zip(flow.outputs, (multiply, tanh), strict=True):
        assert isinstance(output, int)
        assert flow.producer[output] == op and flow.users[output] == (-1,)


def test_a_value_that_is_a_result_twice_is_used_twice_by_the_program() -> None:
    flow = graph_of(lambda x: (lax.tanh(x),) * 2, X)
    (value,) = set(flow.outputs)
    assert isinstance(value, int) and flow.users[value] == (-1, -1)


def test_constants_and_literals_keep_their_values() -> None:
    table = np.arange(15, dtype=np.float32).reshape(3, 5)
    flow = graph_of(lambda x: lax.mul(x + table, jnp.float32(2)), X)
    literals = [o for op in flow.ops for o in op.inputs if isinstance(o, Literal)]
    assert any(
        np.array_equal(value, table) for value in [*flow.constants.values(), *(o.val for o in literals)]
    )
    assert any(np.ndim(o.val) == 0 and o.val == 2 for o in literals)
    assert all(flow.aval(o) is o.aval for o in literals)
    assert all(value not in flow.producer and value not in flow.inputs for value in flow.constants)


@jax.jit
def activation(x: Any) -> Any:
    return jax.jit(jnp.tanh)(x) * 2


@jax.jit
def through_bits(x: Any) -> Any:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(jnp.tanh(x), jnp.int32), jnp.float32)


def calls_of(flow: Dataflow) -> list[Any]:
    return [op for op in flow.ops if op.name in ("jit", "pjit")]


def test_calls_between_a_gather_and_its_dot_are_inlined_and_others_stay_calls() -> None:
    def body(x: Any, w: Any) -> Any:
        return through_bits(lax.all_gather(x, "x", axis=0, tiled=True)) @ through_bits(w)

    flow = dataflow(bodies.shard_body(body, X, W))
    (call,) = (op for op in calls_of(flow) if op.params["name"] == "through_bits")
    assert names(flow).count("tanh") == 1
    assert flow.aval(call.inputs[0]).shape == W.shape


def test_calls_between_a_dot_and_its_scatter_are_inlined_and_others_stay_calls() -> None:
    def body(x: Any, w: Any) -> Any:
        return lax.psum_scatter(through_bits((x @ through_bits(w)).T), "x", scatter_dimension=1, tiled=True)

    flow = dataflow(bodies.shard_body(body, jax.ShapeDtypeStruct((8, 5), jnp.float32), W))
    (call,) = (op for op in calls_of(flow) if op.params["name"] == "through_bits")
    assert flow.aval(call.inputs[0]).shape == W.shape
    assert names(flow).index("dot_general") < names(flow).index("tanh") < names(flow).index("reduce_scatter")


def test_activations_are_inlined_wherever_they_are_and_other_calls_are_not() -> None:
    flow = graph_of(lambda x, w: through_bits(activation(x) @ w), X, W)
    assert names(flow)[:2] == ["tanh", "mul"]
    assert [op.params["name"] for op in calls_of(flow)] == ["through_bits"]


def test_inlined_calls_compute_the_same_values() -> None:
    def body(x: Any, w: Any) -> Any:
        return activation(lax.all_gather(x, "x", axis=0, tiled=True)) @ w

    flow = dataflow(bodies.shard_body(body, X, W))
    tanh = flow.ops[names(flow).index("tanh")]
    dot = flow.ops[names(flow).index("dot_general")]
    (gathered,) = tanh.inputs
    assert isinstance(gathered, int) and flow.ops[flow.producer[gathered]].name == "all_gather"
    assert isinstance(dot.inputs[0], int) and flow.ops[flow.producer[dot.inputs[0]]].name == "mul"
    assert "jit(activation)" in str(tanh.scope) and dot.scope is None


def test_effects_keep_their_order_in_every_order_of_the_graph() -> None:
    def program(x: Any, y: Any) -> Any:
        jax.debug.callback(lambda a: None, y, ordered=True)
        z = jnp.sin(x)
        jax.debug.callback(lambda a: None, x, ordered=True)
        jax.debug.callback(lambda a: None, z)
        return z

    flow = graph_of(program, X, X)
    callbacks = [i for i, op in enumerate(flow.ops) if "callback" in op.name]
    assert len(callbacks) == 3
    graph: nx.DiGraph[int] = nx.DiGraph(flow.edges())
    assert all(nx.has_path(graph, a, b) for a, b in itertools.pairwise(callbacks))
    last_first = list(nx.lexicographical_topological_sort(graph, key=lambda i: -i))
    assert [i for i in last_first if i in callbacks] == callbacks


def test_collectives_are_not_effects_that_order_equations() -> None:
    def body(x: Any, y: Any) -> Any:
        return lax.all_gather(x, "x", axis=0, tiled=True), lax.all_gather(y, "x", axis=0, tiled=True)

    flow = dataflow(bodies.shard_body(body, X, X))
    assert not list(flow.edges())


def test_of_equal_collectives_the_first_one_is_read() -> None:
    def body(x: Any, w: Any) -> Any:
        cast = (lax.convert_element_type(x, jnp.bfloat16) for _ in range(2))
        rows, again = (lax.all_gather(each, "x", axis=0, tiled=True) for each in cast)
        columns = lax.all_gather(x, "x", axis=1, tiled=True)
        return rows @ w, again @ w, columns.T @ w

    flow = dataflow(bodies.shard_body(body, W, W))
    gathers = [op for op in flow.ops if op.name == "all_gather"]
    assert [len(flow.users[op.outputs[0]]) for op in gathers] == [2, 0, 1]
    assert [op in flow.live.values() for op in gathers] == [True, False, True]


def test_of_equal_operations_with_a_number_the_first_one_is_read() -> None:
    """A number is told by its type and its bits: -0 is none of 0."""

    def body(x: Any, w: Any) -> Any:
        factors = [jnp.float32(2), np.float32(2), jnp.float32(0), jnp.float32(-0.0)]
        return [lax.all_gather(x * factor, "x", axis=0, tiled=True) @ w for factor in factors]

    flow = dataflow(bodies.shard_body(body, W, W))
    gathers = [op for op in flow.ops if op.name == "all_gather"]
    assert [len(flow.users[op.outputs[0]]) for op in gathers] == [2, 0, 1, 1]
