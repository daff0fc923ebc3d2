"""Rotary embedding defined. Letters: T tokens, N heads, H head dim, A angles (2·A ≤ H)."""

from __future__ import annotations

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]  # cos and sin, [T, A] each


def rotate(x_TNH: Tensor, cos_TA: Tensor, sin_TA: Tensor) -> Tensor:
    """Turn dims i and i + A of each head by the token's angle i; dims past 2·A stay as they are.

    cos and sin are fp32 and so is the arithmetic.
    """
    half = cos_TA.shape[-1]
    cos, sin = cos_TA.unsqueeze(1), sin_TA.unsqueeze(1)
    first = x_TNH[..., :half].float()
    second = x_TNH[..., half : 2 * half].float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
        x_TNH.dtype
    )
    if 2 * half == x_TNH.shape[-1]:
        return turned
    return torch.cat((turned, x_TNH[..., 2 * half :]), dim=-1)
