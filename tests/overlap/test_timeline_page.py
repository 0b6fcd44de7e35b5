"""The page draws every bar in a real browser, asks nobody for anything, and takes no text for markup."""

from __future__ import annotations

import dataclasses
import html
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlap.exposure import WAIT
from overlap.inspection import Inspection
from overlap.timeline_figure import KINDS, figure
from overlap.timeline_page import page
from tests.overlap import browser, timelines

HOSTILE = (
    "<script>document.title='pwned'</script>",
    "<img src=x onerror=\"document.title='pwned'\">",
    "</script><script>document.title='pwned'</script>",
    "<a href=\"javascript:document.title='pwned'\">here</a>",
    "<!--<script>",
    "{{ 7 * 191 }}",
    "$\\alpha$ &lt;b&gt;\u2028\u202e\x1b[31m",
)


def hostile_inspection() -> Inspection:
    """Every text that a dump or a command line brings in, replaced by each of the hostile ones in turn."""
    programs = []
    for text in HOSTILE:
        line = timelines.after()
        programs.append(
            dataclasses.replace(
                line,
                module=text,
                hardware=text,
                topology=text,
                assumptions=(text,),
                events=tuple(
                    dataclasses.replace(
                        e,
                        name=text,
                        opcode=text,
                        op_name=text,
                        source=text,
                        stream=text if e.stream == "x+" else e.stream,
                    )
                    for e in line.events
                ),
                collectives=tuple(
                    dataclasses.replace(
                        c, name=text, opcode=text, op_name=text, source=text, overlapped_with=(text,)
                    )
                    for c in line.collectives
                ),
            )
        )
    return Inspection(
        HOSTILE[0], tuple((text, program) for text, program in zip(HOSTILE, programs, strict=True))
    )


def without_policy(text: str) -> str:
    """The page without the policy that would stop injected scripts even if there were any."""
    found = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert found[1] == 1
    return found[0]


def points(document: str) -> int:
    """The bars of a page's document; the legend's are no points."""
    return document.count('<g class="point">')


def bars(drawn: dict[str, Any]) -> dict[tuple[str, str], list[tuple[float, float, float]]]:
    """(axis, kind) → (row, start, length) of every bar of a figure."""
    return {
        (trace["yaxis"], trace["legendgroup"]): list(zip(trace["y"], trace["base"], trace["x"], strict=True))
        for trace in drawn["data"]
    }


class TestFigure:
    def test_draws_each_bar_in_its_row_and_the_waits_in_computes(self) -> None:
        drawn = figure(timelines.inspection().titled)
        assert bars(drawn) == {
            ("y", "collective"): [(1, 0, 60), (2, 0, 60)],
            ("y", "matmul"): [(0, 60, 40)],
            ("y", WAIT): [(0, 0, 60)],
            ("y2", "matmul"): [(0, 0, 20), (0, 30, 20)],
            ("y2", "compute"): [(0, 50, 5)],
            ("y2", "copy"): [(1, 20, 5)],
            ("y2", "collective"): [(2, 0, 20), (2, 20, 10)],
            ("y2", WAIT): [(0, 20, 10)],
        }
        layout = drawn["layout"]
        assert layout["yaxis"]["ticktext"] == ["compute", "x+", "x-"]
        assert layout["yaxis2"]["ticktext"] == ["compute", "memory", "x+"]

    def test_both_programs_have_one_time_axis_and_rows_of_one_height(self) -> None:
        drawn = figure(timelines.inspection().titled)
        assert {trace["xaxis"] for trace in drawn["data"]} == {"x"}
        assert "modelled" in drawn["layout"]["xaxis"]["title"]["text"]
        upper, lower = (drawn["layout"][axis]["domain"] for axis in ("yaxis", "yaxis2"))
        assert upper[1] == 1 and lower[0] == 0 and lower[1] < upper[0]
        assert (upper[1] - upper[0]) / 3 == pytest.approx((lower[1] - lower[0]) / 3)

    def test_has_one_trace_per_kind_however_many_bars(self) -> None:
        many = [timelines.event(f"dot.{i}", "matmul", "compute", i, i + 0.5) for i in range(10_000)]
        (trace,) = figure([("f", timelines.timeline(many, [], 10_000))])["data"]
        assert len(trace["x"]) == 10_000

    def test_an_instruction_without_time_has_no_bar(self) -> None:
        nothing = timelines.event("bitcast.1", "compute", "compute", 5, 5)
        assert figure([("f", timelines.timeline([nothing], [], 10))])["data"] == []

    @pytest.mark.parametrize(("how", "other"), [("modelled", "measured"), ("measured", "modelled")])
    def test_every_time_is_called_what_it_is(self, how: Any, other: str) -> None:
        drawn = figure(timelines.inspection().titled, how)
        texts = [text for trace in drawn["data"] for text in trace["hovertext"]]
        texts += [note["text"] for note in drawn["layout"]["annotations"]]
        texts.append(drawn["layout"]["xaxis"]["title"]["text"])
        assert all(how in text and other not in text for text in texts)

    def test_tooltips_tell_operation_source_line_and_that_times_are_modelled(self) -> None:
        (add,) = (t for t in figure([("f", timelines.after())])["data"] if t["legendgroup"] == "compute")
        (text,) = add["hovertext"]
        assert text == (
            "<b>add.1</b><br>compute, other compute<br>5.00 µs modelled, from 50.0 µs to 55.0 µs"
            "<br>first of 3 runs in a loop<br>jit(f)/add.1<br>/src/model.py:12"
        )

    def test_tooltips_of_waits_name_what_is_waited_for(self) -> None:
        (wait,) = (t for t in figure([("f", timelines.after())])["data"] if t["legendgroup"] == WAIT)
        assert "compute waits; on the way: permute.2" in wait["hovertext"][0]

    def test_escapes_what_plotly_would_read_as_html(self) -> None:
        drawn = figure(hostile_inspection().titled)
        texts = [text for trace in drawn["data"] for text in trace["hovertext"]]
        texts += [note["text"] for note in drawn["layout"]["annotations"]]
        texts += [text for name in ("yaxis", "yaxis2") for text in drawn["layout"][name]["ticktext"]]
        tags = {tag for text in texts for tag in re.findall(r"<[^>]*>?", text)}
        assert tags == {"<b>", "</b>", "<br>"}
        assert not any(c in text for text in texts for c in "\x1b\u2028\u202e")

    def test_a_thousand_characters_do_not_widen_a_tooltip(self) -> None:
        long = timelines.event("dot", "matmul", "compute", 0, 5, op_name="/".join(["layer"] * 200))
        (trace,) = figure([("f", timelines.timeline([long], [], 10))])["data"]
        lines = trace["hovertext"][0].split("<br>")
        assert max(map(len, lines)) < 100
        assert len(lines) < 10


class TestPage:
    def test_needs_nothing_from_elsewhere(self) -> None:
        markup = re.sub(r"<script\b.*?</script>", "", page([timelines.inspection()]), flags=re.DOTALL)
        assert not re.findall(r"(?:src|href|action|data)\s*=", markup)
        assert not re.findall(r"url\(|@import|https?:", markup)
        assert "default-src 'none'" in markup

    def test_every_time_in_the_markup_is_called_modelled(self) -> None:
        markup = re.sub(r"<(script|style)\b.*?</\1>", "", page([timelines.inspection()]), flags=re.DOTALL)
        for table in re.findall(r"<table class=\"collectives\">.*?</table>", markup, re.DOTALL):
            header, body = table.split("</thead>")
            columns = re.findall(r"<th[^>]*>(.*?)</th>", header, re.DOTALL)
            for row in re.findall(r"<tr>.*?</tr>", body, re.DOTALL):
                cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
                timed = [c for c, cell in zip(columns, cells, strict=True) if re.search(r"\d [µmn]?s$", cell)]
                assert len(timed) == 3
                assert all("modelled" in column for column in timed)
        for what, cells in re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", markup):
            assert "modelled" in what or not re.search(r"\d [µm]?s\b", cells)

    def test_lists_collectives_by_exposed_time_with_hints_and_what_the_times_rest_on(self) -> None:
        text = page([Inspection("f", (("", timelines.after()),))])
        names = re.findall(r'class="show"[^>]*>([^<]*)<', text)
        assert names == ["permute.2", "permute.1"]
        assert text.count('<div class="hint">') == 1
        assert "/src/model.py:7" in text.replace("<wbr>", "")
        assert all(assumption in html.unescape(text) for assumption in timelines.ASSUMPTIONS)

    def test_compares_two_programs(self) -> None:
        text = page([timelines.inspection()])
        assert "before → after, modelled: 100 µs → 55.0 µs (1.82 × as fast)" in text

    def test_a_program_without_collectives_says_so(self) -> None:
        quiet = timelines.timeline([timelines.event("dot", "matmul", "compute", 0, 10)], [], 10)
        assert "No collectives in this program." in page([Inspection("f", (("", quiet),))])

    def test_hostile_texts_become_no_markup(self) -> None:
        text = page([hostile_inspection()])
        assert text.count("<script") == text.lower().count("</script>") == 3
        markup = re.sub(r"<script\b.*?</script>", "", text, flags=re.DOTALL)
        assert "<img" not in markup and "<a " not in markup
        assert "{{ 7 * 191 }}" in re.sub(r"<script\b.*?</script>", "", text, flags=re.DOTALL)


@browser.needs_browser
class TestBrowser:
    @pytest.mark.parametrize("flags", [(), (browser.DARK,)], ids=["light", "dark"])
    def test_draws_a_bar_per_event_and_wait(self, tmp_path: Path, flags: tuple[str, ...]) -> None:
        inspection = timelines.inspection()
        document = browser.dom(inspection.to_html(tmp_path / "page.html"), *flags)
        events = sum(len(timeline.events) for _, timeline in inspection.programs)
        assert points(document) == events + 2  # one exposed wait in each program
        assert document.count("time, µs (modelled)") == 1 + 1  # as drawn, and in the data

    def test_is_light_or_dark_as_the_reader_prefers(self, tmp_path: Path) -> None:
        written = timelines.inspection().to_html(tmp_path / "page.html")
        light = list(pixels(browser.screenshot(written, tmp_path / "light.png")))
        dark = list(pixels(browser.screenshot(written, tmp_path / "dark.png", browser.DARK)))
        assert most_common(light) == (255, 255, 255)
        assert max(most_common(dark)) < 48
        # Bars are there, in the same colours, on either ground.
        for name in ("matmul", "collective"):
            colour = tuple(map(int, KINDS[name][1].split(",")))
            for picture in (light, dark):
                assert sum(n for pixel, n in Counter(picture).items() if close(pixel, colour)) > 1000

    def test_asks_the_network_for_nothing(self, tmp_path: Path) -> None:
        written = timelines.inspection().to_html(tmp_path / "page.html")
        curious = tmp_path / "curious.html"
        curious.write_text('<img src="http://curious.example/picture.png">')
        assert browser.asked_for(written, tmp_path / "page.json") == []
        assert set(browser.asked_for(curious, tmp_path / "curious.json")) == {
            "http://curious.example/picture.png"
        }

    def test_texts_of_a_dump_stay_texts(self, tmp_path: Path) -> None:
        # Without its policy, and with every tooltip shown once: nothing but escaping protects this page.
        show = (
            "<script>for (const el of document.querySelectorAll('.timeline'))"
            " el.data.forEach((trace, t) => trace.x.forEach((_, i) => {"
            " Plotly.Fx.hover(el, [{curveNumber: t, pointNumber: i}], trace.xaxis + trace.yaxis);"
            " document.body.append(el.querySelector('.hoverlayer').cloneNode(true)); }));</script>"
        )
        text = without_policy(page([hostile_inspection()])).replace("</body>", f"{show}</body>")
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        document = browser.dom(tmp_path / "page.html")
        # A copy of each tooltip, and the last one in its place.
        assert points(document) == 7 * len(HOSTILE)
        assert document.count('class="hovertext"') == points(document) + 1
        assert "<title>pwned" not in document
        assert not re.findall(r"<img|<a [^>]*javascript", document.split('id="figures"')[0])
        layers = document.split('class="hoverlayer"')[1:]
        for text in ("&lt;script&gt;document", "&lt;img src=x onerror=", "&lt;a href=", "&lt;!--&lt;script"):
            assert any(text in layer for layer in layers)
        assert not any("<img" in layer for layer in layers)

    def test_names_of_collectives_zoom_to_them(self, tmp_path: Path) -> None:
        click = (
            "<script>document.querySelectorAll('.show')[0].click(); const axis = "
            "document.getElementById('timeline-0').layout.xaxis; document.title = JSON.stringify(axis.range)"
            "</script>"
        )
        text = without_policy(page([Inspection("f", (("", timelines.after()),))]))
        (tmp_path / "page.html").write_text(text.replace("</body>", f"{click}</body>"), encoding="utf-8")
        (shown,) = re.findall(r"<title>\[(.*),(.*)\]</title>", browser.dom(tmp_path / "page.html"))
        assert [float(time) for time in shown] == pytest.approx([15, 35])

    @pytest.mark.parametrize("width", [900, 1200])
    def test_hints_are_seen_without_scrolling(self, tmp_path: Path, width: int) -> None:
        """The table of collectives was 1,241 px wide, and its last column lay beyond the edge."""
        measure = (
            "<script>document.title = [...document.querySelectorAll('.scroll')].map(of => "
            "of.scrollWidth - of.clientWidth).join()</script>"
        )
        text = without_policy(page([timelines.inspection()]))
        (tmp_path / "page.html").write_text(text.replace("</body>", f"{measure}</body>"), encoding="utf-8")
        document = browser.dom(tmp_path / "page.html", f"--window-size={width},1500")
        (beyond,) = re.findall(r"<title>([\d,]*)</title>", document)
        assert set(beyond.split(",")) == {"0"}

    @pytest.mark.parametrize("module", ["jit_train_step", "jit_a_step_of_" + "many_words_" * 9])
    def test_titles_of_timelines_are_whole_in_a_narrow_window(self, tmp_path: Path, module: str) -> None:
        measure = (
            "<script>const edge = document.querySelector('.timeline').getBoundingClientRect().right;"
            " document.title = [...document.querySelectorAll('.annotation-text')].map(of =>"
            " Math.ceil(of.getBoundingClientRect().right - edge)).join()</script>"
        )
        named = dataclasses.replace(timelines.after(), module=module)
        text = without_policy(page([Inspection("f", (("original", named), ("overlapped", named)))]))
        (tmp_path / "page.html").write_text(text.replace("</body>", f"{measure}</body>"), encoding="utf-8")
        document = browser.dom(tmp_path / "page.html", "--window-size=500,1500")
        (beyond,) = re.findall(r"<title>([-\d,]+)</title>", document)
        assert len(beyond.split(",")) == 2 and max(map(int, beyond.split(","))) <= 0

    def test_ten_thousand_bars_are_drawn(self, tmp_path: Path) -> None:
        many = [timelines.event(f"dot.{i}", "matmul", "compute", i, i + 0.5) for i in range(10_000)]
        inspection = Inspection("f", (("", timelines.timeline(many, [], 10_000)),))
        assert points(browser.dom(inspection.to_html(tmp_path / "page.html"))) == 10_000


def pixels(png: bytes) -> Iterator[tuple[int, int, int]]:
    """The red, green and blue of every pixel of a PNG of 8 bits, without palette or interlacing."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, data, width, channels = 8, b"", 0, 0
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        chunk = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, _, depth, colour = struct.unpack(">IIBB", chunk[:10])
            assert depth == 8 and chunk[12] == 0
            channels = {2: 3, 6: 4}[colour]
        elif kind == b"IDAT":
            data += chunk
        at += 12 + length
    data, stride = zlib.decompress(data), width * channels
    above = bytearray(stride)
    for start in range(0, len(data), stride + 1):
        how, line = data[start], bytearray(data[start + 1 : start + 1 + stride])
        for i in range(stride):
            left, corner = (line[i - channels], above[i - channels]) if i >= channels else (0, 0)
            line[i] = (line[i] + predicted(how, left, above[i], corner)) & 255
        for i in range(0, stride, channels):
            yield line[i], line[i + 1], line[i + 2]
        above = line


def predicted(how: int, left: int, above: int, corner: int) -> int:
    """What a filter of PNG adds to a byte (PNG specification, section 9)."""
    if how < 4:
        return (0, left, above, (left + above) // 2)[how]
    guess = left + above - corner
    return min((left, above, corner), key=lambda value: abs(guess - value))


def most_common(picture: list[tuple[int, int, int]]) -> tuple[int, int, int]:
    return Counter(picture).most_common(1)[0][0]


def close(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(abs(a - b) <= 4 for a, b in zip(one, other, strict=True))
