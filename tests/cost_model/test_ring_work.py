"""Which operand a ring sends, and which it reads by blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

from cost_model import Axis, Hardware, by_name, estimate
from cost_model.chain_sizes import IN_COLUMNS, JOINED
from cost_model.form import Form
from cost_model.plain_chain import PlainChain, chain_of, forms, price, works
from cost_model.ring_work import RingWork, cut_side, sent_side, strip_side

TPUS = ("tpu_v4", "tpu_v5e", "tpu_v6e", "tpu_7x")


def every_work(chain: PlainChain, hardware: Hardware) -> Iterator[tuple[RingWork, Axis]]:
    """All rings of a chain on short axes and long ones."""
    for size in (2, 4, 8, 16):
        axis = Axis(hardware, size)
        for form in forms(chain, axis):
            for work in works(chain, form, axis):
                yield work, axis


@pytest.mark.parametrize("tpu", TPUS)
@pytest.mark.parametrize("pattern", ["dot_reduce_scatter", "dot_psum"])
def test_a_scatter_reads_blocks_of_the_operand_with_the_scattered_dim(
    pattern: Literal["dot_reduce_scatter", "dot_psum"], tpu: str
) -> None:
    """However narrow the strips of the other operand: of 16 columns on 4 devices they are less."""
    narrower = 0
    for cut in ("m", "n"):
        chain = chain_of(pattern, 8192, 4096, 8192, cut=cut)
        for work, axis in every_work(chain, by_name(tpu)):
            block, strip = ("lhs", "rhs") if cut == "m" else ("rhs", "lhs")
            assert cut_side(work, axis.size, 0) == block
            assert strip_side(work, axis.size, 0) == strip
            narrower += work.piece[0].m < work.piece[0].n if cut == "n" else work.piece[0].n < work.piece[0].m
    assert narrower


@pytest.mark.parametrize("operand", ["lhs", "rhs"])
@pytest.mark.parametrize("handed_out", [False, True])
def test_of_two_operands_of_one_size_that_travels_which_is_gathered(
    operand: Literal["lhs", "rhs"], handed_out: bool
) -> None:
    chain = chain_of("all_gather_dot", 4096, 8192, 4096, cut="k", operand=operand, handed_out=handed_out)
    other = {"lhs": "rhs", "rhs": "lhs"}[operand]
    for work, axis in every_work(chain, by_name("tpu_v5p")):
        assert sent_side(work, axis.size, 0) == operand
        assert cut_side(work, axis.size, 0) == other


def test_a_square_weight_and_as_many_tokens_are_priced_as_if_they_differed_by_little() -> None:
    """What is cut apart is the other operand: it takes the memory that the operand a little larger would."""
    axis, form = Axis(by_name("tpu_v5p"), 8), Form(columns=4, cut="apart")

    def added_bytes(m: int) -> float:
        return price(
            chain_of("all_gather_dot", m, 8192, 8192, cut="k", operand="rhs"), form, axis
        ).added_bytes

    assert added_bytes(8192) == pytest.approx(added_bytes(8192 + 64), rel=0.05)


@pytest.mark.parametrize("columns", [1, 4])
def test_rings_whose_pieces_are_joined_are_priced_a_little_above_their_parts(columns: int) -> None:
    chain = chain_of("all_gather_dot", 4096, 8192, 4096, cut="k", operand="rhs")
    axis, form = Axis(by_name("tpu_v6e"), 8), Form(directions=2, columns=columns, joined=True)
    (work,) = works(chain, form, axis)
    longer = JOINED * (IN_COLUMNS if columns > 1 else 1.0)
    assert price(chain, form, axis).overlapped_s == pytest.approx(longer * estimate(work, axis).overlapped_s)
    switch = Axis(by_name("h100"), 8)
    (work,) = works(chain, form, switch)
    assert price(chain, form, switch).overlapped_s == estimate(work, switch).overlapped_s


def test_the_sides_are_of_every_matmul() -> None:
    chain = chain_of("all_gather_dot", 4096, 4096, 4096)
    (work,) = works(chain, Form(), Axis(by_name("tpu_v5p"), 4))
    with pytest.raises(ValueError, match="every matmul has a side, or none is told"):
        RingWork(
            collective="all_gather",
            shard_bytes=1,
            collective_shard_bytes=1,
            matmuls=work.matmuls,
            piece=work.piece,
            sides=("lhs", "rhs"),
        )
