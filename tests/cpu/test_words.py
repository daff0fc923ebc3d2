"""Codes in 32-bit words and 4-bit floats, against words written down by hand."""

from __future__ import annotations

import math

import pytest
import torch

from ridgeline.formats.words import e8m0_values, pack_words, unpack_fp4, unpack_words


def test_the_first_code_is_in_the_lowest_bits() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15, 9]])
    words = pack_words(codes, 4)
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0xF7654321, 0x9]
    assert pack_words(torch.tensor([[1, 255, 0, 128]]), 8).tolist() == [[-(2**31) + 0xFF01]]
    assert pack_words(torch.tensor([[3, 0, 2]]), 2).tolist() == [[0b100011]]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 16, 37])
def test_unpacking_gives_the_codes_back(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (5, count), generator=torch.Generator().manual_seed(0))
    words = pack_words(codes, bits)
    assert words.shape == (5, math.ceil(count * bits / 32))
    assert torch.equal(unpack_words(words, bits, count), codes.to(torch.uint8))


def test_all_4_bit_floats() -> None:
    """e2m1: sign, two bits of exponent with a bias of one, one of mantissa; two in a byte."""
    expected = []
    for code in range(16):
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        expected.append(-size if code & 8 else size)
    packed = torch.tensor([[low | low + 1 << 4 for low in range(0, 16, 2)]], dtype=torch.uint8)
    assert unpack_fp4(packed).tolist() == [expected]


def test_all_powers_of_two() -> None:
    values = e8m0_values(torch.arange(256, dtype=torch.uint8))
    assert values[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert math.isnan(values[255])
    theirs = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    assert torch.equal(values[:255], theirs)
