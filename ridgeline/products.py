"""`linear`: torch's matrix product, computed through fp32 where torch has no fast kernel for the
dtype on this CPU.

On a processor without bf16 instructions (ARM before 8.6, x86 before Cooper Lake) torch falls back
to a scalar loop, 250 times slower than fp32 (Neoverse-N1, 2 threads, 256 rows, 2026-11-16), or with
AVX-512 converts on the way, 3 times slower (Cascade Lake, likewise), and computes results twice.
There x and the weight are converted to fp32 a piece at a time, in memory that is kept (`scratch`),
and each result is rounded once.

    y_MO = linear(x_MD, weight_OD, bias_O)
    dtype = product_dtype(x.dtype, x.device)    # for products without a weight
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

PIECE = 1 << 20  # numbers of x, of a weight and of a result that are in fp32 at once
IS_ARM = platform.machine() in ("aarch64", "arm64")
HALF_DTYPES = (torch.bfloat16, torch.float16)
_own = threading.local()


@cache
def _slow_on_cpu(dtype: torch.dtype) -> bool:
    if dtype not in HALF_DTYPES:
        return False
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported() or _converts_bf16()
    # torch has products in fp16 for ARM, but those of more than one row take six times fp32's time.
    return IS_ARM or not torch.ops.mkldnn._is_mkldnn_fp16_supported()


@cache
def _converts_bf16() -> bool:
    """AVX-512 without instructions for bf16, which oneDNN counts as support."""
    own = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_avx512_supported() and not own


def few_rows_are_slow(dtype: torch.dtype) -> bool:
    """Whether torch's products of a few rows, but more than one, are far below this CPU's speed. On
    ARM they are in fp32 too: four rows take six times as long as one.
    """
    return IS_ARM or _slow_on_cpu(dtype)


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which numbers of this dtype are multiplied."""
    return torch.float32 if device.type == "cpu" and _slow_on_cpu(dtype) else dtype


def linear(
    x: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`x @ weightᵀ + bias` in x's dtype; `out` is for a plain product without gradients."""
    assert out is None or bias_O is None, "a plain product"
    if x.is_cpu:
        is_row = x.numel() == x.shape[-1]
        if _slow_on_cpu(x.dtype) and not (is_row and _converts_bf16()):  # a row is only read once
            return _through_fp32(x, weight_OD, bias_O, out)
        if IS_ARM and x.dtype == torch.float32:
            return _without_onednn(x, weight_OD, bias_O, out)
    return _product(x, weight_OD, bias_O, out)


def product(left_MK: Tensor, right_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`left @ right + bias` in left's dtype, for both passes of training; autograd sees none of
    it.
    """
    dtype = product_dtype(left_MK.dtype, left_MK.device)
    with best_products(left_MK):
        if dtype != left_MK.dtype:
            wide = torch.mm(left_MK.to(dtype), right_KN.to(dtype))
            return (wide if bias_N is None else wide.add_(bias_N)).to(left_MK.dtype)
        if bias_N is None:
            return torch.mm(left_MK, right_KN)
        return torch.addmm(bias_N, left_MK, right_KN)


def add_product(total_MN: Tensor, left_MK: Tensor, right_KN: Tensor) -> None:
    """`total += left @ right`, summed in total's fp32."""
    with best_products(left_MK):
        if total_MN.dtype == left_MK.dtype:
            total_MN.addmm_(left_MK, right_KN)
        elif total_MN.is_cuda:
            torch.addmm(total_MN, left_MK, right_KN, out_dtype=total_MN.dtype, out=total_MN)
        else:  # a CPU has no products with another dtype's result
            total_MN.addmm_(left_MK.to(total_MN.dtype), right_KN.to(total_MN.dtype))


@contextmanager
def best_products(x: Tensor) -> Iterator[None]:
    """torch's own products without oneDNN where that is slower (see `_without_onednn`)."""
    if not (IS_ARM and x.is_cpu):
        yield
        return
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _product(x: Tensor, weight_OD: Tensor, bias_O: Tensor | None, out: Tensor | None) -> Tensor:
    if out is None:
        return functional.linear(x, weight_OD, bias_O)
    return torch.matmul(x, weight_OD.t(), out=out)


def _without_onednn(
    x: Tensor, weight_OD: Tensor, bias_O: Tensor | None, out: Tensor | None
) -> Tensor:
    """On ARM it makes an fp32 result twice, and is no faster than BLAS (Neoverse-N1, 2026-11-16: as
    fast up to 4 rows, 0.82 times at 16, 0.95 at 256).
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return _product(x, weight_OD, bias_O, out)
    finally:
        torch._C._set_mkldnn_enabled(before)


def _through_fp32(
    x: Tensor, weight_OD: Tensor, bias_O: Tensor | None, out: Tensor | None
) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or weight_OD.requires_grad):
        bias = None if bias_O is None else bias_O.float()
        return linear(x.float(), weight_OD.float(), bias).to(x.dtype)
    if out is None:
        out = x.new_empty(*x.shape[:-1], weight_OD.shape[0])
    _in_pieces(x, weight_OD, out)
    return out if bias_O is None else out.add_(bias_O)


def _in_pieces(x: Tensor, weight_OD: Tensor, out: Tensor) -> None:
    num_outputs, depth = weight_OD.shape
    x_MD, out_MO = x.reshape(-1, depth), out.view(-1, num_outputs)
    a_piece = max(1, PIECE // depth)
    num_rows = min(len(x_MD), a_piece)
    step = min(num_outputs, a_piece, PIECE // max(1, num_rows))
    for first in range(0, len(x_MD), a_piece):
        rows_MD = _widened("x", x_MD[first : first + a_piece])
        for start in range(0, num_outputs, step):
            piece_OD = _widened("weight", weight_OD[start : start + step])
            result = scratch("result", len(rows_MD) * len(piece_OD)).view(len(rows_MD), -1)
            linear(rows_MD, piece_OD, out=result)
            out_MO[first : first + a_piece, start : start + step] = result


def _widened(use: str, rows: Tensor) -> Tensor:
    return scratch(use, rows.numel()).view(rows.shape).copy_(rows)


def scratch(use: str, count: int) -> Tensor:
    """This thread's memory, kept for the next product; memory plans count it as workspace."""
    held: Tensor | None = getattr(_own, use, None)
    if held is None or held.numel() < count:
        with torch.inference_mode(False):
            held = torch.empty(max(PIECE, count))
        setattr(_own, use, held)
    return held[:count]
