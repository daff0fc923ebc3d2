"""Decode rows of the fixed attention, under Triton's interpreter: the bits of the prompts' kernel,
whatever order, parts and company; and no more memory than is planned.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.attention.inputs import random_cache
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.deterministic_attention.splits import (
    MOST_PARTIAL,
    count_parts,
    count_splits,
    most_partial_bytes,
    partial_bytes,
)
from ridgeline.kernels.pages import Pages, PageTables
from ridgeline.kernels.prefill_attention import Packing

CPU = torch.device("cpu")
LENGTHS = [200, 1, 64, 130, 65]


def rows_and_pages(dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """In fp32, where a sum in another order shows; with codes in the pages bf16 serves."""
    generator = torch.Generator().manual_seed(3)
    q_BNH = torch.randn(len(LENGTHS), 4, 32, generator=generator)
    if dtype != torch.float32:
        q_BNH = q_BNH.to(torch.bfloat16)
    return q_BNH, random_cache(LENGTHS, 2, 32, 16, dtype, CPU, generator)


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("cache", [torch.float32, torch.int8])
def test_bits_are_those_of_a_prompt_of_one_token(cache: torch.dtype, window: int | None) -> None:
    fixed = pytest.importorskip("ridgeline.kernels.deterministic_attention.triton")
    fixed_decode = pytest.importorskip("ridgeline.kernels.deterministic_attention.decode")
    q_BNH, cached = rows_and_pages(cache)
    pages, tables = cached["pages"], cached["tables"]._replace(max_length=200)
    how: Any = {"spec": AttentionSpec(0.2, window), "split_tokens": 64}
    starts = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    packing = Packing(starts, max_new=1)
    expected = fixed.prefill_attention(q_BNH, packing, pages, tables, **how, apart=False)
    for order, parts in (([4, 2, 0, 1, 3], None), ([0, 1, 2, 3, 4], 1), ([3, 0, 1, 4, 2], 3)):
        ordered = tables._replace(order=torch.tensor(order, dtype=torch.int32))
        found = fixed_decode.decode_rows(q_BNH, pages, ordered, **how, parts=parts)
        assert torch.equal(found, expected), (order, parts)


def test_a_row_alone_has_the_bits_it_has_among_others() -> None:
    fixed_decode = pytest.importorskip("ridgeline.kernels.deterministic_attention.decode")
    q_BNH, cached = rows_and_pages(torch.float32)
    pages, tables = cached["pages"], cached["tables"]
    how: Any = {"spec": AttentionSpec(0.2), "split_tokens": 64}
    order = torch.arange(len(LENGTHS), dtype=torch.int32)
    together = fixed_decode.decode_rows(q_BNH, pages, tables._replace(order=order), **how)
    for row, length in enumerate(LENGTHS):
        one = slice(row, row + 1)
        own = PageTables(tables.page_table[one], tables.lengths[one], length, order[:1])
        alone = fixed_decode.decode_rows(q_BNH[one], pages, own, **how)
        assert torch.equal(alone, together[one]), row


def test_parts_fill_the_chip_and_are_no_more_than_splits() -> None:
    assert count_parts(8, 16, num_units=132) == 16  # one sequence: every split its own
    assert count_parts(8 * 64, 16, num_units=132) == 3
    assert count_parts(8 * 256, 16, num_units=132) == 2
    assert count_parts(8 * 256, 1, num_units=132) == 1


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("rows", [1, 40, 256, 2048])
def test_no_more_is_kept_than_is_planned(rows: int, window: int | None) -> None:
    """2048 rows of 32k keys would keep gigabytes of splits: those go unsplit."""
    fixed_decode = pytest.importorskip("ridgeline.kernels.deterministic_attention.decode")
    longest = 32768
    q_BNH = torch.empty(rows, 32, 128, device="meta", dtype=torch.bfloat16)
    k_pages = torch.empty(1, 8, 64, 128, device="meta", dtype=torch.bfloat16)
    table = torch.empty(rows, longest // 64, device="meta", dtype=torch.int32)
    pages, tables = Pages(k_pages, k_pages, None, None), PageTables(table, table[:, 0])
    kept = partial_bytes(32, 128, rows, count_splits(longest, 512, window, 1))
    fits = fixed_decode.fits(q_BNH, pages, tables, AttentionSpec(0.1, window), 512)
    assert fits == (kept <= MOST_PARTIAL) == (rows <= 40 or window is not None)
    assert most_partial_bytes(32, 8, 128, rows, longest, window) >= min(kept, MOST_PARTIAL) > 0
