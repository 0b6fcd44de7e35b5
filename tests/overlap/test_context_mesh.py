"""shard_maps on the mesh of the context: its devices are priced, tried, and decided for."""

# mypy: allow-untyped-calls

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from overlap import Site, overlap_collectives
from passes import shims
from tests.overlap.mlp import SPECS, always, check, mesh_of, reference, shard_body
from tests.overlap.trial_programs import UNTOLD, Compiler

REF = reference()

verified: Any = functools.partial(overlap_collectives, policy="verify", hardware=UNTOLD, strict=True)


def program(x: Any, w: Any, v: Any) -> Any:
    """``mlp`` on the mesh of the context."""
    return jax.shard_map(shard_body, in_specs=SPECS, out_specs=P("x"))(x, w, v)


def placed(mesh: Mesh) -> list[jax.Array]:
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(REF.arguments, SPECS, strict=True)]


class Tried(Compiler):
    """Remembers the meshes that chains and programs are compiled for."""

    def __init__(self) -> None:
        super().__init__(100, [50])
        self.meshes: dict[Mesh, None] = {}

    def __call__(self, program: Any, arguments: Any, target: Any) -> Any:
        self.meshes[target.mesh] = None
        assert {a.sharding.mesh for a in arguments} == {target.mesh}
        return super().__call__(program, arguments, target)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Tried:
    stand_in = Tried()
    monkeypatch.setattr("overlap.verify.modelled", stand_in)
    return stand_in


def test_each_mesh_of_one_shape_is_decided_for() -> None:
    """jax itself does not trace again where only the order of the devices is another."""
    decided: list[Mesh | None] = []

    def policy(site: Site) -> bool:
        decided.append(shims.context_mesh())
        return True

    one = mesh_of()
    other = Mesh(one.devices[::-1], one.axis_names, axis_types=one.axis_types)
    assert one.abstract_mesh == other.abstract_mesh
    decorated = always(jax.jit(program), policy=policy)
    for mesh in (one, other, one):
        with jax.set_mesh(mesh):
            check(decorated(*placed(mesh)), REF.value())
    assert decided == [one, one, other, other], "two chains, once a mesh"


def test_chains_are_compiled_for_the_devices_of_the_context(tried: Tried) -> None:
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        assert verified(jax.jit(program)).explain(*placed(mesh)).rewritten
    assert list(tried.meshes) == [mesh]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_chains_are_run_on_the_devices_of_the_context(kind: AxisType) -> None:
    mesh = mesh_of(kind=kind)
    decorated = verified(jax.jit(program), policy="autotune")
    with jax.set_mesh(mesh):
        sites = decorated.explain(*placed(mesh)).sites
        check(decorated(*placed(mesh)), REF.value())
    assert len(sites) == 2
    assert all("Measured: " in site.sentence for site in sites)


def test_a_mesh_without_devices_is_told_where_its_chains_would_be_tried(tried: Tried) -> None:
    shapes = [jax.ShapeDtypeStruct(np.shape(a), np.float32) for a in REF.arguments]
    with jax.sharding.use_abstract_mesh(mesh_of().abstract_mesh):
        untried = verified(jax.jit(program)).explain(*shapes).sites
        priced = verified(jax.jit(program), policy="auto").explain(*shapes).sites
    assert not tried.meshes
    assert all("not compiled and timed" in site.sentence for site in untried)
    assert not any("not compiled and timed" in site.sentence for site in priced)
    assert [site.reason for site in untried] == [site.reason for site in priced]
