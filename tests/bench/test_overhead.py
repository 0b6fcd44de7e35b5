"""The overhead benchmark runs, and says what it measured; how long things take is not tested."""

# mypy: allow-untyped-calls

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from bench import overhead
from tests.calls import calls_in


def test_a_quick_run_writes_figures_and_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(["--quick", "--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    content = json.loads((tmp_path / "overhead.json").read_text())
    assert content["quick"] is True
    assert content["versions"]["jax"] == jax.__version__
    assert {figure["unit"] for figure in content["figures"]} == {"µs", "×", "s"}
    for figure in content["figures"]:
        assert figure["name"] in shown
        assert figure["name"] in (tmp_path / "overhead.md").read_text()


def test_the_programs_have_the_equations_and_chains_that_are_said() -> None:
    function, arguments = overhead.decoder_layers(2)
    assert str(jax.make_jaxpr(function)(*arguments)).count("= all_gather[") == 2 * 9
    assert str(jax.make_jaxpr(function)(*arguments)).count("= reduce_scatter[") == 2 * 2
    function, arguments = overhead.dense_layers(2, collectives=False)
    assert "all_gather" not in str(jax.make_jaxpr(function)(*arguments))


def test_a_missed_target_is_seen() -> None:
    figure = overhead.Figure(name="n", base="b", full="f", value=3.0, target=2.0, unit="×")
    assert not figure.met
    assert "**no**" in overhead.table([figure])


@pytest.mark.parametrize(
    ("program", "most"),
    [
        (lambda: overhead.dense_layers(80, collectives=False), 1.3),
        (lambda: overhead.decoder_layers(8), 4.5),
    ],
    ids=["nothing to rewrite", "rings"],
)
def test_rewriting_calls_few_functions_beside_those_of_tracing(
    program: Callable[[], tuple[Any, Any]], most: float
) -> None:
    def calls(policy: str | None) -> int:
        function, arguments = program()
        return calls_in(lambda: overhead.trace_s(function, arguments, policy))

    calls("always")  # what is made once in a process
    assert calls("always") <= most * calls(None)
