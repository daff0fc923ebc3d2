"""torch's own attention for fresh prompts, and when to take it.

cuDNN's kernel is the fastest there is for plain causal prompts on sm_90, but it knows sequences of
one length only, and builds a plan for each new shape: it is taken for long prompts of equal length.
`varlen_attn` takes packed prompts of any lengths, at about half cuDNN's speed.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeline.errors import UnsupportedError
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.prefill_attention.reference import Packing

CUDNN_MAX_HEAD_DIM = 128
# A heuristic until measured: prompts so long that attention outweighs the launch and the plan.
CUDNN_MIN_TOKENS = 2048

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def choose_path(
    q_TNH: Tensor, num_sequences: int, spec: AttentionSpec, max_new: int | None
) -> Literal["cudnn", "triton"]:
    """`max_new` is the longest prompt's length: times the number of prompts it gives T only when
    all are of that length.
    """
    num_tokens, _, head_dim = q_TNH.shape
    plain = spec.window is None and spec.softcap is None
    if not plain or q_TNH.dtype not in (torch.bfloat16, torch.float16):
        return "triton"
    if max_new is None or max_new < CUDNN_MIN_TOKENS or max_new * num_sequences != num_tokens:
        return "triton"
    fits = head_dim % 8 == 0 and head_dim <= CUDNN_MAX_HEAD_DIM
    return "cudnn" if fits and target_of(q_TNH).name in ("sm_90", "sm_100") else "triton"


def equal_prompts(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    num_sequences: int,
    spec: AttentionSpec,
    backend: Literal["cudnn", "flash"] | None = "cudnn",
) -> Tensor:
    """Prompts of one length, T / B tokens each, through one of torch's backends (None: those that
    are enabled).
    """

    def batched(x_TNH: Tensor) -> Tensor:
        return x_TNH.unflatten(0, (num_sequences, -1)).transpose(1, 2)

    with sdpa_kernel(BACKENDS[backend]) if backend else nullcontext():
        out = functional.scaled_dot_product_attention(
            batched(q_TNH),
            batched(k_TKH),
            batched(v_TKH),
            is_causal=True,
            scale=spec.scale,
            enable_gqa=True,
        )
    return out.transpose(1, 2).reshape(q_TNH.shape)


@lru_cache
def has_windows() -> bool:
    """Whether this torch's `varlen_attn` knows windows."""
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


@lru_cache
def aligns_at_end(device: torch.device) -> bool:
    """Whether `varlen_attn` takes fewer queries for the last of their keys, as flash attention does
    from 2.1 on. Its documentation does not say, and taken for the first they would be wrong without
    a word: the device is asked, once.
    """
    q = torch.zeros(2, 1, 64, dtype=torch.bfloat16, device=device)
    v = torch.tensor([0.0, 1.0, 2.0, 4.0], dtype=torch.bfloat16, device=device)
    packings = [Packing(torch.tensor([0, n], dtype=torch.int32, device=device), n) for n in (2, 4)]
    with torch.no_grad():
        out = any_prompts(
            q,
            torch.zeros(4, 1, 64, dtype=torch.bfloat16, device=device),
            v.view(4, 1, 1).expand(4, 1, 64).contiguous(),
            packings[0],
            AttentionSpec(1.0),
            packings[1],
        )
    # the means of the first three values, and of all
    return [round(value, 2) for value in out[:, 0, 0].tolist()] == [1.0, 1.75]


def any_prompts(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    packing: Packing,
    spec: AttentionSpec,
    keys: Packing | None = None,
) -> Tensor:
    """Packed prompts of any lengths through `varlen_attn`, whose arguments change from torch to
    torch. Where there are more keys than queries, these are the last of them (`aligns_at_end`).
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": spec.scale} if "scale" in known else {}
    before = -1 if spec.window is None else spec.window - 1  # tokens seen beside itself
    options |= {"window_size": (before, 0)} if has_windows() else {"is_causal": True}
    if spec.window is not None and not has_windows():
        raise UnsupportedError("this torch's varlen_attn has no windows; use torch 2.13")
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    keys = keys or packing
    most = packing.most_new(len(q_TNH)), keys.most_new(len(k_TKH))
    out = varlen_attn(q_TNH, k_TKH, v_TKH, packing.starts, keys.starts, *most, **options)
    assert isinstance(out, Tensor)
    return out
