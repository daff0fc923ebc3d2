"""RMSNorm in Triton: one pass over memory, forward and backward.

Rows are contiguous in their last dim; the rows' own stride is free. A program holds whole rows in
registers (several short ones, or one of up to 65,536), so that x is read once whatever is asked
for: the sum with the residual, the norm, its 8-bit codes. tune_space.py says how rows are shared
out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.formats.scaling import LARGEST, SMALLEST_AMAX
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.rms_norm.tune_space import (
    RmsNormConfig,
    block_of,
    choose,
    num_backward,
    num_warps,
    tune_key,
)
from ridgeline.kernels.rows import as_rows, row_scale, to_codes
from ridgeline.kernels.targets import can_wait

MAX_COLUMNS = 65536


@triton.jit
def norm_tile(
    tile,
    gain,
    x_ptr,
    residual_ptr,
    out_ptr,
    hidden_ptr,
    scale_ptr,
    x_stride,
    residual_stride,
    num_rows,
    num_columns,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    EVEN: tl.constexpr,
    HINT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows from one end to the other. EVEN: no edge to mask."""
    READ: tl.constexpr = "" if HINT == "" else "evict_first"
    WRITE: tl.constexpr = "evict_first" if HINT == "both" else ""
    rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: offsets pass 2^31
    columns = tl.arange(0, BLOCK)
    keep = None if EVEN else (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    other = None if EVEN else 0.0
    # Without the hint, 8-bit outputs make the compiler give each thread 16 neighbours, and each
    # 16-byte load then uses half of the 32-byte sectors it touches.
    columns_8 = tl.max_contiguous(columns[None, :], [1, 8])
    x_ptrs = x_ptr + rows[:, None] * x_stride + columns_8
    x = tl.load(x_ptrs, mask=keep, other=other, eviction_policy=READ)
    h = x.to(tl.float32)  # [ROWS, BLOCK]
    place = rows[:, None] * num_columns + columns_8
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + rows[:, None] * residual_stride + columns_8
        residual = tl.load(residual_ptrs, mask=keep, other=other, eviction_policy=READ)
        h += residual.to(tl.float32)
        rounded = h.to(hidden_ptr.dtype.element_ty)  # what later layers see is what is normed here
        tl.store(hidden_ptr + place, rounded, mask=keep, eviction_policy=WRITE)
        h = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=1) / num_columns + eps)
    out = h * scale[:, None] * gain[None, :]
    if QUANTIZED:
        scales = row_scale(tl.max(tl.abs(out), axis=1), LARGEST, SMALLEST_AMAX)
        tl.store(scale_ptr + rows, scales, mask=rows < num_rows)
        out *= (1.0 / scales)[:, None]  # one division a row
        tl.store(
            out_ptr + place,
            to_codes(out, out_ptr.dtype.element_ty),
            mask=keep,
            eviction_policy=WRITE,
        )
    else:
        rounded = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, rounded, mask=keep, eviction_policy=WRITE)


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    hidden_ptr,
    scale_ptr,
    x_stride,
    residual_stride,
    num_rows,
    num_columns,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    EVEN: tl.constexpr,
    HINT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile a program, or with STAGES > 1 every num_programs-th, the next ones on their way."""
    columns = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # before any load: an optimizer may just have written the weight
    # The weight comes before the rows: after their sum its way would be waited for once more.
    if EVEN:
        weight = tl.load(weight_ptr + columns)
    else:
        weight = tl.load(weight_ptr + columns, mask=columns < num_columns, other=0.0)
    gain = weight.to(tl.float32) + offset  # fp32: bf16 would round 1 + weight to eight bits
    if STAGES == 1:
        norm_tile(
            tl.program_id(0), gain, x_ptr, residual_ptr, out_ptr, hidden_ptr, scale_ptr,
            x_stride, residual_stride, num_rows, num_columns, eps,
            HAS_RESIDUAL, QUANTIZED, LARGEST, SMALLEST_AMAX, EVEN, HINT, ROWS, BLOCK,
        )  # fmt: skip
    else:
        num_tiles = tl.cdiv(num_rows, ROWS)
        for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), num_stages=STAGES):
            norm_tile(
                tile, gain, x_ptr, residual_ptr, out_ptr, hidden_ptr, scale_ptr,
                x_stride, residual_stride, num_rows, num_columns, eps,
                HAS_RESIDUAL, QUANTIZED, LARGEST, SMALLEST_AMAX, EVEN, HINT, ROWS, BLOCK,
            )  # fmt: skip


def rms_norm(
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    offset: float = 0.0,
    residual_TD: Tensor | None = None,
    quantized: torch.dtype | None = None,
    config: RmsNormConfig | None = None,
    fixed: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """The launcher; arguments and results are reference.py's. With `fixed`, one way for any number
    of rows: a row's bits then do not depend on how many come with it.
    """
    rows_TD, shape = as_rows(x_TD), x_TD.shape
    num_rows, num_columns = rows_TD.shape
    _check(num_columns)
    out = torch.empty(shape, dtype=quantized or x_TD.dtype, device=x_TD.device)
    scale_T = hidden = rows_residual = None
    if quantized is not None:
        scale_T = torch.empty(shape[:-1], dtype=torch.float32, device=x_TD.device)
    if residual_TD is not None:
        rows_residual = as_rows(residual_TD)
        hidden = torch.empty(shape, dtype=x_TD.dtype, device=x_TD.device)
    target = target_of(x_TD)
    if config is None:
        key = tune_key(num_rows, num_columns, x_TD.dtype, residual_TD is not None, quantized)
        config = choose(None if fixed else key, num_columns, x_TD.device, target)
    num_tiles = triton.cdiv(num_rows, config.rows)
    waits = can_wait(target)
    options = {"launch_pdl": True} if waits else {}
    even_rows = config.rows == 1 if fixed else num_rows % config.rows == 0
    if num_rows:
        launch(
            rms_norm_kernel,
            (min(num_tiles, config.per_unit * target.num_units or num_tiles),),
            (
                rows_TD,
                rows_residual if rows_residual is not None else rows_TD,
                weight_D,
                out,
                hidden if hidden is not None else out,
                scale_T if scale_T is not None else out,
                rows_TD.stride(0),
                rows_residual.stride(0) if rows_residual is not None else 0,
                num_rows,
                num_columns,
                eps,
                offset,
            ),
            HAS_RESIDUAL=residual_TD is not None,
            QUANTIZED=quantized is not None,
            LARGEST=LARGEST[quantized] if quantized is not None else 1.0,
            SMALLEST_AMAX=SMALLEST_AMAX,
            EVEN=num_columns == block_of(num_columns) and even_rows,
            HINT=config.hint,
            ROWS=config.rows,
            BLOCK=block_of(num_columns),
            STAGES=config.num_stages,
            PDL=waits,
            num_warps=config.num_warps,
            options={**options, **({"enable_fp_fusion": False} if fixed else {})},
        )
    results = [out] if scale_T is None else [out, scale_T]
    if hidden is not None:
        results.append(hidden)
    return tuple(results) if len(results) > 1 else results[0]


@triton.jit
def backward_row(
    x_ptr,
    grad_ptr,
    grad_hidden_ptr,
    row,
    num_columns,
    columns,
    keep,
    HAS_HIDDEN: tl.constexpr,
):
    """What a row's gradient is made of; without a residual's own gradient the last is x."""
    place = tl.cast(row, tl.int64) * num_columns + columns
    x = tl.load(x_ptr + place, mask=keep, other=0.0)
    passed = x
    if HAS_HIDDEN:
        passed = tl.load(grad_hidden_ptr + place, mask=keep, other=0.0)
    return x, tl.load(grad_ptr + place, mask=keep, other=0.0), passed


@triton.jit
def rms_norm_backward_kernel(
    x_ptr,
    weight_ptr,
    grad_ptr,
    grad_hidden_ptr,
    grad_x_ptr,
    partial_ptr,
    num_rows,
    num_columns,
    eps,
    offset,
    HAS_HIDDEN: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program walks every num_programs-th row and keeps its share of the weight's gradient.
    AHEAD: the next row is on its way while one is computed.
    """
    columns = tl.arange(0, BLOCK)
    in_row = columns < num_columns
    gain = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32) + offset
    grad_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    first, step = tl.program_id(0), tl.num_programs(0)
    if AHEAD:
        next_x, next_grad, next_passed = backward_row(
            x_ptr, grad_ptr, grad_hidden_ptr, first, num_columns, columns, in_row, HAS_HIDDEN
        )
    for row in range(first, num_rows, step):
        place = tl.cast(row, tl.int64) * num_columns + columns
        if AHEAD:
            x, grad, passed = next_x, next_grad, next_passed
            following = row + step
            end = tl.where(following < num_rows, num_columns, 0)
            next_x, next_grad, next_passed = backward_row(
                x_ptr, grad_ptr, grad_hidden_ptr, following, num_columns, columns,
                columns < end, HAS_HIDDEN,
            )  # fmt: skip
        else:
            x, grad, passed = backward_row(
                x_ptr, grad_ptr, grad_hidden_ptr, row, num_columns, columns, in_row, HAS_HIDDEN
            )
        x, grad = x.to(tl.float32), grad.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x) / num_columns + eps)
        normed = x * scale
        weighted = grad * gain
        mean = tl.sum(weighted * normed) / num_columns
        grad_x = (weighted - normed * mean) * scale
        if HAS_HIDDEN:  # what comes back along the residual stream, in fp32: rounded once
            grad_x += passed.to(tl.float32)
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=in_row)
        grad_weight += grad * normed
    place = tl.program_id(0).to(tl.int64) * num_columns + columns
    tl.store(partial_ptr + place, grad_weight, mask=in_row)


def rms_norm_backward(
    x_TD: Tensor,
    weight_D: Tensor,
    grad_TD: Tensor,
    eps: float,
    offset: float,
    grad_hidden_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients for x (and the residual, whose gradient is the same) and for the weight. x is what
    was normed: with a residual the sum, whose own gradient is `grad_hidden_TD`.

    The weight's gradient is summed in fp32 by program and then over programs, in one order: the
    same inputs give the same bits.
    """
    rows_TD, grad_rows = as_rows(x_TD).contiguous(), as_rows(grad_TD).contiguous()
    hidden_rows = grad_rows if grad_hidden_TD is None else as_rows(grad_hidden_TD).contiguous()
    num_rows, num_columns = rows_TD.shape
    _check(num_columns)
    grad_x = torch.empty_like(rows_TD)
    target = target_of(x_TD)
    block = block_of(num_columns)
    warps = num_warps(2 * block, target)  # half as many elements a thread as forward: it holds more
    ahead = block <= (16 if can_wait(target) else 8) * warps * target.warp_size  # else it spills
    num_programs = num_backward(num_rows, warps, target)
    partial = torch.empty(num_programs, num_columns, dtype=torch.float32, device=x_TD.device)
    launch(
        rms_norm_backward_kernel,
        (num_programs,),
        (
            rows_TD,
            weight_D,
            grad_rows,
            hidden_rows,
            grad_x,
            partial,
            num_rows,
            num_columns,
            eps,
            offset,
        ),
        HAS_HIDDEN=grad_hidden_TD is not None,
        AHEAD=ahead,
        BLOCK=block,
        num_warps=warps,
    )
    return grad_x.view(x_TD.shape), partial.sum(0).to(weight_D.dtype)


def _check(num_columns: int) -> None:
    if num_columns > MAX_COLUMNS:
        raise UnsupportedError(f"rows of {num_columns} are longer than {MAX_COLUMNS}")
