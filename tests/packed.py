"""Batches of packed documents for the tests of training, made from lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from ridgeline.data.loading.packing import IGNORED, PackedBatch


def pack(*documents: Sequence[int], ignored: Sequence[int] = ()) -> PackedBatch:
    """Documents end to end; a document's last token has nothing to predict, and neither have the
    rows of `ignored`.
    """
    targets = torch.tensor([id for text in documents for id in (*text[1:], IGNORED)])
    targets[list(ignored)] = IGNORED
    return PackedBatch(
        torch.tensor([id for text in documents for id in text]),
        targets,
        torch.cat([torch.arange(len(text)) for text in documents]),
        torch.tensor([0, *accumulate(map(len, documents))], dtype=torch.int32),
    )


def draw(*lengths: int, vocab: int = 131, seed: int = 0) -> list[list[int]]:
    """Random documents of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (size,), generator=generator).tolist() for size in lengths]
