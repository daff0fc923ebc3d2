"""Decode attention straight from the projection, defined: rotary_pages, then decode_attention.

Letters: B sequences, C = (N + 2·K)·H columns of N query and K KV heads of H dims, A angles; the
pages' own are in kernels/pages.py.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.decode_attention.reference import decode_attention
from ridgeline.kernels.pages import Pages, PageTables
from ridgeline.kernels.rotary.reference import Angles
from ridgeline.kernels.rotary_pages.reference import QKNorm, rotary_pages


class Projected(NamedTuple):
    """The fused projection of one new token a sequence, and what turns it into q, K and V."""

    qkv: Tensor  # [B, C]
    angles: Angles | None  # [B, A] each; None: nothing is turned
    slots: Tensor  # [B], int32: where K and V go; negative: nowhere
    norm: QKNorm | None = None


def projected_attention(
    rows: Projected, pages: Pages, tables: PageTables, spec: AttentionSpec
) -> Tensor:
    """The result [B, N, H] of one new token a sequence, whose K and V go into its slot: **changes
    the pages and their scales in place**. Lengths count the new token.

    Every row is of a sequence of its own: no row reads what another one writes. A token with a
    negative slot is not written, because its K and V are in their page already, or because its
    length is zero (a padded row of a batch), which gives zeros.
    """
    q_BNH = rotary_pages(rows.qkv, rows.angles, rows.slots, pages, rows.norm)
    return decode_attention(q_BNH, pages, tables, spec)
