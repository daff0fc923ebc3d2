"""Rotary embedding by cpu.cpp; host_library.py builds it. See reference.py for what it is."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.host_library import function, short_name


def rotate(
    x_TNH: Tensor,
    cos_TA: Tensor,
    sin_TA: Tensor,
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Heads lie end to end in each token, of x and of `out`, which may be x."""
    x_TNH = x_TNH if _are_together(x_TNH) else x_TNH.contiguous()
    out = torch.empty(x_TNH.shape, dtype=x_TNH.dtype) if out is None else out
    assert _are_together(out), f"strides {out.stride()}"
    cos, sin = cos_TA.contiguous(), sin_TA.contiguous()
    num_tokens, num_heads, head_dim = x_TNH.shape
    function("rotary", short_name(x_TNH.dtype), "plplppflllli")(
        x_TNH.data_ptr(),
        x_TNH.stride(0),
        out.data_ptr(),
        out.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        -1.0 if inverse else 1.0,
        num_tokens,
        num_heads,
        head_dim,
        cos.shape[1],
        torch.get_num_threads(),
    )
    return out


def _are_together(x_TNH: Tensor) -> bool:
    return x_TNH.stride()[1:] == (x_TNH.shape[2], 1)
