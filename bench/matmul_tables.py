"""Makes the tables of matmul times from the real TPU compiler's estimates, and judges them on unseen shapes.

    python -m bench.matmul_tables [--chips tpu_v5e ...] [--jobs N]      (make bench-matmul)

It compiles random matmuls for each chip (no TPU is needed, but libtpu: pip install
'overlap-collectives[tpu]'), fits the rates of `cost_model.matmul_table` to the estimates of one set, writes
them to cost_model/tables, and compares them with those of another set, drawn apart:
bench/results/matmul_model.json and .md, and the shapes with their cycles in
tests/cost_model/matmul_unseen.json. Samples are kept in bench/results/matmul_samples: what is there is not
compiled again, so that a run can be stopped and go on later. A matmul compiles in about a second.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import hashlib
import json
import math
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

from bench import matmul_samples
from bench.matmul_samples import TOPOLOGIES, Sample, Set, hardware_of
from bench.quantile import quantile
from cost_model import Hardware, Matmul, matmul_s
from cost_model.matmul_table import FOLDER, SCHEMA, MatmulTable, is_large

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "results"
SAMPLES: Final = RESULTS / "matmul_samples"
UNSEEN: Final = ROOT / "tests" / "cost_model" / "matmul_unseen.json"

SEED: Final = 1
NUMBERS: Final[dict[Set, int]] = {"table": 48, "large": 22, "long": 30, "unseen": 70}
"""How many handfuls of programs: about 400 matmuls for a table, 250 to judge it."""

FITTED: Final[tuple[Set, ...]] = ("table", "large", "long")
"""The sets that tables are fitted to."""

UNITS: Final = ("int8", "bfloat16", "float32")
WIDTHS: Final = ("1", "2", "4")
ON_V4: Final = ("near_elements_per_s", "ragged_elements_per_s", "converted_elements_per_s")
"""Rates that count on v4 alone, the one chip with CMEM."""

FAR: Final = ("tile", "sums_per_s", "wide_sums", "added_bytes_per_s")
"""Rates that count only where both operands are in main memory. They are fitted to large matmuls too, as if
these were cut like others."""

START_FAR: Final = {"wide_sums": 4.0, "added_bytes_per_s": 5e12}
"""Where the search for those of them begins that nothing else tells of."""

TRUST_FAR: Final = {"wide_sums": 0.05}
"""How surely it is near there: of some chips few samples tell of it."""

OF_LARGE: Final = {"strip_bytes": 3e6, "large_added_bytes_per_s": 5e12, "left_over": 1.0}
"""Rates of large matmuls, and where the search for them begins."""

PLACES: Final = ("all in main memory", "weight on chip", "more on chip")


def collect(chips: Sequence[str], jobs: int) -> None:
    """Compiles what is missing of the sets."""
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
    if why := tpu_target.missing():
        raise SystemExit(f"{len(wanted)} handfuls of samples are missing and cannot be compiled: {why}")
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
    """The samples that are there, in the order of their numbers; a shape that a table saw is not unseen."""
    lines = sorted(_lines(chip, of), key=lambda line: line["number"])
    samples = [Sample.from_list(fields) for line in lines for fields in line["samples"]]
    if of == "unseen":
        seen = {sample.dot for fitted in FITTED for sample in read(chip, fitted)}
        samples = [sample for sample in samples if sample.dot not in seen]
    return samples


def predicted_s(sample: Sample, table: MatmulTable) -> float:
    """Seconds of a sample by a table."""
    dot = sample.dot
    return table.seconds(
        dot.batch,
        dot.m,
        dot.k,
        dot.n,
        dot.dtype,
        matmul_samples.BYTES[dot.dtype],
        matmul_samples.BYTES[dot.dtype],
        matmul_samples.BYTES[dot.out_dtype],
        lhs_near=sample.lhs != 0,
        rhs_near=sample.rhs != 0,
        result_near=sample.result != 0,
        accumulator_width=sample.accumulator_width,
        accumulator_near=bool(sample.accumulator),
    )


def fit(
    samples: Sequence[Sample], large: Sequence[Sample], long: Sequence[Sample], hardware: Hardware
) -> MatmulTable:
    """The table whose times are nearest to the samples', in the logarithm and without much heed to outliers.

    It starts from plausible rates and stays near them where the samples do not say otherwise. What counts
    only where both operands are in main memory is fitted to such ones of two sets, after the rest; and what
    counts only for large ones to these, last.
    """
    far = [sample for sample in (*samples, *large) if _place(sample) == PLACES[0]]
    begin = _fit_all(samples, hardware)
    start = {name: START_FAR.get(name, getattr(begin, name)) for name in FAR}
    table = _fit_some(begin, start, far, hardware)
    return _fit_some(table, OF_LARGE, [sample for sample in (*far, *long) if _is_large(sample)], hardware)


def _is_large(sample: Sample) -> bool:
    """Whether the formula takes it as a large one."""
    dot, width = sample.dot, matmul_samples.BYTES[sample.dot.dtype]
    lhs_bytes, rhs_bytes = width * dot.m * dot.k, width * dot.k * dot.n
    return _place(sample) == PLACES[0] and is_large(dot.batch, lhs_bytes, rhs_bytes, width)


def _fit_some(
    table: MatmulTable, start: Mapping[str, float], samples: Sequence[Sample], hardware: Hardware
) -> MatmulTable:
    """A table with some rates, that begin somewhere, fitted to the samples that they count for."""
    import numpy as np
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    def moved(point: Any) -> MatmulTable:
        values = dict(zip(start, np.exp(point).tolist(), strict=True))
        return dataclasses.replace(table, **values)

    def residuals(point: Any) -> Any:
        errors = np.log1p(_errors(samples, moved(point), hardware))
        return np.concatenate([errors, trust * (point - origin)])

    origin = np.log(list(start.values()))
    trust = np.array([TRUST_FAR.get(name, 0.01) for name in start])
    return moved(least_squares(residuals, origin, loss="soft_l1", f_scale=0.15).x)


def _fit_all(samples: Sequence[Sample], hardware: Hardware) -> MatmulTable:
    """A table with all rates but those of large matmuls, and of adding to what is in main memory."""
    import numpy as np
    from scipy.optimize import least_squares

    lanes = hardware.matmul_tile[1]
    seconds = [sample.cycles / hardware.clock_hz for sample in samples]
    has_cmem = any(3 in (sample.lhs, sample.rhs) for sample in samples)
    hbm = hardware.hbm_bytes_per_s
    start = {
        **{f"flops_per_s {unit}": hardware.flops_for(unit) for unit in UNITS},
        **{f"least_rows {unit}": 0.4 * lanes for unit in UNITS},
        "launch_s": 1e-7,
        "batch_s": 2e-8,
        "operand_latency_s": 1e-6,
        "second_latency_s": 1e-6,
        "result_latency_s": 1e-6,
        "step_s": 4e-7,
        "second_stream": 0.3,
        "step_bytes": 4e6,
        "tile": 1000.0,
        "sums_per_s": 5e12,
        "lhs_bytes_per_s": 0.7 * hbm,
        "rhs_bytes_per_s": 0.7 * hbm,
        "narrow_reading": 0.9,
        "result_bytes_per_s 2": 0.3 * hbm,
        "result_bytes_per_s 4": 0.8 * hbm,
        **(dict.fromkeys(ON_V4, hbm) if has_cmem else {}),
    }
    names = list(start)
    origin = np.log(list(start.values()))
    # The peak in bfloat16 is known, those of other dtypes are what the unit could do, of the rest little is.
    known = {"flops_per_s bfloat16": 1.0, "flops_per_s int8": 0.1, "flops_per_s float32": 0.1}
    trust = np.array([known.get(name, 0.01) for name in names])

    def table(point: Any, narrow_launch_s: float = 0.0) -> MatmulTable:
        value = dict(zip(names, np.exp(point).tolist(), strict=True))
        groups: dict[str, Any] = {
            "flops_per_s": {unit: value.pop(f"flops_per_s {unit}") for unit in UNITS},
            "least_rows": {unit: value.pop(f"least_rows {unit}") for unit in UNITS},
            # As many elements of one byte as of two: no sample has such results.
            "result_bytes_per_s": {
                "1": value["result_bytes_per_s 2"] / 2,
                "2": value.pop("result_bytes_per_s 2"),
                "4": value.pop("result_bytes_per_s 4"),
            },
        }
        unknown = dict.fromkeys((*ON_V4, "added_bytes_per_s", *OF_LARGE), 0.0)
        values = {**unknown, "wide_sums": 1.0, **value}
        return MatmulTable(lanes=lanes, narrow_launch_s=narrow_launch_s, **groups, **values)

    def errors(guess: MatmulTable) -> list[float]:
        return [
            math.log(predicted_s(sample, guess) / second)
            for sample, second in zip(samples, seconds, strict=True)
        ]

    def residuals(point: Any) -> Any:
        return np.concatenate([errors(table(point)), trust * (point - origin)])

    robust = functools.partial(least_squares, loss="soft_l1", f_scale=0.15)
    best = robust(residuals, origin).x
    # Last, so that it does not bend what other dtypes tell.
    (launch_us,) = robust(lambda us: errors(table(best, us[0] * 1e-6)), [0.1], bounds=(0, 10)).x
    if not has_cmem:
        return table(best, launch_us * 1e-6)
    # The unit takes no operands of one byte there and computes in bfloat16: what is left that concerns them
    # alone is fitted together.
    begin = best.copy()
    for rate in ("flops_per_s", "least_rows"):
        begin[names.index(f"{rate} int8")] = best[names.index(f"{rate} bfloat16")]
    narrow = [names.index(name) for name in ("narrow_reading", "converted_elements_per_s")]

    def moved(point: Any) -> Any:
        all_rates = begin.copy()
        all_rates[narrow] = point[:-1]
        return all_rates

    def of_narrow(point: Any) -> Any:
        misses = errors(table(moved(point), math.exp(point[-1])))
        return np.concatenate([misses, trust[narrow] * (point[:-1] - begin[narrow])])

    found = robust(of_narrow, [*begin[narrow], math.log(launch_us * 1e-6 + 1e-8)]).x
    return table(moved(found), math.exp(found[-1]))


def write_table(chip: str, table: MatmulTable, samples: Sequence[Sample]) -> None:
    """The table's file, with where it comes from."""
    hardware = hardware_of(chip)
    errors = [abs(error) for error in _errors(samples, table, hardware)]
    content = {
        "schema": SCHEMA,
        "chip": chip,
        "made": {
            "by": "bench/matmul_tables.py",
            "how": "fitted to estimated_cycles of matmuls compiled for the chip, over its clock",
            "on": datetime.date.today().isoformat(),
            "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
            "topology": TOPOLOGIES[chip],
            "clock_hz": hardware.clock_hz,
            "samples": len(samples),
            "samples_sha256": hashlib.sha256(
                b"".join(_path(chip, of).read_bytes() for of in FITTED)
            ).hexdigest(),
            "median_error": round(statistics.median(errors), 4),
            "p95_error": round(quantile(errors, 0.95), 4),
        },
        "rates": _rounded({name: getattr(table, name) for name in MatmulTable.__dataclass_fields__}),
    }
    FOLDER.mkdir(exist_ok=True)
    _path_of_table(chip).write_text(json.dumps(content, indent=2) + "\n")


def judge(chips: Sequence[str]) -> dict[str, Any]:
    """The errors of `matmul_s` on unseen shapes: per chip, of it per dtype, and per place of operands."""
    found: dict[str, Any] = {}
    for chip in chips:
        hardware = hardware_of(chip)
        samples = read(chip, "unseen")
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
    parser.add_argument("--no-compile", action="store_true", help="use the samples that are there")
    options = parser.parse_args(argv)
    if not options.no_compile:
        collect(options.chips, options.jobs)
    for chip in options.chips:
        samples = read(chip, "table")
        if not samples:
            raise SystemExit(f"no samples of {chip} in {SAMPLES}: run without --no-compile")
        large, long = read(chip, "large"), read(chip, "long")
        write_table(chip, fit(samples, large, long, hardware_of(chip)), [*samples, *large, *long])
    found = judge([chip for chip in TOPOLOGIES if _path_of_table(chip).is_file()])
    _write_results(found)
    print(_markdown(found))
    return 0


def _matmul_s(sample: Sample, hardware: Hardware) -> float:
    dot = sample.dot
    matmul = Matmul(batch=dot.batch, m=dot.m, k=dot.k, n=dot.n, dtype=dot.dtype, out_dtype=dot.out_dtype)
    return matmul_s(
        matmul,
        hardware,
        lhs_on_chip=sample.lhs != 0,
        rhs_on_chip=sample.rhs != 0,
        result_on_chip=sample.result != 0,
        accumulator={0: None, 2: "bfloat16", 4: "float32"}[sample.accumulator_width],
        accumulator_on_chip=bool(sample.accumulator),
    )


def _errors(samples: Sequence[Sample], table: MatmulTable, hardware: Hardware) -> list[float]:
    return [predicted_s(sample, table) * hardware.clock_hz / sample.cycles - 1 for sample in samples]


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


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


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
        "the tables were not fitted to: median / 95th percentile of the relative error (number of shapes).",
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
