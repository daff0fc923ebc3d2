"""Sampling in Triton: one pass over the logits, then small work on what matters in each row.

1. `summarize_kernel` reads the logits once and leaves, for each group of 256 neighbouring entries,
   its largest logit and the sum of its weights.
2. `filter_kernel`, where a row asks for top-k, top-p or min-p, finds the smallest logit that is
   kept. The groups' largest logits bound it from below, so only groups that reach the bound are
   read again (about k of them for top-k; for a distribution as peaked as a language model's about
   as many as top-p keeps), and the threshold is then found among what lies above the bound, held in
   registers. Where that is too much to hold (a flat distribution), each step of the search reads
   the row again: still exact, slower. Then the groups' sums are made again from what is kept.
3. `draw_kernel` chooses a group, then an entry in it: reference.py's two steps. Greedy rows go the
   same way without noise, so a batch may mix them.

Rows are contiguous in their last dim; the rows' own stride is free. A NaN counts as +inf, so that a
row that holds one shows it. The host is never asked: shapes and launches depend on the arguments
that are None and on nothing a tensor holds, as a captured graph needs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.launch import launch
from ridgeline.kernels.sampling.reference import (
    ENTRY_STREAM,
    GROUP,
    GROUP_STREAM,
    SMALLEST_TEMPERATURE,
)

MAX_GROUPS = 4096  # a row's groups are held in registers at once: vocabularies up to 1,048,576
CANDIDATES = 4096  # how many entries of a row the filters hold at once
BOUND_STEPS = tl.constexpr(16)  # the range over 2^16: closer than bf16 tells logits apart
# Bits of USES: which tables and penalties a launch has.
COUNTS, SEEN, BIAS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
REPETITION, PRESENCE, FREQUENCY = tl.constexpr(8), tl.constexpr(16), tl.constexpr(32)
# Groups a program reads at once: 8192 entries keep enough loads in flight for the one pass over all
# logits; the filters take fewer, so that several of their programs fit on an SM. Heuristics until
# measured.
TILE_GROUPS, FILTER_TILE_GROUPS = 32, 16


@triton.jit
def load_logits(tables, row, columns, keep, USES: tl.constexpr):
    """The row's logits at `columns` after penalties and bias, in fp32; -inf outside `keep`.

    `tables` are the kernels' first eleven arguments. All kernels come here, and a product with its
    sum is written as fma: a compiler that fused them in one kernel and not in another would make a
    logit differ from itself at the threshold.
    """
    logits_ptr, counts_ptr, seen_ptr, bias_ptr = tables[0], tables[1], tables[2], tables[3]
    z = tl.load(logits_ptr + row * tables[7] + columns, mask=keep, other=float("-inf"))
    z = z.to(tl.float32)  # the definition is in fp32
    # Settings of the row, one for each column: the interpreter takes no scalar truth for a block.
    zero = tl.zeros(columns.shape, dtype=tl.float32)
    counts, repetition, presence, frequency = zero, zero + 1.0, zero, zero
    if REPETITION & USES:
        repetition = zero + tl.load(tables[4] + row)
    if PRESENCE & USES:
        presence = zero + tl.load(tables[5] + row)
    if FREQUENCY & USES:
        frequency = zero + tl.load(tables[6] + row)
    if COUNTS & USES:  # rows without penalties do not read their tables
        wanted = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
        place = counts_ptr + row * tables[8] + columns
        counts = tl.load(place, mask=keep & wanted, other=0).to(tl.float32)
    if REPETITION & USES:
        seen = counts > 0.0
        if SEEN & USES:
            place = seen_ptr + row * tables[9] + columns
            seen = seen | (tl.load(place, mask=keep & (repetition != 1.0), other=0) != 0)
        z = tl.where(seen, tl.where(z > 0.0, tl.div_rn(z, repetition), z * repetition), z)
    if (PRESENCE | FREQUENCY) & USES:
        z -= tl.fma(counts, frequency, tl.where(counts > 0.0, presence, 0.0))
    if BIAS & USES:
        z += tl.load(bias_ptr + row * tables[10] + columns, mask=keep, other=0.0).to(tl.float32)
    return tl.where(z != z, float("inf"), z)


@triton.jit
def inverse_of(temperature_ptr, row, SMALLEST: tl.constexpr):
    """One over the row's temperature, rounded once as the reference does; 1 for greedy rows."""
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    inverse = tl.div_rn(temperature * 0.0 + 1.0, tl.maximum(temperature, SMALLEST))
    return tl.where(temperature == 0.0, 1.0, inverse)


@triton.jit
def group_weight(z, largest, inverse):
    """Sum of exp((z - largest) / temperature) along a group; 0 for a group of -inf."""
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    return tl.sum(tl.exp((z - safe[:, None]) * inverse), axis=1)


@triton.jit
def gumbel(index, seed, position, STREAM: tl.constexpr):
    """reference.py's noise, bit by bit: in fp64, because near 1 the logarithm of an fp32 loses it.
    Some hundreds of numbers a row, so the cost is nothing.
    """
    zero = index.to(tl.uint32) * 0
    c1 = zero + position.to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, index.to(tl.uint32), c1, zero + STREAM, zero)
    uniform = ((bits >> 8).to(tl.float64) + 0.5) * (1.0 / 16777216.0)
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


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
    SMALLEST: tl.constexpr,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
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
    row = tl.program_id(1).to(tl.int64)  # int64: offsets pass 2^31
    groups = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    z = load_logits(tables, row, columns, columns < vocab_size, USES)  # [TILE, GROUP]
    largest = tl.max(z, axis=1)
    weight = group_weight(z, largest, inverse_of(temperature_ptr, row, SMALLEST))
    place = row * num_groups + groups
    tl.store(largest_ptr + place, largest, mask=groups < num_groups)
    tl.store(sum_ptr + place, weight, mask=groups < num_groups)


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


@triton.jit
def draw_kernel(
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
    lowest_ptr,
    token_ptr,
    SMALLEST: tl.constexpr,
    HAS_LOWEST: tl.constexpr,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_STREAM: tl.constexpr,
    ENTRY_STREAM: tl.constexpr,
):
    """One program a row: the group, then the entry."""
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
    inverse = inverse_of(temperature_ptr, row, SMALLEST)
    drawn = tl.load(temperature_ptr + row) != 0.0
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    groups = tl.arange(0, GROUPS)
    in_row = groups < num_groups
    place = row * num_groups + groups
    largest = tl.load(largest_ptr + place, mask=in_row, other=float("-inf"))
    score = largest
    if drawn:
        sums = tl.load(sum_ptr + place, mask=in_row, other=0.0)
        noisy = largest * inverse + tl.log(tl.maximum(sums, 1e-30))
        noisy += gumbel(groups, seed, position, GROUP_STREAM)
        noisy = tl.where(sums > 0.0, noisy, float("-inf"))
        score = tl.where(largest == float("inf"), largest, noisy)
    group = tl.argmax(score, axis=0)  # the first of equals
    columns = group * GROUP + tl.arange(0, GROUP)
    z = load_logits(tables, row, columns, columns < vocab_size, USES)  # [GROUP]
    entry_score = z
    if drawn:
        entry_score = z * inverse + gumbel(columns, seed, position, ENTRY_STREAM)
        if HAS_LOWEST:
            entry_score = tl.where(z >= tl.load(lowest_ptr + row), entry_score, float("-inf"))
    entry = tl.argmax(entry_score, axis=0)
    tl.store(token_ptr + row, (group * GROUP + entry).to(tl.int64))


def sample_rows(
    logits_BV: Tensor,
    temperature_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    top_k_B: Tensor | None = None,
    top_p_B: Tensor | None = None,
    min_p_B: Tensor | None = None,
    repetition_B: Tensor | None = None,
    presence_B: Tensor | None = None,
    frequency_B: Tensor | None = None,
    output_counts_BV: Tensor | None = None,
    prompt_seen_BV: Tensor | None = None,
    bias_BV: Tensor | None = None,
    num_candidates: int = CANDIDATES,
) -> Tensor:
    """The launcher; arguments and result are reference.py's. `num_candidates` (a power of two) is
    how many entries the filters hold at once.
    """
    num_rows, vocab_size = logits_BV.shape
    num_groups = triton.cdiv(vocab_size, GROUP)
    if num_groups > MAX_GROUPS:
        raise UnsupportedError(f"a vocabulary of {vocab_size} is larger than {MAX_GROUPS * GROUP}")
    device = logits_BV.device
    tokens_B = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return tokens_B
    tables = [_rows(table) for table in (logits_BV, output_counts_BV, prompt_seen_BV, bias_BV)]
    penalties = (repetition_B, presence_B, frequency_B)
    largest_BG = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
    sum_BG = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
    shared = (
        *(logits_BV if table is None else table for table in tables),
        *(temperature_B if values is None else values for values in penalties),
        *(0 if table is None else table.stride(0) for table in tables),
        vocab_size,
        num_groups,
        temperature_B,
        largest_BG,
        sum_BG,
    )
    constants: dict[str, Any] = {
        "SMALLEST": SMALLEST_TEMPERATURE,
        "USES": _bits(
            output_counts_BV, prompt_seen_BV, bias_BV, repetition_B, presence_B, frequency_B
        ),
        "GROUP": GROUP,
    }
    all_groups = max(16, triton.next_power_of_2(num_groups))
    tile = min(TILE_GROUPS, all_groups)
    grid = (triton.cdiv(num_groups, tile), num_rows)
    launch(summarize_kernel, grid, shared, TILE=tile, num_warps=8, **constants)
    lowest_B = None
    if not (top_k_B is None and top_p_B is None and min_p_B is None):
        lowest_B = torch.empty(num_rows, dtype=torch.float32, device=device)
        list_BG = torch.empty(num_rows, num_groups, dtype=torch.int32, device=device)
        candidates = torch.empty(num_rows, num_candidates, dtype=torch.float32, device=device)
        filters = (top_k_B, top_p_B, min_p_B)
        launch(
            filter_kernel,
            (num_rows,),
            (
                *shared,
                *(temperature_B if values is None else values for values in filters),
                lowest_B,
                list_BG,
                candidates,
            ),
            HAS_TOP_K=top_k_B is not None,
            HAS_TOP_P=top_p_B is not None,
            HAS_MIN_P=min_p_B is not None,
            GROUPS=all_groups,
            TILE=min(FILTER_TILE_GROUPS, all_groups),
            CANDIDATES=num_candidates,
            num_warps=8,
            **constants,
        )
    launch(
        draw_kernel,
        (num_rows,),
        (
            *shared,
            seed_B,
            position_B,
            temperature_B if lowest_B is None else lowest_B,
            tokens_B,
        ),
        HAS_LOWEST=lowest_B is not None,
        GROUPS=all_groups,
        GROUP_STREAM=GROUP_STREAM,
        ENTRY_STREAM=ENTRY_STREAM,
        num_warps=4,
        **constants,
    )
    return tokens_B


def _bits(*given: Tensor | None) -> int:
    """USES: one bit for each table or penalty that is given, in the order of the constants."""
    return sum(1 << place for place, values in enumerate(given) if values is not None)


def _rows(table_BV: Tensor | None) -> Tensor | None:
    """The last dim contiguous, as the kernels read it; booleans as bytes."""
    if table_BV is None:
        return None
    rows = table_BV if table_BV.stride(-1) == 1 else table_BV.contiguous()
    return rows.view(torch.uint8) if rows.dtype == torch.bool else rows
