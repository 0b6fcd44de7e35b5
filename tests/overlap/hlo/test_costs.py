"""Costs of single instructions, against bytes and FLOPs counted by hand."""

from __future__ import annotations

import pytest

from cost_model import Hardware, Matmul, by_name, matmul_s
from overlap.hlo.costs import KERNEL_S, TINY_BYTES, VMEM_SPEED, Cost, Costs, Elementwise
from overlap.hlo.parse import parse

TPU = by_name("tpu_v5p")
GPU = by_name("h100")
HBM = TPU.hbm_bytes_per_s

A = "bf16[512,1024]{1,0:T(8,128)(2,1)}"
A_BYTES = 2 * 512 * 1024
IN_VMEM = "bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}"


def cost(
    body: str, hardware: Hardware = TPU, *, fused: str = "", elementwise: Elementwise = "estimated"
) -> Cost:
    """The cost of the root of an entry computation with these instructions."""
    module = parse(f"HloModule m, is_scheduled=true\n\n{fused}\nENTRY %main {{\n{body}\n}}\n")
    entry = module.entry_computation
    return Costs(module, hardware, elementwise).cost(entry, entry.root)


def copy_s(body: str) -> float:
    """Seconds of an asynchronous copy, the first instruction behind the parameters."""
    module = parse(f"HloModule m, is_scheduled=true\n\nENTRY %main {{\n{body}\n}}\n")
    entry = module.entry_computation
    start = next(i for i in entry.instructions if i.is_async_start)
    return Costs(module, TPU).copy_s(entry, start)


def test_the_compiler_s_cycles_are_taken_as_they_stand() -> None:
    config = '{"window_config":{"estimated_cycles":"1750000"}}'
    told = cost(f"  %a = {A} parameter(0)\n  ROOT %r = {A} add(%a, %a), backend_config={config}")
    assert told.seconds == pytest.approx(1e-3)
    assert told.estimated
    assert told.kind == "compute"


@pytest.mark.parametrize("micros, seconds", [(1000, 3 * A_BYTES / HBM), (0.1, 1e-7)])
def test_at_the_bandwidth_elementwise_work_takes_its_bytes_or_its_cycles(
    micros: float, seconds: float
) -> None:
    config = f'{{"window_config":{{"estimated_cycles":"{round(micros * 1750)}"}}}}'
    body = f"  %a = {A} parameter(0)\n  ROOT %r = {A} add(%a, %a), backend_config={config}"
    assert cost(body, elementwise="bandwidth").seconds == pytest.approx(seconds)
    assert cost(body).seconds == pytest.approx(micros * 1e-6)


def test_a_dot_that_names_a_dimension_beyond_its_operand_s_is_refused() -> None:
    body = (
        "  %a = f32[8,4]{1,0} parameter(0)\n  %b = f32[4,2]{1,0} parameter(1)\n"
        "  ROOT %c = f32[8,2]{1,0} dot(%a, %b), lhs_contracting_dims={7}, rhs_contracting_dims={0}"
    )
    with pytest.raises(ValueError, match="a dot names dimension 7 of an operand with 2"):
        cost(body, GPU)


def test_at_the_bandwidth_a_matmul_takes_its_cycles() -> None:
    body = (
        "  %a = bf16[512,1024]{1,0} parameter(0)\n  %b = bf16[1024,256]{1,0} parameter(1)\n"
        "  ROOT %c = bf16[512,256]{1,0} convolution(%a, %b), dim_labels=bf_io->bf, "
        'backend_config={"window_config":{"estimated_cycles":"1750000"}}'
    )
    assert cost(body, elementwise="bandwidth").seconds == pytest.approx(1e-3)


def test_cycles_mean_nothing_on_hardware_without_a_clock() -> None:
    config = '{"window_config":{"estimated_cycles":"1750000"}}'
    told = cost(f"  %a = {A} parameter(0)\n  ROOT %r = {A} add(%a, %a), backend_config={config}", GPU)
    assert told.seconds == pytest.approx(KERNEL_S + 3 * A_BYTES / GPU.hbm_bytes_per_s)


def test_a_copy_without_an_estimate_reads_and_writes_main_memory() -> None:
    told = cost(f"  %a = {A} parameter(0)\n  ROOT %r = {A} copy(%a)")
    assert told.seconds == pytest.approx(2 * A_BYTES / HBM)
    assert (told.kind, told.estimated) == ("copy", False)


def test_what_stays_in_vmem_moves_at_its_speed() -> None:
    told = cost(f"  %a = {IN_VMEM} parameter(0)\n  ROOT %r = {IN_VMEM} copy(%a)")
    assert told.seconds == pytest.approx(2 * A_BYTES / HBM / VMEM_SPEED)


def test_from_vmem_to_main_memory_only_the_write_counts() -> None:
    told = cost(f"  %a = {IN_VMEM} parameter(0)\n  ROOT %r = {A} copy(%a)")
    assert told.seconds == pytest.approx(A_BYTES / HBM)


def test_an_update_in_place_costs_the_update() -> None:
    told = cost(
        f"  %a = {A} parameter(0)\n  %u = bf16[64,1024]{{1,0}} parameter(1)\n  %i = s32[] parameter(2)\n"
        f"  ROOT %r = {A} dynamic-update-slice(%a, %u, %i, %i)"
    )
    assert told.seconds == pytest.approx((2 * 2 * 64 * 1024 + 8) / HBM)


def test_a_slice_costs_what_it_returns() -> None:
    told = cost(
        f"  %a = {A} parameter(0)\n  ROOT %r = bf16[64,1024]{{1,0}} slice(%a), slice={{[0:64], [0:1024]}}"
    )
    assert told.seconds == pytest.approx(2 * 2 * 64 * 1024 / HBM)


def test_what_a_fusion_reads_twice_it_fetches_once() -> None:
    fused = f"""%fused {{
  %p = {A} parameter(0)
  %n = {A} negate(%p)
  ROOT %m = {A} multiply(%p, %n)
}}
"""
    told = cost(f"  %a = {A} parameter(0)\n  ROOT %f = {A} fusion(%a), kind=kLoop, calls=%fused", fused=fused)
    elsewhere = cost(f"  %a = {A} parameter(0)\n  ROOT %f = {A} negate(%a)")
    assert told.seconds == pytest.approx(elsewhere.seconds), "read and written once"


def test_a_fusion_that_updates_in_place_a_slice_of_another_value() -> None:
    fused = f"""%fused {{
  %p = {A} parameter(0)
  %q = {A} parameter(1)
  %i = s32[] parameter(2)
  %s = bf16[64,1024]{{1,0}} dynamic-slice(%q, %i, %i), dynamic_slice_sizes={{64,1024}}
  %n = bf16[64,1024]{{1,0}} negate(%s)
  ROOT %d = {A} dynamic-update-slice(%p, %n, %i, %i)
}}
"""
    told = cost(
        f"  %a = {A} parameter(0)\n  %b = {A} parameter(1)\n  %i = s32[] parameter(2)\n"
        f"  ROOT %f = {A} fusion(%a, %b, %i), kind=kLoop, calls=%fused",
        fused=fused,
    )
    assert told.seconds == pytest.approx(2 * 2 * 64 * 1024 / HBM, rel=1e-3), "a slice read, an update written"
    assert told.does == "negate"


@pytest.mark.parametrize("opcode", ["bitcast", "tuple", "get-tuple-element", "opt-barrier"])
def test_what_moves_nothing_is_free(opcode: str) -> None:
    result = f"({A})" if opcode == "tuple" else A
    operand = f"({A})" if opcode == "get-tuple-element" else A
    suffix = ", index=0" if opcode == "get-tuple-element" else ""
    assert cost(f"  %a = {operand} parameter(0)\n  ROOT %r = {result} {opcode}(%a){suffix}").seconds == 0


def test_an_uninitialised_buffer_is_free() -> None:
    assert cost(f'  ROOT %r = {A} custom-call(), custom_call_target="AllocateBuffer"').seconds == 0


def test_a_register_s_worth_is_free_and_more_is_not() -> None:
    def added(size: int) -> float:
        shape = f"f32[{size}]{{0}}"
        return cost(f"  %a = {shape} parameter(0)\n  ROOT %r = {shape} add(%a, %a)").seconds

    assert added(TINY_BYTES // 4) == 0
    assert added(TINY_BYTES // 4 + 1) > 0


@pytest.mark.parametrize("name", ["h100", "cpu"])
def test_what_little_is_reduced_from_much_reads_all_of_it(name: str) -> None:
    hardware = by_name(name)
    added = (
        "%fused {\n  %p = f32[] parameter(0)\n  %q = f32[] parameter(1)\n  ROOT %s = f32[] add(%p, %q)\n}\n"
    )
    told = cost(
        "  %a = f32[268435456]{0} parameter(0)\n  %z = f32[] constant(0)\n"
        "  ROOT %r = f32[] reduce(%a, %z), dimensions={0}, to_apply=%fused",
        hardware,
        fused=added,
    )
    assert told.seconds == pytest.approx(2**30 / hardware.hbm_bytes_per_s, rel=0.05)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_dot_of_two_types_multiplies_in_the_wider_and_reads_each_as_it_is(swapped: bool) -> None:
    left, right = ("bf16", "s8") if swapped else ("s8", "bf16")
    told = cost(
        f"  %a = {left}[512,512]{{1,0}} parameter(0)\n  %b = {right}[512,512]{{1,0}} parameter(1)\n"
        "  ROOT %r = bf16[512,512]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        GPU,
    )
    narrow = {"rhs_dtype" if swapped else "lhs_dtype": "int8"}
    expected = Matmul(m=512, k=512, n=512, dtype="bfloat16", **narrow)  # type: ignore[arg-type]
    assert told.seconds == pytest.approx(matmul_s(expected, GPU))


def test_a_cublas_call_is_the_matmul_of_its_dimension_numbers() -> None:
    numbers = (
        '{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],'
        '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}'
    )
    told = cost(
        "  %a = bf16[4,512,1024]{2,1,0} parameter(0)\n  %b = bf16[4,1024,256]{2,1,0} parameter(1)\n"
        "  ROOT %r = (f32[4,512,256]{2,1,0}, s8[4096]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul", '
        f'backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{numbers}}}}}',
        GPU,
    )
    expected = Matmul(batch=4, m=512, k=1024, n=256, dtype="bfloat16", out_dtype="float32")
    assert told.seconds == pytest.approx(matmul_s(expected, GPU))
    assert told.kind == "matmul"


def test_a_cublas_call_that_reads_a_slice_is_the_matmul_of_the_slice() -> None:
    """XLA:GPU fuses the two where the slice lies together."""
    numbers = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}'
    called = (
        'custom_call_target="__cublas$lt$matmul", '
        f'backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{numbers}}}}}'
    )
    fused = f"""%fused {{
  %p = bf16[4096,512]{{1,0}} parameter(0)
  %q = bf16[1024,512]{{1,0}} parameter(1)
  %s = bf16[256,512]{{1,0}} slice(%p), slice={{[256:512], [0:512]}}
  ROOT %d = (bf16[1024,256]{{1,0}}, s8[4096]{{0}}) custom-call(%q, %s), {called}
}}
"""
    told = cost(
        "  %a = bf16[4096,512]{1,0} parameter(0)\n  %b = bf16[1024,512]{1,0} parameter(1)\n"
        "  ROOT %f = (bf16[1024,256]{1,0}, s8[4096]{0}) fusion(%a, %b), kind=kCustom, calls=%fused",
        GPU,
        fused=fused,
    )
    assert told.kind == "matmul"
    expected = Matmul(m=1024, k=512, n=256, dtype="bfloat16")
    assert told.seconds == pytest.approx(matmul_s(expected, GPU))


def test_a_fusion_around_a_dot_is_a_matmul() -> None:
    fused = """%fused {
  %p = f32[128,512]{1,0} parameter(0)
  %q = f32[256,512]{1,0} parameter(1)
  ROOT %d = f32[128,256]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
    told = cost(
        "  %a = f32[128,512]{1,0} parameter(0)\n  %b = f32[256,512]{1,0} parameter(1)\n"
        "  ROOT %f = f32[128,256]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused",
        by_name("cpu"),
        fused=fused,
    )
    expected = Matmul(m=128, k=512, n=256, dtype="float32")
    assert told.seconds == pytest.approx(matmul_s(expected, by_name("cpu")))
    assert (told.kind, told.does) == ("matmul", "dot")


def test_a_convolution_without_cycles_contracts_its_kernel_s_input_features() -> None:
    told = cost(
        "  %a = bf16[512,1024]{1,0} parameter(0)\n  %b = bf16[1024,256]{1,0} parameter(1)\n"
        "  ROOT %c = bf16[512,256]{1,0} convolution(%a, %b), dim_labels=bf_io->bf"
    )
    assert told.seconds == pytest.approx(matmul_s(Matmul(m=512, k=1024, n=256), TPU))


def test_a_pallas_kernel_takes_its_author_s_estimate() -> None:
    config = '{"custom_call_config":{"cost_estimate":{"flops":"0","bytes_accessed":"27650000"}}}'
    told = cost(
        f'  %a = {A} parameter(0)\n  ROOT %r = {A} custom-call(%a), custom_call_target="tpu_custom_call", '
        f"backend_config={config}"
    )
    assert told.seconds == pytest.approx(1e-5)


def test_an_asynchronous_copy_passes_main_memory_once_or_twice() -> None:
    def between(target: str) -> float:
        return copy_s(
            f"  %a = {A} parameter(0)\n  %s = ({target}, {A}, u32[]{{:S(2)}}) copy-start(%a)\n"
            f"  ROOT %d = {target} copy-done(%s)"
        )

    assert between(IN_VMEM) == pytest.approx(A_BYTES / HBM)
    assert between(A) == pytest.approx(2 * A_BYTES / HBM)


def test_an_asynchronous_slice_copies_the_slice() -> None:
    piece = "bf16[64,1024]{1,0:T(8,128)(2,1)S(1)}"
    seconds = copy_s(
        f"  %a = {A} parameter(0)\n  %s = (({A}), {piece}, s32[]{{:S(2)}}) slice-start(%a), "
        f"slice={{[0:64], [0:1024]}}\n  ROOT %d = {piece} slice-done(%s)"
    )
    assert seconds == pytest.approx(2 * 64 * 1024 / HBM)


@pytest.mark.parametrize(("space", "sides"), [("", 2), ("S(5)", 1)])
def test_an_asynchronous_update_copies_what_is_updated(space: str, sides: int) -> None:
    """As of activations that are kept in the host's memory: the buffer of all layers stays where it is."""
    buffer, update = f"bf16[512,1024]{{1,0:T(8,128)(2,1){space}}}", "bf16[1,1024]{1,0:T(8,128)(2,1)}"
    seconds = copy_s(
        f"  %a = {buffer} parameter(0)\n  %u = {update} parameter(1)\n  %z = s32[] constant(0)\n"
        f"  %s = (({buffer}, {update}, s32[], s32[]), {buffer}, u32[]) "
        f"dynamic-update-slice-start(%a, %u, %z, %z)\n  ROOT %d = {buffer} dynamic-update-slice-done(%s)"
    )
    assert seconds == pytest.approx(sides * 2 * 1024 / HBM)
