"""Signatures on a GPU, in three launches of one program a document: words, shingles, minima.

A word's hash is a difference of a running sum (reference.py), so that words need no program of
their own and no state but a sum and a count goes from one block of bytes to the next. Words are
left where half a place a byte was kept for them. The minima of a document lie in registers, and all
threads of the program meet each shingle by one load: three operations a permutation, about a
hundred a byte of text.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.launch import launch, target_of
from ridgeline.kernels.minhash.reference import (
    BASE,
    FIRST,
    LARGEST,
    NGRAM,
    SECOND,
    SPREAD,
    STEP,
    Signatures,
    permutations,
    powers,
    signed,
)

BYTES = 256  # of a document looked at together; not measured yet
WORDS = 128  # shingles made together; not measured yet
UNROLL = 8  # shingles in a round of the minima; not measured yet
SPREAD_FACTOR = tl.constexpr(signed(SPREAD))
FIRST_FACTOR, SECOND_FACTOR = tl.constexpr(signed(FIRST)), tl.constexpr(signed(SECOND))
STEP_TERM = tl.constexpr(signed(STEP))
LARGEST_MINIMUM = tl.constexpr(LARGEST)


@triton.jit
def mixed(x):
    """int64; shifted as unsigned numbers."""
    x = (x ^ (x.to(tl.uint64, bitcast=True) >> 30).to(tl.int64, bitcast=True)) * FIRST_FACTOR
    x = (x ^ (x.to(tl.uint64, bitcast=True) >> 27).to(tl.int64, bitcast=True)) * SECOND_FACTOR
    return x ^ (x.to(tl.uint64, bitcast=True) >> 31).to(tl.int64, bitcast=True)


@triton.jit
def continues(c):
    return (c & 0xC0) == 0x80


@triton.jit
def is_pair(c):
    return (c >= 0xC3) & (c <= 0xDF)


@triton.jit
def is_joined(c, before):
    lower = c | 0x20
    letter = (lower >= 97) & (lower <= 122) & (c < 0x80)
    digit = (c >= 48) & (c <= 57)
    return letter | digit | is_pair(c) | (continues(c) & is_pair(before))


@triton.jit
def is_alone(c, after):
    return (c >= 0xE0) & (c != 0xE2) & ~((c == 0xE3) & (after == 0x80))


@triton.jit
def byte_at(text_ptr, place, size):
    """0 outside the document."""
    return tl.load(text_ptr + place, mask=(place >= 0) & (place < size), other=0).to(tl.int32)


@triton.jit
def words_kernel(
    text_ptr,
    offsets_ptr,
    up_ptr,
    down_ptr,
    begun_ptr,
    ended_ptr,
    scales_ptr,
    num_words_ptr,
    UP_STEP: tl.constexpr,
    DOWN_STEP: tl.constexpr,
    BYTES: tl.constexpr,
):
    """A word's hash is (ended - begun) · scale, at its number behind the document's first place."""
    document = tl.program_id(0).to(tl.int64)
    offset = tl.load(offsets_ptr + document)
    size = tl.load(offsets_ptr + document + 1) - offset
    own = text_ptr + offset
    room = (offset + document) // 2  # the document's first place: no two words share two bytes
    most = (size + 1) // 2
    inside = tl.arange(0, BYTES)
    ups = tl.load(up_ptr + inside)
    downs = tl.load(down_ptr + inside)
    up = tl.full((), 1, tl.int64)  # BASE^start, and its inverse
    down = tl.full((), 1, tl.int64)
    total = tl.full((), 0, tl.int64)  # of the running sum
    num_started = tl.full((), 0, tl.int32)
    num_ended = tl.full((), 0, tl.int32)
    for start in range(0, size, BYTES):
        place = start + inside  # [BYTES]
        c = byte_at(own, place, size)
        before = byte_at(own, place - 1, size)
        twice = byte_at(own, place - 2, size)
        thrice = byte_at(own, place - 3, size)
        after = byte_at(own, place + 1, size)
        alone = is_alone(c, after) | (
            continues(c)
            & (
                is_alone(before, c)
                | (continues(before) & is_alone(twice, before))
                | (continues(before) & continues(twice) & is_alone(thrice, twice))
            )
        )
        joins = is_joined(c, before)
        starts = (joins & ~is_joined(before, twice)) | (alone & ~continues(c))
        ends = (joins & ~is_joined(after, c)) | (alone & ~continues(after))
        capital = (c >= 65) & (c <= 90)
        term = (c + 32 * capital.to(tl.int32)).to(tl.int64) * downs * down
        sums = total + tl.cumsum(term, 0)
        # Numbers of words, counted from the document's first.
        started = num_started + tl.cumsum(starts.to(tl.int32), 0) - 1
        ended = num_ended + tl.cumsum(ends.to(tl.int32), 0) - 1
        # `most` bounds what text that is no UTF-8 can write
        tl.store(begun_ptr + room + started, sums - term, mask=starts & (started < most))
        tl.store(ended_ptr + room + ended, sums, mask=ends & (ended < most))
        tl.store(scales_ptr + room + ended, ups * up, mask=ends & (ended < most))
        total += tl.sum(term, 0)
        num_started += tl.sum(starts.to(tl.int32), 0)
        num_ended += tl.sum(ends.to(tl.int32), 0)
        up *= UP_STEP
        down *= DOWN_STEP
    tl.store(num_words_ptr + document, tl.minimum(num_ended, most))


@triton.jit
def shingles_kernel(
    offsets_ptr,
    begun_ptr,
    ended_ptr,
    scales_ptr,
    num_words_ptr,
    low_ptr,
    NGRAM: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The low 32 bits of the hash of the words up to each word: of the last one in a document of
    fewer words than a shingle has, its only shingle's.
    """
    document = tl.program_id(0).to(tl.int64)
    room = (tl.load(offsets_ptr + document) + document) // 2
    num_words = tl.load(num_words_ptr + document)
    for start in range(0, num_words, WORDS):
        word = start + tl.arange(0, WORDS)
        keep = word < num_words
        total = tl.zeros((WORDS,), tl.int64)
        # from the first of the words on, as the last one's weight is 1
        for step in tl.static_range(NGRAM):
            other = word - (NGRAM - 1 - step)
            there = keep & (other >= 0)
            begun = tl.load(begun_ptr + room + other, mask=there, other=0)
            ended = tl.load(ended_ptr + room + other, mask=there, other=0)
            scale = tl.load(scales_ptr + room + other, mask=there, other=0)
            total = total * SPREAD_FACTOR + (ended - begun) * scale
        tl.store(low_ptr + room + word, mixed(total).to(tl.int32), mask=keep)


@triton.jit
def minima_kernel(
    offsets_ptr,
    num_words_ptr,
    low_ptr,
    factors_ptr,
    terms_ptr,
    minima_ptr,
    bands_ptr,
    counts_ptr,
    NGRAM: tl.constexpr,
    BANDS: tl.constexpr,
    ROWS: tl.constexpr,
    BAND_BLOCK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    document = tl.program_id(0).to(tl.int64)
    room = (tl.load(offsets_ptr + document) + document) // 2
    num_words = tl.load(num_words_ptr + document)
    band = tl.arange(0, BAND_BLOCK)
    row = tl.arange(0, ROW_BLOCK)
    number = band[:, None] * ROWS + row[None, :]  # [BAND_BLOCK, ROW_BLOCK]
    keep = (band[:, None] < BANDS) & (row[None, :] < ROWS)
    factors = tl.load(factors_ptr + number, mask=keep, other=0)
    terms = tl.load(terms_ptr + number, mask=keep, other=0)
    least = tl.full((BAND_BLOCK, ROW_BLOCK), LARGEST_MINIMUM, tl.int32)
    first = tl.maximum(tl.minimum(num_words, NGRAM) - 1, 0)
    for word in range(first, num_words, UNROLL):
        for step in tl.static_range(UNROLL):
            # The last one again behind the end: it changes no minimum.
            low = tl.load(low_ptr + room + tl.minimum(word + step, num_words - 1))
            least = tl.minimum(least, factors * low + terms)
    tl.store(minima_ptr + document * BANDS * ROWS + number, least, mask=keep)
    unsigned = least.to(tl.int64) & 0xFFFFFFFF
    parts = mixed(unsigned + (number + 1).to(tl.int64) * STEP_TERM)
    sums = tl.sum(tl.where(keep, parts, 0), 1)
    tl.store(bands_ptr + document * BANDS + band, sums, mask=band < BANDS)
    tl.store(counts_ptr + document, (num_words - first).to(tl.int64))


@lru_cache
def tables(count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Powers of BASE and of its inverse; the factors and terms of the permutations."""
    made = (powers(BASE, BYTES), powers(pow(BASE, -1, 2**64), BYTES), *permutations(count))
    up, down, factors, terms = (each.to(device) for each in made)
    return up, down, factors, terms


def signatures(
    text_N: Tensor, offsets: Tensor, *, bands: int, rows: int, ngram: int = NGRAM
) -> Signatures:
    """The launcher; arguments are reference.py's, on the device."""
    documents, device = len(offsets) - 1, text_N.device
    minima_DP = torch.empty((documents, bands * rows), dtype=torch.int32, device=device)
    bands_DB = torch.empty((documents, bands), dtype=torch.int64, device=device)
    counts_D = torch.empty(documents, dtype=torch.int64, device=device)
    result = Signatures(minima_DP, bands_DB, counts_D)
    if not documents:
        return result
    up, down, factors_P, terms_P = tables(bands * rows, device)
    places = (len(text_N) + documents) // 2 + 1
    begun, ended, scales = torch.empty((3, places), dtype=torch.int64, device=device)
    low = torch.empty(places, dtype=torch.int32, device=device)
    num_words = torch.empty(documents, dtype=torch.int32, device=device)
    warps = 1 if target_of(text_N).warp_size == 32 else 2
    launch(
        words_kernel,
        (documents,),
        (text_N, offsets, up, down, begun, ended, scales, num_words),
        UP_STEP=signed(pow(BASE, BYTES, 2**64)),
        DOWN_STEP=signed(pow(pow(BASE, -1, 2**64), BYTES, 2**64)),
        BYTES=BYTES,
        num_warps=warps,
    )
    launch(
        shingles_kernel,
        (documents,),
        (offsets, begun, ended, scales, num_words, low),
        NGRAM=ngram,
        WORDS=WORDS,
        num_warps=warps,
    )
    launch(
        minima_kernel,
        (documents,),
        (offsets, num_words, low, factors_P, terms_P, minima_DP, bands_DB, counts_D),
        NGRAM=ngram,
        BANDS=bands,
        ROWS=rows,
        BAND_BLOCK=triton.next_power_of_2(bands),
        ROW_BLOCK=triton.next_power_of_2(rows),
        UNROLL=UNROLL,
        num_warps=warps,
    )
    return result
