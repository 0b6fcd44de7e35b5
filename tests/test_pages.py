"""The pages lead where they say: links, files, make targets; the guide's program reports what it shows."""

# mypy: allow-untyped-calls

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Final

import pytest

import overlap

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDE: Final = (ROOT / "docs" / "guide.md").read_text("utf-8")

LINK: Final = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")
CODE: Final = re.compile(r"```.*?```", re.DOTALL)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for path, anchor in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} is not there"
        assert not anchor or anchor in anchors(target), f"{path}#{anchor} is not there"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_are_there(page: Path) -> None:
    named = re.findall(
        r"`((?:overlap|passes|cost_model|bench|tests|docs|\.ci)/[\w./]*\w)`", page.read_text("utf-8")
    )
    # Runs of hours write some results; a page may say where.
    missing = {path for path in named if not (ROOT / path).exists() and not path.startswith("bench/results/")}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_that_are_named_are_there(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets | {"help"}


def test_every_page_is_linked_from_the_readme_or_from_a_page_that_is() -> None:
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        seen.add(page)
        linked = {(page.parent / path).resolve() for path, _ in LINK.findall(page.read_text("utf-8")) if path}
        waiting += [path for path in linked - seen if path.suffix == ".md"]
    assert set(PAGES) <= seen


def test_the_pictures_of_the_readme_are_well_formed_and_have_words_for_who_cannot_see_them() -> None:
    shown = re.findall(r"!\[([^\]]+)\]\(([^)]+\.svg)\)", (ROOT / "README.md").read_text("utf-8"))
    assert shown
    for _, path in shown:
        picture = ET.parse(ROOT / path).getroot()
        words = [element.text for element in picture if element.tag.endswith(("}title", "}desc"))]
        assert len(words) == 2 and all(words)


# The guide's program.


def example() -> dict[str, Any]:
    """What the guide's `train.py` defines."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "def step" in block)
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(code, "train.py", "exec"), names)
    return names


def rows(text: str) -> list[tuple[str, str, str]]:
    """Kind, place and decision of each site that a printed report shows."""
    return re.findall(r"^\d+ +(\w+) +(train\.py:\d+) .*? (rewritten|kept)\b", text, re.MULTILINE)


def shown(after: str) -> str:
    """The first block of text after some words of the guide."""
    return GUIDE.split(after, 1)[1].split("```text\n", 1)[1].split("```", 1)[0]


@pytest.mark.parametrize(
    ("after", "sizes", "reasons"),
    [
        ("The command above prints:", {}, ["profitable", "no_dot", "profitable"]),
        ("the same program keeps both pairs:", {"rows": 256}, ["not_profitable", "no_dot", "not_profitable"]),
    ],
)
def test_the_guides_reports_show_what_its_program_gives(
    after: str, sizes: dict[str, int], reasons: list[str]
) -> None:
    names = example()
    report = names["step"].explain(*names["shapes"](**sizes))
    assert [site.reason for site in report.sites] == reasons
    text = shown(after)
    assert rows(text)
    assert set(rows(text)) <= set(rows(str(report)))
    assert all(reason in GUIDE for reason in reasons)


def test_the_guides_profile_gives_the_values_of_the_original() -> None:
    step, arguments = example()["profile"]()
    assert overlap.ab_profile(step, *arguments, rounds=1, traced_rounds=0).agreement.agreed
