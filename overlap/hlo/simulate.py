"""Times the schedule that a compiler chose: `simulate(module)` walks it in execution order.

The model, in short; `Timeline.assumptions` says for each run what it rests on:

- One compute stream runs the instructions of the SPMD program in schedule order; all devices in lockstep. An
  instruction takes what `overlap.hlo.costs` says: the TPU compiler's cycles, or a roofline.
- Asynchronous copies run one after the other on a stream of their own, at the HBM bandwidth.
- Every physical link direction is a stream. A permute's pairs are routed over the topology; it takes each
  link on its ways for the bytes that cross it, in the order of issue, so two permutes contend only where they
  share a link. It has arrived when its last link is done, and not before its latency.
- Collectives of groups take what `cost_model.group_collectives` says for every link that the groups have, and
  those links for that long. Synchronous ones are waited for at once; asynchronous ones at their done, and on
  GPUs their start stops compute for a while (`Hardware.async_overhead_s`).
- A loop runs its trip count: iterations are walked until the streams' backlogs repeat, and the rest follows
  from the repeating ones. Of a conditional, the slowest branch runs.
- Compute, copies and links do not slow each other down, though they share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from cost_model import Hardware, by_name, from_device_kind
from cost_model.topology import Topology
from overlap.hlo.costs import KERNEL_S, Cost, Costs, Elementwise
from overlap.hlo.guess import guess_hardware, guess_topology
from overlap.hlo.module import Instruction, Module, collective_instruction, host_transfers
from overlap.hlo.neighbours import Neighbours
from overlap.hlo.steps import Step, Steps
from overlap.hlo.streams import Backlog, Key, Streams, Sums, same
from overlap.hlo.timeline import CollectiveTime, Event, Timeline
from overlap.hlo.wires import Transfer, Wires

PERIOD: Final = 8
"""Longest run of iterations that is looked for as what a loop repeats."""

WALKED: Final = 64
"""Iterations after which a loop that does not repeat is continued at the mean of its last `PERIOD`."""


def simulate(
    module: Module,
    hardware: Hardware | str | None = None,
    topology: Topology | Sequence[Any] | None = None,
    *,
    elementwise: Elementwise = "estimated",
) -> Timeline:
    """The modelled timeline of a scheduled module on one device.

    Args:
      module: as `overlap.hlo.parse` reads it, of a TPU, GPU or CPU.
      hardware: what runs it, or its name (`cost_model.names()`). If None, that of `topology` or its devices,
        else of the dump where that tells.
      topology: the network between the devices, by position in the device assignment; or the JAX devices in
        that order (`mesh.devices.flat`), whose coordinates say it. If None, each mesh axis that the replica
        groups and permutes show is taken for a physical axis of its own, and GPUs fill hosts: see
        `Topology.logical`.
      elementwise: whether a TPU's elementwise work and copies take the compiler's cycles, or no more than
        their bytes at the memory bandwidth, which is the least they can take. Matmuls take their cycles.

    Raises:
      ValueError: the hardware is unknown, or cannot be told from the dump; the topology has fewer devices
        than the module.
    """
    return _Simulation(module, hardware, topology, elementwise).timeline()


class _Simulation:
    """One run of one module; what depends on hardware and network is looked up once."""

    def __init__(
        self,
        module: Module,
        hardware: Hardware | str | None,
        topology: Topology | Sequence[Any] | None,
        elementwise: Elementwise,
    ) -> None:
        self.module = module
        self.notes: dict[str, None] = {}
        devices = module.num_partitions * module.num_replicas
        self.hardware = _hardware(module, hardware, topology)
        if isinstance(topology, Topology):
            self.topology = topology
        elif topology is not None:
            self.topology = Topology.from_devices(topology, self.hardware)
        else:
            self.topology, sentence = guess_topology(module, self.hardware)
            self.note(sentence)
        device = self.topology.hardware  # one core, where the devices are cores
        if self.hardware.per_core(device.devices_per_chip) == device:
            self.hardware = device
        if elementwise == "bandwidth" and self.hardware.clock_hz:
            self.note(
                "Elementwise work and copies take their bytes at the memory bandwidth where the compiler "
                "estimates more: the least they can take."
            )
        if self.topology.size < devices:
            raise ValueError(
                f"the topology has {self.topology.size} devices and module {module.name!r} runs on "
                f"{devices}: give the devices of its mesh, in the order of mesh.devices.flat"
            )
        self.costs = Costs(module, self.hardware, elementwise)
        self.steps = Steps(module, self.costs)
        self.wires = Wires(self.topology)
        self.slowest: dict[tuple[str, ...], str] = {}

    def note(self, sentence: str) -> None:
        """Adds an assumption, once."""
        self.notes[sentence] = None

    def traced(self, instruction: Instruction) -> tuple[str, str]:
        """The traced operation and its line; of what wraps a collective, the collective's."""
        if not instruction.op_name:
            instruction = collective_instruction(self.module, instruction) or instruction
        return instruction.op_name, instruction.source

    def timeline(self) -> Timeline:
        """Walks the entry computation, and says what happened."""
        walk = _Walk(self)
        walk.run(self.module.entry, 1)
        streams = walk.streams
        streams.finish()
        return Timeline(
            module=self.module.name,
            hardware=self.hardware.name,
            topology=str(self.topology),
            total_s=streams.now_s,
            compute_s=streams.compute_s,
            exposed_s=streams.exposed_s,
            copy_wait_s=streams.copy_wait_s,
            collectives=self._collectives(walk),
            events=tuple(sorted(walk.events, key=lambda event: event.start_s)),
            peak_in_flight=streams.peak_in_flight,
            assumptions=self._assumptions(walk),
        )

    def _collectives(self, walk: _Walk) -> tuple[CollectiveTime, ...]:
        neighbours = Neighbours(self.module, self.costs)
        found = []
        for key, record in walk.streams.records.items():
            step, transfer = walk.sent[key]
            instruction, asked = step.instruction, step.move
            assert asked is not None
            op_name, source = self.traced(instruction)
            executions = round(record.executions)
            found.append(
                CollectiveTime(
                    name=instruction.name,
                    opcode=asked.operation,
                    op_name=op_name,
                    source=source,
                    bytes_on_wire=transfer.sent_bytes * executions,
                    executions=executions,
                    start_s=record.start_s,
                    end_s=record.end_s,
                    wire_s=record.wire_s,
                    exposed_s=record.exposed_s,
                    hidden_s=record.hidden_s,
                    overlapped_with=record.overlapped_with,
                    next_to_dot=neighbours.next_to_dot(
                        self.module.computation(step.computation), instruction
                    ),
                )
            )
        return tuple(sorted(found, key=lambda collective: collective.start_s))

    def _assumptions(self, walk: _Walk) -> tuple[str, ...]:
        hardware, network = self.hardware, self.topology.hardware
        sentences = [
            "All times are modelled, none is measured: one device of many in lockstep, whose compute, copies "
            "and links do not slow each other down."
        ]
        estimated = sum(1 for step in walk.computed.values() if step.cost is not None and step.cost.estimated)
        if hardware.clock_hz:
            sentences.append(
                f"{estimated} of {len(walk.computed)} compute instructions take the compiler's own cycle "
                f"estimates at {hardware.clock_hz / 1e9:g} GHz ({hardware.name}), which include main memory; "
                f"the others move their bytes at {hardware.hbm_bytes_per_s / 1e9:,.0f} GB/s."
            )
        else:
            sentences.append(
                f"Matmuls take the cost model's roofline for {hardware.name} "
                f"({hardware.matmul_efficiency:.0%} of the peak); other kernels {KERNEL_S * 1e6:g} µs and "
                f"their bytes at {hardware.hbm_bytes_per_s / 1e9:,.0f} GB/s."
            )
        sentences.append(
            f"Links: {self.topology}, {network.axis_bytes_per_s / 1e9:g} GB/s each way and "
            f"{network.hop_latency_s * 1e6:g} µs a hop. Permutes share the links on their routes; a "
            "collective of groups takes all links of its groups for the time of the cost model's formula, "
            "whatever algorithm the compiler chose."
        )
        if hardware.stops_s:
            sentences.append(f"Each asynchronous collective stops compute for {hardware.stops_s * 1e6:g} µs.")
        if not hardware.overlaps:
            sentences.append(f"On {hardware.name} nothing runs beside compute.")
        elif not hardware.opposite_hops_overlap:
            sentences.append("Collectives run one at a time.")
        instructions = (i for part in self.module.computations.values() for i in part.instructions)
        if any(i.shape.is_in_host_memory for i in instructions):
            sentences.append(
                "Copies to and from the host's memory take the time of main memory's side alone."
            )
        between, others = host_transfers(self.module)
        if between:
            sentences.append(f"{between} sends and receives between slices take no time: they have no price.")
        if others:
            sentences.append(f"{others} sends and receives of the host (of callbacks, say) take no time.")
        if not self.module.is_scheduled:
            sentences.append("The module has no schedule: the order of its text is taken for one.")
        return (*sentences, *self.notes)


class _Walk:
    """One walk through the schedule, with its streams and what it has seen."""

    def __init__(self, simulation: _Simulation) -> None:
        hardware = simulation.hardware
        self.simulation = simulation
        self.streams = Streams(one_at_a_time=not hardware.opposite_hops_overlap)
        self.overlaps = hardware.overlaps
        self.events: list[Event] = []
        self.sent: dict[Key, tuple[Step, Transfer]] = {}
        self.computed: dict[int, Step] = {}
        self.copied: set[int] = set()

    def run(self, name: str, repeats: int) -> None:
        """Walks a computation; `repeats` is how often the loops around it run it."""
        streams = self.streams
        for step in self.simulation.steps.of(name):
            match step.what:
                case "compute":
                    assert step.cost is not None
                    start_s = streams.now_s
                    streams.compute(step.cost.seconds, step.instruction.name)
                    if id(step) not in self.computed:
                        self.computed[id(step)] = step
                        self._draw(step, step.cost, "compute", start_s, streams.now_s, repeats)
                case "copy_start":
                    assert step.cost is not None
                    begin_s, end_s = streams.copy_start(step.key, step.cost.seconds)
                    if id(step) not in self.copied:
                        self.copied.add(id(step))
                        self._draw(step, step.cost, "memory", begin_s, end_s, repeats)
                case "copy_done":
                    streams.copy_done(step.key)
                case "send" | "exchange":
                    self._send(step, repeats)
                case "arrive":
                    streams.arrive(step.key)
                case "loop":
                    self._loop(step, repeats)
                case "call":
                    self.run(step.called[0], repeats)
                case "branch":
                    self.run(self._slowest(step), repeats)

    def _send(self, step: Step, repeats: int) -> None:
        assert step.move is not None
        simulation, streams = self.simulation, self.streams
        transfer = simulation.wires.transfer(step.move)
        flight = streams.send(step.key, transfer)
        if step.what == "exchange" or not self.overlaps:
            streams.arrive(step.key)
        else:
            self._stop(step, repeats)
        if step.key in self.sent:
            return
        self.sent[step.key] = (step, transfer)
        _note_price(simulation, step)
        cost = Cost(flight.end_s - flight.begin_s, "collective", step.move.operation)
        for link in transfer.shown:
            self._draw(step, cost, link, flight.begin_s, flight.end_s, repeats)

    def _stop(self, step: Step, repeats: int) -> None:
        """What an asynchronous collective costs the device however few its bytes."""
        streams, seconds = self.streams, self.simulation.hardware.stops_s
        if seconds:
            start_s = streams.now_s
            streams.compute(seconds, step.instruction.name)
            if step.key not in self.sent:
                cost = Cost(seconds, "compute", "starting a collective")
                self._draw(step, cost, "compute", start_s, streams.now_s, repeats)

    def _draw(self, step: Step, cost: Cost, stream: str, start_s: float, end_s: float, repeats: int) -> None:
        op_name, source = self.simulation.traced(step.instruction)
        self.events.append(
            Event(
                name=step.instruction.name,
                opcode=cost.does,
                kind=cost.kind,
                stream=stream,
                start_s=start_s,
                end_s=end_s,
                op_name=op_name,
                source=source,
                repeats=repeats,
            )
        )

    def _slowest(self, step: Step) -> str:
        """The branch of a conditional that takes longest, when nothing else is on its way."""
        simulation = self.simulation
        known = simulation.slowest.get(step.called)
        if known is None:
            times_s = []
            for name in step.called:
                alone = _Walk(simulation)
                alone.run(name, 1)
                times_s.append(alone.streams.now_s)
            known = simulation.slowest[step.called] = step.called[times_s.index(max(times_s))]
            simulation.note("Of each conditional the slowest branch runs.")
        return known

    def _loop(self, step: Step, repeats: int) -> None:
        """Walks iterations until the backlogs repeat, then lets those that repeat fill what is left."""
        simulation, streams = self.simulation, self.streams
        trips = step.trips
        if trips is None:
            trips = 1
            simulation.note(
                f"How often the loop {step.name!r} runs cannot be told from the dump; it is taken to run "
                "once."
            )
        done = 0
        history: list[tuple[Backlog, Sums]] = [(streams.backlog(), streams.sums())]
        while done < trips:
            for name in step.called:
                self.run(name, repeats * trips)
            done += 1
            backlog = streams.backlog()
            for back, (earlier, sums) in enumerate(history[: -PERIOD - 1 : -1], 1):
                if done + back <= trips and same(earlier, backlog):
                    times = (trips - done) // back
                    streams.repeat(sums, times)
                    done += times * back
                    history = []
                    break
            else:
                # After a period that repeated a few are left, too few to take a mean of.
                if WALKED <= done < trips and len(history) >= PERIOD:
                    streams.repeat(history[-PERIOD][1], (trips - done) / PERIOD)
                    done = trips
                    simulation.note(
                        f"The iterations of the loop {step.name!r} do not repeat; after {WALKED} of {trips} "
                        "their mean is continued."
                    )
            history.append((backlog, streams.sums()))


def _note_price(simulation: _Simulation, step: Step) -> None:
    """Says how a collective is priced where that is not by its name."""
    asked = step.move
    assert asked is not None
    if asked.operation == "all-reduce" and asked.priced_as == "reduce-scatter":
        simulation.note(
            "An all-reduce whose result every device cuts to its own part is priced as a reduce-scatter, the "
            "cut as free: what the compiler's fused form would take at best."
        )
    elif asked.operation == "all-reduce" and asked.priced_as == "all-gather":
        simulation.note(
            "An all-reduce of each device's part, placed into zeros, is priced as an all-gather, the zeros "
            "and the placing as free."
        )
    elif asked.operation not in (asked.priced_as, "send"):
        simulation.note(f"{asked.operation} is priced as {asked.priced_as}.")


def _hardware(
    module: Module, hardware: Hardware | str | None, topology: Topology | Sequence[Any] | None
) -> Hardware:
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is not None:
        return by_name(hardware)
    if isinstance(topology, Topology):
        return topology.hardware
    if topology is not None:
        for device in getattr(topology, "flat", topology):
            known = from_device_kind(device.device_kind)
            if known is not None:
                return known
    return guess_hardware(module)
