"""PackedBatch: documents one behind the other in a flat row of tokens, none of which sees another.

Positions restart with each document. A token's target is the next token of its document; the last
one of a document has none (IGNORED). Documents of text end with the model's end-of-text token, so
what is learned of the end is that it comes, not what follows.

    batch = pack(store, pieces)         # pieces: where each document of the row lies (windows.py)
    loss = cross_entropy(logits_TV, batch.targets, ignore_index=IGNORED, reduction="sum")
    loss / batch.num_targets
    joined([batch, other])              # the documents of several rows in one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100  # a target that no loss counts: torch's own number for it
TOKEN_DTYPE = torch.int32  # of ids, targets, positions: half of what is written and copied to a GPU
PADDING_ID = 0  # of tokens that fill up a row; they are a document of their own, without targets


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of D documents."""

    ids: Tensor  # [T] TOKEN_DTYPE, and so the next two
    targets: Tensor  # [T]; IGNORED where no loss is wanted
    positions: Tensor  # [T]; 0 at the beginning of each document
    starts: Tensor  # [D + 1] int32: where documents begin; the last entry is T
    is_padded: bool = False  # starts end with empty documents, and `lengths` only bound the others

    @cached_property
    def num_targets(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORED).sum())

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(self.lengths)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(self.starts.diff().tolist())

    @cached_property
    def learned(self) -> tuple[int, ...]:
        """Tokens of each document up to its last target that counts: no later one changes what is
        learned, and nothing does of a document without targets.
        """
        counted = (self.targets != IGNORED).nonzero().squeeze(1)
        if not len(counted):
            return (0,) * len(self.lengths)
        number = torch.searchsorted(counted, self.starts[1:].long())  # of those before its end
        last = counted[(number - 1).clamp(min=0)] - self.starts[:-1]
        return tuple(torch.where(number > 0, last + 1, 0).clamp(min=0).tolist())

    @classmethod
    def of(cls, ids: Tensor, targets: Tensor, positions: Tensor, starts: Tensor) -> PackedBatch:
        """With integers of any size that hold what a batch's do."""
        return cls(ids.to(TOKEN_DTYPE), targets.to(TOKEN_DTYPE), positions.to(TOKEN_DTYPE), starts)

    def pinned(self) -> PackedBatch:
        """The same in memory that a GPU copies from by itself."""
        return self._with(*(tensor.pin_memory() for tensor in self._tensors()))

    def to(self, device: torch.device) -> PackedBatch:
        """The same on a device; from pinned memory, the host does not wait for the copy. A GPU
        makes 64 bits of what came as 32: its kernels were tested and timed with those.
        """
        if device == self.ids.device:
            return self
        moved = [tensor.to(device, non_blocking=True) for tensor in self._tensors()]
        if device.type == "cuda":
            moved[:-1] = [tensor.long() for tensor in moved[:-1]]
        return self._with(*moved)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """The memory is used on this stream too: it is not given to others before that is done."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def _tensors(self) -> list[Tensor]:
        return [self.ids, self.targets, self.positions, self.starts]

    def _with(self, *tensors: Tensor) -> PackedBatch:
        ids, targets, positions, starts = tensors
        batch = PackedBatch(ids, targets, positions, starts)
        self._tell_counts(batch)
        return batch

    def tell_counts(self, **counts: int | tuple[int, ...]) -> None:
        """Those that are known already: counting takes longer than packing."""
        vars(self).update(counts)

    def _tell_counts(self, batch: PackedBatch) -> None:
        """Counted on the host, so that reading them never waits for a device."""
        counts = ("num_targets", "longest", "lengths", "learned")
        vars(batch).update({name: getattr(self, name) for name in counts})


def joined(batches: Sequence[PackedBatch]) -> PackedBatch:
    """The documents of these rows in one; none of them padded."""
    lengths = [len(batch.ids) for batch in batches]
    firsts = accumulate(lengths[:-1], initial=0)
    starts = [batch.starts[:-1] + first for batch, first in zip(batches, firsts, strict=True)]
    return PackedBatch(
        torch.cat([batch.ids for batch in batches]),
        torch.cat([batch.targets for batch in batches]),
        torch.cat([batch.positions for batch in batches]),
        torch.cat([*starts, starts[0].new_tensor([sum(lengths)])]),
    )


@dataclass(frozen=True)
class Pieces:
    """Where the documents of a row lie in the tokens of a corpus, in the order of the row."""

    first: NDArray[np.int64]  # the token each begins with; of padding anything
    lengths: NDArray[np.int64]  # in tokens, at least 1
    has_next: NDArray[np.bool_]  # the document goes on behind it: its last token has a target
    is_padding: NDArray[np.bool_]


class TokenSource(Protocol):
    """Tokens that lie one behind the other, in memory or in files."""

    def tokens_at(self, index: NDArray[np.int64]) -> NDArray[np.int64]: ...

    def counted_at(self, index: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which of these tokens are to be learned; None: all are."""


def pack(source: TokenSource, pieces: Pieces) -> PackedBatch:
    """A row with these documents: the definition of what kernels/token_windows does faster. A token
    that no vocabulary has is an error that says where it is.
    """
    starts = np.concatenate(([0], np.cumsum(pieces.lengths)))
    num_tokens = int(starts[-1])
    positions = np.arange(num_tokens) - np.repeat(starts[:-1], pieces.lengths)
    index = np.repeat(pieces.first, pieces.lengths) + positions
    last = starts[1:] - 1
    index = np.append(index, np.where(pieces.has_next, index[last] + 1, 0))
    # the row, and behind it the token that follows each piece
    tokens, counted = source.tokens_at(index), source.counted_at(index)
    follows = np.arange(1, num_tokens + 1)
    follows[last] = np.arange(num_tokens, num_tokens + len(last))
    ids, targets = tokens[:num_tokens], tokens[follows]
    if counted is not None:
        targets[~counted[follows]] = IGNORED
    targets[last[~pieces.has_next]] = IGNORED
    padding = np.repeat(pieces.is_padding, pieces.lengths)
    ids[padding], targets[padding] = PADDING_ID, IGNORED
    return PackedBatch.of(
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(positions),
        torch.from_numpy(starts.astype(np.int32)),
    )
