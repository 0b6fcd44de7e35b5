"""The table of accelerators."""

import re

import pytest

from cost_model import by_name, from_device_kind, names

_EVERY = "tpu_v4 tpu_v5e tpu_v5p tpu_v6e tpu_7x a100 h100 h200 b200 cpu"


def test_the_names_are_those_documented() -> None:
    assert names() == tuple(_EVERY.split())
    assert all(by_name(name).name == name for name in names())


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'v5p'.*tpu_v5p.*h100"):
        by_name("v5p")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("v5p", ", did you mean 'tpu_v5p'? known: tpu_v4,"),
        ("TPU-v5P", ", did you mean 'tpu_v5p'? known"),
        ("v5", ", did you mean 'tpu_v5e' or 'tpu_v5p'? known"),
        ("tpu_v9", "; known"),
        ("", "; known"),
    ],
)
def test_a_name_that_is_written_otherwise_is_recognised(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"unknown hardware {name!r}{meant}")):
        by_name(name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "tpu_v4"),
        ("TPU v5 lite", "tpu_v5e"),
        ("TPU v5e", "tpu_v5e"),
        ("TPU v5", "tpu_v5p"),
        ("TPU v5p", "tpu_v5p"),
        ("TPU v6 lite", "tpu_v6e"),
        ("TPU v6e", "tpu_v6e"),
        ("TPU7x", "tpu_7x"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("cpu", "cpu"),
    ],
)
def test_jax_device_kinds_are_recognised(kind: str, name: str) -> None:
    assert from_device_kind(kind) == by_name(name)


@pytest.mark.parametrize("kind", ["", "TPU v3", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090", "Radeon"])
def test_other_device_kinds_are_unknown(kind: str) -> None:
    assert from_device_kind(kind) is None


def test_no_device_kind_is_claimed_twice() -> None:
    kinds = [kind for name in names() for kind in by_name(name).device_kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(
    ("name", "one_way"),
    [("tpu_v5e", 4.5e10), ("tpu_v5p", 9e10), ("a100", 3e11), ("h100", 4.5e11), ("b200", 9e11)],
)
def test_links_of_an_axis_add_up_to_the_published_bandwidth(name: str, one_way: float) -> None:
    assert by_name(name).axis_bytes_per_s == pytest.approx(one_way)


@pytest.mark.parametrize(
    ("name", "cores", "flops_per_cycle"),
    [
        ("tpu_v4", 2, 2**17),
        ("tpu_v5e", 1, 2**17),
        ("tpu_v5p", 1, 2**18),
        ("tpu_v6e", 1, 2**19),
        ("tpu_7x", 2, 2**19),
    ],
)
def test_a_tpu_s_clock_times_its_matrix_units_is_its_peak(
    name: str, cores: int, flops_per_cycle: int
) -> None:
    device = by_name(name).per_core(cores)
    assert device.clock_hz * flops_per_cycle == pytest.approx(device.flops_for("bfloat16"), rel=0.005)


def test_only_the_tpu_compiler_gives_cycles() -> None:
    assert {name for name in names() if by_name(name).clock_hz} == {n for n in names() if n.startswith("tpu")}


def test_every_accelerator_reaches_others_over_a_slower_network() -> None:
    for hardware in map(by_name, names()):
        assert 0 < hardware.dcn_bytes_per_s < hardware.axis_bytes_per_s
        assert hardware.dcn_latency_s > hardware.hop_latency_s
