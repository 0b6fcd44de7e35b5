"""Fits recover what made the times, and calibration files are read back or refused with a reason."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from cost_model import by_name
from cost_model.calibration import AxisMeasured, Calibration, base_hardware, hardware_of, measured_hardware
from cost_model.collectives import hop_s
from cost_model.fitting import Timing, fit_hop, fit_matmuls, hidden, slope
from cost_model.matmul import Matmul, matmul_s

V5P = by_name("tpu_v5p")


def noisy(seconds: float, chance: random.Random) -> float:
    """A time as measured: two per cent of noise, and one in ten three times as long."""
    return seconds * chance.lognormvariate(0, 0.02) * (3 if chance.random() < 0.1 else 1)


def samples(hardware: Any, dtypes: tuple[str, ...], seed: int = 0) -> list[tuple[Matmul, float]]:
    """Times of matmuls by the cost model's formula, with noise; each the median of seven."""
    chance = random.Random(seed)
    sizes = [(8, 128, 128), (16, 256, 256), (64, 1024, 1024)]
    sizes += [(m, 2048, n) for m, n in itertools.product((136, 264, 520, 2056, 4096), (1152, 4096))]
    sizes += [(2048, 2176, 2048), (4096, 4096, 4096), (2048, 1152, 4224), (1024, 8192, 8192)]
    found = []
    for dtype in dtypes:
        for m, k, n in sizes:
            matmul = Matmul(m=m, k=k, n=n, dtype=dtype)
            seconds = matmul_s_by_roofline(matmul, hardware)
            found.append((matmul, Timing.of([noisy(seconds, chance) for _ in range(7)]).seconds))
    return found


def matmul_s_by_roofline(matmul: Matmul, hardware: Any) -> float:
    """The formula, written out once more."""
    m, k, n = (
        -(-size // tile) * tile
        for size, tile in zip((matmul.m, matmul.k, matmul.n), hardware.matmul_tile, strict=True)
    )
    compute_s = 2 * m * k * n / (hardware.matmul_efficiency * hardware.flops_for(matmul.dtype))
    return float(hardware.matmul_overhead_s + max(compute_s, matmul.bytes / hardware.hbm_bytes_per_s))


class TestFits:
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("name", ["tpu_v5p", "tpu_v5e", "h100"])
    def test_rates_and_overhead_of_noisy_matmuls_come_back(self, name: str, seed: int) -> None:
        truth = by_name(name)
        fit = fit_matmuls(
            samples(truth, ("bfloat16", "int8"), seed), truth.hbm_bytes_per_s, truth.matmul_tile
        )
        assert fit.overhead_s == pytest.approx(truth.matmul_overhead_s, rel=0.05)
        for dtype in ("bfloat16", "int8"):
            rate = truth.matmul_efficiency * truth.flops_for(dtype)
            assert fit.flops[dtype] == pytest.approx(rate, rel=0.04)
        assert fit.tile == truth.matmul_tile
        assert fit.error < 0.05

    def test_a_tile_that_explains_the_times_better_is_found(self) -> None:
        truth = dataclasses.replace(V5P, matmul_tile=(8, 256, 256))
        fit = fit_matmuls(samples(truth, ("bfloat16",)), truth.hbm_bytes_per_s, (8, 128, 128))
        assert fit.tile == (8, 256, 256)

    def test_latency_and_bandwidth_of_noisy_hops_come_back(self) -> None:
        chance = random.Random(1)
        sizes = [2.0**i for i in range(6, 28, 2)]
        times = [
            (size, Timing.of([noisy(hop_s(size, V5P), chance) for _ in range(7)]).seconds) for size in sizes
        ]
        fit = fit_hop(times)
        assert fit.latency_s == pytest.approx(1e-6, rel=0.03)
        assert fit.bytes_per_s == pytest.approx(9e10, rel=0.03)

    def test_a_bandwidth_is_a_slope_whatever_the_fixed_cost(self) -> None:
        times = [(size, 5e-3 + size / 4e11) for size in (1e6, 1e7, 1e8, 1e9)]
        times.append((3e8, 1.0))
        assert 1 / slope(times) == pytest.approx(4e11, rel=0.01)

    def test_median_and_spread_ignore_an_outlier(self) -> None:
        timing = Timing.of([1.0, 1.1, 0.9, 1.0, 50.0])
        assert timing.seconds == 1.0
        assert timing.spread == pytest.approx(0.1)

    @pytest.mark.parametrize(
        ("times", "share"), [((2.0, 1.0, 2.0), 1.0), ((2.0, 1.0, 3.0), 0.0), ((2.0, 1.0, 2.5), 0.5)]
    )
    def test_what_is_hidden_is_a_share_of_the_shorter(
        self, times: tuple[float, float, float], share: float
    ) -> None:
        assert hidden(*times) == pytest.approx(share)

    def test_times_that_say_nothing_are_refused(self) -> None:
        with pytest.raises(ValueError, match="no times"):
            Timing.of([])
        with pytest.raises(ValueError, match="positive and finite"):
            Timing.of([0.0])
        with pytest.raises(ValueError, match="fewer than three"):
            fit_matmuls([(Matmul(m=1, k=1, n=1), 1.0)], 1e9, (1, 1, 1))
        with pytest.raises(ValueError, match="no matmuls"):
            fit_matmuls([], 1e9, (1, 1, 1))
        with pytest.raises(ValueError, match="three messages"):
            fit_hop([(1, 1)])
        with pytest.raises(ValueError, match="positive and finite"):
            fit_hop([(1, 1), (2, -1), (3, 1)])
        with pytest.raises(ValueError, match="two sizes"):
            slope([(1, 1), (1, 2)])
        with pytest.raises(ValueError, match="no longer"):
            slope([(1, 2), (2, 1)])


class TestHardware:
    def test_measured_rates_are_what_the_model_then_predicts(self) -> None:
        found = measured_hardware(
            V5P, flops=[("bfloat16", 4e14), ("int8", 5e14)], matmul_overhead_s=1e-6, hbm_bytes_per_s=2e12
        )
        for dtype, rate in (("bfloat16", 4e14), ("int8", 5e14)):
            large = Matmul(m=8192, k=8192, n=8192, dtype=dtype)
            assert matmul_s(large, found) == pytest.approx(1e-6 + large.flops / rate)
        # float32 was not measured: it keeps its ratio to bfloat16, here 1.
        assert found.flops_for("float32") == found.flops_for("bfloat16")
        assert found.matmul_efficiency == pytest.approx(4e14 / 4.59e14)

    def test_rates_above_the_listed_peak_raise_it(self) -> None:
        found = measured_hardware(by_name("cpu"), flops=[("float32", 4e11)])
        assert found.matmul_efficiency == 1
        assert found.flops_for("float32") == pytest.approx(4e11)
        assert found.flops_for("float64") == pytest.approx(2e11)

    def test_a_chip_without_a_table_starts_from_one_of_its_kind_under_its_own_name(self) -> None:
        found = base_hardware("NVIDIA RTX 9090 Ti", "gpu")
        assert (found.name, found.device_kinds) == ("nvidia_rtx_9090_ti", ("NVIDIA RTX 9090 Ti",))
        assert base_hardware("TPU v5", "tpu") == V5P
        with pytest.raises(ValueError, match="no table"):
            base_hardware("abacus", "wood")


CALIBRATION = Calibration(
    hardware=V5P,
    device_kind="TPU v5",
    platform="tpu",
    devices=4,
    processes=1,
    jax_version="0.10.2",
    dtypes=("bfloat16",),
    measured=("matmul_overhead_s",),
    kept=("on_chip_bytes",),
    spread=(("matmul", 0.01),),
    error=(("matmul", 0.02),),
    axes=(
        AxisMeasured(
            size=4, between="ici", latency_s=1e-6, bytes_per_s=9e10, opposite_hops_overlap=True, overlaps=True
        ),
    ),
)


def changed(path: tuple[Any, ...], value: Any) -> str:
    """The calibration's JSON with one value replaced."""
    fields = json.loads(CALIBRATION.to_json())
    at = fields
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(fields)


class TestFiles:
    def test_hardware_is_named_or_read(self, tmp_path: Path) -> None:
        path = tmp_path / "v5p.json"
        CALIBRATION.write(path)
        assert hardware_of(str(path)) == hardware_of("tpu_v5p") == V5P
        assert hardware_of(path) == hardware_of(path.rename(tmp_path / "v5p")) == V5P
        (tmp_path / "v5p").rename(path)
        loud = tmp_path / "V5P.JSON"
        CALIBRATION.write(loud)
        assert hardware_of(str(loud)) == V5P
        assert hardware_of("TPU v5p") == V5P, "as JAX names the devices"
        with pytest.raises(ValueError, match=r"unknown hardware 'tpu_v9'; .* whose name ends in \.json"):
            hardware_of("tpu_v9")
        with pytest.raises(ValueError, match="was measured on"):
            hardware_of(str(path), "cpu")
        missing = tmp_path / "missing.json"
        with pytest.raises(FileNotFoundError) as raised:
            hardware_of(str(missing))
        assert str(raised.value) == f"{missing} cannot be read as hardware: No such file or directory"

    def test_a_file_is_read_back_unchanged(self, tmp_path: Path) -> None:
        path = tmp_path / "v5p.json"
        CALIBRATION.write(path)
        assert Calibration.read(path) == CALIBRATION
        assert Calibration.read(path, device_kind="TPU v5p") == CALIBRATION
        assert [file.name for file in tmp_path.iterdir()] == ["v5p.json"]

    def test_another_kind_of_device_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "v5p.json"
        CALIBRATION.write(path)
        with pytest.raises(ValueError) as raised:
            Calibration.read(path, device_kind="TPU v6 lite")
        said = str(raised.value)
        assert str(path) in said and "'TPU v5'" in said and "'TPU v6 lite'" in said
        assert "python -m overlap calibrate" in said

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "no JSON"),
            ("[]", "no calibration"),
            (V5P.to_json(), "no calibration"),
            (changed(("schema",), 2), "schema is 2"),
            (changed(("schema",), True), "schema is True"),
            (changed(("axes",), {}), "axes must be a list, got {}"),
            (changed(("warp",), 2), "unknown \\['warp'\\]"),
            (changed(("hardware", "hbm_bytes_per_s"), -1), "hbm_bytes_per_s"),
            (changed(("hardware", "hop_latency_s"), float("nan")), "hop_latency_s"),
            (changed(("hardware", "matmul_overhead_s"), 0), "matmul_overhead_s"),
            (changed(("hardware", "matmul_efficiency"), 1.5), "matmul_efficiency"),
            (changed(("hardware", "peak_flops"), []), "peak_flops"),
            (changed(("spread", "matmul"), float("nan")), "spread"),
            (changed(("spread",), 3), "wrong type"),
            (changed(("error", "matmul"), "small"), "error of matmul"),
            (changed(("axes", 0, "bytes_per_s"), float("inf")), "bytes_per_s of an axis"),
            (changed(("axes", 0, "latency_s"), -1e-6), "latency_s of an axis"),
            (changed(("axes", 0, "warp"), 1), "wrong type"),
            (changed(("devices",), 0), "devices"),
            (changed(("processes",), 0), "processes"),
            (changed(("device_kind",), ""), "device_kind"),
            (changed(("device_kind",), 5), "device_kind must be a string"),
            (changed(("platform",), None), "platform must be a string"),
            (changed(("devices",), True), "devices must be an integer"),
            (changed(("dtypes",), "float32"), "dtypes must be a list"),
            (changed(("dtypes",), ["float99"]), "unknown dtype 'float99'"),
            (changed(("kept",), [1]), "kept"),
            (changed(("axes", 0, "overlaps"), "no"), "overlaps of an axis must be true or false"),
            (changed(("axes", 0, "bytes_per_s"), True), "bytes_per_s of an axis must be a number"),
            (changed(("hardware", "overlaps"), "no"), "overlaps must be true or false"),
            (changed(("hardware", "on_chip_bytes"), 10**400), "on_chip_bytes is too large"),
            (changed(("error", "matmul"), 10**400), "error of matmul is too large"),
            ('{"kind":' * 200_000, "nested too deep|no JSON"),
        ],
    )
    def test_what_is_no_calibration_or_impossible_is_refused(
        self, tmp_path: Path, text: str, message: str
    ) -> None:
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as raised:
            Calibration.read(path)
        assert str(path) in str(raised.value) and "Measure again" in str(raised.value)

    def test_a_missing_field_is_named(self) -> None:
        fields = json.loads(CALIBRATION.to_json())
        del fields["measured"]
        with pytest.raises(ValueError, match="missing \\['measured'\\]"):
            Calibration.from_json(json.dumps(fields))
