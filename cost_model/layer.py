"""One transformer layer on a mesh, as one device sees it: its dots, and the collectives next to them.

Per block of two matmuls (the MLP; attention, with the products of queries, keys and values between), with the
shardings of the scaling book ("How to Parallelize a Transformer for Training"):
In[B_X,D_Y]·Win[D_X,F_Y]·Wout[F_Y,D_X] → Out[B_X,D_Y].

- tensor (Y): the input is gathered over D before the first matmul, the result scattered over D after the
  second; backwards the same of their gradients. The gathered input is kept for the backward pass.
- fsdp (X): each weight is gathered just before use, in the backward pass again; its gradient is scattered.
- data: the gradient of each weight is all-reduced; pods: each device's share of it, over the network between.

Scores and values are charged without a causal mask. Elementwise work is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from cost_model.matmul import Matmul
from cost_model.plain_chain import Pattern
from cost_model.strategies import Model
from cost_model.whole import whole

AxisName = Literal["pods", "pipeline", "data", "fsdp", "tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Over how many devices each mesh axis divides a model.

    Attributes:
      pods: slices, data parallel over the network between them.
      pipeline: stages of consecutive layers.
      data: devices with the same weights and other tokens.
      fsdp: devices that share the weights, with other tokens.
      tensor: devices that share the hidden width, with the same tokens.
      microbatches: into how many parts a step's tokens are cut, for a pipeline.

    Raises:
      ValueError: a number is below 1.
      TypeError: a number is no whole one.
    """

    pods: int = 1
    pipeline: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (number := whole(getattr(self, field.name), field.name)) < 1:
                least = (
                    "a step has one microbatch" if field.name == "microbatches" else "an axis has one device"
                )
                raise ValueError(f"{field.name} {number}: {least} at least")

    def __str__(self) -> str:
        """The mesh in words: "data 4 × fsdp 8, 2 microbatches"; "one device" where it is that."""
        axes = {name: getattr(self, name) for name in get_args(AxisName)}
        mesh = " × ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one device"
        return mesh + (f", {self.microbatches} microbatches" if self.microbatches > 1 else "")

    @property
    def devices(self) -> int:
        """Devices of all pods."""
        return self.pods * self.pipeline * self.data * self.fsdp * self.tensor

    @property
    def copies(self) -> int:
        """Devices that see different tokens."""
        return self.pods * self.data * self.fsdp

    def misfit(self, model: Model) -> str:
        """Why the model cannot be divided like this; empty if it can."""
        heads = [model.heads, model.heads if model.kv_heads is None else model.kv_heads]
        for what, size, parts in (
            ("tokens", model.tokens, self.copies * self.microbatches),
            ("d_model", model.d_model, self.fsdp),
            ("d_model", model.d_model, self.tensor),
            ("d_ff", model.d_ff, self.tensor),
            ("heads", heads[0], self.tensor),
            ("kv_heads", heads[1], self.tensor),
            ("layers", model.layers, self.pipeline),
        ):
            if size % parts:
                return f"{what} {size} cannot be cut into {parts} equal parts"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective of a layer.

    Attributes:
      what: in words.
      axis: the mesh axis.
      pattern: what it is next to; "all_reduce" where it is next to no dot.
      elements: of the whole array V.
      dots: the names of those dots, each with the dim that is gathered or scattered.
      free: see `PlainChain`.
      apart: see `PlainDot`.
    """

    what: str
    axis: AxisName
    pattern: Pattern | Literal["all_reduce"]
    elements: int
    dots: tuple[tuple[str, Literal["m", "k", "n"]], ...] = ()
    free: Literal["m", "k", "n"] | None = None
    apart: bool | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward or the backward pass through one layer, on one device: its dots and collectives."""

    dots: Mapping[str, Matmul]
    moves: tuple[Move, ...]


def forward(model: Model, split: Split) -> Pass:
    """The forward pass of one layer, on one device and microbatch."""
    dots: dict[str, Matmul] = {}
    moves: list[Move] = []
    t, d = _local_tokens(model, split), model.d_model
    for block in _blocks(model, split):
        into, out = [f"{block.name} {each}" for each, _ in block.columns], f"{block.name} out"
        dots |= {
            name: Matmul(m=t, k=d, n=n, dtype=model.dtype)
            for name, (_, n) in zip(into, block.columns, strict=True)
        }
        dots |= block.between
        dots[out] = Matmul(m=t, k=block.rows, n=d, dtype=model.dtype)
        moves.append(
            Move(
                what=f"gather {block.name} input",
                axis="tensor",
                pattern="all_gather_dot",
                elements=t * d,
                dots=tuple((name, "k") for name in into),
                free="m",
            )
        )
        moves += [_gathered_weight(name, dots[name], "k") for name in into]
        moves.append(_gathered_weight(out, dots[out], "n"))
        moves.append(
            Move(
                what=f"scatter {block.name} output",
                axis="tensor",
                pattern="dot_reduce_scatter",
                elements=t * d,
                dots=((out, "n"),),
                free="m",
            )
        )
    return _kept(dots, moves, split)


def backward(model: Model, split: Split) -> Pass:
    """The backward pass of one layer, on one device and microbatch.

    The reduction over data and pods is part of it where there is one microbatch: see `reduction`.
    """
    dots: dict[str, Matmul] = {}
    moves: list[Move] = []
    t, d = _local_tokens(model, split), model.d_model
    for block in reversed(_blocks(model, split)):
        hidden, weight = f"{block.name} out, input's gradient", f"{block.name} out, weight's gradient"
        dots[hidden] = Matmul(m=t, k=d, n=block.rows, dtype=model.dtype)
        dots[weight] = Matmul(m=block.rows, k=t, n=d, dtype=model.dtype)
        for name, between in block.between.items():
            # The gradients of both operands.
            dots[f"{name}, gradient"] = dataclasses.replace(between, batch=2 * between.batch)
        moves.append(
            Move(
                what=f"gather {block.name} output's gradient",
                axis="tensor",
                pattern="all_gather_dot",
                elements=t * d,
                dots=((hidden, "k"), (weight, "n")),
            )
        )
        moves.append(_gathered_weight(hidden, dots[hidden], "k"))
        moves += _reduced_gradient(weight, dots[weight], "n", split)
        inputs = []
        for each, n in block.columns:
            inward, weight = (f"{block.name} {each}, {of}'s gradient" for of in ("input", "weight"))
            dots[weight] = Matmul(m=d, k=t, n=n, dtype=model.dtype)
            dots[inward] = Matmul(m=t, k=n, n=d, dtype=model.dtype)
            moves += _reduced_gradient(weight, dots[weight], "m", split)
            moves.append(_gathered_weight(inward, dots[inward], "n"))
            inputs.append(inward)
        moves.append(
            Move(
                what=f"scatter {block.name} input's gradient",
                axis="tensor",
                pattern="dot_reduce_scatter",
                elements=t * d,
                dots=tuple((name, "n") for name in inputs),
                free="m" if len(inputs) == 1 else None,
                # The weights' rows, which lie together.
                apart=False,
            )
        )
    return _kept(dots, moves, split)


def reduction(model: Model, split: Split) -> Pass:
    """What is left for the end of a step of several microbatches: gradients over data and pods."""
    if split.microbatches == 1:
        return Pass({}, ())
    weights = [
        (f"{block.name} {name}, weight's gradient", model.d_model * n)
        for block in _blocks(model, split)
        for name, n in (*block.columns, ("out", block.rows))
    ]
    moves = [
        Move(what=f"reduce {name}", axis=axis, pattern="all_reduce", elements=_left(elements, axis, split))
        for name, elements in weights
        for axis in _REDUCED
    ]
    return _kept({}, moves, split)


@dataclass(frozen=True, slots=True)
class _Block:
    """Two matmuls in a row on one device.

    Attributes:
      name: of the block.
      columns: names and widths of the matrices in, D × width each.
      rows: of the matrix out, rows × D.
      between: dots that no collective is next to.
    """

    name: str
    columns: tuple[tuple[str, int], ...]
    rows: int
    between: dict[str, Matmul]


def _blocks(model: Model, split: Split) -> tuple[_Block, ...]:
    y = split.tensor
    hidden = model.d_ff // y
    names = ("gate", "in") if model.gated else ("in",)
    mlp = _Block("mlp", tuple((name, hidden) for name in names), hidden, {})
    if not model.heads:
        return (mlp,)
    heads = model.heads // y
    kv_heads = (model.heads if model.kv_heads is None else model.kv_heads) // y
    widths = (heads, kv_heads, kv_heads)
    between: dict[str, Matmul] = {}
    if model.sequence:
        t = _local_tokens(model, split)
        # A device has a part of a sequence, whole ones, or equal parts of several.
        rows = t if t <= model.sequence else math.gcd(t, model.sequence)
        batch = heads * (t // rows)
        between = {
            "attention scores": Matmul(
                batch=batch, m=rows, k=model.head_dim, n=model.sequence, dtype=model.dtype
            ),
            "attention values": Matmul(
                batch=batch, m=rows, k=model.sequence, n=model.head_dim, dtype=model.dtype
            ),
        }
    columns = tuple((name, model.head_dim * width) for name, width in zip("qkv", widths, strict=True))
    return _Block("attention", columns, model.head_dim * heads, between), mlp


def _local_tokens(model: Model, split: Split) -> int:
    return model.tokens // (split.copies * split.microbatches)


def _gathered_weight(dot: str, matmul: Matmul, cut: Literal["k", "n"]) -> Move:
    """The weight of a dot, its second operand, gathered over fsdp."""
    return Move(
        what=f"gather weight of {dot}",
        axis="fsdp",
        pattern="all_gather_dot",
        elements=matmul.k * matmul.n,
        dots=((dot, cut),),
        free="n" if cut == "k" else None,
    )


def _reduced_gradient(dot: str, matmul: Matmul, cut: Literal["m", "n"], split: Split) -> list[Move]:
    """The gradient of a weight, scattered over fsdp and reduced over what holds the same weights."""
    elements = matmul.m * matmul.n
    free: Literal["m", "n"] = "n" if cut == "m" else "m"
    moves = [
        Move(
            what=f"scatter {dot}",
            axis="fsdp",
            pattern="dot_reduce_scatter",
            elements=elements,
            dots=((dot, cut),),
            free=free,
            apart=True,
        )
    ]
    if split.microbatches > 1:
        return moves
    for axis in _REDUCED:
        # Where it was scattered or reduced before, what is left of it is next to no dot.
        beside = split.fsdp == 1 and (axis == "data" or split.data == 1)
        moves.append(
            Move(
                what=f"reduce {dot}",
                axis=axis,
                pattern="dot_psum" if beside else "all_reduce",
                elements=_left(elements, axis, split),
                dots=((dot, cut),) if beside else (),
                free=free if beside else None,
                apart=True,
            )
        )
    return moves


_REDUCED: tuple[AxisName, ...] = ("data", "pods")


def _left(elements: int, axis: AxisName, split: Split) -> int:
    """Elements of a weight's gradient that a device reduces over data, and then its share over pods."""
    return elements // (split.fsdp * (split.data if axis == "pods" else 1))


def _kept(dots: dict[str, Matmul], moves: Iterable[Move], split: Split) -> Pass:
    """Without the collectives among one device."""
    return Pass(dots, tuple(move for move in moves if getattr(split, move.axis) > 1))
