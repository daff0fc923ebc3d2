"""The streams that run: their seats, their order, how one stops running and what that frees.

A stream that stops keeps its pages and its seat until the last step planned with it has come back;
until then it is *leaving*, and its pages are *coming*. When pages run out, the stream that ranks
last is preempted: it goes back to the queue and will compute again what the prefix tree has lost.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from operator import attrgetter

from ridgeline.engine.scheduling.following import Following
from ridgeline.engine.scheduling.state import Request, Stream, StreamKey
from ridgeline.engine.scheduling.step_plan import Step
from ridgeline.engine.scheduling.tables import Tables
from ridgeline.engine.scheduling.waiting import WaitingQueue

by_rank = attrgetter("rank")


class Running:
    def __init__(self, tables: Tables, max_batch: int, ahead: bool = False) -> None:
        self.tables = tables
        self.ahead = ahead  # whether a stream goes on behind drafts that have not come back
        self.following = Following(tables)
        self.queue = WaitingQueue()
        self.streams: dict[StreamKey, Stream] = {}  # all that have not ended
        self.prefilling: list[Stream] = []  # both in order of rank
        self.decoding: list[Stream] = []
        self.seats = list(range(max_batch - 1, -1, -1))  # those that are free
        self.steps: dict[int, Step] = {}  # planned and not yet back, and the one being planned
        self.received = 0  # the last step that came back
        self.coming = 0  # pages that are available when leaving streams have left
        self.coming_seats = 0
        self.num_short = 0  # streams that found no page in the step being planned
        self.num_following = 0
        self.num_preemptions = 0

    @property
    def is_empty(self) -> bool:
        return not (self.prefilling or self.decoding)

    def new_stream(self, request: Request, sample: int, tokens: array[int]) -> Stream:
        rank = (request.precedence, request.ask.arrival, request.number, sample)
        stream = Stream(request, sample, tokens, rank)
        request.streams.append(stream)
        self.streams[stream.key] = stream
        return stream

    def prefill(self, stream: Stream) -> None:
        stream.state = "prefilling"
        insort(self.prefilling, stream, key=by_rank)

    def decode(self, stream: Stream) -> None:
        if stream.state == "prefilling":
            _remove(self.prefilling, stream)
        stream.state = "decoding"
        insort(self.decoding, stream, key=by_rank)

    def last_in_rank(self) -> Stream | None:
        return max((*self.prefilling[-1:], *self.decoding[-1:]), key=by_rank, default=None)

    def reach(self, stream: Stream, end: int, step: Step) -> int:
        """How far the stream can write, up to `end`. If it could not write at all, streams are
        preempted from the end of the ranking, and it may be among them.
        """
        reach = self.tables.extend(stream, end, step)
        if reach > stream.position:
            return reach
        return self.tables.extend(stream, end, step) if self._make_room(stream) else 0

    def _make_room(self, stream: Stream) -> bool:
        """Preempt until as many pages are coming as streams are short of one. Whether a page is
        there now.
        """
        cache = self.tables.cache
        self.num_short += 1
        while cache.num_available == 0 and self.coming < self.num_short:
            victim = self.last_in_rank()
            assert victim is not None, "the stream that is short of a page runs itself"
            if victim is stream and self.tables.window and stream.last_step > self.received:
                return False  # the step it is in moves its window on, which may free a page
            self.preempt(victim)
            if victim is stream:
                return False
        return cache.num_available > 0

    def preempt(self, stream: Stream) -> None:
        self.num_preemptions += 1
        self.stop(stream)

    def stop(self, stream: Stream) -> None:
        """Take a stream out of the steps to come. It leaves now, or with the last step it is in."""
        _remove(self.prefilling if stream.state == "prefilling" else self.decoding, stream)
        self._detach(stream)
        if stream.last_step <= self.received:
            self.leave(stream)
            return
        stream.state = "leaving"
        stream.coming = self.tables.num_held_alone(stream)
        self.coming += stream.coming
        self.coming_seats += 1 + len(stream.spare_seats)
        self.steps[stream.last_step].leaving.append(stream)

    def leave(self, stream: Stream) -> None:
        """No step is out with this stream: others can have its pages and its seat."""
        self.tables.store(stream, with_last=True)
        self.tables.release(stream)
        self.seats += [stream.seat, *stream.spare_seats]
        if stream.state == "leaving":
            self.coming -= stream.coming
            self.coming_seats -= 1 + len(stream.spare_seats)
        stream.clear()
        if stream.ended:
            stream.state = "gone"
        else:
            self.queue.push(stream)

    def lose_device(self) -> None:
        """Planned steps do not come back, and no page holds anything."""
        lost, self.steps = self.steps, {}
        self.received = max(lost, default=self.received)
        streams = [*self.prefilling, *self.decoding]
        for step in lost.values():
            streams += step.leaving
            self.tables.unpin(step)
        self.prefilling, self.decoding = [], []
        for stream in streams:
            self._detach(stream)
            self.leave(stream)
        self.tables.cache.clear()

    def end(self, stream: Stream) -> None:
        """The stream makes no more tokens, wherever it is."""
        stream.ended = True
        stream.request.streams.remove(stream)
        del self.streams[stream.key]
        if stream.state in ("prefilling", "decoding"):
            self.stop(stream)
        elif stream.state == "waiting":
            self.queue.discard(stream)
        elif stream.state == "following":
            stream.state = "gone"
            self.num_following -= 1

    def head_follows(self) -> None:
        """The head of the queue has been given somebody to wait for."""
        self.queue.pop()
        self.num_following += 1

    def wake(self, streams: list[Stream]) -> None:
        self.num_following -= len(streams)
        for stream in streams:
            self.queue.push(stream)

    def _detach(self, stream: Stream) -> None:
        """Nobody waits any longer for what this stream would have computed."""
        self.following.withdraw(stream)
        self.wake(self.following.dismiss(stream))


def _remove(streams: list[Stream], stream: Stream) -> None:
    """Take a stream out of a list in order of rank."""
    index = bisect_left(streams, stream.rank, key=by_rank)
    assert streams[index] is stream, f"{stream.key} is not where its rank says"
    del streams[index]
