"""The draw, among what the filters keep (steps 4 and 5 of triton.py).

Imported by triton.py only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.sampling.bracket import (
    BY_COUNT,
    FIELDS,
    FLOOR,
    HIGH,
    LIMIT,
    LOW,
    OUTER_HIGH,
    OUTER_LOW,
    ROW_MAX,
    SURE_SCORE,
    TOP_P,
)
from ridgeline.kernels.sampling.draw import draw_entry, group_score, gumbel
from ridgeline.kernels.sampling.filter import (
    amounts_above,
    draw_between,
    keys_to_try,
    list_groups,
    narrowed_keys,
    order_key,
    order_value,
)
from ridgeline.kernels.sampling.logits import LOG2E, inverse_of


@triton.jit
def sifted(amounts_ptr, PIECES: tl.constexpr):
    """What sift.py found above the high end, and from the low end on."""
    pieces = amounts_ptr + tl.arange(0, PIECES)
    return tl.sum(tl.load(pieces), axis=0), tl.sum(tl.load(pieces + PIECES), axis=0)


@triton.jit
def closer_ends(bounds_ptr, amounts_ptr, low, high, fall, same, z, PIECES: tl.constexpr):
    """Narrower ends that the answer likely lies between, for sift.py's next pass, written to
    bounds_ptr with low and high, keys, which are certain. Returns the low one.

    What lies between the last ends lies about evenly there, so the answer is as far down as it
    takes to gather what the limit leaves. If it is not between them, it is likely next to them.
    fall: one over the temperature, or 0 where entries count alike. If only an entry is in question
    (`same`), all that matters is whether the answer is above its logit z.
    """
    above_high, from_low = sifted(amounts_ptr, PIECES)
    old_high = tl.load(bounds_ptr + HIGH)
    width = tl.minimum(old_high - tl.load(bounds_ptr + LOW), 1e30)  # finite if the low end is not
    wanted = tl.load(bounds_ptr + LIMIT) - above_high
    share = wanted / tl.maximum(from_low - above_high, 1e-30)
    within = (share > 0.0) & (share <= 1.0)
    # Among evenly spaced logits, weights fall by exp(-drop) from end to end, so their sums rise
    # with the distance x as (1 - exp(-x * drop)) / (1 - exp(-drop)).
    drop = tl.maximum(width * fall, 1e-4)
    distance = -tl.log(1.0 - share * (1.0 - tl.exp(-drop))) / drop
    distance = tl.where(within, distance, tl.where(share > 0.0, 1.5, -0.5))
    center = old_high - width * distance
    reach = width * tl.where(within, tl.minimum(0.02 + 0.25 * drop, 0.25), 0.5)
    low_end, high_end = order_value(low), order_value(high)
    new_low = tl.minimum(tl.maximum(center - reach, low_end), high_end)
    new_high = tl.maximum(tl.minimum(center + reach, high_end), new_low)
    new_low = tl.where(same, order_value(order_key(z) + 1), new_low)
    new_high = tl.where(same, high_end, new_high)
    tl.debug_barrier()  # all threads have read what is now written
    tl.store(bounds_ptr + LOW, new_low)
    tl.store(bounds_ptr + HIGH, new_high)
    tl.store(bounds_ptr + OUTER_LOW, low_end)
    tl.store(bounds_ptr + OUTER_HIGH, high_end)
    return new_low


@triton.jit
def draw_filtered(
    tables,
    row,
    groups,
    largest,
    score,
    noise,
    inverse,
    num_listed,
    vocab_size,
    num_groups,
    largest_ptr,
    seed_ptr,
    position_ptr,
    token_ptr,
    bounds_ptr,
    num_listed_ptr,
    list_ptr,
    parts_ptr,
    amounts_ptr,
    scores_ptr,
    needed_ptr,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    PIECES: tl.constexpr,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    LAST: tl.constexpr,
    GROUP_STREAM: tl.constexpr,
    ENTRY_STREAM: tl.constexpr,
):
    """Store the row's token, if LAST or possible without another pass. The smallest kept logit is
    only found as far as that needs it: an entry that is drawn from all that may be kept, and that
    is surely kept itself, is the one.
    """
    in_row = groups < num_groups
    row_max = tl.max(largest, axis=0)
    least_ptr = scores_ptr + num_groups
    sure_ptr = bounds_ptr + SURE_SCORE
    tl.store(scores_ptr + groups, score, mask=in_row)
    tl.store(least_ptr + groups, tl.fma(largest, inverse + noise * 0.0, noise), mask=in_row)
    floor = tl.load(bounds_ptr + FLOOR)
    sure = tl.full((), float("-inf"), tl.float32)
    low, high = order_key(floor), order_key(floor)
    limit, by_count, both, untried = floor, low > high, low > high, low > high
    many = num_listed > FEW
    # What lies above `top`, where groups that only have such entries are not listed.
    base, top = tl.full((), 0.0, tl.float32), row_max
    if num_listed > 0:
        low = order_key(tl.load(bounds_ptr + OUTER_LOW))
        high = order_key(tl.load(bounds_ptr + OUTER_HIGH))
        likely_low = order_key(tl.load(bounds_ptr + LOW))
        likely_high = order_key(tl.load(bounds_ptr + HIGH))
        limit = tl.load(bounds_ptr + LIMIT)
        by_count = tl.load(bounds_ptr + BY_COUNT) != 0.0
        both = by_count & (tl.load(bounds_ptr + TOP_P) < 1.0)
        untried = ((likely_low > low) | (likely_high < high)) & (many == 0)
        if many:  # sift.py has tried the likely ends
            above_high, from_low = sifted(amounts_ptr, PIECES)
            low, high = narrowed_keys(
                low, high, limit, by_count,
                (likely_low - 1, likely_high, likely_high, likely_high),
                (from_low, above_high, above_high, above_high),
            )  # fmt: skip
            listed = in_row & (largest >= tl.load(bounds_ptr + LOW))
            above = tl.load(parts_ptr + groups, mask=listed, other=0.0)
            if LAST:  # noqa: SIM102  (known to the compiler; the other is not)
                if (above_high < limit) & (from_low >= limit):  # between them: few groups are left
                    base, top = above_high, tl.load(bounds_ptr + HIGH)
                    from_end = tl.load(parts_ptr + num_groups + groups, mask=listed, other=0.0)
                    num_listed = list_groups(from_end > above, groups, list_ptr)
            if (by_count == 0) & (above_high < limit) & (floor == float("-inf")):
                kept = tl.log(tl.maximum(above, 1e-30)) + row_max * inverse + noise
                sure = tl.max(tl.where(above > 0.0, kept, float("-inf")), axis=0)
    tl.store(sure_ptr, sure)
    tl.debug_barrier()  # read by other threads than wrote it
    searches = untried | both
    if LAST:
        listed_from = order_key(tl.load(bounds_ptr + LOW))
        aim = low
        pending = num_listed >= 0
        while pending:
            if searches:
                row_max = tl.load(bounds_ptr + ROW_MAX)  # read again: registers are few
                weigh = both & (low == high)  # top-k is settled: how much weighs what it keeps?
                if ((low < listed_from) & (untried == 0)) | (weigh & (top < row_max)):
                    largest = tl.load(largest_ptr + groups, mask=in_row, other=float("-inf"))
                    reaches = in_row & (largest >= order_value(low))
                    num_listed = list_groups(reaches, groups, list_ptr)
                    base, top, listed_from = tl.full((), 0.0, tl.float32), row_max, low
                likely_low = tl.where(weigh, low, order_key(tl.load(bounds_ptr + LOW)))
                likely_high = tl.load(bounds_ptr + tl.where(weigh, ROW_MAX, HIGH))
                likely_high = order_key(likely_high)
                high = tl.where(weigh, likely_high, high)
                keys = keys_to_try(low, high, likely_low, likely_high, untried | weigh, aim)
                amounts, least, most = amounts_above(
                    tables, row, list_ptr, num_listed, vocab_size, keys, low, high, top, base,
                    row_max, inverse * LOG2E, by_count & (weigh == 0),
                    USES, GROUP, SEGMENT, TILE, LANES,
                )  # fmt: skip
                limit = tl.where(weigh, tl.load(bounds_ptr + TOP_P) * amounts[0], limit)
                by_count = by_count & (weigh == 0)
                knows_all = low >= listed_from  # all entries between the ends: snap to them
                low, high = narrowed_keys(low, high, limit, by_count, keys, amounts)
                low = tl.where(knows_all, tl.maximum(low, least), low)
                high = tl.where(knows_all, tl.maximum(tl.minimum(high, most), low), high)
                both, untried = both & (weigh == 0), low > high
            if both == 0:
                floor = tl.load(bounds_ptr + FLOOR)
                token, same, z = draw_between(
                    tables, row, groups, in_row, largest_ptr, scores_ptr, least_ptr, sure_ptr,
                    needed_ptr, vocab_size, inverse,
                    tl.maximum(order_value(low), floor), tl.maximum(order_value(high), floor),
                    tl.load(seed_ptr + row), tl.load(position_ptr + row),
                    USES, GROUP, SEGMENT, TILE, GROUP_STREAM, ENTRY_STREAM,
                )  # fmt: skip
                tl.store(token_ptr + row, token)
                aim = order_key(z)  # whether it is kept is the question, if it is not settled
                pending = (same == 0) | (z < tl.maximum(order_value(high), floor))
            searches = pending
    elif searches == 0:
        token, same, z = draw_between(
            tables, row, groups, in_row, largest_ptr, scores_ptr, least_ptr, sure_ptr,
            needed_ptr, vocab_size, inverse,
            tl.maximum(order_value(low), floor), tl.maximum(order_value(high), floor),
            tl.load(seed_ptr + row), tl.load(position_ptr + row),
            USES, GROUP, SEGMENT, TILE, GROUP_STREAM, ENTRY_STREAM,
        )  # fmt: skip
        if same & (z >= tl.maximum(order_value(high), floor)):
            tl.store(token_ptr + row, token)
            tl.store(num_listed_ptr + row, 0)
        elif many:
            fall = tl.where(by_count, 0.0, inverse)
            new_low = closer_ends(bounds_ptr, amounts_ptr, low, high, fall, same, z, PIECES)
            num_listed = list_groups(in_row & (largest >= new_low), groups, list_ptr)
            tl.store(num_listed_ptr + row, num_listed)


@triton.jit
def finish_kernel(
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
    bounds_ptr,
    num_listed_ptr,
    list_ptr,
    parts_ptr,
    amounts_ptr,
    scores_ptr,  # scratch [B, 2, num_groups]
    needed_ptr,  # scratch [B, num_groups]
    SMALLEST: tl.constexpr,
    FILTERED: tl.constexpr,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    FEW: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    GROUP_STREAM: tl.constexpr,
    ENTRY_STREAM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row. Not LAST: what is not settled by what is known is left to the next launch,
    rows of many groups after another pass of sift.py. Not FIRST: only such rows.
    """
    tables = (
        logits_ptr, counts_ptr, seen_ptr, bias_ptr, repetition_ptr, presence_ptr, frequency_ptr,
        logits_stride, counts_stride, seen_stride, bias_stride,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)  # int64: offsets pass 2^31
    num_listed = tl.full((), 0, tl.int32)
    if FILTERED:
        num_listed = tl.load(num_listed_ptr + row)
    if num_listed >= (0 if FIRST else 1):
        largest_ptr += row * num_groups
        groups = tl.arange(0, GROUPS)
        in_row = groups < num_groups
        largest = tl.load(largest_ptr + groups, mask=in_row, other=float("-inf"))  # [GROUPS]
        inverse = inverse_of(temperature_ptr, row, SMALLEST)
        drawn = tl.load(temperature_ptr + row) != 0.0
        seed = tl.load(seed_ptr + row)
        position = tl.load(position_ptr + row)
        score, noise = largest, tl.zeros((GROUPS,), dtype=tl.float32)
        if drawn:
            sums = tl.load(sum_ptr + row * num_groups + groups, mask=in_row, other=0.0)
            noise = gumbel(groups, seed, position, GROUP_STREAM)
            score = group_score(largest, sums, inverse, noise)  # as if nothing were dropped
        plain = num_listed == 0
        if FILTERED:
            plain = plain & (tl.load(bounds_ptr + row * FIELDS + FLOOR) == float("-inf"))
            if plain == 0:
                draw_filtered(
                    tables, row, groups, largest, score, noise, inverse, num_listed,
                    vocab_size, num_groups, largest_ptr, seed_ptr, position_ptr, token_ptr,
                    bounds_ptr + row * FIELDS, num_listed_ptr, list_ptr + row * num_groups,
                    parts_ptr + row * (2 * num_groups), amounts_ptr + row * (2 * PIECES),
                    scores_ptr + row * (2 * num_groups), needed_ptr + row * num_groups,
                    USES, GROUP, SEGMENT, PIECES, FEW, TILE, LANES, LAST,
                    GROUP_STREAM, ENTRY_STREAM,
                )  # fmt: skip
        if plain:
            group = tl.argmax(score, axis=0)  # the first of equals
            token, _ = draw_entry(
                tables, row, group, vocab_size, inverse, drawn, seed, position, float("-inf"),
                USES, GROUP, ENTRY_STREAM,
            )  # fmt: skip
            tl.store(token_ptr + row, token)
