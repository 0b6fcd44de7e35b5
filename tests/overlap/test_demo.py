"""The demo trains alike with and without rings, reports, and counts what the compiled programs contain."""

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from rich.cells import cell_len

from overlap import __main__, tpu_target
from overlap.demo import count_collectives
from overlap.hlo.parse import parse

ROOT = Path(__file__).parents[2]


def overlap(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m overlap`` in a process of its own, whose environment knows nothing of the tests'."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-m", "overlap", *arguments],
        cwd=cwd,
        env={**kept, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=500,
    )


@cache
def demo() -> str:
    """The output of the demo without its TPU part."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        flags = "--xla_force_host_platform_device_count=3"
        done = overlap("demo", "--no-tpu", "--report", str(report), XLA_FLAGS=flags)
        assert done.returncode == 0, done.stderr
        assert "original → overlapped, modelled" in report.read_text("utf-8")
        assert report.as_uri() in done.stdout
    return done.stdout


def test_what_cannot_be_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    done = overlap("demo", "--no-tpu", "--report", str(tmp_path / "none" / "page.html"))
    assert done.returncode == 2
    assert done.stderr.startswith("overlap demo: cannot write ") and "Traceback" not in done.stderr
    assert not done.stdout
    done = overlap("demo", "--seed", "99999999999999999999")
    assert done.returncode == 2 and "is no number from 0 to 4294967295" in done.stderr


class TestDemo:
    def test_losses_are_equal_at_every_step_and_fall(self) -> None:
        steps = re.findall(r"^(\d+) +(\d\.\d+) +(\d\.\d+) +\S+$", demo(), re.MULTILINE)
        assert [int(step) for step, _, _ in steps] == list(range(10))
        for _, original, overlapped in steps:
            assert float(overlapped) == pytest.approx(float(original), rel=1e-5)
        assert float(steps[-1][1]) < float(steps[0][1]) - 1
        assert "Losses equal to 1e-5 relative" in demo()

    def test_rings_take_the_place_of_collectives(self) -> None:
        counts = {
            name: (int(a), int(b)) for name, a, b in re.findall(r"^([a-z-]+) +(\d+) +(\d+)$", demo(), re.M)
        }
        assert counts["collective-permute"][0] == 0
        assert counts["collective-permute"][1] > 10
        assert counts["all-gather"][0] > counts["all-gather"][1]
        assert counts["reduce-scatter"][0] > counts["reduce-scatter"][1]
        assert counts["all-reduce"][0] == counts["all-reduce"][1]

    def test_report_for_tpu_v5p_tells_of_every_site(self) -> None:
        found = re.search(r"train_step: (\d+) of (\d+) collectives rewritten; modelled", demo())
        assert found is not None
        rewritten, sites = int(found[1]), int(found[2])
        assert 0 < rewritten < sites
        assert (
            len(re.findall(r"^ *\d+ +(?:all_gather|reduce_scatter|psum|dot_)", demo(), re.MULTILINE)) == sites
        )
        assert "profitable (site" in demo()

    def test_says_that_it_skipped_the_tpu(self) -> None:
        assert "Skipped: --no-tpu was given." in demo()

    def test_fits_80_columns_without_colours(self) -> None:
        assert max(map(cell_len, demo().splitlines())) <= 80
        assert "\x1b" not in demo()

    def test_outside_of_a_checkout_says_where_to_run_it(self, tmp_path: Path) -> None:
        hidden = (
            "import sys; sys.modules['bench'] = None\n"
            "from overlap.__main__ import main; sys.exit(main(['demo']))"
        )
        command = [sys.executable, "-c", hidden]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "bench" in done.stderr
        assert "root of a checkout" in done.stderr
        assert "Traceback" not in done.stderr


class TestCommandLine:
    def test_without_a_command_prints_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert __main__.main([]) == 0
        out = capsys.readouterr().out
        assert out.startswith("usage: python -m overlap")
        assert "demo" in out

    def test_unknown_command_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_:
            __main__.main(["dance"])
        assert exit_.value.code == 2
        assert "dance" in capsys.readouterr().err

    def test_interruption_is_no_traceback(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted(**_: object) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr("overlap.demo.run", interrupted)
        assert __main__.main(["demo"]) == 130
        assert capsys.readouterr().err == "interrupted\n"


class TestCountCollectives:
    def test_counts_instructions_once_and_nothing_else(self) -> None:
        hlo = """
HloModule jit_all_gather, is_scheduled=true

%all-gather_fusion (a: f32[4,64]) -> f32[4,64] {
  %a = f32[4,64]{1,0} parameter(0)
  ROOT %all-gather.2 = f32[4,64]{1,0} all-gather(%a), channel_id=2, dimensions={0}
}

ENTRY %main (p: f32[1,64], y: bf16[1,128]) -> f32[4] {
  %p = f32[1,64]{1,0} parameter(0)
  %y = bf16[1,128]{1,0} parameter(1)
  %all-gather.1 = f32[4,64]{1,0} all-gather(%p), channel_id=1, dimensions={0}
  %x = bf16[8,128]{1,0} all-gather(%y), metadata={op_name="jit(f)/reduce-scatter(x)"}
  %s = (bf16[8]{0}, /*index=1*/u32[]{:S(2)}) collective-permute-start(%x), channel_id=4
  %d = bf16[8]{0} collective-permute-done(%s)
  %all-reduce-start = f32[] all-reduce-start(%d)
  %fusion = f32[4]{0} fusion(%all-gather.1), kind=kLoop, calls=%all-gather_fusion
  %t = (f32[2]{0}, f32[2]{0}) all-reduce(%d, %d)
  ROOT %reduce-scatter.3 = f32[4]{0} reduce-scatter(%fusion)
}
"""
        counts = {"all-gather": 3, "reduce-scatter": 1, "all-reduce": 2, "collective-permute": 1}
        assert count_collectives(parse(hlo)) == counts


class TestTpuTarget:
    def test_names_the_platform_that_lacks_the_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("platform.system", lambda: "Darwin")
        monkeypatch.setattr("platform.machine", lambda: "arm64")
        missing = tpu_target.missing()
        assert missing is not None
        assert "arm64 Darwin" in missing

    def test_says_how_to_install_the_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("platform.system", lambda: "Linux")
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        missing = tpu_target.missing()
        assert missing is not None
        assert "overlap-collectives[tpu]" in missing
