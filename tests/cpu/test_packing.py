"""Packed codes: the round trip, the layout the kernels rely on, and what cannot be packed."""

from __future__ import annotations

import pytest
import torch

from ridgeline.errors import UnsupportedError
from ridgeline.formats.packing import pack_int4, pack_int8, unpack_int4, unpack_int8


def test_int4_comes_back() -> None:
    codes = torch.randint(0, 16, (7, 96), dtype=torch.uint8)
    packed = pack_int4(codes)
    assert packed.dtype == torch.int32
    assert packed.shape == (7, 12)
    assert torch.equal(unpack_int4(packed), codes)


def test_int8_comes_back_from_the_whole_range() -> None:
    weight = torch.arange(-128, 128, dtype=torch.int8).view(2, 128)
    packed = pack_int8(weight)
    assert packed.shape == (2, 32)
    assert torch.equal(unpack_int8(packed), weight)


@pytest.mark.parametrize(("bits", "pack"), [(4, pack_int4), (8, pack_int8)])
def test_part_j_of_word_i_is_element_4j_plus_i(bits: int, pack) -> None:
    parts = 32 // bits
    zero = 0 if bits == 4 else -128
    for element in range(4 * parts):
        codes = torch.full((1, 4 * parts), zero, dtype=torch.int32)
        codes[0, element] = zero + 5
        (words,) = pack(codes).tolist()
        assert words[element % 4] == 5 << (bits * (element // 4))


def test_length_must_fill_pieces() -> None:
    with pytest.raises(UnsupportedError, match="multiple of 32"):
        pack_int4(torch.zeros(2, 48, dtype=torch.uint8))
