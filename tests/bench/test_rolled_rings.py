"""The benchmark of long axes runs the rings that it says it runs, and claims what its rows show."""

# mypy: allow-untyped-calls

from __future__ import annotations

import itertools

import pytest

from bench import rolled_rings
from bench.rolled_rings import MOST_GROWTH, MOST_SLOWER, PATTERNS, SLICES, Compiled
from bench.schedules import measure
from bench.schedules.case import Slice
from passes.candidates import UNROLL
from tests.libtpu import needs_libtpu


@needs_libtpu
@pytest.mark.parametrize("devices", [16, 64])
def test_one_ring_is_compiled_in_both_forms(devices: int) -> None:
    mesh = measure.tpu_mesh(
        Slice(topology=SLICES[devices], hardware=rolled_rings.CHIP, mesh_shape=(devices,))
    )
    for pattern in PATTERNS:
        assert rolled_rings.program(pattern, mesh, "original")[1] == ""
        _, unrolled = rolled_rings.program(pattern, mesh, "unrolled")
        _, rolled = rolled_rings.program(pattern, mesh, "rolled")
        assert "rolled" not in unrolled and "directional" in unrolled
        assert rolled.replace(f", rolled by {UNROLL}", "") == unrolled != rolled


def rows(growth: float, slower: float) -> list[Compiled]:
    """Figures in which compiling takes so much longer on 256 devices than on 16, and a rolled hop so much."""
    return [
        Compiled(
            pattern,
            devices,
            form,
            "",
            compile_cpu_s=10.0 * (growth if devices == 256 else 1.0),
            hop_s=1.0 + slower if form == "rolled" else 1.0,
            temp_bytes=0,
        )
        for pattern, devices, form in itertools.product(PATTERNS, SLICES, ("original", "unrolled", "rolled"))
        if (devices, form) != (256, "unrolled")
    ]


def test_the_claims_are_those_of_the_rows() -> None:
    told, met = rolled_rings.claims(rows(growth=1.2, slower=0.03))
    assert met and len(told) == 6
    assert "1.20 × as long on 256 devices as on 16" in told[0] and "+3.0%" in told[1]
    assert not rolled_rings.claims(rows(growth=MOST_GROWTH, slower=0.0))[1]
    assert not rolled_rings.claims(rows(growth=1.0, slower=MOST_SLOWER + 0.01))[1]
    page = rolled_rings.document(rows(growth=1.2, slower=0.03), {"jax": "1"})
    assert "| 256 | rolled | 12.00 s |" in page and told[0] in page
