"""The definition of decode attention: each sequence's pages gathered, then attention's own
definition.

Letters: B sequences, N query heads, K KV heads, H head dim, L tokens of a sequence; the pages' own
are in kernels/pages.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec, attention
from ridgeline.kernels.pages import Pages, PageTables, gather_tokens


def decode_attention(
    q_BNH: Tensor, pages: Pages, tables: PageTables, spec: AttentionSpec
) -> Tensor:
    """One query token for each sequence, the last of its `lengths` tokens, all of which are in the
    pages. A length of zero (a padded row of a batch) gives zeros.
    """
    rows = []
    for index, length in enumerate(tables.lengths.tolist()):
        k_LKH = gather_tokens(pages.k_pages, tables.page_table[index], length, pages.k_scale)
        v_LKH = gather_tokens(pages.v_pages, tables.page_table[index], length, pages.v_scale)
        rows.append(attention(q_BNH[index : index + 1], k_LKH, v_LKH, length - 1, spec))
    return torch.cat(rows) if rows else torch.empty_like(q_BNH)
