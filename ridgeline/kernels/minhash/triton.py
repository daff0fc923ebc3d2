"""Signatures on a GPU, in three launches of one program a document: words, shingles, minima.

A word's hash is a difference of a running sum (reference.py), so that words need no program of
their own and no state but a sum and a count goes from one block of bytes to the next. Words are
left where half a place a byte was kept for them. The minima of a document lie in registers, and all
threads of the program meet each shingle by one load: three operations a permutation, about a
hundred a byte of text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

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


@dataclass(frozen=True)
class MinHashConfig:
    """The fastest of seven on an H200: 29.4 GB/s; one warp with 256 bytes 19.3, two with 512 28.6
    (2026-11-19).
    """

    bytes: int = 1024  # of a document looked at together
    words: int = 128  # shingles made together
    unroll: int = 8  # shingles in a round of the minima
    warps: int = 4  # of 32 threads, for each of the three


DEFAULT = MinHashConfig()
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
    hashes_ptr,
    NGRAM: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The hash of the words up to each word: at the last one in a document of fewer words than a
    shingle has, its only shingle's.
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
        tl.store(hashes_ptr + room + word, mixed(total), mask=keep)


@triton.jit
def minima_kernel(
    offsets_ptr,
    num_words_ptr,
    hashes_ptr,
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
            hash = tl.load(hashes_ptr + room + tl.minimum(word + step, num_words - 1))
            least = tl.minimum(least, factors * hash.to(tl.int32) + terms)
    tl.store(minima_ptr + document * BANDS * ROWS + number, least, mask=keep)
    unsigned = least.to(tl.int64) & 0xFFFFFFFF
    parts = mixed(unsigned + (number + 1).to(tl.int64) * STEP_TERM)
    sums = tl.sum(tl.where(keep, parts, 0), 1)
    tl.store(bands_ptr + document * BANDS + band, sums, mask=band < BANDS)
    tl.store(counts_ptr + document, (num_words - first).to(tl.int64))


class ShinglePlaces(NamedTuple):
    """Hashes of all shingles where they were kept: those of a document from its first place on,
    and from as many further as a shingle has words before its last.
    """

    offsets: Tensor  # [D + 1], of the text
    hashes: Tensor  # [half as many as there are bytes and documents] int64
    num_words: Tensor  # [D] int32
    ngram: int


@lru_cache
def power_tables(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Powers of BASE and of its inverse."""
    return powers(BASE, count).to(device), powers(pow(BASE, -1, 2**64), count).to(device)


@lru_cache
def permutation_tables(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    factors_P, terms_P = permutations(count)
    return factors_P.to(device), terms_P.to(device)


def signatures(
    text_N: Tensor,
    offsets: Tensor,
    *,
    bands: int,
    rows: int,
    ngram: int = NGRAM,
    config: MinHashConfig = DEFAULT,
) -> Signatures:
    """The launcher; arguments are reference.py's, on the device."""
    places = shingle_places(text_N, offsets, ngram=ngram, config=config)
    return minima(places, bands=bands, rows=rows, config=config)


def shingle_places(
    text_N: Tensor, offsets: Tensor, *, ngram: int = NGRAM, config: MinHashConfig = DEFAULT
) -> ShinglePlaces:
    documents, device = len(offsets) - 1, text_N.device
    num_places = (len(text_N) + documents) // 2 + 1
    begun, ended, scales = torch.empty((3, num_places), dtype=torch.int64, device=device)
    hashes = torch.empty(num_places, dtype=torch.int64, device=device)  # outlives the others
    num_words = torch.empty(documents, dtype=torch.int32, device=device)
    result = ShinglePlaces(offsets, hashes, num_words, ngram)
    if not documents:
        return result
    up, down = power_tables(config.bytes, device)
    num_warps = warps_of(text_N, config)
    launch(
        words_kernel,
        (documents,),
        (text_N, offsets, up, down, begun, ended, scales, num_words),
        UP_STEP=signed(pow(BASE, config.bytes, 2**64)),
        DOWN_STEP=signed(pow(pow(BASE, -1, 2**64), config.bytes, 2**64)),
        BYTES=config.bytes,
        num_warps=num_warps,
    )
    launch(
        shingles_kernel,
        (documents,),
        (offsets, begun, ended, scales, num_words, hashes),
        NGRAM=ngram,
        WORDS=config.words,
        num_warps=num_warps,
    )
    return result


def minima(
    places: ShinglePlaces, *, bands: int, rows: int, config: MinHashConfig = DEFAULT
) -> Signatures:
    documents, device = len(places.num_words), places.hashes.device
    minima_DP = torch.empty((documents, bands * rows), dtype=torch.int32, device=device)
    bands_DB = torch.empty((documents, bands), dtype=torch.int64, device=device)
    counts_D = torch.empty(documents, dtype=torch.int64, device=device)
    result = Signatures(minima_DP, bands_DB, counts_D)
    if not documents:
        return result
    factors_P, terms_P = permutation_tables(bands * rows, device)
    launch(
        minima_kernel,
        (documents,),
        (
            places.offsets,
            places.num_words,
            places.hashes,
            factors_P,
            terms_P,
            minima_DP,
            bands_DB,
            counts_D,
        ),
        NGRAM=places.ngram,
        BANDS=bands,
        ROWS=rows,
        BAND_BLOCK=triton.next_power_of_2(bands),
        ROW_BLOCK=triton.next_power_of_2(rows),
        UNROLL=config.unroll,
        num_warps=warps_of(places.hashes, config),
    )
    return result


def warps_of(tensor: Tensor, config: MinHashConfig) -> int:
    """For as many threads; AMD's warps have twice as many."""
    return max(1, 32 * config.warps // target_of(tensor).warp_size)


def shingles_of(places: ShinglePlaces, documents_M: Tensor) -> tuple[Tensor, Tensor]:
    """Hashes of some documents' shingles in their order, and where each document's begin, [M + 1]:
    what `shingles` gives for them on a CPU.
    """
    num_words = places.num_words[documents_M].long()
    first = (num_words.clamp(max=places.ngram) - 1).clamp(min=0)
    counts = num_words - first
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    begin = (places.offsets[documents_M] + documents_M) // 2 + first
    shift = (begin - starts[:-1]).repeat_interleave(counts)
    return places.hashes[torch.arange(len(shift), device=shift.device) + shift], starts
