"""The one pass over all logits: each group's largest logit and the sum of its weights (step 1 of
triton.py), and the draw itself where a program has the whole row.

Imported by triton.py only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.sampling.draw import draw_entry, group_score, gumbel
from ridgeline.kernels.sampling.logits import (
    LOG2E,
    by_group,
    group_weight,
    inverse_of,
    load_logits,
    nan_as_infinity,
    of_groups_max,
    tile_offsets,
    tile_rows,
)


@triton.jit
def summarize_tile(
    tables,
    row,
    tile,
    vocab_size,
    num_groups,
    rate,
    largest_ptr,
    sum_ptr,
    DRAWN: tl.constexpr,
    EVEN: tl.constexpr,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
):
    """TILE neighbouring groups. EVEN: the row does not end among them."""
    start = tile * (TILE * GROUP)
    offsets = tile_offsets(tile_rows(GROUP, SEGMENT, TILE), GROUP, SEGMENT, TILE)
    keep = None if EVEN else offsets < vocab_size - start
    z = by_group(load_logits(tables, row, start, offsets, keep, USES), GROUP, SEGMENT, TILE)
    groups = tile * TILE + tl.arange(0, TILE)
    in_row = groups < num_groups
    if DRAWN:
        largest = of_groups_max(z)
        sums = group_weight(z, largest, rate)
        largest = tl.where(sums != sums, float("inf"), largest)  # a NaN is seen by its weight
        tl.store(sum_ptr + groups, sums, mask=in_row)
    else:
        largest = of_groups_max(nan_as_infinity(z))
    tl.store(largest_ptr + groups, largest, mask=in_row)


@triton.jit
def summarize_tiles(
    tables,
    row,
    first,
    last,
    vocab_size,
    num_groups,
    rate,
    largest_ptr,
    sum_ptr,
    DRAWN: tl.constexpr,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles first..last - 1; whole ones, which are nearly all, need no mask."""
    num_whole = 0
    if USES == 0:  # the tables of penalties are read with masks anyway
        num_whole = vocab_size // (TILE * GROUP)
        for tile in tl.range(first, tl.minimum(last, num_whole), num_stages=STAGES):
            summarize_tile(
                tables, row, tile, vocab_size, num_groups, rate, largest_ptr, sum_ptr,
                DRAWN, True, USES, GROUP, SEGMENT, TILE,
            )  # fmt: skip
    for tile in range(tl.maximum(first, num_whole), last):
        summarize_tile(
            tables, row, tile, vocab_size, num_groups, rate, largest_ptr, sum_ptr,
            DRAWN, False, USES, GROUP, SEGMENT, TILE,
        )  # fmt: skip


@triton.jit
def summarize_kernel(
    logits_ptr,
    counts_ptr,
    seen_ptr,
    bias_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    logits_stride,
    counts_stride,
    seen_stride,
    bias_stride,
    vocab_size,
    num_groups,
    temperature_ptr,
    largest_ptr,
    sum_ptr,
    seed_ptr,
    position_ptr,
    token_ptr,
    pieces,
    SMALLEST: tl.constexpr,
    WHOLE: tl.constexpr,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_STREAM: tl.constexpr,
    ENTRY_STREAM: tl.constexpr,
    PDL: tl.constexpr,
):
    """`pieces` programs a row. WHOLE: one, which also draws."""
    tables = (
        logits_ptr, counts_ptr, seen_ptr, bias_ptr, repetition_ptr, presence_ptr, frequency_ptr,
        logits_stride, counts_stride, seen_stride, bias_stride,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) // pieces).to(tl.int64)  # int64: offsets pass 2^31
    piece = tl.program_id(0) % pieces
    largest_ptr += row * num_groups
    sum_ptr += row * num_groups
    inverse = inverse_of(temperature_ptr, row, SMALLEST)
    drawn = tl.load(temperature_ptr + row) != 0.0
    num_tiles = tl.cdiv(num_groups, TILE)
    first, last = piece * num_tiles // pieces, (piece + 1) * num_tiles // pieces
    if drawn:
        summarize_tiles(
            tables, row, first, last, vocab_size, num_groups, inverse * LOG2E, largest_ptr, sum_ptr,
            True, USES, GROUP, SEGMENT, TILE, STAGES,
        )  # fmt: skip
    else:
        summarize_tiles(
            tables, row, first, last, vocab_size, num_groups, inverse, largest_ptr, sum_ptr,
            False, USES, GROUP, SEGMENT, TILE, STAGES,
        )  # fmt: skip
    if WHOLE:
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        tl.debug_barrier()  # read by other threads than wrote them
        groups = tl.arange(0, GROUPS)
        in_row = groups < num_groups
        score = tl.load(largest_ptr + groups, mask=in_row, other=float("-inf"))
        if drawn:
            sums = tl.load(sum_ptr + groups, mask=in_row, other=0.0)
            noise = gumbel(groups, seed, position, GROUP_STREAM)
            score = group_score(score, sums, inverse, noise)
        group = tl.argmax(score, axis=0)  # the first of equals
        token, _ = draw_entry(
            tables, row, group, vocab_size, inverse, drawn, seed, position, float("-inf"),
            USES, GROUP, ENTRY_STREAM,
        )  # fmt: skip
        tl.store(token_ptr + row, token)
