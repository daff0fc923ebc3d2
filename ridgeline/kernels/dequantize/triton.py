"""Packed weights to 16 bits in Triton, bound by the memory it writes.

A thread makes eight neighbouring weights, one 16-byte store. They are two parts of the four words
of a piece (formats/packing.py), which it loads whole: neighbouring threads load the same piece,
which costs the cache a little and the memory nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.errors import UnsupportedError
from ridgeline.formats.packing import WORDS, ZERO
from ridgeline.kernels.dequantize.reference import packed_bits
from ridgeline.kernels.launch import launch, target_of

CHUNK = 8  # weights a thread makes at a time
# Of a program, 32 weights a thread. Heuristics until measured: rows long enough for whole lines of
# memory, and enough of them that the scales of neighbouring outputs come together.
TILE, CHUNKS = 4096, 64


@triton.jit
def dequantize_kernel(
    weight_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    weight_stride,
    scale_stride,
    out_stride,
    num_outputs,
    num_chunks,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    ZERO: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """OUTPUTS rows times CHUNKS of eight weights. GROUP 0: one scale a row."""
    IN_PIECE: tl.constexpr = 16 // BITS  # chunks of a piece: 128 / BITS weights
    blocks = tl.cdiv(num_chunks, CHUNKS)
    outputs = (tl.program_id(0) // blocks) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None, None]
    chunks = (tl.program_id(0) % blocks) * CHUNKS + tl.arange(0, CHUNKS)[None, :, None]
    keep = (outputs < num_outputs) & (chunks < num_chunks)
    row = outputs.to(tl.int64)  # int64: a weight may have more than 2^31 elements
    words = 4 * (chunks // IN_PIECE) + tl.arange(0, 4)[None, None, :]
    loaded = tl.load(weight_ptr + row * weight_stride + words, mask=keep, other=0)
    # The chunk's two parts of the four words, part by part: [OUTPUTS, CHUNKS, 4] to [.., 8].
    shift = 2 * BITS * (chunks % IN_PIECE)
    both = tl.join(loaded >> shift, loaded >> (shift + BITS))
    codes = tl.reshape(tl.permute(both, (0, 1, 3, 2)), (OUTPUTS, CHUNKS, 8))
    # Under the exponent of 2^23 a code reads as 2^23 + code: no conversion, and exact.
    number = ((codes & ((1 << BITS) - 1)) | 0x4B000000).to(tl.float32, bitcast=True)
    if GROUP > 0:
        # int64: groups times outputs may pass 2^31.
        place = (8 * chunks // GROUP).to(tl.int64) * scale_stride + outputs
        scale = tl.load(scale_ptr + place, mask=keep, other=0.0).to(tl.float32)
    else:
        scale = tl.load(scale_ptr + outputs, mask=outputs < num_outputs, other=0.0)
    if ASYMMETRIC:
        zero = 8388608.0 + tl.load(zero_ptr + place, mask=keep, other=0).to(tl.float32)
    else:
        zero = 8388608.0 + ZERO
    weight = (number - zero) * scale  # fp32: rounded once, at the store
    out = out_ptr + row * out_stride + 8 * chunks + tl.arange(0, 8)[None, None, :]
    tl.store(out, weight.to(out_ptr.dtype.element_ty), mask=keep)


def dequantize_packed(
    weight_OW: Tensor,
    scale: Tensor,
    zero_GO: Tensor | None,
    depth: int,
    dtype: torch.dtype,
    out_OD: Tensor | None = None,
) -> Tensor:
    """The launcher; rows contiguous in their last dim, `out_OD`'s too."""
    bits = packed_bits(weight_OW, depth)
    group = depth // scale.shape[0] if bits == 4 else 0
    if group % (WORDS * 32 // bits) or (group and group * scale.shape[0] != depth):
        raise UnsupportedError(
            f"groups of {group} in rows of {depth} are not supported; use 32, 64 or 128"
        )
    num_outputs, num_chunks = weight_OW.shape[0], depth // CHUNK
    if out_OD is None:
        out_OD = torch.empty(num_outputs, depth, dtype=dtype, device=weight_OW.device)
    assert weight_OW.stride(1) == out_OD.stride(1) == scale.stride(-1) == 1, "rows are contiguous"
    assert zero_GO is None or zero_GO.stride() == scale.stride(), "zeros lie as scales do"
    zeros = scale if zero_GO is None else zero_GO
    strides = (weight_OW.stride(0), scale.stride(0), out_OD.stride(0))
    chunks = min(CHUNKS, triton.next_power_of_2(num_chunks))
    outputs = TILE // CHUNK // chunks
    programs = triton.cdiv(num_outputs, outputs) * triton.cdiv(num_chunks, chunks)
    if programs:
        launch(
            dequantize_kernel,
            (programs,),
            (weight_OW, scale, zeros, out_OD, *strides, num_outputs, num_chunks),
            BITS=bits,
            GROUP=group,
            ASYMMETRIC=zero_GO is not None,
            ZERO=float(ZERO[bits]),
            OUTPUTS=outputs,
            CHUNKS=chunks,
            num_warps=max(1, TILE // (32 * target_of(weight_OW).warp_size)),
        )
    return out_OD
