"""From the fused projection to attention's output in a decode step: norm, rotary embedding, the
newest K and V into pages and decode attention, for one new token a sequence.

`projected_attention` runs where its tensors are: on a CPU the references, on a GPU one kernel, of
CUDA C++ (cuda.py) or Triton, or rotary_pages and decode_attention one after the other (`Apart`),
whichever was measured to be faster. Where nothing was measured, pages of values take the one kernel
and pages of 8-bit codes the two, because decode_attention has a faster kernel for them in cuda.cu;
so few sequences that clusters leave no SM without a block go to CUDA C++. `in_one_kernel` says
which it will be. When torch.compile traces it, it is the custom op
`ridgeline::projected_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.kernels import decode_attention as decoding
from ridgeline.kernels.attention.reference import AttentionSpec
from ridgeline.kernels.autotune import chosen
from ridgeline.kernels.decode_attention.splits import longest_sequence
from ridgeline.kernels.launch import target_of
from ridgeline.kernels.pages import holds_codes
from ridgeline.kernels.projected_attention import reference

__all__ = ["Apart", "in_one_kernel", "launched", "projected_attention", "tune_key"]


@dataclass(frozen=True)
class Apart:
    """The way of two kernels: each has its own choices."""

    kernels: int = 2


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
    settled: bool = False,
) -> Tensor:
    """Returns [B, N, H]; **changes the pages and scales in place**. See reference.py: no two rows
    may be of one sequence. With `split_tokens` given, a sequence's result is the same bits whatever
    else is in the batch. `settled` allows a kernel to read all but the projection before the kernel
    in front of it has ended (cuda.py says when that is right).
    """
    turning = (qkv_BC, cos_BA, sin_BA, slots_B, k_pages_PKSH, v_pages_PKSH)
    attending = (page_table_BM, lengths_B)
    scales, norms = (k_scale_PKS, v_scale_PKS), (q_norm_H, k_norm_H)
    numbers = (eps, offset, max_length, split_tokens, order_B)
    if torch.compiler.is_compiling():
        about = (spec.scale, spec.window, spec.softcap)
        return traced(*turning, *attending, *about, *scales, *norms, *numbers)
    inputs = (*turning, *attending, spec, *scales, *norms, *numbers)
    if qkv_BC.device.type == "cpu":
        return reference.projected_attention(*inputs)
    return launched(*inputs, settled=settled)


def launched(
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
    settled: bool = False,
    config: Any = None,
) -> Tensor:
    """By kernels of ours: as `config` says (cuda.Clustered, triton.Fused or Apart), else as
    measured, else by dtype and size.
    """
    from ridgeline.kernels.projected_attention import cuda, triton
    from ridgeline.kernels.rotary_pages import triton as turning

    projected = (qkv_BC, cos_BA, sin_BA, slots_B, k_pages_PKSH, v_pages_PKSH)
    scales = (k_scale_PKS, v_scale_PKS)
    norms: dict[str, Any] = {"q_norm_H": q_norm_H, "k_norm_H": k_norm_H}
    norms |= {"eps": eps, "offset": offset}
    about: dict[str, Any] = {"max_length": max_length, "split_tokens": split_tokens}
    about["order_B"] = order_B
    is_asked_for = config is not None
    if config is None:
        config = _way(qkv_BC, k_pages_PKSH, page_table_BM, max_length, split_tokens)
    attending = (page_table_BM, lengths_B, spec, *scales)
    if isinstance(config, cuda.Clustered):
        try:
            return cuda.projected_attention(
                *projected, *attending, **norms, settled=settled, config=config
            )
        except UnsupportedError:
            if is_asked_for:
                raise
            config = None  # Triton's kernel takes everything
    if isinstance(config, Apart):
        q_BNH = turning.rotary_pages(*projected, *scales, **norms)
        return decoding.launched(q_BNH, k_pages_PKSH, v_pages_PKSH, *attending, **about)
    about |= norms | {"config": config}
    return triton.projected_attention(*projected, *attending, **about)


def in_one_kernel(
    qkv_BC: Tensor, k_pages_PKSH: Tensor, page_table_BM: Tensor, max_length: int | None
) -> bool:
    """Whether that is what is launched for such inputs, without `split_tokens`."""
    return not isinstance(_way(qkv_BC, k_pages_PKSH, page_table_BM, max_length, None), Apart)


def _way(
    qkv_BC: Tensor,
    k_pages_PKSH: Tensor,
    page_table_BM: Tensor,
    max_length: int | None,
    split_tokens: int | None,
) -> Any:
    """Apart, a cuda.Clustered, a triton.Fused, or None: Triton's kernel by its own heuristic."""
    by_dtype = Apart() if holds_codes(k_pages_PKSH.dtype) else None
    # A choice may depend on the batch only where the caller did not ask that results do not.
    if split_tokens is not None:
        return by_dtype
    from ridgeline.kernels.projected_attention import cuda, triton

    def in_cuda() -> bool:
        return cuda.unsupported(qkv_BC, k_pages_PKSH) is None

    key = tune_key(qkv_BC, k_pages_PKSH, page_table_BM, max_length)
    best = chosen(
        "projected_attention", key, qkv_BC.device, lambda way: "blocks" not in way or in_cuda()
    )
    if best is not None:
        kind = Apart if "kernels" in best else cuda.Clustered if "blocks" in best else triton.Fused
        return kind(**best)
    num_kv_heads, page_size, head_dim = k_pages_PKSH.shape[1:]
    longest = longest_sequence(page_table_BM, page_size, max_length)
    about = (longest, head_dim, k_pages_PKSH.dtype, target_of(qkv_BC))
    way = cuda.choose(len(qkv_BC) * num_kv_heads, *about)
    return way if way is not None and in_cuda() else by_dtype


def tune_key(
    qkv_BC: Tensor, k_pages_PKSH: Tensor, page_table_BM: Tensor, max_length: int | None
) -> str:
    """Under which a measured choice holds: decode_attention's, for queries of these heads."""
    batch, (num_kv_heads, _, head_dim) = len(qkv_BC), k_pages_PKSH.shape[1:]
    num_heads = qkv_BC.shape[1] // head_dim - 2 * num_kv_heads
    q_BNH = qkv_BC[:, : num_heads * head_dim].view(batch, num_heads, head_dim)
    return decoding.tune_key(q_BNH, k_pages_PKSH, page_table_BM, max_length)


@torch.library.custom_op(
    "ridgeline::projected_attention", mutates_args=("k_pages", "v_pages", "k_scale", "v_scale")
)
def traced(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
    max_length: int | None,
    split_tokens: int | None,
    order: Tensor | None,
) -> Tensor:
    turning = (qkv, cos, sin, slots, k_pages, v_pages, page_table, lengths)
    spec = AttentionSpec(scale, window, softcap)
    optional = (k_scale, v_scale, q_norm, k_norm)
    numbers = (eps, offset, max_length, split_tokens)
    return projected_attention(*turning, spec, *optional, *numbers, order)


@traced.register_fake
def _(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    k_pages: Tensor,
    *_: object,
) -> Tensor:
    num_kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads, head_dim)
