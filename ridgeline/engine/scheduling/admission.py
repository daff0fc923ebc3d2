"""Which waiting streams start, in order of rank: as long as there are budget, seats and pages.

A stream starts when the pages of all its tokens are there, those that it shares included, and one
more is left for each stream that is running. The head of the queue is not passed over for one that
needs less. Running streams of a lower priority make way for it.
"""

from __future__ import annotations

from ridgeline.engine.scheduling.prefix_cache import Match
from ridgeline.engine.scheduling.rows import plan_piece
from ridgeline.engine.scheduling.running import Running
from ridgeline.engine.scheduling.state import Rank, Stream
from ridgeline.engine.scheduling.step_plan import Step

# Pages of prompts looked up in one step, about 2 ms: a thousand requests that arrive together, or
# wake together, are spread over steps. The last one looked at may go beyond it.
MAX_LOOKUP_PAGES = 1024


class Admission:
    __slots__ = ("_blocked", "_running", "hit_tokens", "prompt_tokens")

    def __init__(self, running: Running) -> None:
        self._running = running
        self._blocked: tuple[Stream, int, int] | None = None  # who, and the room it did not find
        self.prompt_tokens = 0  # of streams that have started
        self.hit_tokens = 0  # of those, found in the cache

    def plan_prompts(self, step: Step) -> None:
        """Pieces of prompts, those of streams that have started and those that start now, in order
        of rank.
        """
        for stream in list(self._running.prefilling):
            self._admit(step, stream.rank)
            if step.budget > 0 and stream.state == "prefilling":
                plan_piece(self._running, stream, step)
        self._admit(step, None)

    def admits_nobody(self) -> bool:
        """Whether it is known, without looking anything up, that no waiting stream can start now,
        and that this stays so while running streams grow.
        """
        head = self._running.queue.head()
        return head is None or self._is_blocked(head)

    def _admit(self, step: Step, before: Rank | None) -> None:
        """Start streams from the head of the queue, if `before` is given only those before it."""
        running = self._running
        while step.budget > 0 and step.num_lookups < MAX_LOOKUP_PAGES:
            stream = running.queue.head()
            if stream is None or self._is_blocked(stream):
                return
            if before is not None and stream.rank > before:
                return
            wanted = running.tables.find(stream)
            step.num_lookups += 1 + len(stream.tokens) // running.tables.size
            if running.following.follow(stream, wanted):
                running.head_follows()
                continue
            match = self._affordable(stream, wanted)
            if match is None and self._make_room(stream, wanted):
                match = self._affordable(stream, wanted)
            if match is None:
                self._blocked = (stream, self._room(stream), len(running.seats))
                return
            self._start(stream, match, step)

    def _start(self, stream: Stream, match: Match, step: Step) -> None:
        self.take_in(stream, match, step)
        self._running.following.announce(stream)
        plan_piece(self._running, stream, step)
        assert stream.last_step == step.step_id, f"{stream.key} was admitted without room"

    def take_in(self, stream: Stream, match: Match, step: Step) -> None:
        """The head of the queue has seats and the pages that were found for it."""
        running = self._running
        running.queue.pop()
        running.prefill(stream)
        running.queue.note_start(stream)
        step.seat(stream, running.seats.pop())
        stream.spare_seats = [running.seats.pop() for _ in range(_num_seats(stream) - 1)]
        running.tables.start(stream, match, step)
        running.tables.promise(stream, self._num_new_pages(stream, match))
        if not stream.started:
            stream.started = True
            self.prompt_tokens += len(stream.tokens)
            self.hit_tokens += match.num_tokens
            if stream.key[1] == 0:  # the others have its prompt
                prompt = stream.request.ask.prompt
                stream.request.num_cached = min(match.num_tokens, len(prompt))

    def _is_blocked(self, stream: Stream) -> bool:
        """Whether this stream found no room before and there is no more now: looking up a long
        prompt in every step would cost more than the step.
        """
        if self._blocked is None:
            return False
        who, room, seats = self._blocked
        return who is stream and self._room(stream) <= room and len(self._running.seats) <= seats

    def _room(self, stream: Stream) -> int:
        """Pages for a stream to start with. One is left for each that is running, and for each
        sample that will fork off, unless nothing runs.
        """
        running = self._running
        room = running.tables.cache.num_available - running.tables.promised
        if running.is_empty:
            return room
        return room - len(running.decoding) - (_num_seats(stream) - 1)

    def _affordable(self, stream: Stream, match: Match) -> Match | None:
        """The match, if the stream can start with it now: without the copy if only that fits."""
        if _num_seats(stream) > len(self._running.seats):
            return None
        if self._cost(stream, match) <= self._room(stream):
            return match
        tokens = min(len(match.pages) * self._running.tables.size, len(stream.tokens) - 1)
        bare = match._replace(copy_source=None, num_copied=0, num_tokens=tokens)
        return bare if self._cost(stream, bare) <= self._room(stream) else None

    def _cost(self, stream: Stream, match: Match) -> int:
        """Pages that would no longer be available."""
        tables = self._running.tables
        held = match.pages[tables.num_behind(match.num_tokens) :]
        if match.copy_source is not None:
            held = [*held, match.copy_source]
        return self._num_new_pages(stream, match) + sum(map(tables.cache.is_idle, held))

    def _num_new_pages(self, stream: Stream, match: Match) -> int:
        """Pages to be taken until the next token has its place."""
        tables, length = self._running.tables, len(stream.tokens)
        needed = tables.num_pages(min(length + 1, max(stream.full_length - 1, length)))
        shared = len(match.pages) - tables.num_behind(match.num_tokens)
        least = 0 if len(match.pages) * tables.size == length else 1
        return max(needed - shared, least)

    def _make_room(self, stream: Stream, match: Match) -> bool:
        """Preempt streams of a lower priority. Whether any was: those that are in a planned step
        make room only when it has come back. A stream whose turn has come preempts nobody for it.
        """
        running = self._running
        cost, seats = self._cost(stream, match), _num_seats(stream)
        precedence, before = -stream.request.ask.priority, running.num_preemptions
        while (
            self._room(stream) + running.coming < cost
            or len(running.seats) + running.coming_seats < seats
        ):
            victim = running.last_in_rank()
            if victim is None or victim.rank[0] <= precedence:
                break
            running.preempt(victim)
        return running.num_preemptions > before


def _num_seats(stream: Stream) -> int:
    """Lines of the page table that a stream needs to start."""
    return 1 if stream.request.forked else stream.request.ask.num_samples
