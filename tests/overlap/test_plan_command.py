"""``python -m overlap plan``: its prices are those of the pass, its words and picture those of the prices."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from cost_model import Axis, by_name
from cost_model.explanation import explain
from cost_model.form import Form
from cost_model.plain_chain import PlainChain, chain_of, forms, price
from overlap import __main__, overlap_collectives
from passes import shims
from passes.candidates import candidates
from passes.pricing import pricer
from passes.rules import considered
from passes.schedule import RingSchedule
from tests.overlap.calibrations import calibration
from tests.overlap.documented import undocumented
from tests.passes import bodies

V5P = by_name("tpu_v5p")
P = 4
M, K, N = 4096, 2048, 1024


def gathered(x: Any, dim: int) -> Any:
    return lax.all_gather(x, "x", axis=dim, tiled=True)


def scattered(y: Any, dim: int) -> Any:
    return lax.psum_scatter(y, "x", scatter_dimension=dim, tiled=True)


def exchanged(x: Any) -> Any:
    return lax.all_to_all(x, "x", split_axis=0, concat_axis=0, tiled=True)


PROGRAMS: dict[str, tuple[Any, tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "gather rows": (lambda x, w: gathered(x, 0) @ w, (M // P, K), (K, N), {"pattern": "all_gather_dot"}),
    "gather columns of the weight": (
        lambda x, w: x @ gathered(w, 1),
        (M, K),
        (K, N // P),
        {"pattern": "all_gather_dot", "cut": "n"},
    ),
    "gather the contracting dim": (
        lambda x, w: gathered(x, 1) @ w,
        (M, K // P),
        (K, N),
        {"pattern": "all_gather_dot", "cut": "k"},
    ),
    "gather the weight's contracting dim": (
        lambda x, w: x @ gathered(w, 0),
        (M, K),
        (K // P, N),
        {"pattern": "all_gather_dot", "cut": "k", "operand": "rhs"},
    ),
    "scatter rows": (lambda x, w: scattered(x @ w, 0), (M, K), (K, N), {"pattern": "dot_reduce_scatter"}),
    "scatter columns": (
        lambda x, w: scattered(x @ w, 1),
        (M, K),
        (K, N),
        {"pattern": "dot_reduce_scatter", "cut": "n"},
    ),
    "psum": (lambda x, w: lax.psum(x @ w, "x"), (M, K), (K, N), {"pattern": "dot_psum"}),
    "all_to_all before": (lambda x, w: exchanged(x) @ w, (M, K), (K, N), {"pattern": "all_to_all_dot"}),
    "all_to_all after": (lambda x, w: exchanged(x @ w), (M, K), (K, N), {"pattern": "dot_all_to_all"}),
}


def of_shape(options: dict[str, Any], dtype: str) -> PlainChain:
    options = {**options, "starts_implied": not shims.EXPLICIT_STARTS}
    return chain_of(
        options["pattern"], M, K, N, dtype=dtype, **{k: v for k, v in options.items() if k != "pattern"}
    )


def form_of(schedule: RingSchedule, gathers: bool) -> Form:
    """The part of a schedule that has a price."""
    return Form(
        route="ring" if schedule.route == "exchange" else schedule.route,
        directions=schedule.directions,
        rings=schedule.rings,
        walks=schedule.walks,
        chains=schedule.chains,
        columns=schedule.columns,
        across=schedule.across,
        joined=schedule.joined,
        halfway=schedule.halfway,
        late=schedule.late,
        cut=schedule.cut,
        wide_wire=not gathers and schedule.route == "ring" and schedule.wire == "float32",
    )


class TestTheSameAsThePass:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize("program", PROGRAMS)
    def test_the_best_form_has_the_estimate_of_the_site(self, program: str, dtype: str) -> None:
        body, x, w, options = PROGRAMS[program]
        mesh = jax.make_mesh((P,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:P])
        jitted = jax.jit(
            jax.shard_map(
                lambda x, w: body(x[0], w[0])[None],
                mesh=mesh,
                in_specs=PartitionSpec("x"),
                out_specs=PartitionSpec("x"),
                check_vma=False,
            )
        )
        arguments = [jax.ShapeDtypeStruct((P, *shape), dtype) for shape in (x, w)]
        (site,) = overlap_collectives(jitted, hardware="tpu_v5p", strict=True).explain(*arguments).sites
        assert site.kind == options["pattern"]
        chain, axis = of_shape(options, dtype), Axis(V5P, P)
        found = explain(chain, axis, considered(chain, axis))
        if options["pattern"] == "dot_psum" and site.estimate is not None:
            # The pass takes the dim of the sum that it likes best: rows or columns.
            other = chain_of("dot_psum", M, K, N, dtype=dtype, cut="n")
            columns = explain(other, axis, considered(other, axis))
            assert site.estimate in (found.best.estimate, columns.best.estimate)
        else:
            assert found.best.estimate == site.estimate
        assert found.pays == (site.reason == "profitable")

    @pytest.mark.parametrize("hardware", ["tpu_v5p", "tpu_v5e", "tpu_7x", "h100", "cpu"])
    @pytest.mark.parametrize("program", [name for name in PROGRAMS if name != "psum"])
    def test_every_schedule_of_a_search_has_its_price(self, program: str, hardware: str) -> None:
        body, x, w, options = PROGRAMS[program]
        shards = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (x, w)]
        flow, (match,) = bodies.matched(body, *shards, axis_size=P)
        assert isinstance(match.found, tuple)
        axis = Axis(by_name(hardware), P)
        plain = of_shape(options, "bfloat16")
        (chain,) = match.found
        on_pass = {
            form_of(schedule, plain.gathers): pricer(flow, chain, axis)(schedule)
            for schedule in candidates(flow, chain, axis, thorough=True)
        }
        exchanged = options["pattern"] in ("all_to_all_dot", "dot_all_to_all")
        assert exchanged or set(forms(plain, axis)) == set(on_pass)
        for form, priced in on_pass.items():
            assert price(plain, form, axis) == priced

    @pytest.mark.parametrize("program", ["scatter rows", "gather rows", "gather the contracting dim"])
    def test_the_forms_considered_are_those_of_the_chip_s_rule(self, program: str) -> None:
        body, x, w, options = PROGRAMS[program]
        shards = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (x, w)]
        for hardware in ("tpu_v5e", "tpu_v5p", "tpu_7x", "h100"):
            axis = Axis(by_name(hardware), P)
            flow, (match,) = bodies.matched(body, *shards, axis_size=P)
            assert isinstance(match.found, tuple)
            plain = of_shape(options, "bfloat16")
            of_pass = {form_of(s, plain.gathers) for s in candidates(flow, match.found[0], axis)}
            assert set(considered(plain, axis)) == of_pass


GIVEN = ("plan", "--pattern", "all_gather_dot", "--shape", "8192,8192,2048")
ON_16 = (*GIVEN, "--hardware", "tpu_v5p", "--axis-size", "16")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = __main__.main(arguments)
    out, errors = capsys.readouterr()
    assert status == 0, errors
    return out


class TestTheCommand:
    def test_tells_terms_verdict_and_break_even(self, capsys: pytest.CaptureFixture[str]) -> None:
        out = plan(capsys, *ON_16)
        assert "all_gather of 128.0 MiB" in out and "rewriting pays." in out
        assert "tokens per device, here 512: pays from " in out
        assert "devices on the axis, here 16: " in out
        assert "links of the axis, one way, here 90 GB/s: pays from " in out

    def test_no_line_is_wider_than_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        for options in (ON_16, (*GIVEN, "--topology", "v5p:4x4x4", "--cut", "k")):
            assert max(map(len, plan(capsys, *options).splitlines())) <= 80

    def test_gpus_are_given_by_their_number(self, capsys: pytest.CaptureFixture[str]) -> None:
        alone = plan(capsys, *GIVEN, "--hardware", "h100", "--axis-size", "8")
        of_host = plan(capsys, *GIVEN, "--topology", "h100:16", "--axis-size", "8")
        assert "(2 hosts of 8 h100, each behind one switch)" in " ".join(of_host.split())
        best = [next(line for line in out.splitlines() if "The best" in line) for out in (alone, of_host)]
        assert best[0] == best[1]
        both = plan(capsys, *GIVEN, "--topology", "h100:16")
        assert "all_gather_dot over 16 devices of h100 (2 hosts of 8 h100" in both

    def test_json_has_the_same_figures(self, capsys: pytest.CaptureFixture[str]) -> None:
        figures = json.loads(plan(capsys, *ON_16, "--json"))
        assert undocumented(figures, "cost_model.md", "The JSON of `plan`") == set()
        chain, axis = chain_of("all_gather_dot", 8192, 8192, 2048), Axis(V5P, 16)
        best = explain(chain, axis, considered(chain, axis)).best
        assert figures["candidates"][0]["benefit_s"] == best.estimate.benefit_s
        assert [each["variable"] for each in figures["break_even"]] == ["tokens", "axis_size", "bandwidth"]
        for each in figures["break_even"]:
            gains = [1 - p["overlapped_s"] / p["original_s"] >= V5P.least_gain for p in each["points"]]
            assert sum(a != b for a, b in itertools.pairwise(gains)) == len(each["crossings"])

    def test_a_slice_is_taken_for_what_it_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        out = plan(capsys, *GIVEN, "--topology", "v5p:4x4x4", "--axis-size", "16")
        assert "4x4x4 tpu_v5p chips, wrapping around in x, y, z" in " ".join(out.split())
        assert "2 rings" in out and "devices on the axis" not in out

    def test_hardware_may_be_a_calibration(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = tmp_path / "slow.json"
        calibration(dataclasses.replace(V5P, link_bytes_per_s=9e8)).write(path)
        out = plan(capsys, *GIVEN, "--hardware", str(path), "--axis-size", "16")
        assert "here 0.9 GB/s" in out

    def test_collectives_may_be_offloaded(self, capsys: pytest.CaptureFixture[str]) -> None:
        shape = ("plan", "--pattern", "dot_psum", "--shape", "4096,4096,4096", "--axis-size", "16")
        for where in (("--hardware", "tpu_v6e"), ("--topology", "v6e:4x4")):
            assert "all_reduces in turn" not in plan(capsys, *shape, *where)
            assert "By 16 all_reduces in turn" in plan(capsys, *shape, *where, "--offload")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((*ON_16[:-3], "h100", *ON_16[-2:], "--offload"), "no compiler options for it on h100"),
            (GIVEN, "give --hardware and --axis-size"),
            ((*GIVEN, "--hardware", "tpu_v5p"), "give --hardware and --axis-size"),
            ((*GIVEN, "--hardware", "abacus", "--axis-size", "4"), "unknown hardware 'abacus'"),
            (
                (*GIVEN, "--hardware", "no.json", "--axis-size", "4"),
                "--hardware no.json cannot be read as hardware: No such file or directory\n",
            ),
            ((*GIVEN, "--hardware", "v5p", "--axis-size", "4"), "did you mean 'tpu_v5p'?"),
            ((*ON_16, "--plot", ""), "--plot is empty: name a file, such as plan.png"),
            ((*GIVEN, "--hardware", "tpu_v5p", "--axis-size", "1"), "fewer than 2 devices"),
            ((*GIVEN, "--hardware", "tpu_v5p", "--axis-size", "3"), "M = 8192 cannot be cut evenly over 3"),
            ((*GIVEN, "--topology", "4x4"), "needs --hardware"),
            ((*GIVEN, "--topology", "v5p:4x4", "--hardware", "tpu_v4"), "says tpu_v4"),
            ((*GIVEN, "--topology", "v5p:4x4", "--axis-size", "3"), "does not divide"),
            ((*GIVEN[:-1], "1,2", "--hardware", "tpu_v5p", "--axis-size", "4"), "is not M,K,N"),
            ((*ON_16, "--dtype", "soft"), "unknown dtype"),
            (
                ("plan", "--pattern", "dot_psum", "--shape", f"8,8,{10**400}", *ON_16[-4:]),
                "N must be below 2**63",
            ),
            ((*ON_16, "--dtype", "float99"), "unknown dtype 'float99'; known: bool, float4"),
            ((*ON_16, "--operand", "rhs"), "the rhs's dims are k or n, and m is cut"),
            ((*ON_16, "--dtype", "bf16"), "unknown dtype 'bf16', did you mean 'bfloat16'? known: bool, "),
            (
                (
                    *("plan", "--pattern", "dot_psum", "--shape", "64,64,64", "--cut", "k"),
                    *("--hardware", "tpu_v5p", "--axis-size", "4"),
                ),
                "dot_psum scatters a dim of the dot's result, m or n, not k\n",
            ),
        ],
    )
    def test_options_of_no_use_give_a_sentence(
        self, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert __main__.main(arguments) == 2
        out, errors = capsys.readouterr()
        assert out == "" and errors.startswith("overlap plan: ") and message in errors
        assert "Traceback" not in errors


class TestThePicture:
    def test_without_matplotlib_the_option_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        for name in ("matplotlib", "matplotlib.figure"):
            monkeypatch.setitem(sys.modules, name, None)
        assert __main__.main((*ON_16, "--plot", str(tmp_path / "out.png"))) == 2
        errors = capsys.readouterr().err
        assert "pip install matplotlib" in errors and "Traceback" not in errors

    def test_it_is_drawn_in_the_format_of_its_name(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        pytest.importorskip("matplotlib")
        out = plan(capsys, *ON_16, "--plot", str(tmp_path / "out.svg"))
        assert "Wrote" in out
        drawn = (tmp_path / "out.svg").read_text("utf-8")
        assert drawn.startswith("<?xml") and len(drawn) > 5000
        assert __main__.main((*ON_16, "--plot", str(tmp_path / "out.nonsense"))) == 2
        assert "out.nonsense cannot be drawn: format 'nonsense' is not supp" in capsys.readouterr().err

    def test_it_is_named_as_it_is_written(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        assert f"Wrote {tmp_path / 'out'}.png\n" in plan(capsys, *ON_16, "--plot", str(tmp_path / "out"))
        assert [file.name for file in tmp_path.iterdir()] == ["out.png"]
        missing = str(tmp_path / "nodir" / "out.svg")
        assert __main__.main((*ON_16, "--plot", missing)) == 2
        said = f"overlap plan: --plot {missing} cannot be written: no such file or directory\n"
        assert capsys.readouterr().err == said
        assert __main__.main((*ON_16, "--plot", str(tmp_path))) == 2
        assert f"{tmp_path} is a directory: name a file" in capsys.readouterr().err
        assert not tmp_path.with_suffix(".png").exists()
