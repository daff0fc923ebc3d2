"""What every sampling kernel sees of a row: its logits with penalties and bias applied, and weights
of groups.

Imported by the Triton files of this folder only.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Bits of USES: which tables and penalties a launch has.
COUNTS, SEEN, BIAS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
REPETITION, PRESENCE, FREQUENCY = tl.constexpr(8), tl.constexpr(16), tl.constexpr(32)


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
