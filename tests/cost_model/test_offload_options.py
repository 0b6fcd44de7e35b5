"""Which collectives run beside dots by themselves, by the compiler's options."""

import dataclasses
from typing import Any

import pytest

from cost_model import Hardware, by_name, names
from cost_model.hardware import OFFLOADABLE
from cost_model.offload_options import compiled_with, offload_options

V6E = by_name("tpu_v6e")
OPTIONS = offload_options(V6E)


@pytest.mark.parametrize(
    ("name", "offloaded"),
    [
        ("tpu_v4", ("all_gather",)),
        ("tpu_v5e", ("all_gather", "all_reduce")),
        ("tpu_v5p", OFFLOADABLE),
        ("tpu_v6e", OFFLOADABLE),
        ("tpu_7x", OFFLOADABLE),
    ],
)
def test_a_chip_s_options_offload_all_that_it_can(name: str, offloaded: tuple[str, ...]) -> None:
    hardware = by_name(name)
    assert compiled_with(hardware, offload_options(hardware)).offloaded == offloaded
    assert set(hardware.offloaded) <= set(offloaded)


@pytest.mark.parametrize("name", names())
def test_no_options_change_nothing(name: str) -> None:
    hardware = by_name(name)
    assert compiled_with(hardware, {}) is hardware
    assert compiled_with(hardware, {"xla_tpu_scoped_vmem_limit_kib": "65536"}) is hardware


@pytest.mark.parametrize("name", ["h100", "cpu", "tpu_7x"])
def test_where_there_is_nothing_to_ask_for(name: str) -> None:
    assert offload_options(by_name(name)) == {}


@pytest.mark.parametrize("true", ["true", "True", True, "1", 1])
def test_however_an_option_is_spelled(true: Any) -> None:
    assert compiled_with(V6E, dict.fromkeys(OPTIONS, true)).offloaded == OFFLOADABLE


@pytest.mark.parametrize("false", ["false", False, 0])
def test_what_is_turned_off_is_not_offloaded(false: Any) -> None:
    """By default too: who turns off one of TPU7x's offloads has the program decided without it."""
    (option,) = (option for each, option in V6E.offload_options if each == "all_reduce")
    for hardware in (V6E, by_name("tpu_7x")):
        assert compiled_with(hardware, {**OPTIONS, option: false}).offloaded == (
            "all_gather",
            "reduce_scatter",
        )


def test_some_of_a_collective_s_options_are_too_few() -> None:
    """Which axes they are for is not looked at: what may not be offloaded is taken not to be."""
    first, *_ = (option for each, option in V6E.offload_options if each == "all_gather")
    assert compiled_with(V6E, {first: "true"}) is V6E


def test_json_keeps_them() -> None:
    assert Hardware.from_json(V6E.to_json()).offload_options == V6E.offload_options
    with pytest.raises(ValueError, match=r"offload_options names collectives of .*, not \['all_to_all'\]"):
        dataclasses.replace(V6E, offload_options=(("all_to_all", "xla_option"),))
