"""``python -m overlap split``: its figures are those of ``best_splits``, in tables that fit a terminal."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from cost_model import by_name
from cost_model.mesh_split import best_splits
from cost_model.strategies import Model
from overlap import __main__
from passes import shims
from passes.rules import considered
from tests.overlap.calibrations import calibration
from tests.overlap.documented import undocumented

V5P = by_name("tpu_v5p")
MODEL = Model(layers=4, d_model=4096, d_ff=16384, tokens=65536, heads=32, kv_heads=8, sequence=2048)
SIZES = ("--layers", "4", "--d-model", "4096", "--d-ff", "16384", "--tokens", "65536")
ATTENTION = ("--heads", "32", "--kv-heads", "8", "--sequence", "2048")
GIVEN = ("split", "--topology", "v5p:2x4", *SIZES, *ATTENTION)


def split(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = __main__.main(arguments)
    out, errors = capsys.readouterr()
    assert status == 0, errors
    assert errors == ""  # no bar where there is no terminal
    return out


def test_json_has_every_split_with_the_prices_of_the_pass(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(split(capsys, *GIVEN, "--json"))
    assert undocumented(told, "cost_model.md", "The JSON of `split`") == set()
    figures = told["splits"]
    steps = best_splits(MODEL, V5P, (2, 4), among=considered, starts_implied=not shims.EXPLICIT_STARTS)
    assert len(figures) == len(steps) == 4
    for found, step in zip(figures, steps, strict=True):
        assert (found["mesh"]["fsdp"], found["mesh"]["tensor"]) == (step.split.fsdp, step.split.tensor)
        assert found["step_s"]["overlapped"] == step.step_s("overlapped")
        assert found["step_s"]["plain"] == step.step_s("plain")
        assert found["state_bytes"] == step.state_bytes
        saved = [c["saved_s"] for part in found["layer"].values() for c in part["collectives"]]
        per_step = MODEL.layers * sum(saved)
        assert per_step == pytest.approx(step.step_s("plain") - step.step_s("overlapped"), rel=1e-9)
    times = [found["step_s"]["overlapped"] for found in figures]
    assert times == sorted(times)


def test_the_table_has_the_fastest_first_and_says_how_many_are_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    best = best_splits(MODEL, V5P, (2, 4), among=considered)[0].split
    out = split(capsys, *GIVEN, "--rows", "2")
    rows = [line for line in out.splitlines() if "×" in line and (" s " in line or " ms " in line)]
    assert len(rows) == 2
    assert f"tensor {best.tensor}" in rows[0] or best.tensor == 1
    assert "2 more are slower: --rows 4 shows them." in out
    assert "All times are modelled" in " ".join(out.split())
    assert "gather mlp input" not in out


def test_the_collectives_of_a_layer_are_listed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    out = split(capsys, *GIVEN, "--collectives")
    assert all(part in out for part in ("forward:", "backward:", "a ring saves"))
    assert "at the end:" not in out  # nothing is reduced over data


@pytest.mark.parametrize(
    ("where", "tokens", "more"), [("v5p:4x4x4", "262144", True), ("v5e:4x4", "65536", False)]
)
def test_a_ring_that_saves_more_than_its_collective_takes_is_explained(
    where: str, tokens: str, more: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--layers", "4", "--d-model", "8192", "--d-ff", "32768", "--tokens", tokens, "--collectives")
    out = split(capsys, "split", "--topology", where, *given, "--axes", "fsdp,tensor" if more else "fsdp")
    assert (
        "A ring saves more than its collective takes where its dots are faster" in " ".join(out.split())
    ) == more


def test_no_line_is_wider_than_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--axes", "pipeline,data,fsdp,tensor", "--microbatches", "4,8", "--collectives", "--pods", "2")
    for options in (GIVEN, (*GIVEN, *more)):
        assert max(map(len, split(capsys, *options).splitlines())) <= 80


def test_memory_leaves_out_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    every = json.loads(split(capsys, *GIVEN, "--axes", "data,fsdp,tensor", "--json"))["splits"]
    least = min(found["state_bytes"] for found in every)
    limit = ("--memory", str(1.5 * least / 2**30))
    fit = json.loads(split(capsys, *GIVEN, "--axes", "data,fsdp,tensor", *limit, "--json"))["splits"]
    assert 0 < len(fit) < len(every)
    assert all(found["state_bytes"] <= 1.5 * least for found in fit)


def test_gpus_behind_a_switch_and_several_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    out = split(capsys, "split", "--topology", "h100:8", "--pods", "2", *SIZES)
    assert "8 h100 in each of 2 pods (16 devices)" in " ".join(out.split())
    assert "pods 2 × tensor 8" in out
    assert "Of the first" not in out  # a switch has no dimensions
    out = split(capsys, "split", "--topology", "h100:16", *SIZES)
    assert "on 2 hosts of 8 h100, each behind one switch (16 devices)" in " ".join(out.split())


def test_numbers_of_microbatches_that_fit_no_split_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    many = ("--axes", "pipeline,fsdp", "--microbatches", "4,99999999", "--json")
    assert __main__.main((*GIVEN, *many)) == 0
    out, errors = capsys.readouterr()
    assert {step["microbatches"] for step in json.loads(out)["splits"]} == {1, 4}
    assert errors == "overlap split: no split with 99999999 microbatches fits the model\n"


def test_one_device_has_one_split(capsys: pytest.CaptureFixture[str]) -> None:
    assert "one device" in split(capsys, "split", "--topology", "v5p:1", *SIZES)


def test_hardware_may_be_a_calibration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    calibration(dataclasses.replace(V5P, link_bytes_per_s=9e8)).write(path)
    slow = json.loads(split(capsys, "split", "--topology", "2x4", "--hardware", str(path), *SIZES, "--json"))
    fast = json.loads(split(capsys, "split", "--topology", "v5p:2x4", *SIZES, "--json"))
    assert slow["splits"][0]["step_s"]["plain"] > 2 * fast["splits"][0]["step_s"]["plain"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--topology", "4x4"), "needs --hardware, or its name"),
        (("--topology", "v9:4x4"), "v9"),
        (("--topology", "v5p:4by4"), "no shape of a slice"),
        (("--topology", "v5p:4x4", "--hardware", "tpu_v4"), "says tpu_v4"),
        (("--topology", "h100:100000"), "topology 'h100:100000' is too large"),
        (
            ("--hardware", "no.json"),
            "--hardware no.json cannot be read as hardware: No such file or directory\n",
        ),
        (("--hardware", "v5p"), "did you mean 'tpu_v5p'?"),
        (("--layers", "0"), "--layers 0: a model has at least 1"),
        (("--kv-heads", "5"), "--kv-heads 5 must divide --heads 32"),
        (("--heads", "0"), "--sequence 2048 needs heads"),
        (("--heads", "0", "--sequence", "0"), "--kv-heads 8 needs heads"),
        (("--sequence", "-5"), "--sequence -5 must not be negative"),
        (("--dtype", "soft"), "unknown dtype"),
        (("--tokens", "7"), "--tokens 7 are no whole number of sequences of 2048"),
        (("--axes", "fsdp,fsdp"), "a mesh axis stands twice in fsdp, fsdp"),
        (("--topology", "v5e:4x4x4"), "no slice of tpu_v5e: its pods have 16×16 chips"),
        (("--axes", "fsdp,time"), "unknown mesh axis 'time'"),
        (("--microbatches", "4,x"), "no numbers from 1 on"),
        (("--microbatches", "0"), "no numbers from 1 on"),
        (
            ("--microbatches", "4"),
            "--microbatches 4 is of no use without a pipeline: give --axes pipeline,fsdp",
        ),
        (("--memory", "0"), "leaves no room"),
        (("--memory", "nan"), "leaves no room"),
        (
            ("--memory", "0.001"),
            "the model fits no split of 2x4; tensor 8, which needs the least memory, needs ",
        ),
        (("--memory", "0.001"), " GiB of a device for weights and Adam's state, more than --memory 0.001\n"),
        (
            ("--tokens", "7", "--sequence", "0", "--axes", "fsdp"),
            "the last tried, fsdp 8: --tokens 7 cannot be cut into 8 equal",
        ),
        (("--rows", "0"), "at least one"),
        (("--pods", "0"), "--pods 0: there is at least 1"),
        (("--pods", "7"), "--tokens 65536 cannot be cut evenly over --pods 7"),
    ],
)
def test_options_of_no_use_give_a_sentence(
    more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main((*GIVEN, *more)) == 2
    out, errors = capsys.readouterr()
    assert out == "" and errors.startswith("overlap split: ") and message in errors
    assert "Traceback" not in errors


def test_a_bar_shows_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert __main__.main(GIVEN) == 0
    assert "pricing splits" in capsys.readouterr().err
