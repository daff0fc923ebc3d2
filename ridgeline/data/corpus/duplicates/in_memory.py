"""Near duplicates among texts in memory, on a CPU or a GPU: the same pairs as by the tasks.

    pairs = near_duplicates(texts, DuplicateOptions(), device="cuda")    # texts: an Arrow array
    pairs.first, pairs.second, pairs.similarity

A GPU makes signatures, sorts bands into buckets and counts what each pair shares; the text is all
that goes to it. It takes some twenty times the text's size of its memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.data.corpus.duplicates.options import DuplicateOptions
from ridgeline.data.corpus.duplicates.pairing import BEFORE, HEADS
from ridgeline.data.corpus.duplicates.tables import packed
from ridgeline.kernels.minhash import shingle_sets, signatures


class SimilarPairs(NamedTuple):
    """Numbers of two documents each, the lower one first; sorted."""

    first: Tensor  # [M] int64
    second: Tensor  # [M] int64
    similarity: Tensor  # [M] float64
    num_candidates: int  # pairs that share a band


def near_duplicates(
    texts: Any, options: DuplicateOptions, device: str | torch.device = "cpu"
) -> SimilarPairs:
    text_N, offsets = packed(texts)
    return similar_pairs(text_N.to(device), offsets.to(device), options)


def similar_pairs(text_N: Tensor, offsets: Tensor, options: DuplicateOptions) -> SimilarPairs:
    """As kernels/minhash takes them; where they are, all is done."""
    if text_N.is_cuda:
        from ridgeline.kernels.minhash import triton

        places = triton.shingle_places(text_N, offsets, ngram=options.ngram)
        made = triton.minima(places, bands=options.bands, rows=options.rows)
    else:
        made = signatures(
            text_N, offsets, bands=options.bands, rows=options.rows, ngram=options.ngram
        )
    first, second = candidates(made.bands, made.counts)
    wanted, number = torch.cat((first, second)).unique(return_inverse=True)
    if text_N.is_cuda:
        hashes_S, starts = triton.shingles_of(places, wanted)
    else:
        hashes_S, starts = sets_of(text_N, offsets, wanted, options.ngram)
    similarity = set_similarity(hashes_S, starts, number[: len(first)], number[len(first) :])
    near = (similarity >= options.threshold).nonzero()[:, 0]
    return SimilarPairs(first[near], second[near], similarity[near], len(first))


def candidates(bands_DB: Tensor, counts_D: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs as pairing.py makes them, each once; a bucket's documents are sorted by number."""
    num_documents, num_bands = bands_DB.shape
    documents = torch.arange(num_documents, device=bands_DB.device)[counts_D > 0]
    values, order = bands_DB[documents].T.reshape(-1).sort(stable=True)
    document = documents.repeat(num_bands)[order]
    is_same = torch.zeros_like(values, dtype=torch.bool)
    is_same[1:] = values[1:] == values[:-1]
    place = torch.arange(len(values), device=values.device)
    start = torch.where(is_same, 0, place).cummax(0).values
    later = is_same.nonzero()[:, 0]  # all others are the first of their bucket
    number = later - start[later]
    keys = []
    for back in range(1, BEFORE + 1):
        own = later[number >= back]
        keys.append(document[own - back] * num_documents + document[own])
    for head in range(HEADS):
        own = later[number - head > BEFORE]
        keys.append(document[start[own] + head] * num_documents + document[own])
    pairs = torch.cat(keys).unique()
    return pairs // max(1, num_documents), pairs % max(1, num_documents)


def sets_of(
    text_N: Tensor, offsets: Tensor, documents_M: Tensor, ngram: int
) -> tuple[Tensor, Tensor]:
    pieces = [text_N[offsets[n] : offsets[n + 1]] for n in documents_M.tolist()]
    sizes = offsets.diff()[documents_M]
    text = torch.cat(pieces) if pieces else text_N[:0]
    return shingle_sets(text, torch.cat((sizes.new_zeros(1), sizes.cumsum(0))), ngram=ngram)


def set_similarity(hashes_S: Tensor, starts: Tensor, first_M: Tensor, second_M: Tensor) -> Tensor:
    """Jaccard's, of pairs of lists of hashes, in which a hash may stand more than once."""
    counts = starts.diff()
    owner = torch.arange(len(counts), device=starts.device).repeat_interleave(counts)
    # Hashes by their number among all, so that one sorted row holds every set.
    different, dense = hashes_S.unique(return_inverse=True)
    size = max(1, len(different))
    rows = (owner * size + dense).unique()
    sizes = torch.bincount(rows // size, minlength=len(counts))
    begins = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    # Each hash of a pair's smaller set is looked for in the other.
    is_turned = sizes[first_M] > sizes[second_M]
    small = torch.where(is_turned, second_M, first_M)
    large = torch.where(is_turned, first_M, second_M)
    num_small = sizes[small]
    pair = torch.arange(len(small), device=small.device).repeat_interleave(num_small)
    shift = begins[small] - (num_small.cumsum(0) - num_small)
    own = torch.arange(len(pair), device=pair.device) + shift[pair]
    wanted = rows[own] % size + large[pair] * size
    place = torch.searchsorted(rows, wanted).clamp(max=max(0, len(rows) - 1))
    both = torch.bincount(pair[rows[place] == wanted], minlength=len(small))
    union = sizes[first_M] + sizes[second_M] - both
    return both.double() / union.clamp(min=1).double()
