"""The draw: noise, scores of groups, and the entry of the group that was drawn.

Imported by the Triton files of this folder only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.sampling.logits import load_logits, nan_as_infinity


@triton.jit
def gumbel(index, seed, position, STREAM: tl.constexpr):
    """reference.py's noise, -log(-log(u)) with u = (24 bits + 1/2) / 2^24, to about 3e-7: less than
    an fp32 score is rounded by.

    fp32 suffices because the inner logarithm is never taken near 1, where it would lose all: there
    t = 1 - u is exact, and -log(1 - t) = 2 artanh(s) with s = t / (2 - t) is a short series.
    """
    zero = index.to(tl.uint32) * 0
    c1 = zero + position.to(tl.uint32)
    bits, _, _, _ = tl.philox(seed, index.to(tl.uint32), c1, zero + STREAM, zero)
    bits = (bits >> 8).to(tl.int32)  # signed: below, they are taken from 2^24
    t = ((16777216 - bits).to(tl.float32) - 0.5) * (1.0 / 16777216.0)
    s = t / (2.0 - t)  # at most 1/3 where it is used
    q = s * s
    series = 1.0 + q * (
        0.33333333 + q * (0.2 + q * (0.14285714 + q * (0.11111111 + q * (0.09090909 + q * 0.0769))))
    )
    u = (bits.to(tl.float32) + 0.5) * (1.0 / 16777216.0)
    return -tl.log(tl.where(bits >= 8388608, 2.0 * s * series, -tl.log(u)))


@triton.jit
def group_score(largest, sums, inverse, noise):
    """log of a group's weight, with noise; its weights are relative to its largest logit. Groups
    without weight come last, groups with an infinity (or NaN) first.
    """
    # fma, named: fused in one kernel and not in another it would be another number
    score = tl.fma(largest, inverse + noise * 0.0, tl.log(tl.maximum(sums, 1e-30))) + noise
    score = tl.where(sums > 0.0, score, float("-inf"))
    return tl.where(largest == float("inf"), largest, score)


@triton.jit
def draw_entry(
    tables,
    row,
    group,
    vocab_size,
    inverse,
    drawn,
    seed,
    position,
    lowest,
    USES: tl.constexpr,
    GROUP: tl.constexpr,
    STREAM: tl.constexpr,
):
    """The entry of `group` with the largest noisy logit of those that are at least `lowest`, and
    its logit; without noise for greedy rows.
    """
    offsets = tl.arange(0, GROUP)
    start = group * GROUP
    z = load_logits(tables, row, start, offsets, start + offsets < vocab_size, USES)
    z = nan_as_infinity(z)
    score = z
    if drawn:
        noise = gumbel(start + offsets, seed, position, STREAM)
        score = tl.fma(z, inverse + noise * 0.0, noise)
        score = tl.where(z >= lowest, score, float("-inf"))
    entry = tl.argmax(score, axis=0)  # the first of equals
    logit = tl.max(tl.where(offsets == entry, z, float("-inf")), axis=0)
    return (start + entry).to(tl.int64), logit
