"""Rotary embedding in Triton: one pass over memory; its backward turns by the negative angle.

A program turns all heads of a few tokens, or a share of many heads, so that a token's angles are
read once for all of them. The last dim is contiguous; tokens and heads have strides of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.targets import Target

TILE = 2048  # pairs a program turns. A heuristic until measured


@triton.jit
def turn(first, second, cos, sin):
    """Pairs turned by their angles. fp32 in and out."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def load_angles(
    ptr,
    tokens,
    num_tokens,
    ANGLES: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """cos or sin of `tokens` [TOKENS, 1, 1], to be used with heads [TOKENS, HEADS, BLOCK]."""
    angles = tl.arange(0, BLOCK)[None, None, :]
    place = tokens * ANGLES + angles
    kept = (angles < ANGLES) & (tokens < num_tokens)
    if TOKENS > 1:
        # In the heads' own shape and so in their layout; the compiler would otherwise bring the
        # heads into the angles' layout, through shared memory.
        place = tl.broadcast_to(place, [TOKENS, HEADS, BLOCK])
        kept = tl.broadcast_to(kept, [TOKENS, HEADS, BLOCK])
    return tl.load(ptr + place, mask=kept, other=0.0)


@triton.jit
def rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    token_stride,
    head_stride,
    out_token_stride,
    out_head_stride,
    num_tokens,
    num_heads,
    INVERSE: tl.constexpr,
    ANGLES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    blocks = tl.cdiv(num_heads, HEADS)
    token_block, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    # int64: a token's offset passes 2^31
    tokens = (token_block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    heads = (block * HEADS + tl.arange(0, HEADS))[None, :, None]
    keep = (tokens < num_tokens) & (heads < num_heads)
    x_ptr += tokens * token_stride + heads * head_stride
    out_ptr += tokens * out_token_stride + heads * out_head_stride

    angles = tl.arange(0, BLOCK)[None, None, :]
    cos = load_angles(cos_ptr, tokens, num_tokens, ANGLES, TOKENS, HEADS, BLOCK)
    sin = load_angles(sin_ptr, tokens, num_tokens, ANGLES, TOKENS, HEADS, BLOCK)
    if INVERSE:
        sin = -sin
    kept = keep & (angles < ANGLES)
    first = tl.load(x_ptr + angles, mask=kept, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + ANGLES + angles, mask=kept, other=0.0).to(tl.float32)
    first, second = turn(first, second, cos, sin)
    tl.store(out_ptr + angles, first.to(out_ptr.dtype.element_ty), mask=kept)
    tl.store(out_ptr + ANGLES + angles, second.to(out_ptr.dtype.element_ty), mask=kept)
    if REST > 0:  # dims past the angles stay as they are
        dims = 2 * ANGLES + tl.arange(0, REST)[None, None, :]
        kept = keep & (dims < HEAD_DIM)
        tl.store(out_ptr + dims, tl.load(x_ptr + dims, mask=kept, other=0.0), mask=kept)


def rotate(
    x_TNH: Tensor,
    cos_TA: Tensor,
    sin_TA: Tensor,
    inverse: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The launcher; arguments and results are reference.py's. `inverse` turns back. `out` may be x
    itself, or part of a wider tensor.
    """
    if x_TNH.stride(-1) != 1:
        x_TNH = x_TNH.contiguous()
    num_tokens, num_heads, head_dim = x_TNH.shape
    num_angles = cos_TA.shape[-1]
    out_TNH = out
    if out_TNH is None:
        out_TNH = torch.empty(x_TNH.shape, dtype=x_TNH.dtype, device=x_TNH.device)
    assert out_TNH.stride(-1) == 1, out_TNH.stride()
    tokens, heads, block = choose(num_heads, num_angles)
    num_programs = triton.cdiv(num_tokens, tokens) * triton.cdiv(num_heads, heads)
    if num_programs:
        launch(
            rotate_kernel,
            (num_programs,),
            (
                x_TNH,
                cos_TA.contiguous(),
                sin_TA.contiguous(),
                out_TNH,
                x_TNH.stride(0),
                x_TNH.stride(1),
                out_TNH.stride(0),
                out_TNH.stride(1),
                num_tokens,
                num_heads,
            ),
            INVERSE=inverse,
            ANGLES=num_angles,
            HEAD_DIM=head_dim,
            TOKENS=tokens,
            HEADS=heads,
            BLOCK=block,
            REST=width_of_rest(head_dim, num_angles),
            num_warps=num_warps(tokens * heads * block, target_of(x_TNH)),
        )
    return out_TNH


def choose(num_heads: int, num_angles: int) -> tuple[int, int, int]:
    """Tokens, heads and angles of a program's tile: powers of two."""
    block = triton.next_power_of_2(num_angles)
    heads = max(1, min(triton.next_power_of_2(num_heads), TILE // block))
    return max(1, TILE // (heads * block)), heads, block


def width_of_rest(head_dim: int, num_angles: int) -> int:
    """The power of two that covers the dims no angle turns; 0 where there are none."""
    rest = head_dim - 2 * num_angles
    return triton.next_power_of_2(rest) if rest else 0


def num_warps(num_pairs: int, target: Target) -> int:
    """Sixteen pairs a thread: four 16-byte loads of bf16 in flight."""
    return max(1, min(8, num_pairs // (16 * target.warp_size)))
