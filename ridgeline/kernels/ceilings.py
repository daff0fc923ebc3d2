"""The machine's ceilings, as everybody above the kernels measures them: torch's rates, and beside
them what our own kernels reach. The best counts, because a ceiling that something exceeds is none.

    hardware = measure(detect(), {"read_bandwidth", "matrix_bf16"})
    hardware.ceilings["matrix_bf16"].by       # "quantized_linear, 32 rows, int8 weights"

A CPU's products of few rows in integers beat torch's large ones in bf16 where the processor has no
bf16, and torch has hardly any int8 product for ARM. A GPU's ceilings are torch's alone: its large
products are the fastest there are, and our attention over pages read at most 1.02 times as fast as
torch's sum (H200, 2026-11-15).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ridgeline.formats.dtypes import parse_dtype
from ridgeline.formats.packing import pack_int4
from ridgeline.hardware import Ceiling, Hardware, ceilings
from ridgeline.hardware.facts import MEASURED
from ridgeline.hardware.probes import buffer_bytes
from ridgeline.kernels import host_library
from ridgeline.kernels.quantized_linear.cpu import HostProduct
from ridgeline.kernels.skinny_linear.cpu import skinny_linear
from ridgeline.progress import Progress
from ridgeline.timing import time_host

NUM_ROWS = (8, 32)  # of x: where our products of few rows are fastest
WEIGHT = (2048, 1024)  # outputs and depth: small enough for a cache, so that arithmetic is timed
READ_WEIGHT = (4096, 2048)  # repeated until no cache holds it
GROUP = 64
SAMPLE_S = 0.06  # for each product: there are ten

Product = Callable[[], object]


def measure(
    hardware: Hardware,
    only: Collection[str] | None = None,
    progress: Progress | None = None,
    refresh: bool = False,
) -> Hardware:
    """As hardware/ceilings.py, on a CPU with our kernels' rates beside torch's."""
    own = OWN_PROBES if hardware.device_type == "cpu" else ceilings.NO_PROBES
    return ceilings.measure(hardware, only, progress, refresh, own)


def matrix(name: str, hardware: Hardware) -> Ceiling:
    """The fastest of our products with x in a dtype ("bf16"), or in codes ("int8")."""
    _need_host_kernels()
    products = _codes() if name == "int8" else _products(parse_dtype(name))
    flops = 2.0 * WEIGHT[0] * WEIGHT[1]
    return max(
        (_rate(f"matrix_{name}", flops * rows, call, by) for by, rows, call in products),
        key=lambda ceiling: ceiling.value,
    )


def _products(dtype: torch.dtype) -> Iterator[tuple[str, int, Product]]:
    """Each with its name and the rows of x: plain weights, int8 and 4-bit ones."""
    plain_OD = torch.randn(WEIGHT).to(dtype)
    weights = {"int8": _int8_weight(WEIGHT), "int4": _int4_weight(dtype)}
    for rows in NUM_ROWS:
        x_MD = torch.randn(rows, WEIGHT[1]).to(dtype)
        yield f"skinny_linear, {rows} rows", rows, partial(skinny_linear, x_MD, plain_OD)
        for name, (codes, scale) in weights.items():
            product = HostProduct(WEIGHT[1], dtype, codes, scale)
            yield f"quantized_linear, {rows} rows, {name} weights", rows, partial(product, x_MD)


def _codes() -> Iterator[tuple[str, int, Product]]:
    """x is rounded to int8 on the way."""
    codes, scale = _int8_weight(WEIGHT)
    for dtype in (torch.bfloat16, torch.float32):
        product = HostProduct(WEIGHT[1], dtype, codes, scale, inputs=torch.int8)
        for rows in NUM_ROWS:
            x_MD = torch.randn(rows, WEIGHT[1]).to(dtype)
            yield f"quantized_linear, {rows} rows of codes", rows, partial(product, x_MD)


def _int8_weight(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(shape[0]) + 0.5


def _int4_weight(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes = pack_int4(torch.randint(0, 16, WEIGHT))
    return codes, (torch.rand(WEIGHT[1] // GROUP, WEIGHT[0]) + 0.5).to(dtype)


def read_bandwidth(hardware: Hardware) -> Ceiling:
    """A row times a weight that no cache holds."""
    _need_host_kernels()
    outputs, depth = READ_WEIGHT
    times = -(-buffer_bytes(hardware) // (outputs * depth))  # repeated: to draw it takes seconds
    x_MD = torch.randn(1, depth).bfloat16()
    piece, scale = _int8_weight(READ_WEIGHT)
    codes, scale = piece.repeat(times, 1), scale.repeat(times)
    coded = HostProduct(depth, torch.bfloat16, codes, scale)
    best = _rate("read_bandwidth", codes.nbytes, partial(coded, x_MD), "quantized_linear, 1 row")
    del coded, codes
    plain_OD = torch.randn(READ_WEIGHT).bfloat16().repeat(-(-times // 2), 1)
    call = partial(skinny_linear, x_MD, plain_OD)
    other = _rate("read_bandwidth", plain_OD.nbytes, call, "skinny_linear, 1 row")
    return max(best, other, key=lambda ceiling: ceiling.value)


def _rate(key: str, work: float, call: Product, by: str) -> Ceiling:
    """A CPU's best sample, as hardware/probes.py takes it."""
    timing = time_host(call, target_s=SAMPLE_S, min_samples=3, warmup_s=0.02)
    return Ceiling(work / timing.min_s, MEASURED[key][1], "measured", timing.spread, by)


def _need_host_kernels() -> None:
    if not host_library.prepare():
        raise RuntimeError("CPU kernels could not be built")  # not cached: it may be mended


OWN_PROBES: Mapping[str, ceilings.Probe] = {
    "read_bandwidth": read_bandwidth,
    **{f"matrix_{name}": partial(matrix, name) for name in ("fp32", "bf16", "fp16", "int8")},
}
