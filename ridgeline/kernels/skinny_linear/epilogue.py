"""From a program's sums to the output: splits of the depth joined, the norm's scale, the scales of
codes, bias, activation, residual, the store. Every kernel of the skinny family ends here.

A split depth is summed by the last program to arrive at a tile, in the order of the splits, so that
results do not depend on who was first.

Arguments that belong together travel in tuples: `sums` (the [M, O] tile, the tile of the ups, the
squares of x's rows), `places` (rows, columns), `scales` (pointers to the weight's and x's),
`ends` (bias, residual, its stride, out), `sizes` (rows, outputs, depth).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.gated_activation.activations import activate


@triton.jit
def scale_and_finish(
    sums,
    places,
    scales,
    ends,
    partial_ptr,
    counter_ptr,
    sizes,
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
    """All of it; with a split depth, by the last program of a tile."""
    GATED: tl.constexpr = ACTIVATION is not None
    total, up, squares = sums
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
            scale = tl.rsqrt(squares / sizes[2] + eps)
            total *= scale[:, None]
            if GATED:
                up *= scale[:, None]
        finish(
            total, up, places, scales, ends, sizes,
            WEIGHT_SCALE, X_SCALE, HAS_BIAS, HAS_RESIDUAL, ACTIVATION,
        )  # fmt: skip


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
def finish(
    total,
    up,
    places,
    scales,
    ends,
    sizes,
    WEIGHT_SCALE: tl.constexpr,
    X_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Scales, bias, activation, residual and the store of one [rows, columns] tile of fp32 sums."""
    rows, columns = places
    weight_scale_ptr, x_scale_ptr = scales
    bias_ptr, residual_ptr, residual_stride, out_ptr = ends
    num_rows, num_outputs, _ = sizes
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
