"""What every sampling kernel sees of a row: its logits with penalties and bias applied, and the
weights made of them.

A tile of groups is held as [GROUP / SEGMENT, TILE, SEGMENT]: parts, groups, neighbours. SEGMENT is
128 bytes: eight threads of a warp share a group and reduce most of it in their own registers; as
rows of 256 a whole warp would share it and spend a third of its time passing numbers around. It is
loaded as rows of a matrix, parts first, because compilers lay out three dims in different ways. The
order in which a group's weights are summed follows from this shape alone, so it is the same in
whatever batch a request runs.

Imported by the Triton files of this folder only.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Bits of USES: which tables and penalties a launch has.
COUNTS, SEEN, BIAS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
REPETITION, PRESENCE, FREQUENCY = tl.constexpr(8), tl.constexpr(16), tl.constexpr(32)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_logits(tables, row, start, offsets, keep, USES: tl.constexpr):
    """The row's logits at `start + offsets` after penalties and bias, in fp32; -inf outside `keep`
    (None: all are wanted).

    `tables` are the kernels' first eleven arguments. All kernels come here, and a product with its
    sum is written as fma: a compiler that fused them in one kernel and not in another would make a
    logit differ from itself at the threshold.
    """
    place = tables[0] + row * tables[7] + start + offsets
    if keep is None:
        z = tl.load(place).to(tl.float32)  # the definition is in fp32
    else:
        z = tl.load(place, mask=keep, other=float("-inf")).to(tl.float32)
    if USES:
        z = adjusted(tables, row, start + offsets, keep, z, USES)
    return z


@triton.jit
def adjusted(tables, row, columns, keep, z, USES: tl.constexpr):
    """reference.py's adjusted_logits."""
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
        place = tables[1] + row * tables[8] + columns
        counts = tl.load(place, mask=keep & wanted, other=0).to(tl.float32)
    if REPETITION & USES:
        seen = counts > 0.0
        if SEEN & USES:
            place = tables[2] + row * tables[9] + columns
            seen = seen | (tl.load(place, mask=keep & (repetition != 1.0), other=0) != 0)
        z = tl.where(seen, tl.where(z > 0.0, tl.div_rn(z, repetition), z * repetition), z)
    if (PRESENCE | FREQUENCY) & USES:
        z -= tl.fma(counts, frequency, tl.where(counts > 0.0, presence, 0.0))
    if BIAS & USES:
        place = tables[3] + row * tables[10] + columns
        z += tl.load(place, mask=keep, other=0.0).to(tl.float32)
    return z


@triton.jit
def nan_as_infinity(z):
    return tl.where(z != z, float("inf"), z)


@triton.jit
def tile_rows(GROUP: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr):
    """Which of a tile's groups each row of its matrix is a part of."""
    return tl.arange(0, GROUP // SEGMENT * TILE) % TILE


@triton.jit
def tile_offsets(groups, GROUP: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr):
    """Where the entries of a tile are, as a matrix; `groups`: of each row."""
    part = tl.arange(0, GROUP // SEGMENT * TILE) // TILE
    return (groups * GROUP + part * SEGMENT)[:, None] + tl.arange(0, SEGMENT)[None, :]


@triton.jit
def by_group(z, GROUP: tl.constexpr, SEGMENT: tl.constexpr, TILE: tl.constexpr):
    """The matrix as [parts, TILE, SEGMENT]."""
    return tl.reshape(z, (GROUP // SEGMENT, TILE, SEGMENT))


@triton.jit
def load_listed(
    tables,
    row,
    list_ptr,
    start,
    num_listed,
    vocab_size,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The next TILE groups of a row's list, as [parts, TILE, SEGMENT]; -inf past its end."""
    slots = start + tile_rows(GROUP, SEGMENT, TILE)
    ids = tl.load(list_ptr + slots, mask=slots < num_listed, other=0)
    offsets = tile_offsets(ids, GROUP, SEGMENT, TILE)
    keep = (offsets < vocab_size) & (slots < num_listed)[:, None]
    return by_group(load_logits(tables, row, 0, offsets, keep, USES), GROUP, SEGMENT, TILE)


@triton.jit
def of_groups_max(z):
    """[parts, TILE, SEGMENT] -> [TILE]."""
    return tl.max(tl.max(z, axis=0), axis=1)


@triton.jit
def of_groups_sum(z):
    return tl.sum(tl.sum(z, axis=0), axis=1)


@triton.jit
def of_threads_sum(z, SEGMENT: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr):
    """[parts, TILE, SEGMENT] -> [TILE, LANES]: what a group's threads can sum up by themselves."""
    apart = tl.reshape(z, (z.shape[0], TILE, LANES, SEGMENT // LANES))
    return tl.sum(tl.sum(apart, axis=0), axis=2)


@triton.jit
def of_threads_max(z, SEGMENT: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr):
    apart = tl.reshape(z, (z.shape[0], TILE, LANES, SEGMENT // LANES))
    return tl.max(tl.max(apart, axis=0), axis=2)


@triton.jit
def weights(z, row_max, rate):
    """exp((z - row_max) / temperature), with rate = log2(e) / temperature; 1 each with rate 0: then
    they are counted. -inf times 0 would be NaN.
    """
    return tl.exp2((tl.maximum(z, -1e30) - row_max) * rate)


@triton.jit
def group_weight(z, largest, rate):
    """Sum of exp((z - largest) / temperature) over each group; 0 for a group of -inf. `rate` is
    log2(e) / temperature: the chip's exponential is to the base of 2.
    """
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    return of_groups_sum(tl.exp2((z - safe[None, :, None]) * rate))


@triton.jit
def inverse_of(temperature_ptr, row, SMALLEST: tl.constexpr):
    """One over the row's temperature, rounded once as the reference does; 1 for greedy rows."""
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    inverse = tl.div_rn(temperature * 0.0 + 1.0, tl.maximum(temperature, SMALLEST))
    return tl.where(temperature == 0.0, 1.0, inverse)
