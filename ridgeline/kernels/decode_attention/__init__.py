"""Attention of one new token a sequence over a paged cache: the kernel of every decode step.

`decode_attention` runs where its tensors are: the reference on a CPU, the kernels on a GPU, through
the custom op `ridgeline::decode_attention` when torch.compile traces it. op.py is what the registry
walks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.decode_attention import reference

__all__ = ["decode_attention"]


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
) -> Tensor:
    """See reference.py. With `split_tokens` given, a sequence's result is the same bits whatever
    else is in the batch.
    """
    pages = (k_pages_PKSH, v_pages_PKSH, page_table_BM, lengths_B)
    scales = (k_scale_PKS, v_scale_PKS)
    if torch.compiler.is_compiling():
        numbers = (spec.scale, spec.window, spec.softcap)
        return traced(q_BNH, *pages, *numbers, *scales, max_length, split_tokens)
    if q_BNH.device.type == "cpu":
        return reference.decode_attention(q_BNH, *pages, spec, *scales)
    from ridgeline.kernels.decode_attention import triton

    return triton.decode_attention(q_BNH, *pages, spec, *scales, max_length, split_tokens)


@torch.library.custom_op("ridgeline::decode_attention", mutates_args=())
def traced(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    max_length: int | None,
    split_tokens: int | None,
) -> Tensor:
    spec = AttentionSpec(scale, window, softcap)
    pages = (k_pages, v_pages, page_table, lengths)
    return decode_attention(q, *pages, spec, k_scale, v_scale, max_length, split_tokens)


@traced.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)
