"""The definition of prefill attention: one sequence after another through attention's own
definition.

Letters: T new tokens of all sequences end to end, B sequences, M pages a sequence at most, N query
heads, K KV heads, H head dim, P pages, S tokens a page. `starts` has B + 1 numbers: sequence b's
new tokens are rows starts[b] … starts[b + 1] - 1.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec, attention
from ridgeline.kernels.pages import gather_tokens


def prefill_attention(
    q_TNH: Tensor,
    starts: Tensor,
    k_pages_PKSH: Tensor,
    v_pages_PKSH: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    spec: AttentionSpec,
    k_scale_PKS: Tensor | None = None,
    v_scale_PKS: Tensor | None = None,
    max_new: int | None = None,
) -> Tensor:
    """Each sequence's new tokens are the last of its `lengths` tokens, all of which are in the
    pages. `max_new` (no sequence has more new tokens) changes the work, not the result.
    """
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    bounds = starts.tolist()
    for index, length in enumerate(lengths_B.tolist()):
        begin, end = bounds[index : index + 2]
        k_LKH = gather_tokens(k_pages_PKSH, page_table_BM[index], length, k_scale_PKS)
        v_LKH = gather_tokens(v_pages_PKSH, page_table_BM[index], length, v_scale_PKS)
        first_position = length - (end - begin)
        out_TNH[begin:end] = attention(q_TNH[begin:end], k_LKH, v_LKH, first_position, spec)
    return out_TNH


def prompt_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    starts: Tensor,
    spec: AttentionSpec,
    max_new: int | None = None,
) -> Tensor:
    """Fresh prompts: nothing is cached before them, and K and V are as packed as the queries."""
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    bounds = starts.tolist()
    for begin, end in pairwise(bounds):
        rows = slice(begin, end)
        out_TNH[rows] = attention(q_TNH[rows], k_TKH[rows], v_TKH[rows], 0, spec)
    return out_TNH
