"""Decode attention straight from the projection, defined: rotary_pages, then decode_attention.

Letters: B sequences, C = (N + 2·K)·H columns of N query and K KV heads of H dims, A angles; M pages
a sequence at most, P pages of S tokens (kernels/pages.py has their layout).
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.decode_attention.reference import decode_attention
from ridgeline.kernels.rotary_pages.reference import rotary_pages


def projected_attention(
    qkv_BC: Tensor,
    cos_BA: Tensor | None,
    sin_BA: Tensor | None,
    slots_B: Tensor,
    k_pages_PKSH: Tensor,
    v_pages_PKSH: Tensor,
    page_table_BM: Tensor,
    lengths_B: Tensor,
    spec: AttentionSpec,
    k_scale_PKS: Tensor | None = None,
    v_scale_PKS: Tensor | None = None,
    q_norm_H: Tensor | None = None,
    k_norm_H: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    max_length: int | None = None,
    split_tokens: int | None = None,
    order_B: Tensor | None = None,
) -> Tensor:
    """The result [B, N, H] of one new token a sequence, whose K and V go into its slot: **changes
    the pages and their scales in place**. Lengths count the new token.

    Every row is of a sequence of its own: no row reads what another one writes. A token with a
    negative slot is not written, because its K and V are in their page already, or because its
    length is zero (a padded row of a batch), which gives zeros.
    """
    turning = (qkv_BC, cos_BA, sin_BA, slots_B, k_pages_PKSH, v_pages_PKSH)
    scales = (k_scale_PKS, v_scale_PKS)
    q_BNH = rotary_pages(*turning, *scales, q_norm_H, k_norm_H, eps, offset)
    pages = (k_pages_PKSH, v_pages_PKSH, page_table_BM, lengths_B)
    return decode_attention(q_BNH, *pages, spec, *scales)
