"""The cost model's matmuls against the clock of an attached GPU: by the chip's table, and once calibrated.

    python -m bench.gpu_matmuls [--quick]   writes bench/results/gpu_matmuls.json and .md, in minutes
    python -m bench.gpu_matmuls --stored    prices what was measured again

Every shape is drawn with a seed, and timed whole and cut into eighths along M, as a ring over eight devices
cuts it: how much longer the pieces take together is what a ring has to win back. Measured, on one GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
from jax.sharding import Mesh

from bench.quantile import quantile
from bench.schedules.run import RESULTS, versions, write
from bench.schedules.tables import table
from bench.versions import spelled
from cost_model import Hardware, Matmul, matmul_s
from cost_model.calibration import Calibration, base_hardware
from overlap.calibrate_programs import MeshPrograms
from overlap.calibration import calibrate, repeats, timings

NAME: Final = "gpu_matmuls"
SEED: Final = 20261126
SHAPES: Final = {"bfloat16": 24, "float32": 10, "int8": 10}
PIECES: Final = 8
LARGEST: Final = 5e12
"""FLOPs of the largest matmul: some 8 ms of an H100 in bfloat16."""

ROUNDS: Final = 9
TARGET_S: Final = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A matmul's time and an eighth's.

    Attributes:
      matmul: the whole.
      whole_s, piece_s: measured seconds of it, and of an eighth along M.
      spread: median absolute deviation, the larger of the two.
    """

    matmul: Matmul
    whole_s: float
    piece_s: float
    spread: float

    @property
    def cut(self) -> float:
        """Eight pieces' time over the whole's."""
        return PIECES * self.piece_s / self.whole_s

    def errors(self, hardware: Hardware) -> tuple[float, float, float]:
        """Predicted over measured, less 1: of the whole, of a piece, and of what cutting costs."""
        whole_s, piece_s = matmul_s(self.matmul, hardware), matmul_s(piece(self.matmul), hardware)
        return (
            whole_s / self.whole_s - 1,
            piece_s / self.piece_s - 1,
            PIECES * piece_s / whole_s / self.cut - 1,
        )


def drawn() -> list[Matmul]:
    """The shapes: rows from 512 to 32768, the other sides from 256 to 16384, multiples of 64, log-uniform."""
    draw = random.Random(SEED)

    def side(least: int, most: int) -> int:
        return 64 * round(math.exp(draw.uniform(math.log(least), math.log(most))) / 64)

    found = []
    for dtype, count in SHAPES.items():
        shapes: list[Matmul] = []
        while len(shapes) < count:
            m, k, n = side(512, 32768), side(256, 16384), side(256, 16384)
            matmul = Matmul(m=m, k=k, n=n, dtype=dtype)
            if matmul.flops <= LARGEST:
                shapes.append(matmul)
        found += shapes
    return found


def piece(matmul: Matmul) -> Matmul:
    """An eighth along M."""
    return dataclasses.replace(matmul, m=matmul.m // PIECES)


def timed(matmuls: Sequence[Matmul]) -> list[Timed]:
    """All of them, timed in turn on the attached device."""
    device = jax.devices()[0]
    programs = MeshPrograms(Mesh([device], ("x",)))
    base = base_hardware(device.device_kind, device.platform)
    each = list(dict.fromkeys([*matmuls, *map(piece, matmuls)]))
    cases = {matmul: (programs.matmul(matmul), repeats(matmul_s(matmul, base), TARGET_S)) for matmul in each}
    found = timings(cases, ROUNDS, time.perf_counter, lambda: None)
    return [
        Timed(
            matmul=matmul,
            whole_s=found[matmul].seconds,
            piece_s=found[piece(matmul)].seconds,
            spread=max(found[matmul].spread, found[piece(matmul)].spread),
        )
        for matmul in matmuls
    ]


def judged(times: Sequence[Timed], hardware: Hardware) -> dict[str, dict[str, Any]]:
    """Per dtype and over all: how far a hardware's predictions are off."""
    found = {}
    for dtype in ("all", *SHAPES):
        errors = [of.errors(hardware) for of in times if dtype in ("all", of.matmul.dtype)]
        found[dtype] = {
            name: _summary([each[at] for each in errors]) for at, name in enumerate(("whole", "piece", "cut"))
        }
    return found


def _summary(errors: Sequence[float]) -> dict[str, float]:
    sizes = list(map(abs, errors))
    return {
        "count": len(sizes),
        "median": round(statistics.median(sizes), 4),
        "p95": round(quantile(sizes, 0.95), 4),
        "bias": round(statistics.median(errors), 4),
    }


def page(content: Mapping[str, Any]) -> str:
    """The results, for people."""
    lines = []
    for whose, by_dtype in content["errors"].items():
        for dtype, errors in by_dtype.items():
            cells = [
                f"{e['median']:.1%} / {e['p95']:.1%} ({e['bias']:+.1%})"
                for e in (errors["whole"], errors["piece"], errors["cut"])
            ]
            lines.append((whose, dtype, str(errors["whole"]["count"]), *cells))
    headings = ("predicted by", "dtype", "shapes", "whole matmul", "an eighth of it", "8 eighths / whole")
    said = spelled(content["versions"])
    parts = [
        "# Matmuls of a GPU",
        f"Measured on one {content['device_kind']} (wall clock, median of {ROUNDS} rounds), against the cost "
        "model: median / 95th percentile of the relative error (median of the signed one). The shapes are "
        "drawn with a seed, and none is one that a calibration times.",
        f"Made with {said}.",
        table(headings, lines),
        f"Cut into eighths along M a matmul took ×{content['cut']:.2f} as long in the median.",
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; the exit status is 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quick calibration")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where results go")
    parser.add_argument(
        "--stored", action="store_true", help="price the times in bench/results again; needs no GPU"
    )
    options = parser.parse_args(argv)
    if options.stored:
        content = json.loads((RESULTS / f"{NAME}.json").read_text("utf-8"))
    else:
        device = jax.devices()[0]
        if device.platform != "gpu":
            print(f"bench.gpu_matmuls: needs a GPU, and jax has found {device.device_kind}", file=sys.stderr)
            return 2
        mine = calibrate(mesh_shape=(jax.device_count(),), quick=options.quick)
        content = {
            "schema": 1,
            "kind": "measured",
            "device_kind": device.device_kind,
            "versions": versions(),
            "calibration": json.loads(mine.to_json()),
            "matmuls": [dataclasses.asdict(of) for of in timed(drawn())],
        }
    content |= compared(content)
    write(options.out, NAME, page(content), content)
    print(page(content))
    return 0


def compared(content: Mapping[str, Any]) -> dict[str, Any]:
    """What times say of the chip's table and of the calibration, and of cutting."""
    times = [Timed(**{**of, "matmul": Matmul(**of["matmul"])}) for of in content["matmuls"]]
    chip = base_hardware(content["device_kind"], "gpu")
    mine = Calibration.from_json(json.dumps(content["calibration"])).hardware
    return {
        "cut": statistics.median(of.cut for of in times),
        "errors": {f"table of {chip.name}": judged(times, chip), "calibration": judged(times, mine)},
    }


if __name__ == "__main__":
    sys.exit(main())
