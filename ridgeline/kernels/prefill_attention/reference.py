"""The definition of prefill attention: one sequence after another through attention's own
definition.

Letters: T new tokens of all sequences end to end, B sequences, N query heads, K KV heads, H head
dim, L tokens of a sequence; the pages' own are in kernels/pages.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec, attention
from ridgeline.kernels.pages import Pages, PageTables, gather_tokens


class Packing(NamedTuple):
    """How the new tokens of B sequences lie end to end: sequence b's are rows starts[b] …
    starts[b + 1] - 1.
    """

    starts: Tensor  # [B + 1]
    max_new: int | None = None  # no sequence has more; changes how much work a kernel does, only

    @property
    def num_sequences(self) -> int:
        return self.starts.shape[0] - 1

    def most_new(self, num_tokens: int) -> int:
        """Of all sequences' new tokens, those that one has at most."""
        return num_tokens if self.max_new is None else min(num_tokens, self.max_new)


def prefill_attention(
    q_TNH: Tensor, packing: Packing, pages: Pages, tables: PageTables, spec: AttentionSpec
) -> Tensor:
    """Each sequence's new tokens are the last of its `lengths` tokens, all of which are in the
    pages.
    """
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    bounds = packing.starts.tolist()
    for index, length in enumerate(tables.lengths.tolist()):
        begin, end = bounds[index : index + 2]
        k_LKH = gather_tokens(pages.k_pages, tables.page_table[index], length, pages.k_scale)
        v_LKH = gather_tokens(pages.v_pages, tables.page_table[index], length, pages.v_scale)
        first_position = length - (end - begin)
        out_TNH[begin:end] = attention(q_TNH[begin:end], k_LKH, v_LKH, first_position, spec)
    return out_TNH


def prompt_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packing: Packing, spec: AttentionSpec
) -> Tensor:
    """Fresh prompts: nothing is cached before them, and K and V are as packed as the queries."""
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    bounds = packing.starts.tolist()
    for begin, end in pairwise(bounds):
        rows = slice(begin, end)
        out_TNH[rows] = attention(q_TNH[rows], k_TKH[rows], v_TKH[rows], 0, spec)
    return out_TNH
