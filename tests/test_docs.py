"""Every example of docs/patterns.md computes what it should, and its report says what the page says."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import cost_model
import overlap
from cost_model.form import Form
from cost_model.walk import Walk
from overlap.trial_times import Timed
from overlap.verify import Modelled
from passes import Code, RingSchedule

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "patterns.md"

KINDS: Final = {"all_gather_dot", "dot_reduce_scatter", "dot_psum", "all_to_all_dot", "dot_all_to_all"}
"""The patterns, as reports name them."""

KEPT: Final = {"all_gather", "reduce_scatter", "psum", "all_to_all"}
"""What reports name where there is no pattern."""

BOTH: Final = "True, False"


@dataclasses.dataclass(frozen=True)
class Example:
    """One example of the page: its code, and what the comments above it say.

    Attributes:
      section: the heading that it is under.
      line: the page's line that its code starts on.
      code: the code, comments included.
      said: comment name → what is said, in order, for names that may come more than once.
    """

    section: str
    line: int
    code: str
    said: dict[str, list[str]]

    def one(self, name: str, default: str) -> str:
        """What a comment that comes once at most says."""
        (text,) = self.said.get(name, [default])
        return text

    @property
    def reports(self) -> list[tuple[str, str, int]]:
        """Kind, reason and count of each site."""
        found = (re.fullmatch(r"(\w+): (\w+)(?: ×(\d+))?", text) for text in self.said["report"])
        return [(f[1], f[2], int(f[3] or 1)) for f in found if f]

    @property
    def shards(self) -> list[tuple[tuple[Any, ...], str]]:
        """Shape and dtype of each argument on one device."""
        found = re.findall(r"\w+ ?(\w*)\[([\w, ]+)\]", self.one("shards", ""))
        scope = jax.export.SymbolicScope()
        shapes = [tuple(jax.export.symbolic_shape(shape, scope=scope)) for _, shape in found]
        return [(shape, dtype or "float32") for shape, (dtype, _) in zip(shapes, found, strict=True)]

    def names(self) -> dict[str, Any]:
        """What the code defines, run after the page's first block; its lines are the page's."""
        names: dict[str, Any] = {}
        for first, code in ((SETUP_LINE, SETUP), (self.line, self.code)):
            exec(compile("\n" * (first - 1) + code, str(PAGE), "exec"), names)
        return names


def read(text: str) -> Iterator[Example]:
    """The Python blocks of a Markdown page."""
    section, start = "", 0
    block: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if block is not None and line == "```":
            comments = re.findall(r"^# (?:(\w+): )?(.*)$", "\n".join(block), re.MULTILINE)
            said: dict[str, list[str]] = {}
            for name, what in comments:
                said.setdefault(name, []).append(what)
            yield Example(section, start, "\n".join(block), said)
            block = None
        elif block is not None:
            block.append(line)
        elif line == "```python":
            start, block = number + 1, []
        elif line.startswith("#"):
            section = line.lstrip("# ")


FIRST, *EXAMPLES = read(PAGE.read_text("utf-8"))
SETUP, SETUP_LINE = FIRST.code, FIRST.line
TO_RUN: Final = [example for example in EXAMPLES if "explained, not run" not in example.said.get("", [])]


def of(examples: list[Example]) -> pytest.MarkDecorator:
    """One test per example and value of check_vma, named after the section and the line."""
    return pytest.mark.parametrize(
        ("example", "check_vma"),
        [
            pytest.param(example, vma == "True", id=f"{example.section}, line {example.line}, vma {vma}")
            for example in examples
            for vma in example.one("check_vma", BOTH).split(", ")
        ],
    )


def mesh_of(example: Example) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh of an example, and the axes that its shard_map is manual over."""
    axes = re.findall(r"(\w+)=(\d+)(?: \((\w+)\))?", example.one("mesh", "x=4"))
    types = {"": AxisType.Auto, "auto": AxisType.Auto, "explicit": AxisType.Explicit}
    sizes = tuple(int(size) for _, size, _ in axes)
    mesh = jax.make_mesh(
        sizes,
        tuple(name for name, _, _ in axes),
        axis_types=tuple(types[kind] for _, _, kind in axes),
        devices=jax.devices()[: math.prod(sizes)],
    )
    return mesh, tuple(name for name, _, kind in axes if not kind)


def mapped(example: Example, names: dict[str, Any], *, check_vma: bool) -> tuple[Any, Mesh, NamedSharding]:
    """The example's body as a jitted function of stacked shards, its mesh, and how the stacks lie on it."""
    mesh, manual = mesh_of(example)
    spec = PartitionSpec(manual)

    def body(*stacked: Any) -> Any:
        return jax.tree.map(lambda result: result[None], names["body"](*(shard[0] for shard in stacked)))

    function = jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=set(manual), check_vma=check_vma
        )
    )
    return function, mesh, NamedSharding(mesh, spec)


def stacks(example: Example, sharding: NamedSharding) -> list[tuple[tuple[Any, ...], str]]:
    """Shape and dtype of each argument with the shards of all devices stacked along a leading dim."""
    devices = math.prod(sharding.mesh.shape[name] for name in sharding.spec[0])
    return [((devices, *shape), dtype) for shape, dtype in example.shards]


def overlapped(example: Example, function: Callable[..., Any]) -> overlap.Overlapped:
    """The function, decorated as the example says."""
    policy: Any = example.one("policy", "always")
    hardware: Any = example.one("hardware", "tpu_v5p")
    if hardware in cost_model.names() and example.one("trial", ""):
        # What is tried here is not compiled for it.
        hardware = dataclasses.replace(cost_model.by_name(hardware), device_kinds=())
    return overlap.overlap_collectives(
        function,
        policy=eval(policy) if policy.startswith("lambda") else policy,
        hardware=None if hardware == "unknown" else hardware,
        strict=True,
    )


TRIAL: Final = re.compile(r"([\d.]+) µs as written, ([\d.]+) µs as a ring(?:, ([\d.]+) µs in the program)?")
"""What an example says of a trial."""


class Compiler:
    """Tells what the compiler is supposed to have made of a chain and then of its program.

    Args:
      trial: the words of the example.
    """

    def __init__(self, trial: re.Match[str]) -> None:
        self.as_written, as_a_ring, in_the_program = trial.groups()
        self.rings = [as_a_ring, in_the_program or as_a_ring]
        self.originals = 0

    def __call__(self, program: Any, arguments: Any, target: Any) -> Modelled:
        if "ppermute" in str(program.trace(*arguments).jaxpr):
            us = self.rings[self.originals - 1]
        else:
            us = self.as_written
            self.originals += 1
        return Modelled(Timed(float(us) / 1e6, 0), 0.0)


@contextlib.contextmanager
def circumstances(example: Example) -> Iterator[None]:
    """What the example supposes: devices that the cost model does not know, or the times of a trial."""
    with contextlib.ExitStack() as stack:
        if example.one("hardware", "") == "unknown":
            stack.enter_context(mock.patch("cost_model.from_device_kind", return_value=None))
        if trial := TRIAL.fullmatch(example.one("trial", "")):
            stack.enter_context(mock.patch("overlap.verify.modelled", Compiler(trial)))
        yield


@of(EXAMPLES)
def test_the_report_says_what_the_page_says(example: Example, check_vma: bool) -> None:
    function, mesh, sharding = mapped(example, example.names(), check_vma=check_vma)
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in stacks(example, sharding)
    ]
    with jax.set_mesh(mesh), circumstances(example):
        sites = overlapped(example, function).explain(*shapes).sites
    assert [(site.kind, site.reason, site.count) for site in sites] == example.reports
    assert all(site.source.startswith(f"{PAGE}:") for site in sites)
    for words in example.said.get("says", []):
        assert any(words in site.sentence for site in sites)


@of(TO_RUN)
def test_the_values_are_those_of_the_original_and_of_numpy(example: Example, check_vma: bool) -> None:
    names = example.names()
    function, mesh, sharding = mapped(example, names, check_vma=check_vma)
    shards = [some(shape, dtype) for shape, dtype in stacks(example, sharding)]
    placed = [jax.device_put(shard, sharding) for shard in shards]
    with jax.set_mesh(mesh), circumstances(example):
        original = jax.block_until_ready(function(*placed))
        rewritten = overlapped(example, function)(*placed)
    narrow = any(result.dtype.itemsize < 4 for result in jax.tree.leaves(original)) or any(
        dtype == "bfloat16" for _, dtype in example.shards
    )
    tolerance = 2e-2 if narrow else 1e-5
    assert_close(rewritten, original, tolerance)
    if "expected" in names:
        assert_close(rewritten, names["expected"](*(shard.astype(np.float64) for shard in shards)), tolerance)


def some(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values of both signs, the same in every run."""
    values = np.random.default_rng(sum(shape)).normal(size=shape)
    if dtype == "bool":
        return values > 0
    return (values * 40 if dtype == "int8" else values).astype(np.dtype(dtype))


def assert_close(got: Any, wanted: Any, tolerance: float) -> None:
    """Equal within a tolerance that is relative to the largest value."""
    wanted = wanted if isinstance(got, tuple | list) else (wanted,)
    for one, other in zip(jax.tree.leaves(got), wanted, strict=True):
        exact = np.asarray(other, np.float64)
        one = np.asarray(one).astype(np.float64)
        assert one.shape == exact.shape
        np.testing.assert_allclose(
            one, exact, rtol=0, atol=tolerance * max(1.0, np.abs(exact).max(initial=0))
        )


def test_every_kind_and_every_reason_has_an_example() -> None:
    said = [report for example in EXAMPLES for report in example.reports]
    assert {kind for kind, _, _ in said} & KINDS == KINDS
    assert {kind for kind, _, _ in said} <= KINDS | KEPT
    assert {reason for _, reason, _ in said} == {str(code) for code in Code}


@pytest.mark.parametrize("code", Code, ids=str)
def test_every_reason_has_a_section_whose_first_example_gives_it(code: Code) -> None:
    first, *_ = (example for example in EXAMPLES if example.section == f"`{code}`")
    assert str(code) in {reason for _, reason, _ in first.reports}


def test_every_comment_is_understood() -> None:
    for example in EXAMPLES:
        known = {"shards", "report", "says", "mesh", "policy", "hardware", "check_vma", "trial", ""}
        assert set(example.said) <= known, example.section
        assert set(example.said.get("", [])) <= {"explained, not run"}, example.section
        assert len(example.reports) == len(example.said["report"]), example.section


SEVERAL: Final[dict[str, tuple[Any, ...]]] = {
    "chains": (1, 2),
    "columns": (1, 2),
    "rings": (1, 2),
    "unroll": (0, 4),
    "orders": ((), ((1, 0),), ((0, 1), (1, 0)), (Walk((0, 1), (0, 0)),) * 2),
}
"""Values of a schedule's fields that are neither booleans nor one of a few words."""


def forms_of(kind: type[RingSchedule] | type[Form]) -> Iterator[RingSchedule | Form]:
    """Every one that there can be, of few pieces."""
    hints = get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    choices = [
        SEVERAL.get(name) or ((False, True) if hints[name] is bool else get_args(hints[name]))
        for name in fields
    ]
    for values in itertools.product(*choices):
        with contextlib.suppress(ValueError):
            yield kind(**dict(zip(fields, values, strict=True)))


def test_every_word_of_a_schedule_is_in_the_table_and_no_other() -> None:
    said = {str(form) for kind in (RingSchedule, Form) for form in forms_of(kind)}
    words = {re.sub(r"\b(?!1 )\d+\b", "N", word) for text in said for word in text.split(", ")}
    section = PAGE.read_text("utf-8").partition("### The words of a schedule")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    told = [word for cell in cells for word in re.findall(r"`(.*?)`", cell)]
    assert sorted(told) == sorted(words)


def test_links_inside_the_page_lead_somewhere() -> None:
    text = PAGE.read_text("utf-8")
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors
