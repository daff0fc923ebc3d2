"""The measurements: one function per ceiling, each about a second. All timing is done by
`ridgeline.timing`.

Data is random: constant data draws less power, and a GPU then runs faster than on real work.
Buffers are several times the largest cache. Something a device cannot do raises `NotSupportedHere`,
which is cached; any other failure (say, out of memory) is reported and tried again next time.

    PROBES["matrix_bf16"](detect())     # Ceiling(value=7.87e14, unit="FLOP/s", …)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ridgeline.hardware.detection import available_memory
from ridgeline.hardware.facts import MEASURED, Ceiling, Hardware
from ridgeline.products import linear, product_dtype
from ridgeline.timing import Timing, measure, time_graph, time_host

GIB = 1 << 30
CPU_SIZES = (
    512,
    1024,
    2048,
)  # the best counts: which size is fastest differs between CPUs and dtypes
CPU_MATRIX_LIMIT_S = 0.3  # a slower product than this and no larger one is tried
LAUNCHES = 500  # fewer than a launch queue holds, so that the host never waits inside a sample
REST_S = 0.3  # between matrix measurements on a GPU: its power average falls back
BURST_S = 0.04
TRANSFER_BYTES = 256 << 20


class NotSupportedHere(Exception):  # noqa: N818  (an answer, not an error)
    """This device or torch build cannot do this at all; the message is the reason shown."""


def _seconds(hardware: Hardware, timing: Timing) -> float:
    """A GPU's median. A CPU's best: the rest is other processes' work, and a ceiling must not fall
    because the machine was busy."""
    return timing.min_s if hardware.device_type == "cpu" else timing.median_s


def _rate(hardware: Hardware, key: str, work: float, timing: Timing) -> Ceiling:
    rate = work / _seconds(hardware, timing)
    return Ceiling(rate, MEASURED[key][1], "measured", timing.spread)


def _duration(hardware: Hardware, key: str, timing: Timing, num_steps: int = 1) -> Ceiling:
    step_s = _seconds(hardware, timing) / num_steps
    return Ceiling(step_s, MEASURED[key][1], "measured", timing.spread)


# Memory


def buffer_bytes(hardware: Hardware) -> int:
    """Several times the largest cache (torch does not report AMD's 256 MiB), in at most an eighth
    of free memory. A CPU reads its buffer in order, so nothing of it survives in a cache half as
    large.
    """
    is_cpu = hardware.device_type == "cpu"
    least, factor = (GIB // 2, 2) if is_cpu else (2 * GIB, 8)
    wanted = max(least, factor * (hardware.cache_bytes or 0))
    return min(wanted, available_memory(hardware.device) // 8) // 4096 * 4096


def _random_floats(num_bytes: int, device: str) -> torch.Tensor:
    """Normal fp32 values; drawn once and repeated, because a CPU draws a gigabyte in seconds."""
    piece = torch.randn(1 << 20, device=device)
    buffer = torch.empty(num_bytes // 4, device=device)
    for chunk in buffer.split(piece.numel()):
        chunk.copy_(piece[: chunk.numel()])
    return buffer


def copy_bandwidth(hardware: Hardware) -> Ceiling:
    source = _random_floats(buffer_bytes(hardware), hardware.device)
    target = torch.empty_like(source)
    timing = measure(lambda: target.copy_(source), hardware.device, target_s=0.4)
    return _rate(hardware, "copy_bandwidth", 2 * source.nbytes, timing)


def read_bandwidth(hardware: Hardware) -> Ceiling:
    """The faster of a sum and, on a CPU, a matrix-vector product, which prefetches better."""
    buffer = _random_floats(buffer_bytes(hardware), hardware.device)
    readers: list[Callable[[], object]] = [buffer.sum]
    if hardware.device_type == "cpu":
        matrix, vector = buffer.view(-1, 1024), torch.randn(1024)
        readers.append(lambda: torch.mv(matrix, vector))
    timings = [measure(reader, hardware.device, target_s=0.3) for reader in readers]
    best = min(timings, key=lambda timing: _seconds(hardware, timing))
    return _rate(hardware, "read_bandwidth", buffer.nbytes, best)


# Matrix rates


def matrix(
    key: str, product: Callable[[Hardware, int], Callable[[], object]], hardware: Hardware
) -> Ceiling:
    """Rate of square products; `product(hardware, size)` returns the call to time. On a GPU a short
    burst after a rest: the rate before the power limit lowers the clocks, which no kernel exceeds.
    An H200 falls from 787 to 673 TFLOP/s in bf16 within a second of continuous products
    (2026-11-15): that is `matrix_bf16_sustained`.
    """
    if hardware.device_type != "cpu":
        size = _gpu_size(hardware)
        call = product(hardware, size)
        time.sleep(REST_S)
        timing = measure(call, hardware.device, target_s=BURST_S, warmup_s=0.0)
        return _rate(hardware, key, 2.0 * size**3, timing)
    best: Ceiling | None = None
    for size in CPU_SIZES:
        timing = time_host(product(hardware, size), target_s=0.25, min_samples=3)
        rate = _rate(hardware, key, 2.0 * size**3, timing)
        best = rate if best is None or rate.value > best.value else best
        if timing.median_s > CPU_MATRIX_LIMIT_S / 8:  # the next size has eight times the work
            break
    assert best is not None
    return best


def matrix_bf16_sustained(hardware: Hardware) -> Ceiling:
    """The rate after a second of continuous products."""
    _need_gpu(hardware, "not told apart on a CPU")
    size = _gpu_size(hardware)
    product = _dense(torch.bfloat16, hardware, size)
    timing = measure(product, hardware.device, target_s=0.6, warmup_s=0.4)
    return _rate(hardware, "matrix_bf16_sustained", 2.0 * size**3, timing)


def _gpu_size(hardware: Hardware) -> int:
    return 8192 if available_memory(hardware.device) > 4 * GIB else 4096


def _dense(dtype: torch.dtype, hardware: Hardware, size: int) -> Callable[[], object]:
    a = torch.randn(size, size, device=hardware.device).to(dtype)
    b = torch.randn(size, size, device=hardware.device).to(dtype)
    out = torch.empty_like(a)
    if product_dtype(dtype, a.device) != dtype:
        return lambda: linear(a, b, out=out)
    return lambda: torch.mm(a, b, out=out)


def _int8(hardware: Hardware, size: int) -> Callable[[], object]:
    a, b = (
        torch.randint(-128, 128, (size, size), dtype=torch.int8, device=hardware.device)
        for _ in range(2)
    )
    return lambda: torch._int_mm(a, b.t())


def _fp8(dtype: torch.dtype, hardware: Hardware, size: int) -> Callable[[], object]:
    """One scale per tensor and fp32 accumulation, torch's default."""
    a, b = (torch.randn(size, size, device=hardware.device).to(dtype) for _ in range(2))
    one = torch.ones((), device=hardware.device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


@contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    """torch's switch between full fp32 and tf32, put back afterwards."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before


def matrix_fp32(hardware: Hardware) -> Ceiling:
    with _fp32_precision("ieee"):
        return matrix("matrix_fp32", partial(_dense, torch.float32), hardware)


def matrix_tf32(hardware: Hardware) -> Ceiling:
    if not _compute_capability(hardware) >= (8, 0) and hardware.architecture != "gfx942":
        raise NotSupportedHere("not supported")
    with _fp32_precision("tf32"):
        return matrix("matrix_tf32", partial(_dense, torch.float32), hardware)


def matrix_bf16(hardware: Hardware) -> Ceiling:
    if hardware.device_type == "cuda" and _compute_capability(hardware) < (8, 0):
        raise NotSupportedHere("not supported")  # torch would emulate it
    return matrix("matrix_bf16", partial(_dense, torch.bfloat16), hardware)


def matrix_fp8(hardware: Hardware) -> Ceiling:
    dtype = fp8_dtype(hardware)
    if dtype is None:
        raise NotSupportedHere("not supported")
    return matrix("matrix_fp8", partial(_fp8, dtype), hardware)


def fp8_dtype(hardware: Hardware) -> torch.dtype | None:
    """The 8-bit float that the matrix units take; gfx942's has no negative zero."""
    if hardware.architecture == "gfx942":
        return torch.float8_e4m3fnuz
    if _compute_capability(hardware) >= (8, 9) or hardware.architecture.startswith(
        ("gfx95", "gfx12")
    ):
        return torch.float8_e4m3fn
    return None


def _compute_capability(hardware: Hardware) -> tuple[int, int]:
    """NVIDIA's (major, minor); (0, 0) for anything else."""
    if hardware.device_type != "cuda":
        return (0, 0)
    digits = hardware.architecture.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])


# Launches and the host link


def eager_launch(hardware: Hardware) -> Ceiling:
    """Cost of one tiny torch operation in a long stream: on a GPU, the host's per kernel."""
    x = torch.ones(1, device=hardware.device)

    def stream() -> None:
        for _ in range(LAUNCHES):
            x.mul_(1.0)

    timing = time_host(stream, device=hardware.device, target_s=0.3)
    return _duration(hardware, "eager_launch", timing, LAUNCHES)


def graph_step(hardware: Hardware) -> Ceiling:
    """From the start of one tiny kernel to the next when a captured graph is replayed."""
    _need_gpu(hardware, "no graphs on a CPU")
    x = torch.ones(1, device=hardware.device)
    timing = time_graph(
        lambda: x.mul_(1.0), device=hardware.device, num_calls=LAUNCHES, target_s=0.3
    )
    return _duration(hardware, "graph_step", timing)


def host_to_device(key: str, pinned: bool, hardware: Hardware) -> Ceiling:
    _need_gpu(hardware, "no device memory")
    source = _random_floats(TRANSFER_BYTES, "cpu")
    source = source.pin_memory() if pinned else source
    target = torch.empty_like(source, device=hardware.device)
    # The clock, not events: a pageable copy is staged by the host, which events would miss.
    timing = time_host(
        lambda: target.copy_(source, non_blocking=pinned), device=hardware.device, target_s=0.3
    )
    return _rate(hardware, key, source.nbytes, timing)


def _need_gpu(hardware: Hardware, reason: str) -> None:
    if hardware.device_type == "cpu":
        raise NotSupportedHere(reason)


PROBES: dict[str, Callable[[Hardware], Ceiling]] = {
    "copy_bandwidth": copy_bandwidth,
    "read_bandwidth": read_bandwidth,
    "matrix_fp32": matrix_fp32,
    "matrix_tf32": matrix_tf32,
    "matrix_bf16": matrix_bf16,
    "matrix_bf16_sustained": matrix_bf16_sustained,
    "matrix_fp16": partial(matrix, "matrix_fp16", partial(_dense, torch.float16)),
    "matrix_fp8": matrix_fp8,
    "matrix_int8": partial(matrix, "matrix_int8", _int8),
    "eager_launch": eager_launch,
    "graph_step": graph_step,
    "h2d_pinned": partial(host_to_device, "h2d_pinned", True),
    "h2d_pageable": partial(host_to_device, "h2d_pageable", False),
}
