"""The skinny product in the vector units: one row of x, products summed where they are made."""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.skinny_linear.epilogue import scale_and_finish
from ridgeline.kernels.skinny_linear.prologue import gained_row, load_weight


@triton.jit
def skinny_reduce_kernel(
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
    VECTOR: tl.constexpr,
):
    """One row of x a program (BLOCK_M is 1); grid and arguments are the dot kernel's. VECTOR
    weights fill a 16-byte load: what a thread sums before anything else.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    rows = tl.program_id(2) + tl.arange(0, 1)
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    inner = tl.arange(0, BLOCK_K)
    in_outputs = (outputs < num_outputs)[:, None]
    # int64: a weight may have more than 2^31 elements.
    gate_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride + inner[None, :]
    up_ptrs = gate_ptrs + tl.cast(num_outputs, tl.int64) * weight_stride
    x_ptrs = x_ptr + tl.program_id(2).to(tl.int64) * x_stride + inner
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
        held_x = tl.load(x_ptrs + held, mask=held + inner < depth, other=0.0)
    total = tl.zeros((BLOCK_O, BLOCK_K // VECTOR), dtype=tl.float32)
    up = tl.zeros((BLOCK_O, BLOCK_K // VECTOR), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_ptrs + k, mask=k + inner < depth, other=0.0)
        gate_weight = load_weight(gate_ptrs, k, in_outputs, inner, depth, EVEN)
        x_fp32, squares = gained_row(x, squares, gain_ptr, k + inner, depth, offset, NORM)
        total += products(x_fp32, gate_weight, BLOCK_O, BLOCK_K, VECTOR)
        if GATED:
            up_weight = load_weight(up_ptrs, k, in_outputs, inner, depth, EVEN)
            up += products(x_fp32, up_weight, BLOCK_O, BLOCK_K, VECTOR)
    if HOLD:
        x_fp32, squares = gained_row(held_x, squares, gain_ptr, held + inner, depth, offset, NORM)
        total += products(x_fp32, held_gate, BLOCK_O, BLOCK_K, VECTOR)
        if GATED:
            up += products(x_fp32, held_up, BLOCK_O, BLOCK_K, VECTOR)
    total, up = tl.sum(total, axis=1)[None, :], tl.sum(up, axis=1)[None, :]
    scale_and_finish(
        (total, up, tl.zeros((1,), dtype=tl.float32) + tl.sum(squares, axis=0)),
        (rows, outputs),
        (weight_scale_ptr, x_scale_ptr),
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
        1,
        BLOCK_O,
    )


@triton.jit
def products(x, weight, O: tl.constexpr, K: tl.constexpr, VECTOR: tl.constexpr):
    """[O, K] products, each thread's own VECTOR neighbours already summed: [O, K / VECTOR]."""
    product = weight.to(tl.float32) * x[None, :]  # fp32: what is summed must not be rounded
    return tl.sum(tl.reshape(product, (O, K // VECTOR, VECTOR)), axis=2)
