"""Makes the tables of what TPU compilers believe of their chips, and judges matmul times on unseen shapes.

    python -m bench.matmul_tables [--chips tpu_v5e ...] [--jobs N]      (make bench-matmul)

It compiles a few matmuls for each chip (no TPU is needed, but libtpu: pip install 'overlap-collectives[tpu]')
with the compiler's log on. That tells the terms of every window that it tries, from which follow the rates of
`cost_model.windows`; they are written to cost_model/tables. Then it compiles random matmuls and compares what
`matmul_s` finds with the compiler's estimates: bench/results/matmul_model.json and .md, and the shapes with
their cycles in tests/cost_model/matmul_unseen.json. These samples are kept in bench/results/matmul_samples:
what is there is not compiled again, so that a run can be stopped and go on later.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, get_args

from overlap import tpu_target

if __name__ in ("__main__", "__mp_main__"):
    os.environ.update(tpu_target.ENVIRONMENT)

from bench import matmul_log, matmul_samples
from bench.matmul_log import Search, Tried
from bench.matmul_samples import BYTES, TOPOLOGIES, Dot, Sample, Set, hardware_of
from bench.quantile import quantile
from cost_model import Hardware, Matmul, matmul_s
from cost_model.matmul_table import FOLDER, SCHEMA
from cost_model.tile import LANES, SUBLANES, padded
from cost_model.windows import LEAVING, PACKED_ROWS, SUM_BYTES

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "results"
SAMPLES: Final = RESULTS / "matmul_samples"
UNSEEN: Final = ROOT / "tests" / "cost_model" / "matmul_unseen.json"

SEED: Final = 1
NUMBERS: Final[dict[Set, int]] = {"table": 48, "large": 22, "long": 30, "unseen": 80}
"""How many handfuls of programs: about 700 matmuls of each chip."""

UNITS: Final = ("int8", "bfloat16", "float32")

PROBED: Final = (16384, 8192, 8192)
"""M, K and N of the matmuls whose windows tell of a chip: powers of two, so that windows that divide them
move whole, and so large that neither operand is on chip."""

PROBED_ROWS: Final = (8, 2048, 4096)
"""Those of one of a few rows, for which weights are loaded."""

STARTS: Final = (0, 256, 512, 1024, 2048)
LEAST_ROWS: Final = (0, 8, 16, 32, 64, 128, 256)
ROWS_PER_CYCLE: Final = (2, 4, 8, 16)
"""What is tried of a matrix unit."""

SELDOM: Final = 0.01
"""Share of windows in which registers take longer than the matrix unit, below which that is left out."""

KNOWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "tpu_v4 core": {
        "near_row_cycles": 0.5,
        "near_window_cycles": 128,
        "near_bytes_per_cycle": 1024,
        "near_leaves": "whole",
    },
    "tpu_v5p": {"cores": 2},
    "tpu_v5e": {"near_leaves": "short"},
    "tpu_v6e": {"near_leaves": "between"},
    "tpu_7x": {
        "read_together": True,
        "exact": True,
        "adding_vmem_bytes": 2097152,
        "near_leaves": "short",
        "retries": True,
    },
}
"""What is not fitted but was seen, in the same logs: see `cost_model.windows.Rates`. CMEM of a v4 is near but
no VMEM; a v5p's device is two cores; 7x counts windows at the edges with their bytes."""

PLACES: Final = ("all in main memory", "weight on chip", "more on chip")


def rates_of(chip: str) -> dict[str, Any]:
    """The fields of a chip's `Rates`, from the compiler's log of a few matmuls.

    Raises:
      ValueError: the log is not as expected.
    """
    hardware = hardware_of(chip)
    lanes = hardware.matmul_tile[1]
    probed = {unit: _probed(chip, unit, PROBED) for unit in UNITS}
    few_rows = {unit: _probed(chip, unit, PROBED_ROWS) for unit in UNITS}
    tried = probed["bfloat16"].tried
    whole = [one for one in tried if all(size % part == 0 for size, part in _sizes(one, PROBED))]
    read_cycles, read_s = _line(
        [(2 * one.rows * one.k, one.lhs_cycles) for one in whole]
        + [(2 * one.k * one.columns, one.rhs_cycles) for one in whole]
    )
    leaving = [(LEAVING[2] * one.rows * one.columns, one.result_cycles) for one in whole]
    write_cycles, write_s = _line(leaving)
    if abs(read_s / write_s - 1) > 0.01:
        raise ValueError(f"{chip}: reads at {1 / read_s:.1f} bytes per cycle, writes at {1 / write_s:.1f}")
    wide_sum_cycles, narrow_sum_cycles = (_sum_cycles(probed[unit].tried) for unit in ("float32", "bfloat16"))
    convert_cycles = narrow_sum_cycles - wide_sum_cycles
    return {
        "clock_hz": hardware.clock_hz,
        "cores": 1,
        "lanes": lanes,
        "vmem_bytes": probed["bfloat16"].room_bytes,
        "bytes_per_cycle": 1 / read_s,
        "read_cycles": read_cycles,
        "write_cycles": write_cycles,
        "read_together": False,
        "exact": False,
        "adding_vmem_bytes": 0,
        "sum_cycles": wide_sum_cycles - convert_cycles,
        "convert_cycles": convert_cycles,
        "near_row_cycles": 0.0,
        "near_window_cycles": 0.0,
        "near_bytes_per_cycle": 0.0,
        "retries": False,
        "near_leaves": "never",
        "units": {unit: _unit(unit, lanes, probed[unit].tried, few_rows[unit].tried) for unit in UNITS},
        **KNOWN.get(chip, {}),
    }


def _probed(chip: str, unit: str, sizes: tuple[int, int, int]) -> Search:
    m, k, n = sizes
    dot = Dot(m=m, k=k, n=n, dtype=unit, out_dtype="int32" if unit == "int8" else unit)
    return matmul_log.searches(matmul_log.logged(lambda: matmul_samples.compile_alone(chip, dot)))[0]


def _sizes(one: Tried, sizes: tuple[int, int, int]) -> list[tuple[int, int]]:
    return list(zip(sizes, (one.rows, one.k, one.columns), strict=True))


def _sum_cycles(tried: Sequence[Tried]) -> float:
    """Cycles in which partial sums are added up, per register of the result, where K is cut."""
    cut = [one for one in tried if one.k < PROBED[1]]
    registers = sum(one.rows * one.columns / (SUBLANES * LANES) for one in cut)
    return round(sum(one.sum_cycles for one in cut) / registers, 2)


def _unit(unit: str, lanes: int, tried: Sequence[Tried], few_rows: Sequence[Tried]) -> dict[str, Any]:
    """The fields of a `Unit`."""
    depths = (lanes, 2 * lanes)

    def misses(start: int, depth: int, per_cycle: int, least: int) -> float:
        found = (
            start
            + -(-one.k // depth) * -(-one.columns // lanes) * max(one.rows, least) / per_cycle
            - one.unit_cycles
            for one in (*tried, *few_rows)
        )
        return sum(map(abs, found))

    start, depth, per_cycle, least = min(
        itertools.product(STARTS, depths, ROWS_PER_CYCLE, LEAST_ROWS), key=lambda of: misses(*of)
    )
    return {
        "start_cycles": start,
        "depth": depth,
        "rows_per_cycle": per_cycle,
        "least_rows": least,
        "copy_bytes": _copy_bytes(unit, tried),
        "register_cycles": _register_cycles(tried, depth, lanes),
    }


def _copy_bytes(unit: str, tried: Sequence[Tried]) -> float:
    """Bytes on chip of an element of an operand, beside two buffers of what arrives."""
    packed = PACKED_ROWS[unit]
    found = []
    for one in tried:
        elements = [one.rows * one.k, one.k * one.columns]
        buffers = [2 * BYTES[unit] * of for of in elements]
        near = (one.lhs_near, one.rhs_near)
        held = sum(of for of, is_near in zip(buffers, near, strict=True) if not is_near)
        copied = padded(one.rows, packed) * one.k + elements[1]
        found.append((one.vmem_bytes - SUM_BYTES * one.rows * one.columns - held) / copied)
    return round(statistics.median(found), 2)


def _register_cycles(tried: Sequence[Tried], depth: int, lanes: int) -> list[float]:
    """Cycles per register of the left and of the right operand, and of what is added up, where they count."""
    import numpy as np

    longer = [one for one in tried if one.compute_cycles > one.unit_cycles]
    if len(longer) < SELDOM * len(tried):
        return [0.0, 0.0, 0.0]
    tile = SUBLANES * LANES
    terms = np.array(
        [
            (
                one.rows * one.k / tile,
                one.k * one.columns / tile,
                one.rows * padded(one.k, depth) * padded(one.columns, lanes) / tile / LANES,
            )
            for one in longer
        ]
    )
    cycles = np.array([one.compute_cycles for one in longer], float)
    kept = np.ones(len(longer), bool)
    for _ in range(8):  # those nearest to a plane: the others have another bottleneck
        found = np.linalg.lstsq(terms[kept], cycles[kept], rcond=None)[0]
        misses = np.abs(terms @ found - cycles)
        kept = misses <= np.quantile(misses, 0.6) + 0.5
    return [round(max(0.0, float(each)), 3) for each in found]


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the line through points, by least squares."""
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    return round(intercept), slope


def write_table(chip: str) -> None:
    """The table's file, with where it comes from."""
    content = {
        "schema": SCHEMA,
        "chip": chip,
        "made": {
            "by": "bench/matmul_tables.py",
            "how": "from the compiler's log of the windows that it tries",
            "on": datetime.date.today().isoformat(),
            "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
            "topology": TOPOLOGIES[chip],
        },
        "rates": _significant(rates_of(chip)),
    }
    FOLDER.mkdir(exist_ok=True)
    _path_of_table(chip).write_text(json.dumps(content, indent=2) + "\n")


def collect(chips: Sequence[str], jobs: int) -> None:
    """Compiles what is missing of the samples."""
    from rich.progress import Progress

    SAMPLES.mkdir(parents=True, exist_ok=True)
    wanted = [
        (chip, of, _next_number(chip, of) + more)
        for of in get_args(Set)
        for more in range(NUMBERS[of])
        for chip in chips
        if len(_lines(chip, of)) + more < NUMBERS[of]
    ]
    if not wanted:
        return
    spawn = multiprocessing.get_context("spawn")
    with (
        Progress(transient=True) as progress,
        concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool,
    ):
        task = progress.add_task("compiling", total=len(wanted))
        futures = {
            pool.submit(matmul_samples.collect, chip, of, number, SEED): (chip, of, number)
            for chip, of, number in wanted
        }
        try:
            for future in concurrent.futures.as_completed(futures):
                chip, of, number = futures[future]
                with _path(chip, of).open("a", encoding="utf-8") as file:
                    file.write(matmul_samples.to_line(number, future.result()) + "\n")
                progress.advance(task)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def read(chip: str, of: Set) -> list[Sample]:
    """The samples that are there, in the order of their numbers."""
    lines = sorted(_lines(chip, of), key=lambda line: line["number"])
    return [Sample.from_list(fields) for line in lines for fields in line["samples"]]


def read_all(chip: str) -> list[Sample]:
    """The samples of all collections."""
    return [sample for of in get_args(Set) for sample in read(chip, of)]


def judge(chips: Sequence[str]) -> dict[str, Any]:
    """The errors of `matmul_s` on all samples: per chip, of it per dtype, and per place of operands."""
    found: dict[str, Any] = {}
    for chip in chips:
        hardware = hardware_of(chip)
        samples = read_all(chip)
        errors = [_matmul_s(sample, hardware) * hardware.clock_hz / sample.cycles - 1 for sample in samples]
        pairs = list(zip(samples, errors, strict=True))
        found[chip] = {
            "all": _summary(errors),
            **{
                unit: _summary([error for sample, error in pairs if sample.dot.dtype == unit])
                for unit in UNITS
            },
            **{
                place: _summary([error for sample, error in pairs if _place(sample) == place])
                for place in PLACES
            },
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chips", nargs="*", choices=list(TOPOLOGIES), default=list(TOPOLOGIES))
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once")
    parser.add_argument("--no-compile", action="store_true", help="judge by the tables and samples there are")
    options = parser.parse_args(argv)
    if not options.no_compile:
        if why := tpu_target.missing():
            raise SystemExit(f"bench.matmul_tables: {why}")
        # A process of its own for every chip: the log is turned on before JAX is imported.
        spawn = multiprocessing.get_context("spawn")
        for chip in options.chips:
            logging = spawn.Process(target=_write_logged, args=(chip,))
            logging.start()
            logging.join()
            if logging.exitcode:
                raise SystemExit(f"bench.matmul_tables: no table of {chip}")
        collect(options.chips, options.jobs)
    found = judge([chip for chip in TOPOLOGIES if _path_of_table(chip).is_file()])
    _write_results(found)
    print(_markdown(found))
    return 0


def _write_logged(chip: str) -> None:
    os.environ.update(matmul_log.ENVIRONMENT)
    write_table(chip)


def _matmul_s(sample: Sample, hardware: Hardware) -> float:
    dot = sample.dot
    matmul = Matmul(batch=dot.batch, m=dot.m, k=dot.k, n=dot.n, dtype=dot.dtype, out_dtype=dot.out_dtype)
    placed = sample.program == "placed"
    return matmul_s(
        matmul,
        hardware,
        lhs_on_chip=sample.lhs != 0,
        rhs_on_chip=sample.rhs != 0,
        result_on_chip=sample.result != 0,
        accumulator={0: None, 2: "bfloat16", 4: "float32"}[sample.accumulator_width],
        accumulator_on_chip=bool(sample.accumulator),
        placed="rows" if placed else None,
    )


def _place(sample: Sample) -> str:
    near = (sample.lhs != 0, sample.rhs != 0)
    return PLACES[0] if near == (False, False) else PLACES[1] if near == (False, True) else PLACES[2]


def _summary(errors: Sequence[float]) -> dict[str, Any]:
    sizes = [abs(error) for error in errors]
    if not sizes:
        return {"count": 0}
    return {
        "count": len(sizes),
        "median": round(statistics.median(sizes), 4),
        "p95": round(quantile(sizes, 0.95), 4),
        "largest": round(max(sizes), 4),
        "bias": round(statistics.fmean(errors), 4),
    }


def _significant(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _significant(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _write_results(found: dict[str, Any]) -> None:
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    content = {"schema": 1, "kind": "modelled", "versions": versions, "unseen": found}
    (RESULTS / "matmul_model.json").write_text(json.dumps(content, indent=2) + "\n")
    (RESULTS / "matmul_model.md").write_text(_markdown(found))
    rows = {chip: [sample.to_list() for sample in read(chip, "unseen")] for chip in found}
    lines = [
        f"{json.dumps(chip)}: [\n" + ",\n".join(f" {json.dumps(row)}" for row in rows[chip]) + "\n]"
        for chip in found
    ]
    UNSEEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _markdown(found: dict[str, Any]) -> str:
    """The errors as a table, for people."""
    cases = ("all", *UNITS, *PLACES)
    lines = [
        "# Matmul model",
        "",
        "Predicted times of matmuls of random shape against the TPU compiler's own estimates, on shapes that",
        "no table was made from: median / 95th percentile of the relative error (number of shapes).",
        "",
        f"| chip | {' | '.join(cases)} |",
        f"|---|{'---|' * len(cases)}",
    ]
    for chip, summaries in found.items():
        cells = [
            f"{one['median']:.1%} / {one['p95']:.1%} ({one['count']})" if one["count"] else "–"
            for one in (summaries[case] for case in cases)
        ]
        lines.append(f"| {chip} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _path(chip: str, of: Set) -> Path:
    return SAMPLES / f"{chip.replace(' ', '_')}.{of}.jsonl"


def _path_of_table(chip: str) -> Path:
    return FOLDER / f"{chip.replace(' ', '_')}.json"


def _lines(chip: str, of: Set) -> list[dict[str, Any]]:
    path = _path(chip, of)
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _next_number(chip: str, of: Set) -> int:
    return max((line["number"] + 1 for line in _lines(chip, of)), default=0)


if __name__ == "__main__":
    sys.exit(main())
