"""How much of a ceiling kernels reach: the share of bandwidth or matrix rate that one gets to, and
the time it takes to start and end. Defaults only, each with the measurement behind it; where a step
was divided, what it reached there stands in their place (gains.py scales what was measured).

    reach = product_reach("int8", "bf16", on_gpu=True, fused=True)
    seconds = num_bytes / (reach.bandwidth * ceiling) + reach.fixed_s
"""

from __future__ import annotations

from typing import NamedTuple


class Reach(NamedTuple):
    bandwidth: float  # share of the read bandwidth
    matrix: float  # share of the matrix rate
    fixed_s: float  # start and end of one kernel, beyond what its bytes take


# H200, batch 1 of an 8B shape, 2026-11-15 (results/LOG.md): a layer's four products take 107 µs in
# bf16, 62 in int8, 61 in fp8 and 43 in int4-g128, where their bytes alone take 100, 50, 50 and 26.
# Steps of many tokens: 0.88 of the bf16 rate (44,181 tok/s); 0.82 of the fp8 rate and
# what rounding inputs takes: 1.58 times bf16's for prompts, 1.24 for 512 requests (2026-11-18).
GPU_PRODUCT = {
    "plain": Reach(1.0, 0.88, 1.9e-6),
    # By cuBLAS, with norms and activations apart: what leaves 9.5 and 4.8 ms for a step as a graph,
    # 0.7 of them in other kernels, gaps and the host (2026-11-15).
    "fp32": Reach(0.82, 0.9, 2.5e-6),
    "fp16": Reach(0.96, 0.88, 2.5e-6),
    "int8": Reach(1.0, 0.84, 3.1e-6),
    "fp8": Reach(1.0, 0.82, 2.9e-6),
    "int4": Reach(1.0, 0.84, 4.3e-6),
    "w8a8-int8": Reach(1.0, 0.45, 6.0e-6),  # 25,260 tok/s of prefill: scaling in separate kernels
}
# What is left of it by Triton's rules of thumb, for a layer's four products of one row: as the
# H200's choices list them for bf16 (111 µs instead of 106) and fp8 (73 instead of 64); int8 and
# int4 by the speed before they were tuned and in CUDA C++ (349 and 417 tok/s, results/LOG.md).
UNTUNED = {"plain": 0.96, "int8": 0.85, "fp8": 0.87, "int4": 0.78, "w8a8-int8": 1.0}
# Of a product whose inputs are rounded in a kernel of their own, as they are from 64 rows on.
# Fitted, together with fp8's share of the matrix rate, to the gains of two climbs of 8B shapes on
# the H200 (2026-11-18); that it is the rounding which takes it was not measured.
ROUNDING_INPUTS_S = 10e-6
# Share of the bandwidth at which codes are written out as numbers: 128 tokens of an 8B shape took
# 14.0 ms in int4-g128, 12.8 of them in its matrices, and 5.9 by copies (a climb, 2026-11-17).
DECODING = 0.55
# Xeon with AMX and VNNI, 2 threads, 2026-11-15: `demo` at batch 1 in fp32 and bf16 makes 34 and 56
# tok/s, in int8 1.33 to 1.5 times bf16's, in int4-g64 1.83 times since its digits are multiplied as
# integers, which are for x in bf16. Without our kernels torch multiplies a row in bf16 slower than
# in fp32.
CPU_PRODUCT = {
    "plain": Reach(0.6, 0.7, 3e-6),
    "fp16": Reach(0.6, 0.7, 3e-6),
    "fp32": Reach(0.6, 0.8, 3e-6),
    "int8": Reach(0.6, 0.5, 5e-6),
    "fp8": Reach(0.3, 0.3, 5e-6),
    "int4": Reach(0.6, 0.5, 5e-6),
    "w8a8-int8": Reach(0.5, 0.5, 8e-6),
}
CPU_INT4_OF_FP32 = Reach(0.45, 0.5, 5e-6)  # unpacked to fp32
CPU_BF16_BY_TORCH = Reach(0.2, 0.7, 8e-6)
DEQUANTIZED = 0.15  # share of the bandwidth where a reference writes the weight back first

# Decode attention over 64 x 8192 tokens reads at 0.97 of the bandwidth in bf16 and 0.85 in fp8; one
# short sequence takes 8 µs. The plain loop's attention copies keys to fp32 and repeats them.
GPU_ATTENTION, PLAIN_ATTENTION = Reach(0.9, 0.55, 6e-6), Reach(0.12, 0.08, 25e-6)
OF_CODES = 0.88  # of what is reached over pages of numbers, over pages of codes
# On a CPU pages of codes are written and read by the references: `demo` with weights in int8 fell
# to 0.57 of its speed (a climb, 2026-11-15).
CPU_CODES_S = 180e-6
CPU_ATTENTION, CPU_PLAIN_ATTENTION = Reach(0.4, 0.2, 10e-6), Reach(0.12, 0.1, 60e-6)


class LinkSpeed(NamedTuple):
    """Between ranks."""

    bytes_per_s: float  # each way
    fixed_s: float  # of one sum or gather, however short


# Two ranks on two busy cores, through gloo: 0.5 ms for 16 KB, 50 for 34 MB (2026-11-16).
CPU_LINK = LinkSpeed(0.7e9, 500e-6)
# Not measured, for want of two GPUs: a share of what the datasheet has, or PCIe 4's where it has
# nothing, and a usual time for a short sum. Ratios alone are made of them, except where ranks are
# added.
GPU_LINK_SHARE, PCIE_BYTES_PER_S, GPU_SUM_S = 0.7, 25e9, 12e-6


def link_reach(both_ways: float | None, *, on_gpu: bool) -> LinkSpeed:
    """`both_ways`: of the link between GPUs, as datasheets have it; None: there is none."""
    if not on_gpu:
        return CPU_LINK
    one_way = PCIE_BYTES_PER_S if both_ways is None else both_ways / 2
    return LinkSpeed(GPU_LINK_SHARE * one_way, GPU_SUM_S)


def product_reach(scheme: str | None, dtype: str, *, on_gpu: bool, fused: bool) -> Reach:
    """Of a matrix product with weights in this scheme (None: plain)."""
    table = GPU_PRODUCT if on_gpu else CPU_PRODUCT
    if scheme is None:
        if not on_gpu and not fused and dtype != "fp32":
            return CPU_BF16_BY_TORCH
        return table.get(dtype, table["plain"])
    result = table[_family(scheme)]
    if not on_gpu and dtype == "fp32" and _family(scheme) == "int4":
        result = CPU_INT4_OF_FP32
    return result if fused or on_gpu else result._replace(bandwidth=DEQUANTIZED)


def untuned_share(scheme: str | None) -> float:
    """Of a GPU's speed at a product of few rows, where nothing that was measured is used."""
    return UNTUNED["plain" if scheme is None else _family(scheme)]


def _family(scheme: str) -> str:
    return next(name for name in ("w8a8-int8", "int8", "fp8", "int4") if scheme.startswith(name))


def attention_reach(*, on_gpu: bool, fused: bool, codes: bool = False) -> Reach:
    """`codes`: whether pages hold 8-bit codes."""
    if on_gpu:
        result = GPU_ATTENTION if fused else PLAIN_ATTENTION
    else:
        result = CPU_ATTENTION if fused else CPU_PLAIN_ATTENTION
    if codes:
        more_s = 0.0 if on_gpu else CPU_CODES_S
        result = Reach(result.bandwidth * OF_CODES, result.matrix, result.fixed_s + more_s)
    return result
