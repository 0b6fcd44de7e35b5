"""Layers as people write them: what is rewritten gives what was written."""

# mypy: allow-untyped-calls

import os
import random
from typing import Any, Final

import jax
import numpy as np
import pytest

from bench.programs import layers
from overlap import overlap_collectives

TOLERANCE: Final = 1e-4
"""Of each array's largest value, in float32."""

SIZES: Final = {"B": 64, "S": 1024, "D": 2048, "F": 8192, "H": 16, "h": 128, "V": 32768}


SEEDS: Final = range(16 if os.environ.get("CI") else 48)
"""In CI, which has an hour for all pairs of Python and jax, they are fewer."""


@pytest.mark.parametrize("seed", SEEDS)
def test_rewritten_loss_and_gradients_equal_those_as_written(seed: int) -> None:
    program = layers.program(layers.drawn(random.Random(seed)), 8, SIZES)
    mesh = program.make_mesh()
    arguments = program.arguments(mesh)
    step = program.make(mesh)
    expected = step(*arguments)
    found = overlap_collectives(step, policy="always", strict=True, hardware="tpu_v5e")(*arguments)

    def check(path: tuple[object, ...], a: Any, e: Any) -> None:
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        where = f"{program.name}: {jax.tree_util.keystr(path)}"
        assert a.shape == e.shape and np.abs(e).max() > 0, where
        assert np.abs(a - e).max() <= TOLERANCE * np.abs(e).max(), where

    jax.tree_util.tree_map_with_path(check, found, expected)


def test_a_draw_is_the_same_again_and_makes_every_choice() -> None:
    found = [layers.drawn(random.Random(seed)) for seed in range(200)]
    assert found == [layers.drawn(random.Random(seed)) for seed in range(200)]
    assert {each.sharding for each in found} == {"tensor", "sequence", "fsdp", "fsdp+sequence"}
    assert {block for each in found for block in each.blocks} == set(layers.BLOCKS)
    for name in ("norm_behind", "bias", "float32_weights", "cast_behind", "scanned", "head"):
        assert {getattr(each, name) for each in found} == {True, False}, name
    assert len({str(each) for each in found}) > 150


def test_only_what_can_matter_is_chosen() -> None:
    for seed in range(200):
        of = layers.drawn(random.Random(seed))
        assert not of.norm_behind or of.over_sequence
        assert not of.cast_behind or (of.float32_weights and of.over_fsdp)
        assert not of.scanned or of.layers > 1
