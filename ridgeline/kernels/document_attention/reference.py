"""Attention of packed documents defined: each document alone through attention's own definition,
which autograd can differentiate. Letters: T tokens of all documents end to end, S keys, where they
are more, N query heads, K KV heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ridgeline.kernels.attention.reference import AttentionSpec, attention


@dataclass(frozen=True)
class Documents:
    """How documents lie end to end. Their lengths are on the host too: they decide what runs, and
    nothing may wait for the device to say them.
    """

    starts: Tensor  # [D + 1] int32, on the device; the last is T
    lengths: tuple[int, ...]
    is_padded: bool = False  # starts end with empty ones, and `lengths` only bound the others

    @staticmethod
    def of(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Documents:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return Documents(starts.to(device), lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def are_equal(self) -> bool:
        return len(set(self.lengths)) == 1 and not self.is_padded

    def each(self, *packed: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The parts of every document. By `split`, whose backward is one copy of all of them."""
        return zip(*(tensor.split(list(self.lengths)) for tensor in packed), strict=True)


def document_attention(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    documents: Documents,
    spec: AttentionSpec,
    keys: Documents | None = None,
) -> Tensor:
    """A token sees its own document's tokens up to itself, as far as the window goes. With `keys`
    a document has these keys, and its queries are the last of them.
    """
    parts = paired(q_TNH, k_SKH, v_SKH, documents, keys)
    return torch.cat([attention(q, k, v, len(k) - len(q), spec) for q, k, v in parts])


def paired(
    q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, documents: Documents, keys: Documents | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every document's queries with its keys and values."""
    own = (keys or documents).each(k_SKH, v_SKH)
    return ((q, k, v) for (q,), (k, v) in zip(documents.each(q_TNH), own, strict=True))
