"""Layers of a transformer as people write them: choices, and the training step of any of them.

How a layer is sharded, what its blocks are, where the norm and the casts stand, whether layers are scanned
and made again in the backward pass: that changes what compilers fuse with dots, and what they keep.
Docstrings give the shapes one device sees: b = batch, or batch / fsdp; s = seq, or seq / tensor; S = seq,
D = width, H = heads, or heads / tensor; h = width of a head, F = hidden width, or hidden width / tensor.
"""

# JAX leaves its collectives, and what jit and shard_map return, untyped.
# mypy: allow-untyped-calls, no-warn-return-any

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from bench.programs import esm2_layer
from bench.programs.decoder import causal_attention, rms_norm, rotate
from bench.programs.program import Operand, Program, gather, mean_square, scatter

Sharding = Literal["tensor", "sequence", "fsdp", "fsdp+sequence"]
"""Activations whole and blocks that end with a psum; activations sharded along the sequence, gathered and
scattered; weights gathered; or weights and activations, each over an axis of its own."""

Block = Literal["attention", "fused_attention", "mlp", "gated", "fused_gated"]
"""Attention with three projections, or one for all of them; an MLP, or a gated one, with two projections up
or one for both."""

Remat = Literal["nothing", "all", "dots"]
"""What is made again in the backward pass: nothing, a whole layer, or all but the results of dots."""

ACTIVATIONS: Final[Mapping[str, Callable[[Array], Array]]] = {
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How a step is written.

    Attributes:
      sharding: of the layers.
      blocks: of a layer, in order.
      norm: of a block's input.
      norm_behind: whether it stands behind the gather of the activations.
      activation: of the MLPs.
      bias: whether projections have biases.
      float32_weights: whether weights are float32, and cast to the activations' dtype in every step.
      cast_behind: whether they are so behind their gather.
      layers: how many.
      scanned: whether the layers are a `lax.scan`.
      remat: what is made again.
      head: whether there is a vocabulary and a cross entropy behind the layers.
    """

    sharding: Sharding
    blocks: tuple[Block, ...]
    norm: Literal["rms", "layer"]
    norm_behind: bool
    activation: str
    bias: bool
    float32_weights: bool
    cast_behind: bool
    layers: int
    scanned: bool
    remat: Remat
    head: bool

    def __str__(self) -> str:
        said = [self.sharding, "+".join(self.blocks), self.norm, self.activation, f"{self.layers}x"]
        said += [each.name for each in fields(self) if getattr(self, each.name) is True]
        return " ".join([*said, *([f"remat_{self.remat}"] if self.remat != "nothing" else [])])

    @property
    def over_tensor(self) -> bool:
        """Whether heads and hidden width are sharded."""
        return self.sharding != "fsdp"

    @property
    def over_sequence(self) -> bool:
        """Whether activations are sharded along the sequence between blocks."""
        return self.sharding.endswith("sequence")

    @property
    def over_fsdp(self) -> bool:
        """Whether weights and the batch are sharded over an axis of their own."""
        return self.sharding.startswith("fsdp")


def drawn(draw: random.Random) -> Choices:
    """Some choices; those that say nothing of the rest are not made."""

    def sometimes(chance: float, possible: bool = True) -> bool:
        return draw.random() < chance and possible

    sharding = draw.choice(get_args(Sharding))
    attention: Block = draw.choice(("attention", "fused_attention"))
    mlp: Block = draw.choice(("mlp", "mlp", "gated", "fused_gated"))
    layers = draw.choice((1, 1, 2, 3))
    float32_weights = sometimes(0.4)
    return Choices(
        sharding=sharding,
        blocks=draw.choice(((attention, mlp), (attention, mlp), (mlp,), (attention,))),
        norm=draw.choice(("rms", "layer")),
        norm_behind=sometimes(0.5, sharding.endswith("sequence")),
        activation=draw.choice(tuple(ACTIVATIONS)),
        bias=sometimes(0.3),
        float32_weights=float32_weights,
        cast_behind=sometimes(0.5, float32_weights and sharding.startswith("fsdp")),
        layers=layers,
        scanned=sometimes(0.5, layers > 1),
        remat=draw.choice(("nothing", "nothing", "all", "dots")),
        head=sometimes(0.25),
    )


# A layer, as one device sees it. Its weights are a dict of dicts: one of each block, by name.


def weight(of: Choices, w: Array, dim: int, dtype: Any) -> Array:
    """A weight as it is used: cast, and whole in the dim that is sharded over "fsdp"."""
    if not of.over_fsdp:
        return w.astype(dtype)
    return gather(w, "fsdp", dim).astype(dtype) if of.cast_behind else gather(w.astype(dtype), "fsdp", dim)


def projected(of: Choices, w: Mapping[str, Array], name: str, x: Array) -> Array:
    """[b, S, D] times the weight of that name [D / fsdp, …] → [b, S, …]."""
    y = jnp.einsum("bsd,d...->bs...", x, weight(of, w[name], 0, x.dtype))
    return y + w[f"{name}_bias"].astype(x.dtype) if of.bias else y


def normalised(of: Choices, w: Mapping[str, Array], x: Array) -> Array:
    """[b, s, D], as wide."""
    if of.norm == "rms":
        return rms_norm(x, w["scale"])
    return esm2_layer.layer_norm(x, esm2_layer.Norm(w["scale"], w["shift"]))


def entered(of: Choices, w: Mapping[str, Array], x: Array) -> Array:
    """[b, s, D] → [b, S, D]: what a block's dots read."""
    if not of.over_sequence:
        return normalised(of, w, x)
    if of.norm_behind:
        return normalised(of, w, gather(x, "tensor", 1))
    return gather(normalised(of, w, x), "tensor", 1)


def left(of: Choices, partial_sum: Array) -> Array:
    """[b, S, D] → [b, s, D]: what a block adds to its input."""
    if of.over_sequence:
        return scatter(partial_sum, "tensor", 1)
    return lax.psum(partial_sum, "tensor") if of.over_tensor else partial_sum


def attention_block(of: Choices, w: Mapping[str, Array], x: Array, *, fused: bool) -> Array:
    """[b, s, D] → [b, s, D]."""
    y = entered(of, w, x)
    if fused:
        q, k, v = jnp.moveaxis(projected(of, w, "projections", y), 2, 0)
    else:
        q, k, v = (projected(of, w, name, y) for name in ("query", "key", "value"))
    mixed = causal_attention(rotate(q, 10_000.0), rotate(k, 10_000.0), v)
    return left(of, jnp.einsum("bshk,hkd->bsd", mixed, weight(of, w["output"], 2, x.dtype)))


def mlp_block(of: Choices, w: Mapping[str, Array], x: Array, *, gate: Literal["", "own", "fused"]) -> Array:
    """[b, s, D] → [b, s, D]."""
    activation, y = ACTIVATIONS[of.activation], entered(of, w, x)
    if gate == "fused":
        gates, up = jnp.moveaxis(projected(of, w, "both", y), 2, 0)
        hidden = activation(gates) * up
    elif gate == "own":
        hidden = activation(projected(of, w, "gate", y)) * projected(of, w, "up", y)
    else:
        hidden = activation(projected(of, w, "up", y))
    return left(of, hidden @ weight(of, w["down"], 1, x.dtype))


BLOCKS: Final[Mapping[Block, Callable[..., Array]]] = {
    "attention": partial(attention_block, fused=False),
    "fused_attention": partial(attention_block, fused=True),
    "mlp": partial(mlp_block, gate=""),
    "gated": partial(mlp_block, gate="own"),
    "fused_gated": partial(mlp_block, gate="fused"),
}


def layer(of: Choices, w: Mapping[str, Any], x: Array) -> Array:
    """[b, s, D] → [b, s, D]."""
    for name in of.blocks:
        x = x + BLOCKS[name](of, w[name], x)
    return x


def cross_entropy(of: Choices, w: Mapping[str, Array], x: Array) -> Array:
    """[b, s, D] → the mean over the tokens of this device; the next token is any, but always the same."""
    y = entered(of, w, x)
    logits = jnp.einsum("bsd,dv->bsv", y, weight(of, w["vocabulary"], 0, x.dtype)).astype(jnp.float32)
    axes = ("tensor",) if of.over_tensor else ()
    count = logits.shape[-1]
    first = lax.axis_index("tensor") * count if axes else 0
    total = count * lax.axis_size("tensor") if axes else count
    column = jnp.arange(logits.shape[1]) * 7 % total - first
    largest = lax.stop_gradient(logits).max(-1)
    largest = lax.pmax(largest, axes) if axes else largest
    exponentials = jnp.exp(logits - largest[..., None]).sum(-1)
    picked = jnp.where(jnp.arange(count) == column[:, None], logits, 0).sum(-1)
    if axes:
        exponentials, picked = lax.psum(exponentials, axes), lax.psum(picked, axes)
    return (jnp.log(exponentials) + largest - picked).mean()


def loss(of: Choices, axes: tuple[str, ...], w: Mapping[str, Any], x: Array) -> Array:
    """Scalar, the same on every device."""
    policy = jax.checkpoint_policies.dots_saveable if of.remat == "dots" else None
    step: Callable[..., Array] = partial(layer, of)
    if of.remat != "nothing":
        step = jax.checkpoint(step, policy=policy, prevent_cse=not of.scanned)
    if of.scanned:
        x, _ = lax.scan(lambda x, w: (step(w, x), None), x, w["layers"])
    else:
        for each in w["layers"]:
            x = step(each, x)
    found = cross_entropy(of, w["head"], x) if of.head else mean_square(x)
    varying = tuple(axis for axis in axes if axis == "fsdp" or (of.over_sequence and not of.head))
    return lax.pmean(found, varying) if varying else found


# Its operands, and the program.


def operands(of: Choices) -> tuple[dict[str, Any], Operand]:
    """Weights, and the input [b, s, D]."""
    tensor = "tensor" if of.over_tensor else None
    fsdp = "fsdp" if of.over_fsdp else None

    def norm() -> dict[str, Operand]:
        names = ("scale",) if of.norm == "rms" else ("scale", "shift")
        return {name: Operand("D", P(), float32=of.float32_weights) for name in names}

    def operand(dims: str, spec: tuple[str | None, ...], fan_in: str) -> Operand:
        return Operand(dims, P(*spec), fan_in=fan_in, float32=of.float32_weights)

    def projection(name: str, dims: str) -> dict[str, Operand]:
        sharded = tuple(tensor if each in ("H", "F") else None for each in dims.split())
        found = {name: operand(f"D {dims}", (fsdp, *sharded), "D")}
        return found | ({f"{name}_bias": operand(dims, sharded, "D")} if of.bias else {})

    def block(name: Block) -> dict[str, Operand]:
        output = {"output": operand("H h D", (tensor, None, fsdp), "H h")}
        if name == "attention":
            return (
                norm()
                | projection("query", "H h")
                | projection("key", "H h")
                | projection("value", "H h")
                | output
            )
        if name == "fused_attention":
            return norm() | projection("projections", "three H h") | output
        down = {"down": operand("F D", (tensor, fsdp), "F")}
        if name == "fused_gated":
            return norm() | projection("both", "two F") | down
        return norm() | (projection("gate", "F") if name == "gated" else {}) | projection("up", "F") | down

    def in_layers(each: Operand) -> Operand:
        return replace(each, dims=f"L {each.dims}", spec=P(None, *each.spec))

    one = {name: block(name) for name in of.blocks}
    weights: dict[str, Any] = {
        "layers": jax.tree.map(in_layers, one) if of.scanned else tuple(one for _ in range(of.layers))
    }
    if of.head:
        weights["head"] = norm() | {"vocabulary": operand("D V", (fsdp, tensor), "D")}
    return weights, Operand("B S D", P(fsdp, "tensor" if of.over_sequence else None))


def program(of: Choices, devices: int, sizes: Mapping[str, int]) -> Program:
    """The step.

    Args:
      of: how it is written.
      devices: how many there are: along one axis, or 4 along "tensor" and the others along "fsdp".
      sizes: B (the batch, of all devices), S, D, F, H, h and V in its real size.
    """
    axes = {"fsdp": ("fsdp",), "fsdp+sequence": ("fsdp", "tensor")}.get(of.sharding, ("tensor",))
    counts = {"L": of.layers, "two": 2, "three": 3}
    small = {"B": devices, "S": devices, "D": 32, "F": 64, "H": devices, "h": 4, "V": 4 * devices}
    return Program(
        name=str(of),
        mesh_shape=(devices,) if len(axes) == 1 else (devices // 4, 4),
        axis_names=axes,
        sizes={"small": small | counts, "real": {**sizes, **counts}},
        operands=operands(of),
        local_loss=partial(loss, of, axes),
    )
