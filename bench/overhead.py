"""Measures what the library itself costs: a warm call, rewriting, compiling, importing.

    python -m bench.overhead            prints a table, writes bench/results/overhead.json and .md
    python -m bench.overhead --quick    few rounds and small programs: shows that it runs, not what it costs

All figures are measured (wall clock) and each is a median of interleaved rounds, on CPU devices.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from bench.programs import decoder
from bench.versions import spelled
from overlap import overlap_collectives
from overlap.compiled_memory import temporary_bytes

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = Path(__file__).resolve().parent / "results"

CALL_S: Final = 25e-6
"""Target: what a warm call may cost over the jitted function's."""

REWRITE: Final = 2.0
"""Target: the time of rewriting a program over the time of tracing it."""

LAYERS: Final = (1, 10, 30, 100)
"""Of the programs that are compiled."""

IMPORT_S: Final = 0.3
"""Target: what ``import overlap`` may take once jax is imported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One measurement against its target.

    Attributes:
      name: what was measured.
      base, full: the two medians that it compares, with what they are of.
      value: the figure; below ``target`` is good.
      target: what the figure may be; None where it is shown for comparison.
      unit: of value and target.
    """

    name: str
    base: str
    full: str
    value: float
    target: float | None
    unit: str

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.target is None or self.value <= self.target


def medians(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of what each variant returns, run in turns so that a slow spell of the machine hits all."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds):
        names = list(variants)
        for name in names if turn % 2 else reversed(names):
            samples[name].append(variants[name]())
    return {name: statistics.median(values) for name, values in samples.items()}


# A warm call.


def call_s(function: Callable[..., Any], arguments: Sequence[Any], calls: int) -> float:
    """Seconds of one call, of many in a row; the last result is waited for."""
    start = time.perf_counter()
    for _ in range(calls):
        result = function(*arguments)
    spent = time.perf_counter() - start
    jax.block_until_ready(result)
    return spent / calls


def measure_call(name: str, jitted: Any, arguments: Sequence[Any], *, rounds: int, calls: int) -> Figure:
    """The decorated function's call against the jitted function's, both warm."""
    decorated = overlap_collectives(jitted, policy="always", strict=True)
    for function in (jitted, decorated):
        jax.block_until_ready(function(*arguments))
    found = medians(
        {
            "jitted": lambda: call_s(jitted, arguments, calls),
            "decorated": lambda: call_s(decorated, arguments, calls),
        },
        rounds,
    )
    return Figure(
        name=name,
        base=f"jitted {found['jitted'] * 1e6:.2f} µs",
        full=f"decorated {found['decorated'] * 1e6:.2f} µs",
        value=(found["decorated"] - found["jitted"]) * 1e6,
        target=CALL_S * 1e6,
        unit="µs",
    )


def one_device() -> tuple[Any, Sequence[Any]]:
    """A trivial function of one device."""
    return jax.jit(lambda x: x + 1), (jnp.zeros((8,), jnp.float32),)


def two_devices() -> tuple[Any, Sequence[Any]]:
    """A tiny shard_map program with one ``all_gather → dot``."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def body(x: Any, w: Any) -> Any:
        return lax.all_gather(x, "x", axis=0, tiled=True) @ w

    specs = (P("x"), P(None, "x"))
    jitted = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(None, "x")))
    shardings = [jax.NamedSharding(mesh, spec) for spec in specs]
    return jitted, [jax.device_put(np.ones((8, 8), np.float32), s) for s in shardings]


# Rewriting.


Program = tuple[Callable[..., Any], Sequence[Any]]
"""A function that can be traced, and the types of its arguments."""


def decoder_layers(count: int) -> Program:
    """The decoder's layers, unrolled: each has 11 collectives, 9 gathers and 2 scatters next to its dots.

    Each has weights of its own: gathers of the same weights would be one.
    """
    config, mesh = decoder.SMALL, decoder.make_mesh(jax.devices()[:8])
    weights = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype),
        decoder.state_shapes(config, mesh).params.layers,
    )
    weight_specs = jax.tree.map(lambda spec: P(*spec[1:]), decoder.PARAM_SPECS.layers)
    x_spec = P("fsdp", "tensor")

    def body(x: Any, w: Any) -> Any:
        for layer in w:
            x = x + decoder.attention_block(config, layer, x)
            x = x + decoder.mlp_block(config, layer, x)
        return x

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(x_spec, [weight_specs] * count), out_specs=x_spec)
    x = jax.ShapeDtypeStruct((config.batch, config.seq, config.d_model), config.dtype)
    return mapped, (x, [weights] * count)


def dense_layers(count: int, *, collectives: bool = True) -> Program:
    """Chains and cheap elementwise work: a collective per 12 equations, more than any real program has.

    Without ``collectives`` the gathers and scatters are replaced by local equations.
    """
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def gathered(x: Any) -> Any:
        return lax.all_gather(x, "x", axis=0, tiled=True) if collectives else lax.concatenate([x] * 4, 0)

    def scattered(y: Any) -> Any:
        return lax.psum_scatter(y, "x", scatter_dimension=0, tiled=True) if collectives else y[:4]

    def body(x: Any, w: Any, v: Any) -> Any:
        for _ in range(count):
            h = gathered(x) @ w
            for i in range(8):
                h = lax.add(lax.mul(h, lax.tanh(h)), h) if i % 2 else lax.sub(h, lax.exp(h))
            x = lax.add(x, scattered(h @ v))
        return x

    specs = (P("x"), P(None, "x"), P("x"))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (16, 64), (64, 16))]
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x")), shapes


def equations(jaxpr: Any) -> int:
    """The equations of a jaxpr and of the jaxprs in it."""
    return sum(
        1 + sum(equations(inner) for inner in jax.extend.core.jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def trace_s(function: Callable[..., Any], arguments: Sequence[Any], policy: Any) -> float:
    """Seconds of tracing a function that was never traced; as jitted (None), or decorated with a policy."""
    jitted: Any = jax.jit(lambda *args: function(*args))
    traced = jitted if policy is None else overlap_collectives(jitted, policy=policy, strict=True)
    gc.collect()
    start = time.perf_counter()
    traced.trace(*arguments)
    return time.perf_counter() - start


def measure_rewrite(
    name: str, program: Callable[[int], Program], size: int, *, rounds: int, target: float | None
) -> Figure:
    """The decorated trace less the plain trace, over the plain trace, of about ``size`` equations."""

    def traced(count: int) -> tuple[Any, Sequence[Any], int]:
        function, arguments = program(count)
        return function, arguments, equations(jax.jit(function).trace(*arguments).jaxpr)

    per_layer = traced(4)[2] - traced(3)[2]
    function, arguments, count = traced(max(1, round(size / per_layer)))
    found = medians(
        {
            "plain": lambda: trace_s(function, arguments, None),
            "decorated": lambda: trace_s(function, arguments, "always"),
        },
        rounds,
    )
    rewriting = found["decorated"] - found["plain"]
    sites = overlap_collectives(function, policy="always").explain(*arguments).sites
    rewritten = sum(site.rewritten for site in sites)
    return Figure(
        name=f"rewriting {name}: {count} equations, {rewritten} of {len(sites)} collectives",
        base=f"tracing {found['plain']:.3f} s",
        full=f"rewriting {rewriting:.3f} s",
        value=rewriting / found["plain"],
        target=target,
        unit="×",
    )


# Compiling.


def mlp_layers(count: int, *, scanned: bool) -> Program:
    """Layers of a tensor-parallel MLP, a gather and a scatter each, all in a row or in one scan."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def layer(x: Any, weights: tuple[Any, Any]) -> tuple[Any, None]:
        w, v = weights
        h = jnp.tanh(lax.all_gather(x, "x", tiled=True) @ w)
        return x + lax.psum_scatter(h @ v, "x", tiled=True), None

    def body(x: Any, w: Any, v: Any) -> Any:
        if scanned:
            return lax.scan(layer, x, (w, v))[0]
        for i in range(count):
            x, _ = layer(x, (w[i], v[i]))
        return x

    specs = (P("x"), P(None, None, "x"), P(None, "x"))
    shapes = (128, 64), (count, 64, 256), (count, 256, 64)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("x")), arguments


def build(function: Callable[..., Any], arguments: Sequence[Any], policy: Any) -> tuple[float, float, int]:
    """Seconds of tracing (and rewriting) anew, and of compiling; temporary bytes of one device."""
    jitted: Any = jax.jit(lambda *args: function(*args))
    program = jitted if policy is None else overlap_collectives(jitted, policy=policy, strict=True)
    gc.collect()
    start = time.perf_counter()
    traced = program.trace(*arguments)
    middle = time.perf_counter()
    compiled = traced.lower().compile()
    spent_s = time.perf_counter() - middle
    return middle - start, spent_s, temporary_bytes(compiled) or 0


def measure_build(count: int, *, scanned: bool, rounds: int) -> Figure:
    """From a function to a program that can run, with every chain as a ring and without."""
    function, arguments = mlp_layers(count, scanned=scanned)
    found: dict[str, list[tuple[float, float, int]]] = {"jitted": [], "decorated": []}
    for turn in range(rounds):
        for name in found if turn % 2 else reversed(found):
            found[name].append(build(function, arguments, None if name == "jitted" else "always"))
    told, totals = {}, {}
    for name, runs in found.items():
        trace_s, compile_s = (statistics.median(run[part] for run in runs) for part in (0, 1))
        totals[name] = trace_s + compile_s
        told[name] = f"{name} {trace_s:.2f} + {compile_s:.2f} s, {runs[0][2] / 1e3:.0f} kB"
    return Figure(
        name=f"trace and rewrite + compile, temporary memory: {count} layers, "
        + ("scanned" if scanned else "unrolled"),
        base=told["jitted"],
        full=told["decorated"],
        value=totals["decorated"] / totals["jitted"],
        target=None,
        unit="×",
    )


# Importing.

_IMPORT = """
import time, jax, jax.numpy
start = time.perf_counter()
import overlap
spent = time.perf_counter() - start
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "importing overlap started a backend"
print(spent)
"""


def import_s() -> float:
    """Seconds that a new process spends in ``import overlap`` after ``import jax``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT], env=environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def measure_import(rounds: int) -> Figure:
    """``import overlap`` beyond jax; the first run, which may have to compile bytecode, is not counted."""
    import_s()
    spent = medians({"import": import_s}, rounds)["import"]
    return Figure(name="import overlap", base="jax imported", full="", value=spent, target=IMPORT_S, unit="s")


# The report.


def measure(quick: bool) -> list[Figure]:
    """All figures."""
    rounds, calls = (3, 20) if quick else (41, 1000)
    sizes = (300, 600) if quick else (5_000, 10_000, 20_000)
    figures = [
        measure_call("call, one device: x + 1", *one_device(), rounds=rounds, calls=calls),
        measure_call(
            "call, two devices: shard_map", *two_devices(), rounds=rounds, calls=max(20, calls // 5)
        ),
    ]
    rewriting = functools.partial(measure_rewrite, rounds=1 if quick else 3)
    figures += [rewriting("decoder layers", decoder_layers, size, target=REWRITE) for size in sizes]
    without = functools.partial(dense_layers, collectives=False)
    figures += [rewriting("layers without collectives", without, size, target=REWRITE) for size in sizes]
    figures.append(rewriting("a collective per 12 equations", dense_layers, sizes[0], target=None))
    for scanned, count in itertools.product((True, False), (1, 2) if quick else LAYERS):
        figures.append(measure_build(count, scanned=scanned, rounds=1 if quick else 3))
    figures.append(measure_import(1 if quick else 7))
    return figures


def versions() -> dict[str, str]:
    """What the figures were measured with."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def table(figures: Sequence[Figure]) -> str:
    """The figures as a Markdown table."""
    rows = [("", "base", "with the library", "figure", "target", "met")]
    for f in figures:
        wanted, met = "none", ""
        if f.target is not None:
            wanted, met = f"≤ {f.target:g} {f.unit}", "yes" if f.met else "**no**"
        rows.append((f.name, f.base, f.full, f"{f.value:.2f} {f.unit}", wanted, met))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; the exit status is 1 where a full run misses a target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds and small programs; no verdict")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="folder of overhead.json and overhead.md"
    )
    options = parser.parse_args(argv)
    figures, made_with = measure(options.quick), versions()
    text = table(figures)
    kind = "Measured (wall clock, medians of interleaved rounds)" + (", a quick run" if options.quick else "")
    heading = f"{kind}; {spelled(made_with)}."
    print(f"{heading}\n\n{text}")
    options.output.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": 1,
        "quick": options.quick,
        "versions": made_with,
        "figures": [{**dataclasses.asdict(f), "met": f.met} for f in figures],
    }
    (options.output / "overhead.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    (options.output / "overhead.md").write_text(f"# What the library costs\n\n{heading}\n\n{text}\n")
    return 0 if options.quick or all(f.met for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
