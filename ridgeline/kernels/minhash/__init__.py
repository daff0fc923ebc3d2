"""MinHash: what documents have in common, from the hashes of their shingles (runs of words).

    minima, bands, counts = signatures(text_N, offsets, bands=26, rows=8)
    hashes_S, starts = shingle_sets(text_N, offsets)
    shared(hashes_S, starts, torch.tensor([[0, 1]]))     # how many the first two share

Documents lie end to end in `text_N` (uint8, valid UTF-8, as Arrow holds them); `offsets` (int64,
[D + 1]) say where each begins, and the last one where the last ends. reference.py says what words
and hashes are. A CPU takes cpu.cpp, a GPU triton.py; the bits are the same. No custom op: nothing
is traced through it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.minhash import cpu, reference
from ridgeline.kernels.minhash.reference import LONGEST_NGRAM, NGRAM, Signatures

__all__ = ["NGRAM", "Signatures", "shared", "shingle_sets", "shingles", "signatures"]


def signatures(
    text_N: Tensor, offsets: Tensor, *, bands: int, rows: int, ngram: int = NGRAM
) -> Signatures:
    """Least permuted hashes, hashes of the bands, and how many shingles each document has."""
    _check(text_N, offsets, ngram)
    if bands < 1 or rows < 1:
        raise ValueError(f"{bands} bands of {rows} rows; both must be at least 1")
    if text_N.is_cuda:
        from ridgeline.kernels.minhash import triton

        return triton.signatures(text_N, offsets, bands=bands, rows=rows, ngram=ngram)
    own = cpu if cpu.serves() else reference
    return own.signatures(text_N, offsets, bands=bands, rows=rows, ngram=ngram)


def shingles(text_N: Tensor, offsets: Tensor, *, ngram: int = NGRAM) -> tuple[Tensor, Tensor]:
    """64-bit hashes of each document's shingles in their order, on a CPU; and where they begin."""
    _check(text_N, offsets, ngram)
    if cpu.serves():
        return cpu.shingles(text_N, offsets, ngram=ngram, as_sets=False)
    return reference.shingles(text_N, offsets, ngram=ngram)


def shingle_sets(text_N: Tensor, offsets: Tensor, *, ngram: int = NGRAM) -> tuple[Tensor, Tensor]:
    """As `shingles`, each hash once in a document and sorted as an unsigned number."""
    _check(text_N, offsets, ngram)
    if cpu.serves():
        return cpu.shingles(text_N, offsets, ngram=ngram, as_sets=True)
    return reference.shingle_sets(text_N, offsets, ngram=ngram)


def shared(hashes_S: Tensor, starts: Tensor, pairs_M2: Tensor) -> Tensor:
    """Of sets as `shingle_sets` gives them: how many hashes each pair of them has in common."""
    assert pairs_M2.dtype == torch.int64
    assert pairs_M2.is_contiguous()
    own = cpu if cpu.serves() else reference
    return own.shared(hashes_S, starts, pairs_M2)


def _check(text_N: Tensor, offsets: Tensor, ngram: int) -> None:
    if not 1 <= ngram <= LONGEST_NGRAM:
        raise ValueError(f"ngram={ngram} is outside 1 to {LONGEST_NGRAM}")
    assert text_N.dtype == torch.uint8
    assert text_N.is_contiguous()
    assert offsets.dtype == torch.int64
    assert offsets.is_contiguous()
