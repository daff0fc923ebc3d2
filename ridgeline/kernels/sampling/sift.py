"""How much lies above each of a row's two ends (step 3 of triton.py): the second pass over a row,
over the groups that reach the low end, for rows where these are many.

Imported by triton.py only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.sampling.bracket import BY_COUNT, FIELDS, HIGH, LOW, ROW_MAX
from ridgeline.kernels.sampling.logits import (
    LOG2E,
    inverse_of,
    load_listed,
    of_groups_sum,
    weights,
)


@triton.jit
def sift_kernel(
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
    bounds_ptr,
    num_listed_ptr,
    list_ptr,
    parts_ptr,  # out [B, 2, num_groups]: what each listed group has above the high end, and
    # from the low end on
    amounts_ptr,  # out [B, 2, PIECES]: the sums of these
    SMALLEST: tl.constexpr,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    PIECES: tl.constexpr,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """PIECES programs a row, always as many: the order of their sums must not depend on the batch.
    Each takes every PIECES-th tile of listed groups.
    """
    tables = (
        logits_ptr, counts_ptr, seen_ptr, bias_ptr, repetition_ptr, presence_ptr, frequency_ptr,
        logits_stride, counts_stride, seen_stride, bias_stride,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(0) // PIECES).to(tl.int64)  # int64: offsets pass 2^31
    piece = tl.program_id(0) % PIECES
    num_listed = tl.load(num_listed_ptr + row)
    if num_listed > FEW:
        bounds_ptr += row * FIELDS
        low = tl.load(bounds_ptr + LOW)
        high = tl.load(bounds_ptr + HIGH)
        row_max = tl.load(bounds_ptr + ROW_MAX)
        by_count = tl.load(bounds_ptr + BY_COUNT) != 0.0
        rate = tl.where(by_count, 0.0, inverse_of(temperature_ptr, row, SMALLEST) * LOG2E)
        list_ptr += row * num_groups
        parts_ptr += row * (2 * num_groups)
        all_above = tl.zeros((TILE,), dtype=tl.float32)
        all_from = tl.zeros((TILE,), dtype=tl.float32)
        for start in range(piece * TILE, num_listed, PIECES * TILE):
            z = load_listed(
                tables, row, list_ptr, start, num_listed, vocab_size, USES, GROUP, SEGMENT, TILE
            )
            weight = weights(z, row_max, rate)
            # A product is cheaper than a choice: a comparison can give 1 and 0 as floats.
            above = of_groups_sum((z > high).to(tl.float32) * weight)
            from_low = of_groups_sum((z >= low).to(tl.float32) * weight)
            slots = start + tl.arange(0, TILE)
            groups = tl.load(list_ptr + slots, mask=slots < num_listed, other=0)
            tl.store(parts_ptr + groups, above, mask=slots < num_listed)
            tl.store(parts_ptr + num_groups + groups, from_low, mask=slots < num_listed)
            all_above += above
            all_from += from_low
        amounts_ptr += row * (2 * PIECES) + piece
        tl.store(amounts_ptr, tl.sum(all_above, axis=0))
        tl.store(amounts_ptr + PIECES, tl.sum(all_from, axis=0))
