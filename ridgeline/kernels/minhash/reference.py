"""The definition of shingles and MinHash signatures; it serves where there is no C++ compiler.

**Words** are found in UTF-8 by bytes, alike on every device. ASCII letters (lowered), ASCII digits
and characters of two bytes from U+00C0 on join into words; a character of three or four bytes is a
word by itself, since its script mostly has no spaces; everything else separates: the rest of ASCII,
U+0080-U+00BF, U+2000-U+2FFF (typographic marks) and U+3000-U+303F.

**A shingle** is `ngram` words in a row; a document of fewer words is one shingle. Its 64-bit hash
is the mixed sum of its bytes with weights SPREAD^(words after it) · BASE^(bytes of its word after
it), modulo 2^64. **A signature** has, of bands · rows permutations p of the low 32 bits x of these,
the least a_p·x + b_p (int32, wrapping). **A band** is one 64-bit number made of `rows` of them.

    signatures(text_N, offsets, bands=26, rows=8)      # text_N: uint8, documents end to end

Letters: N bytes, D documents, W words, S shingles, B bands, P permutations.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

NGRAM = 5
LONGEST_NGRAM = 32
BASE = 0x9E3779B97F4A7C15  # of the bytes of a word
SPREAD = 0xD6E8FEB86659FD95  # of the words of a shingle
# Mixing constants of splitmix64 (Steele, Lea, Flood 2014).
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
STEP = 0xA0761D6478BD642F  # of the places of a band
LARGEST = 2**31 - 1
MASK = 2**64 - 1


class Signatures(NamedTuple):
    minima: Tensor  # [D, P] int32; LARGEST in documents without a word
    bands: Tensor  # [D, B] int64
    counts: Tensor  # [D] int64: shingles, repeated ones as often as they stand there


def signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    value &= MASK
    return value - 2**64 if value >> 63 else value


def mixed(x: Tensor) -> Tensor:
    """Every bit of an int64 over all of them."""
    x = (x ^ shifted(x, 30)) * signed(FIRST)
    x = (x ^ shifted(x, 27)) * signed(SECOND)
    return x ^ shifted(x, 31)


def shifted(x: Tensor, count: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> count) & ((1 << (64 - count)) - 1)


@lru_cache
def permutations(count: int) -> tuple[Tensor, Tensor]:
    """Odd factors a_P and terms b_P, int32, the same in every run."""
    numbers = mixed(torch.arange(1, 2 * count + 1) * signed(BASE)).int()
    return numbers[:count] | 1, numbers[count:]


def signatures(
    text_N: Tensor, offsets: Tensor, *, bands: int, rows: int, ngram: int = NGRAM
) -> Signatures:
    """Of documents that begin at `offsets` (int64, [D + 1]; the last: where the last one ends)."""
    hashes_S, starts = shingles(text_N, offsets, ngram=ngram)
    factors_P, terms_P = permutations(bands * rows)
    minima_DP = torch.full((len(starts) - 1, bands * rows), LARGEST, dtype=torch.int32)
    for document, (start, end) in enumerate(pairwise(starts.tolist())):
        if end > start:
            low_S = hashes_S[start:end].to(torch.int32)  # keeps the low 32 bits
            minima_DP[document] = (low_S[:, None] * factors_P + terms_P).amin(0)
    return Signatures(minima_DP, band_hashes(minima_DP, rows), starts.diff())


def band_hashes(minima_DP: Tensor, rows: int) -> Tensor:
    places_P = torch.arange(1, minima_DP.shape[1] + 1) * signed(STEP)
    terms_DP = mixed((minima_DP.long() & 0xFFFFFFFF) + places_P)
    return terms_DP.unflatten(1, (-1, rows)).sum(2)


def shingles(text_N: Tensor, offsets: Tensor, *, ngram: int = NGRAM) -> tuple[Tensor, Tensor]:
    """Hashes of all documents' shingles in their order, and where each document's begin."""
    hashes_W, ends_W = word_hashes(text_N, offsets)
    first_D = torch.searchsorted(ends_W, offsets)  # the first word of each document, then W
    document_W = torch.searchsorted(offsets, ends_W, right=True) - 1
    place_W = torch.arange(len(ends_W)) - first_D[document_W]
    last_W = first_D.diff()[document_W] - 1
    sum_W, weight = torch.zeros_like(hashes_W), 1
    for back in range(min(ngram, len(hashes_W))):
        earlier_W = torch.cat((hashes_W.new_zeros(back), hashes_W[: len(hashes_W) - back]))
        sum_W += torch.where(place_W >= back, earlier_W * signed(weight), 0)
        weight = weight * SPREAD & MASK
    whole_W = (place_W >= ngram - 1) | ((last_W < ngram - 1) & (place_W == last_W))
    num_D = torch.bincount(document_W[whole_W], minlength=len(offsets) - 1)
    return mixed(sum_W[whole_W]), torch.cat((num_D.new_zeros(1), num_D.cumsum(0)))


def word_hashes(text_N: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """A word's hash is the sum of c · BASE^(bytes after it): differences of one running sum. Also
    the place of each word's last byte.
    """
    bytes_N = text_N.long()
    starts_N, ends_N = word_edges(bytes_N, offsets)
    is_capital_N = (bytes_N >= ord("A")) & (bytes_N <= ord("Z"))
    lower_N = bytes_N + 32 * is_capital_N
    up_N, down_N = powers(BASE, len(bytes_N)), powers(pow(BASE, -1, 2**64), len(bytes_N))
    terms_N = lower_N * down_N
    sums_N = terms_N.cumsum(0)
    starts_W, ends_W = starts_N.nonzero()[:, 0], ends_N.nonzero()[:, 0]
    return (sums_N[ends_W] - sums_N[starts_W] + terms_N[starts_W]) * up_N[ends_W], ends_W


def powers(base: int, count: int) -> Tensor:
    """base^0 … base^(count - 1) modulo 2^64."""
    factors = torch.full((count,), signed(base))
    factors[:1] = 1
    return factors.cumprod(0)


def word_edges(bytes_N: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each byte begins a word, and whether it ends one. All that counts is a byte, the
    three before it and the one after it, as far as they are of its document.
    """
    place_N = torch.arange(len(bytes_N))
    document_N = torch.searchsorted(offsets, place_N, right=True) - 1
    begin_N, end_N = offsets[document_N], offsets[document_N + 1]

    def neighbour(distance: int) -> Tensor:
        other_N = place_N + distance
        inside_N = (other_N >= begin_N) & (other_N < end_N)
        return torch.where(inside_N, bytes_N[other_N.clamp(0, max(0, len(bytes_N) - 1))], 0)

    before, twice, thrice, after = (neighbour(distance) for distance in (-1, -2, -3, 1))
    alone = is_alone(bytes_N, after) | (
        continues(bytes_N)
        & (
            is_alone(before, bytes_N)
            | (continues(before) & is_alone(twice, before))
            | (continues(before) & continues(twice) & is_alone(thrice, twice))
        )
    )
    joins = is_joined(bytes_N, before)
    starts = (joins & ~is_joined(before, twice)) | (alone & ~continues(bytes_N))
    ends = (joins & ~is_joined(after, bytes_N)) | (alone & ~continues(after))
    return starts, ends


def continues(c: Tensor) -> Tensor:
    """A byte of UTF-8 that is not a character's first."""
    return (c & 0xC0) == 0x80


def is_pair(c: Tensor) -> Tensor:
    """The first of two bytes of a character that joins words."""
    return (c >= 0xC3) & (c <= 0xDF)


def is_joined(c: Tensor, before: Tensor) -> Tensor:
    lower = c | 0x20
    letter = (lower >= ord("a")) & (lower <= ord("z")) & (c < 0x80)
    digit = (c >= ord("0")) & (c <= ord("9"))
    return letter | digit | is_pair(c) | (continues(c) & is_pair(before))


def is_alone(c: Tensor, after: Tensor) -> Tensor:
    """The first byte of a character that is a word by itself."""
    return (c >= 0xE0) & (c != 0xE2) & ~((c == 0xE3) & (after == 0x80))


def shingle_sets(text_N: Tensor, offsets: Tensor, *, ngram: int = NGRAM) -> tuple[Tensor, Tensor]:
    """Each document's hashes once, sorted as unsigned numbers."""
    hashes_S, starts = shingles(text_N, offsets, ngram=ngram)
    flip = signed(1 << 63)  # turns the order of signed numbers into that of unsigned ones
    sets = [
        (hashes_S[start:end] ^ flip).unique() ^ flip for start, end in pairwise(starts.tolist())
    ]
    sizes = torch.tensor([0, *map(len, sets)])
    return torch.cat(sets) if sets else hashes_S, sizes.cumsum(0)


def shared(hashes_S: Tensor, starts: Tensor, pairs_M2: Tensor) -> Tensor:
    def one(number: int) -> Tensor:
        return hashes_S[starts[number] : starts[number + 1]]

    counts = [int(torch.isin(one(a), one(b)).sum()) for a, b in pairs_M2.tolist()]
    return torch.tensor(counts, dtype=torch.int64)
