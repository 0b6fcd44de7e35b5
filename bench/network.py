"""Measures what overlapping gains over a real network: real processes, links of a set rate, wall clock.

    python -m bench.network             everything; prints rows as they come, writes bench/results/network.*
    python -m bench.network --quick     one ratio, few rounds, small: shows that it runs, not what it gains
    python -m bench.network --ratios 1 --renew  those rows anew; all others in network.json stay as they are
    python -m bench.network --loopback  without namespaces and rates: needs no root
    python -m bench.network --remove    only removes what a killed run left behind

Each process has one CPU device and, in a network namespace of its own, one link to a switch (see
network_links.py); that needs root and Debian's iproute2. Calibrates the hardware first. Then each case is
sized to compute for a set time, and the links are set so that communication takes 0.3, 1 and 3 times as long.
Variants run in turn. With fewer cores than processes, processes share cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.network_cases import CASES, INNER, OUTER, Sizes, rate_for, rows_for
from bench.network_job import THREADS, Job, JobError, job, slowest
from bench.network_links import Links, LinksError, links, remove_left_behind
from bench.network_results import (
    RACED,
    Goal,
    Row,
    cells,
    dates,
    from_dict,
    goals,
    header,
    outcome,
    predicted,
    table,
    to_dict,
)
from bench.versions import spelled
from cost_model.fitting import fit_hop

RESULTS: Final = Path(__file__).resolve().parent / "results"
RATIOS: Final = (0.3, 1.0, 3.0)

CALIBRATION_BYTES_PER_S: Final = 2.5e8
"""The links' rate while the hardware is calibrated."""

HOPS: Final = (2**12, 2**16, 2**19, 2**21)
"""Bytes of the messages from which a link's rate and latency are fitted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
      rounds: of every race.
      target_s: how long a case's compute alone is to take.
      inner, outer: sizes of the matmuls.
      ratios: communication to compute.
      threads: of XLA's pool in every process.
    """

    rounds: int
    target_s: float
    ratios: tuple[float, ...]
    inner: int = INNER
    outer: int = OUTER
    threads: int = THREADS


FULL: Final = Effort(rounds=11, target_s=0.4, ratios=RATIOS)
"""With less to compute, waiting for a core to send a message on counts more than sending it."""

QUICK: Final = Effort(rounds=3, target_s=0.004, ratios=(1.0,), inner=512, outer=512)


def calibrated(running: Job, effort: Effort) -> dict[str, Any]:
    """What ``overlap.calibrate`` finds, with matmuls of the cases' sizes and their pieces'."""
    rows = (128, 256, 512, 1024, 2048)
    matmuls = [(m, effort.inner, effort.outer) for m in rows]
    matmuls.append((512, effort.inner // 2, effort.outer))
    return running.do("calibrate", matmuls=matmuls, hops=HOPS, rounds=max(3, effort.rounds // 2))[0]


def at_rate(running: Job, hardware: Mapping[str, Any], effort: Effort) -> dict[str, Any]:
    """The calibrated hardware with the links as they are now."""
    times = slowest(running.do("hops", sizes=HOPS, rounds=max(3, effort.rounds // 3)))
    fit = fit_hop([(int(size), statistics.median(taken)) for size, taken in times.items()])
    return {
        **hardware,
        "link_bytes_per_s": fit.bytes_per_s,
        "dcn_bytes_per_s": fit.bytes_per_s,
        "hop_latency_s": fit.latency_s,
        "dcn_latency_s": fit.latency_s,
        "links_per_axis": 1,
    }


def measured(
    running: Job, joined: Links | None, names: Sequence[str], processes: int, effort: Effort
) -> Iterator[Row]:
    """Calibrates, then measures the cases."""
    if joined:
        joined.set_rate(CALIBRATION_BYTES_PER_S)
    found = calibrated(running, effort)
    hardware = found["hardware"]
    rate = dict(hardware["peak_flops"])["float32"] * hardware["matmul_efficiency"]
    print(f"calibrated: {rate / 1e9:.1f} GFLOP/s, a hop beside a matmul overlaps: {found['overlaps']}")
    for name in names:
        case = CASES[name]
        sizes = Sizes(rows_for(case, effort.target_s, rate, processes), effort.inner, effort.outer)
        arguments = {"name": name, **dataclasses.asdict(sizes)}
        alone = running.do("case", **arguments, variants=["compute"], hardware=None, rounds=effort.rounds)
        compute_s = statistics.median(slowest(alone)["compute"])
        for ratio in effort.ratios if joined else (None,):
            bytes_per_s = None
            if joined and ratio is not None:
                bytes_per_s = rate_for(case, sizes, processes, compute_s, ratio)
                joined.set_rate(bytes_per_s)
            now = at_rate(running, hardware, effort)
            told = running.do("case", **arguments, variants=RACED, hardware=now, rounds=effort.rounds)
            yield row_of(told, processes, name, ratio, bytes_per_s, sizes)


def row_of(
    told: Sequence[Mapping[str, Any]],
    processes: int,
    name: str,
    ratio: float | None,
    bytes_per_s: float | None,
    sizes: Sizes,
) -> Row:
    """What the processes told of one race, as a row.

    Raises:
      JobError: the processes decided differently.
    """
    sites = told[0]["sites"]
    if any(reply["sites"] != sites for reply in told):
        raise JobError(f"{name}: the processes decided differently about the same program")
    times = slowest(told)
    said = {v: predicted(of, statistics.median(times["compute"])) for v, of in sites.items()}
    guesses = {variant: guess["made"] for variant, guess in said.items() if guess}
    if said["auto"]:
        guesses["original"] = said["auto"]["original"]
    return Row(
        processes=processes,
        case=name,
        ratio=ratio,
        rate_bytes_per_s=bytes_per_s,
        rows=sizes.rows,
        times_s=times,
        predicted_s=guesses,
        schedules={variant: [outcome(site) for site in of] for variant, of in sites.items()},
        apart={v: max(reply["apart"][v] for reply in told) for v in told[0]["apart"]},
        date=datetime.date.today().isoformat(),
    )


def versions(jax: str, effort: Effort, cores: Sequence[int]) -> dict[str, Any]:
    """What the figures were measured with."""
    return {
        "python": platform.python_version(),
        "jax": jax,
        "machine": f"{platform.machine()}, {len(cores)} cores, Linux {platform.release()}",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "XLA threads per process": effort.threads,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") or "none",
    }


def written(rows: Sequence[Row], found: Sequence[Goal], made_with: Mapping[str, Any], quick: bool) -> str:
    """The results as Markdown."""
    kind = "a quick run, which shows only that it runs; " if quick else ""
    made = spelled(made_with)
    lines = [
        "# What overlapping gains over a network",
        "",
        f"Measured (wall clock, medians of interleaved rounds ± half the distance of the quartiles, in ms); "
        f"{kind}{made}.",
        "",
        "P processes with one CPU device each, gloo, one rate-limited link per process to a switch. The "
        "ratio is as set and, in brackets, as measured. × is the speed-up over the original; ~ is within "
        "noise (95 % bootstrap interval). Efficiency is max(compute, communication) / time. Predictions are "
        "relative to what was measured. Processes beyond the number of cores share them. " + dates(rows),
        "",
        table(rows),
        "",
        *(f"- {goal.name}: {goal.found}{'' if goal.met else ' (**missed**)'}" for goal in found),
        "",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Lets what is made be removed when the run is told to end, too."""

    def leave(number: int, _: Any) -> None:
        sys.exit(128 + number)

    # SIGINT, too: a shell that starts a run in the background has it ignored.
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {end: signal.signal(end, leave) for end in ends}
    try:
        yield
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)


def run(options: argparse.Namespace, effort: Effort, rows: list[Row], made_with: dict[str, Any]) -> None:
    """Measures all rows, and prints them as they come.

    Args:
      options: the command line.
      effort: how much is measured.
      rows: is added to, so that what was measured before a failure is not lost.
      made_with: what they were measured with; is added to.

    Raises:
      JobError, LinksError: what the run ended with.
    """
    cores = sorted(os.sched_getaffinity(0))
    print("| " + " | ".join(header()) + " |", flush=True)
    for processes in options.processes:
        with contextlib.ExitStack() as stack:
            joined = None if options.loopback else stack.enter_context(links(processes, cores))
            running = stack.enter_context(job(joined.hosts if joined else None, processes, effort.threads))
            if not made_with:
                made_with.update(versions(running.jax, effort, cores))
            for row in measured(running, joined, options.cases, processes, effort):
                print("| " + " | ".join(cells(row)) + " |", flush=True)
                rows.append(row)


def with_stored(rows: Sequence[Row], path: Path) -> list[Row]:
    """The rows, and in their places among them those of a file that were not measured now."""
    stored = [from_dict(values) for values in json.loads(path.read_text())["rows"]] if path.exists() else []
    kept = {row.key: row for row in [*stored, *rows]}
    return sorted(kept.values(), key=lambda row: (row.processes, list(CASES).index(row.case), row.ratio or 0))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds and small programs; no verdict")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, no rates")
    parser.add_argument("--remove", action="store_true", help="only remove what a killed run left behind")
    parser.add_argument("--renew", action="store_true", help="keep all stored rows that are not measured now")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--ratios", type=float, nargs="+", help="communication to compute; default: 0.3 1 3")
    parser.add_argument("--rounds", type=int, help=f"default: {FULL.rounds}")
    parser.add_argument("--target-ms", type=float, help=f"of compute; default: {FULL.target_s * 1e3:g}")
    parser.add_argument("--threads", type=int, default=THREADS, help="of XLA in each process (NPROC)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of network.json and network.md")
    options = parser.parse_args(argv)
    if min(options.processes) < 2 or max(options.processes) > 200:
        parser.error("--processes: 2 to 200")
    return options


def effort_of(options: argparse.Namespace) -> Effort:
    """How much the command line asks for."""
    base = QUICK if options.quick else FULL
    return dataclasses.replace(
        base,
        rounds=options.rounds or base.rounds,
        target_s=options.target_ms / 1e3 if options.target_ms else base.target_s,
        ratios=tuple(options.ratios or base.ratios),
        threads=options.threads,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, writes; the exit status is 1 where a full run misses a goal, 2 if it cannot run."""
    options = parsed(argv)
    effort = effort_of(options)
    rows: list[Row] = []
    made_with: dict[str, Any] = {}
    failed = False
    try:
        with _signals_as_exits():
            if options.remove:
                print("removed: " + (", ".join(remove_left_behind()) or "nothing"))
                return 0
            run(options, effort, rows, made_with)
    except (LinksError, JobError) as error:
        print(f"bench.network: {error}", file=sys.stderr)
        failed = True
    if not rows:
        return 2
    if options.renew:
        rows = with_stored(rows, options.output / "network.json")
    found = goals(rows)
    text = written(rows, found, made_with, options.quick)
    print("\n".join(["", *(f"{goal.name}: {goal.found}{'' if goal.met else ' (missed)'}" for goal in found)]))
    options.output.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": 1,
        "quick": options.quick,
        "versions": made_with,
        "effort": dataclasses.asdict(effort),
        "goals": [dataclasses.asdict(goal) for goal in found],
        "rows": [to_dict(row) for row in rows],
    }
    (options.output / "network.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    (options.output / "network.md").write_text(text)
    if failed:
        return 2
    return 0 if options.quick or options.loopback or all(goal.met for goal in found) else 1


if __name__ == "__main__":
    sys.exit(main())
