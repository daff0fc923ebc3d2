"""Small codes in 32-bit words as checkpoint files store them, and 4-bit floats.

Codes fill a word from its low bits, in the order of the row; our own kernels read another order
(packing.py). A 4-bit float (e2m1) has one sign, two exponent bits and
one of mantissa; two of them share a byte, the first one in its low half. An e8m0 scale is a power
of two alone: its byte less 127.

    words = pack_words(codes_OD, 4)          # int32, an eighth as many columns
    unpack_words(words, 4, depth)            # the codes again, uint8
"""

from __future__ import annotations

import torch
from torch import Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_NAN = 255


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """[…, N] unsigned codes to […, ⌈N · bits / 32⌉] int32; zeros fill up the last word."""
    per_word = 32 // bits
    missing = -codes.shape[-1] % per_word
    padded = torch.nn.functional.pad(codes.to(torch.int32), (0, missing))
    parts = padded.unflatten(-1, (-1, per_word))
    words = torch.zeros_like(parts[..., 0])
    for part in range(per_word):
        words |= parts[..., part] << (bits * part)
    return words


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """The inverse: the first `count` codes of each row of words, as uint8."""
    in_bytes = words.contiguous().view(
        torch.uint8
    )  # low ones first; bytes move 4x as fast as words
    if bits == 8:
        return in_bytes[..., :count]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    codes = (in_bytes.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)[..., :count]


def unpack_fp4(packed: Tensor) -> Tensor:
    """[…, N / 2] bytes to the [… , N] fp32 values of the e2m1 floats they hold."""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=packed.device)
    halves = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    return table[halves.long()]


def e8m0_values(exponents: Tensor) -> Tensor:
    """The fp32 powers of two that e8m0 bytes (uint8) stand for; the NaN code stays NaN."""
    bits = exponents.to(torch.int32) << 23  # it is fp32's own exponent, with the same bias
    values = bits.masked_fill(exponents == 0, 1 << 22).view(torch.float32)
    return values.masked_fill(exponents == E8M0_NAN, torch.nan)
