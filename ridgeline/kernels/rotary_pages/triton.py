"""q/k norm, rotary embedding and the write into pages in one Triton kernel: the projection's output
is read once, q and the pages are written once.

A program takes a few tokens and up to eight heads of one kind: query, K or V. A head is held in
two or three parts: the dims that pair up (first and second half of those turned) and, where fewer
than all are turned, the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.formats.scaling import LARGEST, SMALLEST_AMAX
from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.pages import Pages, check_pages, holds_codes
from ridgeline.kernels.rotary.reference import Angles
from ridgeline.kernels.rotary.triton import load_angles, num_warps, turn, width_of_rest
from ridgeline.kernels.rotary_pages.reference import QKNorm
from ridgeline.kernels.rows import row_scale, to_codes
from ridgeline.kernels.targets import roomy

TILE = 4096  # numbers of one program. A heuristic until measured
MAX_HEADS = 8  # of one program


@triton.jit
def load_heads(
    ptr,
    keep,
    ANGLES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """The three parts of heads that start at `ptr` [TOKENS, HEADS, 1], as fp32; zero past them."""
    angles = tl.arange(0, BLOCK)[None, None, :]
    kept = keep & (angles < ANGLES)
    first = tl.load(ptr + angles, mask=kept, other=0.0).to(tl.float32)
    second = tl.load(ptr + ANGLES + angles, mask=kept, other=0.0).to(tl.float32)
    if REST > 0:
        dims = 2 * ANGLES + tl.arange(0, REST)[None, None, :]
        rest = tl.load(ptr + dims, mask=keep & (dims < HEAD_DIM), other=0.0).to(tl.float32)
    else:
        rest = first  # stands for nothing; no one reads it
    return first, second, rest


@triton.jit
def norm_heads(
    first,
    second,
    rest,
    weight_ptr,
    eps,
    offset,
    ANGLES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    total = tl.sum(first * first + second * second, axis=2, keep_dims=True)
    if REST > 0:
        total += tl.sum(rest * rest, axis=2, keep_dims=True)
    scale = tl.rsqrt(total / HEAD_DIM + eps)
    angles = tl.arange(0, BLOCK)[None, None, :]
    gain = tl.load(weight_ptr + angles, mask=angles < ANGLES, other=0.0).to(tl.float32) + offset
    first = first * scale * gain
    gain = tl.load(weight_ptr + ANGLES + angles, mask=angles < ANGLES, other=0.0).to(tl.float32)
    second = second * scale * (gain + offset)
    if REST > 0:
        dims = 2 * ANGLES + tl.arange(0, REST)[None, None, :]
        gain = tl.load(weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        rest = rest * scale * (gain + offset)
    return first, second, rest


@triton.jit
def store_heads(
    ptr,
    start,
    first,
    second,
    rest,
    keep,
    CODES: tl.constexpr,
    ANGLES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """`start` [TOKENS, HEADS, 1] is where each head begins. Eight numbers a thread, codes too, so
    that the loads are not cut in halves for the sake of wider stores.
    """
    dtype: tl.constexpr = ptr.dtype.element_ty
    if CODES:
        first, second = to_codes(first, dtype), to_codes(second, dtype)
    angles = tl.arange(0, BLOCK)[None, None, :]
    kept = keep & (angles < ANGLES)
    RUN: tl.constexpr = 8 if BLOCK >= 8 else BLOCK
    place = tl.max_contiguous(start + angles, [1, 1, RUN])
    tl.store(ptr + place, first.to(dtype), mask=kept)
    place = tl.max_contiguous(start + ANGLES + angles, [1, 1, RUN])
    tl.store(ptr + place, second.to(dtype), mask=kept)
    if REST > 0:
        if CODES:
            rest = to_codes(rest, dtype)
        dims = 2 * ANGLES + tl.arange(0, REST)[None, None, :]
        REST_RUN: tl.constexpr = 8 if REST >= 8 else REST
        place = tl.max_contiguous(start + dims, [1, 1, REST_RUN])
        tl.store(ptr + place, rest.to(dtype), mask=keep & (dims < HEAD_DIM))


@triton.jit
def write_pages(
    pages_ptr,
    scale_ptr,
    slots,
    heads,
    num_kv_heads,
    first,
    second,
    rest,
    keep,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ANGLES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """Values as they are, or codes and scales when LARGEST > 0. The layout is kernels/pages.py's:
    [P, K, S, H] and [P, K, S].
    """
    row = (slots // PAGE_SIZE * num_kv_heads + heads) * PAGE_SIZE + slots % PAGE_SIZE
    if LARGEST > 0:
        amax = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=2, keep_dims=True)
        if REST > 0:
            amax = tl.maximum(amax, tl.max(tl.abs(rest), axis=2, keep_dims=True))
        scale = row_scale(amax, LARGEST, SMALLEST_AMAX)
        tl.store(scale_ptr + row, scale, mask=keep)
        inverse = 1.0 / scale
        first, second, rest = first * inverse, second * inverse, rest * inverse
    store_heads(
        pages_ptr,
        row * HEAD_DIM,
        first,
        second,
        rest,
        keep,
        LARGEST > 0,
        ANGLES,
        HEAD_DIM,
        BLOCK,
        REST,
    )


@triton.jit
def rotary_pages_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_norm_ptr,
    k_norm_ptr,
    qkv_stride,
    num_tokens,
    num_heads,
    num_kv_heads,
    eps,
    offset,
    HAS_NORM: tl.constexpr,
    TURNS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ANGLES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    q_blocks, kv_blocks = tl.cdiv(num_heads, HEADS), tl.cdiv(num_kv_heads, HEADS)
    blocks = q_blocks + 2 * kv_blocks
    token_block, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    # int64: offsets of tokens and slots pass 2^31
    tokens = (token_block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    in_tokens = tokens < num_tokens
    qkv_ptr += tokens * qkv_stride
    if block < q_blocks:
        heads = (block * HEADS + tl.arange(0, HEADS))[None, :, None]
        keep = in_tokens & (heads < num_heads)
        first, second, rest = load_heads(
            qkv_ptr + heads * HEAD_DIM, keep, ANGLES, HEAD_DIM, BLOCK, REST
        )
        if HAS_NORM:
            first, second, rest = norm_heads(
                first, second, rest, q_norm_ptr, eps, offset, ANGLES, HEAD_DIM, BLOCK, REST
            )
        if TURNS:
            cos = load_angles(cos_ptr, tokens, num_tokens, ANGLES, TOKENS, HEADS, BLOCK)
            sin = load_angles(sin_ptr, tokens, num_tokens, ANGLES, TOKENS, HEADS, BLOCK)
            first, second = turn(first, second, cos, sin)
        start = (tokens * num_heads + heads) * HEAD_DIM
        store_heads(q_ptr, start, first, second, rest, keep, False, ANGLES, HEAD_DIM, BLOCK, REST)
    else:
        slots = tl.load(slots_ptr + tokens, mask=in_tokens, other=-1).to(tl.int64)
        if block < q_blocks + kv_blocks:
            heads = ((block - q_blocks) * HEADS + tl.arange(0, HEADS))[None, :, None]
            keep = (slots >= 0) & (heads < num_kv_heads)
            first, second, rest = load_heads(
                qkv_ptr + (num_heads + heads) * HEAD_DIM, keep, ANGLES, HEAD_DIM, BLOCK, REST
            )
            if HAS_NORM:
                first, second, rest = norm_heads(
                    first, second, rest, k_norm_ptr, eps, offset, ANGLES, HEAD_DIM, BLOCK, REST
                )
            if TURNS:
                cos = load_angles(cos_ptr, tokens, num_tokens, ANGLES, TOKENS, HEADS, BLOCK)
                sin = load_angles(sin_ptr, tokens, num_tokens, ANGLES, TOKENS, HEADS, BLOCK)
                first, second = turn(first, second, cos, sin)
            write_pages(
                k_pages_ptr,
                k_scale_ptr,
                slots,
                heads,
                num_kv_heads,
                first,
                second,
                rest,
                keep,
                LARGEST,
                SMALLEST_AMAX,
                PAGE_SIZE,
                ANGLES,
                HEAD_DIM,
                BLOCK,
                REST,
            )
        else:
            heads = ((block - q_blocks - kv_blocks) * HEADS + tl.arange(0, HEADS))[None, :, None]
            keep = (slots >= 0) & (heads < num_kv_heads)
            place = (num_heads + num_kv_heads + heads) * HEAD_DIM
            first, second, rest = load_heads(qkv_ptr + place, keep, ANGLES, HEAD_DIM, BLOCK, REST)
            write_pages(
                v_pages_ptr,
                v_scale_ptr,
                slots,
                heads,
                num_kv_heads,
                first,
                second,
                rest,
                keep,
                LARGEST,
                SMALLEST_AMAX,
                PAGE_SIZE,
                ANGLES,
                HEAD_DIM,
                BLOCK,
                REST,
            )


def rotary_pages(
    qkv_TC: Tensor, angles: Angles | None, slots_T: Tensor, pages: Pages, norm: QKNorm | None = None
) -> Tensor:
    """The launcher; arguments and results are reference.py's."""
    check_pages(pages)
    check_projection(qkv_TC, slots_T, pages)
    (num_tokens, width), (_, num_kv_heads, page_size, head_dim) = qkv_TC.shape, pages.k_pages.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    # Without angles the parts are the head's halves all the same.
    num_angles = angles[0].shape[-1] if angles is not None else head_dim // 2
    q_TNH = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_TC.dtype, device=qkv_TC.device)
    tokens, heads, block, num_held = choose(num_kv_heads, num_angles, head_dim)
    blocks = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    codes, target = holds_codes(pages.k_pages.dtype), target_of(qkv_TC)
    if num_tokens:
        launch(
            rotary_pages_kernel,
            (triton.cdiv(num_tokens, tokens) * blocks,),
            (
                qkv_TC,
                angles[0].contiguous() if angles is not None else qkv_TC,
                angles[1].contiguous() if angles is not None else qkv_TC,
                slots_T,
                q_TNH,
                pages.k_pages,
                pages.v_pages,
                pages.k_scale if pages.k_scale is not None else pages.k_pages,
                pages.v_scale if pages.v_scale is not None else pages.v_pages,
                norm.q_weight if norm is not None else qkv_TC,
                norm.k_weight if norm is not None else qkv_TC,
                qkv_TC.stride(0),
                num_tokens,
                num_heads,
                num_kv_heads,
                norm.eps if norm is not None else 1e-6,
                norm.offset if norm is not None else 0.0,
            ),
            HAS_NORM=norm is not None,
            TURNS=angles is not None,
            LARGEST=LARGEST[pages.k_pages.dtype] if codes else 0.0,
            SMALLEST_AMAX=SMALLEST_AMAX,
            PAGE_SIZE=page_size,
            ANGLES=num_angles,
            HEAD_DIM=head_dim,
            TOKENS=tokens,
            HEADS=heads,
            BLOCK=block,
            REST=width_of_rest(head_dim, num_angles),
            num_warps=num_warps(num_held // 2, target),
            options=roomy(target) if codes else None,
        )
    return q_TNH


def choose(num_kv_heads: int, num_angles: int, head_dim: int) -> tuple[int, int, int, int]:
    """Tokens, heads and angles of a program's tile, powers of two; and the numbers it holds."""
    block = triton.next_power_of_2(num_angles)
    heads = min(MAX_HEADS, triton.next_power_of_2(num_kv_heads))
    width = triton.next_power_of_2(2 * block + width_of_rest(head_dim, num_angles))
    tokens = max(1, TILE // (heads * width))
    return tokens, heads, block, tokens * heads * width


def check_projection(qkv_TC: Tensor, slots_T: Tensor, pages: Pages) -> None:
    """What a kernel that reads the projection relies on and cannot see."""
    head_dim = pages.k_pages.shape[3]
    if qkv_TC.shape[1] % head_dim:
        raise UnsupportedError(f"{qkv_TC.shape[1]} columns are not whole heads of {head_dim}")
    assert qkv_TC.stride(1) == 1, "rows of qkv are not contiguous"
    assert slots_T.shape == qkv_TC.shape[:1], "one slot a token"
    assert slots_T.is_contiguous(), "slots are not contiguous"
