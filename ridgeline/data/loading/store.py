"""TokenStore: the tokens of a corpus, one document behind the other, in memory or in mapped files.

Each document has its origin, so that a batch can be traced back to files and lines. Where only a
part of the tokens is learned (conversations), `counted` says which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.loading.mixture import Mixture
from ridgeline.data.loading.sources import Origin
from ridgeline.errors import UsageError


@dataclass(frozen=True)
class TokenShard:
    """N tokens of D documents."""

    tokens: NDArray[Any]  # [N] uint16 or uint32
    offsets: NDArray[np.int64]  # [D + 1]: where documents begin, then N
    origins: NDArray[np.int64]  # [D, 2]: number of the file, line (or byte)
    counted: NDArray[np.bool_] | None = None  # [N]: whether it is learned; None: every token is
    first_file: int = 0  # its number 0, in the store's list
    by_byte: bool = False  # origins are bytes in the files, not lines


@dataclass(frozen=True)
class Addresses:
    """Where the shards of a store lie in memory."""

    bases: NDArray[np.int64]  # tokens of the store before each, then N
    tokens: NDArray[np.int64]
    width: int  # bytes of a token
    counted: NDArray[np.int64]  # of the marks whether they are learned; 0: all are


def _addresses(arrays: Sequence[NDArray[Any] | None]) -> NDArray[np.int64]:
    for array in arrays:
        assert array is None or array.flags.c_contiguous, "tokens lie one behind the other"
    return np.array([0 if a is None else a.ctypes.data for a in arrays], dtype=np.int64)


@dataclass(frozen=True)
class MixedStore:
    """Which shards of a store belong to which corpus of a mixture."""

    mixture: Mixture
    num_shards: tuple[int, ...]  # of each corpus, in their order


class TokenStore:
    """The shards of a corpus as one row of tokens. Safe to share between threads."""

    def __init__(
        self,
        shards: Sequence[TokenShard],
        files: Sequence[str],
        vocab_size: int,
        mixed: MixedStore | None = None,
    ) -> None:
        self.mixed = mixed
        self.shards = tuple(shards)
        self.files = tuple(files)
        self.vocab_size = vocab_size  # of the tokenizer: every id is below it
        sizes = [len(shard.tokens) for shard in shards]
        self._bases = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        self.num_tokens = int(self._bases[-1])
        starts = [
            shard.offsets[:-1] + base for shard, base in zip(shards, self._bases, strict=False)
        ]
        self.offsets: NDArray[np.int64] = np.concatenate([*starts, self._bases[-1:]])
        self.num_documents = len(self.offsets) - 1
        self.is_marked = any(shard.counted is not None for shard in shards)

    def corpus_bounds(self) -> NDArray[np.int64]:
        """Where the tokens of each corpus of a mixture begin, then N."""
        counts = (len(self.shards),) if self.mixed is None else self.mixed.num_shards
        return self._bases[np.cumsum([0, *counts])]

    def tokens_at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids at these places of the whole row. One that no vocabulary has is an error."""
        ids = np.empty(len(index), dtype=np.int64)
        for shard, chosen, local in self._local(index):
            ids[chosen] = shard.tokens[local]
        if len(ids) and ids.max() >= self.vocab_size:
            place = int(index[ids.argmax()])
            raise UsageError(
                f"token {ids.max()} of {self.origin(self.document_of(place))} is outside the "
                f"vocabulary of {self.vocab_size}; the token files are damaged: build them again"
            )
        return ids

    def counted_at(self, index: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        if not self.is_marked:
            return None
        counted = np.ones(len(index), dtype=np.bool_)
        for shard, chosen, local in self._local(index):
            if shard.counted is not None:
                counted[chosen] = shard.counted[local]
        return counted

    def _local(
        self, index: NDArray[np.int64]
    ) -> list[tuple[TokenShard, NDArray[np.bool_] | slice, NDArray[np.int64]]]:
        """The shards that these places lie in: which of the places, and where in the shard."""
        if len(self.shards) == 1:
            return [(self.shards[0], slice(None), index)]
        numbers = np.searchsorted(self._bases, index, side="right") - 1
        return [
            (self.shards[n], numbers == n, index[numbers == n] - self._bases[n])
            for n in np.unique(numbers).tolist()
        ]

    def addresses(self) -> Addresses | None:
        """Where the shards lie in memory; None where tokens are of several widths."""
        widths = {shard.tokens.itemsize for shard in self.shards}
        if len(widths) != 1:
            return None
        tokens = _addresses([shard.tokens for shard in self.shards])
        counted = _addresses([shard.counted for shard in self.shards])
        return Addresses(self._bases, tokens, widths.pop(), counted)

    def num_counted(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> int:
        """How many tokens in these ranges, none of which overlap, are learned."""
        is_full = last > first
        order = np.argsort(first[is_full])
        first, last = first[is_full][order], last[is_full][order]
        total = 0
        for shard, base in zip(self.shards, self._bases.tolist(), strict=False):
            begin, end = np.searchsorted(first, (base, base + len(shard.tokens)))
            if shard.counted is None:
                total += int((last[begin:end] - first[begin:end]).sum())
            elif begin < end:
                bounds = np.stack([first[begin:end], last[begin:end]], 1).ravel() - base
                # what lies between two ranges is summed too, and left out
                sums = np.add.reduceat(np.append(shard.counted, False), bounds, dtype=np.int64)
                total += int(sums[::2].sum())
        return total

    def document_of(self, place: int) -> int:
        """The document that the token at a place belongs to."""
        return int(np.searchsorted(self.offsets, place, side="right")) - 1

    def origin(self, document: int) -> Origin:
        for shard in self.shards:
            if document < len(shard.origins):
                file, place = shard.origins[document].tolist()
                return Origin(self.files[shard.first_file + file], place, shard.by_byte)
            document -= len(shard.origins)
        raise IndexError(document)

    @cached_property
    def digest(self) -> str:
        """Of the tokens, their documents and what is learned: equal for equal data, however it is
        cut into shards.
        """
        state = hashlib.sha256(self.offsets.tobytes())
        for shard in self.shards:
            state.update(np.ascontiguousarray(shard.tokens, dtype=np.uint32).data)
        for shard in self.shards if self.is_marked else ():
            counted = (
                np.ones(len(shard.tokens), np.bool_) if shard.counted is None else shard.counted
            )
            state.update(np.ascontiguousarray(counted).data)
        return state.hexdigest()
