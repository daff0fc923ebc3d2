"""The search for the smallest logit that is kept, as far as a draw needs it (step 4 of triton.py).

Imported by finish.py only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.sampling.draw import draw_entry, group_score, gumbel
from ridgeline.kernels.sampling.logits import (
    LOG2E,
    load_listed,
    of_groups_sum,
    of_threads_max,
    of_threads_sum,
    weights,
)


@triton.jit
def order_key(z):
    """Integers in the order of the floats they come from (-0 with +0); `order_value` goes back."""
    bits = (tl.maximum(z, -3.4e38) + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def order_value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def list_groups(wanted, groups, list_ptr):
    """Put the wanted groups side by side; returns how many they are."""
    tl.debug_barrier()  # an older list may still be read
    slot = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    tl.store(list_ptr + slot, groups, mask=wanted)
    tl.debug_barrier()  # read by other threads than wrote it
    return tl.sum(wanted.to(tl.int32), axis=0)


@triton.jit
def amounts_above(
    tables,
    row,
    list_ptr,
    num_listed,
    vocab_size,
    keys,
    low,
    high,
    top,
    base,
    row_max,
    rate,
    by_count,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Number or weight of the entries above each of four keys: `base` lies above `top`, and from
    there on the listed groups hold all. Also the smallest and the largest key from low to high that
    an entry has.
    """
    rate = tl.where(by_count, 0.0, rate)
    z_0, z_1 = order_value(keys[0]), order_value(keys[1])
    z_2, z_3 = order_value(keys[2]), order_value(keys[3])
    z_low, z_high = order_value(low), order_value(high)
    above_0 = tl.zeros((TILE, LANES), dtype=tl.float32)  # counts below 2^24 are exact
    above_1, above_2, above_3 = above_0, above_0, above_0
    least, most = above_0 + float("inf"), above_0 - float("inf")
    for start in tl.range(0, num_listed, TILE, num_stages=3):
        z = load_listed(
            tables, row, list_ptr, start, num_listed, vocab_size, USES, GROUP, SEGMENT, TILE
        )
        z = tl.where(z > top, float("-inf"), z)
        weight = weights(z, row_max, rate)
        above_0 += of_threads_sum((z > z_0).to(tl.float32) * weight, SEGMENT, TILE, LANES)
        above_1 += of_threads_sum((z > z_1).to(tl.float32) * weight, SEGMENT, TILE, LANES)
        above_2 += of_threads_sum((z > z_2).to(tl.float32) * weight, SEGMENT, TILE, LANES)
        above_3 += of_threads_sum((z > z_3).to(tl.float32) * weight, SEGMENT, TILE, LANES)
        below = tl.where(z <= z_high, z, float("-inf"))
        most = tl.maximum(most, of_threads_max(below, SEGMENT, TILE, LANES))
        from_low = tl.where(z >= z_low, -z, float("-inf"))
        least = tl.minimum(least, -of_threads_max(from_low, SEGMENT, TILE, LANES))
    amounts = (
        base + tl.sum(above_0),
        base + tl.sum(above_1),
        base + tl.sum(above_2),
        base + tl.sum(above_3),
    )
    return amounts, order_key(tl.min(least)), order_key(tl.max(most))


@triton.jit
def keys_to_try(low, high, likely_low, likely_high, use_likely, aim):
    """Four keys: the likely ends and two in between; or `aim` and three evenly between the ends."""
    base = tl.where(use_likely, likely_low - 1, low)
    span = tl.where(use_likely, likely_high - base, high - low).to(tl.uint32, bitcast=True)
    # Thirds, or quarters, of 2^32: the high half of the product is the share.
    one = tl.umulhi(span, tl.where(use_likely, 0, 1073741824).to(tl.uint32))
    two = tl.umulhi(span, tl.where(use_likely, 1431655765, 2147483648).to(tl.uint32))
    three = tl.umulhi(span, tl.where(use_likely, 2863311530, 3221225472).to(tl.uint32))
    aim = tl.minimum(tl.maximum(aim, low), tl.maximum(high - 1, low))
    return (
        base + one.to(tl.int32, bitcast=True),
        base + two.to(tl.int32, bitcast=True),
        base + three.to(tl.int32, bitcast=True),
        tl.where(use_likely, likely_high, aim),
    )


@triton.jit
def narrowed_keys(low, high, limit, by_count, keys, amounts):
    """The two ends, as keys, after four were tried: the answer is the smallest key with less than
    `limit` above it.
    """
    new_low, new_high, reach = low, high, limit + 1.0
    for i in tl.static_range(4):
        enough = amounts[i] < limit
        reach = tl.where(enough | (keys[i] + 1 < new_low), reach, amounts[i])
        new_low = tl.where(enough, new_low, tl.maximum(new_low, keys[i] + 1))
        new_high = tl.where(enough, tl.minimum(new_high, keys[i]), new_high)
    # Where exactly as many as are wanted reach the low end, it keeps what the answer does. Below a
    # certain low end nothing is found but another rounding of the same sum.
    new_high = tl.where(by_count & (reach == limit), new_low, new_high)
    return new_low, tl.maximum(new_low, new_high)


@triton.jit
def draw_group(
    tables,
    row,
    list_ptr,
    num_listed,
    largest_ptr,
    vocab_size,
    inverse,
    low,
    high,
    seed,
    position,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    STREAM: tl.constexpr,
):
    """The listed group that is drawn if the smallest kept logit is `high`, and whether it is drawn
    with every other one from `low` on. A group's score only falls as less of it is kept, so it is
    if at its lowest it is above the others' highest.
    """
    minus = tl.full((), float("-inf"), tl.float32)
    group, best, top_group, top, second = tl.load(list_ptr), minus, tl.load(list_ptr), minus, minus
    for start in range(0, num_listed, TILE):
        slots = start + tl.arange(0, TILE)
        ids = tl.load(list_ptr + slots, mask=slots < num_listed, other=0)
        largest = tl.load(largest_ptr + ids)
        z = load_listed(
            tables, row, list_ptr, start, num_listed, vocab_size, USES, GROUP, SEGMENT, TILE
        )
        weight = tl.exp2((z - largest[None, :, None]) * (inverse * LOG2E))
        at_most = of_groups_sum((z >= low).to(tl.float32) * weight)
        at_least = of_groups_sum((z >= high).to(tl.float32) * weight)
        noise = gumbel(ids, seed, position, STREAM)
        highest = group_score(largest, at_most, inverse, noise)
        lowest = group_score(largest, at_least, inverse, noise)
        lowest = tl.where(slots < num_listed, lowest, float("-inf"))
        highest = tl.where(slots < num_listed, highest, float("-inf"))
        tile_best = tl.max(lowest, axis=0)
        first = tl.min(tl.where(lowest == tile_best, ids, 2147483647), axis=0)  # of equals
        group = tl.where(tile_best > best, first, group)
        best = tl.maximum(best, tile_best)
        tile_top = tl.max(highest, axis=0)
        first = tl.min(tl.where(highest == tile_top, ids, 2147483647), axis=0)
        tile_second = tl.max(tl.where(ids == first, float("-inf"), highest), axis=0)
        second = tl.maximum(tl.minimum(top, tile_top), tl.maximum(second, tile_second))
        top_group = tl.where(tile_top > top, first, top_group)
        top = tl.maximum(top, tile_top)
    rival = tl.where(top_group == group, second, top)
    return group, (best > rival) | (low == high)


@triton.jit
def draw_between(
    tables,
    row,
    groups,
    in_row,
    largest_ptr,
    score_ptr,
    least_ptr,
    sure_ptr,
    needed_ptr,
    vocab_size,
    inverse,
    low,
    high,
    seed,
    position,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_STREAM: tl.constexpr,
    ENTRY_STREAM: tl.constexpr,
):
    """The token drawn among entries from `low` on, whether its group is the one drawn whatever the
    smallest kept logit is from low to high, and its logit: if that is at least `high`, the token is
    kept anyway.

    score, least: the groups' scores if all were kept of them, or only their largest logits; sure: a
    score that some group has anyway. They are read from memory because registers are few. Groups
    whose highest score is below another's lowest need not be looked into; the margin is for sums
    rounded differently.
    """
    largest = tl.load(largest_ptr + groups, mask=in_row, other=float("-inf"))
    score = tl.load(score_ptr + groups, mask=in_row, other=float("-inf"))
    least = tl.load(least_ptr + groups, mask=in_row, other=float("-inf"))
    best = tl.max(tl.where(largest >= high, least, float("-inf")), axis=0)
    best = tl.maximum(best, tl.load(sure_ptr))
    needed = (largest >= low) & (score >= best - (1e-3 + 1e-6 * tl.abs(best)))
    num_needed = list_groups(needed, groups, needed_ptr)
    group, same = draw_group(
        tables, row, needed_ptr, num_needed, largest_ptr, vocab_size, inverse, low, high,
        seed, position, USES, GROUP, SEGMENT, TILE, GROUP_STREAM,
    )  # fmt: skip
    token, z = draw_entry(
        tables, row, group, vocab_size, inverse, True, seed, position, low,
        USES, GROUP, ENTRY_STREAM,
    )  # fmt: skip
    return token, same, z
