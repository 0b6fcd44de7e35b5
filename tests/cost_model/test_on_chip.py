"""The time of dots as they are written, by what of their operands is on chip."""

from __future__ import annotations

import dataclasses

import pytest

from cost_model import Matmul, by_name, matmul_s
from cost_model.on_chip import LITTLE, OTHER, SIDES, Side, beside_bytes, side_bytes, wholes, wholes_s

V5E, V5P, H100 = by_name("tpu_v5e"), by_name("tpu_v5p"), by_name("h100")
ROOMY = dataclasses.replace(V5P, on_chip_bytes=1e9, receives_on_chip=True)

TALL = Matmul(m=4096, k=4096, n=1024)
"""A left operand of 34 MB and a right one of 8 MB, all of which v5p has room for one by one."""


def test_sides() -> None:
    assert [side_bytes(TALL, side) for side in SIDES] == [TALL.lhs_bytes, TALL.rhs_bytes]
    assert side_bytes(TALL, None) == 0
    assert [OTHER[side] for side in SIDES] == ["rhs", "lhs"]
    assert beside_bytes(8e6, V5P) == LITTLE * (V5P.on_chip_bytes - 8e6)
    assert beside_bytes(8e6, H100) == 0


def test_nothing_before_a_tpu_s_first_dot_hides_what_it_waits_for() -> None:
    """The larger operand that fits, as of ``x[768, 19712] @ w[19712, 640]`` before a psum on v6e: x."""
    near_s = matmul_s(TALL, V5P, lhs_on_chip=True)
    assert wholes_s((TALL,), V5P, 0.0) == pytest.approx(near_s + TALL.lhs_bytes / V5P.hbm_bytes_per_s)
    less = dataclasses.replace(V5P, on_chip_bytes=TALL.lhs_bytes - 1)
    near_s = matmul_s(TALL, less, rhs_on_chip=True)
    assert wholes_s((TALL,), less, 0.0) == pytest.approx(near_s + TALL.rhs_bytes / V5P.hbm_bytes_per_s)
    none = dataclasses.replace(V5P, on_chip_bytes=1.0)
    assert wholes_s((TALL,), none, 0.0) == pytest.approx(matmul_s(TALL, none))


def test_of_two_equal_operands_the_dot_waits_for_one() -> None:
    square = Matmul(m=2048, k=2048, n=2048)
    fitting = dataclasses.replace(V5P, on_chip_bytes=square.lhs_bytes)
    found = wholes_s((square,), fitting, 0.0) - square.lhs_bytes / V5P.hbm_bytes_per_s
    assert found == pytest.approx(matmul_s(square, fitting, lhs_on_chip=True))
    assert found > matmul_s(square, fitting, lhs_on_chip=True, rhs_on_chip=True)


def test_later_dots_find_theirs_fetched_beside_those_before() -> None:
    first_s = wholes_s((TALL,), ROOMY, 0.0)
    later_s = matmul_s(TALL, ROOMY, lhs_on_chip=True, rhs_on_chip=True)
    assert wholes_s((TALL, TALL), ROOMY, 0.0) == pytest.approx(first_s + later_s)
    assert wholes_s((TALL, TALL), ROOMY, 1.0) == pytest.approx(2 * later_s)


@pytest.mark.parametrize("sent", SIDES)
def test_what_a_collective_brings_is_not_on_chip_on_some(sent: Side) -> None:
    """Of the first dot after it; then it may have been fetched."""
    roomy = dataclasses.replace(ROOMY, receives_on_chip=False)
    far_s = matmul_s(TALL, roomy, lhs_on_chip=sent == "rhs", rhs_on_chip=sent == "lhs")
    near_s = matmul_s(TALL, roomy, lhs_on_chip=True, rhs_on_chip=True)
    assert far_s > near_s
    assert wholes_s((TALL,), roomy, 1.0, sent) == pytest.approx(far_s)
    assert wholes_s((TALL, TALL), roomy, 1.0, sent) == pytest.approx(far_s + near_s)
    assert wholes_s((TALL,), ROOMY, 1.0, sent) == pytest.approx(near_s)


def test_elsewhere_nothing_is_waited_for() -> None:
    assert wholes_s((TALL,), H100, 0.0) == pytest.approx(matmul_s(TALL, H100, rhs_on_chip=True))
    assert wholes_s((), V5P, 0.0) == 0


@pytest.mark.parametrize(
    ("chip", "matmul", "before_s", "sent", "compiled_s"),
    [
        ("tpu_v6e", Matmul(m=768, k=19712, n=640), 0.0, None, 51.6e-6),
        ("tpu_v5e", Matmul(m=512, k=17920, n=640), 0.0, None, 95.8e-6),
        ("tpu_v5e", Matmul(m=3328, k=5120, n=10624), 0.0, None, 2042.8e-6),
        ("tpu_v5p", Matmul(m=768, k=8448, n=640), 0.0, None, 29.1e-6),
        ("tpu_v5p", Matmul(m=320, k=512, n=15616), 66.6e-6, "rhs", 31.4e-6),
        ("tpu_v5p", Matmul(m=64, k=512, n=2816), 2e-6, "lhs", 3.4e-6),
        # 93 MB of it, which alone fit; fetched beside the all_gather, and waited for.
        ("tpu_v6e", Matmul(batch=8, m=3792, k=1536, n=256), 31e-6, None, 68.9e-6),
        ("tpu_7x", Matmul(m=3712, k=3712, n=8448), 114.8e-6, "lhs", 263.1e-6),
    ],
    ids=str,
)
def test_it_is_what_compilers_make_of_them(
    chip: str, matmul: Matmul, before_s: float, sent: Side | None, compiled_s: float
) -> None:
    """Dots of chains as written, with what they waited for, by the TPU compiler's estimates (jax 0.12)."""
    assert wholes_s((matmul,), by_name(chip), before_s, sent) == pytest.approx(compiled_s, rel=0.11)


@pytest.mark.parametrize(
    ("chip", "matmuls", "before_s", "compiled_s"),
    [
        # The second finds no room beside the first's 53 MB, which are fetched again before the program ends.
        ("tpu_v6e", (Matmul(m=21872, k=6144, n=4352),) * 2, 1399.8e-6, 3458.7e-6),
        # The second does beside the first's 43 MB, and the third not beside both.
        ("tpu_v6e", (Matmul(m=59648, k=3456, n=6272),) * 3, 2147.4e-6, 11516.6e-6),
        ("tpu_v5p", (Matmul(m=52608, k=4480, n=4736),) * 2, 1963.8e-6, 11154.1e-6),
        ("tpu_v5e", (Matmul(m=288, k=7168, n=3200),) * 3, 40.1e-6, 251.6e-6),
        # Each is fetched while the one before runs, and waited for.
        ("tpu_v5e", (Matmul(m=128, k=256, n=23552),) * 3, 4e-6, 104.6e-6),
        ("tpu_v5e", (Matmul(m=864, k=2048, n=23168),), 36.9e-6, 511.4e-6),
        ("tpu_v5p", (Matmul(m=96, k=896, n=11264),) * 2, 2e-6, 21.5e-6),
    ],
    ids=str,
)
def test_several_dots_share_the_room_with_what_the_next_run_of_the_program_needs_first(
    chip: str, matmuls: tuple[Matmul, ...], before_s: float, compiled_s: float
) -> None:
    """Dots that share a gather of their left operand, by the TPU compiler's estimates (jax 0.12)."""
    assert wholes_s(matmuls, by_name(chip), before_s, "lhs") == pytest.approx(compiled_s, rel=0.02)


@pytest.mark.parametrize(
    ("chip", "matmul", "compiled_s"),
    [
        ("tpu_v6e", Matmul(m=2304, k=1152, n=1664), 19.0e-6),
        ("tpu_v5e", Matmul(m=32320, k=256, n=640), 153.4e-6),
        ("tpu_v5p", Matmul(m=4864, k=4608, n=896), 110.1e-6),
    ],
    ids=str,
)
def test_a_collective_that_adds_up_may_find_the_results_on_chip(
    chip: str, matmul: Matmul, compiled_s: float
) -> None:
    """Dots before a reduce_scatter: of v5p results never are."""
    hardware = by_name(chip)
    (dot,) = wholes((matmul,), hardware, 0.0, summed=True)
    assert dot.seconds == pytest.approx(compiled_s, rel=0.04)
    assert dot.stays == (chip == "tpu_v6e")
    (written,) = wholes((matmul,), hardware, 0.0)
    assert (dot.seconds < written.seconds) == hardware.receives_on_chip


def test_pieces_after_the_first_find_what_they_share() -> None:
    """As of the 12 strips of ``x[576, 21248] @ w[21248, 1536]`` that 7x scatters in turn."""
    strip, chip = Matmul(m=576, k=21248, n=128), by_name("tpu_7x")
    first_s = wholes_s((strip,), chip, 0.0)
    again_s = wholes_s((strip,), chip, 2e-6, again="lhs")
    assert again_s == pytest.approx(20441 / 2.2e9, rel=0.01)
    assert first_s == pytest.approx(again_s + strip.lhs_bytes / chip.hbm_bytes_per_s)
    little = dataclasses.replace(chip, on_chip_bytes=strip.lhs_bytes - 1)
    assert wholes_s((strip,), little, 2e-6, again="lhs") > again_s
