"""Shapes read from text: every layout that compilers print, sizes in bytes, and what is no shape."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.hlo.shapes import Shape, bits, parse_shape


@pytest.mark.parametrize(
    "text, shape",
    [
        ("f32[]", Shape("f32")),
        ("f32[]{:T(128)S(6)}", Shape("f32", (), (), "T(128)", 6)),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", Shape("bf16", (8, 128), (1, 0), "T(8,128)(2,1)", 1)),
        ("s4[2,3,5,7]{3,2,1,0:T(2,128)E(4)}", Shape("s4", (2, 3, 5, 7), (3, 2, 1, 0), "T(2,128)")),
        ("f32[3,4]{1,0:D(D,C)}", Shape("f32", (3, 4), (1, 0))),
        ("f32[3,4]{0,1:D(D,C)T(*,8)(4,1)#(u32)S(5)}", Shape("f32", (3, 4), (0, 1), "T(*,8)(4,1)", 5)),
        ("f32[4]{0:T(4)M(16)SC(0:1,2)P((u8[16]{0}, s32[1]{0}))}", Shape("f32", (4,), (0,), "T(4)")),
        ("f32[<=16,3]{1,0}", Shape("f32", (16, 3), (1, 0))),
        ("f32[?,3]", Shape("f32", (0, 3))),
        ("token[]", Shape("token")),
        ("opaque[]", Shape("opaque")),
        ("()", Shape("tuple")),
        ("b(f32[2]{0})", Shape("buffer", elements=(Shape("f32", (2,), (0,)),))),
        (
            "((f32[2]{0}, u32[]), (), /*index=2*/pred[3])",
            Shape(
                "tuple",
                elements=(
                    Shape("tuple", elements=(Shape("f32", (2,), (0,)), Shape("u32"))),
                    Shape("tuple"),
                    Shape("pred", (3,)),
                ),
            ),
        ),
    ],
)
def test_shapes_as_compilers_print_them(text: str, shape: Shape) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    "text, size",
    [
        ("f32[]", 4),
        ("pred[10]", 10),
        ("s4[3]", 2),
        ("u4[3,5]", 8),
        ("u2[5]", 2),
        ("f4e2m1fn[7]", 4),
        ("f8e4m3fn[3,3]", 9),
        ("f8e5m2[2]", 2),
        ("f8e8m0fnu[32]", 32),
        ("bf16[5,7]", 70),
        ("f16[2]", 4),
        ("f64[2]", 16),
        ("c64[2]", 16),
        ("c128[2]", 32),
        ("f32[0,7]", 0),
        ("(f32[2], (bf16[3], token[]), u32[])", 18),
        ("b(s8[9])", 9),
        ("token[]", 0),
        ("opaque[]", 0),
        ("()", 0),
    ],
)
def test_bytes(text: str, size: int) -> None:
    assert parse_shape(text).bytes == size


def test_the_arrays_of_a_tuple_in_order() -> None:
    shape = parse_shape("((f32[2]{0}, u32[]), token[], pred[3])")
    assert [array.dtype for array in shape.arrays] == ["f32", "u32", "pred"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f32",
        "f32[2",
        "f32[2]{1,0}",
        "f32[2,2]{0,0}",
        "f32[2]{0",
        "f32[-2]",
        "f32[2,]",
        "x32[2]",
        "int[2]",
        "(f32[2]",
        "(f32[2],)",
        "(f32[2] f32[2])",
        "f32[2]) ",
        "b(f32[2], f32[2])",
        "(" * 5000,
    ],
)
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(ValueError):
        parse_shape(text)


def test_no_dtype() -> None:
    for dtype in ("float", "bf99", "bf32", "f33", "f8", "c32", "f8e4m3fn!"):
        with pytest.raises(ValueError, match=f"'{dtype}' is no HLO type"):
            bits(dtype)


def arrays() -> st.SearchStrategy[Shape]:
    def with_layout(dims: list[int]) -> st.SearchStrategy[Shape]:
        return st.builds(
            Shape,
            dtype=st.sampled_from(["pred", "s4", "u8", "bf16", "f8e4m3fn", "f32", "c64"]),
            dims=st.just(tuple(dims)),
            layout=st.none() | st.permutations(range(len(dims))).map(tuple),
            tiling=st.sampled_from(["", "T(8,128)", "T(8,128)(2,1)"]),
            memory_space=st.integers(0, 6),
        ).map(lambda s: s if s.layout is not None else Shape(s.dtype, s.dims))

    return st.lists(st.integers(0, 4096), max_size=5).flatmap(with_layout)


SHAPES = st.recursive(
    arrays() | st.just(Shape("token")),
    lambda inner: st.lists(inner, max_size=7).map(lambda shapes: Shape("tuple", elements=tuple(shapes))),
    max_leaves=12,
)


def printed(shape: Shape) -> str:
    """As XLA prints it, with its comments in long tuples."""
    if shape.dtype == "tuple":
        parts = [
            f"/*index={i}*/{printed(e)}" if i and i % 5 == 0 else printed(e)
            for i, e in enumerate(shape.elements)
        ]
        return f"({', '.join(parts)})"
    text = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
    if shape.layout is None:
        return text
    notes = shape.tiling + (f"S({shape.memory_space})" if shape.memory_space else "")
    return f"{text}{{{','.join(map(str, shape.layout))}{':' if notes else ''}{notes}}}"


@given(SHAPES)
def test_what_is_printed_is_read(shape: Shape) -> None:
    assert parse_shape(printed(shape)) == shape


@given(SHAPES)
def test_bytes_are_those_of_the_arrays(shape: Shape) -> None:
    widths = {"pred": 1, "s4": 0.5, "u8": 1, "bf16": 2, "f8e4m3fn": 1, "f32": 4, "c64": 8}
    assert parse_shape(printed(shape)).bytes == sum(
        math.ceil(math.prod(array.dims) * widths[array.dtype]) for array in shape.arrays
    )
