"""Attention for training: documents packed end to end in one row, none of which sees another.

What the model needs of a batch (`Sequences` in models/transformer.py), without a cache and with
gradients. Each document is attended over alone, so that another one's values cannot reach it.

    hidden_TD = model(batch.ids, PackedDocuments(batch.positions, batch.starts))

Letters: T tokens, N query heads, K key-value heads, H head dim, S tokens of one document.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.attention import AttentionSpec, attention
from ridgeline.products import product_dtype

DocumentAttention = Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]


def reference_attention(q_SNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, spec: AttentionSpec) -> Tensor:
    """The definition: every score written out."""
    return attention(q_SNH, k_SKH, v_SKH, 0, spec)


def sdpa_attention(q_SNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, spec: AttentionSpec) -> Tensor:
    """torch's own, which does not hold the scores; it has no soft-cap, and no windows."""
    length = q_SNH.shape[0]
    if spec.softcap is not None or (spec.window is not None and spec.window < length):
        return reference_attention(q_SNH, k_SKH, v_SKH, spec)
    dtype = product_dtype(q_SNH.dtype, q_SNH.device)
    q_NSH, k_KSH, v_KSH = (part.transpose(0, 1).to(dtype) for part in (q_SNH, k_SKH, v_SKH))
    out_NSH = functional.scaled_dot_product_attention(
        q_NSH[None], k_KSH[None], v_KSH[None], is_causal=True, scale=spec.scale, enable_gqa=True
    )[0]
    return out_NSH.transpose(0, 1).to(q_SNH.dtype)


class PackedDocuments:
    """The documents of one batch. `starts` says where each begins; its last entry is T."""

    def __init__(
        self,
        positions_T: Tensor,
        starts: Tensor,
        attend_one: DocumentAttention = reference_attention,
    ) -> None:
        bounds: list[int] = starts.tolist()
        assert (bounds[0], bounds[-1]) == (0, len(positions_T)), (bounds, len(positions_T))
        self.positions_T = positions_T
        self.attend_one = attend_one
        self._bounds = [(start, end) for start, end in pairwise(bounds) if end > start]
        lengths = torch.tensor([end - start for start, end in self._bounds])
        self.lengths_T = lengths.repeat_interleave(lengths).to(positions_T.device)

    def attend(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec
    ) -> Tensor:
        """Each document's tokens over the document itself [T, N, H]."""
        return torch.cat(
            [
                self.attend_one(q_TNH[start:end], k_TKH[start:end], v_TKH[start:end], spec)
                for start, end in self._bounds
            ]
        )
