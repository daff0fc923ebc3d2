"""Shingles, signatures and shared shingles by cpu.cpp, one core; host_library.py builds it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ridgeline.kernels.host_library import function, load
from ridgeline.kernels.minhash.reference import LARGEST, Signatures, permutations


def serves() -> bool:
    """Built and loaded, if that can be."""
    return load("minhash")


def signatures(text_N: Tensor, offsets: Tensor, *, bands: int, rows: int, ngram: int) -> Signatures:
    documents, count = len(offsets) - 1, bands * rows
    factors_P, terms_P = padded_permutations(count)
    scratch_P = torch.empty_like(factors_P)
    minima_DP = torch.empty((documents, count), dtype=torch.int32)
    bands_DB = torch.empty((documents, bands), dtype=torch.int64)
    counts_D = torch.empty(documents, dtype=torch.int64)
    function("minhash", "signatures", "pplippllpppp")(
        text_N.data_ptr(),
        offsets.data_ptr(),
        documents,
        ngram,
        factors_P.data_ptr(),
        terms_P.data_ptr(),
        bands,
        rows,
        scratch_P.data_ptr(),
        minima_DP.data_ptr(),
        bands_DB.data_ptr(),
        counts_D.data_ptr(),
    )
    return Signatures(minima_DP, bands_DB, counts_D)


@lru_cache
def padded_permutations(count: int) -> tuple[Tensor, Tensor]:
    """With as many behind them as fill up registers: their minima are not looked at."""
    room = function("minhash", "padded", "i")(count)
    factors_P, terms_P = permutations(count)
    fill = torch.full((room - count,), LARGEST, dtype=torch.int32)
    return torch.cat((factors_P, fill)), torch.cat((terms_P, fill))


def shingles(
    text_N: Tensor, offsets: Tensor, *, ngram: int, as_sets: bool
) -> tuple[Tensor, Tensor]:
    documents = len(offsets) - 1
    num_bytes = int(offsets[-1] - offsets[0])
    hashes_S = torch.empty((num_bytes + documents) // 2, dtype=torch.int64)
    starts = torch.empty(documents + 1, dtype=torch.int64)
    function("minhash", "shingles", "ppliipp")(
        text_N.data_ptr(),
        offsets.data_ptr(),
        documents,
        ngram,
        int(as_sets),
        hashes_S.data_ptr(),
        starts.data_ptr(),
    )
    return hashes_S[: int(starts[-1])], starts


def shared(hashes_S: Tensor, starts: Tensor, pairs_M2: Tensor) -> Tensor:
    counts_M = torch.empty(len(pairs_M2), dtype=torch.int64)
    function("minhash", "shared", "ppplp")(
        hashes_S.data_ptr(),
        starts.data_ptr(),
        pairs_M2.data_ptr(),
        len(pairs_M2),
        counts_M.data_ptr(),
    )
    return counts_M
