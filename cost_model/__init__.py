"""How long things take: hardware, matmuls, collectives, and rings in their place.

The bottom floor of overlap-collectives. It knows no jaxpr and imports no JAX: numbers of bytes and matrix
sizes go in, seconds come out.

    work = RingWork(collective="all_gather", shard_bytes=..., matmuls=..., piece=..., directions=2, ...)
    estimate(work, Axis(by_name("tpu_v5p"), 16)).benefit_s      # what a rewrite is predicted to save

It pays from `Hardware.least_gain` of the original time on: what is less, a prediction may be off by.
"""

from cost_model.axis import Axis, Directions, ring_hop_s
from cost_model.break_even import break_evens
from cost_model.calibration import Calibration, OtherDevicesError, hardware_of
from cost_model.chips import by_name, from_device_kind, names
from cost_model.collectives import all_gather_s, all_reduce_s, all_to_all_s, hop_s, reduce_scatter_s
from cost_model.dtypes import dtype_bytes
from cost_model.exchange import exchange_estimate
from cost_model.explanation import explain
from cost_model.hardware import Hardware
from cost_model.matmul import Matmul, matmul_s
from cost_model.plain_chain import chain_of
from cost_model.ring import Estimate, estimate
from cost_model.ring_order import RingOrder, ring_orders, ring_step_s
from cost_model.ring_work import RingWork
from cost_model.topology import Link, Place, Topology
from cost_model.walk import Walk, ring_walks, walk_step_s

__all__ = [
    "Axis",
    "Calibration",
    "Directions",
    "Estimate",
    "Hardware",
    "Link",
    "Matmul",
    "OtherDevicesError",
    "Place",
    "RingOrder",
    "RingWork",
    "Topology",
    "Walk",
    "all_gather_s",
    "all_reduce_s",
    "all_to_all_s",
    "break_evens",
    "by_name",
    "chain_of",
    "dtype_bytes",
    "estimate",
    "exchange_estimate",
    "explain",
    "from_device_kind",
    "hardware_of",
    "hop_s",
    "matmul_s",
    "names",
    "reduce_scatter_s",
    "ring_hop_s",
    "ring_orders",
    "ring_step_s",
    "ring_walks",
    "walk_step_s",
]
