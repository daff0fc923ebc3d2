"""The memory layout of 4-bit and 8-bit codes for kernels, which read 16 bytes at a time and never
move a code between threads.

A row's codes (0 … 15, or 0 … 255) are taken 32 (or 16) at a time: a piece, which becomes four
32-bit words, the 16 bytes one thread loads. Part j of word i, counted from the low bits, holds
element 4j + i. So the same part of neighbouring words holds neighbouring elements: a thread that
takes part j out of its four words needs four consecutive values of x, which is one 8-byte load; and
groups of 32 or more never divide a thread's share.

Signed int8 weights are stored with 128 added: a float can be built around an unsigned code with one
instruction.

    packed_OW = pack_int4(codes_OD)          # int32, an eighth as many columns
    unpack_int4(packed_OW)                   # the codes again
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.errors import UnsupportedError

WORDS = 4  # 32-bit words in a 16-byte piece
ZERO = {2: 2, 4: 8, 8: 128}  # by bits: the code of 0.0 where no zero points are stored


def pack_int4(codes_OD: Tensor) -> Tensor:
    """[O, D] codes of 0 … 15, in any integer dtype, to [O, D / 8] int32 words."""
    return _pack(codes_OD, 4)


def unpack_int4(packed_OW: Tensor) -> Tensor:
    """The inverse: [O, D / 8] int32 words to [O, D] codes in uint8."""
    return _unpack(packed_OW, 4).to(torch.uint8)


def pack_int8(weight_OD: Tensor) -> Tensor:
    """[O, D] int8 to [O, D / 4] int32 words."""
    return _pack(weight_OD, 8, ZERO[8])


def unpack_int8(packed_OW: Tensor) -> Tensor:
    """The inverse: [O, D / 4] int32 words to [O, D] int8."""
    return (_unpack(packed_OW, 8) - ZERO[8]).to(torch.int8)


def _pack(codes_OD: Tensor, bits: int, added: int = 0) -> Tensor:
    """One part of all words at a time, so that only one set of codes is held in 32 bits."""
    num_rows, depth = codes_OD.shape
    parts = 32 // bits
    piece = WORDS * parts
    if depth % piece:
        raise UnsupportedError(
            f"rows of {depth} {bits}-bit codes; the length must be a multiple of {piece}"
        )
    pieces = codes_OD.reshape(num_rows, depth // piece, parts, WORDS)
    packed = torch.zeros_like(pieces[:, :, 0], dtype=torch.int32)
    for part in range(parts):
        codes = (pieces[:, :, part].to(torch.int32) + added).bitwise_and_((1 << bits) - 1)
        packed |= codes.bitwise_left_shift_(bits * part)
    return packed.reshape(num_rows, depth // parts)


def _unpack(packed_OW: Tensor, bits: int) -> Tensor:
    num_rows, num_words = packed_OW.shape
    parts = 32 // bits
    words = packed_OW.reshape(num_rows, num_words // WORDS, 1, WORDS)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed_OW.device)
    # Mask off the sign bits that >> brings in.
    codes = (words >> shifts.view(1, 1, parts, 1)) & ((1 << bits) - 1)
    return codes.reshape(num_rows, num_words * parts)
