"""Dump directories as the compilers really fill them, and all that may lie in their place."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from overlap.hlo.module import Module
from overlap.inspect_dumps import Dump, DumpError, find, pairs, read

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
def gather(x, w):
    return jax.lax.all_gather(x, "x", tiled=True) @ w
gather = jax.jit(jax.shard_map(gather, mesh=mesh, in_specs=(P("x"), P(None, "x")), out_specs=P(None, "x")))
gather.lower(*[jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2).compile()
jax.jit(jnp.sin).lower(1.0).compile()
"""


@cache
def dumped(base: Path, flags: str) -> Path:
    """A directory that the CPU compiler filled with the dumps of two programs."""
    folder = base / f"dump{abs(hash(flags))}"
    wanted = f"--xla_force_host_platform_device_count=4 --xla_dump_to={folder} {flags}"
    environment = {**os.environ, "XLA_FLAGS": wanted, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dumped(tmp_path_factory.getbasetemp(), "--xla_dump_hlo_as_text")


@pytest.fixture(scope="module")
def protos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dumped(tmp_path_factory.getbasetemp(), "--xla_dump_hlo_as_proto")


def module(name: str) -> Module:
    return Module(name=name, computations={}, entry="", is_scheduled=True)


class TestFind:
    def test_takes_the_modules_after_optimizations_and_nothing_else(self, dump: Path) -> None:
        found = find(dump)
        assert len(list(dump.iterdir())) > 10
        assert sorted({re.sub(r"^module_\d+\.|\.cpu_.*", "", path.name) for path in found}) == [
            "jit_gather",
            "jit_sin",
        ]
        assert all(path.name.endswith(".cpu_after_optimizations.txt") for path in found)

    @pytest.mark.parametrize("name", ["gpu_after_optimizations.txt", "cl_1004524046.after_optimizations.txt"])
    def test_knows_the_names_that_other_compilers_give(self, tmp_path: Path, name: str) -> None:
        for other in (
            "after_optimizations-buffer-assignment.txt",
            "after_optimizations_after_buffer_assignment.txt",
        ):
            (tmp_path / f"module_0000.jit_f.{other}").write_text("HloModule f, is_scheduled=true")
        (tmp_path / f"module_0000.jit_f.{name}").write_text("")
        assert [path.name for path in find(tmp_path)] == [f"module_0000.jit_f.{name}"]

    def test_a_directory_of_saved_texts_will_do(self, tmp_path: Path, dump: Path) -> None:
        for number, path in enumerate(find(dump)):
            (tmp_path / f"{number}.hlo").write_bytes(path.read_bytes())
        (tmp_path / "before.txt").write_text("HloModule f, entry_computation_layout={()->f32[]}\n")
        (tmp_path / "notes.txt").write_text("is_scheduled=true")
        assert [path.name for path in find(tmp_path)] == ["0.hlo", "1.hlo"]

    def test_a_file_is_taken_as_it_is(self, dump: Path) -> None:
        (path, *_) = find(dump)
        assert find(path) == [path]

    def test_what_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(DumpError, match=r"nothing: there is no such file or directory\."):
            find(tmp_path / "nothing")

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        with pytest.raises(DumpError, match=r"the directory is empty; .*--xla_dump_to"):
            find(tmp_path)

    def test_a_directory_of_other_things(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("milk, eggs")
        with pytest.raises(DumpError, match="none of its 1 files is a module after optimizations"):
            find(tmp_path)

    def test_a_directory_of_protos(self, protos: Path) -> None:
        with pytest.raises(DumpError, match=r"protocol buffers only.*--xla_dump_hlo_as_text"):
            find(protos)

    def test_a_device(self) -> None:
        with pytest.raises(DumpError, match="this is a device, not a file"):
            find(Path("/dev/zero"))


class TestRead:
    def test_reads_each_module_of_a_dump(self, dump: Path) -> None:
        modules = [read(path).module for path in find(dump)]
        assert sorted(module.name for module in modules) == ["jit_gather", "jit_sin"]
        assert all(module.is_scheduled for module in modules)

    def test_a_proto(self, protos: Path) -> None:
        (path, *_) = sorted(protos.glob("*after_optimizations.hlo.pb"))
        with pytest.raises(DumpError, match=r"a protocol buffer, not text.*--xla_dump_hlo_as_text"):
            read(path)

    def test_a_module_before_optimizations(self, dump: Path) -> None:
        (path, *_) = sorted(dump.glob("*before_optimizations.txt"))
        with pytest.raises(DumpError, match=r"is not scheduled.*after optimizations"):
            read(path)

    def test_a_text_cut_off_anywhere_is_an_error_that_names_a_line(self, tmp_path: Path, dump: Path) -> None:
        (path,) = (path for path in find(dump) if "gather" in path.name)
        text = path.read_text()
        cut = tmp_path / "cut.txt"
        for share in range(1, 10):
            cut.write_text(text[: len(text) * share // 10])
            with pytest.raises(DumpError, match=r"cut\.txt: line \d+"):
                read(cut)

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            pytest.param(b"", "the file is empty", id="empty"),
            pytest.param(b"\x00\x01\x02" * 99, "binary, not text", id="zeros"),
            pytest.param(b"\xff\xfe\xfa", "binary, not text", id="not utf-8"),
            pytest.param(b"\x1f\x8b\x08", "compressed by gzip, and damaged", id="gzip's head"),
            pytest.param(gzip.compress(b"milk, eggs"), "line 1", id="gzip of a list"),
            pytest.param(
                gzip.compress(b"HloModule f")[:-9], "compressed by gzip, and damaged", id="gzip cut off"
            ),
            pytest.param(b"milk, eggs", "line 1", id="a list"),
            pytest.param(b"HloModule", "is not scheduled", id="one word"),
            pytest.param(
                b"module @jit_f attributes {mhlo.num_partitions = 1 : i32} {",
                r"StableHLO.*compile\(\)\.as_text",
                id="StableHLO",
            ),
            pytest.param(b"{ lambda ; a:f32[]. let b:f32[] = sin a in (b,) }", "a jaxpr", id="a jaxpr"),
            pytest.param(b"HloModule f, is_scheduled=true\n\x1b[31mENTRY", "line 2", id="an escape"),
        ],
    )
    def test_other_contents(self, tmp_path: Path, data: bytes, words: str) -> None:
        path = tmp_path / "module.txt"
        path.write_bytes(data)
        with pytest.raises(DumpError, match=words) as raised:
            read(path)
        assert "\x1b" not in str(raised.value)

    def test_a_compressed_dump(self, tmp_path: Path, dump: Path) -> None:
        (path,) = (path for path in find(dump) if "gather" in path.name)
        compressed = tmp_path / f"{path.name}.gz"
        compressed.write_bytes(gzip.compress(path.read_bytes()))
        assert read(compressed).module == read(path).module
        assert find(tmp_path) == [compressed]

    def test_a_directory_of_compressed_texts(self, tmp_path: Path, dump: Path) -> None:
        """Under names of their own; one that is damaged is none of a module."""
        (path,) = (path for path in find(dump) if "gather" in path.name)
        compressed = tmp_path / "step.hlo.gz"
        compressed.write_bytes(gzip.compress(path.read_bytes()))
        (tmp_path / "other.txt.gz").write_bytes(gzip.compress(path.read_bytes())[:40])
        assert find(tmp_path) == [compressed]

    def test_a_dump_that_an_editor_marked_as_utf_8(self, tmp_path: Path, dump: Path) -> None:
        (path,) = (path for path in find(dump) if "gather" in path.name)
        marked = tmp_path / path.name
        marked.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert read(marked).module == read(path).module

    def test_what_cannot_be_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(DumpError, match=r"cannot be read \(Permission denied\)"):
            read(tmp_path / "module.txt")


class TestPairs:
    def test_two_lone_modules_are_before_and_after_whatever_their_names(self) -> None:
        a, b = Dump(Path("a"), module("f")), Dump(Path("b"), module("g"))
        assert list(pairs([[a], [b]])) == [(a, b)]

    def test_modules_of_two_directories_are_paired_by_name_in_order(self) -> None:
        before = [Dump(Path(f"b{i}"), module(name)) for i, name in enumerate(["f", "g", "f", "h"])]
        after = [Dump(Path(f"a{i}"), module(name)) for i, name in enumerate(["f", "f", "k", "g"])]
        assert list(pairs([before, after])) == [
            (before[0], after[0]),
            (before[1], after[3]),
            (before[2], after[1]),
            (before[3],),
            (after[2],),
        ]

    def test_otherwise_each_stands_alone(self) -> None:
        dumps = [Dump(Path("a"), module("f")), Dump(Path("b"), module("f"))]
        assert list(pairs([dumps])) == [(dumps[0],), (dumps[1],)]
