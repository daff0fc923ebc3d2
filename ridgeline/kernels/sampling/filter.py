"""Top-k, top-p and min-p: the search for the smallest logit that is kept (step 2 of triton.py).

Imported by the Triton files of this folder only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.sampling.logits import group_weight, inverse_of, load_logits

BOUND_STEPS = tl.constexpr(16)  # the range over 2^16: closer than bf16 tells logits apart


@triton.jit
def order_key(z):
    """Integers in the order of the floats they come from (-0 with +0); `order_value` goes back."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_value(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def listed_logits(
    tables,
    list_ptr,
    row,
    start,
    num_listed,
    vocab_size,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The next TILE groups of a row's list: ids, which of them are real, logits [TILE, GROUP]."""
    slots = start + tl.arange(0, TILE)
    listed = slots < num_listed
    ids = tl.load(list_ptr + slots, mask=listed, other=0)
    columns = ids[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    keep = (columns < vocab_size) & listed[:, None]
    return ids, listed, load_logits(tables, row, columns, keep, USES)


@triton.jit
def collect(
    tables,
    list_ptr,
    candidates_ptr,
    row,
    num_listed,
    vocab_size,
    bound,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Put the logits that reach `bound` side by side, as many as fit; returns how many reach it."""
    num_found = 0
    for start in range(0, num_listed, TILE):
        _, _, z = listed_logits(
            tables, list_ptr, row, start, num_listed, vocab_size, USES, GROUP, TILE
        )
        found = ((z >= bound) & (z > float("-inf"))).to(tl.int32)
        in_group = tl.sum(found, axis=1)
        before = num_found + tl.cumsum(in_group, axis=0) - in_group
        spot = before[:, None] + tl.cumsum(found, axis=1) - 1
        tl.store(candidates_ptr + spot, z, mask=(found == 1) & (spot < CANDIDATES))
        num_found += tl.sum(in_group, axis=0)
    return num_found


@triton.jit
def halve_held(z, weight, bound, row_max, limit):
    """The smallest z such that the logits larger than it weigh less than `limit` together. The key
    range halves each step, so it ends at the very logit after at most 32.
    """
    low = order_key(tl.maximum(bound, -3.4e38)).to(tl.int64)  # int64: a sum of two keys
    high = order_key(row_max).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        larger = tl.sum(tl.where(z > order_value(middle), weight, 0.0), axis=0)
        high = tl.where(larger < limit, middle, high)
        low = tl.where(larger < limit, low, middle + 1)
    return order_value(low)


@triton.jit
def weigh(
    tables,
    list_ptr,
    row,
    num_listed,
    vocab_size,
    row_max,
    inverse,
    floor,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Weight of the listed groups' logits that are at least `floor`."""
    amount = 0.0
    for start in range(0, num_listed, TILE):
        _, _, z = listed_logits(
            tables, list_ptr, row, start, num_listed, vocab_size, USES, GROUP, TILE
        )
        weight = tl.where(z >= floor, tl.exp((z - row_max) * inverse), 0.0)
        amount += tl.sum(tl.sum(weight, axis=1), axis=0)
    return amount


@triton.jit
def halve(
    tables,
    list_ptr,
    row,
    num_listed,
    vocab_size,
    bound,
    row_max,
    inverse,
    floor,
    limit,
    BY_COUNT: tl.constexpr,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The smallest z such that the logits larger than it are fewer than `limit` (BY_COUNT), or that
    those of them from `floor` on weigh less than `limit`. One pass over the listed groups a step.
    """
    low = order_key(tl.maximum(bound, -3.4e38)).to(tl.int64)  # int64: a sum of two keys
    high = order_key(row_max).to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        pivot = order_value(middle)
        amount = 0.0
        for start in range(0, num_listed, TILE):
            _, _, z = listed_logits(
                tables, list_ptr, row, start, num_listed, vocab_size, USES, GROUP, TILE
            )
            larger = z > pivot
            if BY_COUNT:
                part = larger.to(tl.float32)  # counts below 2^24 are exact
            else:
                weight = tl.exp((z - row_max) * inverse)
                part = tl.where(larger & (z >= floor), weight, 0.0)
            amount += tl.sum(tl.sum(part, axis=1), axis=0)
        high = tl.where(amount < limit, middle, high)
        low = tl.where(amount < limit, low, middle + 1)
    return order_value(low)


@triton.jit
def refresh_sums(
    tables,
    list_ptr,
    largest_ptr,
    sum_ptr,
    row,
    num_listed,
    vocab_size,
    lowest,
    inverse,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Make the listed groups' sums again from the logits that are kept; returns nothing."""
    for start in range(0, num_listed, TILE):
        ids, listed, z = listed_logits(
            tables, list_ptr, row, start, num_listed, vocab_size, USES, GROUP, TILE
        )
        largest = tl.load(largest_ptr + ids, mask=listed, other=0.0)
        z = tl.where(z >= lowest, z, float("-inf"))
        tl.store(sum_ptr + ids, group_weight(z, largest, inverse), mask=listed)


@triton.jit
def filter_kernel(
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
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    lowest_ptr,  # out: the smallest logit kept [B]
    list_ptr,  # scratch [B, num_groups]: groups that reach the bound
    candidates_ptr,  # scratch [B, CANDIDATES]: logits that reach the bound
    SMALLEST: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """One program a row. Keeps z iff fewer than k logits are larger, and those that are larger
    hold less than p of the weight that top-k left, and z is at least min_p's bound.
    """
    tables = (
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
    )
    row = tl.program_id(0).to(tl.int64)  # int64: offsets pass 2^31
    largest_ptr += row * num_groups
    sum_ptr += row * num_groups
    list_ptr += row * num_groups
    candidates_ptr += row * CANDIDATES
    inverse = inverse_of(temperature_ptr, row, SMALLEST)
    top_k = tl.full((), 0, tl.int32)
    top_p = tl.full((), 1.0, tl.float32)
    min_p = tl.full((), 0.0, tl.float32)
    if HAS_TOP_K:
        top_k = tl.load(top_k_ptr + row).to(tl.int32)
    if HAS_TOP_P:
        top_p = tl.load(top_p_ptr + row).to(tl.float32)
    if HAS_MIN_P:
        min_p = tl.load(min_p_ptr + row).to(tl.float32)
    groups = tl.arange(0, GROUPS)
    in_row = groups < num_groups
    largest = tl.load(largest_ptr + groups, mask=in_row, other=float("-inf"))  # [GROUPS]
    row_max = tl.max(largest, axis=0)
    by_k = (top_k > 0) & (top_k < vocab_size)
    by_p = top_p < 1.0
    finite = (row_max < float("inf")) & (row_max > float("-inf"))
    drawn = tl.load(temperature_ptr + row) != 0.0
    lowest = tl.full((), float("-inf"), tl.float32)
    if (by_k | by_p | (min_p > 0.0)) & finite & drawn:
        if min_p > 0.0:  # exp((z - row_max) / temperature) >= min_p, solved for z
            lowest = row_max + tl.div_rn(tl.log(min_p), inverse)
        # 1. A bound that all that is kept surely reaches.
        bound = lowest
        sums = tl.load(sum_ptr + groups, mask=in_row, other=0.0)
        of_largest = tl.exp((largest - row_max) * inverse)
        total = tl.sum(sums * of_largest, axis=0)
        if by_k | by_p:
            # k groups whose largest logit reaches z hold k logits that do; groups whose largest
            # logits have p of the weight between them likewise (the margin is for sums rounded
            # differently). Each step keeps such a z, so their number is only a matter of how close
            # the bound comes.
            bound = tl.full((), float("-inf"), tl.float32)
            low = tl.min(tl.where(largest > float("-inf"), largest, row_max), axis=0)
            if by_k == 0:  # what is further below weighs nothing
                low = tl.maximum(low, row_max - 64.0 / inverse)
            high = row_max
            for _ in range(BOUND_STEPS):
                middle = 0.5 * (low + high)
                if by_k:
                    enough = tl.sum((largest >= middle).to(tl.int32), axis=0) >= top_k
                else:
                    reached = tl.sum(tl.where(largest >= middle, of_largest, 0.0), axis=0)
                    enough = reached >= top_p * total * 1.0001
                bound = tl.where(enough, middle, bound)
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            if by_p & (by_k == 0):
                # All logits below this could not have 1 - p of the weight together.
                rest = tl.maximum((1.0 - top_p) * 0.9999 * total / vocab_size, 1e-30)
                bound = tl.maximum(bound, row_max + tl.log(rest) / inverse)
        # 2. The groups that reach it, listed; the others hold nothing that is kept.
        reaches = (largest >= bound) & (largest > float("-inf"))
        num_listed = tl.sum(reaches.to(tl.int32), axis=0)
        slot = tl.cumsum(reaches.to(tl.int32), axis=0) - 1
        tl.store(list_ptr + slot, groups, mask=reaches)
        tl.store(sum_ptr + groups, tl.zeros_like(sums), mask=in_row & (largest < bound))
        tl.debug_barrier()  # the list is read by other threads than wrote it
        # 3. The smallest logit kept.
        if by_k | by_p:
            num_found = collect(
                tables,
                list_ptr,
                candidates_ptr,
                row,
                num_listed,
                vocab_size,
                bound,
                USES,
                GROUP,
                TILE,
                CANDIDATES,
            )
            tl.debug_barrier()
            kth = tl.full((), float("-inf"), tl.float32)
            if num_found <= CANDIDATES:
                places = tl.arange(0, CANDIDATES)
                z = tl.load(candidates_ptr + places, mask=places < num_found, other=float("-inf"))
                weight = tl.exp((z - row_max) * inverse)
                if by_k:
                    kth = halve_held(z, weight * 0.0 + 1.0, bound, row_max, top_k.to(tl.float32))
                    weight = tl.where(z >= kth, weight, 0.0)
                    total = tl.sum(weight, axis=0)
                    lowest = tl.maximum(lowest, kth)
                if by_p:
                    last = halve_held(z, weight, bound, row_max, top_p * total)
                    lowest = tl.maximum(lowest, last)
            else:
                if by_k:
                    kth = halve(
                        tables,
                        list_ptr,
                        row,
                        num_listed,
                        vocab_size,
                        bound,
                        row_max,
                        inverse,
                        kth,
                        top_k.to(tl.float32),
                        True,
                        USES,
                        GROUP,
                        TILE,
                    )
                    lowest = tl.maximum(lowest, kth)
                if by_p:
                    if by_k:
                        total = weigh(
                            tables,
                            list_ptr,
                            row,
                            num_listed,
                            vocab_size,
                            row_max,
                            inverse,
                            kth,
                            USES,
                            GROUP,
                            TILE,
                        )
                    last = halve(
                        tables,
                        list_ptr,
                        row,
                        num_listed,
                        vocab_size,
                        bound,
                        row_max,
                        inverse,
                        kth,
                        top_p * total,
                        False,
                        USES,
                        GROUP,
                        TILE,
                    )
                    lowest = tl.maximum(lowest, last)
        # 4. The listed groups' sums, of what is kept.
        refresh_sums(
            tables,
            list_ptr,
            largest_ptr,
            sum_ptr,
            row,
            num_listed,
            vocab_size,
            lowest,
            inverse,
            USES,
            GROUP,
            TILE,
        )
    tl.store(lowest_ptr + row, lowest)
