"""Attention of many new tokens at once: prompts, and chunks of prompts over a paged prefix.

`prefill_attention` reads a paged cache in which the new tokens already are; `prompt_attention`
takes fresh prompts with K and V packed like the queries, and may hand them to cuDNN (sdpa.py).
Both run where their tensors are: the reference on a CPU, kernels on a GPU, through custom ops when
torch.compile traces them. op.py is what the registry walks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.prefill_attention import reference, sdpa

__all__ = ["prefill_attention", "prompt_attention"]


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
    split_tokens: int | None = None,
    max_length: int | None = None,
    order_B: Tensor | None = None,
) -> Tensor:
    """See reference.py. With `split_tokens` given, a token's result is the same bits whatever else
    is in the batch and however many of its sequence's tokens come with it (fixed.py); `max_length`,
    which no sequence passes, then lets few sequences fill the chip. `order_B` says that each
    sequence has one new token, and in which order they may be taken up (fixed_decode.py).
    """
    pages = (starts, k_pages_PKSH, v_pages_PKSH, page_table_BM, lengths_B)
    scales = (k_scale_PKS, v_scale_PKS)
    if torch.compiler.is_compiling():
        assert split_tokens is None, "the engine, which alone asks for splits, is not compiled"
        numbers = (spec.scale, spec.window, spec.softcap)
        return traced_prefill(q_TNH, *pages, *numbers, *scales, max_new)
    if q_TNH.device.type == "cpu":
        return reference.prefill_attention(q_TNH, *pages, spec, *scales)
    from ridgeline.kernels.deterministic_attention import decode as fixed_decode
    from ridgeline.kernels.deterministic_attention import triton as fixed
    from ridgeline.kernels.prefill_attention import triton

    if split_tokens is not None and order_B is not None:
        cut = (split_tokens, max_length)
        if fixed_decode.fits(q_TNH, k_pages_PKSH, page_table_BM, spec, *cut):
            about = (q_TNH, *pages[1:], spec, *scales)
            return fixed_decode.decode_rows(*about, order_B, *cut)
    if split_tokens is not None:
        return fixed.prefill_attention(
            q_TNH, *pages, spec, *scales, max_new, split_tokens=split_tokens, max_length=max_length
        )
    return triton.prefill_attention(q_TNH, *pages, spec, *scales, max_new)


def prompt_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    starts: Tensor,
    spec: AttentionSpec,
    max_new: int | None = None,
) -> Tensor:
    """See reference.py. With `max_new`, the longest prompt's length, cuDNN can be chosen."""
    packed = (k_TKH, v_TKH, starts)
    if torch.compiler.is_compiling():
        return traced_prompt(q_TNH, *packed, spec.scale, spec.window, spec.softcap, max_new)
    if q_TNH.device.type == "cpu":
        return reference.prompt_attention(q_TNH, *packed, spec)
    if sdpa.choose_path(q_TNH, starts.shape[0] - 1, spec, max_new) == "cudnn":
        return sdpa.equal_prompts(q_TNH, k_TKH, v_TKH, starts.shape[0] - 1, spec)
    from ridgeline.kernels.prefill_attention import triton

    return triton.prompt_attention(q_TNH, *packed, spec, max_new)


@torch.library.custom_op("ridgeline::prefill_attention", mutates_args=())
def traced_prefill(
    q: Tensor,
    starts: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    max_new: int | None,
) -> Tensor:
    spec = AttentionSpec(scale, window, softcap)
    pages = (starts, k_pages, v_pages, page_table, lengths)
    return prefill_attention(q, *pages, spec, k_scale, v_scale, max_new)


@torch.library.custom_op("ridgeline::prompt_attention", mutates_args=())
def traced_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    max_new: int | None,
) -> Tensor:
    return prompt_attention(q, k, v, starts, AttentionSpec(scale, window, softcap), max_new)


@traced_prefill.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


@traced_prompt.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)
