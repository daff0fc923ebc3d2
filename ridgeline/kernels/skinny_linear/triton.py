"""The skinny product in Triton: weights streamed once, everything around them folded in.

`reduce` keeps one row of x and sums products in the vector units; `dot` feeds 16 to 64 rows to the
matrix units. Both take x's norm on the way in (the gain is multiplied into x, the row's scale is
applied to the sum: it is one number a row), and bias, activation and residual on the way out.

With programmatic dependent launch a program starts while the kernel before it still runs, loads its
first weight tile, and only then waits for that kernel's results. The tile stays in registers until
after the loop, so that waiting for it holds up no other load.

A split depth is summed by the last program to arrive at a tile, in the order of the splits, so that
results do not depend on who was first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.gated_activation.reference import Activation
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.rows import as_rows
from ridgeline.kernels.skinny_linear.cut import Around, Scales, launch_cut, scale_kind
from ridgeline.kernels.skinny_linear.tune_space import Config, choose, product_key, tuned


@triton.jit
def activate(gate, KIND: tl.constexpr):
    if KIND == "silu":
        result = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 (1 + tanh z) is sigmoid(2 z), which neither overflows nor needs a tanh.
        result = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return result


@triton.jit
def finish(
    total,
    up,
    rows,
    columns,
    weight_scale_ptr,
    x_scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    residual_stride,
    num_rows,
    num_outputs,
    WEIGHT_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Scales, bias, activation, residual and the store of one [rows, columns] tile of fp32 sums."""
    in_columns = columns < num_outputs
    keep = (rows < num_rows)[:, None] & in_columns[None, :]
    if WEIGHT_SCALE == "tensor":
        scale = tl.load(weight_scale_ptr)
        total *= scale
        up *= scale
    elif WEIGHT_SCALE == "row":
        total *= tl.load(weight_scale_ptr + columns, mask=in_columns, other=0.0)[None, :]
        if ACTIVATION is not None:
            up_scale = tl.load(weight_scale_ptr + num_outputs + columns, mask=in_columns, other=0.0)
            up *= up_scale[None, :]
    if X_SCALE == "tensor":
        scale = tl.load(x_scale_ptr)
        total *= scale
        up *= scale
    elif X_SCALE == "row":
        row_scale = tl.load(x_scale_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        total *= row_scale
        up *= row_scale
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        if HAS_BIAS:
            up_bias = tl.load(bias_ptr + num_outputs + columns, mask=in_columns, other=0.0)
            up += up_bias.to(tl.float32)[None, :]
        total = activate(total, ACTIVATION) * up
    row = rows.to(tl.int64)[:, None]  # int64: rows times a stride may pass 2^31
    if HAS_RESIDUAL:
        residual = residual_ptr + row * residual_stride + columns[None, :]
        total += tl.load(residual, mask=keep, other=0.0).to(tl.float32)
    place = row * num_outputs + columns[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def keep_partial(total, up, squares, base, GATED: tl.constexpr, M: tl.constexpr, O: tl.constexpr):
    """One split's sums: the tile, the tile of the ups, the squares of its rows of x."""
    place = tl.arange(0, M)[:, None] * O + tl.arange(0, O)[None, :]
    tl.store(base + place, total)
    if GATED:
        tl.store(base + M * O + place, up)
    tl.store(base + 2 * M * O + tl.arange(0, M), squares)


@triton.jit
def sum_partials(base, SPLIT: tl.constexpr, GATED: tl.constexpr, M: tl.constexpr, O: tl.constexpr):
    """The splits' sums in their order; `.cg`: other SMs wrote them, so L1 must not answer."""
    TILE: tl.constexpr = 2 * M * O + M
    place = tl.arange(0, M)[:, None] * O + tl.arange(0, O)[None, :]
    total = tl.zeros((M, O), dtype=tl.float32)
    up = tl.zeros((M, O), dtype=tl.float32)
    squares = tl.zeros((M,), dtype=tl.float32)
    for split in tl.static_range(SPLIT):
        part = base + split * TILE
        total += tl.load(part + place, cache_modifier=".cg")
        if GATED:
            up += tl.load(part + M * O + place, cache_modifier=".cg")
        squares += tl.load(part + 2 * M * O + tl.arange(0, M), cache_modifier=".cg")
    return total, up, squares


@triton.jit
def scale_and_finish(
    total,
    up,
    squares,
    rows,
    columns,
    weight_scale_ptr,
    x_scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    residual_stride,
    num_rows,
    num_outputs,
    depth,
    eps,
    WEIGHT_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr,
    M: tl.constexpr,
    O: tl.constexpr,
):
    """From a program's [M, O] sums to the output: splits joined, the norm's scale, the epilogue."""
    GATED: tl.constexpr = ACTIVATION is not None
    arrived = SPLIT - 1
    if SPLIT > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        base = partial_ptr + tile.to(tl.int64) * SPLIT * (2 * M * O + M)
        part = base + tl.program_id(1) * (2 * M * O + M)
        keep_partial(total, up, squares, part, GATED, M, O)
        tl.debug_barrier()  # every thread has stored before one of them counts the program in
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLIT - 1:
        if SPLIT > 1:
            total, up, squares = sum_partials(base, SPLIT, GATED, M, O)
            tl.store(counter_ptr + tile, 0)  # as the next launch must find it
        if NORM:
            scale = tl.rsqrt(squares / depth + eps)
            total *= scale[:, None]
            if GATED:
                up *= scale[:, None]
        finish(
            total,
            up,
            rows,
            columns,
            weight_scale_ptr,
            x_scale_ptr,
            bias_ptr,
            residual_ptr,
            out_ptr,
            residual_stride,
            num_rows,
            num_outputs,
            WEIGHT_SCALE,
            X_SCALE,
            HAS_BIAS,
            HAS_RESIDUAL,
            ACTIVATION,
        )


@triton.jit
def load_weight(pointers, k, in_rows, columns, depth, EVEN: tl.constexpr):
    """The [O, K] tile of weights at depth k; EVEN: no edge to mask, so loads stay wide."""
    if EVEN:
        tile = tl.load(pointers + k)
    else:
        tile = tl.load(pointers + k, mask=in_rows & (k + columns < depth)[None, :], other=0.0)
    return tile


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
    ups = num_outputs + outputs
    num_weight_rows = num_outputs * (2 if GATED else 1)
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
            x,
            gate_weight,
            total,
            rows,
            outputs,
            k,
            weight_scale_ptr,
            x_scale_ptr,
            num_rows,
            num_weight_rows,
            depth,
            WEIGHT_SCALE,
            SWAP,
        )
        if GATED:
            up_weight = load_weight(up_ptrs, k, in_outputs, inner, depth, EVEN)
            up = add_product(
                x,
                up_weight,
                up,
                rows,
                ups,
                k,
                weight_scale_ptr,
                x_scale_ptr,
                num_rows,
                num_weight_rows,
                depth,
                WEIGHT_SCALE,
                SWAP,
            )
    if HOLD:
        if NORM:
            held_x, squares = gained(held_x, squares, gain_ptr, held + inner, depth, offset)
        total = add_product(
            held_x,
            held_gate,
            total,
            rows,
            outputs,
            held,
            weight_scale_ptr,
            x_scale_ptr,
            num_rows,
            num_weight_rows,
            depth,
            WEIGHT_SCALE,
            SWAP,
        )
        if GATED:
            up = add_product(
                held_x,
                held_up,
                up,
                rows,
                ups,
                held,
                weight_scale_ptr,
                x_scale_ptr,
                num_rows,
                num_weight_rows,
                depth,
                WEIGHT_SCALE,
                SWAP,
            )
    if SWAP:
        total = tl.trans(total)
        up = tl.trans(up)
    scale_and_finish(
        total.to(tl.float32),  # scales are fp32
        up.to(tl.float32),
        squares,
        rows,
        outputs,
        weight_scale_ptr,
        x_scale_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        partial_ptr,
        counter_ptr,
        residual_stride,
        num_rows,
        num_outputs,
        depth,
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
def gained(x, squares, gain_ptr, columns, depth, offset):
    """x times the norm's gain, back in x's dtype for the matrix units; its squares kept in fp32."""
    gain = tl.load(gain_ptr + columns, mask=columns < depth, other=0.0).to(tl.float32) + offset
    exact = x.to(tl.float32)  # the square and the product are rounded once, not the factors
    return (exact * gain[None, :]).to(x.dtype), squares + tl.sum(exact * exact, axis=1)


@triton.jit
def add_product(
    x,
    weight,
    total,
    rows,
    outputs,
    k,
    weight_scale_ptr,
    x_scale_ptr,
    num_rows,
    num_weight_rows,
    depth,
    WEIGHT_SCALE: tl.constexpr,
    SWAP: tl.constexpr,
):
    """total plus one step's product; scales of 128-blocks belong to the step, all others to the
    end. A step never crosses a block: its depth divides 128.
    """
    if WEIGHT_SCALE == "block":
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
    scale_and_finish(
        tl.sum(total, axis=1)[None, :],
        tl.sum(up, axis=1)[None, :],
        tl.zeros((1,), dtype=tl.float32) + tl.sum(squares, axis=0),
        rows,
        outputs,
        weight_scale_ptr,
        x_scale_ptr,
        bias_ptr,
        residual_ptr,
        out_ptr,
        partial_ptr,
        counter_ptr,
        residual_stride,
        num_rows,
        num_outputs,
        depth,
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
def gained_row(x, squares, gain_ptr, columns, depth, offset, NORM: tl.constexpr):
    """x in fp32, which the vector units work in; its gain rounded in as the dot kernel's is."""
    exact = x.to(tl.float32)
    if NORM:
        gain = tl.load(gain_ptr + columns, mask=columns < depth, other=0.0).to(tl.float32) + offset
        squares += exact * exact
        exact = (exact * gain).to(x.dtype).to(tl.float32)
    return exact, squares


@triton.jit
def products(x, weight, O: tl.constexpr, K: tl.constexpr, VECTOR: tl.constexpr):
    """[O, K] products, each thread's own VECTOR neighbours already summed: [O, K / VECTOR]."""
    product = weight.to(tl.float32) * x[None, :]  # fp32: what is summed must not be rounded
    return tl.sum(tl.reshape(product, (O, K // VECTOR, VECTOR)), axis=2)


def skinny_linear(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    norm_weight_D: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: Activation | None = None,
    config: Config | None = None,
    pdl: bool = True,
) -> Tensor:
    """The launcher; arguments and result are reference.py's. bf16 or fp16, rows contiguous in their
    last dim. `pdl=False` where the kernel before must have ended before this one's programs start.
    """
    if x_MD.dtype not in (torch.bfloat16, torch.float16) or weight_OD.dtype != x_MD.dtype:
        raise UnsupportedError(
            f"a skinny product of {x_MD.dtype} and {weight_OD.dtype}; both must be bf16 or fp16"
        )
    epilogue = Around(bias_O, residual_MO, norm_weight_D, eps, offset, activation)
    return product(x_MD, weight_OD, epilogue, config=config, pdl=pdl)


def product(
    x_MD: Tensor,
    weight_OD: Tensor,
    around: Around,
    scales: Scales | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
    pdl: bool = True,
) -> Tensor:
    """One product of x and weight in any pair of dtypes the matrix units take, 8-bit weights with
    16-bit x included.
    """
    scales = scales or Scales()
    gated = around.activation is not None
    x_rows = as_rows(x_MD)
    num_rows, depth = x_rows.shape
    num_outputs = weight_OD.shape[0] // (2 if gated else 1)
    _check(x_rows, weight_OD, gated)
    target = target_of(x_MD)
    weight_scale, x_scale = scale_kind(scales.weight), scale_kind(scales.x)
    by_blocks = weight_scale == "block"
    if config is None:
        key = product_key(x_MD, weight_OD, gated, around.norm_weight is not None, weight_scale)
        config = tuned("skinny_linear", key, x_MD.device)
    if config is None:
        short = by_blocks or weight_OD.dtype != x_MD.dtype
        config = choose(
            num_rows,
            num_outputs,
            depth,
            gated,
            target,
            8 * weight_OD.element_size(),
            max_block_k=(64 if gated else 128) if short else 512,
            matrix_only=by_blocks,
        )
    fits = not by_blocks or (config.kind == "dot" and 128 % config.block_k == 0)
    assert fits, f"{config.label} with scales of 128-blocks"
    extra = {"VECTOR": 16 // weight_OD.element_size()} if config.kind == "reduce" else {}
    return launch_cut(
        skinny_reduce_kernel if config.kind == "reduce" else skinny_dot_kernel,
        x_rows,
        (weight_OD, scales.weight, scales.x),
        (weight_OD.stride(0),),
        around,
        (*x_MD.shape[:-1], num_outputs),
        out_dtype or x_MD.dtype,
        config,
        target,
        pdl,
        WEIGHT_SCALE=weight_scale,
        X_SCALE=x_scale,
        SWAP=config.swap,
        **extra,
    )


def _check(x_MD: Tensor, weight_OD: Tensor, gated: bool) -> None:
    if weight_OD.stride(1) != 1:
        raise UnsupportedError("the weight's rows are not contiguous; call .contiguous() once")
    assert weight_OD.shape[1] == x_MD.shape[1], f"{x_MD.shape} times {weight_OD.shape}"
    assert not gated or weight_OD.shape[0] % 2 == 0, "gate and up rows must be as many"
