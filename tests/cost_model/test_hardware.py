"""The description of an accelerator: its rules, its checks, its JSON form."""

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from cost_model import Hardware, by_name, names


@pytest.mark.parametrize("name", names())
def test_json_round_trip_changes_nothing(name: str) -> None:
    hardware = by_name(name)
    again = Hardware.from_json(hardware.to_json())
    assert again == hardware
    assert hash(again) == hash(hardware)


WRONG = pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hop_latency_s": "soon"}, "hop_latency_s must be a number, got 'soon'"),
        ({"overlaps": "no"}, "overlaps must be true or false, got 'no'"),
        ({"overlaps": 1}, "overlaps must be true or false"),
        ({"link_bytes_per_s": True}, "link_bytes_per_s must be a number, got True"),
        ({"links_per_axis": 1.5}, "links_per_axis must be an integer"),
        ({"devices_per_chip": True}, "devices_per_chip must be an integer"),
        ({"on_chip_bytes": 10**400}, "on_chip_bytes is too large"),
        ({"name": 7}, "name must be a string"),
        ({"network": ["torus"]}, "network must be a string"),
        ({"device_kinds": "NVIDIA H100"}, "device_kinds must be a list"),
        ({"device_kinds": [3]}, r"device_kinds\[0\] must be a string"),
        ({"offloaded": "all_gather"}, "offloaded must be a list"),
        ({"peak_flops": {"bfloat16": 1e14}}, "peak_flops must be a list"),
        ({"peak_flops": [["bfloat16"]]}, r"peak_flops\[0\] must be a list of 2"),
        ({"peak_flops": [["bfloat16", "1e14"]]}, r"peak_flops\[0\]\[1\] must be a number"),
        ({"peak_flops": [["float99", 1e14]]}, "unknown dtype 'float99'; known: bool, float4/6/8/16/32/64"),
        ({"matmul_tile": [8, 128]}, "matmul_tile must be a list of 3"),
        ({"hbm_bytes_per_s": -1}, "hbm_bytes_per_s"),
        ({"name": None}, "name must be a string"),
        ({"devices_per_chip": 10**400}, "devices_per_chip is too large"),
    ],
)


@WRONG
def test_a_wrong_field_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(by_name("h100"), **change)


def test_numbers_may_be_numpy_s_and_lists_tuples() -> None:
    h100 = by_name("h100")
    given: Any = {"hop_latency_s": np.float32(0.5), "devices_per_chip": np.int64(1), "matmul_tile": [8, 8, 8]}
    found = dataclasses.replace(h100, **given)
    assert found == dataclasses.replace(h100, hop_latency_s=0.5, matmul_tile=(8, 8, 8))
    assert hash(found) and Hardware.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("change", "message"), [({"schema": 99}, "schema"), ({"warp_drive": 9}, "warp_drive")]
)
def test_json_of_another_form_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hardware.from_json(json.dumps({**json.loads(by_name("h100").to_json()), **change}))


@pytest.mark.parametrize(
    ("dtype", "known"),
    [
        ("bfloat16", True),
        ("float8_e5m2", True),
        ("float32", True),
        ("float64", False),
        ("complex64", False),
        ("foo", False),
    ],
)
def test_whose_rate_is_known(dtype: str, known: bool) -> None:
    v5p = by_name("tpu_v5p")
    assert v5p.rates(dtype) == known
    assert known or v5p.flops_for(dtype) == min(flops for _, flops in v5p.peak_flops)


@WRONG
def test_json_with_a_wrong_field_is_refused(change: dict[str, Any], message: str) -> None:
    fields = {**json.loads(by_name("h100").to_json()), **change}
    with pytest.raises(ValueError, match=message):
        Hardware.from_json(json.dumps(fields))


@pytest.mark.parametrize("missing", ["schema", "peak_flops", "hop_latency_s"])
def test_json_without_a_needed_field_is_refused(missing: str) -> None:
    fields = json.loads(by_name("h100").to_json())
    del fields[missing]
    with pytest.raises(ValueError, match=missing):
        Hardware.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["[]", "not json", "null", "[" * 200_000])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Hardware.from_json(text)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "field",
    ["hbm_bytes_per_s", "link_bytes_per_s", "hop_latency_s", "matmul_overhead_s", "matmul_efficiency"],
)
def test_rates_and_times_must_be_positive_and_finite(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(by_name("tpu_v5p"), **dict[str, Any]({field: value}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak_flops": (("bfloat16", math.nan),)}, "bfloat16"),
        ({"peak_flops": ()}, "at least one dtype"),
        ({"peak_flops": (("bf16", 1e12),)}, "unknown dtype 'bf16'"),
        ({"network": "mesh"}, "torus"),
        ({"matmul_tile": (8, 128)}, "matmul_tile"),
        ({"matmul_efficiency": 1.5}, "at most 1"),
        ({"least_gain": 1.0}, "least_gain must be at least 0 and below 1"),
        ({"least_gain_beside": -0.1}, "least_gain_beside must be at least 0 and below 1"),
        ({"wraparound_multiple": -4}, "wraparound_multiple"),
        ({"devices_per_chip": 0}, "devices_per_chip"),
        ({"clock_hz": -1.0}, "clock_hz"),
        ({"copy_overhead_s": -1.0}, "copy_overhead_s"),
        ({"copy_overhead_s": math.nan}, "copy_overhead_s"),
        ({"between_tiles": 0.0}, "between_tiles"),
        ({"joining": 0.0}, "joining"),
        ({"slicing": -1.0}, "slicing"),
        ({"dcn_bytes_per_s": math.inf}, "dcn_bytes_per_s"),
        ({"dcn_latency_s": math.nan}, "dcn_latency_s"),
    ],
)
def test_other_fields_are_checked_too(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(by_name("tpu_v5p"), **change)


def test_each_dtype_has_the_rate_of_the_unit_that_computes_it() -> None:
    v5e, h100 = by_name("tpu_v5e"), by_name("h100")
    assert v5e.flops_for("bfloat16") == 1.97e14
    assert v5e.flops_for("int8") == v5e.flops_for("uint8") == v5e.flops_for("int4") == 3.94e14
    assert v5e.flops_for("float8_e4m3fn") == v5e.flops_for("bfloat16"), "no float8 unit: computed as bfloat16"
    assert h100.flops_for("float8_e5m2") == 1.979e15
    assert h100.flops_for("float16") == h100.flops_for("bfloat16")


@pytest.mark.parametrize("name", names())
def test_a_wider_float_is_never_the_faster_one(name: str) -> None:
    rates = [by_name(name).flops_for(dtype) for dtype in ("float8_e4m3fn", "bfloat16", "float32", "float64")]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("name", names())
def test_an_unknown_dtype_gets_the_slowest_rate(name: str) -> None:
    hardware = by_name(name)
    assert hardware.flops_for("posit16") == min(flops for _, flops in hardware.peak_flops)


@pytest.mark.parametrize(
    ("name", "joined", "open_ended"),
    [
        ("tpu_v4", (4, 8, 16), (1, 2, 6)),
        ("tpu_v5e", (16,), (2, 4, 8)),
        ("tpu_v6e", (16, 256), (2, 4, 8)),
        ("tpu_v5p", (4, 12, 28), (2, 3)),
        ("h100", (2, 3, 8), ()),
    ],
)
def test_axes_close_on_themselves_by_size(
    name: str, joined: tuple[int, ...], open_ended: tuple[int, ...]
) -> None:
    hardware = by_name(name)
    assert all(hardware.has_wraparound(size) for size in joined)
    assert not any(hardware.has_wraparound(size) for size in open_ended)


def test_a_core_is_an_equal_part_of_its_chip() -> None:
    chip = by_name("tpu_v4")
    core = chip.per_core(2)
    assert core.name == "tpu_v4 core"
    assert core.flops_for("bfloat16") == chip.flops_for("bfloat16") / 2
    assert core.flops_for("int8") == chip.flops_for("int8") / 2
    assert core.on_chip_bytes == chip.on_chip_bytes / 2
    assert core.axis_bytes_per_s == chip.axis_bytes_per_s
    assert core.per_core(2) is core
    assert chip.per_core(1) is chip
    die = by_name("tpu_7x")
    assert die.per_core(2) is die.per_core(1) is die


def test_a_description_without_the_later_fields_is_read() -> None:
    fields = json.loads(by_name("tpu_v5p").to_json())
    for later in ("devices_per_chip", "clock_hz", "dcn_bytes_per_s", "dcn_latency_s"):
        del fields[later]
    hardware = Hardware.from_json(json.dumps(fields))
    assert (hardware.devices_per_chip, hardware.clock_hz, hardware.dcn_bytes_per_s) == (1, 0, 0)


def test_the_cost_model_imports_no_jax() -> None:
    check = "import sys, cost_model; print({'jax', 'jaxlib', 'passes', 'overlap'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
