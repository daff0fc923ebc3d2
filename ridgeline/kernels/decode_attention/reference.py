"""The definition of decode attention: each sequence's pages gathered, then attention's own
definition.

Letters: B sequences, M pages a sequence at most, N query heads, K KV heads, H head dim, P pages,
S tokens a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec, attention
from ridgeline.kernels.pages import gather_tokens


def decode_attention(
    q_BNH: Tensor,
    k_pages_PKSH: Tensor,
    v_pages_PKSH: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    spec: AttentionSpec,
    k_scale_PKS: Tensor | None = None,
    v_scale_PKS: Tensor | None = None,
    max_length: int | None = None,
    split_tokens: int | None = None,
    order_B: Tensor | None = None,
) -> Tensor:
    """One query token for each sequence, the last of its `lengths` tokens, all of which are in the
    pages. A length of zero (a padded row of a batch) gives zeros.

    `max_length` (no sequence is longer), `split_tokens` (how the kernel cuts sequences) and
    `order_B` (in which order it may take them up: the longest first end sooner) change the work,
    not the result.
    """
    rows = []
    for index, length in enumerate(lengths_B.tolist()):
        k_LKH = gather_tokens(k_pages_PKSH, page_table_BM[index], length, k_scale_PKS)
        v_LKH = gather_tokens(v_pages_PKSH, page_table_BM[index], length, v_scale_PKS)
        rows.append(attention(q_BNH[index : index + 1], k_LKH, v_LKH, length - 1, spec))
    return torch.cat(rows) if rows else torch.empty_like(q_BNH)
