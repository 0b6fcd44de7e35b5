"""The report is legible in 80 columns, says what to do about each site, and survives JSON unchanged."""

import dataclasses
import io
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from cost_model import Estimate
from overlap import Report, Site
from passes import Code, Reason

ESTIMATE = Estimate(
    dot_s=4e-4, collective_s=1e-4, partials_s=4.1e-4, hops_s=1e-4, hop_latency_s=3e-6, overlapped_s=4.2e-4
)


def site(code: Code = Code.PROFITABLE, detail: str = "", **changes: Any) -> Site:
    """A site of the longest usual width, with some fields changed."""
    fields: dict[str, Any] = {
        "kind": "dot_reduce_scatter",
        "axis": "tensor",
        "axis_size": 16,
        "source": "/home/me/model/decoder.py:1175 (scatter_sequence)",
        "path": "shard_map/scan",
        "count": 1,
        "operand": "bf16[8,4096,4096]",
        "result": "bf16[8,1024,4096]",
        "dots": ("bf16[8,4096,3584] · bf16[3584,4096] at /home/me/model/decoder.py:1194 (mlp_block)",),
        "rewritten": code is Code.PROFITABLE,
        "reason": str(code),
        "sentence": Reason(code, detail).sentence,
        "schedule": "unidirectional",
        "estimate": ESTIMATE,
    }
    return Site(**{**fields, **changes})


finite = st.floats(allow_nan=False, allow_infinity=False)
estimates = st.builds(
    Estimate,
    **{field.name: finite for field in dataclasses.fields(Estimate)},
)
sites = st.builds(
    Site,
    kind=st.sampled_from(["all_gather_dot", "dot_reduce_scatter", "psum"]) | st.text(),
    axis=st.text(),
    axis_size=st.integers(1),
    source=st.text(),
    path=st.text(),
    count=st.integers(0),
    operand=st.text(),
    result=st.text(),
    dots=st.lists(st.text(), max_size=3).map(tuple),
    rewritten=st.booleans(),
    reason=st.sampled_from([str(code) for code in Code]) | st.text(),
    sentence=st.text(),
    schedule=st.text(),
    estimate=st.none() | estimates,
)
reports = st.builds(Report, st.lists(sites, max_size=4).map(tuple), name=st.text(), hint=st.text())


class TestNotebook:
    def test_the_repr_is_short(self) -> None:
        found = Report((site(), site(Code.NO_DOT)), name="step")
        assert repr(found) == "<Report of step: 1 of 2 collectives rewritten>"

    def test_it_is_shown_as_a_table_with_totals_and_reasons(self) -> None:
        found = Report((site(), site(Code.NOT_PROFITABLE, "It stops at x.")), name="step")
        shown = found._repr_html_()
        assert shown.count("<tr>") == 3 and shown.count("<table>") == 1
        for text in ("dot_reduce_scatter<br>tensor (16)", "decoder.py:1175<br>scatter_sequence"):
            assert text in shown
        assert "step: 1 of 2 collectives rewritten" in shown and "not_profitable (site 2): " in shown
        assert "<table>" not in Report((), name="step")._repr_html_()

    @given(reports)
    def test_no_text_of_a_site_becomes_markup(self, report: Report) -> None:
        hostile = "<script>alert(1)</script>"
        sites = tuple(dataclasses.replace(s, source=hostile, axis=hostile) for s in report.sites)
        tags = re.findall(r"<(\w+)", Report(sites, hostile)._repr_html_())
        assert set(tags) <= {"div", "table", "thead", "tbody", "tr", "th", "td", "p", "br"}


def test_printing_never_fails_for_want_of_a_sign(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job of the user's that prints to a log in ASCII ended in a UnicodeEncodeError."""
    report, log = Report((site(),), name="step"), io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", log)
    print(report)
    log.flush()
    printed = log.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "?s" in printed and "µs" in report.text()


class TestTable:
    @pytest.mark.parametrize("width", [40, 80, 100, 120])
    def test_no_line_is_wider_than_asked(self, width: int) -> None:
        report = Report(tuple(site(code, "It stops at x.", count=9) for code in Code), name="train_step")
        assert max(map(cell_len, report.text(width).splitlines())) <= width

    @given(st.lists(sites, min_size=1, max_size=3).map(tuple), st.integers(80, 130))
    def test_any_text_in_a_site_fits_and_renders(self, found: tuple[Site, ...], width: int) -> None:
        text = Report(found).text(width)
        assert f"{sum(s.rewritten for s in found)} of {len(found)} collective" in " ".join(text.split())
        assert max(cell_len(line) for line in text.split("\n")) <= width

    def test_no_cell_is_broken_in_80_columns(self) -> None:
        codes = [str(code) for code in Code]
        text = Report(tuple(site(code, count=32) for code in Code)).text(80)
        table = text[: text.index("rewritten; modelled")]
        for word in ("dot_reduce_scatter", "tensor (16) ×32", "scatter_sequence", "decoder.py:1175", *codes):
            assert word in table

    @pytest.mark.parametrize("width", [94, 120])
    def test_types_are_shown_where_no_name_need_be_broken_for_them(self, width: int) -> None:
        flat = site(Code.PARTIAL_SUM_ESCAPES, operand="bf16[4096,4096]", result="bf16[1024,4096]")
        deep = dataclasses.replace(flat, operand="bf16[8,16,1024,128,64]")
        shown, left_out = Report((flat,)).text(width), Report((flat, deep)).text(width)
        for word in ("dot_reduce_scatter", "scatter_sequence", "partial_sum_escapes", "420 ×1.19"):
            assert word in shown and word in left_out.split("collectives rewritten")[0]
        assert "bf16[4096,4096]" in shown
        assert ("bf16[8,16,1024,128,64]" in left_out) is (width == 120)
        assert ("bf16" in left_out) is (width == 120)

    def test_functions_are_named_by_the_innermost_that_has_a_name(self) -> None:
        for written, shown in {
            "attention.<locals>.<genexpr>": "attention",
            "make_step.<locals>.loss": "loss",
            "Block.__call__": "Block.__call__",
            "<lambda>": "<lambda>",
        }.items():
            row = Report((site(source=f"layer.py:1 ({written})"),)).text(100).splitlines()[4]
            assert row.split()[2] == shown

    def test_hint_comes_last(self) -> None:
        report = Report((site(),), hint="Try it [both] ways.")
        assert report.text(100).endswith("\n\nTry it [both] ways.")
        assert report._repr_html_().count("Try it [both] ways.") == 1
        assert "Try" not in Report((), hint=report.hint).text(100)

    def test_row_tells_decision_reason_schedule_and_times(self) -> None:
        rows = Report((site(),)).text(100).splitlines()[3:5]
        assert rows[0].split() == [
            *("1", "dot_reduce_scatter", "decoder.py:1175", "bf16[8,4096,4096]", "rewritten"),
            *("500", "→", "420", "×1.19"),
        ]
        assert rows[1].split() == [
            *("tensor", "(16)", "scatter_sequence", "→", "bf16[8,1024,4096]", "profitable"),
            "unidirectional",
        ]

    def test_site_without_estimate_shows_no_times(self) -> None:
        text = Report((site(Code.NO_DOT, estimate=None, schedule=""),)).text(80)
        assert "×" not in text.split("collective rewritten")[0].split("──\n")[1]

    def test_totals_count_every_execution(self) -> None:
        report = Report((site(count=10), site(count=5), site(Code.NOT_PROFITABLE, count=1000)), name="step")
        assert math.isclose(report.saved_s, 15 * 8e-5)
        assert (
            "step: 2 of 3 collectives rewritten; modelled, per call: 1.20 ms saved of the 7.50 ms"
            in report.text(100)
        )

    def test_totals_admit_a_loss(self) -> None:
        slower = dataclasses.replace(ESTIMATE, overlapped_s=6e-4)
        text = Report((site(Code.POLICY_ALWAYS, rewritten=True, estimate=slower),)).text(100)
        assert "1 of 1 collective rewritten; modelled, per call: 100 µs lost of the 500 µs" in text

    def test_totals_tell_of_rings_without_an_estimate(self) -> None:
        text = Report((site(estimate=None),)).text(100)
        assert "1 of 1 collective rewritten; 1 without an estimate." in text

    def test_legend_gives_each_reason_once_with_its_sites_and_details(self) -> None:
        stops = "It stops at sort, /home/me/model/decoder.py:7 (f)."
        report = Report(
            (
                site(Code.NO_DOT, stops),
                site(),
                site(Code.NO_DOT, stops),
                site(Code.NO_DOT, "It stops at top_k, unknown."),
                site(Code.UNSUPPORTED_COLLECTIVE, "(psum)"),
                site(Code.NO_DOT, stops),
            )
        )
        text = report.text(120)
        assert (
            "no_dot (sites 1, 3, 4, 6): No dot is reached through equations that act block by block." in text
        )
        assert "    1, 3, 6: It stops at sort, decoder.py:7 (f).\n" in text
        assert "    4: It stops at top_k, unknown.\n" in text
        assert f"profitable (site 2): {Reason(Code.PROFITABLE).sentence}\n" in text
        unsupported = Reason(Code.UNSUPPORTED_COLLECTIVE, "(psum)").sentence
        assert f"unsupported_collective (site 5): {unsupported}" in " ".join(text.split())
        assert text.count(Reason(Code.NO_DOT).sentence) == 1

    def test_legend_draws_runs_of_sites_together(self) -> None:
        assert "profitable (sites 1-5): " in Report(tuple(site() for _ in range(5))).text(100)

    def test_reason_of_another_version_keeps_its_sentence(self) -> None:
        text = Report((site(reason="moon_phase", sentence="The moon was full."),)).text(100)
        assert "moon_phase (site 1): The moon was full." in text

    def test_files_of_one_name_keep_enough_of_their_paths(self) -> None:
        found = (site(source="/a/encoder/layer.py:1 (f)"), site(source="/a/decoder/layer.py:2 (f)"))
        text = Report(found).text(120)
        assert "encoder/layer.py:1" in text
        assert "decoder/layer.py:2" in text
        assert "/a/" not in text

    def test_loops_of_unknown_length_are_pointed_out(self) -> None:
        assert "while loops are counted once" in Report((site(path="shard_map/while"),)).text(120)
        assert "while loops" not in Report((site(),)).text(120)

    def test_what_is_hidden_as_written_is_pointed_out(self) -> None:
        hidden = dataclasses.replace(ESTIMATE, hidden_s=1e-6)
        assert "other dots hide" in " ".join(Report((site(estimate=hidden),)).text(120).split())
        assert "other dots hide" not in " ".join(Report((site(estimate=ESTIMATE),)).text(120).split())

    def test_brackets_are_not_taken_for_markup(self) -> None:
        assert "f32[red]" in Report((site(operand="f32[red]"),)).text(120)

    def test_empty_report_says_that_there_is_nothing(self) -> None:
        expected = "step: no all_gather, reduce_scatter, psum or all_to_all in this program."
        assert str(Report((), name="step")) == expected

    def test_str_has_no_colours_and_takes_100_columns_without_a_terminal(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "40")
        monkeypatch.setattr("sys.stdout", io.StringIO())
        report = Report((site(),))
        assert str(report) == report.text(100)
        assert "\x1b" not in str(report)

    def test_str_takes_the_terminals_width(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = io.StringIO()
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr("sys.stdout", terminal)
        report = Report((site(),))
        for columns, width in ((80, 80), (110, 110), (400, 120)):
            monkeypatch.setenv("COLUMNS", str(columns))
            assert str(report) == report.text(width)

    def test_rich_prints_it_in_colour(self) -> None:
        out = io.StringIO()
        Console(file=out, force_terminal=True, color_system="standard", width=80, _environ={}).print(
            Report((site(),))
        )
        assert "\x1b[1;32mrewritten\x1b[0m" in out.getvalue()


class TestReport:
    def test_is_a_value(self) -> None:
        report = Report((site(), site(Code.NO_DOT)), name="step")
        assert report == Report([site(), site(Code.NO_DOT)], name="step")  # type: ignore[arg-type]
        assert hash(report) == hash(Report(report.sites, "step"))
        with pytest.raises(dataclasses.FrozenInstanceError):
            report.name = "other"  # type: ignore[misc]

    def test_divides_sites_into_rewritten_and_kept(self) -> None:
        report = Report((site(Code.NO_DOT), site(), site(Code.NOT_PROFITABLE)))
        assert report.rewritten == report.sites[1:2]
        assert report.kept == (report.sites[0], report.sites[2])

    def test_nothing_is_narrower_than_a_column(self) -> None:
        none: Any = "x"
        with pytest.raises(ValueError, match="width must be at least 1 column, got 0"):
            Report((site(),)).text(0)
        with pytest.raises(TypeError, match="width must be a whole number, got 'x'"):
            Report((site(),)).text(none)


class TestJson:
    @given(reports)
    def test_round_trip(self, report: Report) -> None:
        assert Report.from_json(report.to_json()) == report

    def test_tells_times_versions_and_schema(self) -> None:
        data = json.loads(Report((site(), site(Code.NO_DOT, estimate=None)), name="step").to_json())
        assert data["schema"] == 3
        assert set(data["versions"]) == {"overlap", "jax"}
        assert data["name"] == "step"
        first, second = data["sites"]
        assert first["estimate"]["original_s"] == ESTIMATE.original_s
        assert first["estimate"]["benefit_s"] == ESTIMATE.benefit_s
        assert first["estimate"]["overlapped_s"] == ESTIMATE.overlapped_s
        assert first["estimate"]["hop_latency_s"] == ESTIMATE.hop_latency_s
        assert second["estimate"] is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d: d.update(schema=1), "schema 3 is expected, not 1"),
            (lambda d: d.pop("schema"), "schema 3 is expected, not None"),
            (lambda d: d.update(schema=True), "schema 3 is expected, not True"),
            (lambda d: d.pop("sites"), "the report lacks sites"),
            (lambda d: d.update(name=3), "name of the report must be a string, not an integer"),
            (lambda d: d.update(extra=3), "the report has unknown fields: extra"),
            (lambda d: d.update(sites=[3]), "site 1 must be a JSON object, not an integer"),
            (lambda d: d["sites"][0].pop("kind"), "site 1 lacks kind"),
            (lambda d: d["sites"][0].update(colour="red"), "site 1 has unknown fields: colour"),
            (
                lambda d: d["sites"][0].update(count=True),
                "count of site 1 must be an integer, not true or false",
            ),
            (lambda d: d["sites"][0].update(count=1.5), "count of site 1 must be an integer, not a number"),
            (lambda d: d["sites"][0].update(rewritten=1), "rewritten of site 1 must be true or false"),
            (lambda d: d["sites"][0].update(dots=[3]), r"dots\[0\] of site 1 must be a string"),
            (lambda d: d["sites"][0].update(estimate=[]), "estimate of site 1 must be an object or null"),
            (lambda d: d["sites"][0]["estimate"].pop("dot_s"), "the estimate of site 1 lacks dot_s"),
            (lambda d: d["sites"][0]["estimate"].update(dot_s="1"), "dot_s of the estimate of site 1"),
            (lambda d: d["sites"][0]["estimate"].update(dot_s=10**400), "dot_s of .* is too large"),
        ],
    )
    def test_wrong_content_is_a_value_error_that_names_it(self, change: Any, message: str) -> None:
        data = json.loads(Report((site(),)).to_json())
        change(data)
        with pytest.raises(ValueError, match=message):
            Report.from_json(json.dumps(data))

    @pytest.mark.parametrize("text", ["", "{", "\x00", "[" * 200_000])
    def test_no_json_is_a_value_error(self, text: str) -> None:
        with pytest.raises(ValueError, match="a report must be JSON: "):
            Report.from_json(text)

    @pytest.mark.parametrize("text", ["null", "[]", "3"])
    def test_no_object_is_a_value_error(self, text: str) -> None:
        with pytest.raises(ValueError, match="a report must be a JSON object, not "):
            Report.from_json(text)
