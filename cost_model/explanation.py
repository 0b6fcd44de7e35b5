"""A prediction term by term: what a collective and its dots cost as written, and as rings of each form.

    explain(chain_of("all_gather_dot", 8192, 8192, 2048), Axis(by_name("tpu_v5p"), 16)).best.estimate

Every number is the cost model's own: `matmul_s`, the axis's collectives and steps, and `estimate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal

from cost_model.axis import Axis
from cost_model.chain_sizes import piece_in_turn
from cost_model.dtypes import dtype_bytes
from cost_model.form import Form
from cost_model.hardware import Hardware
from cost_model.matmul import Matmul, matmul_s
from cost_model.offloaded import sums_whole
from cost_model.on_chip import SIDES, Side, Whole
from cost_model.pipeline import gather_after, last_gather_s, placing_s
from cost_model.plain_chain import PlainChain, forms, gathered_bytes, pays, price, works
from cost_model.ring import Estimate, copies_as_written_s, dots_as_written
from cost_model.ring_work import blocks_of

Bound = Literal["compute", "memory", "bandwidth", "latency", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DotTerm:
    """One dot on one device, as written.

    Attributes:
      matmul: its sizes.
      seconds: its time, with what it waits for.
      on_chip: the operands that it finds on chip.
      waited_s: the part in which it waits for them.
      overhead_s: the part that every matmul costs, however small.
      efficiency: its FLOP/s as a fraction of the peak.
      bound: "compute", or "memory" where it waits for operands from HBM: see `WAITING`.
    """

    matmul: Matmul
    seconds: float
    on_chip: tuple[Side, ...]
    waited_s: float
    overhead_s: float
    efficiency: float
    bound: Bound

    def line(self) -> str:
        """The term in words."""
        of = self.matmul
        batch = f"{of.batch}×" if of.batch > 1 else ""
        waited = f" after {_us(self.waited_s).strip()} of waiting" if self.waited_s else ""
        return (
            f"  {_us(self.seconds)}  dot {batch}[{of.m},{of.k}]·[{of.k},{of.n}] {of.dtype}, "
            f"{_ON_CHIP[self.on_chip]} on chip{waited}: {self.efficiency:.0%} of the peak, bound by "
            f"{self.bound}; {_us(self.overhead_s).strip()} of it is what any matmul costs"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTerm:
    """The collective as written.

    Attributes:
      full_bytes: V, of the whole array as it moves: of one that a compiler may round to bfloat16, the half.
      seconds: its time.
      latency_s: what it takes however few the bytes.
      bound: "bandwidth", or "latency" where fewer bytes would not help.
      copies_s: what else it takes to round what a gather moves, and to lay out what it brings.
    """

    full_bytes: float
    seconds: float
    latency_s: float
    bound: Bound
    copies_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The chain as rings of one form. Prologue, steady state and epilogue add up to `estimate.overlapped_s`.

    Attributes:
      form: how the rings run.
      estimate: the price, as of the pass.
      partials: one piece of each dot.
      steps: ring steps with partial dots, P; of a form with columns those of all columns. Where whole shards
        go half way round they are half as many, and their dots differ: step_dots_s is the mean.
      hops: ring steps with a hop.
      step_dots_s: partial dots of one step, with the additions and copies between them, and what hops stop
        the device for, on average.
      step_hop_s: all hops of one step, on average.
      hop_bound: "bandwidth", or "latency" where smaller shards would travel no faster.
      prologue_s: before the first hop has anything to send: a scatter ring's first partial dots.
      steady_s: hops beside partial dots.
      epilogue_s: after the last hop: a gather ring's last partial dots; a psum's gather.
      exposed_s: time in which nothing is multiplied.
    """

    form: Form
    estimate: Estimate
    partials: tuple[Matmul, ...]
    steps: int
    hops: int
    step_dots_s: float
    step_hop_s: float
    hop_bound: Bound
    prologue_s: float
    steady_s: float
    epilogue_s: float
    exposed_s: float

    def lines(self) -> list[str]:
        """The terms in words."""
        total = self.estimate.overlapped_s
        how = f"As {'rings' if self.form.pieces > 1 else 'a ring'}, {self.form}"
        if self.form.route != "ring":
            how = "As an exchange" if self.form.route == "exchange" else f"By {self.form}"
        slower = "the hop" if self.step_hop_s > self.step_dots_s else "the dots"
        pieces = ", ".join(f"[{of.m},{of.k}]·[{of.k},{of.n}]" for of in self.partials)
        return [
            f"{how}: {_us(total).strip()}",
            f"  {_us(self.prologue_s)}  prologue: partial dots before the first hop",
            f"  {_us(self.steady_s)}  steady state: {self.hops} × a hop beside a step's partial dots; "
            f"{slower} take{'s' if slower == 'the hop' else ''} longer",
            f"  {_us(self.epilogue_s)}  epilogue: what comes after the last hop",
            f"  of which a step's dots {_us(self.step_dots_s).strip()} (pieces {pieces}; all of them "
            f"{_us(self.estimate.partials_s).strip()} in {self.steps} steps)",
            f"  and a step's hop {_us(self.step_hop_s).strip()}, bound by {self.hop_bound} (all of them "
            f"{_us(self.estimate.hops_s).strip()}, latency alone {_us(self.estimate.hop_latency_s).strip()})",
            f"  exposed, nothing being multiplied: {_us(max(0.0, self.exposed_s)).strip()}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is predicted of a chain, and why.

    Attributes:
      chain: the chain.
      axis: the mesh axis.
      dots: the dots as written.
      collective: the collective as written.
      candidates: forms of rings, those that need no more memory first, the fastest of them first.
    """

    chain: PlainChain
    axis: Axis
    dots: tuple[DotTerm, ...]
    collective: CollectiveTerm
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The form of the largest benefit."""
        return self.candidates[0]

    @property
    def pays(self) -> bool:
        """Whether the best form is worth it: see `plain_chain.pays`."""
        return pays(self.best.estimate, self.axis.hardware)

    def __str__(self) -> str:
        """Every term in words and numbers."""
        hardware = self.axis.hardware
        where = str(self.axis.topology) if self.axis.topology else _network(self.axis)
        lines = [f"{self.chain.pattern} over {self.axis.size} devices of {hardware.name} ({where})", ""]
        lines.append("As written, one after the other:")
        lines += [dot.line() for dot in self.dots]
        moved = self.collective
        rounded = " rounded to bfloat16," if moved.full_bytes < self.chain.moved_bytes else ""
        lines.append(
            f"  {_us(moved.seconds)}  {_COLLECTIVE[self.chain.pattern]} of {_mib(moved.full_bytes)},"
            f"{rounded} bound by {moved.bound}; {_us(moved.latency_s).strip()} however few the bytes"
        )
        if moved.copies_s:
            made = "what is gathered is rounded before" if rounded else "gathered columns are laid out after"
            lines.append(f"  {_us(moved.copies_s)}  copies: {made}")
        lines += [f"  {_us(self.best.estimate.original_s)}  together", ""]
        lines += [*self.best.lines(), ""]
        for title, others in self._others():
            lines.append(title)
            lines += [f"  {_us(other.estimate.overlapped_s)}  {other.form}" for other in others[:LISTED]]
            if len(others) > LISTED:
                lines.append(f"  … {len(others) - LISTED} more: --json")
            lines.append("")
        gain_s = self.best.estimate.benefit_s
        share = abs(gain_s) / self.best.estimate.original_s
        verdict = f"saves {_us(gain_s).strip()} ({share:.1%}): rewriting pays"
        if not self.pays:
            more_bytes = self.best.estimate.added_bytes
            but = f"less than the {hardware.least_gain:.0%} that a prediction may be off"
            if more_bytes > 0:
                but = f"and needs {_mib(more_bytes)} more memory"
            verdict = verdict.replace(": rewriting pays", f", {but}: left as it is")
        if gain_s <= 0:
            verdict = f"loses {_us(-gain_s).strip()} ({share:.1%}): left as it is"
        best = "way" if self.best.form.route != "ring" else "ring"
        lines.append(f"The best {best}, {self.best.form}, {verdict}.")
        if self.pays and share < hardware.least_gain_beside:
            lines.append(
                f"Beside other rings in one program, which share what is on chip, it must gain "
                f"{hardware.least_gain_beside:.0%}: there it is left as it is."
            )
        for dtype in sorted({dot.matmul.dtype for dot in self.dots}):
            if not hardware.rates(dtype):
                lines.append(
                    f"No rate of {dtype} is known on {hardware.name}: the slowest of those listed is taken."
                )
        if hardware.stops_s:
            lines.append(
                f"Every hop beside dots stops this hardware for {_us(hardware.stops_s).strip()}, "
                "which the dots' times above have in them."
            )
        if not hardware.overlaps:
            lines.append("This hardware runs no communication beside compute: hops and dots take turns.")
        return "\n".join(lines)

    def _others(self) -> Iterator[tuple[str, tuple[Candidate, ...]]]:
        """The forms but the best, by the memory that they need, under what is said of them."""
        light = tuple(other for other in self.candidates[1:] if other.estimate.added_bytes <= 0)
        heavy = tuple(other for other in self.candidates[1:] if other.estimate.added_bytes > 0)
        if light:
            yield "Other forms, the fastest first:", light
        if heavy:
            yield "Forms that need more memory than as written, which come last, the fastest first:", heavy

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values; seconds and bytes."""
        first = self.best.estimate
        return {
            "pattern": self.chain.pattern,
            "hardware": self.axis.hardware.name,
            "axis_size": self.axis.size,
            "topology": None if self.axis.topology is None else str(self.axis.topology),
            "dtype": self.chain.dtype,
            "original_s": first.original_s,
            "pays": self.pays,
            "dots": [dataclasses.asdict(dot) for dot in self.dots],
            "collective": dataclasses.asdict(self.collective),
            "candidates": [
                {
                    **dataclasses.asdict(candidate),
                    "name": str(candidate.form),
                    "benefit_s": candidate.estimate.benefit_s,
                }
                for candidate in self.candidates
            ],
        }


def explain(chain: PlainChain, axis: Axis, among: Sequence[Form] | None = None) -> Explanation:
    """Prices a chain term by term.

    Args:
      chain: see `chain_of`.
      axis: the mesh axis.
      among: forms of rings to price; all that fit if None.

    Raises:
      ValueError: the axis has one device, so that nothing is communicated, the chain's dots cannot be cut
        evenly over its devices, or `among` names no form.
      TypeError: the chain or the axis is none.
    """
    if not isinstance(chain, PlainChain):
        raise TypeError(f"chain must be a PlainChain, as chain_of makes, got {chain!r}")
    check_axis(axis)
    if axis.size < 2:
        raise ValueError("an axis of one device communicates nothing: give at least 2")
    if misfit := chain.misfit(axis.size):
        raise ValueError(misfit)
    among = forms(chain, axis) if among is None else among
    if not among:
        raise ValueError("among names no form: give at least one, or leave it out for all that fit")
    candidates = [_candidate(chain, form, axis) for form in among]
    # A stable sort: of equals the simplest stays first, as the pass has it.
    candidates.sort(key=lambda candidate: candidate.estimate.rank, reverse=True)
    collective = _collective(chain, axis)
    return Explanation(
        chain=chain,
        axis=axis,
        dots=_dots(chain, axis, collective.seconds + collective.copies_s),
        collective=collective,
        candidates=tuple(candidates),
    )


def check_axis(axis: Axis) -> None:
    """Raises TypeError if it is none: hardware alone, say."""
    if not isinstance(axis, Axis):
        raise TypeError(f"axis must be an Axis, such as Axis(by_name('tpu_v5p'), 16), got {axis!r}")


WAITING: Final = 0.9
"""A dot is bound by memory if it took less than this part of its time with its operands on chip."""

LISTED: Final = 8
"""Forms of a kind that are told in words beside the best."""

_ON_CHIP: Final[dict[tuple[Side, ...], str]] = {
    (): "nothing",
    ("lhs",): "left operand",
    ("rhs",): "right operand",
    SIDES: "both operands",
}

_COLLECTIVE: Final = {
    "all_gather_dot": "all_gather",
    "dot_reduce_scatter": "reduce_scatter",
    "dot_psum": "psum",
    "all_to_all_dot": "all_to_all",
    "dot_all_to_all": "all_to_all",
}


def _network(axis: Axis) -> str:
    if axis.hardware.network == "switch":
        return "behind one switch"
    return "a ring of its own" if axis.hardware.has_wraparound(axis.size) else "a line, no wraparound"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:10,.1f} µs"


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"


def _dots(chain: PlainChain, axis: Axis, before_s: float) -> tuple[DotTerm, ...]:
    """The dots as the estimates have them, beside a collective that takes so long with its copies."""
    if work := works(chain, Form(), axis):
        pairs = zip(work[0].matmuls, dots_as_written(work[0], axis, before_s), strict=True)
    else:
        matmuls = [dot.matmul for dot in chain.dots]
        pairs = zip(matmuls, [Whole(seconds=matmul_s(of, axis.hardware)) for of in matmuls], strict=True)
    return tuple(_dot(matmul, whole, axis.hardware) for matmul, whole in pairs)


def _dot(matmul: Matmul, whole: Whole, hardware: Hardware) -> DotTerm:
    on_chip_s = matmul_s(matmul, hardware, lhs_on_chip=True, rhs_on_chip=True, result_on_chip=True)
    # What is found on chip is not waited for by the least matmul either.
    lhs, rhs = "lhs" in whole.on_chip, "rhs" in whole.on_chip
    least = Matmul(m=1, k=1, n=1, dtype=matmul.dtype)
    return DotTerm(
        matmul=matmul,
        seconds=whole.seconds,
        on_chip=whole.on_chip,
        waited_s=whole.waited_s,
        overhead_s=matmul_s(least, hardware, lhs_on_chip=lhs, rhs_on_chip=rhs, result_on_chip=whole.stays),
        efficiency=matmul.flops / hardware.flops_for(matmul.dtype) / whole.seconds,
        bound="memory" if on_chip_s < WAITING * whole.seconds else "compute",
    )


def _collective(chain: PlainChain, axis: Axis) -> CollectiveTerm:
    full_bytes, work = gathered_bytes(chain, axis), works(chain, Form(), axis)
    seconds, latency_s = _collective_s(chain, axis, full_bytes), _collective_s(chain, axis, 0)
    return CollectiveTerm(
        full_bytes=full_bytes,
        seconds=seconds,
        latency_s=latency_s,
        bound="bandwidth" if seconds > latency_s else "latency",
        copies_s=copies_as_written_s(work[0], axis) if work else 0.0,
    )


def _collective_s(chain: PlainChain, axis: Axis, full_bytes: float) -> float:
    if "all_to_all" in chain.pattern:
        # V of an all_to_all is that of all devices together.
        return axis.all_to_all_s(axis.size * full_bytes)
    if chain.pattern == "dot_psum":
        gather = gather_after(full_bytes, dtype_bytes(chain.dtype), axis)
        return axis.reduce_scatter_s(full_bytes) + gather.collective_s
    if chain.gathers:
        return axis.all_gather_s(full_bytes)
    return (axis.all_reduce_s if sums_whole(chain.dtype, axis) else axis.reduce_scatter_s)(full_bytes)


def _candidate(chain: PlainChain, form: Form, axis: Axis) -> Candidate:
    priced = price(chain, form, axis)
    if form.route not in ("ring", "exchange"):
        return _in_turn(chain, form, priced, axis)
    (work,) = works(chain, form, axis) or (None,)
    columns = 1 if work is None else work.columns
    steps, hops = axis.size * columns, (axis.size - 1) * columns
    if form.halfway:
        hops = axis.size // 2
        steps = hops + 1
    # A psum's gather comes after its ring, or beside it in columns, and is no part of the steps.
    gather = None
    if chain.pattern == "dot_psum":
        blocks = "rows" if work is None else blocks_of(work, axis.size)
        gather = gather_after(chain.moved_bytes, dtype_bytes(chain.dtype), axis, blocks)
    gather_s, copies_s = (0.0, 0.0) if gather is None else (gather.overlapped_s, gather.partials_s)
    if work is not None and gather is not None and columns > 1:
        copies_s = placing_s(work, chain.moved_bytes, axis, across=form.across)
    dots_s = priced.partials_s - copies_s
    step_dots_s = dots_s / steps
    # Half way round an odd number of devices two shards come last.
    alone_s = dots_s * (2 if form.halfway and axis.size % 2 else 1) / axis.size
    if work is not None and gather is not None and columns > 1:
        # Beside the first products of all chunks but one runs the gather of the chunk before.
        alone_s, gather_s = step_dots_s, last_gather_s(work, chain.moved_bytes, axis, across=form.across)
    ring_s = priced.overlapped_s - gather_s
    return Candidate(
        form=form,
        estimate=priced,
        partials=tuple(dot.piece(Fraction(1, axis.size)) for dot in chain.dots)
        if work is None
        else work.piece,
        steps=steps,
        hops=hops,
        step_dots_s=step_dots_s,
        step_hop_s=priced.hops_s / hops,
        hop_bound="bandwidth" if priced.hops_s > priced.hop_latency_s else "latency",
        prologue_s=0.0 if chain.gathers else alone_s,
        steady_s=ring_s - alone_s,
        epilogue_s=gather_s + (alone_s if chain.gathers else 0.0),
        exposed_s=priced.overlapped_s - priced.partials_s,
    )


def _in_turn(chain: PlainChain, form: Form, priced: Estimate, axis: Axis) -> Candidate:
    """Pieces that go by collectives in turn: as many steps, and a hop each."""
    dots_s, hop_s = priced.partials_s / form.chains, priced.hops_s / form.chains
    first_s, last_s = (0.0, dots_s) if chain.gathers else (dots_s, 0.0)
    return Candidate(
        form=form,
        estimate=priced,
        partials=piece_in_turn(chain.sizes(axis), form),
        steps=form.chains,
        hops=form.chains,
        step_dots_s=dots_s,
        step_hop_s=hop_s,
        hop_bound="bandwidth" if priced.hops_s > priced.hop_latency_s else "latency",
        prologue_s=first_s,
        steady_s=priced.overlapped_s - first_s - last_s,
        epilogue_s=last_s,
        exposed_s=priced.overlapped_s - priced.partials_s,
    )
