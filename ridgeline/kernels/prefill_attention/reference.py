"""The definition of prefill attention: one sequence after another through attention's own
definition.

Letters: T new tokens of all sequences end to end, B sequences, N query heads, K KV heads, H head
dim, L tokens of a sequence; the pages' own are in kernels/pages.py. `starts` has B + 1 numbers:
sequence b's new tokens are rows starts[b] … starts[b + 1] - 1.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec, attention
from ridgeline.kernels.pages import Pages, PageTables, gather_tokens


def prefill_attention(
    q_TNH: Tensor, starts: Tensor, pages: Pages, tables: PageTables, spec: AttentionSpec
) -> Tensor:
    """Each sequence's new tokens are the last of its `lengths` tokens, all of which are in the
    pages.
    """
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    bounds = starts.tolist()
    for index, length in enumerate(tables.lengths.tolist()):
        begin, end = bounds[index : index + 2]
        k_LKH = gather_tokens(pages.k_pages, tables.page_table[index], length, pages.k_scale)
        v_LKH = gather_tokens(pages.v_pages, tables.page_table[index], length, pages.v_scale)
        first_position = length - (end - begin)
        out_TNH[begin:end] = attention(q_TNH[begin:end], k_LKH, v_LKH, first_position, spec)
    return out_TNH


def prompt_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, starts: Tensor, spec: AttentionSpec
) -> Tensor:
    """Fresh prompts: nothing is cached before them, and K and V are as packed as the queries."""
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    bounds = starts.tolist()
    for begin, end in pairwise(bounds):
        rows = slice(begin, end)
        out_TNH[rows] = attention(q_TNH[rows], k_TKH[rows], v_TKH[rows], 0, spec)
    return out_TNH
