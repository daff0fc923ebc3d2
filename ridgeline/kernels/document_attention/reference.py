"""Attention of packed documents defined: each document alone through attention's own definition,
which autograd can differentiate. Letters: T tokens of all documents end to end, N query heads, K
KV heads, H head dim.
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
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, documents: Documents, spec: AttentionSpec
) -> Tensor:
    """A token sees its own document's tokens up to itself, as far as the window goes."""
    return torch.cat(
        [attention(q, k, v, 0, spec) for q, k, v in documents.each(q_TNH, k_TKH, v_TKH)]
    )
