"""The skinny product in the matrix units: 16 to 64 rows of x."""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.skinny_linear.epilogue import scale_and_finish
from ridgeline.kernels.skinny_linear.prologue import gained, load_weight


@triton.jit
def skinny_dot_kernel(
    x_ptr,
    weight_ptr,
    weight_scale_ptr,
    x_scale_ptr,
    bias_ptr,
    residual_ptr,
    gain_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    x_stride,
    weight_stride,
    residual_stride,
    num_rows,
    num_outputs,
    depth,
    steps,
    eps,
    offset,
    WEIGHT_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    SPLIT: tl.constexpr,
    HOLD: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs: blocks of outputs x splits of the depth (`steps` tiles each) x blocks of rows."""
    GATED: tl.constexpr = ACTIVATION is not None
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    inner = tl.arange(0, BLOCK_K)
    in_outputs = (outputs < num_outputs)[:, None]
    in_rows = (rows < num_rows)[:, None]
    # int64: a weight may have more than 2^31 elements.
    gate_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride + inner[None, :]
    up_ptrs = gate_ptrs + tl.cast(num_outputs, tl.int64) * weight_stride
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]
    scales = (weight_scale_ptr, x_scale_ptr)
    gates, ups = (rows, outputs), (rows, num_outputs + outputs)
    weight_sizes = (num_rows, num_outputs * (2 if GATED else 1), depth)
    begin = tl.program_id(1) * steps * BLOCK_K
    end = tl.minimum(begin + steps * BLOCK_K, depth)
    held = begin
    if HOLD:
        held_gate = load_weight(gate_ptrs, held, in_outputs, inner, depth, EVEN)
        if GATED:
            held_up = load_weight(up_ptrs, held, in_outputs, inner, depth, EVEN)
        begin += BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if HOLD:
        held_x = tl.load(x_ptrs + held, mask=in_rows & (held + inner < depth)[None, :], other=0.0)
    # int8 times int8 is summed exactly, in int32; all else in fp32.
    INTEGER: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if INTEGER else tl.float32
    total = tl.zeros((BLOCK_O, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_O), dtype=SUM)
    up = tl.zeros((BLOCK_O, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_O), dtype=SUM)
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_ptrs + k, mask=in_rows & (k + inner < depth)[None, :], other=0.0)
        gate_weight = load_weight(gate_ptrs, k, in_outputs, inner, depth, EVEN)
        if NORM:
            x, squares = gained(x, squares, gain_ptr, k + inner, depth, offset)
        total = add_product(
            total, x, gate_weight, k, gates, scales, weight_sizes, WEIGHT_SCALE, SWAP
        )
        if GATED:
            up_weight = load_weight(up_ptrs, k, in_outputs, inner, depth, EVEN)
            up = add_product(up, x, up_weight, k, ups, scales, weight_sizes, WEIGHT_SCALE, SWAP)
    if HOLD:
        if NORM:
            held_x, squares = gained(held_x, squares, gain_ptr, held + inner, depth, offset)
        total = add_product(
            total, held_x, held_gate, held, gates, scales, weight_sizes, WEIGHT_SCALE, SWAP
        )
        if GATED:
            up = add_product(
                up, held_x, held_up, held, ups, scales, weight_sizes, WEIGHT_SCALE, SWAP
            )
    if SWAP:
        total = tl.trans(total)
        up = tl.trans(up)
    scale_and_finish(
        (total.to(tl.float32), up.to(tl.float32), squares),  # scales are fp32
        gates,
        scales,
        (bias_ptr, residual_ptr, residual_stride, out_ptr),
        partial_ptr,
        counter_ptr,
        (num_rows, num_outputs, depth),
        eps,
        WEIGHT_SCALE,
        X_SCALE,
        HAS_BIAS,
        HAS_RESIDUAL,
        NORM,
        ACTIVATION,
        SPLIT,
        BLOCK_M,
        BLOCK_O,
    )


@triton.jit
def add_product(
    total, x, weight, k, places, scales, sizes, WEIGHT_SCALE: tl.constexpr, SWAP: tl.constexpr
):
    """total plus one step's product; scales of 128-blocks belong to the step, all others to the
    end. A step never crosses a block: its depth divides 128. `places` are rows and weight rows,
    `sizes` how many of them there are, and the depth.
    """
    if WEIGHT_SCALE == "block":
        rows, outputs = places
        weight_scale_ptr, x_scale_ptr = scales
        num_rows, num_weight_rows, depth = sizes
        part = multiply(x, weight, tl.zeros(total.shape, dtype=tl.float32), SWAP)
        blocks = (depth + 127) // 128
        weight_place = weight_scale_ptr + (outputs // 128) * blocks + k // 128
        weight_scale = tl.load(weight_place, mask=outputs < num_weight_rows, other=0.0)
        x_place = x_scale_ptr + rows * blocks + k // 128
        x_scale = tl.load(x_place, mask=rows < num_rows, other=0.0)
        if SWAP:
            total += part * weight_scale[:, None] * x_scale[None, :]
        else:
            total += part * x_scale[:, None] * weight_scale[None, :]
    else:
        total = multiply(x, weight, total, SWAP)
    return total


@triton.jit
def multiply(x, weight, total, SWAP: tl.constexpr):
    """total + x [M, K] @ weight [O, K] transposed; the other way round with SWAP."""
    if weight.dtype != x.dtype:
        weight = weight.to(tl.float32).to(x.dtype)  # 8-bit codes are exact in fp16 and bf16
    # Hopper's fp8 units add in about 14 bits: after IMPRECISE products the sum moves to fp32.
    IMPRECISE: tl.constexpr = min(128, x.shape[1]) if x.dtype.is_fp8() else None
    # An if with an else: code after a return would be compiled too, with shapes that do not fit.
    if SWAP:
        total = tl.dot(
            weight, tl.trans(x), total, max_num_imprecise_acc=IMPRECISE, out_dtype=total.dtype
        )
    else:
        total = tl.dot(
            x, tl.trans(weight), total, max_num_imprecise_acc=IMPRECISE, out_dtype=total.dtype
        )
    return total
