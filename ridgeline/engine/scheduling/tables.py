"""Page tables: the pages each stream holds, taken as it grows, shared where prompts begin alike,
put into the prefix tree when they are full, let go when it leaves or the window has passed them.

Every change of a table goes into the step being planned, so that the device's copy follows.
"""

from __future__ import annotations

from ridgeline.engine.scheduling.prefix_cache import Match, PrefixCache
from ridgeline.engine.scheduling.state import Stream
from ridgeline.engine.scheduling.step_plan import NOT_WRITTEN, Step


class Tables:
    __slots__ = ("cache", "promised", "reuse", "size", "window")

    def __init__(self, cache: PrefixCache, window: int | None, reuse: bool) -> None:
        self.cache = cache
        self.size = cache.page_size
        self.window = window  # tokens that a token sees, itself included; None: all before it
        self.reuse = reuse  # whether pages are kept for others
        self.promised = 0  # pages that streams admitted will still take for their prompts

    def num_pages(self, num_tokens: int) -> int:
        """Pages a stream of this length holds at most."""
        pages = -(-num_tokens // self.size)
        return pages if self.window is None else min(pages, self.window // self.size + 2)

    def find(self, stream: Stream) -> Match:
        """What of the stream's tokens need not be computed."""
        if self.reuse and stream.request.ask.reuse_prefix:
            limit = stream.request.ask.reuse_limit
            return self.cache.match(stream.request.ask.salt, stream.tokens[:limit])
        return Match([], None, 0, 0, self.cache.root(stream.request.ask.salt))

    def start(self, stream: Stream, match: Match, step: Step) -> None:
        """Give a stream the pages that were found for it."""
        stream.pages = list(match.pages)
        stream.position = stream.prefilled = match.num_tokens
        stream.num_dropped = self.num_behind(match.num_tokens)
        stream.num_stored = stream.num_hit = len(match.pages)
        stream.shared_end = len(match.pages) * self.size
        stream.node = match.node
        stream.copy_source = match.copy_source
        self._hold(stream, step)

    def fork(self, stream: Stream, sibling: Stream, step: Step) -> None:
        """Give a new sample the pages of the prompt, and a copy of the last one if it has room."""
        full = stream.target // self.size
        sibling.pages = stream.pages[:full]
        sibling.position = sibling.prefilled = stream.target
        sibling.num_dropped = min(stream.num_dropped, full)
        sibling.num_hit = full
        sibling.num_stored, sibling.node = stream.num_stored, stream.node
        sibling.copy_source = stream.pages[full] if stream.target % self.size else None
        self._hold(sibling, step)

    def extend(self, stream: Stream, end: int, step: Step) -> int:
        """Take pages for the positions before `end`, while there are any; how far they reach."""
        while len(stream.pages) * self.size < end:
            page = self.cache.take()
            if page is None:
                break
            if stream.copy_source is not None:
                step.copy_page(stream.copy_source, page)
                stream.copy_source = None
            step.set_page(stream, len(stream.pages), page)
            stream.pages.append(page)
            if stream.promised:
                self.promise(stream, stream.promised - 1)
        return min(len(stream.pages) * self.size, end)

    def promise(self, stream: Stream, num_pages: int) -> None:
        self.promised += num_pages - stream.promised
        stream.promised = num_pages

    def slots(self, stream: Stream, first: int, end: int) -> list[int] | range:
        """Where keys and values of these positions are written."""
        size = self.size
        slot = stream.pages[first // size] * size + first % size
        if first >= stream.shared_end and first % size + end - first <= size:
            return range(slot, slot + end - first)
        written = max(min(end, stream.shared_end) - first, 0)
        slots, first = [NOT_WRITTEN] * written, first + written
        while first < end:
            stop = min(end, first - first % size + size)
            slot = stream.pages[first // size] * size + first % size
            slots.extend(range(slot, slot + stop - first))
            first = stop
        return slots

    def store(self, stream: Stream, with_last: bool = False) -> None:
        """Put the pages that are full into the tree, and the last one too if asked for."""
        if not self.reuse or stream.failed:
            return
        if not self.cache.is_alive(stream.node):
            if stream.num_dropped:
                return  # its first pages are no longer there to be put back
            stream.node, stream.num_stored = self.cache.root(stream.request.ask.salt), 0
        num_tokens = stream.num_computed
        while (stream.num_stored + 1) * self.size <= num_tokens:
            index = stream.num_stored
            stream.node = self.cache.insert(
                stream.node, self.page_tokens(stream, index), stream.pages[index]
            )
            stream.num_stored += 1
        start = stream.num_stored * self.size
        if with_last and start < num_tokens and stream.num_stored < len(stream.pages):
            last = stream.tokens[start:num_tokens].tobytes()
            self.cache.insert(stream.node, last, stream.pages[stream.num_stored])

    def page_tokens(self, stream: Stream, index: int) -> bytes:
        return stream.tokens[index * self.size : (index + 1) * self.size].tobytes()

    def slide(self, stream: Stream) -> None:
        """Let go of pages that no later token sees. They may stay in the tree."""
        behind = self.num_behind(stream.num_computed)
        if behind <= stream.num_dropped:
            return
        self.store(stream)
        for page in reversed(stream.pages[stream.num_dropped : behind]):
            self.cache.release(page)
        stream.num_dropped = behind

    def release(self, stream: Stream) -> None:
        """Let go of everything, the last page first: the tree then gives up leaves first."""
        for page in reversed(stream.pages[stream.num_dropped :]):
            self.cache.release(page)
        if stream.copy_source is not None:
            self.cache.release(stream.copy_source)
        self.promise(stream, 0)

    def forget(self, stream: Stream) -> None:
        """Take what the stream has computed out of the tree."""
        for page in stream.pages[max(stream.num_hit, stream.num_dropped) :]:
            self.cache.forget(page)

    def unpin(self, step: Step) -> None:
        """A step has come back: the pages it copied from may change."""
        for page in step.pins:
            self.cache.release(page)

    def num_held_alone(self, stream: Stream) -> int:
        """Pages that become available when this stream lets go."""
        holders = self.cache.pool.holders
        alone = sum(holders(page) == 1 for page in stream.pages[stream.num_dropped :])
        return alone + (stream.copy_source is not None and holders(stream.copy_source) == 1)

    def _hold(self, stream: Stream, step: Step) -> None:
        for index in range(stream.num_dropped, len(stream.pages)):
            self.cache.hold(stream.pages[index])
            step.set_page(stream, index, stream.pages[index])
        if stream.copy_source is not None:
            self.cache.hold(stream.copy_source)

    def num_behind(self, position: int) -> int:
        """How many of the first pages no token from `position` on can see."""
        if self.window is None:
            return 0
        return max(position - self.window + 1, 0) // self.size
