"""Windows: the sequences of equal length that a corpus is trained in. A window is a sample.

Texts lie one behind the other and are cut wherever a window is full; what is left of a document
begins the next window, and the last token before the cut still has its target. Conversations and
completions stay whole where they fit into a window, and what remains of it is filled up; longer
ones are cut. Either way every token is in exactly one window.

    windows = cut_windows(store, spans, 1024)
    windows.batch(np.array([17, 3]))            # a PackedBatch of two of them, 2,048 tokens
    windows.documents(17)                       # what is in it, for people
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.loading.packing import PackedBatch, Pieces, pack
from ridgeline.data.loading.sources import Origin
from ridgeline.data.loading.store import TokenStore

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Parts of documents, as places of tokens in the corpus."""

    first: Integers
    last: Integers  # behind the last token
    limit: Integers  # tokens from `last` to here go on with it: the next one is its last target


class TokenWindows:
    """Spans in a row, each in one window or in several that follow each other."""

    def __init__(self, store: TokenStore, spans: Spans, ends: Integers, length: int) -> None:
        """`ends`: where the windows end, counted in tokens of the spans in this order."""
        self.store = store
        self.length = length
        self.num_windows = len(ends)
        self._spans = spans
        self._begins = np.concatenate(([0], np.cumsum(spans.last - spans.first)))
        self._ends = np.concatenate(([0], ends))

    @property
    def num_tokens(self) -> int:
        """Less what fills up windows."""
        return int(self._begins[-1])

    def batch(self, windows: Integers) -> PackedBatch:
        """One row with these windows in this order."""
        return pack(self.store, self.pieces(windows))

    def pieces(self, windows: Integers) -> Pieces:
        parts = [self._pieces_of(window) for window in windows.tolist()]
        return Pieces(
            first=np.concatenate([part.first for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            has_next=np.concatenate([part.has_next for part in parts]),
            is_padding=np.concatenate([part.is_padding for part in parts]),
        )

    def _pieces_of(self, window: int) -> Pieces:
        begin, end = self._ends[window], self._ends[window + 1]
        low = int(np.searchsorted(self._begins, begin, side="right")) - 1
        high = int(np.searchsorted(self._begins, end))
        begins, ends = self._begins[low:high], self._begins[low + 1 : high + 1]
        # the first span may have begun in the window before, the last may go on in the next
        inner_begins, inner_ends = np.maximum(begins, begin), np.minimum(ends, end)
        first = self._spans.first[low:high] + (inner_begins - begins)
        lengths = inner_ends - inner_begins
        has_next = first + lengths < self._spans.limit[low:high]
        missing = self.length - int(end - begin)
        if missing:
            first, lengths = np.append(first, 0), np.append(lengths, missing)
            has_next = np.append(has_next, False)
        is_padding = np.zeros(len(first), dtype=np.bool_)
        is_padding[len(first) - bool(missing) :] = True
        return Pieces(first, lengths, has_next, is_padding)

    def documents(self, window: int) -> list[Origin]:
        """Where the documents of a window come from, in their order."""
        pieces = self._pieces_of(window)
        firsts = pieces.first[~pieces.is_padding].tolist()
        return [self.store.origin(self.store.document_of(place)) for place in firsts]

    def num_targets(self) -> int:
        """Targets that count in all windows together."""
        spans = self._spans
        return self.store.num_counted(spans.first + 1, np.minimum(spans.last + 1, spans.limit))


def cut_windows(store: TokenStore, spans: Spans, length: int) -> TokenWindows:
    """Cut wherever a window is full; only the last is filled up."""
    num_tokens = int((spans.last - spans.first).sum())
    ends = np.append(np.arange(length, num_tokens, length, dtype=np.int64), num_tokens)
    return TokenWindows(store, spans, ends, length)


def whole_windows(store: TokenStore, spans: Spans, length: int) -> TokenWindows:
    """Spans that fit into a window are never cut: each goes, the longest first, into the window
    where it leaves the least room. Spans that do not fit are cut, and their last parts packed.
    """
    parts = _cut_long(spans, length)
    sizes = parts.last - parts.first
    windows = best_fit(sizes, length)
    order = np.argsort(windows, kind="stable")
    ordered = Spans(parts.first[order], parts.last[order], parts.limit[order])
    num_tokens = np.bincount(windows, weights=sizes).astype(np.int64)
    return TokenWindows(store, ordered, np.cumsum(num_tokens), length)


def _cut_long(spans: Spans, length: int) -> Spans:
    """Each span in parts of at most a window."""
    counts = -(-(spans.last - spans.first) // length)
    owners = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = spans.first[owners] + numbers * length
    return Spans(first, np.minimum(first + length, spans.last[owners]), spans.limit[owners])


def best_fit(sizes: Integers, length: int) -> Integers:
    """The window of each part, numbered from 0 on."""
    windows = np.empty(len(sizes), dtype=np.int64)
    num_windows = 0
    rooms: list[int] = []  # free tokens of windows that are not full, each number once, rising
    having: dict[int, list[int]] = {}  # windows by their room
    descending = np.argsort(-sizes, kind="stable")
    for part, size in zip(descending.tolist(), sizes[descending].tolist(), strict=True):
        place = bisect_left(rooms, size)
        if place == len(rooms):
            room, window = length, num_windows
            num_windows += 1
        else:
            room = rooms[place]
            window = having[room].pop()
            if not having[room]:
                del rooms[place], having[room]
        windows[part] = window
        if left := room - size:
            if left not in having:
                insort(rooms, left)
            having.setdefault(left, []).append(window)
    return windows
