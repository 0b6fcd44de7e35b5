"""A chain cut out of its program: the smallest program that runs it, as written or as a ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from passes import shims
from passes.chains import AllGatherDot, Chain
from passes.emit import Ring, emit_ring
from passes.graph import Dataflow, Literal, Operand
from passes.hops import PlacesOf
from passes.network import Network
from passes.schedule import RingSchedule
from passes.starts import starts_explicitly

Program = Callable[..., tuple[Any, ...]]
Choice = TypeVar("Choice")


@dataclasses.dataclass(frozen=True)
class Excerpt(Generic[Choice]):
    """A part of a program as a program of its own.

    Attributes:
      arguments: types and shardings of the program's arguments, whole arrays on the part's mesh.
      original: the part as written, a jitted function of such arguments.
      version: from a choice of how to rewrite it to the same rewritten.
      mesh: the devices that it runs on.
      whole: whether it is no chain but a whole program: of that the first version that gains will do.
      compared: so many of its versions, the first ones, are all to be compared.
      emitted: what decides, beside the part's text, how its rings are made: whether jax may differentiate
        them, and whether they start their hops themselves.
    """

    arguments: tuple[jax.ShapeDtypeStruct, ...]
    original: Program
    version: Callable[[Choice], Program]
    mesh: Any
    whole: bool = False
    compared: int = 1
    emitted: tuple[bool, ...] = ()


def excerpt(flow: Dataflow, chain: Chain, network: Network) -> Excerpt[RingSchedule] | None:
    """The program of one chain; None where the program does not know its devices.

    Every value that the chain takes from outside is an argument with one more dim in front, of the devices
    that have different values of it; so are its results.
    """
    mesh = network.mesh
    if mesh is None:
        return None
    members = sorted(chain.ops)
    made = {value for op in members for value in flow.ops[op].outputs}
    taken = dict.fromkeys(
        operand
        for op in members
        for operand in flow.ops[op].inputs
        if isinstance(operand, int) and operand not in made
    )
    wanted = _wanted(flow, chain)

    def specs(values: Iterable[int]) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(_axes(flow.avals[value], network)) for value in values)

    def program(run: Callable[[dict[int, Any]], dict[int, Any]]) -> Program:
        def body(*arguments: Any) -> tuple[Any, ...]:
            env = dict(flow.constants)
            env.update(
                (value, lax.squeeze(argument, (0,))) for value, argument in zip(taken, arguments, strict=True)
            )
            results = run(env)
            return tuple(lax.expand_dims(results[value], (0,)) for value in wanted)

        return jax.jit(
            jax.shard_map(
                body,
                mesh=mesh,
                in_specs=specs(taken),
                out_specs=specs(wanted),
                axis_names=set(network.manual_axes),
                check_vma=network.check_vma,
            )
        )

    def original(env: dict[int, Any]) -> dict[int, Any]:
        for number in members:
            op = flow.ops[number]
            values = [_read(env, operand) for operand in op.inputs]
            with shims.equation_scope(op.eqn, op.scope):
                env.update(zip(op.outputs, op.bind(values), strict=True))
        return env

    def ring(schedule: RingSchedule) -> Program:
        def run(env: dict[int, Any]) -> dict[int, Any]:
            rings = PlacesOf().rings(chain.collective, schedule.orders)
            with shims.hops_vary():  # the program has no loop
                return emit_ring(flow, Ring(chain, schedule), lambda operand: _read(env, operand), rings)

        return program(run)

    arguments = tuple(
        jax.ShapeDtypeStruct(
            (_copies(flow.avals[value], network), *flow.avals[value].shape),
            flow.avals[value].dtype,
            sharding=NamedSharding(mesh, spec),
        )
        for value, spec in zip(taken, specs(taken), strict=True)
    )
    emitted = flow.differentiable, starts_explicitly(flow, chain)
    return Excerpt(arguments, program(original), ring, mesh, emitted=emitted)


def _wanted(flow: Dataflow, chain: Chain) -> dict[int, None]:
    """What a ring of the chain makes for the rest of the program."""
    if isinstance(chain, AllGatherDot):
        dots = [flow.ops[dot.op].outputs[0] for dot in chain.dots]
        return dict.fromkeys([*dots, *chain.handed_out])
    results = [flow.ops[chain.collective.op].outputs[0]]
    gather = getattr(chain, "gather", None)
    if gather is not None:
        results = [flow.ops[dot.op].outputs[0] for dot in gather.dots] + list(gather.handed_out)
    return dict.fromkeys(results)


def _read(env: dict[int, Any], operand: Operand) -> Any:
    return operand.val if isinstance(operand, Literal) else env[operand]


def _axes(aval: Any, network: Network) -> tuple[str, ...]:
    """The axes over which a value may differ, in the mesh's order."""
    varying = shims.varying_axes(aval) if network.check_vma else network.manual_axes
    return tuple(name for name in network.mesh.axis_names if name in varying)


def _copies(aval: Any, network: Network) -> int:
    count = 1
    for axis in _axes(aval, network):
        count *= network.mesh.shape[axis]
    return count
