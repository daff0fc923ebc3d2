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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ridgeline.data.loading.mixture import MixedOrder, skipped_ranges
from ridgeline.data.loading.order import SampleOrder, SkippingOrder, WindowOrder
from ridgeline.data.loading.packing import PADDING_ID, PackedBatch, Pieces, pack
from ridgeline.data.loading.sources import Origin
from ridgeline.data.loading.store import TokenStore
from ridgeline.kernels.token_windows import WindowPacker, WindowTables

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Parts of documents, as places of tokens in the corpus."""

    first: Integers
    last: Integers  # behind the last token
    limit: Integers  # tokens from `last` to here go on with it: the next one is its last target


class TokenWindows:
    """Spans in a row, each in one window or in several that follow each other."""

    def __init__(
        self,
        store: TokenStore,
        spans: Spans,
        length: int,
        ends: Integers | None = None,
        parts: Sequence[int] = (),
    ) -> None:
        """`ends`: where the windows end, counted in tokens of the spans in this order; without,
        each ends where it is full, and nothing is kept of it. `parts`: how many windows are of each
        corpus of the store's mixture.
        """
        self._parts = tuple(parts)
        self.store = store
        self.length = length
        self._spans = spans
        self._begins = np.concatenate(([0], np.cumsum(spans.last - spans.first)))
        self._ends = None if ends is None else np.concatenate(([0], ends))
        self.num_windows = -(-self.num_tokens // length) if ends is None else len(ends)

    @property
    def num_tokens(self) -> int:
        """Less what fills up windows."""
        return int(self._begins[-1])

    def order(self, seed: int) -> WindowOrder:
        """Which of them comes when in a run."""
        if not self._parts:
            return SampleOrder(self.num_windows, seed)
        assert self.store.mixed is not None, "parts are of a mixture"
        mixture = self.store.mixed.mixture
        mixed = MixedOrder(self._parts, mixture.quotas(), seed)
        return SkippingOrder(mixed, skipped_ranges(mixture.skip))

    def windows_between(self, first: int, last: int) -> tuple[list[int], int]:
        """The windows that have tokens of the store from `first` up to `last`, and how many."""
        spans = self._spans
        chosen = np.flatnonzero((spans.first < last) & (spans.last > first))
        begins = np.maximum(spans.first[chosen], first) - spans.first[chosen]
        ends = np.minimum(spans.last[chosen], last) - spans.first[chosen]
        windows = set[int]()
        for span, begin, end in zip(chosen.tolist(), begins.tolist(), ends.tolist(), strict=True):
            base = int(self._begins[span])
            low, high = self._window_at(base + begin), self._window_at(base + end - 1)
            windows.update(range(low, high + 1))
        return sorted(windows), int((ends - begins).sum())

    def _window_at(self, token: int) -> int:
        """Of a token counted in tokens of the spans."""
        if self._ends is None:
            return token // self.length
        return int(np.searchsorted(self._ends, token, side="right")) - 1

    @property
    def ends(self) -> Integers:
        """Where each ends, in tokens of the spans."""
        return self._bounds(np.arange(self.num_windows))[1]

    @property
    def spans(self) -> Spans:
        return self._spans

    def batch(self, windows: Integers) -> PackedBatch:
        """One row with these windows in this order."""
        row = None if self._packer is None else self._packer.pack(windows)
        if row is None or row.largest >= self.store.vocab_size:
            return pack(self.store, self.pieces(windows))
        batch = PackedBatch(row.ids, row.targets, row.positions, row.starts)
        batch.tell_counts(num_targets=row.num_targets, lengths=row.lengths, learned=row.learned)
        return batch

    @cached_property
    def _packer(self) -> WindowPacker | None:
        shards = self.store.addresses()
        if shards is None:
            return None
        tables = WindowTables(
            begins=self._begins,
            first=self._spans.first,
            limit=self._spans.limit,
            num_spans=len(self._spans.first),
            ends=self._ends,
            length=self.length,
            bases=shards.bases,
            addresses=shards.tokens,
            counted=shards.counted,
            num_shards=len(shards.tokens),
            width=shards.width,
            padding_id=PADDING_ID,
        )
        return WindowPacker(tables)

    def _bounds(self, windows: Integers) -> tuple[Integers, Integers]:
        if self._ends is not None:
            return self._ends[windows], self._ends[windows + 1]
        begins = windows * self.length
        return begins, np.minimum(begins + self.length, self.num_tokens)

    def pieces(self, windows: Integers) -> Pieces:
        begins, ends = self._bounds(windows)
        low = np.searchsorted(self._begins, begins, side="right") - 1
        counts = np.searchsorted(self._begins, ends) - low
        missing = self.length - (ends - begins)
        is_short = missing > 0
        counts_in_row = counts + is_short
        owners = np.repeat(np.arange(len(windows)), counts_in_row)
        number = np.arange(len(owners)) - np.repeat(
            np.cumsum(counts_in_row) - counts_in_row, counts_in_row
        )
        is_padding = number == counts[owners]
        spans = np.where(is_padding, 0, low[owners] + number)
        begin, end = self._begins[spans], self._begins[spans + 1]
        # the first span may have begun in the window before, the last may go on in the next
        inner = np.maximum(begin, begins[owners])
        lengths = np.where(is_padding, missing[owners], np.minimum(end, ends[owners]) - inner)
        first = np.where(is_padding, 0, self._spans.first[spans] + inner - begin)
        has_next = ~is_padding & (first + lengths < self._spans.limit[spans])
        return Pieces(first, lengths, has_next, is_padding)

    def documents(self, window: int) -> list[Origin]:
        """Where the documents of a window come from, in their order."""
        pieces = self.pieces(np.array([window]))
        firsts = pieces.first[~pieces.is_padding].tolist()
        return [self.store.origin(self.store.document_of(place)) for place in firsts]

    def num_targets(self) -> int:
        """Targets that count in all windows together."""
        spans = self._spans
        return self.store.num_counted(spans.first + 1, np.minimum(spans.last + 1, spans.limit))


def cut_windows(store: TokenStore, spans: Spans, length: int) -> TokenWindows:
    """Cut wherever a window is full; only the last is filled up."""
    return TokenWindows(store, spans, length)


def joined_windows(parts: Sequence[TokenWindows]) -> TokenWindows:
    """Those of each corpus of a mixture, one corpus behind the other."""
    bases = np.cumsum([0, *(part.num_tokens for part in parts)])
    spans = Spans(
        np.concatenate([part.spans.first for part in parts]),
        np.concatenate([part.spans.last for part in parts]),
        np.concatenate([part.spans.limit for part in parts]),
    )
    ends = np.concatenate([part.ends + base for part, base in zip(parts, bases, strict=False)])
    sizes = [part.num_windows for part in parts]
    return TokenWindows(parts[0].store, spans, parts[0].length, ends, sizes)


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
    return TokenWindows(store, ordered, length, np.cumsum(num_tokens))


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
