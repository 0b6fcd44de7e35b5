"""The accelerators the cost model knows, and how to find one by name or by JAX's `device_kind`.

TPU rates: the scaling book's tables ("How to Think About TPUs") and the Cloud TPU pages of each generation.
On TPU a float32 matmul at JAX's default precision is one bfloat16 pass, hence its rate. Efficiency and
overhead of matmuls are fitted to the TPU compiler's cycle estimates ([M,8192]·[8192,2048] in bfloat16, M from
64 to 8192), at 1.05 GHz for v4 (one of its two cores), 1.5 for v5e, 1.75 for v5p and v6e, 2.2 for 7x. These
are the published peaks over the FLOPs of one estimated cycle (2^17 on a v4 core and on v5e, 2^18 on v5p, 2^19
on v6e and on a 7x die); at them M=8192 is estimated at 95 % of the peak on v4, 97 % on v5e, 96 % on v5p, 86 %
on v6e and 94 % on 7x. A hop's latency of about 1 µs is the scaling book's. On-chip memory is VMEM (CMEM on
v4), that of both cores where JAX sees them as one device.

The data-centre network: 50 Gbit/s per chip on v5p, 100 on v6e and 7x (Cloud TPU's table of machine types; the
book has v5p's 6.25e9 bytes/s too), two ports of 100 Gbit/s for the 8 chips of a v5e host (its page); v4, for
which none is published, as v5p. GPUs: one InfiniBand port of the DGX each, 200 Gbit/s on A100 and 400 on the
later ones (NVIDIA). Its latency of 10 µs, and all of the CPU's, are round figures.

GPU rates: NVIDIA's data sheets for the SXM boards, dense (their sparse figures halved); float32 is TF32,
JAX's default. On-chip memory is the L2 cache. A link is one NVLink, a GPU's links all lead to the switch.
Efficiency, the overhead of a matmul (a kernel's launch with its ramp) and of other kernels, and that matmuls
are cuBLAS's alone, were measured on one H100, as was the bandwidth of its main memory (`bench.gpu_steps`,
`bench.gpu_matmuls`); that of an H200 is what a copy reached there. What an asynchronous collective costs
beside its time was measured on one H200, where collectives moved nothing (`bench.gpu_steps`): whole programs
took so much longer than their kernels, which are CUDA graphs but where a collective parts them. Of the others
efficiency is rounded experience, and so is the hop's latency, that of a NCCL send and receive kernel. XLA:GPU
keeps one collective in flight by default, so opposite hops do not overlap; any collective may be it. PCIe and
NVL boards have no such switch and are left unknown.

On a full pod of v5e, 16x16 chips, the TPU compiler starts no permute ahead, neither ours nor those of XLA's
own windowed einsum (libtpu of jax 0.12; on 8x16 chips, and on pods of the others, it does).

What a ring must be predicted to gain: on an H100 rings computed for up to 10 % longer than priced, half of
them for 5 %. Of the random chains of `bench/decisions.py`, rings of v4, v5p and 7x were further off than
those of v5e and v6e. In programs of several chains, of those MLPs in which a ring was predicted to gain 5 to
8 % none took longer with it; of less, one took 4 % longer. On v4 three layers with a backward pass did, by
2 %.
"""

from cost_model.hardware import OFFLOADABLE, Hardware


def _gpu(
    name: str,
    device_kinds: tuple[str, ...],
    peak_flops: tuple[tuple[str, float], ...],
    *,
    hbm_bytes_per_s: float,
    link_bytes_per_s: float,
    links_per_axis: int,
    matmul_efficiency: float,
    on_chip_bytes: float,
    dcn_bytes_per_s: float,
) -> Hardware:
    return Hardware(
        name=name,
        device_kinds=device_kinds,
        peak_flops=peak_flops,
        hbm_bytes_per_s=hbm_bytes_per_s,
        link_bytes_per_s=link_bytes_per_s,
        links_per_axis=links_per_axis,
        hop_latency_s=8e-6,
        network="switch",
        switch_devices=8,
        matmul_efficiency=matmul_efficiency,
        matmul_overhead_s=6e-6,
        matmul_tile=(64, 16, 64),
        on_chip_bytes=on_chip_bytes,
        lone_matmuls=True,
        copy_overhead_s=2e-6,
        async_overhead_s=1e-5,
        offloaded=("all_gather", "reduce_scatter"),
        least_gain=0.07,
        opposite_hops_overlap=False,
        dcn_bytes_per_s=dcn_bytes_per_s,
        dcn_latency_s=1e-5,
    )


_HOPPER_FLOPS = (
    ("float64", 6.7e13),
    ("float32", 4.945e14),
    ("bfloat16", 9.89e14),
    ("float8", 1.979e15),
    ("int8", 1.979e15),
)

_SPARSE_CORES = tuple(
    (collective, f"xla_tpu_enable_sparse_core_collective_offload_{name}")
    for collective, names in {
        "all_gather": ("all_gather", "2d_all_gather", "3d_all_gather"),
        "all_reduce": ("all_reduce",),
        "reduce_scatter": ("reduce_scatter", "nd_reduce_scatter"),
    }.items()
    for name in names
)
"""Of axes along one dim of the torus, and along several."""

_CHIPS = (
    Hardware(
        name="tpu_v4",
        device_kinds=("TPU v4",),
        peak_flops=(("float32", 2.75e14), ("bfloat16", 2.75e14), ("int8", 2.75e14)),
        hbm_bytes_per_s=1.2e12,
        link_bytes_per_s=4.5e10,
        hop_latency_s=1e-6,
        network="torus",
        wraparound_multiple=4,
        matmul_efficiency=0.955,
        matmul_overhead_s=7e-6,
        matmul_tile=(8, 128, 128),
        on_chip_bytes=122 * 2**20,
        results_on_chip=0.6,
        places_slowly=True,
        fetches_shards=True,
        cuts_on_chip=False,
        fuses_additions=True,
        copy_overhead_s=1.1e-6,
        joining=1.25,
        slicing=2.0,
        rounding=2.5,
        clock_hz=1.05e9,
        dcn_bytes_per_s=6.25e9,
        dcn_latency_s=1e-5,
        least_gain=0.05,
        least_gain_beside=0.08,
        offload_options=(("all_gather", "xla_enable_async_all_gather"),),
    ),
    # Its compiler runs all_gathers within the dots beside them, and no other collective (libtpu 0.0.42 and
    # 0.0.50, by default: "async collective fusion").
    Hardware(
        name="tpu_v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        peak_flops=(("float32", 1.97e14), ("bfloat16", 1.97e14), ("int8", 3.94e14)),
        hbm_bytes_per_s=8.1e11,
        link_bytes_per_s=4.5e10,
        hop_latency_s=1e-6,
        network="torus",
        wraparound_multiple=16,
        matmul_efficiency=0.965,
        matmul_overhead_s=4.6e-6,
        matmul_tile=(8, 128, 128),
        on_chip_bytes=112 * 2**20,
        keeps_sums=True,
        results_on_chip=1.0,
        places_slowly=True,
        fuses_additions=True,
        copy_overhead_s=1.1e-6,
        adding=1.2,
        slicing=1.3,
        rounding=3.1,
        synchronous_chips=256,
        clock_hz=1.5e9,
        dcn_bytes_per_s=3.125e9,
        dcn_latency_s=1e-5,
        least_gain=0.03,
        least_gain_beside=0.05,
        offloaded=("all_gather",),
        offload_options=(
            ("all_reduce", "xla_tpu_enable_async_collective_fusion_fuse_all_reduce"),
            ("all_reduce", "xla_enable_async_all_reduce"),
        ),
        dots_gather=True,
    ),
    Hardware(
        name="tpu_v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        peak_flops=(("float32", 4.59e14), ("bfloat16", 4.59e14), ("int8", 9.18e14)),
        hbm_bytes_per_s=2.765e12,
        link_bytes_per_s=9e10,
        hop_latency_s=1e-6,
        network="torus",
        wraparound_multiple=4,
        matmul_efficiency=0.965,
        matmul_overhead_s=3.7e-6,
        matmul_tile=(8, 128, 128),
        on_chip_bytes=47 * 2**20,
        receives_on_chip=False,
        fetches_sums=True,
        strips_apart=True,
        fuses_additions=True,
        copy_overhead_s=1.1e-6,
        joining=1.4,
        slicing=2.0,
        rounding=4.2,
        clock_hz=1.75e9,
        dcn_bytes_per_s=6.25e9,
        dcn_latency_s=1e-5,
        least_gain=0.03,
        least_gain_beside=0.05,
        offload_options=_SPARSE_CORES,
    ),
    Hardware(
        name="tpu_v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        peak_flops=(("float32", 9.18e14), ("bfloat16", 9.18e14), ("int8", 1.836e15)),
        hbm_bytes_per_s=1.6e12,
        link_bytes_per_s=9e10,
        hop_latency_s=1e-6,
        network="torus",
        wraparound_multiple=16,
        matmul_efficiency=0.88,
        matmul_overhead_s=6e-6,
        matmul_tile=(8, 256, 256),
        on_chip_bytes=92 * 2**20,
        keeps_sums=True,
        results_on_chip=0.9,
        between_tiles=1.5,
        strips_apart=True,
        fuses_additions=True,
        copy_overhead_s=1.1e-6,
        adding=0.5,
        slicing=1.5,
        rounding=2.5,
        clock_hz=1.75e9,
        dcn_bytes_per_s=1.25e10,
        dcn_latency_s=1e-5,
        least_gain=0.02,
        least_gain_beside=0.05,
        offload_options=_SPARSE_CORES,
    ),
    # JAX sees each of a chip's two dies as a device: half of the chip's FLOP/s and memory bandwidth. The
    # links belong to the chip; an axis that runs through both dies of every chip has them to itself. Its
    # SparseCores do what is offloaded (libtpu 0.0.42 and 0.0.50, by default); permutes they do not.
    Hardware(
        name="tpu_7x",
        device_kinds=("TPU7x",),
        peak_flops=(
            ("float32", 1.1535e15),
            ("bfloat16", 1.1535e15),
            ("float8", 2.307e15),
            ("int8", 2.307e15),
        ),
        hbm_bytes_per_s=3.69e12,
        link_bytes_per_s=9e10,
        hop_latency_s=1e-6,
        network="torus",
        wraparound_multiple=4,
        matmul_efficiency=0.965,
        matmul_overhead_s=4.1e-6,
        matmul_tile=(8, 256, 256),
        on_chip_bytes=31 * 2**20,
        keeps_sums=True,
        results_on_chip=0.9,
        places_slowly=True,
        devices_per_chip=2,
        receives_on_chip=False,
        fetches_shards=True,
        fuses_additions=True,
        copy_overhead_s=1.1e-6,
        adding=1.25,
        slicing=2.0,
        rounding=2.1,
        clock_hz=2.2e9,
        dcn_bytes_per_s=6.25e9,
        dcn_latency_s=1e-5,
        least_gain=0.01,
        least_gain_beside=0.05,
        offloaded=OFFLOADABLE,
        offload_options=_SPARSE_CORES,
    ),
    _gpu(
        "a100",
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "A100-SXM4-80GB", "A100-SXM4-40GB"),
        (("float64", 1.95e13), ("float32", 1.56e14), ("bfloat16", 3.12e14), ("int8", 6.24e14)),
        hbm_bytes_per_s=2.0e12,
        link_bytes_per_s=2.5e10,
        links_per_axis=12,
        matmul_efficiency=0.85,
        on_chip_bytes=20e6,
        dcn_bytes_per_s=2.5e10,
    ),
    _gpu(
        "h100",
        ("NVIDIA H100 80GB HBM3",),
        _HOPPER_FLOPS,
        hbm_bytes_per_s=3.0e12,
        link_bytes_per_s=2.5e10,
        links_per_axis=18,
        matmul_efficiency=0.8,
        on_chip_bytes=25e6,
        dcn_bytes_per_s=5e10,
    ),
    _gpu(
        "h200",
        ("NVIDIA H200",),
        _HOPPER_FLOPS,
        hbm_bytes_per_s=4.3e12,
        link_bytes_per_s=2.5e10,
        links_per_axis=18,
        matmul_efficiency=0.8,
        on_chip_bytes=25e6,
        dcn_bytes_per_s=5e10,
    ),
    _gpu(
        "b200",
        ("NVIDIA B200",),
        (
            ("float64", 3.7e13),
            ("float32", 1.1e15),
            ("bfloat16", 2.25e15),
            ("float8", 4.5e15),
            ("int8", 4.5e15),
        ),
        hbm_bytes_per_s=8.0e12,
        link_bytes_per_s=5e10,
        links_per_axis=18,
        matmul_efficiency=0.75,
        on_chip_bytes=63e6,
        dcn_bytes_per_s=5e10,
    ),
    # Virtual CPU devices share cores and memory: a collective is a copy with a rendezvous, made by the cores
    # that would multiply. The rates only have to be plausible; what matters is that nothing overlaps.
    Hardware(
        name="cpu",
        device_kinds=("cpu",),
        peak_flops=(("float64", 5e10), ("float32", 1e11)),
        hbm_bytes_per_s=2e10,
        link_bytes_per_s=1e10,
        hop_latency_s=2e-5,
        network="switch",
        matmul_efficiency=0.8,
        matmul_overhead_s=5e-6,
        matmul_tile=(1, 1, 8),
        on_chip_bytes=16e6,
        overlaps=False,
        opposite_hops_overlap=False,
        dcn_bytes_per_s=1.25e9,
        dcn_latency_s=5e-5,
    ),
)

_BY_NAME = {chip.name: chip for chip in _CHIPS}
_BY_DEVICE_KIND = {kind: chip for chip in _CHIPS for kind in chip.device_kinds}


def names() -> tuple[str, ...]:
    """The names `by_name` accepts."""
    return tuple(_BY_NAME)


def by_name(name: str) -> Hardware:
    """The hardware of this name, such as `"tpu_v5p"`.

    Raises:
      ValueError: no hardware has this name; the message lists those there are.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        like = [repr(each) for each in names() if _letters(name) and _letters(name) in _letters(each)]
        meant = f", did you mean {' or '.join(like)}?" if like else ";"
        raise ValueError(f"unknown hardware {name!r}{meant} known: {', '.join(names())}") from None


def _letters(name: object) -> str:
    """A name without what people write differently: "TPU-v5p" is as "tpu_v5p"."""
    return "".join(filter(str.isalnum, str(name).lower()))


def from_device_kind(kind: str) -> Hardware | None:
    """The hardware that JAX reports under this `device_kind`, such as `"TPU v5 lite"`; None if unknown."""
    return _BY_DEVICE_KIND.get(kind)
