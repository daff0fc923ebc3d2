"""Between which two logits the smallest kept one lies (step 2 of triton.py): from what the groups'
summaries say for certain and, where that leaves much of the row, from a sample of it.

Imported by the Triton files of this folder only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.sampling.logits import LOG2E, inverse_of, load_logits

# What the filters ask of a row, in bounds [B, FIELDS]: the two ends; the two ends that are certain,
# where those are only likely; the row's largest logit; the limit: the smallest logit is sought that
# has fewer entries above it (BY_COUNT is 1: top-k), or less weight; top_p; min_p's bound; and a
# score that some group has anyway.
LOW, HIGH, OUTER_LOW, OUTER_HIGH = (tl.constexpr(f) for f in range(4))
ROW_MAX, LIMIT, BY_COUNT, TOP_P, FLOOR, SURE_SCORE = (tl.constexpr(f) for f in range(4, 10))
FIELDS = tl.constexpr(10)
PIVOTS = tl.constexpr(8)  # logits tried at once, half of them for each end
GROUP_STEPS = tl.constexpr(4)  # the range over 5^4
SAMPLE_PIVOTS, SAMPLE_STEPS = tl.constexpr(4), tl.constexpr(6)  # the range over 3^6
SAMPLE, TOGETHER = tl.constexpr(2048), tl.constexpr(8)  # entries, and neighbours among them
SURE = tl.constexpr(2.0)  # standard deviations that are allowed for


@triton.jit
def spread(low, unsure_low, unsure_high, high, COUNT: tl.constexpr):
    """COUNT logits: half between the low end and what is known not to be one, half between what is
    known not to be a high end and the high end; and which are which.
    """
    index = tl.arange(0, COUNT)
    for_high = index >= COUNT // 2
    below = tl.where(for_high, unsure_high, low)
    above = tl.where(for_high, high, unsure_low)
    step = (index % (COUNT // 2) + 1).to(tl.float32) / (COUNT // 2 + 1)
    return below + (above - below) * step, for_high


@triton.jit
def narrowed(pivots, for_high, is_low, is_high, low, unsure_low, unsure_high, high):
    """The four ends after `spread`'s logits were tried. One that fails as a high end says nothing
    if a smaller one does not: a sample is less sure of larger logits.
    """
    low = tl.max(tl.where(is_low & (for_high == 0), pivots, low), axis=0)
    unsure_low = tl.min(tl.where(is_low | for_high, unsure_low, pivots), axis=0)
    high = tl.min(tl.where(is_high & for_high, pivots, high), axis=0)
    failed = (is_high == 0) & for_high & (pivots < high)
    unsure_high = tl.max(tl.where(failed, pivots, unsure_high), axis=0)
    return low, tl.maximum(low, unsure_low), unsure_high, high


@triton.jit
def bracket_by_groups(largest, least, most, start, row_max, low_limit, high_limit):
    """Two logits that the smallest kept one lies between. least and most: what a group with such a
    largest logit has at least and at most of the amount that the limits are of, above whatever its
    largest logit is above. -inf where all groups have not enough for a low end.
    """
    low, unsure_low, unsure_high, high = start, row_max, start, row_max
    for _ in range(GROUP_STEPS):
        pivots, for_high = spread(low, unsure_low, unsure_high, high, PIVOTS)
        each = tl.where(for_high[:, None], most[None, :], least[None, :])
        amount = tl.sum(tl.where(largest[None, :] > pivots[:, None], each, 0.0), axis=1)
        low, unsure_low, unsure_high, high = narrowed(
            pivots, for_high, amount >= low_limit, amount < high_limit,
            low, unsure_low, unsure_high, high,
        )  # fmt: skip
    return tl.where(low > start, low, float("-inf")), high


@triton.jit
def bracket_by_sample(z, certain, highest, row_max, rate, by_count, total, limit, factor):
    """Two logits that the smallest kept one lies between, as far as a sample can tell; it is at
    least `certain` and at most `highest`.

    Each sampled entry stands for `factor` of them. By weight, what lies below a logit is estimated
    and taken from the known total: the weights there are the smaller ones, so the estimate is the
    better one. Its variance is at most the logit's weight times the sum; four more entries than
    were seen are allowed for, because none seen does not mean that there is none.
    """
    weight = tl.exp2((z - row_max) * rate)
    when_below = tl.where(by_count, weight * 0.0, weight)
    when_above = tl.where(by_count, weight * 0.0 + 1.0, weight * 0.0)
    start = tl.maximum(certain, tl.min(tl.where(z > float("-inf"), z, highest), axis=0))
    low, unsure_low, unsure_high, high = start, highest, start, highest
    for _ in range(SAMPLE_STEPS):
        pivots, for_high = spread(low, unsure_low, unsure_high, high, SAMPLE_PIVOTS)
        parts = tl.where(z[None, :] > pivots[:, None], when_above[None, :], when_below[None, :])
        seen = tl.sum(parts, axis=1)
        one = tl.exp2((pivots - row_max) * rate)
        one = tl.where(by_count, one * 0.0 + 1.0, one)
        unsure = SURE * factor * tl.sqrt(one * (seen + 4.0 * one))
        larger = tl.where(by_count, factor * seen, total - factor * seen)
        low, unsure_low, unsure_high, high = narrowed(
            pivots, for_high, larger - unsure >= limit, larger + unsure < limit,
            low, unsure_low, unsure_high, high,
        )  # fmt: skip
    return tl.where(low > start, low, certain), high


@triton.jit
def bracket_kernel(
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
    bounds_ptr,  # out [B, FIELDS]
    num_listed_ptr,  # out [B]: how many groups reach the low end; 0: there is nothing to search
    list_ptr,  # out [B, num_groups]: which
    SMALLEST: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row. FEW: as many listed groups are little work."""
    tables = (
        logits_ptr, counts_ptr, seen_ptr, bias_ptr, repetition_ptr, presence_ptr, frequency_ptr,
        logits_stride, counts_stride, seen_stride, bias_stride,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)  # int64: offsets pass 2^31
    groups = tl.arange(0, GROUPS)
    in_row = groups < num_groups
    place = row * num_groups + groups
    largest = tl.load(largest_ptr + place, mask=in_row, other=float("-inf"))  # [GROUPS]
    inverse = inverse_of(temperature_ptr, row, SMALLEST)
    rate = inverse * LOG2E
    drawn = tl.load(temperature_ptr + row) != 0.0
    top_k = tl.full((), 0, tl.int32)
    top_p = tl.full((), 1.0, tl.float32)
    floor = tl.full((), float("-inf"), tl.float32)
    row_max = tl.max(largest, axis=0)
    finite = (row_max < float("inf")) & (row_max > float("-inf"))
    if HAS_TOP_K:
        top_k = tl.load(top_k_ptr + row).to(tl.int32)
    if HAS_TOP_P:
        top_p = tl.load(top_p_ptr + row).to(tl.float32)
    if HAS_MIN_P:
        min_p = tl.load(min_p_ptr + row).to(tl.float32)
        if (min_p > 0.0) & finite & drawn:
            # exp((z - row_max) / temperature) >= min_p, solved for z
            floor = tl.minimum(row_max, row_max + tl.div_rn(tl.log(min_p), inverse))
    by_k = (top_k > 0) & (top_k < vocab_size)
    by_p = top_p < 1.0
    bounds_ptr += row * FIELDS
    num_listed = tl.full((), 0, tl.int32)
    if (by_k | by_p) & finite & drawn:
        sums = tl.load(sum_ptr + place, mask=in_row, other=0.0)
        of_largest = tl.exp2((largest - row_max) * rate)
        of_all = sums * of_largest
        total = tl.sum(of_all, axis=0)
        limit = tl.where(by_k, top_k.to(tl.float32), top_p * total)
        # 1. From the groups. k groups whose largest logits are above a logit hold k entries that
        # are; groups whose largest logits have the weight likewise. The other way round, the
        # groups' whole weight bounds what is above; their number does not, but of k entries in
        # random groups it is known how many are the largest of theirs. The margins are for sums
        # rounded differently.
        num = num_groups * 1.0
        different = num * (1.0 - tl.exp(-limit / num))
        different = different - 4.0 * tl.sqrt(tl.maximum(limit - different, 0.0) + 1.0) - 1.0
        least = tl.where(by_k, (largest > float("-inf")).to(tl.float32), of_largest)
        most = tl.where(by_k, least, of_all)
        certain = tl.full((), float("-inf"), tl.float32)
        if by_k == 0:
            # All logits below this could not have 1 - p of the weight together.
            rest = tl.maximum((1.0 - top_p) * 0.9999 * total / vocab_size, 1e-30)
            certain = row_max + tl.log2(rest) / rate
        low, high, certain_high = certain, row_max, row_max
        if tl.sum(least, axis=0) >= 0.25 * limit:  # else they say next to nothing
            start = tl.min(tl.where(largest > float("-inf"), largest, row_max), axis=0)
            found_low, high = bracket_by_groups(
                largest, least, most, tl.maximum(start, certain), row_max,
                tl.where(by_k, limit, limit * 1.0001), tl.where(by_k, different, limit * 0.9999),
            )  # fmt: skip
            certain = tl.maximum(certain, found_low)
            low = certain
            certain_high = tl.where(by_k, row_max, high)
        # 2. Where many groups are left, from a sample too.
        num_reaching = tl.sum((in_row & (largest >= low)).to(tl.int32), axis=0)
        if num_reaching > FEW:
            index = tl.arange(0, SAMPLE)
            spot = (index // TOGETHER) * vocab_size // (SAMPLE // TOGETHER)  # below 2^31
            columns = spot // TOGETHER * TOGETHER + index % TOGETHER
            in_vocab = columns < vocab_size
            z = load_logits(tables, row, 0, columns, in_vocab, USES)
            factor = vocab_size / tl.sum(in_vocab.to(tl.float32), axis=0)
            likely_low, likely_high = bracket_by_sample(
                z, certain, high, row_max, rate, by_k, total, limit, factor
            )
            low = tl.maximum(low, likely_low)
            high = tl.maximum(low, likely_high)
        # 3. The groups that reach the low end, listed; the others hold nothing that is kept.
        reaches = (largest >= low) & (largest > float("-inf"))
        num_listed = tl.sum(reaches.to(tl.int32), axis=0)
        slot = tl.cumsum(reaches.to(tl.int32), axis=0) - 1
        tl.store(list_ptr + row * num_groups + slot, groups, mask=reaches)
        tl.store(bounds_ptr + LOW, low)
        tl.store(bounds_ptr + HIGH, high)
        tl.store(bounds_ptr + OUTER_LOW, certain)
        tl.store(bounds_ptr + OUTER_HIGH, certain_high)
        tl.store(bounds_ptr + ROW_MAX, row_max)
        tl.store(bounds_ptr + LIMIT, limit)
        tl.store(bounds_ptr + BY_COUNT, by_k.to(tl.float32))
        tl.store(bounds_ptr + TOP_P, top_p)
    tl.store(bounds_ptr + FLOOR, floor)
    tl.store(num_listed_ptr + row, num_listed)
