"""What the cost model knows of an accelerator: rates, latencies, the shape of its network."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from cost_model.dtypes import parse_dtype
from cost_model.typed import loads, typed

SCHEMA = 1
"""Version of the JSON form of `Hardware`."""

LEAST_GAIN: Final = 0.05
"""`Hardware.least_gain` where nothing is known of the errors of predictions."""

Offloaded = Literal["all_gather", "all_reduce", "reduce_scatter"]
OFFLOADABLE: Final[tuple[Offloaded, ...]] = get_args(Offloaded)
"""What `Hardware.offloaded` and `Hardware.offload_options` may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device, as JAX counts devices, and the links that join it to its neighbours on a mesh axis.

    Attributes:
      name: the name `by_name` knows it under.
      device_kinds: the `device_kind` strings with which JAX reports it.
      peak_flops: (dtype name, FLOP/s) pairs of dense matmuls at JAX's default precision. See `flops_for`.
      hbm_bytes_per_s: bandwidth of main memory, reads and writes together.
      link_bytes_per_s: bandwidth of one link, one way.
      links_per_axis: links, per direction, that carry the traffic of one mesh axis. See `axis_bytes_per_s`.
      hop_latency_s: the least time a message to a neighbour takes, however short.
      network: "torus", where a device reaches its two neighbours on an axis, or "switch", where every pair of
        devices is one hop apart and a device's links are shared by all its transfers.
      switch_devices: how many devices a switch joins, of one host, where nothing else tells. 0: all.
      wraparound_multiple: on a torus, the axis sizes whose ends are joined are its multiples. 0: none.
      matmul_efficiency: the fraction of the peak that a large matmul reaches.
      matmul_overhead_s: fixed cost of every matmul: filling and draining the matrix unit's pipeline, and the
        launch. It is why many small matmuls take longer than a large one.
      on_chip_bytes: the largest operand used again that stays close to the matrix unit: of TPUs as their
        compilers were seen to keep it (of 64 or 128 MiB of VMEM), else half of that memory (L2).
      keeps_sums: whether partial sums may stay in that memory from one partial matmul to the next.
      results_on_chip: the part of that memory which the results of partial matmuls may fill, together with
        what is held there, to be put together in it.
      places_slowly: whether a matmul that puts its result into its place in that memory takes about as long
        as one that writes it to main memory.
      receives_on_chip: whether what collectives bring may arrive in that memory.
      fetches_shards: whether a shard is brought there before its dot: one that takes little room, and a whole
        one that a step's only dot contracts.
      fetches_sums: whether a partial sum that is added to by turns with others is brought there beside their
        dots, where sums do not stay; and pieces of shards that have arrived elsewhere are, too.
      cuts_on_chip: whether a dot may read its block of an operand that lies in that memory as a whole.
      between_tiles: how many times as long a scatter's dots take that cut parts of both operands out, of one
        few rows that begin within a tile.
      strips_apart: whether dots that make strips of a sum, of many rows, read a copy of what a strip has of
        their other operand faster than a part of the whole. (On 7x the compiler then changes the operands'
        places, and an MLP's dots took 1.6 times as long.)
      fuses_additions: whether adding to a partial sum is part of the matmul that makes the addend.
      lone_matmuls: whether matmuls are kernels of a library, which do nothing else: others put their results
        into place, and add them up.
      copy_overhead_s: fixed cost of every copy that a ring makes beside its matmuls.
      async_overhead_s: for how long a device computes nothing for every collective that runs beside its dots,
        however few its bytes.
      joining: how many times as long as elsewhere it takes to join pieces, and to take results apart again.
      slicing: how many times as long as reading and writing it takes to cut a shard into what is sent.
      rounding: how many times as long as reading and writing it takes to round a shard of float32 to bfloat16
        before it is sent.
      adding: how many times as long as reading and writing it takes to add up, apart from the dots, what a
        scatter's make in float32 and what has come. 0: not known, and taken to be as long, of what they make
        in their own type.
      matmul_tile: the multiples to which the hardware pads (M, K, N).
      overlaps: whether communication can run beside compute at all.
      synchronous_chips: slices of so many chips overlap nothing all the same, as their compiler makes every
        permute wait. 0: there are none.
      opposite_hops_overlap: whether two hops in opposite directions can be in flight together.
      devices_per_chip: how many such devices share a chip and the links that leave it.
      clock_hz: the clock of the compiler's cycle estimates. 0: the compiler gives none.
      dcn_bytes_per_s: a device's share of the network between slices or hosts (DCN, NIC), one way.
        0: unknown.
      dcn_latency_s: the least time a message through that network takes.
      offloaded: the collectives, of `OFFLOADABLE`, that run beside the dots by themselves, as the
        compiler has it by default.
      offload_options: (collective, compiler option) pairs: the options that have the compiler do so, all of a
        collective's. See `cost_model.offload_options`.
      dots_gather: whether the compiler makes all_gathers a part of the dots beside them, which then run
        them; else they have units or kernels of their own.
      least_gain: the part of the original time that a ring must be predicted to gain: what predictions for
        this device may be off.
      least_gain_beside: the same beside other rings in one program, which share what is on chip; where it
        is less, `least_gain`.

    Raises:
      ValueError: a value is of another type than its field, a rate, time or count is not a positive finite
        number, or `network` is unknown.
    """

    name: str
    device_kinds: tuple[str, ...] = ()
    peak_flops: tuple[tuple[str, float], ...]
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    links_per_axis: int = 1
    hop_latency_s: float
    network: Literal["torus", "switch"]
    switch_devices: int = 0
    wraparound_multiple: int = 0
    matmul_efficiency: float
    matmul_overhead_s: float
    matmul_tile: tuple[int, int, int]
    on_chip_bytes: float
    keeps_sums: bool = False
    results_on_chip: float = 0.0
    places_slowly: bool = False
    receives_on_chip: bool = True
    fetches_shards: bool = False
    fetches_sums: bool = False
    cuts_on_chip: bool = True
    between_tiles: float = 1.0
    strips_apart: bool = False
    fuses_additions: bool = False
    lone_matmuls: bool = False
    copy_overhead_s: float = 0.0
    adding: float = 0.0
    async_overhead_s: float = 0.0
    joining: float = 1.0
    slicing: float = 1.0
    rounding: float = 1.0
    overlaps: bool = True
    synchronous_chips: int = 0
    opposite_hops_overlap: bool = True
    devices_per_chip: int = 1
    clock_hz: float = 0.0
    dcn_bytes_per_s: float = 0.0
    dcn_latency_s: float = 0.0
    offloaded: tuple[str, ...] = ()
    offload_options: tuple[tuple[str, str], ...] = ()
    dots_gather: bool = False
    least_gain: float = LEAST_GAIN
    least_gain_beside: float = 0.0

    def __post_init__(self) -> None:
        for of in dataclasses.fields(self):
            value = typed(getattr(self, of.name), of.type, f"hardware {self.name!r}: {of.name}")
            object.__setattr__(self, of.name, value)
        positive = {
            "hbm_bytes_per_s": self.hbm_bytes_per_s,
            "link_bytes_per_s": self.link_bytes_per_s,
            "links_per_axis": self.links_per_axis,
            "hop_latency_s": self.hop_latency_s,
            "matmul_efficiency": self.matmul_efficiency,
            "matmul_overhead_s": self.matmul_overhead_s,
            "on_chip_bytes": self.on_chip_bytes,
            "devices_per_chip": self.devices_per_chip,
            "between_tiles": self.between_tiles,
            "joining": self.joining,
            **{f"peak_flops[{dtype!r}]": flops for dtype, flops in self.peak_flops},
            **{f"matmul_tile[{i}]": multiple for i, multiple in enumerate(self.matmul_tile)},
        }
        for field, value in positive.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"hardware {self.name!r}: {field} must be positive and finite, got {value!r}"
                )
        for field in (
            "results_on_chip",
            "copy_overhead_s",
            "adding",
            "async_overhead_s",
            "slicing",
            "rounding",
            "clock_hz",
            "dcn_bytes_per_s",
            "dcn_latency_s",
        ):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"hardware {self.name!r}: {field} must be finite and not negative, got {value!r}"
                )
        for field in ("least_gain", "least_gain_beside"):
            value = getattr(self, field)
            if not 0 <= value < 1:
                raise ValueError(
                    f"hardware {self.name!r}: {field} must be at least 0 and below 1, got {value!r}"
                )
        if self.matmul_efficiency > 1:
            raise ValueError(
                f"hardware {self.name!r}: matmul_efficiency must be at most 1, got {self.matmul_efficiency!r}"
            )
        if len(self.matmul_tile) != 3:
            raise ValueError(
                f"hardware {self.name!r}: matmul_tile must be (M, K, N), got {self.matmul_tile!r}"
            )
        for field in ("switch_devices", "wraparound_multiple", "synchronous_chips"):
            if (value := getattr(self, field)) < 0:
                raise ValueError(f"hardware {self.name!r}: {field} must not be negative, got {value!r}")
        if self.network not in ("torus", "switch"):
            raise ValueError(
                f"hardware {self.name!r}: network must be 'torus' or 'switch', got {self.network!r}"
            )
        with_options = [collective for collective, _ in self.offload_options]
        for field, collectives in (("offloaded", self.offloaded), ("offload_options", with_options)):
            if unknown := set(collectives) - set(OFFLOADABLE):
                raise ValueError(
                    f"hardware {self.name!r}: {field} names collectives of {OFFLOADABLE}, "
                    f"not {sorted(unknown)}"
                )
        if not self.peak_flops:
            raise ValueError(f"hardware {self.name!r}: peak_flops must name at least one dtype")
        for dtype, _ in self.peak_flops:
            parse_dtype(dtype)

    @property
    def stops_s(self) -> float:
        """For how long a hop beside dots stops the device; 0 where none runs beside them."""
        return self.async_overhead_s if self.overlaps else 0.0

    @property
    def axis_bytes_per_s(self) -> float:
        """Bytes per second that one device can send in one direction of a mesh axis."""
        return self.link_bytes_per_s * self.links_per_axis

    def on_slice(self, chips: int) -> "Hardware":
        """The hardware as it runs on a slice of so many chips: see `synchronous_chips`.

        Of two hops in opposite directions one waits for the other there, too (v5e, of a scatter's ring).
        """
        if chips != self.synchronous_chips:
            return self
        return dataclasses.replace(self, overlaps=False, opposite_hops_overlap=False)

    def per_core(self, devices_per_chip: int) -> "Hardware":
        """One of `devices_per_chip` equal parts of the chip; this hardware, if that is no finer than it is.

        The TPU v4 compiler without megacore, and every topology described to it, counts each of a chip's two
        cores as a device: half of the chip's FLOP/s, memory bandwidth and on-chip memory, with the chip's
        links shared by both.
        """
        if devices_per_chip <= self.devices_per_chip:
            return self
        part = self.devices_per_chip / devices_per_chip
        return dataclasses.replace(
            self,
            name=f"{self.name} core",
            peak_flops=tuple((dtype, part * flops) for dtype, flops in self.peak_flops),
            hbm_bytes_per_s=part * self.hbm_bytes_per_s,
            on_chip_bytes=part * self.on_chip_bytes,
            dcn_bytes_per_s=part * self.dcn_bytes_per_s,
            devices_per_chip=devices_per_chip,
        )

    def flops_for(self, dtype: str) -> float:
        """Peak FLOP/s of a dense matmul whose operands have this dtype.

        A dtype without an entry of its own is computed in the narrowest listed dtype of its kind (float or
        integer) that holds it: float8 runs at the bfloat16 rate where there is no float8 unit. One that none
        holds (float64, complex, an unknown name) gets the slowest listed rate, so that a wider dtype is never
        the faster one.
        """
        rates = self._rates(dtype)
        return min(rates)[1] if rates else min(flops for _, flops in self.peak_flops)

    def rates(self, dtype: str) -> bool:
        """Whether a listed dtype holds this one, so that `flops_for` is not just the slowest."""
        return bool(self._rates(dtype))

    def _rates(self, dtype: str) -> list[tuple[int, float]]:
        """Bits and FLOP/s of the listed dtypes that hold one."""
        try:
            kind, bits = parse_dtype(dtype)
        except ValueError:
            return []
        holders = [(parse_dtype(listed), flops) for listed, flops in self.peak_flops]
        return [(width, flops) for (of_kind, width), flops in holders if of_kind == kind and width >= bits]

    def has_wraparound(self, axis_size: int) -> bool:
        """Whether the last device of a mesh axis of this size is a neighbour of the first.

        The inference TPUs (v5e, v6e) join the ends of a full axis of 16, the training TPUs (v4, v5p, 7x)
        those of an axis that is a multiple of 4 (scaling book, "How to Think About TPUs"); two devices are
        neighbours once, not twice. An axis that is a multiple of those and folds through several physical
        axes closes on itself too. Behind a switch every pair is one hop apart.
        """
        if self.network == "switch":
            return True
        return self.wraparound_multiple > 0 and axis_size > 2 and axis_size % self.wraparound_multiple == 0

    def to_json(self) -> str:
        """A JSON object with every field and the `schema` version; `from_json` reads it back unchanged."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Hardware":
        """Reads what `to_json` wrote, or a description of one's own hardware in that form.

        Raises:
          ValueError: `text` is no JSON object, has another schema, a missing or unknown field, or a value
            that is of another type or that `Hardware` refuses.
        """
        return cls.from_fields(loads(text))

    @classmethod
    def from_fields(cls, given: Any) -> "Hardware":
        """As `from_json`, of what stands in the JSON."""
        if not isinstance(given, dict) or given.get("schema") != SCHEMA:
            raise ValueError(f'a hardware description is a JSON object with "schema": {SCHEMA}')
        fields = {name: value for name, value in given.items() if name != "schema"}
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(fields.keys() - known):
            raise ValueError(f"unknown hardware fields {unknown}; the fields are {sorted(known)}")
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(f"incomplete hardware description: {error}") from error
