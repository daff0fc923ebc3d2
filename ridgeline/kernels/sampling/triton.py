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
from ridgeline.kernels.sampling.filter import filter_kernel
from ridgeline.kernels.sampling.logits import (
    group_weight,
    inverse_of,
    load_logits,
)
from ridgeline.kernels.sampling.reference import (
    ENTRY_STREAM,
    GROUP,
    GROUP_STREAM,
    SMALLEST_TEMPERATURE,
)

MAX_GROUPS = 4096  # a row's groups are held in registers at once: vocabularies up to 1,048,576
CANDIDATES = 4096  # how many entries of a row the filters hold at once
# Groups a program reads at once: 8192 entries keep enough loads in flight for the one pass over all
# logits; the filters take fewer, so that several of their programs fit on an SM. Heuristics until
# measured.
TILE_GROUPS, FILTER_TILE_GROUPS = 32, 16


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
