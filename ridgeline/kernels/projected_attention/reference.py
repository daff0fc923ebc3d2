"""Decode attention straight from the projection, defined: rotary_pages, then decode_attention.

Letters: B sequences, C = (N + 2·K)·H columns of N query and K KV heads of H dims, A angles; the
pages' own are in kernels/pages.py.
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.decode_attention.reference import decode_attention
from ridgeline.kernels.pages import Pages, PageTables
from ridgeline.kernels.rotary_pages.reference import QKNorm, rotary_pages


def projected_attention(
    qkv_BC: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    slots_B: Tensor,
    pages: Pages,
    tables: PageTables,
    spec: AttentionSpec,
    *,
    norm: QKNorm | None = None,
    split_tokens: int | None = None,
) -> Tensor:
    """The result [B, N, H] of one new token a sequence, whose K and V go into its slot: **changes
    the pages and their scales in place**. Lengths count the new token.

    Every row is of a sequence of its own: no row reads what another one writes. A token with a
    negative slot is not written, because its K and V are in their page already, or because its
    length is zero (a padded row of a batch), which gives zeros.
    """
    q_BNH = rotary_pages(qkv_BC, angles, slots_B, pages, norm)
    return decode_attention(q_BNH, pages, tables, spec)
