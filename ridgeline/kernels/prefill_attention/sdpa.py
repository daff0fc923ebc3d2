"""torch's own attention for fresh prompts, and when to take it.

cuDNN's kernel is the fastest there is for plain causal prompts on sm_90, but it knows sequences of
one length only, and builds a plan for each new shape: it is taken for long prompts of equal length.
Where keys and values lie in pages they are copied together first, which takes a twentieth of the
time, and only lengths that come again are taken.
`varlen_attn` takes packed prompts of any lengths, at about half cuDNN's speed.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.launch import target_of

CUDNN_MAX_HEAD_DIM = 128
# A heuristic until measured: prompts so long that attention outweighs the launch and the plan.
CUDNN_MIN_TOKENS = 2048
PAGED_STEP = 1024  # over pages, lengths that are multiples of this

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

    q, k, v = (_batched(x, num_sequences) for x in (q_TNH, k_TKH, v_TKH))
    return _attend(q, k, v, spec, backend).reshape(q_TNH.shape)


def _batched(x_TNH: Tensor, num_sequences: int) -> Tensor:
    return x_TNH.unflatten(0, (num_sequences, -1)).transpose(1, 2)


def _attend(
    q_BNLH: Tensor,
    k_BKLH: Tensor,
    v_BKLH: Tensor,
    spec: AttentionSpec,
    backend: Literal["cudnn", "flash"] | None,
) -> Tensor:
    """[B, L, N, H]"""
    with sdpa_kernel(BACKENDS[backend]) if backend else nullcontext():
        out = functional.scaled_dot_product_attention(
            q_BNLH, k_BKLH, v_BKLH, is_causal=True, scale=spec.scale, enable_gqa=True
        )
    return out.transpose(1, 2)


def from_pages(
    q_TNH: Tensor,
    k_pages_PKSH: Tensor,
    v_pages_PKSH: Tensor,
    page_table_BM: Tensor,
    spec: AttentionSpec,
    backend: Literal["cudnn", "flash"] | None = "cudnn",
) -> Tensor:
    """Prompts of one length whose keys and values, and no others, were just written to pages."""
    num_sequences = page_table_BM.shape[0]
    length = q_TNH.shape[0] // num_sequences
    pages = -(-length // k_pages_PKSH.shape[2])
    used = page_table_BM[:, :pages].reshape(-1)

    def gathered(pages_PKSH: Tensor) -> Tensor:
        """[B, K, L, H], by one copy."""
        heads = pages_PKSH.transpose(0, 1).index_select(1, used)
        heads = heads.unflatten(1, (num_sequences, pages)).flatten(2, 3)
        return heads[:, :, :length].transpose(0, 1)

    k, v = gathered(k_pages_PKSH), gathered(v_pages_PKSH)
    return _attend(_batched(q_TNH, num_sequences), k, v, spec, backend).reshape(q_TNH.shape)


def any_prompts(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, starts: Tensor, spec: AttentionSpec, max_new: int
) -> Tensor:
    """Packed prompts of any lengths through `varlen_attn`, whose arguments change from torch to
    torch.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": spec.scale} if "scale" in known else {}
    options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    out = varlen_attn(q_TNH, k_TKH, v_TKH, starts, starts, max_new, max_new, **options)
    assert isinstance(out, Tensor)
    return out
