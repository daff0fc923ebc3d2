"""The definition of attention for one sequence: every score written out, softmax in fp32.

Letters: T new tokens, S tokens in the cache (the new ones included), N query heads, K key-value
heads, G = N / K, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What stays the same in a layer from step to step."""

    scale: float  # scores are q·k times this
    window: int | None = (
        None  # a token sees itself and the window - 1 tokens before it; None: all before it
    )
    softcap: float | None = None  # scores become cap · tanh(score / cap)


def attention(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, first_position: int, spec: AttentionSpec
) -> Tensor:
    """Queries at positions first_position … first_position + T - 1 over keys at positions 0 … S -
    1.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_kv_heads = k_SKH.shape[1]
    groups = num_heads // num_kv_heads
    q_KGTH = q_TNH.float().view(num_tokens, num_kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    k_KHS = k_SKH.float().permute(1, 2, 0)
    v_KSH = v_SKH.float().permute(1, 0, 2)

    rows_KMH = q_KGTH.reshape(num_kv_heads, groups * num_tokens, head_dim)
    scores_KMS = torch.bmm(rows_KMH, k_KHS) * spec.scale
    if spec.softcap is not None:
        scores_KMS = torch.tanh(scores_KMS / spec.softcap) * spec.softcap
    hidden_TS = hidden_from(num_tokens, k_SKH.shape[0], first_position, spec.window, q_TNH.device)
    if hidden_TS is not None:
        scores_KMS = scores_KMS.masked_fill(hidden_TS.repeat(groups, 1), float("-inf"))
    out_KMH = torch.bmm(torch.softmax(scores_KMS, dim=-1), v_KSH)
    out_KGTH = out_KMH.view(num_kv_heads, groups, num_tokens, head_dim)
    return out_KGTH.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim).to(q_TNH.dtype)


def hidden_from(
    num_tokens: int, num_keys: int, first_position: int, window: int | None, device: torch.device
) -> Tensor | None:
    """True where a key is hidden from a query (later than it, or behind its window); None when none
    is.
    """
    if num_tokens == 1 and (window is None or num_keys <= window):
        return None
    query_T1 = torch.arange(first_position, first_position + num_tokens, device=device).unsqueeze(1)
    key_1S = torch.arange(num_keys, device=device).unsqueeze(0)
    hidden_TS = key_1S > query_T1
    if window is not None:
        hidden_TS |= key_1S <= query_T1 - window
    return hidden_TS
